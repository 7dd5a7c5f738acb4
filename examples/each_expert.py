"""
Scores of an adapter, a native MoE or a dense model on tasks of lm-evaluation-harness; with `--each-expert`, of each of
its experts alone: all tokens then go to the expert in every layer, with gate 1. Needs the extra `train` and lm_eval.

    python -m examples.each_expert my-adapter --tasks recall text --include-path . --each-expert
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from moe_peft import force_experts
from moe_peft.models.introspection import expert_names
from moe_peft.models.layer import routed_layers
from moe_peft.native.folders import AdapterFolder, open_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("--tasks", nargs="+", required=True, help="names or patterns")
    parser.add_argument("--include-path", help="a folder with tasks of your own; the harness's own are then not read")
    parser.add_argument("--limit", type=float, help="examples per task")
    parser.add_argument("--each-expert", action="store_true", help="evaluate each expert alone, too")
    parser.add_argument("--apply-chat-template", action="store_true")
    options = parser.parse_args()

    folder = open_folder(options.model, "model")
    model = folder.load()
    language_model = HFLM(pretrained=model, tokenizer=folder.tokenizer, batch_size=8)
    manager = TaskManager(include_path=options.include_path, include_defaults=options.include_path is None)
    tasks = manager.match_tasks(options.tasks)
    ways = {"model": nullcontext()}
    if isinstance(folder, AdapterFolder):
        ways["base"] = model.disable_adapter()
    if options.each_expert:
        number = min(layer.num_experts for layer in routed_layers(model, "--each-expert"))
        for expert in expert_names(model) or range(number):
            ways[f"expert {expert}"] = force_experts(model, expert)
    for way, context in ways.items():
        with context:
            results = simple_evaluate(
                language_model, tasks=tasks, task_manager=manager, limit=options.limit,
                apply_chat_template=options.apply_chat_template,
            )["results"]  # fmt: skip
        for task, metric, value in scores(results):
            print(f"{way}: {task} {metric} {value:.4f}", flush=True)


def scores(results: dict) -> Iterator[tuple[str, str, float]]:
    """Task, metric and value of each score, without standard errors."""
    for task, row in results.items():
        for name, value in row.items():
            metric, comma, _ = name.partition(",")
            if comma and not metric.endswith("_stderr"):
                yield task, metric, value


if __name__ == "__main__":
    main()
