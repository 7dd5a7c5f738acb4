"""
The tensors of the MoE that an adapter on its base is: expert i is the base's FFN with LoRA i merged, the gate is the
router, folded.

A MoE-LoRA adapter and its base to a native MoE checkpoint that computes the same.

Does an exported model compute what its adapter does?
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict

from ..adapter.config import MoELoraConfig
from ..adapter.experts import EXPERTS, Experts
from ..routing.routers import make_router
from ..utils import loading
from ..utils.io import reading
from ..utils.loading import check_tokenizer, read_adapter_weights, read_config, read_model, read_tokenizer
from ..utils.validation import FOLDER, PATH, TEXT, Rule, check
from .expert_init import FFN, zero_ffn
from .families import DENSE_BLOCK
from .model_folder import DenseModel, open_dense, parse_dtype, parse_size, write_moe
from .moe_config import EMPTY_SHARED, moe_config

# --- adapted ---------------------------------------------------------------------------------------------------------


class _Update(NamedTuple):
    """The experts of one weight."""

    A: torch.Tensor
    B: torch.Tensor
    experts: Experts


@dataclass
class Adapted:
    """A MoE's content, from the base's tensors and the adapter's."""

    dense: DenseModel
    spec: Experts = field(init=False)  # of the FFNs that have a router
    state: Mapping[str, torch.Tensor]  # the adapter's tensors
    routers: dict[int, torch.Tensor] = field(default_factory=dict)
    specs: dict[int, Experts] = field(default_factory=dict)  # of each adapted FFN
    updates: dict[str, _Update] = field(default_factory=dict)  # by the weight's name in the base

    def backbone(self, name: str) -> torch.Tensor:
        return self.dense.family.backbone(name, self.dense.config, lambda own: self._updated(own, self._read(own), 0))

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
        """The adapter's tensor where it trained a whole one, otherwise the base's."""
        return self.state[name] if name in self.state else self.dense.read(name)

    def _updated(self, name: str, weight: torch.Tensor, expert: int) -> torch.Tensor:
        """Expert `expert`'s weight, in float32; a weight without LoRAs as it is."""
        if name not in self.updates:
            return weight
        A, B, experts = self.updates[name]
        return experts.merge(weight, A, B, expert)


def adapted_content(state: Mapping[str, torch.Tensor], config: MoELoraConfig, dense: DenseModel) -> Adapted:
    """
    What a MoE is to be filled with, checked against what a native MoE can hold.

    Args:
        state: the adapter's tensors, by their names below the base model.

    Raises:
        ValueError: a tensor is not finite or does not fit the base, or the adapter computes what no native MoE does.
    """
    if reason := EXPERTS[config.expert_type].no_lora:
        raise ValueError(f"export: expert_type={config.expert_type!r}: no native MoE computes this: {reason}")
    content = Adapted(dense, state)
    layers = {DENSE_BLOCK.format(layer=layer): layer for layer in range(dense.config.num_hidden_layers)}
    shapes = dense.shapes()
    for key, tensor in state.items():
        if not tensor.isfinite().all():
            raise ValueError(f"export: {key} holds NaN or infinity; save the adapter again")
        module, _, kind = key.partition(".moe_lora_")
        matrix, _, projection = kind.partition(".")
        if not kind:  # a module that was trained and saved whole
            _check_size(key, tuple(tensor.shape), tuple(shapes.get(key, ())))
            continue
        spec = config.expert_spec(module, dense.config)
        if matrix in ("A", "B"):
            weight = f"{module}.{projection}.weight" if module in layers else f"{module}.weight"
            if module not in layers:
                spec = spec.for_linear()
            features = {projection: (shapes[weight][1], shapes[weight][0])} if weight in shapes else {}
            expected = spec.shapes(features).get(projection, ((), ()))[matrix == "B"]
            _check_size(key, tuple(tensor.shape), expected, "its config and the base say")
            other = f"{module}.moe_lora_{'B' if matrix == 'A' else 'A'}.{projection}"
            if other not in state:
                raise ValueError(f"export: the adapter has {key}, but no {other}; save it again")
            if matrix == "A":
                content.updates[weight] = _Update(tensor, state[other], spec)
        if module in layers:
            content.specs[layers[module]] = spec
        elif spec.num_experts > 1:
            raise ValueError(
                f"export: {module} is a single linear with {spec.num_experts} experts, which no native MoE has; train "
                "it with one (num_experts_pattern)"
            )
    _read_routers(content)
    return content


def _check_size(key: str, own: tuple[int, ...], place: tuple[int, ...], says: str = "the base has") -> None:
    if own != place:
        there = f"{says} {list(place)}" if place else "the base has no such place"
        raise ValueError(f"export: {key} has {list(own)}, {there}; give the adapter's own base")


