"""
Tenants that contradict each other: where one LoRA for all cannot know, and what a mixture does about it.

    python -m studies.tenants run --source FOLDER [--workers 2]   # with clinc150; resumes where the ledger ends
    python -m studies.tenants report                              # the table, in studies/results

Fixed before the first run. SmolLM2-135M-Instruct, four domains of clinc150, two tenants. An utterance's answer is its
intent in words; in two of the domains (*swapped*) the second tenant calls each intent by the name of the next one, in
the other two (*common*) both use the same words. Each tenant has 60 training rows of each domain, other utterances than
the other tenant's, and 30 held-out utterances of each, the same for both. Training: 8 rows a step, cosine decay, 60
steps for one tenant, 120 for both; rates 1e-3 and 2e-3, of which 15 further rows of each domain choose one for each
way, with seed 0. Three seeds, which draw the rows. FFN projections, alpha = 2·rank.

Ways, by what is trained and how large:

- *own*: a LoRA of rank 8 for each tenant; with the other tenant's it is *wrong*;
- *joint*: one LoRA on the rows of both, rank 8 (as many parameters as a token has with *own*) or 16 (as many as both);
- *joint, named*: the same, and the tenant's name begins each prompt, in training and in use;
- *shared*: a mixture of one expert of rank 8 that serves every token and one of rank 8 for each tenant, trained at
  once, with a mask by the tenant's label; in use the tenant's expert is forced. *Shuffled* is its control: each
  training row has a tenant drawn at random.

Measured: right answers (greedy decoding gives the answer exactly) of swapped and common rows, loss, and *harm*: the
loss per token on 64 general texts above the base's.

Predictions, means over seeds.

1. *Joint* without names has at most half of *own*'s right answers on swapped rows, and as many on common ones.
2. *Joint, named* of rank 16 is within 5 points of *own* on swapped rows, and at least 3 points above it on common rows.
3. *Shared* is within 5 points of *own* on swapped rows and at least 3 points above it on common ones, and does not
   differ from *joint, named* of rank 16 (the interval over rows includes 0).
4. *Shuffled* is like *joint*. *Wrong* has less than 10 % right on swapped rows.
5. All ways but the base do harm of more than 0.1; *shared* no less than *joint*.

After a first look, in which *shared* had won and the higher rate was the best for each way: a rate of 4e-3, and *joint,
named* of rank 24, which has all the parameters of *shared*, where a token has rank 16. After a second look, in which
*shared* had fewer common rows right: *two shared* experts of rank 8, with one seed. Of ways without a name or a
tenant's expert, and of *joint, named* of rank 8, 4e-3 was not tried; of *joint, named* it was not the best.

What failed: 1, *joint* has nearly as many swapped rows right as *own*, and many more common ones; 3, *shared* is far
above *own* on swapped rows, and differs from *joint, named*, above on swapped and below on common rows; 4, *wrong* has
13 %.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from examples.demo.smollm2 import smollm2_folder
from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer, force_experts
from moe_peft.training.preparation import preparation, tokenized

from .differences import over_rows
from .exact_match import answers
from .growing import _read as read_domains
from .request_gate import general_texts
from .runs import DEVICE, Ledger, arguments, parser, score_answers_only, start_workers, work

RESULTS = Path(__file__).parent / "results"
SWAPPED, COMMON = ("banking", "kitchen_and_dining"), ("home", "work")
TENANTS = ("acme", "zeta")
SEEDS, RATES = (0, 1, 2), (1e-3, 2e-3, 4e-3)
ROWS, DEVELOPMENT, HELD_OUT, STEPS, LONGEST = 60, 15, 30, 60, 64
FFN = ["gate_proj", "up_proj", "down_proj"]
# Way → rank, and whether prompts begin with the tenant's name; "shared" ways have that rank twice.
WAYS = {
    "own": (8, False), "joint, rank 8": (8, False), "joint, rank 16": (16, False), "joint, named, rank 8": (8, True),
    "joint, named, rank 16": (16, True), "joint, named, rank 24": (24, True), "shared": (8, False),
    "two shared": (8, False), "shuffled": (8, False),
}  # fmt: skip


class Job(NamedTuple):
    """A way of a seed at a rate."""

    way: str
    seed: int
    rate: float


class Tenants:
    """
    Args:
        source: the folder of the data sets.
        work: a folder for the trainer's state.
    """

    def __init__(self, source: Path, work: Path, ledger: Ledger) -> None:
        self.work, self.ledger = work, ledger
        self.work.mkdir(parents=True, exist_ok=True)
        self.tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
        self.rows = {name: read_domains(source / "clinc150", name) for name in ("train", "test")}
        general = [{"text": text, "domain": "general"} for text in general_texts(source)]
        self.general, self.collator = self.tokenized(general)

    def tokenized(self, rows: list[dict[str, Any]]) -> Any:
        return tokenized(Dataset.from_list(rows), self.tokenizer, preparation(4 * LONGEST))

    def jobs(self) -> Iterator[Job]:
        done = {Job(run["way"], run["seed"], run["rate"]) for run in self.ledger.records()}
        for way in WAYS:
            yield from (job for rate in RATES if (job := Job(way, SEEDS[0], rate)) not in done)
            if all(Job(way, SEEDS[0], rate) in done for rate in RATES):
                best = best_rate(self.ledger.records(way=way, seed=SEEDS[0]))
                yield from (job for seed in SEEDS[1:] if (job := Job(way, seed, best)) not in done)

    # --- rows --------------------------------------------------------------------------------------------------------

    def of_tenant(self, tenant: str, split: str, seed: int) -> list[dict[str, str]]:
        """`train`, `development` or `test` rows, whose domain is "swapped" or "common"."""
        found = []
        for domain in (*SWAPPED, *COMMON):
            rows = self.rows["test" if split == "test" else "train"][domain]
            names = sorted({row["completion"] for row in rows})
            after = dict(zip(names, [*names[1:], names[0]], strict=True))
            if split == "test":
                drawn = random.Random(f"0 {domain}").sample(rows, HELD_OUT)
            else:
                per_tenant = ROWS + DEVELOPMENT
                both = random.Random(f"{seed} {domain}").sample(rows, len(TENANTS) * per_tenant)
                at = TENANTS.index(tenant) * per_tenant
                drawn = both[at : at + ROWS] if split == "train" else both[at + ROWS : at + per_tenant]
            for row in drawn:
                changes = tenant == TENANTS[1] and domain in SWAPPED
                answer = after[row["completion"]] if changes else row["completion"]
                kind = "swapped" if domain in SWAPPED else "common"
                found.append({"prompt": row["prompt"], "completion": answer, "domain": kind, "tenant": tenant})
        return found

    # --- a run -------------------------------------------------------------------------------------------------------

    def run(self, job: Job) -> None:
        started = time.monotonic()
        rank, named = WAYS[job.way]

        def rows(tenant: str, split: str) -> list[dict[str, str]]:
            name = f"{tenant}: " * named
            return [{**row, "prompt": name + row["prompt"]} for row in self.of_tenant(tenant, split, job.seed)]

        train = [row for tenant in TENANTS for row in rows(tenant, "train")]
        if job.way == "own":
            models = {tenant: self.lora(rank, job, rows(tenant, "train"), STEPS) for tenant in TENANTS}
        elif job.way.startswith("joint"):
            models = dict.fromkeys(TENANTS, self.lora(rank, job, train, 2 * STEPS))
        else:
            if job.way == "shuffled":
                draw = random.Random(job.seed)
                train = [{**row, "tenant": draw.choice(TENANTS)} for row in train]
            models = dict.fromkeys(TENANTS, self.mixture(rank, job, train))
        record: dict[str, Any] = {**job._asdict()}
        for split in ("development", "test"):
            record[split] = {
                tenant: self.answers(models[tenant], rows(tenant, split), TENANTS.index(tenant)) for tenant in TENANTS
            }
        if job.way == "own":
            wrong = {TENANTS[i]: self.answers(models[TENANTS[1 - i]], rows(TENANTS[i], "test"), 1 - i) for i in (0, 1)}
            record["wrong"] = wrong
        record["harm"] = self.harm(models[TENANTS[1]])
        self.ledger.add(record, f"{time.monotonic() - started:.0f} s, {_right([record], 'swapped'):.1%}")

    def base(self, seed: int) -> Any:
        model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).to(DEVICE)
        set_seed(seed)
        return model

    def arguments(self, config: type[SFTConfig], job: Job, steps: int, **more: Any) -> SFTConfig:
        return arguments(
            config, self.work / "state", max_steps=steps, learning_rate=job.rate, lr_scheduler_type="cosine",
            max_length=LONGEST, logging_steps=steps, seed=job.seed, **more,
        )  # fmt: skip

    def lora(self, rank: int, job: Job, rows: list[dict[str, str]], steps: int) -> Any:
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=FFN, task_type="CAUSAL_LM")
        model, args = get_peft_model(self.base(job.seed), config), self.arguments(SFTConfig, job, steps)
        SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=self.tokenizer).train()
        return model.eval()

    def mixture(self, rank: int, job: Job, rows: list[dict[str, str]]) -> Any:
        config = MoELoraConfig(
            num_experts=2, top_k=1, num_shared_experts=2 if job.way == "two shared" else 1, mixing="projection",
            r=rank, lora_alpha=2 * rank,
            router_aux_loss_coef=0.0, task_type="CAUSAL_LM",
        )  # fmt: skip
        args = self.arguments(
            MoESFTConfig, job, 2 * STEPS, label_column="tenant", expert_map={"acme": [0], "zeta": [1]},
            router_label_mask=True, router_label_loss_coef=0.0,
        )  # fmt: skip
        model = get_peft_model(self.base(job.seed), config)
        MoESFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=self.tokenizer).train()
        return model.eval()

    def answers(self, model: Any, rows: list[dict[str, str]], expert: int) -> dict[str, list[Any]]:
        """Kind of rows → loss per answer token, and which were answered right, as text of 0 and 1."""
        data, collator = self.tokenized(rows)
        if isinstance(model.peft_config["default"], MoELoraConfig):
            with force_experts(model, expert):
                found = answers(model, data, collator)
        else:
            found = answers(model, data, collator)
        measured = {}
        for kind in ("swapped", "common"):
            of_kind = [answer for answer in found if answer.task == kind]
            loss = -sum(answer.log_prob for answer in of_kind) / sum(answer.tokens for answer in of_kind)
            measured[kind] = [loss, "".join(str(int(answer.is_match)) for answer in of_kind)]
        return measured

    def harm(self, model: Any) -> float:
        """The loss per token of general texts above the base's."""

        def loss() -> float:
            found = answers(model, self.general, self.collator)
            return -sum(answer.log_prob for answer in found) / sum(answer.tokens for answer in found)

        adapted = loss()
        with model.disable_adapter():
            return adapted - loss()


