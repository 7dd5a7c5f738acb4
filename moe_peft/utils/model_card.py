"""
Write the README.md of a folder with an adapter or a model, from the template `model_card.md` in this folder.

A card leads with the folder's content, its base model and how to load it. Its first line is a comment that names this
package as the author, and holds facts for later cards. Without this line, a card's text belongs to its user.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import safe_open

from .io import atomic_write, read_json
from .messages import REPOSITORY, InputError, one_line

logger = logging.getLogger("moe_peft")

TAGS: tuple[str, ...] = ("mixture-of-experts", "moe_peft")
_TEMPLATE = Path(__file__).with_suffix(".md")
# PEFT's task type → its class, and the hub's name for the task.
_TASKS = {
    "CAUSAL_LM": ("AutoPeftModelForCausalLM", "text-generation"),
    "SEQ_2_SEQ_LM": ("AutoPeftModelForSeq2SeqLM", "text-generation"),
    "SEQ_CLS": ("AutoPeftModelForSequenceClassification", "text-classification"),
    "TOKEN_CLS": ("AutoPeftModelForTokenClassification", "token-classification"),
    "QUESTION_ANS": ("AutoPeftModelForQuestionAnswering", "question-answering"),
    "FEATURE_EXTRACTION": ("AutoPeftModelForFeatureExtraction", "feature-extraction"),
}
_HEAD = re.compile(r"\.(?:score|classifier)\.(?:.+\.)?weight$")
_MARK = re.compile(r"\s*<!-- moe_peft writes this card; delete this line to keep your edits: (\{.*\}) -->")
# Beginnings of a card written only by PEFT: its template, not filled in, or its addition to an empty card.
_OF_PEFT = ("# Model Card for Model ID", "### Framework versions")


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

    The first line of a card says that it will be overwritten. Without this line, a README.md keeps its text, unless it
    is empty or PEFT's template; only its metadata are updated. Facts about training stay if none are given. An
    unreadable card, in this folder or of the base model, is logged and left unchanged.

    `owner/name` is a name on the hub unless it is also a local path. All other names may be local paths, so a card
    shows only their last part.

    Args:
        base: the base model or models, names or folders; None: the base model in the adapter's config. Their license is
            passed on if their cards, in local folders or in the hub's cache, agree on one.
        made: how it was made, in a few words.
        training: facts about its training, one line each.
        datasets: names of the training data. Names that can be on the hub go into the metadata.
        tags: further tags.
        title: the heading; None: the kind of model and its base model.
        repo: its name on the hub, for the code that loads it.
        overwrite: also replace a text written by a user.

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

    # Keep facts from the previous card unless they are overridden.
    mark = None if old is None else _MARK.match(old.text)
    former = _facts(mark)
    facts = {
        "base": [f"Base model: {', '.join(map(_link, bases))}"] if bases else [],
        "made": [f"Made by {made}"] if made else [],
        "data": [f"Training data: {', '.join(_link(n, 'datasets/') for n in datasets)}"] if datasets else [],
        "training": list(training),
        "datasets": list(filter(_is_repo, datasets)),
    }
    facts = {subject: lines or former.get(subject, []) for subject, lines in facts.items()}

    # Metadata: from the previous card, this package and the base model. The hub refuses local paths there.
    data = ModelCardData() if old is None else old.data
    kinds = TAGS if is_moe_lora or (not adapter and num_experts) else TAGS[1:]
    data.library_name = "peft" if adapter else "transformers"
    data.pipeline_tag = data.pipeline_tag or task
    every = {*(data.tags or []), *tags, *kinds, *(["peft"] if adapter else [])}
    data.tags = sorted(t for t in every if not t.startswith("base_model:") or _is_repo(t.rpartition(":")[2]))
    names = list(filter(_is_repo, bases or _listed(data.base_model)))
    data.base_model = names[0] if len(names) == 1 else names or None
    others = [name for name in _listed(data.datasets) if name not in former.get("datasets", [])]
    data.datasets = list(filter(_is_repo, dict.fromkeys([*others, *facts["datasets"]]))) or None
    passed_on = former.get("license") == [data.license]
    if data.license is None or (passed_on and facts["base"] != former.get("base")):
        _pass_license_on(data, bases, folder)
        passed_on = data.license is not None
    facts["license"] = [data.license] if passed_on else []

    # Text.
    if old is not None and old.text.strip() and not (mark or overwrite or old.text.lstrip().startswith(_OF_PEFT)):
        card = old
    else:
        saved_tokenizer = task == "text-generation" and (folder / "tokenizer_config.json").is_file()
        place = folder if saved_tokenizer or not bases else Path(bases[0])
        card = ModelCard.from_template(
            data,
            template_path=str(_TEMPLATE),
            repository=REPOSITORY,
            facts=facts,
            mark=json.dumps(facts).replace(">", r"\u003e"),  # ">" would end the comment
            title=title or _title(adapter, num_experts, bases),
            adapter=adapter,
            is_moe_lora=is_moe_lora,
            model=model,
            num_experts=num_experts,
            auto=auto,
            name_or_path=repo or "path/to/this/folder",
            saved_tokenizer=saved_tokenizer,
            generates=saved_tokenizer or (task == "text-generation" and adapter and bases),
            chat=(place / "chat_template.jinja").is_file(),
            num_labels=_num_labels(folder) if task in ("text-classification", "token-classification") else None,
        )
    with atomic_write(path) as partial:
        card.save(partial)
    return path


def card_facts(folder: str | os.PathLike) -> dict[str, list[str]]:
    """
    Return the facts `made`, `data`, `training`, … of a folder's card. Empty if this package did not write the card.
    """
    card = load_card(Path(folder) / "README.md")
    return _facts(None if card is None else _MARK.match(card.text))


def is_untrained_mixture(folder: str | os.PathLike) -> bool:
    """Return whether a folder's card says that `moe-peft mix` made it, without training since then."""
    facts = card_facts(folder)
    return not facts.get("training") and any("`moe-peft mix`" in line for line in facts.get("made", []))


