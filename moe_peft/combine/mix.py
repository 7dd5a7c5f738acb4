"""
Builds a mixture with LoRA adapters or dense models as experts (`moe-peft mix`), or merges LoRA adapters into one LoRA.

Gates are set without training. The mixture is measured on held-out rows, and compared with the base, each expert alone,
the experts' mean, and one expert picked for each request.

`mix` and the functions directly below it read from top to bottom: open the parts, read the rows, build the model, set
its gates, measure it, write it. They alone see `MixSettings`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset
from transformers.utils.logging import tqdm

from ..adapter.lora_conversion import lora_to_moe
from ..models.gate_init import GateInit, Sums, find_gate_init, init_gates
from ..models.introspection import NAMES_FIELD
from ..models.layer import routed_layers
from ..native import UpcycleConfig, upcycle
from ..native.folders import DenseFolder, NativeFolder, WholeModel, open_folder
from ..native.gate_sums import KEPT, read_sums, renumbered, size_of_sums, sums_file, write_sums
from ..native.upcycle import mean_model
from ..training.answers import AnswersFile
from ..utils.io import new_folder, read_json, write_json
from ..utils.loading import CONFIG
from ..utils.messages import InputError
from ..utils.model_card import write_model_card
from ..utils.plugins import load_function
from ..utils.torch_contexts import free_memory
from .distil import ANSWERED_AT_ONCE, LEARNING_RATE, RANK, ROWS_PER_STEP, Teachers, fitted, with_general
from .experts import join_expert
from .held_out import (
    MEAN_OF_MODELS,
    HeldOut,
    check_not_taken,
    score,
    score_distilled,
    score_merged,
    score_mixture,
    score_ways,
)
from .mix_settings import MOST_ALONE, MixSettings
from .parts import Parts, check_plain, expert_labels, open_parts, warn_of_templates
from .regmean import regmean
from .request_gate import BASE, RequestGate, absolute
from .request_gate import FILE as REQUEST_GATE
from .request_texts import Request
from .texts import (
    Batching,
    expert_rows,
    general_prompts,
    neutral_texts,
    prompt_rows,
    requests_of_prompts,
    requests_of_rows,
    split_rows,
    unanswered_prompts,
)

REPORT = "mix.json"
logger = logging.getLogger("moe_peft")


class Made(NamedTuple):
    """
    A model that `mix` has written.

    Args:
        labels: names of all experts.
        base: the base model, for the model card.
        how: how it was made, for the model card.
        measured: results on held-out rows; None without held-out rows.
    """

    labels: list[str]
    base: str
    how: str
    measured: HeldOut | None


def mix(settings: MixSettings) -> HeldOut | None:
    """
    Build the mixture and write it to `settings.output`. `mix.json` holds the settings and the results.

    Returns:
        the results on held-out rows; None without held-out rows.
    """
    gates = find_gate_init(settings.gates)
    _check_gates(settings, gates)
    if settings.right is not None:
        load_function(settings.right, "right")  # report errors in the function before reading anything
    with new_folder(settings.output) as folder:
        if settings.models:
            made = _mix_models(settings, folder)
        elif settings.into == "moe":
            made = _mix_adapters(settings, gates, folder)
        elif settings.steps is None:
            made = _merge_adapters(settings, folder)
        else:
            made = _distil_adapters(settings, folder)
        _write_report(settings, made, folder)
    return made.measured


# --- the kinds of mixtures -------------------------------------------------------------------------------------------


def _mix_adapters(settings: MixSettings, gates: GateInit, folder: Path) -> Made:
    """Write a mixture of LoRA adapters, or the mixture `add_to` with one more."""
    parts = open_parts(
        settings.adapters or [], settings.labels, base=settings.base, add_to=settings.add_to, replace=settings.replace,
        always=settings.always,
    )  # fmt: skip
    labels, tokenizer, file = parts.labels, parts.tokenizer, sums_file(settings.gates)
    check_not_taken(labels, settings.gates)
    kept_gates, former = gates.with_kept_sums(), None
    if parts.mixture is not None and kept_gates is not None:
        former = read_sums(parts.mixture.folder / file, kept_gates, parts.mixture.gates)

    # Read the texts. Errors in them are reported before the base is loaded.
    calibration, held_out = _rows(settings, labels, tokenizer, parts.new)
    batching = Batching(tokenizer, settings.max_length, settings.batch_size, settings.seed)
    general, held_out_general = neutral_texts(settings.neutral)
    if settings.prompts is None:
        if former is None and gates.needs_texts:
            _check_all_experts(parts, calibration, None if kept_gates is None else file)
        texts, requests = calibration, requests_of_rows(calibration, labels)
    else:
        texts = prompt_rows(settings.prompts, labels, None if former is None else parts.new)
        requests = requests_of_prompts(settings.prompts)
    batches = None
    if texts is not None and gates.needs_texts:
        batches = batching.for_gates(texts, general if settings.neutral else (), len(labels))
    _say_cost(calibration, held_out, labels)

    # Build the model.
    base = parts.base.load(settings.dtype)
    if parts.mixture is not None:
        model = join_expert(base, parts.mixture, parts.paths[0], parts.replace, parts.new)
    else:
        model = lora_to_moe(
            base, parts.paths, attention=settings.attention or "route", mixing=settings.mixing or "output",
            top_k=settings.top_k or min(gates.top_k, len(labels)), always=settings.always,
            base_expert=settings.neutral is not None,
        )  # fmt: skip
    config = model.peft_config["default"]
    config.revision, config.expert_names = parts.base.revision, [*labels, *([BASE] if config.base_expert else [])]

    # Set its gates: first the gate for requests, then the gates for tokens.
    request_gate = _request_gate(parts, model, requests, general, settings.max_length)
    sums, keeps = None, kept_gates is not None and _keeps_sums(model, file, settings.keep_sums)
    if kept_gates is not None and (keeps or former is not None):
        former = former and _former_sums(former, parts, batches, config.num_experts)
        sums = init_gates(model, kept_gates, batches, former=former)
    else:
        init_gates(model, gates, batches)

    # Measure it and write it.
    measured = None
    if held_out is not None:
        rows = batching.held_out(held_out, labels, settings.right, settings.max_new_tokens)
        to_base = held_out_general if request_gate is not None and BASE in request_gate.texts else []
        measured = score_mixture(model.eval(), rows, settings.gates, labels, request_gate, to_base)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    if sums is not None and keeps:
        write_sums(folder / file, sums)
    if request_gate is not None:
        request_gate.base, request_gate.revision = absolute(parts.base.path), parts.base.revision
        request_gate.save_pretrained(folder)
    return Made(labels, parts.base.path, f"gates without training: `{settings.gates}`", measured)


def _mix_models(settings: MixSettings, folder: Path) -> Made:
    """Write a native MoE of dense models."""
    paths = settings.models or []
    labels = expert_labels(paths, "models", settings.labels)
    check_not_taken(labels, settings.gates)
    models = [open_folder(path, "models", DenseFolder) for path in paths]
    warn_of_templates([model for model in models if model is models[0] or model.has_tokenizer])
    calibration, held_out = _rows(settings, labels, models[0].tokenizer)
    texts = calibration if settings.prompts is None else prompt_rows(settings.prompts, labels)
    batching = Batching(models[0].tokenizer, settings.max_length, settings.batch_size, settings.seed)
    rows = None
    if held_out is not None:
        rows = batching.held_out(held_out, labels, settings.right, settings.max_new_tokens)
    config = UpcycleConfig(
        num_experts=len(paths), top_k=settings.top_k or min(2, len(paths)), init="checkpoints",
        router_init=settings.gates, dtype=None if settings.dtype == "auto" else settings.dtype,
    )  # fmt: skip
    upcycle(paths, folder, config, calibration=None if texts is None else batching.for_gates(texts))
    write_json(folder / CONFIG, {**read_json(folder / CONFIG), NAMES_FIELD: labels})

    measured = None
    if rows is not None:
        scored = {}
        for label, model in tqdm([*zip(labels, models, strict=True), (MEAN_OF_MODELS, None)], desc="models"):
            loaded = mean_model(models, settings.dtype) if model is None else model.load(settings.dtype)
            scored[label] = score(loaded, rows)
            del loaded
            free_memory()
        mixture = open_folder(folder, "output", NativeFolder).load()
        measured = score_mixture(mixture, rows, settings.gates, labels, others=scored)
    return Made(labels, paths[0], f"gates without training: `{settings.gates}`", measured)


def _merge_adapters(settings: MixSettings, folder: Path) -> Made:
    """Write one LoRA, the least-squares merge of the adapters."""
    parts, calibration, held_out = _parts_of_one_lora(settings)
    labels, tokenizer = parts.labels, parts.tokenizer
    batching = Batching(tokenizer, settings.max_length, settings.batch_size, settings.seed)
    rows = batching.held_out(held_out, labels, settings.right, settings.max_new_tokens)
    _say_cost(calibration, held_out, labels, others=3)
    batches = batching.for_merging(calibration, neutral_texts(settings.neutral)[0], len(labels))

    # Measure the base, each adapter alone, their mean, and each row's own adapter, in a temporary mixture.
    mixture = lora_to_moe(parts.base.load(settings.dtype), parts.paths, top_k=1, mixing="projection").eval()
    scored = score_ways(mixture, rows, labels)
    model = regmean(mixture.unload(), parts.paths, batches)
    measured = score_merged(model, rows, labels, scored)
    _write_lora(model, folder, parts.base, tokenizer)
    return Made(labels, parts.base.path, "merged by least squares (RegMean)", measured)


def _distil_adapters(settings: MixSettings, folder: Path) -> Made:
    """Write one LoRA, trained on the adapters' own answers. Gold answers are for its measurement alone."""
    steps = settings.steps or 0
    parts, calibration, held_out = _parts_of_one_lora(settings)
    labels, tokenizer = parts.labels, parts.tokenizer
    own, held_out_own = (
        unanswered_prompts(rows, labels, tokenizer, settings.max_length, f"steps={steps}")
        for rows in (calibration, held_out)
    )
    general, held_out_general = (
        general_prompts(texts, calibration, tokenizer, settings.max_length) for texts in neutral_texts(settings.neutral)
    )
    prompts, asked = with_general(own, general, settings.seed), [*held_out_own, held_out_general]
    batching = Batching(tokenizer, settings.max_length, settings.batch_size, settings.seed)
    rows = batching.held_out(held_out, labels, settings.right, settings.max_new_tokens)
    _say_cost(calibration, held_out, labels, others=3)
    kept = answers_file(settings.output, settings.answers)
    kept.read()  # report errors in the file before loading the base
    logger.info(
        "the adapters and the base answer %d prompts, and %d held-out ones, with at most %d tokens (kept in %s); "
        "then one LoRA is trained for %d steps of %d of these answers",
        sum(map(len, prompts)), sum(map(len, asked)), settings.max_new_tokens, kept.path, steps, ROWS_PER_STEP,
    )  # fmt: skip

    # Ask the adapters and the base.
    model = parts.base.load(settings.dtype)
    at_once = ANSWERED_AT_ONCE * settings.batch_size
    teachers = Teachers(model, parts.paths, tokenizer, settings.max_new_tokens, at_once, kept, labels)
    learned = teachers.rows(prompts)
    taught = rows.taught(teachers.rows(asked), [*labels, BASE])
    have_gold = rows.have_answers
    if not have_gold:
        rows = taught.of(labels)

    # Measure them in a temporary mixture, then train the LoRA and measure it.
    mixture = lora_to_moe(model, parts.paths, top_k=1, mixing="projection").eval()
    scored = score_ways(mixture, rows, labels)
    model = mixture.unload()
    of_base = score(model, taught.of([BASE]))
    model = fitted(
        model, teachers.loras, learned, tokenizer, steps, settings.rank or RANK,
        settings.learning_rate or LEARNING_RATE, settings.batch_size, settings.seed,
    )  # fmt: skip
    measured = score_distilled(model, rows, labels, scored, taught, of_base, have_gold)
    _write_lora(model, folder, parts.base, tokenizer)
    of_adapters = sum(row["expert"] < len(labels) for row in learned)
    how = (
        f"distilled: {steps} steps on the adapters' own answers to {of_adapters} prompts, and the base's to "
        f"{len(learned) - of_adapters} general ones"
    )
    return Made(labels, parts.base.path, how, measured)


