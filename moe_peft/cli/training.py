"""
The stages of one training: the arguments of each, and checks of all before the first begins.

Where a training that is told to resume goes on: which checkpoint, whether it fits, and whether it is the last.

What the commands that train do with their options: load, plan, train stage by stage, save.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from huggingface_hub import HfApi
from peft import get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import TrainingArguments, set_seed
from trl import get_quantization_config

from ..adapter.config import MoELoraConfig
from ..models.introspection import native_routers, router_parameters, router_sizes
from ..models.model_size import model_size
from ..routing.expert_map import label_text
from ..training.checkpointing import names_checkpoint, numbered_checkpoints, save_full_weights, train_or_resume
from ..training.data import PREFERENCES, SUPERVISED, check_has_labels, check_rows, load_data
from ..training.estimate import (
    Launch,
    Memory,
    base_dtype,
    memory,
    planned_launch,
    rows_and_length,
    steps_and_rows,
    training_line,
)
from ..training.labels import check_labels
from ..training.preflight import check_answers, check_launched, check_packages, check_settings, check_value
from ..training.preparation import rehearse
from ..training.router_losses import Stage, loss_coefficients
from ..training.trainable import freeze_for_stage
from ..training.trainers import experts_of_labels
from ..utils.distributed import in_first_process, leave_processes
from ..utils.io import held, reading, writable
from ..utils.loading import (
    changed_embeddings,
    chat_template,
    check_tokenizer,
    empty_model,
    read_config,
    read_model,
    read_tokenizer,
)
from ..utils.model_card import write_model_card
from ..utils.validation import choice_error, one_line, unknown_key
from .arguments import Options

# --- stages ----------------------------------------------------------------------------------------------------------

logger = logging.getLogger("moe_peft")
_OF_ALL_STAGES = {
    "training_stage": "the stage's name says this",
    "output_dir": "it is the folder of the stage's name in output_dir",
}


def _has_labels_alone(training: Any) -> bool:
    """
    Whether labels supervise routers and nothing says when. Together with the language loss they did harm in
    "Label-Supervised Routing in Upcycled Mixture of Experts", so two stages are the default.
    """
    if getattr(training, "expert_map", None) is None or training.router_label_loss_coef == 0:
        return False
    whenever = training.training_stage == "joint" and training.router_schedule == "constant"
    return whenever and not training.router_label_mask


def stages(options: Options) -> Iterator[Any]:
    """
    The arguments of each stage. With several, each has a folder of its own for its checkpoints.

    Raises:
        ValueError: an unknown stage, or a setting of one that is unknown or wrong.
    """
    given, training = options.run.stages, options.training
    for f in dataclasses.fields(training):
        if f.init:
            check_value(f.name, getattr(training, f.name))
    if given is None and _has_labels_alone(training):
        given = ["routers", "rest"]
        goes_on = str(training.resume_from_checkpoint).lower() in ("true", "1")
        if goes_on and numbered_checkpoints(Path(str(training.output_dir))):
            raise ValueError(
                f"resume_from_checkpoint=True: {training.output_dir} has checkpoints of one training with all losses; "
                f"move them to {training.output_dir}/joint and set stages=[joint], or choose another output_dir"
            )
        logger.info("expert_map: stages routers and rest, one after the other; for one training of all: stages=joint")
    if given is None:
        yield training
        return
    if not given:
        raise ValueError(f"stages={given!r}: name at least one of {', '.join(Stage.__args__)}")  # type: ignore[attr-defined]
    if training.training_stage != "joint":
        raise ValueError(f"training_stage={training.training_stage!r}: stages says which; leave it out")
    if len(set(given)) < len(given):
        raise ValueError(f"stages={given!r}: name each stage once")
    if len(given) > 1 and names_checkpoint(training):
        raise ValueError(
            f"resume_from_checkpoint={str(training.resume_from_checkpoint)!r}: is of one of the stages "
            f"{', '.join(given)}; use true, or stages.<name>.resume_from_checkpoint"
        )
    names = {f.name for f in dataclasses.fields(training) if f.init}
    for name, own in (given if isinstance(given, dict) else dict.fromkeys(given)).items():
        if name not in Stage.__args__:  # type: ignore[attr-defined]
            raise ValueError(choice_error("stages", name, Stage.__args__))  # type: ignore[attr-defined]
        own = {} if own is None else own
        if not isinstance(own, dict):
            raise ValueError(f"stages.{name}={own!r}: must be a mapping of settings")
        for key in own:
            if key in _OF_ALL_STAGES:
                raise ValueError(f"stages.{name}.{key}: {_OF_ALL_STAGES[key]}; leave it out")
            if key not in names:
                raise ValueError(unknown_key(f"stages.{name}.{key}", names))
        own = {**_resolved(own), **own}
        check_settings(type(training), own, f"stages.{name}.")
        settings = {key: getattr(training, key) for key in names}
        folder = str(Path(str(training.output_dir)) / name)
        try:
            yield type(training)(**{**settings, "output_dir": folder, **own, "training_stage": name})
        except (TypeError, ValueError) as error:
            raise ValueError(f"stages.{name}: {one_line(error)}") from error


def _resolved(own: dict[str, Any]) -> dict[str, Any]:
    """What the arguments of all stages have set themselves, and a stage changes under another name."""
    found: dict[str, Any] = {"bf16": False} if own.get("fp16") else {}
    aliases = {name: name.replace("gradient_", "activation_") for name in own if name.startswith("gradient_checkpoint")}
    known = {f.name for f in dataclasses.fields(TrainingArguments)}
    return found | {new: own[old] for old, new in aliases.items() if new in known}


def section(args: Any, found: Sequence[Any]) -> str:
    """Before a setting's name in a message: the stage that has it, if there are several."""
    return f"stages.{args.training_stage}." if len(found) > 1 else ""


