"""Writing a native MoE folder: a plan of its tensors, checked before any work, filled layer by layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import snapshot_download
from tqdm.auto import tqdm
from transformers import AutoConfig, PreTrainedConfig

from .checkpoint import Checkpoint, ShardedWriter, whole_folder
from .families import DENSE_NAME, PROJECTIONS, Family, backbone_shapes, find_family
from .initialise import FFN

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
# What lies beside the weights and belongs to the new model too.
_COMPANIONS = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
               "vocab.txt", "merges.txt", "chat_template*", "*.tiktoken", "additional_chat_templates")  # fmt: skip

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class DenseModel:
    """A dense model folder: its config and its tensors, read when asked for."""

    folder: Path
    config: PreTrainedConfig
    tensors: Checkpoint
    family: Family  # of the MoE that it becomes

    def backbone(self, name: str) -> torch.Tensor:
        """A tensor that is no FFN's; the head is the embeddings where the model ties them."""
        if name == HEAD and name not in self.tensors.files:
            name = EMBEDDINGS
        return self.tensors.tensor(name)

    def shapes(self) -> dict[str, torch.Size]:
        """Of every tensor, the head too where it is tied."""
        f, d = self.config.intermediate_size, self.config.hidden_size
        shapes = backbone_shapes(self.config)
        for layer in range(self.config.num_hidden_layers):
            for projection, shape in _shapes(f, d).items():
                shapes[DENSE_NAME.format(layer=layer, projection=projection)] = shape
        return shapes

    def ffn(self, layer: int) -> FFN:
        return FFN(*(self.tensors.tensor(DENSE_NAME.format(layer=layer, projection=p)) for p in PROJECTIONS))


class Content(Protocol):
    """What goes into a MoE, asked for layer by layer; each tensor is given once."""

    def backbone(self, name: str) -> torch.Tensor: ...

    def router(self, layer: int) -> torch.Tensor: ...  # [n, d]

    def experts(self, layer: int) -> Iterator[FFN]: ...  # n of them; one, in a layer without experts

    def shared(self, layer: int) -> FFN: ...  # only asked for where the config has a shared expert


def open_dense(model: str, family: str | None, caller: str, revision: str | None = None) -> DenseModel:
    """
    A dense model's folder, or its name on the hub, whose safetensors are downloaded then.

    Args:
        family: the wanted MoE's model type; None takes the one that fits.
        revision: of a model on the hub.

    Raises:
        ValueError: no family holds it, it is not there, is quantized, or its safetensors are not those of its config.
    """
    try:
        config = AutoConfig.from_pretrained(model, revision=revision or "main")
        folder = Path(model)
        if not folder.is_dir():
            wanted = ["*.json", "*.safetensors", *_COMPANIONS]
            folder = Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        raise ValueError(f"{caller}: model {model!r}: {' '.join(str(error).split())[:200]}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{caller}: {model} is quantized; give the full-precision model it was made from")
    kind = find_family(config.model_type, family, caller)
    tensors = Checkpoint(folder, caller)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    dense = DenseModel(folder, config, tensors, kind)
    shapes = {name: shape for name, shape in dense.shapes().items() if not (tied and name == HEAD)}
    for name, shape in shapes.items():
        if name not in tensors.files:
            raise ValueError(f"{caller}: {folder} has no tensor {name}; is the checkpoint whole?")
        if tensors.shape(name) != shape:
            raise ValueError(
                f"{caller}: {folder}: {name} is {list(tensors.shape(name))}, its config says {list(shape)}"
            )
    unknown = [name for name in tensors if name not in shapes and not name.endswith("rotary_emb.inv_freq")]
    if unknown and unknown != [HEAD]:
        raise ValueError(f"{caller}: {folder}: tensors that a native MoE has no place for: {sorted(unknown)[:3]}")
    return dense


def write_moe(
    family: Family,
    config: PreTrainedConfig,
    content: Content,
    companions: Sequence[Path],
    output_dir: Path,
    dtype: torch.dtype,
    max_shard_size: int,
    caller: str,
) -> Path:
    """
    Write a MoE folder: weights in the names on disk, config, and what lies beside the weights in the folders
    `companions`, a later one's files over an earlier one's.

    Raises:
        ValueError: `output_dir` exists, or the dense backbone is not the MoE's.
    """
    config.dtype = dtype
    backbone = backbone_shapes(config)
    plan = {name: (dtype, shape) for name, shape in _plan(family, config, backbone).items()}
    with whole_folder(output_dir, caller) as folder:
        with ShardedWriter(folder, plan, max_shard_size) as writer:
            for name in backbone:
                writer.write(name, content.backbone(name))
            for layer in tqdm(range(config.num_hidden_layers), desc=f"{caller}: layers"):
                _write_layer(writer, family, config, content, layer)
        for path in (path for source in companions for pattern in _COMPANIONS for path in source.glob(pattern)):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            else:
                shutil.copy(path, folder / path.name)
        config.save_pretrained(folder)
        add_older_names(folder / "config.json", family, config)
    return output_dir


