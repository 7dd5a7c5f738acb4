"""
`moe-peft mix`: LoRA adapters, or dense models, become the experts of one mixture. Its gates are set without training
and measured on held-out rows beside the base, each expert alone, the experts' mean and uniform gates.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers.utils.logging import tqdm

from ..adapter.lora_conversion import lora_to_moe
from ..models.gate_init import Sums, find_gate_init, init_gates
from ..models.introspection import NAMES_FIELD
from ..native import UpcycleConfig, upcycle
from ..native.folders import (
    AdapterFolder,
    DenseFolder,
    LoraFolder,
    MoELoraFolder,
    NativeFolder,
    WholeModel,
    base_named,
    open_folder,
)
from ..native.safetensors_io import new_folder
from ..native.upcycle import mean_model
from ..routing.expert_map import label_text
from ..training.data import check_learnable, check_rows, drawn, load_data, rows_of_labels, with_shared_format
from ..training.preparation import calibration_batches, preparation, tokenized
from ..utils.io import read_json, reading, write_json
from ..utils.loading import CONFIG, check_tokenizer
from ..utils.messages import InputError, choice_error
from ..utils.model_card import write_model_card
from ..utils.torch_contexts import free_memory
from .experts import put_expert
from .held_out import HeldOut, Parts, score, score_mixture
from .mix_settings import MixSettings
from .sums import KEPT, SUMS, read_sums, size_of_sums, write_sums

REPORT = "mix.json"
logger = logging.getLogger("moe_peft")

# --- texts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """
    Rows by expert, of `--data` or `--test-data`.

    Args:
        joins: whether they may be of the last expert alone, as there are sums of the others' texts.
    """

    settings: MixSettings
    labels: Sequence[str]
    tokenizer: Any
    joins: bool = False

    def by_expert(self, field: str) -> list[Dataset] | None:
        """The rows of each expert, with a column `expert`; None if the field is not given."""
        files, column = getattr(self.settings, field), self.settings.label_column
        if files is None:
            return None
        named, labels = f"--{field.replace('_', '-')}", self.labels
        if column is None:
            labels = labels[-1:] if self.joins and len(files) == 1 else labels
            if len(files) != len(labels):
                raise InputError(f"{named}: {len(files)} files for {len(labels)} experts; give one for each")
            parts = [load_data(file, named, None) for file in files]
        else:
            data = load_data(files[0], named, column)
            rows = rows_of_labels(map(label_text, data[column]))
            new = labels[-1 if self.settings.replace is None else self.settings.replace]
            if self.settings.add_to is not None and rows.keys() & set(labels) == {new}:
                labels = self._alone(named, new)
            for label in labels:
                if label not in rows:
                    raise InputError(
                        f"{choice_error('labels', label, list(rows)[:8])}, which {named} has; name the experts by them"
                    )
            parts = [data.select(rows[label]) for label in labels]
            if left := rows.keys() - set(labels):
                logger.warning(
                    "%s: rows of %s are left out: no expert has that name", named, ", ".join(sorted(left)[:8])
                )
        parts = with_shared_format(parts, named)
        for part in parts:
            check_rows(part, named, self.tokenizer)
        return [
            part.add_column("expert", [self.labels.index(label)] * len(part))
            for label, part in zip(labels, parts, strict=True)
        ]

    def _alone(self, named: str, new: str) -> list[str]:
        """The labels, where there are only rows of the new expert."""
        if self.joins:
            return [new]
        why = (
            f"{self.settings.add_to!r} has no {SUMS} of the others' texts (--keep-sums)"
            if self.settings.replace is None
            else "the replaced expert's texts cannot be taken out of any sums"
        )
        raise InputError(f"{named}: has only rows of {new!r}, and {why}; give rows of all experts")

    def split(self) -> tuple[Dataset | None, Dataset | None]:
        """Calibration and held-out rows, which do not overlap."""
        s = self.settings
        parts, tests = self.by_expert("data"), self.by_expert("test_data")
        if parts is None:
            return None, None
        parts = [drawn(part, len(part), s.seed) for part in parts]
        counts = [min(s.calibration_examples, len(part) // (2 if tests is None else 1)) for part in parts]
        if not all(counts):
            label = self.labels[parts[counts.index(0)]["expert"][0]]
            raise InputError(f"--data: one row of {label!r}; give two or more, or --test-data")
        if tests is None:
            tests = [part.select(range(n, len(part))) for n, part in zip(counts, parts, strict=True)]
        else:
            tests = [drawn(part, len(part), s.seed) for part in tests]
        tests = [part.select(range(min(s.test_examples, len(part)))) for part in tests]
        used = [part.select(range(n)) for n, part in zip(counts, parts, strict=True)]
        return _joined(used, "--data"), _joined(tests, "--data" if s.test_data is None else "--test-data")

    def of_prompts(self) -> Dataset:
        prompts, labels = self.settings.prompts or {}, self.labels
        labels = labels[-1:] if self.joins and prompts.keys() == {labels[-1]} else labels
        for label in [*(prompts.keys() - set(labels)), *(set(labels) - prompts.keys())]:
            raise InputError(f"prompts: {label!r}: give prompts for each of the experts {', '.join(labels)}")
        return Dataset.from_list([
            {"text": text, "expert": self.labels.index(label), "negative": negative}
            for label in labels
            for negative in (False, True)
            for text in (prompts[label].negative if negative else prompts[label].positive)
        ])  # fmt: skip

    def batches(self, rows: Dataset | None) -> list[dict[str, torch.Tensor]] | None:
        """Calibration batches of the prompts, or else of the rows."""
        s, columns = self.settings, ["expert"]
        if s.prompts is not None:
            rows, columns = self.of_prompts(), ["expert", "negative"]
        if rows is None or not find_gate_init(s.gates).needs_texts:
            return None
        return calibration_batches(rows, self.tokenizer, len(rows), s.batch_size, s.max_length, s.seed, columns=columns)

    def parts(self, held_out: Dataset) -> Parts:
        args = preparation(self.settings.max_length)
        rows, collator = tokenized(held_out, self.tokenizer, args)
        check_learnable("held-out rows", rows, args)
        of_label = rows_of_labels(rows["expert"])
        parts = {label: rows.select(of_label[i]) for i, label in enumerate(self.labels) if i in of_label}
        return Parts(parts, collator, self.settings.batch_size)


def _joined(parts: Sequence[Dataset], field: str) -> Dataset:
    """All rows; of messages, some may have keys that others lack."""
    with reading(f"{field}: rows of its files do not go together"):
        return Dataset.from_list([row for part in parts for row in part])


def labels_of(settings: MixSettings) -> list[str]:
    """The experts' names, in order."""
    sources = settings.adapters or settings.models or []
    labels = [Path(source).name for source in sources]
    if settings.add_to is not None:
        path = Path(settings.add_to, REPORT)
        gates = read_json(path)["gates"] if path.is_file() else settings.gates
        if gates != settings.gates:
            raise InputError(
                f"gates={settings.gates!r}: those of {settings.add_to!r} are {gates!r}, whose logits have another "
                "scale; use these"
            )
        former = open_folder(settings.add_to, "add_to", MoELoraFolder, base=settings.base).config.expert_names
        if former is None and settings.labels is None:
            raise InputError(f"labels=None: the experts of {settings.add_to!r} have no names (expert_names); give them")
        former = former or []
        position = len(former) if settings.replace is None else settings.replace
        labels = [*former[:position], *labels, *former[position + 1 :]]
    labels = labels if settings.labels is None else settings.labels
    if len(set(labels)) < len(labels):
        raise InputError(f"labels={labels}: two experts have the same name; give others (--labels)")
    if "base" in labels or "mean" in labels:
        raise InputError(f"labels={labels}: 'base' and 'mean' are lines of the table of losses; give others (--labels)")
    if settings.add_to is None and len(labels) != len(sources):
        raise InputError(f"labels={labels}: {len(sources)} experts; give a name for each")
    return labels


