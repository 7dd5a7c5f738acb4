"""
vLLM plugin: serves a MoE-LoRA adapter on its base model, `vllm serve ./my-adapter`, without an export.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). For the engine, the adapter is a
base model with overrides of its config: an architecture of `vllm_models`, the adapter's folder, and a digest of the
adapter. The digest makes the adapter part of vLLM's key for compiled models.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.messages import InputError

if TYPE_CHECKING:
    from ..native.folders import MoELoraFolder

ADAPTER_FIELD = "moe_lora_adapter"  # field of the model's config: the adapter's folder
DIGEST_FIELD = "moe_lora_digest"  # field of the model's config: `adapter_digest` of the adapter
PREFIX = "MoELora"  # prefix of our architectures' names
# Architectures of supported base models. `vllm_models` makes their classes.
ARCHITECTURES = (
    "CohereForCausalLM", "Cohere2ForCausalLM", "Exaone4ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "Glm4ForCausalLM", "GraniteForCausalLM", "LlamaForCausalLM", "MistralForCausalLM",
    "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
)  # fmt: skip
# Modules that may have experts: an FFN, or any linear of an FFN or an attention.
_SERVED = re.compile(r"model\.layers\.\d+\.(mlp|(mlp|self_attn)\.\w+)")


def register() -> None:
    """Register our architectures, and let vLLM load the folder of a MoE-LoRA adapter as a model."""
    from vllm import ModelRegistry
    from vllm.engine.arg_utils import EngineArgs

    for architecture in ARCHITECTURES:
        name = PREFIX + architecture
        ModelRegistry.register_model(name, f"moe_peft.serving.vllm_models:{name}")

    create = getattr(EngineArgs, "create_engine_config", None)
    if create is None:  # another version of vLLM; docs/serving.md has the equivalent arguments
        return

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = find_moe_lora(self.model)
        if adapter is not None:
            use_base(self, adapter)
        return create(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def find_moe_lora(model: str) -> MoELoraFolder | None:
    """Return the MoE-LoRA adapter in a folder; None for any other folder or a name on the hub."""
    if not Path(model).is_dir():
        return None
    from ..native.folders import MoELoraFolder, find_adapter

    adapter = find_adapter(model, "adapter")
    return adapter if isinstance(adapter, MoELoraFolder) else None


def use_base(engine: Any, adapter: MoELoraFolder) -> None:
    """Replace an adapter's folder in vLLM's engine arguments by its base and the overrides that add the adapter."""
    adapter.remedy = "set it in the adapter's config"
    check_served(adapter, engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.enable_lora)
    adapter.check_tensors()
    (architecture,) = adapter.base.config.architectures
    if not isinstance(engine.hf_overrides, dict):
        raise InputError("hf_overrides: a function; with an adapter's folder as the model, give a dictionary")
    engine.hf_overrides = {
        **engine.hf_overrides,
        "architectures": [f"{PREFIX}{architecture}"],
        ADAPTER_FIELD: os.path.abspath(adapter.path),
        DIGEST_FIELD: adapter_digest(adapter),
    }
    if engine.tokenizer is None and adapter.has_tokenizer:
        engine.tokenizer = _tokenizer_folder(adapter)  # training may have changed its chat template and EOS token
    engine.served_model_name = engine.served_model_name or adapter.path
    engine.model, engine.revision = adapter.base.path, adapter.base.revision


_folders: list[tempfile.TemporaryDirectory] = []  # kept until the process ends


def _tokenizer_folder(adapter: MoELoraFolder) -> str:
    """
    Make a folder with the adapter's tokenizer and the base's config. Return its path. For a tokenizer without a config,
    vLLM logs errors.
    """
    _folders.append(tempfile.TemporaryDirectory())
    folder = Path(_folders[-1].name)
    for file in adapter.folder.iterdir():
        if file.is_file() and not file.name.startswith("adapter_"):
            (folder / file.name).symlink_to(file.resolve())
    adapter.base.config.save_pretrained(folder)
    return str(folder)


def adapter_digest(adapter: MoELoraFolder) -> str:
    """
    Return a hash of the adapter's config and tensor names. The graph that vLLM compiles and caches depends on them.
    """
    from ..utils.loading import ADAPTER_CONFIG

    parts = [(adapter.folder / ADAPTER_CONFIG).read_text("utf-8"), *sorted(adapter.tensors)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def check_served(
    adapter: MoELoraFolder, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1, enable_lora: bool = False
) -> None:
    """
    Check that vLLM can serve an adapter.

    Raises:
        ValueError: vLLM cannot compute the adapter's model with these settings.
    """
    from ..adapter.config import ALL_ROWS
    from ..adapter.layers import MoELoraFFN, MoELoraLayer

    (architecture,) = adapter.base.config.architectures or [None]
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"{adapter}: its base is a {architecture}, but vLLM serves adapters on {', '.join(ARCHITECTURES)}; export "
            "it with `moe-peft export`"
        )
    if enable_lora:
        raise InputError(
            "enable_lora: vLLM's LoRAs would replace linears that have experts; serve them with the base, or mix them"
        )
    if pipeline_parallel_size > 1:
        raise InputError("pipeline_parallel_size: a MoE-LoRA adapter needs 1; use tensor_parallel_size")
    if adapter.config.router_class.needs_token_ids:
        raise InputError(
            f"{adapter}: router_type={adapter.config.router_type!r}: vLLM's layers do not see token ids; serve it with "
            "transformers and PEFT"
        )
    for name, layer in adapter.empty.base_model.model.named_modules():
        if not isinstance(layer, MoELoraLayer):
            continue
        if not _SERVED.fullmatch(name):
            raise InputError(
                f"{adapter}: {name} has LoRAs, but vLLM serves LoRAs only on FFNs and on linears of FFNs and "
                "attentions; serve it with transformers and PEFT"
            )
        in_parts = isinstance(layer, MoELoraFFN) and tensor_parallel_size > 1
        if in_parts and getattr(layer.projection(layer.layout.down), "bias", None) is not None:
            raise InputError("tensor_parallel_size: experts on FFNs with biases need 1")
    rows = adapter.base.config.get_text_config().vocab_size
    for key, tensor in adapter.tensors.items():
        is_whole = key.endswith(("embed_tokens.weight", "lm_head.weight"))
        if ALL_ROWS in key or (is_whole and len(tensor) != rows):
            raise InputError(f"{adapter}: {key}: tokens were added to the base; export it with `moe-peft export`")
    if adapter.base.config.get_text_config().tie_word_embeddings and not adapter.config.ensure_weight_tying:
        trained = (key for key in adapter.tensors if key.endswith(("embed_tokens.weight", "lm_head.weight")))
        if (tied := next(trained, None)) is not None:
            raise InputError(f"{adapter}: {tied} was trained, but the base ties it to another; export it")
