"""
Builds a mixture with LoRA adapters or dense models as experts (`moe-peft mix`), or merges LoRA adapters into one LoRA.

Gates are set without training. The mixture is measured on held-out rows, and compared with the base, each expert alone,
the experts' mean, and one expert picked for each request.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers.utils.logging import tqdm

from ..adapter.lora_conversion import lora_to_moe
from ..adapter.plain_lora import lora_scalings
from ..models.gate_init import Sums, find_gate_init, init_gates
from ..models.introspection import NAMES_FIELD
from ..models.layer import routed_layers
from ..native import UpcycleConfig, upcycle
from ..native.folders import (
    AdapterFolder,
    DenseFolder,
    LoraFolder,
    MoELoraFolder,
    NativeFolder,
    WholeModel,
    base_named,
    check_same_tokens,
    open_folder,
)
from ..native.gate_sums import FILE as SUMS
from ..native.gate_sums import KEPT, WAY, read_sums, renumbered, size_of_sums, write_sums
from ..native.upcycle import mean_model
from ..routing.expert_map import label_text
from ..utils.io import hash_file, new_folder, read_json, write_json
from ..utils.loading import CONFIG, adapter_weights, check_tokenizer, read_adapter_weights
from ..utils.messages import InputError
from ..utils.model_card import write_model_card
from ..utils.plugins import load_function
from ..utils.torch_contexts import free_memory
from .distil import ANSWERED_AT_ONCE, LEARNING_RATE, RANK, ROWS_PER_STEP, Teachers, fitted, with_general
from .experts import put_expert
from .held_out import (
    DISTILLED,
    MEAN_OF_ADAPTERS,
    MEAN_OF_MODELS,
    MERGED,
    OWN,
    PICKED,
    HeldOut,
    score,
    score_distilled,
    score_merged,
    score_mixture,
    score_ways,
)
from .mix_settings import MOST_ALONE, MixSettings
from .regmean import regmean
from .request_gate import BASE, RequestGate, absolute
from .request_gate import FILE as REQUEST_GATE
from .texts import CalibrationData, neutral_texts

REPORT = "mix.json"
_GATES = "gates without training: `{}`"
logger = logging.getLogger("moe_peft")


def labels_of(settings: MixSettings) -> list[str]:
    """Return the experts' names, in order."""
    sources = settings.adapters or settings.models or []
    # The name of a folder such as "." is known after resolving it.
    labels = [Path(source).name or Path(source).resolve().name for source in sources]
    if settings.add_to is not None:
        path = Path(settings.add_to, REPORT)
        gates = read_json(path).get("gates") if path.is_file() else settings.gates
        if gates != settings.gates:
            raise InputError(
                f"gates={settings.gates!r}: those of {settings.add_to!r} are {gates!r}, whose logits have another "
                "scale; use these"
            )
        config = open_folder(settings.add_to, "add_to", MoELoraFolder, base=settings.base).config
        if config.expert_names is None and settings.labels is None:
            raise InputError(f"labels=None: the experts of {settings.add_to!r} have no names (expert_names); give them")
        former = (config.expert_names or [])[: config.num_updates]
        position = len(former) if settings.replace is None else settings.replace
        labels = [*former[:position], *labels, *former[position + 1 :]]
    labels = [label_text(label) for label in (labels if settings.labels is None else settings.labels)]
    if not all(labels):
        raise InputError(f"labels={labels}: an expert has no name; give names (--labels)")
    if len(set(labels)) < len(labels):
        raise InputError(f"labels={labels}: two experts have the same name; give others (--labels)")
    lines = (BASE, "mean", MEAN_OF_ADAPTERS, MEAN_OF_MODELS, MERGED, DISTILLED, OWN, PICKED, f"{settings.gates} gates")
    if taken := [label for label in labels if label in lines]:
        raise InputError(f"labels={labels}: {taken[0]!r} is a line or column of the tables; give another (--labels)")
    if settings.add_to is None and len(labels) != len(sources):
        raise InputError(f"labels={labels}: {len(sources)} experts; give a name for each")
    places = [os.path.realpath(source) for source in sources]
    if again := [source for i, source in enumerate(sources) if places[i] in places[:i]]:
        raise InputError(f"{'adapters' if settings.adapters else 'models'}={again[0]!r}: is given twice")
    return labels


