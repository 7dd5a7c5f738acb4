"""
Dense checkpoints to a native MoE checkpoint, a tensor at a time.

Sources: Sparse Upcycling (Komatsuzaki et al., 2023), Drop-Upcycling (arXiv 2502.19261), fine-grained experts and weight
scaling (He et al., 2024), several checkpoints as experts (Branch-Train-MiX, UpIT).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from .families import EMPTY_SHARED, Family, find_family, moe_config
from .initialise import FFN, ExpertInit, Init, RouterInit, generator_for, router_weight, shard_indices, zero_ffn
from .writing import DenseModel, open_dense, parse_dtype, parse_size, write_moe

_THREADS = 4  # as many FFNs may be in memory
# What models must have in common for their average to make sense.
_SAME = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "rope_parameters", "rms_norm_eps", "hidden_act", "sliding_window", "tie_word_embeddings",
)  # fmt: skip
# What a field may hold, by its default's type.
_KINDS: dict[type, tuple[type, ...]] = {
    int: (int,), float: (float, int), bool: (bool,), str: (str,), type(None): (str, type(None)),
}  # fmt: skip


@dataclass
class UpcycleConfig:
    """
    How a dense model becomes a MoE.

    Args:
        num_experts: n, before they are split (`granularity`).
        top_k: experts per token, before they are split.
        family: the MoE's model type; None takes the one that fits.
        init: initial values of experts, see [`ExpertInit`].
        noise_scale, noise_std, noise_share, drop_rate, shared_indices: its settings.
        granularity: m: every expert is split into m fine ones of f/m neurons, and m·top_k are active. The m parts of an
            expert share their initial gate, so at first they are chosen together.
        num_shared_experts: experts that are always active (Qwen2-MoE).
        weight_scaling: scale up and down projections so that the active experts add up to the dense FFN.
        router_init: initial gates: `"normal"` N(0, 0.02²), `"uniform"` with that deviation, `"zeros"` (all experts tie;
            parts of one are then not chosen together), `"given"`.
        router_weights: for `"given"`, a safetensors file with a tensor [n, d] per layer, named "0", "1", …
        dtype: of the weights; None keeps the model's.
        max_shard_size: of the output's files.
        seed: of everything random. The same seed gives the same bytes.

    Raises:
        ValueError: a field has a value that cannot work; the message names it and the remedy.
    """

    num_experts: int = field(default=8, metadata={"help": "Experts per layer."})
    top_k: int = field(default=2, metadata={"help": "Experts per token."})
    family: str | None = field(default=None, metadata={"help": "Model type of the MoE, e.g. mixtral."})
    init: str = field(default="copy", metadata={"help": f"Experts' initial values: {', '.join(Init.__args__)}."})  # type: ignore[attr-defined]
    noise_scale: float = field(default=0.01, metadata={"help": "noise: deviation, in multiples of the weight's."})
    noise_std: float = field(default=0.02, metadata={"help": "random_noise: deviation."})
    noise_share: float = field(default=0.5, metadata={"help": "random_noise: share of the weights."})
    drop_rate: float = field(default=0.5, metadata={"help": "drop: share of the neurons that are drawn anew."})
    shared_indices: bool = field(default=True, metadata={"help": "drop: the same neurons in gate, up and down."})
    granularity: int = field(default=1, metadata={"help": "Fine experts that each expert is split into."})
    num_shared_experts: int = field(default=0, metadata={"help": "Experts that are always active."})
    weight_scaling: bool = field(default=True, metadata={"help": "Keep the size of the FFN's output."})
    router_init: str = field(default="normal", metadata={"help": f"Gates: {', '.join(RouterInit.__args__)}."})  # type: ignore[attr-defined]
    router_weights: str | None = field(default=None, metadata={"help": "Safetensors file with the given gates."})
    dtype: str | None = field(default=None, metadata={"help": "float32, bfloat16 or float16; default: the model's."})
    max_shard_size: str = field(default="5GB", metadata={"help": "Size of the output's files."})
    seed: int = field(default=0, metadata={"help": "Seed of everything random."})

    def __post_init__(self) -> None:
        for own in fields(self):
            kinds = _KINDS[type(own.default)]
            value = getattr(self, own.name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                self._refuse(own.name, f"must be {' or '.join(kind.__name__ for kind in kinds)}")
        parse_dtype(self.dtype, None, "upcycle")
        parse_size(self.max_shard_size, "upcycle")
        for name in ("num_experts", "top_k", "granularity"):
            if getattr(self, name) < 1:
                self._refuse(name, "use a whole number of at least 1")
        if self.top_k > self.num_experts:
            self._refuse("top_k", f"use at most num_experts={self.num_experts}")
        for name, allowed in (("init", Init), ("router_init", RouterInit)):
            if getattr(self, name) not in allowed.__args__:  # type: ignore[attr-defined]
                self._refuse(name, f"use one of {', '.join(allowed.__args__)}")  # type: ignore[attr-defined]
        for name in ("drop_rate", "noise_share"):
            if not 0 <= getattr(self, name) <= 1:
                self._refuse(name, "use a number from 0 to 1")
        for name in ("noise_scale", "noise_std", "num_shared_experts"):
            if getattr(self, name) < 0:
                self._refuse(name, "must not be negative")
        if (self.router_init == "given") != (self.router_weights is not None):
            self._refuse("router_weights", "goes with router_init='given'")

    def _refuse(self, name: str, remedy: str) -> None:
        raise ValueError(f"upcycle: {name}={getattr(self, name)!r}: {remedy}")


def upcycle(
    models: str | os.PathLike | Sequence[str | os.PathLike],
    output_dir: str | os.PathLike,
    config: UpcycleConfig | None = None,
    router_weights: Mapping[int, torch.Tensor] | None = None,
) -> Path:
    """
    Write the MoE that dense models become: weights, config, tokenizer and generation config.

    Memory: a few times one FFN and the largest other tensor, whatever the models' size.

    Args:
        models: a dense model's folder (or name on the hub), or several of one architecture: expert i then comes from
            the i-th (in turn, where there are fewer than experts), all else is their average.
        output_dir: a folder that does not exist yet. A run that is killed leaves none.
        config: see [`UpcycleConfig`].
        router_weights: layer → given gates [n, d], in place of the file that the config names.

    Raises:
        ValueError: no family holds the models, a setting does not fit, a checkpoint is broken, or `output_dir` exists.
    """
    config = config or UpcycleConfig()
    names = [os.fspath(models)] if isinstance(models, (str, os.PathLike)) else [os.fspath(m) for m in models]
    if config.init == "checkpoints" and len(names) < 2:
        raise ValueError("upcycle: init='checkpoints': give two models or more, or use init='copy'")
    if not names:
        raise ValueError("upcycle: models=[]: give at least one dense model")
    sources = [open_dense(name, config.family, "upcycle") for name in names]
    for source in sources[1:]:
        check_same_architecture(source, sources[0], "upcycle: models")
    dense = sources[0].config
    family, moe = upcycled_config(dense, config)
    given = router_weights if router_weights is not None else _read_routers(config)
    content = _Upcycled(sources, config, given)
    return write_moe(
        family,
        moe,
        content,
        [sources[0].folder],
        Path(output_dir),
        parse_dtype(config.dtype, dense, "upcycle"),
        parse_size(config.max_shard_size, "upcycle"),
        "upcycle",
    )


def upcycled_config(dense: PreTrainedConfig, config: UpcycleConfig) -> tuple[Family, PreTrainedConfig]:
    """
    The MoE's family and config, of a dense model's config.

    Raises:
        ValueError: no family holds it, or a setting does not fit.
    """
    family = find_family(dense.model_type, config.family, "upcycle")
    m, f = config.granularity, dense.intermediate_size
    if f % m:
        raise ValueError(f"upcycle: granularity={m}: must divide the dense model's intermediate_size {f}")
    shared_width = config.num_shared_experts * f
    if family.shared and not shared_width:
        shared_width = EMPTY_SHARED
    moe = moe_config(
        family,
        dense,
        num_experts=config.num_experts * m,
        top_k=config.top_k * m,
        width=f // m,
        shared_width=shared_width,
    )
    return family, moe


class _Upcycled:
    """The MoE's content, made from the dense models' as it is asked for."""

    def __init__(
        self,
        sources: list[DenseModel],
        config: UpcycleConfig,
        routers: Mapping[int, torch.Tensor] | None,
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
        """Made by a few threads, ahead of the writing: drawing random numbers takes longer than writing them."""
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
        """The dense FFN, or the part of one, that each expert is made of; and the expert's index."""
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
        # Gates sum to 1, so m·k fine experts add up to a k·m-th of k whole ones; shared experts add as many again.
        return made.scaled(m / (1 + c.num_shared_experts) if c.weight_scaling else 1.0)

    def shared(self, layer: int) -> FFN:
        c, dense = self.config, self.sources[0].config
        if not c.num_shared_experts:
            return zero_ffn(EMPTY_SHARED, dense.hidden_size)
        ffns = [self.sources[i % len(self.sources)].ffn(layer) for i in range(c.num_shared_experts)]
        wide = FFN(
            torch.cat([x.gate for x in ffns]), torch.cat([x.up for x in ffns]), torch.cat([x.down for x in ffns], 1)
        )
        # The gate of Qwen2-MoE's shared expert is a sigmoid, which is a half at first.
        return wide.scaled(2 / (1 + c.num_shared_experts) if c.weight_scaling else 1.0)


def check_same_architecture(model: DenseModel, other: DenseModel, what: str) -> None:
    """
    Raises:
        ValueError: the models' tensors could not be averaged to one that makes sense.
    """
    ours, theirs = model.config.to_dict(), other.config.to_dict()
    for name in _SAME:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{what}: {model.folder} has another architecture than {other.folder}: {name}={ours.get(name)!r} and "
                f"{theirs.get(name)!r}; give models of one"
            )


def _read_routers(config: UpcycleConfig) -> dict[int, torch.Tensor] | None:
    if config.router_weights is None:
        return None
    try:
        return {int(name): tensor for name, tensor in load_file(config.router_weights).items()}
    except Exception as error:  # safetensors has an exception type of its own
        raise ValueError(
            f"upcycle: router_weights={config.router_weights!r}: {error}; give a safetensors file with tensors named "
            "by their layer"
        ) from error
