"""Every supported model family: all FFNs are found, outputs do not change at first, experts are correct."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from moe_peft import FFNLayout, MoELoraConfig, register_ffn_layout
from moe_peft.adapter import ffn_layout as ffn_module
from moe_peft.adapter.layers import MoELoraFFN, MoELoraLayer
from tests.helpers.close import assert_near
from tests.helpers.reference import assert_same, reference, run

pytestmark = pytest.mark.slow

HIDDEN, FFN_SIZE, VOCAB, LAYERS = 64, 96, 128, 2
IDS = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(5))
GATED, FUSED = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")


@dataclass
class Family:
    """A model class of transformers, its config's special fields, and what its FFNs are called and made of."""

    name: str
    projections: tuple[str, ...] = GATED
    path: str = "model.layers.{}.mlp"
    special: dict = field(default_factory=dict)

    def build(self) -> PreTrainedModel:
        """A tiny model whose every parameter is random: biases and norms too."""
        common = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": FFN_SIZE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
        }
        torch.manual_seed(0)
        model_class = getattr(transformers, f"{self.name}ForCausalLM", None) or getattr(
            transformers, f"{self.name}LMHeadModel"
        )
        model = model_class(model_class.config_class(**{**common, **self.special}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model.eval()


GPT = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_inner": FFN_SIZE, "n_positions": 64}
FAMILIES = [
    Family("Llama"),
    Family("Mistral"),
    Family("Qwen2"),
    Family("Qwen3", special={"head_dim": 16}),
    Family("Gemma2", special={"head_dim": 16}),
    Family("Gemma3", special={"head_dim": 16}),
    Family("Olmo2"),
    Family("SmolLM3"),
    Family("Granite"),
    Family("Phi3", FUSED),
    Family("Glm", FUSED, special={"head_dim": 16}),
    Family(
        "GPT2",
        ("c_fc", "c_proj"),
        "transformer.h.{}.mlp",
        GPT,
    ),
    Family("GPTNeoX", ("dense_h_to_4h", "dense_4h_to_h"), "gpt_neox.layers.{}.mlp"),
    Family("Phi", ("fc1", "fc2")),
    Family("Starcoder2", ("c_fc", "c_proj")),
    Family("Nemotron", ("up_proj", "down_proj")),
    Family("Bloom", ("dense_h_to_4h", "dense_4h_to_h"), "transformer.h.{}.mlp", {"n_layer": LAYERS, "n_head": 4}),
    Family(
        "Mpt",
        ("up_proj", "down_proj"),
        "transformer.blocks.{}.ffn",
        {"d_model": HIDDEN, "n_layers": LAYERS, "n_heads": 4, "max_seq_len": 64},
    ),
    Family("GPTJ", ("fc_in", "fc_out"), "transformer.h.{}.mlp", {**GPT, "rotary_dim": 8}),
    Family("CodeGen", ("fc_in", "fc_out"), "transformer.h.{}.mlp", {**GPT, "rotary_dim": 8}),
    Family("Lfm2", ("w1", "w2", "w3"), "model.layers.{}.feed_forward", {"layer_types": ["conv", "full_attention"]}),
    Family("ModernBertDecoder", ("Wi", "Wo"), special={"global_attn_every_n_layers": 1}),
    Family("Llama4", path="model.layers.{}.feed_forward", special={"moe_layers": [], "head_dim": 16}),
]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
mixings = pytest.mark.parametrize("mixing", ["output", "projection"])


def adapt(model: nn.Module, **settings) -> PeftModel:
    torch.manual_seed(1)
    adapted = get_peft_model(model, MoELoraConfig(**{"num_experts": 4, "r": 8, **settings})).eval()
    if settings.get("init_lora_weights") is False:  # routers that decide, too
        for layer in ffn_layers(adapted).values():
            nn.init.normal_(layer.moe_lora_router["default"].weight, std=0.3)
    return adapted


def ffn_layers(model: nn.Module) -> dict[str, MoELoraFFN]:
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELoraFFN)}


