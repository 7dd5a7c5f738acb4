"""A MoE-LoRA adapter is saved, loaded, switched, copied and removed like a LoRA adapter; wrong use is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import cpu_offload
from packaging.version import Version
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.peft import MIN_PEFT_VERSION
from trl.trainer.utils import disable_dropout_in_model

from moe_peft import MoELoraConfig, expert_to_lora, lora_to_moe
from moe_peft.adapter.layers import MoELoraLayer
from moe_peft.utils.messages import InputError
from tests.helpers.adapters import save_adapter_with_sets
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama, tiny_opt

TESTS = Path(__file__).parents[1]
PROTOCOL = ("num_experts", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
IDS = torch.randint(3, 128, (2, 10), generator=torch.Generator().manual_seed(1))

# What an adapter may be made of, each setting with files of its own.
KINDS: dict[str, dict[str, Any]] = {
    "output": {},
    "projection": {"mixing": "projection", "normalize_top_k": False},
    "one-projection": {"target_projections": ["down_proj"], "use_rslora": True},
    "one-expert": {"num_experts": 1, "top_k": 1},
    "attention": {"target_modules": ["mlp", "q_proj", "v_proj"], "num_experts_pattern": {"q_proj": 1}},
    "patterns": {
        "num_experts_pattern": {"layers.0.mlp": 6},
        "top_k_pattern": {"layers.0.mlp": 3},
        "rank_pattern": {"layers.1.mlp": 2},
    },
    "lm-head": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": IDS[0, :3].tolist()},
    "bottleneck": {
        "expert_type": "bottleneck",
        "bottleneck_size": 8,
        "target_modules": ["mlp", "q_proj"],
        "num_experts_pattern": {"q_proj": 1},
    },
}


def adapter(**kwargs: Any) -> MoELoraConfig:
    """A config whose adapter changes the logits from the start and whose aux loss is too large to overlook."""
    defaults = {"num_experts": 4, "top_k": 2, "r": 4, "router_aux_loss_coef": 0.5, "init_lora_weights": False}
    return MoELoraConfig(task_type="CAUSAL_LM", **{**defaults, **kwargs})


def adapted(seed: int = 1, base: PreTrainedModel | None = None, name: str = "default", **kwargs: Any) -> PeftModel:
    base = tiny_llama() if base is None else base
    torch.manual_seed(seed)
    return get_peft_model(base, adapter(**kwargs), adapter_name=name).eval()


def add(model: Any, name: str, seed: int, **kwargs: Any) -> None:
    """Add an adapter with the values that `adapted(seed, **kwargs)` has."""
    torch.manual_seed(seed)
    model.add_adapter(name, adapter(**kwargs))
    model.eval()


def scramble_head(model: PeftModel) -> None:
    """Give the trained copies of `modules_to_save` and rows of tokens values of their own."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".modules_to_save." in name or ".trainable_tokens_delta." in name:
            parameter.data.normal_(generator=generator)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def assert_aux_loss_counted_once(model: Any, routers: int, coef: float = 0.5) -> None:
    """`loss` holds the balancing loss exactly once, from one tensor of logits per router."""
    out = model(input_ids=IDS, labels=IDS)
    language_loss = model(input_ids=IDS, labels=IDS, output_router_logits=False).loss
    assert len(out.router_logits) == routers
    assert out.aux_loss > 0.9
    assert_near(out.loss, language_loss + coef * out.aux_loss)


def hooks(model: torch.nn.Module) -> dict[str, int]:
    kinds = [kind for kind in vars(model) if kind.endswith(("_hooks", "_with_kwargs", "_always_called"))]
    counts = {(n, kind): len(vars(m)[kind]) for n, m in model.named_modules() for kind in kinds if vars(m).get(kind)}
    return {f"{name}.{kind}": count for (name, kind), count in counts.items()}


def snapshot(model: torch.nn.Module) -> dict[str, Any]:
    """Everything an operation that failed, or was undone, must leave as it was (tensors apart)."""
    return {
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "attributes": {key for key in vars(model) if not key.startswith("_hf_")},
        "config": model.config.to_dict(),
        "hooks": hooks(model),
        "shapes": {key: value.shape for key, value in model.state_dict().items()},
        "active": [m.active_adapters for m in model.modules() if isinstance(m, BaseTunerLayer)],
        "trained": {name for name, p in model.named_parameters() if p.requires_grad},
        "adapters": list(getattr(model, "peft_config", {})),
    }


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return str(folder)


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_adapter_gives_the_saved_ones_logits_bit_for_bit(kind: str, base_folder: str, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    unadapted = logits(base)
    model = adapted(base=base, **KINDS[kind])
    scramble_head(model)
    expected = logits(model)
    assert (expected - unadapted).abs().max() > 1e-3
    model.save_pretrained(tmp_path)

    def fresh() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(base_folder)

    assert_equal(logits(PeftModel.from_pretrained(fresh(), tmp_path)), expected)
    assert_equal(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path)), expected)
    # transformers puts the file's tensors themselves into the model: another alignment may round differently.
    assert_near(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_low_cpu_mem_usage_loads_the_same_values_and_leaves_none_on_the_meta_device(kind: str, tmp_path):
    model = adapted(**KINDS[kind])
    scramble_head(model)
    model.save_pretrained(tmp_path)
    # Where there is a GPU, PEFT reads to it, and leaves modules_to_save of a model on the CPU there.
    options = {"low_cpu_mem_usage": True, "torch_device": "cpu"}
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path, **options)
    loaded.load_adapter(tmp_path, "again", **options)
    assert {p.device.type for p in loaded.parameters()} == {"cpu"}
    values = dict(model.named_parameters())
    for name in ("default", "again"):
        loaded.set_adapter(name)
        assert_near(logits(loaded), logits(model))
        own = {key: p for key, p in loaded.named_parameters() if f".{name}." in key}
        assert own
        for key, parameter in own.items():
            assert_equal(parameter, values[key.replace(f".{name}.", ".default.")])


def test_saved_keys_and_shapes_are_those_of_the_golden_file(tmp_path):
    """If this fails on purpose, adapters that users have saved no longer load: bump a format version instead."""
    adapted(**KINDS["attention"]).save_pretrained(tmp_path)
    shapes = {key: list(value.shape) for key, value in load_file(tmp_path / "adapter_model.safetensors").items()}
    assert shapes == json.loads((TESTS / "golden" / "adapter_keys.json").read_text())


FRESH_PROCESS = """
import sys, traceback
from peft import AutoPeftModelForCausalLM as Auto
try:
    Auto.from_pretrained(sys.argv[1])
except Exception:
    traceback.print_exc()
from tests.helpers.adapters import save_adapter_with_sets
save_adapter_with_sets(sys.argv[2])
"""


