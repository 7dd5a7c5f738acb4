"""
A MoE-LoRA adapter and its base to a native MoE checkpoint that computes the same: expert i is the FFN with LoRA i
merged, the gate the router, folded.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftConfig, PeftModel
from peft.utils import load_peft_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..adapter.config import ExpertSpec, MoELoraConfig
from ..routing.routers import make_router
from .families import DENSE_NAME, EMPTY_SHARED, PROJECTIONS, moe_config
from .initialise import FFN, zero_ffn
from .writing import DenseModel, open_dense, parse_dtype, parse_size, write_moe

_PREFIX = "base_model.model."
_MLP = "model.layers.{layer}.mlp"


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
    Write the native MoE that an adapter on its base is. The base may have been quantized in training; its
    full-precision weights are taken here.

    Exact in exact arithmetic; in float32 up to rounding, in a half precision up to that of the weights and the gate.

    Args:
        adapter: a MoE-LoRA adapter's folder, mixing "output", of FFNs with as many experts everywhere and a router that
            folds. LoRAs on single linears with one expert are merged.
        output_dir: a folder that does not exist yet. A run that is killed leaves none.
        base: the base model's folder or name; the one that the adapter names if None.
        family: the MoE's model type; None takes the one that fits.
        dtype: of the weights, by name; None keeps the base's.
        max_shard_size: of the output's files.

    Raises:
        ValueError: what the adapter or the base has that a native MoE cannot hold, by name; nothing is written then.
    """
    config = _read_config(adapter)
    dense = open_dense(_base_name(config, base), family, "export", None if base else config.revision)
    kind = dense.family
    content = _read_adapter(os.fspath(adapter), config, dense)
    spec = content.spec
    moe = moe_config(
        kind,
        dense.config,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        width=dense.config.intermediate_size,
        normalises=spec.normalize_top_k,
        shared_width=EMPTY_SHARED if kind.shared else 0,
        dense_layers=[layer for layer in range(dense.config.num_hidden_layers) if layer not in content.routers],
        caller="export",
    )
    moe.router_aux_loss_coef = config.router_aux_loss_coef
    return write_moe(
        kind,
        moe,
        content,
        [dense.folder, Path(adapter)],
        Path(output_dir),
        parse_dtype(dtype, dense.config, "export"),
        parse_size(max_shard_size, "export"),
        "export",
    )


class Comparison(NamedTuple):
    """Logits of an adapter and of what it was exported to."""

    tokens: int
    largest: float  # logit, by size
    difference: float  # the largest
    agreement: float  # share of tokens whose most probable successor is the same


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
        ValueError: there is no text.
    """
    source = _base_name(_read_config(adapter), base)
    try:
        tokenizer = AutoTokenizer.from_pretrained(os.fspath(exported))
    except (OSError, ValueError) as error:
        raise ValueError(f"export: verify: {exported} has no tokenizer, as adapter and base have none") from error
    ids = [ids for text in texts if (ids := tokenizer(text, return_tensors="pt")["input_ids"]).numel()]
    if not ids:
        raise ValueError("export: verify: no text; give at least one")
    precision = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=precision)
    ours = _logits(PeftModel.from_pretrained(model, os.fspath(adapter)), ids)
    del model
    theirs = _logits(AutoModelForCausalLM.from_pretrained(os.fspath(exported), dtype=precision), ids)
    same = [a.argmax(-1) == b.argmax(-1) for a, b in zip(ours, theirs, strict=True)]
    return Comparison(
        sum(x.shape[1] for x in ids),
        max(float(a.abs().max()) for a in ours),
        max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)),
        float(torch.cat([x.flatten() for x in same]).float().mean()),
    )


@torch.no_grad()
def _logits(model: Any, ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [model.eval()(input_ids=x).logits.float() for x in ids]


@dataclass
class _Adapted:
    """The MoE's content, from the base's tensors and the adapter's."""

    dense: DenseModel
    spec: ExpertSpec
    routers: dict[int, torch.Tensor]
    specs: dict[int, ExpertSpec]
    state: dict[str, torch.Tensor]  # A and B by module, projection and kind; and whole tensors by name
    linears: dict[str, float]  # single linears with an ordinary LoRA: name → scaling

    def backbone(self, name: str) -> torch.Tensor:
        if name in self.state:
            return self.state[name]
        module = name.removesuffix(".weight")
        if module not in self.linears:
            return self.dense.backbone(name)
        return self._merged(self.dense.backbone(name), module, "weight", 0, self.linears[module])

    def router(self, layer: int) -> torch.Tensor:
        return self.routers[layer]

    def experts(self, layer: int) -> Iterator[FFN]:
        names = [DENSE_NAME.format(layer=layer, projection=projection) for projection in PROJECTIONS]
        ffn = FFN(*map(self.backbone, names))
        module = _MLP.format(layer=layer)
        if layer not in self.routers:
            spec = self.specs.get(layer)
            yield ffn if spec is None else self._expert(ffn, module, 0, spec.scaling)
            return
        for expert in range(self.spec.num_experts):
            yield self._expert(ffn, module, expert, self.specs[layer].scaling)

    def shared(self, layer: int) -> FFN:
        return zero_ffn(EMPTY_SHARED, self.dense.config.hidden_size)

    def _expert(self, ffn: FFN, module: str, expert: int, scaling: float) -> FFN:
        pairs = zip(PROJECTIONS, ffn, strict=True)
        return FFN(*(self._merged(weight, module, projection, expert, scaling) for projection, weight in pairs))

    def _merged(self, weight: torch.Tensor, module: str, projection: str, expert: int, scaling: float) -> torch.Tensor:
        """`W + s·B_iᵀ A_i`, float32 or better; W itself where the projection has no experts."""
        A = self.state.get(f"{module}.moe_lora_A.{projection}")
        if A is None:
            return weight
        B = self.state[f"{module}.moe_lora_B.{projection}"]
        return torch.addmm(weight.float(), B[expert].float().T, A[expert].float(), alpha=scaling)


