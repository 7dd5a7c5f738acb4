"""
The documentation works. On every page, Python snippets and `moe-peft` commands run in the page's order, in a folder
with a model and data as a user has them; blocks with a title are files there. The site builds, loads nothing from the
network, and its API page has every public name.
"""

from __future__ import annotations

import html
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import statistics
import sys
from pathlib import Path

import pytest

from examples.demo.tasks import write_rows as demo_rows
from moe_peft.cli import COMMANDS, dpo, main, sft
from moe_peft.utils.foreign import FOREIGN
from tests.helpers.chat_model import save_chat_model
from tests.helpers.user_folder import PACKAGES, ends_soon, in_folder, write_adapter, write_rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
README, PAGES = ROOT / "README.md", sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r'^```(python|bash|yaml)(?: title="(.+?)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
# What shows that a page did more than pass.
PRINTED = {
    "README.md": "'aux_loss'",
    "adapter.md": "trainable params",
    "checks.md": "num_train_epochs=nan: must be a finite number",
    "chat.md": "/help lists the commands",
    "combine.md": "What reaches its own",
    "evaluating.md": "expert 0: ",
    "extending.md": "router_entropy_loss",
    "native-checkpoints.md": "have logits within",
    "pruning.md": "active per token",
    "serve-many.md": "warning: code: has 12 different texts",
    "steering.md": "'compliance'",
    "training.md": "FLOP per token",
    "tutorial.md": "verified: of",
    "upit.md": "router_init",
}
WRITTEN = {
    "combine.md": "mixed-2/mix.json",
    "hub.md": "lora-prose-again/adapter_model.safetensors",
    "inspect.md": "routing/report.html",
    "native-checkpoints.md": "exported/model.safetensors",
    "pruning.md": "pruned/pruning.json",
    "routers.md": "stock/model.safetensors",
    "serve-many.md": "gate-of-code/request_gate.safetensors",
    "training.md": "labels/adapter_model.safetensors",
    "tutorial.md": "exported/model.safetensors",
    "upit.md": "upit/adapter/adapter_model.safetensors",
}


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Language, title and text of a page's code blocks, in order."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_tables_are_in_one_piece(page):
    """Rows behind an empty line, without a head of their own, are shown as text."""
    assert not re.findall(r"\n\n(\|.*)\n(?!\|[-:| ]+\|\n)", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_code_fits_a_page(page):
    wide = [line for _, _, text in blocks(page) for line in text.splitlines() if len(line) > 80]
    assert not wide


def test_the_routers_are_counted():
    from moe_peft.routing import ROUTERS

    words = ("Nine", "Ten", "Eleven", "Twelve", "Thirteen", "Fourteen", "Fifteen", "Sixteen")
    word = words[len(ROUTERS) - 9]
    assert f"[{word} routers](docs/routers.md)" in README.read_text(encoding="utf-8")
    assert f"**{word} routers**" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_keys_of_other_programs_are_those_that_the_commands_answer():
    table = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8").partition("| there | here |\n|---|---|\n")[2]
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].splitlines()]
    listed = {key.strip("`"): here.replace("`", "") for keys, here in rows for key in keys.split(", ")}
    assert listed == FOREIGN
    settings = {command: command.parser("").complete().actions for command in (sft, dpo)}
    assert not [key for key in FOREIGN for known in settings.values() if key in known]
    for key, here in FOREIGN.items():
        named = re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", re.sub(r": \w+|\w+\.json", "", here))
        assert all(name in settings[sft] for name in named), key


@pytest.mark.parametrize("key", ["lora_model_dir", "model_type", "val_set_size", "rl", "torch_dtype"])
def test_a_key_of_another_program_is_not_guessed(key, capsys):
    with pytest.raises(SystemExit):
        main(["sft", f"--{key}", "x"])
    assert f"error: --{key}: not a setting here; instead: {FOREIGN[key]}\n" in capsys.readouterr().err


def differences(text: str) -> list[tuple[float, ...]]:
    """Differences in a text and their intervals."""
    number = r"([+-]?\d+\.\d+)"
    found = re.findall(rf"{number}(?: points)?(?: \|)? \[{number}, {number}\]", text.replace("−", "-"))
    return [tuple(map(float, each)) for each in found]


