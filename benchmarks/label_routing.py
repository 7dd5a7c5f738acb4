"""
Label-supervised routing, small: three domains with two experts each; routers alone learn to send each domain's tokens
to its experts.

    python benchmarks/label_routing.py      # five minutes on 2 cores; writes benchmarks/results/label_routing.*

A 1M-parameter base and the demo's data, once as a MoE-LoRA adapter and once as a native Mixtral whose experts began as
copies of the base's FFN. First everything is fine-tuned, so that experts differ; then routers alone are trained with
the label loss. Compliance and loss are those of held-out rows, before the routers' training and after.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM, set_seed

from moe_peft import MoELoraConfig
from moe_peft.analysis import RoutingStatistics, record_routing
from moe_peft.report import plot_compliance, plot_shares
from moe_peft.trainer import MoESFTConfig, MoESFTTrainer
from moe_peft.upit.scoring import example_losses

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from domains import DOMAINS, build
from tiny_base import ensure_base

N, K = 6, 2
EXPERTS = {"code": [0, 1], "prose": [2, 3], "arithmetic": [4, 5]}
TUNING_STEPS, ROUTER_STEPS = 150, 200


def adapter(base: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base)
    set_seed(0)
    return get_peft_model(model, MoELoraConfig(num_experts=N, top_k=K, r=8, lora_alpha=16, task_type="CAUSAL_LM"))


def mixtral(base: Path) -> MixtralForCausalLM:
    """A native MoE that computes what the base computes: every expert is a copy of its FFN."""
    dense = AutoModelForCausalLM.from_pretrained(base)
    shared = {
        name: value for name, value in dense.config.to_dict().items() if name not in ("model_type", "architectures")
    }
    config = MixtralConfig(**shared, num_local_experts=N, num_experts_per_tok=K, router_aux_loss_coef=0.01)
    config.sliding_window = None
    set_seed(0)
    model = MixtralForCausalLM(config)
    state = dense.state_dict()
    for i in range(config.num_hidden_layers):
        mlp = f"model.layers.{i}.mlp"
        gate, up, down = (state.pop(f"{mlp}.{name}_proj.weight") for name in ("gate", "up", "down"))
        state[f"{mlp}.experts.gate_up_proj"] = torch.cat([gate, up]).expand(N, -1, -1).clone()
        state[f"{mlp}.experts.down_proj"] = down.expand(N, -1, -1).clone()
        state[f"{mlp}.gate.weight"] = model.state_dict()[f"{mlp}.gate.weight"]
    model.load_state_dict(state)
    return model


def trainer(model: Any, tokenizer: Any, data: Dataset, folder: str, **own: Any) -> MoESFTTrainer:
    settings = {
        "per_device_train_batch_size": 8,
        "learning_rate": 4e-3,
        "lr_scheduler_type": "constant",
        "assistant_only_loss": True,
        "max_length": 256,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "logging_steps": 50,
        "save_strategy": "no",
        "report_to": "none",
        "label_column": "domain",
        "expert_map": EXPERTS,
    }
    args = MoESFTConfig(output_dir=folder, **{**settings, **own})
    return MoESFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)


def measure(model: Any, tokenizer: Any, data: Dataset, folder: str) -> tuple[RoutingStatistics, float]:
    """Routing statistics and mean loss of held-out rows."""
    judge = trainer(model, tokenizer, data, folder)
    rows = judge.train_dataset
    losses = []
    with record_routing(model, list(DOMAINS), EXPERTS) as statistics:
        for domain in DOMAINS:
            statistics.current = domain
            part = rows.select([i for i, label in enumerate(rows["domain"]) if label == domain])
            loss_S1, count_S = example_losses(judge, part)
            losses.append(float(loss_S1.sum() / count_S.sum()))
    return statistics, sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path(".cache/base"), help="trained when missing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    base = ensure_base(args.base, 0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    train, test = (Dataset.from_list(rows) for rows in build(0, 240, 60))
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Label-supervised routing, small",
        "",
        "Made by `python benchmarks/label_routing.py`: six experts, two to a domain, routers alone trained for "
        f"{ROUTER_STEPS} steps.",
        "",
        "| model | mean compliance before | after | first token, after | tokens 64–127, after | loss before | after |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, make, rate in (("MoE-LoRA adapter", adapter, 4e-3), ("native Mixtral", mixtral, 1e-3)):
            model = make(base)
            tuning = {"router_label_loss_coef": 0.0, "learning_rate": rate, "max_steps": TUNING_STEPS}
            trainer(model, tokenizer, train, folder, **tuning).train()
            before, loss_before = measure(model, tokenizer, test, folder)
            routing = {"training_stage": "routers", "learning_rate": 5e-3, "max_steps": ROUTER_STEPS}
            trainer(model, tokenizer, train, folder, **routing).train()
            after, loss_after = measure(model, tokenizer, test, folder)
            positions = after.compliance().mean(0)
            cells = [before.mean_compliance(), after.mean_compliance(), float(positions[0]), float(positions[6])]
            row = [*(f"{cell:.3f}" for cell in cells), f"{loss_before:.4f}", f"{loss_after:.4f}"]
            lines.append(f"| {name} | {' | '.join(row)} |")
            print(lines[-1], flush=True)
            stem = "label_routing_" + ("adapter" if make is adapter else "mixtral")
            plot_compliance(after.compliance(), args.out / f"{stem}_compliance.png")
            plot_shares(after.shares(), args.out / f"{stem}_load.png", f"{name}: where each domain's tokens go")
    (args.out / "label_routing.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
