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


def request_gate(set_name: str, way: str, rows: int, key: str = "exact") -> str:
    """A mean over seeds, in per cent."""
    found = [
        record[key]
        for record in records("studies/results/request_gate.jsonl")
        if (record["set"], record["way"], record.get("rows")) == (set_name, way, rows)
    ]
    assert len(found) == 3
    return f"{100 * sum(found) / 3:.0f} %"


def test_picking_and_mixing():
    own, picked = request_gate("domains", "own", 0), request_gate("domains", "picked, 8 layers, base", 240)
    token = request_gate("domains", "token, tokens", 240)
    assert (
        f"on eight look-alike tasks {picked} right where each task's own LoRA has {own} and a mixture by token {token}"
    ) in text("README.md")
    short = [request_gate("short", "picked, 8 layers, base", 150), request_gate("short", "own", 0)]
    assert f"| {short[0]} (own: {short[1]}) | {picked} (own: {own}) |" in text("docs/combine.md")


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
    step, peak = cells["bfloat16", "training step"], cells["bfloat16", "peak memory"]
    values = [of[name].split(" ")[0] for name in ("output", "projection") for of in (step, peak)]
    assert (
        'a training step takes {} times LoRA\'s, its peak {} times; with `mixing="projection"` {} and {}'.format(
            *values
        )
    ) in text("README.md")


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
    names = {"output": "ours, `output`", "projection": "ours, `projection`", "X-LoRA": "X-LoRA (PEFT)",
             "MixLoRA": "MixLoRA (`mixlora` 0.2.3)"}  # fmt: skip
    for (hidden, method), row in cells("benchmarks/results/peers.md", 2).items():
        if method in names:
            assert page[hidden, names[method]] == [cell.split()[0] for cell in row]


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


def test_what_reaches_a_service():
    runs = [run for run in records("studies/results/requests.jsonl") if "right" in run]
    by_run = {(run["set"], run["seed"], run["way"], run["rows"]): run for run in runs}

    def right(set_name: str, way: str, seeds: tuple[int, ...], kind: str = "one", rows: int = 0) -> float:
        return share([by_run[set_name, seed, way, rows]["right"][kind] for seed in seeds])

    def harm(set_name: str, way: str, seeds: tuple[int, ...], rows: int = 0) -> float:
        ways = ((way, rows), ("base", 0))
        losses = [[by_run[set_name, seed, of, n]["none_loss"] for seed in seeds] for of, n in ways]
        return (sum(losses[0]) - sum(losses[1])) / len(seeds)

    controls = [
        right(name, f"{way}control", seeds, rows=rows)
        for way, rows in (("picked, shuffled, ", 240), ("token, shuffled, ", 240), ("mean, ", 0), ("own, noise, ", 0))
        for name, seeds in (("short", (3, 4)), ("domains", (3,)), ("many", (0,)))
    ]
    assert not any(controls[9:])
    assert (
        "picking has {:.0f}, {:.0f} and {:.0f} % right and a mixture {:.0f}, {:.0f} and {:.0f} %, where the mean of "
        "the LoRAs has {:.0f}, {:.0f} and {:.0f} %; the own LoRAs with noise as large in place of B have none"
    ).format(*controls) in text("docs/combine.md")
    many = [
        right("many", way, (0,), rows=rows) for way, rows in (("picked", 240), ("own", 0), ("token", 240), ("mean", 0))
    ]
    assert (
        "24 LoRAs picking answers {:.0f} % right, where the requests' own have {:.0f} %, a mixture has {:.0f} % and "
        "the mean of the LoRAs {:.0f} %"
    ).format(*many) in text("docs/combine.md")
    slots = slice(20 * 15, 20 * 22)  # seven tasks of twenty rows, after ten domains and five parts of banking77
    of_slots = [share([by_run["many", 0, way, 0]["right"]["one"][slots]]) for way in ("joint", "own")]
    assert (
        "all rows has {:.0f} %: tasks with the same form teach each other. On seven that ask for slots as JSON it has "
        "{:.0f} %, their own LoRAs {:.0f} %"
    ).format(right("many", "joint", (0,)), *of_slots) in text("docs/combine.md")
    joint, replay = "joint", "joint, replay"
    assert (
        f"on the look-alike domains {right('domains', joint, (0, 1, 3)):.0f} % right, where picking has "
        f"{right('domains', 'picked', (0, 1, 3), rows=240):.0f} %"
    ) in text("docs/combine.md")
    assert (
        f"on all rows, {right('domains', joint, (0, 1, 3)):.0f} % and "
        f"{right('domains', 'picked', (0, 1, 3), rows=240):.0f} % right | 3 |"
    ) in text("docs/studies.md")
    assert f"general requests rises by {harm('domains', joint, (0, 1, 3)):.1f} per token" in text("docs/combine.md")
    page, trainings = text("docs/training.md"), (("short", (0,)), ("domains", (0, 3)))
    ways = {
        "one LoRA on all rows": (joint, 0),
        "the same, every fifth row general": (replay, 0),
        "a LoRA for each task, [picked](serve-many.md) by the request": ("picked", 240),
    }
    for title, (way, rows) in ways.items():
        cells = [
            f"{right(name, way, seeds, rows=rows):.0f} %, {harm(name, way, seeds, rows):.2f}"
            for name, seeds in trainings
        ]
        assert f"| {title} | {' | '.join(cells)} |" in page
    picked = right("domains", "picked", (0, 3), rows=240)
    assert (
        f"on these eight tasks {right('domains', replay, (0, 3)):.0f} % right where picking has {picked:.0f} %, in two "
        "trainings"
    ) in text("README.md")
    lost = sorted(
        right(name, joint, seeds, kind) - right(name, replay, seeds, kind)
        for name, seeds in trainings
        for kind in ("system", "switch")
    )
    assert f"replay cost {lost[0]:.0f} to {lost[-1]:.0f} points" in page


