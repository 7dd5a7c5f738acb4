"""A folder as a reader of the documentation has it, with models and data, and processes that run in it."""

from __future__ import annotations

import doctest
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tests.helpers.models import tiny_llama
from tests.helpers.warm import start

# Where the public names are, each in its package's `__all__`.
_ROOMS = ("analysis", "chat", "native", "pruning", "routing", "training", "upit")
PACKAGES = ("moe_peft", *(f"moe_peft.{room}" for room in _ROOMS))


def write_model(folder: str | Path, tokenizer: Any, seed: int = 0) -> None:
    """A tiny Llama with its tokenizer."""
    tiny_llama(vocab=128, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ends_soon(folder)


def ends_soon(folder: str | Path) -> None:
    """Let a random model end its answers: with a third of its tokens."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    size, end = AutoConfig.from_pretrained(folder).vocab_size, AutoTokenizer.from_pretrained(folder).eos_token_id
    GenerationConfig(eos_token_id=sorted({end, *range(1, size, 3)})).save_pretrained(folder)


def write_adapter(folder: str | Path, base: str) -> None:
    """An adapter with four experts, not trained, for a model in the same folder, with its tokenizer."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from moe_peft import MoELoraConfig

    path = Path(folder).parent / base
    config = MoELoraConfig(num_experts=4, r=4, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), config)
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)


def write_rows(file: str | Path, rows: list[dict[str, str]]) -> None:
    Path(file).write_text("\n".join(map(json.dumps, rows)))


def in_folder(folder: Path, job: Callable[..., Any], *args: Any) -> None:
    """Run `job` in a process of its own, in `folder`, its output in the file `log`."""
    process = start(_job, folder, job, *args)
    process.join()
    assert process.exitcode == 0, (folder / "log").read_text()[-3000:]


def _job(folder: Path, job: Callable[..., Any], *args: Any) -> None:
    os.chdir(folder)
    with open("log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    job(*args)
    sys.stdout.flush()


def run_example(name: str, code: str) -> None:
    """Run the lines, but those to skip, in one namespace; what they print is compared where the docstring shows it."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for line in doctest.DocTestParser().get_examples(code, name):
        if doctest.SKIP in line.options:
            continue
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(line.source, name, "single"), namespace)
        if line.want and not doctest.OutputChecker().check_output(line.want, printed.getvalue(), flags):
            raise AssertionError(f"{name}: {line.source}gives\n{printed.getvalue()}and not\n{line.want}")


def run_examples(examples: dict[str, str], inputs: Path) -> None:
    """Run each of several examples in a copy of a folder."""
    for name, code in examples.items():
        os.chdir(shutil.copytree(inputs, Path.cwd() / name))
        run_example(name, code)
        os.chdir("..")
