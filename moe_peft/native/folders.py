"""
Folders with a model or an adapter, and names on the hub. `open_folder` decides once among four kinds: a LoRA, a
MoE-LoRA adapter, a dense model or a native MoE. All contents are read when asked for.
"""

from __future__ import annotations

import copy
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import torch
from accelerate import PartialState
from huggingface_hub import hf_hub_download, snapshot_download
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from ..adapter.config import MoELoraConfig
from ..adapter.layers import MoELoraLayer
from ..models.gates import CONFIG_FIELD
from ..routing.routers import Router
from ..utils.io import check_on_hub, check_weights, read_json, reading, refused_by_libraries
from ..utils.loading import (
    ADAPTER_CONFIG,
    CONFIG,
    EXPERT_COUNTS,
    NO_CODE,
    adapter_weights,
    check_causal,
    check_loaded,
    check_tokenizer,
    empty_model,
    quantization_config,
    read_adapter_config,
    read_adapter_weights,
    read_config,
    read_tokenizer,
    way_to_lora,
)
from ..utils.messages import InputError, choice_error
from .expert_init import FFN
from .families import FAMILIES, DenseFamily, MoEFamily, find_families
from .model_folder import COMPANIONS, DTYPES, EMBEDDINGS, HEAD, NOT_WEIGHTS, companions
from .moe_config import backbone_shapes, carried_settings
from .router_files import load_routers
from .safetensors_io import Checkpoint

logger = logging.getLogger(__name__)

_DOWNLOADED = ["*.json", "*.safetensors", "README.md", *COMPANIONS]


class ModelFolder(ABC):
    """
    A folder, or a name on the hub.

    Args:
        path: the folder or the name.
        field: its config field, for messages.
        revision: revision of a name on the hub.
    """

    kind: str  # as in "is a dense model"

    def __init__(self, path: str | os.PathLike, field: str, revision: str | None = None) -> None:
        self.path, self.field, self.revision = os.fspath(path), field, revision

    def __str__(self) -> str:
        return f"{self.field}={self.path!r}"

    @cached_property
    def folder(self) -> Path:
        """Folder itself, or the download of a name on the hub, without pickled weights."""
        if Path(self.path).is_dir():
            return Path(self.path)
        with reading(self):
            return Path(snapshot_download(self.path, revision=self.revision, allow_patterns=_DOWNLOADED))

    @cached_property
    def has_tokenizer(self) -> bool:
        """True if it was saved with a tokenizer."""
        return _find(self.path, "tokenizer_config.json") is not None

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """Tokenizer of the model or adapter."""

    def load(
        self, dtype: str = "auto", quantization: dict[str, Any] | None = None, *, on_accelerator: bool = True
    ) -> Any:
        """
        Load the model with its weights, in evaluation mode.

        Args:
            dtype: dtype of the weights, as `from_pretrained` takes it.
            quantization: fields of `BitsAndBytesConfig`.
            on_accelerator: place the model on this process's accelerator, if there is one.
        """
        if dtype not in ("auto", *DTYPES):
            raise InputError(choice_error("--dtype", dtype, ("auto", *DTYPES)))
        options: dict[str, Any] = {"dtype": dtype}
        if on_accelerator and torch.accelerator.is_available():
            options["device_map"] = {"": PartialState().device}
        if quantization is not None:
            options["quantization_config"] = quantization_config(quantization, "--quantization")
        return self.from_pretrained(**options).eval()

    @abstractmethod
    def from_pretrained(self, **options: Any) -> Any:
        """Load the model as `from_pretrained` does with these arguments. Check its files and weights as well."""

    @property
    @abstractmethod
    def empty(self) -> nn.Module:
        """Model without weights, on the meta device."""

    @abstractmethod
    def check_tensors(self) -> None:
        """Raise if the tensors on disk differ from the tensors that the config asks for."""

    def companions(self) -> list[Path]:
        """
        Return the tokenizer, generation config and license files to copy to derived models; see
        `model_folder.companions`.
        """
        return companions(self.folder)


Kind = TypeVar("Kind", bound=ModelFolder)


