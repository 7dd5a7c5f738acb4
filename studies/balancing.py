"""
What balances the experts of a deep pretrained model: the scope and the coefficient of the balancing loss.

    python -m studies.balancing [--steps 100] [--output studies/results/balancing.md]

SmolLM2-135M-Instruct (30 layers) learns the demo's four kinds of requests with 8 LoRA experts, 2 of them active, once
for each setting, from the same seed. Before and after, the load of every layer is measured on held-out rows.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
from moe_peft.demo.smollm2 import smollm2_folder
from moe_peft.demo.tasks import make_rows
from moe_peft.upit.evaluate import evaluate

SETTINGS = (("layer", 0.0), ("layer", 0.1), ("global", 0.01), ("layer", 0.01))


def measure(scope: str, coefficient: float, steps: int) -> list[str]:
    """One row of the table."""
    train, test = (Dataset.from_list(rows) for rows in make_rows(300, 20))
    base, tokenizer = (kind.from_pretrained(smollm2_folder()) for kind in (AutoModelForCausalLM, AutoTokenizer))
    torch.manual_seed(0)
    model = get_peft_model(base, MoELoraConfig(num_experts=8, top_k=2, r=8, lora_alpha=16, task_type="CAUSAL_LM"))
    with tempfile.TemporaryDirectory() as folder:
        args = MoESFTConfig(
            folder, max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-3, bf16=False, max_length=256,
            gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=steps, seed=0,
            router_balancing=scope, router_aux_loss_coef=coefficient,
        )  # fmt: skip
        trainer = MoESFTTrainer(model=model, args=args, train_dataset=train, processing_class=tokenizer)
        before = evaluate(model, test, args, tokenizer, "domain")
        trainer.train()
        after = evaluate(model, test, args, tokenizer, "domain")
    row = [scope if coefficient else "none", f"{coefficient:g}"]
    for measured in (before, after):
        assert measured.health is not None
        row += [f"{measured.health.variation:.2f}", str(measured.health.monopolies), str(measured.health.dead)]
    return [*row, f"{after.losses['adapted']['mean']:.3f}", after.health.status]


def main() -> None:
    parser = argparse.ArgumentParser(description="Load of the experts by scope and coefficient of the balancing loss.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("studies/results/balancing.md"))
    options = parser.parse_args()
    lines = [
        f"SmolLM2-135M-Instruct, 8 LoRA experts of rank 8, 2 active, {options.steps} steps of 4 rows of the demo's "
        "requests, learning rate 1e-3, one seed; `python -m studies.balancing`. CV: the load's coefficient of "
        "variation, mean of 30 layers; monopolies: layers; dead: of 240 experts; loss: on held-out answers, per token.",
        "",
        "| scope | coefficient | CV before | monopolies | dead | CV after | monopolies | dead | loss | load |",
        "|" + "---|" * 10,
    ]
    for scope, coefficient in SETTINGS:
        lines.append(f"| {' | '.join(measure(scope, coefficient, options.steps))} |")
        print(lines[-1], flush=True)
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
