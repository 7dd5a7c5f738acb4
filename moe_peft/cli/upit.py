"""`moe-peft upit`, also with `accelerate launch -m moe_peft upit …`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from ..upit.methods import METHODS
from ..utils.messages import InputError
from ..utils.validation import Flag, Settings, Text, TextList
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
    """Settings of `moe-peft upit`. All settings of the run are in the recipe."""

    config: Text | None = Field(None, title="FILE", description="the recipe, a YAML file")
    set: list[str] = Field([], title="KEY=VALUE", description="override a setting, e.g. post_train.seed=1")
    dry_run: Flag = Field(False, description="print the plan and stop")
    redo: Flag = Field(False, description="redo finished stages that no longer fit the recipe")
    compare: TextList | None = Field(
        None, title="FOLDER", description="print a table of finished runs, of results of sft too, and stop"
    )
    output: Text | None = Field(None, title="FILE", description="a .csv or .json file for the table")

    @model_validator(mode="after")
    def _check(self) -> UpitSettings:
        if self.compare is None:
            if self.output is not None:
                raise InputError(f"output={self.output!r}: goes with compare; a recipe has its output_dir")
            if self.config is None:
                raise InputError("--config: must be given, or --compare")
        elif self.config is not None or self.set or self.dry_run or self.redo:
            raise InputError(f"compare={self.compare}: runs nothing; leave out config, set, dry_run and redo")
        path = Path(self.output or "table.csv")
        if path.suffix not in (".csv", ".json") or path.is_dir() or not path.parent.is_dir():
            raise InputError(f"output={self.output!r}: must be a .csv or .json file in a folder that exists")
        return self


def parser(prog: str) -> SettingsParser:
    methods = "\n".join(f"  mode: {mode:5} {', '.join(names)}" for mode, names in METHODS.items())
    return SettingsParser(
        UpitSettings,
        prog,
        usage="%(prog)s (--config FILE | --compare FOLDER …) [options]",
        description="Run a recipe, UpIT or one of its baselines; or compare runs.",
        epilog=f"methods (in the recipe, or --set method=NAME):\n{methods}\n{EXAMPLE}",
    )


def run(settings: UpitSettings) -> None:
    # Only now: these imports take seconds.
    if settings.compare is not None:
        from ..upit.compare import compare, print_comparison, write_comparison

        rows = compare(settings.compare)
        print_comparison(rows)
        if settings.output is not None:
            write_comparison(rows, settings.output)
        return
    from ..upit.pipeline import UpIT
    from ..upit.plan import print_plan
    from ..upit.recipe import load_recipe
    from ..utils.distributed import leave_processes, on_main_process

    assert settings.config is not None
    pipeline = UpIT(load_recipe(settings.config, settings.set))
    if settings.dry_run:
        print_plan(pipeline)
    else:
        pipeline.run(settings.redo)
        on_main_process(lambda: _print_result(pipeline))
        leave_processes()


def _print_result(pipeline: UpIT) -> None:
    """Print the held-out losses, a warning about the experts' load, and the result's folder."""
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, emoji=False)
    metrics = {name: record["metrics"] for name, record in pipeline.records.items()}
    if evaluated := metrics.get("evaluate"):
        table = Table("held-out loss", *evaluated["loss"]["base"])
        for model, losses in evaluated["loss"].items():
            table.add_row(model, *(f"{loss:.3f}" for loss in losses.values()))
        console.print(table)
    # Warnings from held-out data or, without held-out data, from the training's log.
    logs = [evaluated] if evaluated else metrics.get("post_train", {}).get("history", [])
    for warning in filter(None, (log.get("load_warning") for log in logs)):
        console.print(f"load of the experts: {warning}", highlight=False, soft_wrap=True)
    console.print(f"{pipeline.result.name}: {pipeline.result}", highlight=False, soft_wrap=True)
