"""LoRA adapters as trainers of all sorts write them: which become experts, and what is said of the others."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    save_as_lora,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from compatibility.families import tiny
from moe_peft import force_experts, lora_to_moe
from moe_peft.combine.mix import mix
from moe_peft.models.introspection import observed_routing
from moe_peft.models.layer import native_layers, routed_layers
from moe_peft.models.steering import only_expert
from moe_peft.native.folders import LoraFolder, open_folder
from moe_peft.utils.messages import InputError
from tests.helpers.close import assert_near
from tests.helpers.mix_case import FFN, make_case, settings
from tests.helpers.models import tiny_llama
from tests.helpers.native_case import SIZE

ALL = [*FFN, "q_proj", "k_proj", "v_proj", "o_proj"]
OLD = {"auto_mapping", "revision", "rank_pattern", "alpha_pattern", "layers_pattern", "layers_to_transform"}
# What PEFT 0.21 writes beside the fields of earlier versions, all turned off.
NEW = {
    "alora_invocation_tokens": None, "arrow_config": None, "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "kasa_config": None, "layer_replication": None, "lora_bias": False,
    "lora_ga_config": None, "loftq_config": {}, "megatron_config": None, "megatron_core": "megatron.core",
    "monteclora_config": None, "peft_version": "0.21.2", "qalora_group_size": 16, "target_parameters": None,
    "trainable_token_indices": None, "use_bdlora": None, "use_dora": False, "use_qalora": False, "velora_config": None,
}  # fmt: skip

# name → the LoRA's settings, and what its adapter_config.json has beside or instead ("…" leaves a field out).
GOOD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "peft 0.3, q and v": ({"target_modules": ["q_proj", "v_proj"]}, dict.fromkeys(OLD, "…")),
    "peft 0.6, all linears": ({"target_modules": ALL, "r": 2}, {"loftq_config": {}, "rank_pattern": {}}),
    "peft 0.21": ({"target_modules": ALL}, NEW),
    "of a newer peft, with its new fields off": (
        {"target_modules": FFN}, {"use_mora": False, "mora_type": 6, "mora_mode": "sharing", "mora_config": None}
    ),
    "modules_to_save=[]": ({"target_modules": FFN}, {"modules_to_save": []}),
    "empty mappings": ({"target_modules": FFN}, {"modules_to_save": {}, "loftq_config": {}, "target_parameters": []}),
    "task of an encoder-decoder": ({"target_modules": FFN}, {"task_type": "SEQ_2_SEQ_LM"}),
    "no task": ({"target_modules": FFN}, {"task_type": None}),
    "task of features": ({"target_modules": ALL}, {"task_type": "FEATURE_EXTRACTION"}),
    "a regex": ({"target_modules": r".*\.layers\.\d+\.mlp\.(up|down)_proj"}, {}),
    "unsloth": (
        {"target_modules": ALL, "lora_dropout": 0},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}, "lora_dropout": 0},
    ),
    "axolotl, rank 16 and alpha 32": ({"target_modules": ALL, "r": 16, "lora_alpha": 32}, {"peft_version": "0.18.0"}),
    "rslora": ({"target_modules": ALL, "use_rslora": True}, {}),
    "patterns": ({"target_modules": FFN, "rank_pattern": {"up_proj": 2}, "alpha_pattern": {"down_proj": 3}}, {}),
    "alpha with a point": ({"target_modules": FFN}, {"lora_alpha": 8.0}),
    "the main revision": ({"target_modules": FFN}, {"revision": "main"}),
    "a head": ({"target_modules": [*ALL, "lm_head"]}, {}),
    "all linears, and a head in the file": ({"target_modules": [*ALL, "lm_head"]}, {"target_modules": "all-linear"}),
    "more in the file than it names": ({"target_modules": ALL}, {"target_modules": ["q_proj", "lm_head", "up_proj"]}),
    "of some layers": ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}, {}),
    "of a program beside PEFT": (
        {"target_modules": FFN}, {"lora_parameters": {"rank": 4, "scale": 2.0}, "trained_with": {"tool": "x"}}
    ),
    "gaussian": ({"target_modules": FFN}, {"init_lora_weights": "gaussian"}),
    "mica": ({"target_modules": FFN}, {"init_lora_weights": "mica"}),
    "eva": ({"target_modules": FFN}, {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}),
}  # fmt: skip
# Ten of them, which become one mixture.
TEN = [
    "peft 0.3, q and v", "peft 0.6, all linears", "peft 0.21", "of a newer peft, with its new fields off",
    "modules_to_save=[]", "task of an encoder-decoder", "a regex", "unsloth", "rslora", "patterns",
]  # fmt: skip

# name → what the config has, and what is said.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "switched on in a newer peft": ({"use_mora": True}, "use_mora=True: this version of PEFT .* does not know it"),
    "configured in a newer peft": ({"mora_config": {"type": 6}}, r"mora_config=\{'type': 6\}: this version of PEFT"),
    "a type of a newer peft": ({"peft_type": "MORA"}, "peft_type='MORA': PEFT .* has no such adapters"),
    "dora": ({"use_dora": True}, "use_dora=True: DoRA rescales the whole weight"),
    "biases": ({"bias": "all"}, "bias='all': biases of the base were trained"),
    "biases of its own": ({"lora_bias": True}, "lora_bias=True: an expert has no bias"),
    "a head": ({"modules_to_save": ["lm_head"]}, r"lacks the weights of modules_to_save=\['lm_head'\]"),
    "experts of a MoE": ({"target_parameters": ["mlp.experts.up"]}, "target_parameters=.*mlp.experts.up.*q_proj"),
    "an activated LoRA": ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens=.*: it is active only after"),
    "repeated layers": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication=.*: its base repeats some layers"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': it fits only a base that"),
    "a quantized number": ({"alpha_pattern": {"up_proj": "8"}}, r"alpha_pattern\.up_proj='8': must be a number"),
    "a rank in quotes": ({"r": "4"}, "r='4': must be a number"),
    "a rank of 0": ({"rank_pattern": {"up_proj": 0}}, r"rank_pattern\.up_proj=0: must be a number from 1"),
    "another rank": ({"r": 8}, r"has the ranks \(4, 4\), its config says 8"),
}  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory, tokenizer):
    return make_case(tmp_path_factory.mktemp("shapes"), tokenizer)


def write(folder: Path, case: Path, seed: int, lora: dict[str, Any], saved: dict[str, Any]) -> Path:
    """An adapter with these settings, whose config says `saved` besides."""
    config, base = LoraConfig(**{"r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM", **lora}), tiny_llama()
    torch.manual_seed(seed)
    model = get_peft_model(base, config)
    folder.mkdir()
    save_file(get_peft_model_state_dict(model), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    values = json.loads(json.dumps(config.to_dict(), default=sorted)) | {"base_model_name_or_path": str(case / "base")}
    values |= {"init_lora_weights": True, **saved}
    values = {name: value for name, value in values.items() if value != "…" and name != "runtime_config"}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", GOOD)
def test_adapters_of_real_shapes_become_experts_that_compute_the_same(name, case, tmp_path):
    lora, saved = GOOD[name]
    folder = write(tmp_path / "adapter", case, 7, lora, saved)
    model = lora_to_moe(tiny_llama(vocab=128), [folder, case / "a"]).eval()
    assert model.peft_config["default"].task_type == "CAUSAL_LM"
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad(), only_expert(model, 0):  # a head has the mean, of which this is the adapter's own part
        output = model(ids).logits
        expected = PeftModel.from_pretrained(tiny_llama(vocab=128), folder).eval()(ids).logits
    assert_near(output, expected)


@pytest.mark.parametrize("name", BAD)
def test_what_an_expert_cannot_have_is_one_line(name, case, tmp_path):
    saved, message = BAD[name]
    folder = write(tmp_path / "adapter", case, 7, {"target_modules": FFN}, saved)
    with pytest.raises(ValueError, match=message) as error:
        mix(settings(
            case, output=str(tmp_path / "out"), adapters=[str(folder), str(case / "a")], gates="arrow", data=None,
            label_column=None,
        ))  # fmt: skip
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


LINEARS = {"target_modules": FFN, "task_type": "CAUSAL_LM"}
OTHERS = {  # the type → an adapter of it
    "OFT": OFTConfig(**LINEARS, oft_block_size=4), "IA3": IA3Config(**LINEARS, feedforward_modules=[]),
    "LOHA": LoHaConfig(**LINEARS), "LOKR": LoKrConfig(**LINEARS), "VERA": VeraConfig(**LINEARS, r=64),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_adapters_of_other_types_are_called_by_their_type(kind, case, tmp_path):
    """With PEFT's conversion where it has one, which makes an adapter that is taken."""
    model = get_peft_model(tiny_llama(vocab=128), OTHERS[kind])
    model.peft_config["default"].base_model_name_or_path = str(case / "base")
    model.save_pretrained(tmp_path / "other")
    for refuse in (
        lambda: open_folder(tmp_path / "other", "adapters", LoraFolder),
        lambda: lora_to_moe(tiny_llama(vocab=128), [tmp_path / "other"] * 2),
        lambda: lora_to_moe(tiny_llama(vocab=128), [model] * 2),
    ):
        with pytest.raises(InputError, match=f"is an adapter of type {kind};") as error:
            refuse()
        assert ("save_as_lora" in str(error.value)) == (kind not in ("OFT", "IA3"))
    if kind not in ("OFT", "IA3"):
        save_as_lora(tmp_path / "lora", model, rank=2)
        assert lora_to_moe(tiny_llama(vocab=128), [tmp_path / "lora", case / "a"]).peft_config["default"].r == 4


