"""
The examples of public names run: the code fences of their docstrings, line by line after `>>>`, each in a folder that
holds a tiny model under the name of a published one and rows of training data; those of a package in one process.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.upit_case import rows
from tests.helpers.user_folder import PACKAGES, in_folder, run_example, run_examples, write_model, write_rows

pytestmark = pytest.mark.slow

MODEL, DATA = "Qwen/Qwen3-0.6B", "train.jsonl"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Public names that have no example yet.
WITHOUT_EXAMPLE = {
    "moe_peft.FFNLayout",
    "moe_peft.LoadCallback",
    "moe_peft.MoEDPOConfig",
    "moe_peft.MoEDPOTrainer",
    "moe_peft.MoELoraConfig",
    "moe_peft.MoELoraModel",
    "moe_peft.MoESFTConfig",
    "moe_peft.MoESFTTrainer",
    "moe_peft.RouterLossConfig",
    "moe_peft.RouterLossesMixin",
    "moe_peft.allow_experts",
    "moe_peft.expert_to_lora",
    "moe_peft.fold_routers",
    "moe_peft.force_experts",
    "moe_peft.init_attention_routers",
    "moe_peft.lora_to_moe",
    "moe_peft.pin_dispatch",
    "moe_peft.prune_experts",
    "moe_peft.record_routing",
    "moe_peft.register_ffn_layout",
    "moe_peft.replace_routers",
    "moe_peft.write_model_card",
    "moe_peft.analysis.RoutingStatistics",
    "moe_peft.analysis.classify_tokens",
    "moe_peft.evaluation.Harness",
    "moe_peft.evaluation.Score",
    "moe_peft.evaluation.TaskSettings",
    "moe_peft.evaluation.evaluate_model",
    "moe_peft.evaluation.read_scores",
    "moe_peft.native.ExpertInit",
    "moe_peft.native.UpcycleConfig",
    "moe_peft.native.export_adapter",
    "moe_peft.native.load_routers",
    "moe_peft.native.upcycle",
    "moe_peft.native.verify_export",
    "moe_peft.pruning.PrunedLayer",
    "moe_peft.pruning.Pruning",
    "moe_peft.routing.LoadHealth",
    "moe_peft.routing.Router",
    "moe_peft.routing.RouterSettings",
    "moe_peft.routing.Steering",
    "moe_peft.routing.balancing_loss",
    "moe_peft.routing.chosen_experts",
    "moe_peft.routing.compliance",
    "moe_peft.routing.entropies",
    "moe_peft.routing.expert_counts",
    "moe_peft.routing.label_losses",
    "moe_peft.routing.load_doubt",
    "moe_peft.routing.load_health",
    "moe_peft.routing.load_verdicts",
    "moe_peft.routing.make_router",
    "moe_peft.routing.pad_logits",
    "moe_peft.routing.read_expert_map",
    "moe_peft.routing.sigmoid_gates",
    "moe_peft.routing.switch_gates",
    "moe_peft.routing.threshold_gates",
    "moe_peft.routing.top_k_gates",
    "moe_peft.routing.top_p_gates",
    "moe_peft.routing.z_losses",
    "moe_peft.upit.Recipe",
    "moe_peft.upit.UpIT",
    "moe_peft.upit.expand_experts",
    "moe_peft.upit.init_router",
    "moe_peft.upit.load_recipe",
    "moe_peft.upit.post_train",
    "moe_peft.upit.prepare_experts",
    "moe_peft.upit.recipe_from_dict",
}


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
    write_rows(folder / DATA, rows(24))
    return folder


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_run(package: str, inputs: Path, tmp_path: Path):
    examples = {name: code for name, code in EXAMPLES.items() if name.rpartition(".")[0] == package}
    in_folder(tmp_path, run_examples, examples, inputs)


def test_every_public_name_has_an_example():
    assert public_names().keys() - EXAMPLES.keys() == WITHOUT_EXAMPLE


def test_an_example_that_fails_is_told(inputs: Path, tmp_path: Path):
    """Otherwise the tests above would say little."""
    for wrong in (">>> 1 / 0\n", ">>> print(1 + 1)\n3\n"):
        shutil.copytree(inputs, tmp_path / "user", dirs_exist_ok=True)
        with pytest.raises(AssertionError, match=r"ZeroDivisionError|gives\n2\nand not\n3"):
            in_folder(tmp_path / "user", run_example, "wrong", wrong)
    right = f">>> import os\n>>> os.path.exists('{MODEL}/config.json'), os.path.exists('{DATA}')\n(True, True)\n"
    in_folder(tmp_path / "user", run_example, "right", right)
