"""The load of the experts during training."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..routing.statistics import verdict_line
from .recorder import record_routing
from .routing_report import read_load_over_time, write_load_over_time

logger = logging.getLogger("moe_peft")


class LoadCallback(TrainerCallback):
    """
    Plots the load of the experts during training with any `Trainer`: `load.png`, and `load.json` with the numbers,
    written at each save and at the end. Where the load of a layer is not healthy, it warns and says what to try, once
    for the same layers; see `moe_peft.routing.load_verdicts`. A training that resumes continues the numbers that are
    there.

    Args:
        output_dir: the folder for the files.
        every: the number of steps in each point of the figure.
        suffix: the figure's format: ".png", ".pdf" or ".svg".

    Raises:
        ValueError: when training begins: the model has no routers.

    Example:

    ```python
    >>> from moe_peft import LoadCallback
    >>> callback = LoadCallback("load", every=50)  # SFTTrainer(..., callbacks=[callback])
    ```
    """

    def __init__(self, output_dir: str | Path, every: int = 10, suffix: str = ".png") -> None:
        self.output_dir, self.every, self.suffix = Path(output_dir), every, suffix
        self.steps: list[int] = []
        self.loads: list[list[float]] = []
        self.verdicts: list[list[str]] = []
        self._recording = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._recording.close()  # of a training that ended with an error
        done = getattr(state, "global_step", 0)
        self.steps, self.loads, self.verdicts = read_load_over_time(self.output_dir, done) if done else ([], [], [])
        self._statistics = self._recording.enter_context(record_routing(model, training_only=True))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 and self._statistics.tokens.any():
            share_N = self._statistics.shares()["all"].mean(0)
            verdicts = self._statistics.warnings()
            self._statistics.counts.zero_()
            self._statistics.tokens.zero_()
            self.steps.append(state.global_step)
            self.loads.append(share_N.tolist())
            self._warn(verdicts, state)
            self.verdicts.append(verdicts)

    def _warn(self, verdicts: list[str], state: Any) -> None:
        """Unless the same layers were named before."""
        before = {_layer(verdict) for verdict in (self.verdicts[-1] if self.verdicts else [])}
        if state.is_world_process_zero and {_layer(verdict) for verdict in verdicts} - before:
            logger.warning("load of the experts until step %d: %s", state.global_step, verdict_line(verdicts))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.steps and state.is_world_process_zero:
            write_load_over_time(self.steps, self.loads, self.verdicts, self.output_dir, self.suffix)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_save(args, state, control)
        self._recording.close()


def _layer(verdict: str) -> str:
    return verdict.partition(":")[0]
