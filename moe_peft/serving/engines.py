"""
Servers behind `moe-peft pick`: which models a server has, and how a request names an adapter or the base.

| server | a request for an adapter has | detected by |
|---|---|---|
| vLLM, gateways such as LiteLLM, anything else | `model: NAME` | default |
| Ollama | `model: NAME`, with `:latest` where the name has no tag | `owned_by: library` |
| SGLang | `model: BASE:NAME` | `owned_by: sglang` |
| llama-server (llama.cpp) | `lora: [{id, scale}, …]` | `owned_by: llamacpp` |
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx2

from ..combine.request_gate import BASE
from ..utils.messages import InputError, choice_error, one_line

MODELS, LORAS = "/v1/models", "/lora-adapters"
Listed = Mapping[str, Mapping[str, Any]]  # a server's name of a model or adapter → its entry in the list


def models_listed(answer: httpx2.Response) -> dict[str, dict[str, Any]]:
    """
    Return the models of an answer of `/v1/models`.

    Raises:
        ValueError: it is no list of models.
    """
    try:
        return {str(model["id"]): dict(model) for model in answer.json()["data"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{MODELS} is not a list of models, as OpenAI's API has it") from error


def loras_listed(answer: httpx2.Response) -> dict[str, dict[str, Any]]:
    """
    Return the adapters of an answer of llama-server's `/lora-adapters`, each by the name of its file without suffix, by
    its path, and by its number.

    Raises:
        ValueError: it is no list of adapters.
    """
    try:
        loras: list[dict[str, Any]] = [{"id": int(lora["id"]), "scale": float(lora["scale"]), "path": str(lora["path"])}
                 for lora in answer.json()]  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{LORAS} is not a list of adapters, as llama-server has it") from error
    stems = [PurePath(lora["path"]).stem for lora in loras]
    named = {stem: lora for stem, lora in zip(stems, loras, strict=True) if stems.count(stem) == 1}
    return {**named, **{lora["path"]: lora for lora in loras}, **{str(lora["id"]): lora for lora in loras}}


# --- kinds of servers ------------------------------------------------------------------------------------------------


def _by_name(base: str, name: str | None, listed: Listed) -> dict[str, Any]:
    return {"model": name or base}


def _after_base(base: str, name: str | None, listed: Listed) -> dict[str, Any]:
    return {"model": base if name is None else f"{base}:{name}"}


def _by_scale(base: str, name: str | None, listed: Listed) -> dict[str, Any]:
    """Give all scales: without any, llama-server applies the adapters as it was started."""
    chosen = None if name is None else listed[name]["id"]
    scales = {lora["id"]: (lora["scale"] or 1.0) if lora["id"] == chosen else 0.0 for lora in listed.values()}
    return {"model": base, "lora": [{"id": number, "scale": scale} for number, scale in sorted(scales.items())]}


@dataclass(frozen=True)
class ServerKind:
    """
    How a kind of server is told its adapter.

    Args:
        fields: fields of a request's body, from the base's name, the adapter's (None: the base) and the list of them.
        owner: `owned_by` of the models in its list; None: not detected.
        path, read: where it lists its adapters, and how the list is read.
        tag: what a name without it may end with.
        defaults: fields of a request's body that a client may set otherwise.
    """

    fields: Callable[[str, str | None, Listed], dict[str, Any]] = _by_name
    owner: str | None = None
    path: str = MODELS
    read: Callable[[httpx2.Response], dict[str, dict[str, Any]]] = models_listed
    tag: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def find(self, name: str, base: str | None, listed: Listed) -> str | None:
        """Return the name in a server's list for a name of ours, or None."""
        if self.fields is _after_base and base is not None:
            name = name.removeprefix(f"{base}:")
        for each in (name, f"{name}{self.tag}"):
            if each in listed:
                return each
        # A gateway may list a pattern for all names that it takes.
        return name if any("*" in each and fnmatchcase(name, each) for each in listed) else None

    def adapters(self, listed: Listed) -> list[str]:
        """Return a name of each adapter in a server's list, as far as the list says which are adapters."""
        if self.path == MODELS:
            return [name for name, model in listed.items() if model.get("parent")]
        first: dict[int, str] = {}
        for name, lora in listed.items():
            first.setdefault(lora["id"], name)
        return [*first.values()]


