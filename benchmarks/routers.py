"""
Attention-initialised routers against random ones, and the other routers, after equal training.

    python -m benchmarks.routers run --workers 2    # an hour on 2 cores; run it again to continue
    python -m benchmarks.routers report             # writes the table below benchmarks/results

The toy base becomes a MoE-LoRA adapter and a native Mixtral whose experts are copies of the base's FFN, trained on the
three toy domains. On the Mixtral the routers, mixtures and numbers of heads are those of Router Upcycling's tables 1 to
3. For a given seed everything but the router is the same: data, their order, initial experts.

Each router has a learning rate of its own: the best of three and of as many further doublings or halvings as it takes
for the best to have worse ones on both sides, by the held-out loss of a seed that is not compared.
Finished runs are lines of `benchmarks/results/routers.jsonl`; a run that is there is not done again.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging as transformers_logging

from examples.toy.base import ensure_base
from examples.toy.domains import build
from moe_peft import MoELoraConfig, init_attention_routers, replace_routers
from moe_peft.analysis.record import record_routing
from moe_peft.models.view import adapter_layers
from moe_peft.routing import RouterSettings
from moe_peft.routing.statistics import entropies, load_health
from moe_peft.training.sft import MoESFTConfig, MoESFTTrainer

from .differences import paired_difference
from .rates import best_rate, tune
from .runs import Ledger, start_workers
from .toy_training import SFT, loss_per_token, mixtral

N, STEPS, EXAMPLES = 4, 180, 240  # examples: of each domain
SEEDS, TUNING_SEED = range(6), 1000
RESULTS = Path("benchmarks/results/routers.jsonl")
BASE = RESULTS.with_name("upcycle_study_base")  # the toy base, which the study of upcycling keeps
RATES = {"adapter": (2e-3, 4e-3, 8e-3), "mixtral": (5e-4, 1e-3, 2e-3)}


@dataclass(frozen=True)
class Variant:
    """A router, and whether its values come from the base's attention."""

    settings: RouterSettings = field(default_factory=RouterSettings)
    from_attention: bool = False


def _attention(from_attention: bool = True, **settings: Any) -> Variant:
    return Variant(RouterSettings("attention", **settings), from_attention)


VARIANTS: dict[str, dict[str, Variant]] = {
    "adapter": {
        "linear": Variant(),
        "attention": _attention(),
        "attention, max": _attention(mixture="max"),
        "attention, random values": _attention(from_attention=False),
        "linear, from attention": Variant(from_attention=True),
        "mlp": Variant(RouterSettings("mlp")),
        "sigmoid": Variant(RouterSettings("sigmoid")),
        "locmoe": Variant(RouterSettings("locmoe")),
    },
    "mixtral": {
        "linear": Variant(),
        "switch": Variant(RouterSettings("switch", capacity_factor=1.25)),
        "locmoe": Variant(RouterSettings("locmoe")),
        "mlp": Variant(RouterSettings("mlp")),
        "attention": _attention(),
        "attention, 2 heads": _attention(num_heads=2),
        "attention, 8 heads": _attention(num_heads=8),
        "attention, max": _attention(mixture="max"),
        "attention, random values": _attention(from_attention=False),
    },
}


def make(base: Path, kind: str, router: str, batches: list[dict[str, torch.Tensor]], seed: int) -> Any:
    variant = VARIANTS[kind][router]
    if kind == "adapter":
        model = AutoModelForCausalLM.from_pretrained(base)
        set_seed(seed)
        own = {f"router_{k}": v for k, v in asdict(variant.settings).items() if k != "attention_size"}
        config = MoELoraConfig(num_experts=N, top_k=2, r=8, lora_alpha=16, task_type="CAUSAL_LM", **own)
        model = get_peft_model(model, config)
        for i, layer in enumerate(adapter_layers(model)):  # the same experts, whatever the routers drew
            set_seed(1000 * seed + i)
            layer.reset_parameters("default")
    else:
        model = mixtral(base, N, seed)
        if variant.settings != RouterSettings():
            replace_routers(model, variant.settings, seed=seed)
    if variant.from_attention:
        init_attention_routers(model, batches)
    return model