def last_part(path: str) -> str:
    """Return the last part of a path of any operating system: an adapter may have been trained on another system."""
    return PureWindowsPath(path).name or path


def plain(text: str) -> str:
    """Replace characters in a name that Markdown and HTML could read as markup."""
    return re.sub(r"[^\w .,:+/()-]", "_", text)


def load_card(path: Path) -> ModelCard | None:
    """Load a card. None if it is missing or unreadable: a card must never keep a model from being saved."""
    try:
        return ModelCard.load(path) if path.is_file() else None
    except Exception as error:
        logger.warning("%s: ignored, as it is not a readable model card: %s", path, one_line(error))
        return None


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _facts(mark: re.Match | None) -> dict[str, list[str]]:
    """Return the facts in a card's first line. Empty if a user has edited the line."""
    try:
        return json.loads(mark[1]) if mark else {}
    except ValueError:
        return {}


def _title(adapter: dict[str, Any], num_experts: int | None, bases: list[str]) -> str:
    """Return a title independent of the folder. The same adapter thus has the same card in any folder."""
    names = plain(last_part(bases[0])) if len(bases) == 1 else f"{len(bases)} models"
    if adapter:
        kind = "MoE-LoRA" if adapter.get("peft_type") == "MOE_LORA" else adapter.get("peft_type")
        return f"{kind} adapter" + (f" for {names}" if bases else "")
    return ("Mixture-of-Experts" if num_experts else "Language model") + (f" of {names}" if bases else "")


def _num_labels(folder: Path) -> int | None:
    """Return the number of rows of the classification head saved with an adapter."""
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys() if _HEAD.search(name)]  # noqa: SIM118
    return min((rows for rows, *columns in shapes if columns), default=None)


def _is_repo(name: str) -> bool:
    """Return whether this is a name on the hub, by the rule of `write_model_card`."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name and not os.path.exists(name) and not name.endswith((".json", ".jsonl", ".csv", ".parquet"))


def _link(name: str, kind: str = "") -> str:
    """Return a link to the hub, or the last part of a local path."""
    return f"[{name}](https://huggingface.co/{kind}{name})" if _is_repo(name) else f"`{plain(last_part(name))}`"


def _pass_license_on(data: ModelCardData, bases: list[str], folder: Path) -> None:
    """
    Set the license named in the base models' cards, if all agree. A link to a license file is kept if the file is here.
    """
    licenses, fields = [], ("license", "license_name", "license_link")
    data.license = data.license_name = data.license_link = None
    for base in bases:
        cached = try_to_load_from_cache(base, "README.md") if _is_repo(base) else None
        card = load_card(Path(cached) if isinstance(cached, str) else Path(base) / "README.md")
        licenses.append([None if card is None else card.data.get(field) for field in fields])
    if licenses and all(license == licenses[0] for license in licenses):
        data.license, data.license_name, link = licenses[0]
        data.license_link = link if link and ("://" in link or (folder / link).is_file()) else None
