"""Text of tokens as HTML, in the colors of their experts, for reports and conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from .routes import PALETTE, Routes, percent

# Class c0, c1, … is an expert with the palette's color of this number; c-1 is any other expert.
STYLE = """\
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; } .tokens span { box-shadow: inset -1px 0 #0003; }
.legend span { border-radius: 2px; padding: 0 0.4em; } .legend { line-height: 1.8; }
.c-1 { opacity: 0.7; }
""" + "\n".join(
    f".c{i} {{ background: {color}; color: {'white' if i == 0 else 'black'}; }}" for i, color in enumerate(PALETTE)
)


def names_of(routes: Routes) -> list[str]:
    """Return the experts' names, with "expert 3" for a number alone."""
    return [f"expert {name}" if name == str(i) else name for i, name in enumerate(routes.experts)]


def painted(tokens: Sequence[str], routes: Routes, router: int | None, start: int = 0) -> Markup:
    """
    Paint tokens in the colors of their leading experts, of a router or averaged over all (`None`). A token's title has
    the expert's name and share.

    Args:
        tokens: texts of the tokens; the first is token `start` of the routes.
    """
    colors, names, at = [*routes.colors(router)], names_of(routes), slice(start, start + len(tokens))
    experts, shares = routes.leading_T(router)[at], routes.shares_TN(router)[at].amax(-1).tolist()
    spans = []
    for text, expert, share in zip(tokens, experts, shares, strict=True):
        title = f"{names[expert]} {percent(share)}" if expert >= 0 else "no expert"
        color = colors.index(expert) if expert in colors else -1
        spans.append(Markup('<span class="c{}" title="{}">{}</span>').format(color, title, text))
    return Markup("").join(spans)


def legend(routes: Routes, router: int | None) -> Markup:
    """Return the experts with their colors and shares of all tokens. All experts without a color are one entry."""
    colors, names, ranked = [*routes.colors(router)], names_of(routes), routes.ranked(router)
    entries = [
        Markup('<span class="c{}">{}</span> {}').format(colors.index(expert), names[expert], percent(share))
        for expert, share in ranked
        if expert in colors
    ]
    if rest := sum(share for expert, share in ranked if expert not in colors):
        entries.append(Markup('<span class="c-1">others</span> {}').format(percent(rest)))
    return Markup(" &ensp;").join(entries)


class Pieces:
    """Decodes tokens one by one."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.ids: list[int] = []
        self.tokens: list[str] = []
        self._shown = 0

    def add(self, token: int) -> str:
        """Return the text that a token adds; "" while a character's bytes are incomplete."""
        self.ids.append(token)
        self.tokens.append(self._text().rstrip("\ufffd")[self._shown :])
        self._shown += len(self.tokens[-1])
        return self.tokens[-1]

    def end(self) -> str:
        """Return the rest: a character that stays incomplete."""
        rest = self._text()[self._shown :] if self.ids else ""
        if rest:
            self.tokens[-1] += rest
        return rest

    def _text(self) -> str:
        skip = self.skip_special_tokens
        return self.tokenizer.decode(self.ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
