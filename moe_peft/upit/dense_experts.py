"""
Stage 3 for experts that are whole models: dense checkpoints, whose FFNs become the experts of a native MoE and whose
other weights, the backbone, are averaged (UpIT, section 2.2 and Algorithm 3, FFN mode).

One model is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer

from ..contexts import free_memory
from ..training.arguments import for_one_trainer
from ..training.checkpoints import Trained, step_rows, train
from .buckets import Buckets, expert_batches
from .files import link_model, own_folders, read_tensor, write_without
from .router_init import RouterInitTrainer
from .routing_vectors import RoutingVectors, router_weights

_VECTORS = "routing_vectors.weight"


class ExpertTrainer(RouterInitTrainer):
    """Trains one dense model's FFNs and routing vectors, as the only expert in `RouterInitTrainer`'s losses."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        return SFTTrainer.training_step(self, model, inputs, *args, **kwargs)

    def run_model(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, Sequence[torch.Tensor]]:
        vectors: RoutingVectors = self.model.routing_vectors
        vectors.scores = []
        outputs = model(**inputs, fused_lm_head=True)
        return outputs, vectors.scores[: vectors.layers]  # with checkpointing, layers run again later


@dataclass(frozen=True)
class ExpertRouters:
    """The trained experts' folders, their routing vectors by layer [n, d], and the trainings' logs."""

    experts: list[Path]
    vectors: dict[int, torch.Tensor]
    trained: list[Trained]


def init_expert_routers(
    load: Callable[[Path], PreTrainedModel],
    experts: Sequence[Path],
    buckets: Buckets,
    dataset: Dataset,
    args: SFTConfig,
    processing_class: PreTrainedTokenizerBase,
    *,
    output_dir: str | Path,
    objective: str = "positive",
    alpha: float = 0.5,
    train_experts: bool = True,
) -> ExpertRouters:
    """
    Train each expert's FFNs and routing vectors on its bucket with `α·L_lm + (1-α)·L_aux`, all else being frozen.

    If it was stopped and is run again, it goes on where it was.

    Args:
        load: folder → model.
        buckets: each expert's indices into `dataset`. An expert without examples keeps its values.
        dataset: tokenized examples.
        args: how to train each; its `num_train_epochs` counts passes over a bucket, its `output_dir` gets a folder
            for each.
        output_dir: gets `experts/0`, …: model folders.
        objective: a name in `OBJECTIVES` that reads the own expert's logit only; `"positive"` makes L_aux
            `BCE(sigmoid(x·r), 1)`.
        train_experts: False trains the routing vectors alone.
    """
    folders = own_folders(Path(output_dir), len(experts), experts, "init_expert_routers")
    vectors, logs = [], []
    for i, (source, target) in enumerate(zip(experts, folders, strict=True)):
        batches = expert_batches(buckets[i], max(1, round(args.num_train_epochs)), step_rows(args), args.seed + i)
        set_seed(args.seed + i)
        model = load(source)
        model.routing_vectors = RoutingVectors(model)
        if not batches:
            vectors.append(model.routing_vectors.weight.detach().float().cpu())
            if args.should_save:
                link_model(source, target)
            del model  # one at a time
            free_memory()
            continue
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == _VECTORS or (train_experts and ".mlp." in name))
        trainer = ExpertTrainer(
            model=model,
            args=_own_arguments(args, i),
            train_dataset=dataset,
            processing_class=processing_class,
            alpha=alpha,
            objective=objective,
        )
        trainer.set_batches([batches])
        trained = train(trainer)
        vectors.append(_keep_expert(trainer, trained, source, target))
        logs.append(trained)
        del trainer, model
        free_memory()
    return ExpertRouters(folders, router_weights(vectors), logs)


def _own_arguments(args: SFTConfig, expert: int) -> SFTConfig:
    own = for_one_trainer(args)
    own.output_dir = str(Path(str(args.output_dir)) / f"expert-{expert}")
    own.remove_unused_columns, own.train_sampling_strategy = False, "sequential"
    return own


def _keep_expert(trainer: ExpertTrainer, trained: Trained, source: Path, target: Path) -> torch.Tensor:
    """Write the trained expert as a model folder, and return its routing vectors [L, d]."""
    last = trained.last
    if trainer.args.should_save:
        write_without(last, _VECTORS, source, target)
    trainer.accelerator.wait_for_everyone()
    return read_tensor(last, _VECTORS).float()
