"""What the commands that train do with their options: load, plan, train stage by stage, save."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from huggingface_hub import HfApi
from peft import PeftModel, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import set_seed
from trl import get_quantization_config

from ..adapter.config import MoELoraConfig
from ..cards import write_model_card
from ..folders import held, writable
from ..loading import (
    changed_embeddings,
    chat_template,
    check_tokenizer,
    empty_model,
    read_config,
    read_model,
    read_tokenizer,
)
from ..messages import one_line
from ..models.size import model_size
from ..models.view import native_routers, router_parameters, router_sizes
from ..reading import reading
from ..sharding import in_first_process, leave_processes
from ..training.arguments import check_answers, check_launched, check_packages, save_whole
from ..training.continuing import claim
from ..training.data import PREFERENCES, SUPERVISED, check_has_labels, load_data
from ..training.freezing import freeze_for_stage
from ..training.planning import (
    Launch,
    Memory,
    base_dtype,
    memory,
    planned_launch,
    rows_and_length,
    steps_and_rows,
    training_line,
)
from ..training.rows import check_rows
from ..training.tokenizing import rehearse
from .options import Options
from .resuming import check_same_adapter, found_checkpoint, is_done
from .stages import check_stages, section, stages

logger = logging.getLogger("moe_peft")


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
        checkpoint = found_checkpoint(args)
        if checkpoint is not None and isinstance(made.model, PeftModel):
            check_same_adapter(checkpoint, made.model.peft_config[made.model.active_adapter])
        claim(made, checkpoint)
        if checkpoint is None or not is_done(made, checkpoint):
            try:
                made.train(resume_from_checkpoint=checkpoint and str(checkpoint))
            except KeyError as error:  # of the first evaluation
                if "metric_for_best_model" not in str(error):
                    raise
                raise ValueError(f"metric_for_best_model={args.metric_for_best_model!r}: {one_line(error)}") from error
        facts = made.training_facts()
        if number == len(stages) - 1:
            save_whole(made)
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
