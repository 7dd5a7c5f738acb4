"""Code that loads what a folder holds, for its card."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

PLACE = "path/to/this/folder"
# Of each task type: PEFT's class, and the hub's name of the task.
TASKS = {
    "CAUSAL_LM": ("AutoPeftModelForCausalLM", "text-generation"),
    "SEQ_2_SEQ_LM": ("AutoPeftModelForSeq2SeqLM", "text-generation"),
    "SEQ_CLS": ("AutoPeftModelForSequenceClassification", "text-classification"),
    "TOKEN_CLS": ("AutoPeftModelForTokenClassification", "token-classification"),
    "QUESTION_ANS": ("AutoPeftModelForQuestionAnswering", "question-answering"),
    "FEATURE_EXTRACTION": ("AutoPeftModelForFeatureExtraction", "feature-extraction"),
}
_HEAD = re.compile(r"\.(?:score|classifier)\.(?:.+\.)?weight$")


def adapter_snippet(config: dict[str, Any], folder: Path, bases: Sequence[str]) -> str:
    """
    Code that loads an adapter.

    Args:
        config: its `adapter_config.json`.
        bases: the models that it was made from.
    """
    ours = config.get("peft_type") == "MOE_LORA"
    lines = ["import moe_peft  # adds the adapter type MOE_LORA to PEFT"] if ours else []
    auto, task = TASKS.get(config.get("task_type") or "", (None, None))
    if auto is None:
        return "\n".join(
            [*lines, "from peft import PeftConfig, PeftModel", "from transformers import AutoModel", "",
             f'config = PeftConfig.from_pretrained("{PLACE}")',
             "base = AutoModel.from_pretrained(config.base_model_name_or_path)  # or the class that was trained",
             f'model = PeftModel.from_pretrained(base, "{PLACE}")']
        )  # fmt: skip
    own = (folder / "tokenizer_config.json").is_file()
    of_base = bool(bases) and (not os.path.isdir(bases[0]) or (Path(bases[0]) / "tokenizer_config.json").is_file())
    source = f'"{PLACE}"' if own else 'model.peft_config["default"].base_model_name_or_path'
    labels = _num_labels(folder) if task in ("text-classification", "token-classification") else None
    options = f", num_labels={labels}" if labels else ""
    return _snippet([*lines, f"from peft import {auto}"], auto, source if own or of_base else None, options)


def model_snippet(config: dict[str, Any], folder: Path) -> str:
    """Code that loads a model whose `config.json` is `config`."""
    auto = "AutoModelForCausalLM"
    source = f'"{PLACE}"' if (folder / "tokenizer_config.json").is_file() else None
    lines, after = [f"from transformers import {auto}"], []
    if "moe_peft_router" in config:
        lines.append("from moe_peft.native import load_routers")
        after = [f'load_routers(model, "{PLACE}")  # transformers does not know these routers']
    return _snippet(lines, auto, source, after=after)


def _num_labels(folder: Path) -> int | None:
    """Rows of the classifier's head that is saved with the adapter."""
    if not (path := folder / "adapter_model.safetensors").is_file():
        return None
    with safe_open(path, "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys() if _HEAD.search(name)]  # noqa: SIM118
    return min((rows for rows, *columns in shapes if columns), default=None)


def _snippet(lines: list[str], auto: str, tokenizer: str | None, options: str = "", after: Sequence[str] = ()) -> str:
    """Code that loads a model and, if it can generate and there is a tokenizer, generates."""
    generates = tokenizer is not None and auto.endswith(("CausalLM", "Seq2SeqLM"))
    if generates and lines[-1].startswith("from transformers"):
        lines = [*lines[:-1], f"{lines[-1]}, AutoTokenizer"]
    elif generates:
        lines = [*lines, "from transformers import AutoTokenizer"]
    lines = [*lines, "", f'model = {auto}.from_pretrained("{PLACE}"{options})', *after]
    if generates:
        lines += [
            f"tokenizer = AutoTokenizer.from_pretrained({tokenizer})",
            'inputs = tokenizer("Once upon a time", return_tensors="pt")',
            "output = model.generate(**inputs, max_new_tokens=50)",
            "print(tokenizer.decode(output[0], skip_special_tokens=True))",
        ]
    return "\n".join(lines)
