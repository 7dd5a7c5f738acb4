"""
Stages 2 and 3 for experts that are whole models: dense checkpoints, whose FFNs become the experts of a native MoE and
whose other weights, the backbone, are averaged (UpIT, section 2.2 and Algorithms 2 and 3, FFN mode).

Checkpoints are read tensor by tensor; one model is in memory at a time.
"""

from __future__ import annotations

import copy
import gc
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer

from ..merging import Descent, Expansion, dare_tensor, expand
from ..native.checkpoint import Checkpoint, ShardedWriter
from ..native.families import DENSE_NAME, PROJECTIONS
from ..training.checkpoints import Trained, step_rows, train
from ..training.scoring import example_losses
from .buckets import Buckets, bucket_schedule
from .prepare import link_model
from .router_init import RouterInitTrainer

_VECTORS = "routing_vectors.weight"


class _Displacements(Mapping[str, torch.Tensor]):
    """A checkpoint's FFN weights less the base's, float32, each computed when asked for."""

    def __init__(self, folder: Path, base: Checkpoint, layers: int) -> None:
        self.folder, self.own, self.base = folder, Checkpoint(folder, "expand_checkpoints"), base
        self.names = sorted(DENSE_NAME.format(layer=i, projection=p) for i in range(layers) for p in PROJECTIONS)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.own.tensor(name).float() - self.base.tensor(name).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def expand_checkpoints(
    experts: Sequence[str | Path],
    base: str | Path,
    *,
    output_dir: str | Path,
    num_experts: int,
    num_layers: int,
    method: Expansion = "genetic",
    drop_rate: float = 0.9,
    seed: int = 0,
) -> tuple[list[Path], list[Descent]]:
    """
    Merge dense checkpoints into further ones until there are `num_experts`: FFNs by DARE of their displacements from
    the base's, all else by the parents' average. Similarity is the cosine of the displacements of all FFNs.

    Args:
        experts: model folders, fine-tuned from `base`.
        output_dir: gets `experts/0` … `experts/n-1`, the given ones first.

    Returns:
        the n folders, and the descent of each new expert.
    """
    origin = Checkpoint(Path(base), "expand_checkpoints")
    root = Path(output_dir) / "experts"
    given = [_Displacements(Path(folder), origin, num_layers) for folder in experts]
    made: list[Path] = []

    def merge(a: Any, b: Any, alpha: float, rate: float, generator: torch.Generator) -> _Displacements:
        folder = root / str(len(given) + len(made))
        folder.mkdir(parents=True)
        link_model(a.folder, folder, weights=False)
        plan = {name: (a.own.dtype(name), a.own.shape(name)) for name in a.own}
        with ShardedWriter(folder, plan) as writer:
            for name in a.names:
                moved = dare_tensor(a[name], b[name], alpha, rate, generator)
                writer.write(name, origin.tensor(name).float() + moved)
            for name in set(a.own) - set(a.names):
                writer.write(name, (a.own.tensor(name).double() + b.own.tensor(name).double()) / 2)
        made.append(folder)
        return _Displacements(folder, origin, num_layers)

    for i, folder in enumerate(experts):
        (root / str(i)).mkdir(parents=True)
        link_model(Path(folder), root / str(i))
    descents = expand(
        given, num_experts, method=method, similarity="values", drop_rate=drop_rate, seed=seed, merge=merge
    )[1]
    return [root / str(i) for i in range(num_experts)], descents


# --- routing vectors --------------------------------------------------------------------------------------------------


class RoutingVectors(nn.Module):
    """One vector per layer; records `x·r` of each FFN's input while the model runs."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config = model.config
        weight = torch.empty(config.num_hidden_layers, config.hidden_size)
        self.weight = nn.Parameter(nn.init.normal_(weight, std=0.02).to(model.device))
        self.scores: list[torch.Tensor] = []
        for layer in range(config.num_hidden_layers):
            model.get_submodule(f"model.layers.{layer}.mlp").register_forward_pre_hook(self._recorder(layer))

    def _recorder(self, layer: int) -> Callable[[nn.Module, tuple], tuple]:
        def record(ffn: nn.Module, args: tuple) -> tuple:
            # No matrix product: autocast would make it one in half precision.
            score = (args[0].float() * self.weight[layer].float()).sum(-1, keepdim=True)
            self.scores.append(score.reshape(-1, 1))
            # The same input, but tied to the score: DistributedDataParallel takes what no output depends on for unused.
            return (args[0] + 0 * score.to(args[0].dtype),)

        return record


class ExpertTrainer(RouterInitTrainer):
    """Trains one dense model's FFNs and its routing vectors: the one expert of `RouterInitTrainer`'s losses."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        return SFTTrainer.training_step(self, model, inputs, *args, **kwargs)

    def run_model(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, Sequence[torch.Tensor]]:
        vectors: RoutingVectors = self.model.routing_vectors
        vectors.scores = []
        outputs = model(**inputs, fused_lm_head=True)
        layers = len(vectors.weight)  # with checkpointing, layers run again later
        return outputs, vectors.scores[:layers]


