"""
Model families: how a dense model's tensors are named and laid out in a checkpoint, and how those of a
Mixture-of-Experts (MoE) are. `FAMILIES` says which dense families each MoE family can hold, and the functions at the
end which programs compute one differently from transformers.

To add a family, add one entry to that table; write a small class only if its storage is really new. Names are those on
disk, which transformers, vLLM and other stacks read, not those of transformers' fused parameters in memory.

Legend: n experts, f intermediate size, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedConfig

from ..utils.messages import InputError
from .expert_init import FFN

# The FFN block of a layer, in every dense family of the table.
DENSE_BLOCK = "model.layers.{layer}.mlp"

Reader = Callable[[str], torch.Tensor]  # a tensor by its name on disk


class Content(Protocol):
    """The tensors that a MoE is filled with. They are asked for layer by layer, each one once."""

    def backbone(self, name: str) -> torch.Tensor: ...

    def router(self, layer: int) -> torch.Tensor: ...  # [n, d]

    def experts(self, layer: int) -> Iterator[FFN]: ...  # n of them, or one in a layer without a router

    def shared(self, layer: int) -> FFN: ...  # called only if the family has shared experts


class Part(NamedTuple):
    """A tensor, or the part of it that begins at element `start`."""

    name: str
    tensor: torch.Tensor
    start: int = 0


@dataclass(frozen=True)
class FFNNames:
    """
    The tensors of a gated FFN without biases.

    Args:
        inputs: names of gate [f, d] and up [f, d], or of the one tensor [2f, d] that holds both, gate first.
        down: name of the down projection [d, f].
    """

    inputs: tuple[str, ...]
    down: str

    def under(self, prefix: str) -> FFNNames:
        """The same tensors of the block whose names start with `prefix`."""
        return FFNNames(tuple(prefix + name for name in self.inputs), prefix + self.down)

    def shapes(self, f: int, d: int) -> dict[str, torch.Size]:
        rows = 2 * f // len(self.inputs)
        return {**dict.fromkeys(self.inputs, torch.Size((rows, d))), self.down: torch.Size((d, f))}

    def split(self, read: Reader) -> FFN:
        """The FFN stored under these names."""
        inputs = [read(name) for name in self.inputs]
        gate, up = inputs if len(inputs) == 2 else inputs[0].chunk(2)
        return FFN(gate, up, read(self.down))

    def join(self, ffn: FFN) -> dict[str, torch.Tensor]:
        """The inverse of `split`: the tensors to store, by name."""
        inputs = [ffn.gate, ffn.up] if len(self.inputs) == 2 else [torch.cat((ffn.gate, ffn.up))]
        return {**dict(zip(self.inputs, inputs, strict=True)), self.down: ffn.down}


SEPARATE = FFNNames(("gate_proj.weight", "up_proj.weight"), "down_proj.weight")
FUSED = FFNNames(("gate_up_proj.weight",), "down_proj.weight")


@dataclass(frozen=True)
class DenseFamily:
    """
    A family of dense models whose other tensors and settings are those of its MoE, name by name.

    Args:
        model_type: of its config.
        names: the FFN's tensors within the block.
    """

    model_type: str
    names: FFNNames = SEPARATE

    def ffn(self, layer: int) -> FFNNames:
        """The names of a layer's FFN tensors."""
        return self.names.under(DENSE_BLOCK.format(layer=layer) + ".")

    def ffn_shapes(self, config: PreTrainedConfig) -> dict[str, torch.Size]:
        """The names and shapes of every layer's FFN tensors."""
        return {
            name: shape
            for layer in range(config.num_hidden_layers)
            for name, shape in self.ffn(layer).shapes(config.intermediate_size, config.hidden_size).items()
        }

    def backbone(self, name: str, config: PreTrainedConfig, read: Reader) -> torch.Tensor:
        """The non-FFN tensor that the MoE calls `name`, from the dense model's tensors."""
        return read(name)

    def settings(self, config: PreTrainedConfig) -> dict[str, Any]:
        """The config's fields as a MoE reads them; raises a ValueError where no MoE can hold a field's value."""
        return config.to_dict()


