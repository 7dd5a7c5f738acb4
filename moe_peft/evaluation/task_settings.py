"""What is evaluated, in a module without torch, so that `moe-peft eval --help` needs none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..utils.messages import InputError
from ..utils.settings import Range, check_settings, setting


@dataclass(frozen=True)
class TaskSettings:
    """
    What is evaluated; the harness's own names.

    Args:
        tasks: tasks, groups or tags of the harness, patterns like `mmlu_*`, or YAML files.
        include_path: a folder with further tasks, which take precedence over the harness's of the same name.
        num_fewshot: examples in the context; None: as each task says.
        batch_size: requests per forward pass, or `auto`.
        limit: examples per task, or below 1 their share; None: all.
        apply_chat_template: put prompts into the tokenizer's chat template; a string names one of several.
        seed: of random numbers, example choice included; None: the harness's own seeds.

    Example:

    ```python
    >>> from moe_peft.evaluation import TaskSettings
    >>> settings = TaskSettings(("arc_easy", "hellaswag"), num_fewshot=0, limit=100)
    ```
    """

    tasks: Sequence[str]
    include_path: str | None = setting(None, "a folder with further tasks")
    num_fewshot: int | None = setting(None, "examples in the context", Range(at_least=0, whole=True))
    batch_size: int | str = setting(8, "requests per forward pass, or auto")
    limit: float | None = setting(None, "examples per task, or below 1 their share")
    apply_chat_template: bool | str = setting(False, "put prompts into the chat template; by default not")
    seed: int | None = setting(None, "seed of everything random; default: the harness's seeds")

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.tasks:
            raise InputError("tasks: name at least one")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise InputError(f"include_path={self.include_path!r}: no such folder")
        if self.limit is not None and not (0 < self.limit < 1 or (self.limit >= 1 and self.limit % 1 == 0)):
            raise InputError(f"limit={self.limit}: must be a whole number of at least 1, or a share below 1")
        if not re.fullmatch(r"0*[1-9]\d{0,5}|auto(:[1-9]\d*)?", str(self.batch_size)):
            raise InputError(f"batch_size={self.batch_size!r}: must be a whole number from 1 to 999999, auto or auto:N")
