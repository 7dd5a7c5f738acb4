"""
What a folder holds, from its configs.

Code that loads what a folder holds, for its card.

What is a name on the hub, and what the cards of others say.

Writes the README.md of a folder with an adapter or a model.

A card leads with what the folder holds, its base and how to load it. What a user has written is left alone: only cards
that nobody has edited since they were generated (here or by PEFT) are written anew, all others get metadata.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, constants, try_to_load_from_cache
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import safe_open

from .io import read_object

# --- contents --------------------------------------------------------------------------------------------------------

TAGS: tuple[str, ...] = ("mixture-of-experts", "moe_peft")


@dataclass(frozen=True)
class Contents:
    """
    An adapter or a model.

    Args:
        folder: where it is.
        adapter: its `adapter_config.json`; None: it is a model.
        model: its `config.json`; of an adapter {}.
        bases: what it was made from, names or folders.
    """

    folder: Path
    adapter: dict[str, Any] | None
    model: dict[str, Any]
    bases: list[str]

    @classmethod
    def read(cls, folder: Path, base: str | os.PathLike | Sequence[str | os.PathLike] | None) -> Contents:
        """
        Args:
            base: what it was made from; None: what the adapter's config says.

        Raises:
            ValueError: the folder holds neither an adapter nor a model.
        """
        adapter, model = (_read(folder / name) for name in ("adapter_config.json", "config.json"))
        if not adapter and not model:
            raise ValueError(
                f"write_model_card: {str(folder)!r}: no adapter_config.json and no config.json; save it first"
            )
        given = (adapter or {}).get("base_model_name_or_path") if base is None else base
        bases = [os.fspath(b) for b in ([given] if isinstance(given, (str, os.PathLike)) else given or []) if b]
        return cls(folder, adapter or None, model or {}, bases)

    @property
    def is_ours(self) -> bool:
        """Whether it is an adapter of the type `MOE_LORA`."""
        return self.adapter is not None and self.adapter.get("peft_type") == "MOE_LORA"

    @property
    def num_experts(self) -> int | None:
        """A model's experts per layer."""
        return self.model.get("num_experts", self.model.get("num_local_experts"))

    @property
    def tags(self) -> list[str]:
        if self.adapter is not None:
            return ["peft", *(TAGS if self.is_ours else TAGS[1:])]
        return [*(TAGS if self.num_experts else TAGS[1:])]

    @property
    def task(self) -> str | None:
        """The hub's name of its task."""
        if self.adapter is None:
            return "text-generation"
        return TASKS.get(self.adapter.get("task_type") or "", (None, None))[1]

    @property
    def title(self) -> str:
        """It does not depend on the folder, so that the same adapter has the same card wherever it is saved."""
        bases = self.bases
        of = f" of {Path(bases[0]).name}" if len(bases) == 1 else f" of {len(bases)} models" if bases else ""
        if self.adapter is not None:
            kind = "MoE-LoRA adapter" if self.is_ours else f"{self.adapter.get('peft_type')} adapter"
            return kind + of.replace(" of ", " for ", 1)
        return ("Mixture-of-Experts" if self.num_experts else "Language model") + of

    @property
    def sentence(self) -> str:
        """What it is."""
        if self.adapter is None:
            return self._of_model()
        if not self.is_ours:
            return f"This is an adapter for PEFT, of the type `{self.adapter.get('peft_type')}`."
        return _of_experts(self.adapter, f"experts of the kind `{self.adapter.get('expert_type', 'lora')}`")

    @property
    def snippet(self) -> str:
        """Code that loads it."""
        if self.adapter is None:
            return model_snippet(self.model, self.folder)
        return adapter_snippet(self.adapter, self.folder, self.bases)

    @property
    def loading(self) -> str:
        """What loading needs."""
        if self.is_ours:
            return (
                "Install the package (`pip install moe-peft-hf`) and import `moe_peft` before you load. Without the "
                "import, PEFT and `pipeline` stop with `KeyError: 'MOE_LORA'`."
            )
        if "moe_peft" in self.snippet:
            return "Its routers need the package (`pip install moe-peft-hf`)."
        return "It loads without this package:"

    def _of_model(self) -> str:
        n, k, kind = self.num_experts, self.model.get("num_experts_per_tok"), self.model.get("model_type")
        if not (n and k):
            return f"This is a language model of the type `{kind}`."
        return (
            f"This is a Mixture-of-Experts (MoE) language model of the type `{kind}` with {n} experts per layer, of "
            f"which each token uses {k}."
        )


