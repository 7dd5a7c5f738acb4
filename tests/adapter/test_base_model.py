"""What a base model has of its own: routed experts, config fields, vision towers, FFNs without a block."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from compatibility.families import IDS, OUTCOMES, examine, model_types, tiny
from moe_peft import MoELoraConfig, expert_to_lora, lora_to_moe
from moe_peft.adapter import base_model as bases
from moe_peft.adapter.layers import MoELoraLayer, MoELoraLinear
from moe_peft.native.base import Base
from moe_peft.upit.lora_experts import ffn_projections
from tests.helpers.balance import layer_balancing_loss
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama
from tests.helpers.reference import assert_same, reference, run

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "compatibility/results/families.md"


def adapt(model: PreTrainedModel, **settings: Any) -> PeftModel:
    torch.manual_seed(1)
    return get_peft_model(model, MoELoraConfig(**{"num_experts": 4, "r": 4, **settings})).eval()


def layers(model: torch.nn.Module) -> dict[str, MoELoraLayer]:
    return {name: m for name, m in model.named_modules() if isinstance(m, MoELoraLayer)}


def refused(message: str, model: PreTrainedModel, **settings: Any) -> None:
    names, fields = [name for name, _ in model.named_modules()], model.config.to_dict()
    with pytest.raises(ValueError, match=message) as error:
        adapt(model, **settings)
    assert "\n" not in str(error.value)
    assert [name for name, _ in model.named_modules()] == names and model.config.to_dict() == fields


# --- routed experts of the base's own -------------------------------------------------------------------------------

MOES = [
    "aria_text",
    "doge, MoE",
    "ernie4_5_moe",
    "gemma4_text, MoE",
    "granitemoe",
    "hunyuan_v1_moe",
    "jamba",
    "mixtral",
]
DENSE = ["doge", "gemma4_text", "granitemoehybrid, dense", "jamba, one expert", "llama4_text, dense"]


@pytest.mark.parametrize("name", MOES)
def test_a_model_with_routed_experts_is_refused_whatever_its_config_calls_them(name):
    refused("already has routed experts; adapt it with a plain LoraConfig", tiny(name))


@pytest.mark.parametrize("stacked", [True, False])
def test_routed_experts_of_a_model_that_transformers_does_not_know_are_seen(stacked):
    model = tiny("llama")
    block = model.model.layers[0].mlp
    block.gate = torch.nn.Linear(32, 4)
    if stacked:
        block.experts = torch.nn.Module()
        block.experts.w1 = torch.nn.Parameter(torch.zeros(4, 64, 32))
    else:
        block.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
        inside = {"target_modules": r".*experts\.1", "router_aux_loss_coef": 0.0}
        refused("target module 'model.layers.0.mlp.experts.1': it is in a routed expert of the base", model, **inside)
    refused("already has routed experts", model)


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_model_of_a_moe_family_trains_and_keeps_its_own_config(name, tmp_path):
    model = tiny(name)
    fields = copy.deepcopy(model.config.to_dict())
    with torch.no_grad():
        dense = model(input_ids=IDS, labels=IDS)
    adapted = adapt(model, router_aux_loss_coef=0.5)
    config = adapted.get_base_model().config.get_text_config()
    assert (config.num_experts, config.num_experts_per_tok) == (4, 2)
    for asked in ({}, {"output_router_logits": True}):
        outputs = adapted(input_ids=IDS, labels=IDS, **asked)
        expected = layer_balancing_loss(outputs.router_logits, 4, 2)
        assert len(outputs.router_logits) == len(layers(adapted))
        assert_near(outputs.aux_loss, expected)
        assert_near(outputs.loss, dense.loss + 0.5 * expected)  # once; new experts change nothing
    adapted.delete_adapter("default")
    assert model.config.to_dict() == fields
    adapted.add_adapter("again", MoELoraConfig(num_experts=4, r=4))
    unloaded = pickle.loads(pickle.dumps(copy.deepcopy(adapted))).unload()
    assert unloaded.config.to_dict() == fields
    unloaded.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert_near(loaded(input_ids=IDS).logits, dense.logits)


def test_the_values_that_a_config_had_come_back():
    model = tiny("jamba, one expert")
    model.config.output_router_logits, model.config.router_aux_loss_coef = False, 0.125
    adapted = adapt(model)
    adapted.get_base_model().config.output_router_logits = True  # as TRL does
    config = adapted.unload().config
    assert (config.num_experts, config.num_local_experts, config.num_experts_per_tok) == (1, 1, 2)
    assert (config.output_router_logits, config.router_aux_loss_coef) == (False, 0.125)


# --- FFNs whose parts stand in the decoder layer --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["opt", "xglm", "biogpt"])
def test_linears_of_an_ffn_without_a_block_get_experts_of_their_own(name, tmp_path, caplog):
    model = tiny(name)
    with torch.no_grad():
        dense = model(input_ids=IDS).logits
    bases._warn_of_linears.cache_clear()
    with caplog.at_level(logging.WARNING, "moe_peft"):
        adapted = adapt(model, init_lora_weights=False)
        adapt(tiny(name))
    (record,) = [r for r in caplog.records if r.name.startswith("moe_peft")]
    assert "fc1, fc2 gets experts and a router of its own" in record.message
    wrapped = layers(adapted)
    assert len(wrapped) == 4 and {path.rsplit(".", 1)[-1] for path in wrapped} == {"fc1", "fc2"}
    assert all(isinstance(layer, MoELoraLinear) for layer in wrapped.values())
    generator = torch.Generator().manual_seed(2)
    for layer in wrapped.values():
        x = torch.randn(1, 5, layer.in_features, generator=generator)
        d_output = torch.randn(1, 5, layer.out_features, generator=generator)
        assert_same(run(layer, x, d_output), reference(layer, x, d_output))
    with torch.no_grad():
        trained = adapted(input_ids=IDS).logits
    assert (trained - dense).abs().max() > 1e-3
    adapted.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(PeftModel.from_pretrained(tiny(name), tmp_path).eval()(input_ids=IDS).logits, trained)
        assert_near(adapted.unload()(input_ids=IDS).logits, dense)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"router_type": "attention"}, "router_type='attention': .* is a single linear"),
        ({"expert_type": "bottleneck"}, "expert_type='bottleneck': target_modules matches no FFN, only fc1, fc2"),
        (
            {"target_projections": ["fc1"]},
            r"target_projections=\['fc1'\]: target_modules matches no FFN, only fc1, fc2",
        ),
    ],
    ids=["router", "bottleneck", "projections"],
)
def test_what_needs_an_ffn_is_refused_where_there_are_only_linears(settings, message):
    refused(message, tiny("opt"), **settings)


def test_loras_on_such_linears_become_their_experts(tmp_path):
    folders = []
    for seed in range(2):
        torch.manual_seed(seed)
        lora = get_peft_model(tiny("opt"), LoraConfig(r=2, target_modules=["fc1", "fc2"], init_lora_weights=False))
        lora.save_pretrained(tmp_path / f"lora-{seed}")
        folders.append(tmp_path / f"lora-{seed}")
    with torch.no_grad():
        expected = lora.eval()(input_ids=IDS).logits
    moe = lora_to_moe(tiny("opt"), [folders[1]] * 2, top_k=2)
    assert {type(layer) for layer in layers(moe).values()} == {MoELoraLinear} and len(layers(moe)) == 4
    with torch.no_grad():
        assert_near(moe.eval()(input_ids=IDS).logits, expected)
    expert_to_lora(lora_to_moe(tiny("opt"), folders, top_k=1), expert=1, save_directory=tmp_path / "again")
    tensors = [load_file(folder / "adapter_model.safetensors") for folder in (folders[1], tmp_path / "again")]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


def test_upit_trains_loras_on_such_linears():
    assert ffn_projections(tiny("opt"), None) == ["fc1", "fc2"] and ffn_projections(tiny("opt"), ["fc2"]) == ["fc2"]
    assert ffn_projections(tiny("llama"), None) == ["down_proj", "gate_proj", "up_proj"]


# --- what is not a causal language model ----------------------------------------------------------------------------


def test_a_vision_tower_inside_the_decoder_gets_no_experts():
    adapted = adapt(tiny("phi4_multimodal"))
    assert list(layers(adapted.get_base_model())) == ["model.layers.0.mlp", "model.layers.1.mlp"]


def test_layers_to_transform_beside_a_vision_tower():
    """Its FFNs are called as the decoder's, so these are found by their full names."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    text = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=3, num_key_value_heads=2, **sizes)
    vision = transformers.CLIPVisionConfig(num_hidden_layers=2, image_size=16, patch_size=8, projection_dim=32, **sizes)
    llava = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=60)
    for wanted in (None, [0, 2]):
        model = adapt(transformers.LlavaForConditionalGeneration(llava), layers_to_transform=wanted)
        names = [f"model.language_model.layers.{i}.mlp" for i in wanted or range(3)]
        assert list(layers(model.get_base_model())) == names


