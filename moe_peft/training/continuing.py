"""Whether the checkpoints in a folder are those of the training that wants to go on from them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import TrainingArguments

from ..messages import one_line
from ..reading import read_object
from ..sharding import shape_of
from .freezing import base_values

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
        "data": _hash([data[i] for i in sample]),
        "trained parameters": _hash(trained),
        "base": _hash(base_values(trainer.model)),
    }
    return json.loads(json.dumps(facts, default=str))  # as it will be read again


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
