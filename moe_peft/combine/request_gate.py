"""
`RequestGate` chooses one of several adapters for a request, or none: then the base answers.

The gate reads a request by itself, like a classifier in front of a server: without the system prompt, the template's
words, tools or earlier turns, which requests for all adapters share. It takes the mean of the request's tokens in the
first quarter of the base's layers. Kernel ridge regression compares this mean with the means of a few texts for each
adapter. Nothing is trained.

Legend: R requests, L layers read, S positions, d hidden size, n adapters (and the base).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from ..adapter.ffn_layout import find_layout
from ..models.introspection import base_model, base_passes, counted_tokens, text_config
from ..native.folders import DenseFolder, NativeFolder, WholeModel, open_folder, open_model
from ..utils.io import read_text, reading
from ..utils.loading import NO_CODE, check_loaded, read_tokenizer
from ..utils.messages import InputError, choice_error

FILE = "request_gate.safetensors"
BASE = "base"  # name for the choice of no adapter
TEXTS = 4000  # a gate uses about this number of texts at most, over all classes
_MARK = "(the request)"
Message: TypeAlias = Mapping[str, Any]
Request: TypeAlias = str | Sequence[Message]  # a text, or a chat's messages


def neutral_requests() -> list[str]:
    """Return the built-in list of general requests, in English: many kinds of requests, meant for no adapter."""
    return read_neutral(None)


def read_neutral(file: str | None) -> list[str]:
    """
    Read general requests, one per line, from a file (None: the built-in list). Empty lines and lines beginning with
    `# ` do not count.

    Raises:
        ValueError: the file cannot be read, or has fewer than eight requests.
    """
    text = read_text(Path(__file__).with_name("neutral.txt") if file is None else file, f"neutral={file!r}")
    texts = [line.strip() for line in text.splitlines() if line.strip() and not f"{line} ".startswith("# ")]
    if len(texts) < 8:
        raise InputError(f"neutral={file!r}: has {len(texts)} lines; give eight or more, dozens are better")
    return texts


def request_of(row: Mapping[str, Any]) -> Request:
    """Return the request in a row of training data: its prompt, its messages, or its text."""
    return next((row[name] for name in ("prompt", "messages", "text") if row.get(name)), "")


def request_text(request: Request) -> str:
    """Return the text of a request: the request itself, or the last user message of a chat."""
    if isinstance(request, str):
        return request
    content = next((message.get("content") for message in reversed(request) if message.get("role") == "user"), "")
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or () if isinstance(part, Mapping) and part.get("text"))


@dataclass(frozen=True)
class RequestReader:
    """
    Tokenizes requests.

    Args:
        tokenizer: the base's tokenizer.
        chat: whether to put a request in the chat template, as the base sees it in service. False: the text alone.
        max_length: number of tokens to read of a request, not counting the template's tokens.

    Raises:
        ValueError: `chat` is True, and there is no chat template, or it does not accept a lone user message.
    """

    tokenizer: Any
    chat: bool
    max_length: int = 1024

    def __post_init__(self) -> None:
        if self.chat:
            with reading("chat=True: the tokenizer's chat template", "give texts, or a tokenizer that has one"):
                self._in_template(_MARK)

    def batch(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `attention_mask` and `counted`, 1 for tokens of the requests themselves, [R, S] each."""
        # Cut texts surely longer than `max_length` before tokenizing them: other requests wait.
        texts = [text.strip()[: 32 * self.max_length].strip() for text in texts]
        read = []
        for text in texts:
            whole, start = self._rendered(text)
            # The template adds special tokens itself.
            tokens = self.tokenizer(
                whole, add_special_tokens=not self.chat, return_offsets_mapping=self.tokenizer.is_fast
            )
            end, ids = start + len(text), tokens["input_ids"]
            offsets = tokens.get("offset_mapping") or [(start, end)] * len(ids)
            own = [a < end and b > start and a < b for a, b in offsets]
            # Tokens after the last counted token change nothing: drop them.
            last = [at for at, counts in enumerate(own) if counts][: self.max_length][-1:]
            length = last[0] + 1 if last else len(ids)
            read.append((ids[:length], own[:length]))
        length = max(1, *(len(ids) for ids, _ in read))
        ids, mask, counted = (torch.zeros(len(texts), length, dtype=torch.long) for _ in range(3))
        for i, (tokens, own) in enumerate(read):
            ids[i, : len(tokens)], mask[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.long), 1
            counted[i, : len(own)] = torch.tensor(own).long()
        mask[:, 0] = 1  # for an empty request
        return {"input_ids": ids, "attention_mask": mask, "counted": counted}

    def _rendered(self, text: str) -> tuple[str, int]:
        """Return the text to tokenize for a request, and the position of the request in it."""
        return (self._in_template(text), self._start) if self.chat else (f"{text}\n", 0)

    @cached_property
    def _start(self) -> int:
        """Position of a request in the rendered template, found with a marker. The template may contain short texts."""
        return max(0, self._in_template(_MARK).find(_MARK))

    def _in_template(self, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@dataclass
class RequestGate:
    """
    Chooses one of several adapters for a request, or none: then the base answers. It stands in front of a server with
    the adapters under their names (`moe-peft pick`), or steers a mixture of the adapters.

    Args:
        model: the base, or its first layers, with or without adapters. Adapters are disabled.
        reader: tokenizes requests.
        vectors: adapter → vectors of texts for it, float32 [R, L, d]. `"base"` has the vectors of general requests.
        base: folder or name of the base, loaded by `from_pretrained`.
        revision: revision of the base on the hub.
        penalty: λ of the kernel ridge regression.
        layers: number of first layers to read; None: a quarter of the model's layers.
        margin: an adapter is picked only if its score exceeds the base's score by this margin.
        gone: vectors of removed adapters. The base answers their requests.

    Example:

    ```python
    >>> from moe_peft import RequestGate
    >>> gate = RequestGate.fit(
    ...     "Qwen/Qwen3-0.6B",
    ...     {
    ...         "math": ["What is 3 + 4?", "Solve x + 2 = 5."],
    ...         "code": ["Sort a list in C.", "Write a loop in Go."],
    ...     },
    ... )
    >>> names = gate.pick(["What is 6 + 7?", "What is the capital of France?"])
    >>> gate.save_pretrained("gate")
    ```
    """

    model: Any
    reader: RequestReader
    vectors: dict[str, torch.Tensor]
    base: str = ""
    revision: str | None = None
    penalty: float = 0.03
    layers: int | None = None
    margin: float = 0.1
    gone: dict[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def modules(self) -> list[nn.Module]:
        """FFNs of the first layers. The gate reads their inputs."""
        layers = _quarter(text_config(self.model).num_hidden_layers) if self.layers is None else self.layers
        return first_ffns(self.model, layers)

    @cached_property
    def classifier(self) -> KernelRidge:
        """Regression from vectors to adapters, fitted at the first scores: adapters may be added or removed before."""
        return KernelRidge([*self.vectors.values(), *self.gone.values()], self.penalty)

    @property
    def names(self) -> list[str]:
        """Names of the adapters, in order."""
        return [name for name in self.vectors if name != BASE]

    @property
    def columns(self) -> list[str]:
        """Names of the columns of `scores`: the adapters, `"base"`, and removed adapters."""
        return [*self.vectors, *self.gone]

    @classmethod
    def fit(
        cls,
        base: Any,
        requests: Mapping[str, Sequence[Request]],
        neutral: Sequence[str] | None = None,
        *,
        tokenizer: Any = None,
        chat: bool | None = None,
        max_length: int = 1024,
    ) -> RequestGate:
        """
        Build a gate from example requests for each adapter.

        Args:
            base: the adapters' base: a folder, a name on the hub, or a model (then give `tokenizer`).
            requests: adapter → example requests for it: dozens, better hundreds.
            neutral: general requests for the base to answer; None: the built-in English list. With `[]`, each request
                with words goes to some adapter.
            chat: whether to read requests inside the chat template; None: True if some of `requests` are chats.
            max_length: number of tokens to read of a request.

        Raises:
            ValueError: `requests` names no adapter, or names one `"base"`; or an adapter has no requests with words.
        """
        if BASE in requests:
            raise InputError(f"requests: {BASE!r} is the name of the choice of no adapter; give that adapter another")
        if not requests:
            raise InputError("requests: are of no adapter; give some texts for each")
        texts: dict[str, Sequence[Request]] = {**requests, BASE: neutral_requests() if neutral is None else neutral}
        for name, of_name in texts.items():
            _check_requests(of_name, f"requests of {name!r}")
        if chat is None:
            chat = any(not isinstance(request, str) for of_name in requests.values() for request in of_name)
        model, tokenizer, path, layers = _opened(base, tokenizer)
        gate = cls(model, RequestReader(tokenizer, chat, max_length), {}, path, layers=layers)
        for name, of_name in texts.items():
            if len(of_name) or name != BASE:
                gate = gate.with_adapter(name, of_name)
        return gate

    # --- changes -----------------------------------------------------------------------------------------------------

    def with_adapter(self, name: str, requests: Sequence[Request]) -> RequestGate:
        """
        Return a gate with an adapter added, or with new texts for its name. Texts of other adapters are not needed.

        Raises:
            ValueError: no request has words.
        """
        _check_requests(requests, f"requests of {name!r}")
        requests = [request for request in requests if request_text(request).strip()]
        if not requests:
            raise InputError(f"requests: {name!r} has none with words; give some texts that it is for")
        vectors = {**self.vectors, name: self.read(requests)}
        base = {BASE: vectors.pop(BASE)} if BASE in vectors else {}
        gone = {other: value for other, value in self.gone.items() if other != name}
        return dataclasses.replace(self, vectors={**vectors, **base}, gone=gone)

    def without_adapter(self, name: str, to_base: bool = False) -> RequestGate:
        """
        Return a gate without an adapter.

        Args:
            to_base: whether the base answers the adapter's requests. The gate then keeps the vectors of the adapter's
                texts. False: the gate is the same as if the adapter had never been there, and the adapter's requests
                may go to another adapter.
        """
        if name not in (self.names if to_base else {**self.vectors, **self.gone}):
            raise InputError(choice_error("adapter", name, self.names))
        vectors, gone = ({n: v for n, v in of.items() if n != name} for of in (self.vectors, self.gone))
        return dataclasses.replace(self, vectors=vectors, gone={**gone, name: self.vectors[name]} if to_base else gone)

    def in_order(self, names: Sequence[str]) -> RequestGate:
        """Return the gate with its adapters in another order. `names` lists all of them."""
        assert {*names, BASE} >= self.vectors.keys()
        return self._with_vectors({name: self.vectors[name] for name in (*names, BASE) if name in self.vectors})

    def renamed(self, names: Mapping[str, str]) -> RequestGate:
        """Return the gate with other names for its adapters: old → new."""
        return self._with_vectors({names.get(name, name): value for name, value in self.vectors.items()})

    def _with_vectors(self, vectors: dict[str, torch.Tensor]) -> RequestGate:
        return dataclasses.replace(self, vectors=vectors)

    # --- choosing ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, requests: Sequence[Request], batch_size: int = 16) -> torch.Tensor:
        """Compute the vectors of requests, float32 [R, L, d]: the mean of each FFN's input over a request's tokens."""
        _check_requests(requests, "requests")
        if not len(requests):
            return torch.zeros(0, len(self.modules), text_config(self.model).hidden_size)
        texts = [request_text(request) for request in requests]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # similar lengths need little padding
        found: list[list[torch.Tensor]] = [[] for _ in self.modules]

        def add(i: int, batch: Any, mask_RS: torch.Tensor, x_RSD: torch.Tensor, output: Any) -> None:
            counted_RS = counted_tokens(batch, mask_RS)
            share_RS = counted_RS.float() / counted_RS.sum(1, keepdim=True)
            found[i].append(torch.einsum("rs,rsd->rd", share_RS, x_RSD.view(*mask_RS.shape, -1).float()).cpu())

        starts = range(0, len(order), batch_size)
        batches = (self.reader.batch([texts[i] for i in order[at : at + batch_size]]) for at in starts)
        base_passes(self.model, batches, self.modules, add, only=True)
        vectors_RLD = torch.stack([torch.cat(of_layer) for of_layer in found], 1)
        return vectors_RLD[torch.tensor(order).argsort()]

    def scores(self, requests: Sequence[Request]) -> torch.Tensor:
        """Return the score of each request for each of `columns`, float64 [R, n], about 0 to 1."""
        return self.classifier(self.read(requests))

    def pick(self, requests: Sequence[Request]) -> list[str | None]:
        """Return the adapter for each request, or None for the base. A request without words goes to the base."""
        names = [*self.vectors, *[BASE] * len(self.gone)]
        scores_RN = self.scores(requests)
        if BASE in names:
            scores_RN[:, names.index(BASE)] += self.margin
        picked = [names[i] for i in scores_RN.argmax(1).tolist()]
        spoken = [bool(request_text(request).strip()) for request in requests]
        return [name if has_words and name != BASE else None for name, has_words in zip(picked, spoken, strict=True)]

    # --- files -------------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """
        Write the settings and the texts' vectors, not the texts, to a folder. In a mixture's folder, the vectors
        describe the requests for the mixture's adapters.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        reader = self.reader
        about = {
            "base": self.base, "revision": self.revision, "chat": reader.chat, "max_length": reader.max_length,
            "penalty": self.penalty, "margin": self.margin,
        }  # fmt: skip
        _write(Path(folder, FILE), about, self.vectors, self.gone)

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike, base: Any = None, *, tokenizer: Any = None, dtype: str = "auto"
    ) -> RequestGate:
        """
        Load a gate.

        Args:
            folder: folder written by `save_pretrained` or `moe-peft mix`. Its tokenizer, if it has one, reads requests
                unless `tokenizer` is given.
            base: the base, as in `fit`; None: the base named in the gate's file.
            dtype: dtype of the base's weights.
        """
        path = Path(folder, FILE)
        about, vectors, gone = _read(path)
        if tokenizer is None and Path(folder, "tokenizer_config.json").is_file():
            tokenizer = read_tokenizer(folder, path.parent)
        revision = None if base else about["revision"]
        model, tokenizer, named, layers = _opened(base or about["base"], tokenizer, dtype, revision)
        reader = RequestReader(tokenizer, about["chat"], about["max_length"])
        named = named or about["base"]
        gate = cls(model, reader, vectors, named, revision, about["penalty"], layers, about["margin"], gone)
        shape, every = (len(gate.modules), text_config(model).hidden_size), [*vectors.values(), *gone.values()]
        if any(tuple(value.shape[1:]) != shape or not value.isfinite().all() for value in every):
            raise InputError(
                f"{path}: was made with the base {about['base']!r}; {named!r} is another one, with {shape[1]} features "
                f"in {shape[0]} layers that decide"
            )
        return gate


def _write(
    path: Path, about: Mapping[str, Any], vectors: Mapping[str, torch.Tensor], gone: Mapping[str, torch.Tensor]
) -> None:
    tensors = {str(i): x_RLD.contiguous() for i, x_RLD in enumerate([*vectors.values(), *gone.values()])}
    about = {**about, "names": [*vectors], "gone": [*gone]}
    save_file(tensors, path, metadata={"request_gate": json.dumps(about)})


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Read a file of `_write`: settings, vectors by name, and vectors of removed adapters by name."""
    if not path.is_file():
        raise InputError(f"{str(path.parent)!r}: has no {FILE}; make it with moe-peft mix or RequestGate.fit")
    with reading(f"{path}: cannot be read", "make it again"), safe_open(path, framework="pt") as file:
        read = json.loads((file.metadata() or {})["request_gate"])
        names, gone = ([str(name) for name in read[key]] for key in ("names", "gone"))
        tensors = [file.get_tensor(str(i)).float() for i in range(len(names) + len(gone))]
        about = {
            "base": str(read["base"]), "revision": read["revision"], "chat": bool(read["chat"]),
            "max_length": int(read["max_length"]), "penalty": float(read["penalty"]),
            "margin": float(read["margin"]),
        }  # fmt: skip
    whole = names and all(value.dim() and len(value) for value in tensors) and len({*names, *gone}) == len(tensors)
    finite = math.isfinite(about["penalty"]) and math.isfinite(about["margin"]) and isinstance(read["chat"], bool)
    if not (whole and finite and about["penalty"] > 0 and about["max_length"] > 0):
        raise InputError(f"{path}: has no texts, or settings that cannot be; make it again")
    return about, dict(zip(names, tensors, strict=False)), dict(zip(gone, tensors[len(names) :], strict=True))


def copy_without(source: Path, folder: Path, names: Sequence[str]) -> None:
    """Copy the gate for requests from a mixture's folder, if it has one, without the adapters `names`."""
    if (source / FILE).is_file():
        about, *parts = _read(source / FILE)
        _write(folder / FILE, about, *({n: x for n, x in part.items() if n not in names} for part in parts))


class KernelRidge:
    """
    Kernel ridge regression from the vectors of texts to their class, with a Gaussian kernel: far from all texts, scores
    are 0. Classes have the same weight, however many texts they have. Layers have the same weight, too. The kernel's
    width is the root mean square distance of two texts.

    Args:
        classes: the vectors of each class's texts, [R, L, d]. A class with more than `TEXTS`/n texts is thinned out
            evenly.
        penalty: λ.
    """

    def __init__(self, classes: Sequence[torch.Tensor], penalty: float) -> None:
        # Time grows with the cube of the number of texts, and memory with its square.
        step_N = [-(-len(x_RLD) * len(classes) // TEXTS) for x_RLD in classes]
        classes = [x_RLD[::step].float() for x_RLD, step in zip(classes, step_N, strict=True)]
        x_RLD = torch.cat(classes)
        self.mean_LD = x_RLD.mean(0)
        variance_L = x_RLD.var(0, correction=0).sum(-1)
        self.scale_L1 = (2 * len(variance_L) * variance_L).sqrt().clamp_min(1e-12)[:, None]
        self.x_RF = self._scaled(x_RLD)
        count_N = torch.tensor([len(of_class) for of_class in classes])
        class_R = torch.arange(len(classes)).repeat_interleave(count_N)
        kernel_RR = self._kernel(self.x_RF)
        kernel_RR.diagonal().add_(penalty * count_N[class_R].double() * len(classes) / len(x_RLD))
        target_RN = torch.eye(len(classes), dtype=torch.float64)[class_R]
        self.coefficients_RN = torch.cholesky_solve(target_RN, torch.linalg.cholesky(kernel_RR))

    def __call__(self, x_RLD: torch.Tensor) -> torch.Tensor:
        """Return scores of vectors [R, L, d] for each class, float64 [R, n]."""
        return self._kernel(self._scaled(x_RLD.float())) @ self.coefficients_RN

    def _scaled(self, x_RLD: torch.Tensor) -> torch.Tensor:
        """Center and scale vectors, so squared distances of the texts have mean 1, [R, L·d]."""
        return ((x_RLD - self.mean_LD) / self.scale_L1).flatten(1)

    def _kernel(self, x_RF: torch.Tensor) -> torch.Tensor:
        """Return exp(−d²/2) for the distances d from vectors to the texts' vectors, float64."""
        return torch.cdist(x_RF, self.x_RF).double().square().mul(-0.5).exp()


def _quarter(layers: int) -> int:
    """Return a quarter of `layers`, rounded up. So many first layers tell requests apart as well as all layers."""
    return -(-layers // 4)


def first_ffns(model: Any, count: int) -> list[nn.Module]:
    """Return the FFNs of a model's first layers."""
    layers, decoder = text_config(model).num_hidden_layers, base_model(model).get_decoder()  # not an image encoder
    ffns = [module for module in decoder.modules() if find_layout(module) is not None]
    if len(ffns) < layers:  # some FFNs have no known layout: read the layers' inputs
        ffns = next([*part] for part in decoder.modules() if isinstance(part, nn.ModuleList) and len(part) == layers)
    return ffns[:count]


def _check_requests(requests: Any, source: str) -> None:
    """Raise if `requests` is one text or one chat: its letters or messages would be read as requests."""
    if isinstance(requests, str) or (requests and isinstance(requests[0], Mapping)):
        raise InputError(f"{source}: must be a list of texts, or of chats, each a list of messages")


def _opened(
    base: Any, tokenizer: Any, dtype: str = "auto", revision: str | None = None
) -> tuple[Any, Any, str, int | None]:
    """
    Return the base, its tokenizer, its path and the number of layers to read. From a folder or the hub, only these
    layers are loaded. For a loaded model, the path is "" and the number None.
    """
    if isinstance(base, nn.Module):
        if tokenizer is None:
            raise InputError("tokenizer=None: a model comes without one; give its tokenizer")
        return base, tokenizer, "", None
    folder: WholeModel
    if revision is None:
        folder = open_folder(base, "base", DenseFolder, NativeFolder)
    else:
        folder = open_model(base, "base", revision)
    model = first_layers(folder, dtype)
    return model, tokenizer or folder.tokenizer, absolute(folder.path), text_config(model).num_hidden_layers


def absolute(path: str) -> str:
    """Return a folder's absolute path, or a name on the hub unchanged."""
    return os.path.abspath(path) if os.path.isdir(path) else path


def first_layers(folder: WholeModel, dtype: str = "auto") -> Any:
    """Load the first quarter of a model's layers, in evaluation mode."""
    config = copy.deepcopy(folder.config)
    text = config.get_text_config()
    text.num_hidden_layers = _quarter(text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # weights of the other layers are unused on purpose
    try:
        with reading(folder):
            model, info = AutoModelForCausalLM.from_pretrained(
                folder.path, config=config, dtype=dtype, revision=folder.revision, use_safetensors=True,
                output_loading_info=True, ignore_mismatched_sizes=True, **NO_CODE,
            )  # fmt: skip
    finally:
        transformers.logging.set_verbosity(verbosity)
    check_loaded(model, {**info, "unexpected_keys": ()}, folder)
    return model.to(PartialState().device).eval()