@pytest.mark.parametrize("cut", [False, True])
def test_adalora_is_the_lora_that_peft_computes(cut, case, tmp_path):
    """From a folder and from memory, before its ranks are cut and after; one module has no rank left."""
    torch.manual_seed(0)
    config = AdaLoraConfig(**LINEARS, init_r=5, target_r=2, lora_alpha=6, total_step=9)
    base = tiny_llama(vocab=128).double()
    model = get_peft_model(base, config).eval()
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_()
    if cut:
        names = [name for name, _ in model.base_model.model.named_parameters() if ".lora_E." in name]
        rows = {name: [(i + row) % 3 > 0 for row in range(5)] for i, name in enumerate(names)} | {names[1]: [False] * 5}
        model.base_model.resize_modules_by_rank_pattern(rows, "default")
        model.peft_config["default"].rank_pattern = rows
    model.save_pretrained(tmp_path / "ada")
    model.base_model.peft_config["default"].base_model_name_or_path = str(case / "base")
    ids = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        saved = PeftModel.from_pretrained(tiny_llama(vocab=128).double(), tmp_path / "ada").eval()
        expected = saved(ids).logits
        for source in (tmp_path / "ada", saved):
            mixture = lora_to_moe(tiny_llama(vocab=128).double(), [source, case / "a"]).double().eval()
            with force_experts(mixture, 0):
                assert_near(mixture(ids).logits, expected)
    folder = open_folder(tmp_path / "ada", "adapters", LoraFolder, base=case / "base")
    folder.check_tensors()
    assert_near(folder.load("float32", on_accelerator=False)(ids).logits, expected.float())


