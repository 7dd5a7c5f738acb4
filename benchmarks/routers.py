"""
Attention-initialised routers against random ones, and the other routers, after equal training.

    python -m benchmarks.routers    # an hour on one core; writes benchmarks/results/routers.md

The toy base becomes a MoE-LoRA adapter and a native Mixtral whose experts are copies of the base's FFN, trained on the
three toy domains. For a given seed everything but the router is the same: data, their order, initial experts. The
learning rates are the demo's (adapter) and a quarter of it (all weights of the Mixtral), the same for all routers. Runs
whose results are in `--runs` are not repeated.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from examples.toy.base import ensure_base
from examples.toy.domains import build
from moe_peft import MoELoraConfig, init_attention_routers
from moe_peft.analysis.record import record_routing
from moe_peft.models.view import adapter_layers
from moe_peft.routing.statistics import entropies, load_health
from moe_peft.training.sft import MoESFTConfig, MoESFTTrainer

from .differences import paired_difference
from .runs import finished, slug
from .toy_training import SFT, loss_per_token, mixtral

N, STEPS = 4, 180
# Name → settings of the adapter, and whether values come from the base's attention.
ADAPTERS: dict[str, tuple[dict[str, Any], bool]] = {
    "linear": ({}, False),
    "attention": ({"router_type": "attention"}, True),
    "attention, max": ({"router_type": "attention", "router_mixture": "max"}, True),
    "attention, random values": ({"router_type": "attention"}, False),
    "linear, from attention": ({}, True),
    "mlp": ({"router_type": "mlp"}, False),
    "sigmoid": ({"router_type": "sigmoid"}, False),
    "locmoe": ({"router_type": "locmoe"}, False),
}
NATIVE = {"linear": False, "attention": True}


def make(base: Path, kind: str, router: str, batches: list[dict[str, torch.Tensor]], seed: int) -> Any:
    if kind == "adapter":
        settings, from_attention = ADAPTERS[router]
        model = AutoModelForCausalLM.from_pretrained(base)
        set_seed(seed)
        config = MoELoraConfig(num_experts=N, top_k=2, r=8, lora_alpha=16, task_type="CAUSAL_LM", **settings)
        model = get_peft_model(model, config)
        for i, layer in enumerate(adapter_layers(model)):  # the same experts, whatever the routers drew
            set_seed(1000 * seed + i)
            layer.reset_parameters("default")
    else:
        from_attention = NATIVE[router]
        model = mixtral(base, N, seed)
    if from_attention:
        init_attention_routers(model, batches)
    return model


def run(base: Path, kind: str, router: str, seed: int) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    train, test = (Dataset.from_list(rows) for rows in build(seed, 240, 60))
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            **SFT, "max_steps": STEPS, "lr_scheduler_type": "cosine", "save_strategy": "no", "seed": seed,
            "learning_rate": 4e-3 if kind == "adapter" else 1e-3,
            "router_aux_loss_coef": 0.02, "router_z_loss_coef": 0.001,
        }  # fmt: skip
        texts = [
            tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in train.select(range(0, 720, 9))
        ]
        encoded = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=256)
        batches = [{key: encoded[key] for key in ("input_ids", "attention_mask")}]
        model = make(base, kind, router, batches, seed)
        with torch.no_grad():
            logits = model(**batches[0], output_router_logits=True).router_logits
        real = batches[0]["attention_mask"].flatten().bool()
        entropy = float(entropies(logits)[:, real].mean()) / math.log(N)
        trainer = MoESFTTrainer(
            model=model, args=MoESFTConfig(output_dir=folder, **settings), train_dataset=train,
            processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
        test = MoESFTTrainer(
            model=model, args=trainer.args, train_dataset=test, processing_class=tokenizer
        ).train_dataset
        with record_routing(model) as statistics:
            loss = loss_per_token(trainer, test)
    health = load_health(statistics.counts.sum(0), statistics.sizes)
    return {
        "kind": kind, "router": router, "seed": seed, "loss": loss,
        "entropy_at_start": entropy, "load_cv": health.coefficient_of_variation,
    }  # fmt: skip


def report(runs: list[dict[str, Any]], seeds: int) -> str:
    lines = [
        "# Routers after equal training",
        "",
        f"Made by `python -m benchmarks.routers`: {seeds} seeds, {N} experts, top 2, {STEPS} steps of 8 "
        "examples. Held-out loss (lower is better), mean of seeds, and its difference from the random linear one's, "
        "paired by seed, with a 95 % interval. Entropy at the start as a share of the greatest possible.",
        "",
        "| model | router | held-out loss | difference | 95 % interval | entropy at the start | load CV at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    table = {(r["kind"], r["router"], r["seed"]): r for r in runs}
    for kind, routers in (("adapter", ADAPTERS), ("mixtral", NATIVE)):
        for router in routers:
            rows = [table[kind, router, seed] for seed in range(seeds)]
            d = paired_difference(
                [row["loss"] for row in rows], [table[kind, "linear", seed]["loss"] for seed in range(seeds)]
            )
            compared = " | ".join(d.cells()) if router != "linear" else " | "
            loss, entropy, cv = (
                sum(row[key] for row in rows) / seeds for key in ("loss", "entropy_at_start", "load_cv")
            )
            lines.append(f"| {kind} | {router} | {loss:.4f} | {compared} | {entropy:.2f} | {cv:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path(".cache/base"), help="the base model; trained if missing")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--runs", type=Path, default=Path(".cache/routers"), help="finished runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/routers.md"))
    args = parser.parse_args()
    base = ensure_base(args.base, 0)
    args.runs.mkdir(parents=True, exist_ok=True)
    wanted = [("adapter", router) for router in ADAPTERS] + [("mixtral", router) for router in NATIVE]
    runs = [
        finished(args.runs / f"{kind}-{slug(router)}-{seed}.json", partial(run, base, kind, router, seed))
        for seed in range(args.seeds)
        for kind, router in wanted
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(report(runs, args.seeds))
    print(args.out.read_text())


if __name__ == "__main__":
    main()
