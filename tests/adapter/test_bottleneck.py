"""
Bottleneck experts behind the FFN (PESC): outputs, gradients and whole trainings are those of plain loops, and the rest
of the library takes these experts as any others or refuses them by name.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from torch import nn
from trl import SFTConfig, SFTTrainer

from moe_peft import (
    MoELoraConfig,
    allow_experts,
    expert_to_lora,
    fold_routers,
    force_experts,
    lora_to_moe,
    pin_dispatch,
)
from moe_peft.adapter.layers import MoELoraFFN
from moe_peft.analysis import record_routing
from moe_peft.models.layer import router_parameters
from moe_peft.native import export_adapter
from tests.helpers.balance import layer_balancing_loss
from tests.helpers.close import assert_near
from tests.helpers.covering import pairs
from tests.helpers.expert_layers import RecordedDropout, add_adapter, ffn_layer, tensors
from tests.helpers.models import tiny_llama
from tests.helpers.native_case import adapter as saved_adapter
from tests.helpers.native_case import dense_model, saved
from tests.helpers.reference import assert_same, reference, run
from tests.helpers.router_kinds import ROUTER_KINDS, routed_layer
from tests.helpers.upit_case import rows

IDS = torch.randint(3, 128, (2, 10), generator=torch.Generator().manual_seed(1))
STD = 0.2  # of a base's weights where training is to show: bottlenecks act on the output of its FFNs
BOTTLENECK = {"expert_type": "bottleneck", "bottleneck_size": 8}


def make(base: Any = None, **settings: Any) -> PeftModel:
    """A tiny model with random bottlenecks and routers that are sure of their choice."""
    base = tiny_llama() if base is None else base
    torch.manual_seed(1)
    defaults = {"num_experts": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM", **BOTTLENECK}
    model = get_peft_model(base, MoELoraConfig(**{**defaults, **settings}))
    for parameter in router_parameters(model).values():
        nn.init.normal_(parameter, std=0.4)
    return model


def ffns(model: nn.Module) -> list[MoELoraFFN]:
    return [module for module in model.modules() if isinstance(module, MoELoraFFN)]


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


# --- against the loops ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, normalize, sizes, method",
    pairs(
        ["gated", "gated_bias", "fused", "plain", "conv1d"],
        [True, False],
        [(1, 1), (2, 1), (2, 2), (5, 2), (5, 3), (16, 1), (16, 2), (16, 3)],
        ["dense", "blocks", "gather", "dense-blocks"],
    ),
)
def test_output_and_gradients_are_the_loops_in_float64(kind, normalize, sizes, method):
    n, k = sizes
    settings = {"num_experts": n, "top_k": k, "normalize_top_k": normalize, **BOTTLENECK, "bottleneck_size": 3}
    layer = ffn_layer(kind, torch.float64, **settings)
    x, d_output = tensors(2, 5, dtype=torch.float64)
    expected = reference(layer, x, d_output)
    assert (expected.output - layer.base_layer(x)).abs().max() > 0.1
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), expected)


@pytest.mark.parametrize("tokens", [1, 3, 96])
@pytest.mark.parametrize("method", ["auto", "sorted", "dense-sorted"])
@pytest.mark.parametrize("n, k, b", [(4, 2, 8), (16, 3, 16)])
@pytest.mark.parametrize("normalize", [True, False])
def test_output_and_gradients_are_the_loops_in_float32(normalize, n, k, b, method, tokens):
    settings = {"num_experts": n, "top_k": k, "normalize_top_k": normalize, **BOTTLENECK, "bottleneck_size": b}
    layer = ffn_layer("gated_bias", **settings)
    x, d_output = tensors(tokens)
    with pin_dispatch(method):
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


# Switch is refused, and routing by token ids is tested with whole models.
@pytest.mark.parametrize("router", [name for name in ROUTER_KINDS if name not in ("switch", "hash")])
def test_every_router_routes_them(router):
    layer = routed_layer(router, **BOTTLENECK)
    x, d_output = tensors(9, dtype=torch.float64)
    expected = reference(layer, x, d_output)
    # The router's gradient is a difference of the experts'.
    assert_same(run(layer, x, d_output), expected, scale=expected.gradients["x"])


def test_alpha_and_rank_of_loras_do_not_scale_them():
    plain, other = (ffn_layer(**BOTTLENECK, **own) for own in ({}, {"r": 2, "lora_alpha": 99.0, "use_rslora": True}))
    x, _ = tensors(8)
    assert torch.equal(plain(x), other(x))


@pytest.mark.parametrize("n, normalize", [(1, True), (5, True), (5, False)])
def test_dropout_acts_on_the_bottlenecks_input_and_not_on_the_residual(n, normalize):
    settings = {"num_experts": n, "normalize_top_k": normalize, "lora_dropout": 0.4, **BOTTLENECK}
    layer = ffn_layer("gated_bias", torch.float64, **settings).train()
    x, d_output = tensors(8, dtype=torch.float64)
    with RecordedDropout() as dropout:
        actual = run(layer, x, d_output)
    (mask,) = dropout.masks
    assert set(mask.unique().tolist()) == {0.0, 1 / 0.6}
    assert_same(actual, reference(layer, x, d_output, masks={"bottleneck": mask}))
    assert_same(run(layer.eval(), x, d_output), reference(layer, x, d_output))


@pytest.mark.parametrize("tokens", [4, 96])
@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_is_close_to_float64_and_keeps_gradients_in_float32(autocast, tokens):
    layer = ffn_layer("gated_bias", **BOTTLENECK)
    if not autocast:
        layer.base_layer.to(torch.bfloat16)
    x, d_output = tensors(tokens, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        actual = run(layer, x, d_output)
    assert actual.output.dtype == torch.bfloat16
    assert {value.dtype for name, value in actual.gradients.items() if "moe_lora_" in name} == {torch.float32}
    assert_same(actual, reference(layer, x, d_output))


@pytest.mark.parametrize("grad", [True, False])
def test_the_blocks_output_is_not_overwritten(grad):
    layer, kept = ffn_layer(**BOTTLENECK), []
    layer.base_layer.register_forward_hook(lambda module, args, output: kept.append((output, output.clone())))
    with torch.set_grad_enabled(grad):
        layer(tensors(8)[0])
    ((output, before),) = kept
    assert torch.equal(output, before)


@pytest.mark.parametrize("method", ["auto", "dense", "blocks", "gather"])
def test_no_token_at_all_gives_no_output_and_zero_gradients(method):
    layer = ffn_layer(**BOTTLENECK)
    with pin_dispatch(method):
        outcome = run(layer, *tensors(1, 0))
    assert outcome.output.shape[:2] == (1, 0)
    assert not any(gradient.any() for gradient in outcome.gradients.values())


@pytest.mark.parametrize("names", [["default", "lora"], ["lora", "default", "second"], ["default", "second"]], ids=str)
def test_changes_of_active_adapters_of_both_types_add_up(names):
    layer = ffn_layer("gated_bias", normalize_top_k=False, **BOTTLENECK)
    add_adapter(layer, "lora", num_experts=3)
    add_adapter(layer, "second", **{**BOTTLENECK, "bottleneck_size": 4})
    layer.double()
    x, d_output = tensors(6, dtype=torch.float64)
    for active in (*([name] for name in names), names):
        layer.set_adapter(active)
        layer.requires_grad_(True)
        assert_same(run(layer, x, d_output), reference(layer, x, d_output, active))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "dense", "blocks", "gather"])
def test_a_compiled_layer_has_no_graph_break_and_the_same_output_and_gradients(method):
    layer = ffn_layer("gated_bias", **BOTTLENECK)
    x, d_output = tensors(24)
    with pin_dispatch(method):
        expected = run(layer, x, d_output)
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        inputs = x.clone().requires_grad_()
        output = compiled(inputs)
        output.backward(d_output)
    assert_near(output, expected.output)
    assert_near(inputs.grad, expected.gradients["x"])
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            assert_near(parameter.grad, expected.gradients[name], name)


# --- training ---------------------------------------------------------------------------------------------------------


class PlainPESC(nn.Module):
    """The layer as one writes it down: every expert is a module, and a loop adds up what they give."""

    def __init__(self, layer: MoELoraFFN) -> None:
        super().__init__()
        spec = layer.moe_lora_spec["default"]
        D, U = (weights["bottleneck"].detach() for weights in layer.expert_parameters("default"))
        self.ffn, self.k = copy.deepcopy(layer.base_layer), spec.top_k
        self.router = nn.Linear(D.shape[2], spec.num_experts, bias=False)
        self.router.weight.data = layer.router("default").weight.detach().clone()
        self.down = nn.ModuleList(nn.Linear(D.shape[2], D.shape[1], bias=False) for _ in D)
        self.up = nn.ModuleList(nn.Linear(D.shape[1], D.shape[2], bias=False) for _ in D)
        for i in range(spec.num_experts):
            self.down[i].weight.data, self.up[i].weight.data = D[i].clone(), U[i].T.contiguous()
        self.logits = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.ffn(x)
        self.logits = self.router(x)
        top, experts = self.logits.topk(self.k, dim=-1)
        gates, y = top.softmax(-1), torch.zeros_like(h)
        for i, (down, up) in enumerate(zip(self.down, self.up, strict=True)):
            gate = (gates * (experts == i)).sum(-1, keepdim=True)
            y = y + gate * (up(F.gelu(down(h))) + h)
        return y


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointing", "reentrant"])
def test_six_updates_are_those_of_plain_modules(checkpointing):
    model = make(tiny_llama(initializer_range=STD).double(), init_lora_weights=True).double().train()
    plain = tiny_llama(initializer_range=STD).double()
    for block, layer in zip(plain.model.layers, ffns(model), strict=True):
        block.mlp = PlainPESC(layer)
    plain.requires_grad_(False)
    for block in plain.model.layers:
        for part in (block.mlp.router, block.mlp.down, block.mlp.up):
            part.requires_grad_(True)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    own = [p for p in model.parameters() if p.requires_grad]
    optimizers = [torch.optim.AdamW(p, lr=1e-2) for p in (own, [p for p in plain.parameters() if p.requires_grad])]
    losses = []
    for step in range(6):
        ids = torch.randint(3, 128, (3, 12), generator=torch.Generator().manual_seed(step % 2))
        loss = model(input_ids=ids, labels=ids).loss
        expected = plain(input_ids=ids, labels=ids).loss
        routed = tuple(block.mlp.logits.flatten(0, 1) for block in plain.model.layers)
        expected = expected + 0.01 * layer_balancing_loss(routed, 4, 2)
        assert_near(loss, expected, dtype=torch.float32)  # the balancing loss is
        for optimizer, value in zip(optimizers, (loss, expected), strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[-2] < losses[0] - 0.1 and losses[-1] < losses[1] - 0.1
    for block, layer in zip(plain.model.layers, ffns(model), strict=True):
        D, U = (weights["bottleneck"] for weights in layer.expert_parameters("default"))
        assert U.abs().max() > 1e-2
        assert_near(D, torch.stack([down.weight for down in block.mlp.down]), dtype=torch.float32)
        assert_near(U, torch.stack([up.weight.T for up in block.mlp.up]), dtype=torch.float32)
        assert_near(layer.router("default").weight, block.mlp.router.weight, dtype=torch.float32)


@pytest.mark.parametrize("init", [True, "gaussian"])
def test_training_starts_at_the_dense_model_and_reaches_every_parameter(init):
    model = make(init_lora_weights=init)
    assert_near(logits(model), logits(tiny_llama()))
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # D and the routers get a gradient as soon as U is not zero
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("moe_lora_" in name)
        assert not parameter.requires_grad or parameter.grad.abs().max() > 0, name


def test_the_numbers_of_parameters_are_those_of_the_documented_formula():
    n, d, f, b, r = 4, 64, 128, 8, 3
    sizes = {}
    for name, settings in (("bottleneck", {}), ("lora", {"expert_type": "lora", "bottleneck_size": 64, "r": r})):
        layer = ffns(make(num_experts=n, **settings))[0]
        sizes[name] = sum(p.numel() for p in layer.parameters() if p.requires_grad)
    assert sizes == {"bottleneck": n * 2 * d * b + n * d, "lora": n * 3 * r * (d + f) + n * d}


def test_sft_trainer_trains_saves_and_loads_it(tokenizer, tmp_path):
    base = tiny_llama(initializer_range=STD)
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base")
    before = logits(base)
    trainer = SFTTrainer(
        model=base,
        processing_class=tokenizer,
        args=SFTConfig(
            output_dir=str(tmp_path / "out"), max_steps=12, learning_rate=2e-2, logging_steps=4, bf16=False,
            use_cpu=True, report_to="none", per_device_train_batch_size=4, save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows(24)),
        peft_config=MoELoraConfig(num_experts=4, task_type="CAUSAL_LM", **BOTTLENECK),
    )  # fmt: skip
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.1 and all(entry["aux_loss"] > 0.9 for entry in logged)
    trainer.save_model(str(tmp_path / "adapter"))
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(trainer.model))
    assert (logits(loaded) - before).abs().max() > 0.1
    config = loaded.peft_config["default"]
    assert (config.expert_type, config.bottleneck_size) == ("bottleneck", 8)


def test_lora_on_all_linears_beside_bottlenecks_as_in_the_paper(tmp_path):
    """PESC trains LoRAs on attention and FFN as well: two adapters, the LoRA first, both active."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = MoELoraConfig(num_experts=1, top_k=1, r=4, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = get_peft_model(tiny_llama(), config, adapter_name="dense")
    model.add_adapter("pesc", MoELoraConfig(num_experts=4, task_type="CAUSAL_LM", **BOTTLENECK))
    model.base_model.set_adapter(["dense", "pesc"])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[-2] for name in trained if "moe_lora_A" in name} == {"dense", "pesc"}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert all(parameter.grad.abs().max() > 0 for parameter in trained.values())
    x, d_output = (torch.randn(6, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    layer = copy.deepcopy(ffns(model)[0])
    dense = copy.deepcopy(layer.base_layer)
    for name in ("gate_proj", "up_proj", "down_proj"):  # the block that bottlenecks stand behind has the LoRAs merged
        adapted = getattr(dense, name)
        A, B = (weights["weight"][0] for weights in adapted.expert_parameters("dense"))
        setattr(dense, name, nn.Linear(*reversed(adapted.base_layer.weight.shape), bias=False))
        getattr(dense, name).weight.data = (adapted.base_layer.weight + 16 / 4 * B.T @ A).detach()
    expected = copy.deepcopy(layer)
    expected.base_layer = dense
    assert_near(layer(x), reference(expected, x, d_output, ["pesc"]).output)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path / "dense", adapter_name="dense")
    again.load_adapter(tmp_path / "pesc", "pesc")
    again.base_model.set_adapter(["dense", "pesc"])
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("name", ["bottleneck", "A", "mlp"])
def test_an_adapter_may_have_the_name_of_a_part(name, tmp_path):
    torch.manual_seed(1)
    config = MoELoraConfig(num_experts=4, init_lora_weights=False, **BOTTLENECK)
    model = get_peft_model(tiny_llama(), config, adapter_name=name)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path / name, adapter_name=name)
    assert torch.equal(logits(again), logits(model))
    other = PeftModel.from_pretrained(tiny_llama(), tmp_path / name)
    assert torch.equal(logits(other), logits(model))