def test_all_linears_of_a_moe_name_the_experts_part(tmp_path):
    """PEFT puts it into `target_parameters`; the LoRA on attention, as the message advises, is taken."""
    for targets, name in (("all-linear", "all"), (["q_proj", "v_proj"], "attention")):
        config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
        get_peft_model(moe_base("mixtral"), config).save_pretrained(tmp_path / name)
    with pytest.raises(InputError, match=r"target_parameters=.*experts.*q_proj.*moe-peft pick"):
        lora_to_moe(moe_base("mixtral"), [tmp_path / "all"] * 2)
    assert lora_to_moe(moe_base("mixtral"), [tmp_path / "attention"] * 2)


def test_an_adapter_of_mlx_lm_is_called_one(case, tmp_path):
    folder = write(tmp_path / "adapter", case, 7, {"target_modules": FFN}, {})
    (folder / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 8, "scale": 20.0}})
    )
    with pytest.raises(ValueError, match=r"is an adapter of mlx-lm's, .*mlx_lm.fuse"):
        mix(settings(case, output=str(tmp_path / "out"), adapters=[str(folder), str(case / "a")], gates="arrow",
                     data=None, label_column=None))  # fmt: skip


def moe_base(name: str) -> Any:
    torch.manual_seed(0)
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZE, num_local_experts=4))
    if name == "gpt_oss":
        return tiny("gpt_oss")
    shared = {"shared_expert_intermediate_size": 24} if name == "qwen2_moe" else {}
    config, model = {
        "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM), "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM)
    }[name]  # fmt: skip
    return model(config(**SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **shared))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_loras_beside_the_routed_experts_of_a_moe_become_experts(name, tmp_path):
    """
    On attention, and on Qwen2-MoE's shared expert: a forced expert is its LoRA as PEFT loads it, the base's config and
    its own router logits stay, and those who watch routing see the adapter's.
    """
    targets = ["q_proj", "v_proj", *(["shared_expert.up_proj"] if name == "qwen2_moe" else [])]
    folders = [tmp_path / "x", tmp_path / "y"]
    for i, folder in enumerate(folders):
        torch.manual_seed(i)
        config = LoraConfig(r=4, init_lora_weights=False, target_modules=targets, task_type="CAUSAL_LM")
        get_peft_model(moe_base(name), config).save_pretrained(folder)
    ids, base = torch.arange(3, 27).view(2, 12), moe_base(name).eval()
    fields, gates = base.config.to_dict(), len(native_layers(base))
    mixture = lora_to_moe(moe_base(name), folders, top_k=1).eval()
    mixture.save_pretrained(tmp_path / "mixture")
    again = PeftModel.from_pretrained(moe_base(name), tmp_path / "mixture").eval()
    with torch.no_grad():
        for i, folder in enumerate(folders):
            expected = PeftModel.from_pretrained(moe_base(name), folder).eval()(ids).logits
            for model in (mixture, again):
                with force_experts(model, i):
                    assert_near(model(ids).logits, expected)
        with mixture.disable_adapter():
            assert_near(mixture(ids).logits, base(ids).logits)
        seen: list[Any] = []
        with observed_routing(mixture, seen.append):
            output = mixture(ids, labels=ids, output_router_logits=True)
    assert len(output.router_logits) == gates and output.router_logits[0].shape == (24, 4)
    assert output.aux_loss > 0 and mixture.get_base_model().config.to_dict() == fields
    assert len(seen) == 1 and {logits.shape for logits in seen[0].router_logits} == {(24, 2)}
    assert len(seen[0].router_logits) == len(routed_layers(mixture)) >= 2 * gates


