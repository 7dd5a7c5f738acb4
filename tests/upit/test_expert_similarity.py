"""What UpIT says about the experts after each stage, the size of the MoE and its load."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from moe_peft.upit.summary import print_summary
from tests.helpers.close import WIDTH, assert_near, near
from tests.helpers.upit_case import make_case, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def case(tmp_path_factory, tokenizer):
    settings = make_case(tmp_path_factory.mktemp("case"), tokenizer)
    return {**settings, "num_train_epochs": 2, "num_experts": 3, "prepare": {"num_experts": 2}}


def cosines(rows):
    return torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=-1)


def of_pairs(matrix):
    return matrix[~torch.eye(len(matrix), dtype=torch.bool)]


def check(similarity, expected):
    matrix = torch.tensor(similarity["matrix"], dtype=torch.float64)
    assert_near(matrix, expected, terms=WIDTH**2)  # entries of matrices
    assert similarity["mean"] == near(of_pairs(expected).mean().item())
    assert similarity["smallest"] == near(of_pairs(expected).min().item())
    assert similarity["largest"] == near(of_pairs(expected).max().item())


def updates_of_lora(folder):
    state = load_file(folder / "adapter_model.safetensors")
    names = [name for name in sorted(state) if "lora_A" in name]
    return torch.cat(
        [(state[n.replace("lora_A", "lora_B")].double() @ state[n].double()).flatten() for n in names]
    )  # fmt: skip


def updates_of_moe(folder, n):
    state = load_file(folder / "adapter_model.safetensors")
    names = [name for name in sorted(state) if "moe_lora_A" in name]
    return torch.stack([
        torch.cat([
            (state[name.replace("moe_lora_A", "moe_lora_B")][i].double().T @ state[name][i].double()).flatten()
            for name in names
        ])
        for i in range(n)
    ])  # fmt: skip


def test_lora_experts_and_the_summary(case, tmp_path, capsys):
    pipeline = run(case, tmp_path)
    records = pipeline.records
    for stage, count in (("prepare", 2), ("expand", 3), ("router_init", 3)):
        folders = [pipeline.root / stage / "experts" / str(i) for i in range(count)]
        similarity = records[stage]["metrics"]["similarity"]
        check(similarity, cosines(torch.stack([updates_of_lora(folder) for folder in folders])))
    (pipeline.root / "prepare/experts/.DS_Store").touch()  # which file managers leave
    assert pipeline.context.kind.similarity(pipeline.root / "prepare")["similarity"]["matrix"]
    check(records["post_train"]["metrics"]["similarity"], cosines(updates_of_moe(pipeline.result, 3)))
    assert "similarity" not in records["evaluate"]["metrics"]
    assert json.loads((pipeline.root / "manifest.json").read_text())["stages"]["post_train"]["metrics"]["size"][
        "total"
    ] == 2 * 128 * 64 + 2 * (12288 + 24576 + 128) + 64 + 2 * (3 * 4 * 576 + 3 * 64)

    records["evaluate"]["metrics"]["load_warning"] = "collapsed: 2 layers, load CV 1.20. Try this: raise it"
    print_summary(pipeline)
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "similarity of experts: cosine of their updates B A" in printed
        and "active per token" in printed
        and "FLOP per token" in printed
    )
    assert "load of the experts: collapsed: 2 layers, load CV 1.20. Try this: raise it" in printed
    similarity = records["post_train"]["metrics"]["similarity"]
    assert f"{similarity['mean']:.2f}" in printed

    del records["evaluate"]  # a run without held-out data: what training logged last
    history = records["post_train"]["metrics"]["history"]
    assert isinstance(history[-1]["load_warning"], str)
    history[-1]["load_warning"] = "uneven: 2 layers, load CV 0.90"
    pipeline.__dict__["stages"] = pipeline.stages[:-1]
    print_summary(pipeline)
    printed = " ".join(capsys.readouterr().out.split())
    assert "load of the experts: uneven: 2 layers, load CV 0.90" in printed
    history[-1]["load_warning"] = ""
    print_summary(pipeline)
    assert "load of the experts" not in capsys.readouterr().out


def test_ffn_experts(case, tmp_path, capsys):
    settings = {key: value for key, value in case.items() if key != "adapter"}
    pipeline = run({**settings, "mode": "ffn"}, tmp_path)
    print_summary(pipeline)
    assert "cosine of their differences from the base's FFNs" in " ".join(capsys.readouterr().out.split())
    base = load_file(f"{case['model']['name_or_path']}/model.safetensors")
    names = [name for name in sorted(base) if ".mlp." in name]

    def moved(folder):
        own = load_file(folder / "model.safetensors")
        return torch.cat([(own[name].float() - base[name].float()).double().flatten() for name in names])

    for stage, count in (("prepare", 2), ("expand", 3), ("router_init", 3)):
        folders = [pipeline.root / stage / "experts" / str(i) for i in range(count)]
        similarity = pipeline.records[stage]["metrics"]["similarity"]
        check(similarity, cosines(torch.stack([moved(folder) for folder in folders])))

    own = load_file(pipeline.root / "model" / "model.safetensors")
    of_dense = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    rows = torch.stack([
        torch.cat([
            (
                own[f"model.layers.{layer}.block_sparse_moe.experts.{i}.{name}.weight"].float()
                - base[f"model.layers.{layer}.mlp.{dense}.weight"].float()
            ).double().flatten()
            for layer in range(2)
            for name, dense in of_dense.items()
        ])
        for i in range(3)
    ])  # fmt: skip
    check(pipeline.records["post_train"]["metrics"]["similarity"], cosines(rows))
    size = pipeline.records["post_train"]["metrics"]["size"]
    assert size["total"] - size["active"] == 2 * 24576  # one of three FFNs in each of two layers