# --- routing ----------------------------------------------------------------------------------------------------------


def test_forced_experts_compute_alone_and_masked_ones_are_left_out():
    model = make().double()
    layer = ffns(model)[0]
    x, d_output = (
        torch.randn(2, 5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1)
    )
    alone = copy.deepcopy(layer)
    alone.moe_lora_spec["default"] = copy.copy(layer.moe_lora_spec["default"])
    for name, value in (("num_experts", 1), ("top_k", 1)):
        object.__setattr__(alone.moe_lora_spec["default"], name, value)
    for weights in alone.expert_parameters("default"):
        weights["bottleneck"].data = weights["bottleneck"].data[2:3]
    with force_experts(model, torch.tensor([2, 2])):
        assert_near(layer(x), reference(alone, x, d_output).output)
    weight = layer.router("default").weight
    with allow_experts(model, [0, 3]):
        masked = layer(x)
    pair = copy.deepcopy(layer)
    object.__setattr__(pair.moe_lora_spec["default"], "num_experts", 2)
    for weights in pair.expert_parameters("default"):
        weights["bottleneck"].data = weights["bottleneck"].data[[0, 3]]
    pair.router("default").weight.data = weight.data[[0, 3]]
    assert_near(masked, reference(pair, x, d_output).output)


def test_routing_is_recorded():
    model = make().eval()
    with record_routing(model) as recorder:
        outputs = model(input_ids=IDS, output_router_logits=True)
    expected = [torch.bincount(logits_TN.topk(2).indices.flatten(), minlength=4) for logits_TN in outputs.router_logits]
    torch.testing.assert_close(recorder.counts[0], torch.stack(expected).double(), rtol=0, atol=0)


