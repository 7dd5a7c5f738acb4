"""
Stage 3, router initialization (UpIT, section 2.2, Equations 1 and 2, Algorithms 1 and 3). By default, each seed example
goes to the expert with the lowest perplexity on it. Then every expert and its routing vectors are trained on their
bucket, one expert after the other.

An expert is a LoRA adapter on the frozen base model, or a dense model with only its FFNs trained. Each is trained by
itself: gate 1, all other experts absent, with a separate optimizer, schedule and clipping. The routing vectors of
expert i become row i of each router.

Legend: B rows, S positions, M routed modules (a model's FFNs), n experts, d hidden units.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from datasets import Dataset
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer

from ..native.folders import LoraFolder, open_folder
from ..training.data import IGNORED, check_learnable
from ..training.mixins import FiniteWeightsMixin
from ..training.preparation import for_one_trainer, tokenized
from ..training.resuming import Trained, train
from ..training.router_losses import RouterLog
from ..training.scoring import Collator, example_losses
from ..training.trainable import give_rate
from ..utils.compat import loss_is_of_whole_step
from ..utils.distributed import on_main_process
from ..utils.io import atomic_write
from ..utils.loading import without_zero3
from ..utils.torch_contexts import free_memory
from ..utils.validation import prefixed
from .buckets import BUCKETS, Buckets, Seeds
from .dense_experts import DenseStageKind
from .experts import ExpertKind, Load
from .files import expert_folders
from .lora_experts import LoraStageKind
from .recipe import TRAINED
from .routing_vectors import is_vector, moved, record_scores

logger = logging.getLogger("moe_peft")

# --- training of one expert ------------------------------------------------------------------------------------------


class RouterInitTrainer(FiniteWeightsMixin, SFTTrainer):
    """
    Trains one expert and its routing vectors with `α·L_lm + (1-α)·L_aux`. L_lm is the mean over the answer tokens of an
    optimizer step, as in TRL. L_aux is the mean of `BCE(sigmoid(x·r), 1)` over all real tokens of the step and the
    routed modules.

    Args:
        names: the routed modules.
        alpha: α.
        router_learning_rate: constant learning rate of the routing vectors; None: the experts' rate and schedule.
    """

    def __init__(
        self,
        model: Any,
        *args: Any,
        names: Sequence[str],
        alpha: float,
        router_learning_rate: float | None,
        **kwargs: Any,
    ) -> None:
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        self.scores, self.alpha = record_scores(base, names), alpha
        self.router_learning_rate = router_learning_rate
        super().__init__(model, *args, **kwargs)
        self.log_of_losses = RouterLog(self, ())

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the optimizer, with separate parameter groups for the routing vectors."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        rate = self.router_learning_rate
        if is_new and rate is not None:
            vectors = (p for name, p in self.model.named_parameters() if is_vector(name))
            self.groups_of_vectors = give_rate(optimizer, vectors, rate)
        return optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = super().create_scheduler(*args, **kwargs)
        rate = self.router_learning_rate
        if rate is not None and isinstance(scheduler, LambdaLR):
            for i in self.groups_of_vectors:
                scheduler.lr_lambdas[i] = _constant
                scheduler.optimizer.param_groups[i]["lr"] = rate  # warm-up would start at 0
        return scheduler

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> Any:
        """Return the batches of an optimizer step. Count its tokens over all processes."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = torch.stack([
            torch.stack([(batch["labels"][:, 1:] != IGNORED).sum(), batch["attention_mask"].sum()]) for batch in batches
        ])  # fmt: skip
        of_step = self.accelerator.reduce(counts.sum(0).to(device), "sum").clamp(min=1)
        self.answers_in_step, self.tokens_in_step = of_step
        return batches, num_items

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log also the two losses."""
        self.log_of_losses.add_to(logs)
        super().log(logs, *args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        self.scores.clear()
        outputs = model(**inputs, fused_lm_head=True)
        mask_BS = inputs["attention_mask"]
        # In some models, the FFN's linears get flattened tokens.
        scores_MBS = torch.stack([score.view_as(mask_BS).to(outputs.log_probs.device) for score in self.scores])
        lm_loss = -outputs.log_probs.sum()
        routing_loss = (F.softplus(-scores_MBS).mean(0) * mask_BS).sum()  # -log(sigmoid(x·r))
        loss = self.alpha * lm_loss / self.answers_in_step + (1 - self.alpha) * routing_loss / self.tokens_in_step
        self.log_of_losses.note({
            "lm_loss": (lm_loss, outputs.label_mask.sum()),
            "routing_loss": (routing_loss, mask_BS.sum()),
        })  # fmt: skip
        # Gradients are averaged over processes, and over accumulation steps unless the loss is of the complete step.
        loss = loss * self.args.world_size
        if not loss_is_of_whole_step(self, num_items_in_batch):
            loss = loss * self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


def _constant(step: int) -> float:
    return 1.0


# --- the stage -------------------------------------------------------------------------------------------------------


def kind_of(folder: Path) -> type[ExpertKind]:
    """Return the kind of the expert in a folder."""
    return LoraStageKind if isinstance(open_folder(folder, "experts"), LoraFolder) else DenseStageKind


@dataclass(frozen=True)
class InitialRouters:
    """
    Results of stage 3.

    Args:
        experts: folders of the trained experts.
        routers: the routers' weights [n, d], one for each routed module in the model's order.
        buckets: each expert's indices into the seed examples.
        perplexity: perplexity of every expert on every seed example, [S, n]; None if the rule does not need it.
        trained: the trainings of the experts with examples.
        steps: steps of each expert.
        moved: distance of each expert's routing vectors from their start, relative to the start's length, mean of the
            modules.
    """

    experts: list[Path]
    routers: list[torch.Tensor]
    buckets: Buckets
    perplexity: torch.Tensor | None
    trained: list[Trained]
    steps: list[int]
    moved: list[float]


def init_routers(
    load: Load,
    experts: Sequence[str | Path],
    dataset: Dataset,
    args: SFTConfig,
    processing_class: PreTrainedTokenizerBase,
    *,
    output_dir: str | Path,
    buckets: str = "perplexity",
    gates: str = "vectors",
    alpha: float = 0.5,
    router_learning_rate: float | None = 1e-2,
    train_experts: bool = True,
    label_column: str | None = None,
    expert_map: Mapping[Any, Sequence[int]] | None = None,
) -> InitialRouters:
    """
    Assign the seed examples to experts, then train each expert and its routing vectors on its bucket (UpIT, Algorithms
    1 and 3).

    If the training was stopped, the next call resumes it.

    Args:
        load: returns the dense model of an expert's folder; for a LoRA adapter its base model, without adapters. It is
            called for every expert, and one model is in memory at a time.
        experts: n folders: LoRA adapters of one base, or dense models of one architecture.
        dataset: the seed examples (in the paper a random 1 % of the data), in random order: `"perplexity"` fills its
            buckets in the order given.
        args: training arguments of each expert; `num_train_epochs` counts passes over its bucket.
        processing_class: the tokenizer.
        output_dir: gets `experts/0`, …, adapter or model folders. The trainings' state goes to `args.output_dir`.
        buckets: how examples are assigned to experts, a name in `BUCKETS`: `"perplexity"`, `"label"` or `"random"`.
        gates: `"vectors"` trains routing vectors. `"ridge"` and `"prompts"` compute the routers from the buckets, as
            texts of their experts (see `moe_peft.init_gates`), and leave the experts unchanged.
        alpha: weight of the language-modeling loss; the routing loss has 1 - alpha.
        router_learning_rate: constant learning rate of the routing vectors, whatever the experts' schedule. At the
            experts' rate they stay nearly random in few steps. None: the experts' rate and schedule.
        train_experts: False trains only the routing vectors.
        label_column: the column of labels, for `"label"`.
        expert_map: label → experts, for `"label"`; see `label_buckets`.

    Returns:
        the experts' folders, the routers' weights, the buckets and the logs. An expert without examples stays
        unchanged, and its routing vectors are random.
    """
    sources = [Path(expert) for expert in experts]
    targets, kind = expert_folders(Path(output_dir), len(sources)), kind_of(sources[0])
    args = copy.copy(args)
    args.packing = args.padding_free = False  # each example needs separate perplexities and one bucket
    data, collator = tokenized(dataset, processing_class, args)
    check_learnable("init_routers", data, args)
    rule, perplexity_SN = BUCKETS[buckets], None
    if rule.needs_perplexities:
        models = kind.scored(load, sources)
        perplexity_SN = _perplexities(models, sources, data, collator, Path(str(args.output_dir)))
    labels = data[label_column] if rule.needs_labels else None
    filled = rule.fill(Seeds(len(data), len(sources), args.seed, perplexity_SN, labels, expert_map))
    if gates != TRAINED:
        with prefixed(f"router_init.gates={gates!r}"), without_zero3():
            routers = kind.gates(load, sources, gates, _texts(data, collator, filled))
        return InitialRouters(sources, routers, filled, perplexity_SN, [], [0] * len(sources), [0.0] * len(sources))
    names: list[str] = []
    vectors, logs = [], []
    steps, moves = [0] * len(sources), [0.0] * len(sources)
    for i, (source, target, bucket) in enumerate(zip(sources, targets, filled, strict=True)):
        expert_args = _expert_arguments(args, i)  # before the model is loaded, for ZeRO-3 to shard it
        set_seed(expert_args.seed)
        model: Any = load(source)
        names = names or kind.routed_modules(model, sources)
        model = kind.add_vectors(model, source, names, expert_args.seed)
        if bucket:
            kind.train(model, train_experts)
            trainer = RouterInitTrainer(
                model, expert_args, train_dataset=data.select(bucket), processing_class=processing_class,
                names=names, alpha=alpha, router_learning_rate=router_learning_rate,
            )  # fmt: skip
            trained = train(trainer, alpha=alpha, router_learning_rate=router_learning_rate)
            logs.append(trained)
            vectors.append(kind.vectors(trained.last, len(names)))
            steps[i], moves[i] = max(trained.checkpoints), moved(vectors[-1], expert_args.seed)
            logger.info(
                "expert %d: %d steps; its routing vectors moved by %.0f %% of their length", i, steps[i], 100 * moves[i]
            )
            if args.should_save:
                kind.without_vectors(trained.last, source, target)
            del trainer
        else:
            vectors.append([p.detach().float().cpu() for name, p in model.named_parameters() if is_vector(name)])
            if args.should_save:
                kind.copy(source, target)
        PartialState().wait_for_everyone()
        del model  # one model in memory at a time
        free_memory()
    routers = [torch.stack(rows) for rows in zip(*vectors, strict=True)]
    return InitialRouters(targets, routers, filled, perplexity_SN, logs, steps, moves)


def _texts(data: Dataset, collator: Collator, buckets: Buckets, batch_size: int = 8) -> Iterator[dict[str, Any]]:
    """Yield batches of all buckets' examples, each with its expert."""
    texts = [(example, expert) for expert, bucket in enumerate(buckets) for example in bucket]
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        batch = collator([data[example] for example, _ in part])
        kept = {name: batch[name] for name in ("input_ids", "attention_mask")}
        yield {**kept, "expert": torch.tensor([expert for _, expert in part])}