def test_pages_have_the_numbers_of_the_study():
    """Losses, shares and counts, and of either sign and in points or not, all differences."""
    results = (ROOT / "studies/results/upit.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/studies.md").read_text(encoding="utf-8")
    start = page.index("In that earlier study ([14 methods")
    section = page[start : page.index("\n## ", start + 1)]
    rows = re.findall(r"^\| .+? \| [\d.]+M \| 3 \| ([\d.]+) \| ([\d.]+) \|", results, re.MULTILINE)
    known = {(round(float(loss), 3), round(100 * float(exact), 1)) for loss, exact in rows}

    percent = r"([\d.]+) ?%"
    shares = {exact for _, exact in known} | {float(share) for share in re.findall(percent, results)}
    assert {float(share) for share in re.findall(percent, section)} <= shares
    for count in (r"(\d+) of (?:the )?20", r"orrelation(?: with the paper's averages is|:) ([\d.]*\d)"):
        assert re.findall(count, results) == re.findall(count, section.replace("\n", " ")) != []

    results = differences(results)
    results += [(-mean, -high, -low) for mean, low, high in results]
    results += [tuple(100 * value for value in each) for each in results]
    texts = [section]
    for other in (README, *(ROOT / "docs" / f"{name}.md" for name in ("upit", "which-tool", "training"))):
        paragraphs = re.split(r"\n\n|\n(?=\|)", other.read_text(encoding="utf-8"))
        texts += [text for text in paragraphs if "studies.md#does-upit-pay" in text]
    losses = [loss for loss, _ in known] + [abs(value) for each in results for value in each]
    for loss in re.findall(r"(?<![\d.])\d\.\d{3}(?!\d)", "\n".join(texts)):
        assert any(pytest.approx(each, abs=6e-4) == float(loss) for each in losses), loss
    for difference in differences("\n".join(texts)):
        in_points = all(round(value, 1) == value for value in difference)
        assert any(pytest.approx(each, abs=0.06 if in_points else 6e-4) == difference for each in results), difference


def test_the_section_on_the_schedule_has_the_numbers_of_its_study():
    from studies.differences import paired_difference  # not above: pages register losses before trainers are imported
    from studies.upit import BEYOND

    results = (ROOT / "studies/results/schedule.md").read_text(encoding="utf-8").replace("−", "-")
    page = (ROOT / "docs/studies.md").read_text(encoding="utf-8").replace("−", "-")
    start = page.index("## Is it the mixture, the mean or the schedule?")
    section = page[start : page.index("\n## ", start + 1)]
    cells = re.findall(r"M \| [\d.]+ \| 6 \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", results)
    known = [(float(four), float(six), 100 * float(right)) for four, six, right in cells]
    shown = re.findall(r"M \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) % \|", section)
    assert len(shown) > 6
    for four, six, right in shown:
        row = (
            pytest.approx(float(four), abs=6e-4),
            pytest.approx(float(six), abs=6e-4),
            pytest.approx(float(right), abs=0.06),
        )
        assert row in known
    of_results = differences(results)
    ledgers = [(ROOT / f"studies/results/schedule/{seed}.jsonl").read_text().splitlines() for seed in range(6)]
    runs = [{run["method"]: run.get("tasks") for run in map(json.loads, lines)} for lines in ledgers]
    of_four = [
        [statistics.fmean(right for task, (_, right) in run[method].items() if task not in BEYOND) for run in runs]
        for method in ("lora_nr linear", "mixture linear")
    ]
    of_results.append(tuple(paired_difference(*of_four)))
    of_results += [(-mean, -high, -low) for mean, low, high in of_results]
    in_points = [tuple(100 * value for value in each) for each in of_results]
    section, _, earlier = section.partition("**An earlier study")
    in_section = differences(section.replace("\n  ", ""))
    assert len(in_section) > 4
    for difference in in_section:
        tolerance, known = (0.06, in_points) if difference[2] > 1 else (6e-4, of_results)
        assert any(pytest.approx(each, abs=tolerance) == difference for each in known), difference
    of_earlier = differences((ROOT / "studies/results/upit.md").read_text(encoding="utf-8"))
    ((mean, low, high),) = differences(earlier)
    assert any(pytest.approx((-mean, -high, -low), abs=6e-4) == each for each in of_earlier)
    predictions = re.search(r"Of (\d+)\s+predictions that can be compared, (\d+) were missed", section)
    assert [*map(int, predictions.groups())] == [len(re.findall(" to [+-]", results)), results.count(", missed")]


