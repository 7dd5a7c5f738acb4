"""
Experts that served the tokens of one text.

Legend: T tokens, L routers, n experts, K slots of a token.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from ..models.introspection import RoutedPass, expert_names, observed_routing
from ..models.layer import router_names
from ..utils.messages import InputError

# Okabe and Ito's colors, as in all figures; color-blind people can tell them apart. All but the first carry black
# letters.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")


@dataclass(frozen=True, eq=False)
class Routes:
    """
    Experts of a text's tokens, on the CPU.

    Args:
        experts_LTK: the experts in the slots of each token, int64.
        gates_LTK: their gates, float32. 0 leaves an expert out, and fills the slots of routers with fewer than K.
        measure: "gates", or "choices" if the gates of some router are not known: then the chosen experts' gates are 1.
        layers: the routers' names, [L], in the order of `moe-peft inspect`.
        experts: the experts' names, [n]; their numbers if they have none.
    """

    experts_LTK: torch.Tensor
    gates_LTK: torch.Tensor
    measure: str
    layers: Sequence[str]
    experts: Sequence[str]

    @cached_property
    def shares_LTN(self) -> torch.Tensor:
        """Share of each token per expert, [L, T, n]. A token's shares sum to 1, or to 0 if its gates are all 0."""
        gates_LTK = self.gates_LTK.abs()
        shares_LTK = gates_LTK / gates_LTK.sum(-1, keepdim=True).clamp(min=1e-12)
        shares_LTN = torch.zeros(*self.experts_LTK.shape[:2], len(self.experts))
        return shares_LTN.scatter_add_(-1, self.experts_LTK, shares_LTK)

    @cached_property
    def shares_LN(self) -> torch.Tensor:
        """Share of the text per expert and router, [L, n]. A router's shares sum to 1."""
        sums_LN = self.shares_LTN.sum(1)
        return sums_LN / sums_LN.sum(-1, keepdim=True).clamp(min=1e-12)

    @property
    def most_decisive(self) -> int:
        """Index of the router with the most unequal shares: the smallest effective number of experts."""
        return int(self.shares_LN.square().sum(-1).argmax())

    def find(self, words: Sequence[str]) -> list[int]:
        """Return the routers with all these parts in their names, e.g. "12", or "12" and "q_proj"."""
        found = [i for i, layer in enumerate(self.layers) if {*words} <= {*layer.split(".")}]
        if not found:
            raise InputError(f"layer {' '.join(words)}: no such router; they are {_first_and_last(self.layers)}")
        return found

    def shares_TN(self, router: int | None) -> torch.Tensor:
        """Return each token's shares [T, n], of a router or averaged over all."""
        return self.shares_LTN.mean(0) if router is None else self.shares_LTN[router]

    def leading_T(self, router: int | None) -> list[int]:
        """Return each token's expert with the largest share, of a router or averaged over all; -1 without a share."""
        shares_T, experts_T = self.shares_TN(router).max(-1)
        return experts_T.masked_fill(shares_T == 0, -1).tolist()

    def shares_N(self, router: int | None = None) -> torch.Tensor:
        """Return each expert's share of the text, [n], of a router or averaged over all."""
        return self.shares_LN.mean(0) if router is None else self.shares_LN[router]

    def ranked(self, router: int | None = None) -> list[tuple[int, float]]:
        """Return the experts with a share of the text, and their shares, as in `shares_N`, largest first."""
        shares, experts = self.shares_N(router).sort(descending=True, stable=True)
        return [(i, share) for i, share in zip(experts.tolist(), shares.tolist(), strict=True) if share > 0]

    def colors(self, router: int | None) -> dict[int, str]:
        """
        Return expert → color, for the 7 largest shares. With at most 7 experts, the colors are the same in all texts.
        """
        most_used = self.shares_N(router).sort(descending=True, stable=True).indices[: len(PALETTE)]
        return dict(zip(sorted(most_used.tolist()), PALETTE, strict=False))

    def summary(self, most: int = 4) -> str:
        """Return a line such as "law 71 %, math 29 % (gates, mean of 30 routers)"."""
        ranked = self.ranked()
        parts = [f"{self.experts[expert]} {percent(share)}" for expert, share in ranked[:most]]
        if not parts:
            return "no expert"
        more = ", …" if len(ranked) > most else ""
        over = "1 router" if len(self.layers) == 1 else f"mean of {len(self.layers)} routers"
        return f"{', '.join(parts)}{more} ({self.measure}, {over})"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "<1 %"


def _first_and_last(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


class RouteTape:
    """
    Records the routing of this thread's passes with one row, in order. Tensors stay on their devices until `routes`
    copies them.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.n, self.measure = model, 0, "gates"
        self._thread = threading.get_ident()
        self._experts: list[Sequence[torch.Tensor]] = []  # for each pass, one [T, k] per router
        self._gates: list[Sequence[torch.Tensor]] = []

    def see(self, seen: RoutedPass) -> None:
        if threading.get_ident() != self._thread:  # a pass of another text
            return
        gates: list[Any] = list(seen.gates)
        if any(gates_TK is None for gates_TK in gates):
            self.measure = "choices"
            gates = [chosen.gather(-1, of_slots) for chosen, of_slots in zip(seen.chosen, seen.experts, strict=True)]
        self._experts.append(seen.experts)
        self._gates.append(gates)
        self.n = max(logits_TN.shape[-1] for logits_TN in seen.router_logits)

    def routes(self, start: int = 0, stop: int | None = None) -> Routes | None:
        """
        Return the routes of the tokens from `start` to before `stop`, counted over all passes. None if no router ran.
        """
        if not self._experts:
            return None
        experts_LTK, gates_LTK = (_joined(passes, slice(start, stop)) for passes in (self._experts, self._gates))
        layers = router_names(self.model)
        if len(layers) != len(experts_LTK):  # a router ran more than once in a pass
            layers = [f"router.{i}" for i in range(len(experts_LTK))]
        experts = expert_names(self.model) or [str(i) for i in range(self.n)]
        return Routes(experts_LTK, gates_LTK.float(), self.measure, layers, experts)


def _joined(passes: Sequence[Sequence[torch.Tensor]], tokens: slice) -> torch.Tensor:
    """Join the passes to [L, T, K] on the CPU, with zeros in slots that a router does not have."""
    layers = [torch.cat(of_layer)[tokens].to(passes[0][0].device) for of_layer in zip(*passes, strict=True)]
    K = max(of_layer.shape[-1] for of_layer in layers)
    return torch.stack([F.pad(of_layer, (0, K - of_layer.shape[-1])) for of_layer in layers]).cpu()


@contextmanager
def record_routes(model: Any) -> Iterator[RouteTape]:
    """
    Record the experts of each token in this thread's passes inside the block. Each pass must have one row.

    The context manager's value is a `RouteTape`. Its `routes()` returns `Routes`, or None if no router ran (in a dense
    model).

    Args:
        model: a model with a MoE-LoRA adapter, or a native MoE; other models have no routes.
    """
    tape = RouteTape(model)
    with observed_routing(model, tape.see):
        yield tape
