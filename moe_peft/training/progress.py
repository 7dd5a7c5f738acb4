"""One progress bar per training, in place of the bar and the printed dictionaries of transformers' `Trainer`."""

from __future__ import annotations

import logging
import sys
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

logger = logging.getLogger("moe_peft")

_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps{postfix}, {remaining} left"
_FILE_SECONDS = 30.0  # between updates where the output is a file, which keeps every one of them


def show_progress(trainer: Trainer) -> None:
    """Make `trainer` report by [`StageProgress`] alone; what it logs still reaches its other callbacks."""
    for own in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
        trainer.remove_callback(own)
    trainer.add_callback(StageProgress())


class StageProgress(TrainerCallback):
    """
    A bar with the training's name (`run_name` of the arguments), steps, latest losses and the time left.

    The logged values go to the logger "moe_peft", a line for each record: at level DEBUG beside a bar, at level INFO
    where `disable_tqdm` of the arguments asks for none. Only the first of all processes shows anything.
    """

    def __init__(self) -> None:
        self.bar: tqdm | None = None
        self.losses: dict[str, str] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and not args.disable_tqdm:
            self.bar = tqdm(
                desc=_name(args), total=state.max_steps, initial=state.global_step, bar_format=_FORMAT,
                dynamic_ncols=True, mininterval=0.1 if sys.stderr.isatty() else _FILE_SECONDS,
            )  # fmt: skip

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

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
            self.losses.update({key: shown[key] for key in ("loss", "eval_loss") if key in shown})
            text = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in self.losses.items())
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
            self.bar.close()
            self.bar = None


def _name(args: TrainingArguments) -> str:
    return args.run_name or "training"
