"""Reads a model's attentions: where they are, their query projections, and their means on calibration data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from ..checks import Rule, check
from ..contexts import evaluating
from .view import backbone, base_model

_BATCHES = Rule(
    lambda v: isinstance(v, Iterable) and not isinstance(v, (str, bytes, Mapping, torch.Tensor)),
    "give a list of batches, or a data loader",
)


class AttentionMeans(NamedTuple):
    """Means over all real tokens, float32."""

    key_K: torch.Tensor  # of the key projection's output
    input_D: torch.Tensor


def is_attention(module: nn.Module) -> bool:
    """Whether its queries and keys can be read."""
    return all(hasattr(module, name) for name in ("q_proj", "k_proj", "head_dim"))


def attention_before(model: nn.Module, path: str) -> str:
    """
    The path of the attention in the layer that the FFN or gate at `path` belongs to.

    Raises:
        ValueError: there is none whose queries and keys can be read.
    """
    while path:
        path = path.rpartition(".")[0]
        found = [
            (name, module)
            for name, module in model.get_submodule(path).named_modules()
            if hasattr(module, "q_proj") and hasattr(module, "k_proj")
        ]
        if len(found) == 1 and is_attention(found[0][1]):
            return f"{path}.{found[0][0]}".lstrip(".")
        if found:
            break
    raise no_attention(model)


def no_attention(model: nn.Module) -> ValueError:
    return ValueError(
        f"init_attention_routers: {type(model).__name__} has no attention with q_proj, k_proj and head_dim before each "
        "of its FFNs; use random routers"
    )


def query_weight(attention: Any) -> torch.Tensor:
    """
    The weight of the query projection [H·w, d], float32. For a quantized one it is computed from its outputs.

    Raises:
        ValueError: the projection returns more than queries.
    """
    linear = plain_linear(attention.q_proj)
    weight_HD = _weight(linear)
    if weight_HD.shape[0] != attention.config.num_attention_heads * int(attention.head_dim):
        raise ValueError(
            f"init_attention_routers: q_proj of {type(attention).__name__} returns more than queries; use random "
            "routers"
        )
    return weight_HD


def _weight(linear: Any) -> torch.Tensor:
    if type(linear.weight) is nn.Parameter and linear.weight.is_floating_point():
        return linear.weight.float()
    bias = getattr(linear, "bias", None)
    dtype = torch.float32 if bias is None else bias.dtype
    unit_DD = torch.eye(linear.in_features, dtype=dtype, device=linear.weight.device)
    with evaluating(linear):
        columns_DH = linear(unit_DD).float()
    return (columns_DH if bias is None else columns_DH - bias.float()).T


def plain_linear(module: nn.Module) -> Any:
    """The linear inside tuner layers."""
    while isinstance(module, BaseTunerLayer):
        module = module.get_base_layer()
    return module


_ADAPTED = (BaseTunerLayer, ModulesToSaveWrapper)


def attention_means(
    model: nn.Module, attentions: list[Any], batches: Iterable[Mapping[str, Any]]
) -> list[AttentionMeans]:
    """
    Means of each attention over all real tokens of the batches, with adapters disabled.

    Raises:
        ValueError: there are no tokens, or a batch lacks them, or they are not the model's.
    """
    keys: list[Any] = [0.0] * len(attentions)
    inputs: list[Any] = [0.0] * len(attentions)
    tokens: Any = 0.0
    mask_BS1 = torch.ones(())

    def adder(i: int) -> Any:
        def hook(module: nn.Module, args: tuple, keys_BSK: torch.Tensor) -> None:
            weights_BS1 = mask_BS1.to(keys_BSK.device)
            keys[i] = keys[i] + (keys_BSK.double() * weights_BS1).sum(dim=(0, 1))
            inputs[i] = inputs[i] + (args[0].double() * weights_BS1).sum(dim=(0, 1))

        return hook

    check("init_attention_routers", batches=(batches, _BATCHES))
    vocabulary = base_model(model).get_input_embeddings().weight.shape[0]
    device = next(backbone(model).parameters()).device
    adapters = [(layer, layer._disable_adapters) for layer in model.modules() if isinstance(layer, _ADAPTED)]
    handles = [plain_linear(a.k_proj).register_forward_hook(adder(i)) for i, a in enumerate(attentions)]
    try:
        for layer, _ in adapters:
            layer._disable_adapters = True
        for i, batch in enumerate(batches):
            _check_batch(i, batch, vocabulary)
            given = {k: batch[k].to(device) for k in ("input_ids", "attention_mask", "position_ids") if k in batch}
            mask_BS1 = given.get("attention_mask", torch.ones_like(given["input_ids"])).unsqueeze(-1).double()
            tokens = tokens + mask_BS1.sum()
            with evaluating(model):
                backbone(model)(**given, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        for layer, disabled in adapters:
            layer._disable_adapters = disabled
    if not tokens:
        raise ValueError("init_attention_routers: batches: no tokens; give at least one batch of calibration data")
    return [
        AttentionMeans((key / tokens.to(key.device)).float(), (total / tokens.to(total.device)).float())
        for key, total in zip(keys, inputs, strict=True)
    ]


def _check_batch(i: int, batch: Any, vocabulary: int) -> None:
    """Raise if the model cannot run on a batch."""
    ids: Any = batch.get("input_ids") if isinstance(batch, Mapping) else None
    is_ids = isinstance(ids, torch.Tensor) and ids.dtype in (torch.int64, torch.int32)
    if not (is_ids and ids.dim() == 2 and ids.numel() > 0):
        raise ValueError(
            f"init_attention_routers: batches[{i}]: no token ids; give a dict with input_ids, an integer tensor [B, S]"
        )
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(
            f"init_attention_routers: batches[{i}]: token ids {int(ids.min())} to {int(ids.max())}; the model has 0 to "
            f"{vocabulary - 1}: use its own tokenizer"
        )
    places = batch.get("position_ids", ids)
    if not isinstance(places, torch.Tensor) or places.shape != ids.shape:
        raise ValueError(
            f"init_attention_routers: batches[{i}]: position_ids: give a tensor {list(ids.shape)} as input_ids, or "
            "leave it out"
        )
    mask = batch.get("attention_mask", torch.ones_like(ids))
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape or not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            f"init_attention_routers: batches[{i}]: attention_mask: give a tensor of 0 and 1, {list(ids.shape)} as "
            "input_ids, or leave it out"
        )
