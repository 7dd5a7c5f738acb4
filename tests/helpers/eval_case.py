"""Tasks for lm-evaluation-harness on generated data, and models to evaluate."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoTokenizer

from moe_peft import MoELoraConfig
from tests.helpers.models import tiny_llama

# Two tasks with choices, a group of both, and one with a perplexity, where lower is better.
CHOICES = """\
task: toy_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
PERPLEXITY = """\
task: toy_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}]
"""
GROUP = """\
group: toy_both
task: [toy_a, toy_b]
aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]
"""


def rows(offset: int, count: int = 24) -> list[dict]:
    """Questions with three answers each."""
    words = [[f"w{3 + (i * 7 + j * (5 + i) + offset) % 120}" for j in range(12)] for i in range(count)]
    return [
        {"question": " ".join(w[:6]), "choices": [f" {w[6 + 2 * j]} {w[7 + 2 * j]}" for j in range(3)], "answer": i % 3}
        for i, w in enumerate(words)
    ]


def make_tasks(folder: Path) -> Path:
    """Write the task files and their data."""
    folder.mkdir(parents=True)
    for offset, name in enumerate(("a", "b")):
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, rows(offset))))
        (folder / f"{name}.yaml").write_text(CHOICES.format(name=name, data=data))
    (folder / "text.yaml").write_text(PERPLEXITY.format(data=folder / "a.jsonl"))
    (folder / "both.yaml").write_text(GROUP)
    return folder


def make_adapter(folder: Path, tokenizer, seed: int = 0) -> Path:
    """A base, `folder/base`, and an adapter for it with four experts that differ."""
    tiny_llama(vocab=128, seed=seed).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    model = tiny_llama(vocab=128, seed=seed)
    config = MoELoraConfig(num_experts=4, r=4, task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(model, config)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.5)
    model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    model.save_pretrained(folder / "adapter")
    return folder / "adapter"


def plain_scores(model: Any, folder: Path, tasks: list[str], **own: Any) -> dict[tuple[str, str], float]:
    """(task, metric) → value, by the harness's own means. The folder has the tasks and the base's tokenizer."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder / "base"), batch_size=4)
    manager = TaskManager(include_path=str(folder / "tasks"))
    results = simple_evaluate(lm, tasks=tasks, task_manager=manager, **own)["results"]
    return {
        (task, name.partition(",")[0]): value
        for task, row in results.items()
        for name, value in row.items()
        if "," in name and not name.partition(",")[0].endswith("_stderr")
    }


def lighten(setattr: Callable[[Any, str, Any], None] = setattr) -> None:
    """Take from the harness what takes its seconds: its index of thousands of tasks, and a report on the machine."""
    import lm_eval.evaluator
    from lm_eval.tasks import TaskManager

    original = TaskManager.__init__
    setattr(TaskManager, "__init__", lambda self, **options: original(self, **{**options, "include_defaults": False}))
    for name in ("add_env_info", "get_git_commit_hash"):
        setattr(lm_eval.evaluator, name, lambda *args: None)


@pytest.fixture
def light(monkeypatch):
    lighten(monkeypatch.setattr)


def lighten_harness() -> None:
    """The same in a process that runs the example."""
    if "--tasks" in sys.argv:
        lighten()