def mix(settings: MixSettings) -> HeldOut | None:
    """
    Build the mixture and write it to `settings.output`. `mix.json` holds the settings and the results.

    Returns:
        the results on held-out rows; None without held-out rows.
    """
    _check_gates(settings)
    if settings.right is not None:
        load_function(settings.right, "right")  # report errors in the function before reading anything
    labels = labels_of(settings)
    if settings.into == "lora":
        return (_merge_adapters if settings.steps is None else _distil_adapters)(settings, labels)
    return _mix_models(settings, labels) if settings.models else _mix_adapters(settings, labels)


def _check_gates(settings: MixSettings) -> None:
    """Raise if the gates lack texts, ignore given texts, or do not fit dense models."""
    gates, way = settings.gates, find_gate_init(settings.gates)
    if settings.models and not (way.needs_texts and way.router_type == "linear"):
        raise InputError(f"gates={gates!r}: are for LoRA adapters; use ridge or prompts with models")
    if way.needs_texts and not (settings.data or settings.prompts):
        raise InputError(f"gates={gates!r}: need texts for each expert; give data (or prompts), or gates=arrow")
    if settings.prompts and not way.needs_texts:
        raise InputError(f"prompts: gates={gates!r} read no texts; leave them out")
    if settings.neutral and not way.needs_texts:
        raise InputError(f"neutral={settings.neutral!r}: gates={gates!r} read no texts; leave it out")


def _mix_adapters(settings: MixSettings, labels: list[str]) -> HeldOut | None:
    with new_folder(settings.output) as folder:
        # Report errors in the inputs before loading the base.
        mixture, adapters = _opened(settings, labels)
        parts = [*adapters] if mixture is None else [mixture, *adapters]
        if settings.always is not None:
            parts.append(open_folder(settings.always, "always", LoraFolder, base=settings.base))
        base, tokenizer = _base_and_tokenizer(parts)
        former = read_sums(mixture.folder, mixture.gates) if mixture and settings.gates == "ridge" else None
        source = CalibrationData(settings, labels, tokenizer, joins=former is not None)
        calibration, held_out = source.split()
        _say_cost(calibration, held_out, labels)
        batches = source.batches(calibration)

        model = _joined_model(settings, base.load(settings.dtype), mixture, adapters, source)
        config = model.peft_config["default"]
        config.revision, config.expert_names = base.revision, [*labels, *([BASE] if config.base_expert else [])]
        # Fit the request-level gate, then the token-level routers.
        gate = _request_gate(source, model, calibration, mixture)
        if keeps := _keeps_sums(settings, model):
            former = former and _renumbered(former, source, batches, config.num_experts)
            sums = init_gates(model, WAY, batches, former=former)
        else:
            init_gates(model, settings.gates, batches)

        measured = None
        if held_out is not None:
            general = [] if gate is None or BASE not in gate.texts else neutral_texts(settings.neutral)[1]
            measured = score_mixture(model.eval(), source.parts(held_out), settings.gates, labels, gate, general)
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))
        if keeps:
            write_sums(folder, sums)
        if gate is not None:
            gate.base, gate.revision = absolute(base.path), base.revision
            gate.save_pretrained(folder)
        _report(settings, labels, measured, folder, base.path, _GATES.format(settings.gates))
    return measured


def _merge_adapters(settings: MixSettings, labels: list[str]) -> HeldOut | None:
    """Write one LoRA, the least-squares merge of the adapters."""
    with new_folder(settings.output) as folder:
        paths, base, source = _opened_loras(settings, labels)
        calibration, held_out = source.split()
        assert calibration is not None and held_out is not None
        parts = source.parts(held_out)
        _say_cost(calibration, held_out, labels, others=3)
        batches = source.merge_batches(calibration)

        # Measure the base, each adapter alone, their mean, and each row's own adapter, in a temporary mixture.
        mixture = lora_to_moe(base.load(settings.dtype), paths, top_k=1, mixing="projection").eval()
        scored = score_ways(mixture, parts, labels)
        model = regmean(mixture.unload(), paths, batches)
        measured = score_merged(model, parts, labels, scored)
        _write_lora(model, folder, base, source.tokenizer)
        _report(settings, labels, measured, folder, base.path, "merged by least squares (RegMean)")
    return measured


