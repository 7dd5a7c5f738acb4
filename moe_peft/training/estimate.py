"""What a training will take: rows, tokens and memory, found without loading weights; and time, by a few steps."""

from __future__ import annotations

import copy
import logging
import statistics
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch
from accelerate import PartialState
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from trl import SFTConfig

from ..models.introspection import base_model, router_parameters
from ..models.model_size import model_size
from ..utils.compat import private
from ..utils.loading import Base, chat_template
from ..utils.messages import InputError, choice_error, one_line, refused_settings
from .data import drawn
from .preparation import for_one_trainer
from .schedule import steps_and_rows
from .trainable import freeze_for_stage

logger = logging.getLogger("moe_peft")

_SAMPLED_ROWS = 500  # for lengths
_TRACED_LAYERS = 4

# What each strategy shards among the processes; the rest is the same in all of them.
STRATEGIES = {
    "ddp": (),
    "zero2": ("gradients", "optimizer"),
    "zero3": ("weights", "gradients", "optimizer"),
    "fsdp2": ("weights", "gradients", "optimizer"),
}


@dataclass(frozen=True)
class Launch:
    """
    How a training will be launched: the number of processes, and what shards its state among them.

    Raises:
        ValueError: an unknown strategy, or less than one process.
    """

    processes: int = 1
    strategy: str = "ddp"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InputError(choice_error("strategy", self.strategy, STRATEGIES))
        if self.processes < 1:
            raise InputError(f"processes={self.processes}: must be 1 or more")


def planned_launch(processes: int | None, strategy: str | None, dry_run: bool, timed: bool = False) -> Launch:
    """
    The launch that a plan is for: what was asked for, or this process's own.

    Args:
        timed: whether the plan is to have times, which are measured in this process.

    Raises:
        ValueError: they are given for a run that is no plan; an unknown strategy; times of other processes.
    """
    if not dry_run and timed:
        raise InputError("time=True: is for --dry-run")
    if not dry_run and (processes, strategy) != (None, None):
        name, value = ("processes", processes) if processes is not None else ("strategy", strategy)
        raise InputError(f"{name}={value!r}: is for --dry-run; a run takes it from its launcher (accelerate launch)")
    if timed and processes not in (None, 1):
        raise InputError(f"processes={processes}: --time measures the steps of this process; leave one of them out")
    return Launch(PartialState().num_processes if processes is None else processes, strategy or "ddp")