def test_routers_fold():
    model = make(tiny_llama(attn_implementation="eager"), router_type="attention", router_num_heads=2)
    expected = logits(model)
    fold_routers(model)
    assert model.peft_config["default"].router_type == "linear"
    assert_near(logits(model), expected)


# --- what cannot be done ----------------------------------------------------------------------------------------------


def refused(message: str, attempt: Any) -> None:
    with pytest.raises(ValueError, match=message) as error:
        attempt()
    assert "\n" not in str(error.value)


def test_merging_and_conversions_are_refused_by_name(tmp_path):
    model = make()
    before = logits(model)
    refused("MoE-LoRA cannot merge", model.merge_and_unload)
    refused("MoE-LoRA cannot merge", ffns(model)[0].merge)
    refused("expert_to_lora: expert_type='bottleneck'", lambda: expert_to_lora(model, 0, tmp_path / "expert"))
    assert torch.equal(logits(model), before) and not (tmp_path / "expert").exists()
    lora = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["up_proj"], task_type="CAUSAL_LM"))
    lora.save_pretrained(tmp_path / "lora")
    refused(
        "expert_type='bottleneck' has no use for it",
        lambda: lora_to_moe(tiny_llama(), [tmp_path / "lora"] * 2, expert_type="bottleneck"),
    )
    assert torch.equal(logits(model.unload()), logits(tiny_llama()))


def test_export_is_refused_by_name(tmp_path):
    name = saved(dense_model("mistral"), tmp_path / "base")
    saved_adapter(dense_model("mistral"), tmp_path / "adapter", name, **BOTTLENECK)
    message = "expert_type='bottleneck': .*no native MoE computes this"
    refused(message, lambda: export_adapter(tmp_path / "adapter", tmp_path / "moe"))
    assert not (tmp_path / "moe").exists()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"target_modules": ["q_proj"]}, "expert_type='bottleneck': target_modules matches no FFN, only q_proj; name"),
        ({"target_modules": ["nowhere"]}, "nowhere"),
        ({"router_type": "switch"}, "router_type='switch': [^']*; use router_type='linear'$"),
    ],
)
def test_settings_that_bottlenecks_cannot_have_are_refused(settings, message):
    refused(message, lambda: make(**settings))
