"""Model folders: a dense one opened and checked before any work, a MoE's filled layer by layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig
from transformers.utils.logging import tqdm

from ..utils.io import read_object, reading
from ..utils.loading import read_config, refuse_adapter
from ..utils.model_card import write_model_card
from ..utils.validation import TEXT, check, one_of, shown
from .expert_init import FFN
from .families import Content, DenseFamily, MoEFamily, find_families
from .moe_config import backbone_shapes, carried_settings
from .safetensors_io import Checkpoint, ShardedWriter, whole_folder

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
GENERATION_CONFIG = "generation_config.json"
# Files beside the weights that belong to the new model too.
_COMPANIONS = (GENERATION_CONFIG, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
               "vocab.txt", "merges.txt", "chat_template*", "*.tiktoken", "additional_chat_templates")  # fmt: skip
# Files that the base's terms ask to be passed on.
_TERMS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "COPYING*")

NOT_WEIGHTS = "rotary_emb.inv_freq"  # the end of names that old checkpoints have, of what is computed anew
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class DenseModel:
    """A dense model folder: its config, its tensors, read when asked for, and the MoE family that it becomes."""

    folder: Path
    config: PreTrainedConfig
    tensors: Checkpoint
    family: DenseFamily
    moe: MoEFamily

    def read(self, name: str) -> torch.Tensor:
        """A tensor by its name on disk. The head is the embeddings where the model ties them."""
        return self.tensors.tensor(self.tensors.place(name, EMBEDDINGS if name == HEAD else None))

    def backbone(self, name: str) -> torch.Tensor:
        """The non-FFN tensor that the MoE calls `name`."""
        return self.family.backbone(name, self.config, self.read)

    def ffn(self, layer: int) -> FFN:
        return self.family.ffn(layer).split(self.read)

    def shapes(self) -> dict[str, torch.Size]:
        """Names and shapes of all tensors, the head among them even where it is tied."""
        return backbone_shapes(self.config) | self.family.ffn_shapes(self.config)


def open_dense(model: str, family: str | None, caller: str, revision: str | None = None) -> DenseModel:
    """
    Open a dense model's folder, or download the safetensors of a model on the hub.

    Args:
        model: a folder, or a name on the hub.
        family: the wanted MoE's model type; None takes the one that fits.
        revision: of a model on the hub.

    Raises:
        ValueError: the model does not exist, is quantized, has settings that no MoE family can hold, or its tensors
            are not those of its config.
    """
    config, folder = read_config(model, f"{caller}: model {model!r}", revision), Path(model)
    if not folder.is_dir():
        wanted = ["*.json", "*.safetensors", "README.md", *_COMPANIONS, *_TERMS]
        with reading(f"{caller}: model {model!r}"):
            folder = Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{caller}: {model} is quantized; give the full-precision model it was made from")
    refuse_adapter(folder, f"{caller}: model {model!r}")
    families = find_families(config.model_type, family, caller)
    carried_settings(families, config, caller)  # names the setting of which a tensor without a place would be a symptom
    dense = DenseModel(folder, config, Checkpoint(folder, caller), *families)
    for companion in (path for pattern in _COMPANIONS for path in folder.glob(pattern) if path.suffix == ".json"):
        read_object(companion)  # it will be copied
    _check_tensors(dense, caller)
    return dense


def _check_tensors(dense: DenseModel, caller: str) -> None:
    """Raise a ValueError if the tensors on disk are not those of the config."""
    tied = bool(getattr(dense.config, "tie_word_embeddings", False)) and HEAD not in dense.tensors.files
    shapes = {name: shape for name, shape in dense.shapes().items() if not (tied and name == HEAD)}
    for name, shape in shapes.items():
        dense.tensors.place(name)
        if dense.tensors.shape(name) != shape:
            raise ValueError(
                f"{caller}: {dense.folder}: {name} is {list(dense.tensors.shape(name))}, its config says {list(shape)}"
            )
    unknown = [name for name in dense.tensors if name not in shapes and not name.endswith(NOT_WEIGHTS)]
    if unknown:
        raise ValueError(f"{caller}: {dense.folder}: tensors that a native MoE has no place for: {sorted(unknown)[:3]}")


def write_moe(
    family: MoEFamily,
    config: PreTrainedConfig,
    content: Content,
    companions: Sequence[Path],
    output_dir: Path,
    dtype: torch.dtype,
    max_shard_size: int,
    caller: str,
    bases: Sequence[str],
    made: str,
    end: int | None = None,
) -> Path:
    """
    Write a MoE folder: weights under their names on disk, the config, the files that go with them, and a model card.

    Args:
        companions: folders from which tokenizer, chat template and generation config are copied; a later one's files
            replace an earlier one's. The terms of use are the first one's.
        max_shard_size: bytes.
        bases, made: what it was made from, and how: see `write_model_card`.
        end: a token that ends a text, too; None leaves that to the base's config.

    Raises:
        ValueError: `output_dir` exists.
    """
    config.dtype = dtype
    backbone = backbone_shapes(config)
    plan = {name: (dtype, shape) for name, shape in family.plan(config, backbone).items()}
    with whole_folder(output_dir, caller) as folder:
        with ShardedWriter(folder, plan, max_shard_size) as writer:
            for name in backbone:
                writer.write(name, content.backbone(name))
            for layer in tqdm(range(config.num_hidden_layers), desc=f"{caller}: layers"):
                for part in family.parts(config, layer, content):
                    writer.write(part.name, part.tensor, part.start)
        copy_companions(companions[0], folder)
        for source in companions[1:]:
            _copy(source, folder, _COMPANIONS)
        if end is not None:
            _end_texts(end, config, folder / GENERATION_CONFIG)
        config.save_pretrained(folder)
        add_older_names(folder / "config.json", family, config)
        write_model_card(folder, base=bases, made=made)
    return output_dir


def _end_texts(token: int, config: PreTrainedConfig, generation: Path) -> None:
    """Have a token end texts. As where TRL changes it, generation still stops at the former ones."""
    former = _listed(config.eos_token_id)
    if token not in former:
        config.eos_token_id = token
    values = read_object(generation) if generation.is_file() else {}
    known = _listed(values.get("eos_token_id")) or former
    if token not in known:
        generation.write_text(json.dumps({**values, "eos_token_id": [token, *known]}, indent=2, sort_keys=True) + "\n")


def _listed(tokens: int | list[int] | None) -> list[int]:
    return tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]


def copy_companions(source: Path, folder: Path) -> None:
    """Copy what goes with a model or an adapter: tokenizer, chat template, generation config, terms of use."""
    _copy(source, folder, (*_COMPANIONS, *_TERMS))


def copy_terms(source: Path, folder: Path) -> None:
    """Copy a model folder's licence and notices, which its derivatives must usually carry."""
    _copy(source, folder, _TERMS)


