"""Compliance by domain, layer and position; figures and what `inspect` says."""

from __future__ import annotations

import base64
import csv
import html
import json
import logging
import re
from html.parser import HTMLParser

import pytest
import torch
from datasets import Dataset
from filelock import FileLock
from safetensors.torch import load_file, save_file
from trl import SFTConfig, SFTTrainer

from moe_peft.analysis import LoadCallback, RoutingStatistics, figures, record_routing
from moe_peft.analysis import routing_report as report
from moe_peft.analysis.html import Section, load_section, who_serves_what, write_page
from moe_peft.analysis.routing_report import write_report
from moe_peft.cli import main
from moe_peft.native import UpcycleConfig, upcycle
from moe_peft.routing import LoadHealth, load_health
from moe_peft.utils.model_card import write_model_card
from tests.helpers.browser import NEEDS_BROWSER, open_browser, resize
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama
from tests.helpers.native_case import dense_model, saved
from tests.helpers.routed_models import KINDS, N, ids, routed_model
from tests.helpers.trainers import EXPERTS, arguments, make_model
from tests.helpers.upit_case import rows

MAP = {"code": [0, 1, 2], "prose": [3, 5]}
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]])
LABELS = ["prose", "code", "prose"]


@pytest.mark.parametrize("kind", KINDS)
def test_compliance_by_domain_layer_and_position_is_that_of_a_plain_loop(kind):
    model = routed_model(kind)
    with torch.no_grad():
        with record_routing(model, ["code", "prose"], MAP) as statistics:
            statistics.current = LABELS
            model(input_ids=ids(), attention_mask=MASK)
        router_logits = model(input_ids=ids(), attention_mask=MASK, output_router_logits=True).router_logits
    starts, inside = statistics.position_starts, {}
    for layer, logits in enumerate(router_logits):
        for row in range(3):
            for position, s in enumerate(MASK[row].nonzero().flatten().tolist()):
                bucket = max(p for p, start in enumerate(starts) if start <= position)
                p = logits[row * 7 + s].double().softmax(-1)[MAP[LABELS[row]]].sum().item()
                inside.setdefault((LABELS[row], layer, bucket), []).append(p)
    assert starts[:4] == [0, 1, 3, 7] and len(starts) == 16
    result = statistics.compliance_by_domain()
    for domain, compliance in result.items():
        for layer in range(2):
            for bucket in range(len(starts)):
                values = inside.get((domain, layer, bucket))
                if values is None:
                    assert compliance[layer, bucket].isnan()
                else:
                    assert compliance[layer, bucket].item() == near(sum(values) / len(values))
        shares = [value for key, values in inside.items() if key[0] == domain for value in values]
        assert statistics.mean_compliance(domain) == near(sum(shares) / len(shares))
    every = [value for values in inside.values() for value in values]
    assert statistics.mean_compliance() == near(sum(every) / len(every))
    assert statistics.chance() == {"code": 3 / 6, "prose": 2 / 6}


def two_domains() -> RoutingStatistics:
    """One domain always complies, the other never."""
    statistics = RoutingStatistics([N, N], [2, 2], ["a", "b"], {"a": [0, 1], "b": [2, 3]})
    logits = torch.full((8, N), -100.0)
    logits[:, :2] = 100.0
    statistics.current = ["a", "b"]
    statistics.update([logits, logits], torch.ones(2, 4), None)
    return statistics


def test_domains_are_not_pooled(tmp_path):
    statistics = two_domains()
    assert statistics.mean_compliance() == near(0.5)
    assert statistics.mean_compliance("a") == near(1) and statistics.mean_compliance("b") == near(0)
    write_report(statistics, tmp_path)
    report = json.loads((tmp_path / "routing.json").read_text())
    assert report["mean_compliance"] == near(0.5)
    assert report["mean_compliance_by_domain"] == near({"a": 1.0, "b": 0.0})
    assert report["compliance_by_domain"]["a"][1][:4] == near([1, 1, 1, -1])
    assert report["chance"] == near({"a": 1 / 3, "b": 1 / 3}) and report["position_starts"][:3] == [0, 1, 3]
    with (tmp_path / "compliance.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(r["domain"], r["layer"], r["position"], r["tokens"]) for r in table[:3]] == [
        ("a", "0", "0", "1"), ("a", "1", "0", "1"), ("a", "0", "1", "2"),
    ]  # fmt: skip
    assert all(float(r["compliance"]) == near(float(r["domain"] == "a")) for r in table)


