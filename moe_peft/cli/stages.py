"""The stages of one training: the arguments of each, and checks of all before the first begins."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainingArguments

from ..messages import one_line, one_of, unknown_key
from ..routing.expert_map import label_text
from ..training.coefficients import loss_coefficients
from ..training.labels import check_labels
from ..training.limits import check_settings, check_value
from ..training.router_losses import Stage
from ..training.sft import experts_of_labels
from ..training.whole import numbered_checkpoints
from .options import Options
from .resuming import NO_PATH

logger = logging.getLogger("moe_peft")
_OF_ALL_STAGES = {
    "training_stage": "the stage's name says this",
    "output_dir": "it is the folder of the stage's name in output_dir",
}


def _has_labels_alone(training: Any) -> bool:
    """
    Whether labels supervise routers and nothing says when. Together with the language loss they did harm in
    "Label-Supervised Routing in Upcycled Mixture of Experts", so two stages are the default.
    """
    if getattr(training, "expert_map", None) is None or training.router_label_loss_coef == 0:
        return False
    whenever = training.training_stage == "joint" and training.router_schedule == "constant"
    return whenever and not training.router_label_mask


def stages(options: Options) -> Iterator[Any]:
    """
    The arguments of each stage. With several, each has a folder of its own for its checkpoints.

    Raises:
        ValueError: an unknown stage, or a setting of one that is unknown or wrong.
    """
    given, training = options.run.stages, options.training
    for f in dataclasses.fields(training):
        if f.init:
            check_value(f.name, getattr(training, f.name))
    if given is None and _has_labels_alone(training):
        given = ["routers", "rest"]
        goes_on = str(training.resume_from_checkpoint).lower() in ("true", "1")
        if goes_on and numbered_checkpoints(Path(str(training.output_dir))):
            raise ValueError(
                f"resume_from_checkpoint=True: {training.output_dir} has checkpoints of one training with all losses; "
                f"move them to {training.output_dir}/joint and set stages=[joint], or choose another output_dir"
            )
        logger.info("expert_map: stages routers and rest, one after the other; for one training of all: stages=joint")
    if given is None:
        yield training
        return
    if not given:
        raise ValueError(f"stages={given!r}: name at least one of {', '.join(Stage.__args__)}")  # type: ignore[attr-defined]
    if training.training_stage != "joint":
        raise ValueError(f"training_stage={training.training_stage!r}: stages says which; leave it out")
    if len(set(given)) < len(given):
        raise ValueError(f"stages={given!r}: name each stage once")
    checkpoint = training.resume_from_checkpoint
    if len(given) > 1 and checkpoint is not None and str(checkpoint).lower() not in NO_PATH:
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r}: is of one of the stages {', '.join(given)}; use true, or "
            "stages.<name>.resume_from_checkpoint"
        )
    names = {f.name for f in dataclasses.fields(training) if f.init}
    for name, own in (given if isinstance(given, dict) else dict.fromkeys(given)).items():
        if name not in Stage.__args__:  # type: ignore[attr-defined]
            raise ValueError(one_of("stages", name, Stage.__args__))  # type: ignore[attr-defined]
        own = {} if own is None else own
        if not isinstance(own, dict):
            raise ValueError(f"stages.{name}={own!r}: must be a mapping of settings")
        for key in own:
            if key in _OF_ALL_STAGES:
                raise ValueError(f"stages.{name}.{key}: {_OF_ALL_STAGES[key]}; leave it out")
            if key not in names:
                raise ValueError(unknown_key(f"stages.{name}.{key}", names))
        own = {**_resolved(own), **own}
        check_settings(type(training), own, f"stages.{name}.")
        settings = {key: getattr(training, key) for key in names}
        folder = str(Path(str(training.output_dir)) / name)
        try:
            yield type(training)(**{**settings, "output_dir": folder, **own, "training_stage": name})
        except (TypeError, ValueError) as error:
            raise ValueError(f"stages.{name}: {one_line(error)}") from error


def _resolved(own: dict[str, Any]) -> dict[str, Any]:
    """What the arguments of all stages have set themselves, and a stage changes under another name."""
    found: dict[str, Any] = {"bf16": False} if own.get("fp16") else {}
    aliases = {name: name.replace("gradient_", "activation_") for name in own if name.startswith("gradient_checkpoint")}
    known = {f.name for f in dataclasses.fields(TrainingArguments)}
    return found | {new: own[old] for old, new in aliases.items() if new in known}


def section(args: Any, found: Sequence[Any]) -> str:
    """Before a setting's name in a message: the stage that has it, if there are several."""
    return f"stages.{args.training_stage}." if len(found) > 1 else ""


def check_stages(found: Sequence[Any], model: Any, data: Dataset, held_out: Dataset | None) -> None:
    """
    Raises:
        ValueError: what the trainer of a stage would refuse, after the earlier ones had trained: labels without
            experts, experts that the model lacks, or routers that the stage cannot train.
    """
    for args in found:
        try:
            loss_coefficients(model, args, type(args).__name__)
            if getattr(args, "expert_map", None) is None:
                continue
            experts_of_labels(model, args)
            for name, rows in {"train": data, "eval": held_out}.items():
                if rows is not None:
                    check_labels(rows, args.label_column, [label_text(label) for label in args.expert_map], name)
        except ValueError as error:
            raise ValueError(f"{section(args, found)[:-1]}: {error}") from error
