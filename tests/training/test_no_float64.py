"""Training, evaluation and scoring on a device without float64."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from moe_peft.training.checkpointing import Fingerprint
from moe_peft.training.scoring import example_losses
from tests.helpers.no_float64 import no_float64
from tests.helpers.trainers import LABELS, make_model, make_trainer
from tests.helpers.upit_case import rows


def test_the_device_is_told_from_the_cpu():
    x = torch.ones(3)
    with no_float64():
        assert x.cpu().double().sum() == 3
        for make in (lambda: x.double(), lambda: x.sum(dtype=torch.float64), lambda: x.new_zeros(2).double()):
            with pytest.raises(AssertionError, match="makes float64 on the device"):
                make()


@pytest.mark.parametrize("kind", ["adapter", "mixtral", "biases"])
def test_a_step_an_evaluation_and_scores(kind, tokenizer, tmp_path):
    own = {"router_bias_update_rate": 0.01, "router_aux_loss_coef": 0.0} if kind == "biases" else {}
    settings = {"router_z_loss_coef": 0.1, "max_steps": 2, "router_learning_rate": 1e-3, **LABELS}
    data = Dataset.from_list(rows(8))
    trainer = make_trainer(
        tmp_path, tokenizer, make_model("adapter" if kind == "biases" else kind, **own), data, data, **settings
    )
    with no_float64():
        trainer.train()
        trainer.evaluate()
        Fingerprint.of(trainer)
        example_losses(trainer.model, trainer.train_dataset, trainer.data_collator)