@pytest.fixture(scope="module")
def fresh_process(base_folder: str, tmp_path_factory) -> tuple[Path, str]:
    """
    Of a process of another hash seed: the folder of an adapter that it saved, and what it said when it loaded one
    before it had imported moe_peft.
    """
    folder = tmp_path_factory.mktemp("fresh")
    adapted(base=AutoModelForCausalLM.from_pretrained(base_folder)).save_pretrained(folder / "given")
    env = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    command = [sys.executable, "-c", FRESH_PROCESS, str(folder / "given"), str(folder / "saved")]
    done = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "saved", done.stderr


@pytest.mark.slow
def test_same_seed_saves_the_same_bytes_in_every_process(fresh_process, tmp_path):
    save_adapter_with_sets(tmp_path)
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        assert (tmp_path / name).read_bytes() == (fresh_process[0] / name).read_bytes(), name


def test_model_cards_of_all_adapters_say_once_that_loading_needs_the_import(tmp_path):
    model = adapted()
    add(model, "second", seed=2)
    for _ in range(2):
        model.save_pretrained(tmp_path)
    for folder in (tmp_path, tmp_path / "second"):
        card = (folder / "README.md").read_text()
        assert card.count("import moe_peft") == 1
        assert card.count("AutoPeftModelForCausalLM.from_pretrained") == 1


@pytest.mark.slow
def test_a_config_alone_is_saved_as_one_file(tmp_path):
    adapter().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_config.json"]
    assert peft.PeftConfig.from_pretrained(tmp_path).to_dict() == adapter().to_dict()


def test_loading_without_the_import_stops_with_a_key_error_naming_the_type(fresh_process):
    lines = [line for line in fresh_process[1].splitlines() if line.startswith("KeyError")]
    assert lines == ["KeyError: 'MOE_LORA'"]


def test_modules_to_save_are_saved_with_the_adapter_and_leave_the_base_alone(tmp_path):
    model = adapted(modules_to_save=["lm_head"])
    scramble_head(model)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    head = model.get_base_model().lm_head
    assert_equal(saved["base_model.model.lm_head.weight"], head.modules_to_save["default"].weight)
    assert_equal(head.original_module.weight, tiny_llama().lm_head.weight)
    assert not torch.equal(head.original_module.weight, head.modules_to_save["default"].weight)


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("SEQ_CLS", "SequenceClassification"), ("TOKEN_CLS", "TokenClassification"),
        ("QUESTION_ANS", "QuestionAnswering"), ("FEATURE_EXTRACTION", ""),
    ],
)  # fmt: skip
def test_the_head_of_every_task_is_trained_and_saved_as_with_a_lora(task: str, kind: str, tmp_path):
    def base() -> Any:
        torch.manual_seed(0)
        return getattr(transformers, f"Llama{'For' * bool(kind)}{kind or 'Model'}")(tiny_llama().config).eval()

    def made(config: Any) -> tuple[Any, dict[str, torch.Size]]:
        model = get_peft_model(base(), config).eval()
        heads = [p for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
        with torch.no_grad():
            for parameter in heads:
                parameter += 1
        model.save_pretrained(tmp_path / config.peft_type.value)
        saved = load_file(tmp_path / config.peft_type.value / "adapter_model.safetensors")
        return model, {key: w.shape for key, w in saved.items() if "lora_" not in key}

    of_lora = made(LoraConfig(task_type=task, target_modules=["q_proj"]))[1]
    model, of_ours = made(MoELoraConfig(task_type=task, num_experts=2))
    assert of_ours == of_lora and bool(of_ours) == bool(kind)
    loaded = PeftModel.from_pretrained(base(), tmp_path / "MOE_LORA").eval()
    with torch.no_grad():
        assert torch.equal(loaded(IDS)[0], model(IDS)[0])


@pytest.mark.parametrize("task", [None, "own"])
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("SequenceClassification", "SEQ_CLS"), ("TokenClassification", "TOKEN_CLS"),
        ("QuestionAnswering", "QUESTION_ANS"), ("FeatureExtraction", "FEATURE_EXTRACTION"), ("CausalLM", "CAUSAL_LM"),
    ],
)  # fmt: skip
def test_pefts_classes_take_a_config_with_and_without_its_task(kind: str, own: str, task: str | None, tmp_path):
    torch.manual_seed(0)
    name = "LlamaModel" if kind == "FeatureExtraction" else f"LlamaFor{kind}"
    base = getattr(transformers, name)(tiny_llama().config)
    config = MoELoraConfig(num_experts=2, task_type=task and own)
    model = getattr(peft, f"PeftModelFor{kind}")(base, config)
    heads = {n.partition(".modules_to_save")[0] for n, p in model.named_parameters() if "modules_to_save" in n}
    assert len(heads) == (kind not in ("FeatureExtraction", "CausalLM"))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(getattr(transformers, name)(tiny_llama().config), tmp_path)
    assert {n for n, _ in loaded.named_parameters() if "moe_lora_A" in n}