def test_the_table_of_loads_has_the_numbers_of_its_study():
    """CV, dead experts and loss of each scope and coefficient."""
    results = (ROOT / "studies/results/balancing.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/inspect.md").read_text(encoding="utf-8")
    number = r"([\d.]+)"
    row = rf"^\| (\w+) \| {number} \| {number} \| [\d.]+ \| {number} \(.*?\) \| {number} \|"
    known = {(scope, rate): values for scope, rate, *values in re.findall(row, results, re.MULTILINE)}
    shown = re.findall(rf'^\| `?"?(\w+).*? \| {number}.*? \| {number} \| {number} \| {number} \|$', page, re.MULTILINE)
    assert {(scope, rate) for scope, rate, *_ in shown} == known.keys()
    for scope, rate, variation, dead, loss in shown:
        expected = known[scope, rate]
        assert [variation, dead] == expected[:2] and float(loss) == pytest.approx(float(expected[2]), abs=6e-4)
    untrained = re.search(rf"untrained \| \| {number} \| [\d.]+ \| {number} ", results).groups()
    assert untrained == re.search(rf"CV of {number} and {number} dead experts", page).groups()


@pytest.mark.parametrize("page", ["README.md", "docs/combine.md"])
def test_losses_and_shares_of_a_page_are_in_the_tables_of_results(page: str):
    """A loss has three decimals; a share of right answers is in a table, with one decimal or none."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("−", "-")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)  # what programs print is theirs
    results = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "studies/results").glob("*.md"))
    known = {f"{abs(float(number)):.3f}" for number in re.findall(r"\d\.\d{3,}", results)}
    shown = re.findall(r"(?<![\d.])\d\.\d{3}(?!\d)", text)
    shares = {int(share) for share in re.findall(r"(?<![\d.])(\d+) ?%(?= right| \||,)", text)}
    assert shown or shares
    assert set(shown) <= known
    assert shares <= {round(float(share)) for share in re.findall(r"([\d.]+) ?%", results)}


def test_the_page_on_peft_has_the_counts_of_its_tests():
    results = (ROOT / "compatibility/results/peft_suite.md").read_text(encoding="utf-8")
    counts = [[int(number) for number in row] for row in re.findall(r"\.py` \|" + r" (\d+) \|" * 4, results)]
    tests, passed, _, failed = map(sum, zip(*counts, strict=True))
    reasons = [int(number) for number in re.findall(r" \| (\d+) \|$", results, re.MULTILINE)][len(counts) :]
    text = " ".join((ROOT / "docs/peft.md").read_text(encoding="utf-8").split())
    shown = re.search(r"Of (\d+) tests, (\d+) pass and (\d+) are PEFT's own skips; the other (\d+) ([^.]*)\.", text)
    skipped = int(shown[3])
    assert [int(shown[1]), int(shown[2]), int(shown[4])] == [tests, passed, tests - passed - skipped] and not failed
    others = [int(number) for number in re.findall(r"\((\d+)\)", shown[5])]
    assert sorted([*others, skipped]) == sorted(reasons)


def test_files_and_make_targets_that_pages_name_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    folders = "moe_peft|tests|benchmarks|studies|compatibility|recipes|examples|adapter|routing|native|utils"
    for page in (README, ROOT / "CONTRIBUTING.md", *PAGES):
        text = page.read_text(encoding="utf-8")
        paths = re.findall(rf"(?<![\w/.-])(?:{folders})/[\w/.-]+", text)
        assert not [
            path
            for path in paths
            if not any((root / path).exists() for root in (ROOT, ROOT / "docs", ROOT / "moe_peft"))
        ]
        assert set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)) <= targets


def make_inputs() -> None:
    """
    What the pages assume: models under the names of published ones, a dataset under that of one on the hub, an adapter
    with four experts, LoRAs of two domains, and data: rows with a text and its domain, preference pairs, the demo's
    base and chats.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    names = ("Qwen/Qwen3-0.6B-Base", "HuggingFaceTB/SmolLM2-135M-Instruct", "code-model", "prose-model", "math-model")
    for seed, name in enumerate((*names, "demo/base")):
        Path(name).parent.mkdir(exist_ok=True)
        save_chat_model(Path(name), seed)
    ends_soon(names[1])
    write_adapter("my-adapter", names[0])
    for domain in ("code", "prose"):
        lora = LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(names[0]), lora)
        model.save_pretrained(f"loras/{domain}")
    texts = {"code": "def f{0}(x):\n    return x + {0}", "prose": "Once upon a time, {0} boats lay in the harbour."}
    rows = [{"text": text.format(i), "domain": domain} for i in range(12) for domain, text in texts.items()]
    pairs = [{"prompt": row["text"], "chosen": " Yes, indeed.", "rejected": " No."} for row in rows]
    chats = [
        {"messages": [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": "Yes."}]}
        for row in rows
    ]
    of_domains = [{**chat, "domain": row["domain"]} for chat, row in zip(chats, rows, strict=True)]
    Path("trl-lib/Capybara").mkdir(parents=True)
    files = {"train": rows, "test": rows[:6], "pairs": pairs, "chats": of_domains, "trl-lib/Capybara/train": chats}
    for file, content in files.items():
        write_rows(f"{file}.jsonl", content)
    for folder in ("data", "demo"):
        demo_rows(Path(folder), train=16, test=4)


def run_page(page: Path) -> None:
    """Every block as its reader would run it; each snippet has a namespace of its own."""
    sys.path.insert(0, os.getcwd())  # as for a script in the folder
    for i, (language, title, text) in enumerate(blocks(page)):
        if title:
            Path(title).write_text(text, encoding="utf-8")
        elif language == "python":
            exec(compile(text, f"{page.name}, block {i}", "exec"), {"__name__": "__main__"})
        elif language == "bash":
            run_commands(text)


def run_commands(text: str) -> None:
    """The block's `moe-peft` commands, without those on recipes for large models, which test_recipes.py plans, without
    `exec`, which would become another program, without GGUF, which has no tokenizer of whole words, and without
    proxies, which never end."""
    from moe_peft.cli import main

    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("moe-peft ") and not re.search(
            "recipes/|moe-peft exec|--format gguf|moe-peft pick --gate", line
        ):
            main(shlex.split(line, comments=True)[1:])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    in_folder(folder, make_inputs)
    return folder


@pytest.mark.parametrize("page", [p for p in (README, *PAGES) if blocks(p)], ids=lambda page: page.name)
def test_page_runs(page: Path, inputs: Path, tmp_path: Path):
    folder = tmp_path / "user"
    shutil.copytree(inputs, folder)
    in_folder(folder, run_page, page)
    assert PRINTED.get(page.name, "") in (folder / "log").read_text()
    assert (folder / WRITTEN.get(page.name, "log")).exists()


def test_pages_name_what_they_must_show():
    names = {page.name for page in (README, *PAGES) if blocks(page)}
    assert names >= PRINTED.keys() | WRITTEN.keys()


def test_the_page_of_fields_is_a_recipe_of_defaults(site: Path, tmp_path: Path):
    from moe_peft.upit import load_recipe, recipe_from_dict

    page = html.unescape((site / "api/upit-fields.html").read_text(encoding="utf-8"))
    text = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["recipe_fields"]()
    assert "<!-- fields -->" not in page and all(key in page for key in ("prepare_share", "drop_rate", "within_budget"))
    (tmp_path / "recipe.yaml").write_text(text)
    required = {"model": {"name_or_path": "Qwen/Qwen3-0.6B-Base"}, "data": {"train": "train.jsonl"}}
    assert load_recipe(tmp_path / "recipe.yaml") == recipe_from_dict({"output_dir": "upit-defaults", **required})


def test_the_page_of_commands_has_their_options(site: Path):
    text = html.unescape((site / "api/commands.html").read_text(encoding="utf-8"))
    for command in COMMANDS:
        assert f"usage: moe-peft {command}" in text
    assert all(option in text for option in ("--router_z_loss_coef", "--drop-rate", "--keep-sums"))


def test_site_loads_nothing_from_the_net(site: Path):
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text(encoding="utf-8"))
        assert not [tag for tag in tags if re.search(r'(?:src|href)="?(?:https?:)?//', tag)]


def test_links_of_the_site_lead_somewhere(site: Path):
    for page in site.rglob("*.html"):
        links = re.findall(r'(?:href|src)="?(?!\w+:)([^"\s>#]+)', page.read_text(encoding="utf-8"))
        assert not [link for link in links if not (page.parent / link).exists()], page


@pytest.mark.parametrize("package", PACKAGES)
def test_api_pages_have_every_public_name(package: str, site: Path):
    """Under a name that it can be imported by; the two functions named like their modules are headed so."""
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((site / "api").glob("*.html")))
    ids = {name.rpartition(".") for name in re.findall(r'<h\d id="([\w.]+)"', text)}
    headed = {name: {where for where, _, last in ids if last == name} for _, _, name in ids}
    for name in importlib.import_module(package).__all__:
        assert headed.get(name, set()) & {*PACKAGES, f"{package}.{name}"}, name


def test_readme_is_short_and_its_links_lead_somewhere():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert links and not [link for link in links if not (ROOT / link).exists()]
