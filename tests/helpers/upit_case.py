"""A UpIT run small enough for tests, and a process that can kill itself in the middle of it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from moe_peft.cli import main
from moe_peft.upit import UpIT, recipe_from_dict
from tests.helpers.models import tiny_llama
from tests.helpers.processes import in_processes
from tests.helpers.warm import kill_at, start

DOMAINS = ("a", "b", "c")


def rows(count: int, offset: int = 0) -> list[dict[str, str]]:
    """Prompts and completions of three domains in turn."""
    return [
        {
            "prompt": f"w{3 + i % 3} w{10 + (i * 7 + offset) % 90}",
            "completion": " " + " ".join(f"w{3 + (i % 3 * 31 + (i + offset) * j) % 120}" for j in range(3, 9 + i % 5)),
            "domain": DOMAINS[i % 3],
        }
        for i in range(count)
    ]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; of a manifest, all but how long its stages took."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    for name in files:
        if name.endswith("manifest.json"):
            files[name] = json.dumps({**json.loads(files[name]), "seconds": None}).encode()
    return files


def without_paths(folder: Path) -> dict[str, bytes]:
    """The files of a run; `manifest.json` names the folder."""
    return {name: content for name, content in contents(folder).items() if name != "manifest.json"}


def make_case(folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Base model and data in `folder`; returns a recipe's settings, with relative paths."""
    tiny_llama(vocab=128).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    for name, part in (("train", rows(48)), ("eval", rows(12, offset=5))):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    return {
        "output_dir": "out",
        "model": {"name_or_path": str(folder / "base")},
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "eval.jsonl"),
            "label_column": "domain",
        },
        "num_experts": 4,
        "num_train_epochs": 4,
        "adapter": {"r": 4, "lora_alpha": 8, "top_k": 2, "lora_dropout": 0.1},
        "sft": {
            "per_device_train_batch_size": 4,
            "learning_rate": 5e-3,
            "bf16": False,
            "use_cpu": True,
            "gradient_checkpointing": False,
            "save_steps": 5,
            "logging_steps": 4,
            "disable_tqdm": True,
        },
        "prepare": {"num_experts": 3},
        "router_init": {"seed_fraction": 0.25, "num_train_epochs": 2, "sft": {"save_steps": 2}},
    }


def make_ffn_case(folder, tokenizer, **own):
    """The settings for experts that are complete FFNs."""
    case = make_case(folder, tokenizer)
    case.pop("adapter")
    case["sft"]["learning_rate"] = 1e-3
    return {**case, "mode": "ffn", "moe": {"top_k": 2, "router_aux_loss_coef": 0.02}, **own}


def chats(case: dict[str, Any]) -> dict[str, Any]:
    """The case with conversations."""
    for name in ("train", "eval"):
        path = Path(case["data"][name])
        talks = [
            {
                "messages": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["completion"]},
                ],
                "domain": row["domain"],
            }
            for row in map(json.loads, path.read_text().splitlines())
        ]
        path.write_text("\n".join(map(json.dumps, talks)))
    return case


def run(case: dict[str, Any], folder: Path, redo: bool = False, **settings: Any) -> UpIT:
    """Run the recipe, with other settings, to `folder/out`."""
    pipeline = UpIT(recipe_from_dict({**case, "output_dir": str(folder / "out"), **settings}))
    pipeline.run(redo)
    return pipeline


def stage_of(pipeline, name):
    return next(stage for stage in pipeline.stages if stage.name == name)


def run_as_two_processes(settings: dict[str, Any], folder: Path, command: str = "upit", code: int = 0) -> None:
    """Run the recipe by the command line in two processes over gloo, which both end with the exit code."""
    (folder / "two.yaml").write_text(yaml.safe_dump(settings))
    in_processes(_run_command, folder, command, code=code)


def _run_command(rank: int, folder: Path, command: str) -> None:
    main([command, "--config", str(folder / "two.yaml")])


# --- a process that kills itself ------------------------------------------------------------------------------------


def run_in_process(settings: dict[str, Any], folder: Path, kill: tuple[str, int] | None = None) -> int:
    """
    Run the recipe in `folder` in a fresh process; returns its exit code.

    `kill` = (point, n): it sends itself SIGKILL as it comes to that point for the n-th time (see `_POINTS`).
    """
    process = start(_run, settings, str(folder), kill)
    process.join()
    return process.exitcode


def _run(settings: dict[str, Any], folder: str, kill: tuple[str, int] | None) -> None:
    os.chdir(folder)
    logging.disable()
    _count_steps()
    if kill is not None:
        owner, name = _points()[kill[0]]
        kill_at(owner, name, kill[1])
    UpIT(recipe_from_dict(settings)).run(redo=True)


def _points() -> dict[str, tuple[Any, str]]:
    """Where a process can be killed: just before the n-th call of one of these."""
    from transformers import Trainer

    import moe_peft.upit.evaluate
    import moe_peft.upit.files
    import moe_peft.upit.pipeline
    import moe_peft.upit.router_init
    import moe_peft.upit.stage_cache
    from moe_peft.training.resuming import KeepCheckpoints

    return {
        "step": (Trainer, "training_step"),
        "within a checkpoint": (Trainer, "_save_rng_state"),
        "before a checkpoint is marked": (KeepCheckpoints, "on_save"),
        "scoring": (moe_peft.upit.router_init, "example_losses"),
        "writing an expert": (moe_peft.upit.files, "save_file"),
        "writing json": (moe_peft.upit.stage_cache, "write_json"),
        "marking a stage": (moe_peft.upit.stage_cache, "mark_complete"),
        "evaluating": (moe_peft.upit.evaluate, "model_size"),
        "removing": (moe_peft.upit.stage_cache, "remove"),
        "publishing": (moe_peft.upit.pipeline, "link_folder"),
    }


def _count_steps() -> None:
    """Leaves a byte in `steps` for every training step of every process."""
    from transformers import Trainer

    original = Trainer.training_step

    def counting(*args: Any, **kwargs: Any) -> Any:
        with open("steps", "ab") as file:
            file.write(b".")
        return original(*args, **kwargs)

    Trainer.training_step = counting