def test_tasks_that_come_and_go():
    runs = [run for run in records("studies/results/changing_tasks.jsonl") if "right" in run]

    def of(set_name: str, way: str, rows: int | None = None) -> list[dict[str, Any]]:
        return [r for r in runs if (r["set"], r["way"]) == (set_name, way) and rows in (None, r.get("rows"))]

    sets = ("domains", "short")
    all_picked = [of(name, "picked", 240) for name in sets]
    assert all(len(picked) == 3 for picked in all_picked)
    right = [
        share([run["right"]["one"] for run in found])
        for name, picked in zip(sets, all_picked, strict=True)
        for found in (picked, of(name, "own"))
    ]
    said = (
        "new trainings of the look-alike domains had {:.0f} % right where the requests' own LoRAs had {:.0f} %, and of "
        "the four tasks {:.0f} % where they had {:.0f} %; {:.0f} and {:.0f} % of general requests were answered"
    )
    none = [100 * sum(run["none"] for run in picked) / len(picked) for picked in all_picked]
    assert said.format(*right, *none) in text("docs/combine.md")
    before, after, elsewhere = "", "", 0
    for picked in all_picked[0]:
        removed = [run for run in of("domains", "removed") if run["seed"] == picked["seed"]]
        assert len(removed) == 8
        for i, run in enumerate(removed):
            at = slice(30 * i, 30 * i + 30)  # its own requests
            before += picked["right"]["one"][: at.start] + picked["right"]["one"][at.stop :]
            after += run["right"][: at.start] + run["right"][at.stop :]
            elsewhere += sum(name is not None for name in run["chosen"][at])
    assert f"{share([before]):.0f}" == f"{share([after]):.0f}"
    assert (
        f"had {share([after]):.0f} % right as before; of its own requests {100 * elsewhere / 720:.0f} % then went to "
        "another adapter"
    ) in text("docs/combine.md")
    new = [
        share([run["right"] for run in of("domains", f"new, {way}", rows)])
        for rows in (64, 8)
        for way in ("nearest", "zero")
    ]
    said = "With 64 rows it then had {:.0f} % right, from zero {:.0f} %; with 8 rows {:.0f} and {:.0f} %"
    assert said.format(*new) in text("docs/studies.md")
    known = [[100 * run["right"][part].count("1") / 24 for run in of("facts", f"facts, {part}")]
             for part in ("who", "where")]  # fmt: skip
    both = {way: share([run["right"]["both"] for run in of("facts", f"facts, {way}")])
            for way in ("who", "where", "sum", "mean", "joint")}  # fmt: skip
    joint = both.pop("joint")
    assert ("({:.0f} and {:.0f} % right)".format(*(sum(of_part) / len(of_part) for of_part in known))) in text(
        "docs/studies.md"
    )
    assert (
        f"had {min(both.values()):.0f} to {max(both.values()):.0f} % right (chance: 13 %), one LoRA trained on both, "
        f"which knew all companies and cities, {joint:.0f} %"
    ) in text("docs/studies.md")


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