def test_positions_past_the_last_bucket_stay_in_it():
    statistics = RoutingStatistics([4], [1], ["a"], {"a": [0]})
    statistics.update([torch.zeros(2**16 + 7, 4)], torch.ones(1, 2**16 + 7), None)
    assert statistics.compliance_tokens[0].tolist() == [2.0**p for p in range(15)] + [2.0**15 + 8]


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are made."""
    made, original = [], figures.new_figure
    monkeypatch.setattr(figures, "new_figure", lambda *size: made.append(original(*size)) or made[-1])
    return made


def shares(domains, layers, n):
    generator = torch.Generator().manual_seed(0)
    return {f"d{i}": torch.rand(layers, n, generator=generator).softmax(-1) for i in range(domains)}


@pytest.mark.parametrize("domains, layers, n", [(1, 2, 4), (5, 32, 8), (12, 64, 64), (40, 32, 8), (3, 4, 128)])
def test_figures_by_domain_stay_small(domains, layers, n, drawn, tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **kwargs: None)  # drawing takes seconds
    given = shares(domains, layers, n)
    figures.plot_shares(given, tmp_path / "load.png", "Load")
    compliance = {domain: torch.rand(layers, 16) for domain in given}
    figures.plot_compliance(
        compliance, tmp_path / "compliance.png", [2**p - 1 for p in range(16)], dict.fromkeys(given, 0.25)
    )
    for figure in drawn:
        width, height = (round(150 * inches) for inches in figure.get_size_inches())
        assert width <= 1900 and height <= 2200, (width, height)
        panels = [axis for axis in figure.axes if axis.get_visible() and axis.get_title()]
        assert len(panels) == min(domains, 12)
        assert ("12 of 40 domains" in figure.get_suptitle()) == (domains == 40)


def test_a_compliance_panel_has_its_layers_their_mean_and_chance(drawn, tmp_path):
    compliance = torch.rand(32, 16)
    compliance[:, 10:] = float("nan")
    starts = [2**p - 1 for p in range(16)]
    figures.plot_compliance({"a": compliance, "b": compliance / 2}, tmp_path / "c.png", starts, {"a": 0.25, "b": 0.5})
    for axis, scale, chance in zip(drawn[0].axes, (1, 0.5), (25, 50), strict=True):
        lines = {line.get_label(): line for line in axis.lines}
        assert lines.keys() == {"mean", "chance", *(f"layer {layer}" for layer in range(32))}
        assert set(lines["chance"].get_ydata()) == {chance}
        assert_near(torch.tensor(lines["mean"].get_ydata()), compliance[:, :10].mean(0) * scale * 100)
        assert lines["layer 31"].get_xdata().tolist() == [2**p for p in range(10)] and axis.get_xscale() == "log"
        assert {text.get_text() for text in axis.texts} == {"layer 0", "layer 31", "mean", f"chance {chance}%"}
        assert [tick.get_text() for tick in axis.get_xticklabels()][:4] == ["1", "2", "4", "8"]


@pytest.mark.slow
def test_heat_maps_have_numbers(drawn, tmp_path):
    figures.plot_shares(shares(5, 4, 8), tmp_path / "a.png", "Load")
    figures.plot_shares({"a": torch.tensor([[0.25, 0.75]])}, tmp_path / "b.png", "Load")
    figures.plot_shares(shares(2, 4, 64), tmp_path / "c.png", "Load")
    texts = [[text for axis in figure.axes for text in axis.texts] for figure in drawn]
    assert len(texts[0]) == 5 * 4 * 8 and all(text.get_fontsize() >= 9 for text in texts[0])
    assert [text.get_text() for text in texts[1]] == ["25", "75"]
    assert texts[2] == []  # they would be unreadable


def test_a_load_map_shows_the_worst_layers_around_an_even_share(drawn, tmp_path):
    """White is 1/n; the experts that a map names are outlined; experts that a layer lacks are blank."""
    share = torch.full((20, 4), 0.25)
    share[13], share[7] = torch.tensor([0.7, 0.1, 0.1, 0.1]), torch.tensor([0.4, 0.2, 0.2, 0.2])
    figures.plot_shares({"a": share}, tmp_path / "a.png", "Load")
    image = drawn[0].axes[0].images[0]
    assert [tick.get_text() for tick in drawn[0].axes[0].get_yticklabels()][:2] == ["13", "7"]
    assert image.norm(1.0) == 0.5 and image.get_array()[0].tolist() == near([2.8, 0.4, 0.4, 0.4])
    assert "12 most uneven of 20 layers" in drawn[0].get_suptitle() and len(drawn[0].axes) == 1  # no color bar
    figures.plot_shares({"a": share, "b": share}, tmp_path / "b.png", "Load", {"a": [1, 2], "b": [0]})
    first, second = ({(*line.get_xdata(), *line.get_ydata()) for line in axis.lines} for axis in drawn[1].axes)
    assert (0.5, 0.5, -0.5, 11.5) in first and (2.5, 2.5, -0.5, 11.5) in first and (1.5, 1.5, -0.5, 11.5) not in first
    assert (-0.5, -0.5, -0.5, 11.5) in second and (0.5, 0.5, -0.5, 11.5) in second
    assert drawn[1].axes[0].get_yticklabels()[0].get_text() != "13"  # half of it goes to experts that the map names
    figures.plot_shares({"a": torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])}, tmp_path / "c.png", "", sizes=[2, 3])
    assert drawn[2].axes[0].images[0].get_array().mask.tolist() == [[False, False, True], [False] * 3]


def test_a_load_map_names_experts_and_has_the_layer_where_domains_differ_most(drawn, tmp_path):
    names = ["code", "a name that is too long", "$x$", "prose"]
    uneven = torch.full((20, 4), 0.25)
    uneven[:13] = torch.tensor([0.7, 0.1, 0.1, 0.1])
    apart = {"a": uneven.clone(), "b": uneven.clone()}
    apart["a"][17], apart["b"][17] = torch.tensor([[0.4, 0.1, 0.4, 0.1], [0.1, 0.4, 0.1, 0.4]])
    figures.plot_shares(apart, tmp_path / "a.png", "Load", names=names)
    axis = drawn[0].axes[0]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["code", "a name that is …", "$x$", "prose"]
    assert len(axis.get_yticklabels()) == 12 and axis.get_yticklabels()[-1].get_text() == "17"
    assert "11 most uneven of 20 layers" in drawn[0].get_suptitle() and "layer 17" in drawn[0].get_suptitle()
    assert who_serves_what(apart, names).startswith("In layer 17")
    figures.plot_shares({"a": apart["a"]}, tmp_path / "b.png", "Load")
    assert [tick.get_text() for tick in drawn[1].axes[0].get_xticklabels()] == ["0", "1", "2", "3"]


def test_a_method_has_one_color_and_its_variants_dashes(drawn, tmp_path):
    names = ["UpIT", "LoRA, rank 8", "LoRA, rank 64", "k=1", "k=2"]
    figures.plot_curves(
        {name: [(0, 1.0), (1, i / 9)] for i, name in enumerate(names, start=1)}, tmp_path / "a.png", "x", "y"
    )
    lines = dict(zip(names, drawn[0].axes[0].lines, strict=True))
    colors = {name: line.get_color() for name, line in lines.items()}
    assert colors["UpIT"] == figures.method_color("UpIT")
    assert colors["LoRA, rank 8"] == colors["LoRA, rank 64"] == figures.method_color("LoRA")
    assert lines["LoRA, rank 8"].get_linestyle() != lines["LoRA, rank 64"].get_linestyle()
    assert len(set(map(str, colors.values()))) == 4
    labels = {text.get_text(): text.xyann[1] for text in drawn[0].axes[0].texts}
    assert labels.keys() == set(names) and sorted(labels, key=labels.get) == names  # each at the height of its end
    figures.plot_bars({"base": {"a": 0}, "LoRA": {"a": 3}}, tmp_path / "b.png", "Right answers", "{:.0f}")
    assert [text.get_text() for text in drawn[1].axes[0].texts] == ["0  base", "3  LoRA"]


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "magic"), [(".pdf", b"%PDF"), (".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_the_suffix_is_the_format(suffix, magic, tmp_path):
    """And the same numbers are the same bytes."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    first, again = (write_report(two_domains(), folder, suffix) for folder in folders)
    drawings = [path for path in first if path.suffix == suffix]
    assert [path.stem for path in drawings] == ["load", "compliance"]
    assert all(path.read_bytes().startswith(magic) for path in drawings)
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(first, again, strict=True))


