"""
Model families: names and layouts of the tensors in checkpoints of dense models and of Mixture-of-Experts (MoE) models.
`FAMILIES` lists the dense families that each MoE family can hold. The functions at the end say which programs compute a
family differently from transformers.

To add a family, add one entry to the table `FAMILIES`. Write a small class only if its storage is really new. Names are
the names on disk, read by transformers, vLLM and other programs. They differ from transformers' fused parameters in
memory.

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

Reader = Callable[[str], torch.Tensor]  # reads a tensor by its name on disk


class Content(Protocol):
    """Tensors of a MoE. The writer asks for them layer by layer, each once."""

    def backbone(self, name: str) -> torch.Tensor: ...

    def router(self, layer: int) -> torch.Tensor: ...  # [n, d]

    def experts(self, layer: int) -> Iterator[FFN]: ...  # n experts, or one FFN in a layer without a router

    def shared(self, layer: int) -> FFN: ...  # called only if the family has shared experts


class Part(NamedTuple):
    """A tensor, or the part of it that begins at element `start`."""

    name: str
    tensor: torch.Tensor
    start: int = 0


@dataclass(frozen=True)
class FFNNames:
    """
    Tensor names of a gated FFN without biases.

    Args:
        inputs: names of gate [f, d] and up [f, d], or of one tensor [2f, d] that holds both, gate first.
        down: name of the down projection [d, f].
    """

    inputs: tuple[str, ...]
    down: str

    def under(self, prefix: str) -> FFNNames:
        """Prepend a block's prefix to the names."""
        return FFNNames(tuple(prefix + name for name in self.inputs), prefix + self.down)

    def shapes(self, f: int, d: int) -> dict[str, torch.Size]:
        rows = 2 * f // len(self.inputs)
        return {**dict.fromkeys(self.inputs, torch.Size((rows, d))), self.down: torch.Size((d, f))}

    def split(self, read: Reader) -> FFN:
        """Read the FFN stored under these names."""
        inputs = [read(name) for name in self.inputs]
        gate, up = inputs if len(inputs) == 2 else inputs[0].chunk(2)
        return FFN(gate, up, read(self.down))

    def join(self, ffn: FFN) -> dict[str, torch.Tensor]:
        """Return the tensors to store, by name: the inverse of `split`."""
        inputs = [ffn.gate, ffn.up] if len(self.inputs) == 2 else [torch.cat((ffn.gate, ffn.up))]
        return {**dict(zip(self.inputs, inputs, strict=True)), self.down: ffn.down}


SEPARATE = FFNNames(("gate_proj.weight", "up_proj.weight"), "down_proj.weight")
FUSED = FFNNames(("gate_up_proj.weight",), "down_proj.weight")


