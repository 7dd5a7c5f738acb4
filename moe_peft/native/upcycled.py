"""
The tensors of an upcycled MoE, computed from dense models' as they are asked for.

Sources: Sparse Upcycling (Komatsuzaki et al., 2023), Drop-Upcycling (arXiv 2502.19261) with its fine-grained and shared
experts (appendix C.6), weight scaling (He et al., 2024), several checkpoints as experts (Branch-Train-MiX, UpIT).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch

from .config import UpcycleConfig
from .initialise import FFN, ExpertInit, generator_for, joined, router_weight, shard_indices, zero_ffn
from .moe_config import EMPTY_SHARED
from .writing import DenseModel

_THREADS = 4  # also the number of FFNs that may wait in memory


class Upcycled:
    """
    A MoE's content: expert i comes from the i-th dense model (in turn, where there are fewer), the backbone is their
    average.

    Args:
        sources: dense models of one architecture.
        routers: layer → given gates [n, d] or [m·n, d]; None draws them as the config says.

    Raises:
        ValueError: given gates are missing in a layer, have another shape, or hold NaN or infinity.
    """

    def __init__(
        self, sources: list[DenseModel], config: UpcycleConfig, routers: Mapping[int, torch.Tensor] | None
    ) -> None:
        self.sources, self.config, self.routers = sources, config, routers
        self.init = ExpertInit(
            config.init,  # type: ignore[arg-type]
            config.noise_scale,
            config.noise_std,
            config.noise_share,
            config.drop_rate,
            config.shared_indices,
        )
        self._ahead: Iterator[FFN] = iter(())
        self._ahead_at: int | None = None  # the layer whose experts come next in it
        if routers is not None:
            self._check_routers(routers)

    def _check_routers(self, routers: Mapping[int, torch.Tensor]) -> None:
        dense, c = self.sources[0].config, self.config
        shapes = [(n, dense.hidden_size) for n in sorted({c.num_gates, c.num_experts * c.granularity})]
        wanted = " or ".join(map(str, shapes))
        if c.num_gates > c.num_experts:
            wanted += f", a gate for each fine-grained expert with fine_grained_split={c.fine_grained_split!r},"
        for layer, weight in routers.items():
            if layer not in range(dense.num_hidden_layers):
                raise ValueError(
                    f"upcycle: router_weights: no layer {layer!r}; give 0 to {dense.num_hidden_layers - 1}"
                )
            if not (isinstance(weight, torch.Tensor) and weight.is_floating_point()):
                raise ValueError(f"upcycle: router_weights: layer {layer} is no tensor of floats; give {wanted}")
        for layer in range(dense.num_hidden_layers):
            if layer in routers and not routers[layer].isfinite().all():
                raise ValueError(f"upcycle: router_weights: layer {layer} holds NaN or infinity; give other ones")
            if layer not in routers or tuple(routers[layer].shape) not in shapes:
                has = f"shape {tuple(routers[layer].shape)}" if layer in routers else "no tensor"
                raise ValueError(f"upcycle: router_weights: layer {layer} has {has}; give {wanted} for every layer")

    def backbone(self, name: str) -> torch.Tensor:
        if len(self.sources) == 1:
            return self.sources[0].backbone(name)
        total = self.sources[0].backbone(name).double()
        for source in self.sources[1:]:
            total += source.backbone(name)
        return total / len(self.sources)

    def router(self, layer: int) -> torch.Tensor:
        c, d = self.config, self.sources[0].config.hidden_size
        if self.routers is not None:
            weight_ND = self.routers[layer]
        else:
            generator = generator_for(c.seed, layer, "router")
            weight_ND = router_weight(c.router_init, c.num_gates, d, generator, c.router_init_std)  # type: ignore[arg-type]
        parts = c.num_experts * c.granularity // len(weight_ND)
        return weight_ND.repeat_interleave(parts, dim=0)[c.num_shared_experts :]

    def experts(self, layer: int) -> Iterator[FFN]:
        """The routed experts of a layer. Quickest for one layer after the other, as the next one's are begun early."""
        c = self.config
        ahead = self._ahead if self._ahead_at == layer else self._experts_from(layer)
        self._ahead_at = None
        yield from islice(ahead, c.num_experts * c.granularity - c.num_shared_experts)
        self._ahead, self._ahead_at = ahead, layer + 1

    def _experts_from(self, first: int) -> Iterator[FFN]:
        """
        All experts from a layer on, made by a few threads ahead of the writing: drawing random numbers takes longer
        than writing them.
        """
        workers = min(_THREADS, os.cpu_count() or 1)
        pending: deque[Future[FFN]] = deque()
        with ThreadPoolExecutor(workers) as pool:
            for layer in range(first, self.sources[0].config.num_hidden_layers):
                for ffn, place in self._routed(layer):
                    pending.append(pool.submit(self._expert, layer, ffn, place))
                    if len(pending) > workers:
                        yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _routed(self, layer: int) -> Iterator[tuple[FFN, int]]:
        """The dense FFN that each routed expert is made from, or the part of one, and its place among the m·n."""
        c, m = self.config, self.config.granularity
        for expert in range(c.num_experts):
            if expert == 0 or len(self.sources) > 1:
                ffn = self._source(expert).ffn(layer)
            for place, index in enumerate(self._neurons(layer, expert, ffn.gate.shape[0]), expert * m):
                if place >= c.num_shared_experts:  # the first ones are the shared block
                    yield (ffn if m == 1 else ffn.neurons(index)), place

    def _neurons(self, layer: int, expert: int, f: int) -> list[torch.Tensor]:
        """The neurons of each of the m parts of an expert."""
        c, m = self.config, self.config.granularity
        if c.fine_grained_split == "partition":
            return shard_indices(f, m, generator_for(c.seed, layer, expert, "shards"))
        return [
            torch.randperm(f, generator=generator_for(c.seed, layer, expert, "neurons", part))[: f // m]
            for part in range(m)
        ]

    def _expert(self, layer: int, ffn: FFN, place: int) -> FFN:
        c, m = self.config, self.config.granularity
        made = self.init.make(ffn, place, c.num_experts * m, generator_for(c.seed, layer, place))
        if not c.weight_scaling:
            return made
        # The active experts are k times as wide as the dense FFN, so each of their neurons should count 1/k. The gates
        # of the m·k - k_s routed ones sum to 1. Added shared experts are the FFN again, once each.
        return made.scaled((m * c.top_k - c.num_shared_experts) / c.top_k / (1 + c.num_added_shared_experts))

    def shared(self, layer: int) -> FFN:
        c = self.config
        if c.num_added_shared_experts:
            block = joined([self._source(i).ffn(layer) for i in range(c.num_added_shared_experts)])
            factor = 1 / (1 + c.num_added_shared_experts)
        elif c.num_shared_experts:
            sampled = joined(list(self._sampled(layer)))
            block = self.init.make(sampled, 0, 1, generator_for(c.seed, layer, "shared"))
            factor = 1 / c.top_k
        else:
            return zero_ffn(EMPTY_SHARED, self.sources[0].config.hidden_size)
        gate, up, down = block.scaled(factor if c.weight_scaling else 1.0)
        return FFN(gate, up, 2 * down)  # its gate in a Qwen2-MoE is a sigmoid, which is one half at first

    def _sampled(self, layer: int) -> Iterator[FFN]:
        """
        The neurons of the shared block: those of the first k_s parts of the experts' partitions. No neuron is in it
        twice while it is no wider than the dense FFN.
        """
        c, m = self.config, self.config.granularity
        for first in range(0, c.num_shared_experts, m):
            expert = first // m
            ffn = self._source(expert).ffn(layer)
            parts = shard_indices(ffn.gate.shape[0], m, generator_for(c.seed, layer, expert, "shards"))
            yield ffn.neurons(torch.cat(parts[: c.num_shared_experts - first]))

    def _source(self, expert: int) -> DenseModel:
        return self.sources[expert % len(self.sources)]