def _read_config(adapter: str | os.PathLike) -> MoELoraConfig:
    try:
        config = PeftConfig.from_pretrained(os.fspath(adapter))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"export: adapter {str(adapter)!r}: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(config, MoELoraConfig):
        raise ValueError(f"export: adapter {str(adapter)!r} is a {config.peft_type} adapter; give a MOE_LORA adapter")
    return config


def _base_name(config: MoELoraConfig, base: str | os.PathLike | None) -> str:
    name = base or config.base_model_name_or_path
    if not name:
        raise ValueError("export: base=None: the adapter names no base model; give it")
    return os.fspath(name)


def _read_adapter(adapter: str, config: MoELoraConfig, dense: DenseModel) -> _Adapted:
    """The adapter's tensors by place, checked against what a native MoE can hold."""
    try:
        loaded = load_peft_weights(adapter, device="cpu")
    except Exception as error:  # safetensors has an exception type of its own
        raise ValueError(f"export: adapter {adapter!r} cannot be read ({error}); save it again") from error
    state = {key.removeprefix(_PREFIX): tensor for key, tensor in loaded.items()}
    layers = {_MLP.format(layer=layer): layer for layer in range(dense.config.num_hidden_layers)}
    shapes = dense.shapes()
    content = _Adapted(dense, config.expert_spec(""), {}, {}, state, {})
    for key, tensor in state.items():
        if not tensor.isfinite().all():
            raise ValueError(f"export: {key} holds NaN or infinity; save the adapter again")
        module, _, kind = key.partition(".moe_lora_")
        matrix, _, projection = kind.partition(".")
        if not kind:  # a module trained and saved whole
            _check_size(key, tuple(tensor.shape), tuple(shapes.get(key, ())))
            continue
        weight = (
            DENSE_NAME.format(layer=layers[module], projection=projection) if module in layers else f"{module}.weight"
        )
        if matrix in ("A", "B"):
            size = shapes.get(weight, (0, 0))[1 if matrix == "A" else 0]
            _check_size(key, (tensor.shape[-1],), (size,) if weight in shapes else ())
        spec = config.expert_spec(module)
        if module in layers:
            content.specs[layers[module]] = spec
        elif spec.num_experts > 1:
            raise ValueError(
                f"export: {module} is a single linear with {spec.num_experts} experts, which no native MoE has; train "
                "it with one (num_experts_pattern)"
            )
        else:
            content.linears[module] = spec.scaling
    _read_routers(content, config)
    return content


def _check_size(key: str, own: tuple[int, ...], place: tuple[int, ...]) -> None:
    if own != place:
        there = f"the base has {list(place)}" if place else "the base has no such place"
        raise ValueError(f"export: {key} has {list(own)}, {there}; give the adapter's own base")


def _read_routers(content: _Adapted, config: MoELoraConfig) -> None:
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
        prefix = f"{_MLP.format(layer=layer)}.moe_lora_router."
        own = {key.removeprefix(prefix): t for key, t in content.state.items() if key.startswith(prefix)}
        settings = spec.router
        if config.router_type == "attention":
            m = config.router_num_heads or spec.num_experts
            settings = dataclasses.replace(settings, attention_size=own["key"].shape[-1] * m)
        router = make_router(d, spec.num_experts, settings)
        router.load_state_dict(own)
        try:
            content.routers[layer] = router.fold()
        except ValueError as error:
            raise ValueError(f"export: {error}") from error