def _of_experts(config: dict[str, Any], experts: str) -> str:
    n, k = config["num_experts"], config["top_k"]
    router = f"and a router (`{config['router_type']}`) that picks {k} of them for each token"
    return (
        "This is a Mixture-of-Experts (MoE) adapter for PEFT, of the type `MOE_LORA`: every adapted module of the base "
        f"gets {n} {experts}" + (f", {router}." if n > 1 else ".")
    )


def _read(path: Path) -> dict[str, Any] | None:
    return read_object(path) if path.is_file() else None


# --- snippets --------------------------------------------------------------------------------------------------------

PLACE = "path/to/this/folder"
# Of each task type: PEFT's class, and the hub's name of the task.
TASKS = {
    "CAUSAL_LM": ("AutoPeftModelForCausalLM", "text-generation"),
    "SEQ_2_SEQ_LM": ("AutoPeftModelForSeq2SeqLM", "text-generation"),
    "SEQ_CLS": ("AutoPeftModelForSequenceClassification", "text-classification"),
    "TOKEN_CLS": ("AutoPeftModelForTokenClassification", "token-classification"),
    "QUESTION_ANS": ("AutoPeftModelForQuestionAnswering", "question-answering"),
    "FEATURE_EXTRACTION": ("AutoPeftModelForFeatureExtraction", "feature-extraction"),
}
_HEAD = re.compile(r"\.(?:score|classifier)\.(?:.+\.)?weight$")


def adapter_snippet(config: dict[str, Any], folder: Path, bases: Sequence[str]) -> str:
    """
    Code that loads an adapter.

    Args:
        config: its `adapter_config.json`.
        bases: the models that it was made from.
    """
    ours = config.get("peft_type") == "MOE_LORA"
    lines = ["import moe_peft  # adds the adapter type MOE_LORA to PEFT"] if ours else []
    auto, task = TASKS.get(config.get("task_type") or "", (None, None))
    if auto is None:
        return "\n".join(
            [*lines, "from peft import PeftConfig, PeftModel", "from transformers import AutoModel", "",
             f'config = PeftConfig.from_pretrained("{PLACE}")',
             "base = AutoModel.from_pretrained(config.base_model_name_or_path)  # or the class that was trained",
             f'model = PeftModel.from_pretrained(base, "{PLACE}")']
        )  # fmt: skip
    own = (folder / "tokenizer_config.json").is_file()
    of_base = bool(bases) and (not os.path.isdir(bases[0]) or (Path(bases[0]) / "tokenizer_config.json").is_file())
    source = f'"{PLACE}"' if own else 'model.peft_config["default"].base_model_name_or_path'
    labels = _num_labels(folder) if task in ("text-classification", "token-classification") else None
    options = f", num_labels={labels}" if labels else ""
    return _snippet([*lines, f"from peft import {auto}"], auto, source if own or of_base else None, options)


def model_snippet(config: dict[str, Any], folder: Path) -> str:
    """Code that loads a model whose `config.json` is `config`."""
    auto = "AutoModelForCausalLM"
    source = f'"{PLACE}"' if (folder / "tokenizer_config.json").is_file() else None
    lines, after = [f"from transformers import {auto}"], []
    if "moe_peft_router" in config:
        lines.append("from moe_peft.native import load_routers")
        after = [f'load_routers(model, "{PLACE}")  # transformers does not know these routers']
    return _snippet(lines, auto, source, after=after)


