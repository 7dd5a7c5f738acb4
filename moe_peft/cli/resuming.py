"""Where a training that is told to resume goes on: which checkpoint, whether it fits, and whether it is the last."""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path
from typing import Any

from peft import PeftConfig
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..adapter.config import MoELoraConfig
from ..checks import is_whole, shown
from ..reading import opened, read_object, reading
from ..training.whole import numbered_checkpoints

logger = logging.getLogger("moe_peft")
_NO_CHECKPOINT = ("none", "false", "0")
NO_PATH = ("true", "1", *_NO_CHECKPOINT)


def found_checkpoint(args: Any) -> Path | None:
    """
    Where a stage goes on: `resume_from_checkpoint` is a checkpoint's folder, or true for the last one that is whole.

    Raises:
        ValueError: it is not whole, or none is.
    """
    given, refused = str(args.resume_from_checkpoint), None
    if given.lower() in _NO_CHECKPOINT:
        return None
    if given.lower() not in NO_PATH:
        _check_checkpoint(Path(given))
        return Path(given)
    for folder in reversed(numbered_checkpoints(Path(args.output_dir)).values()):
        try:
            _check_checkpoint(folder)
        except ValueError as error:
            refused = refused or error
            continue
        if refused is not None:
            logger.warning("%s; going on from %s", refused, folder.name)
        return folder
    if refused is not None:
        raise refused
    return None


def is_done(trainer: Any, checkpoint: Path) -> bool:
    """
    Whether a checkpoint has all steps of the training; then it is loaded. The trainer would take one more.

    Raises:
        ValueError: it has more, or cannot be loaded without training.
    """
    args, state = trainer.args, TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    if args.auto_find_batch_size and state.train_batch_size is not None:
        trainer._train_batch_size = state.train_batch_size  # as the trainer does
    steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
    if state.global_step < steps:
        return False
    divided = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if steps < state.global_step or divided:
        name, value = ("max_steps", steps) if args.max_steps > 0 else ("num_train_epochs", args.num_train_epochs)
        raise ValueError(
            f"{name}={value}: resume_from_checkpoint: {checkpoint} has {state.global_step} steps already; raise "
            f"{name}, or start anew"
        )
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    if args.load_best_model_at_end and state.best_model_checkpoint is not None:
        trainer._load_best_model()
    return True


def check_same_adapter(checkpoint: Path, config: PeftConfig) -> None:
    """
    Raises:
        ValueError: a setting of the adapter is not that of the checkpoint, of which only weights are read.
    """
    saved = read_object(checkpoint / "adapter_config.json")
    given = json.loads(json.dumps(config.to_dict()))  # as it would be saved
    own = MoELoraConfig.__dataclass_fields__.keys() - PeftConfig.__dataclass_fields__.keys()
    for name in sorted(own & saved.keys()):
        if _in_order(given[name]) != _in_order(saved[name]):
            raise ValueError(
                f"{name}={shown(given[name])}: resume_from_checkpoint: {checkpoint} was trained with "
                f"{shown(saved[name])}; set that, or start anew"
            )


def _in_order(value: Any) -> Any:
    """A setting; a list of one names modules or layers, in any order."""
    return sorted(value, key=str) if isinstance(value, list) else value


def _check_checkpoint(folder: Path) -> None:
    """
    Raises:
        ValueError: there is none, or a file of it is cut off.
    """
    what = f"resume_from_checkpoint: {folder}"
    if not (folder / "trainer_state.json").is_file():
        raise ValueError(f"{what}: has no trainer_state.json, so it is no whole checkpoint; remove it, or give another")
    with reading(f"{what}: trainer_state.json", "remove the folder, to go on from the checkpoint before"):
        state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
        if not is_whole(state.global_step):
            raise ValueError(f"global_step={state.global_step!r}: must be a whole number")
    for path in sorted(folder.glob("*.safetensors")):
        opened(path, what)
    for path in sorted(folder.glob("*.pt*")):  # rng_state.pth, too
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{what}: {path.name} is cut off; remove the folder, to go on from the checkpoint before")