def _parts_of_one_lora(settings: MixSettings) -> tuple[Parts, Dataset, Dataset]:
    """Open adapters that become one LoRA. Return them, calibration rows and held-out rows."""
    parts = open_parts(settings.adapters or [], settings.labels, base=settings.base)
    check_not_taken(parts.labels, settings.gates)
    check_plain(parts.adapters)
    calibration, held_out = _rows(settings, parts.labels, parts.tokenizer)
    assert calibration is not None and held_out is not None
    return parts, calibration, held_out


def _check_gates(settings: MixSettings, gates: GateInit) -> None:
    """Raise if the gates lack texts or sums, ignore given texts, or do not fit dense models or the mixture `add_to`."""
    named = f"gates={settings.gates!r}"
    if settings.models and not (gates.needs_texts and gates.router_type == "linear"):
        raise InputError(f"{named}: are for LoRA adapters; use ridge or prompts with models")
    if gates.needs_texts and not (settings.data or settings.prompts):
        raise InputError(f"{named}: need texts for each expert; give data (or prompts), or gates=arrow")
    if settings.prompts and not gates.needs_texts:
        raise InputError(f"prompts: {named} read no texts; leave them out")
    if settings.neutral and not gates.needs_texts:
        raise InputError(f"neutral={settings.neutral!r}: {named} read no texts; leave it out")
    if settings.keep_sums and gates.with_kept_sums() is None:
        raise InputError(f"keep_sums: {named} have none; leave it out")
    report = None if settings.add_to is None else Path(settings.add_to, REPORT)
    if report is not None and report.is_file() and (former := read_json(report).get("gates")) != settings.gates:
        raise InputError(
            f"{named}: those of {settings.add_to!r} are {former!r}, whose logits have another scale; use these"
        )


