"""What people get wrong: a small world of good files, ways to damage them, and how a command must end on them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from moe_peft import MoELoraConfig
from moe_peft.cli import main
from moe_peft.native import UpcycleConfig, upcycle
from tests.helpers.models import tiny_llama
from tests.helpers.upit_case import make_case

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Damage = Callable[[Path], Any]


def make_world(folder: Path, tokenizer: Any) -> Path:
    """Folders: `base`, `sharded` (in shards), `lora0`, `lora1`, `moe` (an adapter), `native`; data; `case.json`."""
    folder.mkdir()
    (folder / "case.json").write_text(json.dumps(make_case(folder, tokenizer)))
    tiny_llama(vocab=128).save_pretrained(folder / "sharded", max_shard_size="100KB")
    tokenizer.save_pretrained(folder / "sharded")
    lora = LoraConfig(
        r=4, target_modules=["gate_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    moe = MoELoraConfig(num_experts=4, r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    for seed, (name, config) in enumerate((("lora0", lora), ("lora1", lora), ("moe", moe))):
        base = tiny_llama(vocab=128)
        torch.manual_seed(seed)
        model = get_peft_model(base, config)
        model.peft_config["default"].base_model_name_or_path = str(folder / "base")
        model.save_pretrained(folder / name)
    upcycle(folder / "base", folder / "native", UpcycleConfig(num_experts=4))
    return folder


# --- damage -----------------------------------------------------------------------------------------------------------


def text(file: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)


def without(*files: str) -> Damage:
    return lambda folder: [path.unlink() for file in files for path in folder.glob(file)]


def cut(file: str, length: int | None = None) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: len(content) // 2 if length is None else length])

    return damage


def header(file: str, length: int) -> Damage:
    """A safetensors file that gives its header another length."""

    def damage(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(struct.pack("<Q", length) + content[8:])

    return damage


def changed(file: str, **values: Any) -> Damage:
    """A JSON file with other values; of the value `...` without that key."""

    def damage(folder: Path) -> None:
        settings = {**json.loads((folder / file).read_text()), **values}
        (folder / file).write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))

    return damage


def mapped(name: str, file: Any) -> Damage:
    """An index that says that a tensor is in another file."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][name] = file
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def tensors(file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        state = load_file(folder / file)
        change(state)
        save_file(state, folder / file, metadata={"format": "pt"})

    return damage


def pickled(file: str, instead: str) -> Damage:
    """Weights as only `torch.load` reads them."""

    def damage(folder: Path) -> None:
        torch.save(load_file(folder / file), folder / instead)
        (folder / file).unlink()

    return damage


def a_folder(file: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return damage


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


UP = "model.layers.1.mlp.up_proj.weight"
NO_MODEL: dict[str, tuple[Damage, str]] = {
    "no config": (without(CONFIG), "no config.json"),
    "config empty": (text(CONFIG, ""), "config.json: not JSON"),
    "config cut off": (cut(CONFIG), "config.json: not JSON"),
    "config a list": (text(CONFIG, "[]"), "must be a JSON object"),
    "config null": (text(CONFIG, "null"), "must be a JSON object"),
    "config no text": (text(CONFIG, b"\xff\xfe\x00"), "not UTF-8 text"),
    "config very deep": (text(CONFIG, "[" * 100_000), "not JSON"),
    "config a folder": (a_folder(CONFIG), "not a file"),
    "no model type": (changed(CONFIG, model_type=...), "model_type"),
    "unknown model type": (changed(CONFIG, model_type="nonsense"), "nonsense"),
    "model type a number": (changed(CONFIG, model_type=7), "model_type"),
    "size a text": (changed(CONFIG, hidden_size="64"), "hidden_size"),
    "negative size": (changed(CONFIG, hidden_size=-64), "-64"),
    "unknown activation": (changed(CONFIG, hidden_act="nonsense"), "nonsense"),
    "heads that do not fit": (changed(CONFIG, num_attention_heads=5), "5"),
    "other size": (changed(CONFIG, hidden_size=32), "config says"),
    "more layers": (changed(CONFIG, num_hidden_layers=3), "model.layers.2."),
    "fewer layers": (changed(CONFIG, num_hidden_layers=1), "layers?.1"),
    "too many layers to list": (changed(CONFIG, num_hidden_layers=10**12), "num_hidden_layers=10{12}: must be at most"),
    "smaller vocabulary": (changed(CONFIG, vocab_size=100), "128"),
    "an adapter beside it": (text(ADAPTER, "{}"), "holds an adapter beside the model"),
    "no weights": (without(WEIGHTS), "no model.safetensors"),
    "weights of a variant": (
        lambda folder: (folder / WEIGHTS).rename(folder / "model.fp16.safetensors"),
        "has model.fp16.safetensors, but no model.safetensors; save the model with save_pretrained, without a variant",
    ),
    "weights empty": (text(WEIGHTS, b""), "cannot be read"),
    "weights cut off": (cut(WEIGHTS), "cannot be read"),
    "weights cut off in the header": (cut(WEIGHTS, 4), "cannot be read"),
    "header too long": (header(WEIGHTS, 2**63 - 1), "cannot be read"),
    "header empty": (header(WEIGHTS, 0), "cannot be read"),
    "weights noise": (text(WEIGHTS, bytes(range(256)) * 8), "cannot be read"),
    "weights a folder": (a_folder(WEIGHTS), "no model.safetensors"),
    "a weight is missing": (tensors(WEIGHTS, lambda t: t.pop(UP)), UP),
    "a weight of another shape": (tensors(WEIGHTS, lambda t: t.update({UP: torch.zeros(3, 3)})), r"\[3, 3\]"),
    "a bias too many": (
        tensors(WEIGHTS, lambda t: t.update({UP.replace("weight", "bias"): torch.ones(128)})),
        "up_proj.bias",
    ),
    "scales of a quantization": (tensors(WEIGHTS, lambda t: t.update({f"{UP}_scale": torch.ones(1)})), "weight_scale"),
    "NaN": (tensors(WEIGHTS, lambda t: t[UP].fill_(torch.nan)), "NaN"),
    "infinity": (tensors(WEIGHTS, lambda t: t["model.embed_tokens.weight"][3].fill_(torch.inf)), "infinity"),
    "other names": (tensors(WEIGHTS, lambda t: [t.update({f"x.{k}": t.pop(k)}) for k in list(t)]), "lack|no tensor"),
    "pickled": (pickled(WEIGHTS, "pytorch_model.bin"), "only safetensors are read"),
    "a file": (a_file, "a file"),
    "empty": (empty, "no config.json"),
}
NO_SHARDS: dict[str, tuple[Damage, str]] = {
    "shard missing": (without("model-00002-of-00004.safetensors"), "lacks model-00002"),
    "shard cut off": (cut("model-00002-of-00004.safetensors"), "cannot be read"),
    "index cut off": (cut(INDEX), "not JSON"),
    "index a list": (text(INDEX, "[]"), "must be a JSON object"),
    "index without map": (text(INDEX, "{}"), "no weight_map"),
    "map a list": (text(INDEX, '{"weight_map": []}'), "no weight_map"),
    "file a number": (mapped("lm_head.weight", 3), "no weight_map"),
    "file outside": (mapped("lm_head.weight", "../base/model.safetensors"), "not a file in its folder"),
    "file anywhere": (mapped("lm_head.weight", "/etc/passwd"), "not a file in its folder"),
    "other shard": (mapped("lm_head.weight", "model-00002-of-00004.safetensors"), "lacks lm_head.weight"),
}
NO_TOKENIZER: dict[str, tuple[Damage, str]] = {
    "no tokenizer": (without("tokenizer*"), "no tokenizer"),
    "tokenizer cut off": (cut("tokenizer.json"), "no tokenizer|not JSON"),
    "tokenizer a list": (text("tokenizer.json", "[]"), "no tokenizer|must be a JSON object"),
    "tokenizer config cut off": (cut("tokenizer_config.json"), "no tokenizer|not JSON"),
    "fewer embeddings than tokens": (
        changed("tokenizer.json", added_tokens=[
            {"id": i, "content": f"<{i}>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": False} for i in range(128, 133)
        ]), "133 tokens, its embeddings have 128 rows",
    ),
}  # fmt: skip


def first(t: dict[str, torch.Tensor]) -> str:
    return next(iter(t))


NO_ADAPTER: dict[str, tuple[Damage, str]] = {
    "no config": (without(ADAPTER), "adapter_config.json|no config.json"),
    "config cut off": (cut(ADAPTER), "not JSON"),
    "config a list": (text(ADAPTER, "[1]"), "must be a JSON object"),
    "config empty": (text(ADAPTER, "{}"), "peft_type=None"),
    "unknown type": (changed(ADAPTER, peft_type="NONSENSE"), "peft_type='NONSENSE'"),
    "type a number": (changed(ADAPTER, peft_type=3), "peft_type=3"),
    "no regex": (changed(ADAPTER, exclude_modules="a["), "exclude_modules='a\\['.*unterminated"),
    "targets a number": (changed(ADAPTER, target_modules=3), r"target_modules=3: must be names"),
    "targets a fraction": (changed(ADAPTER, exclude_modules=3.5), r"exclude_modules=3.5: must be names"),
    "targets true": (changed(ADAPTER, modules_to_save=True), r"modules_to_save=True: must be names"),
    "a target a number": (changed(ADAPTER, target_modules=[3]), r"target_modules=\[3\]: must be names"),
    "alpha beyond float32": (changed(ADAPTER, lora_alpha=1e39), r"lora_alpha=1e\+39: must be a number from"),
    "rank a text": (changed(ADAPTER, r="8"), "r='8'"),
    "rank 0": (changed(ADAPTER, r=0), "r=0"),
    "other rank": (changed(ADAPTER, r=5), "5"),
    "base a number": (changed(ADAPTER, base_model_name_or_path=3), "base_model_name_or_path=3"),
    "unknown task": (changed(ADAPTER, task_type="NONSENSE"), "NONSENSE"),
    "alpha NaN": (changed(ADAPTER, lora_alpha=float("nan")), "lora_alpha=nan"),
    "alpha a text": (changed(ADAPTER, lora_alpha="x"), "lora_alpha='x'"),
    "no weights": (without(ADAPTER_WEIGHTS), "no adapter_model.safetensors"),
    "weights empty": (text(ADAPTER_WEIGHTS, b""), "cannot be read"),
    "weights cut off": (cut(ADAPTER_WEIGHTS), "cannot be read"),
    "header too long": (header(ADAPTER_WEIGHTS, 2**62), "cannot be read"),
    "NaN": (tensors(ADAPTER_WEIGHTS, lambda t: t[first(t)].fill_(torch.nan)), "NaN"),
    "a weight is missing": (tensors(ADAPTER_WEIGHTS, lambda t: t.pop(first(t))), "down_proj"),
    "a module saved whole is missing": (changed(ADAPTER, modules_to_save=["lm_head"]), "lm_head"),
    "rows of tokens are missing": (changed(ADAPTER, trainable_token_indices=[3]), "trainable_token"),
    "tokens a text": (changed(ADAPTER, trainable_token_indices="x"), "trainable_token_indices='x'"),
    "eight bits": (
        tensors(ADAPTER_WEIGHTS, lambda t: t.update({first(t): t[first(t)].to(torch.float8_e4m3fn)})), "F8_E4M3"
    ),
    "integers": (tensors(ADAPTER_WEIGHTS, lambda t: t.update({first(t): t[first(t)].to(torch.int8)})), "is I8;"),
    "no weight": (tensors(ADAPTER_WEIGHTS, lambda t: t.clear()), "moe_lora|lacks|no FFN"),
    "a weight of another shape": (
        tensors(ADAPTER_WEIGHTS, lambda t: t.update({first(t): torch.zeros(2, 2)})), "2"
    ),
    "pickled": (pickled(ADAPTER_WEIGHTS, "adapter_model.bin"), "only safetensors are read"),
    "a file": (a_file, "a file|not a folder|no adapter_config.json"),
    "empty": (empty, "no config.json|not a folder"),
}  # fmt: skip
NO_MOE: dict[str, tuple[Damage, str]] = {
    "a setting of a newer version": (changed(ADAPTER, temperature=2.0), "temperature=2.0: this version of moe-peft-hf"),
    "base missing": (changed(ADAPTER, base_model_name_or_path="/nowhere"), "/nowhere"),
    "base null": (changed(ADAPTER, base_model_name_or_path=None), "None"),
    "other number of experts": (changed(ADAPTER, num_experts=3), "3"),
    "experts a text": (changed(ADAPTER, num_experts="4"), "num_experts='4'"),
    "no experts": (changed(ADAPTER, num_experts=0), "num_experts=0"),
    "very many experts": (changed(ADAPTER, num_experts=10**9), "1000000000"),
    "k larger than n": (changed(ADAPTER, top_k=9), "top_k=9"),
    "unknown router": (changed(ADAPTER, router_type="nonsense"), "nonsense"),
    "unknown mixing": (changed(ADAPTER, mixing="x"), "mixing='x'"),
    "a layer is missing": (
        tensors(ADAPTER_WEIGHTS, lambda t: [t.pop(key) for key in list(t) if "layers.1." in key]),
        "layers.1.mlp.moe_lora",
    ),
    "pattern a list": (changed(ADAPTER, num_experts_pattern=[1]), r"num_experts_pattern=\[1\]"),
    "k of a layer larger than n": (changed(ADAPTER, top_k_pattern={"layers.0.mlp": 9}), "top_k_pattern="),
}


NORM = "model.norm.weight"
NO_NATIVE: dict[str, tuple[Damage, str]] = {
    **{name: NO_MODEL[name] for name in ("config cut off", "other size", "more layers", "fewer layers",
                                         "smaller vocabulary", "pickled")},
    "a norm is missing": (tensors(WEIGHTS, lambda t: t.pop(NORM)), NORM),
    "a norm of another shape": (tensors(WEIGHTS, lambda t: t.update({NORM: torch.ones(3)})), r"\[3\]"),
    "model type a list": (changed(CONFIG, model_type=["mixtral"]), "mixtral|model_type"),
    "k larger than n": (changed(CONFIG, num_experts_per_tok=9), "num_experts_per_tok=9: must be from 1 to the number"),
    "k of 0": (changed(CONFIG, num_experts_per_tok=0), "num_experts_per_tok=0: must be from 1"),
}  # fmt: skip


def damaged(world: Path, name: str, damage: Damage, folder: Path) -> Path:
    """A damaged copy of one of the world's folders."""
    shutil.copytree(world / name, folder / name)
    damage(folder / name)
    return folder / name


# --- how a command must end -------------------------------------------------------------------------------------------


def refused(arguments: list[str], capsys: Any, output: Path) -> str:
    """Run a command that must end with one line and exit code 2, and leave nothing behind; returns the line."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    printed = capsys.readouterr().err
    assert end.value.code == 2 and "Traceback" not in printed
    lines = [line for line in printed.splitlines() if "error: " in line]
    assert len(lines) == 1, printed
    assert not output.exists(), sorted(output.rglob("*"))
    assert not list(output.parent.glob(f".{output.name}*"))
    return lines[0]