def check_stages(found: Sequence[Any], model: Any, data: Dataset, held_out: Dataset | None) -> None:
    """
    Raises:
        ValueError: what the trainer of a stage would refuse, after the earlier ones had trained: labels without
            experts, experts that the model lacks, or routers that the stage cannot train.
    """
    for args in found:
        try:
            loss_coefficients(model, args, type(args).__name__)
            if getattr(args, "expert_map", None) is None:
                continue
            experts_of_labels(model, args)
            for name, rows in {"train": data, "eval": held_out}.items():
                if rows is not None:
                    check_labels(rows, args.label_column, [label_text(label) for label in args.expert_map], name)
        except ValueError as error:
            raise ValueError(f"{section(args, found)[:-1]}: {error}") from error


# --- training --------------------------------------------------------------------------------------------------------


def train_or_plan(options: Options, trainer: Any) -> None:
    """
    Train every stage and save the result, with the tokenizer, in `output_dir`; or print the plan, if that is asked for.

    Args:
        trainer: the trainer's class.

    Raises:
        ValueError: model, data and settings do not fit together.
    """
    launch = planned_launch(options.run.processes, options.run.strategy, options.run.dry_run)
    if options.run.dry_run:
        print_plan(options, launch)
        return
    found = list(stages(options))
    for args in found:
        path = section(args, found)
        check_packages(args, path)
        check_launched(args, path)
    if len(found) > 1 and found[0].deepspeed_plugin is not None:
        raise ValueError(
            f"stages={[args.training_stage for args in found]}: DeepSpeed prepares a model for one training; use DDP, "
            "FSDP2, stages=[joint], or one run for each with training_stage"
        )
    if options.training.push_to_hub:
        with reading("push_to_hub=True", "log in (hf auth login), or push the result later (hf upload)"):
            in_first_process(HfApi(token=options.training.hub_token).whoami)
    tokenizer = _tokenizer(options)
    check_templates(options, found, tokenizer)
    data, held_out = load_datasets(options, found, tokenizer)
    rehearse_stages(found, data, tokenizer)
    if len(found) > 1:
        check_stages(found, adapted(options, bare_model(options)), data, held_out)
    what = f"output_dir={options.training.output_dir!r}"
    output_dir = writable(str(options.training.output_dir), what)
    if output_dir.exists() and output_dir.resolve() == Path(_name(options)).resolve():
        raise ValueError(f"{what}: is the model's folder, which the result would overwrite; choose another")
    model = load_model(options)
    config = adapter_config(options, model)
    with ExitStack() as stack:
        in_first_process(lambda: stack.enter_context(held(output_dir, what)))
        _train(options, trainer, found, model, config, tokenizer, data, held_out)
    leave_processes()


