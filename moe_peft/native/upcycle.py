"""
Upcycling of dense checkpoints to a native MoE checkpoint, one tensor at a time.

Sources: Sparse Upcycling (Komatsuzaki et al., 2023), Drop-Upcycling (arXiv 2502.19261) with its fine-grained and shared
experts (appendix C.6), weight scaling (He et al., 2024), several checkpoints as experts (Branch-Train-MiX, UpIT).

Legend: n experts, m granularity, k experts per token, f intermediate size, d hidden size.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel

from ..models.attention_init import attention_gates
from ..models.gate_init import GATE_INITS, dense_gates
from ..utils.io import parse_size, reading
from ..utils.messages import InputError
from .expert_init import (
    FFN,
    ExpertInit,
    generator_for,
    joined,
    router_weight,
    shard_indices,
    zero_ffn,
)
from .families import MoEFamily, find_families
from .folders import DenseFolder, check_same_tokens, open_dense
from .model_folder import parse_dtype, write_moe
from .moe_config import EMPTY_SHARED, moe_config
from .upcycle_config import UpcycleConfig, router_inits

# Config fields that models must share for their average to make sense.
_SAME = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "rope_parameters", "rms_norm_eps", "hidden_act", "sliding_window", "tie_word_embeddings",
    "layer_types", "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
)  # fmt: skip


def needs_calibration(router_init: str) -> bool:
    """Return whether these initial gates are made from data."""
    return router_init == "attention" or router_init in GATE_INITS


def upcycle(
    models: str | os.PathLike | Sequence[str | os.PathLike],
    output_dir: str | os.PathLike,
    config: UpcycleConfig | None = None,
    router_weights: Mapping[int, torch.Tensor] | None = None,
    calibration: Iterable[Mapping[str, Any]] | None = None,
) -> Path:
    """
    Write a MoE made from dense models: weights, config, tokenizer and generation config.

    Memory: a few times one FFN and the largest other tensor, for models of any size. With `router_init="attention"`,
    `"ridge"` or `"prompts"`, a dense model is loaded first.

    Args:
        models: a dense model's folder (or name on the hub), or several of one architecture. Expert i of several models
            comes from model i (in turn, if there are fewer models than experts), and all other weights are averaged.
        output_dir: a new or empty folder. A killed run leaves nothing in it.
        config: see `UpcycleConfig`.
        router_weights: layer → gates, in the shapes of `UpcycleConfig.router_weights`; they replace the gates of
            `router_init`.
        calibration: for a `router_init` from data, batches of `input_ids` [B, S] and, if there is padding,
            `attention_mask` [B, S]. They run through the dense model, so the gates do not depend on the experts. For
            `"ridge"` and `"prompts"` also `expert` [B], see `moe_peft.init_gates`. With several models, they run
            through a model with the mean weights.

    Returns:
        the folder.

    Raises:
        ValueError: no family holds the models, a setting does not fit them, a checkpoint is broken, or `output_dir` is
            neither new nor empty.

    Example:

    ```python
    >>> from moe_peft.native import UpcycleConfig, upcycle
    >>> folder = upcycle(
    ...     "Qwen/Qwen3-0.6B", "moe", UpcycleConfig(num_experts=4, init="drop")
    ... )
    ```
    """
    config = config or UpcycleConfig()
    paths: Any = models if isinstance(models, (list, tuple)) else [models]
    names = [os.fspath(path) for path in paths]
    if config.init == "checkpoints" and len(names) < 2:
        raise InputError("init='checkpoints': give two models or more, or use init='copy'")
    if not 1 <= len(names) <= config.num_experts:
        raise InputError(f"num_experts={config.num_experts}: there are {len(names)} models; ask for at least as many")
    if (calibration is not None) != needs_calibration(config.router_init):
        raise InputError(
            f"router_init={config.router_init!r}: calibration data (calibration=…, --calibration FILE) go with "
            f"router_init={', '.join(map(repr, filter(needs_calibration, router_inits())))}; give both or none"
        )
    sources = [open_dense(name, config.family) for name in names]
    for source in sources[1:]:
        check_same_architecture(source, sources[0])
    family, moe = upcycled_config(sources[0].config, config)
    sources[0].say_untied()
    if router_weights is None and config.router_weights is not None:
        router_weights = _read_routers(config.router_weights)
    elif router_weights is None and calibration is not None:
        router_weights = _calibrated_gates(sources, config, calibration)
    return write_moe(
        output_dir,
        family,
        moe,
        Upcycled(sources, config, router_weights),
        base=sources[0].folder,
        tokenizer=sources[0].folder,
        dtype=sources[0].dtype if config.dtype is None else parse_dtype(config.dtype),
        max_shard_size=parse_size(config.max_shard_size),
        bases=names,
        made=f"`moe-peft upcycle` (initial experts: `{config.init}`, initial gates: `{config.router_init}`); "
        "it is meant to be trained",
    )


def upcycled_config(dense: PreTrainedConfig, config: UpcycleConfig) -> tuple[MoEFamily, PreTrainedConfig]:
    """Return the MoE's family and config, from a dense model's config."""
    families = find_families(dense.model_type, config.family)
    m, f = config.granularity, dense.intermediate_size
    if f % m:
        raise InputError(f"granularity={m}: must divide the dense model's intermediate_size {f}")
    dtype = parse_dtype(config.dtype) if config.dtype else dense.dtype or torch.float32
    if (size := f // m * dtype.itemsize) % 16:
        raise InputError(
            f"granularity={m}: an expert's {f // m} neurons in {str(dtype).removeprefix('torch.')} are rows of {size} "
            "bytes, and transformers' grouped products take multiples of 16; use another granularity or dtype"
        )
    shared = config.num_shared_experts
    if shared and families[1].shared is None:
        raise InputError(
            f"num_shared_experts={shared}: {families[1].model_type} has no shared experts; use 0, or a Qwen2 model"
        )
    moe = moe_config(
        families,
        dense,
        num_experts=config.num_experts * m - shared,
        top_k=config.top_k * m - shared,
        width=f // m,
        shared_width=shared * f // m,
        router_aux_loss_coef=config.router_aux_loss_coef,
    )
    return families[1], moe


def check_same_architecture(model: DenseFolder, other: DenseFolder) -> None:
    """Check that two models' weights can be averaged, and that their tokenizers agree."""
    fields, others = model.config.to_dict(), other.config.to_dict()
    for name in _SAME:
        if fields.get(name) != others.get(name):
            raise InputError(
                f"{model.folder} has a different architecture from {other.folder}: {name}={fields.get(name)!r} and "
                f"{others.get(name)!r}; give models of one architecture"
            )
    if model.has_tokenizer and other.has_tokenizer:
        check_same_tokens(model, other)


