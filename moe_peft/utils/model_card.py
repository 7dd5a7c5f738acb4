"""
Writes the README.md of a folder with an adapter or a model, from the template `model_card.md` beside this file.

A card leads with what the folder holds, its base and how to load it. What a user has written is left alone: only cards
that nobody has edited since they were generated (here or by PEFT) are generated again, all others get metadata.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, constants, try_to_load_from_cache
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import safe_open

from .io import read_json
from .messages import InputError, one_line

logger = logging.getLogger("moe_peft")

TAGS: tuple[str, ...] = ("mixture-of-experts", "moe_peft")
_TEMPLATE = Path(__file__).with_suffix(".md")
_FOLDER = "path/to/this/folder"
_TOKENIZER = "tokenizer_config.json"
_FIGURES = ("routing.png", "load.png", "routing/load.png")
# Of each task type of PEFT: its class, and the hub's name of the task.
_TASKS = {
    "CAUSAL_LM": ("AutoPeftModelForCausalLM", "text-generation"),
    "SEQ_2_SEQ_LM": ("AutoPeftModelForSeq2SeqLM", "text-generation"),
    "SEQ_CLS": ("AutoPeftModelForSequenceClassification", "text-classification"),
    "TOKEN_CLS": ("AutoPeftModelForTokenClassification", "token-classification"),
    "QUESTION_ANS": ("AutoPeftModelForQuestionAnswering", "question-answering"),
    "FEATURE_EXTRACTION": ("AutoPeftModelForFeatureExtraction", "feature-extraction"),
}
_HEAD = re.compile(r"\.(?:score|classifier)\.(?:.+\.)?weight$")
# Ends what is generated: its digest, and the facts that the next card keeps.
_MARK = re.compile(r"<!-- moe_peft: (\{.*\}) -->")
# What PEFT adds to any card when it saves an adapter, and the versions, which are written as PEFT does.
_QUANTIZATION = re.compile(r"^The following `bitsandbytes` quantization config .*\n(?:- .*\n?)*", re.MULTILINE)
_PROCEDURE, _VERSIONS = "## Training procedure", "### Framework versions"
_ADDED = re.compile(rf"^(?:{_PROCEDURE}|{_VERSIONS}|- (?:PEFT|moe-peft-hf|Transformers) .*)$", re.MULTILINE)


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
    stay if none are given. A card that cannot be read, this folder's or the base's, is logged and left alone.

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
        repo: its name on the hub, for the code that loads it.
        overwrite: replace a text that somebody has written, too.

    Returns:
        the path of the card.

    Raises:
        ValueError: the folder holds neither an adapter nor a model.

    Example:

    ```python
    >>> from peft import get_peft_model
    >>> from transformers import AutoModelForCausalLM
    >>> from moe_peft import MoELoraConfig, write_model_card
    >>> base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> model = get_peft_model(
    ...     base, MoELoraConfig(num_experts=4, r=4, task_type="CAUSAL_LM")
    ... )
    >>> model.save_pretrained("adapter")
    >>> card = write_model_card(
    ...     "adapter", training=["300 steps of 16 rows"], datasets=["org/data"]
    ... )
    ```
    """
    folder, datasets = Path(folder), list(datasets)
    path = folder / "README.md"
    adapter, model = (_read(folder / name) for name in ("adapter_config.json", "config.json"))
    if not adapter and not model:
        raise InputError(f"{str(folder)!r}: no adapter_config.json and no config.json; save it first")
    origin: Any = adapter.get("base_model_name_or_path") if base is None else base
    bases = [os.fspath(name) for name in (origin if isinstance(origin, (list, tuple)) else [origin]) if name]
    is_moe_lora = adapter.get("peft_type") == "MOE_LORA"
    num_experts = model.get("num_experts", model.get("num_local_experts"))
    auto, task = _TASKS.get(adapter.get("task_type") or "", (None, None))
    if not adapter:
        auto, task = "AutoModelForCausalLM", "text-generation"
    old = load_card(path)
    if old is None and path.is_file() and not overwrite:
        return path

    # Metadata.
    data = ModelCardData() if old is None else old.data
    kinds = TAGS if is_moe_lora or (not adapter and num_experts) else TAGS[1:]
    data.library_name = "peft" if adapter else "transformers"
    data.pipeline_tag = data.pipeline_tag or task
    data.tags = [*(data.tags or []), *tags, *kinds, *(["peft"] if adapter else [])]
    licences = _update_metadata(data, bases, datasets, folder)
    if old is not None and not overwrite and not _is_generated(old.text):
        old.save(path)
        return path

    # Text. What an old card of ours says stays where nothing new is said.
    base_links = ", ".join(_link(name, folder) for name in bases)
    data_links = ", ".join(_link(name, folder, "dataset") for name in datasets)
    facts = {
        "base": [f"Base model: {base_links}"] if bases else [],
        "licence": [f"Licence of the base: {plain(licence)}" for licence in licences],
        "made": [f"Made by {made}"] if made else [],
        "data": [f"Training data: {data_links}"] if datasets else [],
        "training": list(training),
    }
    kept = {} if old is None else _marked(old.text).get("facts", {})
    facts = {subject: lines or kept.get(subject, []) for subject, lines in facts.items()}
    name_or_path = repo or _FOLDER
    saved_tokenizer = task == "text-generation" and (folder / _TOKENIZER).is_file()
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        saved_tokenizer=saved_tokenizer,
        chat=_has_chat_template(folder if saved_tokenizer or not bases else Path(bases[0])),
        title=title or _title(adapter, num_experts, bases),
        adapter=adapter,
        is_moe_lora=is_moe_lora,
        experts=f"experts of the kind `{adapter.get('expert_type', 'lora')}`" if is_moe_lora else None,
        model=model,
        num_experts=num_experts,
        facts=[line for subject, lines in facts.items() if subject != "training" for line in lines],
        auto=auto,
        name_or_path=name_or_path,
        tokenizer=_tokenizer(folder, adapter, bases, name_or_path) if task == "text-generation" else None,
        num_labels=_num_labels(folder) if task in ("text-classification", "token-classification") else None,
        training=facts["training"],
        figure=next((name for name in _FIGURES if (folder / name).is_file()), None),
    )
    quantization = None if old is None else _QUANTIZATION.search(old.text)
    package_version = import_module("moe_peft").__version__  # at run time: the package imports this module
    versions = [f"PEFT {version('peft')}"] if adapter else []
    versions += [f"moe-peft-hf {package_version}", f"Transformers {version('transformers')}"]
    after = [f"{_PROCEDURE}\n\n{quantization[0].strip()}"] if quantization else []
    _save(card, card.text, path, facts, [*after, "\n".join([f"{_VERSIONS}\n", *(f"- {name}" for name in versions)])])
    if adapter:
        _list_adapters(folder.parent)
    return path


