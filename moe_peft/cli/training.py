"""What `moe-peft sft` and `moe-peft dpo` do: load, check, plan or train stage by stage, save."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from huggingface_hub import HfApi
from peft import PeftModel, get_peft_model
from transformers import EarlyStoppingCallback, set_seed
from trl import DPOConfig

from ..adapter.config import MoELoraConfig
from ..models.layer import native_layers, routed_layers
from ..training.checkpointing import numbered_checkpoints
from ..training.data import PREFERENCES, SUPERVISED, check_has_labels, check_rows, load_data
from ..training.estimate import Measured, measured_steps, memory_line, planned_launch, print_estimates
from ..training.preflight import preflight
from ..training.resuming import resumes, save_full_weights, train
from ..training.router_config import loss_coefficients
from ..training.trainable import on_quantized
from ..training.trainers import check_expert_labels
from ..utils.distributed import leave_processes, on_main_process
from ..utils.io import hash_file, output_folder, reading, refused_by_libraries
from ..utils.loading import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    adapter_weights,
    changed_embeddings,
    chat_template,
    without_zero3,
)
from ..utils.messages import InputError, one_line, refused_settings
from ..utils.model_card import write_model_card
from ..utils.validation import prefixed
from .arguments import AdapterOptions, Options, training_stages
from .mix import adapter_destinations


def train_or_plan(options: Options, trainer_class: Any, adapter_rate: float | None = None) -> None:
    """
    Train every stage and save the result, with the tokenizer, in `output_dir`; or print the plan, if asked to.

    Args:
        adapter_rate: the learning rate of an adapter, if the user sets none; None: the trainer's.
    """
    run = options.run
    launch = planned_launch(run.processes, run.strategy, run.dry_run, run.time)
    base, output_dir, tokenizer = options.base, str(options.training.output_dir), options.tokenizer

    # Find what is wrong before weights are loaded.
    model, config = _empty_model(options)
    if config is not None and adapter_rate is not None and not options.has_rate:
        options.training.learning_rate = adapter_rate
    stages = training_stages(options)
    PartialState().print(_rates(options, stages), flush=True)
    for section, args in stages.items():
        _check_best(options.run.early_stopping_patience, args, f"{section}." if section else "")
    for path in dict.fromkeys(getattr(args, "chat_template_path", None) for args in stages.values()):
        change = config and changed_embeddings(path, "chat_template_path", tokenizer, base.config)
        if change:
            raise InputError(change)
    data, eval_data = _load_splits(options, stages, tokenizer)
    for path, args in stages.items():
        preflight(args, data, tokenizer, path, on_this_machine=not options.run.dry_run)
        with prefixed(path) if path else nullcontext():
            loss_coefficients(model, args)
            if getattr(args, "expert_map", None) is not None:
                check_expert_labels(model, args, {"train": data, "eval": eval_data})

    if options.run.dry_run:
        said = memory_line()
        measured = _measured(options, trainer_class, stages, config, data) if options.run.time else {}
        print_estimates(base, model, stages, data, tokenizer, launch, measured, said)
        return
    names = [args.training_stage for args in stages.values()]
    if len(stages) > 1 and options.training.deepspeed_plugin is not None:
        raise InputError(
            f"stages={names}: DeepSpeed prepares a model for one training; use DDP, FSDP2, stages=[joint], or one run "
            "per stage with training_stage"
        )
    sharded = bool(options.training.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP")
    if len(stages) > 1 and sharded and config is not None and isinstance(options.training, DPOConfig):
        raise InputError(
            f"stages={names}: TRL copies an adapter to compare with, which FSDP has sharded from the second stage on; "
            "use DDP, stages=[joint], or one run per stage with training_stage"
        )
    if options.training.push_to_hub:
        with reading("push_to_hub=True", "log in (hf auth login), or push the result later (hf upload)"):
            on_main_process(HfApi(token=options.training.hub_token).whoami)
    if Path(output_dir).exists() and Path(output_dir).resolve() == Path(base.name_or_path).resolve():
        raise InputError(f"output_dir={output_dir!r}: is the model's folder; choose another")

    def is_ours(folder: Path) -> bool:
        """Stages have checkpoints in folders of their own; others belong to a training in a single stage."""
        if not asked or ("" not in stages and numbered_checkpoints(folder)):
            return False
        trained = any((folder / name).is_file() for name in (ADAPTER_CONFIG, CONFIG))
        return not trained or any(numbered_checkpoints(Path(args.output_dir)) for args in stages.values())

    asked = any(map(resumes, stages.values()))
    remedy = "choose another" if asked else "set resume_from_checkpoint=true (and the same stages), or choose another"
    with ExitStack() as stack:
        folder = on_main_process(lambda: stack.enter_context(output_folder(output_dir, "output_dir", is_ours, remedy)))
        _train(options, trainer_class, stages, folder, config, data, eval_data)
    leave_processes()


def _rates(options: Options, stages: Mapping[str, Any]) -> str:
    """The learning rate of each stage, and which are the default."""
    own: Mapping[str, Any] = options.run.stages if isinstance(options.run.stages, dict) else {}
    rates, any_default = [], False
    for section, args in stages.items():
        is_default = not options.has_rate and "learning_rate" not in (own.get(args.training_stage) or {})
        any_default |= is_default
        name = f"{section}: " if section else ""
        rates.append(f"{name}learning_rate={args.learning_rate:g}{', the default' if is_default else ''}")
    return "; ".join([*rates, *(["--learning_rate sets another"] if any_default else [])])


def _measured(
    options: Options, trainer_class: Any, stages: Mapping[str, Any], config: MoELoraConfig | None, data: Dataset
) -> dict[str, Measured]:
    """Section → what optimizer steps take here, measured on a few that are thrown away."""
    model, config = _load_model(options, config)

    def make_trainer(args: Any, rows: Dataset) -> Any:
        nonlocal model, config
        trainer = trainer_class(
            model=model, args=args, train_dataset=rows, processing_class=options.tokenizer, peft_config=config
        )
        model, config = trainer.model, None
        return trainer

    measured = {}
    for path, args in stages.items():
        measured[path] = measured_steps(make_trainer, args, data)
        _drop_reference(model)
    return measured


def _train(
    options: Options, trainer_class: Any, stages: Mapping[str, Any], folder: Path, config: MoELoraConfig | None,
    data: Dataset, eval_data: Dataset | None,
) -> None:  # fmt: skip
    model, config = _load_model(options, config)
    start = {} if options.run.adapter is None else {"adapter": hash_file(Path(options.run.adapter, ADAPTER_WEIGHTS))}
    facts: list[str] = []
    for args in stages.values():
        set_seed(args.seed)  # of the adapter's initial values
        with _trainer_errors(args):
            with refused_settings():
                trainer = trainer_class(
                    model=model, args=args, train_dataset=data, eval_dataset=eval_data,
                    processing_class=options.tokenizer, peft_config=config,
                )  # fmt: skip
            trainer.earlier_training = facts
            if (patience := options.run.early_stopping_patience) is not None:
                trainer.add_callback(EarlyStoppingCallback(patience))
            train(trainer, keep=None, **start)
        facts = trainer.training_facts()
        model, config = trainer.model, None
        if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            _drop_reference(model)
    save_full_weights(trainer)
    trainer.save_model(str(folder))
    if options.training.push_to_hub:
        trainer.push_to_hub(dataset_name=options.data.dataset_name)
    if trainer.is_world_process_zero():
        write_model_card(folder, datasets=[str(options.data.dataset_name)])
        trainer.state.save_to_json(str(folder / "trainer_state.json"))  # with the whole log
    trainer.accelerator.print(f"result: {folder}{_which_step(trainer)}")
    if trainer.is_world_process_zero():
        quoted = shlex.quote(str(folder))
        nexts = [f"moe-peft inspect --model {quoted} --data …", f"moe-peft chat --model {quoted}"]
        if isinstance(trainer.model, PeftModel):
            with suppress(Exception):  # everything is saved already
                nexts += adapter_destinations(str(folder))[0].values()  # those that do not refuse it
        else:
            nexts.append(f"vllm serve {quoted}")
        print(f"next: {'; '.join(nexts)}")


def _drop_reference(model: Any) -> None:
    """Drop the copy of an adapter that DPO compares it with; the next stage has its own, of what it starts from."""
    if isinstance(model, PeftModel) and "ref" in model.peft_config:
        model.delete_adapter("ref")


def _check_best(patience: int | None, args: Any, section: str) -> None:
    """
    Raises:
        ValueError: the best step might have no checkpoint, or would not be the result of a training that it stops.
    """
    by_steps = args.load_best_model_at_end and args.eval_strategy == "steps"
    if by_steps and args.save_strategy == "steps" and args.save_steps != args.eval_steps:
        raise InputError(
            f"{section}save_steps={args.save_steps}: load_best_model_at_end finds only steps that were saved; set it "
            f"to eval_steps={args.eval_steps:g}"
        )
    if patience is None:
        return
    field = f"early_stopping_patience={patience!r}"
    if isinstance(patience, bool) or patience < 1:
        raise InputError(f"{field}: must be a whole number of at least 1")
    if args.eval_strategy == "no" or not args.load_best_model_at_end:
        raise InputError(
            f"{field}: set {section}eval_strategy=steps, eval_steps and load_best_model_at_end=true, so that there is "
            "something to compare and the best step is the result"
        )


def _which_step(trainer: Any) -> str:
    """Which step's weights the result has, if not the last one's."""
    state, metric = trainer.state, trainer.args.metric_for_best_model
    if state.best_model_checkpoint is None or not trainer.args.load_best_model_at_end:
        return ""
    return f" (step {state.best_global_step} of {state.global_step}: the best {metric}, {state.best_metric:.4g})"


@contextmanager
def _trainer_errors(args: Any) -> Iterator[None]:
    """What a trainer refuses with errors other than `ValueError`."""
    try:
        yield
    except (ImportError, NotImplementedError) as error:  # a package, or what TRL does not do with an adapter
        raise InputError(one_line(error)) from error
    except KeyError as error:  # of the first evaluation
        if "metric_for_best_model" not in str(error):
            raise
        raise InputError(f"metric_for_best_model={args.metric_for_best_model!r}: {one_line(error)}") from error


def _load_splits(options: Options, stages: Mapping[str, Any], tokenizer: Any) -> tuple[Dataset, Dataset | None]:
    """The training split, and the test split if one of the stages evaluates, with their rows checked."""
    data = options.data
    if data.dataset_streaming:
        raise InputError("dataset_streaming=True: rows are counted and checked before training; leave it out")
    source: Any = data.dataset_name
    if data.dataset_config is not None:
        source = {"path": data.dataset_name, "name": data.dataset_config}
    formats = SUPERVISED if hasattr(options.training, "assistant_only_loss") else PREFERENCES
    splits = [load_data(source, "dataset_name", None, data.dataset_train_split, formats)]
    if any(args.eval_strategy != "no" or args.eval_on_start for args in stages.values()):
        splits.append(load_data(source, "dataset_name", None, data.dataset_test_split, formats))
    columns = {getattr(args, "label_column", None): path for path, args in reversed([*stages.items()])}
    templates = dict.fromkeys(getattr(args, "chat_template_path", None) for args in stages.values())
    for rows in splits:
        for column, path in columns.items():
            check_has_labels(rows, column, "dataset_name", f"{path}." if path else "")
            for template in templates:
                other_template = partial(chat_template, template, "chat_template_path")
                check_rows(rows, f"dataset_name={source!r}", tokenizer, column, other_template)
    return splits[0], splits[1] if len(splits) > 1 else None


def _load_model(options: Options, config: MoELoraConfig | None) -> tuple[Any, MoELoraConfig | None]:
    """The model to train, and the config of the new adapter that it gets."""
    model, folder = options.base.load(), options.run.adapter
    if folder is None:
        return model, config
    with refused_by_libraries(f"adapter={folder!r}"):
        return PeftModel.from_pretrained(model, folder, is_trainable=True, config=options.adapter_config()), None


def _empty_model(options: Options) -> tuple[Any, MoELoraConfig | None]:
    """The model to train, without weights, and the config of its adapter; None if the model itself is trained."""
    model = options.base.empty()
    if options.run.adapter is not None:
        adapter_weights(options.run.adapter, f"adapter={options.run.adapter!r}")
    if (
        options.run.adapter is not None
        or options.run.use_peft
        or (options.run.use_peft is None and not native_layers(model))
    ):
        with without_zero3(), torch.device("meta"):
            adapted = get_peft_model(model, options.adapter_config())
        return adapted if options.base.quantization is None else on_quantized(adapted), options.adapter_config()
    routed_layers(model, "use_peft=False")
    for name, default in vars(AdapterOptions()).items():
        if (value := options.adapter[name]) != default:
            raise InputError(
                f"{name}={value!r}: is for a MoE-LoRA adapter, but this model itself is trained; leave it out"
            )
    return model, None
