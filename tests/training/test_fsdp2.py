"""FSDP2 (torch's `fully_shard`) in two processes: outputs, gradients and a step are those of one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig

from moe_peft import MoELoraConfig, allow_experts, fold_routers, force_experts, pin_dispatch, record_routing
from moe_peft.routing.losses import balancing_loss, label_losses, z_losses
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama
from tests.helpers.processes import WORLD, in_processes

pytestmark = pytest.mark.slow

METHODS = ("dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted")
# Name → fields of the config, and what happens around the forward and the backward pass.
CASES: dict[str, dict[str, Any]] = {
    **{f"{mixing} {method}": {"mixing": mixing} for mixing in ("output", "projection") for method in METHODS},
    "checkpointing": {},
    "reentrant checkpointing": {},
    "forced": {},
    "masked": {},
    "masked by process": {},  # each has tokens for two experts of its own, none for the others
    "recorded": {},
    "losses on routers": {},
    "folded": {"router_type": "attention", "router_num_heads": 4},
    "bottleneck": {"expert_type": "bottleneck", "bottleneck_size": 4},
    "bfloat16": {},
    "4-bit output": {"mixing": "output"},
    "4-bit projection": {"mixing": "projection"},
}
RATE = 0.5


def model(name: str, folder: Path) -> torch.nn.Module:
    base = tiny_llama(hidden=32)
    if name.startswith("4-bit"):  # packed in float32, so that FSDP divides them together with the other weights
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage="float32")
        base = type(base).from_pretrained(
            folder / "base", quantization_config=config, dtype=torch.float32, device_map="cpu"
        )
    own = dict(CASES[name])
    if own.get("expert_type") is None:
        own |= {"r": 4}
    torch.manual_seed(1)
    adapted = get_peft_model(
        base, MoELoraConfig(num_experts=4, init_lora_weights=False, task_type="CAUSAL_LM", **own)
    ).train()
    if name == "folded":
        fold_routers(adapted)
    if "checkpointing" in name:
        adapted.gradient_checkpointing_enable({"use_reentrant": name.startswith("reentrant")})
        adapted.enable_input_require_grads()
    if name == "bfloat16":
        for parameter in adapted.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
    return adapted


def batch(rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


@contextmanager
def around(name: str, own: torch.nn.Module, rank: int, found: dict[str, Any]) -> Iterator[None]:
    """What a case does around the passes of a rank."""
    mixing, _, method = name.partition(" ")
    context: Any = pin_dispatch(method) if mixing in ("output", "projection") else nullcontext()
    if name == "forced":
        context = force_experts(own, torch.tensor([3, 1]))
    elif name == "masked":
        context = allow_experts(own, torch.tensor([[True, True, False, False], [False, True, True, True]]))
    elif name == "masked by process":
        context = allow_experts(own, torch.tensor([rank == 0, rank == 0, rank == 1, rank == 1]).expand(2, 4))
    elif name == "recorded":
        context = record_routing(own)
    with context as recorded:
        yield
    if name == "recorded":
        found["counts"] = recorded.counts.clone()


def train(name: str, own: torch.nn.Module, ranks: list[int]) -> dict[str, Any]:
    """Outputs of each rank, and the parameters after a step with the mean of their gradients."""
    found: dict[str, Any] = {}
    trained = [p for p in own.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    for rank in ranks:
        with around(name, own, rank, found):
            outputs = own(**batch(rank), output_router_logits=name == "losses on routers")
            loss = outputs.loss
            if name == "losses on routers":
                logits = outputs.router_logits
                allowed = torch.tensor([True, False, True, False]).expand(32, 4)
                loss = loss + balancing_loss(logits, 2) + z_losses(logits).mean() + label_losses(logits, allowed).mean()
            (loss / len(ranks)).backward()
        found[f"logits {rank}"] = outputs.logits.detach().float()
    optimizer.step()
    return found


def run(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    for name in CASES:
        own = model(name, folder)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if name == "bfloat16" else MixedPrecisionPolicy()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*view.*")
            for layer in own.get_base_model().model.layers:
                fully_shard(layer.mlp, mesh=mesh, mp_policy=policy)  # whose output is then a sharded module's
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            if name.startswith("4-bit"):
                packed = own.get_base_model().model.layers[0].mlp.base_layer.gate_proj.weight
                assert isinstance(packed, DTensor) and packed.dtype == torch.float32
            found = train(name, fully_shard(own, mesh=mesh, mp_policy=policy), [rank])
        whole = get_model_state_dict(own, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            found["state"] = get_peft_model_state_dict(own, state_dict=whole)
        torch.save(found, folder / f"{name}-{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One pair of processes for all cases: starting them takes most of the time."""
    folder = tmp_path_factory.mktemp("fsdp2")
    tiny_llama(hidden=32).save_pretrained(folder / "base")
    in_processes(run, folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes_do_what_one_does(name: str, folder: Path):
    one, found = model(name, folder), [torch.load(folder / f"{name}-{rank}.pt") for rank in range(WORLD)]
    before = {key: value.clone() for key, value in get_peft_model_state_dict(one).items()}
    if name == "bfloat16":  # the policy rounds what layers compute with
        for parameter in one.parameters():
            parameter.data = parameter.data.bfloat16()
    alone = train(name, one, list(range(WORLD)))
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    for rank in range(WORLD):
        assert_near(found[rank][f"logits {rank}"], alone[f"logits {rank}"], dtype=dtype)
    gradients = {key: parameter.grad for key, parameter in one.named_parameters() if parameter.requires_grad}
    steps = {key: -RATE * grad.float() for key, grad in get_peft_model_state_dict(one, state_dict=gradients).items()}
    assert found[0]["state"].keys() == before.keys() == steps.keys()
    for key, expected in steps.items():
        moved = found[0]["state"][key] - before[key]
        assert moved.abs().max() > 0 or (name == "forced" and "moe_lora_router" in key), key
        assert_near(moved, expected, key, dtype=dtype, scale=before[key])
    if name == "recorded":
        counted = sum(int(part["counts"].sum()) for part in found)
        assert counted == WORLD * 2 * 32 * 2  # processes, layers, tokens, experts of each
