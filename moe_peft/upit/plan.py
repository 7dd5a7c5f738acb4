"""What a run will need, found without loading weights: steps, tokens, trainable parameters, memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState, init_empty_weights
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ..models.size import ModelSize
from ..training.planning import Launch, Memory, memory, rows_and_length, training_line
from .inputs import load_config
from .pipeline import UpIT
from .shared_stages import TrainingStage


@dataclass(frozen=True)
class StagePlan:
    """
    One stage. `memory` is an estimate for one process; `training` names the rate, the schedule and the context;
    `moe` is the size of the MoE, of the stage that trains the whole of it.
    """

    name: str
    epochs: float
    steps: int
    tokens: int
    trainable: int
    memory: Memory
    training: str
    moe: ModelSize | None = None


def plan(pipeline: UpIT, launch: Launch | None = None) -> list[StagePlan]:
    """
    The stages of a run that train.

    Steps are exact unless packing or truncation to `max_length` changes the number of rows, or stage 3's buckets differ
    in size; tokens come from the mean length of up to 500 rows.

    Args:
        launch: how the run will be launched; None: as this process was.

    Raises:
        ValueError: the recipe, its base or its data do not fit together.
    """
    r = pipeline.recipe
    # A plan may be made on a machine without the accelerator that the run will have.
    own = {} if torch.accelerator.is_available() else {"bf16": False, "fp16": False, "use_cpu": True}
    pipeline.join_processes(**own)
    launch = launch or Launch(PartialState().num_processes)
    data = pipeline.context.train_data
    tokenizer = _with_template(pipeline.context.tokenizer, r.sft.get("chat_template_path"))
    config = load_config(r.model)
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(config)
    found = []
    for stage in pipeline.stages:
        stage.check()
        if not isinstance(stage, TrainingStage):
            continue
        args = stage.arguments(pipeline.root, **own)
        rows, length = rows_and_length(data, tokenizer, args)
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * launch.processes
        steps = stage.steps(rows, batch)
        sizes = stage.sizes(empty)
        half = _half_precision(stage)
        needed = memory(
            empty, args, length, sizes.held, sizes.trained, half=half, dtype=r.model.dtype,
            quantization=r.model.quantization, launch=launch,
        )  # fmt: skip
        tokens = round(stage.epochs * rows * length)
        found.append(
            StagePlan(stage.name, stage.epochs, steps, tokens, sizes.trained, needed, training_line(args), sizes.moe)
        )
    return found


def _half_precision(stage: TrainingStage) -> bool:
    """Whether the stage will train in mixed precision; TRL's default is bf16."""
    return bool(stage.sft.get("bf16", True) or stage.sft.get("fp16"))


def _with_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template that TRL will give it: a file's, or another tokenizer's."""
    if path is not None:
        is_file = Path(path).is_file()
        try:
            own = Path(path).read_text() if is_file else AutoTokenizer.from_pretrained(path).chat_template
        except OSError as error:
            raise ValueError(f"sft.chat_template_path={path!r}: neither a file nor a reachable tokenizer") from error
        tokenizer.chat_template = own
    return tokenizer
