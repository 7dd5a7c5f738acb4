"""Evaluation mode for a block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_peft.utils.torch_contexts import evaluating


class NoisyRouter(nn.Linear):
    """A linear that draws its output in training, as PhiMoE's router does."""

    def forward(self, x):
        return super().forward(x) + (torch.rand(()) if self.training else 0)


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("before", [True, False])
def test_every_module_is_in_evaluation_mode_and_then_as_before(before):
    model = nn.Sequential(NoisyRouter(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).train(before)
    model[1].eval()
    expected, x = modes(model), torch.randn(3, 4)
    with evaluating(model):
        assert not any(modes(model)) and torch.equal(model(x), model(x))
    assert modes(model) == expected


def test_linears_of_bitsandbytes_are_in_training_mode_and_then_as_before():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64), nn.Linear(64, 64))
    for mode in (True, False):
        with evaluating(model.train(mode)):
            assert modes(model) == [False, True, False]
        assert modes(model) == [mode] * 3