def _num_labels(folder: Path) -> int | None:
    """Rows of the classifier's head that is saved with the adapter."""
    if not (path := folder / "adapter_model.safetensors").is_file():
        return None
    with safe_open(path, "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys() if _HEAD.search(name)]  # noqa: SIM118
    return min((rows for rows, *columns in shapes if columns), default=None)


def _snippet(lines: list[str], auto: str, tokenizer: str | None, options: str = "", after: Sequence[str] = ()) -> str:
    """Code that loads a model and, if it can generate and there is a tokenizer, generates."""
    generates = tokenizer is not None and auto.endswith(("CausalLM", "Seq2SeqLM"))
    if generates and lines[-1].startswith("from transformers"):
        lines = [*lines[:-1], f"{lines[-1]}, AutoTokenizer"]
    elif generates:
        lines = [*lines, "from transformers import AutoTokenizer"]
    lines = [*lines, "", f'model = {auto}.from_pretrained("{PLACE}"{options})', *after]
    if generates:
        lines += [
            f"tokenizer = AutoTokenizer.from_pretrained({tokenizer})",
            'inputs = tokenizer("Once upon a time", return_tensors="pt")',
            "output = model.generate(**inputs, max_new_tokens=50)",
            "print(tokenizer.decode(output[0], skip_special_tokens=True))",
        ]
    return "\n".join(lines)


# --- hub -------------------------------------------------------------------------------------------------------------

logger = logging.getLogger("moe_peft")

_FILES = (".json", ".jsonl", ".csv", ".parquet")  # of data


def is_repo(name: str, folder: Path, kind: str = "model") -> bool:
    """Whether it is a name on the hub and cannot be a local path, by the rule of `write_model_card`."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    if os.path.exists(name) or name.endswith(_FILES):
        return False
    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind)).is_dir()
    owner, slash, _ = name.partition("/")
    places = (Path.cwd(), folder.resolve(), *folder.resolve().parents)
    return cached or (bool(slash) and not any((place / owner).exists() for place in places))


def link(name: str, folder: Path, kind: str = "model") -> str:
    """A link to the hub, or the last part of a local path."""
    if not is_repo(name, folder, kind):
        return f"`{Path(name).name}`"
    return f"[{name}](https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name})"


def load_card(path: Path) -> ModelCard | None:
    """None: there is no card, or none that can be read. No card is worth a model that is not saved."""
    try:
        return ModelCard.load(path, ignore_metadata_errors=True) if path.is_file() else None
    except Exception as error:
        logger.warning("%s: ignored, it is no model card that can be read: %s", path, " ".join(str(error).split()))
        return None


def base_metadata(base: str, folder: Path) -> dict[str, Any]:
    """The metadata of a base's card, in its folder or in the hub's cache."""
    path = Path(base) / "README.md"
    if not path.is_file() and is_repo(base, folder):
        cached = try_to_load_from_cache(base, path.name)
        path = Path(cached) if isinstance(cached, str) else path
    return {} if (card := load_card(path)) is None else card.data.to_dict()


def licences(data: dict[str, Any]) -> list[str]:
    """The licences that a card's metadata name."""
    named = (data.get("license_name") if data.get("license") == "other" else None) or data.get("license") or []
    return [str(name) for name in (named if isinstance(named, list) else [named])]


# --- write -----------------------------------------------------------------------------------------------------------

_FIGURES = ("routing.png", "load.png", "routing/load.png")
_MARK = re.compile(r"<!-- moe_peft: (\w+) -->")
_PROCEDURE, _FRAMEWORK = "## Training procedure", "### Framework versions"
# What PEFT adds to any card when it saves an adapter.
_QUANTIZATION = re.compile(r"^The following `bitsandbytes` quantization config .*\n(?:- .*\n?)*", re.MULTILINE)
_FROM_PEFT = re.compile(rf"^(?:{_PROCEDURE}|{_FRAMEWORK}|- PEFT .*)$", re.MULTILINE)
_TEMPLATE = """\
---
{{ card_data }}
---

# {{ title }}

{{ what }}

{% for fact in facts -%}
- {{ fact }}
{% endfor %}
## How to load

{{ loading }}

```python
{{ snippet }}
```
{% if training %}
{{ heading }}

{{ training }}
{% endif %}{% if figure %}
## Routing

Where the tokens go: each expert's share of its layer's assignments.

![Share of assignments per expert and layer]({{ figure }})
{% endif %}
{{ framework }}

{% for name in versions -%}
- {{ name }}
{% endfor -%}
"""


def write_model_card(
    folder: str | os.PathLike,
    *,
    base: str | os.PathLike | Sequence[str | os.PathLike] | None = None,
    made: str | None = None,
    training: Iterable[str] = (),
    datasets: Iterable[str] = (),
    tags: Iterable[str] = (),
    title: str | None = None,
    repo: str | None = None,
    overwrite: bool = False,
) -> Path:
    """
    Write or update the model card of a folder that holds a PEFT adapter or a model.

    A README.md that somebody has written or edited keeps its text; only its metadata are updated. Facts about training
    stay if they are not given anew. A card that cannot be read, this folder's or the base's, is logged and left alone.

    A name is one of the hub if it is in the hub's cache, or is `owner/name` and neither the working directory nor this
    folder or one above it has a file or folder `owner`. Anything else may be a local path, which no card gives away.

    Args:
        base: the model or models that it was made from, names or folders; None: what the adapter's config says. Its
            licence is read from its card, if that is in a local folder or in the hub's cache.
        made: how it was made, in a few words.
        training: facts about its training, one line each.
        datasets: names of the training data. Those that can be names on the hub go into the metadata.
        tags: further tags.
        title: the heading; None: the kind of model and its base.
        repo: its name on the hub, for the snippet.
        overwrite: replace a text that somebody has written, too.

    Returns:
        the path of the card.

    Raises:
        ValueError: the folder holds neither an adapter nor a model, or an argument is not what it should be.
    """
    training, datasets, tags = (list(values) for values in (training, datasets, tags))
    held = Contents.read(Path(folder), base)
    path = held.folder / "README.md"
    if (old := load_card(path)) is None and path.is_file() and not overwrite:
        return path
    data = ModelCardData() if old is None else old.data
    data.tags = [*(data.tags or []), *tags]
    of_bases = _update_metadata(data, held.tags, held.task, held.bases, datasets, held.folder)
    if old is not None and not overwrite and not _is_generated(old.text):
        old.save(path)
        return path
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        title=title or held.title,
        what=held.sentence,
        facts=_with_kept(_facts(held, of_bases, made, datasets), old),
        loading=held.loading,
        snippet=held.snippet.replace(PLACE, repo or PLACE),
        heading=_PROCEDURE,
        training=_training(training, old),
        figure=next((name for name in _FIGURES if (held.folder / name).is_file()), None),
        framework=_FRAMEWORK,
        versions=_versions(held),
    )
    _save_marked(card, card.text, path)
    if held.adapter:
        _list_adapters(held.folder.parent)
    return path


