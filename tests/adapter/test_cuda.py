"""What only a GPU can show: bfloat16 on CUDA, every dispatch method, no synchronization with the device."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model

from moe_peft import MoELoraConfig, pin_dispatch
from tests.helpers.models import tiny_llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def layer(mixing: str, dtype: torch.dtype, num_experts: int = 8, r: int = 8, top_k: int = 2) -> torch.nn.Module:
    base = tiny_llama(layers=1).to("cuda", dtype)
    torch.manual_seed(1)
    config = MoELoraConfig(num_experts=num_experts, r=r, top_k=top_k, mixing=mixing, init_lora_weights=False)
    model = get_peft_model(base, config)
    return model.get_base_model().model.layers[0].mlp


def results(mlp: torch.nn.Module, x: torch.Tensor, method: str) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    mlp.zero_grad()
    with pin_dispatch(method):
        y = mlp(x)
        y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in mlp.parameters() if p.requires_grad)]


@pytest.mark.parametrize("num_experts, r, top_k", [(8, 8, 2), (16, 16, 2), (16, 16, 3)])  # 16·16: not all at once
# bfloat16 has three bits fewer than float16. Of one token the router's gradient is a difference of two experts.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.float16, 2e-2), (torch.bfloat16, 16e-2)])
@pytest.mark.parametrize("mixing", ["output", "projection"])
@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_all_ways_of_computing_agree(
    mixing: str, dtype: torch.dtype, tolerance: float, tokens: int, num_experts: int, r: int, top_k: int
):
    mlp = layer(mixing, dtype, num_experts, r, top_k)
    x = torch.randn(tokens, 64, device="cuda", dtype=dtype)
    want = results(mlp, x, "dense")
    for method in ("blocks", "sorted", "gather", "auto"):
        for got, expected in zip(results(mlp, x, method), want, strict=True):
            scale = expected.abs().max()
            assert (got - expected).abs().max() <= tolerance * scale


@pytest.mark.parametrize("method", ["auto", "dense", "blocks", "sorted", "gather", "dense-blocks", "dense-sorted"])
@pytest.mark.parametrize("num_experts, r", [(8, 8), (16, 16)])
@pytest.mark.parametrize("mixing", ["output", "projection"])
@pytest.mark.parametrize("tokens", [1, 200])
def test_the_layer_never_waits_for_the_device(mixing: str, tokens: int, num_experts: int, r: int, method: str):
    mlp = layer(mixing, torch.bfloat16, num_experts, r)
    x = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with pin_dispatch(method):
        mlp(x).sum().backward()  # first calls may synchronize for their own reasons
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pin_dispatch(method):
            mlp(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