@overload
def open_folder(path: str | os.PathLike, field: str, *, base: str | os.PathLike | None = ...) -> ModelFolder: ...
@overload
def open_folder(
    path: str | os.PathLike, field: str, *wanted: type[Kind], base: str | os.PathLike | None = ...
) -> Kind: ...
def open_folder(
    path: str | os.PathLike, field: str, *wanted: type[ModelFolder], base: str | os.PathLike | None = None
) -> ModelFolder:
    """
    Open a folder, or a name on the hub, as `LoraFolder`, `MoELoraFolder`, `DenseFolder` or `NativeFolder`. Adapters of
    other types are an `AdapterFolder`. Only the config is read.

    Args:
        path: the folder or the name.
        field: its config field, for messages.
        wanted: the kinds that the caller accepts; none given: any.
        base: base model of an adapter; None: the base model named by the adapter.

    Example:

    ```python
    >>> from moe_peft.native.folders import MoELoraFolder, open_folder
    >>> folder = open_folder("my-adapter", "adapter", MoELoraFolder)
    >>> experts = folder.config.num_experts
    >>> model = folder.load("float32")
    ```
    """
    source = f"{field}={os.fspath(path)!r}"
    folder: ModelFolder
    adapter = find_adapter(path, field, base)
    if adapter is not None:
        if wanted and not isinstance(adapter, wanted):
            if Path(path, CONFIG).is_file():
                _refuse_adapter(path, source)
            expect(adapter, *wanted)
        adapter.config = read_adapter_config(path, source)
        folder = adapter
    elif base is not None:
        raise InputError(f"base={os.fspath(base)!r}: is for an adapter, but {source} is not one")
    elif Path(path).is_dir() and not Path(path, CONFIG).exists():
        raise InputError(f"{source}: no {ADAPTER_CONFIG} and no {CONFIG}; name a model's folder")
    else:
        folder = open_model(path, field)
    return expect(folder, *wanted) if wanted else folder


def find_adapter(path: str | os.PathLike, field: str, base: str | os.PathLike | None = None) -> AdapterFolder | None:
    """
    Return the adapter of a folder or of a name on the hub, with its config still unchecked. None if there is no
    adapter.
    """
    config = _find(path, ADAPTER_CONFIG)
    if config is None:
        return None
    kinds: dict[Any, type[AdapterFolder]] = {"LORA": LoraFolder, "ADALORA": LoraFolder, "MOE_LORA": MoELoraFolder}
    kind = read_json(config).get("peft_type")
    return kinds.get(kind if isinstance(kind, str) else None, AdapterFolder)(path, field, base)


def _find(path: str | os.PathLike, file: str) -> Path | None:
    """Return a file of a folder, or of a name on the hub. None if there is no such file."""
    if Path(path).exists():
        return Path(path, file) if Path(path, file).is_file() else None
    try:
        return Path(hf_hub_download(os.fspath(path), file))
    except (OSError, ValueError):  # no such file or repository, no reachable hub, or not a name on the hub
        return None


def open_model(path: str | os.PathLike, field: str, revision: str | None = None) -> WholeModel:
    config = WholeModel(path, field, revision).config
    counts = (getattr(config.get_text_config(), name, None) for name in EXPERT_COUNTS)
    becomes_moe = any(dense.model_type == config.model_type for family in FAMILIES.values() for dense in family.dense)
    has_experts = not becomes_moe and any(count is not None for count in counts)
    folder: WholeModel = (NativeFolder if has_experts else DenseFolder)(path, field, revision)
    folder.config = config
    return folder


def _refuse_adapter(folder: str | os.PathLike, source: object) -> None:
    """Raise if a model's folder also holds an adapter: transformers would load it with the model."""
    if Path(folder, ADAPTER_CONFIG).is_file():
        raise InputError(
            f"{source}: {os.fspath(folder)} holds an adapter beside the model, {ADAPTER_CONFIG}; move the adapter's "
            "files to a folder of their own"
        )


def base_named(name: str, revision: str | None) -> str:
    """Return a base model's name and revision, the same for every path to one folder."""
    return f"{Path(name).resolve() if Path(name).exists() else name} ({revision or 'main'})"