def _read_routers(content: Adapted) -> None:
    routed = {layer: spec for layer, spec in sorted(content.specs.items()) if spec.num_experts > 1}
    if not routed:
        raise ValueError("export: the adapter has no FFN with more than one expert; merge it as a LoRA instead")
    first = content.spec = next(iter(routed.values()))
    d = content.dense.config.hidden_size
    for layer, spec in routed.items():
        if spec.mixing != "output":
            raise ValueError(
                f"export: mixing={spec.mixing!r}: the FFN's non-linearity stands between the experts' updates, so no "
                "native MoE computes this; train with mixing='output'"
            )
        if (spec.num_experts, spec.top_k) != (first.num_experts, first.top_k):
            raise ValueError(
                f"export: num_experts: layer {layer} has {spec.num_experts}, another {first.num_experts}; a native MoE "
                "has as many in every layer"
            )
        prefix = f"{DENSE_BLOCK.format(layer=layer)}.moe_lora_router."
        own = {key.removeprefix(prefix): t for key, t in content.state.items() if key.startswith(prefix)}
        router = make_router(d, spec.num_experts, spec.router)
        with reading(f"export: {prefix}* do not fit the config", "use the config that the adapter was saved with"):
            router.load_state_dict(own)
        try:
            content.routers[layer] = router.fold(spec.top_k, spec.normalize_top_k)
        except ValueError as error:
            raise ValueError(f"export: {error}") from error


# --- export ----------------------------------------------------------------------------------------------------------

_PREFIX = "base_model.model."


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
    Write the native MoE that computes what an adapter on its base computes. The base may have been quantized in
    training; the export reads its full-precision weights.

    The result is exact in exact arithmetic. In float32 it is exact up to rounding, in half precision up to the rounding
    of the weights and the gate.

    Args:
        adapter: folder of a MoE-LoRA adapter with mixing "output", on FFNs with the same number of experts in every
            layer and a router that folds. LoRAs on single linears with one expert are merged.
        output_dir: a folder that does not exist yet. A killed run leaves none.
        base: the base model's folder or name; None takes the one that the adapter names.
        family: the MoE's model type; None takes the one that fits.
        dtype: of the weights, by name; None keeps the base's.
        max_shard_size: of the output's files.

    Raises:
        ValueError: the adapter or the base has something that a native MoE cannot hold; the message names it, and
            nothing is written.
    """
    check("export", adapter=(adapter, PATH), output_dir=(output_dir, FOLDER))
    config = read_adapter_config(adapter)
    source = base_name(config, base)
    dense = open_dense(source, family, "export", None if base else config.revision)
    content = adapted_content(_read_adapter(adapter), config, dense)
    _check_complete(content.state, config, dense)
    moe = moe_config(
        (dense.family, dense.moe),
        dense.config,
        num_experts=content.spec.num_experts,
        top_k=content.spec.top_k,
        width=dense.config.intermediate_size,
        normalises=content.spec.normalize_top_k,
        router_aux_loss_coef=config.router_aux_loss_coef,
        dense_layers=[layer for layer in range(dense.config.num_hidden_layers) if layer not in content.routers],
        caller="export",
    )
    return write_moe(
        dense.moe,
        moe,
        content,
        [dense.folder, Path(adapter)],
        Path(output_dir),
        parse_dtype(dtype, dense, "export"),
        parse_size(max_shard_size, "export"),
        "export",
        [source],
        "`moe-peft export` from a MoE-LoRA adapter on the base; expert i is the FFN with LoRA i merged",
        _end(adapter),
    )


def _end(adapter: str | os.PathLike) -> int | None:
    """The end token of the tokenizer beside the adapter, which the training may have changed."""
    if not Path(adapter, "tokenizer_config.json").is_file():
        return None
    return loading.read_tokenizer(adapter, f"export: adapter {str(adapter)!r}").eos_token_id


def _check_complete(state: Mapping[str, torch.Tensor], config: MoELoraConfig, dense: DenseModel) -> None:
    """Raise if the adapter's file lacks a tensor that its config asks for: the base's would stand in its place."""
    empty = loading.empty_model(dense.config, f"export: model {str(dense.folder)!r}")
    with reading("export: adapter_config.json does not fit the base"), torch.device("meta"):
        model = get_peft_model(empty, copy.deepcopy(config))
    for key in get_peft_model_state_dict(model, save_embedding_layers=False):
        name = key.removeprefix(_PREFIX)
        if name not in state and ".moe_lora_router." not in name:  # which are read by now
            raise ValueError(f"export: the adapter lacks {name}, which its config asks for; save it again")


def read_adapter_config(adapter: str | os.PathLike, caller: str = "export") -> MoELoraConfig:
    """
    Raises:
        ValueError: the folder holds no config, or that of another adapter type.
    """
    check(caller, adapter=(adapter, PATH))
    config = loading.read_adapter_config(adapter, f"{caller}: adapter {str(adapter)!r}")
    if not isinstance(config, MoELoraConfig):
        raise ValueError(f"{caller}: adapter {str(adapter)!r} is a {config.peft_type} adapter; give a MOE_LORA adapter")
    return config


def base_name(config: MoELoraConfig, base: str | os.PathLike | None) -> str:
    """
    The given base model, or the one that the adapter names.

    Raises:
        ValueError: there is neither.
    """
    check("export", base=(base, PATH.or_none()))
    name = config.base_model_name_or_path if base is None else base
    if not name:
        raise ValueError("export: base=None: the adapter names no base model; give it")
    return os.fspath(name)


def _read_adapter(adapter: str | os.PathLike) -> dict[str, torch.Tensor]:
    """The adapter's tensors, by their names below the base model."""
    loaded = loading.read_adapter_weights(adapter, f"export: adapter {str(adapter)!r}")
    return {key.removeprefix(_PREFIX): tensor for key, tensor in loaded.items()}