def _facts(held: Contents, of_bases: list[str], made: str | None, datasets: list[str]) -> list[str]:
    """Its origin, one line each. `of_bases` are the bases' licences."""
    facts = [f"Base model: {', '.join(link(b, held.folder) for b in held.bases)}"] if held.bases else []
    facts += [f"Licence of the base: {licence}" for licence in of_bases] + ([f"Made by {made}"] if made else [])
    links = ", ".join(link(d, held.folder, "dataset") for d in datasets)
    return [*facts, f"Training data: {links}"] if datasets else facts


def _versions(held: Contents) -> list[str]:
    own = import_module(str(__package__).partition(".")[0]).__version__  # at run time: the package imports this module
    of_peft = [f"PEFT {version('peft')}"] if held.adapter else []
    return [*of_peft, f"moe-peft-hf {own}", f"Transformers {version('transformers')}"]


def _update_metadata(
    data: ModelCardData, own_tags: list[str], task: str | None, bases: list[str], datasets: list[str], folder: Path
) -> list[str]:
    """Add what is missing; returns the licences of the bases. Local paths are left out: the hub refuses them."""
    data.library_name = "peft" if "peft" in own_tags else "transformers"
    data.pipeline_tag = data.pipeline_tag or task
    tags = [str(tag) for tag in data.tags or []]
    tags = [t for t in tags if not t.startswith("base_model:") or is_repo(t.rpartition(":")[2], folder)]
    data.tags = sorted({*tags, *own_tags})
    named = [data.base_model] if isinstance(data.base_model, str) else data.base_model or []
    named = list(dict.fromkeys(name for name in (bases or named) if is_repo(name, folder)))
    data.base_model = None if not named else named[0] if len(named) == 1 else named
    public = [data.datasets] if isinstance(data.datasets, str) else data.datasets or []
    public = [name for name in [*public, *datasets] if is_repo(name, folder, "dataset")]
    data.datasets = list(dict.fromkeys(public)) or None
    cards = [card for card in (base_metadata(b, folder) for b in bases) if licences(card)]
    if data.license is None and cards and all(licences(card) == licences(cards[0]) for card in cards):
        for field in ("license", "license_name", "license_link"):
            value = cards[0].get(field)
            if value and (field != "license_link" or "://" in str(value) or (folder / str(value)).is_file()):
                setattr(data, field, value)
    return list(dict.fromkeys(name for card in cards for name in licences(card)))