def _train(
    options: Options, trainer: Any, stages: Sequence[Any], model: Any, config: Any, tokenizer: Any, data: Any,
    held_out: Any,
) -> None:  # fmt: skip
    facts: list[str] = []
    for number, args in enumerate(stages):
        set_seed(args.seed)  # of the adapter's initial values
        try:
            made = trainer(
                model=model, args=args, train_dataset=data, eval_dataset=held_out, processing_class=tokenizer,
                peft_config=config,
            )  # fmt: skip
        except (ImportError, NotImplementedError) as error:  # a package, or what TRL does not do with an adapter
            raise ValueError(one_line(error)) from error
        made.earlier_training = facts
        try:
            train_or_resume(made)
        except KeyError as error:  # of the first evaluation
            if "metric_for_best_model" not in str(error):
                raise
            raise ValueError(f"metric_for_best_model={args.metric_for_best_model!r}: {one_line(error)}") from error
        facts = made.training_facts()
        if number == len(stages) - 1:
            save_full_weights(made)
            made.save_model(options.training.output_dir)
            if options.training.push_to_hub:
                made.push_to_hub(dataset_name=options.data.dataset_name)
            if made.is_world_process_zero():
                write_model_card(options.training.output_dir, datasets=[str(options.data.dataset_name)])
            made.accelerator.print(f"result: {options.training.output_dir}")
        model, config = made.model, None


def check_templates(options: Options, found: Sequence[Any], tokenizer: Any) -> None:
    """
    Raises:
        ValueError: a stage's `chat_template_path` names no template, or an adapter would not fit its base with it.
    """
    for path in dict.fromkeys(getattr(args, "chat_template_path", None) for args in found):
        chat_template(path, "chat_template_path")  # the trainer reads it
        config = read_config(_name(options), _named(options), options.model.model_revision)
        change = changed_embeddings(path, "chat_template_path", tokenizer, config)
        if change is not None and adapter_config(options, empty_model(config, _named(options))) is not None:
            raise ValueError(change)


def load_datasets(options: Options, found: Sequence[Any], tokenizer: Any) -> tuple[Dataset, Dataset | None]:
    """The training split, and the test split if one of the stages evaluates, with their rows checked."""
    data, training = options.data, options.training
    if data.dataset_streaming:
        raise ValueError("dataset_streaming=True: rows are counted and checked before training; leave it out")
    if data.dataset_name is None:
        raise ValueError("dataset_name=None: name a file, a folder or a data set")
    source: Any = data.dataset_name
    if data.dataset_config is not None:
        source = {"path": data.dataset_name, "name": data.dataset_config}
    formats = SUPERVISED if hasattr(training, "assistant_only_loss") else PREFERENCES
    splits = [load_data(source, "dataset_name", None, data.dataset_train_split, formats)]
    if any(args.eval_strategy != "no" or args.eval_on_start for args in found):
        splits.append(load_data(source, "dataset_name", None, data.dataset_test_split, formats))
    labels = {getattr(args, "label_column", None): section(args, found) for args in reversed(found)}
    paths = dict.fromkeys(getattr(args, "chat_template_path", None) for args in found)
    for rows, (label, where), path in product(splits, labels.items(), paths):
        check_has_labels(rows, label, "dataset_name", where if len(labels) > 1 else "")
        template = partial(chat_template, path, "chat_template_path")
        check_rows(rows, f"dataset_name={source!r}", tokenizer, label, template)
    return splits[0], splits[1] if len(splits) > 1 else None


def rehearse_stages(found: Sequence[Any], data: Dataset, tokenizer: Any) -> None:
    """
    Let every stage of SFT prepare some of its examples.

    Raises:
        ValueError: what the trainer would refuse, or learn nothing from.
    """
    for args in found:
        if hasattr(args, "assistant_only_loss") and args.deepspeed_plugin is None:  # which serves one trainer
            check_answers("", data, args.completion_only_loss, args.assistant_only_loss)
            rehearse(data, tokenizer, args, section(args, found).rstrip(".") or "sft")


