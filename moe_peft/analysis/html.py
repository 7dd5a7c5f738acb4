"""Reports as one HTML page with its figures inside, for readers who have not read the documentation."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment

from ..models.model_size import ModelSize
from ..routing.statistics import LoadHealth
from ..utils.expert_merging import likeness
from .recorder import RoutingStatistics
from .routing_report import write_figures
from .token_classes import TOKEN_CLASSES

_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}
EFFECTIVE = "effective experts of a token"
STRONGEST = "layer: busiest expert (share)"
_MOST_CELLS = 16  # of a table of experts by experts
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
img { max-width: 100%; height: auto; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; } caption { text-align: left; color: #555; }
th, td { border: 1px solid #ccc; padding: 0.2rem 0.6rem; text-align: right; } th { background: #f3f3f3; }
th:first-child, td:first-child { text-align: left; } li.bad { color: #8a4b00; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<ul>{% for line in lead %}<li>{{ line }}</li>{% endfor %}</ul>
{% for section in sections %}
<h2>{{ section.title }}</h2>
{% for line in section.text %}<p>{{ line }}</p>
{% endfor %}
{% if section.points %}<ul>{% for line in section.points %}<li class="bad">{{ line }}</li>{% endfor %}</ul>{% endif %}
{% if section.rows %}<div class="wide"><table>
<thead><tr>{% for cell in section.header %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in section.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
{% if section.figure %}<p><img src="{{ section.figure | inlined }}" alt="{{ section.title }}"></p>{% endif %}
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
        text: paragraphs that explain it.
        points: what is not as it should be, one line each.
        header, rows: a table.
        figure: an image file.
    """

    title: str
    text: Sequence[str] = ()
    points: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=list)
    figure: Path | None = None


