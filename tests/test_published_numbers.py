"""Headline numbers of README and pages are those of the ledgers, rounded once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def text(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


def records(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()]


def test_speed_on_a_gpu():
    """Each cell of the page's table, and what README says of it."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for record in records("benchmarks/results/gpu.jsonl"):
        for task, of_task in record["cells"]:
            if "lora" in of_task:
                cells[record["name"].rsplit(", ", 1)[1], task] = of_task
    page = (ROOT / "docs/speed.md").read_text()
    shown = re.findall(r"^\| (bfloat16|4-bit) (?:NF4 )?\| ([a-z ]+) \| (.+) \| (.+) \|$", page, re.M)
    assert {(base, task): {"output": a, "projection": b} for base, task, a, b in shown} == {
        key: {name: of_task[name] for name in ("output", "projection")} for key, of_task in cells.items()
    }
    step, decode = cells["bfloat16", "training step"], cells["bfloat16", "decode"]
    values = [of[name].split(" ")[0] for name in ("output", "projection") for of in (step, decode)]
    assert (
        "a training step takes {} times LoRA's time and a decoded token {} times, with "
        '`mixing="projection"` {} and {} times'
    ).format(*values) in text("README.md")


def test_where_vllms_time_goes():
    page = (ROOT / "benchmarks/results/vllm_parts.md").read_text()
    rows = {
        name: [float(cell.strip() or 0) for cell in cells.split("|")]
        for name, cells in re.findall(r"^\| (.+?) \| generation, 1 \| (.+) \|$", page, re.M)
    }
    added = sorted(rows[f'adapter, `mixing="{mixing}"`'][1] - rows["base"][1] for mixing in ("output", "projection"))
    assert (
        "experts add {:.0f} to {:.0f} ms of CPU time to the {:.0f} ms of a token".format(*added, sum(rows["base"][:4]))
    ) in text("docs/serving.md")


def test_speed_on_a_cpu_and_of_other_packages():
    def cells(page, columns):
        rows = re.findall(r"^\| (.+) \|$", (ROOT / page).read_text(), re.M)
        return {tuple(row[:columns]): row[columns:] for row in (re.split(r" \|(?: |$)", row) for row in rows)}

    page, all_numbers = cells("docs/speed.md", 2), cells("docs/results/speed.md", 3)
    for hidden, experts in (("256", "8"), ("768", "8"), ("256", "64")):
        measured = [all_numbers[hidden, experts, task] for task in ("training step", "prefill", "decode")]
        assert page[hidden, experts] == ["; ".join(cell.split()[0] for cell in row[:2]) for row in measured]
    peers = cells("benchmarks/results/peers.md", 2)

    def between(method: str, task: int) -> str:
        low, high = sorted((row[task].split()[0] for (_, name), row in peers.items() if name == method), key=float)
        return f"{low} to {high}"

    assert (
        f"MixLoRA (`mixlora` 0.2.3) {between('MixLoRA', 0)} times in a training step and {between('MixLoRA', 2)} in "
        f"decoding, PEFT's X-LoRA {between('X-LoRA', 0)} in a training step"
    ) in text("docs/speed.md")


def test_generation_by_a_compiled_pass():
    page = (ROOT / "benchmarks/results/generate.md").read_text()
    measured = dict(re.findall(r"^\| (\w+, [a-z ]+) \| ([\d.]+) \|", page, re.M))
    for shown, method in (("base alone", "base"), ("LoRA", "lora"), ("MoE, `output`", "output"),
                          ("MoE, `projection`", "projection")):  # fmt: skip
        cells = [f"{float(measured[f'{method}, {way}']):.1f}" for way in ("as usual", "static and compiled")]
        assert f"| {shown} | {' | '.join(cells)} |" in text("docs/speed.md")


def share(matches: list[str]) -> float:
    """Of right answers, texts of 0 and 1, in per cent."""
    return 100 * sum(map(int, "".join(matches))) / len("".join(matches))


