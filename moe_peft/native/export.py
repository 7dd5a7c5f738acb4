"""
Export of a MoE-LoRA adapter and its base model to a native MoE checkpoint that computes the same. Expert i is the base
FFN with LoRA i merged, and the gate is the folded router. `verify_export` compares the two.

Legend: n experts, r rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from ..adapter.config import TOKEN_ROWS, MoELoraConfig, name_in_base, trained_tokens
from ..adapter.experts import EXPERTS, Experts
from ..models.introspection import NAMES_FIELD
from ..routing.routers import make_router
from ..utils.io import parse_size
from ..utils.loading import check_tokenizer
from ..utils.messages import InputError
from .expert_init import FFN, zero_ffn
from .families import DENSE_BLOCK
from .folders import DenseFolder, MoELoraFolder, NativeFolder, expect, open_folder
from .model_folder import EMBEDDINGS, HEAD, parse_dtype, write_moe
from .moe_config import EMPTY_SHARED, moe_config

# --- export ----------------------------------------------------------------------------------------------------------


def export_adapter(
    adapter: str | os.PathLike,
    output_dir: str | os.PathLike,
    base: str | os.PathLike | None = None,
    *,
    family: str | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """
    Write a native MoE that computes the same as an adapter on its base model. If the base model was quantized in
    training, the export reads its full-precision weights.

    The result is exact in exact arithmetic. In float32 it is exact up to rounding, in half precision up to the rounding
    of the weights and the gate.

    Args:
        adapter: folder of a MoE-LoRA adapter with mixing "output", on FFNs with the same number of experts in every
            layer and a router that folds. LoRAs on single linears with one expert are merged.
        output_dir: a new or empty folder. A killed run leaves nothing in it.
        base: the base model's folder or name; None takes the base model named by the adapter.
        family: the MoE's model type; None takes the first match.
        dtype: dtype of the weights, by name; None keeps the base model's.
        max_shard_size: maximum size of an output file.

    Returns:
        the folder.

    Raises:
        ValueError: a native MoE cannot hold some part of the adapter or the base model. The message names it, and
            nothing is written.

    Example:

    ```python
    >>> from moe_peft.native import export_adapter
    >>> folder = export_adapter("my-adapter", "moe")
    ```
    """
    folder = open_folder(adapter, "adapter", MoELoraFolder, base=base)
    content, moe = adapted_moe(folder, family)
    content.dense.say_untied()
    return write_moe(
        output_dir,
        content.dense.moe,
        moe,
        content,
        base=content.dense.folder,
        tokenizer=folder.folder if folder.has_tokenizer else content.dense.folder,
        dtype=content.dense.dtype if dtype is None else parse_dtype(dtype),
        max_shard_size=parse_size(max_shard_size),
        bases=[content.dense.path],
        made="`moe-peft export` from a MoE-LoRA adapter on the base; expert i is the FFN with LoRA i merged",
        eos_token_id=folder.tokenizer.eos_token_id if folder.has_tokenizer else None,
    )


def adapted_moe(adapter: MoELoraFolder, family: str | None = None) -> tuple[Adapted, PreTrainedConfig]:
    """Return the tensors of the MoE, computed when asked for, and its config, from an adapter and its base model."""
    config, dense = adapter.config, expect(adapter.base, DenseFolder).to_moe(family)
    state = _state(adapter)
    _count_added_tokens(state, dense.config)
    adapter.check_tensors()
    content = adapted_content(state, config, dense)
    moe = moe_config(
        (dense.family, dense.moe),
        dense.config,
        num_experts=content.spec.num_experts,
        top_k=content.spec.top_k,
        width=dense.config.intermediate_size,
        normalizes=content.spec.normalize_top_k,
        router_aux_loss_coef=config.router_aux_loss_coef,
        dense_layers=[layer for layer in range(dense.config.num_hidden_layers) if layer not in content.routers],
    )
    if config.expert_names is not None:
        setattr(moe, NAMES_FIELD, config.expert_names)
    return content, moe


def _state(adapter: MoELoraFolder) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors by their names in the base model."""
    return {name_in_base(key): w for key, w in adapter.tensors.items()}


def _count_added_tokens(state: Mapping[str, torch.Tensor], config: PreTrainedConfig) -> None:
    """Increase the base config's vocabulary size to the rows of embeddings saved whole by PEFT for added tokens."""
    if EMBEDDINGS in state:
        config.vocab_size = max(config.vocab_size, len(state[EMBEDDINGS]))


# --- the MoE's tensors -----------------------------------------------------------------------------------------------


class _Update(NamedTuple):
    """The experts' LoRA matrices for one weight."""

    A: torch.Tensor
    B: torch.Tensor
    experts: Experts