def encoder_decoder(name: str) -> PreTrainedModel:
    sizes = {"vocab_size": 64, "d_model": 32, "decoder_start_token_id": 0}
    if name == "T5":
        config = transformers.T5Config(d_kv=8, d_ff=64, num_layers=2, num_heads=4, **sizes)
    else:
        ffns = {f"{part}_{size}": value for part in ("encoder", "decoder") for size, value in
                (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
        config = transformers.BartConfig(**ffns, **sizes)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


@pytest.mark.parametrize("name, linears", [("T5", ["q", "v"]), ("Bart", ["fc1", "fc2"])])
def test_an_encoder_decoder_gets_no_balancing_loss_and_so_no_router_that_needs_it(name, linears):
    model = encoder_decoder(name)
    refused(f"target_modules=None: {name}ForConditionalGeneration is an encoder-decoder", model)
    refused("router_aux_loss_coef=0.01: .* is an encoder-decoder.*set it to 0", model, target_modules=linears)
    biases = {"target_modules": linears, "router_aux_loss_coef": 0, "router_bias_update_rate": 0.1}
    refused("router_bias_update_rate=0.1: .* is an encoder-decoder, .*set it to 0", model, **biases)
    labels = IDS[:, :5].contiguous()
    with torch.no_grad():
        dense = model(input_ids=IDS, labels=labels).loss
    for settings in ({"router_aux_loss_coef": 0.0}, {"num_experts": 1, "top_k": 1}):
        adapted = adapt(copy.deepcopy(model), target_modules=linears, **settings)
        loss = adapted(input_ids=IDS, labels=labels).loss
        assert_near(loss, dense)
        asked = adapted(input_ids=IDS, labels=labels, output_router_logits=True)
        assert_near(asked.loss, dense)
        assert asked.get("aux_loss") is None
        loss.backward()
        assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)


def test_routers_that_saw_different_numbers_of_tokens_have_no_balancing_loss():
    model = tiny("prophetnet")  # its queries read three streams of the text
    adapted = adapt(model, target_modules=["query_proj", "relative_pos_embeddings"])
    with pytest.raises(ValueError, match=r"router_aux_loss_coef: routers saw different numbers of tokens.*set it to 0"):
        adapted(input_ids=IDS, labels=IDS)


# --- the table of families ------------------------------------------------------------------------------------------


same_version = pytest.mark.skipif(
    f"transformers {transformers.__version__} " not in TABLE.read_text(), reason="the table is of another transformers"
)


@same_version
@pytest.mark.parametrize("name", ["bart", "bert", "bitnet", "bloom", "jamba, one expert", "lfm2", "mixtral", "zamba2"])
def test_the_table_of_families_says_what_happens(name):
    row = examine(name)
    assert str(row) in TABLE.read_text().splitlines()
    assert row.lora == "yes" and row.adapter in OUTCOMES


@pytest.mark.slow
@same_version
def test_the_table_of_families_has_every_model_type():
    text = TABLE.read_text()
    tried = [line.split("|")[1].strip() for line in text.splitlines() if line.count("|") == 5][2:]
    untried = text.rpartition("more than text: ")[2]
    assert sorted([*tried, *untried.strip().removesuffix(".").split(", ")]) == model_types()


def test_readme_and_page_count_the_rows():
    rows = [line.split("|")[3].strip() for line in TABLE.read_text().splitlines() if line.count("|") == 5]
    (count,) = re.findall(r"(\d+) model types", (ROOT / "README.md").read_text())
    assert int(count) == rows.count("FFN") + rows.count("linears") > 0
    page = (ROOT / "docs/families.md").read_text()
    assert dict(re.findall(r"^\| ([\w ]+) \| .* \| (\d+) \|$", page, re.MULTILINE)) == {
        outcome: str(rows.count(outcome)) for outcome in OUTCOMES
    }


class Packed(torch.nn.Module):
    """A linear whose weights are all buffers, as those of kernels for GPTQ and AWQ."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().max(1, keepdim=True).values / 127
        self.register_buffer("scales", scale)
        self.register_buffer("qweight", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.qweight * self.scales)


@pytest.mark.parametrize(
    "settings",
    [{"mixing": "output"}, {"mixing": "projection"}, {"target_modules": ["q_proj", "down_proj"]}],
    ids=["output", "projection", "linears"],
)
def test_linears_whose_weights_are_buffers(settings: dict[str, Any]):
    """Their gradients are those on linears with the same weights."""
    gradients, ids = [], torch.tensor([[3, 4, 5, 6, 7]])
    for packed in (True, False):
        base = tiny_llama()
        for name, linear in list(base.named_modules()):
            if isinstance(linear, torch.nn.Linear) and name != "lm_head":
                own = Packed(linear)
                linear.weight.data = own.qweight * own.scales
                if packed:
                    base.set_submodule(name, own)
        torch.manual_seed(2)
        config = MoELoraConfig(num_experts=4, r=4, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
        model = get_peft_model(base, config)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[0].items():
        assert_near(gradient, gradients[1][name], name)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("codegen", "transformer.h.0.attn.causal_mask"),
        ("gpt2", "transformer.h.0.attn.masked_bias"),
        ("gpt_bigcode", "transformer.h.0.attn.bias"),
        ("gpt_neo", "transformer.h.0.attn.attention.bias"),
        ("gptj", "transformer.h.0.attn.bias"),
        ("opt", "model.decoder.version"),
        ("xglm", "model.embed_positions.weights"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("llama", "model.layers.0.self_attn.k_proj.k_scale"),
        ("llama", "score.weight"),
    ],
)
def test_what_older_versions_saved_beside_the_weights_is_left_out(name, key, tmp_path):
    """Masks, tables and heads of other tasks; a bias is another model's."""
    model = tiny(name)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, key: torch.ones(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    logits = Base(str(tmp_path)).load().eval()(input_ids=IDS).logits
    assert_near(logits, model.eval()(input_ids=IDS).logits)