def test_ways_to_use_several_loras():
    """One table of one study: right answers and harm. README has its middle column, Train what replay costs."""
    runs = [run for run in records("studies/results/requests.jsonl") if "right" in run]
    by_run = {(run["set"], run["seed"], run["way"], run["rows"]): run for run in runs}
    trainings = (("short", (0,)), ("domains", (0, 3)), ("many", (0,)))

    def right(set_name: str, way: str, seeds: tuple[int, ...], kind: str = "one", rows: int = 0) -> float:
        return share([by_run[set_name, seed, way, rows]["right"][kind] for seed in seeds])

    def cell(set_name: str, seeds: tuple[int, ...], way: str, rows: int) -> tuple[str, str]:
        if (set_name, seeds[0], way, rows) not in by_run:
            return "", ""
        of, base = ([by_run[set_name, seed, *each] for seed in seeds] for each in ((way, rows), ("base", 0)))
        harm = ""
        if "none_loss" in of[0]:
            harm = f"{sum(a['none_loss'] - b['none_loss'] for a, b in zip(of, base, strict=True)) / len(of):.2f}"
        return f"{right(set_name, way, seeds, rows=rows):.0f} %", harm

    ways = {
        "one LoRA on all rows": ("joint", 0),
        "the same, every fifth row general": ("joint, replay", 0),
        "the LoRA of each request's own task": ("own", 0),
        "a LoRA picked by the request, or the base": ("picked", 240),
        "a mixture, token by token": ("token", 240),
        "the mean of the LoRAs": ("mean", 0),
    }
    domains = []
    for title, (way, rows) in ways.items():
        cells = [cell(name, seeds, way, rows) for name, seeds in trainings]
        shown = " | ".join(", ".join(filter(None, each)) for each in cells)
        assert f"| {title} | {shown} |".replace("  ", " ") in text("docs/studies.md")
        domains.append([value or "–" for value in cells[1]])
    titles = (
        "one LoRA on all rows; with every fifth row general",
        "the LoRA of each request's task; the one that is picked",
        "a mixture, token by token; the mean of the LoRAs",
    )
    for title, first, second in zip(titles, domains[::2], domains[1::2], strict=True):
        cells = " | ".join("; ".join(pair) for pair in zip(first, second, strict=True))
        assert f"| {title} | {cells} |" in text("README.md")
    lost = {
        kind: sorted(
            right(name, "joint", seeds, kind) - right(name, "joint, replay", seeds, kind)
            for name, seeds in trainings[:2]
        )
        for kind in ("one", "system", "switch")
    }
    assert f"That cost {lost['one'][0]:.0f} to {lost['one'][-1]:.0f} points" in text("docs/training.md")
    others = sorted([*lost["system"], *lost["switch"]])
    assert f"it cost {others[0]:.0f} to {others[-1]:.0f} points" in text("docs/training.md")
    controls = [
        right(name, f"{way}control", seeds, rows=rows)
        for way, rows in (("picked, shuffled, ", 240), ("token, shuffled, ", 240), ("own, noise, ", 0))
        for name, seeds in (("short", (3, 4)), ("domains", (3,)), ("many", (0,)))
    ]
    assert not any(controls[6:])
    assert (
        "picking has {:.0f}, {:.0f} and {:.0f} % right and a mixture {:.0f}, {:.0f} and {:.0f} %. LoRAs with noise as "
        "large in place of B have none"
    ).format(*controls[:6]) in text("docs/studies.md")


def test_tenants():
    """The rates are those of the study's page, in its order of ways."""
    runs = records("studies/results/tenants.jsonl")
    rows = {
        "one shared expert and one for each": ("shared", 4e-3),
        "one LoRA, the tenant's name in each prompt, as many parameters": ("joint, named, rank 24", 2e-3),
        "one LoRA for all, without names": ("joint, rank 16", 2e-3),
        "a LoRA for each": ("own", 4e-3),
        "the first, trained with the tenants shuffled": ("shuffled", 2e-3),
    }
    for title, (way, rate) in rows.items():
        of_way = [run["test"] for run in runs if (run["way"], run["rate"]) == (way, rate)]
        assert len(of_way) == 3
        kinds = [
            [of_tenant[kind][1] for test in of_way for of_tenant in test.values()] for kind in ("swapped", "common")
        ]
        cells = [share(kinds[0]), share(kinds[1]), share([*kinds[0], *kinds[1]])]
        assert f"| {title} | {' | '.join(f'{cell:.0f} %' for cell in cells)} |" in text("docs/steering.md")


def test_requests_of_an_adapter_that_left():
    runs = records("studies/results/choices.jsonl")
    gone = [
        [100 * run["gone"] for run in runs if (run["set"], run["rows"], run["way"]) == ("domains", 240, way)]
        for way in ("to base", "no trace")
    ]
    to_base, no_trace = (sum(of) / len(of) for of in gone)
    assert f"{to_base:.0f} % go to the base with it, and {no_trace:.1f} % without" in text("docs/serve-many.md")