@dataclass(frozen=True)
class ExpertRouters:
    """The trained experts' folders, their routing vectors by layer [n, d], and the trainings' logs."""

    experts: list[Path]
    vectors: dict[int, torch.Tensor]
    trained: list[Trained]


def tokenize(
    load: Callable[[Path], PreTrainedModel],
    expert: Path,
    dataset: Dataset,
    args: SFTConfig,
    processing_class: PreTrainedTokenizerBase,
) -> Dataset:
    """The examples as TRL prepares them, which drops those without anything to learn."""
    trainer = SFTTrainer(
        model=load(expert), args=copy.copy(args), train_dataset=dataset, processing_class=processing_class
    )
    return trainer.train_dataset


def score_checkpoints(
    load: Callable[[Path], PreTrainedModel],
    experts: Sequence[Path],
    dataset: Dataset,
    args: SFTConfig,
    processing_class: PreTrainedTokenizerBase,
) -> torch.Tensor:
    """Every model's perplexity on each example [S, n], one model after the other."""
    columns = []
    for folder in experts:
        trainer = SFTTrainer(
            model=load(folder), args=copy.copy(args), train_dataset=dataset, processing_class=processing_class
        )
        losses_S1, counts_S = example_losses(trainer, trainer.train_dataset)
        columns.append((losses_S1.squeeze(1) / counts_S).exp())
        del trainer
        _free()
    return torch.stack(columns, dim=1)


def init_expert_routers(
    load: Callable[[Path], PreTrainedModel],
    experts: Sequence[Path],
    buckets: Buckets,
    dataset: Dataset,
    args: SFTConfig,
    processing_class: PreTrainedTokenizerBase,
    *,
    output_dir: str | Path,
    alpha: float = 0.5,
    train_experts: bool = True,
) -> ExpertRouters:
    """
    Train each expert's FFNs and routing vectors on its bucket, its backbone frozen, with the loss
    `α·L_lm + (1-α)·BCE(sigmoid(x·r), 1)`.

    Run again after having been stopped, it goes on where it was.

    Args:
        load: makes a model of a folder.
        buckets: of each expert, indices into `dataset`. An expert without examples keeps its values.
        dataset: tokenized examples.
        args: how to train each; its `num_train_epochs` counts passes over a bucket, its `output_dir` gets a folder for
            each.
        output_dir: gets `experts/0`, …: model folders.
        train_experts: False trains the routing vectors alone.
    """
    root = Path(output_dir) / "experts"
    vectors, logs = [], []
    for i, folder in enumerate(experts):
        own = copy.copy(args)
        own.output_dir = str(Path(str(args.output_dir)) / f"expert-{i}")
        own.remove_unused_columns, own.train_sampling_strategy = False, "sequential"
        schedule = bucket_schedule([buckets[i]], max(1, round(args.num_train_epochs)), args.seed + i)
        set_seed(args.seed + i)
        model = load(folder)
        model.routing_vectors = RoutingVectors(model)
        target = root / str(i)
        if not schedule:
            vectors.append(model.routing_vectors.weight.detach().float().cpu())
            if args.should_save:
                target.mkdir(parents=True)
                link_model(folder, target)
            continue
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == _VECTORS or (train_experts and ".mlp." in name))
        trainer = ExpertTrainer(
            model=model, args=own, train_dataset=dataset, processing_class=processing_class, alpha=alpha
        )
        trained = _train_on(trainer, [example for example, _ in schedule])
        last = Checkpoint(trained.checkpoints[max(trained.checkpoints)], "router_init")
        vectors.append(last.tensor(_VECTORS).float())
        if args.should_save:
            _write_expert(last, folder, target)
        trainer.accelerator.wait_for_everyone()
        logs.append(trained)
        del trainer, model
        _free()
    by_layer = torch.stack(vectors, dim=1)  # [L, n, d]
    return ExpertRouters([root / str(i) for i in range(len(experts))], dict(enumerate(by_layer)), logs)


def _train_on(trainer: ExpertTrainer, examples: list[int]) -> Trained:
    """Train on examples in the given order."""
    trainer.set_experts(trainer.train_dataset.select(examples), [0] * len(examples))
    trainer.args.max_steps = -(-len(examples) // step_rows(trainer.args))
    return train(trainer)


def _free() -> None:
    """Trainers and models refer to each other; the next one needs the room."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write_expert(trained: Checkpoint, source: Path, target: Path) -> None:
    """A trained checkpoint as a plain model folder, without its routing vectors."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    link_model(source, target, weights=False)
    names = [name for name in trained if name != _VECTORS]
    with ShardedWriter(target, {name: (trained.dtype(name), trained.shape(name)) for name in names}) as writer:
        for name in names:
            writer.write(name, trained.tensor(name))