@dataclass(frozen=True)
class Phi3Family(DenseFamily):
    """Phi-3 and Phi-4: a Llama whose queries, keys and values share one tensor, and gate and up another."""

    names: FFNNames = FUSED

    def backbone(self, name: str, config: PreTrainedConfig, read: Reader) -> torch.Tensor:
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
        for i, part in enumerate(("q_proj", "k_proj", "v_proj")):
            if f".self_attn.{part}." in name:
                return read(name.replace(part, "qkv_proj")).split([q, kv, kv])[i]
        return read(name)

    def settings(self, config: PreTrainedConfig) -> dict[str, Any]:
        values = super().settings(config)
        rope = values["rope_parameters"] = dict(values["rope_parameters"])
        if rope["rope_type"] != "default":
            raise InputError(
                f"rope_type={rope['rope_type']!r} of the dense model: no MoE has Phi-3's; use a model with plain RoPE"
            )
        factor = rope.pop("partial_rotary_factor", 1.0)
        if factor != 1:
            raise InputError(f"partial_rotary_factor={factor} of the dense model: a MoE rotates all of a head")
        del values["original_max_position_embeddings"]  # read by longrope alone
        return values


@dataclass(frozen=True)
class MoEFamily:
    """
    A family of MoE models.

    Args:
        model_type: of its config.
        dense: the dense families it can hold.
        block: name of the MoE block in a layer.
        router: name in the block of the router's weight [n, d].
        expert: the tensors of one expert.
        experts: prefix in the block of an expert's tensors, with `{expert}`. Without it, each tensor is stacked
            [n, …] and holds all experts.
        count: config field of n.
        width: config field of an expert's intermediate size.
        normalizes: config field that says whether the chosen gates sum to 1; None if they always do.
        shared: prefix in the block of the shared expert's tensors; None if it has no shared expert. Its gate [1, d] is
            `shared_expert_gate`, and its width `shared_expert_intermediate_size` in the config.
        dense_layers: config field that lists the layers without experts; None if every layer has experts.
        keeps: dense fields that the config class does not declare but the model reads.
    """

    model_type: str
    dense: tuple[DenseFamily, ...]
    block: str = "mlp"
    router: str = "gate.weight"
    expert: FFNNames = SEPARATE
    experts: str = "experts.{expert}."
    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    normalizes: str | None = None
    shared: str | None = None
    dense_layers: str | None = None
    keeps: tuple[str, ...] = ()

    def plan(self, config: PreTrainedConfig, backbone: dict[str, torch.Size]) -> dict[str, torch.Size]:
        """
        The name and shape of every tensor, in the order of the layers.

        Args:
            backbone: those of the tensors outside the MoE blocks.
        """
        plan = {name: shape for name, shape in backbone.items() if not name.startswith("model.layers.")}
        for layer in range(config.num_hidden_layers):
            plan |= {name: shape for name, shape in backbone.items() if name.startswith(f"model.layers.{layer}.")}
            plan |= self._block_shapes(config, layer)
        return plan

    def parts(self, config: PreTrainedConfig, layer: int, content: Content) -> Iterator[Part]:
        """What to write into a layer's block, in any number of parts."""
        block, experts = self._block(layer), content.experts(layer)
        if not self.has_experts(config, layer):
            yield from (Part(*item) for item in self.expert.under(block).join(next(experts)).items())
            return
        yield Part(block + self.router, content.router(layer))
        for i, ffn in enumerate(experts):
            for name, tensor in self._expert(layer, i).join(ffn).items():
                yield Part(name, tensor, i * tensor.numel() if self.stacked else 0)
        if self.shared is not None:
            shared = content.shared(layer)
            yield from (Part(*item) for item in self.expert.under(block + self.shared).join(shared).items())
            # Its gate is a sigmoid, one half at first; llama.cpp takes x·sigmoid(x)/x for it, which is not a number
            # at 0. What multiplies an empty FFN does not matter.
            gate = 1e-6 if shared.down.any() else 1.0
            yield Part(self.shared_gate_name(layer), torch.full((1, config.hidden_size), gate))

    def read_expert(self, layer: int, expert: int, read: Reader) -> FFN:
        """One expert of a MoE's checkpoint."""
        return self._expert(layer, expert).split((lambda name: read(name)[expert]) if self.stacked else read)

    def read_shared(self, layer: int, read: Reader) -> FFN:
        """The shared expert of a MoE's checkpoint."""
        return self.expert.under(f"{self._block(layer)}{self.shared}").split(read)

    def shared_gate_name(self, layer: int) -> str:
        """The tensor of a shared expert's gate."""
        return f"{self._block(layer)}shared_expert_gate.weight"

    def router_name(self, layer: int) -> str:
        """The tensor of a layer's router."""
        return self._block(layer) + self.router

    def expert_names(self, layer: int, expert: int) -> tuple[str, ...]:
        """The tensors of one expert, or, if `stacked`, of all."""
        names = self._expert(layer, expert)
        return (*names.inputs, names.down)

    @property
    def stacked(self) -> bool:
        """Whether each tensor holds all experts."""
        return "{expert}" not in self.experts

    def has_experts(self, config: PreTrainedConfig, layer: int) -> bool:
        """Whether a layer has a router, and experts."""
        if self.dense_layers is None:
            return True
        step = getattr(config, "decoder_sparse_step", 1)
        return layer not in (getattr(config, self.dense_layers) or ()) and (layer + 1) % step == 0

    def _block_shapes(self, config: PreTrainedConfig, layer: int) -> dict[str, torch.Size]:
        n, f, d = getattr(config, self.count), getattr(config, self.width), config.hidden_size
        block = self._block(layer)
        if not self.has_experts(config, layer):
            return self.expert.under(block).shapes(config.intermediate_size, d)
        shapes = {block + self.router: torch.Size((n, d))}
        for i in range(1 if self.stacked else n):
            for name, shape in self._expert(layer, i).shapes(f, d).items():
                shapes[name] = torch.Size((n, *shape)) if self.stacked else shape
        if self.shared is not None:
            shapes |= self.expert.under(block + self.shared).shapes(config.shared_expert_intermediate_size, d)
            shapes[self.shared_gate_name(layer)] = torch.Size((1, d))
        return shapes

    def _block(self, layer: int) -> str:
        return f"model.layers.{layer}.{self.block}."

    def _expert(self, layer: int, expert: int) -> FFNNames:
        return self.expert.under(self._block(layer) + self.experts.format(expert=expert))


