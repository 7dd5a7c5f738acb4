"""`moe-peft upit`, also with `accelerate launch -m moe_peft upit …`."""

from __future__ import annotations

from pydantic import Field

from ..upit.methods import METHODS
from ..utils.validation import Flag, Integer, Settings, Text, read_settings
from .settings import SettingsParser, check_files, check_models

EXAMPLE = r"""
example:
  echo '{output_dir: upit, num_experts: 4, data: {train: trl-lib/Capybara},
    model: {name_or_path: Qwen/Qwen3-0.6B-Base}}' > upit.yaml
  moe-peft upit --config upit.yaml --dry-run
"""


class UpitSettings(Settings):
    """The settings of `moe-peft upit`; what it does is in the recipe."""

    config: Text = Field(title="FILE", description="the recipe, a YAML file")
    set: list[str] = Field([], title="KEY=VALUE", description="override a setting, e.g. post_train.seed=1")
    dry_run: Flag = Field(False, description="print the plan and stop")
    processes: Integer | None = Field(None, description="with --dry-run: plan for this many processes")
    strategy: Text | None = Field(
        None, title="ddp|zero2|zero3|fsdp2", description="with --dry-run: what shards the state among processes"
    )
    redo: Flag = Field(False, description="redo finished stages that no longer fit the recipe")


def parser(prog: str) -> SettingsParser:
    methods = "\n".join(f"  mode: {mode:5} {', '.join(names)}" for mode, names in METHODS.items())
    return SettingsParser(
        UpitSettings,
        prog,
        description="Run a recipe: UpIT or one of its baselines.",
        epilog=f"methods (in the recipe, or --set method=NAME):\n{methods}\n{EXAMPLE}",
    )


def _check_paths(settings: UpitSettings) -> None:
    """Whether model and data of the recipe are there; all else, and what --set may name, is left to `load_recipe`."""
    sections = read_settings(settings.config)
    for check, section, field in ((check_models, "model", "name_or_path"), (check_files, "data", "train")):
        values, path = sections.get(section), f"{section}.{field}"
        value = values.get(field) if isinstance(values, dict) else None
        if isinstance(value, str) and not any(each.startswith(section) for each in settings.set):
            check(**{path: value})


def run(settings: UpitSettings) -> None:
    _check_paths(settings)
    # Only now: these imports take seconds.
    from ..training.estimate import planned_launch
    from ..upit.pipeline import UpIT
    from ..upit.plan import print_plan
    from ..upit.recipe import load_recipe
    from ..upit.summary import print_summary
    from ..utils.distributed import leave_processes

    launch = planned_launch(settings.processes, settings.strategy, settings.dry_run)
    pipeline = UpIT(load_recipe(settings.config, settings.set))
    if settings.dry_run:
        print_plan(pipeline, launch)
    else:
        pipeline.run(settings.redo)
        print_summary(pipeline)
        leave_processes()
