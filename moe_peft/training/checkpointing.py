"""
Training that may be killed at any moment and, run again, resumes and ends with the same bytes.

A checkpoint is complete when the file `complete.json` in it says so, which has the sizes and hashes of the other files
and the fingerprint of the training. Without it, a checkpoint counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import PeftConfig, PeftModel, set_peft_model_state_dict
from peft.utils import load_peft_weights
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import TrainingArguments

from ..models.introspection import native_routers
from ..native.router_files import router_tensors
from ..utils.distributed import on_main_process, shape_of
from ..utils.io import hash_file, read_json, remove, write_json
from ..utils.messages import InputError, one_line
from .estimate import steps_and_rows
from .preflight import refuse_arguments
from .progress import show_progress
from .trainable import base_values

logger = logging.getLogger("moe_peft")

# --- fingerprint -----------------------------------------------------------------------------------------------------

# Training arguments that do not change what is trained: what is shown, logged, evaluated and saved on the way, and how
# rows are loaded. All others count.
INCIDENTAL = {
    "output_dir", "resume_from_checkpoint", "report_to", "run_name", "project", "trackio_space_id",
    "trackio_bucket_id", "trackio_static_space_id", "disable_tqdm", "debug", "log_level", "log_level_replica",
    "log_on_each_node", "logging_strategy", "logging_first_step", "logging_steps",
    "logging_nan_inf_filter", "include_num_input_tokens_seen", "skip_memory_metrics",
    "save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node",
    "enable_jit_checkpoint", "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo",
    "hub_always_push", "hub_revision", "do_train", "do_eval", "do_predict", "eval_strategy", "eval_on_start",
    "eval_steps", "eval_delay", "eval_accumulation_steps", "eval_packing", "per_device_eval_batch_size",
    "bf16_full_eval", "fp16_full_eval",
    "eval_do_concat_batches", "eval_use_gather_object", "batch_eval_metrics", "prediction_loss_only",
    "include_for_metrics", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "dataset_num_proc", "torch_empty_cache_steps", "ddp_timeout", "local_rank",
    "restore_callback_states_from_checkpoint",
}  # fmt: skip
_LENGTH = {"num_train_epochs", "max_steps"}  # may grow when a training resumes
_SAMPLE = 200  # rows of the data that are looked at


@dataclass(frozen=True)
class Fingerprint:
    """
    What identifies a training.

    Args:
        facts: by name, as JSON has them.
    """

    facts: Mapping[str, Any]

    @classmethod
    def of(cls, trainer: Any, **more: Any) -> Fingerprint:
        """
        Of a trainer: its arguments (but for `INCIDENTAL` ones and its length), processes, adapter, data and base.

        Args:
            more: what identifies it, too.
        """
        args, model, data = trainer.args, trainer.model, trainer.train_dataset
        names = {f.name for f in fields(args) if f.init} - INCIDENTAL - _LENGTH
        sample = range(0, len(data), -(-len(data) // _SAMPLE))
        trained = sorted((name, list(shape_of(p))) for name, p in model.named_parameters() if p.requires_grad)
        facts = {
            "trainer": type(trainer).__name__,
            **{name: getattr(args, name) for name in sorted(names)},
            **(_adapter_facts(model.peft_config[model.active_adapter]) if isinstance(model, PeftModel) else {}),
            "processes": args.world_size,
            "rows": len(data),
            "data": _digest([data[i] for i in sample]),
            "trained parameters": _digest(trained),
            "base": _digest(base_values(model)),
            **more,
        }
        return cls(json.loads(json.dumps(facts, default=str)))

    def difference(self, other: Fingerprint) -> str | None:
        """The first fact that differs, with its value here and in the other one; None if all are the same."""
        for name in {**self.facts, **other.facts}:
            here, there = self.facts.get(name), other.facts.get(name)
            if here != there:
                return f"{name} {one_line(here, 40)} and not {one_line(there, 40)}"
        return None


def _adapter_facts(config: PeftConfig) -> dict[str, Any]:
    names = {f.name for f in fields(config)} - {f.name for f in fields(PeftConfig)}
    values = {name: getattr(config, name) for name in sorted(names)}
    return {name: sorted(value, key=str) if isinstance(value, (list, set)) else value for name, value in values.items()}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


# --- complete checkpoints --------------------------------------------------------------------------------------------

MARKER = "complete.json"
_LARGE = 2**30  # bytes; larger files are not hashed, as all processes would wait for that at each save


def mark_complete(checkpoint: Path, fingerprint: Fingerprint, editable: Collection[str] = ()) -> None:
    """
    Say that a checkpoint is complete as it is now, and of which training.

    Args:
        editable: names of files that may change afterwards.
    """
    left_out = {MARKER, *editable}
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name not in left_out)
    files = {str(path.relative_to(checkpoint)): [path.stat().st_size, _hash(path)] for path in paths}
    write_json(checkpoint / MARKER, {"fingerprint": fingerprint.facts, "files": files})


def _hash(path: Path) -> str | None:
    return None if path.stat().st_size > _LARGE else hash_file(path)


def is_complete(checkpoint: Path) -> bool:
    """Whether all files of a checkpoint are there, as they were when it was marked."""
    files = _marker(checkpoint).get("files")
    if not isinstance(files, dict):
        return False
    paths = {checkpoint / name: noted for name, noted in files.items()}
    return all(path.is_file() and [path.stat().st_size, _hash(path)] == noted for path, noted in paths.items())


def _marker(checkpoint: Path) -> dict[str, Any]:
    try:
        return read_json(checkpoint / MARKER)
    except InputError:
        return {}


def fingerprint_of(checkpoint: Path) -> Fingerprint:
    """Of the training that wrote a complete checkpoint."""
    return Fingerprint(_marker(checkpoint)["fingerprint"])


def has_optimizer(checkpoint: Path) -> bool:
    """Whether a checkpoint has an optimizer's state, without which a training that resumes is another one."""
    return any(any(checkpoint.glob(pattern)) for pattern in ("optimizer*", "global_step*"))


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """A trainer's checkpoints by step, complete or not."""
    named = ((re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name), path) for path in folder.glob("*"))
    return dict(sorted((int(name[1]), path) for name, path in named if name and path.is_dir()))


