"""
The examples of public names run: the code fences of their docstrings, line by line after `>>>`, each in a folder that
holds a tiny model under the name of a published one, an adapter of it, and rows of training data; those of a package
in one process.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.upit_case import rows
from tests.helpers.user_folder import (
    PACKAGES,
    in_folder,
    run_example,
    run_examples,
    write_adapter,
    write_model,
    write_rows,
)

pytestmark = pytest.mark.slow

MODEL, DATA = "Qwen/Qwen3-0.6B", "train.jsonl"
# Where users begin, and what they extend.
ENTRANCES = {
    *(f"moe_peft.{name}" for name in (
        "MoELoraConfig", "MoESFTTrainer", "MoEDPOTrainer", "RequestGate", "allow_experts", "expert_to_lora",
        "fold_routers", "force_experts", "init_gates", "lora_to_moe", "prune_experts", "put_expert", "record_routing",
        "register_ffn_layout", "regmean", "replace_routers", "weigh_experts", "with_replay", "write_model_card",
    )),
    "moe_peft.chat.Conversation", "moe_peft.native.ExpertInit", "moe_peft.native.export_adapter",
    "moe_peft.native.upcycle", "moe_peft.routing.Router", "moe_peft.upit.UpIT", "moe_peft.upit.load_recipe",
}  # fmt: skip
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def public_names() -> dict[str, object]:
    """Every public function and class, under the shortest of its names."""
    names: dict[str, object] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not any(value is other for other in names.values()):
                names[f"{package}.{name}"] = value
    return names


def example(value: object) -> str:
    """The docstring's code: its fences, one after the other."""
    return "\n".join(FENCE.findall(inspect.cleandoc(value.__doc__ or "")))


EXAMPLES = {name: code for name, value in public_names().items() if ">>>" in (code := example(value))}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder / MODEL, tokenizer)
    write_adapter(folder / "my-adapter", MODEL)
    write_rows(folder / DATA, rows(24))
    return folder


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_run(package: str, inputs: Path, tmp_path: Path):
    examples = {name: code for name, code in EXAMPLES.items() if name.rpartition(".")[0] == package}
    in_folder(tmp_path, run_examples, examples, inputs)


def test_entrances_have_examples():
    assert not ENTRANCES - EXAMPLES.keys()


def test_an_example_that_fails_is_told(inputs: Path, tmp_path: Path):
    """Otherwise the tests above would say little."""
    for wrong in (">>> 1 / 0\n", ">>> print(1 + 1)\n3\n"):
        shutil.copytree(inputs, tmp_path / "user", dirs_exist_ok=True)
        with pytest.raises(AssertionError, match=r"ZeroDivisionError|gives\n2\nand not\n3"):
            in_folder(tmp_path / "user", run_example, "wrong", wrong)
    right = f">>> import os\n>>> os.path.exists('{MODEL}/config.json'), os.path.exists('{DATA}')\n(True, True)\n"
    in_folder(tmp_path / "user", run_example, "right", right)
