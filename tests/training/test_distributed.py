"""Two processes (gloo): DDP and FSDP2 train every parameter as one process with the complete batch does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_peft import MoELoraConfig
from moe_peft.routing.losses import balancing_loss
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama
from tests.helpers.processes import WORLD, in_processes

pytestmark = pytest.mark.slow


def model(mixing: str) -> torch.nn.Module:
    base = tiny_llama()
    torch.manual_seed(1)
    config = MoELoraConfig(num_experts=4, r=4, mixing=mixing, init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base, config).train()


def batch(rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def expected(mixing: str) -> dict[str, torch.Tensor]:
    """Gradients averaged over the ranks' batches, by one process."""
    one = model(mixing)
    for rank in range(WORLD):
        (one(**batch(rank)).loss / WORLD).backward()
    return {n: p.grad for n, p in one.named_parameters() if p.requires_grad}


def run(rank: int, folder: Path) -> None:
    for kind in KINDS:
        for mixing in MIXINGS:
            gradients = WRAPPED[kind](model(mixing), rank)
            if rank == 0:
                torch.save(gradients, folder / f"{kind}-{mixing}.pt")
    torch.save({scope: balanced_together(scope, rank) for scope in SCOPES}, folder / f"balanced-{rank}.pt")


def ddp(own: torch.nn.Module, rank: int) -> dict[str, torch.Tensor]:
    wrapped = torch.nn.parallel.DistributedDataParallel(own)  # without find_unused_parameters
    wrapped(**batch(rank)).loss.backward()
    return {n: p.grad for n, p in own.named_parameters() if p.requires_grad}


def ddp_looking_for_unused(own: torch.nn.Module, rank: int) -> dict[str, torch.Tensor]:
    wrapped = torch.nn.parallel.DistributedDataParallel(own, find_unused_parameters=True)  # takes outputs apart
    outputs = wrapped(**batch(rank))
    assert len(outputs.router_logits) == 2 and outputs.aux_loss.requires_grad
    outputs.loss.backward()
    return {n: p.grad for n, p in own.named_parameters() if p.requires_grad}


def fsdp2(own: torch.nn.Module, rank: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in own.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(own, mesh=mesh)(**batch(rank)).loss.backward()
    return {n: p.grad.full_tensor() for n, p in own.named_parameters() if p.requires_grad}


WRAPPED = {"ddp": ddp, "ddp-unused": ddp_looking_for_unused, "fsdp2": fsdp2}
KINDS, MIXINGS = tuple(WRAPPED), ("output", "projection")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One pair of processes for all cases: starting them takes most of the time."""
    folder = tmp_path_factory.mktemp("gradients")
    in_processes(run, folder)
    return folder


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_gradients_of_one(kind: str, mixing: str, folder: Path):
    got = torch.load(folder / f"{kind}-{mixing}.pt")
    want = expected(mixing)
    assert got.keys() == want.keys()
    for name in want:
        assert_near(got[name], want[name], name)


# --- balancing all processes' batches together ----------------------------------------------------------------------

SCOPES = ("global", "layer")


def routed(rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Router logits of two layers, and a mask: few tokens in the first process, none but padding in a third one."""
    generator = torch.Generator().manual_seed(rank)
    logits = [torch.randn(12, 4, generator=generator).requires_grad_() for _ in range(2)]
    return logits, (torch.arange(12) < (5, 12, 0)[rank]).long()


def balanced_together(scope: str, rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    def mean(values: torch.Tensor) -> torch.Tensor:
        values = values.detach().clone()
        dist.all_reduce(values)
        return values / WORLD

    logits, mask = routed(rank)
    loss = balancing_loss(logits, 2, mask, scope, mean)
    return loss.detach(), torch.autograd.grad(loss / WORLD, logits)  # as data-parallel training averages


@pytest.mark.parametrize("scope", SCOPES)
def test_batches_balanced_together_are_one_batch(scope: str, folder: Path):
    found = [torch.load(folder / f"balanced-{rank}.pt")[scope] for rank in range(WORLD)]
    parts = [routed(rank) for rank in range(WORLD)]
    layers = [torch.cat(of_layer) for of_layer in zip(*(logits for logits, _ in parts), strict=True)]
    loss = balancing_loss(layers, 2, torch.cat([mask for _, mask in parts]), scope)
    assert_near(sum(value for value, _ in found) / WORLD, loss.detach())
    for rank, (logits, _) in enumerate(parts):
        for own, expected in zip(found[rank][1], torch.autograd.grad(loss, logits, retain_graph=True), strict=True):
            assert expected.abs().max() > 0
            assert_near(own, expected)


def test_a_process_with_padding_alone_adds_nothing():
    logits, mask = routed(2)
    loss = balancing_loss(logits, 2, mask)
    assert loss == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, logits))


# --- rows that do not fill the last batch --------------------------------------------------------------------------


def trained(folder: Path, rows: list[int], batch: int) -> dict[str, torch.Tensor]:
    """An adapter after an epoch of rows with other lengths and labels, and with all losses on routers."""
    from datasets import Dataset

    from moe_peft.training import MoESFTConfig, MoESFTTrainer
    from tests.helpers.words import word_tokenizer

    args = MoESFTConfig(
        str(folder), per_device_train_batch_size=batch, train_sampling_strategy="sequential", use_cpu=True, bf16=False,
        report_to="none", save_strategy="no", learning_rate=1e-2, adam_epsilon=1e-4, num_train_epochs=1,
        gradient_checkpointing=False, disable_tqdm=True, label_column="domain", expert_map={"a": [0, 1], "b": [2]},
        router_aux_loss_coef=0.1, router_z_loss_coef=0.1, router_label_loss_coef=0.1, router_global_batch=True,
    )  # fmt: skip
    texts = [" ".join(f"w{3 + (7 * row + 5 * i) % 100}" for i in range(3 + 6 * row)) for row in rows]
    data = Dataset.from_list([{"text": t, "domain": "ab"[row % 2]} for row, t in zip(rows, texts, strict=True)])
    own = MoESFTTrainer(model("output"), args, train_dataset=data, processing_class=word_tokenizer(128))
    own.train()
    assert own.state.global_step == 2
    if own.is_world_process_zero():  # it waits for nobody
        own.save_model(str(folder / "saved"))
    return {n: p.detach().clone() for n, p in own.model.named_parameters() if p.requires_grad}


def run_uneven(rank: int, folder: Path) -> None:
    torch.save(trained(folder / "state", list(range(5)), 2), folder / f"uneven-{rank}.pt")


def test_the_first_rows_fill_the_last_batch(tmp_path):
    in_processes(run_uneven, tmp_path)
    one = trained(tmp_path / "one", [0, 1, 2, 3, 4, 0, 1, 2], 4)
    before = dict(model("output").named_parameters())
    assert (tmp_path / "state" / "saved" / "adapter_model.safetensors").is_file()
    for rank in range(WORLD):
        for name, value in torch.load(tmp_path / f"uneven-{rank}.pt").items():
            # Adam divides a gradient of about 0.01, and its rounding, by 1e-4 and multiplies them by 1e-2.
            assert_near(value, one[name], name, scale=1.0)
            assert not torch.equal(value, before[name])
