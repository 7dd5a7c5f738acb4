"""
Initial experts from a dense FFN, as pure functions on one FFN's tensors (Drop-Upcycling, arXiv 2502.19261, and its
baselines). A further method is one function and one line in `INITIALISATIONS`.

Legend: d hidden size, f intermediate size, n experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch

from .upcycle_config import INITIALISATION_READS as INITIALISATION_READS
from .upcycle_config import InitialGates


class FFN(NamedTuple):
    """Weights of a gated FFN. Neuron i is row i of gate and up, and column i of down."""

    gate: torch.Tensor  # [f, d]
    up: torch.Tensor  # [f, d]
    down: torch.Tensor  # [d, f]

    def neurons(self, index: torch.Tensor) -> FFN:
        """Select neurons, in the order of `index`."""
        return FFN(self.gate[index], self.up[index], self.down[:, index])

    def scaled(self, factor: float) -> FFN:
        """Return an FFN with `factor` times the output. Up and down are each scaled by the square root of `factor`."""
        if factor == 1:
            return self
        root = factor**0.5
        return FFN(self.gate, self.up * root, self.down * root)


@dataclass(frozen=True)
class ExpertInit:
    """
    Method to make experts from a dense FFN, and its settings.

    Args:
        method: initial value of an expert. `"copy"`: a copy of the FFN; `"noise"`: a copy plus
            N(0, (noise_scale·std(W))²); `"random_noise"`: a copy plus N(0, noise_std²) on a random `noise_share` of the
            weights; `"subset"`: one n-th of the neurons, all others zero; `"permute"`: the neurons in another order,
            which computes the same and trains as `"copy"` does; `"permute_columns"`: the outputs of gate, up and down,
            each in a different order, which computes something else; `"drop"`: a share `drop_rate` of the neurons,
            rounded down, is drawn again from N(μ, σ²), where μ and σ are of the replaced entries of each matrix (σ
            without Bessel's correction; Drop-Upcycling, section 3.2.1); `"checkpoints"`: copies of several models' FFNs
            in turn; `"random"`: N(0, noise_std²), independent of the FFN; `"scratch"`: like `"random"`, in a model with
            random weights outside the experts, too (`UpcycleConfig`).
        noise_scale: for `"noise"`, as a multiple of each matrix's standard deviation.
        noise_std: standard deviation for `"random_noise"`, `"random"` and `"scratch"`.
        noise_share: for `"random_noise"`, the share of the weights that get noise.
        drop_rate: for `"drop"`, the share of the neurons that are drawn again.
        shared_indices: for `"drop"`: True replaces the same neurons in gate, up and down (the paper), False other
            neurons in each (the paper's released code).

    Example:

    ```python
    >>> from moe_peft.native import ExpertInit
    >>> init = ExpertInit("drop", drop_rate=0.5)
    ```
    """

    method: str = "copy"
    noise_scale: float = 0.01
    noise_std: float = 0.02
    noise_share: float = 0.5
    drop_rate: float = 0.5
    shared_indices: bool = True

    def make(self, ffn: FFN, expert: int, n: int, generator: torch.Generator) -> FFN:
        """Make expert `expert` of `n`."""
        return INITIALISATIONS[self.method](self, ffn, expert, n, generator)


def generator_for(seed: int, *key: int | str) -> torch.Generator:
    """Return a generator for a key (layer, expert, purpose). Its numbers do not depend on draws for other keys."""
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def joined(ffns: list[FFN]) -> FFN:
    """Join FFNs into one FFN with all their neurons. It computes the sum of their outputs."""
    gates, ups, downs = zip(*ffns, strict=True)
    return FFN(torch.cat(gates), torch.cat(ups), torch.cat(downs, dim=1))


def zero_ffn(f: int, d: int) -> FFN:
    """Return an FFN of `f` neurons with output zero."""
    return FFN(torch.zeros(f, d), torch.zeros(f, d), torch.zeros(d, f))


def share_of(count: int, share: float) -> int:
    """Return ⌊share·count⌋ in decimal arithmetic: 0.29 of 100 is 29; with floats it would be 28."""
    return int(Fraction(str(share)) * count)


def shard_indices(f: int, granularity: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Partition the FFN's neurons at random among `granularity` fine-grained experts."""
    if granularity == 1:
        return [torch.arange(f)]
    return list(torch.randperm(f, generator=generator).view(granularity, -1))


def router_weight(method: InitialGates, n: int, d: int, generator: torch.Generator, std: float = 0.02) -> torch.Tensor:
    """
    Return a linear gate [n, d], float32: `"zeros"`, `"normal"` N(0, std²), or `"uniform"` U(-√3·std, √3·std), with the
    same standard deviation.
    """
    if method == "zeros":
        return torch.zeros(n, d)
    if method == "uniform":
        return torch.empty(n, d).uniform_(-std * 3**0.5, std * 3**0.5, generator=generator)
    return torch.empty(n, d).normal_(std=std, generator=generator)


def _copy(init: ExpertInit, ffn: FFN, expert: int, n: int, generator: torch.Generator) -> FFN:
    return ffn


def _noise(init: ExpertInit, ffn: FFN, expert: int, n: int, generator: torch.Generator) -> FFN:
    return FFN(*(_normal(w, generator).mul_(init.noise_scale * w.float().std()).add_(w) for w in ffn))


def _random_noise(init: ExpertInit, ffn: FFN, expert: int, n: int, generator: torch.Generator) -> FFN:
    def noisy(w: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(w.shape, generator=generator) >= init.noise_share
        return _normal(w, generator).mul_(init.noise_std).masked_fill_(kept, 0).add_(w)

    return FFN(*map(noisy, ffn))


def _subset(init: ExpertInit, ffn: FFN, expert: int, n: int, generator: torch.Generator) -> FFN:
    f = ffn.gate.shape[0]
    kept = torch.zeros(f, dtype=ffn.gate.dtype)
    kept[expert * f // n : (expert + 1) * f // n] = 1
    return FFN(ffn.gate * kept.unsqueeze(1), ffn.up * kept.unsqueeze(1), ffn.down * kept)


def _permute(init: ExpertInit, ffn: FFN, expert: int, n: int, generator: torch.Generator) -> FFN:
    return ffn.neurons(torch.randperm(ffn.gate.shape[0], generator=generator))


def _permute_columns(init: ExpertInit, ffn: FFN, expert: int, n: int, generator: torch.Generator) -> FFN:
    return FFN(*(w[torch.randperm(len(w), generator=generator)] for w in ffn))


def _drop(init: ExpertInit, ffn: FFN, expert: int, n: int, generator: torch.Generator) -> FFN:
    f = ffn.gate.shape[0]
    count = share_of(f, init.drop_rate)
    index = torch.randperm(f, generator=generator)[:count]
    result = []
    for i, w in enumerate(ffn):
        if i and not init.shared_indices:
            index = torch.randperm(f, generator=generator)[:count]
        dim = 1 if i == 2 else 0
        old = w.index_select(dim, index).float()
        if old.numel():
            std, mean = old.std(correction=0), old.mean()  # `std_mean` takes four times as long
            new = old.normal_(generator=generator).mul_(std).add_(mean)
            w = w.index_copy(dim, index, new.to(w.dtype))
        result.append(w)
    return FFN(*result)


def _random(init: ExpertInit, ffn: FFN, expert: int, n: int, generator: torch.Generator) -> FFN:
    return FFN(*(_normal(w, generator).mul_(init.noise_std) for w in ffn))


def _normal(w: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(w.shape).normal_(generator=generator)


INITIALISATIONS: dict[str, Callable[[ExpertInit, FFN, int, int, torch.Generator], FFN]] = {
    "copy": _copy,
    "noise": _noise,
    "random_noise": _random_noise,
    "subset": _subset,
    "permute": _permute,
    "permute_columns": _permute_columns,
    "drop": _drop,
    "checkpoints": _copy,
    "random": _random,
    "scratch": _random,
}