def plain(text: str) -> str:
    """A name without what Markdown and HTML would read as markup."""
    return re.sub(r"[^\w .,:+/()-]", "_", text)


# --- what a folder holds ---------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _title(adapter: dict[str, Any], num_experts: int | None, bases: list[str]) -> str:
    """It does not depend on the folder, so that the same adapter has the same card wherever it is saved."""
    names = plain(Path(bases[0]).name) if len(bases) == 1 else f"{len(bases)} models"
    if len(bases) == 1 and "model_type" in (config := _read(Path(bases[0]) / "config.json")):  # whose name may be "hf"
        names = f"{names} ({plain(str(config['model_type']))})"
    if adapter:
        kind = "MoE-LoRA" if adapter.get("peft_type") == "MOE_LORA" else adapter.get("peft_type")
        return f"{kind} adapter" + (f" for {names}" if bases else "")
    return ("Mixture-of-Experts" if num_experts else "Language model") + (f" of {names}" if bases else "")


def _tokenizer(folder: Path, adapter: dict[str, Any], bases: list[str], name_or_path: str) -> str | None:
    """The code of what to load a tokenizer from; None if there is none."""
    if (folder / _TOKENIZER).is_file():
        return f'"{name_or_path}"'
    if adapter and bases and (not os.path.isdir(bases[0]) or Path(bases[0], _TOKENIZER).is_file()):
        return 'model.peft_config["default"].base_model_name_or_path'
    return None


def _has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in a local folder has one."""
    return (folder / "chat_template.jinja").is_file() or bool(_read(folder / _TOKENIZER).get("chat_template"))


def _num_labels(folder: Path) -> int | None:
    """Rows of the classifier's head that is saved with an adapter."""
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys() if _HEAD.search(name)]  # noqa: SIM118
    return min((rows for rows, *columns in shapes if columns), default=None)


# --- names of the hub, metadata --------------------------------------------------------------------------------------


