"""
Read configs, adapters' weights and tokenizers through PEFT and transformers, and check them. Missing, non-finite or
pickled weights are refused. `native.folders` decides the kind of a folder, and loads models.
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

EMPTY_IN_OTHERS = "FSDP_CPU_RAM_EFFICIENT_LOADING"  # only the first process reads weights; set by accelerate
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_DTYPES = ("F64", "F32", "BF16", "F16")  # names in safetensors
_MOST_LAYERS = 10_000
# For every load through transformers' Auto classes. Without it, they ask on stdin whether to run code in a model's
# folder, and run it.
NO_CODE = {"trust_remote_code": False}
CONFIG, ADAPTER_CONFIG, ADAPTER_WEIGHTS = "config.json", "adapter_config.json", "adapter_model.safetensors"


def read_adapter_config(folder: str | os.PathLike, source: object) -> PeftConfig:
    """
    Read an adapter's config from a folder or from a name on the hub. AdaLoRA's is converted to a LoRA's.

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
    """
    Convert an AdaLoRA's config to an equivalent LoRA's, with E multiplied into A (see `with_scaled_rows`). Other
    configs stay unchanged.
    """
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
    """Convert an AdaLoRA's tensors to a LoRA's: A [r, in] times E [r, 1]. Other adapters' tensors stay unchanged."""
    scaled: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        module, _, kind = key.rpartition(".")
        if (E := tensors.get(f"{module}.lora_E")) is None:
            scaled[key] = tensor
        elif kind != "lora_E":
            missing = int(len(E) == 0)  # a LoRA has at least one row, here zeros
            is_A = kind == "lora_A"
            scaled[f"{key}.weight"] = pad(tensor * E if is_A else tensor, (0, 0, 0, missing) if is_A else (0, missing))
    return scaled


def way_to_lora(kind: PeftType) -> str:
    """Return the way to convert an adapter type to LoRA, to end a message. "" if PEFT cannot convert it."""
    layer = getattr(PEFT_TYPE_TO_TUNER_MAPPING.get(kind), "tuner_layer_cls", None)
    kinds = () if layer is None else (layer, *layer.__subclasses__())
    converts = any(each.supports_lora_conversion is not BaseTunerLayer.supports_lora_conversion for each in kinds)
    return ", which peft.save_as_lora makes of it" if converts else ""


def _adapter_file(folder: str | os.PathLike, name: str, source: object) -> Path:
    """Return a file of an adapter's folder, or of its name on the hub."""
    if Path(folder).exists():
        return Path(folder, name)
    with reading(source):
        return Path(hf_hub_download(os.fspath(folder), name))


_OF_MLX = {"lora_parameters", "fine_tune_type"}  # keys of mlx-lm's adapter_config.json


def _check_fields(saved: Mapping[str, Any], source: object, kind: str) -> None:
    """Check that this version knows all fields of an adapter's config."""
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
    """Raise if a number in an adapter's config, such as its rank, is no number or larger than any model's."""
    counts = ("r", "init_r", "lora_alpha", "num_experts", "top_k", "bottleneck_size")
    sizes = {name: saved[name] for name in counts if name in saved}
    if sizes.get("lora_alpha", 1) is None and saved.get("peft_type") == "MOE_LORA":
        del sizes["lora_alpha"]
    for name in PATTERNS:
        if name == "rank_pattern" and saved.get("peft_type") == "ADALORA":
            continue  # lists the rows of A that are left
        if not isinstance(value := saved.get(name) or {}, dict):
            raise InputError(f"{source}: {ADAPTER_CONFIG}: {name}={value!r}: must map names of modules to numbers")
        sizes |= {f"{name}.{module}": number for module, number in value.items()}
    for name, value in sizes.items():
        allowed = ALPHA if "alpha" in name.partition(".")[0] else Range(at_least=1, at_most=LARGEST_SIZE)
        if value not in allowed:
            raise InputError(f"{source}: {ADAPTER_CONFIG}: {name}={value!r}: must be a number {allowed}")


def adapter_weights(folder: str | os.PathLike, source: object) -> Path:
    """
    Return the file of an adapter's tensors, in a folder or from a name on the hub. Pickled weights are refused,
    although PEFT would read them. The header is checked; no tensor is read.
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
    """Read an adapter's tensors, on the CPU; see `adapter_weights`."""
    path = adapter_weights(folder, source)
    with reading(f"{source}: its weights cannot be read", "save the adapter again"):
        tensors = with_scaled_rows(load_file(path))
    # With resized embeddings, PEFT saves a head in `modules_to_save` three times.
    copies = re.compile(r"\.(original_module|modules_to_save)\.")
    return {
        key: value for key, value in tensors.items() if not (copies.search(key) and copies.sub(".", key) in tensors)
    }