def expect(folder: ModelFolder, *wanted: type[Kind]) -> Kind:
    """Return the folder. Raise unless it is of one of these kinds."""
    if not isinstance(folder, wanted):
        kinds = " or ".join(str(kind.kind) for kind in wanted)
        way = way_to_lora(folder.config.peft_type) if type(folder) is AdapterFolder and LoraFolder in wanted else ""
        raise InputError(f"{folder}: is {folder.kind}; give {kinds}{way}")
    return folder


def check_same_tokens(folder: ModelFolder, other: ModelFolder) -> None:
    """
    Raise if two tokenizers differ in a token's id or an id's token. Warn if `other` lacks a token.

    A model made from both folders gets the tokenizer of `other`.
    """
    ids, others = folder.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    tokens = {i: token for token, i in others.items()}
    for token, i in sorted(ids.items(), key=lambda pair: pair[1]):
        if others.get(token, i) != i or tokens.get(i, token) != token:
            raise InputError(
                f"{folder}: in its tokenizer, token {i} is {token!r}; in the tokenizer of {other} it is "
                f"{tokens.get(i)!r}; give parts trained with the same tokenizer"
            )
    if lacking := [token for token in ids if token not in others]:
        logger.warning("%s has the token %r, but the tokenizer of %s does not", folder, lacking[0], other)


def check_shapes(
    folder: ModelFolder, shapes: Mapping[str, torch.Size], expected: Mapping[str, torch.Size], source: str = "config"
) -> None:
    """
    Raise if a tensor is missing or superfluous, or has another shape than the config says.

    Args:
        source: what the expected shapes follow from, for messages.
    """
    for name in {**expected, **shapes}:
        if shapes.get(name) != expected.get(name):
            has = f"{name} is {list(shapes[name])}" if name in shapes else f"no tensor {name}"
            wants = list(expected[name]) if name in expected else "nothing about it"
            raise InputError(f"{folder}: {has}, its config says {wants}; use the {source} that it was saved with")


# --- adapters --------------------------------------------------------------------------------------------------------


class AdapterFolder(ModelFolder):
    """
    An adapter of any type.

    Args:
        base: its base model; None: the base model named in its config.
    """

    remedy = "name it with --base"  # if the config names no base model

    def __init__(self, path: str | os.PathLike, field: str, base: str | os.PathLike | None = None) -> None:
        super().__init__(path, field)
        self.other_base = base

    @property
    def kind(self) -> str:  # type: ignore[override]
        return f"an adapter of type {self.config.peft_type.value}"

    @cached_property
    def config(self) -> PeftConfig:
        return read_adapter_config(self.path, self)

    @cached_property
    def base(self) -> WholeModel:
        """Base model that the adapter was trained on. Raise if it does not exist."""
        if self.other_base is not None:
            return open_model(self.other_base, "base")
        name, revision = self.config.base_model_name_or_path, self.config.revision
        field = f"{self}: base_model_name_or_path"
        if not name:
            raise InputError(f"{field}={name!r}: the adapter names no base; {self.remedy}")
        try:
            if not Path(name).exists():
                check_on_hub(name, f"{field}={name!r}", revision)
            return open_model(name, field, revision)
        except InputError as error:
            if Path(name).exists() or "gated" in str(error):
                raise
            raise InputError(
                f"{field}={name!r}: no folder seen from {Path.cwd()}, and no model on a reachable hub; {self.remedy}"
            ) from error

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of the adapter, on the CPU."""
        return read_adapter_weights(self.path, self)

    @cached_property
    def tokenizer(self) -> Any:
        """
        Tokenizer in the adapter's folder, as training may have changed the chat template and EOS token; else the
        base's.
        """
        if not self.has_tokenizer:
            return self.base.tokenizer
        tokenizer = read_tokenizer(self.path, self)
        check_tokenizer(tokenizer, None, self)
        return tokenizer

    def from_pretrained(self, **options: Any) -> Any:
        model = self._resized(self.base.from_pretrained(**options))
        adapter_weights(self.path, self)
        with refused_by_libraries(self):
            return PeftModel.from_pretrained(model, self.path)

    def _resized(self, model: PreTrainedModel) -> PreTrainedModel:
        """Add embedding rows for added tokens, like PEFT, which saves such embeddings in the adapter."""
        if self.has_tokenizer and len(self.tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(self.tokenizer), mean_resizing=False)
        return model

    @cached_property
    def empty(self) -> PeftModel:
        """Base model with the adapter, without weights."""
        base = self._resized(self.base.empty)
        with refused_by_libraries(f"{self}: its config does not fit the base"), torch.device("meta"):
            return get_peft_model(base, copy.deepcopy(self.config))

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Names and shapes of the tensors that the config asks for."""
        state = get_peft_model_state_dict(self.empty, save_embedding_layers=False)
        return {name: tensor.shape for name, tensor in state.items()}

    def check_tensors(self) -> None:
        """Raise if the tensors differ from the config's, or a value is not finite."""
        of_tuner = f".{self.empty.base_model.prefix}"
        shapes = {key: w.shape for key, w in self.tensors.items() if of_tuner in key or key in self.shapes}
        check_shapes(self, shapes, self.shapes, "config and the base")
        for key, tensor in self.tensors.items():
            if not tensor.isfinite().all():
                raise InputError(f"{self}: {key} holds NaN or infinity; save the adapter again")