def _distil_adapters(settings: MixSettings, labels: list[str]) -> HeldOut | None:
    """Write one LoRA, trained on the adapters' own answers. Gold answers are for its measurement alone."""
    steps = settings.steps or 0
    with new_folder(settings.output) as folder:
        paths, base, source = _opened_loras(settings, labels)
        calibration, held_out = source.split()
        assert calibration is not None and held_out is not None
        own, held_out_own = source.prompts(calibration), source.prompts(held_out)
        general, held_out_general = source.general_prompts(calibration)
        prompts, asked = with_general(own, general, settings.seed), [*held_out_own, held_out_general]
        parts = source.parts(held_out)
        _say_cost(calibration, held_out, labels, others=3)
        kept = answers_file(settings)
        logger.info(
            "the adapters and the base answer %d prompts, and %d held-out ones, with at most %d tokens (kept in %s); "
            "then one LoRA is trained for %d steps of %d of these answers",
            sum(map(len, prompts)), sum(map(len, asked)), settings.max_new_tokens, kept, steps, ROWS_PER_STEP,
        )  # fmt: skip

        model = base.load(settings.dtype)
        tokens, rows_at_once = settings.max_new_tokens, ANSWERED_AT_ONCE * settings.batch_size
        teachers = Teachers(model, paths, source.tokenizer, tokens, rows_at_once, kept, labels)
        rows = teachers.rows(prompts)
        taught = source.taught_parts(teachers.rows(asked), parts)
        have_gold = parts.have_answers
        if not have_gold:
            parts = taught.of(labels)
        mixture = lora_to_moe(model, paths, top_k=1, mixing="projection").eval()
        scored = score_ways(mixture, parts, labels)
        model = mixture.unload()
        of_base = score(model, taught.of([BASE]))
        model = fitted(
            model, teachers.loras, rows, source.tokenizer, steps, settings.rank or RANK,
            settings.learning_rate or LEARNING_RATE, settings.batch_size, settings.seed,
        )  # fmt: skip
        measured = score_distilled(model, parts, labels, scored, taught, of_base, have_gold)
        _write_lora(model, folder, base, source.tokenizer)
        of_adapters = sum(row["expert"] < len(labels) for row in rows)
        how = (
            f"distilled: {steps} steps on the adapters' own answers to {of_adapters} prompts, and the base's to "
            f"{len(rows) - of_adapters} general ones"
        )
        _report(settings, labels, measured, folder, base.path, how)
    return measured


def answers_file(settings: MixSettings) -> Path:
    """Return the file that keeps the adapters' answers: beside the output, which is written only in the end."""
    output = Path(settings.output).expanduser().absolute()
    return Path(settings.answers).expanduser() if settings.answers else output.with_name(f"{output.name}.answers.jsonl")


def _opened_loras(settings: MixSettings, labels: list[str]) -> tuple[list[str], WholeModel, CalibrationData]:
    """Return the paths of the adapters that become one LoRA, their base, and the texts. Raise if they do not fit."""
    _, adapters = _opened(settings, labels)
    for adapter in adapters:
        for name in ("modules_to_save", "trainable_token_indices"):
            if value := getattr(adapter.config, name):
                raise InputError(f"{adapter}: {name}={value!r}: into='lora' merges LoRAs on linears alone")
    base, tokenizer = _base_and_tokenizer(adapters)
    return [adapter.path for adapter in adapters], base, CalibrationData(settings, labels, tokenizer)


def _write_lora(model: Any, folder: Path, base: WholeModel, tokenizer: Any) -> None:
    model.peft_config["default"].revision = base.revision
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _base_and_tokenizer(parts: Sequence[AdapterFolder]) -> tuple[WholeModel, Any]:
    """Return the base of all adapters and the first one's tokenizer. Raise if bases or tokenizers differ."""
    base, tokenizer = common_base(parts), parts[0].tokenizer
    check_tokenizer(tokenizer, base.config, parts[0])
    for part in parts[1:]:
        check_same_tokens(part, parts[0])
    warn_of_templates(parts)
    return base, tokenizer