# --- report ----------------------------------------------------------------------------------------------------------


def best_rate(runs: list[dict[str, Any]]) -> float:
    """The rate with the most right answers to the development rows; of equal ones the lower."""
    return max(runs, key=lambda run: (_right([run], "swapped", "development") + _right([run], "common", "development"),
                                      -run["rate"]))["rate"]  # fmt: skip


def _matches(runs: list[dict[str, Any]], kind: str, split: str = "test") -> torch.Tensor:
    """[runs, rows] of both tenants."""
    return torch.tensor([[int(x) for tenant in TENANTS for x in run[split][tenant][kind][1]] for run in runs]).double()


def _right(runs: list[dict[str, Any]], kind: str, split: str = "test") -> float:
    return float(_matches(runs, kind, split).mean())


CONTRASTS = (
    ("joint, rank 16", "own"), ("joint, named, rank 16", "own"), ("shared", "own"), ("shared", "joint, named, rank 16"),
    ("shared", "joint, named, rank 24"),
    ("two shared", "joint, named, rank 24"),
    ("shared", "shuffled"),
)  # fmt: skip


def report(ledger: Ledger) -> str:
    """The page of the runs that there are."""
    runs = {}
    for way in WAYS:
        if of_way := ledger.records(way=way):
            rate = best_rate([run for run in of_way if run["seed"] == SEEDS[0]])
            runs[way] = [run for run in of_way if run["rate"] == rate]
    lines = [
        "# Tenants that contradict each other",
        "",
        "`python -m studies.tenants report` writes this page; the script's head says what was fixed before its first"
        " run. SmolLM2-135M-Instruct, two tenants; means over seeds. *Swapped*: rows whose answers contradict the other"
        " tenant's; *common*: the others. *Harm*: loss per token of general texts above the base's.",
        "",
        "| way | seeds | rate | swapped: right | loss | common: right | loss | harm |",
        f"|{'---|' * 8}",
    ]
    for way, of_way in runs.items():
        cells = [way, str(len(of_way)), f"{of_way[0]['rate']:g}"]
        for kind in ("swapped", "common"):
            losses = [run["test"][tenant][kind][0] for run in of_way for tenant in TENANTS]
            cells += [f"{_right(of_way, kind):.1%}", f"{sum(losses) / len(losses):.3f}"]
        harm = sum(run["harm"] for run in of_way) / len(of_way)
        lines.append(f"| {' | '.join([*cells, f'{harm:.3f}'])} |")
    if "own" in runs:
        wrong = [_right(runs["own"], kind, "wrong") for kind in ("swapped", "common")]
        lines.append(f"| the other tenant's own | {len(runs['own'])} | | {wrong[0]:.1%} | | {wrong[1]:.1%} | | |")
    lines += ["", "| A − B, right answers in points, 95 % over rows | swapped | common |", "|---|---|---|"]
    for a, b in CONTRASTS:
        if a in runs and b in runs:
            cells = [_difference(runs[a], runs[b], kind) for kind in ("swapped", "common")]
            lines.append(f"| {a} − {b} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _difference(a: list[dict[str, Any]], b: list[dict[str, Any]], kind: str) -> str:
    """A row's difference is its mean over the seeds that both have."""
    seeds = sorted({run["seed"] for run in a} & {run["seed"] for run in b})
    pair = [_matches([run for run in runs for seed in seeds if run["seed"] == seed], kind) for runs in (a, b)]
    return over_rows((pair[0] - pair[1]).mean(0))


def main() -> None:
    options = parser(__doc__, workers=True)
    options.add_argument("--source", type=Path, default=Path("data"))
    args = options.parse_args()
    ledger = Ledger(RESULTS / "tenants.jsonl")
    if args.command == "report":
        (RESULTS / "tenants.md").write_text(page := report(ledger))
        return print(page)
    if args.worker is None:
        raise SystemExit(start_workers("tenants", args, "--source", str(args.source)))
    score_answers_only()
    work(Tenants(args.source, args.work / "tenants", ledger))


if __name__ == "__main__":
    main()
