"""Settings of `moe-peft inspect`. The module does not import torch, so `--help` does not need it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..utils.validation import DataSettings, Flag, Text, WeightSettings


class InspectSettings(WeightSettings, DataSettings):
    """The settings of `moe-peft inspect`."""

    model: Text = Field(title="FOLDER", description="an adapter or a native MoE")
    base: Text | None = Field(None, title="PATH", description="an adapter's base; default: the one that it names")
    data: Text = Field(title="FILE", description="a .jsonl, .json, .csv or .parquet file, or a dataset's name")
    label_column: Text | None = Field(None, title="NAME", description="column that holds the domains")
    output: Text = Field("routing", title="FOLDER", description="folder for tables and figures")
    html: Flag = Field(False, description="also write report.html, a page that explains itself")
    figures: Literal["png", "pdf", "svg"] = Field("png", description="format of the figures")
    expert_map: dict[str | int, list[int]] | None = Field(
        None, description='domain → experts, for compliance, e.g. {"code": [0, 1]}, or masks, {"code": [1, 1, 0, 0]}'
    )
