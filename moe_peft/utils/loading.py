"""
Reads configs, adapters' weights and tokenizers through PEFT and transformers, and checks them: nothing is used that is
missing, not finite, or pickled. `native.folders` says what a folder is, and loads models.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import peft
import torch
from accelerate.utils import parse_flag_from_env
from huggingface_hub import hf_hub_download
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, AdaLoraConfig, LoraConfig, PeftConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch.nn.functional import pad
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import deepspeed

from .io import no_weights, open_safetensors, read_json, read_text, reading
from .messages import InputError, one_line, unknown_keys
from .settings import ALPHA, LARGEST_SIZE, PATTERNS, Range, check_patterns

logger = logging.getLogger("moe_peft")

EMPTY_IN_OTHERS = "FSDP_CPU_RAM_EFFICIENT_LOADING"  # the first process alone reads weights; accelerate sets it
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_DTYPES = ("F64", "F32", "BF16", "F16")  # as safetensors names them
_MOST_LAYERS = 10_000
# For every load through one of transformers' Auto classes: left out, the class asks on stdin whether to run the code in
# a model's folder, and runs it.
NO_CODE = {"trust_remote_code": False}
CONFIG, ADAPTER_CONFIG, ADAPTER_WEIGHTS = "config.json", "adapter_config.json", "adapter_model.safetensors"


def read_adapter_config(folder: str | os.PathLike, source: object) -> PeftConfig:
    """
    An adapter's config: a folder's, or that of a name on the hub. AdaLoRA's is that of the LoRA which it is.

    Args:
        source: the field and its value, for messages.
    """
    path = _adapter_file(folder, ADAPTER_CONFIG, source)
    if not path.is_file():
        raise InputError(f"{source}: is not a folder with {ADAPTER_CONFIG}")
    saved = read_json(path)
    kind = saved.get("peft_type")
    if kind is None and _OF_MLX & saved.keys():
        raise InputError(
            f"{source}: is an adapter of mlx-lm's, which PEFT does not read; `mlx_lm.fuse` makes a model of it and its "
            "base (moe-peft mix --models takes such), or save lora_a.T and lora_b.T as PEFT's lora_A.weight and "
            "lora_B.weight, with lora_alpha = scale * rank"
        )
    if kind not in list(PeftType):
        raise InputError(
            f"{source}: {ADAPTER_CONFIG}: peft_type={kind!r}: PEFT {peft.__version__} has no such adapters"
        )
    if kind in ("MOE_LORA", "LORA", "ADALORA"):
        _check_fields(saved, source, kind)
        _check_sizes(saved, source)
    check_patterns(saved, f"{source}: {ADAPTER_CONFIG}: ")
    with reading(source):
        config = as_lora(PeftConfig.from_pretrained(os.fspath(folder)))
    base = config.base_model_name_or_path
    if not isinstance(base, (str, type(None))):
        raise InputError(f"{source}: {ADAPTER_CONFIG}: base_model_name_or_path={base!r}: must be a name or null")
    return config


def as_lora(config: PeftConfig) -> PeftConfig:
    """Return the config of the LoRA that an AdaLoRA is, with its E in A: see `with_scaled_rows`; others stay."""
    if not isinstance(config, AdaLoraConfig):
        return config
    scaling = config.lora_alpha / (config.init_r + 1e-5)  # PEFT's forward pass has the 1e-5
    kept = config.rank_pattern or {}
    ranks = {name.partition(".lora_E")[0]: max(sum(rows), 1) for name, rows in kept.items()}
    shared = {each.name: getattr(config, each.name) for each in fields(LoraConfig) if each.init}
    return LoraConfig(**{
        **shared, "r": config.init_r, "lora_alpha": scaling * config.init_r, "use_rslora": False,
        "rank_pattern": ranks, "alpha_pattern": {name: scaling * rank for name, rank in ranks.items()},
    })  # fmt: skip


def with_scaled_rows(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors with A [r, in] of AdaLoRA times its E [r, 1], as a LoRA has them; others stay."""
    scaled: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        module, _, kind = key.rpartition(".")
        if (E := tensors.get(f"{module}.lora_E")) is None:
            scaled[key] = tensor
        elif kind != "lora_E":
            missing = int(len(E) == 0)  # a LoRA has one row at least, here of zeros
            is_A = kind == "lora_A"
            scaled[f"{key}.weight"] = pad(tensor * E if is_A else tensor, (0, 0, 0, missing) if is_A else (0, missing))
    return scaled