def _opened(settings: MixSettings, labels: list[str]) -> tuple[MoELoraFolder | None, list[LoraFolder]]:
    """Open the adapters, and the mixture `add_to` (None if not set). Raise if they or the labels do not fit."""
    adapters = [open_folder(name, "adapters", LoraFolder, base=settings.base) for name in settings.adapters or []]
    always = [] if settings.always is None else [open_folder(settings.always, "always", LoraFolder, base=settings.base)]
    _check_loras([*adapters, *always])
    if settings.add_to is None:
        return None, adapters
    mixture = open_folder(settings.add_to, "add_to", MoELoraFolder, base=settings.base)
    n = mixture.config.num_updates
    if (settings.replace or 0) >= n:
        raise InputError(f"replace={settings.replace}: {mixture} has experts 0 to {n - 1}")
    n += settings.replace is None
    if len(labels) != n:
        raise InputError(f"labels={labels}: the mixture has {n} experts; give a name for each")
    return mixture, adapters


def _check_loras(loras: Sequence[LoraFolder]) -> None:
    """Raise if two LoRAs are the same. Warn if a LoRA changes nothing."""
    seen: dict[Any, LoraFolder] = {}
    for lora in loras:
        tensors = read_adapter_weights(lora.path, lora)
        if not any(tensor.any() for name, tensor in tensors.items() if ".lora_A." not in name):
            logger.warning("%s: was never trained: its B are all 0, so it answers as the base does", lora)
        identity = (hash_file(adapter_weights(lora.path, lora)), str(lora_scalings(lora.config, tensors)))
        if (other := seen.setdefault(identity, lora)) is not lora:
            raise InputError(f"{lora}: is the same LoRA as {other}; give it once")


def _joined_model(
    settings: MixSettings,
    base: Any,
    mixture: MoELoraFolder | None,
    adapters: Sequence[LoraFolder],
    source: CalibrationData,
) -> Any:
    """Return the base with a new mixture of the adapters, or with the mixture `add_to` and its new expert."""
    paths = [adapter.path for adapter in adapters]
    if mixture is not None:
        return put_expert(base, mixture.path, paths[0], settings.replace, source.new)
    top_k = settings.top_k or min(find_gate_init(settings.gates).top_k, len(paths))
    return lora_to_moe(
        base, paths, attention=settings.attention or "route", top_k=top_k, always=settings.always,
        mixing=settings.mixing or "output", base_expert=settings.neutral is not None,
    )  # fmt: skip


def _renumbered(
    former: Sequence[Sums], source: CalibrationData, batches: list[dict[str, Any]] | None, num_experts: int
) -> list[Sums] | None:
    """
    Return the sums of a mixture's experts, renumbered to leave a place for the new expert. None if the batches have
    texts of other experts too: then all sums are computed anew.
    """
    new = source.labels.index(source.new)
    if batches is not None and any((batch["expert"] != new).any() for batch in batches):
        return None
    after = new + (source.settings.replace is not None)
    return renumbered(former, [*range(new), None, *range(after, len(former[0]))][:num_experts])


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


def _keeps_sums(settings: MixSettings, model: Any) -> bool:
    """Return whether to compute and keep the gates' sums by expert. Warn if they exceed the default size limit."""
    if settings.gates != "ridge":
        return False
    layers = routed_layers(model)
    size = size_of_sums(layers[0].num_experts, [layer.module.in_features for layer in layers])
    if settings.keep_sums is None and size > KEPT:
        logger.warning(
            "%s is not written: for %d routers (LoRAs on attention have one for each linear) it would take %d MB, and "
            "%d is the most by default; without it, --add-to needs texts of all experts; --keep-sums writes it",
            SUMS, len(layers), size >> 20, KEPT >> 20,
        )  # fmt: skip
        return False
    return settings.keep_sums is not False