@pytest.mark.parametrize(
    "other", [{"hidden": 32}, {"layers": 1}, {"layers": 3}], ids=["other width", "fewer layers", "more layers"]
)
def test_adapter_of_another_base_is_refused_in_one_line(other: dict[str, int], tmp_path):
    adapted(base=tiny_llama(**other)).save_pretrained(tmp_path)
    for load in (
        lambda: PeftModel.from_pretrained(tiny_llama(), tmp_path),
        lambda: adapted().load_adapter(tmp_path, "b"),
    ):
        with pytest.raises(ValueError, match=r"layers\.\d\.mlp\.moe_lora_") as error:
            load()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("part", ["moe_lora_A", "moe_lora_B", "moe_lora_router"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused_in_one_line(part: str, value: float, tmp_path):
    adapted().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    name = next(name for name in weights if "layers.1" in name and part in name)
    weights[name].view(-1)[-1] = value
    save_file(weights, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    for load in (
        lambda: PeftModel.from_pretrained(tiny_llama(), tmp_path),
        lambda: adapted().load_adapter(tmp_path, "b"),
    ):
        with pytest.raises(ValueError, match=rf"layers\.1\.mlp\.{part}.*: the adapter's weights hold NaN") as error:
            load()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("is_trainable", [False, True])
def test_is_trainable_decides_whether_a_loaded_adapter_trains(is_trainable: bool, tmp_path):
    adapted(**KINDS["attention"]).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(tiny_llama(), tmp_path, is_trainable=is_trainable)
    model(input_ids=IDS, labels=IDS).loss.backward() if is_trainable else None
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (is_trainable and "moe_lora_" in name), name
        assert (parameter.grad is not None) == parameter.requires_grad, name


def test_status_names_the_adapter_type():
    status = adapted().get_model_status()
    assert status.peft_types == {"default": "MOE_LORA"}
    assert status.num_adapter_layers == 2
    assert status.requires_grad == {"default": True}


# --- several adapters -----------------------------------------------------------------------------------------------


def test_a_name_that_keeps_peft_from_saving_other_adapters_is_warned_of(tmp_path):
    model = adapted()
    for name in ("1", "down_proj"):
        with pytest.warns(UserWarning, match=rf"adapter_name='{name}'.*choose another name"):
            model.add_adapter(name, model.peft_config["default"])
    with warnings.catch_warnings(action="error"):
        model.add_adapter("other", model.peft_config["default"])
    model.save_pretrained(tmp_path, selected_adapters=["default"])
    saved = load_file(tmp_path / "adapter_model.safetensors")
    # If they are there, PEFT is mended, and the warning can go.
    assert not any("layers.1." in name or "down_proj" in name for name in saved)


FIRST = {"target_modules": ["mlp", "q_proj"], "num_experts_pattern": {"q_proj": 1}}
SECOND = {"target_modules": ["mlp", "v_proj"], "num_experts": 6, "top_k": 3, "r": 2, "mixing": "projection"}


def test_each_adapter_computes_as_if_it_were_alone(tmp_path):
    first, second = logits(adapted(seed=1, **FIRST)), logits(adapted(seed=2, **SECOND))
    model = adapted(seed=1, **FIRST)
    config = model.get_base_model().config

    add(model, "second", seed=2, **SECOND)
    assert_equal(logits(model), first)
    assert (config.num_experts, config.num_experts_per_tok) == (4, 2)

    model.set_adapter("second")
    assert (config.num_experts, config.num_experts_per_tok) == (6, 3)
    assert_equal(logits(model), second)
    assert_aux_loss_counted_once(model, routers=4)

    model.save_pretrained(tmp_path)
    model.set_adapter("default")
    assert (config.num_experts, config.num_experts_per_tok) == (4, 2)
    assert_equal(logits(model), first)

    model.delete_adapter("second")
    assert_equal(logits(model), first)
    assert not [name for name, _ in model.named_parameters() if ".second" in name]
    assert_aux_loss_counted_once(model, routers=2)

    model.load_adapter(tmp_path / "second", "third")
    assert_equal(logits(model), first)
    model.set_adapter("third")
    assert_equal(logits(model), second)
    assert (config.num_experts, config.num_experts_per_tok) == (6, 3)


def test_deleting_the_active_adapter_activates_the_one_that_is_left():
    model = adapted(seed=1, **FIRST)
    expected = logits(model)
    add(model, "second", seed=2, **SECOND)
    model.set_adapter("second")
    with pytest.warns(UserWarning, match="Setting active adapter to default"):
        model.delete_adapter("second")
    assert model.active_adapters == ["default"]
    assert_equal(logits(model), expected)
    assert model.get_base_model().config.num_experts == 4


def test_deleting_the_active_adapter_works_where_it_alone_adapted_the_first_layer():
    model = adapted(seed=1)
    expected = logits(model)
    add(model, "second", seed=2, target_modules=["q_proj", "mlp"], num_experts=6)
    model.set_adapter("second")
    with pytest.warns(UserWarning, match="Setting active adapter to default"):
        model.delete_adapter("second")
    assert model.active_adapters == ["default"]
    assert_equal(logits(model), expected)
    assert_aux_loss_counted_once(model, routers=2)


def test_deleting_the_last_adapter_leaves_the_base_model_computing():
    model = adapted()
    base = model.get_base_model()
    model.delete_adapter("default")
    assert_equal(logits(base), logits(tiny_llama()))
    assert not [name for name in PROTOCOL if hasattr(base.config, name)]
    assert base(input_ids=IDS, labels=IDS).get("aux_loss") is None


def test_adapters_active_together_add_their_updates_of_a_linear():
    model = adapted(seed=1, **FIRST)
    add(model, "second", seed=2, **{**SECOND, "target_modules": ["mlp", "q_proj"]})
    model.double()
    x = torch.randn(3, 5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer, update = model.get_base_model().model.layers[0].self_attn.q_proj, {}
    for names in (["default"], ["second"], ["default", "second"]):
        model.base_model.set_adapter(names)
        update["+".join(names)] = layer(x) - layer.base_layer(x)
    assert all(value.abs().max() > 1e-4 for value in update.values())
    assert_near(update["default+second"], update["default"] + update["second"])


def test_adapters_active_together_all_record_their_routers():
    model = adapted(seed=1, num_experts=4)
    add(model, "second", seed=2, num_experts=6, mixing="projection")
    model.base_model.set_adapter(["default", "second"])
    out = model(input_ids=IDS, labels=IDS)
    assert [logits.shape for logits in out.router_logits] == [(20, 6)] * 4
    assert model.get_base_model().config.num_experts == 6
    assert_aux_loss_counted_once(model, routers=4)


@pytest.mark.parametrize("mixing", ["output", "projection"])
def test_a_trainer_that_turns_dropout_off_turns_all_of_it_off(mixing: str):
    """As TRL does for DPO and KTO, which compare two passes."""
    model = adapted(num_experts=4, lora_dropout=0.5, mixing=mixing).train()
    with torch.no_grad():
        assert not torch.equal(logits(model), logits(model))
        disable_dropout_in_model(model)
        assert torch.equal(logits(model), logits(model))
        model.eval().add_adapter("later", model.peft_config["default"])
        model.set_adapter("later")
        assert torch.equal(logits(model), logits(model))


def test_a_config_that_was_used_is_as_it_was():
    def scalings(config: MoELoraConfig) -> list[float]:
        model = get_peft_model(tiny_llama(), config)
        assert model.peft_config["default"].lora_alpha == 4 * config.r
        return [m.moe_lora_spec["default"].scaling for m in model.modules() if isinstance(m, MoELoraLayer)]

    config = MoELoraConfig(num_experts=8, top_k_pattern={r"layers\.0\.mlp": 1})
    for r in (4, 16):
        assert scalings(dataclasses.replace(config, r=r)) == [2.0, 4.0]
        config.r = r
        assert scalings(config) == [2.0, 4.0]
    assert config.lora_alpha is None and config.alpha_pattern == {}


def test_disabled_adapter_gives_the_bases_logits_and_loss():
    base = tiny_llama().eval()
    model = adapted(**KINDS["attention"])
    with model.disable_adapter():
        out = model(input_ids=IDS, labels=IDS)
    expected = base(input_ids=IDS, labels=IDS)
    assert_equal(out.logits, expected.logits)
    assert_equal(out.loss, expected.loss)
    assert out.get("aux_loss") is None
    assert_aux_loss_counted_once(model, routers=4)


def test_adapter_on_linears_inside_an_ffn_that_another_adapter_wraps(tmp_path):
    inner = {"target_modules": ["gate_proj", "down_proj"]}
    expected = {"inner": logits(adapted(seed=1, **inner)), "outer": logits(adapted(seed=2))}
    model = adapted(seed=1, name="inner", **inner)
    add(model, "outer", seed=2)
    model.save_pretrained(tmp_path)
    for name in ("inner", "outer"):
        model.set_adapter(name)
        assert_equal(logits(model), expected[name])
        assert_equal(logits(PeftModel.from_pretrained(tiny_llama(), tmp_path / name)), expected[name])
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, BaseTunerLayer) and name in layer.moe_lora_B:
                    layer.reset_parameters(name)
        assert not torch.equal(logits(model), expected[name])
        model.load_adapter(tmp_path / name, name)  # as a trainer resumes
        assert_equal(logits(model), expected[name])


def test_target_inside_an_ffn_that_is_wrapped_already_is_refused():
    """PEFT passes over modules inside a tuner layer, so the adapter would silently lack them."""
    model = adapted()
    before = snapshot(model.get_base_model())
    with pytest.raises(ValueError, match="gate_proj"):
        add(model, "second", seed=2, target_modules=["gate_proj", "q_proj"])
    assert snapshot(model.get_base_model()) == before


# --- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_compute_the_same_and_are_independent(duplicate: Callable[[PeftModel], PeftModel]):
    model = adapted(**KINDS["attention"])
    expected = logits(model)
    twin = duplicate(model)
    assert_equal(logits(twin), expected)
    assert_aux_loss_counted_once(twin, routers=4)
    assert hooks(twin) == hooks(model)

    add(twin, "second", seed=2, num_experts=6)
    twin.set_adapter("second")
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if "moe_lora_" in name:
                parameter.zero_()
    assert_equal(logits(model), expected)
    assert model.get_base_model().config.num_experts == 4
    assert_aux_loss_counted_once(model, routers=4)


def test_unloading_a_copy_leaves_the_original_its_hooks():
    model = adapted(target_modules=["q_proj"])
    twin = copy.deepcopy(model).unload()
    assert hooks(twin) == {}
    assert_equal(logits(twin), logits(tiny_llama()))
    assert_aux_loss_counted_once(model, routers=2)


# --- number formats and generation ----------------------------------------------------------------------------------


def adapter_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if "moe_lora_" in name}


@pytest.mark.parametrize("autocast, expected", [(True, torch.float32), (False, torch.bfloat16)])
def test_adapter_of_a_bfloat16_base(autocast: bool, expected: torch.dtype, tmp_path):
    base = tiny_llama().bfloat16()
    torch.manual_seed(1)
    config = adapter(**KINDS["attention"], top_k=4)  # all experts, so that rounding never chooses others
    model = get_peft_model(base, config, autocast_adapter_dtype=autocast).eval()
    assert {p.dtype for p in adapter_parameters(model).values()} == {expected}
    with torch.no_grad():
        out = model(input_ids=IDS, output_router_logits=True)
    assert out.logits.dtype == torch.bfloat16
    assert {r.dtype for r in out.router_logits} == {torch.float32}
    tokens = model.generate(input_ids=IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert tokens.shape == (2, 13)
    assert_equal(tokens[:, :10], IDS)
    assert_equal(tokens[:, 10], out.logits[:, -1].argmax(-1))

    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    for name, parameter in adapter_parameters(loaded).items():
        assert parameter.dtype == torch.float32
        assert_equal(parameter, model.get_parameter(name).float())
    assert_near(logits(loaded), out.logits.float(), dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["output", "projection", "attention", "bottleneck"])
def test_generation_with_the_cache_equals_generation_without(kind: str):
    model = adapted(**KINDS[kind])
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0  # left padding
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    outs = [
        model.generate(input_ids=IDS, attention_mask=mask, use_cache=use_cache, **settings)
        for use_cache in (True, False)
    ]
    assert_equal(outs[0].sequences, outs[1].sequences)
    assert_near(torch.stack(outs[0].logits), torch.stack(outs[1].logits))
    assert len(outs[0].logits) == 6


# --- the way back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [["mlp"], ["q_proj"], ["gate_proj", "v_proj", "mlp"]], ids=str)
def test_unload_restores_the_base_model_exactly(targets: list[str]):
    base = tiny_llama().eval()
    base.requires_grad_(False)  # as PEFT leaves it
    before, expected = snapshot(base), logits(base)
    tensors = {key: value.clone() for key, value in base.state_dict().items()}
    model = adapted(base=base, target_modules=targets[:2])
    if targets[2:]:  # an FFN wrapped by one adapter around linears with another
        add(model, "second", seed=2, target_modules=targets[2:])
    model(input_ids=IDS, labels=IDS)
    assert model.unload() is base
    assert snapshot(base) == before
    for key, value in base.state_dict().items():
        assert_equal(value, tensors[key])
    assert_equal(logits(base), expected)
    assert_equal(logits(adapted(base=base)), logits(adapted()))


LORA = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")

REFUSED: dict[str, tuple[Callable[[PeftModel, str], Any], str]] = {
    "merge_and_unload": (lambda m, _: m.merge_and_unload(), "cannot merge.*native MoE.*expert_to_lora"),
    "merge_adapter": (lambda m, _: m.merge_adapter(), "cannot merge.*native MoE.*expert_to_lora"),
    "unmerge_adapter": (lambda m, _: m.unmerge_adapter(), "cannot merge"),
    "layer.merge": (lambda m, _: m.get_base_model().model.layers[0].mlp.merge(), "cannot merge"),
    "layer.unmerge": (lambda m, _: m.get_base_model().model.layers[0].mlp.unmerge(), "cannot merge"),
    "add_weighted_adapter": (lambda m, _: m.add_weighted_adapter(["default"], [1.0], "sum"), "weighted adapters"),
    "adapter_names": (lambda m, _: m(input_ids=IDS, adapter_names=["default", "__base__"]), "adapter_names"),
    "generate": (
        lambda m, _: m.generate(input_ids=IDS, adapter_names=["default", "__base__"], max_new_tokens=1),
        "adapter_names",
    ),
    "other type": (lambda m, _: m.add_adapter("plain", LORA), "MOE_LORA"),
    "mixed": (lambda m, _: get_peft_model(m.get_base_model(), adapter(), mixed=True), "MOE_LORA"),
    "hotswap": (lambda m, folder: hotswap_adapter(m, folder, adapter_name="default"), "MOE_LORA"),
    "no such module": (lambda m, _: add(m, "bad", 2, target_modules=["nowhere"]), "nowhere"),
    "not a linear": (lambda m, _: add(m, "bad", 2, target_modules=["input_layernorm"]), "input_layernorm"),
    "module and its child": (
        lambda m, _: add(m, "bad", 2, target_modules=["q_proj", "mlp", "gate_proj"]),
        "mlp.*gate_proj",
    ),
    "no such projection": (lambda m, _: add(m, "bad", 2, target_projections=["w1"]), "target_projections.*w1.*up_proj"),
    "name in use": (lambda m, _: add(m, "default", 2), "default"),
    "no such adapter": (lambda m, _: m.set_adapter("nobody"), "nobody"),
}


@pytest.mark.filterwarnings("ignore:You are trying to modify a model")
@pytest.mark.parametrize("operation", REFUSED)
def test_what_cannot_be_done_is_refused_before_anything_is_touched(operation: str, tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    base, expected = model.get_base_model(), logits(model)
    before = snapshot(base)
    attempt, message = REFUSED[operation]
    with pytest.raises(ValueError, match=message) as error:
        attempt(model, str(tmp_path))
    assert "\n" not in str(error.value)
    assert snapshot(base) == before
    assert list(model.peft_config) == ["default"]
    assert_equal(logits(model), expected)
    assert_aux_loss_counted_once(model, routers=2)


def test_failed_first_adapter_leaves_the_base_model_as_it_was():
    base = tiny_llama()
    before = snapshot(base)
    for targets in (["nowhere"], ["input_layernorm"], ["mlp", "input_layernorm"], ["mlp", "gate_proj"]):
        with pytest.raises(ValueError, match=targets[-1]):
            get_peft_model(base, adapter(target_modules=targets))
        assert snapshot(base) == before


# --- transformers' own adapter methods ------------------------------------------------------------------------------

# transformers may ask for a PEFT that is not out yet: its methods then refuse plain LoRA, too.
with_transformers_methods = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"transformers' own adapter methods ask for peft {MIN_PEFT_VERSION}; here is {peft.__version__}",
)


@with_transformers_methods
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_transformers_own_methods_add_switch_disable_and_delete(tmp_path):
    first, second = logits(adapted(seed=1, **FIRST)), logits(adapted(seed=2, **SECOND))
    model = tiny_llama().eval()
    for name, seed, settings in (("first", 1, FIRST), ("second", 2, SECOND)):
        torch.manual_seed(seed)
        model.add_adapter(adapter(**settings), name)
        model.eval()
    assert model.active_adapters() == ["second"]
    assert_equal(logits(model), second)
    assert_aux_loss_counted_once(model, routers=4)
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (6, 3)

    model.save_pretrained(tmp_path)
    model.set_adapter("first")
    assert_equal(logits(model), first)
    assert_aux_loss_counted_once(model, routers=2)
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (4, 2)

    model.disable_adapters()
    assert_equal(logits(model), logits(tiny_llama()))
    assert model(input_ids=IDS, labels=IDS).get("aux_loss") is None
    model.enable_adapters()
    assert_equal(logits(model), first)

    model.delete_adapter("second")
    assert_equal(logits(model), first)
    model.delete_adapter("first")
    assert_equal(logits(model), logits(tiny_llama()))
    assert not [name for name in PROTOCOL if hasattr(model.config, name)]

    loaded = tiny_llama()
    loaded.load_adapter(tmp_path)
    assert_equal(logits(loaded), second)
    assert_aux_loss_counted_once(loaded, routers=4)
    assert_equal(logits(PeftModel.from_pretrained(tiny_llama(), tmp_path)), second)


@with_transformers_methods
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_router_logits_follow_the_layers_when_transformers_deletes_the_active_adapter():
    model = tiny_llama().eval()
    for name, seed, targets in (("first", 1, ["mlp"]), ("second", 2, ["q_proj", "mlp"])):
        torch.manual_seed(seed)
        model.add_adapter(adapter(target_modules=targets), name)
    model.eval()
    with pytest.warns(UserWarning, match="Setting active adapter to first"):
        model.delete_adapter("second")
    assert_equal(logits(model), logits(adapted(seed=1)))
    assert_aux_loss_counted_once(model, routers=2)


# --- which modules, with which settings -----------------------------------------------------------------------------

# Values that would compute something else than asked, or NaN.
WRONG: list[tuple[str, Any]] = [
    *(("r", value) for value in (0, -1, 1.5, None)),
    *(("num_experts", value) for value in (0, -1, "8")),
    *(("top_k", value) for value in (0, 9, True)),
    *(("lora_alpha", value) for value in (0, -1, float("nan"))),
    *(("lora_dropout", value) for value in (1.0, -0.1, float("nan"))),
    *(("router_jitter_noise", value) for value in (1.0, -0.1)),
    *(("router_aux_loss_coef", value) for value in (-0.01, float("nan"))),
    *(("mixing", value) for value in ("sum", None)),
    *(("expert_type", value) for value in ("adapter", None)),
    ("bottleneck_size", 0),
    ("target_projections", []),
    *(("init_lora_weights", value) for value in ("pissa", None)),
    *((f"{name}_pattern", {"mlp": 0}) for name in ("num_experts", "top_k", "rank", "alpha")),
]


@pytest.mark.parametrize("field, value", WRONG, ids=lambda value: repr(value) if not isinstance(value, str) else value)
def test_wrong_config_value_is_one_line_naming_field_and_value(field: str, value: Any):
    with pytest.raises(ValueError) as error:
        MoELoraConfig(**{field: value})
    message = str(error.value)
    assert f"{field}=" in message and repr(value) in message and "\n" not in message


def test_none_for_a_pattern_is_none_of_it_and_whole_numbers_are_integers(tmp_path):
    patterns = dict.fromkeys(("num_experts_pattern", "top_k_pattern", "rank_pattern", "alpha_pattern"))
    config = MoELoraConfig(r=4.0, num_experts=4, **patterns)
    assert config == MoELoraConfig(r=4, num_experts=4) and type(config.r) is int
    adapted(num_experts=4, r=4).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **patterns}))
    assert_equal(logits(PeftModel.from_pretrained(tiny_llama(), tmp_path)), logits(adapted(num_experts=4, r=4)))