FAMILIES: dict[str, MoEFamily] = {
    family.model_type: family
    for family in (
        # Phi-3 does not become a PhiMoE: its norms have biases and its gates do not sum to 1.
        MoEFamily(
            "mixtral",
            (DenseFamily("llama"), DenseFamily("mistral"), Phi3Family("phi3")),
            block="block_sparse_moe",
            expert=FFNNames(("w1.weight", "w3.weight"), "w2.weight"),
            count="num_local_experts",
            width="intermediate_size",
        ),
        MoEFamily(
            "qwen2_moe",
            (DenseFamily("qwen2"),),
            normalizes="norm_topk_prob",
            shared="shared_expert.",
            dense_layers="mlp_only_layers",
        ),
        MoEFamily(
            "qwen3_moe",
            (DenseFamily("qwen3"),),
            normalizes="norm_topk_prob",
            dense_layers="mlp_only_layers",
            keeps=("head_dim",),
        ),
        MoEFamily("flex_olmo", (DenseFamily("olmo2"),), width="intermediate_size", normalizes="norm_topk_prob"),
        MoEFamily(
            "granitemoe",
            (DenseFamily("granite"),),
            block="block_sparse_moe",
            router="router.layer.weight",
            expert=FFNNames(("input_linear.weight",), "output_linear.weight"),
            experts="",
            count="num_local_experts",
            width="intermediate_size",
        ),
    )
}

# Dense families that no MoE family of transformers can hold, although adapters can be trained on them.
_NO_MOE = {
    "glm": "no MoE has its rotary embedding, which pairs neighboring dimensions in half of each head",
    "glm4": "no MoE has its rotary embedding together with norms after attention and FFN",
}