def tokens(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """An FFN's input [1, T, d] and the gradient of its output."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, count, HIDDEN, generator=generator), torch.randn(1, count, HIDDEN, generator=generator)


# --- transformers' families -------------------------------------------------------------------------------------------


@every_family
def test_every_ffn_is_wrapped_and_zero_experts_leave_the_logits(family):
    model = family.build()
    with torch.no_grad():
        before = model(IDS).logits
        adapted = adapt(model, target_modules=None)
        after = adapted(IDS).logits
    layers = ffn_layers(adapted.get_base_model())
    assert list(layers) == [family.path.format(i) for i in range(LAYERS)]
    for layer in layers.values():
        assert sorted(layer.moe_lora_A["default"]) == sorted(family.projections)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in adapted.named_parameters() if "moe_lora_" in name}
    assert len(trained) == LAYERS * (2 * len(family.projections) + 1)
    assert before.std() > 0.1
    assert_near(after, before)


@every_family
@mixings
def test_random_experts_compute_the_loops(family, mixing):
    adapted = adapt(family.build(), mixing=mixing, init_lora_weights=False)
    x, d_output = tokens()
    for layer in ffn_layers(adapted).values():
        outcome = run(layer, x, d_output)
        assert (
            outcome.output - layer.layout.block(layer.base_layer, x)
        ).abs().max() > 1e-2 * outcome.output.abs().max()
        assert_same(outcome, reference(layer, x, d_output))


@every_family
def test_random_experts_without_normalised_gates_compute_the_loops(family):
    # The down projection's bias counts as often as the gates say.
    adapted = adapt(family.build(), normalize_top_k=False, top_k=1, init_lora_weights=False)
    x, d_output = tokens()
    for layer in ffn_layers(adapted).values():
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


@every_family
@mixings
def test_generation_gives_the_same_tokens_with_and_without_cache(family, mixing):
    adapted = adapt(family.build(), mixing=mixing, init_lora_weights=False)
    settings = {
        "max_new_tokens": 8,
        "do_sample": False,
        "attention_mask": torch.ones_like(IDS),
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    cached, whole = (adapted.generate(input_ids=IDS, use_cache=use_cache, **settings) for use_cache in (True, False))
    assert cached.sequences.shape == (2, IDS.shape[1] + 8)
    assert torch.equal(cached.sequences, whole.sequences)
    assert_near(torch.stack(cached.logits), torch.stack(whole.logits))
    with torch.no_grad():
        logits = adapted(IDS).logits
        with adapted.disable_adapter():
            plain = adapted(IDS).logits
    assert (logits - plain).abs().max() > 1e-2 * plain.abs().max()


# --- other FFNs -------------------------------------------------------------------------------------------------------


class CustomFFN(nn.Module):
    """A gated FFN with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, FFN_SIZE, False), nn.Linear(HIDDEN, FFN_SIZE, False)
        self.w2 = nn.Linear(FFN_SIZE, HIDDEN)
        self.nonlinearity = ACT2FN["gelu"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.nonlinearity(self.w1(x)) * self.w3(x))


class LlamaLikeFFN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, FFN_SIZE), nn.Linear(HIDDEN, FFN_SIZE)
        self.down_proj, self.act_fn = nn.Linear(FFN_SIZE, HIDDEN), ACT2FN["silu"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ScaledFFN(LlamaLikeFFN):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


class ResidualFFN(LlamaLikeFFN):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class SwappedFFN(LlamaLikeFFN):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class TupleFFN(LlamaLikeFFN):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x


class BloomLikeFFN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h, self.act = nn.Linear(HIDDEN, FFN_SIZE), ACT2FN["gelu"]
        self.dense_4h_to_h = nn.Linear(FFN_SIZE, HIDDEN)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class Stack(nn.Module):
    """Blocks one after the other, under the names block.0, block.1, …"""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.block = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.block:
            x = x + block(x)
        return x


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FFNLayout]]:
    """The registered layouts, restored afterwards."""
    copied = list(ffn_module._LAYOUTS)
    monkeypatch.setattr(ffn_module, "_LAYOUTS", copied)
    yield copied


@mixings
def test_a_registered_layout_makes_an_unknown_ffn_one_of_ours(layouts, mixing):
    torch.manual_seed(0)
    model = Stack(CustomFFN(), nn.Linear(HIDDEN, HIDDEN), CustomFFN())
    with pytest.raises(ValueError, match=r"no FFN block of a known layout.*register_ffn_layout"):
        adapt(model)
    register_ffn_layout(FFNLayout(gate="w1", up="w3", down="w2", act="nonlinearity"))
    adapted = adapt(model, mixing=mixing, init_lora_weights=False)
    layers = ffn_layers(adapted.get_base_model())
    assert list(layers) == ["block.0", "block.2"]
    x, d_output = tokens()
    for layer in layers.values():
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))


def test_a_registered_layout_is_tried_before_the_built_in_ones(layouts):
    register_ffn_layout(FFNLayout(gate="up_proj", up="gate_proj", down="down_proj", act="act_fn"))
    torch.manual_seed(0)
    adapted = adapt(Stack(SwappedFFN(), SwappedFFN()), init_lora_weights=False)
    (first, second) = ffn_layers(adapted).values()
    assert first.layout == second.layout == layouts[0]
    x, d_output = tokens()
    assert_near(run(first, x, d_output).output, reference(first, x, d_output).output)


def test_registering_a_layout_twice_is_registering_it_once(layouts):
    layout = FFNLayout(gate="w1", up="w3", down="w2", act="nonlinearity")
    before = len(layouts)
    register_ffn_layout(layout)
    register_ffn_layout(layout)
    assert len(layouts) == before + 1 and layouts[0] == layout


