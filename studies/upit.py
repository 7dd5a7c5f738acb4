"""
Does UpIT pay on a pretrained model? SmolLM2-135M-Instruct on six short tasks of real data, with UpIT and its rivals.

    python -m studies.short_tasks --source FOLDER --output .cache/short_tasks
    python -m studies.upit run [--workers 2]     # resumes where the ledger ends; a run takes minutes on a core
    python -m studies.upit report                # tables and figures of the ledger, in studies/results

Fixed before the first run: tasks, sizes, seeds, methods, contrasts and the rule for learning rates. A seed draws the
training rows, too: of the quarter, seed s has rows s, s + 4, … of each task. Every method takes 4 passes over its
rows; those that start from the same stage 1 take 2 there and 2 after it, of which UpIT's stage 3 takes 0.4. The
learning rate of a method is the best on seed 3 and its quarter, with worse ones on both sides; UpIT's variants have
UpIT's, stage 1 that of the LoRA of rank k·r, and all rows those of the quarter. The loss per answer token, mean of
the tasks, decides, in the contrasts below, paired over seeds, with 95 % t intervals. Of ten, two in five such studies
would show one without zero where there is no difference at all.

Added after the first results, for what else might explain them: three methods with a rate that decays linearly, as
Trainer's does by default (UpIT's after stage 1); and, neither trained further, the mean of stage 1's eight checkpoints
as one LoRA, and the last of them. Their contrasts are further ones, marked with a star. Added, too: the split of the
losses into tasks that the model can do and tasks that it cannot, the routing of mixtures before any training, and the
order of the paper's Table 1.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from filelock import FileLock
from peft import PeftModel, get_peft_model
from safetensors import safe_open
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from examples.demo.smollm2 import smollm2_folder
from moe_peft import MoELoraConfig
from moe_peft.analysis.figures import plot_bars, plot_curves
from moe_peft.analysis.recorder import record_routing
from moe_peft.models.layer import routed_layers
from moe_peft.training.preparation import preparation, tokenized
from moe_peft.upit import UpIT, load_recipe
from moe_peft.upit.files import expert_folders
from moe_peft.upit.stage_cache import run_stage
from moe_peft.utils.io import hash_file

from .differences import Difference, paired_difference, plot_differences
from .exact_match import measure
from .rates import best_rate, next_rate
from .runs import Ledger, parser, score_answers_only, start_workers, work
from .short_tasks import TASKS

RECIPE = Path(__file__).with_suffix(".yaml")
RESULTS = Path(__file__).parent / "results"
SEEDS, TUNING_SEED = (0, 1, 2), 3
FIRST_RATES = (1e-3, 2e-3)
SIZES = {"quarter": 4, "all": 1}  # every how-manyth row of each task


class Method(NamedTuple):
    """
    Args:
        label: in tables and figures.
        settings: of the recipe.
        experts: which of stage 1's eight checkpoints the recipe starts from; None: it does not.
        rate_of: the method that has its learning rate.
    """

    label: str
    settings: tuple[str, ...]
    experts: tuple[int, ...] | None = None
    rate_of: str | None = None


_ALL = tuple(range(8))
METHODS = {
    "lora_kr": Method("LoRA, rank k·r", ("method=lora", "adapter.r=16", "adapter.lora_alpha=32")),
    "lora_nr": Method("LoRA, rank n·r", ("method=lora", "adapter.r=64", "adapter.lora_alpha=128")),
    "loramoe_pt": Method("LoRAMoE-PT", ("method=loramoe_pt",)),
    "pesc": Method("PESC", ("method=pesc",)),
    "upit": Method("UpIT", ("method=upit",), _ALL),
    "upit_no_init": Method("UpIT, random routers", ("method=upit", "router_init.buckets=none"), _ALL, "upit"),
    "upit_expanded": Method("UpIT, 4 + 4 experts", ("method=upit",), (1, 3, 5, 7), "upit"),
    "loramoe_sft": Method("LoRAMoE-SFT", ("method=loramoe_sft",), _ALL),
    "self_moe": Method("Self-MoE", ("method=self_moe",), _ALL),
    "mean": Method("mean of the checkpoints", (), _ALL, "lora_kr"),
    "last": Method("last checkpoint", (), _ALL, "lora_kr"),
}
_DECAY = ("sft.lr_scheduler_type=linear",)
METHODS |= {
    f"{name}_decay": Method(f"{METHODS[name].label}, decay", METHODS[name].settings + _DECAY, METHODS[name].experts)
    for name in ("lora_kr", "loramoe_pt", "upit")
}
# In the order in which their runs are made: the first contrasts are there first.
PHASES = (
    ("lora_kr", "loramoe_pt"), ("upit", "loramoe_sft", "lora_kr_decay", "loramoe_pt_decay"),
    ("mean", "last", "upit_no_init", "upit_expanded", "self_moe"), ("lora_nr", "pesc", "upit_decay"),
)  # fmt: skip
CONTRASTS = (
    ("loramoe_pt", "lora_kr"), ("loramoe_pt", "lora_nr"), ("upit", "lora_kr"), ("upit", "lora_nr"),
    ("upit", "loramoe_pt"), ("upit", "loramoe_sft"), ("upit", "upit_no_init"), ("upit", "upit_expanded"),
    ("upit", "self_moe"), ("pesc", "loramoe_pt"),
)  # fmt: skip
ADDED = (  # after the first results
    ("upit", "lora_kr_decay"), ("upit", "loramoe_pt_decay"), ("loramoe_pt_decay", "lora_kr_decay"),
    ("upit_decay", "lora_kr_decay"), ("upit_decay", "loramoe_pt_decay"), ("upit_decay", "upit"), ("upit", "mean"),
    ("upit_decay", "mean"), ("self_moe", "mean"), ("mean", "last"), ("upit", "pesc"),
)  # fmt: skip
DRAWN = (  # in the figure
    ("loramoe_pt_decay", "lora_kr_decay"), ("upit_decay", "lora_kr_decay"), ("upit_decay", "loramoe_pt_decay"),
    ("upit_decay", "upit"), ("upit_decay", "mean"), ("self_moe", "mean"), ("mean", "last"), ("upit", "loramoe_sft"),
)  # fmt: skip
ROUTED = ("loramoe_pt", "loramoe_sft", "upit", "self_moe")  # whose routing a figure shows
DECAYING = ("loramoe_pt_decay", "upit_decay")  # and which decay
BEYOND = ("arithmetic", "sql")  # tasks that the model cannot do: on all rows no method gets a quarter of them right
# Averages of nine benchmarks in UpIT's Table 1, with 8 experts, 2 active (LoRA has none), at constant rates.
PAPER = {
    "pesc": 47.07, "loramoe_pt": 47.32, "lora_kr": 47.53, "self_moe": 49.30, "loramoe_sft": 49.99, "upit": 52.21,
}  # fmt: skip
CURVES = ("lora_kr", "lora_kr_decay", "pesc", *ROUTED)  # and whose training loss


class Job(NamedTuple):
    """A run to be made."""

    method: str
    size: str
    seed: int
    rate: float


class Study:
    """
    Args:
        data: the folder of `train.jsonl` and `test.jsonl`.
        work: a folder for what is made on the way.
        ledger: of the finished runs.

    Attributes:
        digest: of the rows, the model and its tokenizer. Runs with another one do not count.
    """

    def __init__(self, data: Path, work: Path, ledger: Ledger) -> None:
        self.ledger = ledger
        self.train, self.test = (_read(data / f"{name}.jsonl") for name in ("train", "test"))
        model = [hash_file(smollm2_folder() / name) for name in ("model.safetensors", "tokenizer.json")]
        self.digest = hashlib.sha256(json.dumps([self.train, self.test, model]).encode()).hexdigest()[:12]
        self.work = work / self.digest
        self.work.mkdir(parents=True, exist_ok=True)

    # --- what is to be done ------------------------------------------------------------------------------------------

    def records(self, **wanted: Any) -> list[dict[str, Any]]:
        """The finished runs with this digest."""
        return self.ledger.records(**wanted, data=self.digest)

    def rate(self, method: str) -> float | None:
        """A method's learning rate, once there is one with worse ones on both sides."""
        method = METHODS[method].rate_of or method
        losses = self.tuning_losses(method)
        return None if next_rate(losses, FIRST_RATES) is not None else best_rate(losses)

    def tuning_losses(self, method: str) -> dict[float, float]:
        """Rate → held-out loss on the tuning seed."""
        return {r["rate"]: r["loss"] for r in self.records(method=method, size="quarter", seed=TUNING_SEED)}

    def jobs(self) -> Iterator[Job]:
        """Runs that are missing and can be made now, the most urgent first."""
        done = {(r["method"], r["size"], r["seed"], r["rate"]) for r in self.records()}
        rates = {name: self.rate(name) for name in METHODS}
        for size in SIZES:
            for phase in PHASES:
                for tuned in (name for name in phase if METHODS[name].rate_of is None):
                    if METHODS[tuned].experts is not None and rates["lora_kr"] is None:
                        continue  # that of stage 1
                    losses = self.tuning_losses(tuned)
                    rate = next_rate(losses, FIRST_RATES)
                    if rate is not None:
                        untried = [first for first in FIRST_RATES if first not in losses] or [rate]
                        yield from (Job(tuned, "quarter", TUNING_SEED, rate) for rate in untried)
                for seed in SEEDS:
                    of_seed = (Job(name, size, seed, rate) for name in phase if (rate := rates[name]) is not None)
                    yield from (job for job in of_seed if job not in done)
        untrained = [Job("base", "none", 0, 0.0), *(Job("untrained", "none", seed, 0.0) for seed in SEEDS)]
        yield from (job for job in untrained if job not in done)

    # --- a run -------------------------------------------------------------------------------------------------------

    def run(self, job: Job) -> None:
        """Make a run, measure its result and write it down."""
        folder, adapter, curve = self.work / "-".join(map(str, job)), None, []
        if job.method == "mean":
            adapter = mean_adapter(self._stage_1(job), folder)
        elif job.method == "last":
            adapter = self._stage_1(job)[-1]
        elif job.method == "untrained":
            adapter = self._untrained(job, folder)
        elif job.method != "base":
            adapter, curve = self._trained(job, folder)
        record = {**job._asdict(), **self.measure(adapter), "curve": curve, "data": self.digest}
        if adapter is not None:
            record["parameters"] = _parameters(adapter)
        self.ledger.add(record, f"{record['loss']:.4f}")
        shutil.rmtree(folder, ignore_errors=True)

    def _trained(self, job: Job, folder: Path) -> tuple[Path, list[list[Any]]]:
        """A recipe's adapter, and its training losses: stage, passes, loss."""
        method = METHODS[job.method]
        settings = [*method.settings, f"sft.learning_rate={job.rate}"]
        if method.experts is not None:
            experts = self._stage_1(job)
            settings += [f"prepare.adapters={[str(experts[i]) for i in method.experts]}", "num_train_epochs=2"]
        pipeline = self._recipe(job, folder, settings)
        adapter = pipeline.run()
        curve = [
            [stage, round(step["epoch"], 2), step["loss"]]
            for stage, of in pipeline.records.items()
            for step in of["metrics"].get("history", ())
            if "loss" in step
        ]
        return adapter, curve

    def _recipe(self, job: Job, folder: Path, settings: list[str]) -> UpIT:
        inputs = [f"model.name_or_path={smollm2_folder()}", f"data.train={self._file_of_rows(job)}"]
        return UpIT(load_recipe(RECIPE, [f"output_dir={folder}", f"seed={job.seed}", *inputs, *settings]))

    def rows(self, size: str, seed: int) -> list[dict[str, str]]:
        """The training rows of a seed."""
        of_task: dict[str, list[dict[str, str]]] = defaultdict(list)
        for row in self.train:
            of_task[row["domain"]].append(row)
        every = SIZES[size]
        return [row for rows in of_task.values() for row in rows[seed % every :: every]]

    def _file_of_rows(self, job: Job) -> Path:
        path = self.work / f"{job.size}-{job.seed % SIZES[job.size]}.jsonl"
        if not path.exists():
            path.write_text("".join(json.dumps(row) + "\n" for row in self.rows(job.size, job.seed)))
        return path

    def _stage_1(self, job: Job) -> list[Path]:
        """The eight checkpoints of a LoRA of rank r that methods with stages share; half of the passes."""
        folder, rate = self.work / f"stage_1-{job.size}-{job.seed}", self.rate("lora_kr")
        with FileLock(f"{folder}.lock"):
            pipeline = self._recipe(job, folder, ["router_init.buckets=none", f"sft.learning_rate={rate}"])
            pipeline.join_processes()
            folder.mkdir(exist_ok=True)
            run_stage(pipeline.stages[0])
        return expert_folders(pipeline.stages[0].folder, 8)

    def _untrained(self, job: Job, folder: Path) -> Path:
        """A mixture as it begins: routers are random, and experts change nothing yet."""
        base = AutoModelForCausalLM.from_pretrained(smollm2_folder())
        set_seed(job.seed)
        config = MoELoraConfig(num_experts=8, top_k=2, r=8, lora_alpha=16, mixing="projection", task_type="CAUSAL_LM")
        get_peft_model(base, config).save_pretrained(str(folder))
        return folder

    def measure(self, adapter: Path | None) -> dict[str, Any]:
        """
        Loss and exact matches of an adapter, or of the base, on the held-out rows; of a mixture, its `specialization`.
        """
        base = smollm2_folder()
        tokenizer = AutoTokenizer.from_pretrained(base)
        model = AutoModelForCausalLM.from_pretrained(base)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter)
        rows, collator = tokenized(Dataset.from_list(self.test), tokenizer, preparation(max_length=64))
        if not routed_layers(model):
            return measure(model, rows, collator)
        with record_routing(model, sorted(set(rows["domain"]))) as statistics:
            measured = measure(model, rows, collator, statistics)
        return {**measured, "specialization": {t: of_L.tolist() for t, of_L in statistics.specialization().items()}}


