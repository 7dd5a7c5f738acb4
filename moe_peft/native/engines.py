"""
Which programs compute a native MoE differently from transformers. `python -m compatibility.serving` runs them on every
family and setting, and raises an error where this and what it sees disagree.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from .families import FAMILIES

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
