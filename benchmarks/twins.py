"""
How often the two best experts of a token share a key, with grouped-query attention and attention-initialised routers.

    python -m benchmarks.twins    # two minutes; writes the table below benchmarks/results

A Llama model with 32 query heads and 8 key heads, random or trained for 60 steps, becomes a MoE-LoRA adapter, whose
routers get the attention's queries and keys. "noise": experts that share a key head get its key and noise of 1 %.
"shares": the key is divided among them (`moe_peft.routing.attention_heads.share_keys`).
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import get_peft_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from examples.toy.base import corpus, running_text
from moe_peft import MoELoraConfig, init_attention_routers
from moe_peft.routing import attention_heads

RESULTS = Path("benchmarks/results/twins.md")
TOKENIZER = RESULTS.with_name("upcycle_study_base")
KEY_HEADS, SEEDS, STEPS = 8, range(3), 60


def make(seed: int, rows: torch.Tensor, steps: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=256, head_dim=8, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=32, num_key_value_heads=KEY_HEADS,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        batch = rows[4 * step : 4 * step + 4]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def twin_share(model: LlamaForCausalLM, n: int, shared: bool, rows: torch.Tensor) -> float:
    """The share of tokens whose two best experts have one key before it is divided; the mean over layers."""
    families: list[torch.Tensor] = []
    divide = attention_heads.share_keys

    def recorded(keys_GW: torch.Tensor, mean_queries_GW: torch.Tensor) -> torch.Tensor:
        families.append(attention_heads.key_families(keys_GW))
        return divide(keys_GW, mean_queries_GW) if shared else keys_GW * (1 + 0.01 * torch.randn_like(keys_GW))

    adapter: Any = get_peft_model(model, MoELoraConfig(num_experts=n, router_type="attention", task_type="CAUSAL_LM"))
    with patch.object(attention_heads, "share_keys", recorded):
        init_attention_routers(adapter, [{"input_ids": rows[:16]}])
    with torch.no_grad():
        logits = adapter(input_ids=rows[16:32], output_router_logits=True).router_logits
    adapter.unload()
    pairs = [family_G[of_layer.topk(2).indices] for family_G, of_layer in zip(families, logits, strict=True)]
    return statistics.mean(float((pair[:, 0] == pair[:, 1]).float().mean()) for pair in pairs)


def by_chance(n: int) -> float:
    """Of random pairs; as many experts for each key head."""
    return max(n // KEY_HEADS - 1, 0) / (n - 1)


def table() -> Iterator[str]:
    yield "| experts | random model: noise | shares | trained model: noise | shares | by chance |"
    yield "|---|---|---|---|---|---|"
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    rows = torch.tensor(running_text(corpus(random.Random(0), 600_000), tokenizer))
    held_out, train = rows[:32], rows[32:]
    models = {steps: [make(seed, train, steps) for seed in SEEDS] for steps in (0, STEPS)}
    for n in (8, 16, 32):
        cells = [
            statistics.mean(twin_share(model, n, shared, held_out) for model in of_kind)
            for of_kind in models.values()
            for shared in (False, True)
        ]
        yield f"| {n} | {' | '.join(f'{100 * cell:.1f} %' for cell in (*cells, by_chance(n)))} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    transformers_logging.set_verbosity_error()
    head = [
        "# Experts that share a key head", "",
        "Made by `python -m benchmarks.twins`: the share of tokens whose two best experts have the same key head, mean",
        f"of {len(SEEDS)} seeds and 3 layers. Its head says what the columns are.", "",
    ]  # fmt: skip
    text = "\n".join([*head, *table()]) + "\n"
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