@dataclass(frozen=True)
class DenseFamily:
    """
    A family of dense models. Its MoE has the same names for settings and for tensors outside the FFN.

    Args:
        model_type: the config's model type.
        names: names of the FFN's tensors within the block.
    """

    model_type: str
    names: FFNNames = SEPARATE

    def ffn(self, layer: int) -> FFNNames:
        """Return the names of a layer's FFN tensors."""
        return self.names.under(DENSE_BLOCK.format(layer=layer) + ".")

    def ffn_shapes(self, config: PreTrainedConfig) -> dict[str, torch.Size]:
        """Return the names and shapes of every layer's FFN tensors."""
        return {
            name: shape
            for layer in range(config.num_hidden_layers)
            for name, shape in self.ffn(layer).shapes(config.intermediate_size, config.hidden_size).items()
        }

    def backbone(self, name: str, config: PreTrainedConfig, read: Reader) -> torch.Tensor:
        """Return the non-FFN tensor that the MoE calls `name`, from the dense model's tensors."""
        return read(name)

    def settings(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Return the config's fields in the MoE's format. Raise a ValueError for a value that no MoE can hold."""
        return config.to_dict()


@dataclass(frozen=True)
class Phi3Family(DenseFamily):
    """Phi-3 and Phi-4: a Llama with queries, keys and values in one tensor, and gate and up in another."""

    names: FFNNames = FUSED

    def backbone(self, name: str, config: PreTrainedConfig, read: Reader) -> torch.Tensor:
        # Rows of queries, and of keys or values, in the tensor that holds all three.
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
        # Cut the MoE's tensor out of it. All other tensors have the same name.
        for i, part in enumerate(("q_proj", "k_proj", "v_proj")):
            if f".self_attn.{part}." in name:
                return read(name.replace(part, "qkv_proj")).split([q, kv, kv])[i]
        return read(name)

    def settings(self, config: PreTrainedConfig) -> dict[str, Any]:
        values = super().settings(config)
        # Accept only plain RoPE on the whole head.
        rope = values["rope_parameters"] = dict(values["rope_parameters"])
        if rope["rope_type"] != "default":
            raise InputError(
                f"rope_type={rope['rope_type']!r} of the dense model: no MoE has Phi-3's; use a model with plain RoPE"
            )
        factor = rope.pop("partial_rotary_factor", 1.0)
        if factor != 1:
            raise InputError(f"partial_rotary_factor={factor} of the dense model: a MoE rotates all of a head")
        del values["original_max_position_embeddings"]  # used by longrope only
        return values


@dataclass(frozen=True)
class MoEFamily:
    """
    A family of MoE models.

    Args:
        model_type: the config's model type.
        dense: the dense families it can hold.
        block: name of the MoE block in a layer.
        router: name of the router's weight [n, d] in the block.
        expert: names of one expert's tensors.
        experts: prefix of an expert's tensors in the block, with `{expert}`. Without `{expert}`, each tensor is stacked
            [n, …] and holds all experts.
        count: config field of n.
        width: config field of an expert's intermediate size.
        normalizes: config field that says whether the chosen gates sum to 1; None if they always do.
        shared: prefix of the shared expert's tensors in the block; None if there is no shared expert. Its gate [1, d]
            is `shared_expert_gate`, and its width `shared_expert_intermediate_size` in the config.
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
        Return the name and shape of every tensor, in the order of the layers.

        Args:
            backbone: names and shapes of the tensors outside the MoE blocks.
        """
        # First the tensors outside of layers, then per layer attention and norms, and the MoE block.
        plan = {name: shape for name, shape in backbone.items() if not name.startswith("model.layers.")}
        for layer in range(config.num_hidden_layers):
            plan |= {name: shape for name, shape in backbone.items() if name.startswith(f"model.layers.{layer}.")}
            plan |= self._block_shapes(config, layer)
        return plan

    def parts(self, config: PreTrainedConfig, layer: int, content: Content) -> Iterator[Part]:
        """Yield the tensors of a layer's block. A stacked tensor comes in one part per expert."""
        block, experts = self._block(layer), content.experts(layer)
        # A layer without experts is one dense FFN in the expert's names.
        if not self.has_experts(config, layer):
            yield from (Part(*item) for item in self.expert.under(block).join(next(experts)).items())
            return
        # The router, then each expert. In stacked tensors, expert i begins after i experts.
        yield Part(block + self.router, content.router(layer))
        for i, ffn in enumerate(experts):
            for name, tensor in self._expert(layer, i).join(ffn).items():
                yield Part(name, tensor, i * tensor.numel() if self.stacked else 0)
        if self.shared is not None:
            shared = content.shared(layer)
            yield from (Part(*item) for item in self.expert.under(block + self.shared).join(shared).items())
            # Write the shared expert's gate, a sigmoid that starts at one half. llama.cpp computes it as
            # x·sigmoid(x)/x, which is not a number at 0. If the shared FFN is empty, its gate's value does not matter.
            gate = 1e-6 if shared.down.any() else 1.0
            yield Part(self.shared_gate_name(layer), torch.full((1, config.hidden_size), gate))

    def read_expert(self, layer: int, expert: int, read: Reader) -> FFN:
        """Read one expert from a MoE's checkpoint."""
        return self._expert(layer, expert).split((lambda name: read(name)[expert]) if self.stacked else read)

    def read_shared(self, layer: int, read: Reader) -> FFN:
        """Read the shared expert from a MoE's checkpoint."""
        return self.expert.under(f"{self._block(layer)}{self.shared}").split(read)

    def shared_gate_name(self, layer: int) -> str:
        """Return the tensor name of a shared expert's gate."""
        return f"{self._block(layer)}shared_expert_gate.weight"

    def router_name(self, layer: int) -> str:
        """Return the tensor name of a layer's router."""
        return self._block(layer) + self.router

    def expert_names(self, layer: int, expert: int) -> tuple[str, ...]:
        """Return the tensor names of one expert or, if `stacked`, of all experts."""
        names = self._expert(layer, expert)
        return (*names.inputs, names.down)

    @property
    def stacked(self) -> bool:
        """True if each tensor holds all experts."""
        return "{expert}" not in self.experts

    def has_experts(self, config: PreTrainedConfig, layer: int) -> bool:
        """Return whether a layer has a router and experts."""
        if self.dense_layers is None:
            return True
        # Every `decoder_sparse_step`-th layer has experts, unless it is listed as dense.
        step = getattr(config, "decoder_sparse_step", 1)
        return layer not in (getattr(config, self.dense_layers) or ()) and (layer + 1) % step == 0

    def _block_shapes(self, config: PreTrainedConfig, layer: int) -> dict[str, torch.Size]:
        n, f, d = getattr(config, self.count), getattr(config, self.width), config.hidden_size
        block = self._block(layer)
        if not self.has_experts(config, layer):
            return self.expert.under(block).shapes(config.intermediate_size, d)
        # The router and the experts: one stacked tensor for all, or n separate tensors.
        shapes = {block + self.router: torch.Size((n, d))}
        for i in range(1 if self.stacked else n):
            for name, shape in self._expert(layer, i).shapes(f, d).items():
                shapes[name] = torch.Size((n, *shape)) if self.stacked else shape
        # The shared expert and its gate.
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
        # Phi-3 does not become a PhiMoE: PhiMoE's norms have biases and its gates do not sum to 1.
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

# Dense families that no MoE family of transformers can hold. Adapters can be trained on them.
_NO_MOE = {
    "glm": "no MoE has its rotary embedding, which pairs neighboring dimensions in half of each head",
    "glm4": "no MoE has its rotary embedding together with norms after attention and FFN",
}


def find_families(dense_type: str, moe_type: str | None = None) -> tuple[DenseFamily, MoEFamily]:
    """
    Return the dense family of a model type, and the MoE family that holds it.

    Args:
        moe_type: the MoE's model type; None takes the first match.
    """
    # Take the first pair with these model types.
    pairs = [(dense, moe) for moe in FAMILIES.values() for dense in moe.dense]
    for dense, moe in pairs:
        if dense.model_type == dense_type and moe_type in (None, moe.model_type):
            return dense, moe
    # No pair fits: name all that exist, and the reason if it is known.
    choices = ", ".join(f"{dense.model_type} → {moe.model_type}" for dense, moe in pairs)
    why = f" ({_NO_MOE[dense_type]})" if dense_type in _NO_MOE else ""
    field = f"family={moe_type!r}: " if moe_type is not None else ""
    raise InputError(
        f"{field}a {dense_type!r} model does not become {moe_type or 'a native MoE'}{why}; choose from: {choices}"
    )


# --- programs that compute a family differently -----------------------------------------------------------------------
#
# `python -m compatibility.serving` runs these programs on every family and setting. It raises an error if a result
# disagrees with the functions below.

# Architectures in llama.cpp with rotary embeddings on neighboring dimensions of a head. transformers and llama.cpp's
# other architectures rotate the two halves of a head.
INTERLEAVED = ("llama", "granitemoe")

# Model type → architecture in llama.cpp. Qwen2's attention is Llama's with biases; llama.cpp's Llama may have these.
_ARCHITECTURES = {
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "granitemoe": "granitemoe",
    "flex_olmo": "olmo2",
}  # fmt: skip


def architecture(config: PreTrainedConfig) -> str:
    """Return a native MoE's architecture in llama.cpp, or "" if it is not known."""
    # llama.cpp's Qwen2-MoE does not normalize gates. Its Llama does, and fits a Qwen2-MoE without shared experts.
    if config.model_type == "qwen2_moe" and config.norm_topk_prob:
        return "llama"
    return _ARCHITECTURES.get(config.model_type, "")


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Return the size of the sliding window if a layer has one shorter than the maximum text length, otherwise None."""
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    used = window and window < config.max_position_embeddings and (layers is None or "sliding_attention" in layers)
    return window if used else None


def inexact(config: PreTrainedConfig, has_shared: bool = False) -> dict[str, str]:
    """
    Return program → reason, for programs that cannot load the model or compute it differently from transformers.

    Args:
        has_shared: whether the shared experts compute something; in an exported Qwen2-MoE they do not.
    """
    if config.model_type not in _ARCHITECTURES:
        return dict.fromkeys(("llama.cpp", "mlx-lm"), f"what it computes for a {config.model_type!r} is not known")
    # The settings on which programs differ.
    family, kind, scaling = FAMILIES[config.model_type], config.model_type, config.rope_parameters["rope_type"]
    normalizes = family.normalizes is None or getattr(config, family.normalizes)
    dense = [layer for layer in range(config.num_hidden_layers) if not family.has_experts(config, layer)]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scalings = ("default", "linear", "llama3") if architecture(config) in INTERLEAVED else ("default",)
    # Reason → whether it applies, for each program.
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
    # Keep the first reason of each program that has one.
    reasons = {"llama.cpp": llama_cpp, "mlx-lm": mlx}
    return {
        engine: next(reason for reason, holds in of_engine.items() if holds)
        for engine, of_engine in reasons.items()
        if any(of_engine.values())
    }
