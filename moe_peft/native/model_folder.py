"""Model folders: a dense one is opened and checked before any work, a MoE's is filled layer by layer."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig
from transformers.utils.logging import tqdm

from ..utils.io import read_json, reading
from ..utils.loading import read_config, refuse_adapter
from ..utils.messages import InputError, choice_error
from ..utils.model_card import write_model_card
from .expert_init import FFN
from .families import Content, DenseFamily, MoEFamily, find_families
from .moe_config import backbone_shapes, carried_settings
from .safetensors_io import Checkpoint, ShardedWriter, new_folder

logger = logging.getLogger(__name__)

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
GENERATION_CONFIG = "generation_config.json"
# Files beside the weights that belong to the new model too.
_COMPANIONS = (GENERATION_CONFIG, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
               "vocab.txt", "merges.txt", "chat_template*", "*.tiktoken", "additional_chat_templates/*")  # fmt: skip
# Files that the base's terms ask to be passed on.
TERMS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "COPYING*")
COMPANIONS = (*_COMPANIONS, *TERMS)

NOT_WEIGHTS = "rotary_emb.inv_freq"  # old checkpoints hold it, and models compute it
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


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
        return self.tensors.tensor(self.tensors.stored_name(name, EMBEDDINGS if name == HEAD else None))

    def backbone(self, name: str) -> torch.Tensor:
        """The non-FFN tensor that the MoE calls `name`."""
        return self.family.backbone(name, self.config, self.read)

    def ffn(self, layer: int) -> FFN:
        return self.family.ffn(layer).split(self.read)

    @property
    def dtype(self) -> torch.dtype:
        """That of its config; of its embeddings on disk, where the config says none that is written here."""
        name = str(getattr(self.config, "dtype", None)).removeprefix("torch.")
        return _DTYPES.get(name) or self.tensors.dtype(EMBEDDINGS)

    def say_untied(self) -> None:
        """Tell the user if the MoE has more parameters than the experts', because its head is no longer tied."""
        if getattr(self.config, "tie_word_embeddings", False):
            count = self.config.vocab_size * self.config.hidden_size
            logger.info(f"the head, tied to the embeddings in the dense model, gets parameters of its own: {count:,}")

    def shapes(self) -> dict[str, torch.Size]:
        """Names and shapes of all tensors, the head among them even where it is tied."""
        return backbone_shapes(self.config) | self.family.ffn_shapes(self.config)


def open_dense(model: str, family: str | None = None, revision: str | None = None) -> DenseModel:
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
    source = f"model {model!r}"
    config, folder = read_config(model, source, revision), Path(model)
    if not folder.is_dir():
        patterns = ["*.json", "*.safetensors", "README.md", *COMPANIONS]
        with reading(source):
            folder = Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"{model} is quantized; give the full-precision model it was made from")
    refuse_adapter(folder, source)
    families = find_families(config.model_type, family)
    carried_settings(families, config)  # names the setting of which a tensor that fits nowhere would be a symptom
    dense = DenseModel(folder, config, Checkpoint(folder), *families)
    for companion in companions(folder):  # which will be copied
        if companion.suffix == ".json":
            read_json(companion)
    _check_tensors(dense)
    return dense


def _check_tensors(dense: DenseModel) -> None:
    """Raise a ValueError if the tensors on disk are not those of the config."""
    tied = bool(getattr(dense.config, "tie_word_embeddings", False)) and HEAD not in dense.tensors.files
    shapes = {name: shape for name, shape in dense.shapes().items() if not (tied and name == HEAD)}
    for name, shape in shapes.items():
        dense.tensors.stored_name(name)
        if dense.tensors.shape(name) != shape:
            raise InputError(
                f"{dense.folder}: {name} is {list(dense.tensors.shape(name))}, its config says {list(shape)}"
            )
    unknown = [name for name in dense.tensors if name not in shapes and not name.endswith(NOT_WEIGHTS)]
    if unknown:
        raise InputError(f"{dense.folder}: tensors that a native MoE does not have: {sorted(unknown)[:3]}")