def _calibrated_gates(
    sources: Sequence[DenseFolder], config: UpcycleConfig, calibration: Iterable[Mapping[str, Any]]
) -> dict[int, torch.Tensor]:
    """Return layer → gates, made from data in the dense model."""
    attention = config.router_init == "attention"
    if attention and len(sources) > 1:
        raise InputError("router_init='attention': takes one dense model; use another router_init with several")
    dense = sources[0].load() if len(sources) == 1 else mean_model(sources, config.dtype or "auto")
    try:
        if attention:
            gates = attention_gates(dense, calibration, config.num_gates, config.router_num_heads)
        else:
            gates = dense_gates(dense, config.router_init, calibration, config.num_experts)
    except InputError as error:
        settings = f", router_num_heads={config.router_num_heads}" if attention else ""
        raise InputError(f"router_init={config.router_init!r}{settings}: {error}") from error
    return dict(enumerate(gates))


def mean_model(sources: Sequence[DenseFolder], dtype: str = "auto") -> PreTrainedModel:
    """
    Return a dense model with the mean weights of several models of one architecture, rounded as `upcycle` rounds them.
    """
    dense = sources[0].load(dtype)
    for name, parameter in dense.named_parameters():
        parameter.data.copy_(_mean(source.read(name) for source in sources))
    return dense


