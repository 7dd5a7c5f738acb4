"""
Which checkpoints of a training were written to the end, and are still as they were.

Whether the checkpoints in a folder are those of the training that wants to go on from them.

Trainers that save no weights which have diverged.

Resumes the training of native MoEs from a checkpoint.

Training that may be killed at any moment and, run again, goes on and ends with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from peft import PeftModel, set_peft_model_state_dict
from peft.utils import load_peft_weights
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import TrainingArguments

from ..models.introspection import native_routers
from ..native.router_files import router_tensors
from ..utils.distributed import shape_of
from ..utils.io import read_object
from ..utils.validation import one_line
from .estimate import steps_and_rows
from .preflight import refuse_arguments, save_whole
from .progress import show_progress
from .trainable import base_values

# --- whole -----------------------------------------------------------------------------------------------------------

WHOLE = "whole"  # a file that says so, with the lengths of the files beside it, and hashes of all but large ones
_LARGE = 2**30  # bytes; a shard of a whole model is not hashed, as all processes would wait for that at each saving


def mark_whole(checkpoint: Path) -> None:
    """Say that a checkpoint is whole as it is now."""
    _note(checkpoint, {name: [length, _hash(checkpoint / name)] for name, length in _lengths(checkpoint)})


def remove_from(checkpoint: Path, name: str) -> None:
    """Remove a file of a checkpoint, which stays whole."""
    _note(checkpoint, {other: noted for other, noted in _noted(checkpoint).items() if other != name})
    (checkpoint / name).unlink()


def _note(checkpoint: Path, files: dict[str, Any]) -> None:
    (checkpoint / f"{WHOLE}.partial").write_text(json.dumps(files))
    (checkpoint / f"{WHOLE}.partial").replace(checkpoint / WHOLE)


def _lengths(checkpoint: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and not path.name.startswith(WHOLE):
            yield str(path.relative_to(checkpoint)), path.stat().st_size


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(path: Path) -> str | None:
    return None if path.stat().st_size > _LARGE else hash_file(path)


def _noted(checkpoint: Path) -> dict[str, Any]:
    """What the file says, if it says anything."""
    try:
        found = json.loads((checkpoint / WHOLE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: noted if isinstance(noted, list) else [noted, None] for name, noted in found.items()}  # lengths once


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """A trainer's checkpoints by step, whole or not; none of the folders that others made beside them."""
    named = ((re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name), path) for path in folder.glob("*"))
    return dict(sorted((int(name[1]), path) for name, path in named if name and path.is_dir()))


def whole_checkpoints(folder: Path, thoroughly: bool = False) -> dict[int, Path]:
    """
    By step. A file that is missing or cut off makes a checkpoint a broken one.

    Args:
        thoroughly: so does a file with other bytes.
    """
    return {step: path for step, path in numbered_checkpoints(folder).items() if _is_whole(path, thoroughly)}


def _is_whole(checkpoint: Path, thoroughly: bool) -> bool:
    files, lengths = _noted(checkpoint), dict(_lengths(checkpoint))
    as_long = bool(files) and all(lengths.get(name) == noted[0] for name, noted in files.items())
    hashes = {name: noted[1] for name, noted in files.items() if noted[1] is not None}
    return as_long and not (thoroughly and any(_hash(checkpoint / name) != known for name, known in hashes.items()))


# --- continuing ------------------------------------------------------------------------------------------------------

NOTE = "training.json"
# Arguments that decide what is trained, beside those that begin with `router_`.
_DECISIVE = {
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "per_device_train_batch_size",
    "gradient_accumulation_steps", "seed", "data_seed", "label_smoothing_factor", "neftune_noise_alpha", "max_length",
    "packing", "completion_only_loss", "assistant_only_loss", "training_stage", "expert_map", "beta", "loss_type",
    "bf16", "fp16", "dataloader_drop_last", "train_sampling_strategy", "average_tokens_across_devices",
    "optim_target_modules", "truncation_mode", "disable_dropout", "label_smoothing", "loss_weights", "ld_alpha",
    "f_divergence_type", "f_alpha_divergence_coef", "use_weighting", "discopop_tau", "desirable_weight",
    "undesirable_weight", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps",
}  # fmt: skip
_SAMPLE = 200  # rows of the data that are looked at


def claim(trainer: Any, folder: Path | None, **more: Any) -> dict[str, Any]:
    """
    Have a trainer note in its checkpoints what is trained. If `folder` has a note, check that it says the same.

    Args:
        folder: the checkpoint that the training goes on from, or a folder in which all are of one training; None: it
            begins anew.
        more: to be noted, too.

    Returns:
        what is noted.

    Raises:
        ValueError: they are of another training.
    """
    facts = {**_facts(trainer), **more}
    noted = read_object(folder / NOTE) if folder is not None and (folder / NOTE).is_file() else None
    unknown = {f.name for f in fields(trainer.args)} - (noted or {}).keys()  # arguments that an older note has not
    for name in {**(noted or {}), **facts}:
        if noted is not None and name not in unknown and noted.get(name) != facts.get(name):
            raise ValueError(
                f"{str(folder)!r}: is of another training, with {name} "
                f"{one_line(str(noted.get(name)), 40)} and not {one_line(str(facts.get(name)), 40)}; choose another "
                "output_dir, or remove it"
            )
    trainer.add_callback(_Note(facts))
    return facts


