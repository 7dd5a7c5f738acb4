"""A training by `moe-peft sft` or `moe-peft dpo` that is small enough for tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from moe_peft.cli import main
from tests.helpers.models import tiny_llama
from tests.helpers.upit_case import rows

ADAPTER = {"num_experts": 6, "top_k": 2, "r": 4, "lora_alpha": 8}
SETTINGS = {
    "per_device_train_batch_size": 4, "learning_rate": 5e-3, "max_steps": 6, "bf16": False, "use_cpu": True,
    "report_to": "none", "gradient_checkpointing": False, "disable_tqdm": True, "save_steps": 3, "logging_steps": 1,
}  # fmt: skip
MASKS = {"a": [1, 1, 0, 0, 0, 0], "b": [0, 0, 1, 1, 0, 0], "c": [0, 0, 0, 0, 1, 1]}
MAPS = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}


def make_case(folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Base model, data, and the settings of a run."""
    tiny_llama(vocab=128).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows(24))))
    pairs = [{"prompt": f"w{i + 3}", "chosen": f" w{i + 4} w5", "rejected": f" w{i + 9} w7"} for i in range(12)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return {
        "model_name_or_path": str(folder / "base"), "dataset_name": str(folder / "train.jsonl"), **ADAPTER, **SETTINGS
    }  # fmt: skip


def run(command: str, folder: Path, settings: dict, *flags: str) -> Path:
    (folder / "run.yaml").write_text(yaml.safe_dump({"output_dir": str(folder / "out"), **settings}, sort_keys=False))
    main([command, "--config", str(folder / "run.yaml"), *flags])
    return folder / "out"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")
