"""`moe-peft upcycle`; its options are the fields of `UpcycleConfig`."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from pydantic import Field, create_model

from ..native.upcycle_config import UpcycleConfig
from ..utils.messages import InputError
from ..utils.validation import Count, Settings, Text, TextList
from .settings import SettingsParser, check_files, check_models

# Options in the short help.
USUAL = (
    "num_experts", "top_k", "init", "drop_rate", "granularity", "num_shared_experts", "router_init", "calibration",
    "model", "output", "family", "dtype", "seed", "config",
)  # fmt: skip
EXAMPLE = r"""
example:
  moe-peft upcycle --model Qwen/Qwen3-0.6B-Base --output moe \
    --num-experts 4 --init copy
"""

_CONFIG = [field.name for field in dataclasses.fields(UpcycleConfig)]
_GROUPS = {
    "Model": ("model", "output", "family", "dtype", "max_shard_size"),
    "Router": ("top_k", "router_init", "router_init_std", "router_num_heads", "router_weights", "router_aux_loss_coef",
               "calibration", "calibration_examples"),
    "Experts": [name for name in _CONFIG if name != "seed"],
}  # fmt: skip
_HINTS = get_type_hints(UpcycleConfig)
_FIELDS: dict[str, Any] = {
    field.name: (_HINTS[field.name], Field(field.default, description=field.metadata["help"]))
    for field in dataclasses.fields(UpcycleConfig)
}
_Config: Any = create_model("UpcycleConfig", __base__=Settings, **_FIELDS)


class UpcycleSettings(_Config):
    """The settings of `moe-peft upcycle`."""

    model: TextList = Field(title="NAME", description="folders or names of dense models")
    output: Text = Field(title="FOLDER", description="folder for the MoE; new or empty")
    calibration: Text | None = Field(
        None, title="FILE", description="data for --router-init attention: a file, or a dataset's name"
    )
    calibration_examples: Count | None = Field(None, description="examples of it to draw, with --seed; default: 256")


def parser(prog: str) -> SettingsParser:
    description = "Make a native MoE from dense models."
    return SettingsParser(UpcycleSettings, prog, groups=_GROUPS, description=description, epilog=EXAMPLE)


def run(settings: UpcycleSettings) -> None:
    given: Any = settings
    if (settings.calibration is None) == (given.router_init == "attention"):
        raise InputError(f"calibration={settings.calibration!r}: goes with router_init='attention'")
    if settings.calibration_examples is not None and settings.calibration is None:
        raise InputError(f"calibration_examples={settings.calibration_examples}: goes with calibration")
    check_models(model=settings.model)
    check_files(**{"--calibration": settings.calibration})
    # Only now: these imports take seconds.
    from ..models.gate_init import GATE_INITS
    from ..native import upcycle

    config = UpcycleConfig(**{name: getattr(given, name) for name in _CONFIG})
    if config.router_init in GATE_INITS:
        raise InputError(f"router_init={config.router_init!r}: needs texts for each expert; use moe-peft mix --models")
    batches = None if settings.calibration is None else _batches(settings)
    print(upcycle(settings.model, settings.output, config, calibration=batches))


def _batches(settings: Any) -> list[dict[str, Any]]:
    from ..training.data import check_rows, load_data
    from ..training.preparation import calibration_batches
    from ..utils.loading import read_tokenizer

    data = load_data(settings.calibration, "--calibration", None)
    tokenizer = read_tokenizer(settings.model[0], f"--calibration: {settings.model[0]!r}")
    check_rows(data, "--calibration", tokenizer)
    return calibration_batches(data, tokenizer, settings.calibration_examples or 256, seed=settings.seed)