def read_config(name: str | os.PathLike, source: object, revision: str | None = None) -> PreTrainedConfig:
    """Read a model's config from a folder or from a name on the hub."""
    folder = Path(name)
    if folder.is_file():
        raise InputError(f"{source}: is a file; name a model's folder")
    if folder.is_dir():
        if not (folder / CONFIG).exists() and (folder / ADAPTER_CONFIG).is_file():
            kind = read_json(folder / ADAPTER_CONFIG).get("peft_type")
            raise InputError(
                f"{source}: is a {kind} adapter, not a model: "
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
    """Check that a model is a causal language model."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"{source}: is a {config.model_type!r} model; name a causal language model")


def empty_model(config: PreTrainedConfig, source: object, dtype: str = "auto") -> PreTrainedModel:
    """
    Create a model without weights, on the meta device.

    Args:
        dtype: of the parameters; "auto" is the config's.
    """
    check_causal(config, source)
    with reading(source), without_zero3(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **NO_CODE, **({} if dtype == "auto" else {"dtype": dtype}))


@contextmanager
def without_zero3() -> Iterator[None]:
    """Keep ZeRO-3 from sharding new models inside the block."""
    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference


def read_tokenizer(name: str | os.PathLike, source: object, revision: str | None = None) -> Any:
    """Read a tokenizer."""
    with reading(f"{source}: no tokenizer", "save the model's tokenizer in its folder"):
        return AutoTokenizer.from_pretrained(os.fspath(name), revision=revision or "main", **NO_CODE)


def check_tokenizer(tokenizer: Any, config: PreTrainedConfig | None, source: object) -> None:
    """
    Check that a tokenizer has an EOS token, and no more tokens than the model has embeddings.

    Args:
        config: config of the model used with the tokenizer; None: the embeddings will be resized.
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
    """Return the template of `chat_template_path`, from a file or another tokenizer. None if there is no path."""
    if path is None:
        return None
    source = f"{field}={path!r}"
    if Path(path).is_file():
        return read_text(path, source)
    template = read_tokenizer(path, source).chat_template
    if isinstance(template, dict):  # the default is for conversations without tools
        template = template.get("default")
    if template is None:
        raise InputError(f"{source}: a tokenizer without a (default) chat template; name another, or a file")
    return template


_ROWS = 64  # TRL makes the number of embeddings a multiple of this


def changed_embeddings(path: str | None, field: str, tokenizer: Any, config: PreTrainedConfig) -> str | None:
    """
    Return a message if an adapter's base model does not fit the tokenizer of `chat_template_path`, otherwise None.

    With a tokenizer's template, TRL takes its added tokens and its EOS token, and resizes the embeddings. An adapter's
    folder does not hold resized embeddings.

    Args:
        tokenizer: the base model's.
        config: the base model's.
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


def _check_counts(values: Mapping[str, Any], source: object) -> None:
    """Check the numbers of layers and experts in a model's config."""
    for name, value in values.items():
        most = LARGEST_SIZE if name in EXPERT_COUNTS else _MOST_LAYERS if "layer" in name else None
        if isinstance(value, dict):
            _check_counts(value, source)
        elif most is not None and isinstance(value, int) and value > most:
            raise InputError(f"{source}: {CONFIG}: {name}={value}: must be at most {most}")


def _check_experts(config: PreTrainedConfig, source: object) -> None:
    """Check the number of experts per token in a native MoE's config."""
    config = config.get_text_config()
    k = getattr(config, "num_experts_per_tok", None)
    n = next((n for name in EXPERT_COUNTS if (n := getattr(config, name, None)) is not None), None)
    if type(k) is int and type(n) is int and n > 0 and not 1 <= k <= n:
        raise InputError(f"{source}: {CONFIG}: num_experts_per_tok={k}: must be from 1 to the number of experts, {n}")


def quantization_config(fields: Mapping[str, Any], path: str) -> BitsAndBytesConfig:
    """
    Return a checked `BitsAndBytesConfig`. The class itself ignores unknown fields, and does nothing without a number
    of bits.

    Args:
        path: the field with the config, for messages.
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
    """Check the weights of a model loaded by transformers."""
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
        if re.sub(r"\blayers\.\d+\.", "layers.0.", key) in names:  # parts that this class leaves out are allowed
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
