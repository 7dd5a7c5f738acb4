"""`moe-peft eval`: evaluates a model on tasks, with its base and each of its experts alone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from ..analysis.inputs import describe
from ..models.introspection import base_model, expert_names
from ..models.layer import routed_layers
from ..models.steering import Expert, allow_experts, expert_indices, force_experts
from ..native.folders import AdapterFolder, open_folder
from ..utils.distributed import on_main_process
from ..utils.io import output_folder, read_json, write_json
from ..utils.loading import check_template
from ..utils.messages import InputError
from ..utils.torch_contexts import free_memory
from .harness import Harness
from .results import RESULTS, Scores, as_table, read_scores
from .settings import EvalSettings, TaskSettings

logger = logging.getLogger("moe_peft")

_KEPT = ("configs", "versions", "n-shot", "n-samples", "group_subtasks", "higher_is_better")


def evaluate_model(settings: EvalSettings) -> dict[str, Scores]:
    """
    Evaluate a model on tasks of lm-evaluation-harness. Print a table, and write `results.json` into `settings.output`,
    a new folder or a folder with an earlier evaluation. The base of an adapter is the model with the adapter disabled.

    Returns:
        "model", "base", "expert 0" (or its name), … → scores, in the main process. In other processes all are empty.

    Raises:
        ValueError: the model or a task does not exist, there is no such expert, or the folder holds something else.

    Example:

    ```python
    >>> from moe_peft.evaluation import EvalSettings, evaluate_model
    >>> settings = EvalSettings(
    ...     model="Qwen/Qwen3-0.6B",
    ...     tasks=["my-task.yaml"],
    ...     limit=2,
    ...     output="evaluation",
    ... )
    >>> scores = evaluate_model(settings)
    >>> accuracy = scores["model"]["my_task", "acc"].value
    ```
    """
    base, with_base = settings.base, not settings.no_base
    experts: Sequence[Expert] | None = settings.experts
    PartialState(cpu=not torch.accelerator.is_available())
    with ExitStack() as stack:
        output = on_main_process(lambda: stack.enter_context(output_folder(settings.output, "output", _is_evaluation)))
        folder = open_folder(settings.model, "--model")
        adapter = isinstance(folder, AdapterFolder)
        if isinstance(folder, AdapterFolder):
            folder.other_base = base
        elif base is not None and not with_base:
            raise InputError(f"--base {base!r}: --no-base contradicts it; give one of the two")
        other = open_folder(base, "--base") if with_base and base is not None and not adapter else None
        for each in (folder, other):
            if each is not None:
                check_template(each.tokenizer, settings.apply_chat_template, "apply_chat_template")
        harness = Harness(settings)
        model, tokenizer = folder.load(settings.dtype, settings.quantization), folder.tokenizer
        if experts is not None:
            experts = _named(model, dict.fromkeys(expert_indices(model, experts, "--experts")))
        results = _run(harness, model, tokenizer, experts, settings.each_expert)
        about = {
            **settings.model_dump(include={*TaskSettings.model_fields}), "model": settings.model, **describe(model),
            "lm_eval": version("lm_eval"), "experts": experts,
        }  # fmt: skip
        if with_base and adapter:
            with model.disable_adapter():
                results["base"] = harness.run(model, tokenizer)
            about["base"] = base_model(model).config._name_or_path
        elif other is not None:
            del model
            free_memory()
            results["base"] = harness.run(other.load(settings.dtype, settings.quantization), other.tokenizer)
            about["base"] = base
        scores = {name: read_scores(of_model) if of_model else {} for name, of_model in results.items()}
        if PartialState().is_main_process:
            about |= {name: value for name, value in results["model"].items() if name in _KEPT}
            rows = {name: [score._asdict() for score in of.values()] for name, of in scores.items()}
            write_json(output / RESULTS, {"about": about, "scores": rows})
            console = Console(markup=False, emoji=False)
            console.print(as_table(scores))
            console.print(str(output / RESULTS), highlight=False, soft_wrap=True)
    return scores


def _is_evaluation(folder: Path) -> bool:
    """Return whether a folder has an earlier evaluation and nothing else."""
    others = {path.name for path in folder.iterdir()} - {RESULTS, ".lock"}
    return not others and {"about", "scores"} <= read_json(folder / RESULTS).keys()


def _run(
    harness: Harness, model: Any, tokenizer: Any, experts: Sequence[Expert] | None, each_expert: bool
) -> dict[str, Any]:
    """Run the harness on the model and, with `each_expert`, on each of its experts alone."""
    alone = _alone(model, experts) if each_expert else []
    results = {}
    for name, chosen in [("model", experts), *((f"expert {expert}", [expert]) for expert in alone)]:
        with _steered(model, chosen):
            results[name] = harness.run(model, tokenizer)
    return results


def _alone(model: Any, experts: Sequence[Expert] | None) -> list[Expert]:
    """Return the experts to evaluate one by one."""
    sizes = {layer.num_experts for layer in routed_layers(model, "--each-expert")}
    smallest = min(sizes)
    if len(sizes) > 1 and experts is None:
        logger.warning("--each-expert: layers have %d to %d experts; only the first %d", smallest, max(sizes), smallest)
    return _named(model, range(smallest)) if experts is None else list(experts)


def _named(model: Any, experts: Iterable[int]) -> list[Expert]:
    """Return the experts by their names, if they have names."""
    names = expert_names(model) or []
    return [names[expert] if expert < len(names) else expert for expert in experts]


def _steered(model: Any, experts: Sequence[Expert] | None) -> AbstractContextManager[None]:
    """Restrict routers to some experts. A single expert is enough, even if top-k is larger."""
    if experts is None:
        return nullcontext()
    if len(experts) == 1:
        return force_experts(model, experts[0])
    return allow_experts(model, experts)
