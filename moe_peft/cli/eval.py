"""`moe-peft eval`, also with `accelerate launch -m moe_peft eval …`."""

from __future__ import annotations

import argparse
from typing import Annotated

from pydantic import Field

from ..evaluation import TaskSettings, evaluate_model
from ..utils.distributed import leave_processes
from ..utils.validation import Seed
from .arguments import add_figures_option, add_weights_options, reads


def parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog, description="Evaluate a model on tasks of lm-evaluation-harness.")
    add = parser.add_argument
    add("--model", required=True, help="folder of an adapter, a native MoE or a dense model")
    add("--base", help="an adapter's base, by default the one that it names; else a model to compare with")
    add("--no-base", action="store_true", help="do not evaluate an adapter's base beside it")
    add(
        "--tasks",
        required=True,
        nargs="+",
        action="extend",
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
        help="put prompts into the chat template",
    )  # fmt: skip
    add("--seed", type=reads(Seed), help="of random numbers, example choice included; default: the harness's seeds")
    add(
        "--experts",
        metavar="N,N,…",
        type=_experts,
        help="let routers choose among these only; a single one gets all tokens",
    )
    add("--each-expert", action="store_true", help="evaluate each expert alone, too (of --experts, if given)")
    add_weights_options(parser)
    add("--output", default="evaluation", metavar="FOLDER", help="folder for results.json, results.md and the figure")
    add_figures_option(parser)
    parser.set_defaults(figures=None)
    return parser


def _experts(text: str) -> list[int]:
    """Indices with commas."""
    read = reads(list[Annotated[int, Field(ge=0, le=2**16)]], "give numbers with commas, e.g. 0,3")
    return sorted(set(read(f"[{text}]")))


def run(options: argparse.Namespace) -> None:
    if options.figures is not None and not options.each_expert:
        raise ValueError(f"--figures {options.figures}: the figure shows --each-expert; add that, or leave it out")
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