# --- verdicts in a training's log, and inspect ------------------------------------------------------------------------


def test_the_callback_warns_of_a_collapse_once(tokenizer, tmp_path, caplog):
    model = make_model(router_aux_loss_coef=0.0)
    with torch.no_grad():
        model.get_base_model().model.layers[1].mlp.moe_lora_router["default"].weight.zero_()  # ties: the same two
    trainer = SFTTrainer(
        model=model,
        args=arguments(tmp_path, SFTConfig, max_steps=6, learning_rate=0.0),
        train_dataset=Dataset.from_list(rows(24)),
        processing_class=tokenizer,
        callbacks=[LoadCallback(tmp_path / "load", every=2)],
    )
    with caplog.at_level(logging.WARNING, logger="moe_peft"):
        trainer.train()
    told = [record.getMessage() for record in caplog.records if record.name == "moe_peft"]
    (line,) = [line for line in told if line.startswith("load of the experts until step 2: collapsed, CV ")]
    assert "monopolies: 1 of " in line and "raise `router_aux_loss_coef`" in line and "\n" not in line
    points = json.loads((tmp_path / "load" / "load.json").read_text())["points"]
    assert len(points) == 3 and all(point["warning"].startswith("collapsed") for point in points)
    assert (tmp_path / "load" / "load.png").exists()


