"""
What a GPU would meet, seen without one: no wait for the device, static shapes, layers on two devices, deterministic
kernels. Tensors without values run the same Python and autograd (`benchmarks.tracing`).
"""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.tracing import Trace
from moe_peft import MoELoraConfig
from moe_peft.adapter import dispatch_choice
from moe_peft.adapter.experts import EXPERTS
from moe_peft.adapter.layers import MoELoraFFN
from moe_peft.adapter.router_recorder import steering_of
from moe_peft.models.layer import routed_layers
from moe_peft.models.steering import steered
from moe_peft.routing import RouterSettings, make_router
from moe_peft.routing.gates import AllowedExperts, ForcedExperts
from moe_peft.routing.losses import balancing_loss
from moe_peft.routing.statistics import counted_experts
from tests.helpers.models import tiny_llama
from tests.helpers.router_kinds import ROUTER_KINDS

T, N, K, D = 24, 6, 2, 64
KINDS = ["gpu", "cuda 9"]
# Tensors without values may be on any devices, but those of a GPU that is there must be there, too.
OTHERS = "hpu" if torch.cuda.is_available() else "cuda"
# Without a deterministic kernel on CUDA, by the documentation of torch.use_deterministic_algorithms.
NOT_DETERMINISTIC = {
    "adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward", "bincount", "histc",
    "kthvalue", "median", "put_", "resize_",
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    """The meta device is a GPU of this kind."""

    def play(kind: str) -> None:
        monkeypatch.setattr(dispatch_choice, "device_kind", lambda device: kind)

    return play


def meta_model(layers: int = 1, dtype: torch.dtype = torch.bfloat16, **settings) -> torch.nn.Module:
    with torch.device("meta"):
        base = tiny_llama(layers).to(dtype)
        return get_peft_model(base, MoELoraConfig(**{"num_experts": 8, "r": 8, "top_k": 2, **settings}))


def trace(model: torch.nn.Module, tokens: int, train: bool) -> Trace:
    """A pass of the first layer in a batch of this many tokens, and its gradients."""
    layer = next(module for module in model.modules() if isinstance(module, MoELoraFFN))
    x = torch.empty(1, tokens, D, dtype=torch.bfloat16, device="meta", requires_grad=train)
    model.train(train)
    with Trace() as seen, torch.set_grad_enabled(train):
        y = layer(x)
        if train:
            y.backward(torch.empty_like(y))
    if train:
        missing = [name for name, p in layer.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing and x.grad is not None
    assert seen.operations
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_experts, r, mixing", [(8, 8, "output"), (64, 16, "projection")])  # narrow and wide
@pytest.mark.parametrize("expert_type", EXPERTS)
def test_no_kind_of_experts_waits_for_the_device(mixing, expert_type, num_experts, r, kind, gpu):
    gpu(kind)
    settings = {"expert_type": expert_type, "num_experts": num_experts, "r": r, "lora_dropout": 0.1}
    settings |= {"mixing": mixing} if expert_type != "bottleneck" else {"bottleneck_size": r}
    for k in (1, 2, 3, 8):
        model = meta_model(**settings, top_k=k)
        for tokens, train in ((1, False), (8, False), (100, False), (600, False), (600, True)):
            assert trace(model, tokens, train).waits == [], (k, tokens, train)


@pytest.mark.parametrize("router", [name for name in ROUTER_KINDS if name != "hash"])
def test_no_router_waits_or_has_a_kernel_that_is_not_deterministic(router, gpu):
    gpu("gpu")
    for train in (False, True):
        seen = trace(meta_model(**ROUTER_KINDS[router], router_jitter_noise=0.01), 100, train)
        assert seen.waits == []
        for operation in seen.operations:
            assert operation.name not in NOT_DETERMINISTIC
            if operation.name == "cumsum":  # deterministic for integers alone
                assert not operation.dtypes[0].is_floating_point


def test_a_hash_router_does_not_wait_either(gpu):
    gpu("gpu")
    model = meta_model(router_type="hash")
    ids = torch.zeros(2, 9, dtype=torch.long, device="meta")
    with Trace() as seen, torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    with Trace() as of_base, torch.no_grad(), model.disable_adapter():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert sorted(seen.waits) == sorted(of_base.waits)


@pytest.mark.parametrize("steering", [
    ForcedExperts(torch.tensor([0, 3])), AllowedExperts(torch.ones(2, 8) > 0),
], ids=["forced", "allowed"])  # fmt: skip
def test_routing_by_a_steering_on_the_device_does_not_wait(steering):
    logits = torch.empty(2 * 9, 8, device="meta")
    with Trace() as seen:
        steering.to(torch.device("meta")).route(logits, K, True)
    assert seen.waits == ["_to_copy"]  # which `to` itself is


def test_a_trace_sees_what_would_wait():
    x = torch.empty(3, 4, device="meta")
    waiting = [
        lambda: x.sum().item(), lambda: x.new_tensor([1.0, 2.0]), lambda: x[[0, 2]], lambda: x.cpu(),
        lambda: torch.ones(3, 4).to("meta"), lambda: torch.tensor([1.0], device="meta"), lambda: bool((x > 0).any()),
        lambda: x.nonzero(),
    ]  # fmt: skip
    for wait in waiting:
        with Trace() as seen:
            wait()
        assert len(seen.waits) == 1
    with Trace() as seen:
        x[1:, 0].add_(1), torch.where(x > 0, x, 1), x.topk(2), x[0].softmax(-1)
    assert seen.waits == []


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("sizes", [None, [4, 6, 6]])
def test_the_balancing_loss_does_not_wait(scope, sizes):
    logits = [torch.empty(T, N, device="meta", requires_grad=True) for _ in range(3)]
    with Trace() as seen:
        balancing_loss(logits, K, torch.ones(T, device="meta"), scope, sizes=sizes).backward()
    assert seen.waits == []


# --- two devices -----------------------------------------------------------------------------------------------------


class OneDevice(TorchDispatchMode):
    """Raises where an operation meets tensors of two devices, as a GPU does; only a copy may."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        copies = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
        assert copies or len({x.device for x in flat}) < 2, func
        return func(*args, **(kwargs or {}))


def moved(module: torch.nn.Module, device: str) -> torch.nn.Module:
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                tensors[name] = None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return module


def test_a_hash_router_on_another_device_than_the_token_ids():
    with FakeTensorMode(), OneDevice():
        router = moved(make_router(D, N, RouterSettings("hash")), f"{OTHERS}:1")
        ids = torch.zeros(T, dtype=torch.long, device=f"{OTHERS}:0")
        assert router(torch.empty(T, D, device=f"{OTHERS}:1"), ids).device == torch.device(f"{OTHERS}:1")


@pytest.mark.parametrize("router_type", ["linear", "sigmoid", "mlp", "attention", "locmoe"])
def test_biases_on_another_device_than_the_logits_that_the_loss_counts(router_type):
    """A trainer brings the logits of all layers to the first one's device."""
    settings = RouterSettings(router_type, bias_update_rate=0.001, attention_size=24)
    with FakeTensorMode(), OneDevice():
        routers = [moved(make_router(D, N, settings), f"{OTHERS}:{i}") for i in (0, 1)]
        logits = [torch.empty(T, N, device=f"{OTHERS}:0") for _ in routers]
        chosen = counted_experts(routers, logits, [K, K])
        assert chosen is not None
        assert balancing_loss(logits, K, chosen=chosen).device == torch.device(f"{OTHERS}:0")


def test_steering_goes_to_the_device_of_each_layer_once():
    model = get_peft_model(tiny_llama(), MoELoraConfig(num_experts=N))
    layers = [layer.module for layer in routed_layers(model)]
    devices = [torch.device(f"{OTHERS}:0"), torch.device(f"{OTHERS}:1")]
    with FakeTensorMode(), OneDevice():
        for layer, device in zip(layers, devices, strict=True):
            moved(layer, str(device))
        for steering in (ForcedExperts(torch.zeros(2, dtype=torch.long)), AllowedExperts(torch.ones(2, N) > 0)):
            with steered(model, steering):
                for layer, device in zip(layers, devices, strict=True):
                    there = steering_of(layer)
                    assert there.by_row.device == device
                    gates, experts = there.route(torch.empty(T, N, device=device), K, True)
                    assert {gates.device, experts.device} == {device}


@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_a_few_tokens_cast_the_experts_that_they_choose_and_no_others(mixing, gpu):
    gpu("gpu")
    model = meta_model(num_experts=64, mixing=mixing)
    for name, parameter in model.named_parameters():
        if "moe_lora_" in name:
            parameter.data = parameter.data.float()
    casts = [operation for operation in trace(model, 2, False).operations if operation.name == "_to_copy"]
    pairs, r, f = 2 * K, 8, 2 * D
    assert casts and max(operation.bytes for operation in casts) <= pairs * r * f * (4 + 2)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router_type", ["linear", "mlp", "attention", "sigmoid"])
def test_a_router_keeps_its_input_as_it_is_stored_and_learns_the_same(router_type):
    torch.manual_seed(0)
    router = make_router(D, N, RouterSettings(router_type, attention_size=24))
    x = torch.randn(T, D).bfloat16().requires_grad_()
    precise = x.detach().float().requires_grad_()
    logits = router(x)
    in_float = router(precise)
    assert torch.equal(logits, in_float)
    weights = torch.randn(T, N)
    ours, theirs = (
        torch.autograd.grad((y * weights).sum(), [own, *router.parameters()], retain_graph=True)
        for y, own in ((logits, x), (in_float, precise))
    )
    assert torch.equal(ours[0], theirs[0].bfloat16())
    assert all(map(torch.equal, ours[1:], theirs[1:]))
    assert not _holds(logits.grad_fn, precise) and _holds(in_float.grad_fn, precise)


def test_hooks_of_a_checkpoint_decide_what_a_router_keeps():
    router, x = make_router(D, N, RouterSettings()), torch.randn(T, D).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        router(x)
    assert any(saved.dtype == torch.float32 and torch.equal(saved, x.float()) for saved in kept)


def _holds(node, wanted: torch.Tensor) -> bool:
    """Whether a graph holds this tensor."""
    raw = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
    own = [saved.data for saved in raw if isinstance(getattr(saved, "data", None), torch.Tensor)]
    return any(saved.shape == wanted.shape and torch.equal(saved, wanted) for saved in own) or any(
        _holds(other, wanted) for other, _ in node.next_functions if other is not None
    )