def _training(given: list[str], old: ModelCard | None) -> str:
    """The section's text: the given facts or those of the old card, and the quantization that PEFT noted there."""
    text = "" if old is None else old.text
    found = re.search(rf"^{_PROCEDURE}\n+(.*?)(?=^##|^<!--|\Z)", text, re.MULTILINE | re.DOTALL)
    kept = _QUANTIZATION.sub("", found[1]).strip() if found and _MARK.search(text) else ""
    quantization = _QUANTIZATION.search(text)
    facts = "\n".join(f"- {fact}" for fact in given) or kept
    return "\n\n".join(part for part in (facts, quantization[0].strip() if quantization else "") if part)


def _with_kept(facts: list[str], old: ModelCard | None) -> list[str]:
    """The facts, and those of an old card of ours on what they say nothing about."""
    if old is None or not _MARK.search(old.text):
        return facts
    lead = old.text.partition("## How to load")[0]
    subjects = {fact.split()[0] for fact in facts}
    kept = [line[2:] for line in lead.splitlines() if line.startswith("- ") and line.split()[1] not in subjects]
    return [*facts, *kept]


def _list_adapters(root: Path) -> None:
    """Say where adapters with names of their own are: PEFT writes its empty template into the folder above them."""
    path = root / "README.md"
    if not path.is_file() or any((root / name).is_file() for name in ("adapter_config.json", "config.json")):
        return
    if (card := load_card(path)) is None or not _is_generated(card.text):
        return
    names = sorted(found.parent.name for found in root.glob("*/adapter_config.json"))
    _update_metadata(card.data, ["peft", *TAGS], None, [], [], root)
    listed = "\n".join(f"- [{name}]({name}/README.md)" for name in names)
    how = f'PeftModel.from_pretrained(base, "{PLACE}", subfolder="{names[0]}")'
    text = f"# Adapters for PEFT\n\nEach folder holds one; its card says how to load it alone.\n\n{listed}\n\n"
    _save_marked(card, f"{text}After `import moe_peft`, `{how}` puts one on its base.", path)


def _save_marked(card: ModelCard, text: str, path: Path) -> None:
    card.text = f"{text.rstrip()}\n\n<!-- moe_peft: {_digest(text)} -->\n"
    card.save(path)


def _is_generated(text: str) -> bool:
    """Whether nobody has edited the text since it was written here, or by PEFT from its template."""
    mark = _MARK.search(text)
    return _digest(text) == (mark[1] if mark else _digest(ModelCard.from_template(ModelCardData()).text))


def _digest(text: str) -> str:
    """Of what is not added by PEFT or the marker itself."""
    for pattern in (_QUANTIZATION, _FROM_PEFT, _MARK):
        text = pattern.sub("", text)
    return hashlib.sha256("\n".join(line for line in text.splitlines() if line.strip()).encode()).hexdigest()[:12]