@pytest.fixture
def folder(tokenizer, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = make_model()
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows(24))))
    return tmp_path


def inspect(folder, *options, expert_map=EXPERTS):
    command = ["inspect", "--model", folder / "adapter", "--data", folder / "data.jsonl", "--label-column", "domain"]
    command += ["--output", folder / "report", "--expert-map", json.dumps(expert_map), *options]
    main(list(map(str, command)))
    return json.loads((folder / "report" / "routing.json").read_text())


@pytest.mark.parametrize("name", ["notes.txt", "routing.json"])
def test_what_no_report_wrote_is_refused_before_any_work_and_stays(name, tmp_path, capsys):
    (tmp_path / name).write_text('{"shares": "mine"}')
    with pytest.raises(SystemExit) as end:
        main(["inspect", "--model", str(tmp_path), "--data", "none", "--output", str(tmp_path)])
    assert end.value.code == 2
    assert f"output={str(tmp_path)!r}: is not empty; choose another" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: '{"shares": "mine"}'}


@pytest.mark.slow
def test_a_report_is_replaced_when_the_next_one_is_whole(folder, monkeypatch):
    inspect(folder, "--html", "--max-examples", "4")
    (folder / "report" / "notes.txt").write_text("mine")
    (folder / "report" / ".report.partial").mkdir()  # of a run that was killed
    before = {path.name: path.read_bytes() for path in (folder / "report").iterdir() if path.is_file()}
    with monkeypatch.context() as patched:
        patched.setattr(report, "plot_compliance", raising(KeyboardInterrupt))
        with pytest.raises(SystemExit):
            inspect(folder, "--figures", "pdf", "--max-examples", "4")
    assert {path.name: path.read_bytes() for path in (folder / "report").iterdir()} == before
    with FileLock(folder / "report" / ".lock"), pytest.raises(SystemExit):
        inspect(folder, "--max-examples", "4")
    inspect(folder, "--figures", "pdf", "--max-examples", "4")
    names = {path.name for path in (folder / "report").iterdir()}
    assert names == {"notes.txt", "routing.json", "load.csv", "compliance.csv", "load.pdf", "compliance.pdf"}


def raising(error: type[BaseException]):
    def function(*args, **kwargs):
        raise error

    return function