def _rows(
    settings: MixSettings, labels: Sequence[str], tokenizer: Any, new: str | None = None
) -> tuple[Dataset | None, Dataset | None]:
    """
    Return calibration rows and held-out rows; both None without `data`.

    Args:
        new: the expert that joins a mixture; rows of it alone are accepted.
    """
    if settings.data is None:
        return None, None
    parts = expert_rows(settings.data, "--data", labels, tokenizer, settings.label_column, new)
    tests = settings.test_data and expert_rows(
        settings.test_data, "--test-data", labels, tokenizer, settings.label_column, new
    )
    return split_rows(parts, tests, labels, settings.calibration_examples, settings.test_examples, settings.seed)


def _write_report(settings: MixSettings, made: Made, folder: Path) -> None:
    """Write `mix.json` and the model card, which says how the model was made."""
    results = {} if made.measured is None else asdict(made.measured)
    if "right" in results:  # the setting of this name is the function that judges answers
        results["right_answers"] = results.pop("right")
    report = {"labels": made.labels, **settings.model_dump(exclude={"labels", "output"}), **results}
    write_json(folder / REPORT, report)
    named = ", ".join(f"`{label}`" for label in made.labels)
    write_model_card(folder, base=made.base, made=f"`moe-peft mix`: {named}; {made.how}")


