"""Training of `moe-peft sft` and `moe-peft dpo`: data, model, a trainer for each stage, the result; or a plan."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from huggingface_hub import HfApi
from peft import PeftModel, get_peft_model
from transformers import EarlyStoppingCallback, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from trl import DPOConfig, SFTConfig

from ..adapter.config import MoELoraConfig
from ..combine.texts import read_requests
from ..models.layer import routed_layers
from ..routing.expert_map import label_text
from ..training.checkpointing import MARKER, numbered_checkpoints
from ..training.data import PREFERENCES, SUPERVISED, check_has_labels, check_rows, load_data
from ..training.estimate import print_estimates
from ..training.preflight import check_arguments, check_loss
from ..training.replay import FILE as REPLAY
from ..training.replay import LABEL, Replay
from ..training.resuming import resumes, save_full_weights, train
from ..training.router_config import loss_coefficients
from ..training.trainable import on_quantized
from ..utils.distributed import leave_processes, on_main_process
from ..utils.io import hash_file, output_folder, reading, refused_by_libraries
from ..utils.loading import ADAPTER_WEIGHTS, adapter_weights, chat_template, without_zero3
from ..utils.messages import InputError, one_line, refused_settings
from ..utils.validation import prefixed
from .arguments import Options, training_stages
from .commands import to_run


def train_or_plan(options: Options, trainer_class: Any, adapter_rate: float) -> None:
    """
    Train every stage and save the result, with the tokenizer, in `output_dir`. With `dry_run`, only print the plan.

    Args:
        adapter_rate: the learning rate of an adapter, if the user sets none.
    """
    if options.trains_adapter and not options.has_rate:
        options.training.learning_rate = adapter_rate
    if options.run.dry_run:
        _print_costs(options)
    else:
        train_stages(options, trainer_class)


def train_stages(options: Options, trainer_class: Any) -> None:
    """Train every stage and save the result, with the tokenizer, in `output_dir`."""
    stages = _checked_stages(options)
    data, eval_data = _load_splits(options, stages)
    replay = _replay(options, stages, data)
    _check_engines(options, stages)
    if len(stages) > 1 or replay is not None:  # before anything takes time
        _empty_model(options, stages)
    with ExitStack() as stack:
        folder = on_main_process(lambda: stack.enter_context(_result_folder(options, stages)))
        _train(options, trainer_class, stages, folder, data, eval_data, replay)
    leave_processes()


def _print_costs(options: Options) -> None:
    """Print the cost of every stage, after all checks that need no weights."""
    stages = _checked_stages(options)
    data, _ = _load_splits(options, stages)
    replay = _replay(options, stages, data)
    model = _empty_model(options, stages)
    if options.trains_adapter and options.base.quantization is not None:
        model = on_quantized(model)
    line = None if replay is None else replay.plan(data, options.base.empty().num_parameters())
    data = data if replay is None else replay.planned(data)
    print_estimates(options.base, model, stages, data, options.tokenizer, line)


def _empty_model(options: Options, stages: Mapping[str, Any]) -> Any:
    """Return the model without weights. Raise if it has no routers, or they have no use for what a stage sets."""
    model = options.base.empty()
    if options.trains_adapter:
        with without_zero3(), torch.device("meta"):
            model = get_peft_model(model, options.adapter_config())
    routed_layers(model, "training")
    for path, args in stages.items():
        with prefixed(path) if path else nullcontext():
            loss_coefficients(model, args)
    return model


def _checked_stages(options: Options) -> dict[str, Any]:
    """Return the training arguments of each stage, checked; see `training_stages`."""
    stages = training_stages(options)
    for path, args in stages.items():
        check_arguments(args, path, on_this_machine=not options.run.dry_run)
        _check_best(options.run.early_stopping_patience, args, f"{path}." if path else "")
    return stages


# --- data and model --------------------------------------------------------------------------------------------------


def _load_splits(options: Options, stages: Mapping[str, Any]) -> tuple[Dataset, Dataset | None]:
    """Load the training split, and the test split if a stage evaluates. Check their rows."""
    data, tokenizer = options.data, options.tokenizer
    if data.dataset_streaming:
        raise InputError("dataset_streaming=True: rows are counted and checked before training; leave it out")
    source: Any = data.dataset_name
    if data.dataset_config is not None:
        source = {"path": data.dataset_name, "name": data.dataset_config}
    formats = SUPERVISED if hasattr(options.training, "assistant_only_loss") else PREFERENCES
    names = [data.dataset_train_split]
    if any(args.eval_strategy != "no" or args.eval_on_start for args in stages.values()):
        names.append(data.dataset_test_split)
    text_field = getattr(options.training, "dataset_text_field", "text")
    splits = [load_data(source, "dataset_name", None, name, formats, text_field) for name in names]
    if text_field != "text":
        for args in stages.values():
            args.dataset_text_field = "text"
    # Check each label column and chat template once, even if stages share it.
    read = {
        (getattr(args, "label_column", None), getattr(args, "chat_template_path", None)): f"{path}." if path else ""
        for path, args in reversed([*stages.items()])
    }
    for (column, template), section in read.items():
        template = chat_template(template, f"{section}chat_template_path")
        for rows in splits:
            check_has_labels(rows, column, "dataset_name", section)
            check_rows(rows, f"dataset_name={source!r}", tokenizer, column, template)
    for path, args in stages.items():
        if isinstance(args, SFTConfig):
            check_loss(args, splits[0], tokenizer, path)
    return splits[0], splits[1] if len(splits) > 1 else None


def _replay(options: Options, stages: Mapping[str, Any], data: Dataset) -> Replay | None:
    """Return what makes the general rows that `replay` asks for, checked; None without `replay`."""
    asked, tokenizer = options.replay, options.tokenizer
    if asked is None or asked.replay == 0:
        if asked is not None and asked.replay_file is not None:
            raise InputError(f"replay_file={asked.replay_file!r}: set replay, the share of such rows, too")
        return None
    field, every = f"replay={asked.replay!r}", [*stages.values()]
    if len(paths := {args.chat_template_path for args in every}) > 1:
        raise InputError(f"{field}: stages have different chat_template_path ({', '.join(map(str, paths))}); give one")
    for path, args in stages.items():
        if args.expert_map is not None and LABEL not in map(label_text, args.expert_map):
            section = f"{path}." if path else ""
            raise InputError(
                f"{field}: general rows have the label {LABEL!r}; give it experts in {section}expert_map, such as all"
            )
    tokens = [tokenizer.convert_tokens_to_ids(args.eos_token) for args in every if args.eos_token is not None]
    replay = Replay(
        asked.replay,
        read_requests(asked.replay_file, "replay_file"),
        tokenizer,
        asked.replay_max_new_tokens,
        min((args.max_length for args in every if args.max_length is not None), default=None),
        chat_template(paths.pop(), "chat_template_path"),
        sorted({args.label_column for args in every if args.label_column is not None}),
        [token for token in tokens if token is not None],
    )
    replay.form(data)
    return replay


def _load_model(options: Options) -> tuple[Any, MoELoraConfig | None]:
    """Load the model to train. Return it with the config of the new adapter that the trainer adds, or None."""
    # Check the adapter before weights are loaded.
    config, folder = options.adapter_config() if options.trains_adapter else None, options.run.adapter
    if folder is not None:
        adapter_weights(folder, f"adapter={folder!r}")
    model = options.base.load()
    if folder is None:
        return model, config
    with refused_by_libraries(f"adapter={folder!r}"):
        return PeftModel.from_pretrained(model, folder, is_trainable=True, config=config), None


# --- training --------------------------------------------------------------------------------------------------------


def _train(
    options: Options, trainer_class: Any, stages: Mapping[str, Any], folder: Path, data: Dataset,
    eval_data: Dataset | None, replay: Replay | None,
) -> None:  # fmt: skip
    (model, config), tokenizer = _load_model(options), options.tokenizer
    if replay is not None:
        data = replay.mixed(data, model, folder / REPLAY)
    start = {} if options.run.adapter is None else {"adapter": hash_file(Path(options.run.adapter, ADAPTER_WEIGHTS))}
    for path, args in stages.items():
        PartialState().print(f"{f'{path}: ' if path else ''}learning_rate={args.learning_rate:g}", flush=True)
        set_seed(args.seed)  # for the adapter's initial values
        with _trainer_errors(args):
            with refused_settings():
                trainer = trainer_class(
                    model=model, args=args, train_dataset=data, eval_dataset=eval_data, processing_class=tokenizer,
                    peft_config=config,
                )  # fmt: skip
            _say_what_is_left_out(len(data), trainer)
            if (patience := options.run.early_stopping_patience) is not None:
                trainer.add_callback(EarlyStoppingCallback(patience))
            start = {"stage before": train(trainer, keep=None, **start).result}
        model, config = trainer.model, None
        # Remove DPO's reference copy of the adapter. The next stage makes a new copy at its start.
        sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        if isinstance(model, PeftModel) and "ref" in model.peft_config and not sharded:
            model.delete_adapter("ref")
    save_full_weights(trainer)
    trainer.save_model(str(folder))
    if options.training.push_to_hub:
        trainer.push_to_hub(dataset_name=options.data.dataset_name)
    if trainer.is_world_process_zero():
        trainer.write_card(folder, datasets=[str(options.data.dataset_name)])
        trainer.state.save_to_json(str(folder / "trainer_state.json"))  # with the whole log
        _say_what_follows(trainer, folder)


def _say_what_is_left_out(rows: int, trainer: Any) -> None:
    """Print the number of rows without a token to learn. TRL leaves such rows out silently."""
    args, prepared = trainer.args, trainer.train_dataset
    if isinstance(prepared, Dataset) and not getattr(args, "packing", False) and len(prepared) < rows:
        left_out = f"{rows - len(prepared):,} of {rows:,} rows are left out"
        PartialState().print(f"{left_out}: within max_length={args.max_length} they have nothing to learn", flush=True)


def _check_engines(options: Options, stages: Mapping[str, Any]) -> None:
    """Check the training engine and the hub."""
    training, names = options.training, [args.training_stage for args in stages.values()]
    if len(stages) > 1 and training.deepspeed_plugin is not None:
        raise InputError(
            f"stages={names}: DeepSpeed prepares a model for one training; use DDP, FSDP2, stages=[joint], or one run "
            "per stage with training_stage"
        )
    sharded = bool(training.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP")
    if len(stages) > 1 and sharded and options.trains_adapter and isinstance(training, DPOConfig):
        raise InputError(
            f"stages={names}: TRL copies the adapter as a reference, but from the second stage on FSDP has sharded it; "
            "use DDP, stages=[joint], or one run per stage with training_stage"
        )
    if training.push_to_hub:
        with reading("push_to_hub=True", "log in (hf auth login), or push the result later (hf upload)"):
            on_main_process(HfApi(token=training.hub_token).whoami)


def _check_best(patience: int | None, args: Any, section: str) -> None:
    """Check the settings for the best step and early stopping."""
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


@contextmanager
def _trainer_errors(args: Any) -> Iterator[None]:
    """Turn a trainer's errors other than `ValueError` into an `InputError`."""
    try:
        yield
    except (ImportError, NotImplementedError) as error:  # a missing package, or a feature TRL lacks for adapters
        raise InputError(one_line(error)) from error
    except KeyError as error:  # from the first evaluation
        if "metric_for_best_model" not in str(error):
            raise
        raise InputError(f"metric_for_best_model={args.metric_for_best_model!r}: {one_line(error)}") from error


