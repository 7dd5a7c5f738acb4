"""
PEFT's own tests, which its source distribution has, with this adapter type in place of PEFT's.

    python -m compatibility.peft_suite   # a few minutes; pip downloads the source of the installed peft

Of its files for decoder models, custom models and configs, the tests that PEFT runs for every adapter type. There is no
hub: its models are made from configs, as tiny as those of the hub, in a cache of their own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from moe_peft import MoELoraConfig

RESULTS = Path(__file__).parent / "results" / "peft_suite.md"
CACHE = Path(__file__).parents[1] / ".cache" / "peft_suite"
REPORT = CACHE / "report.xml"
FILES = ("test_decoder_models.py", "test_custom_models.py", "test_config.py")
# Models of PEFT's tests → their type and what differs from the small sizes of all.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "peft-internal-testing/tiny-random-OPTForCausalLM": ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 64}),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("gpt2", {}),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": ("gptj", {"rotary_dim": 4}),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("llama", {}),
    "peft-internal-testing/tiny-dummy-qwen2": ("qwen2", {}),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": ("gemma3_text", {"head_dim": 8}),
}
# Part of a test's name or of its message → why it fails.
REASONS = {
    "MoE-LoRA cannot merge": "it merges. Each token has its own experts, so no weight equals them; the error says so, "
    "and what to do instead",
    "with_bias_raises": "`bias` is refused at once: experts have none",
    "test_default_target_modules": "it asks for a list of linears by model type. By default, experts go to the FFNs "
    "that are found, and the error says why there are none",
    "Hub": (HUB := "it needs data of the hub"),
    "huggingface.co": HUB,
    "tiny-opt-lora-revision": HUB,
    "test_only_params_are_updated": "it trains an unbounded loss at a rate of 0.5. After two steps, the router is sure "
    "of its choice (the loss is -1e32), and its gradient is zero",
}
MOE = {"num_experts": 4, "top_k": 2, "r": 4}


def cases(arguments: str) -> list[tuple[Any, ...]] | None:
    """What a test for every adapter type runs with, by the names of its arguments; None: it is no such test."""
    if arguments == "config_cls,config_kwargs":
        return [(MoELoraConfig, {"task_type": "CAUSAL_LM", "target_modules": None, **MOE})]
    if arguments == "test_name, model_id, config_cls, config_kwargs":
        kinds = [
            {"target_modules": "lin0"},
            {"target_modules": ["lin1"]},
            {"target_modules": ["lin0", "lin1"]},
            {"target_modules": ["lin0"], "modules_to_save": ["lin1"]},
        ]
        return [(f"MLP {i} MoE-LoRA", "MLP", MoELoraConfig, {**MOE, **kind}) for i, kind in enumerate(kinds)]
    if arguments == "config_class, mandatory_kwargs":
        return [(MoELoraConfig, {})]
    return [MoELoraConfig] if arguments == "config_cls" else None


# --- the plugin: in pytest's process ---------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: Any) -> None:
    markers = metafunc.definition.own_markers
    for i, marker in enumerate(markers):
        if marker.name == "parametrize" and isinstance(marker.args[0], str) and (ours := cases(marker.args[0])):
            markers[i] = pytest.mark.parametrize(marker.args[0], ours).mark
    for module in (metafunc.module, sys.modules.get(f"{metafunc.module.__package__}.testing_common")):
        if hasattr(module, "set_init_weights_false"):  # whose name of the setting depends on the adapter type
            module.set_init_weights_false = lambda config_cls, options: {**options, "init_lora_weights": False}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    items[:] = [
        item for item in items if MoELoraConfig in getattr(getattr(item, "callspec", None), "params", {}).values()
    ]


# --- the command -----------------------------------------------------------------------------------------------------


def make_models() -> None:
    """The models, with a tokenizer, where a cache of the hub has its snapshots."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.helpers.words import word_tokenizer

    for name, (kind, others) in MODELS.items():
        folder = CACHE / "hub" / f"models--{name.replace('/', '--')}"
        if folder.exists():
            continue
        sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 256}
        config = AutoConfig.for_model(
            kind, **sizes, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=128, **others
        )
        snapshot = folder / "snapshots" / "0"
        AutoModelForCausalLM.from_config(config).save_pretrained(snapshot)
        word_tokenizer(model_max_length=128).save_pretrained(snapshot)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0")


def sources() -> Path:
    """PEFT's source distribution, unpacked, and what its tests import."""
    name = f"peft-{version('peft')}"
    if not (CACHE / name).exists():
        packages = ["--target", str(CACHE / "packages"), "diffusers", "parameterized"]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *packages], check=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--no-build-isolation", f"peft=={version('peft')}", "--dest", str(CACHE)], check=True)
        with tarfile.open(CACHE / f"{name}.tar.gz") as archive:
            archive.extractall(CACHE, filter="data")
        (CACHE / name / "tests" / "__init__.py").touch()  # which is not in it
    return CACHE / name


def reason(test: str, outcome: str, message: str) -> str | None:
    """Why a test does not hold for this adapter type; None: it should."""
    if outcome == "skipped":
        return "PEFT skips it: it is for some adapter types only, or not for this model"
    return next((why for part, why in REASONS.items() if part in test or part in message), None)


def report() -> str:
    """The page of a run."""
    found = list(ElementTree.parse(REPORT).iter("testcase"))
    others = []  # file, test, why it did not pass (None: it should have), message
    for case in found:
        for outcome in case:  # none if it passed
            message = outcome.get("message", "")
            why = reason(case.attrib["name"], outcome.tag, message)
            others.append((case.attrib["classname"], case.attrib["name"], why, message))
    lines = [
        "# PEFT's own tests",
        "",
        "`python -m compatibility.peft_suite` writes this page: PEFT's tests for every adapter type, with "
        f"`MoELoraConfig` in place of its own. peft {version('peft')}, transformers {version('transformers')}.",
        "",
        "| file | tests | passed | did not, explained | failed |",
        "|---|---|---|---|---|",
    ]
    for file in FILES:
        part = file.removesuffix(".py")
        count = sum(part in case.attrib["classname"] for case in found)
        counts = Counter(why is not None for name, _, why, _ in others if part in name)
        lines.append(f"| `{file}` | {count} | {count - counts.total()} | {counts[True]} | {counts[False]} |")
    lines += ["", "| reason | tests |", "|---|---|"]
    for why, count in Counter(why for _, _, why, _ in others if why).most_common():
        lines.append(f"| {why} | {count} |")
    lines += [f"\n`{test}`: {message.splitlines()[0]}" for _, test, why, message in others if not why]
    return "\n".join(lines) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    make_models()
    root = str(Path(__file__).parents[1])
    cache = {"HF_HUB_CACHE": str(CACHE / "hub"), "HF_HUB_OFFLINE": "1"}
    env = {**os.environ, **cache, "PYTHONPATH": f"{root}{os.pathsep}{CACHE / 'packages'}"}
    plugins = ["-p", "compatibility.peft_suite", "-p", "no:cacheprovider", "-p", "no:warnings"]
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", *plugins, f"--junitxml={REPORT}"]
    subprocess.run([*command, *(f"tests/{file}" for file in FILES)], cwd=sources(), env=env)
    RESULTS.write_text(report())
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
