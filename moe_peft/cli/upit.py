"""`moe-peft upit`, also with `accelerate launch -m moe_peft upit …`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from ..upit.methods import METHODS
from ..utils.validation import Flag, Settings, Text
from .settings import SettingsParser

if TYPE_CHECKING:
    from ..upit import UpIT

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
    redo: Flag = Field(False, description="redo finished stages that no longer fit the recipe")


def parser(prog: str) -> SettingsParser:
    methods = "\n".join(f"  mode: {mode:5} {', '.join(names)}" for mode, names in METHODS.items())
    return SettingsParser(
        UpitSettings,
        prog,
        description="Run a recipe: UpIT or one of its baselines.",
        epilog=f"methods (in the recipe, or --set method=NAME):\n{methods}\n{EXAMPLE}",
    )


def run(settings: UpitSettings) -> None:
    # Only now: these imports take seconds.
    from ..upit.pipeline import UpIT
    from ..upit.plan import print_plan
    from ..upit.recipe import load_recipe
    from ..utils.distributed import leave_processes, on_main_process

    pipeline = UpIT(load_recipe(settings.config, settings.set))
    if settings.dry_run:
        print_plan(pipeline)
    else:
        pipeline.run(settings.redo)
        on_main_process(lambda: _print_result(pipeline))
        leave_processes()


def _print_result(pipeline: UpIT) -> None:
    """The held-out losses, what is wrong with the load of the experts, and where the result is."""
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, emoji=False)
    metrics = {name: record["metrics"] for name, record in pipeline.records.items()}
    if evaluated := metrics.get("evaluate"):
        table = Table("held-out loss", *evaluated["loss"]["base"])
        for model, losses in evaluated["loss"].items():
            table.add_row(model, *(f"{loss:.3f}" for loss in losses.values()))
        console.print(table)
    # Of held-out data or, without these, of what training logged last.
    logs = [evaluated] if evaluated else metrics.get("post_train", {}).get("history", [])
    for warning in filter(None, (log.get("load_warning") for log in logs)):
        console.print(f"load of the experts: {warning}", highlight=False, soft_wrap=True)
    console.print(f"{pipeline.result.name}: {pipeline.result}", highlight=False, soft_wrap=True)