def test_a_base_that_is_an_adapter_is_called_one(case, tmp_path):
    with pytest.raises(ValueError, match=r"base='.*/b': is a LORA adapter, not a model: merge it into its base"):
        mix(settings(case, output=str(tmp_path / "out"), base=str(case / "b"), gates="arrow", data=None,
                     label_column=None))  # fmt: skip
    saved = {"base_model_name_or_path": str(case / "b")}
    folders = [str(write(tmp_path / name, case, i, {"target_modules": FFN}, saved)) for i, name in enumerate("xy")]
    with pytest.raises(ValueError, match=r"base_model_name_or_path='.*/b': is a LORA adapter, not a model"):
        mix(settings(case, output=str(tmp_path / "out"), adapters=folders, gates="arrow", data=None, label_column=None))


def test_ten_of_real_shapes_are_one_mixture_without_a_word(case, tmp_path, caplog):
    folders = [write(tmp_path / f"{i}", case, i, *GOOD[name]) for i, name in enumerate(TEN)]
    with caplog.at_level(logging.WARNING):
        mix(settings(
            case, output=str(tmp_path / "out"), adapters=list(map(str, folders)), gates="arrow", data=None,
            label_column=None,
        ))  # fmt: skip
    assert not [record.message for record in caplog.records if record.name.startswith("moe_peft")]
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["num_experts"], config["expert_names"]) == (10, list("0123456789"))


def test_embeddings_must_be_the_bases(case, tmp_path):
    """PEFT saves them beside the LoRA where tokens were added."""
    base = AutoModelForCausalLM.from_pretrained(case / "base")
    folder = write(tmp_path / "adapter", case, 7, {"target_modules": FFN}, {})
    state = load_file(folder / "adapter_model.safetensors")
    embeddings = base.get_input_embeddings().weight.detach().clone()

    def saved(tensor):
        names = ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight")
        head = base.get_output_embeddings().weight.detach().clone()
        save_file({**state, names[0]: tensor, names[1]: head}, folder / "adapter_model.safetensors")

    saved(embeddings)
    assert lora_to_moe(base, [folder, case / "a"]).peft_config["default"].num_experts == 2
    saved(embeddings + 1)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight was trained in full and differs from .*/a"):
        lora_to_moe(AutoModelForCausalLM.from_pretrained(case / "base"), [folder, case / "a"])
    saved(torch.cat([embeddings, embeddings[:2]]))
    with pytest.raises(ValueError, match=r"has 130 rows, the base's 128: tokens were added, and experts"):
        lora_to_moe(AutoModelForCausalLM.from_pretrained(case / "base"), [folder, case / "a"])


TRAINED_IN_FULL = ("model.norm", "model.layers.0.input_layernorm", "lm_head")


