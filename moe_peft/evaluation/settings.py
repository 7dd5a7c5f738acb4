"""Settings of `moe-peft eval`. The module does not import torch, so `--help` does not need it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ..utils.validation import Flag, Integer, Number, Seed, Settings, Text, TextList, WeightSettings


def _folder(path: str) -> str:
    if not Path(path).is_dir():
        raise PydanticCustomError("folder", "no such folder")
    return path


def _batch(size: Any) -> Any:
    if not re.fullmatch(r"0*[1-9]\d{0,5}|auto(:[1-9]\d*)?", str(size)):
        raise PydanticCustomError("batch_size", "must be a whole number from 1 to 999999, auto or auto:N")
    return size


def _count_or_share(limit: float) -> float:
    if limit > 1 and limit % 1:
        raise PydanticCustomError("limit", "must be a whole number of at least 1, or a share below 1")
    return limit


@BeforeValidator
def _joined_by_commas(values: Any) -> Any:
    """Split a list's texts at commas, as in `a,b`. A file may also write texts as numbers."""
    if not isinstance(values, list):
        return values
    texts = [str(value) if type(value) is int else value for value in values]
    return [part for text in texts for part in (text.split(",") if isinstance(text, str) else [text]) if part != ""]


class TaskSettings(Settings):
    """
    Tasks and their settings, by the harness's names.

    Example:

    ```python
    >>> from moe_peft.evaluation import TaskSettings
    >>> settings = TaskSettings(
    ...     tasks=["arc_easy", "hellaswag"], num_fewshot=0, limit=100
    ... )
    ```
    """

    tasks: Annotated[TextList, _joined_by_commas] = Field(
        title="NAME", description="tasks, groups, tags, patterns or YAML files; commas may separate them"
    )
    include_path: Annotated[Text, AfterValidator(_folder)] | None = Field(
        None, description="a folder with further tasks, which take precedence"
    )
    num_fewshot: Annotated[Integer, Field(ge=0)] | None = Field(
        None, description="examples in the context; default: as each task says"
    )
    batch_size: Annotated[Integer | Text, AfterValidator(_batch)] = Field(
        8, description="requests per forward pass, or auto"
    )
    limit: Annotated[Number, Field(gt=0), AfterValidator(_count_or_share)] | None = Field(
        None, description="examples per task, or below 1 their share; default: all"
    )
    apply_chat_template: Flag | Text = Field(
        False, description="put prompts into the chat template, or into the one of this name; by default not"
    )
    seed: Seed | None = Field(None, description="seed of everything random; default: the harness's seeds")


class EvalSettings(WeightSettings, TaskSettings):
    """
    The settings of `moe-peft eval`.

    Example:

    ```python
    >>> from moe_peft.evaluation import EvalSettings
    >>> settings = EvalSettings(model="my-adapter", tasks=["arc_easy"])
    ```
    """

    model: Text = Field(title="FOLDER", description="an adapter, a native MoE or a dense model")
    base: Text | None = Field(
        None,
        title="PATH",
        description="an adapter's base, by default the one that it names; else a model to compare with",
    )
    no_base: Flag = Field(False, description="do not also evaluate an adapter's base")
    experts: Annotated[list[Text], _joined_by_commas] | None = Field(
        None,
        title="N,N,…",
        description="let routers choose only among these, by index or name; a single one gets all tokens, with gate 1",
    )
    each_expert: Flag = Field(False, description="evaluate each expert alone, too (of --experts, if given)")
    output: Text = Field("evaluation", title="FOLDER", description="folder for results.json")