def find_families(dense_type: str, moe_type: str | None = None) -> tuple[DenseFamily, MoEFamily]:
    """
    The dense family of a model type, and the MoE family that holds it.

    Args:
        moe_type: the MoE's model type; None takes the first that fits.
    """
    pairs = [(dense, moe) for moe in FAMILIES.values() for dense in moe.dense]
    for dense, moe in pairs:
        if dense.model_type == dense_type and moe_type in (None, moe.model_type):
            return dense, moe
    choices = ", ".join(f"{dense.model_type} → {moe.model_type}" for dense, moe in pairs)
    why = f" ({_NO_MOE[dense_type]})" if dense_type in _NO_MOE else ""
    field = f"family={moe_type!r}: " if moe_type is not None else ""
    raise InputError(
        f"{field}a {dense_type!r} model does not become {moe_type or 'a native MoE'}{why}; choose from: {choices}"
    )


# --- programs that compute one differently ----------------------------------------------------------------------------
#
# `python -m compatibility.serving` runs them on every family and setting, and raises an error where this and what it
# sees disagree.

# Architectures of llama.cpp that rotate neighboring dimensions of a head; transformers and the others its halves.
INTERLEAVED = ("llama", "granitemoe")

# Model type → architecture of llama.cpp. Qwen2's attention is a Llama's with biases, which its Llama may have.
_ARCHITECTURES = {
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "granitemoe": "granitemoe",
    "flex_olmo": "olmo2",
}  # fmt: skip


def architecture(config: PreTrainedConfig) -> str:
    """The one of llama.cpp for a native MoE; empty: it is not known."""
    if config.model_type == "qwen2_moe" and config.norm_topk_prob:
        return "llama"
    return _ARCHITECTURES.get(config.model_type, "")


def sliding_window(config: PreTrainedConfig) -> int | None:
    """The window, where a layer has one that is shorter than texts may be."""
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    used = window and window < config.max_position_embeddings and (layers is None or "sliding_attention" in layers)
    return window if used else None


def inexact(config: PreTrainedConfig, has_shared: bool = False) -> dict[str, str]:
    """
    The programs that do not compute what the model does, or do not load it, and why.

    Args:
        has_shared: whether its shared experts compute something; an exported Qwen2-MoE's do not.
    """
    if config.model_type not in _ARCHITECTURES:
        return dict.fromkeys(("llama.cpp", "mlx-lm"), f"what it computes for a {config.model_type!r} is not known")
    family, kind, scaling = FAMILIES[config.model_type], config.model_type, config.rope_parameters["rope_type"]
    normalizes = family.normalizes is None or getattr(config, family.normalizes)
    dense = [layer for layer in range(config.num_hidden_layers) if not family.has_experts(config, layer)]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scalings = ("default", "linear", "llama3") if architecture(config) in INTERLEAVED else ("default",)
    llama_cpp = {
        "its OLMo2 has no experts": kind == "flex_olmo",
        f"every layer has experts there, layers {dense} have none": bool(dense),
        f"gates sum to 1 in its Qwen3-MoE, {family.normalizes}=False": kind == "qwen3_moe" and not normalizes,
        "its Qwen3-MoE has no biases of attention": kind == "qwen3_moe" and bool(config.attention_bias),
        f"gates do not sum to 1 beside its shared experts, {family.normalizes}=True": normalizes and has_shared,
        f"rope_type={scaling!r}: exact in its {architecture(config)} are {scalings}": scaling not in scalings,
        f"hidden_act={config.hidden_act!r}: it has SiLU": config.hidden_act not in ("silu", "swish"),
    }
    mlx = {
        "it has no FlexOlmo": kind == "flex_olmo",
        "it ignores norm_topk_prob=True": kind == "qwen2_moe" and normalizes,
        f"it lacks rope_type={scaling!r}": kind in ("mixtral", "qwen2_moe") and scaling != "default",
        "it lacks head_dim": kind == "mixtral" and head_dim != config.hidden_size // config.num_attention_heads,
        "it lacks sliding windows": sliding_window(config) is not None,
    }
    reasons = {"llama.cpp": llama_cpp, "mlx-lm": mlx}
    return {
        engine: next(reason for reason, holds in of_engine.items() if holds)
        for engine, of_engine in reasons.items()
        if any(of_engine.values())
    }
