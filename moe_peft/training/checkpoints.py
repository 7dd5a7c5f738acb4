"""Training that may be killed at any moment and, run again, goes on and ends with the same bytes."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from peft import PeftModel, set_peft_model_state_dict
from peft.utils import load_peft_weights
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import TrainingArguments

from ..reading import read_object
from .arguments import refuse_arguments, save_whole
from .continuing import NOTE, claim, write_note
from .planning import steps_and_rows
from .progress import show_progress
from .whole import WHOLE, mark_whole, numbered_checkpoints, remove_from, whole_checkpoints

logger = logging.getLogger("moe_peft")

_NOT_MODEL = (
    WHOLE, NOTE, "optimizer*", "scheduler*", "scaler*", "rng_state*", "trainer_state.json", "training_args.bin",
    "pytorch_model_fsdp*", "global_step*", "latest", "zero_to_fp32.py",
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """What `train` leaves: the log, one record per logged step, and the checkpoint folders by step."""

    history: list[dict[str, Any]]
    checkpoints: dict[int, Path]

    @property
    def last(self) -> Path:
        """The last checkpoint."""
        return self.checkpoints[max(self.checkpoints)]

    def metrics(self) -> dict[str, float]:
        """The last record's losses, and the number of steps."""
        last = (
            {key: value for key, value in self.history[-1].items() if isinstance(value, float)} if self.history else {}
        )
        return {**last, "steps": max(self.checkpoints)}


class _Checkpoints(TrainerCallback):
    """
    Save at given steps, every `save_steps` and at the end, and mark what is whole. Each save comes with a log, so that
    the averages of a run that goes on from it begin where they began in a run that was not stopped.
    """

    def __init__(self, keep: Collection[int]) -> None:
        self.keep = set(keep)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step
        if step in self.keep or step % int(args.save_steps) == 0 or step >= state.max_steps:
            control.should_log = control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        PartialState().wait_for_everyone()  # every process writes its part of a checkpoint
        if not state.is_world_process_zero:
            return
        folder = Path(str(args.output_dir))
        mark_whole(folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        for step, older in whole_checkpoints(folder).items():
            if step < state.global_step and step not in self.keep:
                shutil.rmtree(older)
            elif step < state.global_step and (older / "optimizer.pt").is_file():
                remove_from(older, "optimizer.pt")  # the most of it, and only for going on from there


def total_steps(trainer: Trainer) -> int:
    """Optimizer steps of a trainer: `max_steps`, or those of `num_train_epochs`, each of which begins a step."""
    return steps_and_rows(trainer.args, len(trainer.train_dataset), trainer.args.world_size)[0]


def step_rows(args: TrainingArguments) -> int:
    """Rows of one optimizer step."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size


def train(trainer: Trainer, keep: Collection[int] = ()) -> Trained:
    """
    Train for `total_steps(trainer)`, from the last whole checkpoint in `trainer.args.output_dir` if there is one.

    Args:
        trainer: made anew, from the same model, data and arguments as the run that was stopped.
        keep: steps whose checkpoints stay. The last one always does.

    Raises:
        ValueError: the folder has checkpoints of another training, or an argument is not for a training like this.
    """
    refuse_arguments(trainer.args)
    steps = total_steps(trainer)
    trainer.args.max_steps = steps
    if trainer.args.save_steps < 1:  # a share of all steps
        trainer.args.save_steps = math.ceil(steps * trainer.args.save_steps)
    save_whole(trainer)
    folder = Path(trainer.args.output_dir)
    if trainer.args.should_save:
        _mend_note(folder)
    PartialState().wait_for_everyone()
    if not (folder / NOTE).is_file() and numbered_checkpoints(folder) and not whole_checkpoints(folder):
        raise ValueError(f"{str(folder)!r}: has checkpoints of another training; choose another output_dir")
    facts = claim(trainer, folder, steps=steps)
    PartialState().wait_for_everyone()  # all have read
    if trainer.args.should_save:
        write_note(folder, facts)  # now, so that broken checkpoints without a whole one are known as ours
    if trainer.args.should_save and folder.is_dir():
        whole = set(whole_checkpoints(folder, thoroughly=True).values())
        for broken in sorted(set(numbered_checkpoints(folder).values()) - whole):
            logger.warning("%s: is cut off or damaged; removed", broken)
            shutil.rmtree(broken)
    PartialState().wait_for_everyone()
    before = whole_checkpoints(folder)
    latest = max(before, default=0)
    lost = min((step for step in (*keep, steps) if step < latest and step not in before), default=steps)
    if latest < steps or lost < steps:
        trainer.add_callback(_Checkpoints(keep))
        show_progress(trainer)
        # One that is kept has lost its optimizer's state when a later one was saved, which may be damaged now.
        resumable = [
            path
            for step, path in before.items()
            if step < lost and (any(path.glob("optimizer*")) or any(path.glob("global_step*")))
        ]
        trainer.train(resume_from_checkpoint=str(resumable[-1]) if resumable else None)
    else:
        if isinstance(trainer.model, PeftModel):
            name = trainer.model.active_adapter
            weights = load_peft_weights(str(_adapter(before[latest], name)), device="cpu")
            set_peft_model_state_dict(trainer.model, weights, adapter_name=name)
    PartialState().wait_for_everyone()
    checkpoints = whole_checkpoints(folder)
    state = TrainerState.load_from_json(str(checkpoints[steps] / TRAINER_STATE_NAME))
    # `num_tokens` counts from the last start of the process.
    history = [{k: v for k, v in record.items() if k != "num_tokens"} for record in state.log_history]
    return Trained(history, checkpoints)


def _mend_note(folder: Path) -> None:
    """Put the last checkpoint's note in the place of one that cannot be read any more."""
    if (folder / NOTE).is_file():
        try:
            read_object(folder / NOTE)
        except ValueError as error:
            logger.warning("%s; taken from the last checkpoint", error)
            (folder / NOTE).unlink()
            for checkpoint in list(whole_checkpoints(folder, thoroughly=True).values())[-1:]:
                shutil.copy(checkpoint / NOTE, folder / NOTE)


def copy_result(checkpoint: Path, folder: Path, adapter_name: str = "default") -> None:
    """
    The weights, tokenizer and model card of a checkpoint, without what only its training needed. An adapter comes out
    of the folder of its name.
    """
    adapter = _adapter(checkpoint, adapter_name)
    ignored = shutil.ignore_patterns(*_NOT_MODEL, *([adapter.name] if adapter != checkpoint else []))
    for source in dict.fromkeys((checkpoint, adapter)):
        shutil.copytree(source, folder, ignore=ignored, copy_function=link_weights, dirs_exist_ok=True)


def _adapter(checkpoint: Path, name: str) -> Path:
    """Where an adapter is saved: PEFT gives those of other names than "default" a folder."""
    return checkpoint / name if (checkpoint / name / "adapter_config.json").is_file() else checkpoint


def link_weights(source: str, target: str) -> None:
    """A copy of a file; weights, which may be large and are not edited, are linked where the file system can do it."""
    Path(target).unlink(missing_ok=True)  # never write into a file that may be linked from elsewhere
    if source.endswith(".safetensors"):
        try:
            os.link(os.path.realpath(source), target)
            return
        except OSError:
            pass
    shutil.copy2(source, target)


def link_folder(source: Path, target: Path) -> None:
    """A copy of a folder, see `link_weights`."""
    shutil.copytree(source, target, copy_function=link_weights)