def _copy(source: Path, folder: Path, patterns: Sequence[str]) -> None:
    for path in (path for pattern in patterns for path in source.glob(pattern)):
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        elif path.is_file():  # no pipe
            shutil.copy(path, folder / path.name)


def add_older_names(path: Path, family: MoEFamily, config: PreTrainedConfig) -> None:
    """Add to a config file the fields that transformers 5 renamed, under the names that other stacks read."""
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
    """
    Bytes of `"5GB"` or `"200MB"`; units in either case (accelerate's parser takes "5gb" for gigabits). A number alone
    is bytes, of which there must be a million: `"5"` is not meant as five.
    """
    check(caller, max_shard_size=(size, TEXT))
    for unit, factor, least in (("GB", 10**9, 1), ("MB", 10**6, 1), ("KB", 10**3, 1), ("", 1, 10**6)):
        number = size[: len(size) - len(unit)]
        is_size = size.upper().endswith(unit) and number.replace(".", "", 1).isdecimal()
        if is_size and least <= float(number) * factor < 2**63:
            return int(float(number) * factor)
    raise ValueError(f"{caller}: max_shard_size={shown(size)}: give a number above 0 with KB, MB or GB")


def parse_dtype(name: str | None, model: DenseModel | None, caller: str) -> torch.dtype:
    """The dtype of that name; if None, the model's own: its config's, or that of its embeddings on disk."""
    check(caller, dtype=(name, one_of(_DTYPES).or_none()))
    if name is None and model is not None:
        return config_dtype(model.config) or model.tensors.dtype(EMBEDDINGS)
    return _DTYPES.get(str(name), torch.float32)


def config_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """What a config says; None if that is nothing, or nothing that is written here."""
    return _DTYPES.get(str(getattr(config, "dtype", None)).removeprefix("torch."))