@pytest.mark.parametrize("target_modules", [None, ["block.0", "block.1"], r"block\.\d"], ids=["found", "list", "regex"])
@pytest.mark.parametrize("odd", [ScaledFFN, ResidualFFN, SwappedFFN, TupleFFN, BloomLikeFFN])
def test_an_ffn_that_computes_something_else_is_refused_before_any_layer_is_touched(odd, target_modules):
    torch.manual_seed(0)
    model = Stack(LlamaLikeFFN(), odd()).train()
    names = [name for name, _ in model.named_modules()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError) as refusal:
        get_peft_model(model, MoELoraConfig(num_experts=4, r=8, target_modules=target_modules))
    message = str(refusal.value)
    assert "\n" not in message and len(message) < 400
    assert "'block.1'" in message and odd.__name__ in message and "register_ffn_layout" in message
    assert not any(isinstance(module, MoELoraLayer) for module in model.modules())
    assert [name for name, _ in model.named_modules()] == names
    assert all(module.training for module in model.modules())
    assert values.keys() == model.state_dict().keys()
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("expert_type", ["lora", "bottleneck"])
@pytest.mark.parametrize("name", ["Bloom", "Mpt"])
def test_a_residual_is_added_after_the_experts_and_the_dropout(name, expert_type):
    family = next(family for family in FAMILIES if family.name == name)
    adapted = adapt(family.build(), expert_type=expert_type, init_lora_weights=False)
    layer = next(iter(ffn_layers(adapted).values()))
    layer.base_layer.hidden_dropout = 0.5
    x, residual = tokens(40)
    leaf = residual.clone().requires_grad_()
    y = layer(x, leaf)
    assert_near(y, layer(x) + residual)
    assert torch.equal(torch.autograd.grad(y.sum(), leaf)[0], torch.ones_like(leaf))
    assert_near(layer(x), reference(layer, x, residual).output)
    layer.enable_adapters(False)
    assert torch.equal(layer(x, residual), layer.base_layer(x, residual))
    layer.enable_adapters(True)
    layer.train()
    dropped = layer(x, residual) - residual
    assert expert_type == "bottleneck" or 0.4 < (dropped.abs() > 1e-6).double().mean() < 0.6


def test_an_ffn_with_a_dropout_that_the_layout_lacks_is_refused():
    family = next(family for family in FAMILIES if family.name == "ModernBertDecoder")
    model = Family(family.name, special={**family.special, "mlp_dropout": 0.1}).build()
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp': the forward of ModernBertDecoderMLP does not compute"):
        adapt(model)


@pytest.mark.parametrize("training", [True, False])
def test_a_look_at_an_ffn_leaves_its_mode_and_the_random_state(training):
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=HIDDEN, n_layer=1, n_head=4, vocab_size=VOCAB, resid_pdrop=0.5)
    ).train(training)
    mlp = model.transformer.h[0].mlp
    layout = ffn_module.find_layout(mlp)
    state = torch.get_rng_state()
    assert ffn_module.probe_ffn(layout, mlp, HIDDEN, torch.device("cpu"), torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert {module.training for module in mlp.modules()} == {training}


@pytest.mark.parametrize("name", ["GPT2", "Starcoder2"])
def test_the_blocks_own_dropout_stays_in_training(name):
    family = next(family for family in FAMILIES if family.name == name)
    special = {"resid_pdrop": 0.5} if name == "GPT2" else {"residual_dropout": 0.5}
    model = Family(name, family.projections, family.path, {**family.special, **special}).build()
    layer = next(iter(ffn_layers(adapt(model, init_lora_weights=False)).values())).train()
    x, d_output = tokens(40)
    torch.manual_seed(3)
    dropped = layer(x).detach()
    expected = reference(layer, x, d_output).output
    kept = dropped != 0
    assert 0.4 < kept.double().mean() < 0.6
    assert_near(dropped[kept], 2 * expected[kept])


@pytest.mark.parametrize("name", ["GPT2", "Mpt"])
def test_a_bottleneck_reads_what_the_blocks_own_dropout_left(name):
    """Of the output with the adapter inside, once for both; here neither changes anything yet."""
    family = next(family for family in FAMILIES if family.name == name)
    adapted = adapt(family.build(), init_lora_weights=True)
    settings = {"num_experts": 1, "expert_type": "bottleneck", "task_type": "CAUSAL_LM"}
    adapted.add_adapter("behind", MoELoraConfig(**settings))
    layer = next(iter(ffn_layers(adapted).values()))
    x, _ = tokens(40)
    if isinstance(getattr(layer.base_layer, layer.layout.dropout), torch.nn.Module):
        getattr(layer.base_layer, layer.layout.dropout).p = 0.5
    else:
        setattr(layer.base_layer, layer.layout.dropout, 0.5)
    for mode in (True, False):
        layer.train(mode)
        found = []
        for adapters in ([], ["default"], ["behind"], ["default", "behind"]):
            layer.enable_adapters(bool(adapters))
            layer.set_adapter(adapters or ["default"])
            torch.manual_seed(3)
            found.append(layer(x, *[torch.zeros_like(x)] * layer.layout.residual).detach())
        base, *others = found
        assert mode == (0.4 < (base == 0).double().mean() < 0.6)
        for other in others:
            assert_near(other, base)
