"""lm-evaluation-harness on a model that is already loaded."""

from __future__ import annotations

import difflib
import io
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from transformers.utils.logging import is_progress_bar_enabled

from ..models.introspection import base_model
from ..training.scoring import to_device
from ..utils.messages import InputError, one_line
from .settings import TaskSettings


class Harness:
    """
    Tasks, loaded once for any number of models. With several processes, each evaluates a share of the examples.

    The numbers are the same as from `lm_eval.simple_evaluate`. `simple_evaluate` loads the tasks and describes the
    machine again for each model: this takes minutes if each of 16 experts is a model.

    Args:
        settings: the tasks and their settings.

    Raises:
        ValueError: a task is unknown or cannot be loaded.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from moe_peft.evaluation import Harness, TaskSettings, read_scores
    >>> harness = Harness(TaskSettings(tasks=["my-task.yaml"], limit=2))
    >>> model, tokenizer = (
    ...     kind.from_pretrained("Qwen/Qwen3-0.6B")
    ...     for kind in (AutoModelForCausalLM, AutoTokenizer)
    ... )
    >>> scores = read_scores(harness.run(model, tokenizer))
    ```
    """

    def __init__(self, settings: TaskSettings) -> None:
        self.settings = settings
        with _quiet():
            self.loaded = _load_tasks(settings)
        for task in self.loaded["tasks"].values():
            if (shots := task.get_config("num_fewshot")) != 0:  # a task with 0 shots keeps 0
                task.set_config("num_fewshot", (shots or 0) if settings.num_fewshot is None else settings.num_fewshot)

    def run(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        """
        Run the tasks. Return the result of `lm_eval.evaluate`, without single examples, in the main process, and {} in
        others.

        Args:
            model: a model of transformers or PEFT; it is moved to this process's device.
            tokenizer: its tokenizer.

        Raises:
            ValueError: a task's data, templates, filters or metrics fail, or the model's logits are NaN. Errors of
                torch are not changed.
        """
        from lm_eval import evaluate
        from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

        to_device(model)
        s = self.settings
        other = DEFAULT_OTHER_SEED if s.seed is None else s.seed
        random.seed(DEFAULT_RANDOM_SEED if s.seed is None else s.seed)
        np.random.seed(other)
        torch.manual_seed(other)
        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(other)
        broken: list[torch.Tensor] = []  # tasks give results even for NaN logits
        # PEFT's forward calls the inner model's `forward`, without its hooks. `generate` calls only the inner model.
        hooks = [
            each.register_forward_hook(lambda module, args, output: broken.append(output.logits.isnan().any()))
            for each in {model, base_model(model)}
        ]
        try:
            with _quiet(), _explained(s):
                results = evaluate(
                    _language_model(model, tokenizer, s.batch_size), self.loaded, limit=s.limit, log_samples=False,
                    apply_chat_template=s.apply_chat_template, fewshot_as_multiturn=bool(s.apply_chat_template),
                )  # fmt: skip
        finally:
            for hook in hooks:
                hook.remove()
        if broken and torch.stack(broken).any():
            raise InputError("dtype: the model's logits are NaN; use bfloat16 or float32, or another model")
        return results or {}


def _load_tasks(settings: TaskSettings) -> Any:
    """
    Load the tasks and groups of the settings.

    If the user's folder has all of them, the harness's thousands of tasks are not searched. A pattern may match any of
    these tasks, and a group of the user may name some of them. The latter shows only when the group is loaded.
    """
    from lm_eval.tasks import TaskManager  # only now: it takes seconds

    names = list(settings.tasks)
    if all(Path(name).is_file() or not set("*?[") & set(name) for name in names):
        manager = TaskManager(include_path=settings.include_path, include_defaults=False)
        if not _unknown(names, manager):
            with suppress(Exception):
                return _loaded(names, manager)
    manager = TaskManager(include_path=settings.include_path)
    for name in _unknown(names, manager):
        near = difflib.get_close_matches(name, manager.all_tasks, n=3)
        remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else "`lm_eval ls tasks` lists all"
        raise InputError(f"tasks={name!r}: no such task; {remedy}")
    with _explained(settings):
        return _loaded(names, manager)


def _loaded(names: list[str], manager: Any) -> Any:
    names = [match for name in names for match in (manager.match_tasks([name]) or [name])]
    return manager.load(list(dict.fromkeys(names)))


def _unknown(names: list[str], manager: Any) -> list[str]:
    return [name for name in names if not manager.match_tasks([name]) and not Path(name).is_file()]


def _language_model(model: Any, tokenizer: Any, batch_size: int | str) -> Any:
    """Return the model as the harness takes it. Processes share the examples."""
    from lm_eval.models.huggingface import HFLM

    state = PartialState()

    class SharedHFLM(HFLM):
        rank = property(lambda self: state.process_index)
        world_size = property(lambda self: state.num_processes)

    language_model = SharedHFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    if state.num_processes > 1:
        language_model.accelerator = Accelerator()
    return language_model


@contextmanager
def _explained(settings: TaskSettings) -> Iterator[None]:
    """Turn any error of a task file, its code or its data into an `InputError` of one line. Torch's errors stay."""
    try:
        yield
    except RuntimeError:
        raise
    except Exception as error:
        tasks = ",".join(settings.tasks)
        reason = "no rows" if isinstance(error, StopIteration) else one_line(error)
        raise InputError(f"tasks={tasks!r}: {type(error).__name__}: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """
    Hide the harness's log except errors: it warns about each default again for each model. Show its progress bars only
    if transformers' are shown.
    """
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with nullcontext() if is_progress_bar_enabled() else redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