# --- gates -----------------------------------------------------------------------------------------------------------


def _check_all_experts(parts: Parts, rows: Dataset | None, file: str | None) -> None:
    """
    Raise if rows are of the joining expert alone. They are enough only with sums of the other experts' texts.

    Args:
        file: the name of the missing file with the sums; None: the gates have no sums to keep.
    """
    if rows is not None and parts.new is not None and {*rows["expert"]} == {parts.labels.index(parts.new)}:
        sums = "no sums" if file is None else f"no {file}"
        how = "" if file is None else " (--keep-sums)"
        raise InputError(
            f"--data: has only rows of {parts.new!r}, and {parts.mixture} has {sums} of the others' texts{how}; give "
            "rows of all experts"
        )


def _keeps_sums(model: Any, file: str, keep: bool | None) -> bool:
    """
    Return whether to compute and keep the gates' sums by expert. Warn if they exceed the default size limit.

    Args:
        keep: the user's choice; None: up to the limit.
    """
    layers = routed_layers(model)
    size = size_of_sums(layers[0].num_experts, [layer.module.in_features for layer in layers])
    if keep is None and size > KEPT:
        logger.warning(
            "%s is not written: for %d routers (LoRAs on attention have one for each linear) it would take %d MB, and "
            "%d is the most by default; without it, --add-to needs texts of all experts; --keep-sums writes it",
            file, len(layers), size >> 20, KEPT >> 20,
        )  # fmt: skip
        return False
    return keep is not False