SERVER_KINDS: dict[str, ServerKind] = {
    "vllm": ServerKind(owner="vllm"),
    "sglang": ServerKind(_after_base, "sglang"),
    # Its cache of prompts does not record their adapters: a prompt comes back as another adapter has read it.
    "llama-server": ServerKind(_by_scale, "llamacpp", LORAS, loras_listed, defaults={"cache_prompt": False}),
    "ollama": ServerKind(owner="library", tag=":latest"),
    "names": ServerKind(),
}


# --- a server --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """
    A server, and how to ask it for adapters.

    Args:
        url: its URL, without `/v1`, user and password.
        base: its name of the base.
        names: our names of adapters → its names.
        fields: our names of adapters, and `"base"` → fields of a request's body.
        kind: kind of server.
        own: headers of the proxy's own requests.
        login: `Authorization` for requests of clients that send none; None: none.
    """

    url: str
    base: str
    names: Mapping[str, str]
    fields: Mapping[str, Mapping[str, Any]]
    kind: ServerKind = SERVER_KINDS["names"]
    own: Mapping[str, str] = field(default_factory=dict)
    login: str | None = None

    def body(self, asked: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return the body of a request for an adapter or `"base"`, from the one that a client sent."""
        return {**self.kind.defaults, **asked, **self.fields[name]}

    def missing(self, answer: httpx2.Response) -> list[str]:
        """
        Return our names of adapters that the server no longer lists.

        Raises:
            ValueError: the answer is no list.
        """
        listed = self.kind.read(answer)
        return [name for name, theirs in self.names.items() if self.kind.find(theirs, self.base, listed) is None]


def find_engine(
    url: str,
    adapters: Sequence[str] | None,
    names: Mapping[str, str],
    base: str | None,
    served: str,
    key: str | None = None,
    kind: str | None = None,
) -> Engine:
    """
    Ask a server for its models, and find the adapters and the base among them.

    Args:
        url: the server's URL, with or without `/v1`; it may have a user and password.
        adapters: our names of the adapters; None: those of `names`, or else all of the server's.
        names: the server's names of adapters, where they differ from ours.
        base: the server's name of the base; None: its first model that is no adapter.
        served: the name of our model.
        key: API key for the proxy's own requests; clients send theirs.
        kind: a name in `SERVER_KINDS`; None: detected.

    Raises:
        ValueError: the server does not answer, lacks a model, or has a model with our name.
    """
    url, login = _without_login(url.rstrip("/").removesuffix("/v1"))
    own = f"Bearer {key}" if key is not None else login
    headers = {} if own is None else {"authorization": own}
    source = f"server={url!r}"
    models = _list(url, MODELS, models_listed, headers)
    owners = {str(model.get("owned_by")) for model in models.values()}
    of_server = SERVER_KINDS[kind] if kind else _detected(owners)
    listed = models if of_server.path == MODELS else _list(url, of_server.path, of_server.read, headers)
    if adapters is None:
        adapters = [*names] or of_server.adapters(listed)
        if not adapters:
            raise InputError(f"{source}: does not say which of its models are adapters; name them (--names)")
    for name in names.keys() - set(adapters):
        raise InputError(choice_error("names", name, adapters))
    wanted = {name: names.get(name, name) for name in adapters}
    if base is not None:
        found_base = of_server.find(base, None, models)
    else:
        taken = {of_server.find(name, None, listed) for name in wanted.values()} if listed is models else set()
        others = [name for name, model in models.items() if not model.get("parent") and name not in taken]
        if len({models[name].get("root", name) for name in others}) > 1:  # one model may have several names
            raise InputError(f"{source}: has {', '.join(others)}; name the base (--base-name)")
        found_base = next(iter(others), None)
        if found_base is None and models:
            raise InputError(
                f"{source}: has {', '.join(models)}: each has the name of an adapter, so none is the base; name the "
                "base (--base-name), and the adapter of the same name (--names)"
            )
    if found_base is None:
        raise InputError(choice_error("base_name", base, models))
    found = {name: of_server.find(theirs, found_base, listed) for name, theirs in wanted.items()}
    if missing := [wanted[name] for name, theirs in found.items() if theirs is None]:
        raise InputError(
            f"{source}: has no {', '.join(missing)}, only {', '.join(listed)}; start it with them (vllm serve BASE "
            "--enable-lora --lora-modules NAME=FOLDER), or say how it calls them (--names)"
        )
    theirs = {name: each for name, each in found.items() if each is not None}
    if same := [name for name, each in theirs.items() if listed is models and each == found_base]:
        raise InputError(
            f"{source}: its base is called {found_base}, as the adapter {same[0]!r}; give another (--names)"
        )
    if served in models:
        raise InputError(f"served_model_name={served!r}: {source} has a model of that name; give another")
    fields = {name: of_server.fields(found_base, each, listed) for name, each in [*theirs.items(), (BASE, None)]}
    return Engine(url, found_base, theirs, fields, of_server, headers, login)


