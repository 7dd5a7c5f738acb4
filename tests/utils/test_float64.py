"""Apple's GPUs have no float64: nothing that looks at routing makes it there. Seen with fake tensors of that device."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_peft.models.gate_init import ArrowGates, BatchLabels, RidgeGates
from moe_peft.routing.statistics import expert_counts
from moe_peft.utils.expert_likeness import value_gram
from moe_peft.utils.torch_contexts import double

T, N, D, R = 12, 4, 8, 2


class AppleGPU(TorchDispatchMode):
    """Raises what an Apple GPU does where a tensor of it would be float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "mps" and tensor.dtype == torch.float64:
                raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype ({func})")
        return out


def calibrate(way) -> None:
    x_TD = double(torch.randn(T, D, device="mps"))
    way.sums(x_TD, BatchLabels(torch.tensor([0, 1]), torch.tensor([False, False]), torch.arange(T) // (T // 2), 2))


CASES = {
    "counts": lambda: expert_counts(torch.randn(T, N, device="mps"), torch.ones(T, device="mps"), 2),
    "similarity": lambda: value_gram(torch.randn(N, D, device="mps")),
    "ridge": lambda: calibrate(RidgeGates()),
    "arrow": lambda: ArrowGates().gates({}, [(torch.randn(N, R, D, device="mps"), torch.randn(N, D, R, device="mps"))]),
}


@pytest.mark.parametrize("case", CASES)
def test_no_float64_on_apples_gpus(case):
    with FakeTensorMode(), AppleGPU():
        CASES[case]()


def test_the_device_here_would_refuse_it():
    with FakeTensorMode(), AppleGPU(), pytest.raises(TypeError, match="float64"):
        torch.ones(1, device="mps").double()
