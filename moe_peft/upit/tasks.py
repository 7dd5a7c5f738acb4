"""The tasks of lm-evaluation-harness that a recipe names for its last stage."""

from __future__ import annotations

from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Annotated, Any

from peft import PeftModel
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as validated
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..evaluation.harness import Harness, TaskSettings
from ..evaluation.scores import Score, Scores, read_scores
from ..training.scoring import make_scorable
from .values import Flag, Integer, Number, Text


@validated(config=ConfigDict(extra="forbid", frozen=True))
class EvaluateSection:
    """Tasks for the result and for its base, beside the held-out losses on `data.eval`."""

    # Tasks, groups or tags of the harness, patterns, or YAML files.
    tasks: list[Text] = field(default_factory=list)
    # A folder with further tasks, and their data.
    include_path: Text | None = None
    # Examples in the context; null: as each task says.
    num_fewshot: Annotated[Integer, Field(ge=0)] | None = None
    # Requests per forward pass, or auto.
    batch_size: Integer | Text = 8
    # Examples per task, or below 1 their share; null: all.
    limit: Annotated[Number, Field(gt=0)] | None = None
    # True puts prompts into the tokenizer's chat template; a name chooses one of several.
    apply_chat_template: Flag | Text = False

    @property
    def settings(self) -> TaskSettings | None:
        """
        None without tasks.

        Raises:
            ValueError: a wrong value.
        """
        if not self.tasks:
            for f in fields(self):
                value = getattr(self, f.name)
                if f.name != "tasks" and value != f.default:
                    raise ValueError(f"evaluate.{f.name}={value!r}: is of evaluate.tasks, which are none; leave it out")
            return None
        try:
            return TaskSettings(**{**asdict(self), "tasks": tuple(self.tasks)})
        except ValueError as error:
            raise ValueError(f"evaluate.{error}") from error


def load_harness(settings: TaskSettings) -> Harness:
    """
    Raises:
        ValueError: a task is unknown or cannot be loaded.
    """
    try:
        return Harness(settings)
    except ValueError as error:
        raise ValueError(f"evaluate.{error}") from error


def task_files(section: EvaluateSection, apart_from: Path) -> list[Path]:
    """
    The files that say what the tasks are, as far as the recipe names them: YAML files, and all in `include_path`.

    Args:
        apart_from: a folder that does not count, the run's own.
    """
    named = [Path(task) for task in section.tasks if Path(task).is_file()]
    inside = sorted(Path(section.include_path).rglob("*")) if section.include_path else []
    inside = [path for path in inside if path.is_file() and "__pycache__" not in path.parts]
    return [*named, *(path for path in inside if not path.resolve().is_relative_to(apart_from.resolve()))]


def evaluate_tasks(
    harness: Harness,
    model: PeftModel | PreTrainedModel,
    processing_class: PreTrainedTokenizerBase,
    base: PreTrainedModel | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """
    The scores of the base and of the adapted model, for the record; empty in all processes but the main one.

    Args:
        base: the model to compare with; None takes the model without its adapter.
    """
    make_scorable(model)
    found = {"adapted": harness.run(model, processing_class)}
    if base is None:
        with model.disable_adapter():
            found["base"] = harness.run(model, processing_class)
    else:
        make_scorable(base)
        found["base"] = harness.run(base, processing_class)
    scores = {name: read_scores(found[name]) if found[name] else {} for name in ("base", "adapted")}
    return {name: [score._asdict() for score in of.values()] for name, of in scores.items()}


def recorded_scores(recorded: dict[str, list[dict[str, Any]]]) -> dict[str, Scores]:
    """What `evaluate_tasks` found, from the record."""
    every = {name: [Score(**values) for values in of] for name, of in recorded.items()}
    return {name: {(score.task, score.metric): score for score in of} for name, of in every.items()}
