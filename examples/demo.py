"""UpIT's quickstart: one small model, three domains, and what LoRA, LoRAMoE-SFT and UpIT make of it.

    python examples/demo.py [--out .cache/demo] [--base .cache/base] [--fast]

Runs `recipes/upit/quickstart.yaml` once per method, on the same data and with the same budget: the adapter is trained
through the recipe's stages, saved, reloaded and judged on held-out rows. LoRA has rank 16; the mixtures have 8 experts
of rank 8, of which 2 are active. Runs offline, on a CPU, in a few minutes; stopped, it goes on where it was. `--fast`
only shows that everything works: its numbers mean nothing.
"""

import argparse
import json
import logging
import sys
from pathlib import Path

from domains import DOMAINS, Row, build, write_jsonl
from peft import AutoPeftModelForCausalLM
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tiny_base import ensure_base
from transformers import AutoTokenizer
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer

from moe_peft.upit import UpIT, load_recipe

SEED = 0
TOLERANCE = 0.02  # how much worse than LoRA's a mixture's mean held-out loss may be
RECIPE = Path(__file__).parents[1] / "recipes" / "upit" / "quickstart.yaml"
METHODS = {
    "LoRA": ("method=lora", "adapter.r=16", "adapter.lora_alpha=32"),  # as many active parameters as the mixtures
    "LoRAMoE-SFT": ("method=loramoe_sft",),
    "UpIT": ("method=upit",),
}
FAST = ("num_experts=4", "sft.per_device_train_batch_size=4", "router_init.seed_fraction=0.2")


def reply(model: Model, tokenizer: Tokenizer, row: Row) -> str:
    """The model's greedy answer to a row's question."""
    prompt = tokenizer.apply_chat_template(
        row["messages"][:1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    output = model.generate(**prompt, max_new_tokens=100, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def compare(base: Path, train: list[Row], test: list[Row], out: Path, overrides: tuple[str, ...]) -> dict[str, float]:
    """Run every method, show and save the results; returns each one's mean held-out loss."""
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        write_jsonl(out / f"{name}.jsonl", rows)
    inputs = (f"model.name_or_path={base}", f"data.train={out / 'train.jsonl'}", f"data.eval={out / 'test.jsonl'}")
    results: dict[str, dict[str, float]] = {}
    for method, own in METHODS.items():
        console.rule(method)
        folder = out / method.lower()
        pipeline = UpIT(load_recipe(RECIPE, [*inputs, f"output_dir={folder}", *overrides, *own]))
        pipeline.run()
        losses = pipeline.records["evaluate"]["metrics"]["loss"]
        results["base"], results[method] = losses["base"], losses["adapted"]
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")

    table = Table("method", title="Held-out loss per answer token")
    for column in (*DOMAINS, "mean"):
        table.add_column(column, justify="right")
    for method, result in results.items():
        table.add_row(method, *(f"{result[column]:.3f}" for column in (*DOMAINS, "mean")))
    console.print(table)
    model = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    for domain in DOMAINS:
        row = next(row for row in test if row["domain"] == domain)
        console.print(f"[bold]{domain}[/bold]: {escape(row['messages'][0]['content'])}")
        console.print(escape(reply(model, tokenizer, row)), style="cyan", highlight=False)
    figure = folder / "evaluate" / "routing.png"
    console.print(f"where each domain's tokens go: {figure}", highlight=False, soft_wrap=True)
    return {method: result["mean"] for method, result in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA, LoRAMoE-SFT and UpIT on three domains.")
    parser.add_argument("--out", type=Path, default=Path(".cache/demo"), help="for adapters and results")
    parser.add_argument("--base", type=Path, default=Path(".cache/base"), help="trained when missing")
    parser.add_argument("--fast", action="store_true", help="a few steps on a minimal model")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_peft").setLevel(logging.INFO)
    try:
        if args.fast:
            overrides, (train, test) = FAST, build(SEED, 16, 4)
            base = ensure_base(args.out / "base", SEED, hidden=32, layers=2, vocab_size=512, chars=60_000)
        else:
            overrides, (train, test) = (), build(SEED, 400, 60)
            base = ensure_base(args.base, SEED)
        means = compare(base, train, test, args.out, overrides)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    excess = max(means[method] for method in means if method not in ("base", "LoRA")) - means["LoRA"]
    if not args.fast and excess > TOLERANCE:
        sys.exit(f"a mixture's mean held-out loss is {excess:.3f} worse than LoRA's; the limit is {TOLERANCE}")


if __name__ == "__main__":
    main()
