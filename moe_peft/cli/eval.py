"""`moe-peft eval`, also with `accelerate launch -m moe_peft eval …`; its options are the fields of `EvalSettings`."""

from __future__ import annotations

from ..evaluation.settings import EvalSettings, TaskSettings
from .settings import SettingsParser, check_models

EXAMPLE = r"""
example:
  moe-peft eval --model HuggingFaceTB/SmolLM2-135M-Instruct \
    --tasks arc_easy --limit 100
"""
_GROUPS = {
    "Model": ("model", "base", "no_base", "experts", "each_expert", "dtype", "quantization"),
    "Tasks": TaskSettings.model_fields,
    "Report": ("output",),
}


def parser(prog: str) -> SettingsParser:
    description = "Evaluate a model on tasks of lm-evaluation-harness."
    return SettingsParser(EvalSettings, prog, groups=_GROUPS, description=description, epilog=EXAMPLE)


def run(settings: EvalSettings) -> None:
    check_models(**{"--model": settings.model, "base": settings.base})
    # Only now: these imports take seconds.
    from ..evaluation import evaluate_model
    from ..utils.distributed import leave_processes

    evaluate_model(settings)
    leave_processes()
