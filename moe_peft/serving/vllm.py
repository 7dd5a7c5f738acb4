"""
vLLM's plugin: it serves a MoE-LoRA adapter on its base, `vllm serve ./my-adapter`, without an export.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). For the engine, the adapter is a
base model with two overrides of its config: the architecture, one of `vllm_models`, and the adapter's folder.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.messages import InputError

if TYPE_CHECKING:
    from ..native.folders import MoELoraFolder

ADAPTER_FIELD = "moe_lora_adapter"  # of the model's config, the adapter's folder
PREFIX = "MoELora"  # of our architectures' names
# Architectures of bases that are served, each with its class in `vllm_models`.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def register() -> None:
    """Register our architectures, and let engines take the folder of a MoE-LoRA adapter as a model."""
    from vllm import ModelRegistry
    from vllm.engine.arg_utils import EngineArgs

    for architecture in ARCHITECTURES:
        name = PREFIX + architecture
        ModelRegistry.register_model(name, f"moe_peft.serving.vllm_models:{name}")

    create = getattr(EngineArgs, "create_engine_config", None)
    if create is None:  # another vLLM; docs/serving.md has the long way to say the same
        return

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = find_moe_lora(self.model)
        if adapter is not None:
            use_base(self, adapter)
        return create(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def find_moe_lora(model: str) -> MoELoraFolder | None:
    """The MoE-LoRA adapter that a folder holds; None if it holds something else, or is a name on the hub."""
    if not Path(model).is_dir():
        return None
    from ..native.folders import MoELoraFolder, find_adapter

    adapter = find_adapter(model, "adapter")
    return adapter if isinstance(adapter, MoELoraFolder) else None


def use_base(engine: Any, adapter: MoELoraFolder) -> None:
    """Replace an adapter's folder in vLLM's engine arguments by its base and the overrides that add the adapter."""
    adapter.remedy = "set it in the adapter's config"
    (architecture,) = adapter.base.config.architectures or [None]
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"{adapter}: its base is a {architecture}, and vLLM serves adapters on {', '.join(ARCHITECTURES)}; export "
            "it with `moe-peft export`"
        )
    if not isinstance(engine.hf_overrides, dict):
        raise InputError("hf_overrides: a function; with an adapter's folder as the model, give a dictionary")
    engine.hf_overrides = {
        **engine.hf_overrides,
        "architectures": [PREFIX + architecture],
        ADAPTER_FIELD: os.path.abspath(adapter.path),
    }
    if engine.tokenizer is None and adapter.has_tokenizer:
        engine.tokenizer = adapter.path  # training may have changed its chat template and EOS token
    engine.served_model_name = engine.served_model_name or adapter.path
    engine.model, engine.revision = adapter.base.path, adapter.base.revision