@pytest.mark.parametrize(
    "settings, field",
    [
        ({"target_modules": ".*mlp", "layers_to_transform": [0]}, "layers_to_transform"),
        ({"target_modules": ".*mlp", "layers_pattern": "layers"}, "layers_pattern"),
        ({"target_modules": ["mlp"], "layers_pattern": "layers"}, "layers_pattern"),
        ({"num_experts_pattern": {"mlp": 2}, "top_k": 3}, "top_k"),
        ({"router_type": "soft", "top_k_pattern": {"mlp": 1}}, "top_k_pattern"),
        ({"expert_type": "bottleneck", "mixing": "projection"}, "mixing"),
        ({"expert_type": "bottleneck", "target_projections": ["up_proj"]}, "target_projections"),
    ],
    ids=[
        "regex+layers",
        "regex+pattern",
        "pattern alone",
        "pattern below top_k",
        "soft+top_k by layer",
        "bottleneck+projection",
        "bottleneck+projections",
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, Any], field: str):
    with pytest.raises(ValueError, match=f"MoELoraConfig: {field}=") as error:
        MoELoraConfig(**settings)
    assert "\n" not in str(error.value)


LAYER = "model.layers.{}.{}".format


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, {LAYER(0, "mlp"), LAYER(1, "mlp")}),
        ({"target_modules": "mlp"}, set()),  # a string is a regex for the whole name
        ({"target_modules": r".*\.1\.(mlp|self_attn\.q_proj)"}, {LAYER(1, "mlp"), LAYER(1, "self_attn.q_proj")}),
        (
            {"target_modules": ["layers.0.mlp", "v_proj"]},
            {LAYER(0, "mlp"), *(LAYER(i, "self_attn.v_proj") for i in (0, 1))},
        ),
        ({"exclude_modules": ["layers.0.mlp"]}, {LAYER(1, "mlp")}),
        ({"exclude_modules": r".*\.1\..*"}, {LAYER(0, "mlp")}),
        ({"layers_to_transform": 1}, {LAYER(1, "mlp")}),
        (
            {"layers_to_transform": [0], "target_modules": ["mlp", "q_proj"]},
            {LAYER(0, "mlp"), LAYER(0, "self_attn.q_proj")},
        ),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, {LAYER(1, "mlp")}),
    ],
    # A set has no order to name a test by, and pytest finds no test by a name with backslashes.
    ids=lambda value: repr(value).replace("\\", "") if isinstance(value, dict) else "",
)
def test_targets(settings: dict[str, Any], expected: set[str]):
    if not expected:
        with pytest.raises(ValueError, match="not found in the base model"):
            adapted(**settings)
        return
    model = adapted(**settings)
    assert set(model.targeted_module_names) == expected
    layers = {name for name, module in model.get_base_model().named_modules() if isinstance(module, BaseTunerLayer)}
    assert layers == expected


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"target_modules": ["w1"]}, "w1.*not found.* Its linears are down_proj, gate_proj, k_proj, .*lm_head, o_proj"),
        ({"target_modules": "w[12]"}, r"w\[12\].*not found.* Its linears are"),
        ({"target_modules": ["all"]}, "all.*not found.* Did you mean 'all-linear'"),
        ({"target_modules": ["mlp"], "layers_to_transform": [7]}, "layers_to_transform.*7"),
        ({"exclude_modules": ["mlp"]}, "exclude_modules"),
    ],
    ids=["name", "regex", "all", "layer", "all excluded"],
)
def test_targets_that_match_nothing_are_an_error(settings: dict[str, Any], message: str):
    with pytest.raises(peft.NoMatchingPeftModuleError, match=message) as error:
        adapted(**settings)
    assert isinstance(error.value, InputError) and "\n" not in str(error.value)


