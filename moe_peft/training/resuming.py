"""Training that may be killed at any time. Run again, it resumes and ends with the same bytes."""

from __future__ import annotations

import logging
import math
import pickle
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback
from transformers import logging as transformers_logging
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import TrainingArguments

from ..utils.distributed import on_main_process, shape_of
from ..utils.io import remove
from ..utils.messages import InputError
from .checkpointing import (
    MARKER,
    Fingerprint,
    fingerprint_of,
    has_optimizer,
    hash_value,
    is_complete,
    last_checkpoint,
    mark_complete,
    numbered_checkpoints,
    without_optimizer,
)
from .preflight import refuse_arguments
from .schedule import steps_and_rows

logger = logging.getLogger("moe_peft")

# --- what arguments ask for ------------------------------------------------------------------------------------------

_YES, _NO = ("true", "1"), ("none", "false", "0")


def resumes(args: TrainingArguments) -> bool:
    """Return whether training arguments ask for a checkpoint to resume from."""
    return str(args.resume_from_checkpoint).lower() not in _NO


def names_checkpoint(args: TrainingArguments) -> bool:
    """Return whether training arguments name a checkpoint, rather than ask for the last one."""
    return str(args.resume_from_checkpoint).lower() not in (*_YES, *_NO)


def total_steps(trainer: Trainer) -> int:
    """
    Return a trainer's number of optimizer steps: `max_steps`, or the steps of `num_train_epochs`. Each epoch begins a
    new step.
    """
    return steps_and_rows(trainer.args, len(trainer.train_dataset), trainer.args.world_size)[0]


def save_full_weights(trainer: Trainer) -> None:
    """Make FSDP write full weights, as all other trainers do. With sharded weights, `save_model` writes nothing."""
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """
    Result of `train`.

    Args:
        history: the log, one record per logged step.
        checkpoints: step → checkpoint, for all kept steps.
        result: digest of the training and its last step, for the fingerprint of a training that starts from its
            weights.
        parameters: number of trained parameters.
    """

    history: list[dict[str, Any]]
    checkpoints: dict[int, Path]
    result: str
    parameters: int

    @property
    def last(self) -> Path:
        """Last checkpoint."""
        return self.checkpoints[max(self.checkpoints)]

    def metrics(self) -> dict[str, float]:
        """Return the last record's losses, and the numbers of steps and of trained parameters."""
        last = self.history[-1] if self.history else {}
        losses = {key: value for key, value in last.items() if isinstance(value, float)}
        return {**losses, "steps": max(self.checkpoints), "trained_parameters": self.parameters}


def train(trainer: Any, keep: Collection[int] | None = (), **facts: Any) -> Trained:
    """
    Train, and mark each checkpoint as complete once it is written. If the training was done already, load its weights.

    Args:
        trainer: a trainer with the same model, data and arguments as in the run to resume.
        keep: steps to keep checkpoints of. The last step's checkpoint is always kept. Of all other steps, only the
            latest checkpoint is kept. Training resumes from the last complete checkpoint in `trainer.args.output_dir`,
            if there is one. If a checkpoint of `keep` is missing, it is trained again. None: use the trainer's
            `save_strategy` and `resume_from_checkpoint`, and remove nothing.
        facts: further facts for the training's fingerprint.
    """
    args, steps = trainer.args, total_steps(trainer)  # raises if the rows fill no batch
    parameters = sum(math.prod(shape_of(p)) for p in trainer.model.parameters() if p.requires_grad)
    kept: set[int] = set()
    if keep is not None:
        # Count the steps now: the last step's checkpoint is the result, so it is kept, too.
        refuse_arguments(args)
        args.max_steps = facts["steps"] = steps
        if args.save_steps < 1:  # a share of all steps
            args.save_steps = math.ceil(args.max_steps * args.save_steps)
        kept = {*keep, args.max_steps}
        save_full_weights(trainer)
    if transformers_logging.get_verbosity() >= logging.ERROR:  # as with --quiet; the log is in the result
        trainer.remove_callback(PrinterCallback)
    fingerprint = Fingerprint.of(trainer, **facts)
    trainer.add_callback(MarkComplete(fingerprint) if keep is None else KeepCheckpoints(fingerprint, kept))

    checkpoint = on_main_process(lambda: _checkpoint_to_resume(args, fingerprint, kept))
    if checkpoint is None or not _load_if_done(trainer, checkpoint, kept):
        try:
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        except pickle.UnpicklingError as error:  # torch loads only tensors and plain values
            raise InputError(
                f"{checkpoint}: its optimizer.pt, scheduler.pt or rng_state.pth holds more than tensors, which is not "
                "loaded: it could run code; start anew in another output_dir"
            ) from error

    # Return the log as in the last checkpoint's file. `num_tokens` counts from the last start of the process.
    log = (record for record in trainer.state.log_history if "train_runtime" not in record)
    history = [{name: record[name] for name in sorted(record) if name != "num_tokens"} for record in log]
    found = on_main_process(lambda: numbered_checkpoints(Path(args.output_dir)))
    best = trainer.state.best_global_step if args.load_best_model_at_end else None
    result = hash_value([fingerprint.facts, trainer.state.global_step, best])
    return Trained(history, {step: found[step] for step in sorted(kept)}, result, parameters)


