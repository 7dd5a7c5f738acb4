"""
Label-supervised routing, small: three domains with two experts each, in two stages. First the routers alone learn to
send each domain's tokens to its experts; then the experts learn while the routers are frozen.

    python -m benchmarks.label_routing    # 15 minutes on 2 cores; writes benchmarks/results/label_routing.*

On the toy base and data, once as a MoE-LoRA adapter and once as a native Mixtral whose experts begin as copies of the
base's FFN. Compliance and loss are those of held-out rows. The baseline trains the same experts on the same data for
as many steps, without labels.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from examples.toy.base import ensure_base
from examples.toy.domains import DOMAINS, build
from moe_peft import MoELoraConfig
from moe_peft.analysis.figures import plot_compliance, plot_shares
from moe_peft.analysis.record import RoutingStatistics, record_routing
from moe_peft.routing.statistics import compliance
from moe_peft.training.sft import MoESFTConfig, MoESFTTrainer

from .toy_training import SFT, loss_per_token, mixtral

N = 6
EXPERTS = {"code": [0, 1], "prose": [2, 3], "arithmetic": [4, 5]}
ROUTER_STEPS, TUNING_STEPS = 600, 200


def adapter(base: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base)
    set_seed(0)
    return get_peft_model(model, MoELoraConfig(num_experts=N, top_k=2, r=8, lora_alpha=16, task_type="CAUSAL_LM"))


def trainer(model: Any, tokenizer: Any, data: Dataset, folder: str, **own: Any) -> MoESFTTrainer:
    settings = {
        **SFT, "lr_scheduler_type": "linear", "use_cpu": not torch.cuda.is_available(), "save_strategy": "no",
        "logging_steps": 50, "label_column": "domain", "expert_map": EXPERTS,
    }  # fmt: skip
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
            losses.append(loss_per_token(judge, part))
    for row in rows:
        ids, answer_T = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"]) != -100
        with torch.no_grad():
            logits = model(input_ids=ids.to(model.device), output_router_logits=True).router_logits
        allowed_TN = torch.zeros(len(answer_T), N, dtype=torch.bool)
        allowed_TN[:, EXPERTS[row["domain"]]] = True
        inside += float(compliance([l_TN.cpu() for l_TN in logits], allowed_TN).mean(0)[answer_T].sum())
        answers += int(answer_T.sum())
    return statistics, inside / answers, sum(losses) / len(losses)


def study(
    name: str, model: Any, rate: float, tokenizer: Any, data: tuple[Dataset, Dataset], figures: Path
) -> list[str]:
    """
    Train `model` in both stages and, from the same start, without labels.

    Args:
        name: of the kind of model.
        rate: learning rate of all but the routers.
        data: training rows and held-out rows.
        figures: how the figures' paths begin.

    Returns:
        rows of the table.
    """
    train, test = data
    rows = []

    def note(what: str, model: Any) -> RoutingStatistics:
        statistics, answers, loss = measure(model, tokenizer, test, folder)
        by_position = statistics.compliance().mean(0)
        cells = [statistics.mean_compliance(), answers, float(by_position[0]), float(by_position[6])]
        rows.append(f"| {name} | {what} | {' | '.join(f'{cell:.3f}' for cell in cells)} | {loss:.4f} |")
        print(rows[-1], flush=True)
        return statistics

    with tempfile.TemporaryDirectory() as folder:
        plain = copy.deepcopy(model)
        note("before", model)
        routing = {"training_stage": "routers", "learning_rate": 2e-2, "max_steps": ROUTER_STEPS}
        trainer(model, tokenizer, train, folder, **routing).train()
        statistics = note("routers trained", model)
        by_domain, starts = statistics.compliance_by_domain(), statistics.position_starts
        plot_compliance(by_domain, f"{figures}_compliance.png", starts, statistics.chance())
        plot_shares(statistics.shares(), f"{figures}_load.png", f"{name}: where each domain's tokens go")
        tuning = {"learning_rate": rate, "max_steps": TUNING_STEPS}
        trainer(model, tokenizer, train, folder, training_stage="rest", **tuning).train()
        note("then the rest", model)
        trainer(plain, tokenizer, train, folder, router_label_loss_coef=0.0, **tuning).train()
        note("without labels", plain)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path(".cache/base"), help="the base model; trained if missing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    base = ensure_base(args.base, 0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    train, test = build(0, 600, 60)
    data = Dataset.from_list(train), Dataset.from_list(test)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / "label_routing"
    lines = [
        "# Label-supervised routing, small",
        "",
        f"Made by `python -m benchmarks.label_routing`: six experts, two per domain; {ROUTER_STEPS} steps for the "
        f"routers alone, then {TUNING_STEPS} for the rest, of 8 examples. Compliance is the mean probability of a "
        "token's own experts over layers, of held-out rows; answers are the tokens that the loss counts. Loss: "
        'held-out, mean of the domains. "Without labels": routers and the rest trained for as many steps, with the '
        "balancing loss.",
        "",
        "| model | | compliance, all tokens | of answers | first token | tokens 64–127 | loss |",
        "|---|---|---|---|---|---|---|",
        *study("MoE-LoRA adapter", adapter(base), 4e-3, tokenizer, data, Path(f"{stem}_adapter")),
        *study("native Mixtral", mixtral(base, N), 1e-3, tokenizer, data, Path(f"{stem}_mixtral")),
    ]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
