"""`moe-peft eval`, also with `accelerate launch -m moe_peft eval …`."""

from __future__ import annotations

import argparse
from typing import Annotated

from pydantic import Field

from ..evaluation import TaskSettings, evaluate_model
from ..utils.distributed import leave_processes
from ..utils.messages import InputError
from ..utils.validation import Seed
from .arguments import add_figures_option, add_weights_options, reads

EXAMPLE = r"""
example:
  moe-peft eval --model HuggingFaceTB/SmolLM2-135M-Instruct \
    --tasks arc_easy --limit 100
"""


def parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog, description="Evaluate a model on tasks of lm-evaluation-harness.", epilog=EXAMPLE
    )
    model, tasks, report = map(parser.add_argument_group, ("Model", "Tasks", "Report"))
    add = model.add_argument
    add("--model", required=True, metavar="FOLDER", help="an adapter, a native MoE or a dense model")
    add("--base", help="an adapter's base, by default the one that it names; else a model to compare with")
    add("--no-base", action="store_true", help="do not evaluate an adapter's base beside it")
    add(
        "--experts",
        metavar="N,N,…",
        type=_experts,
        help="let routers choose among these only; a single one gets all tokens",
    )
    add("--each-expert", action="store_true", help="evaluate each expert alone, too (of --experts, if given)")
    add_weights_options(model)
    add = tasks.add_argument
    add(
        "--tasks",
        required=True,
        nargs="+",
        action="extend",
        metavar="NAME",
        help="tasks, groups, tags, patterns or YAML files, also with commas",
    )
    add("--include-path", "--include_path", metavar="FOLDER", help="a folder with further tasks")
    add(
        "--num-fewshot",
        "--num_fewshot",
        type=reads(Annotated[int, Field(ge=0)]),
        metavar="N",
        help="examples in the context",
    )
    add("--batch-size", "--batch_size", default="8", metavar="N", help="requests per forward pass, or auto")
    add(
        "--limit",
        type=reads(Annotated[float, Field(gt=0)]),
        metavar="N",
        help="examples per task, or below 1 their share",
    )
    add(
        "--apply-chat-template", "--apply_chat_template", nargs="?", const=True, default=False, metavar="NAME",
        help="put prompts into the chat template; by default not",
    )  # fmt: skip
    add("--seed", type=reads(Seed), metavar="N", help="of all that is drawn; default: the harness's seeds")
    report.add_argument(
        "--output", default="evaluation", metavar="FOLDER", help="folder for results.json, results.md and the figure"
    )
    add_figures_option(report)
    parser.set_defaults(figures=None)
    return parser


def _experts(text: str) -> list[int]:
    """Indices with commas."""
    read = reads(list[Annotated[int, Field(ge=0, le=2**16)]], "give numbers with commas, e.g. 0,3")
    return sorted(set(read(f"[{text}]")))


def run(options: argparse.Namespace) -> None:
    if options.figures is not None and not options.each_expert:
        raise InputError(f"--figures {options.figures}: the figure shows --each-expert; add that, or leave it out")
    settings = TaskSettings(
        tuple(task for names in options.tasks for task in names.split(",") if task),
        include_path=options.include_path,
        num_fewshot=options.num_fewshot,
        batch_size=options.batch_size,
        limit=options.limit,
        apply_chat_template=options.apply_chat_template,
        seed=options.seed,
    )
    evaluate_model(
        options.model,
        settings,
        options.output,
        base=options.base,
        with_base=not options.no_base,
        experts=options.experts,
        each_expert=options.each_expert,
        dtype=options.dtype,
        quantization=options.quantization,
        suffix=f".{options.figures or 'png'}",
    )
    leave_processes()