class _Note(TrainerCallback):
    """Writes the note into each checkpoint: an output folder may have those of several trainings."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.should_save:
            write_note(Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", self.facts)


def write_note(folder: Path, facts: dict[str, Any]) -> None:
    """Note in a folder what is trained there, as `claim` returned it."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{NOTE}.partial"
    partial.write_text(json.dumps(facts, indent=2))
    partial.replace(folder / NOTE)


def _facts(trainer: Any) -> dict[str, Any]:
    known = {f.name for f in fields(trainer.args)}
    names = [name for name in sorted(known) if name in _DECISIVE or name.startswith("router_")]
    data = trainer.train_dataset
    sample = range(0, len(data), -(-len(data) // _SAMPLE))
    trained = sorted((name, list(shape_of(p))) for name, p in trainer.model.named_parameters() if p.requires_grad)
    facts = {
        "trainer": type(trainer).__name__,
        "rows": len(data),
        **{name: getattr(trainer.args, name) for name in names},
        **{name: getattr(trainer, name) for name in ("alpha", "objective") if hasattr(trainer, name)},
        "data": _digest([data[i] for i in sample]),
        "trained parameters": _digest(trained),
        "base": _digest(base_values(trainer.model)),
    }
    return json.loads(json.dumps(facts, default=str))  # as it will be read again


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


# --- saving ----------------------------------------------------------------------------------------------------------

logger = logging.getLogger("moe_peft")

_HALF = (torch.bfloat16, torch.float16)


class FiniteWeightsMixin:
    """
    Mixin for a Trainer: it saves no weights that are not finite. (ZeRO-3's, which are divided, it does not look at.)
    It warns where steps would be lost in rounding.
    """

    args: Any
    model: Any
    state: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    is_world_process_zero: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        keeps_float32 = self.is_fsdp_enabled or self.is_deepspeed_enabled  # beside the weights
        trained = [p for p in self.model.parameters() if p.requires_grad and p.dtype in _HALF]
        quantized = getattr(self.model, "is_quantized", False)  # TRL makes its adapters bfloat16
        if trained and not keeps_float32 and not quantized and self.is_world_process_zero():
            logger.warning(
                "learning_rate=%g: %s parameters are trained in %s, where a weight changes by no less than a %s of "
                "itself: smaller steps are lost; load the model in float32 (bf16=True still computes in bfloat16)",
                self.args.learning_rate,
                f"{sum(p.numel() for p in trained):,}",
                str(trained[0].dtype).removeprefix("torch."),
                "256th" if trained[0].dtype == torch.bfloat16 else "2048th",
            )
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Raises:
            ValueError: a trained weight is not finite; nothing is written then.
        """
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        bad = [name for name, parameter in trained if not _largest(parameter).isfinite()][:1]
        if self.is_fsdp_enabled:  # each process has parts of its own; all stop if one of them is not finite
            bad = gather_object(bad)
        for name in bad[:1]:
            raise ValueError(
                f"learning_rate={self.args.learning_rate}: after step {self.state.global_step}, {name} is not finite, "
                f"and {output_dir or self.args.output_dir} was not saved; use a lower rate, or max_grad_norm"
            )
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]


@torch.no_grad()
def _largest(parameter: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of what this process holds of a parameter, computed without a tensor of its size."""
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return torch.linalg.vector_norm(own, torch.inf) if own.numel() else torch.zeros(())


# --- resuming --------------------------------------------------------------------------------------------------------


class NativeResumeMixin:
    """
    Lets a trainer resume native MoEs. transformers' own method (5.23) loads a checkpoint's tensors by their names on
    disk. Experts have other names in memory, so it does not load them.
    """

    model: Any

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._is_plain_native():
            _load_native(self.model if model is None else model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        if self._is_plain_native():
            _load_native(self.model, self.state.best_model_checkpoint)  # type: ignore[attr-defined]
        else:
            super()._load_best_model()  # type: ignore[misc]

    def _is_plain_native(self) -> bool:
        """Whether whole native MoEs are saved, by their own `save_pretrained`."""
        native = bool(native_routers(self.model)) and not isinstance(self.model, PeftModel)
        return native and not self.is_fsdp_enabled  # type: ignore[attr-defined]


def _load_native(model: Any, folder: str) -> None:
    """Load a checkpoint's weights into a native MoE, including those of routers in the place of its gates."""
    state = type(model).from_pretrained(folder, dtype="auto").state_dict()
    model.load_state_dict({**state, **router_tensors(model, folder)})


# --- checkpoints -----------------------------------------------------------------------------------------------------

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
