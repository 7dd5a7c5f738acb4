"""`moe-peft inspect`."""

from __future__ import annotations

from pydantic import Field

from ..utils.validation import Flag, Text
from .settings import DataSettings, FigureFormat, SettingsParser, WeightSettings, check_files, check_models

EXAMPLE = r"""
example:
  moe-peft inspect --model adapter --data trl-lib/Capybara --max-examples 64
"""


class InspectSettings(WeightSettings, DataSettings):
    """The settings of `moe-peft inspect`."""

    model: Text = Field(title="FOLDER", description="an adapter or a native MoE")
    base: Text | None = Field(None, title="PATH", description="an adapter's base; default: the one that it names")
    data: Text = Field(title="FILE", description="a .jsonl, .json, .csv or .parquet file, or a dataset's name")
    label_column: Text | None = Field(None, title="NAME", description="column that holds the domains")
    output: Text = Field("routing", title="FOLDER", description="folder for tables and figures")
    html: Flag = Field(False, description="also write report.html, a page that explains itself")
    figures: FigureFormat = Field("png", description="format of the figures")
    expert_map: dict[str | int, list[int]] | None = Field(
        None, description='domain → experts, for compliance, e.g. {"code": [0, 1]}, or masks, {"code": [1, 1, 0, 0]}'
    )


_GROUPS = {
    "Model and data": (
        "model",
        "base",
        *WeightSettings.model_fields,
        "data",
        *DataSettings.model_fields,
        "label_column",
    ),
    "Report": ("output", "html", "figures", "expert_map"),
}


def parser(prog: str) -> SettingsParser:
    description = "Report where a model's tokens go: tables and figures."
    return SettingsParser(InspectSettings, prog, groups=_GROUPS, description=description, epilog=EXAMPLE)


def run(settings: InspectSettings) -> None:
    check_models(**{"--model": settings.model, "base": settings.base})
    check_files(**{"--data": settings.data})
    from ..analysis.inspect import inspect_model  # only now: these imports take seconds

    others = settings.model_dump(exclude={"model", "data", "output", "figures"})
    inspect_model(settings.model, settings.data, settings.output, suffix=f".{settings.figures}", **others)