def write_moe(
    output_dir: str | os.PathLike,
    family: MoEFamily,
    config: PreTrainedConfig,
    content: Content,
    *,
    copied: Sequence[Path],
    dtype: torch.dtype,
    max_shard_size: int,
    bases: Sequence[str],
    made: str,
    eos_token_id: int | None = None,
) -> Path:
    """
    Write a MoE folder: weights under their names on disk, the config, the files that go with them, and a model card.

    Args:
        copied: folders from which tokenizer, chat template and generation config are copied; a later one's files
            replace an earlier one's. The terms of use are the first one's.
        max_shard_size: bytes.
        bases, made: what it was made from, and how: see `write_model_card`.
        eos_token_id: a further EOS token; None: the base's config has all.

    Raises:
        ValueError: `output_dir` is neither new nor empty.
    """
    for source in copied:  # before any work
        companions(source)
    config.dtype = dtype
    backbone = backbone_shapes(config)
    plan = {name: (dtype, shape) for name, shape in family.plan(config, backbone).items()}
    with new_folder(output_dir) as folder:
        # The weights, each tensor straight to its bytes on disk.
        with ShardedWriter(folder, plan, max_shard_size) as writer:
            for name in backbone:
                writer.write(name, content.backbone(name))
            for layer in tqdm(range(config.num_hidden_layers), desc="layers"):
                for part in family.parts(config, layer, content):
                    writer.write(part.name, part.tensor, part.start)
        # What goes with them.
        copy_companions(copied[0], folder)
        for source in copied[1:]:
            copy_companions(source, folder, _COMPANIONS)
        if eos_token_id is not None:
            _add_eos_token(eos_token_id, config, folder / GENERATION_CONFIG)
        config.save_pretrained(folder)
        add_older_names(folder / "config.json", family, config)
        write_model_card(folder, base=bases, made=made)
    return Path(output_dir).expanduser()


def _add_eos_token(token: int, config: PreTrainedConfig, generation: Path) -> None:
    """Add an EOS token. As where TRL changes it, generation still stops at the former ones."""
    former = _listed(config.eos_token_id)
    if token not in former:
        config.eos_token_id = token
    values = read_json(generation) if generation.is_file() else {}
    tokens = _listed(values.get("eos_token_id")) or former
    if token not in tokens:
        generation.write_text(json.dumps({**values, "eos_token_id": [token, *tokens]}, indent=2, sort_keys=True) + "\n")


def _listed(tokens: int | list[int] | None) -> list[int]:
    return tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]


def copy_companions(source: Path, folder: Path, patterns: Sequence[str] = COMPANIONS) -> None:
    """Copy what goes with a model or an adapter: tokenizer, chat template, generation config, terms of use."""
    for path in companions(source, patterns):
        (folder / path.relative_to(source)).parent.mkdir(exist_ok=True)
        shutil.copy(path, folder / path.relative_to(source))


def companions(source: Path, patterns: Sequence[str] = COMPANIONS) -> list[Path]:
    """
    The files beside a folder's weights that go with what is made of it.

    Raises:
        ValueError: one is a link that leads out of the folder, so that any file of this machine could get into what is
            published. Those of the hub's cache lead to its `blobs`.
    """
    files = [path for pattern in patterns for path in source.glob(pattern) if path.is_file()]  # no pipe
    roots = [source.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parents[1] / "blobs")
    for path in files:
        if not any(path.resolve().is_relative_to(root) for root in roots):
            raise InputError(
                f"{path}: is a link to {path.resolve()}, out of the folder; copy that file here, or remove it"
            )
    return files


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


def parse_size(size: str) -> int:
    """
    Bytes of `"5GB"` or `"200MB"`; units in either case (accelerate's parser takes "5gb" for gigabits). A number alone
    is bytes, of which there must be a million: `"5"` is not meant as five.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([KMG]B|)", size.upper())
    count = int(float(match[1]) * _UNITS[match[2]]) if match and len(size) < 20 else 0
    if count < (1 if match and match[2] else 10**6):
        raise InputError(f"max_shard_size={size!r}: give a number above 0 with KB, MB or GB")
    return count


def parse_dtype(name: str) -> torch.dtype:
    """The dtype of that name."""
    if name not in _DTYPES:
        raise InputError(choice_error("dtype", name, _DTYPES))
    return _DTYPES[name]