# --- verify ----------------------------------------------------------------------------------------------------------

_TEXTS = Rule(
    lambda v: isinstance(v, (list, tuple)) and all(isinstance(text, str) for text in v), "give a list of texts"
)


class Comparison(NamedTuple):
    """Logits of an adapter compared with those of the model it was exported to."""

    tokens: int
    largest: float  # absolute value of a logit
    difference: float  # the largest
    agreement: float  # share of tokens for which both predict the same next token


def verify_export(
    adapter: str | os.PathLike,
    exported: str | os.PathLike,
    texts: Sequence[str],
    base: str | os.PathLike | None = None,
    dtype: str = "float32",
) -> Comparison:
    """
    Compare the logits of an adapter on its base with those of the exported model, on some texts.

    The models are in memory one after the other, in `dtype`.

    Raises:
        ValueError: there is no text, no tokenizer, no such base or dtype, or `exported` is an adapter.
    """
    check("export: verify", exported=(exported, PATH), texts=(texts, _TEXTS), dtype=(dtype, TEXT))
    precision = parse_dtype(dtype, None, "export: verify")
    config = read_adapter_config(adapter)
    source, revision = base_name(config, base), None if base else config.revision
    if (Path(exported) / "adapter_config.json").is_file():
        raise ValueError(f"export: verify: exported={os.fspath(exported)!r}: this is an adapter; give the export")
    read_adapter_weights(adapter, f"export: adapter {os.fspath(adapter)!r}")  # PEFT would take a pickled file
    tokenizer = read_tokenizer(exported, f"export: verify: {exported}")
    check_tokenizer(tokenizer, read_config(exported, f"export: verify: {exported}"), f"export: verify: {exported}")
    ids = [ids for text in texts if (ids := tokenizer(text, return_tensors="pt")["input_ids"]).numel()]
    if not ids:
        raise ValueError("export: verify: no text; give at least one")
    model = read_model(source, f"export: base {source!r}", revision=revision, dtype=precision)
    ours = _logits(PeftModel.from_pretrained(model, os.fspath(adapter)), ids)
    del model
    theirs = _logits(read_model(exported, f"export: verify: {exported}", dtype=precision), ids)
    same = [a.argmax(-1) == b.argmax(-1) for a, b in zip(ours, theirs, strict=True)]
    return Comparison(
        sum(x.shape[1] for x in ids),
        max(float(a.abs().max()) for a in ours),
        max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)),
        float(torch.cat([x.flatten() for x in same]).float().mean()),
    )


def check_verifiable(adapter: str | os.PathLike, base: str | os.PathLike | None = None) -> None:
    """
    Whether the export of an adapter will have a tokenizer that fits it; before it is written.

    Raises:
        ValueError: neither the adapter nor its base has one, or it has more tokens than the base has embeddings.
    """
    config = read_adapter_config(adapter)
    source = base_name(config, base)
    revision = None if base else config.revision
    own = (Path(adapter) / "tokenizer_config.json").is_file()
    what = f"export: verify: {os.fspath(adapter if own else source)!r}"
    tokenizer = read_tokenizer(adapter, what) if own else read_tokenizer(source, what, revision)
    check_tokenizer(tokenizer, read_config(source, f"export: base {source!r}", revision), what)


@torch.no_grad()
def _logits(model: Any, ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [model.eval()(input_ids=x).logits.float() for x in ids]