# --- the mixture -----------------------------------------------------------------------------------------------------


def mix(settings: MixSettings) -> HeldOut | None:
    """
    Write the mixture to `settings.output`, with `mix.json`, which has what is returned.

    Returns:
        what it gives on held-out rows; None without any.
    """
    _check_gates(settings)
    labels = labels_of(settings)
    return _mix_models(settings, labels) if settings.models else _mix_adapters(settings, labels)


def _check_gates(settings: MixSettings) -> None:
    """Raise if what is given is not what the gates are made of."""
    gates, way = settings.gates, find_gate_init(settings.gates)
    if settings.models and not (way.needs_texts and way.router_type == "linear"):
        raise InputError(f"gates={gates!r}: are for LoRA adapters; use ridge or prompts with models")
    if way.needs_texts and not (settings.data or settings.prompts):
        raise InputError(f"gates={gates!r}: need texts for each expert; give data (or prompts), or gates=arrow")
    if settings.prompts and not way.needs_texts:
        raise InputError(f"prompts: gates={gates!r} read no texts; leave them out")


def _mix_adapters(settings: MixSettings, labels: list[str]) -> HeldOut | None:
    with new_folder(settings.output) as folder:
        adapters = [open_folder(name, "adapters", LoraFolder, base=settings.base) for name in settings.adapters or []]
        mixture = None
        if settings.add_to is not None:
            mixture = open_folder(settings.add_to, "add_to", MoELoraFolder, base=settings.base)
            n = mixture.config.num_experts
            if (settings.replace or 0) >= n:
                raise InputError(f"replace={settings.replace}: {mixture} has experts 0 to {n - 1}")
            n += settings.replace is None
            if len(labels) != n:
                raise InputError(f"labels={labels}: the mixture has {n} experts; give a name for each")
        parts = [*adapters] if mixture is None else [mixture, *adapters]
        base, tokenizer = common_base(parts), parts[0].tokenizer
        check_tokenizer(tokenizer, base.config, parts[0])
        warn_of_templates(parts)
        former = None
        if mixture is not None and settings.gates == "ridge" and settings.replace is None:
            former = read_sums(mixture.folder, mixture.config.num_experts)
        source = Source(settings, labels, tokenizer, joins=former is not None)
        calibration, held_out = source.split()
        batches = source.batches(calibration)
        paths, loaded = [adapter.path for adapter in adapters], base.load(settings.dtype)
        if mixture is None:
            top_k = settings.top_k or min(find_gate_init(settings.gates).top_k, len(paths))
            mixing, attention = settings.mixing or "output", settings.attention or "route"
            model, changed = lora_to_moe(loaded, paths, attention=attention, top_k=top_k, mixing=mixing), None
        else:
            expert = settings.replace if settings.replace is not None else len(labels) - 1
            model = put_expert(loaded, mixture.path, paths[0], settings.replace, labels[expert])
            changed = [expert]
        config = model.peft_config["default"]
        config.revision, config.expert_names = base.revision, labels
        if batches is not None and any((batch["expert"] != len(labels) - 1).any() for batch in batches):
            former = None  # there are texts of all
        sums = init_gates(model, settings.gates, batches, experts=changed, former=former)
        measured = None
        if held_out is not None:
            measured = score_mixture(model.eval(), source.parts(held_out), settings.gates, labels)
        model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))
        if settings.gates == "ridge":
            _keep_sums(settings, sums, folder)
        _report(settings, labels, measured, folder, base.path)
    return measured