def _detected(owners: set[str]) -> ServerKind:
    found = [kind for kind in SERVER_KINDS.values() if {kind.owner} == owners]
    return found[0] if found else SERVER_KINDS["names"]


def _without_login(url: str) -> tuple[str, str | None]:
    """Return a URL without user and password, and the header `Authorization` that they make."""
    wrong = InputError(
        "server: is not a URL such as http://127.0.0.1:8000 or http://USER:PASSWORD@host (in these, write / as %2F and "
        "@ as %40)"
    )
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise wrong from error
    login, _, host = parts.netloc.rpartition("@")
    bare = urlunsplit(parts._replace(netloc=host)) if login else url
    if "@" in bare:  # a part of a password, which no message shows
        raise wrong
    pair = ":".join(map(unquote, (login if ":" in login else f"{login}:").split(":", 1)))
    return bare, f"Basic {base64.b64encode(pair.encode(errors='replace')).decode()}" if login else None


def _list(
    url: str, path: str, read: Callable[[httpx2.Response], dict[str, dict[str, Any]]], headers: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    try:
        answer = httpx2.get(f"{url}{path}", headers=dict(headers), timeout=30, trust_env=False)
        return read(answer.raise_for_status())
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise InputError(
            f"server={url!r}: {one_line(error)}; start it first, e.g. vllm serve BASE --enable-lora"
        ) from error
    except ValueError as error:
        raise InputError(f"server={url!r}: {error}") from error


# --- adapters that do nothing ----------------------------------------------------------------------------------------

_PROMPTS = ("Once upon a time", "def f(x):", "Question: What is 3 + 4?\nAnswer:")


async def warnings_of_adapters(client: httpx2.AsyncClient, engine: Engine) -> list[str]:
    """
    Let the base and each adapter continue a few texts, 16 tokens each, greedily. Return a warning for each adapter that
    does not answer, or that answers like the base: the server may have loaded it without effect.
    """

    async def continued(name: str) -> list[str]:
        texts = []
        for prompt in _PROMPTS:
            body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, **engine.body({}, name)}
            answer = await client.post(f"{engine.url}/v1/completions", json=body, headers=dict(engine.own), timeout=60)
            texts.append(str(answer.raise_for_status().json()["choices"][0]["text"]))
        return texts

    texts: dict[str, list[str]] = {}
    warnings = []
    for name in (BASE, *engine.names):
        try:
            texts[name] = await continued(name)
        except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
            warnings.append(f"{name}: does not continue a text: {one_line(error) or type(error).__name__}")
            if name == BASE:
                return warnings
            continue
        if name != BASE and texts[name] == texts[BASE] and any(texts[BASE]):
            warnings.append(f"{name}: continues {len(_PROMPTS)} texts exactly as the base; does the server apply it?")
    return warnings