def _former_sums(
    former: Sequence[Sums], parts: Parts, batches: Sequence[Mapping[str, Any]] | None, num_experts: int
) -> list[Sums] | None:
    """
    Return the sums of a mixture's experts, renumbered to leave a place for the new expert. None if the batches have
    texts of other experts too: then all sums are computed anew.
    """
    new = parts.labels.index(str(parts.new))
    if any((batch["expert"] != new).any() for batch in batches or ()):
        return None
    after = new + (parts.replace is not None)
    return renumbered(former, [*range(new), None, *range(after, len(former[0]))][:num_experts])


def _request_gate(
    parts: Parts, model: Any, requests: Mapping[str, Sequence[Request]], general: Sequence[str], max_length: int
) -> RequestGate | None:
    """Return the gate for requests. None without requests, or if the mixture `add_to` has no such gate."""
    labels, tokenizer, mixture, new = parts.labels, parts.tokenizer, parts.mixture, parts.new
    if requests.keys() >= {*labels}:
        chat = any(not isinstance(request, str) for of_label in requests.values() for request in of_label)
        if not chat and getattr(tokenizer, "chat_template", None):
            logger.warning(
                "the texts are no chats, but the base has a chat template: tokens of the template and of system "
                "prompts are new to the mixture's gates; give rows with messages if that is how it will be asked"
            )
        return RequestGate.fit(model, requests, general, tokenizer=tokenizer, chat=chat, max_length=max_length)
    if mixture is None or new is None or new not in requests or not (mixture.folder / REQUEST_GATE).is_file():
        return None
    gate = RequestGate.from_pretrained(mixture.folder, model, tokenizer=tokenizer)
    names = (mixture.config.expert_names or [])[: mixture.config.num_updates]
    if parts.replace is not None and names and names[parts.replace] in gate.texts:
        gate = gate.without_adapter(names[parts.replace])
    others = [label for label in labels if label != new or parts.replace is not None]
    gate = gate.renamed(dict(zip(names or others, others, strict=True)))
    return gate.with_adapter(new, requests[new]).in_order(labels)


# --- files and messages ----------------------------------------------------------------------------------------------


def answers_file(output: str, answers: str | None) -> AnswersFile:
    """
    Return the file that keeps the adapters' answers: `answers`, or one beside the output, which is written only in the
    end.
    """
    folder = Path(output).expanduser().absolute()
    beside = folder.with_name(f"{folder.name}.answers.jsonl")
    return AnswersFile(beside if answers is None else Path(answers).expanduser())


def _write_lora(model: Any, folder: Path, base: WholeModel, tokenizer: Any) -> None:
    model.peft_config["default"].revision = base.revision
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _say_cost(calibration: Dataset | None, held_out: Dataset | None, labels: Sequence[str], others: int = 4) -> None:
    """
    Log how many texts will be read and in how many ways held-out rows will be answered.

    Args:
        others: ways besides each expert alone. By default the base, the mean, the gate for requests and the mixture.
    """
    if held_out is not None:
        ways = others + (len(labels) if len(labels) <= MOST_ALONE else 1)
        logger.info(
            "%d texts are read once; %d held-out rows are answered in %d ways (fewer: --test-examples)",
            len(calibration or ()), len(held_out), ways,
        )  # fmt: skip
