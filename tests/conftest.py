"""Fixtures shared by the tests: tiny models built from configs, nothing from a hub."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the imports: names that are not folders are not looked for

import datasets
import pytest
import transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import tests.helpers.templates  # noqa: F401
from tests.helpers import close
from tests.helpers.models import tiny_llama
from tests.helpers.words import word_tokenizer

# Tests ask servers on this machine, which a proxy of the environment does not reach.
_DIRECT = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
os.environ["no_proxy"] = f"127.0.0.1,localhost,{_DIRECT}"


def pytest_runtest_setup() -> None:
    """Trainers collect garbage many times; without this, all modules would be looked through each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Puts back what training arguments and commands set for the whole process."""
    before, verbosity = dict(os.environ), transformers.logging.get_verbosity()
    yield
    datasets.enable_progress_bars()
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(verbosity)
    logging.getLogger("moe_peft").setLevel(logging.NOTSET)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def pytest_terminal_summary(terminalreporter) -> None:
    if close.LOG and Path(close.LOG).exists():
        terminalreporter.section("largest error by comparison: share of the tolerance, tolerance, test")
        for place, (ratio, tolerance, test) in close.worst().items():
            terminalreporter.line(f"{ratio:8.4f} {tolerance:9.2e}  {place}  {test}")


@pytest.fixture
def llama() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Words "w3" … "w127"; 0 pads, 1 ends, 2 is unknown."""
    return word_tokenizer(model_max_length=256)


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The documentation as mkdocs builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder
