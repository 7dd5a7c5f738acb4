"""Updates of experts that are trained at once: clipping, endings, DeepSpeed's order of calls, unusual models."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from peft import get_peft_model
from transformers import TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from moe_peft import MoELoraConfig
from moe_peft.upit import router_init as own_updates
from moe_peft.upit.router_init import OwnUpdates
from moe_peft.utils.distributed import Access, ZeROAccess
from tests.helpers.models import tiny_llama

STEPS = [2, 1, 0, 2]


def make(dtype=torch.float32, **settings):
    base = tiny_llama().to(dtype)
    torch.manual_seed(1)
    config = MoELoraConfig(num_experts=4, r=4, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    return get_peft_model(base, config, autocast_adapter_dtype=False).train()


def backward(model) -> None:
    ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()


def given(step: int = 0):
    return TrainingArguments(output_dir="unused", use_cpu=True), TrainerState(global_step=step), TrainerControl()


def begun(model, max_grad_norm: float = 1e-2, steps=STEPS, **own) -> OwnUpdates:
    callback = OwnUpdates(steps, max_grad_norm)
    callback.on_train_begin(*given(), model=model, **own)
    return callback


def trained(model) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def parts(model, expert: int) -> list[torch.Tensor]:
    """One expert's gradients: its slices of the LoRAs and its rows of the routers."""
    return [p.grad[expert] for p in trained(model).values()]


@pytest.mark.parametrize("scale", [1.0, 1e-7])  # of gradients: below 1e-6, what keeps the norm from 0 counts
def test_each_expert_is_clipped_as_torch_clips_a_model(scale):
    model, limit = make(), 1e-2 * scale
    backward(model)
    expected = []
    for expert in range(4):
        own = [torch.nn.Parameter(grad.clone()) for grad in parts(model, expert)]
        for parameter, grad in zip(own, parts(model, expert), strict=True):
            parameter.grad = grad * scale
        torch.nn.utils.clip_grad_norm_(own, limit)
        expected.append([p.grad for p in own])
    for parameter in trained(model).values():
        parameter.grad *= scale
    begun(model, limit).on_pre_optimizer_step(*given())
    for expert in range(4):
        for found, wanted in zip(parts(model, expert), expected[expert], strict=True):
            torch.testing.assert_close(found / scale, wanted / scale, rtol=1e-5, atol=1e-9)


def test_gradients_keep_their_type():
    model = make(torch.bfloat16, router_type="mlp")
    backward(model)
    before = {name: p.grad.clone() for name, p in trained(model).items()}
    callback = begun(model, 1e-3)
    callback.on_pre_optimizer_step(*given())
    shared = {name: grad for name, grad in before.items() if "router" in name}
    norm = torch.cat([grad.double().flatten() for grad in shared.values()]).norm()
    for name, parameter in trained(model).items():
        assert parameter.grad.dtype == torch.bfloat16
        if name in shared:
            wanted = shared[name].double() * (1e-3 / norm)
            torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-2, atol=1e-9)


def test_squares_of_half_precision_gradients_do_not_vanish():
    """1e-4 squared is nothing in float16."""
    model = make(torch.float16)
    for parameter in trained(model).values():
        parameter.grad = torch.full_like(parameter, 1e-4)
    norm = 1e-4 * sum(part.numel() for part in parts(model, 0)) ** 0.5
    begun(model, norm / 2).on_pre_optimizer_step(*given())
    for parameter in trained(model).values():
        wanted = torch.full_like(parameter, 5e-5)
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-2, atol=0)


@pytest.mark.parametrize(("router", "copies"), [("mlp", {}), ("attention", {"mean_query": 4})])
def test_routers_alone_are_clipped_together(router, copies):
    """A stored mean of queries as the four matrices that it stands for."""
    model = make(router_type=router)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("router" in name)
    backward(model)
    wanted = []
    for name, parameter in trained(model).items():
        count = next((n for part, n in copies.items() if part in name), 1)
        wanted.append([parameter.detach().clone().requires_grad_() for _ in range(count)])
    assert any(len(same) > 1 for same in wanted) == bool(copies)
    for same, own in zip(wanted, trained(model).values(), strict=True):
        for parameter in same:
            parameter.grad = own.grad.clone()
    torch.nn.utils.clip_grad_norm_([parameter for same in wanted for parameter in same], 1e-2)
    begun(model).on_pre_optimizer_step(*given())
    for same, own in zip(wanted, trained(model).values(), strict=True):
        torch.testing.assert_close(own.grad, same[0].grad)


def test_experts_that_only_some_layers_have_stay():
    model = make(num_experts_pattern={r"layers\.1\.mlp": 6})
    before = {name: p.detach().clone() for name, p in trained(model).items()}
    optimizer, callback = torch.optim.AdamW(trained(model).values(), lr=1e-2), begun(model)
    backward(model)
    callback.on_pre_optimizer_step(*given())
    optimizer.step()
    callback.on_optimizer_step(*given())
    for name, parameter in trained(model).items():
        moved = [i for i in range(len(parameter)) if not torch.equal(parameter[i], before[name][i])]
        assert moved == [0, 1, 3], name


def test_deepspeeds_optimizer_does_what_the_callbacks_do():
    """It steps inside the backward pass, so its `step` is replaced by one that clips before and puts back after."""
    results = []
    for replaced in (False, True):
        model = make()
        optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2, weight_decay=0.1)
        calls = []

        def stepped(*args, of=optimizer, log=calls, **kwargs):
            log.append((args, kwargs))
            of.step()
            return "stepped"

        zero, state = SimpleNamespace(step=stepped, clip_grad=5.0), TrainerState()
        callback = begun(model)
        if replaced:
            callback._step_with(zero, state)
            assert zero.clip_grad == 0  # or it would clip all experts together
        for step in range(2):
            state.global_step = step
            optimizer.zero_grad()
            backward(model)
            if replaced:
                assert zero.step(1, closure=None) == "stepped" and calls[step] == ((1,), {"closure": None})
            else:
                callback.on_pre_optimizer_step(given()[0], state, given()[2])
                optimizer.step()
                callback.on_optimizer_step(given()[0], state, given()[2])
        results.append({name: p.detach() for name, p in trained(model).items()})
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_deepspeed_is_found_and_its_callbacks_do_nothing(monkeypatch):
    deepspeed = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    monkeypatch.setattr(own_updates, "PartialState", lambda: deepspeed)
    zero = SimpleNamespace(step=None, clip_grad=5.0)
    callback = begun(make(), optimizer=SimpleNamespace(optimizer=zero))
    assert isinstance(callback.access, ZeROAccess) and zero.clip_grad == 0 and zero.step is not None
    monkeypatch.setattr(callback, "_before_step", None)
    monkeypatch.setattr(callback, "_after_step", None)
    callback.on_pre_optimizer_step(*given())
    callback.on_optimizer_step(*given())
    assert type(OwnUpdates(STEPS, 1.0).access) is Access
