"""Between forward and backward, our trainers wait for the device no more often than TRL's own with a LoRA does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from trl import SFTConfig, SFTTrainer

from moe_peft.training.router_log import RouterLog
from tests.helpers.models import tiny_llama
from tests.helpers.trainers import LABELS, arguments, make_trainer
from tests.helpers.upit_case import rows

STEPS, ACCUMULATION, LOGGING_STEPS = 6, 2, 3


class _Waits(TorchDispatchMode):
    """Counts what makes the CPU wait for a GPU: reading a value, and copies to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += func.overloadpacket in (aten._local_scalar_dense, aten.nonzero, aten.masked_select)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits() -> Iterator[_Waits]:
    seen = _Waits()

    def counted(name):
        original = getattr(torch.Tensor, name)

        def call(*args, **kwargs):
            seen.count += 1
            return original(*args, **kwargs)

        return mock.patch.object(torch.Tensor, name, call)

    with counted("tolist"), counted("cpu"), counted("numpy"), seen:
        yield seen


def counts(trainer) -> tuple[set[int], int]:
    """
    Waits in each micro-batch, forward, losses and backward, but for the first of all; and in what routers add to a log,
    where the sums are brought to the CPU.
    """
    steps, logs = [], []

    def counted(name, into):
        original = getattr(type(trainer), name)

        def call(*args, **kwargs):
            with waits() as seen:
                result = original(trainer, *args, **kwargs)
            into.append(seen.count)
            return result

        return mock.patch.object(trainer, name, call)

    brought = RouterLog._of_all
    count = mock.patch.object(RouterLog, "_of_all", lambda log, sums: logs.append(1) or brought(log, sums))
    with counted("training_step", steps), count:
        trainer.train()
    assert len(steps) == STEPS * ACCUMULATION
    return set(steps[1:]), len(logs)


ARGUMENTS = {"max_steps": STEPS, "gradient_accumulation_steps": ACCUMULATION, "logging_steps": LOGGING_STEPS}


@pytest.mark.parametrize("own", [
    {"router_z_loss_coef": 0.01, **LABELS},
    {"router_balancing": "global"},
    {"router_label_mask": True, **LABELS},
], ids=["labels", "global", "masked"])  # fmt: skip
def test_a_step_waits_as_often_as_that_of_a_lora(own, tokenizer, tmp_path):
    lora = get_peft_model(tiny_llama(), LoraConfig(target_modules=["up_proj"], task_type="CAUSAL_LM"))
    data = Dataset.from_list(rows(24))
    args = arguments(tmp_path / "lora", SFTConfig, **ARGUMENTS)
    of_lora, _ = counts(SFTTrainer(lora, args, train_dataset=data, processing_class=tokenizer))
    of_step, of_log = counts(make_trainer(tmp_path / "moe", tokenizer, data=data, **ARGUMENTS, **own))
    assert max(of_step) <= max(of_lora)
    assert of_log == 2 * STEPS // LOGGING_STEPS  # the sums of losses, and the loads
