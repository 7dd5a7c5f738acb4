"""
`RequestGate` chooses one of several adapters for a request, or none: then the base answers.

The gate reads a request like a classifier in front of a server: without the system prompt, the template's words or
tools, which requests for all adapters share. It reads all texts in one form (`one_form`) and takes the mean of a text's
tokens in the first quarter of the base's layers. Kernel ridge regression compares this mean with the means of a few
texts for each adapter, and with lists of texts for no adapter. Nothing is trained.

A request is for an adapter if the whole request is, or else one of its sentences or lines: the others may be greetings
or a pasted document. Requests about another text ("Translate into French: ...") are for the base, whatever the other
text is. If a chat's last message refers to the message before it ("and for Berlin?"), the earlier message decides.

Legend: R requests or texts, L layers read, S positions, d hidden size, n adapters (and the base).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from ..adapter.ffn_layout import find_layout
from ..models.introspection import base_model, base_passes, counted_tokens, text_config
from ..native.folders import DenseFolder, NativeFolder, WholeModel, open_folder, open_model
from ..utils.io import reading
from ..utils.loading import NO_CODE, check_loaded, empty_model, read_tokenizer
from ..utils.messages import InputError, choice_error
from .kernel_ridge import KernelRidge
from .request_texts import (
    Request,
    check_requests,
    neutral_requests,
    numbers_of,
    one_form,
    parts_of,
    quoting,
    read_list,
    request_text,
    user_turns,
)

FILE = "request_gate.safetensors"
BASE = "base"  # name for the choice of no adapter
ABOUT, FILLER, AS_BEFORE = "about_a_text", "filler", "as_before"  # lists of texts for no adapter
QUOTED = 24  # number of an adapter's texts, an eighth of all, that the gate reads as quoted in a request about a text
CLEARLY_ABOUT = 0.45  # score of a part that is about another text
_MARK = "(the request)"
_ATTENTIONS = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers with keys and values alone
_PROBE = "Which of these words is the longest? (a probe)"


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

    @cached_property
    def prefix(self) -> list[int]:
        """The tokens of the chat template before a request, such as a default system prompt."""
        ids = [self.batch([text])["input_ids"][0].tolist() for text in ("a", "7")]
        return [a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(*ids, strict=False))]

    def batch(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `attention_mask` and `counted`, 1 for tokens of the requests themselves, [R, S] each."""
        read = []
        for text in (self.cut(text) for text in texts):
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

    def cut(self, text: str) -> str:
        """Cut a text that is surely longer than `max_length` before it is tokenized: other requests wait."""
        return text.strip()[: 32 * self.max_length].strip()

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


@dataclass(frozen=True)
class Texts:
    """
    What a gate keeps of the texts of one class.

    Args:
        vectors: the texts' vectors, float32 [R, L, d].
        digests: numbers of the texts, int64 [R]. They show which texts two adapters share.
        quoted: vectors of some of an adapter's texts inside requests about them, [Q, L, d].
        parts: vectors of the parts of some of an adapter's texts, [P, L, d].
    """

    vectors: torch.Tensor
    digests: torch.Tensor
    quoted: torch.Tensor
    parts: torch.Tensor

    def __len__(self) -> int:
        return len(self.vectors)


class _Prefix(NamedTuple):
    """The first tokens of all requests [1, P], and their keys and values."""

    ids_1P: torch.Tensor
    cache: DynamicCache


def _continuing(batch: dict[str, torch.Tensor], prefix: _Prefix | None) -> Mapping[str, Any]:
    """Return a batch that continues the prefix, if all its texts begin with the prefix and have more tokens."""
    P = 0 if prefix is None else prefix.ids_1P.shape[1]
    begins = batch["input_ids"].shape[1] > P and bool(batch["attention_mask"][:, : P + 1].all())
    if prefix is None or not begins or not (batch["input_ids"][:, :P] == prefix.ids_1P).all():
        return batch
    cache = copy.deepcopy(prefix.cache)  # the pass adds to it
    cache.batch_repeat_interleave(len(batch["input_ids"]))
    return {
        "input_ids": batch["input_ids"][:, P:], "counted": batch["counted"][:, P:], "past_key_values": cache,
        "attention_mask": batch["attention_mask"],
    }  # fmt: skip


