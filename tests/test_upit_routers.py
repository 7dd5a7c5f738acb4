"""UpIT for whole FFNs with routers in the place of plain gates: what trains is what the same calls train by hand."""

from __future__ import annotations

import json
import logging
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from test_upit_ffn import settings_in
from test_upit_resume import contents
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from upit_case import run, run_in_process

from moe_peft import fold_routers, init_attention_routers, replace_routers
from moe_peft.models.gate import RoutedGate
from moe_peft.models.native_routers import CONFIG_FIELD
from moe_peft.native import UpcycleConfig, upcycle
from moe_peft.native.routed import read_routed_model
from moe_peft.routing.routers import RouterSettings
from moe_peft.training.calibration import calibration_batches
from moe_peft.training.tokenizing import tokenized
from moe_peft.upit import UpIT, post_train, recipe_from_dict

ATTENTION = {"type": "attention", "num_heads": 2}


def settings_with(router, folder, tokenizer, **own):
    case = settings_in(folder, tokenizer, method="upcycle_pt", num_experts=4, num_train_epochs=1)
    for name in ("prepare", "router_init"):
        del case[name]
    moe = {"top_k": 2, "init": "drop", **own}
    return {**case, "moe": moe, "post_train": {"router": router, "sft": {"router_z_loss_coef": 0.001}}}


@pytest.mark.parametrize("router", [ATTENTION, {"type": "attention"}])
def test_attention_routers_are_trained_and_folded_as_by_hand(router, tmp_path, tokenizer):
    settings = settings_with(router, tmp_path, tokenizer, router_init="attention")
    pipeline = run(settings, tmp_path)
    base, stage = settings["model"]["name_or_path"], pipeline.stages[0]
    assert json.loads((tmp_path / "out/post_train/stage.json").read_text())["metrics"]["steps"] == 12

    upcycle(base, tmp_path / "copies", UpcycleConfig(num_experts=4, top_k=2, init="drop", seed=stage.seed))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "copies")
    model.config.router_aux_loss_coef = 0.01
    data, tokenizer = pipeline.context.train_data, AutoTokenizer.from_pretrained(base)
    batches = calibration_batches(data, tokenizer, seed=stage.seed)
    replace_routers(model, RouterSettings(**router))
    init_attention_routers(model, batches, dense=AutoModelForCausalLM.from_pretrained(base))
    before = [gate.moe_router.mean_query.clone() for gate in gates(model)]
    args = stage.arguments(tmp_path / "by hand", num_train_epochs=1)
    post_train(model, data, args, tokenizer, output_dir=tmp_path / "mine")
    assert all(not torch.equal(old, gate.moe_router.mean_query) for old, gate in zip(before, gates(model), strict=True))
    fold_routers(model)

    found, info = AutoModelForCausalLM.from_pretrained(pipeline.result, output_loading_info=True)
    assert not any(info.values())
    wanted = model.state_dict()
    assert found.state_dict().keys() == wanted.keys() and not any("moe_router" in name for name in wanted)
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-6, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")


def gates(model):
    return [module for module in model.modules() if isinstance(module, RoutedGate)]


@pytest.mark.parametrize("router", [{"type": "mlp"}, {"type": "attention", "num_heads": 2, "mixture": "max"}])
def test_routers_that_do_not_fold_stay(router, tmp_path, tokenizer, caplog):
    caplog.set_level(logging.INFO)
    pipeline = run(settings_with(router, tmp_path, tokenizer), tmp_path)
    assert "the result keeps its routers" in caplog.text
    model = read_routed_model(pipeline.result, "result").eval()
    assert [gate.moe_router.settings.type for gate in gates(model)] == [router["type"]] * 2
    data, collator = tokenized(
        pipeline.context.eval_data, pipeline.context.tokenizer, pipeline.stages[0].arguments(tmp_path)
    )
    losses, counts = Counter(), Counter()  # the evaluation is of the model with its routers
    for row in data:
        batch = collator([row])
        with torch.no_grad():
            logits, labels = model(input_ids=batch["input_ids"]).logits[0, :-1], batch["labels"][0, 1:]
        losses[row["domain"]] += cross_entropy(logits, labels, reduction="sum").item()
        counts[row["domain"]] += int((labels != -100).sum())
    found = pipeline.records["evaluate"]["metrics"]["loss"]["adapted"]
    for domain, loss in losses.items():
        assert found[domain] == pytest.approx(loss / counts[domain], rel=1e-4)


def test_locmoe_folds(tmp_path, tokenizer):
    result = run(settings_with({"type": "locmoe"}, tmp_path, tokenizer), tmp_path).result
    config = json.loads((result / "config.json").read_text())
    assert config["num_experts_per_tok"] == 2 and config["output_router_logits"] is False
    assert CONFIG_FIELD not in config
    assert not any("moe_router" in name for name in load_file(result / "model.safetensors"))


@pytest.mark.parametrize(("point", "n"), [("step", 8), ("before a checkpoint is marked", 2), ("renaming a stage", 1)])
def test_killed_run_goes_on_to_the_same_bytes(point, n, tmp_path, tokenizer):
    settings = settings_with(ATTENTION, tmp_path, tokenizer, router_init="attention")
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    assert run_in_process(settings, tmp_path / "whole") == 0
    assert run_in_process(settings, tmp_path / "killed", (point, n)) == -9
    assert run_in_process(settings, tmp_path / "killed") == 0
    found, wanted = (
        {name: content for name, content in contents(tmp_path / folder / "out").items() if name != "manifest.json"}
        for folder in ("killed", "whole")
    )
    assert found == wanted


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"post_train": {"router": {"type": "x"}}}, "post_train.router: "),
        ({"post_train": {"router": {"kind": "mlp"}}}, "post_train.router.kind: unknown key"),
        ({"post_train": {"router": {"attention_size": 8}}}, "post_train.router.attention_size: it follows from"),
        ({"post_train": {"router": {"type": "mlp", "num_heads": 4}}}, "num_heads=4: router='mlp' has no use for it"),
        ({"post_train": {"router": {"type": "attention", "num_heads": 0}}}, "router_num_heads=0"),
        ({"post_train": {"router": {"type": "attention", "num_heads": "x"}}}, "router_num_heads='x'"),
        ({"post_train": {"router": {"type": "hash"}}}, "router_type='hash': a native gate has no token ids"),
        (
            {"post_train": {"router": {"type": "attention", "num_heads": 3}}},
            "router_num_heads=3: must divide the base's",
        ),
        ({"method": "sft"}, "left out: the method 'sft' has no gates"),
        ({"method": "upit"}, "left out: stage 3 trains plain gates; or set router_init.buckets=none"),
        ({"mode": "lora", "method": "loramoe_pt", "moe": {}}, "post_train.router.type: unknown key in the mode 'lora'"),
        (
            {"post_train": {"router": {"type": "mlp"}}, "moe": {"router_init": "attention"}},
            "moe.router_init='attention': must be left out: attention does not initialise that post_train.router",
        ),
    ],
)
def test_routers_that_cannot_be_are_refused(own, message, tmp_path, tokenizer):
    settings = settings_with(ATTENTION, tmp_path, tokenizer)
    with pytest.raises(ValueError) as error:
        UpIT(recipe_from_dict({**settings, "output_dir": str(tmp_path / "out"), **own})).check()
    assert message in str(error.value) and "\n" not in str(error.value)
