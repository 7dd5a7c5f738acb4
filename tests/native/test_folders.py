"""`open_folder`: the kind of a folder or of a name on the hub, decided from its config alone."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlavaConfig,
    Mistral3Config,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    T5Config,
)

from moe_peft import RequestGate
from moe_peft.native import export_adapter, folders, upcycle, verify_export
from moe_peft.native.base import Base
from moe_peft.native.export import check_verifiable
from moe_peft.native.folders import (
    AdapterFolder,
    DenseFolder,
    LoraFolder,
    MoELoraFolder,
    NativeFolder,
    find_adapter,
    open_folder,
)
from moe_peft.pruning import prune_experts
from moe_peft.utils import loading
from moe_peft.utils.messages import InputError
from tests.helpers.close import assert_near
from tests.helpers.native_case import IDS, adapter, dense_model, saved

KINDS = {
    "lora": LoraFolder, "ia3": AdapterFolder, "moe": MoELoraFolder, "dense": DenseFolder, "native": NativeFolder,
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("folders")
    base = saved(dense_model("llama"), folder / "dense")
    tokenizer.save_pretrained(base)
    adapter(dense_model("llama"), folder / "moe", base, target_modules=["mlp"])
    others = {
        "lora": LoraConfig(target_modules=["up_proj"], task_type="CAUSAL_LM"),
        "ia3": IA3Config(target_modules=["v_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
    }
    for name, config in others.items():
        model = get_peft_model(dense_model("llama"), config)
        model.peft_config["default"].base_model_name_or_path = base
        model.save_pretrained(folder / name)
    upcycle(base, folder / "native")
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_a_config_says_the_kind_and_nothing_else_is_read(name, world, tmp_path):
    shutil.copytree(world / name, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer*"))
    assert type(open_folder(tmp_path / name, "model")) is KINDS[name]
    other = LoraFolder if name == "dense" else DenseFolder
    with pytest.raises(ValueError, match=f"model=.*{name}': is .*; give {other.kind}"):
        open_folder(tmp_path / name, "model", other)


@pytest.mark.parametrize("config", [LlavaConfig, Mistral3Config, Qwen2_5_VLConfig, Qwen3VLConfig, T5Config])
def test_what_is_no_causal_language_model_is_refused_by_its_type(config, tmp_path):
    """Also by `RequestGate.fit`, which loads a part of the base."""
    config().save_pretrained(tmp_path)
    for refused in (lambda: open_folder(tmp_path, "base"), lambda: RequestGate.fit(str(tmp_path), {"a": ["w3"]})):
        with pytest.raises(InputError, match=f"base=.*{config.model_type!r} model.*causal language model"):
            refused()


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_loads_with_the_tokenizer_that_goes_with_it(name, world):
    folder = open_folder(world / name, "model")
    with torch.no_grad():
        assert folder.load("bfloat16")(input_ids=IDS).logits.dtype == torch.bfloat16
    assert len(folder.tokenizer) <= 128


def test_names_on_the_hub(world, monkeypatch):
    def download(name, file, **_):
        path = world / name.removeprefix("org/") / file
        if not path.is_file():
            raise OSError(f"no {file} in {name}")
        return str(path)

    monkeypatch.setattr(folders, "hf_hub_download", download)
    for name in ("lora", "ia3", "moe"):
        assert type(find_adapter(f"org/{name}", "model")) is KINDS[name]
    assert find_adapter("org/dense", "model") is None
    assert [AdapterFolder(f"org/{name}", "model").has_tokenizer for name in ("moe", "dense")] == [False, True]


def test_a_config_on_the_hub_is_checked_like_a_folders(world, tmp_path, monkeypatch):
    shutil.copytree(world / "lora", tmp_path / "org/lora")
    path = tmp_path / "org/lora/adapter_config.json"
    monkeypatch.setattr(loading, "hf_hub_download", lambda name, file, **_: str(tmp_path / name / file))
    for changes, message in (
        ({"use_mora": True}, "use_mora=True: this version of PEFT"),
        ({"r": 10**9}, "r=1000000000"),
    ):
        path.write_text(json.dumps({**json.loads((world / "lora/adapter_config.json").read_text()), **changes}))
        with pytest.raises(ValueError, match=f"org/lora.*{message}"):
            loading.read_adapter_config("org/lora", "adapters='org/lora'")


def test_an_adapters_base_has_the_revision_that_it_names(world, tmp_path):
    shutil.copytree(world / "lora", tmp_path / "lora")
    path = tmp_path / "lora/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "revision": "v2"}))
    named, other = (open_folder(tmp_path / "lora", "model", base=base) for base in (None, world / "dense"))
    assert (named.base.path, named.base.revision) == (str(world / "dense"), "v2")
    assert (other.base.path, other.base.revision) == (str(world / "dense"), None)


@pytest.mark.parametrize("field", ["model_name_or_path", "model.name_or_path"])
def test_the_base_of_a_training_is_no_lora(field, world):
    """transformers would load the LoRA's base with the LoRA in it."""
    base = Base(str(world / "lora"), field=field)
    for start in (lambda: base.config, base.empty, base.load, lambda: base.tokenizer):
        with pytest.raises(ValueError, match=f"^{field}='.*lora': is a LORA adapter, not a model: merge it"):
            start()


def test_a_base_is_for_adapters(world):
    with pytest.raises(ValueError, match=r"base='x': is for an adapter, but model=.*dense' is not one"):
        open_folder(world / "dense", "model", base="x")


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_with_added_tokens_is_read_with_their_embeddings(tied, tokenizer, tmp_path):
    base = saved(dense_model("llama", tie_word_embeddings=tied), tmp_path / "base")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["new", "newer"])
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(len(tokenizer))
    model = adapter(model, tmp_path / "moe", base, trainable_token_indices=tokenizer("new newer")["input_ids"][:2])
    tokenizer.save_pretrained(tmp_path / "moe")
    folder = open_folder(tmp_path / "moe", "model", MoELoraFolder)
    folder.check_tensors()
    ids = tokenizer("w5 new w6 newer", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(folder.load(on_accelerator=False)(ids).logits, model(ids).logits, rtol=0, atol=0)
    native = AutoModelForCausalLM.from_pretrained(export_adapter(tmp_path / "moe", tmp_path / "exported"))
    assert_near(native(ids).logits, model(ids).logits)
    check_verifiable(tmp_path / "moe")
    assert verify_export(tmp_path / "moe", tmp_path / "exported", ["w5 new w6 newer"]).passed
    prune_experts(tmp_path / "moe", tmp_path / "pruned", drop=[3])
