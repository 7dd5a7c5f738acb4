"""
Attention-initialised routers against random ones, and the other routers, after equal training.

    python -m benchmarks.routers    # some hours on one core; writes benchmarks/results/routers.md

The toy base becomes a MoE-LoRA adapter and a native Mixtral whose experts are copies of the base's FFN, trained on the
three toy domains. On the Mixtral the routers, mixtures and numbers of heads are those of Router Upcycling's tables 1 to
3. For a given seed everything but the router is the same: data, their order, initial experts.

Each router has a learning rate of its own: the best of three, by the held-out loss of a seed that is not compared.
Runs whose results are in `--runs` are not repeated, so a study that was stopped continues.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from examples.toy.base import ensure_base
from examples.toy.domains import build
from moe_peft import MoELoraConfig, init_attention_routers, replace_routers
from moe_peft.analysis.record import record_routing
from moe_peft.models.view import adapter_layers
from moe_peft.routing import RouterSettings
from moe_peft.routing.statistics import entropies, load_health
from moe_peft.training.sft import MoESFTConfig, MoESFTTrainer

from .differences import paired_difference
from .runs import finished, slug
from .toy_training import SFT, loss_per_token, mixtral

N = 4
TUNING_SEED = 1000
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


@dataclass(frozen=True)
class Size:
    """How long a run trains, and on how many examples of each domain."""

    steps: int
    examples: int


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


def run(base: Path, kind: str, router: str, seed: int, rate: float, size: Size) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    train, test = (Dataset.from_list(rows) for rows in build(seed, size.examples, max(size.examples // 4, 1)))
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            **SFT, "max_steps": size.steps, "lr_scheduler_type": "cosine", "save_strategy": "no", "seed": seed,
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


def study(base: Path, folder: Path, wanted: Sequence[tuple[str, str]], seeds: int, size: Size) -> list[dict[str, Any]]:
    """Tune each router's rate, then run all seeds; finished runs are read."""
    folder = folder / f"{size.steps}-steps-{size.examples}-examples"
    folder.mkdir(parents=True, exist_ok=True)

    def one(kind: str, router: str, seed: int, rate: float) -> dict[str, Any]:
        path = folder / f"{kind}-{slug(router)}-{seed}-{rate:g}.json"
        return finished(path, partial(run, base, kind, router, seed, rate, size))

    rates = {}
    for kind, router in wanted:
        tried = [one(kind, router, TUNING_SEED, rate) for rate in RATES[kind]]
        rates[kind, router] = min(tried, key=lambda record: record["loss"])["rate"]
    return [one(kind, router, seed, rates[kind, router]) for seed in range(seeds) for kind, router in wanted]


def report(runs: list[dict[str, Any]], wanted: Sequence[tuple[str, str]], seeds: int, size: Size) -> str:
    lines = [
        "# Routers after equal training",
        "",
        f"Made by `python -m benchmarks.routers`: {seeds} seeds, {N} experts, top 2 (switch: top 1), {size.steps} "
        "steps of 8 examples. Each router's learning rate is the best of three on another seed. Held-out loss (lower "
        "is better), mean of seeds, and its difference from the random linear one's, paired by seed, with a 95 % "
        "interval. Entropy at the start as a share of the greatest possible.",
        "",
        "| model | router | rate | held-out loss | difference | 95 % interval | entropy at start | load CV at end |",
        "|---|---|---|---|---|---|---|---|",
    ]
    table = {(r["kind"], r["router"], r["seed"]): r for r in runs}
    for kind, router in wanted:
        rows = [table[kind, router, seed] for seed in range(seeds)]
        linear = [table[kind, "linear", seed]["loss"] for seed in range(seeds)]
        compared = " | "
        if router != "linear" and seeds > 1:
            compared = " | ".join(paired_difference([row["loss"] for row in rows], linear).cells())
        loss, entropy, cv = (sum(row[key] for row in rows) / seeds for key in ("loss", "entropy_at_start", "load_cv"))
        lines.append(
            f"| {kind} | {router} | {rows[0]['rate']:g} | {loss:.4f} | {compared} | {entropy:.2f} | {cv:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path(".cache/base"), help="the base model; trained if missing")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--examples", type=int, default=240, help="of each domain")
    parser.add_argument("--routers", nargs="+", metavar="ROUTER", help="beside the linear one; default: all")
    parser.add_argument("--runs", type=Path, default=Path(".cache/routers"), help="finished runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/routers.md"))
    args = parser.parse_args()
    chosen = None if args.routers is None else {"linear", *args.routers}
    wanted = [(kind, r) for kind, routers in VARIANTS.items() for r in routers if chosen is None or r in chosen]
    size = Size(args.steps, args.examples)
    runs = study(ensure_base(args.base, 0), args.runs, wanted, args.seeds, size)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(report(runs, wanted, args.seeds, size))
    print(args.out.read_text())


if __name__ == "__main__":
    main()