@pytest.mark.parametrize("settings", [{}, {"layers_to_transform": [0]}], ids=["all", "some layers"])
def test_model_without_ffn_blocks_is_told_to_name_linears(settings: dict[str, Any]):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    with pytest.raises(ValueError, match=r"no FFN block of a known layout in MambaForCausalLM; name the modules"):
        adapted(base=MambaForCausalLM(MambaConfig(**sizes)), **settings)
    with pytest.raises(ValueError, match=r"out_proj': a state-space mixer's kernel takes its weight"):
        adapted(base=MambaForCausalLM(MambaConfig(**sizes)), target_modules=["in_proj", "out_proj"])
    adapted(base=MambaForCausalLM(MambaConfig(**sizes)), target_modules=["in_proj"])


def test_all_linear_gives_every_linear_but_the_head_experts():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*matches no targeted module")
        model = adapted(target_modules="all-linear", num_experts_pattern={"q_proj": 1})
    base = tiny_llama()
    linears = {name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    assert set(model.targeted_module_names) == linears
    assert_aux_loss_counted_once(model, routers=len(linears) - 2)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_patterns_set_rank_alpha_and_experts_layer_by_layer(use_rslora: bool):
    model = adapted(
        lora_alpha=8,
        use_rslora=use_rslora,
        num_experts_pattern={"layers.1.mlp": 6},
        rank_pattern={r"layers\.0\..*": 2},
        alpha_pattern={"layers.1.mlp": 2},
    )
    shapes = [layer.mlp.moe_lora_A["default"]["up_proj"].shape for layer in model.get_base_model().model.layers]
    assert shapes == [(4, 2, 64), (6, 4, 64)]
    scaling = [layer.mlp.moe_lora_spec["default"].scaling for layer in model.get_base_model().model.layers]
    assert scaling == ([8 / 2**0.5, 2 / 4**0.5] if use_rslora else [8 / 2, 2 / 4])


def test_router_logits_are_padded_to_the_largest_number_of_experts():
    model = adapted(num_experts_pattern={"layers.1.mlp": 6})
    inputs = {}
    for i, layer in enumerate(model.get_base_model().model.layers):
        layer.mlp.register_forward_pre_hook(lambda module, args, i=i: inputs.__setitem__(i, args[0].reshape(-1, 64)))
    out = model(input_ids=IDS, labels=IDS)
    for i, n in ((0, 4), (1, 6)):
        layer = model.get_base_model().model.layers[i].mlp
        assert_near(out.router_logits[i][:, :n], inputs[i] @ layer.moe_lora_router["default"].weight.T)
    assert_equal(out.router_logits[0][:, 4:], torch.full((20, 2), torch.finfo(torch.float32).min))
    assert model.get_base_model().config.num_experts == 6
    assert_aux_loss_counted_once(model, routers=2)


@pytest.mark.parametrize("init", [True, "gaussian", False])
def test_experts_begin_as_loras_do_and_each_in_its_own_way(init: Any):
    model = adapted(num_experts=16, r=8, init_lora_weights=init)
    A_all, B_all = model.get_base_model().model.layers[0].mlp.expert_parameters("default")
    for projection, A in A_all.items():
        B, bound = B_all[projection], A.shape[2] ** -0.5
        assert A.std().item() == pytest.approx(1 / 8 if init == "gaussian" else bound / 3**0.5, rel=0.03)
        assert abs(A.mean().item()) < 0.05 * A.std() and not torch.equal(A[0], A[1])
        assert init == "gaussian" or 0.99 * bound < A.abs().max() <= bound
        if init is False:
            assert B.std().item() == pytest.approx(8**-0.5 / 3**0.5, rel=0.03) and abs(B.mean().item()) < 0.05 * B.std()
        else:
            assert not B.any()


def test_top_k_by_layer():
    """Each layer computes what it does in a model where all layers have its top_k."""
    model = adapted(top_k_pattern={r"layers\.0\.mlp": 3})
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3))
    for i, k in ((0, 3), (1, 2)):
        expected = adapted(top_k=k).get_base_model().model.layers[i].mlp(x)
        assert_equal(model.get_base_model().model.layers[i].mlp(x), expected)
    with pytest.raises(
        ValueError, match=r"top_k_pattern=\{'layers.0.mlp': 3\}: must be at most the number of experts \(2\)"
    ):
        adapted(num_experts_pattern={"layers.0.mlp": 2}, top_k_pattern={"layers.0.mlp": 3})