def _request_gate(
    source: CalibrationData, model: Any, calibration: Dataset | None, mixture: MoELoraFolder | None
) -> RequestGate | None:
    """Return the gate for requests. None without texts, or if the mixture `add_to` has no such gate."""
    requests, settings = source.requests(calibration), source.settings
    if requests.keys() >= {*source.labels}:
        chat = any(not isinstance(request, str) for of_label in requests.values() for request in of_label)
        if not chat and getattr(source.tokenizer, "chat_template", None):
            logger.warning(
                "the texts are no chats, but the base has a chat template: tokens of the template and of system "
                "prompts are new to the mixture's gates; give rows with messages if that is how it will be asked"
            )
        return RequestGate.fit(
            model, requests, neutral_texts(settings.neutral)[0], tokenizer=source.tokenizer, chat=chat,
            max_length=settings.max_length,
        )  # fmt: skip
    if mixture is None or source.new not in requests or not (mixture.folder / REQUEST_GATE).is_file():
        return None
    gate = RequestGate.from_pretrained(mixture.folder, model, tokenizer=source.tokenizer)
    names = (mixture.config.expert_names or [])[: mixture.config.num_updates]
    if settings.replace is not None and names[settings.replace] in gate.texts:
        gate = gate.without_adapter(names[settings.replace])
    others = [label for label in source.labels if label != source.new or settings.replace is not None]
    gate = gate.renamed(dict(zip(names or others, others, strict=True)))
    return gate.with_adapter(source.new, requests[source.new]).in_order(source.labels)


def common_base(adapters: Sequence[AdapterFolder]) -> WholeModel:
    """Return the base of the adapters for one mixture. Raise unless all name the same base and revision."""
    bases = [adapter.base for adapter in adapters]
    named = [base_named(base.path, base.revision) for base in bases]
    for adapter, name in zip(adapters, named, strict=True):
        if name != named[0]:
            raise InputError(
                f"{adapter}: its base is {name}, that of {adapters[0]} is {named[0]}; experts of one mixture need one "
                "base, so say which (--base)"
            )
    return bases[0]


def warn_of_templates(parts: Sequence[AdapterFolder | DenseFolder]) -> None:
    """Warn if experts had different chat templates or EOS tokens in training. A mixture has the first expert's."""
    for name, what in (("chat_template", "chat template"), ("eos_token", "EOS token")):
        values = [getattr(part.tokenizer, name) for part in parts]
        for part, value in zip(parts, values, strict=True):
            if value != values[0]:
                logger.warning(
                    "%s has another %s than %s, whose %s the mixture uses: texts may not look as in its training",
                    part, what, parts[0], what,
                )  # fmt: skip


def _mix_models(settings: MixSettings, labels: list[str]) -> HeldOut | None:
    paths = settings.models or []
    models = [open_folder(path, "models", DenseFolder) for path in paths]
    warn_of_templates([model for model in models if model is models[0] or model.has_tokenizer])
    source = CalibrationData(settings, labels, models[0].tokenizer)
    calibration, held_out = source.split()
    parts = None if held_out is None else source.parts(held_out)
    config = UpcycleConfig(
        num_experts=len(paths), top_k=settings.top_k or min(2, len(paths)), init="checkpoints",
        router_init=settings.gates, dtype=None if settings.dtype == "auto" else settings.dtype,
    )  # fmt: skip
    measured = None
    with new_folder(settings.output) as folder:
        upcycle(paths, folder, config, calibration=source.batches(calibration))
        write_json(folder / CONFIG, {**read_json(folder / CONFIG), NAMES_FIELD: labels})
        if parts is not None:
            scored = {}
            for label, model in tqdm([*zip(labels, models, strict=True), (MEAN_OF_MODELS, None)], desc="models"):
                loaded = mean_model(models, settings.dtype) if model is None else model.load(settings.dtype)
                scored[label] = score(loaded, parts)
                del loaded
                free_memory()
            mixture = open_folder(folder, "output", NativeFolder).load()
            measured = score_mixture(mixture, parts, settings.gates, labels, others=scored)
        _report(settings, labels, measured, folder, paths[0], _GATES.format(settings.gates))
    return measured


def _report(
    settings: MixSettings, labels: list[str], measured: HeldOut | None, folder: Path, base: str, how: str
) -> None:
    """Write `mix.json` and the model card, which says how the model was made."""
    report = {"labels": labels, **settings.model_dump(exclude={"labels", "output"})}
    write_json(folder / REPORT, report | (asdict(measured) if measured else {}))
    made = f"`moe-peft mix`: {', '.join(f'`{label}`' for label in labels)}; {how}"
    write_model_card(folder, base=base, made=made)