def test_names_are_printed_as_they_are(folder, capsys, tmp_path):
    """Rich has a markup in which [/x] is an error, and [a] is nothing."""
    rows = [{"text": "w3 w4 w5", "domain": domain} for domain in ("[/x]", "mean", ":smile:")]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["inspect", "--model", folder / "adapter", "--data", tmp_path / "data.jsonl"]
    main([*map(str, command), "--label-column", "domain", "--output", str(tmp_path / "runs[a]")])
    printed = capsys.readouterr().out
    assert "[/x]" in printed and ":smile:" in printed and str(tmp_path / "runs[a]" / "load.png") in printed


@pytest.mark.slow
def test_inspect_says_what_it_measured(folder, capsys):
    masks = {label: [int(i in experts) for i in range(6)] for label, experts in EXPERTS.items()}
    options = ("--split", "train[:12]", "--dtype", "bfloat16", "--figures", "svg")
    report = inspect(folder, *options, expert_map=masks)
    printed = " ".join(capsys.readouterr().out.split())
    assert "LlamaForCausalLM, bfloat16, not quantized" in printed
    assert "split train[:12], 12 examples" in printed
    assert (
        "active per token" in printed
        and "FLOP per token" in printed
        and "similarity of experts: cosine of their updates B A " in printed
    )
    assert "chance" in printed and "33.3%" in printed
    about = report["about"]
    assert about["dtype"] == "bfloat16" and about["quantization"] is None and about["split"] == "train[:12]"
    assert about["examples"] == 12 and len(about["similarity"]) == 6
    assert about["size"]["total"] == sum(p.numel() for p in make_model().parameters())
    there = {path.name for path in (folder / "report").iterdir()}
    assert there == {"routing.json", "load.csv", "compliance.csv", "load.svg", "compliance.svg"}
    by_index = inspect(folder, *options)
    assert by_index["compliance_by_domain"] == report["compliance_by_domain"]
    assert report["warning"] == "" and re.search("load: (un)?even, CV ", printed)  # an expert map asks for uneven loads