@pytest.mark.parametrize("field", ["num_experts_pattern", "top_k_pattern", "rank_pattern", "alpha_pattern"])
def test_pattern_that_matches_no_module_is_refused(field):
    with pytest.raises(ValueError, match=rf"{field}: 'layers\.9\.mlp' matches no targeted module"):
        adapted(**{field: {"layers.9.mlp": 2}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "Mixtral.*already has routed experts.*LoraConfig"),
        ({"target_modules": ["mlp"]}, "target module 'model.layers.0.mlp' .* is neither an FFN"),
        ({"target_modules": ["q_proj"]}, "router_aux_loss_coef=0.5: Mixtral.* has routers of its own"),
        ({"target_modules": "all-linear"}, "router_aux_loss_coef=0.5: Mixtral.* has routers of its own"),
    ],
    ids=["unnamed", "a block of experts", "attention", "all-linear"],
)
def test_what_a_base_model_with_experts_of_its_own_cannot_have(settings: dict[str, Any], message: str):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    base = MixtralForCausalLM(MixtralConfig(num_local_experts=4, **sizes, **heads))
    before = snapshot(base)
    with pytest.raises(ValueError, match=message):
        get_peft_model(base, adapter(top_k=1, **settings))
    assert snapshot(base) == before


def test_config_object_of_an_adapted_model_serves_another_model():
    """The protocol's fields in it are the first adapter's, not a sign of experts of the base model's own."""
    first = adapted(seed=1).get_base_model()
    torch.manual_seed(0)
    second = adapted(seed=2, base=LlamaForCausalLM(first.config))
    assert_aux_loss_counted_once(second, routers=2)
    assert_aux_loss_counted_once(first, routers=2)


