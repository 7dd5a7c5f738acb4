"""Reports as one HTML page with its figures inside, for readers without the documentation."""

from __future__ import annotations

import base64
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment
from markupsafe import Markup, escape

from ..models.model_size import ModelSize
from ..routing.statistics import LoadHealth
from ..utils.expert_likeness import likeness
from ..utils.model_card import last_part
from .figures import DPI, telling_layer
from .recorder import RoutingStatistics
from .routing_report import write_figures
from .texts import MOST_TOKENS, PaintedTexts
from .token_classes import TOKEN_CLASSES

_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}
EFFECTIVE = "effective experts of a token"
STRONGEST = "layer: busiest expert (share)"
_BUSIEST = "{expert} in layer {layer} ({share:.0%})"
_MOST_CELLS = 16  # rows of a table of experts by experts
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root {
  color-scheme: light dark; --page: #fff; --ink: #222; --soft: #666; --line: #ccc; --head: #f3f3f3; --bad: #8a4b00;
}
@media (prefers-color-scheme: dark) {
  :root { --page: #181818; --ink: #ddd; --soft: #aaa; --line: #444; --head: #2a2a2a; --bad: #f0a860; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem;
       margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } .lead { font-size: 1.15rem; } .facts, caption { color: var(--soft); font-size: 0.9rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
.wide { overflow-x: auto; margin: 1rem 0; } img { max-width: 100%; height: auto; background: white; }
table { border-collapse: collapse; font-size: 0.9rem; overflow-wrap: normal; }
th, td { border: 1px solid var(--line); padding: 0.2rem 0.6rem; text-align: left; } th { background: var(--head); }
.number { text-align: right; white-space: nowrap; } .note { color: var(--soft); } .bad { color: var(--bad); }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<ul class="lead">{% for line in lead %}<li>{{ line | coded }}</li>{% endfor %}</ul>
{% if facts %}<ul class="facts">{% for line in facts %}<li>{{ line | coded }}</li>{% endfor %}</ul>{% endif %}
{% for section in sections %}
<h2>{{ section.title }}</h2>
{% for line in section.text %}<p>{{ line | coded }}</p>
{% endfor %}
{% if section.note %}<p class="{{ 'bad' if section.bad else 'note' }}">{{ section.note | coded }}</p>{% endif %}
{% if section.figure %}<div class="wide">{{ section.figure | inlined(section.title) }}</div>
{% endif %}
{% if section.texts %}{{ section.texts.part() }}{% endif %}
{% if section.rows %}<div class="wide"><table>
<thead><tr>{% for cell in section.header %}<th{{ cell | aligned(section.rows, loop.index0) }}>{{ cell }}</th>
{% endfor %}</tr></thead>
<tbody>
{% for row in section.rows %}<tr>{% for cell in row %}<td{{ cell | aligned(section.rows, loop.index0) }}>{{ cell }}</td>
{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
{% endfor %}
</body>
</html>
"""


@dataclass(frozen=True)
class Section:
    """
    A part of a page.

    Args:
        title: its heading.
        text: paragraphs of explanation, with code between backticks.
        note: a warning.
        bad: whether the warning is about a harm.
        header, rows: a table.
        figure: an image file.
        texts: texts with painted tokens; in one section of a page at most.
    """

    title: str
    text: Sequence[str] = ()
    note: str = ""
    bad: bool = False
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=list)
    figure: Path | None = None
    texts: PaintedTexts | None = None


def write_page(
    path: Path, title: str, lead: Sequence[str], sections: Sequence[Section], facts: Sequence[str] = ()
) -> Path:
    """
    Write a page that is complete in one file and loads nothing from elsewhere.

    Args:
        lead: the result, in sentences for readers who stop there.
        facts: description of the measurement.
    """
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(inlined=_inlined, coded=_coded, aligned=_aligned)
    page = environment.from_string(_PAGE).render(title=title, lead=lead, facts=facts, sections=sections)
    path.write_text(page, encoding="utf-8")
    return path


def write_html(
    statistics: RoutingStatistics, path: Path, about: Mapping[str, Any], files: Sequence[Path], texts: PaintedTexts
) -> Path:
    """
    Write the page of `moe-peft inspect`: the files of `write_report` and the command's output, explained.

    Args:
        about: description of the measurement, as in `routing.json`.
        files: the files of `write_report`. Figures that no page can show are drawn again.
        texts: texts of the same data.
    """
    how = f"{about['class']}, {about['dtype']}, {about['quantization'] or 'not quantized'}"
    n, ks = max(statistics.sizes), sorted(set(statistics.ks))
    tokens = {d: f"{int(count):,}" for d, count in zip(statistics.domains, statistics.tokens.tolist(), strict=True)}
    health, shares, has_map = statistics.health(), statistics.shares(), statistics.allowed is not None
    k = " or ".join(map(str, ks))
    choice = (
        f"Each token goes to {k} of {n} experts, which a router chooses, in each of {len(statistics.sizes)} layers."
    )
    names = about.get("expert_names")
    lead = [choice, who_serves_what(shares, names)]
    facts = [
        f"Model: `{about['model']}` ({how})",
        f"Size: {ModelSize(**about['size'])}",
        f"Data: `{about['data']}`, split {about['split']}, {about['examples']:,} examples",
        *numbering(about["routers"]),
    ]
    if has_map:
        chance = sum(statistics.chance()[domain] for domain in shares) / len(shares)
        lead[0] = (
            f"Routers give {statistics.mean_compliance():.0%} of their probability to the experts that the expert map "
            f"names for a token's domain; chance would be {chance:.0%}."
        )
        facts.append(choice)
    with tempfile.TemporaryDirectory() as folder:
        figures = {file.stem: file for file in files if file.suffix in _TYPES}
        figures = figures or {file.stem: file for file in write_figures(statistics, Path(folder), ".png", names)}
        sections = [
            shares_section(shares, figures["load"], tokens, statistics.sizes, names),
            _texts(texts),
            *_compliance(statistics, figures),
            load_section(health, has_map, bool(about.get("mixed"))),
            _layers(statistics, names),
            *_similarity(about["similarity"], about["similarity_of"], names),
            *_token_classes(statistics, names),
        ]
        subject = f"MoE-LoRA on {last_part(about['base'])}" if about["base"] else last_part(about["model"])
        return write_page(path, f"Where the tokens go: {subject}", list(filter(None, lead)), sections, facts)


def numbering(routers: Sequence[str]) -> list[str]:
    """Return a sentence about the numbers of layers, or nothing if each of the model's layers has one router."""
    numbers = [re.search(r"\.(\d+)\.", f"{name}.") for name in routers]
    if [number and int(number[1]) for number in numbers] == list(range(len(routers))):
        return []
    shown = [f"{i} is {name}" for i, name in enumerate(routers)]
    return [f"Layers are counted by router: {', '.join([*shown[:3], '…', shown[-1]] if len(shown) > 4 else shown)}"]


def who_serves_what(shares: Mapping[str, torch.Tensor], names: Sequence[str] | None = None) -> str:
    """
    Return a sentence about experts that serve mostly one domain, in the layer with the largest differences between
    domains; "" for one domain. Mostly is at least two thirds of an expert's tokens, and 1.5 times the even share.

    Args:
        shares: domain → each expert's share of its layer's assignments, [L, n].
        names: names of the experts.
    """
    if len(shares) < 2:
        return ""
    layer = telling_layer(shares)
    share_DN = torch.stack([share_LN[layer] for share_LN in shares.values()])
    part_DN = share_DN / share_DN.sum(0).clamp(min=1e-12)  # as if domains had equally many
    served = defaultdict(list)
    least = max(2 / 3, 1.5 / len(shares)) - 1e-6  # one of two domains always has half
    for expert, (part, domain) in enumerate(zip(*part_DN.max(0), strict=True)):
        if part >= least:
            served[list(shares)[domain]].append(_name(expert, names))
    if not served:
        domain, expert = divmod(int(part_DN.argmax()), part_DN.shape[1])
        part = f"{float(part_DN.max()):.0%} of its tokens from {list(shares)[domain]} (even: {1 / len(shares):.0%})"
        one = f"expert {_name(expert, names)} of layer {layer}"
        return f"No expert serves mostly one domain: the most one-sided, {one}, has {part}."
    parts = [
        f"{_listed(experts, 'expert')} serve{'s' * (len(experts) == 1)} mostly {d}" for d, experts in served.items()
    ]
    return f"In layer {layer}, where domains differ most, {'; '.join(parts)}."


def load_section(health: LoadHealth, wanted: bool = False, mixed: bool = False) -> Section:
    """
    Return a section about how evenly the experts are used.

    Args:
        wanted: whether an expert map asks for uneven loads.
        mixed: whether `moe-peft mix` made the model, without training. Then there is no advice.
    """
    text = [
        "The load of a layer is how its tokens are shared out among its experts. CV, the spread of their shares "
        "divided by the mean, is 0 if all get the same. Untrained routers are uneven, too: they send similar tokens "
        "the same way."
    ]
    text.append(f"This model: {health}." + " Its expert map asks for an uneven load." * wanted)
    advice = "" if wanted or mixed else health.warning
    return Section("Is the load healthy?", text, advice, bad=bool(advice) and health.status == "collapsed")


def shares_section(
    shares: Mapping[str, torch.Tensor],
    figure: Path,
    tokens: Mapping[str, str] | None = None,
    sizes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> Section:
    """
    Return a section about the routing of each domain's tokens.

    Args:
        shares: domain → each expert's share of its layer's assignments, [L, n].
        figure: figure of the shares.
        tokens: domain → number of tokens.
        sizes: number of experts of each layer; None: n in all.
        names: names of the experts.
    """
    rows, n = [], max(share_LN.shape[1] for share_LN in shares.values())
    for domain, share_LN in shares.items():
        rows.append([domain, *([] if tokens is None else [tokens[domain]]), strongest(share_LN, _BUSIEST, names)])
    others = "" if names else "Expert 3 of one layer has nothing to do with expert 3 of another. "
    least, most = (1 / size for size in (max(sizes or [n]), min(sizes or [n])))
    even = f"{least:.1%}" if least == most else f"{least:.1%} to {most:.1%}, by the layer's number of experts"
    return Section(
        "Where each domain's tokens go",
        [
            "A token that goes to an expert is an assignment; with two experts per token, each token makes two. "
            f"The numbers say what share of a layer's assignments each expert gets. Even routing gives every expert "
            f"{even}. {others}Domains whose panels look alike are not told apart by the routers."
        ],
        header=["domain", *([] if tokens is None else ["tokens"]), "busiest experts (share)"],
        rows=rows,
        figure=figure,
    )


def strongest(
    share_LN: torch.Tensor, form: str = "{layer}: {expert} ({share:.0%})", names: Sequence[str] | None = None
) -> str:
    """Return the busiest experts of the three layers with the largest share of one expert; shares are [L, n]."""
    best_L, expert_L = share_LN.max(1)
    layers = best_L.topk(min(3, len(best_L))).indices.tolist()
    best = ((i, _name(int(expert_L[i]), names), float(best_L[i])) for i in layers)
    return ", ".join(form.format(layer=i, expert=expert, share=share) for i, expert, share in best)


def _name(expert: int, names: Sequence[str] | None) -> str:
    return str(expert) if names is None else names[expert]


def _texts(texts: PaintedTexts) -> Section:
    text = (
        "The beginnings of a few texts. Each token has the color of the expert that served it, or of the one with the "
        "largest gate, in the layer that you pick; first it is the one whose experts' shares differ most. A token "
        "that is pointed at says which expert that is, and its share of the token's gates. Texts are cut after "
        f"{MOST_TOKENS} tokens."
    )
    return Section("Which expert serves each token", [text], texts=texts)


def _layers(statistics: RoutingStatistics, names: Sequence[str] | None) -> Section:
    rows = []
    counts_LN, effective_L = statistics.counts.sum(0), statistics.effective_sums.sum(0) / statistics.tokens.sum()
    for layer, (cv, n) in enumerate(zip(statistics.variations(), statistics.sizes, strict=True)):
        share_N = counts_LN[layer, :n] / counts_LN[layer].sum()
        ends = (int(share_N.argmin()), int(share_N.argmax()))
        extremes = (f"{_name(i, names)} ({float(share_N[i]):.1%})" for i in ends)
        rows.append([str(layer), str(n), f"{cv:.2f}", *extremes, f"{float(effective_L[layer]):.2f}"])
    text = (
        "The effective number of experts of a token is (Σg)²/Σg² of its gates g: k if all are equal, near 1 if one has "
        "almost all the weight."
    )
    header = ["layer", "experts", "CV", "least used", "most used", EFFECTIVE]
    return Section("Load of each layer", [text], header=header, rows=rows)


def _similarity(similarity: list[list[float]] | None, of: str, expert_names: Sequence[str] | None) -> Iterator[Section]:
    alike = likeness(similarity)
    if similarity is None or alike is None:
        return
    text = (
        f"Cosine of the experts' {of}, over all layers: 1 says that two experts are the same, 0 that they have nothing "
        f"in common. Here it is {alike.mean:.3f} on average, from {alike.smallest:.3f} to {alike.largest:.3f}."
    )
    names = [_name(i, expert_names) for i in range(len(similarity))]
    rows = [[name, *(f"{value:.2f}" for value in row)] for name, row in zip(names, similarity, strict=True)]
    small = len(similarity) <= _MOST_CELLS
    yield Section("How alike the experts are", [text], header=["expert", *names], rows=rows if small else [])


def _compliance(statistics: RoutingStatistics, figures: Mapping[str, Path]) -> Iterator[Section]:
    if statistics.allowed is None:
        return
    chance = statistics.chance()
    rows = [
        [domain, f"{statistics.mean_compliance(domain):.1%}", f"{chance[domain]:.1%}"] for domain in statistics.shares()
    ]
    yield Section(
        "Do tokens go to the experts of their domain?",
        [
            "The expert map gives each domain its experts. Compliance is the probability that routers give to these. "
            "Uniform routers would reach chance, 100 % is perfect."
        ],
        header=["domain", "compliance", "chance"],
        rows=[*rows, ["all", f"{statistics.mean_compliance():.1%}", ""]],
        figure=figures["compliance"],
    )


def _token_classes(statistics: RoutingStatistics, names: Sequence[str] | None) -> Iterator[Section]:
    rows = []
    for name, counts_LN in zip(TOKEN_CLASSES, statistics.class_counts, strict=True):
        if counts_LN.any():
            share_LN = counts_LN / counts_LN.sum(1, keepdim=True).clamp(min=1)
            rows.append([name, strongest(share_LN, _BUSIEST, names)])
    if rows:
        text = "Which experts get each kind of token."
        yield Section("Kinds of tokens", [text], header=["kind", "busiest experts (share)"], rows=rows)


def _inlined(path: Path, title: str) -> Markup:
    """Return the image inside the page. Its letters are as large as the page's, and not much smaller on a phone."""
    data, size = path.read_bytes(), ""
    if path.suffix == ".png":
        width = int.from_bytes(data[16:20]) * 96 // DPI
        size = f' width="{width}" style="min-width: {width * 0.64:.0f}px"'
    url = f"data:{_TYPES[path.suffix]};base64,{base64.b64encode(data).decode()}"
    return Markup('<img src="{}" alt="{}"{}>').format(url, title, Markup(size))


def _coded(text: str) -> Markup:
    """Return text with the parts between backticks in code font."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _aligned(cell: str, rows: Sequence[Sequence[str]], column: int) -> Markup:
    """Return the class of a table's cell. Columns of numbers are aligned at the right."""
    is_number = all(re.fullmatch(r"[-+]?[\d.,]+%?|", row[column]) for row in rows)
    return Markup(' class="number"' if is_number else "")


def _listed(items: Sequence[str], noun: str) -> str:
    """Return a list in words, e.g. "experts 2, 3 and 5"."""
    first, last = items[:-1], items[-1]
    return f"{noun}s {', '.join(first)} and {last}" if first else f"{noun} {last}"
