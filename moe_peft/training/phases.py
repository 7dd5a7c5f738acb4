"""The three-phase schedule: a cautious start, the main part, a cautious end."""

from __future__ import annotations

from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

PHASE_ENDS = (0.05, 0.75, 1.0)  # as shares of the steps
LEARNING_RATE = (0.1, 1.0, 0.1)  # factors; those of the losses are in `routing.losses.ROUTER_LOSSES`


def phase_at(step: int, steps: int) -> int:
    """The phase (0, 1 or 2) that a step of `steps` belongs to."""
    return next((i for i, end in enumerate(PHASE_ENDS) if step < end * steps), len(PHASE_ENDS) - 1)


def three_phase_scheduler(optimizer: Optimizer, steps: int) -> LambdaLR:
    """The learning rate schedule over `steps` optimizer steps."""
    return LambdaLR(optimizer, partial(_rate, steps=steps))  # without a state, which resuming would restore


def _rate(step: int, steps: int) -> float:
    """The learning rate factor at a step."""
    return LEARNING_RATE[phase_at(step, steps)]
