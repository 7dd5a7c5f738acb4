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
    Waits in each micro-batch, forward, losses and backward, but for the first of all; and how often all logs together
    bring something to the CPU.
    """
    steps, copies = [], []
    step, log, cpu = trainer.training_step, trainer.log, torch.Tensor.cpu

    def counted_step(*args, **kwargs):
        with waits() as seen:
            loss = step(*args, **kwargs)
        steps.append(seen.count)
        return loss

    def counted_log(*args, **kwargs):
        with mock.patch.object(torch.Tensor, "cpu", lambda tensor: copies.append(tensor) or cpu(tensor)):
            log(*args, **kwargs)

    with mock.patch.object(trainer, "training_step", counted_step), mock.patch.object(trainer, "log", counted_log):
        trainer.train()
    assert len(steps) == STEPS * ACCUMULATION
    return set(steps[1:]), len(copies)


ARGUMENTS = {"max_steps": STEPS, "gradient_accumulation_steps": ACCUMULATION, "logging_steps": LOGGING_STEPS}


@pytest.mark.slow
@pytest.mark.parametrize("own", [
    {"router_balancing": "global", "router_z_loss_coef": 0.01, **LABELS},
    {"router_label_mask": True, **LABELS},
], ids=["labels", "masked"])  # fmt: skip
def test_a_step_waits_as_often_as_that_of_a_lora(own, tokenizer, tmp_path):
    lora = get_peft_model(tiny_llama(), LoraConfig(target_modules=["up_proj"], task_type="CAUSAL_LM"))
    data = Dataset.from_list(rows(24))
    args = arguments(tmp_path / "lora", SFTConfig, **ARGUMENTS)
    of_lora, _ = counts(SFTTrainer(lora, args, train_dataset=data, processing_class=tokenizer))
    of_ours, in_logs = counts(make_trainer(tmp_path / "moe", tokenizer, data=data, **ARGUMENTS, **own))
    assert max(of_ours) <= max(of_lora)
    assert in_logs == 2 * STEPS // LOGGING_STEPS  # the sums of losses, and the loads
