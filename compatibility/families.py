"""
Which causal language models of the installed transformers the adapter covers: compatibility/results/families.md.

    python -m compatibility.families                      # writes compatibility/results/families.md
    python -m compatibility.families --types opt,jamba    # only prints their rows

Every model type that a causal language model can be made of is made tiny from its default config. Three trials follow,
each on a copy: plain LoRA on all linears, a `MoELoraConfig` with `target_modules=None`, and, if that raises an error,
one on all linears. A trial passes if the loss is finite, every parameter of the adapter gets a gradient, and `unload()`
gives back the model's logits and config. It takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import copy
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftConfig, get_peft_model
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moe_peft import MoELoraConfig
from moe_peft.adapter.layers import MoELoraFFN, MoELoraLinear

IDS = torch.arange(4, 20).view(2, 8)
# The first pattern that matches a config field's name gives its size. Smaller values stay.
SIZES = {
    r"vocab_size": 64,
    r"^(hidden_size|d_model|n_embd|dim|embedding_size|embed_dim|word_embed_proj_dim|lru_width|emb_dim"
    r"|embedding_dim|dim_model)$": 32,
    r"intermediate_size|ffn_dim|^(n_inner|d_ff|dim_ff|dff|ffn_hidden_size)$": 64,
    r"^(num_hidden_layers|n_layers?|num_layers|num_blocks)$|(en|de)coder_layers": 2,
    r"(key_value|attention|kv)_heads$|^(n_heads?|num_heads)$": 4,
    r"head_dim|rotary_dim": 8,
    r"^(q|kv|o)_lora_rank$": 16,
    r"num_(local_|routed_)?experts$|n_routed_experts": 4,
    r"experts_per_tok|^(moe_topk|moe_k|top_k_experts)$": 2,
    r"^(first_k_dense_replace|num_dense_layers)$": 1,
    r"^(n_group|topk_group|num_expert_groups?)$": 1,
    r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|sliding_window)$": 64,
    r"token_id$": 1,
}
# PEFT refuses a Mamba block's `out_proj`; no adapter belongs on a router.
LINEARS = {
    "target_modules": "all-linear",
    "exclude_modules": r".*(out_proj|conv1d|router|gate|pooler|pooler.dense)",
    "task_type": "CAUSAL_LM",
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
# What the sizes do not settle.
SETTINGS: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 4},
    "xlm": {"causal": True, "n_words": 64},
    "xmod": {"default_language": "en_XX"},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.95, 0.0],
        "hidden_size_per_layer_input": 8,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "head_dim": 16},
}
# Dense models with the config class of a MoE.
DENSE = {
    "granitemoehybrid, dense": ("granitemoehybrid", {"num_local_experts": 0}),
    "jamba, one expert": ("jamba", {"num_experts": 1}),
    "llama4_text, dense": ("llama4_text", {"moe_layers": []}),
    "nemotron_h, no MoE layers": ("nemotron_h", {"layer_types": ["mamba", "mlp", "attention"]}),
    "doge, MoE": ("doge", {"is_moe": True, "num_experts": 16}),
    "gemma4_text, MoE": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    ),
}


RESULT = Path(__file__).parent / "results" / "families.md"
# What the adapter does with a model type, and what the table says of it.
OUTCOMES = {
    "FFN": "experts and one router per FFN; Llama, Mistral, Phi-3, Qwen2, Qwen3, OLMo2 and Granite can be exported",
    "linears": (
        "each linear of an FFN gets experts and a router: the FFN's parts stand in the decoder layer; such adapters "
        "cannot be exported"
    ),
    "named linears": "`target_modules=None` raises an error; linears that you name in `target_modules` get experts",
    "MoE already": "raises an error: the model has routed experts of its own",
    "no": "neither FFNs nor all linears work",
}
UNTRIED = "not tried"
INTRODUCTION = """\
# Model families

What `MoELoraConfig` does with each causal language model of transformers {version}.

The columns:

- **LoRA**: whether plain PEFT LoRA on all linears works, for comparison.
- **adapter**: what `MoELoraConfig` with `target_modules=None` does; see the first table.
- **modules, or the reason**: which modules get experts, or why none do.

