"""The load of the experts during training."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from .record import record_routing
from .report import write_load_over_time


class LoadCallback(TrainerCallback):
    """
    Plots the load of the experts during training with any `Trainer`: `load.png`, and `load.json` with the numbers,
    written at each save and at the end.

    Args:
        output_dir: the folder for the files.
        every: the number of steps in each point of the figure.

    Raises:
        ValueError: the model has no routers (raised when training begins).
    """

    def __init__(self, output_dir: str | Path, every: int = 10) -> None:
        self.output_dir, self.every = Path(output_dir), every
        self.steps: list[int] = []
        self.loads: list[list[float]] = []
        self._recording = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._statistics = self._recording.enter_context(record_routing(model))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            share_N = self._statistics.shares()["all"].mean(0)
            self._statistics.counts.zero_()
            self.steps.append(state.global_step)
            self.loads.append(share_N.tolist())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.steps and state.is_world_process_zero:
            write_load_over_time(self.steps, self.loads, self.output_dir)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_save(args, state, control)
        self._recording.close()