def trained_in_full(folder: Path, case: Path, seed: int, change: float, declared: bool) -> Path:
    """A LoRA whose file has complete tensors beside the matrices, and whose config says so or not."""
    saved = {"modules_to_save": ["input_layernorm", "model.norm", "lm_head"]} if declared else {}
    write(folder, case, seed, {"target_modules": ALL}, saved)
    state, base = load_file(folder / "adapter_model.safetensors"), tiny_llama(vocab=128)
    modules = [name for name, _ in base.named_modules() if name.endswith(("input_layernorm", "lm_head", "l.norm"))]
    for name in modules if declared else TRAINED_IN_FULL:
        state[f"base_model.model.{name}.weight"] = base.get_submodule(name).weight.detach() * (1 + change)
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("declared", [True, False])
def test_tensors_that_all_adapters_trained_alike_are_shared(declared, case, tmp_path):
    """In memory, and again from the mixture's folder: a forced expert is its LoRA as PEFT loads it."""
    folders = [trained_in_full(tmp_path / name, case, i, 0.5, declared) for i, name in enumerate("xy")]
    ids = torch.arange(3, 27).view(2, 12)
    model = lora_to_moe(tiny_llama(vocab=128), folders).eval()
    model.save_pretrained(tmp_path / "mixture")
    again = PeftModel.from_pretrained(tiny_llama(vocab=128), tmp_path / "mixture").eval()
    for i, folder in enumerate(folders):
        with torch.no_grad():
            expected = PeftModel.from_pretrained(tiny_llama(vocab=128), folder).eval()(ids).logits
            for mixture in (model, again):
                with force_experts(mixture, i):
                    assert_near(mixture(ids).logits, expected)
    with torch.no_grad(), model.disable_adapter():
        assert_near(model(ids).logits, tiny_llama(vocab=128).eval()(ids).logits)
    with pytest.raises(ValueError, match=r"base_expert=True: all experts would share the adapters' .*\.weight"):
        lora_to_moe(tiny_llama(vocab=128), folders, base_expert=True)


@pytest.mark.parametrize("tying", [False, True])
def test_trained_embeddings_are_tied_to_the_head_as_the_loras_have_them(tying, tmp_path):
    folders = [tmp_path / "x", tmp_path / "y"]
    for i, folder in enumerate(folders):
        torch.manual_seed(i)
        config = LoraConfig(
            r=4, init_lora_weights=False, target_modules=FFN, task_type="CAUSAL_LM", modules_to_save=["embed_tokens"],
            ensure_weight_tying=tying,
        )  # fmt: skip
        model = get_peft_model(tiny_llama(tie_word_embeddings=True), config)
        model.get_base_model().model.embed_tokens.modules_to_save["default"].weight.data.mul_(1.5)
        model.save_pretrained(folder)
    ids, mixture = torch.arange(3, 27).view(2, 12), lora_to_moe(tiny_llama(tie_word_embeddings=True), folders).eval()
    for i, folder in enumerate(folders):
        with torch.no_grad(), force_experts(mixture, i):
            expected = PeftModel.from_pretrained(tiny_llama(tie_word_embeddings=True), folder).eval()(ids).logits
            assert_near(mixture(ids).logits, expected)


def test_tensors_that_adapters_trained_otherwise_are_named(case, tmp_path):
    same, changed, more = (trained_in_full(tmp_path / f"{x}", case, 0, x, True) for x in (0.0, 0.5, 0.25))
    assert lora_to_moe(tiny_llama(vocab=128), [same, case / "a"]).peft_config["default"].modules_to_save is None
    for others in ((case / "a", changed), (changed, same), (changed, more)):
        with pytest.raises(ValueError, match=r"lm_head\.weight was trained in full and differs from"):
            lora_to_moe(tiny_llama(vocab=128), others)


def test_other_chat_templates_are_a_warning(case, tmp_path, tokenizer, caplog):
    folders = [write(tmp_path / name, case, i, {"target_modules": FFN}, {}) for i, name in enumerate("xy")]
    for folder, template in zip(folders, ("{{ messages }}", "{{ messages[0] }}"), strict=True):
        tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(template)
    with caplog.at_level(logging.WARNING, "moe_peft"):
        mix(settings(
            case, output=str(tmp_path / "out"), adapters=list(map(str, folders)), gates="arrow", data=None,
            label_column=None,
        ))  # fmt: skip
    assert [r.message for r in caplog.records if "chat template" in r.message and "may not look" in r.message]
