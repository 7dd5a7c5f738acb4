"""Load of the experts during training."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

from transformers import TrainerCallback

from ..utils.io import read_json, write_json
from .figures import plot_curves
from .recorder import record_routing

logger = logging.getLogger("moe_peft")


class LoadCallback(TrainerCallback):
    """
    Plots the imbalance of the experts' load during training with any `Trainer`. It writes `load.png`, and `load.json`
    with the numbers, at each save and at the end. If the load becomes uneven or collapses, it warns, with advice
    (`moe_peft.routing.LoadHealth`), and again only after a recovery. It does not warn if an expert map asks for uneven
    loads. A resumed training continues the existing numbers. With several processes, the numbers are a sample: the
    first process's batches.

    Args:
        output_dir: folder of the files.
        every: the number of steps in each point of the figure.

    Raises:
        ValueError: when training begins, if the model has no routers.
    """

    def __init__(self, output_dir: str | Path, every: int = 10) -> None:
        self.output_dir, self.every = Path(output_dir), every
        self.points: list[dict[str, Any]] = []
        self._recording = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._recording.close()  # left by a training that ended with an error
        done = getattr(state, "global_step", 0)
        self.points = []
        with suppress(ValueError, KeyError, TypeError):  # no file, or another program's
            points = read_json(self.output_dir / "load.json")["points"] if done else []
            self.points = [point for point in points if point["step"] <= done]
        self._statistics = self._recording.enter_context(record_routing(model, training_only=True))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 and self._statistics.tokens.any():
            health, variations = self._statistics.health(), self._statistics.variations()
            warning = "" if getattr(args, "expert_map", None) else health.warning
            self._statistics.counts.zero_()
            self._statistics.tokens.zero_()
            if warning and state.is_world_process_zero and not (self.points and self.points[-1]["warning"]):
                logger.warning("load of the experts until step %d: %s", state.global_step, warning)
            self.points.append({
                "step": state.global_step, "variations": variations, "untrained": health.untrained, "warning": warning
            })  # fmt: skip

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.points and state.is_world_process_zero:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            curves = {
                "most uneven layer": lambda point: max(point["variations"]),
                "median layer": lambda point: median(point["variations"]),
                "most even layer": lambda point: min(point["variations"]),
                "untrained gates": lambda point: point["untrained"],
            }
            drawn = {name: [(point["step"], value(point)) for point in self.points] for name, value in curves.items()}
            plot_curves(drawn, self.output_dir / "load.png", "step", "coefficient of variation of the load", "linear")
            write_json(self.output_dir / "load.json", {"points": self.points})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_save(args, state, control)
        self._recording.close()
