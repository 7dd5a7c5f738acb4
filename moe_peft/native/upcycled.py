"""
The tensors of an upcycled MoE, computed from dense models' as they are asked for.

Sources: Sparse Upcycling (Komatsuzaki et al., 2023), Drop-Upcycling (arXiv 2502.19261), fine-grained experts and weight
scaling (He et al., 2024), several checkpoints as experts (Branch-Train-MiX, UpIT).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from .config import UpcycleConfig
from .initialise import FFN, ExpertInit, generator_for, router_weight, shard_indices, zero_ffn
from .moe_config import EMPTY_SHARED
from .writing import DenseModel

_THREADS = 4  # also the number of FFNs that may wait in memory


class Upcycled:
    """
    A MoE's content: expert i comes from the i-th dense model (in turn, where there are fewer), the backbone is their
    average.

    Args:
        sources: dense models of one architecture.
        routers: layer → given gates [n, d]; None draws them as the config says.

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
        if routers is not None:
            self._check_routers(routers)

    def _check_routers(self, routers: Mapping[int, torch.Tensor]) -> None:
        dense = self.sources[0].config
        for layer in range(dense.num_hidden_layers):
            shape = (self.config.num_experts, dense.hidden_size)
            if layer in routers and not routers[layer].isfinite().all():
                raise ValueError(f"upcycle: router_weights: layer {layer} holds NaN or infinity; give other ones")
            if layer not in routers or tuple(routers[layer].shape) != shape:
                has = f"shape {tuple(routers[layer].shape)}" if layer in routers else "no tensor"
                raise ValueError(f"upcycle: router_weights: layer {layer} has {has}; give {shape} for every layer")

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
            weight_ND = router_weight(c.router_init, c.num_experts, d, generator)  # type: ignore[arg-type]
        return weight_ND.repeat_interleave(c.granularity, dim=0)

    def experts(self, layer: int) -> Iterator[FFN]:
        """Made by a few threads ahead of the writing, since drawing random numbers takes longer than writing them."""
        workers = min(_THREADS, os.cpu_count() or 1)
        pending: deque[Future[FFN]] = deque()
        with ThreadPoolExecutor(workers) as pool:
            for ffn, place in self._parts(layer):
                pending.append(pool.submit(self._expert, layer, ffn, place))
                if len(pending) > workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _parts(self, layer: int) -> Iterator[tuple[FFN, int]]:
        """The dense FFN that each expert is made from, or the part of one, and the expert's index."""
        c, m = self.config, self.config.granularity
        for expert in range(c.num_experts):
            if expert == 0 or len(self.sources) > 1:
                ffn = self.sources[expert % len(self.sources)].ffn(layer)
            shards = shard_indices(ffn.gate.shape[0], m, generator_for(c.seed, layer, expert, "shards"))
            for part, index in enumerate(shards):
                yield (ffn if m == 1 else ffn.neurons(index)), expert * m + part

    def _expert(self, layer: int, ffn: FFN, place: int) -> FFN:
        c, m = self.config, self.config.granularity
        made = self.init.make(ffn, place, c.num_experts * m, generator_for(c.seed, layer, place))
        # Gates sum to 1, so m·k fine-grained experts add up to an m-th of the FFN; shared experts add the FFN again.
        return made.scaled(m / (1 + c.num_shared_experts) if c.weight_scaling else 1.0)

    def shared(self, layer: int) -> FFN:
        c, dense = self.config, self.sources[0].config
        if not c.num_shared_experts:
            return zero_ffn(EMPTY_SHARED, dense.hidden_size)
        ffns = [self.sources[i % len(self.sources)].ffn(layer) for i in range(c.num_shared_experts)]
        wide = FFN(
            torch.cat([x.gate for x in ffns]), torch.cat([x.up for x in ffns]), torch.cat([x.down for x in ffns], 1)
        )
        # The gate of Qwen2-MoE's shared expert is a sigmoid, which is one half at first.
        return wide.scaled(2 / (1 + c.num_shared_experts) if c.weight_scaling else 1.0)