def test_one_expert_on_the_linears_of_opt_computes_as_lora_does():
    """OPT calls fc1 and fc2 with two-dimensional input, [batch · sequence, hidden]."""
    targets = {"target_modules": ["fc1", "fc2"], "r": 4, "lora_alpha": 16}
    model = adapted(base=tiny_opt(), num_experts=1, top_k=1, **targets)
    lora = get_peft_model(tiny_opt(), LoraConfig(task_type="CAUSAL_LM", **targets)).eval()
    dimensions = []
    with torch.no_grad():
        for name, layer in lora.get_base_model().named_modules():
            if hasattr(layer, "lora_A"):
                own = model.get_base_model().get_submodule(name)
                own.register_forward_pre_hook(lambda module, args: dimensions.append(args[0].dim()))
                layer.lora_A["default"].weight.copy_(own.moe_lora_A["default"]["weight"][0])
                layer.lora_B["default"].weight.copy_(own.moe_lora_B["default"]["weight"][0].T)
    assert_near(logits(model), logits(lora))
    assert dimensions == [2] * 4


def test_routers_on_the_linears_of_opt_are_balanced():
    """OPT's causal LM calls its decoder and not its backbone (`base_model`)."""
    model = adapted(base=tiny_opt(), target_modules=["fc1", "fc2"])
    assert_aux_loss_counted_once(model, routers=4)


# --- bases that are divided or elsewhere ----------------------------------------------------------------------------


def test_tensor_parallelism_is_refused():
    base = tiny_llama()
    base._tp_size = 2
    with pytest.raises(ValueError, match="tp_size=2: experts need complete projections"):
        get_peft_model(base, MoELoraConfig(num_experts=2, task_type="CAUSAL_LM"))
    assert not any(isinstance(module, MoELoraLayer) for module in base.modules())


def test_an_offloaded_ffn_is_refused():
    base = cpu_offload(tiny_llama(), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp' is offloaded"):
        get_peft_model(base, MoELoraConfig(num_experts=2, task_type="CAUSAL_LM"))


def test_an_adapter_is_not_loaded_on_a_base_with_a_layer_on_disk(tmp_path):
    """PEFT takes accelerate's hooks away first, by which an offloaded module is known."""
    adapted().save_pretrained(tmp_path / "adapter")
    tiny_llama().save_pretrained(tmp_path / "base")
    parts = ("embed_tokens", "rotary_emb", "norm", "layers.0")
    device_map = {**{f"model.{name}": "cpu" for name in parts}, "lm_head": "cpu", "model.layers.1": "disk"}
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", device_map=device_map, offload_folder=tmp_path / "disk"
    )
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp' is offloaded"):
        PeftModel.from_pretrained(base, tmp_path / "adapter")


@pytest.mark.parametrize(
    "settings", [{}, {"num_experts": 1}, {"target_modules": ["q_proj"]}, {"expert_type": "bottleneck"}], ids=str
)
def test_offloaded_experts_are_refused_and_planned_ones_are_not(settings: dict[str, Any]):
    """accelerate's hooks bring the weights of a module that is called, and experts are parameters alone."""
    model = cpu_offload(adapted(**settings), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="adapter 'default': its experts are offloaded, and"):
        model(input_ids=IDS)
    flops = []
    for device in ("cpu", "meta"):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            adapted(**settings).to(device)(input_ids=IDS.to(device))
        flops.append(counter.get_total_flops())
    assert flops[0] > 0 and flops[1] > 0