@dataclass
class Adapted:
    """Content of a MoE, computed from the base model's and the adapter's tensors."""

    dense: DenseFolder
    spec: Experts = field(init=False)  # of the FFNs with a router
    state: Mapping[str, torch.Tensor]  # the adapter's tensors
    routers: dict[int, torch.Tensor] = field(default_factory=dict)
    specs: dict[int, Experts] = field(default_factory=dict)  # layer → spec of its adapted FFN
    updates: dict[str, _Update] = field(default_factory=dict)  # by the weight's name in the base model
    shared_updates: dict[str, _Update] = field(default_factory=dict)  # likewise, for the experts that serve every token
    rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # likewise, tokens and their rows

    def backbone(self, name: str) -> torch.Tensor:
        return self.dense.family.backbone(name, self.dense.config, lambda key: self._updated(key, self._read(key), 0))

    def router(self, layer: int) -> torch.Tensor:
        return self.routers[layer]

    def experts(self, layer: int) -> Iterator[FFN]:
        names = self.dense.family.ffn(layer)
        weights = {name: self._read(name) for name in (*names.inputs, names.down)}
        for expert in range(self.spec.num_experts if layer in self.routers else 1):
            yield names.split(lambda name, i=expert: self._updated(name, weights[name], i))  # type: ignore[misc]

    def shared(self, layer: int) -> FFN:
        return zero_ffn(EMPTY_SHARED, self.dense.config.hidden_size)

    def _read(self, name: str) -> torch.Tensor:
        """
        Read a weight: the adapter's tensor if it was trained itself, otherwise the base model's with its trained rows.
        """
        weight = self.state[name] if name in self.state else self.dense.read(name)
        if name not in self.rows:
            return weight
        tokens, rows = self.rows[name]
        return weight.index_copy(0, tokens, rows.to(weight.dtype))

    def _updated(self, name: str, weight: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the weight of expert `expert` in float32. A weight without LoRAs is returned unchanged."""
        if name not in self.updates:
            return weight
        A, B, experts = self.updates[name]
        merged = experts.merge(weight, A, B, expert)
        if name in self.shared_updates:
            A, B, _ = self.shared_updates[name]
            merged.addmm_(B[0].T.float(), A[0].float(), alpha=experts.scaling)
        return merged


def adapted_content(state: Mapping[str, torch.Tensor], config: MoELoraConfig, dense: DenseFolder) -> Adapted:
    """
    Sort an adapter's tensors into what its native MoE will hold: updates, token rows, routers. Raise if no native MoE
    computes the adapter, or a tensor is missing, not finite, or of another size.

    Args:
        state: the adapter's tensors, checked, by their names in the base model.
    """
    if reason := EXPERTS[config.expert_type].no_lora:
        raise InputError(f"expert_type={config.expert_type!r}: no native MoE computes this: {reason}")
    content, shapes = Adapted(dense, state), dense.shapes
    layers = {DENSE_BLOCK.format(layer=layer): layer for layer in range(dense.config.num_hidden_layers)}
    for key, tensor in state.items():
        module, _, kind = key.partition(".moe_lora_")
        matrix, _, projection = kind.partition(".")
        if key.endswith(TOKEN_ROWS):
            module = key.removesuffix(TOKEN_ROWS)
            content.rows[f"{module}.weight"] = torch.tensor(trained_tokens(config, module)), tensor
            continue
        if not kind:  # a module trained and saved as a whole, or embeddings, which PEFT saves without being asked
            if tensor.shape != shapes.get(key):
                has = f"the base has {list(shapes[key])}" if key in shapes else "the base has no such tensor"
                raise InputError(f"{key} is {list(tensor.shape)}, {has}; give the adapter's own base")
            continue
        spec = config.expert_spec(module, dense.config)
        if matrix != "router":
            weight = f"{module}.{projection}.weight" if module in layers else f"{module}.weight"
            if module not in layers:
                spec = spec.for_linear()
            if weight not in shapes:
                raise InputError(f"{key}: no native MoE has experts on {module}; leave it out of target_modules")
            if not matrix.endswith("B"):
                updates = content.shared_updates if matrix.startswith("shared_") else content.updates
                updates[weight] = _Update(tensor, state[f"{module}.moe_lora_{matrix[:-1]}B.{projection}"], spec)
        if module in layers:
            content.specs[layers[module]] = spec
        elif spec.num_experts > 1:
            raise InputError(
                f"{module} is a single linear with {spec.num_experts} experts, which no native MoE has; mix "
                "LoRAs with attention='mean', or train it with one (num_experts_pattern)"
            )
    if dense.config.tie_word_embeddings and EMBEDDINGS in content.rows:
        content.rows.setdefault(HEAD, content.rows[EMBEDDINGS])
    _read_routers(content)
    return content


def _read_routers(content: Adapted) -> None:
    routed = {layer: spec for layer, spec in sorted(content.specs.items()) if spec.num_experts > 1}
    if not routed:
        raise InputError("the adapter has no FFN with more than one expert; merge it as a LoRA instead")
    first = content.spec = next(iter(routed.values()))
    d = content.dense.config.hidden_size
    for layer, spec in routed.items():
        if spec.mixing != "output":
            raise InputError(
                f"mixing={spec.mixing!r}: the FFN's non-linearity stands between the experts' updates, so no "
                "native MoE computes this; train with mixing='output'"
            )
        for name in ("num_experts", "top_k"):
            if (here := getattr(spec, name)) != (other := getattr(first, name)):
                raise InputError(
                    f"{name}: layer {layer} has {here}, another {other}; a native MoE has the same in every layer"
                )
        prefix = f"{DENSE_BLOCK.format(layer=layer)}.moe_lora_router."
        state = {key.removeprefix(prefix): t for key, t in content.state.items() if key.startswith(prefix)}
        router = make_router(d, spec.num_experts, spec.router)
        router.load_state_dict(state)
        content.routers[layer] = router.fold(spec.top_k, spec.normalize_top_k)


# --- verify ----------------------------------------------------------------------------------------------------------


# Tolerance for logits, in units of the largest logit, and the share of tokens that must be within it. Rounding now and
# then sends a token to another expert; in float32 only where two experts are tied.
_TOLERANCES = {torch.float32: (1e-3, 0.999), torch.float16: (5e-3, 0.9), torch.bfloat16: (2e-2, 0.9)}


class Comparison(NamedTuple):
    """Logits of an adapter, compared with the logits of its exported model."""

    tokens: int
    largest: float  # absolute value of a logit
    difference: float  # the largest
    agreement: float  # share of tokens for which both predict the same next token
    tolerance: float  # in units of `largest`; it depends on the dtype of the exported weights
    within: float  # share of tokens with logits within the tolerance
    passed: bool  # 999 of 1,000 tokens of a float32 export are within, nine in ten otherwise


def verify_export(
    adapter: str | os.PathLike,
    exported: str | os.PathLike,
    texts: Sequence[str],
    base: str | os.PathLike | None = None,
    dtype: str = "float32",
) -> Comparison:
    """
    Check on some texts that an adapter on its base model and the exported model have equal logits, up to the rounding
    of the exported weights.

    The models are in memory one after the other, in `dtype`.

    Args:
        adapter: the adapter's folder.
        exported: the folder that `export_adapter` wrote.
        texts: the texts to compare on.
        base: the base model, if not the base model named by the adapter.
        dtype: dtype that both compute in: `"float32"`, `"bfloat16"` or `"float16"`.

    Returns:
        the differences of the logits. `passed` is True if they are rounding: 999 of 1,000 tokens of a float32 export
            are within the tolerance, nine in ten of any other export.

    Raises:
        ValueError: there is no text, no tokenizer, no such base or dtype, or `exported` is an adapter.
    """
    folder = open_folder(adapter, "adapter", MoELoraFolder, base=base)
    native = open_folder(exported, "exported", NativeFolder)
    tokenizer = native.tokenizer
    ids = [ids for text in texts if (ids := tokenizer(text, return_tensors="pt")["input_ids"]).numel()]
    if not ids:
        raise InputError("texts: no tokens; give at least one text")
    adapted = _logits(folder.load(dtype, on_accelerator=False), ids)
    expected = _logits(native.load(dtype, on_accelerator=False), ids)
    pairs = list(zip(adapted, expected, strict=True))
    largest = max(float(a.abs().max()) for a in adapted)
    difference = torch.cat([(a - b).abs().amax(-1).flatten() for a, b in pairs])  # of every token
    same = torch.cat([(a.argmax(-1) == b.argmax(-1)).flatten() for a, b in pairs])
    tolerance, share = _TOLERANCES[native.tensors.dtype(EMBEDDINGS)]
    within = float((difference <= tolerance * largest).float().mean())
    return Comparison(
        len(same), largest, float(difference.max()), float(same.float().mean()), tolerance, within, within >= share
    )


def check_verifiable(adapter: str | os.PathLike, base: str | os.PathLike | None = None) -> None:
    """Check, before an adapter is exported, that the exported model will have a tokenizer that fits it."""
    folder = open_folder(adapter, "adapter", MoELoraFolder, base=base)
    _count_added_tokens(_state(folder), folder.base.config)
    check_tokenizer(folder.tokenizer, folder.base.config, folder)


@torch.no_grad()
def _logits(model: Any, ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [model(input_ids=x).logits.float() for x in ids]