class LoraFolder(AdapterFolder):
    """A LoRA adapter."""

    kind = "a LORA adapter"


class MoELoraFolder(AdapterFolder):
    """A MoE-LoRA adapter."""

    kind = "a MOE_LORA adapter"

    @cached_property
    def config(self) -> MoELoraConfig:
        return cast(MoELoraConfig, super().config)

    @property
    def gates(self) -> list[torch.Tensor]:
        """Weights [n, d] of the linear gates, in the order of the model's layers."""
        layers = (path for path, m in self.empty.named_modules() if isinstance(m, MoELoraLayer) and m.moe_lora_router)
        names = [f"{path}.moe_lora_router.weight" for path in layers]
        return [self.tensors[name] for name in names if name in self.tensors]

    def sized_settings(self, routers: Iterable[Router]) -> dict[str, Any]:
        """
        Return the router settings that default to a function of the number of experts, with their present values. Set
        explicitly, they stay the same when experts are added or removed.
        """
        settings = {}
        for name, of_size in self.config.router_class.sized.items():
            values = {getattr(router.settings, name) or of_size(router.num_experts) for router in routers}
            if len(values) > 1:
                raise InputError(
                    f"{self}: router_{name}=None: the default depends on the number of experts, and layers have "
                    "different numbers; set it in the adapter's config first"
                )
            settings[f"router_{name}"] = values.pop()
        return settings


# --- models ----------------------------------------------------------------------------------------------------------


class WholeModel(ModelFolder):
    """A complete model, not an adapter."""

    @cached_property
    def config(self) -> PreTrainedConfig:
        config = read_config(self.path, self, self.revision)
        check_causal(config, self)
        return config

    @cached_property
    def tokenizer(self) -> Any:
        config = self.config  # first, to report a missing model as such
        tokenizer = read_tokenizer(self.path, self, self.revision)
        check_tokenizer(tokenizer, config, self)
        return tokenizer

    @cached_property
    def tensors(self) -> Checkpoint:
        """Tensors of the model, each read when asked for."""
        return Checkpoint(self.folder)

    @property
    def dtype(self) -> torch.dtype:
        """
        Config's dtype, or the dtype of the embeddings on disk if the config names no dtype that can be written here.
        """
        name = str(getattr(self.config, "dtype", None)).removeprefix("torch.")
        return DTYPES.get(name) or self.tensors.dtype(EMBEDDINGS)

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor by its name on disk. A tied head is read from the embeddings."""
        return self.tensors.tensor(self.tensors.stored_name(name, EMBEDDINGS if name == HEAD else None))

    @property
    def empty(self) -> PreTrainedModel:
        return empty_model(copy.deepcopy(self.config), self)  # adapters write to a model's config

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Names and shapes of all tensors, including the head even if it is tied."""
        raise NotImplementedError

    def check_tensors(self) -> None:
        """Raise if the tensors on disk differ from the config's. A tied head may be missing."""
        tied = getattr(self.config, "tie_word_embeddings", False) and HEAD not in self.tensors.files
        shapes = {name: self.tensors.shape(name) for name in self.tensors if not name.endswith(NOT_WEIGHTS)}
        check_shapes(self, shapes, {name: shape for name, shape in self.shapes.items() if not (tied and name == HEAD)})

    def from_pretrained(self, **options: Any) -> Any:
        """
        Load the model, with the routers that replaced a MoE's gates. Raise if a weight is missing, rather than
        initialize it. A quantized model is placed on this process's device, unless ZeRO-3 shards it.
        """
        has_routers = hasattr(self.config.get_text_config(), CONFIG_FIELD)
        if Path(self.path).is_dir():
            _refuse_adapter(self.path, self)
            check_weights(Path(self.path), self)
        if options.get("quantization_config") is not None and not is_deepspeed_zero3_enabled():
            options.setdefault("device_map", {"": PartialState().device})
        options |= {"revision": self.revision or "main", "use_safetensors": True, **NO_CODE}
        with reading(self):
            model, info = AutoModelForCausalLM.from_pretrained(
                self.path, output_loading_info=True, ignore_mismatched_sizes=not has_routers, **options
            )
        if has_routers:  # replaced gates are not in its files
            load_routers(model, self.folder)
        else:
            check_loaded(model, info, self)
        return model