def way_to_lora(kind: PeftType) -> str:
    """Return how adapters of a type become LoRAs, to end a message; empty if PEFT cannot convert them."""
    layer = getattr(PEFT_TYPE_TO_TUNER_MAPPING.get(kind), "tuner_layer_cls", None)
    kinds = () if layer is None else (layer, *layer.__subclasses__())
    converts = any(each.supports_lora_conversion is not BaseTunerLayer.supports_lora_conversion for each in kinds)
    return ", which peft.save_as_lora makes of it" if converts else ""


def _adapter_file(folder: str | os.PathLike, name: str, source: object) -> Path:
    """A file of an adapter's folder, or of its name on the hub."""
    if Path(folder).exists():
        return Path(folder, name)
    with reading(source):
        return Path(hf_hub_download(os.fspath(folder), name))


_OF_MLX = {"lora_parameters", "fine_tune_type"}  # keys of mlx-lm's adapter_config.json


def _check_fields(saved: Mapping[str, Any], source: object, kind: str) -> None:
    """
    Raises:
        ValueError: a config sets what this version does not know; PEFT would drop it with a warning. In a LoRA's
            config, unknown numbers and texts pass, and what another program has written there as a mapping, with a
            warning: new features of PEFT are turned on by true, a list, or a mapping called `…_config`.
    """
    supported = {field.name for field in fields(PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)])}
    program = "moe-peft-hf" if kind == "MOE_LORA" else f"PEFT ({peft.__version__})"
    for name, value in saved.items():
        is_off = value in (None, False, "", 0, [], {})
        is_off |= kind != "MOE_LORA" and isinstance(value, (str, int, float)) and value is not True
        if name in supported or name == "runtime_config" or is_off:
            continue
        if kind != "MOE_LORA" and isinstance(value, dict) and not name.endswith("_config"):
            logger.warning("%s: %s: %s is not a field of PEFT's, and not read", source, ADAPTER_CONFIG, name)
        else:
            raise InputError(
                f"{source}: {ADAPTER_CONFIG}: {name}={value!r}: this version of {program} does not know it; install "
                "a newer one"
            )


def _check_sizes(saved: Mapping[str, Any], source: object) -> None:
    """
    Raises:
        ValueError: a size in an adapter's config is not a number above 0, or would take all memory.
    """
    counts = ("r", "init_r", "lora_alpha", "num_experts", "top_k", "bottleneck_size")
    sizes = {name: saved[name] for name in counts if name in saved}
    if sizes.get("lora_alpha", 1) is None and saved.get("peft_type") == "MOE_LORA":
        del sizes["lora_alpha"]
    for name in PATTERNS:
        if name == "rank_pattern" and saved.get("peft_type") == "ADALORA":
            continue  # it says which rows of A are left
        if not isinstance(value := saved.get(name) or {}, dict):
            raise InputError(f"{source}: {ADAPTER_CONFIG}: {name}={value!r}: must map names of modules to numbers")
        sizes |= {f"{name}.{module}": number for module, number in value.items()}
    for name, value in sizes.items():
        allowed = ALPHA if "alpha" in name.partition(".")[0] else Range(at_least=1, at_most=LARGEST_SIZE)
        if value not in allowed:
            raise InputError(f"{source}: {ADAPTER_CONFIG}: {name}={value!r}: must be a number {allowed}")


def adapter_weights(folder: str | os.PathLike, source: object) -> Path:
    """
    The file of an adapter's tensors: a folder's, or that of a name on the hub, where PEFT would take a pickled one. Its
    header is checked; no tensor is read.
    """
    path = _adapter_file(folder, ADAPTER_WEIGHTS, f"{source}: no {ADAPTER_WEIGHTS}; only safetensors are read")
    if not path.is_file():
        raise InputError(f"{source}: {no_weights(path.parent, ADAPTER_WEIGHTS)}")
    with open_safetensors(path, source) as file:
        for key in file.keys():  # noqa: SIM118  (it is not a mapping)
            part = file.get_slice(key)
            dtype, is_matrix = part.get_dtype(), len(part.get_shape()) > 1
            if dtype not in _DTYPES and (dtype.startswith("F") or is_matrix):  # a salt is an integer
                raise InputError(f"{source}: {key} is {dtype}; save the adapter in float32, bfloat16 or float16")
    return path


def read_adapter_weights(folder: str | os.PathLike, source: object) -> dict[str, torch.Tensor]:
    """An adapter's tensors, on the CPU; see `adapter_weights`."""
    path = adapter_weights(folder, source)
    with reading(f"{source}: its weights cannot be read", "save the adapter again"):
        tensors = with_scaled_rows(load_file(path))
    # PEFT saves a head in `modules_to_save` of resized embeddings three times.
    copies = re.compile(r"\.(original_module|modules_to_save)\.")
    return {
        key: value for key, value in tensors.items() if not (copies.search(key) and copies.sub(".", key) in tensors)
    }


