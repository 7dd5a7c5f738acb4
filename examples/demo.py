"""Fine-tune one small model on three domains at once: plain LoRA against a mixture of LoRA experts.

    python examples/demo.py [--out .cache/demo] [--base .cache/base] [--fast]

The two adapters change the same FFN projections with the same active rank per token (one LoRA of rank 16; 2
of 8 experts of rank 8), scaling, steps and data order. Each is trained by the stock `SFTTrainer`, saved, and
reloaded through `AutoPeftModelForCausalLM` before it is judged on held-out rows. Runs offline, on a CPU, in a
few minutes. `--fast` only shows that everything works: its numbers mean nothing.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from domains import DOMAINS, Row, build
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tiny_base import ensure_base
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer
from trl import SFTConfig, SFTTrainer

from moe_peft import MoELoraConfig

SEED = 0
TOLERANCE = 0.02  # how much worse than LoRA's the mean held-out loss may be

FFN = ["gate_proj", "up_proj", "down_proj"]  # what MoELoraConfig adapts by default
LORA = LoraConfig(r=16, lora_alpha=32, target_modules=FFN, task_type="CAUSAL_LM")
MOE_LORA = MoELoraConfig(num_experts=8, top_k=2, r=8, lora_alpha=16, task_type="CAUSAL_LM")
# With the rate that did best for each, of 2e-3, 4e-3, 8e-3 and 16e-3, on another sample of the data.
METHODS: dict[str, tuple[PeftConfig, float]] = {"LoRA": (LORA, 8e-3), "MoE-LoRA": (MOE_LORA, 4e-3)}


def fine_tune(base: Path, config: PeftConfig, rate: float, rows: list[Row], steps: int, out: Path) -> int:
    """Train one adapter and save it to `out`; returns its number of trainable parameters."""
    args = SFTConfig(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        assistant_only_loss=True,
        max_length=256,
        bf16=False,  # SFTConfig's defaults save accelerator memory; here they would only cost time
        gradient_checkpointing=False,
        logging_steps=25,
        save_strategy="no",
        report_to="none",
        seed=SEED,
        data_seed=SEED,  # the same batches in the same order for every method
    )
    dataset = Dataset.from_list(rows)
    trainer = SFTTrainer(model=str(base), args=args, train_dataset=dataset, peft_config=config)
    trainer.train()
    trainer.save_model()
    return trainer.model.get_nb_trainable_parameters()[0]


@torch.no_grad()
def held_out_losses(model: Model, tokenizer: Tokenizer, rows: list[Row]) -> dict[str, float]:
    """The mean loss per answer token for each domain, and the mean over domains."""
    model.eval()
    losses = {}
    for domain in DOMAINS:
        total, count = 0.0, 0
        for messages in (row["messages"] for row in rows if row["domain"] == domain):
            encoded = tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
            )
            answer = encoded["assistant_masks"][0, 1:].bool()
            ids = encoded["input_ids"].to(model.device)
            logits = model(input_ids=ids).logits[0, :-1]
            total += cross_entropy(logits[answer], ids[0, 1:][answer], reduction="sum").item()
            count += int(answer.sum())
        losses[domain] = total / count
    return {**losses, "mean": sum(losses.values()) / len(losses)}


def reply(model: Model, tokenizer: Tokenizer, row: Row) -> str:
    """The model's greedy answer to a row's question."""
    prompt = tokenizer.apply_chat_template(
        row["messages"][:1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    output = model.generate(**prompt, max_new_tokens=100, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def compare(base: Path, train: list[Row], test: list[Row], steps: int, out: Path) -> dict[str, float]:
    """Train and judge every method, show and save the results; returns each one's mean held-out loss."""
    console = Console()
    console.print(f"{len(train)} training rows, {len(test)} held-out rows, {steps} steps")
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    results: dict[str, dict[str, float]] = {}
    results["base"] = {**held_out_losses(model, tokenizer, test), "trainable_parameters": 0, "seconds": 0}
    for method, (config, rate) in METHODS.items():
        console.rule(method)
        folder = out / method.lower()
        start = time.perf_counter()
        parameters = fine_tune(base, config, rate, train, steps, folder)
        seconds = time.perf_counter() - start
        model = AutoPeftModelForCausalLM.from_pretrained(folder)
        losses = held_out_losses(model, tokenizer, test)
        results[method] = {**losses, "trainable_parameters": parameters, "seconds": round(seconds)}
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")

    table = Table("method", title="Held-out loss per answer token")
    for column in results["base"]:
        table.add_column(column.replace("_", " "), justify="right")
    for method, result in results.items():
        cells = (f"{cell:.3f}" if isinstance(cell, float) else f"{cell:,}" for cell in result.values())
        table.add_row(method, *cells)
    console.print(table)
    for domain in DOMAINS:
        row = next(row for row in test if row["domain"] == domain)
        console.print(f"[bold]{domain}[/bold]: {escape(row['messages'][0]['content'])}")
        console.print(escape(reply(model, tokenizer, row)), style="cyan", highlight=False)
    return {method: result["mean"] for method, result in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA against MoE-LoRA on three domains.")
    parser.add_argument("--out", type=Path, default=Path(".cache/demo"), help="for adapters and results")
    parser.add_argument("--base", type=Path, default=Path(".cache/base"), help="trained when missing")
    parser.add_argument("--fast", action="store_true", help="a few steps on a minimal model")
    args = parser.parse_args()
    try:
        if args.fast:
            steps, (train, test) = 5, build(SEED, 16, 4)
            base = ensure_base(args.out / "base", SEED, hidden=32, layers=2, vocab_size=512, chars=60_000)
        else:
            steps, (train, test) = 480, build(SEED, 600, 100)
            base = ensure_base(args.base, SEED)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    means = compare(base, train, test, steps, args.out)
    excess = means["MoE-LoRA"] - means["LoRA"]
    if not args.fast and excess > TOLERANCE:
        sys.exit(f"MoE-LoRA's mean held-out loss is {excess:.3f} worse than LoRA's; the limit is {TOLERANCE}")


if __name__ == "__main__":
    main()