class MarkComplete(TrainerCallback):
    """Marks each checkpoint of a training as complete after all processes have written their part."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        checkpoint = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        on_main_process(lambda: mark_complete(checkpoint, self.fingerprint))


class KeepCheckpoints(MarkComplete):
    """
    Saves at the steps of `keep`, every `save_steps` and at the end.

    Each save comes with a log. The averages of a resumed run thus begin at the same step as in a run without
    interruption.

    Args:
        keep: steps to keep checkpoints of. Of all other steps, only the last checkpoint is kept.
    """

    def __init__(self, fingerprint: Fingerprint, keep: Collection[int]) -> None:
        super().__init__(fingerprint)
        self.keep = set(keep)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step
        if step in self.keep or step % int(args.save_steps) == 0 or step >= state.max_steps:
            control.should_log = control.should_save = True
            # Remove a killed run's part of this checkpoint first, so that the two do not mix.
            on_main_process(lambda: remove(Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_save(args, state, control, **kwargs)
        on_main_process(lambda: self._remove_older(Path(str(args.output_dir)), state.global_step))

    def _remove_older(self, folder: Path, last: int) -> None:
        for step, older in numbered_checkpoints(folder).items():
            if step < last and (older / MARKER).is_file():
                if step in self.keep:
                    without_optimizer(older)
                else:
                    shutil.rmtree(older)


# --- resuming --------------------------------------------------------------------------------------------------------


def _checkpoint_to_resume(args: TrainingArguments, fingerprint: Fingerprint, kept: set[int]) -> Path | None:
    """
    Return the checkpoint to continue from, or the finished training's last checkpoint. None: start from the beginning.
    """
    folder = Path(str(args.output_dir))
    if kept:
        return _last_before_a_gap(folder, fingerprint, kept)
    if not resumes(args):
        return None
    if names_checkpoint(args):
        checkpoint = Path(str(args.resume_from_checkpoint))
        if not is_complete(checkpoint):
            raise InputError(
                f"resume_from_checkpoint={str(checkpoint)!r}: is not a complete checkpoint; name another, or use true"
            )
    else:
        last = last_checkpoint(folder)
        if last is None:
            logger.info("%s: no complete checkpoint; training from the beginning", folder)
            return None
        checkpoint = last
    _check_same(checkpoint, fingerprint)
    logger.info("resuming from %s", checkpoint)
    return checkpoint


def _last_before_a_gap(folder: Path, fingerprint: Fingerprint, kept: set[int]) -> Path | None:
    """
    Return the last complete checkpoint. If a checkpoint in `kept` is missing, return the last resumable one before it.
    """
    complete = {step: path for step, path in numbered_checkpoints(folder).items() if is_complete(path)}
    for path in complete.values():
        _check_same(path, fingerprint)
    missing = kept - complete.keys()
    if not missing:
        return complete[max(complete)]
    return next((complete[s] for s in sorted(complete)[::-1] if s < min(missing) and has_optimizer(complete[s])), None)


def _check_same(checkpoint: Path, fingerprint: Fingerprint) -> None:
    """Check that a complete checkpoint belongs to this training."""
    difference = fingerprint_of(checkpoint).difference(fingerprint)
    if difference is not None:
        raise InputError(
            f"{str(checkpoint)!r}: belongs to another training, with {difference}; set that, or choose another "
            "output_dir"
        )


def _restore_early_stopping(trainer: Any, state: TrainerState) -> EarlyStoppingCallback | None:
    """
    Restore the counter of the trainer's early-stopping callback from a checkpoint, but not its patience. Return the
    callback.
    """
    saved = state.stateful_callbacks.get(EarlyStoppingCallback.__name__)
    for callback in trainer.callback_handler.callbacks:
        if saved is not None and isinstance(callback, EarlyStoppingCallback):
            callback.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]
            return callback
    return None


def _load_if_done(trainer: Any, checkpoint: Path, kept: set[int]) -> bool:
    """
    Load a checkpoint if it has all steps of the training, and return whether it has. `trainer.train` would add a step.
    """
    args, state = trainer.args, TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    if args.auto_find_batch_size and state.train_batch_size is not None:
        trainer._train_batch_size = state.train_batch_size  # as the trainer does
    steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    waiting = _restore_early_stopping(trainer, state)
    stopped = waiting is not None and waiting.early_stopping_patience_counter >= waiting.early_stopping_patience
    if state.global_step < steps and not stopped:
        if not has_optimizer(checkpoint):
            raise InputError(
                f"resume_from_checkpoint={args.resume_from_checkpoint!r}: {checkpoint} has no optimizer state "
                "(save_only_model saves none), so training cannot resume from it; start anew in another output_dir"
            )
        return False
    if steps < state.global_step or (sharded and not kept):
        name, value = ("max_steps", steps) if args.max_steps > 0 else ("num_train_epochs", args.num_train_epochs)
        if waiting is not None and state.global_step < steps:
            name, value = "early_stopping_patience", waiting.early_stopping_patience
        raise InputError(
            f"{name}={value}: {checkpoint} has {state.global_step} steps already; raise {name}, or start anew"
        )
    trainer.state = state
    if not sharded:  # with shards, only the files are used
        trainer._load_from_checkpoint(str(checkpoint))
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            best = checkpoint.parent / Path(state.best_model_checkpoint).name  # the run's folder may have moved since
            if not is_complete(best):
                raise InputError(
                    f"load_best_model_at_end=True: {best} has the best weights, and is not complete; bring it back, or "
                    "start anew in another output_dir"
                )
            state.best_model_checkpoint = str(best)
            trainer._load_best_model()
    return True
