"""
vLLM as the generator in TRL's trainers while a MoE-LoRA adapter is in training (`use_vllm=True`).

TRL merges an adapter to send full weights to vLLM. A MoE-LoRA adapter cannot be merged. vLLM serves it unmerged, so
only the adapter's tensors are sent, none of the base model.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch.distributed.tensor import DTensor
from trl.generation import vllm_generation

from ..utils.compat import require
from ..utils.distributed import gathered
from ..utils.messages import InputError

require("trl.generation.vllm_generation.VLLMGeneration")


class AdapterGeneration(vllm_generation.VLLMGeneration):
    """
    TRL's `VLLMGeneration` for a MoE-LoRA adapter. The engine starts from the adapter's folder. Before each step's
    generation, it gets the tensors of the adapter's file.
    """

    model: Any

    def __init__(self, model: Any, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        if any(config.trainable_token_indices for config in model.peft_config.values()):
            raise InputError(
                "use_vllm=True: trainable_token_indices: vLLM is not sent single rows; leave one of them out"
            )
        if getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", 2) == 1:
            raise InputError("use_vllm=True: FSDP version 1 hides an adapter's tensors; set fsdp_version: 2")
        with tempfile.TemporaryDirectory() as folder:
            with gathered(model.parameters()):
                model.save_pretrained(folder)
            model.name_or_path = folder  # TRL passes this name to vLLM; by default it is the base model's
            try:
                super().__init__(model, accelerator, *args, **kwargs)
            finally:
                del model.name_or_path

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and values of each tensor, gathered one at a time. All processes must iterate."""
        state = self.model.state_dict(keep_vars=True)
        saved = get_peft_model_state_dict(self.model, state_dict=state, save_embedding_layers=False)
        for name, tensor in saved.items():
            with gathered([tensor]):
                own = tensor.detach()
                full = own.full_tensor() if isinstance(own, DTensor) else own
                yield name.removeprefix("base_model.model."), full


@contextmanager
def rollouts_of_adapters(trainer: type) -> Iterator[None]:
    """Make trainers that generate by TRL's `VLLMGeneration` use `AdapterGeneration` inside the block."""
    modules = (sys.modules[base.__module__] for base in trainer.__mro__)
    module = next((module for module in modules if hasattr(module, "VLLMGeneration")), None)
    if module is None:
        raise InputError(
            f"use_vllm=True: {trainer.__name__} merges an adapter to give vLLM its weights, and a MoE-LoRA cannot be "
            "merged; leave it out"
        )
    before, module.VLLMGeneration = module.VLLMGeneration, AdapterGeneration  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.VLLMGeneration = before  # type: ignore[attr-defined]