class DenseFolder(WholeModel):
    """A dense model. `to_moe` sets its family and the family of its MoE."""

    kind = "a dense model"
    family: DenseFamily
    moe: MoEFamily

    def to_moe(self, family: str | None = None) -> DenseFolder:
        """
        Check, tensor by tensor, that the model can become a native MoE.

        Args:
            family: the MoE's model type; None takes the first match.

        Returns:
            itself.
        """
        if getattr(self.config, "quantization_config", None) is not None:
            raise InputError(f"{self.path} is quantized; give the full-precision model it was made from")
        _refuse_adapter(self.folder, self)
        self.family, self.moe = find_families(self.config.model_type, family)
        # Check settings before tensors: a setting that no MoE has can be the cause of a tensor that does not fit.
        carried_settings((self.family, self.moe), self.config)
        for companion in self.companions():  # will be copied
            if companion.suffix == ".json":
                read_json(companion)
        self.check_tensors()
        return self

    def backbone(self, name: str) -> torch.Tensor:
        """Return the non-FFN tensor that the MoE calls `name`."""
        return self.family.backbone(name, self.config, self.read)

    def ffn(self, layer: int) -> FFN:
        return self.family.ffn(layer).split(self.read)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return backbone_shapes(self.config) | self.family.ffn_shapes(self.config)

    def say_untied(self) -> None:
        """Log that the MoE's head, tied in the dense model, gets its own parameters."""
        if getattr(self.config, "tie_word_embeddings", False):
            count = self.config.vocab_size * self.config.hidden_size
            logger.info(f"the head, tied to the embeddings in the dense model, gets parameters of its own: {count:,}")


def open_dense(path: str | os.PathLike, family: str | None = None) -> DenseFolder:
    """Open a dense model that can become a native MoE; see `DenseFolder.to_moe`."""
    return open_folder(path, "model", DenseFolder).to_moe(family)


class NativeFolder(WholeModel):
    """A native MoE. In a family of `FAMILIES`, it also provides its tensors as a MoE's `Content`."""

    kind = "a native MoE"

    @cached_property
    def family(self) -> MoEFamily:
        """Family of the MoE. Raise if it is not in `FAMILIES`, or if other routers replaced its gates."""
        kind = self.config.model_type
        if kind not in FAMILIES:
            raise InputError(f"{self}: a {kind!r} model; give a native MoE of {', '.join(FAMILIES)}")
        if hasattr(self.config.get_text_config(), CONFIG_FIELD):
            raise InputError(f"{self}: other routers have replaced its gates; fold them first")
        return FAMILIES[kind]

    @property
    def num_experts(self) -> int:
        return getattr(self.config, self.family.count)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return self.family.plan(self.config, backbone_shapes(self.config))

    def backbone(self, name: str) -> torch.Tensor:
        return self.read(name)

    def router(self, layer: int) -> torch.Tensor:
        return self.read(self.family.router_name(layer))

    def experts(self, layer: int) -> Iterator[FFN]:
        read = lru_cache(2)(self.read) if self.family.stacked else self.read  # one tensor holds all experts
        for expert in range(self.num_experts):
            yield self.family.read_expert(layer, expert, read)

    def shared(self, layer: int) -> FFN:
        return self.family.read_shared(layer, self.read)
