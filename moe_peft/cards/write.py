"""
Writes the README.md of a folder with an adapter or a model.

A card leads with what the folder holds, its base and how to load it. What a user has written is left alone: only cards
that nobody has edited since they were generated (here or by PEFT) are written anew, all others get metadata.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ..checks import FLAG, PATH, TEXT, TEXTS, Rule, check
from .contents import TAGS, Contents
from .hub import base_metadata, is_repo, licences, link, load_card
from .snippets import PLACE

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


_BASES = Rule(
    lambda v: all(isinstance(name, (str, os.PathLike)) for name in (v if isinstance(v, (list, tuple)) else [v])),
    "give a name or a folder, or a list of them",
)


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
    lists = {"training": training, "datasets": datasets, "tags": tags}
    lists = {name: v if isinstance(v, str) or not isinstance(v, Iterable) else list(v) for name, v in lists.items()}
    check(
        "write_model_card",
        folder=(folder, PATH),
        base=(base, _BASES.or_none()),
        made=(made, TEXT.or_none()),
        **{name: (value, TEXTS) for name, value in lists.items()},
        title=(title, TEXT.or_none()),
        repo=(repo, TEXT.or_none()),
        overwrite=(overwrite, FLAG),
    )
    training, datasets, tags = (list(value) for value in lists.values())
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
