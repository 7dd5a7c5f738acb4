"""Three LoRA adapters and three dense models of a tiny base, and rows of three domains, for `moe-peft mix`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from moe_peft.combine.mix_settings import MixSettings
from moe_peft.utils.validation import validate
from tests.helpers.models import tiny_llama

DOMAINS = ("a", "b", "c")
FFN = ["gate_proj", "up_proj", "down_proj"]


def rows(count: int = 36) -> list[dict[str, str]]:
    """Words of other thirds of the vocabulary in each domain."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        words = torch.randint(3 + 40 * (i % 3), 43 + 40 * (i % 3), (int(4 + i % 5),), generator=generator).tolist()
        made.append({"text": " ".join(f"w{word}" for word in words), "domain": DOMAINS[i % 3]})
    return made


def write_lora(
    folder: Path, base: Path, seed: int, targets: list[str] = FFN, r: int = 4, moved: dict[int, float] | None = None
) -> None:
    """
    Args:
        moved: token → what training has added to its row of the embeddings.
    """
    model = tiny_llama(vocab=128)
    torch.manual_seed(seed)
    config = LoraConfig(
        r=r, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM",
        trainable_token_indices=None if moved is None else [*moved],
    )  # fmt: skip
    adapted = get_peft_model(model, config)
    if moved is not None:
        delta = adapted.get_base_model().get_input_embeddings().token_adapter.trainable_tokens_delta["default"]
        delta.data += torch.tensor([*moved.values()])[:, None]
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder)


def make_case(folder: Path, tokenizer: Any) -> Path:
    """`base`, LoRAs `a`, `b`, `c`, `d`, dense `dense-a`, …, `data.jsonl`, `test.jsonl`, `a.jsonl`, …"""
    base = tiny_llama(vocab=128)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    for i, name in enumerate((*DOMAINS, "d")):
        write_lora(folder / name, folder / "base", i)
    for i, name in enumerate(DOMAINS):
        model = tiny_llama(vocab=128)
        torch.manual_seed(i)
        for parameter in model.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        model.save_pretrained(folder / f"dense-{name}")
        tokenizer.save_pretrained(folder / f"dense-{name}")
    of_domain = {name: [row for row in rows() if row["domain"] == name] for name in DOMAINS}
    files = {"data": rows(), "test": rows()[:12], **of_domain}
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
    return folder


def settings(case: Path, **changes: Any) -> MixSettings:
    values = {
        "adapters": [str(case / name) for name in DOMAINS],
        "data": [str(case / "data.jsonl")],
        "label_column": "domain",
        **changes,
    }
    return validate(MixSettings, {name: value for name, value in values.items() if value is not None})