def _mean(tensors: Iterator[torch.Tensor]) -> torch.Tensor:
    """Average tensors in float64, with one of them in memory at a time."""
    total, count = next(tensors).double(), 1
    for count, tensor in enumerate(tensors, 2):  # noqa: B007
        total += tensor
    return total / count


def _read_routers(path: str) -> dict[int, torch.Tensor]:
    source = f"router_weights={path!r}"
    if not Path(path).is_file():
        raise InputError(f"{source}: no such file")
    with reading(source, "give a safetensors file with tensors named by their layer"):
        return {int(name): tensor for name, tensor in load_file(path).items()}


_THREADS = 4  # also the maximum number of FFNs that wait in memory


class Upcycled:
    """
    Content of an upcycled MoE. Expert i comes from dense model i (in turn, if there are fewer models), and the backbone
    is their average.

    Args:
        sources: dense models of one architecture.
        routers: layer → gates [n, d] or [m·n, d]; None draws them by the config.
    """

    def __init__(
        self, sources: list[DenseFolder], config: UpcycleConfig, routers: Mapping[int, torch.Tensor] | None
    ) -> None:
        self.sources, self.config, self.routers = sources, config, routers
        self.init = ExpertInit(
            config.init,
            config.noise_scale,
            config.noise_std,
            config.noise_share,
            config.drop_rate,
            config.shared_indices,
        )
        self._ahead: Iterator[FFN] = iter(())
        self._ahead_at: int | None = None  # layer of the next experts in `_ahead`
        if routers is not None:
            self._check_routers(routers)

    def _check_routers(self, routers: Mapping[int, torch.Tensor]) -> None:
        dense, config = self.sources[0].config, self.config
        shapes = [(n, dense.hidden_size) for n in sorted({config.num_gates, config.num_experts * config.granularity})]
        if not routers.keys() <= set(range(dense.num_hidden_layers)):
            raise InputError(f"router_weights: layers {sorted(routers)}; there are 0 to {dense.num_hidden_layers - 1}")
        for layer in range(dense.num_hidden_layers):
            shape = tuple(routers[layer].shape) if layer in routers else None
            if shape not in shapes:
                raise InputError(
                    f"router_weights: layer {layer} has {'no tensor' if shape is None else f'shape {shape}'}; give "
                    f"{' or '.join(map(str, shapes))} for every layer"
                )
            if not routers[layer].isfinite().all():
                raise InputError(f"router_weights: layer {layer} holds NaN or infinity; give other weights")

    def backbone(self, name: str) -> torch.Tensor:
        if self.config.init == "scratch":
            like = self.sources[0].backbone(name)
            if like.dim() == 1:  # a norm's weight, or a bias
                return torch.full_like(like, float(not name.endswith("bias")))
            weight = torch.empty(like.shape)
            return weight.normal_(std=self.config.noise_std, generator=generator_for(self.config.seed, name))
        if len(self.sources) == 1:
            return self.sources[0].backbone(name)
        return _mean(source.backbone(name) for source in self.sources)

    def router(self, layer: int) -> torch.Tensor:
        c, d = self.config, self.sources[0].config.hidden_size
        if self.routers is not None:
            weight_ND = self.routers[layer]
        else:
            generator = generator_for(c.seed, layer, "router")
            weight_ND = router_weight(c.router_init, c.num_gates, d, generator, c.router_init_std)  # type: ignore[arg-type]
        parts = c.num_experts * c.granularity // len(weight_ND)
        gates = weight_ND.repeat_interleave(parts, dim=0)[c.num_shared_experts :]
        if parts > 1 and c.num_shared_experts % parts:
            # Not all parts of an expert are active. If their gates tied, each program would choose different parts.
            noise = torch.empty(gates.shape).normal_(generator=generator_for(c.seed, layer, "ties"))
            gates = gates + 0.01 * gates.std() * noise
        return gates

    def experts(self, layer: int) -> Iterator[FFN]:
        """
        Yield the routed experts of a layer. Reading layer by layer is fastest, as the next layer's experts are begun
        early.
        """
        c = self.config
        ahead = self._ahead if self._ahead_at == layer else self._experts_from(layer)
        self._ahead_at = None
        yield from islice(ahead, c.num_experts * c.granularity - c.num_shared_experts)
        self._ahead, self._ahead_at = ahead, layer + 1

    def _experts_from(self, first: int) -> Iterator[FFN]:
        """
        Yield all experts from layer `first` on.

        A few threads make them ahead of the writer, because drawing random numbers takes longer than writing them.
        """
        workers = min(_THREADS, os.cpu_count() or 1)
        pending: deque[Future[FFN]] = deque()
        with ThreadPoolExecutor(workers) as pool:
            for layer in range(first, self.sources[0].config.num_hidden_layers):
                for ffn, index in self._routed(layer):
                    pending.append(pool.submit(self._expert, layer, ffn, index))
                    if len(pending) > workers:
                        yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _routed(self, layer: int) -> Iterator[tuple[FFN, int]]:
        """Yield each routed expert's source, a dense FFN or a part of it, and the expert's index among the m·n."""
        c, m = self.config, self.config.granularity
        for expert in range(c.num_experts):
            if expert == 0 or len(self.sources) > 1:
                ffn = self._source(expert).ffn(layer)
            for index, neurons in enumerate(self._neurons(layer, expert, ffn.gate.shape[0]), expert * m):
                if index >= c.num_shared_experts:  # the first experts are the shared block
                    yield (ffn if m == 1 else ffn.neurons(neurons)), index

    def _neurons(self, layer: int, expert: int, f: int) -> list[torch.Tensor]:
        """Return the neurons of each of an expert's m parts."""
        c, m = self.config, self.config.granularity
        if c.fine_grained_split == "partition":
            return shard_indices(f, m, generator_for(c.seed, layer, expert, "shards"))
        return [
            torch.randperm(f, generator=generator_for(c.seed, layer, expert, "neurons", part))[: f // m]
            for part in range(m)
        ]

    def _expert(self, layer: int, ffn: FFN, index: int) -> FFN:
        c, m = self.config, self.config.granularity
        expert = self.init.make(ffn, index, c.num_experts * m, generator_for(c.seed, layer, index))
        if not c.weight_scaling:
            return expert
        # The active experts are k times as wide as the dense FFN, so each of their neurons should count 1/k. The gates
        # of the m·k - k_s routed experts sum to 1.
        return expert.scaled((m * c.top_k - c.num_shared_experts) / c.top_k)

    def shared(self, layer: int) -> FFN:
        c = self.config
        if not c.num_shared_experts:
            return zero_ffn(EMPTY_SHARED, self.sources[0].config.hidden_size)
        sampled = joined(list(self._sampled(layer)))
        block = self.init.make(sampled, 0, 1, generator_for(c.seed, layer, "shared"))
        gate, up, down = block.scaled(1 / c.top_k if c.weight_scaling else 1.0)
        return FFN(gate, up, 2 * down)  # its gate in a Qwen2-MoE is a sigmoid, one half at first

    def _sampled(self, layer: int) -> Iterator[FFN]:
        """
        Yield the neurons of the shared block: the first k_s parts of the experts' partitions. No neuron occurs twice if
        the block is at most as wide as the dense FFN.
        """
        c, m = self.config, self.config.granularity
        for first in range(0, c.num_shared_experts, m):
            expert = first // m
            ffn = self._source(expert).ffn(layer)
            parts = shard_indices(ffn.gate.shape[0], m, generator_for(c.seed, layer, expert, "shards"))
            yield ffn.neurons(torch.cat(parts[: c.num_shared_experts - first]))

    def _source(self, expert: int) -> DenseFolder:
        return self.sources[expert % len(self.sources)]
