"""What a run will need, found without loading weights: steps, tokens, trainable parameters, memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate import PartialState

from ..models.size import ModelSize
from ..training.planning import Launch, Memory, base_dtype, memory, rows_and_length, training_line
from .inputs import load_empty
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
    pipeline.check(weights=False, **own)
    tokenizer = pipeline.context.tokenizer
    empty = load_empty(r.model)
    found = []
    for stage in pipeline.stages:
        if not isinstance(stage, TrainingStage):
            continue
        args = stage.example_arguments(pipeline.root, **own)
        rows, length = rows_and_length(data, tokenizer, args)
        steps = stage.steps(rows, launch.processes)
        sizes = stage.sizes(empty)
        half = _half_precision(stage)
        needed = memory(
            empty, args, length, sizes.held, sizes.trained, half=half, dtype=r.model.dtype,
            quantization=r.model.quantization, launch=launch,
            trained=base_dtype(empty, r.model.dtype) if r.mode == "ffn" else torch.float32,
        )  # fmt: skip
        tokens = round(stage.epochs * rows * length)
        found.append(
            StagePlan(stage.name, stage.epochs, steps, tokens, sizes.trained, needed, training_line(args), sizes.moe)
        )
    return found


def _half_precision(stage: TrainingStage) -> bool:
    """Whether the stage will train in mixed precision; TRL's default is bf16."""
    return bool(stage.sft.get("bf16", True) or stage.sft.get("fp16"))