def test_how_requests_are_told_apart():
    runs = records("studies/results/choices.jsonl")

    def reached(set_name: str, kind: str, rows: int = 240, way: str = "kernel", margin: str = "0.1") -> float:
        of = [run for run in runs if (run["set"], run["rows"], run["way"]) == (set_name, rows, way)]
        return 100 * sum(run[f"{kind}, {margin}"] for run in of) / len(of)

    linear = [reached(name, "own", way="linear", margin="0") for name in ("domains", "many")]
    assert (
        f"With 24 of each look-alike domain {reached('domains', 'own', 24):.0f} % of the requests reach their own "
        "LoRA, "
        f"with 240, {reached('domains', 'own'):.0f} %. With 240 of each of 24 tasks {reached('many', 'own'):.0f} % do, "
        f"and {reached('many', 'more'):.0f} to {reached('many', 'general'):.0f} % of general requests reach the base"
    ) in text("docs/combine.md")
    assert "a linear gate, which had {:.0f} and {:.0f} % there".format(*linear) in text("docs/combine.md")
    gone = [
        [100 * run["gone"] for run in runs if (run["set"], run["rows"], run["way"]) == ("domains", 240, way)]
        for way in ("to base", "no trace")
    ]
    to_base, no_trace = (sum(of) / len(of) for of in gone)
    assert f"{to_base:.0f} % go to the base with it, and {no_trace:.1f} % without" in text("docs/serve-many.md")


def test_upit_as_its_paper_has_it():
    runs = {run["method"]: run for run in records("studies/results/upit_paper_quarter.jsonl") if run["rate"] == 6e-4}
    upit, frozen, mean, lora = (
        runs[way] for way in ("upit 8", "upit 8, random routers", "mean, trained on", "lora, decay")
    )
    losses = [sum(loss for loss, _ in run["test"].values()) / len(run["test"]) for run in (upit, frozen, mean, lora)]
    page = text("docs/studies.md")
    assert (
        "its loss was {:.3f}, with random routers {:.3f}, of the mean trained on {:.3f}, of a LoRA whose rate decays "
        "{:.3f}"
    ).format(*losses) in page
    shares = [100 * run["routing"] for run in (upit, frozen)]
    assert (
        "{:.0f} % of a task's tokens go to other experts than the average task's, {:.0f} % with".format(*shares) in page
    )
    loss, right = zip(*[zip(*run["untrained"].values(), strict=True) for run in (upit, lora)], strict=True)
    assert "the lowest, {:.3f} against LoRA's {:.3f}".format(*(sum(of) / len(of) for of in loss)) in page
    assert (
        "It chose {:.0f} % of 210 answers right, LoRA {:.0f} %".format(*(100 * sum(of) / len(of) for of in right))
        in page
    )
    sixteen = []
    for run in (runs["upit 16"], runs["upit 16, random routers"]):
        untrained = [sum(of) / len(of) for of in zip(*run["untrained"].values(), strict=True)]
        sixteen += [sum(loss for loss, _ in run["test"].values()) / len(run["test"]), untrained[0], 100 * untrained[1]]
    assert (
        "it was no better: {:.3f}, on the other tasks {:.3f}, and {:.0f} % right (with random routers {:.3f}, {:.3f} "
        "and {:.0f} %)"
    ).format(*sixteen) in page


def test_one_lora_out_of_several():
    runs = {run["way"]: run for run in records("studies/results/one_lora.jsonl") if "right" in run}
    assert all((run["set"], run["seed"]) == ("short", 10) for run in runs.values()), "say what other runs found"
    rights = {way: 100 * run["right"]["one"].count("1") / len(run["right"]["one"]) for way, run in runs.items()}
    harm = {way: run["none_loss"] - runs["base"]["none_loss"] for way, run in runs.items()}
    assert round(rights["own"]) == round(rights["picked"])
    assert (
        f"one distilled LoRA of rank 16 has {rights['distilled']:.0f} % right, the merge {rights['regmean']:.0f} %, "
        f"the mean of the LoRAs {rights['mean']:.0f} %, and each task's own LoRA, or the one that is picked, "
        f"{rights['own']:.0f} %"
    ) in text("docs/combine.md")
    of_general = f"(a loss of {harm['distilled']:.2f} a token above the base's own)"
    assert f"{of_general}, the merge does not ({harm['regmean']:.2f})" in text("docs/combine.md")


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