def _is_repo(name: str, folder: Path, kind: str = "model") -> bool:
    """Whether it is a name on the hub and cannot be a local path, by the rule of `write_model_card`."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    if os.path.exists(name) or name.endswith((".json", ".jsonl", ".csv", ".parquet")):
        return False
    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind)).is_dir()
    owner, slash, _ = name.partition("/")
    parents = (Path.cwd(), folder.resolve(), *folder.resolve().parents)
    return cached or (bool(slash) and not any((parent / owner).exists() for parent in parents))


def _link(name: str, folder: Path, kind: str = "model") -> str:
    """A link to the hub, or the last part of a local path."""
    if not _is_repo(name, folder, kind):
        return f"`{plain(Path(name).name)}`"
    return f"[{name}](https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name})"


def load_card(path: Path) -> ModelCard | None:
    """None if there is no card, or none that can be read: no card is worth a model that is not saved."""
    try:
        return ModelCard.load(path) if path.is_file() else None
    except Exception as error:
        logger.warning("%s: ignored, it is no model card that can be read: %s", path, one_line(error))
        return None


def _metadata_of(base: str, folder: Path) -> dict[str, Any]:
    """The metadata of a base's card, in its folder or in the hub's cache."""
    path = Path(base) / "README.md"
    if not path.is_file() and _is_repo(base, folder):
        cached = try_to_load_from_cache(base, path.name)
        path = Path(cached) if isinstance(cached, str) else path
    return {} if (card := load_card(path)) is None else card.data.to_dict()


def _licences(data: dict[str, Any]) -> list[str]:
    """The licences that a card's metadata name."""
    name = (data.get("license_name") if data.get("license") == "other" else None) or data.get("license") or []
    return [str(licence) for licence in (name if isinstance(name, list) else [name])]


def _update_metadata(data: ModelCardData, bases: list[str], datasets: list[str], folder: Path) -> list[str]:
    """Add names and the bases' licence; returns the licences. Local paths are left out: the hub refuses them."""
    tags = {str(tag) for tag in data.tags or []}
    data.tags = sorted(t for t in tags if not t.startswith("base_model:") or _is_repo(t.rpartition(":")[2], folder))
    former = [data.base_model] if isinstance(data.base_model, str) else data.base_model or []
    names = list(dict.fromkeys(name for name in (bases or former) if _is_repo(name, folder)))
    data.base_model = names[0] if len(names) == 1 else names or None
    former = [data.datasets] if isinstance(data.datasets, str) else data.datasets or []
    data.datasets = list(dict.fromkeys(n for n in [*former, *datasets] if _is_repo(n, folder, "dataset"))) or None
    cards = [card for card in (_metadata_of(name, folder) for name in bases) if _licences(card)]
    if data.license is None and cards and all(_licences(card) == _licences(cards[0]) for card in cards):
        for field in ("license", "license_name", "license_link"):
            value = cards[0].get(field)
            if value and (field != "license_link" or "://" in str(value) or (folder / str(value)).is_file()):
                setattr(data, field, value)
    return list(dict.fromkeys(licence for card in cards for licence in _licences(card)))


# --- generated and edited cards --------------------------------------------------------------------------------------


def _list_adapters(root: Path) -> None:
    """Say where adapters with names of their own are: PEFT writes its empty template into the folder above them."""
    path = root / "README.md"
    if not path.is_file() or any((root / name).is_file() for name in ("adapter_config.json", "config.json")):
        return
    if (card := load_card(path)) is None or not _is_generated(card.text):
        return
    names = sorted(config.parent.name for config in root.glob("*/adapter_config.json"))
    card.data.tags = ["peft", *TAGS]
    _update_metadata(card.data, [], [], root)
    listed = "\n".join(f"- [{name}]({name}/README.md)" for name in names)
    how = f'PeftModel.from_pretrained(base, "{_FOLDER}", subfolder="{names[0]}")'
    text = f"# Adapters for PEFT\n\nEach folder holds one; its card says how to load it alone.\n\n{listed}\n\n"
    _save(card, f"{text}After `import moe_peft`, `{how}` puts one on its base.", path)


def _save(
    card: ModelCard, text: str, path: Path, facts: dict[str, list[str]] | None = None, after: Sequence[str] = ()
) -> None:
    """Save a generated text, its mark, and what PEFT updates."""
    mark = json.dumps({"digest": _digest(text), "facts": facts or {}})
    card.text = "\n\n".join([text.strip(), f"<!-- moe_peft: {mark} -->", *after]) + "\n"
    card.save(path)


def _is_generated(text: str) -> bool:
    """Whether nobody has edited the text since it was generated here, or by PEFT from its template."""
    mark = _MARK.search(text)
    if mark is None:
        return _digest(text) == _digest_of_template()
    return _digest(text[: mark.start()]) == _marked(text).get("digest") and _digest(text[mark.end() :]) == _digest("")


def _marked(text: str) -> dict[str, Any]:
    """What the mark of a generated card holds; of other cards nothing."""
    mark = _MARK.search(text)
    try:
        return json.loads(mark[1]) if mark else {}
    except ValueError:
        return {}


@cache
def _digest_of_template() -> str:
    """Of the card that PEFT begins with."""
    return _digest(ModelCard.from_template(ModelCardData()).text)


def _digest(text: str) -> str:
    """Of a text without what PEFT adds, and without empty lines."""
    text = _ADDED.sub("", _QUANTIZATION.sub("", text))
    return hashlib.sha256("\n".join(line for line in text.splitlines() if line.strip()).encode()).hexdigest()[:12]