def write_page(path: Path, title: str, lead: Sequence[str], sections: Sequence[Section]) -> Path:
    """Write a page that is complete in one file and loads nothing from elsewhere."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["inlined"] = _inlined
    page = environment.from_string(_PAGE).render(title=title, lead=lead, sections=sections)
    path.write_text(page, encoding="utf-8")
    return path


def write_html(statistics: RoutingStatistics, path: Path, about: Mapping[str, Any], files: Sequence[Path]) -> Path:
    """
    The page of `moe-peft inspect`: what `write_report` writes and the command prints, explained.

    Args:
        about: what was measured, as in `routing.json`.
        files: what `write_files` has written. Figures that no page can show are drawn again.
    """
    how = f"{about['class']}, {about['dtype']}, {about['quantization'] or 'not quantized'}"
    n, ks = max(statistics.sizes), sorted(set(statistics.ks))
    tokens = {d: f"{int(count):,}" for d, count in zip(statistics.domains, statistics.tokens.tolist(), strict=True)}
    lead = [
        f"Model: {about['model']} ({how})",
        f"Size: {ModelSize(**about['size'])}",
        f"Data: {about['data']}, split {about['split']}, {about['examples']:,} examples",
        f"Routing: {len(statistics.sizes)} layers with experts, up to {n} in each; "
        f"a router in each layer sends every token to {' or '.join(map(str, ks))} of them",
    ]
    with tempfile.TemporaryDirectory() as folder:
        figures = {file.stem: file for file in files if file.suffix in _TYPES}
        figures = figures or {file.stem: file for file in write_figures(statistics, Path(folder), ".png")}
        sections = [
            load_section(statistics.health(), statistics.allowed is not None),
            shares_section(statistics.shares(), figures["load"], tokens, statistics.sizes),
            _layers(statistics),
            *_similarity(about["similarity"], about["similarity_of"]),
            *_compliance(statistics, figures),
            *_token_classes(statistics, figures),
            Section(
                "Which experts work together",
                ["Of the tokens of the row's expert, the share that the column's expert serves, too."],
                figure=figures["coactivation"],
            ),
        ]
        return write_page(path, "Where the tokens go", lead, sections)


def load_section(health: LoadHealth, wanted: bool = False) -> Section:
    """
    Whether the experts are used evenly, in words.

    Args:
        wanted: whether an expert map asks for uneven loads.
    """
    text = [
        "A MoE is worth its size if all of its experts work. The load of a layer is how the work is shared out among "
        "its experts; CV, its coefficient of variation, is the spread of their shares divided by the mean: 0 is even. "
        "Untrained gates are not even, either: they send similar tokens the same way."
    ]
    if health.warning and not wanted:
        return Section("Is the load healthy?", text, [health.warning])
    verdicts = {
        "even": f"Yes, it is no more uneven than that of untrained gates: {health}.",
        "unknown": f"There are too few tokens to tell: {health}. By chance alone, CV would be {health.by_chance:.2f}.",
    }
    return Section("Is the load healthy?", [*text, verdicts.get(health.status, f"It is as the labels ask: {health}.")])


def shares_section(
    shares: Mapping[str, torch.Tensor],
    figure: Path,
    tokens: Mapping[str, str] | None = None,
    sizes: Sequence[int] | None = None,
) -> Section:
    """
    Where each domain's tokens go.

    Args:
        shares: domain → each expert's share of its layer's assignments, [L, n].
        figure: of the shares.
        tokens: domain → how many.
        sizes: experts of each layer; None: n in all.
    """
    rows, n = [], max(share_LN.shape[1] for share_LN in shares.values())
    for domain, share_LN in shares.items():
        rows.append([domain, *([] if tokens is None else [tokens[domain]]), strongest(share_LN)])
    least, most = (1 / size for size in (max(sizes or [n]), min(sizes or [n])))
    even = f"{least:.1%}" if least == most else f"{least:.1%} to {most:.1%}, by the layer's number of experts"
    return Section(
        "Where each domain's tokens go",
        [
            f"The share of a layer's assignments that each expert gets. Even routing gives every expert {even}. "
            "Expert 3 of one layer has nothing to do with expert 3 of another. "
            "Domains whose rows look alike are not told apart by the routers."
        ],
        header=["domain", *([] if tokens is None else ["tokens"]), STRONGEST],
        rows=rows,
        figure=figure,
    )


def strongest(share_LN: torch.Tensor) -> str:
    """The experts with the largest share in the three layers where that is largest, in words; shares are [L, n]."""
    best_L, expert_L = share_LN.max(1)
    layers = best_L.topk(min(3, len(best_L))).indices.tolist()
    return ", ".join(f"{layer}: {int(expert_L[layer])} ({float(best_L[layer]):.0%})" for layer in layers)


def losses_section(losses: Mapping[str, Mapping[str, float]]) -> Section:
    """Held-out losses by model and domain, and what training has gained."""
    base, trained = losses["base"], losses["adapted"]
    rows = [[name, f"{base[name]:.3f}", f"{loss:.3f}", f"{loss - base[name]:+.3f}"] for name, loss in trained.items()]
    return Section(
        "Losses on held-out data",
        [
            "The mean loss per token on data that were not trained on, of the base and of the trained model. Lower is "
            "better: a negative difference is a gain."
        ],
        header=["domain", "base", "trained", "difference"],
        rows=rows,
    )


def _layers(statistics: RoutingStatistics) -> Section:
    rows = []
    counts_LN, effective_L = statistics.counts.sum(0), statistics.effective_sums.sum(0) / statistics.tokens.sum()
    for layer, (cv, n) in enumerate(zip(statistics.variations(), statistics.sizes, strict=True)):
        share_N = counts_LN[layer, :n] / counts_LN[layer].sum()
        extremes = (f"{i} ({float(share_N[i]):.1%})" for i in (int(share_N.argmin()), int(share_N.argmax())))
        rows.append([str(layer), str(n), f"{cv:.2f}", *extremes, f"{float(effective_L[layer]):.2f}"])
    text = (
        "The effective number of experts of a token is (Σg)²/Σg² of its gates g: k if all are equal, near 1 if one has "
        "almost all the weight."
    )
    header = ["layer", "experts", "CV", "least used", "most used", EFFECTIVE]
    return Section("Load of each layer", [text], header=header, rows=rows)


def _similarity(similarity: list[list[float]] | None, of: str) -> Iterator[Section]:
    alike = likeness(similarity)
    if similarity is None or alike is None:
        return
    text = (
        f"Cosine of the experts' {of}, over all layers: 1 says that two experts are the same, 0 that they have nothing "
        f"in common. Here it is {alike.mean:.3f} on average, from {alike.smallest:.3f} to {alike.largest:.3f}."
    )
    names = [str(i) for i in range(len(similarity))]
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


def _token_classes(statistics: RoutingStatistics, figures: Mapping[str, Path]) -> Iterator[Section]:
    if "token_classes" not in figures:
        return
    rows = []
    for name, counts_LN in zip(TOKEN_CLASSES, statistics.class_counts, strict=True):
        if counts_LN.any():
            rows.append([name, strongest(counts_LN / counts_LN.sum(1, keepdim=True).clamp(min=1))])
    yield Section(
        "Kinds of tokens",
        ["Which experts get each kind of token."],
        header=["kind", STRONGEST],
        rows=rows,
        figure=figures["token_classes"],
    )


def _inlined(path: Path) -> str:
    """The file as a URL that holds it."""
    return f"data:{_TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"