@dataclass(frozen=True)
class Memory:
    """
    Bytes of one process on its device. On a CPU, those of Python and its libraries come on top.

    Args:
        weights: all of them, quantized ones at their packed size.
        gradients, optimizer: of the trainable parameters.
        activations: the most that forward and backward hold at once beside these; None: unknown.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int | None

    @property
    def total(self) -> int:
        return sum(filter(None, asdict(self).values()))

    @property
    def total_gib(self) -> str:
        """The total, as plans show it."""
        return f"{self.total / 2**30:.2f} GiB" + " + activations" * (self.activations is None)

    def __str__(self) -> str:
        sizes = {name: "unknown" if size is None else f"{size / 2**30:.2f} GiB" for name, size in asdict(self).items()}
        return ", ".join(f"{name} {size}" for name, size in sizes.items())


def memory(
    model: nn.Module,
    args: SFTConfig,
    longest: int,
    *,
    half: bool,
    quantization: Mapping[str, Any] | None = None,
    launch: Launch = Launch(),
) -> Memory:
    """
    An estimate for one process: the weights, gradients and Adam's two moments of the trainable ones, and the
    activations of one batch of the longest rows, see `activation_bytes`.

    DDP's buckets hold the gradients once more. Where parameters are sharded, two layers (the one that computes and the
    next) and what is in no layer, such as embeddings, are full all the same.

    Args:
        model: what is trained, without weights, each parameter with its dtype; see `on_quantized`.
        longest: tokens of the longest row; of a preference, those of both answers.
        half: whether it trains in mixed precision.
        quantization: fields of a `BitsAndBytesConfig`, of the base.
    """
    weights, largest, outside = _weight_bytes(model, quantization or {})
    trainable = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(p.numel() * p.element_size() for p in trainable)
    moments = sum(p.numel() for p in trainable) if "8bit" in getattr(args.optim, "value", args.optim) else gradients
    buckets = 2 if launch.strategy == "ddp" and launch.processes > 1 else 1
    activations = activation_bytes(model, args, longest, half=half, quantized=bool(quantization))
    needed = Memory(weights, gradients * buckets, 2 * moments, activations)
    shares = {name: -(-getattr(needed, name) // launch.processes) for name in STRATEGIES[launch.strategy]}
    if "weights" in shares and launch.processes > 1:
        shares["weights"] = min(shares["weights"] + 2 * largest + outside, needed.weights)
    return replace(needed, **shares)


def _layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of a model's decoder layers, and its name: that with the most parameters."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda named: sum(p.numel() for p in named[1].parameters()))


def _weight_bytes(model: nn.Module, quantization: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of all weights, of the largest layer, and of those in no layer. A tied weight counts once."""
    scale = (1 if quantization.get("bnb_4bit_use_double_quant") else 4) / 64  # 64 weights have one in float32
    packed = 0.5 + scale if quantization.get("load_in_4bit") else 1.0 if quantization.get("load_in_8bit") else None
    head = base_model(model).get_output_embeddings()

    def size(part: nn.Module) -> float:
        sizes = {}
        for module in part.modules():
            linear = isinstance(module, nn.Linear) and module is not head and not module.weight.requires_grad
            for parameter in module.parameters(recurse=False):
                width = packed if linear and packed is not None else parameter.element_size()
                sizes[id(parameter)] = parameter.numel() * width
        return sum(sizes.values())

    layers = [size(layer) for layer in _layers(model)[1]]
    total = size(model)
    return round(total), round(max(layers)), round(total - sum(layers))


# --- activations -----------------------------------------------------------------------------------------------------