def run(base: Path, kind: str, router: str, seed: int, rate: float) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    train, test = (Dataset.from_list(rows) for rows in build(seed, EXAMPLES, EXAMPLES // 4))
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            **SFT, "max_steps": STEPS, "lr_scheduler_type": "cosine", "save_strategy": "no", "seed": seed,
            "learning_rate": rate, "router_aux_loss_coef": 0.02, "router_z_loss_coef": 0.001,
        }  # fmt: skip
        texts = [
            tokenizer.apply_chat_template(row["messages"], tokenize=False)
            for row in train.select(range(0, len(train), 9))
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
        "kind": kind, "router": router, "seed": seed, "rate": rate, "loss": loss,
        "entropy_at_start": entropy, "load_cv": health.coefficient_of_variation,
    }  # fmt: skip


# --- running ----------------------------------------------------------------------------------------------------------

JOBS = [(kind, router) for kind, routers in VARIANTS.items() for router in routers]


def work(base: Path, ledger: Ledger, worker: int, workers: int) -> None:
    """One worker's share of the runs: tuning first, then the seeds."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    rates = tune(
        JOBS,
        lambda job: tuned(ledger, *job),
        lambda job: RATES[job[0]],
        lambda job, rate: do(base, ledger, *job, TUNING_SEED, rate),
        worker,
        workers,
    )
    for seed, job in list(product(SEEDS, JOBS))[worker::workers]:
        if not ledger.has(kind=job[0], router=job[1], seed=seed, rate=rates[job]):
            do(base, ledger, *job, seed, rates[job])


def do(base: Path, ledger: Ledger, kind: str, router: str, seed: int, rate: float) -> None:
    start = time.perf_counter()
    record = run(base, kind, router, seed, rate)
    ledger.add(record, f"{time.perf_counter() - start:.0f} s")


def tuned(ledger: Ledger, kind: str, router: str) -> dict[float, float]:
    """Rate → loss of a router on the tuning seed."""
    wanted = (kind, router, TUNING_SEED)
    return {r["rate"]: r["loss"] for r in ledger.records() if (r["kind"], r["router"], r["seed"]) == wanted}


# --- report -----------------------------------------------------------------------------------------------------------


def report(ledger: Ledger) -> str:
    lines = [
        "# Routers after equal training",
        "",
        f"Made by `python -m benchmarks.routers run` and `… report`: {len(SEEDS)} seeds, {N} experts, top 2 (switch: "
        f"top 1), {STEPS} steps of 8 examples. Each router's learning rate is the best on another seed. "
        "Held-out loss (lower is better), mean of seeds, and its difference from the random linear one's, paired by "
        "seed, with a 95 % interval. Entropy at the start as a share of the greatest possible.",
        "",
        "| model | router | rate | held-out loss | difference | 95 % interval | entropy at start | load CV at end |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, router in JOBS:
        rate = best_rate(tuned(ledger, kind, router))
        rows = [ledger.find(kind=kind, router=router, seed=seed, rate=rate) for seed in SEEDS]
        compared = " | "
        if router == "linear":
            linear = [row["loss"] for row in rows]
        else:
            compared = " | ".join(paired_difference([row["loss"] for row in rows], linear).cells())
        loss, entropy, cv = (
            sum(row[key] for row in rows) / len(rows) for key in ("loss", "entropy_at_start", "load_cv")
        )
        lines.append(f"| {kind} | {router} | {rate:g} | {loss:.4f} | {compared} | {entropy:.2f} | {cv:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--base", type=Path, default=BASE, help="the base model; trained if missing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the finished runs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    ledger = Ledger(args.results)
    if args.command == "report":
        args.results.with_suffix(".md").write_text(report(ledger))
        print(report(ledger))
    elif args.worker is not None:
        work(args.base, ledger, args.worker, args.workers)
    else:
        ensure_base(args.base, 0)
        sys.exit(start_workers("routers", ["--results", str(args.results), "--base", str(args.base)], args.workers))


if __name__ == "__main__":
    main()