def mean_adapter(adapters: Sequence[Path], folder: Path) -> Path:
    """One LoRA whose update is the mean of the adapters' updates, as `folder/mean`."""
    # an adapter named "0" would keep PEFT from saving layer 0 of the others
    (first, path), *others = {f"expert_{path.name}": path for path in adapters}.items()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(smollm2_folder()), path, first)
    for name, path in others:
        model.load_adapter(path, name)
    experts = list(model.peft_config)
    model.add_weighted_adapter(experts, [1 / len(experts)] * len(experts), "mean", combination_type="cat")
    model.save_pretrained(str(folder), selected_adapters=["mean"])
    return folder / "mean"


def _read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _parameters(adapter: Path) -> int:
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


# --- report ----------------------------------------------------------------------------------------------------------


def report(study: Study) -> None:
    """Write tables and figures of the runs that there are, and print the tables."""
    lines = [
        "# UpIT and its rivals on SmolLM2-135M-Instruct",
        "",
        "`python -m studies.upit report` writes this page; the script's head says what was fixed before the first run. "
        f'Methods with "decay", "{METHODS["mean"].label}", "{METHODS["last"].label}" and contrasts with * were added '
        "after the first results.",
        "",
        "A seed varies initial values and the order of the rows, and on the quarter the rows as well. So on all rows "
        "the intervals say nothing about other rows, and the learning rates are those of the quarter.",
        "",
    ]
    excluding = 0
    panels: dict[str, list[tuple[str, Difference]]] = {}
    for size in SIZES:
        runs = {name: _by_seed(study, name, size) for name in METHODS}
        missing = sum(len(SEEDS) - len(of) for of in runs.values())
        lines += [f"## {size.capitalize()} of the rows", ""]
        lines += [f"*In progress: {missing} of {len(SEEDS) * len(METHODS)} runs are missing.*", ""] if missing else []
        if not any(runs.values()):
            continue
        lines += [*_means(study, runs), "", *_contrasts(runs), ""]
        if rows := _differences(runs, _LOSSES["loss"]):
            fixed = [row for row in rows if not row[0].endswith("*")]
            without = sum(difference.excludes_zero() for _, difference in fixed)
            excluding += without
            lines += [f"Intervals of the loss without 0: {without} of the {len(fixed)} fixed contrasts.", ""]
            if drawn := _differences(runs, _LOSSES["loss"], DRAWN):
                panels[f"{size} of the rows"] = drawn
            curves = {METHODS[name].label: points for name in CURVES if (points := _curve(runs[name]))}
            plot_curves(curves, RESULTS / f"upit_{size}.svg", "passes over the rows", "training loss")
            title = "Training loss by half passes, mean of the seeds; methods with stages after the first one"
            lines += [f"![{title}](upit_{size}.svg)", ""]
            by_name = {"base, random routers": {run["seed"]: run for run in study.records(method="untrained")}}
            by_name |= {METHODS[name].label: runs[name] for name in (*ROUTED, *DECAYING)}
            if shares := {label: of for label, made in by_name.items() if (of := _specialization(made))}:
                means = [f"{label} {np.mean(list(of.values())):.1%}" for label, of in shares.items()]
                title = "Share of a task's tokens that go to other experts than the average task's"
                plot_bars(shares, RESULTS / f"upit_{size}_routing.svg", title, "{:.0%}")
                lines += [f"![{title}, mean of layers and seeds](upit_{size}_routing.svg)", ""]
                lines += [f"Mean of the tasks: {'; '.join(means)}.", ""]
    if panels:
        plot_differences(panels, RESULTS / "upit_differences.svg", "difference of held-out loss")
        lines += ["![Differences of held-out loss with 95 % intervals](upit_differences.svg)", ""]
    lines += [f"Of all fixed contrasts, {excluding} of {len(SIZES) * len(CONTRASTS)} exclude 0.", ""]
    lines += [*_paper(study), "", "## Learning rates", "", *_rates(study)]
    (RESULTS / "upit.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _by_seed(study: Study, name: str, size: str) -> dict[int, dict[str, Any]]:
    runs = study.records(method=name, size=size, rate=study.rate(name))
    return {run["seed"]: run for run in runs if run["seed"] in SEEDS}


def _means(study: Study, runs: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """Each method's means over its seeds, the lowest loss first, and those of the base; by task, loss and exact."""
    tasks = sorted({task for of in runs.values() for run in of.values() for task in run["tasks"]})
    lines = [f"| method | parameters | seeds | loss | exact | {' | '.join(tasks)} |", f"|{'---|' * (5 + len(tasks))}"]
    made = {METHODS[name].label: list(of.values()) for name, of in runs.items() if of}
    made |= {"no training": study.records(method="base")}
    for label, of in sorted(made.items(), key=lambda item: _mean(item[1], "loss")):
        if of:
            size = f"{of[0]['parameters'] / 1e6:.2f}M" if "parameters" in of[0] else ""
            by_task = ["{:.3f}, {:.0%}".format(*np.mean([r["tasks"][t] for r in of], axis=0)) for t in tasks]
            cells = [label, size, str(len(of)), f"{_mean(of, 'loss'):.4f}", f"{_mean(of, 'exact'):.3f}", *by_task]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _mean(runs: list[dict[str, Any]], measure: str) -> float:
    return float(np.mean([run[measure] for run in runs])) if runs else float("inf")


def _loss_of(run: dict[str, Any], beyond: bool) -> float:
    """Mean loss of the tasks that are beyond the model, or of the others."""
    return float(np.mean([loss for task, (loss, _) in run["tasks"].items() if (task in BEYOND) is beyond]))


_LOSSES: dict[str, Callable[[dict[str, Any]], float]] = {
    "loss": lambda run: run["loss"],
    "loss of the tasks that it can do": lambda run: _loss_of(run, False),
    "of those that it cannot": lambda run: _loss_of(run, True),
}


def _differences(
    runs: dict[str, dict[int, dict[str, Any]]],
    measure: Callable[[dict[str, Any]], float],
    contrasts: Sequence[tuple[str, str]] = (*CONTRASTS, *ADDED),
) -> list[tuple[str, Difference]]:
    """The contrasts that at least two seeds have: label, difference."""
    rows = []
    for name, other in contrasts:
        seeds = sorted(runs[name].keys() & runs[other].keys())
        if len(seeds) > 1:
            pairs = [[measure(runs[method][seed]) for seed in seeds] for method in (name, other)]
            star = " *" if (name, other) in ADDED else ""
            rows.append((f"{METHODS[name].label} − {METHODS[other].label}{star}", paired_difference(*pairs)))
    return rows


def _contrasts(runs: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    measures = {**_LOSSES, "exact": lambda run: run["exact"]}
    lines = [
        f"| contrast | {' | '.join(f'{name} | 95 % interval' for name in measures)} | share that those have |",
        f"|{'---|' * (2 + 2 * len(measures))}",
    ]
    for of_contrast in zip(*(_differences(runs, value) for value in measures.values()), strict=True):
        (label, loss), _, (_, beyond), _ = of_contrast
        cells = [cell for _, difference in of_contrast for cell in difference.cells()]
        share = f"{beyond.mean * len(BEYOND) / (loss.mean * len(TASKS)):.0%}" if loss.excludes_zero() else ""
        lines.append(f"| {' | '.join([label, *cells, share])} |")
    return lines


def _paper(study: Study) -> list[str]:
    """The methods of UpIT's Table 1 in its order, and what they have here."""
    shares = {name: 100 * _mean(list(of.values()), "exact") for name in PAPER if (of := _by_seed(study, name, "all"))}
    lines = ["## The order of the paper's Table 1, its half with LoRA", ""]
    lines += ["| method, at a constant rate | paper: average | here, all of the rows: right answers |", "|---|---|---|"]
    lines += [f"| {METHODS[name].label} | {PAPER[name]:.2f} | {share:.1f} % |" for name, share in shares.items()]
    if len(shares) == len(PAPER):
        rho = stats.spearmanr(list(PAPER.values()), list(shares.values())).statistic
        lines += ["", f"Spearman's rank correlation: {rho:.2f}."]
    return lines


def _curve(runs: dict[int, dict[str, Any]]) -> list[tuple[float, float]]:
    """Training loss of stages 1 and 4, mean of the seeds, by half passes."""
    halves: dict[int, list[float]] = defaultdict(list)
    for run in runs.values():
        start = 2 if METHODS[run["method"]].experts is not None else 0
        for stage, epoch, loss in run["curve"]:
            if stage != "router_init":
                halves[math.ceil(2 * (start + epoch))].append(float(loss))
    return [(half / 2, float(np.mean(losses))) for half, losses in sorted(halves.items())]


def _specialization(runs: dict[int, dict[str, Any]]) -> dict[str, float]:
    """By task, mean of layers and seeds; nothing without runs."""
    tasks = next(iter(runs.values()))["specialization"] if runs else ()
    return {task: float(np.mean([run["specialization"][task] for run in runs.values()])) for task in tasks}


def _rates(study: Study) -> list[str]:
    lines = ["| method | losses on the tuning seed | chosen |", "|---|---|---|"]
    for name, method in METHODS.items():
        if method.rate_of is None:
            losses = study.tuning_losses(name)
            tried = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in sorted(losses.items()))
            rate = study.rate(name)
            lines.append(f"| {method.label} | {tried} | {'' if rate is None else f'{rate:g}'} |")
    return lines


def main() -> None:
    args = parser(__doc__, workers=True).parse_args()
    study = Study(args.data.absolute(), args.work.absolute(), Ledger(RESULTS / "upit.jsonl"))
    if args.command == "report":
        return report(study)
    if args.worker is None:
        raise SystemExit(start_workers("upit", args))
    score_answers_only()
    work(study)


if __name__ == "__main__":
    main()
