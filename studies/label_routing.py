"""
Can routers of a pretrained model learn domains? Label-supervised routing on SmolLM2-135M-Instruct, in two stages.

    python -m studies.short_tasks --source FOLDER --output .cache/short_tasks
    python -m studies.label_routing run       # resumes where the ledger ends
    python -m studies.label_routing report    # table and figure of the ledger, in studies/results

Fixed before the first run: three of the short tasks with two experts each, a mixture of 6 LoRAs of rank 8, k = 2.
First the routers alone learn for one pass over 600 rows to send each task's tokens to its experts, at a rate of 0.01;
then the experts learn for two passes with frozen routers. The same two passes without labels, where routers and experts
learn together with the balancing loss, say what it costs. Experts learn at the rate that is best for LoRAMoE-PT in
`studies.upit`. Held-out rows, three seeds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from examples.demo.smollm2 import smollm2_folder
from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
from moe_peft.analysis.figures import plot_compliance
from moe_peft.analysis.recorder import RoutingStatistics, record_routing
from moe_peft.training.preparation import preparation, tokenized

from .differences import paired_difference
from .exact_match import measure
from .runs import Ledger, arguments, parser, score_answers_only
from .upit import RESULTS, SEEDS, Study

EXPERTS = {"arithmetic": [0, 1], "banking": [2, 3], "slots": [4, 5]}
STATES = ("before", "routers trained", "then the experts", "without labels")
_POSITIONS = 5  # buckets of doubling width, that begin at 0, 1, 3, 7 and 15: rows have at most 32 tokens


def mixture(seed: int) -> Any:
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder())
    set_seed(seed)
    config = MoELoraConfig(num_experts=6, top_k=2, r=8, lora_alpha=16, mixing="projection", task_type="CAUSAL_LM")
    return get_peft_model(model, config)


class LabelRouting:
    """
    Args:
        data: the short tasks.
        rate: of the experts.
    """

    def __init__(self, data: Study, ledger: Ledger, rate: float) -> None:
        self.work, self.ledger, self.rate, self.digest = data.work, ledger, rate, data.digest
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
        self.train, self.test = (
            Dataset.from_list([row for row in rows if row["domain"] in EXPERTS]) for rows in (data.train, data.test)
        )

    def run(self, seed: int) -> None:
        """Both stages and, from the same start, the second one without labels."""
        model = mixture(seed)
        self._note(STATES[0], seed, model)
        self._train(model, seed, training_stage="routers", learning_rate=1e-2, num_train_epochs=1)
        self._note(STATES[1], seed, model)
        self._train(model, seed, training_stage="rest", learning_rate=self.rate, num_train_epochs=2)
        self._note(STATES[2], seed, model)
        model = mixture(seed)
        self._train(model, seed, router_label_loss_coef=0.0, learning_rate=self.rate, num_train_epochs=2)
        self._note(STATES[3], seed, model)

    def _train(self, model: Any, seed: int, **options: Any) -> None:
        args = arguments(
            MoESFTConfig, self.work / "label_routing", max_length=64, lr_scheduler_type="constant",
            label_column="domain", expert_map=EXPERTS, router_balancing="layer", seed=seed, **options,
        )  # fmt: skip
        MoESFTTrainer(model, args, train_dataset=self.train, processing_class=self.tokenizer).train()

    def _note(self, state: str, seed: int, model: Any) -> None:
        rows, collator = tokenized(self.test, self.tokenizer, preparation(max_length=64))
        with record_routing(model, list(EXPERTS), EXPERTS) as statistics:
            measured = measure(model, rows, collator, statistics)
        by_domain = {task: of[:, :_POSITIONS].tolist() for task, of in statistics.compliance_by_domain().items()}
        record = {"state": state, "seed": seed, **measured, "mean_compliance": statistics.mean_compliance()}
        self.ledger.add({**record, "compliance": by_domain, "data": self.digest}, f"{measured['loss']:.4f}")


def report(records: list[dict[str, Any]]) -> None:
    """Write the table and the figure of the runs that there are, and print the table."""
    runs = {state: {r["seed"]: r for r in records if r["state"] == state} for state in STATES}
    lines = [
        "# Label-supervised routing on SmolLM2-135M-Instruct", "",
        "`python -m studies.label_routing report` writes this page.", "",
        "| | seeds | compliance | first token | tokens 16–31 | first layer | last layer | loss | exact |",
        f"|{'---|' * 9}",
    ]  # fmt: skip
    for state, of in runs.items():
        if of:
            compliance_LP = np.nanmean([_layers_positions(run) for run in of.values()], axis=0)
            numbers = [
                np.mean([run["mean_compliance"] for run in of.values()]), compliance_LP[:, 0].mean(),
                compliance_LP[:, -1].mean(), np.nanmean(compliance_LP[0]), np.nanmean(compliance_LP[-1]),
            ]  # fmt: skip
            loss, exact = (np.mean([run[name] for run in of.values()]) for name in ("loss", "exact"))
            cells = [state, str(len(of)), *(f"{number:.3f}" for number in numbers), f"{loss:.4f}", f"{exact:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    seeds = sorted(runs[STATES[2]].keys() & runs[STATES[3]].keys())
    if len(seeds) > 1:
        difference = paired_difference(*([runs[state][seed]["loss"] for seed in seeds] for state in STATES[2:]))
        lines += ["", "Loss with labels minus without: {} {}".format(*difference.cells())]
    if trained := runs[STATES[2]]:
        by_task = {t: torch.tensor([r["compliance"][t] for r in trained.values()]).mean(0) for t in EXPERTS}
        starts = RoutingStatistics([6], [2]).position_starts[:_POSITIONS]
        plot_compliance(by_task, RESULTS / "label_routing.svg", starts, dict.fromkeys(EXPERTS, 1 / 3))
        lines += ["", "![Compliance by position, mean of the seeds](label_routing.svg)"]
    (RESULTS / "label_routing.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _layers_positions(run: dict[str, Any]) -> np.ndarray:
    """Compliance, mean of the tasks, [L, P]."""
    return np.nanmean(np.array([run["compliance"][task] for task in EXPERTS], dtype=float), axis=0)


def main() -> None:
    args = parser(__doc__).parse_args()
    data = Study(args.data, args.work, Ledger(RESULTS / "upit.jsonl"))
    ledger = Ledger(RESULTS / "label_routing.jsonl")
    if args.command == "report":
        return report(ledger.records(data=data.digest))
    score_answers_only()
    rate = data.rate("loramoe_pt")
    if rate is None:
        raise SystemExit("LoRAMoE-PT has no learning rate yet: python -m studies.upit run")
    study = LabelRouting(data, ledger, rate)
    for seed in SEEDS:
        if not ledger.records(seed=seed, state=STATES[-1], data=study.digest):
            study.run(seed)


if __name__ == "__main__":
    main()
