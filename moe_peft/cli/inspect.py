"""`moe-peft inspect`; its options are the fields of `InspectSettings`."""

from __future__ import annotations

from ..analysis.inspect_settings import InspectSettings
from ..utils.validation import DataSettings
from .settings import SettingsParser, check_files, check_models

EXAMPLE = r"""
example:
  moe-peft inspect --model adapter --data trl-lib/Capybara --max-examples 64
"""
_GROUPS = {
    "Model and data": ("model", "base", "dtype", "quantization", "data", *DataSettings.model_fields, "label_column"),
    "Report": ("output", "html", "figures", "expert_map"),
}


def parser(prog: str) -> SettingsParser:
    description = "Report where a model's tokens go: tables and figures."
    return SettingsParser(InspectSettings, prog, groups=_GROUPS, description=description, epilog=EXAMPLE)


def run(settings: InspectSettings) -> None:
    check_models(**{"--model": settings.model, "base": settings.base})
    check_files(**{"--data": settings.data})
    from ..analysis.inspect import inspect_model  # only now: these imports take seconds

    inspect_model(settings)