def _expert_arguments(args: SFTConfig, expert: int) -> SFTConfig:
    """Return the arguments of one expert's training."""
    expert_args = for_one_trainer(args)
    expert_args.output_dir = str(Path(str(args.output_dir)) / f"expert-{expert}")
    expert_args.seed = expert_args.data_seed = args.seed + expert
    expert_args.dataloader_drop_last = False  # a bucket may be smaller than a batch
    return expert_args


def _perplexities(
    models: Iterator[Any], experts: Sequence[Path], data: Dataset, collator: Collator, state: Path
) -> torch.Tensor:
    """
    Return each expert's perplexity on each example, [S, n]. A resumed run reads it from `state`, for equal buckets.
    """
    path = state / "perplexity.safetensors"
    files = sorted(path for expert in experts for path in expert.glob("*.safetensors"))
    versions = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps([list(data["input_ids"]), versions]).encode()).hexdigest()
    if path.is_file():
        with safe_open(path, framework="pt") as file:
            if file.metadata() == {"examples": digest}:
                return file.get_tensor("perplexity")
    columns = []
    for model in models:
        losses_S, counts_S = example_losses(model, data, collator)
        columns.append((losses_S / counts_S).exp())
        del model
        free_memory()
    free_memory()  # frees the LoRAs' base, held by the generator
    perplexity_SN = torch.stack(columns, dim=1)
    on_main_process(lambda: _save_perplexity(path, perplexity_SN, digest))
    return perplexity_SN


def _save_perplexity(path: Path, perplexity_SN: torch.Tensor, digest: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        save_file({"perplexity": perplexity_SN.contiguous()}, partial, metadata={"examples": digest})