# --- the result ------------------------------------------------------------------------------------------------------


def _result_folder(options: Options, stages: Mapping[str, Any]) -> Any:
    """Return a context manager for the folder of the result: a new folder, or the folder of the training to resume."""
    asked = any(map(resumes, stages.values()))

    def is_ours(folder: Path) -> bool:
        """
        Return whether these stages wrote the folder. Stages save checkpoints in subfolders, a single training does not.
        """
        if not asked or ("" not in stages and numbered_checkpoints(folder)):
            return False
        folders = [Path(args.output_dir) for args in stages.values()]
        checkpoints = [path for each in folders for path in numbered_checkpoints(each).values()]
        if any((checkpoint / MARKER).is_file() for checkpoint in checkpoints):
            return True
        # A training killed in its first save leaves at most an unfinished checkpoint, and no file but answers.
        finished = any((checkpoint / TRAINER_STATE_NAME).is_file() for checkpoint in checkpoints)
        files = {path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}
        return not finished and files <= {REPLAY}

    remedy = "choose another" if asked else "set resume_from_checkpoint=true (and the same stages), or choose another"
    return output_folder(str(options.training.output_dir), "output_dir", is_ours, remedy)


def _say_what_follows(trainer: Any, folder: Path) -> None:
    """Print the folder of the result, its step if it is not the last, and commands to look at it."""
    state, which = trainer.state, ""
    if state.best_model_checkpoint is not None and trainer.args.load_best_model_at_end:
        best = f"the best {trainer.args.metric_for_best_model}, {state.best_metric:.4g}"
        which = f" (step {state.best_global_step} of {state.global_step}: {best})"
    print(f"result: {folder}{which}")
    quoted = shlex.quote(str(folder))
    print(f"next: {to_run(f'inspect --model {quoted} --data …')}; {to_run(f'chat --model {quoted}')}")
