"""
Identity and completeness of checkpoints.

A checkpoint is complete if it has a file `complete.json`, which holds the sizes and hashes of the other files and the
fingerprint of the training. Checkpoints without it are ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..utils.distributed import shape_of
from ..utils.io import hash_file, link_weights, read_json, write_json
from ..utils.loading import ADAPTER_CONFIG, EMPTY_IN_OTHERS
from ..utils.messages import InputError, one_line

logger = logging.getLogger("moe_peft")

# --- fingerprint -----------------------------------------------------------------------------------------------------

# Training arguments that do not change the trained weights: display, logging, evaluation, saving and the loading of
# rows. All other arguments are part of the fingerprint.
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
    "include_for_metrics",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "dataset_num_proc", "torch_empty_cache_steps", "ddp_timeout", "local_rank",
    "restore_callback_states_from_checkpoint",
}  # fmt: skip
_LENGTH = {"num_train_epochs", "max_steps"}  # may grow when a training resumes


@dataclass(frozen=True)
class Fingerprint:
    """
    Identifies a training.

    Args:
        facts: name → value, as JSON.
    """

    facts: Mapping[str, Any]

    @classmethod
    def of(cls, trainer: Any, **more: Any) -> Fingerprint:
        """
        Return the fingerprint of a trainer: its arguments (without `INCIDENTAL` ones and its length), processes,
        adapter, data and base model.

        Args:
            more: further facts by name.
        """
        args, model, data = trainer.args, trainer.model, trainer.train_dataset
        names = {f.name for f in fields(args) if f.init} - INCIDENTAL - _LENGTH
        trained = sorted((name, list(shape_of(p))) for name, p in model.named_parameters() if p.requires_grad)
        facts = {
            "trainer": type(trainer).__name__,
            **{name: getattr(args, name) for name in sorted(names)},
            **(_adapter_facts(model.peft_config[model.active_adapters[0]]) if isinstance(model, PeftModel) else {}),
            "processes": args.world_size,
            "rows": len(data),
            "data": _digest_rows(data),
            "trained parameters": hash_value(trained),
            "base": hash_value(base_values(model)),
            **more,
        }
        return cls(json.loads(json.dumps(facts, default=str)))

    def difference(self, other: Fingerprint) -> str | None:
        """Return the first fact that differs from `other`, with both values. None if all are the same."""
        for name in {**self.facts, **other.facts}:
            here, there = self.facts.get(name), other.facts.get(name)
            if here != there:
                return f"{name} {one_line(here, 40)} and not {one_line(there, 40)}"
        return None


def _adapter_facts(config: PeftConfig) -> dict[str, Any]:
    names = {f.name for f in fields(config)} - {f.name for f in fields(PeftConfig)}
    values = {name: getattr(config, name) for name in sorted(names)}
    return {name: sorted(value, key=str) if isinstance(value, (list, set)) else value for name, value in values.items()}


def base_values(model: nn.Module) -> list[float]:
    """
    Return the first four values of each base parameter, as numbers that identify the base model.

    Parameters of adapters are left out: their initial values may differ between runs. The list is empty for a model
    without adapters, and where only the first process reads the weights (`FSDP_CPU_RAM_EFFICIENT_LOADING`).
    """
    if not isinstance(model, PeftModel) or parse_flag_from_env(EMPTY_IN_OTHERS):
        return []
    return [x for p in base_parameters(model) if not p.is_meta for x in first_values(p)]


def base_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return a model's parameters without those of its adapters."""
    prefixes = {module.prefix for module in model.modules() if isinstance(module, BaseTuner)}
    of_adapters = (*prefixes, "modules_to_save", "trainable_tokens_")
    parts = ((name.split("."), p) for name, p in model.named_parameters())
    return [p for names, p in parts if not any(n.startswith(of_adapters) for n in names)]


def first_values(parameter: nn.Parameter) -> list[float]:
    """Return a parameter's first four values."""
    return parameter.detach().flatten()[:4].cpu().double().tolist()


def _digest_rows(data: Dataset) -> str:
    hashed = hashlib.sha256()
    for rows in data.with_format("arrow").iter(1000):
        table = rows.replace_schema_metadata().combine_chunks()  # same bytes for any chunks on disk
        hashed.update(str(table.schema).encode())
        for batch in table.to_batches():
            hashed.update(batch.serialize())
    return hashed.hexdigest()[:16]


def hash_value(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


# --- complete checkpoints --------------------------------------------------------------------------------------------

MARKER = "complete.json"
_LARGE = 2**30  # bytes; larger files are not hashed: all processes would wait for it at each save


def mark_complete(checkpoint: Path, fingerprint: Fingerprint, editable: Collection[str] = ()) -> None:
    """
    Mark a checkpoint as complete in its present state, with the fingerprint of its training.

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
    """Return whether all files of a checkpoint exist, unchanged since it was marked."""
    marker = _marker(checkpoint)
    files = marker.get("files")
    if not (isinstance(files, dict) and isinstance(marker.get("fingerprint"), dict)):  # a damaged marker
        return False
    paths = {checkpoint / name: noted for name, noted in files.items()}
    return all(path.is_file() and [path.stat().st_size, _hash(path)] == noted for path, noted in paths.items())


def _marker(checkpoint: Path) -> dict[str, Any]:
    try:
        return read_json(checkpoint / MARKER)
    except InputError:
        return {}


def fingerprint_of(checkpoint: Path) -> Fingerprint:
    """Return the fingerprint of the training that wrote a complete checkpoint."""
    return Fingerprint(_marker(checkpoint)["fingerprint"])


def has_optimizer(checkpoint: Path) -> bool:
    """
    Return whether a checkpoint has the optimizer's state. Without it, a resumed training would be a different training.
    """
    return any(any(checkpoint.glob(pattern)) for pattern in ("optimizer*", "global_step*"))


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """Return a trainer's checkpoints by step, complete or not."""
    named = ((re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name), path) for path in folder.glob("*"))
    return dict(sorted((int(name[1]), path) for name, path in named if name and path.is_dir()))


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint in a folder, or None."""
    for checkpoint in reversed(numbered_checkpoints(folder).values()):
        if is_complete(checkpoint):
            return checkpoint
        logger.warning("%s: is not complete; skipped", checkpoint)
    return None


def without_optimizer(checkpoint: Path) -> None:
    """
    Remove the optimizer's state from a complete checkpoint. It is most of the checkpoint, and only resuming needs it.
    """
    marker = _marker(checkpoint)
    if "optimizer.pt" in marker.get("files", {}):
        del marker["files"]["optimizer.pt"]
        write_json(checkpoint / MARKER, marker)
        (checkpoint / "optimizer.pt").unlink()


# Files that only training needs.
_NOT_MODEL = (
    MARKER, "optimizer*", "scheduler*", "scaler*", "rng_state*", "trainer_state.json", "training_args.bin",
    "pytorch_model_fsdp*", "global_step*", "latest", "zero_to_fp32.py",
)  # fmt: skip


def copy_result(checkpoint: Path, folder: Path, adapter_name: str = "default") -> None:
    """
    Copy a checkpoint's weights, tokenizer and model card to `folder`, without its training state.

    PEFT saves an adapter not named "default" in a subfolder. Its files are copied to `folder` itself.
    """
    named = checkpoint / adapter_name
    sources = [checkpoint, named] if (named / ADAPTER_CONFIG).is_file() else [checkpoint]
    ignored = shutil.ignore_patterns(*_NOT_MODEL, *[source.name for source in sources[1:]])
    for source in sources:
        shutil.copytree(source, folder, ignore=ignored, copy_function=link_weights, dirs_exist_ok=True)
