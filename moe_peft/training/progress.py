"""One progress bar per training, instead of the bar and the printed dictionaries of transformers' `Trainer`."""

from __future__ import annotations

import io
import logging
import sys
import time
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

logger = logging.getLogger(__name__)

_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps{postfix}, {remaining} left"
# What a bar shows of a log, and what it calls it.
_SHOWN = {
    "loss": "loss", "eval_loss": "eval loss", "learning_rate": "rate", "aux_loss": "balancing", "load_cv": "load cv"
}  # fmt: skip
_SECONDS_PER_LINE = 30.0


def show_progress(trainer: Trainer) -> None:
    """
    Make `trainer` report only by `StageProgress`; what it logs still reaches its other callbacks. In a notebook the
    trainer keeps its table.
    """
    if DEFAULT_PROGRESS_CALLBACK is ProgressCallback:
        for callback in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(StageProgress())


class StageProgress(TrainerCallback):
    """
    A bar with the training's name (`run_name` of the arguments), steps, latest losses, rate, load and the time left.
    Where standard error is not a terminal, the bar is a line of text, written at the end and every half minute at most.

    The logged values go to this module's logger, one line for each record: at level DEBUG beside a bar, at level INFO
    where `disable_tqdm` of the arguments asks for none. Only the first of all processes shows anything.
    """

    def __init__(self) -> None:
        self.bar: tqdm | None = None
        self.losses: dict[str, str] = {}
        self.terminal = sys.stderr.isatty()
        self.last_line = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and not args.disable_tqdm:
            self.last_line = time.monotonic()
            self.bar = tqdm(
                desc=_name(args), total=state.max_steps, initial=state.global_step, bar_format=_FORMAT,
                dynamic_ncols=True, file=sys.stderr if self.terminal else io.StringIO(),
            )  # fmt: skip

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)
            if time.monotonic() - self.last_line > _SECONDS_PER_LINE:
                self._write_line()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        shown = {key: f"{value:.4g}" for key, value in (logs or {}).items() if isinstance(value, (int, float))}
        if self.bar is not None:
            self.losses.update({name: shown[key] for key, name in _SHOWN.items() if key in shown})
            text = ", ".join(f"{name} {value}" for name, value in self.losses.items())
            self.bar.set_postfix_str(text, refresh=False)
        level = logging.INFO if self.bar is None else logging.DEBUG
        if state.is_world_process_zero and logger.isEnabledFor(level):
            text = ", ".join(f"{key} {value}" for key, value in shown.items())
            with tqdm.external_write_mode(file=sys.stderr):
                logger.log(level, "%s: step %d of %d: %s", _name(args), state.global_step, state.max_steps, text)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.bar is not None:
            self._write_line()
            self.bar.close()
            self.bar = None

    def _write_line(self) -> None:
        if not self.terminal:
            print(self.bar, file=sys.stderr, flush=True)
            self.last_line = time.monotonic()


def _name(args: TrainingArguments) -> str:
    return args.run_name or "training"