def read_config(name: str | os.PathLike, source: object, revision: str | None = None) -> PreTrainedConfig:
    """A model's config, of a folder or a name on the hub."""
    folder = Path(name)
    if folder.is_file():
        raise InputError(f"{source}: is a file; name a model's folder")
    if folder.is_dir():
        if not (folder / CONFIG).exists() and (folder / ADAPTER_CONFIG).is_file():
            kind = read_json(folder / ADAPTER_CONFIG).get("peft_type")
            raise InputError(
                f"{source}: it is a {kind} adapter, not a model: "
                + ("name it with adapter" if kind == "MOE_LORA" else "merge it into its base first (merge_and_unload)")
            )
        if not (folder / CONFIG).exists():
            raise InputError(f"{source}: has no {CONFIG}; name a model's folder")
        if not isinstance(read_json(folder / CONFIG).get("model_type"), str):
            raise InputError(f"{source}: {CONFIG} has no model_type; save the model with save_pretrained")
    with reading(source if folder.is_dir() else f"{source}: neither a model folder nor a model on a reachable hub"):
        values = PreTrainedConfig.get_config_dict(os.fspath(name), revision=revision or "main")[0]
    _check_counts(values, source)
    with reading(source):
        config = AutoConfig.from_pretrained(os.fspath(name), revision=revision or "main", **NO_CODE)
    _check_experts(config, source)
    return config


def check_causal(config: PreTrainedConfig, source: object) -> None:
    """
    Raises:
        ValueError: transformers has no causal language model of this type.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"{source}: is a {config.model_type!r} model, which is no causal language model; name one")


def empty_model(config: PreTrainedConfig, source: object, dtype: str = "auto") -> PreTrainedModel:
    """
    A model without weights, on the meta device.

    Args:
        dtype: of the parameters; "auto" is the config's.
    """
    check_causal(config, source)
    with reading(source), without_zero3(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **NO_CODE, **({} if dtype == "auto" else {"dtype": dtype}))


@contextmanager
def without_zero3() -> Iterator[None]:
    """Inside this block, ZeRO-3 does not shard new models."""
    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference


def read_tokenizer(name: str | os.PathLike, source: object, revision: str | None = None) -> Any:
    """
    Raises:
        ValueError: there is none, or it cannot be read.
    """
    with reading(f"{source}: no tokenizer", "save the model's tokenizer in its folder"):
        return AutoTokenizer.from_pretrained(os.fspath(name), revision=revision or "main", **NO_CODE)


def check_tokenizer(tokenizer: Any, config: PreTrainedConfig | None, source: object) -> None:
    """
    Args:
        config: of the model that it is used with; None: one whose embeddings are resized for it.
    """
    if tokenizer.eos_token is None:
        raise InputError(f"{source}: its tokenizer has no eos_token; set it in tokenizer_config.json")
    rows = None if config is None else getattr(config.get_text_config(), "vocab_size", None)
    if rows is not None and len(tokenizer) > rows:
        raise InputError(
            f"{source}: its tokenizer has {len(tokenizer)} tokens, its embeddings have {rows} rows; use the tokenizer "
            "that the model was trained with, or resize its embeddings and save it"
        )


def chat_template(path: str | None, field: str) -> str | None:
    """What `chat_template_path` names: a file's template, or that of another tokenizer. None if there is no path."""
    if path is None:
        return None
    source = f"{field}={path!r}"
    if Path(path).is_file():
        return read_text(path, source)
    template = read_tokenizer(path, source).chat_template
    if isinstance(template, dict):  # the one that conversations without tools go through
        template = template.get("default")
    if template is None:
        raise InputError(f"{source}: a tokenizer without a (default) chat template; name another, or a file")
    return template


_ROWS = 64  # TRL makes the number of embeddings a multiple of this