class Page(HTMLParser):
    """What a page loads, its images, headings and tables."""

    def __init__(self, path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.images: list[bytes] = []
        self.tables: list[list[list[str]]] = []
        self.headings: list[str] = []
        self._open: list[str] = []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        assert not self._open  # every tag is closed

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        for url in (attributes.get("src"), attributes.get("href")):
            if url is not None and url.startswith("data:image/png;base64,"):
                self.images.append(base64.b64decode(url.partition(",")[2], validate=True))
            elif url is not None:
                self.loaded.append(url)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in ("img", "meta"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self._open and self._open[-1] in ("h1", "h2"):
            self.headings.append(data)

    def table(self, first: str) -> dict[str, list[str]]:
        """The rows, by their first cells, of the table whose header begins so."""
        (rows,) = (rows for rows in self.tables if rows[0][0] == first)
        return {row[0]: row[1:] for row in rows[1:]}


@pytest.mark.slow
def test_inspect_writes_one_page_that_holds_everything(folder, capsys):
    report = inspect(folder, "--html", "--figures", "pdf")
    assert str(folder / "report" / "report.html") in capsys.readouterr().out
    page = Page(folder / "report" / "report.html")
    assert not page.loaded and "http" not in page.text.replace("https://", "http://")  # loads and links to nothing
    assert len(page.images) == 2 and all(image.startswith(b"\x89PNG") for image in page.images)
    assert not list((folder / "report").glob("*.png"))
    assert page.headings[0] == "Where the tokens go: MoE-LoRA on base" and "Is the load healthy?" in page.headings
    domains = next(rows for rows in page.tables if rows[0][1:2] == ["tokens"])
    assert {row[0]: row[1] for row in domains[1:]} == {name: f"{int(n):,}" for name, n in report["tokens"].items()}
    compliance = next(rows for rows in page.tables if rows[0][1:2] == ["compliance"])
    assert compliance[-1][:2] == ["all", f"{report['mean_compliance']:.1%}"]
    layers = page.table("layer")
    for layer in range(2):
        counts = [sum(report["token_classes"][name][layer][i] for name in report["token_classes"]) for i in range(6)]
        most = max(range(6), key=counts.__getitem__)
        assert layers[str(layer)][3] == f"{most} ({counts[most] / sum(counts):.1%})"
    alike = next(rows for rows in page.tables if rows[0] == ["expert", *map(str, range(6))])
    assert float(alike[1][2]) == pytest.approx(report["about"]["similarity"][0][1], abs=0.006)
    assert f"CV {report['load']['variation']:.2f}" in html.unescape(page.text)


@NEEDS_BROWSER
@pytest.mark.slow
def test_on_a_phone_tables_scroll_in_their_own_boxes(tmp_path):
    long = [f"{'customer' * 6}-{i}" for i in range(16)]
    sections = [Section(long[0], long, header=long, rows=[long]), Section("few", header=["a", "b"], rows=[["1", "2"]])]
    page = write_page(tmp_path / "page.html", long[0], long, sections, long)
    (tmp_path / "profile").mkdir()
    with open_browser(tmp_path / "profile") as browser:
        resize(browser, 390, 844)
        browser.get(page.as_uri())
        widths = "return [document.documentElement, ...document.querySelectorAll('.wide')].map(e => e.{}Width)"
        inner, outer = (browser.execute_script(widths.format(name)) for name in ("scroll", "client"))
    assert inner[0] <= 390 and max(outer) <= 390 and inner[1] > 390 and inner[2] == outer[2]


def test_pages_escape_what_data_say(tmp_path):
    section = Section("A <b>", ["x < y"], "& `<i>`", header=["<td>"], rows=[["<script>alert(1)</script>"]])
    page = Page(write_page(tmp_path / "page.html", "<i>title", ["a & b"], [section]))
    assert page.headings == ["<i>title", "A <b>"] and page.tables == [[["<td>"], ["<script>alert(1)</script>"]]]
    assert "<script" not in page.text and "a &amp; b" in page.text and "&amp; <code>&lt;i&gt;</code>" in page.text


def test_the_load_of_a_page():
    even, bad, few = (
        load_health(torch.tensor([counts]).double(), [4], tokens)
        for counts, tokens in (([250] * 4, 1000.0), ([990, 4, 3, 3], 1000.0), ([2, 1, 1, 1], 5.0))
    )
    assert "even, CV 0.00" in load_section(even).text[-1] and not load_section(even).note
    assert load_section(bad).note == bad.warning and load_section(bad).bad
    wanted = load_section(bad, wanted=True)
    assert "asks for an uneven load" in wanted.text[-1] and not wanted.note and not wanted.bad
    assert "unknown, CV" in load_section(few).text[-1]


def test_what_a_page_begins_with_needs_no_other_words():
    apart = {"code": [[0.25] * 4, [0.4, 0.1, 0.1, 0.4]], "prose": [[0.25] * 4, [0.1, 0.4, 0.1, 0.4]]}
    shares = {domain: torch.tensor(share) for domain, share in apart.items()}
    served = "expert 0 serves mostly code; expert 1 serves mostly prose"
    assert who_serves_what(shares) == f"In layer 1, where domains differ most, {served}."
    assert who_serves_what({"all": shares["code"]}) == ""
    assert who_serves_what({"code": shares["code"], "prose": shares["code"]}).startswith("No expert serves mostly one")
    # One of two domains always has half of an expert: three quarters are needed, two thirds where there are more.
    for domains, share, serves in (
        (2, 0.74, False),
        (2, 0.75, True),
        (3, 0.66, False),
        (3, 0.67, True),
        (9, 0.66, False),
    ):
        rest = (1 - share) / (domains - 1)
        one = {f"d{i}": torch.tensor([[share if i == 0 else rest, 1.0]]) for i in range(domains)}
        assert who_serves_what(one).startswith("In layer 0") == serves, (domains, share)


@pytest.mark.parametrize("n", [1, 3])
def test_inspect_of_a_native_moe_with_one_expert_and_with_several(n, folder, tokenizer, capsys):
    moe = upcycle(folder / "base", folder / "moe", UpcycleConfig(num_experts=n, top_k=1, init="noise"))
    tokenizer.save_pretrained(moe)
    command = ["inspect", "--model", moe, "--data", folder / "data.jsonl", "--output", folder / "report"]
    main(list(map(str, command)))
    printed = " ".join(capsys.readouterr().out.split())
    assert ("similarity of experts: cosine of their weights " in printed) == (n > 1)
    report = json.loads((folder / "report" / "routing.json").read_text())
    assert report["experts"] == [n, n] and len(report["about"]["similarity"]) == n
    assert report["about"]["similarity_of"] == "weights"
    assert "Try this" not in printed if n == 1 else report["load"]["by_chance"] > 0


def test_inspect_of_few_data_gives_no_advice(folder, capsys):
    report = inspect(folder, "--max-examples", "2", expert_map=EXPERTS)
    printed = " ".join(capsys.readouterr().out.split())
    assert report["load"]["by_chance"] > 0.1
    assert "load: " in printed and "Try this" not in printed


def test_a_mixture_that_was_not_trained_gets_no_advice_on_training(folder, capsys, monkeypatch):
    monkeypatch.setattr(LoadHealth, "status", "collapsed")
    said = {}
    for made in ("`moe-peft mix`: `a`, `b`; gates without training: `ridge`", "`moe_peft.expert_to_lora`"):
        write_model_card(folder / "adapter", made=made, overwrite=True)
        command = ["inspect", "--model", folder / "adapter", "--data", folder / "data.jsonl", "--html"]
        main(list(map(str, [*command, "--output", folder / "report"])))
        page = (folder / "report" / "report.html").read_text(encoding="utf-8")
        said[made[:15]] = " ".join(capsys.readouterr().out.split()) + page
    of_mixture, of_other = said.values()
    assert "router_aux_loss_coef" in of_other and "load: collapsed" in of_other
    assert "router_aux_loss_coef" not in of_mixture and "load: collapsed" in of_mixture


@pytest.mark.slow
def test_inspect_of_a_quantized_base(folder, capsys):
    report = inspect(folder, "--quantization", '{"load_in_4bit": true}', "--max-examples", "4")
    assert report["about"]["quantization"] == "bitsandbytes, load_in_4bit"
    assert report["about"]["size"]["total"] == sum(p.numel() for p in make_model().parameters())
    assert "bitsandbytes, load_in_4bit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int3"], "--dtype='int3': must be one of auto, float32"),
        (["--quantization", "4bit"], "quantization='4bit': must be a mapping"),
        (["--quantization", '{"load_in_4bit": "yes"}'], "--quantization={'load_in_4bit': 'yes'}: "),
        (["--quantization", '{"load_in_4bit": true, "bnb_4bit_compute_dtype": "foo"}'], "bnb_4bit_compute_dtype"),
        (["--quantization", "[" * 100_000], "argument --quantization: '[[["),
        (["--expert-map", '{"a": [0], "a": [1], "b": [2], "c": [3]}'], "the key 'a' occurs twice"),
        (["--expert-map", '{"a":' * 100_000], "cannot be read as YAML"),
        (["--split", "test"], "data.jsonl': "),
        (
            ["--expert-map", '{"a": [1, 1, 0], "b": [2], "c": [3]}'],
            "--expert-map: 'a': [1, 1, 0]: names an expert twice",
        ),
    ],
)
def test_wrong_options(options, message, folder, capsys):
    with pytest.raises(SystemExit):
        inspect(folder, *options)
    last = capsys.readouterr().err.splitlines()[-1]
    assert message in last and last.startswith("error: ")


def test_logits_that_are_not_finite_are_no_routing(tokenizer, tmp_path, capsys):
    """A model whose activations overflow float16."""
    tokenizer.save_pretrained(saved(dense_model("llama"), tmp_path / "dense"))
    upcycle(tmp_path / "dense", tmp_path / "moe", UpcycleConfig(num_experts=4, router_init_std=0.5))
    weights = load_file(tmp_path / "moe" / "model.safetensors")
    overflowing = {name: weight * 2e3 if "experts" in name else weight for name, weight in weights.items()}
    save_file(overflowing, tmp_path / "moe" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "data.jsonl").write_text('{"text": "w3 w4 w5 w6"}\n')
    command = ["inspect", "--model", str(tmp_path / "moe"), "--data", str(tmp_path / "data.jsonl")]
    with pytest.raises(SystemExit):
        main([*command, "--output", str(tmp_path / "out"), "--dtype", "float16"])
    assert "error: --dtype='float16': logits of router 1 are not finite; use bfloat16" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