def _keep_sums(settings: MixSettings, sums: Sequence[Sums], folder: Path) -> None:
    size = size_of_sums(sums)
    if settings.keep_sums or (settings.keep_sums is None and size <= KEPT):
        write_sums(folder, sums)
    elif settings.keep_sums is None:
        logger.warning(
            "%s is not written, as it would take %d MB; with --keep-sums, an expert can join with only its own texts",
            SUMS, size // 10**6,
        )  # fmt: skip


def common_base(adapters: Sequence[AdapterFolder]) -> WholeModel:
    """The base of adapters that become experts of one mixture; all must name the same, in one revision."""
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
    """Warn if experts were trained with different chat templates or EOS tokens: a mixture has the first one's."""
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
    source = Source(settings, labels, models[0].tokenizer)
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
            losses = {}
            for label, model in tqdm([*zip(labels, models, strict=True), ("mean of the models", None)], desc="models"):
                loaded = mean_model(models, settings.dtype) if model is None else model.load(settings.dtype)
                losses[label] = score(loaded, parts)
                del loaded
                free_memory()
            mixture = open_folder(folder, "output", NativeFolder).load()
            measured = score_mixture(mixture, parts, settings.gates, labels)
            measured = HeldOut({**losses, **measured.losses}, measured.reached)
        _report(settings, labels, measured, folder, paths[0])
    return measured


def _report(settings: MixSettings, labels: list[str], measured: HeldOut | None, folder: Path, base: str) -> None:
    report = {"labels": labels, **settings.model_dump(exclude={"labels", "output"})}
    write_json(folder / REPORT, report | (asdict(measured) if measured else {}))
    made = f"`moe-peft mix`: {', '.join(f'`{label}`' for label in labels)}; gates without training: `{settings.gates}`"
    write_model_card(folder, base=base, made=made)
