"""
Label-supervised routing, small: three domains with two experts each, in two stages. Routers alone learn to send each
domain's tokens to its experts; then experts learn, routers frozen.

    python benchmarks/label_routing.py      # quarter of an hour on 2 cores; writes benchmarks/results/label_routing.*

A 1M-parameter base and the demo's data, once as a MoE-LoRA adapter and once as a native Mixtral whose experts begin as
copies of the base's FFN. Compliance and loss are those of held-out rows. Training with the same experts, data and steps
but without labels is what the result is compared with.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM, set_seed

from moe_peft import MoELoraConfig
from moe_peft.analysis.figures import plot_compliance, plot_shares
from moe_peft.analysis.record import RoutingStatistics, record_routing
from moe_peft.routing.statistics import compliance
from moe_peft.training.scoring import example_losses
from moe_peft.training.sft import MoESFTConfig, MoESFTTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from domains import DOMAINS, build
from tiny_base import ensure_base

N, K = 6, 2
EXPERTS = {"code": [0, 1], "prose": [2, 3], "arithmetic": [4, 5]}
ROUTER_STEPS, TUNING_STEPS = 600, 200


def adapter(base: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base)
    set_seed(0)
    return get_peft_model(model, MoELoraConfig(num_experts=N, top_k=K, r=8, lora_alpha=16, task_type="CAUSAL_LM"))


def mixtral(base: Path, n: int = N, seed: int = 0) -> MixtralForCausalLM:
    """A native MoE that computes what the base computes: every expert is a copy of its FFN."""
    dense = AutoModelForCausalLM.from_pretrained(base)
    shared = {
        name: value for name, value in dense.config.to_dict().items() if name not in ("model_type", "architectures")
    }
    config = MixtralConfig(**shared, num_local_experts=n, num_experts_per_tok=K, router_aux_loss_coef=0.01)
    config.sliding_window = None
    set_seed(seed)
    model = MixtralForCausalLM(config)
    state = dense.state_dict()
    for i in range(config.num_hidden_layers):
        mlp = f"model.layers.{i}.mlp"
        gate, up, down = (state.pop(f"{mlp}.{name}_proj.weight") for name in ("gate", "up", "down"))
        state[f"{mlp}.experts.gate_up_proj"] = torch.cat([gate, up]).expand(n, -1, -1).clone()
        state[f"{mlp}.experts.down_proj"] = down.expand(n, -1, -1).clone()
        state[f"{mlp}.gate.weight"] = model.state_dict()[f"{mlp}.gate.weight"]
    model.load_state_dict(state)
    return model


def trainer(model: Any, tokenizer: Any, data: Dataset, folder: str, **own: Any) -> MoESFTTrainer:
    settings = {
        "per_device_train_batch_size": 8,
        "lr_scheduler_type": "linear",
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


def measure(model: Any, tokenizer: Any, data: Dataset, folder: str) -> tuple[RoutingStatistics, float, float]:
    """Of held-out rows: routing statistics, mean compliance of the answers' tokens, and mean loss over domains."""
    judge = trainer(model, tokenizer, data, folder)
    rows = judge.train_dataset
    losses, inside, answers = [], 0.0, 0
    with record_routing(model, list(DOMAINS), EXPERTS) as statistics:
        for domain in DOMAINS:
            statistics.current = domain
            part = rows.select([i for i, label in enumerate(rows["domain"]) if label == domain])
            loss_S1, count_S = example_losses(judge, part)
            losses.append(float(loss_S1.sum() / count_S.sum()))
    for row in rows:
        ids, answer_T = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"]) != -100
        with torch.no_grad():
            logits = model(input_ids=ids.to(model.device), output_router_logits=True).router_logits
        allowed_TN = torch.zeros(len(answer_T), N, dtype=torch.bool)
        allowed_TN[:, EXPERTS[row["domain"]]] = True
        inside += float(compliance([l_TN.cpu() for l_TN in logits], allowed_TN).mean(0)[answer_T].sum())
        answers += int(answer_T.sum())
    return statistics, inside / answers, sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path(".cache/base"), help="trained when missing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    base = ensure_base(args.base, 0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    train, test = (Dataset.from_list(rows) for rows in build(0, 600, 60))
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Label-supervised routing, small",
        "",
        f"Made by `python benchmarks/label_routing.py`: six experts, two to a domain; {ROUTER_STEPS} steps for routers "
        f"alone, then {TUNING_STEPS} for the rest, of 8 examples. Compliance is the mean probability of a token's own "
        "experts over layers, of held-out rows; answers are what the loss counts. Loss: held-out, mean of the domains. "
        '"Without labels": the rest and the routers trained for as many steps, with the balancing loss.',
        "",
        "| model | | compliance, all tokens | of answers | first token | tokens 64–127 | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, make, rate in (("MoE-LoRA adapter", adapter, 4e-3), ("native Mixtral", mixtral, 1e-3)):
            model = make(base)
            plain = copy.deepcopy(model)

            def note(what: str, measured: Any, name: str = name) -> None:
                statistics, answers, loss = measured
                by_position = statistics.compliance().mean(0)
                cells = [statistics.mean_compliance(), answers, float(by_position[0]), float(by_position[6])]
                lines.append(f"| {name} | {what} | {' | '.join(f'{cell:.3f}' for cell in cells)} | {loss:.4f} |")
                print(lines[-1], flush=True)

            note("before", measure(model, tokenizer, test, folder))
            routing = {"training_stage": "routers", "learning_rate": 2e-2, "max_steps": ROUTER_STEPS}
            trainer(model, tokenizer, train, folder, **routing).train()
            measured = measure(model, tokenizer, test, folder)
            note("routers trained", measured)
            stem = "label_routing_" + ("adapter" if make is adapter else "mixtral")
            plot_compliance(measured[0].compliance(), args.out / f"{stem}_compliance.png")
            plot_shares(measured[0].shares(), args.out / f"{stem}_load.png", f"{name}: where each domain's tokens go")
            tuning = {"learning_rate": rate, "max_steps": TUNING_STEPS}
            trainer(model, tokenizer, train, folder, training_stage="rest", **tuning).train()
            note("then the rest", measure(model, tokenizer, test, folder))
            trainer(plain, tokenizer, train, folder, router_label_loss_coef=0.0, **tuning).train()
            note("without labels", measure(plain, tokenizer, test, folder))
    (args.out / "label_routing.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