def changed_embeddings(path: str | None, field: str, tokenizer: Any, config: PreTrainedConfig) -> str | None:
    """
    Why an adapter's base cannot take what `chat_template_path` names; None if it can. With a tokenizer's template, TRL
    takes its added tokens and its EOS token, and resizes the embeddings, which an adapter's folder does not hold.

    Args:
        tokenizer: the base's.
        config: the base's.
    """
    if path is None or Path(path).is_file():
        return None
    source = f"{field}={path!r}"
    vocabulary = tokenizer.get_vocab()
    tokens = [token.content for token in read_tokenizer(path, source).added_tokens_decoder.values()]
    added = [token for token in tokens if token not in vocabulary]
    rows = getattr(config.get_text_config(), "vocab_size", None)
    resized = -(-(len(vocabulary) + len(added)) // _ROWS) * _ROWS
    if not added and rows in (None, resized):
        return None
    why = f"adds {added[0]!r}" if added else f"gives {resized} rows to the embeddings, which have {rows}"
    return f"{source}: its tokenizer {why}, and an adapter keeps its base's; name a .jinja file, and set eos_token"


def check_template(tokenizer: Any, asked: bool | str, field: str, remedy: str = "give it one") -> None:
    """
    Args:
        asked: whether prompts go through a chat template; a string names one of several.
        field: the field that asks for it, for messages.
        remedy: where there is none.
    """
    template = tokenizer.chat_template
    if asked and template is None:
        raise InputError(f"{field}={asked!r}: the tokenizer has no chat template; {remedy}, or leave this out")
    if isinstance(asked, str) and not (isinstance(template, dict) and asked in template):
        names = f"has {', '.join(template)}" if isinstance(template, dict) else "has a single one, without a name"
        raise InputError(f"{field}={asked!r}: no such chat template: the tokenizer {names}; name that, or none")


def _check_counts(values: Mapping[str, Any], source: object) -> None:
    """
    Raises:
        ValueError: a model's config has so many layers or experts that listing them would take for ever.
    """
    for name, value in values.items():
        most = LARGEST_SIZE if name in EXPERT_COUNTS else _MOST_LAYERS if "layer" in name else None
        if isinstance(value, dict):
            _check_counts(value, source)
        elif most is not None and isinstance(value, int) and value > most:
            raise InputError(f"{source}: {CONFIG}: {name}={value}: must be at most {most}")


def _check_experts(config: PreTrainedConfig, source: object) -> None:
    """
    Raises:
        ValueError: a native MoE's config has no experts, or gives a token more than there are.
    """
    config = config.get_text_config()
    k = getattr(config, "num_experts_per_tok", None)
    n = next((n for name in EXPERT_COUNTS if (n := getattr(config, name, None)) is not None), None)
    if type(k) is int and type(n) is int and n > 0 and not 1 <= k <= n:
        raise InputError(f"{source}: {CONFIG}: num_experts_per_tok={k}: must be from 1 to the number of experts, {n}")


def quantization_config(fields: Mapping[str, Any], path: str) -> BitsAndBytesConfig:
    """
    The config, checked: by itself it ignores unknown fields, and does nothing without a number of bits.

    Args:
        path: of the field that has them.
    """
    supported = inspect.signature(BitsAndBytesConfig).parameters.keys() - {"kwargs"}
    if wrong := unknown_keys(fields, supported, f"{path}.", "transformers' BitsAndBytesConfig"):
        raise InputError(wrong)
    if not (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        raise InputError(f"{path}={dict(fields)}: give load_in_4bit or load_in_8bit: true")
    try:
        return BitsAndBytesConfig(**fields)
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}={dict(fields)}: {one_line(error)}") from error


def check_loaded(model: PreTrainedModel, info: Mapping[str, Any], source: object) -> None:
    """
    Raises:
        ValueError: weights were missing, have another shape, or are not finite.
    """
    for key, shape, expected in sorted(info["mismatched_keys"]):
        raise InputError(
            f"{source}: {key} is {list(shape)}, its config says {list(expected)}; use the config it was saved with"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{source}: its files lack {missing[0]}{more}; download or save the model again")
    names = model.state_dict().keys() if info["unexpected_keys"] else ()
    weighted = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    for key in sorted(info["unexpected_keys"]):
        owner, _, last = key.rpartition(".")
        of_weight = last == "bias" or last.startswith("weight_")  # the second: scales of quantized weights
        if owner in names or (owner in weighted and of_weight):
            raise InputError(
                f"{source}: its files have {key}, which its config does not mention; use the config it was saved with"
            )
        if re.sub(r"\blayers\.\d+\.", "layers.0.", key) in names:  # not those of parts that this class leaves out
            layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
            raise InputError(
                f"{source}: its files have {key}, its config says num_hidden_layers={layers}; use the config it was "
                "saved with"
            )
    if parse_flag_from_env(EMPTY_IN_OTHERS):
        return
    for key, weight in model.named_parameters():
        if weight.is_meta or weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            continue
        if not weight.detach().isfinite().all():
            raise InputError(f"{source}: {key} holds NaN or infinity; use another checkpoint")
