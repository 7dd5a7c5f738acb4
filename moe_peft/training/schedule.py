"""Number of steps of a training, and the phases of the router schedules."""

from __future__ import annotations

import math

from trl import SFTConfig

from ..utils.messages import InputError

# --- steps -----------------------------------------------------------------------------------------------------------


def steps_and_rows(args: SFTConfig, rows: int, processes: int) -> tuple[int, float]:
    """Return the number of `Trainer`'s optimizer steps, and the number of rows it reads in them."""
    batch, accumulated = args.per_device_train_batch_size * processes, args.gradient_accumulation_steps
    in_epoch, usable = steps_in_epoch(rows, batch, accumulated, args.dataloader_drop_last)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * in_epoch)
    return steps, min(steps * batch * accumulated, steps / in_epoch * usable)


def steps_in_epoch(rows: int, batch: int, accumulated: int, drop_last: bool) -> tuple[int, int]:
    """
    Return the number of `Trainer`'s optimizer steps in an epoch, and of rows it reads. Each epoch begins a new step.

    Args:
        batch: rows of one batch of all processes.
        accumulated: batches of a step.
        drop_last: whether an incomplete last batch is left out.
    """
    batches = rows // batch if drop_last else -(-rows // batch)
    if drop_last and not batches:
        raise InputError(
            f"dataloader_drop_last=True: {rows} rows do not fill a batch of {batch}; lower "
            "per_device_train_batch_size, or leave it out"
        )
    return max(1, -(-batches // accumulated)), min(rows, batches * batch)


# --- router schedules ------------------------------------------------------------------------------------------------

PHASE_ENDS = (0.05, 0.75, 1.0)  # as shares of the steps
LEARNING_RATE = (0.1, 1.0, 0.1)  # factors; for the losses' factors see `routing.losses.ROUTER_LOSSES`


def phase_at(step: int, steps: int) -> int:
    """Return the phase (0, 1 or 2) of a step among `steps`."""
    return next((i for i, end in enumerate(PHASE_ENDS) if step < end * steps), len(PHASE_ENDS) - 1)


def _three_phases(step: int, steps: int) -> float:
    return LEARNING_RATE[phase_at(step, steps)]


def _step_decay(step: int, steps: int) -> float:
    warm_up = round(0.01 * steps)
    return (min(1.0, step / warm_up) if warm_up else 1.0) * 0.316 ** sum(step >= end * steps for end in (0.8, 0.9))


# `router_schedule` → the learning rate's factor at a step, given the number of steps.
FACTORS = {"three_phase": _three_phases, "step_decay": _step_decay}
_NAMES = {"three_phase": "in three phases", "step_decay": "with step decay"}


def schedule_name(args: SFTConfig) -> str:
    """Describe the learning rate's schedule in words."""
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    return _NAMES.get(getattr(args, "router_schedule", ""), schedule)