def test_three_studies_of_upit():
    runs = {run["method"]: run for run in records("studies/results/upit_paper_quarter.jsonl") if run["rate"] == 6e-4}
    upit, frozen, mean, lora = (
        runs[way] for way in ("upit 8", "upit 8, random routers", "mean, trained on", "lora, decay")
    )
    sixteen = runs["upit 16"]

    def loss_of(run: dict[str, Any]) -> str:
        return f"{sum(loss for loss, _ in run['test'].values()) / len(run['test']):.3f}"

    page = text("docs/studies.md")
    assert f"eight tasks, 1,600 rows | 1 | stage 3 | {loss_of(upit)} | {loss_of(mean)} | {loss_of(lora)} |" in page
    for study, seeds, kind, methods in (
        ("schedule", 6, "`ridge`", ("UpIT", "mean of the checkpoints, trained on", "LoRA, rank k·r, linear decay")),
        ("upit", 3, "stage 3", ("UpIT, decay", None, "LoRA, rank k·r, decay")),
    ):
        # The last table that has the method: of upit.md the one of all rows.
        table = (ROOT / f"studies/results/{study}.md").read_text()
        found = [
            re.findall(rf"^\| {re.escape(name)} \| .+? \| {seeds} \| ([\d.]+) \|", table, re.M)[-1] if name else ""
            for name in methods
        ]
        cells = " | ".join(f"{float(loss):.3f}" if loss else "" for loss in found).replace("  ", " ")
        assert f"| {seeds} | {kind} | {cells} |" in page, cells
    shares = [100 * run["routing"] for run in (upit, frozen)]
    assert (
        "{:.0f} % of a task's tokens go to other experts than the average task's, {:.0f} % with random routers, whose "
        "loss is {}"
    ).format(*shares, loss_of(frozen)) in page
    loss, right = zip(*[zip(*run["untrained"].values(), strict=True) for run in (upit, lora)], strict=True)
    assert "the lowest, {:.3f} against LoRA's {:.3f}".format(*(sum(of) / len(of) for of in loss)) in page
    assert (
        "it chose {:.0f} % of 210 answers right, LoRA {:.0f} %".format(*(100 * sum(of) / len(of) for of in right))
        in page
    )
    assert f"it was no better ({loss_of(sixteen)})" in page


def test_the_fork():
    runs = {run["way"]: run for run in records("studies/results/fork.jsonl")}
    assert {(run["set"], run["seed"]) for run in runs.values()} == {("short", 10)}, "say what other runs found"
    page, names = text("docs/which-tool.md"), {
        "joint, 8n, 20 %": "one LoRA on all rows, with 20 % `replay`", "distilled": "one LoRA, distilled",
        "regmean": "one LoRA, merged", "picked": "picked for each request",
    }  # fmt: skip
    for way, name in names.items():
        run = runs[way]
        rights = [f"{100 * of.count('1') / len(of):.0f} %" for of in run["right"].values()]
        labels = ", ".join(f"{100 * run['labels'][kind]:.0f} %" for kind in ("far", "near"))
        harm = f"{run['none_loss'] - runs['base']['none_loss']:.2f}"
        assert f"| {' | '.join([name, *rights, labels, harm])} |" in page, way
    table = (ROOT / "studies/results/fork.md").read_text()
    for pair, kind, shown in (
        ("joint, 8n, 20 % − picked", 0, "+5.0 [-1.7, 11.7]"), ("joint, 8n, 20 % − picked", 2, "-6.2 [-12.9, 0.4]"),
        ("distilled − own", 0, "-6.9 [-13.2, -0.6]"),
    ):  # fmt: skip
        (row,) = re.findall(rf"\| {re.escape(pair)} \| 1 \| (.*?) \|\n", table) or [""]
        assert row.split(" | ")[kind] == shown


def test_how_a_request_is_written():
    runs = records("studies/results/writings.jsonl")

    def share(name: str, kind: str, way: str = "now", rows: int = 240) -> str:
        of = [r["found"][kind][0] for r in runs if (r["set"], r["way"], r["rows"]) == (name, way, rows)]
        return f"{sum(100 * each.count('1') / len(each) for each in of) / len(of):.0f} %"

    page = text("docs/serve-many.md")
    short, domains = ([share(name, kind) for kind in ("typos", "polite", "after")] for name in ("short", "domains"))
    rows = {
        "as in the adapters' texts, or as sentences, in lower case or capitals": [
            f"{share('short', 'data')} reach their adapter", share("domains", "data")
        ],
        "with typing errors; between polite sentences; below a document": ["; ".join(short), "; ".join(domains)],
        "a message that refers to the one before it": [share("short", "second"), share("domains", "second")],
        "requests about a quoted request": [f"{share('short', 'quoted')} go to the base", share("domains", "quoted")],
        "questions that no adapter is for, of another data set": [share("short", "oos"), share("domains", "oos")],
        "the same with a hundred such questions in `--neutral`": [
            share("short", "oos", "own log"), share("domains", "oos", "own log")
        ],
        "requests like the adapters' own, of other kinds": [share("short", "near"), share("domains", "near")],
    }  # fmt: skip
    for title, cells in rows.items():
        assert f"| {title} | {' | '.join(cells)} |" in page
    few = [share(name, "data", rows=24).removesuffix(" %") for name in ("short", "domains")]
    assert f"With 24 texts of each adapter, {few[0]} and {few[1]} % of its requests reach it" in page
