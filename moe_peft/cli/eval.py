"""`moe-peft eval`, also with `accelerate launch -m moe_peft eval …`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import Field

from ..evaluation.task_settings import TaskSettings
from ..utils.validation import Flag, Seed, Text
from .settings import SettingsParser, WeightSettings, check_models, joined_by_commas, settings_of

EXAMPLE = r"""
example:
  moe-peft eval --model HuggingFaceTB/SmolLM2-135M-Instruct \
    --tasks arc_easy --limit 100
"""
_TaskSettings: Any = settings_of(TaskSettings)


class EvalSettings(WeightSettings, _TaskSettings):
    """The settings of `moe-peft eval`."""

    model: Text = Field(title="FOLDER", description="an adapter, a native MoE or a dense model")
    base: Text | None = Field(
        None,
        title="PATH",
        description="an adapter's base, by default the one that it names; else a model to compare with",
    )
    no_base: Flag = Field(False, description="do not also evaluate an adapter's base")
    experts: Annotated[list[Text], joined_by_commas] | None = Field(
        None,
        title="N,N,…",
        description="let routers choose only among these, by index or name; a single one gets all tokens",
    )
    each_expert: Flag = Field(False, description="evaluate each expert alone, too (of --experts, if given)")
    tasks: Annotated[list[Text], joined_by_commas] = Field(
        title="NAME", description="tasks, groups, tags, patterns or YAML files; commas may separate them"
    )
    seed: Seed | None = Field(None, description="seed of everything random; default: the harness's seeds")
    output: Text = Field("evaluation", title="FOLDER", description="folder for results.json")


_GROUPS = {
    "Model": ("model", "base", "no_base", "experts", "each_expert", "dtype", "quantization"),
    "Tasks": [field.name for field in dataclasses.fields(TaskSettings)],
    "Report": ("output",),
}


def parser(prog: str) -> SettingsParser:
    description = "Evaluate a model on tasks of lm-evaluation-harness."
    return SettingsParser(EvalSettings, prog, groups=_GROUPS, description=description, epilog=EXAMPLE)


def run(settings: EvalSettings) -> None:
    given: Any = settings
    tasks = {field.name: getattr(given, field.name) for field in dataclasses.fields(TaskSettings)}
    what = TaskSettings(**tasks)
    check_models(**{"--model": settings.model, "base": settings.base})
    # Only now: these imports take seconds.
    from ..evaluation import evaluate_model
    from ..utils.distributed import leave_processes

    evaluate_model(
        settings.model,
        what,
        settings.output,
        base=settings.base,
        with_base=not settings.no_base,
        experts=settings.experts,
        each_expert=settings.each_expert,
        dtype=settings.dtype,
        quantization=settings.quantization,
    )
    leave_processes()