def load_model(options: Options) -> Any:
    """The model with its weights."""
    model, quantization = options.model, get_quantization_config(options.model)
    return read_model(
        _name(options), _named(options), revision=model.model_revision, dtype=model.dtype,
        attn_implementation=model.attn_implementation, quantization_config=quantization,
    )  # fmt: skip


def bare_model(options: Options) -> Any:
    """The model without weights."""
    config = read_config(_name(options), _named(options), options.model.model_revision)
    return empty_model(config, _named(options))


def adapted(options: Options, model: Any) -> Any:
    """A model without weights, with the adapter if one is trained."""
    config = adapter_config(options, model)
    if config is None:
        return model
    with torch.device("meta"):
        return get_peft_model(model, config)


def adapter_config(options: Options, model: Any) -> MoELoraConfig | None:
    """
    The adapter to train; None if the model itself is trained.

    Raises:
        ValueError: the model is to be trained itself, but has no routers, or there are fields of an adapter.
    """
    chosen = options.run.use_peft
    if not native_routers(model) if chosen is None else chosen:
        config = options.adapter_config()
        config.revision = options.model.model_revision
        return config
    router_sizes(model, "use_peft=False")
    for name, value in options.changed_adapter_fields():
        raise ValueError(f"{name}={value!r}: is for a MoE-LoRA adapter, and this model is trained itself; leave it out")
    return None


def print_plan(options: Options, launch: Launch) -> None:
    """Steps, tokens, parameters and memory of every stage, found without loading weights."""
    found = list(stages(options))
    tokenizer = _tokenizer(options)
    check_templates(options, found, tokenizer)
    data, held_out = load_datasets(options, found, tokenizer)
    rehearse_stages(found, data, tokenizer)
    model = bare_model(options)
    table = Table("stage", title=f"{_name(options)}: {len(data):,} examples")
    for column in ("steps", "tokens", "trainable parameters", "memory per process, about"):
        table.add_column(column, justify="right")
    base, whole = model.num_parameters(), adapted(options, model)
    weights = options.model.dtype or "auto"
    quantization = {"load_in_4bit": options.model.load_in_4bit, "load_in_8bit": options.model.load_in_8bit}
    needed: list[Memory] = []
    if len(found) > 1:
        check_stages(found, whole, data, held_out)
    for args in found:
        rows, length = rows_and_length(data, tokenizer, args)
        steps, read = steps_and_rows(args, rows, launch.processes)
        freeze_for_stage(whole, router_parameters(whole), args.training_stage, "sft")
        trainable = sum(p.numel() for p in whole.parameters() if p.requires_grad)
        needed.append(memory(
            model, args, length, sum(p.numel() for p in whole.parameters()) - base, trainable, launch=launch,
            trained=base_dtype(model, weights) if whole is model else torch.float32,
            half=bool(args.bf16 or args.fp16), dtype=weights, quantization=quantization,
        ))  # fmt: skip
        cells = (
            f"{steps:,}",
            f"{round(read * length):,}",
            f"{trainable:,}",
            f"{needed[-1].total / 2**30:.2f} GiB",
        )
        table.add_row(args.training_stage, *cells)
    if not PartialState().is_main_process:
        return
    console = Console(markup=False, emoji=False)
    console.print(table)
    for args, parts in zip(found, needed, strict=True):
        console.print(f"{args.training_stage}: {training_line(args)}; {parts}", highlight=False, soft_wrap=True)
    console.print(f"model: {model_size(whole)}", highlight=False, soft_wrap=True)
    console.print(f"result: {options.training.output_dir}", highlight=False, soft_wrap=True)


def _name(options: Options) -> str:
    name = options.model.model_name_or_path
    if name is None:
        raise ValueError("model_name_or_path=None: name a model folder or a model of the hub")
    return name


def _named(options: Options) -> str:
    return f"model_name_or_path={_name(options)!r}"


def _tokenizer(options: Options) -> Any:
    config = read_config(_name(options), _named(options), options.model.model_revision)
    tokenizer = read_tokenizer(_name(options), _named(options), options.model.model_revision)
    check_tokenizer(tokenizer, config, _named(options))
    return tokenizer