def activation_bytes(
    model: nn.Module, args: SFTConfig, longest: int, *, half: bool, quantized: bool = False
) -> int | None:
    """
    The most bytes that forward and backward of one batch hold at once, beside weights and gradients.

    Both run on tensors without values, so this follows the model's own code (its attention, experts, checkpoints and
    TRL's loss in tiles), whatever it is. Layers beyond the fourth are taken to be like the two before.

    Args:
        model: what is trained, without weights. It stays as it is.
        longest: tokens of a row; of a preference, those of both answers.
        half: whether it trains in mixed precision.
        quantized: whether the base's weights are unpacked for each matrix product.

    Returns:
        the bytes; None, with a warning, if the model does not run without values, as where shapes depend on them.
    """
    rows, tokens = args.per_device_train_batch_size, longest
    if not hasattr(args, "assistant_only_loss"):  # both answers of a preference
        rows, tokens = 2 * rows, -(-longest // 2)
    traced = copy.deepcopy(model)
    name, layers = _layers(traced)
    traced.set_submodule(name, layers[:_TRACED_LAYERS])
    try:
        peak, after = _trace(traced, args, rows, max(tokens, 2), half)
    except Exception as error:  # of any model's code
        logger.warning("activations: unknown, as they need values: %s: %s", type(error).__name__, one_line(error))
        return None
    if (untraced := len(layers) - _TRACED_LAYERS) > 0:
        peak += untraced * (after[_TRACED_LAYERS - 1] - after[_TRACED_LAYERS - 3]) // 2
    linears = (m.weight for m in layers.modules() if isinstance(m, nn.Linear) and not m.weight.requires_grad)
    return peak + (max((w.numel() * w.element_size() for w in linears), default=0) if quantized else 0)


def _trace(model: Any, args: SFTConfig, rows: int, tokens: int, half: bool) -> tuple[int, list[int]]:
    """
    Run a forward and a backward pass without values: the most bytes that are alive at once, and those that are alive
    after each layer.
    """
    base, layers = base_model(model), _layers(model)[1]
    base.config.get_text_config().num_hidden_layers = len(layers)
    full_logits = args.label_smoothing_factor > 0
    if not full_logits:
        outputs = ("log_probs", "entropy", "is_top1")  # those that TRL logs
        private("trl.trainer.utils", "add_fused_lm_head")(base, outputs=outputs)
    if args.gradient_checkpointing:
        base.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        if isinstance(model, PeftModel):
            base.enable_input_require_grads()
    with FakeTensorMode(), _LiveBytes() as live:
        model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"))
        base.tie_weights()
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        ids = torch.ones(rows, tokens, dtype=torch.long)
        before, after = live.restart(), list[int]()
        for layer in layers:
            layer.register_forward_hook(lambda *_: after.append(live.live))
        with torch.autocast("cpu", torch.float16 if args.fp16 else torch.bfloat16, enabled=half):
            loss = model.train()(
                input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False,
                **({} if full_logits else {"fused_lm_head": True}),
            ).loss  # fmt: skip
        loss.backward()
        return live.peak - before, after


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations inside it make, while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.live = self.peak = 0

    def restart(self) -> int:
        """Forget the peak so far; returns the bytes that are alive."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # Without values, it takes bfloat16 alone.
            halves = [part.to(torch.bfloat16) for part in args[:2]]
            result = func(*halves, *args[2:], **(kwargs or {})).to(args[0].dtype)
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, key: int) -> None:
        self.live -= self.sizes.pop(key)


# --- time ------------------------------------------------------------------------------------------------------------

_TIMED_STEPS = 3


def seconds_per_step(make_trainer: Callable[[Any, Dataset], Trainer], args: SFTConfig, data: Dataset) -> float:
    """
    The median time of three optimizer steps, after one that does not count. Nothing is saved or reported.

    Args:
        make_trainer: arguments and rows → the trainer.
        args: of the training that is planned.
    """
    args = for_one_trainer(args)
    args.max_steps, args.save_strategy, args.eval_strategy = _TIMED_STEPS + 1, SaveStrategy.NO, IntervalStrategy.NO
    args.report_to, args.push_to_hub, args.disable_tqdm = [], False, True
    args.load_best_model_at_end = args.eval_on_start = False
    args.logging_strategy = IntervalStrategy.NO
    rows = args.max_steps * args.per_device_train_batch_size * args.gradient_accumulation_steps
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        args.output_dir = folder
        with refused_settings():
            trainer = make_trainer(args, drawn(data, min(rows * PartialState().num_processes, len(data)), args.seed))
        trainer.add_callback(clock)
        trainer.train()
    return statistics.median(end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False))


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.ends.append(time.perf_counter())


def duration(seconds: float) -> str:
    """A time in words: `42 s`, `7 min`, `2 h 05 min`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


# --- the plan of a training ------------------------------------------------------------------------------------------


def python_line() -> str:
    """What a process takes before it holds a model, which on a CPU comes on top of the estimates."""
    return f"on a CPU, add {psutil.Process().memory_info().rss / 2**30:.2f} GiB for Python and its libraries"


def print_estimates(
    base: Base,
    model: Any,
    stages: Mapping[str, Any],
    data: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    launch: Launch,
    seconds: Mapping[str, float],
) -> None:
    """
    Print what each stage of `sft` or `dpo` will take: steps, tokens, parameters, memory and time.

    Args:
        model: what is trained, without weights: the base, or the base with an adapter.
        stages: section → training arguments.
        seconds: section → measured time of a step; empty: no times.
    """
    python = python_line()  # before the traces
    quantization = {} if base.quantization is None else base.quantization.to_dict()
    table = Table("stage", title=f"{base.name_or_path}: {len(data):,} examples")
    columns = ("steps", "tokens", "trainable parameters", "memory per process, about")
    for column in (*columns, *["time, about"] * bool(seconds)):
        table.add_column(column, justify="right")
    lines = []
    for section, args in stages.items():
        rows = count_rows(data, tokenizer, args)
        steps, read = steps_and_rows(args, rows.count, launch.processes)
        freeze_for_stage(model, router_parameters(model), args.training_stage)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        half = bool(args.bf16 or args.fp16)
        needed = memory(model, args, rows.longest, half=half, quantization=quantization, launch=launch)
        numbers = [f"{steps:,}", f"{round(read * rows.length):,}", f"{trainable:,}", needed.total_gib]
        if section in seconds:
            numbers.append(duration(steps * seconds[section]))
        table.add_row(args.training_stage, *numbers)
        lines.append(f"{args.training_stage}: {training_line(args)}; {needed}")
    if PartialState().is_main_process:
        console = Console(markup=False, emoji=False)
        console.print(table)
        for line in (*lines, python, f"model: {model_size(model)}"):
            console.print(line, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Rows:
    """How many rows a training has, the mean of their tokens, and those of the longest one."""

    count: int
    length: float
    longest: int


def count_rows(data: Dataset, tokenizer: PreTrainedTokenizerBase, args: SFTConfig) -> Rows:
    """Training rows as they are after truncation and packing. Their tokens come from up to 500 of them."""
    stride = max(1, len(data) // _SAMPLED_ROWS)
    limit = args.max_length or float("inf")
    template = chat_template(getattr(args, "chat_template_path", None), "chat_template_path")
    lengths = [row_tokens(tokenizer, data[i], template) for i in range(0, len(data), stride)]
    cut = [min(length, limit) for length in lengths]
    if getattr(args, "packing", False) and args.max_length:
        kept = cut if args.packing_strategy == "bfd" else lengths  # others split what is too long
        tokens = len(data) * statistics.fmean(kept)
        return Rows(max(1, round(tokens / args.max_length)), float(args.max_length), args.max_length)
    return Rows(len(data), statistics.fmean(cut), int(max(cut)))


def row_tokens(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], template: str | None = None) -> int:
    """
    Tokens of a row, before truncation, in the formats that TRL takes; of a preference, those of both answers.

    Args:
        template: of chats; None: the tokenizer's.
    """
    if "input_ids" in row:
        return len(row["input_ids"])
    if "messages" in row:
        return _tokens(tokenizer, row["messages"], template)
    if "chosen" in row and "rejected" in row:
        prompt = row.get("prompt", type(row["chosen"])())
        return sum(_tokens(tokenizer, prompt + row[answer], template) for answer in ("chosen", "rejected"))
    if "prompt" in row and "completion" in row:
        return _tokens(tokenizer, row["prompt"] + row["completion"], template)
    return _tokens(tokenizer, row["text"], template)


def _tokens(tokenizer: PreTrainedTokenizerBase, content: str | list[dict[str, str]], template: str | None) -> int:
    if isinstance(content, list):
        return len(tokenizer.apply_chat_template(content, chat_template=template, return_dict=True)["input_ids"])
    return len(tokenizer(content)["input_ids"]) + 1  # TRL adds the end


def training_line(args: SFTConfig) -> str:
    """Learning rate, schedule, context and gradient checkpointing in words."""
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    router_schedules = {"three_phase": "in three phases", "step_decay": "with step decay"}
    schedule = router_schedules.get(getattr(args, "router_schedule", ""), schedule)
    checkpointing = "on, which takes a third more time" if args.gradient_checkpointing else "off"
    router_rate = getattr(args, "router_learning_rate", None)
    of_routers = "" if router_rate is None else f" (routers {router_rate:g})"
    return (
        f"learning rate {args.learning_rate:g}{of_routers}, {schedule}; context {args.max_length or 'unlimited'}; "
        f"gradient checkpointing {checkpointing}"
    )
