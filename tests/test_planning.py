"""The memory that a plan names, against sums made by hand, under every strategy."""

from __future__ import annotations

import pytest
from conftest import tiny_llama
from test_size import ATTENTION, FFN
from trl import SFTConfig

from moe_peft.training.planning import STRATEGIES, Launch, memory, planned_launch

LAYER = ATTENTION + FFN + 2 * 64
OUTSIDE = 2 * 128 * 64 + 64  # embeddings, head, norm
BASE = 4 * (2 * LAYER + OUTSIDE)
HELD, TRAINED = 3000, 2000
# Of a row of 10 tokens in float32: both layers' activations, as nothing is computed again.
ACTIVATIONS = 4 * 10 * 4 * 2 * (10 * 64 + 8 * 128)


@pytest.fixture(scope="module")
def needed(tmp_path_factory):
    args = SFTConfig(
        str(tmp_path_factory.mktemp("out")), per_device_train_batch_size=4, bf16=False, use_cpu=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    return lambda launch: memory(tiny_llama(), args, 10, HELD, TRAINED, half=False, launch=launch)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_process_holds_everything(strategy, needed):
    found = needed(Launch(1, strategy))
    assert (found.parameters, found.gradients, found.optimizer) == (BASE + 4 * HELD, 4 * TRAINED, 8 * TRAINED)
    assert found.activations == ACTIVATIONS
    assert found.total == BASE + 4 * HELD + 12 * TRAINED + ACTIVATIONS


@pytest.mark.parametrize("processes", [2, 8, 64])
def test_what_is_divided(processes, needed):
    ddp, zero2, zero3, fsdp2 = (needed(Launch(processes, name)) for name in ("ddp", "zero2", "zero3", "fsdp2"))
    assert (ddp.parameters, ddp.gradients, ddp.optimizer) == (BASE + 4 * HELD, 2 * 4 * TRAINED, 8 * TRAINED)
    assert (zero2.parameters, zero2.gradients) == (BASE + 4 * HELD, -(-4 * TRAINED // processes))
    assert zero2.optimizer == 8 * TRAINED // processes
    whole = 4 * (2 * LAYER + OUTSIDE) + 2 * (4 * HELD // 2)  # this model has but two layers
    assert zero3 == fsdp2
    assert zero3.parameters == min(-(-(BASE + 4 * HELD) // processes) + whole, BASE + 4 * HELD)
    assert {found.activations for found in (ddp, zero2, zero3)} == {ACTIVATIONS}


def test_many_layers_shrink_with_the_processes():
    args = SFTConfig("unused", per_device_train_batch_size=1, bf16=False, use_cpu=True)
    model = tiny_llama(layers=12)
    one, many = (memory(model, args, 10, 0, 0, half=False, launch=Launch(n, "fsdp2")) for n in (1, 8))
    assert one.parameters == 4 * (12 * LAYER + OUTSIDE)
    assert many.parameters == one.parameters // 8 + 4 * (2 * LAYER + OUTSIDE)


def test_wrong_launches_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"strategy='zero4': .*zero3"):
        Launch(2, "zero4")
    with pytest.raises(ValueError, match="processes=0: must be 1 or more"):
        Launch(0)
    with pytest.raises(ValueError, match=r"processes=8: is for --dry-run; a run takes it from its launcher"):
        planned_launch(8, None, dry_run=False)
    with pytest.raises(ValueError, match=r"strategy='ddp': is for --dry-run"):
        planned_launch(None, "ddp", dry_run=False)
    assert planned_launch(None, None, dry_run=True) == Launch(1, "ddp")
