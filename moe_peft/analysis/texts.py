"""A few texts of a report's data. Their tokens have the colors of their experts in a layer that the reader picks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import Environment
from markupsafe import Markup

from .inputs import ReportData
from .markup import STYLE, Pieces, legend, names_of, painted
from .routes import Routes, record_routes

MOST_TEXTS, MOST_OF_A_DOMAIN, MOST_TOKENS = 12, 4, 200

# For each layer, the page has the tokens' experts (-1: none) and their shares in percent; its script paints by them.
_PART = """\
<style>
{{ style }}
.text { border: 1px solid var(--line); border-radius: 4px; padding: 0.4rem 0.8rem; margin: 0.8rem 0; }
.text h3 { font-size: 0.8rem; color: var(--soft); margin: 0; }
.picker { position: sticky; top: 0; background: var(--page); padding: 0.2rem 0; }
.picker p { margin: 0.3rem 0; } select { font: inherit; max-width: 100%; }
</style>
<div>
<div class="picker"><p><label>Layer: <select id="layer">{% for layer in layers %}
<option value="{{ loop.index0 }}"{{ " selected" if loop.index0 == picked }}>{{ layer.name }}</option>
{% endfor %}</select></label></p>
{% for layer in layers %}<p class="legend"{{ " hidden" if loop.index0 != picked }}>{{ layer.legend }}</p>
{% endfor %}</div>
{% for label, text in texts %}<div class="text">{% if label %}<h3>{{ label }}</h3>{% endif %}
<div class="tokens">{{ text }}</div></div>
{% endfor %}</div>
<script type="application/json" id="routes">{{ data | tojson }}</script>
<script>
const routes = JSON.parse(document.getElementById("routes").textContent), layer = document.getElementById("layer");
const legends = document.querySelectorAll(".legend"), tokens = document.querySelectorAll(".tokens span");
function paint() {
  const {experts, shares, colors} = routes.layers[layer.value];
  legends.forEach((legend, i) => legend.hidden = i != layer.value);
  tokens.forEach((token, i) => {
    token.className = "c" + colors.indexOf(experts[i]);
    token.title = experts[i] < 0 ? "no expert" : `${routes.names[experts[i]]} ${shares[i]} %`;
  });
}
layer.addEventListener("input", paint);
paint();  // a browser that loads the page again keeps what was picked
</script>
"""


@dataclass(frozen=True)
class PaintedTexts:
    """
    Sampled texts, with the experts of their tokens.

    Args:
        labels: the domain of each text, or "".
        tokens: the texts of the tokens of each text.
        routes: the experts of all tokens of all texts.
    """

    labels: Sequence[str]
    tokens: Sequence[Sequence[str]]
    routes: Routes

    @property
    def telling(self) -> int:
        """
        Index of the router with the largest differences of shares between domains (or texts, with a single domain).
        """
        ends = torch.tensor([len(tokens) for tokens in self.tokens]).cumsum(0).tolist()
        parts = [self.routes.shares_LTN[:, a:b].mean(1) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        kinds = self.labels if len({*self.labels}) > 1 else range(len(parts))
        groups: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for kind, share_LN in zip(kinds, parts, strict=True):
            groups[kind].append(share_LN)
        means_GLN = torch.stack([torch.stack(of_kind).mean(0) for of_kind in groups.values()])
        return int(means_GLN.var(0, correction=0).sum(-1).argmax())

    def part(self) -> Markup:
        """Return the texts as a part of a page. A page has at most one such part."""
        routes, all_layers = self.routes, range(len(self.routes.layers))
        routers: list[int | None] = [*all_layers, *([None] if len(all_layers) > 1 else [])]
        names = [f"{i}: {name}" for i, name in enumerate(routes.layers)] + ["mean of all layers"]
        texts, start, telling = [], 0, self.telling
        for label, tokens in zip(self.labels, self.tokens, strict=True):
            texts.append((label, painted(tokens, routes, telling, start)))
            start += len(tokens)
        data = {
            "names": names_of(routes),
            "layers": [
                {
                    "experts": routes.leading_T(router),
                    "shares": [max(1, round(100 * share)) for share in routes.shares_TN(router).amax(-1).tolist()],
                    "colors": [*routes.colors(router)],
                }
                for router in routers
            ],
        }
        layers = [{"name": names[i], "legend": legend(routes, router)} for i, router in enumerate(routers)]
        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        return Markup(
            environment.from_string(_PART).render(
                style=Markup(STYLE), layers=layers, picked=telling, texts=texts, data=data
            )
        )


@torch.no_grad()
def sample_texts(model: Any, tokenizer: Any, rows: ReportData) -> PaintedTexts:
    """
    Sample the first few rows of each domain, or of the first 12 domains, and record their routing in plain passes.
    """
    domains = rows.domains or [""] * len(rows.data)
    taken: dict[str, list[int]] = defaultdict(list)
    of_each = min(MOST_OF_A_DOMAIN, max(1, MOST_TEXTS // len({*domains})))
    for i, domain in enumerate(domains):
        if len(taken[domain]) < of_each:
            taken[domain].append(i)
    chosen = [(domain, i) for domain, of_domain in taken.items() for i in of_domain][:MOST_TEXTS]
    tokens = []
    device = next(model.parameters()).device
    with record_routes(model) as tape:
        for _, i in chosen:
            ids, pieces = rows.data[i]["input_ids"][:MOST_TOKENS], Pieces(tokenizer, skip_special_tokens=False)
            model(input_ids=torch.tensor([ids], device=device), logits_to_keep=1, use_cache=False)
            for token in ids:
                pieces.add(token)
            pieces.end()
            tokens.append(pieces.tokens)
    routes = tape.routes()
    assert routes is not None  # the model has routers: its routing was recorded
    return PaintedTexts([domain for domain, _ in chosen], tokens, routes)