def test_a_peft_model_is_no_base():
    """A wrapper around another one gets no balancing loss and cannot be trained."""
    inner = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(
        ValueError, match="MoELoraConfig: the model is a PeftModel; give its base, merge its adapter first"
    ):
        get_peft_model(inner, MoELoraConfig(num_experts=4, r=2, task_type="CAUSAL_LM"))


def test_a_base_that_holds_a_lora_is_refused_by_its_name(tmp_path):
    """transformers opens the folder of a LoRA as its base with the LoRA in it; what is saved would name the base."""
    tiny_llama().save_pretrained(tmp_path / "base")
    held = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    held.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    held.save_pretrained(tmp_path / "lora")
    adapted().save_pretrained(tmp_path / "moe")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "lora")
    config = MoELoraConfig(num_experts=2, target_modules=["up_proj"], task_type="CAUSAL_LM")
    for start in (
        lambda: get_peft_model(opened, config),
        lambda: get_peft_model(held.get_base_model(), config),
        lambda: opened.add_adapter(config, "b"),
        lambda: PeftModel.from_pretrained(opened, tmp_path / "moe"),
    ):
        with pytest.raises(InputError, match="holds the lora adapter 'default'"):
            start()
    assert get_peft_model(held.merge_and_unload(), config)


def test_what_is_advised_in_place_of_a_weighted_adapter_works():
    model = adapted(mixing="projection")
    with pytest.raises(InputError, match=r"expert_to_lora.*lora_to_moe.*set_adapter.*mixing='projection'"):
        model.add_weighted_adapter(["default"], [1.0], "sum")
    add(model, "second", seed=2)  # with mixing="output"
    model.base_model.set_adapter(["default", "second"])
    assert model(input_ids=IDS).logits.isfinite().all()
    model.set_adapter("default")
    experts = [expert_to_lora(model, i, adapter_name=name) for name in ("default", "second") for i in (0, 1)]
    assert lora_to_moe(tiny_llama(), experts).peft_config["default"].num_experts == 4


def test_a_name_that_another_adapter_has_is_named(tmp_path):
    adapted(num_experts=3).save_pretrained(tmp_path)
    model = adapted(num_experts=4)
    with pytest.raises(InputError, match="give it another name if 'default' is another adapter's"):
        model.load_adapter(tmp_path, "default")
    model.load_adapter(tmp_path, "other")
    assert model.peft_config["other"].num_experts == 3


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"target_modules": ["mlp", "nothing"]}, "nothing"), ({"exclude_modules": "noth.*"}, "noth"),
        ({"target_projections": ["up_proj", "nothing"]}, "nothing"),
        ({"exclude_modules": ["layers.0.mlp", "nothing"]}, "nothing"),
        ({"layers_to_transform": [0, 99]}, "99"), ({"layers_to_transform": [1, -1]}, "-1"),
        ({"layers_to_transform": [0], "layers_pattern": ["layers", "blocks"]}, "blocks"),
        ({"modules_to_save": ["lm_head", "nothing"]}, "nothing"),
        ({"trainable_token_indices": {"embed_tokens": [3], "nothing": [3]}}, "nothing"),
        *(({field: {"mlp": 2, "nothing": 2}}, "nothing") for field in
          ("num_experts_pattern", "top_k_pattern", "rank_pattern", "alpha_pattern")),
    ],
    ids=str,
)  # fmt: skip
def test_a_member_that_matches_nothing_beside_one_that_does_is_named(settings: dict[str, Any], wrong: str):
    """By us or by PEFT, as for `target_modules`."""
    config = {"num_experts": 4, "top_k": 2, "target_modules": ["mlp"], "task_type": "CAUSAL_LM", **settings}
    with pytest.raises(InputError, match=f"{[*settings][-1]}.*{wrong}"):
        get_peft_model(tiny_llama(), MoELoraConfig(**config))


def test_members_that_match_are_taken():
    own = {"layers_to_transform": [0, 1], "layers_pattern": ["layers"], "target_modules": ["mlp", "q_proj"]}
    assert get_peft_model(tiny_llama(), adapter(**own, exclude_modules=["lm_head", "layers.1.mlp"]))
    assert get_peft_model(tiny_llama(), adapter(layers_to_transform=1, exclude_modules=r".*\.0\.mlp"))


class Shifted(nn.Linear):
    """A linear with arguments of its own."""

    def forward(self, x: torch.Tensor, factor: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return factor * super().forward(x) + shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = Shifted(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x, 3.0, shift=0.5)


def test_a_linears_own_arguments_reach_it():
    torch.manual_seed(0)
    net, x = Net(), torch.randn(5, 8)
    expected = net(x)
    model = get_peft_model(net, MoELoraConfig(num_experts=3, r=2, target_modules=["lin"]))
    assert_equal(model(x), expected)  # B is zero


@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_alpha_that_is_left_out_is_twice_the_active_rank(use_rslora, tmp_path):
    """As gates sum to 1, the sum of updates is then scaled as that of a LoRA with an alpha of twice its rank."""
    config = MoELoraConfig(
        use_rslora=use_rslora, top_k=3, num_experts_pattern={"q_proj": 1}, top_k_pattern={"k_proj": 2},
        rank_pattern={"k_proj": 4}, alpha_pattern={"v_proj": 5}, init_lora_weights=False,
        target_modules=["mlp", "q_proj", "k_proj", "v_proj"],
    )  # fmt: skip
    assert [config.expert_spec(name).scaling for name in ("mlp", "q_proj", "k_proj")] == near([6, 2, 4])
    assert config.expert_spec("v_proj").lora_alpha == 5 and config.lora_alpha is None
    model = get_peft_model(tiny_llama(), config).eval()
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
    # Later another number of active experts scales as before.
    saved = MoELoraConfig.from_pretrained(tmp_path)
    saved.top_k = 1
    assert saved.expert_spec("mlp").scaling == near(6) and saved.alpha_pattern.keys() == {
        "v_proj", "q_proj", "k_proj"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["top_k_pattern", "alpha_pattern", "rank_pattern", "num_experts_pattern"])
def test_of_patterns_that_overlap_the_first_counts_after_loading_too(name, tmp_path):
    config = MoELoraConfig(**{name: {r"layers\.0\.mlp": 5, ".*mlp": 3}}, init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), config).eval()
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, again(IDS).logits)
    specs = [m.moe_lora_spec["default"] for m in again.modules() if isinstance(m, MoELoraLayer)]
    field = {"alpha_pattern": "lora_alpha", "rank_pattern": "r"}.get(name, name.removesuffix("_pattern"))
    assert [getattr(spec, field) for spec in specs] == [5, 3]