def last_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint in a folder."""
    for checkpoint in reversed(numbered_checkpoints(folder).values()):
        if is_complete(checkpoint):
            return checkpoint
        logger.warning("%s: is not complete; passed over", checkpoint)
    return None


# --- saving ----------------------------------------------------------------------------------------------------------

_HALF = (torch.bfloat16, torch.float16)


class FiniteWeightsMixin:
    """
    Mixin for a Trainer: it saves no weights that are not finite. (ZeRO-3's, which are sharded, it does not look at.)
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
            raise InputError(
                f"learning_rate={self.args.learning_rate}: after step {self.state.global_step}, {name} is not finite, "
                f"and {output_dir or self.args.output_dir} was not saved; use a lower learning rate, or max_grad_norm"
            )
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]


@torch.no_grad()
def _largest(parameter: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of what this process holds of a parameter, computed without a tensor of its size."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return torch.linalg.vector_norm(local, torch.inf) if local.numel() else torch.zeros(())


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
        """Whether complete native MoEs are saved, by their own `save_pretrained`."""
        native = bool(native_routers(self.model)) and not isinstance(self.model, PeftModel)
        return native and not self.is_fsdp_enabled  # type: ignore[attr-defined]


def _load_native(model: Any, folder: str) -> None:
    """Load a checkpoint's weights into a native MoE, including those of routers in the place of its gates."""
    state = type(model).from_pretrained(folder, dtype="auto").state_dict()
    model.load_state_dict({**state, **router_tensors(model, folder)})


# --- training --------------------------------------------------------------------------------------------------------

_NOT_MODEL = (
    MARKER, "optimizer*", "scheduler*", "scaler*", "rng_state*", "trainer_state.json", "training_args.bin",
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
        last = self.history[-1] if self.history else {}
        losses = {key: value for key, value in last.items() if isinstance(value, float)}
        return {**losses, "steps": max(self.checkpoints)}


class MarkComplete(TrainerCallback):
    """Marks each checkpoint of a training when all processes have written their part of it."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        checkpoint = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        on_main_process(lambda: mark_complete(checkpoint, self.fingerprint))


class _Checkpoints(MarkComplete):
    """
    Saves at given steps, every `save_steps` and at the end. Each save comes with a log, so that the averages of a run
    that resumes from it begin where they began in a run that was not stopped.

    Args:
        keep: steps whose checkpoints stay. Of others, only the last one does.
    """

    def __init__(self, fingerprint: Fingerprint, keep: Collection[int]) -> None:
        super().__init__(fingerprint)
        self.keep = set(keep)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step
        if step in self.keep or step % int(args.save_steps) == 0 or step >= state.max_steps:
            control.should_log = control.should_save = True
            # What a killed run left of this checkpoint must not mix with it.
            on_main_process(lambda: remove(Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_save(args, state, control, **kwargs)
        on_main_process(lambda: self._remove_older(Path(str(args.output_dir)), state.global_step))

    def _remove_older(self, folder: Path, last: int) -> None:
        for step, older in numbered_checkpoints(folder).items():
            if step >= last or not (older / MARKER).is_file():
                continue
            if step not in self.keep:
                shutil.rmtree(older)
            elif "optimizer.pt" in (marker := _marker(older)).get("files", {}):
                del marker["files"]["optimizer.pt"]  # most of it, and only needed to resume from there
                write_json(older / MARKER, marker)
                (older / "optimizer.pt").unlink()


def total_steps(trainer: Trainer) -> int:
    """Optimizer steps of a trainer: `max_steps`, or those of `num_train_epochs`, each of which begins a step."""
    return steps_and_rows(trainer.args, len(trainer.train_dataset), trainer.args.world_size)[0]


def save_full_weights(trainer: Trainer) -> None:
    """Have FSDP write full weights, as any other trainer does; of sharded ones `save_model` writes nothing."""
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")


def train(trainer: Trainer, keep: Collection[int] = (), **facts: Any) -> Trained:
    """
    Train for `total_steps(trainer)`, from the last complete checkpoint in `trainer.args.output_dir` if there is one.

    Args:
        trainer: recreated from the same model, data and arguments as the run that was stopped.
        keep: steps whose checkpoints stay. The last one always does.
        facts: what identifies the training, beside its fingerprint.

    Raises:
        ValueError: the folder has checkpoints of another training, or an argument is not for a training like this.
    """
    refuse_arguments(trainer.args)
    steps = total_steps(trainer)
    trainer.args.max_steps = steps
    if trainer.args.save_steps < 1:  # a share of all steps
        trainer.args.save_steps = math.ceil(steps * trainer.args.save_steps)
    save_full_weights(trainer)
    folder = Path(trainer.args.output_dir)
    fingerprint = Fingerprint.of(trainer, steps=steps, **facts)
    complete = on_main_process(lambda: _complete_checkpoints(folder, fingerprint))
    # A kept checkpoint that is missing, or damaged, is trained again; it has lost its optimizer's state.
    latest = max(complete, default=0)
    lost = min((step for step in (*keep, steps) if step < latest and step not in complete), default=steps)
    if latest < steps or lost < steps:
        trainer.add_callback(_Checkpoints(fingerprint, keep))
        show_progress(trainer)
        before = [path for step, path in complete.items() if step < lost]
        resumable = list(filter(has_optimizer, before))
        trainer.train(resume_from_checkpoint=str(resumable[-1]) if resumable else None)
        complete = on_main_process(
            lambda: {s: p for s, p in numbered_checkpoints(folder).items() if s in {*keep, steps}}
        )
    elif isinstance(trainer.model, PeftModel):
        name = trainer.model.active_adapter
        weights = load_peft_weights(str(_adapter(complete[latest], name)), device="cpu")
        set_peft_model_state_dict(trainer.model, weights, adapter_name=name)
    state = TrainerState.load_from_json(str(complete[steps] / TRAINER_STATE_NAME))
    # `num_tokens` counts from the last start of the process.
    history = [{k: v for k, v in record.items() if k != "num_tokens"} for record in state.log_history]
    return Trained(history, complete)


def _complete_checkpoints(folder: Path, fingerprint: Fingerprint) -> dict[int, Path]:
    """The complete checkpoints in a folder, by step."""
    complete = {step: path for step, path in numbered_checkpoints(folder).items() if is_complete(path)}
    for path in complete.values():
        check_same(path, fingerprint)
    return complete


def check_same(checkpoint: Path, fingerprint: Fingerprint) -> None:
    """
    Raises:
        ValueError: a complete checkpoint is of another training.
    """
    difference = fingerprint_of(checkpoint).difference(fingerprint)
    if difference is not None:
        raise InputError(
            f"{str(checkpoint)!r}: is of another training, with {difference}; set that, or choose another output_dir"
        )


# --- resuming --------------------------------------------------------------------------------------------------------

_YES, _NO = ("true", "1"), ("none", "false", "0")


def resumes(args: TrainingArguments) -> bool:
    """Whether training arguments ask for a checkpoint to resume from."""
    return str(args.resume_from_checkpoint).lower() not in _NO


def names_checkpoint(args: TrainingArguments) -> bool:
    """Whether training arguments name one, and not just the last."""
    return str(args.resume_from_checkpoint).lower() not in (*_YES, *_NO)


def train_or_resume(trainer: Trainer, **facts: Any) -> None:
    """
    Train as the trainer's arguments say. If `resume_from_checkpoint` is true, from the last complete checkpoint in
    `output_dir`, or from the beginning if there is none; if it is a checkpoint's folder, from that.

    Args:
        facts: what identifies the training beside its trainer.

    Raises:
        ValueError: the checkpoint is not complete, or of another training, has more steps, or no optimizer state.
    """
    fingerprint = Fingerprint.of(trainer, **facts)
    trainer.add_callback(MarkComplete(fingerprint))
    checkpoint = on_main_process(lambda: _checkpoint_to_resume(trainer.args, fingerprint))
    if checkpoint is None or not _load_if_done(trainer, checkpoint):
        if checkpoint is not None and not has_optimizer(checkpoint):
            raise InputError(
                f"resume_from_checkpoint={trainer.args.resume_from_checkpoint!r}: {checkpoint} has no optimizer state "
                "(save_only_model saves none), so training cannot resume from it; start anew in another output_dir"
            )
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))


def _checkpoint_to_resume(args: TrainingArguments, fingerprint: Fingerprint) -> Path | None:
    if not resumes(args):
        return None
    if names_checkpoint(args):
        checkpoint = Path(str(args.resume_from_checkpoint))
        if not is_complete(checkpoint):
            raise InputError(
                f"resume_from_checkpoint={str(checkpoint)!r}: is not a complete checkpoint; name another, or use true"
            )
    else:
        last = last_checkpoint(Path(str(args.output_dir)))
        if last is None:
            logger.info("%s: no complete checkpoint; training from the beginning", args.output_dir)
            return None
        checkpoint = last
    check_same(checkpoint, fingerprint)
    logger.info("resuming from %s", checkpoint)
    return checkpoint


def _load_if_done(trainer: Any, checkpoint: Path) -> bool:
    """If a checkpoint has all steps of the training, load it, as the trainer would take one more."""
    args, state = trainer.args, TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    if args.auto_find_batch_size and state.train_batch_size is not None:
        trainer._train_batch_size = state.train_batch_size  # as the trainer does
    steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
    if state.global_step < steps:
        return False
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if steps < state.global_step or sharded:
        name, value = ("max_steps", steps) if args.max_steps > 0 else ("num_train_epochs", args.num_train_epochs)
        raise InputError(
            f"{name}={value}: {checkpoint} has {state.global_step} steps already; raise {name}, or start anew"
        )
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    if args.load_best_model_at_end and state.best_model_checkpoint is not None:
        trainer._load_best_model()
    return True


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