class RequestChoice(NamedTuple):
    """
    The choice for a request.

    Args:
        name: the adapter, or None for the base.
        scores: adapter → score of the text that decided, and of `"base"`; each about 0 to 1.
        text: the text that decided: the request, a part of it, or an earlier message.
    """

    name: str | None
    scores: Mapping[str, float]
    text: str = ""


@dataclass
class RequestGate:
    """
    Chooses one of several adapters for a request, or none: then the base answers. It stands in front of a server with
    the adapters under their names (`moe-peft pick`), or steers a mixture of the adapters.

    Args:
        model: the base, or its first layers, with or without adapters. Adapters are disabled.
        reader: tokenizes requests.
        texts: adapter → its texts' vectors. `"base"` has the vectors of general requests.
        lists: list of this package (`"about_a_text"`, `"filler"`, `"as_before"`) → vectors of its texts, [R, L, d].
        base: folder or name of the base, loaded by `from_pretrained`.
        revision: revision of the base on the hub.
        penalty: λ of the kernel ridge regression.
        layers: number of first layers to read; None: a quarter of the model's layers.
        lose: share of the adapters' own requests that may go to the base. The margin follows from it.
        fixed_margin: lead over the base that an adapter needs; None: from `lose`.
        gone: texts of removed adapters. The base answers their requests.

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
    texts: dict[str, Texts]
    lists: dict[str, torch.Tensor] = field(default_factory=dict)
    base: str = ""
    revision: str | None = None
    penalty: float = 0.03
    layers: int | None = None
    lose: float = 0.03
    fixed_margin: float | None = None
    gone: dict[str, Texts] = field(default_factory=dict)
    # Device and dtype of the model → the prefix read there. Gates with other adapters share it.
    _prefixes: dict[Any, _Prefix | None] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def modules(self) -> list[nn.Module]:
        """FFNs of the first layers. The gate reads their inputs."""
        layers = _quarter(text_config(self.model).num_hidden_layers) if self.layers is None else self.layers
        return first_ffns(self.model, layers)

    @cached_property
    def classifier(self) -> KernelRidge:
        """Regression from vectors to `_classes`, fitted at the first scores."""
        kept = [*self.texts.values(), *self.gone.values()]
        lists = dict(self.lists)
        if ABOUT in lists:
            lists[ABOUT] = torch.cat([lists[ABOUT], *(of.quoted for of in self.texts.values())])
        # No text of a list is also a text of an adapter.
        number_R = torch.arange(-sum(map(len, lists.values())), 0).split([len(x_RLD) for x_RLD in lists.values()])
        digests = [*(of.digests for of in kept), *number_R]
        return KernelRidge([*(of.vectors for of in kept), *lists.values()], self.penalty, digests)

    @cached_property
    def _classes(self) -> list[str]:
        """Names of the classifier's classes, in order."""
        return [*self.texts, *self.gone, *self.lists]

    @cached_property
    def names(self) -> list[str]:
        """Names of the adapters, in order."""
        return [name for name in self.texts if name != BASE]

    @cached_property
    def columns(self) -> list[str]:
        """Names of the columns of `scores`: the adapters, and `"base"` if the base may be chosen."""
        return [*self.names, BASE] if self._for_base else self.names

    @cached_property
    def _for_base(self) -> list[int]:
        """Indices of the classes whose requests the base answers."""
        adapters = {*self.names}
        return [i for i, name in enumerate(self._classes) if name not in adapters]

    @cached_property
    def margin(self) -> float:
        """
        Lead over the base that an adapter needs. It loses the share `lose` of the adapters' own texts, or less: where
        own and general texts are far apart, it lies in the middle between them. It is at least 0, so a score below the
        base's never suffices.
        """
        if self.fixed_margin is not None or not self._for_base:
            return self.fixed_margin or 0.0
        scores_RN, own_R = self.left_out()
        lead_R, is_own_R = scores_RN[:, :-1].max(1).values - scores_RN[:, -1], own_R < len(self.names)
        own = float(lead_R[is_own_R].quantile(self.lose))
        general = max(0.0, float(lead_R[~is_own_R].quantile(0.99))) if BASE in self.texts else own
        return max(0.0, own if own <= general else (own + general) / 2)

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
        lose: float = 0.03,
    ) -> RequestGate:
        """
        Build a gate from example requests for each adapter.

        Args:
            base: the adapters' base: a folder, a name on the hub, or a model (then give `tokenizer`).
            requests: adapter → example requests for it: dozens, better hundreds.
            neutral: general requests for the base to answer; None: the built-in list (`neutral_requests`). Add requests
                of your users' own to it. With `[]`, each request with words goes to some adapter.
            chat: whether to read requests inside the chat template; None: True if some of `requests` are chats.
            max_length: number of tokens to read of a request.
            lose: share of the adapters' own requests that may go to the base.

        Raises:
            ValueError: `requests` names no adapter, or names one `"base"`; or an adapter has no requests with words.
        """
        if BASE in requests:
            raise InputError(f"requests: {BASE!r} is the name of the choice of no adapter; give that adapter another")
        if not requests:
            raise InputError("requests: are of no adapter; give some texts for each")
        texts: dict[str, Sequence[Request]] = {**requests, BASE: neutral_requests() if neutral is None else neutral}
        for name, of_name in texts.items():
            check_requests(of_name, f"requests of {name!r}")
        if chat is None:
            chat = any(not isinstance(request, str) for of_name in requests.values() for request in of_name)
        model, tokenizer, path, layers = _opened(base, tokenizer)
        gate = cls(model, RequestReader(tokenizer, chat, max_length), {}, base=path, layers=layers, lose=lose)
        if len(texts[BASE]):
            gate = dataclasses.replace(
                gate, lists={name: gate.read(read_list(name)) for name in (ABOUT, FILLER, AS_BEFORE)}
            )
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
        check_requests(requests, f"requests of {name!r}")
        texts = [text for request in requests if (text := request_text(request).strip())]
        if not texts:
            raise InputError(f"requests: {name!r} has none with words; give some texts that it is for")
        # In an order of their own: the gate is the same whatever order the requests come in.
        number_R = numbers_of(texts)
        texts = [texts[i] for i in number_R.argsort(stable=True).tolist()]
        quoted = quoting(texts, min(QUOTED, -(-len(texts) // 8))) if self.lists and name != BASE else []
        parts = _some_parts(texts) if self.lists and name != BASE else []
        lengths = [len(texts), len(quoted), len(parts)]
        vectors = self.read([*texts, *quoted, *parts]).split(lengths)
        kept = {**self.texts, name: Texts(vectors[0], number_R.sort().values, *vectors[1:])}
        base = {BASE: kept.pop(BASE)} if BASE in kept else {}
        gone = {other: value for other, value in self.gone.items() if other != name}
        return dataclasses.replace(self, texts={**kept, **base}, gone=gone)

    def without_adapter(self, name: str, to_base: bool = False) -> RequestGate:
        """
        Return a gate without an adapter.

        Args:
            to_base: whether the base answers the adapter's requests. The gate then keeps the vectors of the adapter's
                texts. False: the gate is the same as if the adapter had never been there, and the adapter's requests
                may go to another adapter.
        """
        if name not in (self.names if to_base else {**self.texts, **self.gone}):
            raise InputError(choice_error("adapter", name, self.names))
        texts, gone = ({n: v for n, v in of.items() if n != name} for of in (self.texts, self.gone))
        return dataclasses.replace(self, texts=texts, gone={**gone, name: self.texts[name]} if to_base else gone)

    def in_order(self, names: Sequence[str]) -> RequestGate:
        """Return the gate with its adapters in another order. `names` lists all of them."""
        assert {*names, BASE} >= self.texts.keys()
        texts = {name: self.texts[name] for name in (*names, BASE) if name in self.texts}
        return dataclasses.replace(self, texts=texts)

    def renamed(self, names: Mapping[str, str]) -> RequestGate:
        """Return the gate with other names for its adapters: old → new."""
        return dataclasses.replace(self, texts={names.get(name, name): value for name, value in self.texts.items()})

    # --- choosing ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, requests: Sequence[Request], batch_size: int = 16) -> torch.Tensor:
        """
        Compute the vectors of requests, float32 [R, L, d]: the mean of each FFN's input over a request's tokens. Values
        have the precision of float16, in which `save_pretrained` keeps them.
        """
        check_requests(requests, "requests")
        if not len(requests):
            return torch.zeros(0, len(self.modules), text_config(self.model).hidden_size)
        texts = [one_form(self.reader.cut(request_text(request))) for request in requests]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # similar lengths need little padding
        prefix, starts = self._prefix(), range(0, len(order), batch_size)
        batches = (self.reader.batch([texts[i] for i in order[at : at + batch_size]]) for at in starts)
        vectors_RLD = self._vectors(_continuing(batch, prefix) for batch in batches)
        return vectors_RLD[torch.tensor(order).argsort()].clamp(-6e4, 6e4).half().float()

    def _vectors(self, batches: Iterable[Mapping[str, Any]]) -> torch.Tensor:
        """Return the vectors of the texts of all batches, [R, L, d]."""
        found: list[list[torch.Tensor]] = [[] for _ in self.modules]

        def add(i: int, batch: Any, mask_RS: torch.Tensor, x_RSD: torch.Tensor, output: Any) -> None:
            counted_RS = counted_tokens(batch, mask_RS)
            share_RS = counted_RS.float() / counted_RS.sum(1, keepdim=True)
            found[i].append(torch.einsum("rs,rsd->rd", share_RS, x_RSD.view(*mask_RS.shape, -1).float()).cpu())

        base_passes(self.model, batches, self.modules, add, only=True)
        return torch.stack([torch.cat(of_layer) for of_layer in found], 1)

    def _prefix(self) -> _Prefix | None:
        """
        Return the tokens that the chat template puts before each request, read once and again if the model moves. None
        without such tokens, or for a base that does not continue them from keys and values alone.
        """
        first = next(self.model.parameters())
        place = (first.device, first.dtype)
        if place not in self._prefixes:
            self._prefixes[place] = self._read_prefix()
        return self._prefixes[place]

    @torch.no_grad()
    def _read_prefix(self) -> _Prefix | None:
        ids, kinds = self.reader.prefix, {*(getattr(text_config(self.model), "layer_types", None) or ())}
        stateful = base_model(self.model)._is_stateful or kinds - _ATTENTIONS
        if not ids or stateful or not self.reader.tokenizer.is_fast:  # without offsets, all tokens of a text count
            return None
        prefix = _Prefix(torch.tensor([ids]), DynamicCache(config=text_config(self.model)))
        start = {"input_ids": prefix.ids_1P, "past_key_values": prefix.cache}
        base_passes(self.model, [start], self.modules, lambda *args: None, only=True)
        batch = self.reader.batch([_PROBE])
        continued = _continuing(batch, prefix)
        if continued is batch:
            return None
        whole_1LD, continued_1LD = (self._vectors([each]) for each in (batch, continued))
        same = torch.cosine_similarity(whole_1LD, continued_1LD, dim=-1).min() > 0.999
        return prefix if same else None

    def pick(self, requests: Sequence[Request]) -> list[str | None]:
        """Return the adapter for each request, or None for the base. A request without words goes to the base."""
        return [choice.name for choice in self.choose(requests)]

    def scores(self, requests: Sequence[Request]) -> torch.Tensor:
        """Return the scores of the text that decided for each request, float64 [R, n]; see `columns` and `choose`."""
        found = [[*choice.scores.values()] for choice in self.choose(requests)]
        return torch.tensor(found, dtype=torch.float64).reshape(len(found), len(self.columns))

    def choose(self, requests: Sequence[Request]) -> list[RequestChoice]:
        """
        Return the adapter for each request, with the scores and the text that decided.

        The last user message decides, or the message before it if the last one refers to it.
        """
        check_requests(requests, "requests")
        turns = [[text for turn in user_turns(request) if (text := turn.strip())] or [""] for request in requests]
        choices: dict[int, RequestChoice] = {}
        earlier, open_ = 0, [*range(len(turns))]
        while open_:
            found = self._choose([turns[i][earlier] for i in open_])
            refers = [as_before and earlier + 1 < len(turns[i]) for i, (_, as_before) in zip(open_, found, strict=True)]
            choices |= {i: choice for i, (choice, _) in zip(open_, found, strict=True)}
            open_, earlier = [i for i, again in zip(open_, refers, strict=True) if again], earlier + 1
        return [choices[i] for i in range(len(turns))]

    def _choose(self, texts: Sequence[str]) -> list[tuple[RequestChoice, bool]]:
        """Return the choice for each message by itself, and whether the message refers to an earlier one."""
        parts = [parts_of(text) for text in texts]
        parts = [of_text if len(of_text) > 1 and self.lists else [] for of_text in parts]
        flat = [*texts, *(part for of_text in parts for part in of_text)]
        raw_RN = self.classifier(self.read(flat))
        scores_RN, lead_R = self._of_columns(raw_RN)
        lead, nearest = lead_R.tolist(), [self._classes[i] for i in raw_RN.argmax(1).tolist()]
        is_about = [False] * len(flat)
        if self.lists:
            is_about = (raw_RN[:, self._classes.index(ABOUT)] > CLEARLY_ABOUT).tolist()
        at, found = len(texts), []
        for i, (text, of_text) in enumerate(zip(texts, parts, strict=True)):
            span = range(at, at := at + len(of_text))
            # The whole message decides, or else the part that leads most. A part about another text is for the base.
            decides = i if lead[i] > self.margin else max([i, *span], key=lambda j: lead[j])
            is_for_adapter = bool(text) and lead[decides] > self.margin
            scores = dict(zip(self.columns, scores_RN[decides].tolist(), strict=True))
            best = max(self.names, key=scores.__getitem__)
            about = [j for j in span if is_about[j]]
            if about and not (is_for_adapter and best in self._about_texts):
                decides, is_for_adapter = about[0], False
                scores = dict(zip(self.columns, scores_RN[decides].tolist(), strict=True))
            choice = RequestChoice(best if is_for_adapter else None, scores, flat[decides])
            found.append((choice, not is_for_adapter and nearest[i] == AS_BEFORE))
        return found

    @cached_property
    def _about_texts(self) -> set[str]:
        """Adapters whose own requests are about another text, such as "Give this as JSON: …"."""
        found = set()
        for name in self.names if self.lists else ():
            parts = self.texts[name].parts
            if len(parts):
                is_about_P = self.classifier(parts)[:, self._classes.index(ABOUT)] > CLEARLY_ABOUT
                if is_about_P.double().mean() > self.lose:
                    found.add(name)
        return found

    def _of_columns(self, raw_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores of the `columns` from scores of all classes, and the best adapter's lead over the base."""
        adapters = [i for i, name in enumerate(self.texts) if name != BASE]
        scores_RN, best_R = raw_RN[:, adapters], raw_RN[:, adapters].max(1).values
        if not self._for_base:
            return scores_RN, torch.full_like(best_R, torch.inf)
        base_R = raw_RN[:, self._for_base].max(1).values
        return torch.cat([scores_RN, base_R[:, None]], 1), best_R - base_R

    def left_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return scores of the adapters' texts and of general requests, each by a gate without this text, float64 [R, n],
        and the index of the column that each text is for, [R].
        """
        ridge = self.classifier
        scores_RN, _ = self._of_columns(ridge.left_out_RN)
        # The columns are in the order of the classes, of which `texts` are the first.
        used_R = ridge.class_R < len(self.texts)
        return scores_RN[used_R], ridge.class_R[used_R]

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
            "penalty": self.penalty, "lose": self.lose, "margin": self.fixed_margin,
        }  # fmt: skip
        saved = _Saved(about, self.texts, self.gone, self.lists, self.read([_PROBE]))
        saved.write(Path(folder, FILE))

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
        saved = _Saved.read(path)
        about = saved.about
        if tokenizer is None and Path(folder, "tokenizer_config.json").is_file():
            tokenizer = read_tokenizer(folder, path.parent)
        revision = None if base else about["revision"]
        model, tokenizer, named, layers = _opened(base or about["base"], tokenizer, dtype, revision)
        reader = RequestReader(tokenizer, about["chat"], about["max_length"])
        named = named or about["base"]
        gate = cls(
            model, reader, saved.texts, saved.lists, named, revision, about["penalty"], layers, about["lose"],
            about["margin"], saved.gone,
        )  # fmt: skip
        shape, every = (len(gate.modules), text_config(model).hidden_size), saved.vectors()
        fits = all(tuple(x_RLD.shape[1:]) == shape and bool(x_RLD.isfinite().all()) for x_RLD in every)
        # A quantized base reads nearly the same; other weights or another tokenizer do not.
        if not fits or torch.cosine_similarity(gate.read([_PROBE]), saved.probe, dim=-1).mean() < 0.9:
            raise InputError(
                f"{path}: was made with the base {about['base']!r}; {named!r} is another one, with {shape[1]} features "
                f"in {shape[0]} layers that decide"
            )
        return gate


class _Saved(NamedTuple):
    """What the file of a gate has."""

    about: dict[str, Any]
    texts: dict[str, Texts]
    gone: dict[str, Texts]
    lists: dict[str, torch.Tensor]
    probe: torch.Tensor  # vector of `_PROBE`, [1, L, d]: which base it was

    def vectors(self) -> list[torch.Tensor]:
        """Return all vectors, each [R, L, d]."""
        of_texts = [x for of in (*self.texts.values(), *self.gone.values()) for x in (of.vectors, of.quoted, of.parts)]
        return [*of_texts, *self.lists.values(), self.probe]

    def without(self, names: Sequence[str]) -> _Saved:
        """Return the same without some adapters."""
        texts, gone = ({name: of for name, of in part.items() if name not in names} for part in (self.texts, self.gone))
        return self._replace(texts=texts, gone=gone)

    def write(self, path: Path) -> None:
        tensors = {"probe": self.probe, **{f"lists.{name}": x_RLD for name, x_RLD in self.lists.items()}}
        for i, of in enumerate([*self.texts.values(), *self.gone.values()]):
            tensors |= {f"{i}.{key}": value for key, value in vars(of).items()}
        tensors = {
            name: value.half().contiguous() if value.is_floating_point() else value.contiguous()
            for name, value in tensors.items()
        }
        about = {**self.about, "names": [*self.texts], "gone": [*self.gone], "lists": [*self.lists]}
        save_file(tensors, path, metadata={"request_gate": json.dumps(about)})

    @classmethod
    def read(cls, path: Path) -> _Saved:
        if not path.is_file():
            raise InputError(f"{str(path.parent)!r}: has no {FILE}; make it with moe-peft mix or RequestGate.fit")
        with reading(f"{path}: cannot be read", "make it again"), safe_open(path, framework="pt") as file:
            read = json.loads((file.metadata() or {})["request_gate"])
            names, gone, lists = ([str(name) for name in read[key]] for key in ("names", "gone", "lists"))

            def floats(name: str) -> torch.Tensor:
                return file.get_tensor(name).float()

            of_names = [
                Texts(
                    floats(f"{i}.vectors"),
                    file.get_tensor(f"{i}.digests").long(),
                    floats(f"{i}.quoted"),
                    floats(f"{i}.parts"),
                )
                for i in range(len(names) + len(gone))
            ]
            about = {
                "base": str(read["base"]), "revision": read["revision"], "chat": bool(read["chat"]),
                "max_length": int(read["max_length"]), "penalty": float(read["penalty"]), "lose": float(read["lose"]),
                "margin": None if read["margin"] is None else float(read["margin"]),
            }  # fmt: skip
            saved = cls(
                about, dict(zip(names, of_names, strict=False)), dict(zip(gone, of_names[len(names) :], strict=True)),
                {name: floats(f"lists.{name}") for name in lists}, floats("probe"),
            )  # fmt: skip
        whole = all(x_RLD.dim() == 3 for x_RLD in saved.vectors()) and {*lists} in (set(), {ABOUT, FILLER, AS_BEFORE})
        whole = whole and all(len(of) and of.digests.shape == (len(of),) for of in of_names)
        unique = len({*names, *gone}) == len(of_names) and {*names} - {BASE}
        numbers = math.isfinite(about["penalty"]) and about["penalty"] > 0 and about["max_length"] > 0
        numbers = numbers and 0 <= about["lose"] < 1 and math.isfinite(about["margin"] or 0)
        if not (whole and unique and numbers and isinstance(read["chat"], bool)):
            raise InputError(f"{path}: has no texts, or settings that cannot be; make it again")
        return saved


def _some_parts(texts: Sequence[str]) -> list[str]:
    """Return the parts of at most `QUOTED` texts, evenly spaced, of those that have several."""
    several = [parts for text in texts if len(parts := parts_of(text)) > 1]
    return [part for parts in several[:: -(-len(several) // QUOTED) or 1] for part in parts]


def copy_without(source: Path, folder: Path, names: Sequence[str]) -> None:
    """Copy the gate for requests from a mixture's folder, if it has one, without the adapters `names`."""
    if (source / FILE).is_file():
        _Saved.read(source / FILE).without(names).write(folder / FILE)


def _quarter(layers: int) -> int:
    """Return a quarter of `layers`, rounded up. So many first layers tell requests apart as well as all layers."""
    return -(-layers // 4)


def first_ffns(model: Any, count: int) -> list[nn.Module]:
    """
    Return the modules whose inputs the gate reads in a model's first layers: each layer's FFN, or the layers themselves
    if one of them does not have a single FFN of a known layout. The choice depends on these layers alone.

    Raises:
        ValueError: the model has no list of layers.
    """
    layers = _layers(model)[:count]
    if not layers:
        raise InputError(f"{type(model).__name__}: has no list of layers that a gate can read; use another base")
    ffns = [[module for module in layer.modules() if find_layout(module) is not None] for layer in layers]
    return [of_layer[0] for of_layer in ffns] if all(len(of_layer) == 1 for of_layer in ffns) else layers


def _layers(model: Any) -> list[nn.Module]:
    """Return the layers of a model's decoder, not of an image encoder; [] if it has no list of them."""
    count, parts = text_config(model).num_hidden_layers, base_model(model).get_decoder().modules()
    return next(([*part] for part in parts if isinstance(part, nn.ModuleList) and len(part) == count), [])


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
    model, layers = first_layers(folder, dtype), _quarter(folder.config.get_text_config().num_hidden_layers)
    return model, tokenizer or folder.tokenizer, absolute(folder.path), layers


def absolute(path: str) -> str:
    """Return a folder's absolute path, or a name on the hub unchanged."""
    return os.path.abspath(path) if os.path.isdir(path) else path


def first_layers(folder: WholeModel, dtype: str = "auto") -> Any:
    """
    Load the first quarter of a model's layers, in evaluation mode. If these layers would compute something else without
    the others, load all layers.
    """
    config = _first_quarter(folder)
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


def _first_quarter(folder: WholeModel) -> Any:
    """Return the config of the first quarter of a model's layers, or the model's own if the layers would differ."""
    config = copy.deepcopy(folder.config)
    text = config.get_text_config()
    try:
        layers, text.num_hidden_layers = text.num_hidden_layers, _quarter(text.num_hidden_layers)
        for name, value in vars(text).items():
            if isinstance(value, (list, tuple)) and len(value) == layers:  # a value for each layer
                setattr(text, name, value[: text.num_hidden_layers])
        same = _same_layers(empty_model(folder.config, folder), empty_model(config, folder))
    except (InputError, NotImplementedError):  # there is no such model
        same = False
    return config if same else folder.config


def _same_layers(model: Any, first: Any) -> bool:
    """Return whether the layers of `first` are those of `model`, and so are its parameters outside of the layers."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if any(shapes.get(name) != parameter.shape for name, parameter in first.named_parameters()):
        return False  # such as embeddings for each layer
    layers = _layers(first)
    return bool(layers) and all(map(operator.eq, map(_facts, layers), map(_facts, _layers(model))))


def _facts(layer: nn.Module) -> list[tuple[str, type, dict[str, Any]]]:
    """Return the name, the type and the plain attributes of each module of a layer, such as its scale or window."""
    plain = (bool, int, float, str, list, tuple)
    return [
        (name, type(module), {key: repr(value) for key, value in vars(module).items() if isinstance(value, plain)})
        for name, module in layer.named_modules()
    ]
