"""Write a MoE checkpoint layer by layer, with its tokenizer, configs and license files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig
from transformers.utils.logging import tqdm

from ..utils.io import new_folder, read_json
from ..utils.messages import InputError, choice_error
from ..utils.model_card import write_model_card
from .families import Content, MoEFamily
from .moe_config import backbone_shapes
from .safetensors_io import ShardedWriter

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
GENERATION_CONFIG = "generation_config.json"
# Files to copy to the new model: the tokenizer's …
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
              "chat_template*", "*.tiktoken", "additional_chat_templates/*")  # fmt: skip
# … and the license files, which must be passed on.
TERMS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "COPYING*")
COMPANIONS = (GENERATION_CONFIG, *_TOKENIZER, *TERMS)

NOT_WEIGHTS = "rotary_emb.inv_freq"  # in old checkpoints; models compute it
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def write_moe(
    output_dir: str | os.PathLike,
    family: MoEFamily,
    config: PreTrainedConfig,
    content: Content,
    *,
    base: Path,
    tokenizer: Path,
    dtype: torch.dtype,
    max_shard_size: int,
    bases: Sequence[str],
    made: str,
    eos_token_id: int | None = None,
) -> Path:
    """
    Write a MoE folder: weights under their names on disk, config, tokenizer, generation config, license files and model
    card.

    Args:
        base: folder to copy the generation config and license files from.
        tokenizer: folder to copy the tokenizer and chat template from.
        max_shard_size: in bytes.
        bases, made: base models, and how the MoE was made: see `write_model_card`.
        eos_token_id: a further EOS token; None: use only the base config's EOS tokens.
    """
    for source in (base, tokenizer):  # before any work
        companions(source)
    config.dtype = dtype
    backbone = backbone_shapes(config)
    plan = {name: (dtype, shape) for name, shape in family.plan(config, backbone).items()}
    with new_folder(output_dir) as folder:
        # Write the weights, each tensor directly to its bytes on disk.
        with ShardedWriter(folder, plan, max_shard_size) as writer:
            for name in backbone:
                writer.write(name, content.backbone(name))
            for layer in tqdm(range(config.num_hidden_layers), desc="layers"):
                for part in family.parts(config, layer, content):
                    writer.write(part.name, part.tensor, part.start)
        # Write the tokenizer, configs, license files and model card.
        copy_companions(base, folder, (GENERATION_CONFIG, *TERMS))
        copy_companions(tokenizer, folder, _TOKENIZER)
        if eos_token_id is not None:
            _add_eos_token(eos_token_id, config, folder / GENERATION_CONFIG)
        config.save_pretrained(folder)
        add_older_names(folder / "config.json", family, config)
        write_model_card(folder, base=bases, made=made)
    return Path(output_dir).expanduser()


def _add_eos_token(token: int, config: PreTrainedConfig, generation: Path) -> None:
    """Add an EOS token. Generation still stops at the previous ones, as in TRL."""
    former = _listed(config.eos_token_id)
    if token not in former:
        config.eos_token_id = token
    values = read_json(generation) if generation.is_file() else {}
    tokens = _listed(values.get("eos_token_id")) or former
    if token not in tokens:
        generation.write_text(
            json.dumps({**values, "eos_token_id": [token, *tokens]}, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )


def _listed(tokens: int | list[int] | None) -> list[int]:
    return tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]


def copy_companions(source: Path, folder: Path, patterns: Sequence[str] = COMPANIONS) -> None:
    """Copy the tokenizer, chat template, generation config and license files of a model or an adapter."""
    for path in companions(source, patterns):
        (folder / path.relative_to(source)).parent.mkdir(exist_ok=True)
        shutil.copy(path, folder / path.relative_to(source))


def companions(source: Path, patterns: Sequence[str] = COMPANIONS) -> list[Path]:
    """
    Return the tokenizer, generation config and license files in a folder, to copy to derived models. Raise for a link
    to a file outside.
    """
    files = [path for pattern in patterns for path in source.glob(pattern) if path.is_file()]  # no pipe
    roots = [source.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parents[1] / "blobs")
    for path in files:
        if not any(path.resolve().is_relative_to(root) for root in roots):
            raise InputError(
                f"{path}: is a link to {path.resolve()}, outside the folder; copy that file here, or remove it"
            )
    return files


def add_older_names(path: Path, family: MoEFamily, config: PreTrainedConfig) -> None:
    """Add fields renamed by transformers 5 to a config file under their old names, for vLLM and other readers."""
    values = json.loads(path.read_text(encoding="utf-8"))
    rope = dict(values.get("rope_parameters") or {})
    values[family.count] = getattr(config, family.count)
    values["torch_dtype"] = values["dtype"]
    if "rope_theta" in rope:
        values["rope_theta"] = rope.pop("rope_theta")
        if rope.get("rope_type", "default") != "default":
            values["rope_scaling"] = rope
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype with this name."""
    if name not in DTYPES:
        raise InputError(choice_error("dtype", name, DTYPES))
    return DTYPES[name]
