"""Held-out losses from Python."""

from __future__ import annotations

from datasets import Dataset
from trl import SFTConfig

from moe_peft.upit.evaluate import evaluate
from tests.helpers.close import near
from tests.helpers.trainers import make_model, make_trainer
from tests.helpers.upit_case import rows


def test_a_model_is_left_as_it_was_and_trains_on(tokenizer, tmp_path):
    trainer, held_out = make_trainer(tmp_path, tokenizer, max_steps=1), Dataset.from_list(rows(6, offset=5))
    model, args = trainer.model, trainer.args
    before = evaluate(model, held_out, args, tokenizer, "domain").losses
    trainer.train()  # with the outputs of its head that TRL logs
    after = evaluate(model, held_out, args, tokenizer, "domain").losses
    assert after["base"] == before["base"] and after["adapted"] != before["adapted"]
    without_trainer = make_model()
    evaluate(without_trainer, held_out, args, tokenizer)
    assert "forward" not in vars(without_trainer.get_base_model())


def test_a_domain_called_mean_keeps_its_loss(tokenizer, tmp_path):
    args = SFTConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none", max_length=32)
    data = Dataset.from_list([{"text": f"w{i + 3} w{i + 9} w5", "domain": "a" if i % 2 else "mean"} for i in range(6)])
    losses = evaluate(make_model(), data, args, tokenizer, "domain").losses["adapted"]
    assert losses.keys() == {"a", "mean (domain)", "mean"}
    assert losses["mean"] == near((losses["a"] + losses["mean (domain)"]) / 2)
    assert losses["a"] != losses["mean (domain)"]