`python -m compatibility.families` writes this page. It builds a tiny model of each type from its default config and
trains each adapter for one backward pass. A trial passes if the loss includes the balancing
loss, every adapter parameter gets a gradient (on all linears: every one that text passes through), and `unload()`
restores the model's logits and config.
"""


@dataclass(frozen=True)
class Row:
    """One model type: "yes" or the error of plain LoRA, one of `OUTCOMES`, and the modules or the reason."""

    name: str
    lora: str
    adapter: str
    detail: str = ""

    def __str__(self) -> str:
        return f"| {self.name} | {self.lora} | {self.adapter} | {self.detail} |"


def model_types() -> list[str]:
    """The types that stand for a model of their own (others share the class of one of these)."""
    kinds = []
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        model_class = getattr(transformers, name, None) if name.endswith(("CausalLM", "HeadModel", "Decoder")) else None
        if getattr(model_class, "config_class", None) is CONFIG_MAPPING[kind]:
            kinds.append(kind)
    return sorted([*kinds, *DENSE])


def _sizes(config: PreTrainedConfig) -> dict[str, int]:
    small = {}
    for name, value in config.to_dict().items():
        size = next((size for pattern, size in SIZES.items() if re.search(pattern, name)), None)
        if size is not None and isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(value, size)
    return small


def tiny(name: str, **fields: Any) -> PreTrainedModel:
    """
    A model of this type, a few thousand parameters large and with random values everywhere.

    Args:
        fields: further fields of the config.

    Raises:
        Exception: the type's config cannot be made tiny in this way.
    """
    kind, special = DENSE.get(name, (name, {}))
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    parts = {part: getattr(default, part, None) for part in config_class.sub_configs}
    settings = {**_sizes(default), **{part: _sizes(of) for part, of in parts.items() if of is not None}}
    config = config_class(**{**settings, **SETTINGS.get(kind, {}), **special, **fields})
    config.use_cache, config.is_decoder = False, True
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > 4e6:
        raise ValueError(f"{name}: still {count:,} parameters")
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.eval()


def trial(model: PreTrainedModel, config: PeftConfig) -> list[str]:
    """
    Adapt a copy of the model, train it for one backward pass, and unload.

    Returns:
        The names of what has experts (nothing with plain LoRA).

    Raises:
        Exception: something in it failed.
    """
    copied = copy.deepcopy(model)
    with torch.no_grad():
        before, fields = copied(input_ids=IDS).logits, copied.config.to_dict()
    adapted = get_peft_model(copied, config)
    outputs = adapted(input_ids=IDS, labels=IDS)
    if isinstance(config, MoELoraConfig) and outputs.aux_loss is None:
        raise RuntimeError("no balancing loss")
    outputs.loss.backward()
    gradients = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    if config.target_modules is not None:  # among all linears may be some that text alone does not pass through
        gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    bad = [name for name, gradient in gradients.items() if gradient is None or not gradient.isfinite().all()]
    if bad or not gradients:
        raise RuntimeError(f"no finite gradient in {bad[:1]}")
    kinds = (MoELoraFFN, MoELoraLinear)
    names = [name for name, module in adapted.get_base_model().named_modules() if isinstance(module, kinds)]
    plain = adapted.unload()
    with torch.no_grad():
        same = torch.allclose(plain(input_ids=IDS).logits, before, rtol=1e-5, atol=1e-6)
    if not same or plain.config.to_dict() != fields:
        raise RuntimeError("unload() does not give back the model")
    return names


def examine(name: str) -> Row:
    """The row of a model type."""
    try:
        model = tiny(name)
        with torch.no_grad():
            assert model(input_ids=IDS, labels=IDS).loss.isfinite()
    except Exception as error:
        return Row(name, "", UNTRIED, _reason(error))
    try:
        trial(model, LoraConfig(r=2, **LINEARS))
        lora = "yes"
    except Exception as error:
        lora = f"no: {_reason(error)}"
    experts = {"num_experts": 2, "top_k": 1, "r": 2}
    try:
        names = trial(model, MoELoraConfig(**experts, task_type="CAUSAL_LM"))
    except Exception as error:
        if "routed experts" in str(error):
            return Row(name, lora, "MoE already")
        reason = _reason(error)
    else:
        linears = isinstance(model.get_submodule(names[0]), torch.nn.Linear)
        patterns = sorted({re.sub(r"\b\d+\b", "*", path) for path in names})
        return Row(name, lora, "linears" if linears else "FFN", ", ".join(f"`{path}`" for path in patterns))
    try:
        trial(model, MoELoraConfig(**experts, **LINEARS))
    except Exception as error:
        return Row(name, lora, "no", _reason(error))
    return Row(name, lora, "named linears", reason)


def _reason(error: Exception) -> str:
    """What an error says was wrong, without the remedy."""
    text = " ".join(str(error).split()).partition(";")[0]
    text = re.sub(r"^MoELoraConfig: (target_modules=None: )?", "", text)
    return re.sub(r"FFNLayout\(.*\)", "a known layout", text)[:160]


def page(rows: list[Row]) -> str:
    """compatibility/results/families.md."""
    tried = [row for row in rows if row.adapter != UNTRIED]
    lines = [
        INTRODUCTION.format(version=transformers.__version__),
        "| adapter | meaning | model types |",
        "|---|---|---|",
        *(f"| {name} | {text} | {sum(r.adapter == name for r in tried)} |" for name, text in OUTCOMES.items()),
        "",
        '"One expert", "dense" and "no MoE layers" are models without routed experts that have a MoE family\'s config.',
        "",
        "| model type | LoRA | adapter | modules, or the reason |",
        "|---|---|---|---|",
        *map(str, tried),
        "",
        "Not tried, because the script cannot make them tiny or they need more than text: "
        + ", ".join(row.name for row in rows if row.adapter == UNTRIED)
        + ".",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="model types, separated by commas (all)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    names = options.types.split(",") if options.types else model_types()
    rows = []
    for name in names:
        rows.append(examine(name))
        print(rows[-1], flush=True)
    if not options.types:
        RESULT.write_text(page(rows))


if __name__ == "__main__":
    main()