def add_older_names(path: Path, family: Family, config: PreTrainedConfig) -> None:
    """Fields that transformers 5 has under other names, and that other stacks read as they were."""
    values = json.loads(path.read_text())
    rope = dict(values.get("rope_parameters") or {})
    values[family.count] = getattr(config, family.count)
    values["torch_dtype"] = values["dtype"]
    if "rope_theta" in rope:
        values["rope_theta"] = rope.pop("rope_theta")
        if rope.get("rope_type", "default") != "default":
            values["rope_scaling"] = rope
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def parse_size(size: str, caller: str) -> int:
    """Bytes of `"5GB"`, `"200MB"` or a number."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3), ("", 1)):
        number = size[: len(size) - len(unit)]
        if size.upper().endswith(unit) and number.replace(".", "", 1).isdigit() and float(number) * factor >= 1:
            return int(float(number) * factor)
    raise ValueError(f"{caller}: max_shard_size={size!r}: give a number above 0 with KB, MB or GB")


def parse_dtype(name: str | None, config: PreTrainedConfig | None, caller: str) -> torch.dtype:
    """The dtype of that name; the model's own (float32, if it has none) if None."""
    if name is not None and name not in _DTYPES:
        raise ValueError(f"{caller}: dtype={name!r}: use {', '.join(_DTYPES)}")
    found = getattr(config, "dtype", None) if name is None else name
    return _DTYPES.get(str(found).removeprefix("torch."), torch.float32)


def _plan(family: Family, config: PreTrainedConfig, backbone: dict[str, torch.Size]) -> dict[str, torch.Size]:
    """Every tensor's shape, in the order of the layers."""
    n, f, d = getattr(config, family.count), getattr(config, family.width), config.hidden_size
    shared = getattr(config, "shared_expert_intermediate_size", 0) if family.shared else 0
    plan = {name: shape for name, shape in backbone.items() if not name.startswith("model.layers.")}
    for layer in range(config.num_hidden_layers):
        plan.update({name: shape for name, shape in backbone.items() if name.startswith(f"model.layers.{layer}.")})
        if layer in _dense_layers(family, config):
            for p, shape in _shapes(config.intermediate_size, d).items():
                plan[DENSE_NAME.format(layer=layer, projection=p)] = shape
            continue
        plan[family.name(layer, family.router)] = torch.Size((n, d))
        if family.fused:
            plan[family.name(layer, family.experts["gate_proj"])] = torch.Size((n, 2 * f, d))
            plan[family.name(layer, family.experts["down_proj"])] = torch.Size((n, d, f))
        else:
            for expert in range(n):
                for p, shape in _shapes(f, d).items():
                    plan[family.name(layer, family.experts[p].format(expert=expert))] = shape
        if family.shared:
            for p, shape in _shapes(shared, d).items():
                plan[family.name(layer, family.shared.format(projection=p))] = shape
            plan[family.name(layer, "shared_expert_gate.weight")] = torch.Size((1, d))
    return plan


def _shapes(f: int, d: int) -> dict[str, torch.Size]:
    """Of an FFN's weights, by projection."""
    return {p: torch.Size((d, f) if p == "down_proj" else (f, d)) for p in PROJECTIONS}


def _dense_layers(family: Family, config: PreTrainedConfig) -> list[int]:
    return list(getattr(config, family.dense_layers)) if family.dense_layers else []


def _write_layer(writer: ShardedWriter, family: Family, config: PreTrainedConfig, content: Content, layer: int) -> None:
    experts = content.experts(layer)
    if layer in _dense_layers(family, config):
        for p, weight in zip(PROJECTIONS, next(experts), strict=True):
            writer.write(DENSE_NAME.format(layer=layer, projection=p), weight)
        return
    writer.write(family.name(layer, family.router), content.router(layer))
    for expert, ffn in enumerate(experts):
        for p, weight in zip(PROJECTIONS, ffn, strict=True):
            name = family.name(layer, family.experts[p].format(expert=expert))
            start = 0
            if family.fused:  # an expert's gate and up are neighbours
                start = expert * weight.numel() * (1 if p == "down_proj" else 2) + weight.numel() * (p == "up_proj")
            writer.write(name, weight, start)
    if family.shared:
        for p, weight in zip(PROJECTIONS, content.shared(layer), strict=True):
            writer.write(family.name(layer, family.shared.format(projection=p)), weight)
        writer.write(family.name(layer, "shared_expert_gate.weight"), torch.zeros(1, config.hidden_size))
