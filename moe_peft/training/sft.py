"""
`MoESFTTrainer`: TRL's `SFTTrainer` with losses on the routers, for MoE-LoRA adapters and native MoEs of transformers.

Label-supervised routing: data carries a label (its domain, say), `expert_map` says which experts may serve it, and
routers learn to choose among those. Labels become one per token in preparation, and so survive packing and
padding-free batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from trl import SFTConfig, pack_dataset

from ..models.view import router_parameters, router_sizes
from ..routing.losses import balancing_loss, label_losses, z_losses
from ..routing.statistics import compliance, entropies, expert_counts, load_health
from .resuming import ResumingTrainer

_NO_LABEL = -1
# Where a phase ends, as a share of the training; factors of the learning rate, the balancing loss and the z-loss in it.
_THREE_PHASES = ((0.05, (0.1, 5.0, 2.0)), (0.75, (1.0, 1.0, 1.0)), (1.0, (0.1, 0.5, 0.5)))


@dataclass
class MoESFTConfig(SFTConfig):
    """
    `SFTConfig` and the routers' losses. The balancing loss is `SFTConfig.router_aux_loss_coef`'s.

    Args:
        label_column: the data's column of labels.
        expert_map: label → experts that may serve it.
        router_label_loss_coef: coefficient of label-supervised routing's loss; counts with `expert_map`.
        router_z_loss_coef: coefficient of the z-loss.
        router_balancing: `"global"` pools the tokens of all layers in the balancing loss, `"layer"` does not.
        training_stage: `"joint"` trains everything with all losses. Label-supervised routing has two stages:
            `"routers"` trains routers alone, with the label loss and the z-loss; `"rest"` trains what else is
            trainable, routers frozen, with the language-modelling loss. A trainer of the next stage takes the same
            model as it is.
        router_schedule: `"three_phase"`: 5 % of the steps at a tenth of the learning rate with 5 times the balancing
            loss and twice the z-loss, 70 % as set, 25 % at a tenth with half of both.
    """

    label_column: str | None = field(default=None, metadata={"help": "The data's column of labels."})
    expert_map: dict[str, list[int]] | None = field(default=None, metadata={"help": "Label → experts."})
    router_label_loss_coef: float = field(default=1.0, metadata={"help": "Coefficient of the label loss."})
    router_z_loss_coef: float = field(default=0.0, metadata={"help": "Coefficient of the z-loss."})
    router_balancing: Literal["global", "layer"] = field(default="global", metadata={"help": "Scope of balancing."})
    training_stage: Literal["joint", "routers", "rest"] = field(default="joint", metadata={"help": "What is trained."})
    router_schedule: Literal["constant", "three_phase"] = field(default="constant", metadata={"help": "Phases."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (
            ("router_balancing", ("global", "layer")),
            ("training_stage", ("joint", "routers", "rest")),
            ("router_schedule", ("constant", "three_phase")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"MoESFTConfig: {name}={getattr(self, name)!r}: use one of {list(allowed)}")
        for name in ("router_label_loss_coef", "router_z_loss_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"MoESFTConfig: {name}={getattr(self, name)}: must not be negative")
        if (self.label_column is None) != (self.expert_map is None):
            raise ValueError(
                f"MoESFTConfig: label_column={self.label_column!r}, expert_map={self.expert_map!r}: give both or none"
            )
        if self.training_stage == "routers" and self.expert_map is None:
            raise ValueError("MoESFTConfig: training_stage='routers' needs label_column and expert_map")
        if self.router_schedule == "three_phase" and self.lr_scheduler_type not in ("linear", "constant"):
            raise ValueError(
                f"MoESFTConfig: lr_scheduler_type={self.lr_scheduler_type!r}: the schedule 'three_phase' sets the rate"
            )


class MoESFTTrainer(ResumingTrainer):
    """
    See [`MoESFTConfig`]. Logs `aux_loss`, `router_z_loss`, `router_entropy`, `load_cv`, `dead_experts` and, with
    labels, `router_label_loss` and `compliance`.

    Label loss and z-loss are means over all real tokens of an optimizer step, whatever the accumulation steps and
    processes. The balancing loss is not a mean over tokens: as in TRL it is that of each micro-batch, averaged.

    Raises:
        ValueError: the model has no routers; labels are missing or unknown; `expert_map` names experts that the model
            lacks.
    """

    data_collator: Any
    lr_scheduler: Any
    _signature_columns: Any

    def __init__(self, model: Any, args: MoESFTConfig, *positional: Any, **kwargs: Any) -> None:
        self._labels = list(args.expert_map or {})
        super().__init__(model, args, *positional, **kwargs)
        self._config = self.model.config.get_text_config()
        sizes = router_sizes(self.model, "MoESFTTrainer")
        routers = router_parameters(self.model)
        if args.training_stage == "routers" and not routers:
            raise ValueError("MoESFTTrainer: training_stage='routers': these routers have no parameters; use 'joint'")
        # This class computes the balancing loss itself: TRL would add its own, from all layers pooled.
        self._balancing_coef = self.router_aux_loss_coef
        self.aux_loss_enabled = False
        self._config.output_router_logits = False
        self._sizes = [n for n, _ in sizes]
        if self._labels:
            self._allowed = _allowed_experts(args.expert_map or {}, max(self._sizes))
            self.data_collator = _LabelCollator(self.data_collator)
        _freeze(self.model, routers, args.training_stage)
        self._step_tokens: torch.Tensor | None = None

    # --- labels ---------------------------------------------------------------------------------------------------

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        """TRL's preparation, with the label of each row made one per token before rows are packed."""
        common = (processing_class, formatting_func, dataset_name)
        column = args.label_column
        if column is None or "token_labels" in dataset.column_names:
            return super()._prepare_dataset(dataset, common[0], args, packing, *common[1:])
        self._check_labels(dataset, column, dataset_name)
        unpacked = copy.copy(args)
        if packing:
            unpacked.max_length = None  # packing cuts
        dataset = super()._prepare_dataset(dataset, common[0], unpacked, False, *common[1:])
        index = {label: i for i, label in enumerate(self._labels)}

        def spread(row: dict[str, Any]) -> dict[str, Any]:
            return {"token_labels": [index[str(row[column])]] * len(row["input_ids"])}

        dataset = dataset.map(
            spread, num_proc=args.dataset_num_proc, desc=f"Labelling tokens of {dataset_name} dataset"
        )
        if packing:
            dataset = dataset.select_columns(["input_ids", "labels", "token_labels"])
            dataset = pack_dataset(dataset, args.max_length, args.packing_strategy)
        return dataset

    def _check_labels(self, dataset: Any, column: str, name: str) -> None:
        if not isinstance(dataset, Dataset):
            raise ValueError(f"MoESFTTrainer: label_column={column!r}: the {name} dataset must be a map-style Dataset")
        if column not in dataset.column_names:
            raise ValueError(f"MoESFTTrainer: label_column={column!r}: the {name} dataset has {dataset.column_names}")
        unknown = sorted({str(label) for label in dataset.unique(column)} - set(self._labels))
        if unknown:
            raise ValueError(
                f"MoESFTTrainer: expert_map: no experts for the labels {unknown} of the {name} dataset; add them"
            )

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self._labels and "token_labels" not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, "token_labels"]

    # --- training -------------------------------------------------------------------------------------------------

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        if self.args.router_schedule == "three_phase" and self.lr_scheduler is None:
            rate = {step: phase(step, num_training_steps)[0] for step in range(num_training_steps + 1)}
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, _Rate(rate))
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Also counts the real tokens of the coming optimizer step, over all its batches and processes."""
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        tokens = torch.zeros((), device=device)
        for batch in samples:
            tokens += _real_tokens(batch).sum().to(device)
        self._step_tokens = self.accelerator.reduce(tokens, "sum")
        return samples, items

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        token_labels = inputs.pop("token_labels", None)
        mask_T = _real_tokens({**inputs, "token_labels": token_labels}).flatten()
        inputs["output_router_logits"] = True
        with _recorded_router_logits(self.model) as recorded:
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, *rest = result if return_outputs else (result,)
        loss = self._with_router_losses(loss, recorded[0], mask_T, token_labels, num_items_in_batch is not None)
        return (loss, *rest) if return_outputs else loss

    def _with_router_losses(
        self,
        loss: torch.Tensor,
        router_logits: Sequence[torch.Tensor],
        mask_T: torch.Tensor,
        token_labels: torch.Tensor | None,
        loss_is_of_step: bool,
    ) -> torch.Tensor:
        """Add what the stage trains with, and note what is logged."""
        args, training = self.args, self.model.training
        _, balancing_factor, z_factor = phase(self.state.global_step, self.state.max_steps, args.router_schedule)
        # Sums over this batch's tokens become means over the step's; DDP averages over processes, hence the factor.
        total = mask_T.sum()
        scale = 1.0
        if training and loss_is_of_step and self._step_tokens is not None:
            total, scale = self._step_tokens.to(mask_T.device), float(self.accelerator.num_processes)
        k = int(self._config.num_experts_per_tok)
        balance = balancing_loss(router_logits, k, mask_T, args.router_balancing)
        z_T = z_losses(router_logits)
        noted = {"aux_loss": balance, "router_z_loss": (z_T * mask_T).sum() / mask_T.sum()}
        noted["router_entropy"] = (entropies(router_logits).mean(0) * mask_T).sum() / mask_T.sum()
        if args.training_stage == "routers":
            loss = loss.detach() * 0
        if args.training_stage != "rest":
            loss = loss + args.router_z_loss_coef * z_factor * scale * (z_T * mask_T).sum() / total
        if args.training_stage == "joint":
            steps = self.current_gradient_accumulation_steps if training and loss_is_of_step else 1
            loss = loss + self._balancing_coef * balancing_factor * balance / steps
        if token_labels is not None:
            known_T = mask_T * (token_labels.flatten() != _NO_LABEL)
            allowed_TN = self._allowed.to(mask_T.device)[token_labels.flatten().clamp(min=0)]
            label_T = label_losses(router_logits, allowed_TN)
            if args.training_stage != "rest":
                loss = loss + args.router_label_loss_coef * scale * (label_T * known_T).sum() / total
            noted["router_label_loss"] = (label_T * known_T).sum() / known_T.sum()
            noted["compliance"] = (compliance(router_logits, allowed_TN).mean(0) * known_T).sum() / known_T.sum()
        self._note(noted, router_logits, mask_T, k)
        return loss

    @torch.no_grad()
    def _note(
        self, noted: dict[str, torch.Tensor], router_logits: Sequence[torch.Tensor], mask_T: torch.Tensor, k: int
    ) -> None:
        metrics = self._metrics["train" if self.model.training else "eval"]
        counts_LN = torch.stack([expert_counts(logits_TN, mask_T, k) for logits_TN in router_logits])
        health = load_health(self.accelerator.reduce(counts_LN, "sum").cpu(), self._sizes)
        values = self.accelerator.reduce(torch.stack([value.detach().float() for value in noted.values()]), "mean")
        for name, value in zip(noted, values.tolist(), strict=True):
            metrics[name].append(value)
        metrics["load_cv"].append(health.coefficient_of_variation)
        metrics["dead_experts"].append(float(health.dead))


def phase(step: int, steps: int, schedule: str = "three_phase") -> tuple[float, float, float]:
    """Factors of the learning rate, the balancing loss and the z-loss at a step of `steps`."""
    if schedule == "constant" or steps <= 0:
        return 1.0, 1.0, 1.0
    return next((factors for end, factors in _THREE_PHASES if step < end * steps), _THREE_PHASES[-1][1])


class _Rate:
    """The learning rate's factor at a step (a class, so that it pickles)."""

    def __init__(self, factors: Mapping[int, float]) -> None:
        self.factors = factors

    def __call__(self, step: int) -> float:
        return self.factors[step]


class _LabelCollator:
    """Adds `token_labels` in the shape of `input_ids`, -1 at padding."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(examples)
        if "token_labels" not in examples[0]:
            return batch
        labels = [torch.tensor(example["token_labels"]) for example in examples]
        rows, length = batch["input_ids"].shape
        if rows == 1:
            labels = [torch.cat(labels)]  # padding-free
        padded = pad_sequence(labels, batch_first=True, padding_value=_NO_LABEL)
        whole = torch.full((rows, length), _NO_LABEL)
        whole[:, : padded.shape[1]] = padded
        return {**batch, "token_labels": whole}


def _real_tokens(batch: Mapping[str, Any]) -> torch.Tensor:
    """1 for tokens, 0 for padding, [B, S]. Padding-free batches have no mask; they are padded at the end at most."""
    if batch.get("attention_mask") is not None:
        return batch["attention_mask"]
    if batch.get("token_labels") is not None:
        return (batch["token_labels"] != _NO_LABEL).long()
    return torch.ones_like(batch["input_ids"])


def _allowed_experts(expert_map: Mapping[str, Sequence[int]], n: int) -> torch.Tensor:
    """m, bool [labels, n]."""
    allowed = torch.zeros(len(expert_map), n, dtype=torch.bool)
    for row, (label, experts) in enumerate(expert_map.items()):
        if not experts or not all(0 <= i < n for i in experts):
            raise ValueError(f"MoESFTTrainer: expert_map: {label!r}: {list(experts)}: name experts from 0 to {n - 1}")
        allowed[row, list(experts)] = True
    return allowed


def _freeze(model: nn.Module, routers: Mapping[str, nn.Parameter], stage: str) -> None:
    """
    Freeze what the stage does not train; what an earlier stage froze is trainable again. The model keeps a note, as
    routers may have been made anew since.

    Raises:
        ValueError: nothing is left to train.
    """
    before = model.__dict__.pop("_moe_stage", None)
    for name, parameter in model.named_parameters():
        if before is not None and (name in before["names"] or (before["routers"] and name in routers)):
            parameter.requires_grad_(True)
    frozen = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and stage != "joint" and (name in routers) == (stage == "rest")
    }
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    if frozen:
        names = frozen.keys() - routers.keys()
        model.__dict__["_moe_stage"] = {"names": names, "routers": bool(frozen.keys() & routers.keys())}
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"MoESFTTrainer: training_stage={stage!r}: nothing is left to train; unfreeze what it trains")


@contextmanager
def _recorded_router_logits(model: Any) -> Iterator[list[Sequence[torch.Tensor]]]:
    """The router logits that the backbone returns; TRL's fused head does not hand them on."""
    recorded: list[Sequence[torch.Tensor]] = []
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    hook = base.base_model.register_forward_hook(lambda module, args, output: recorded.append(output.router_logits))
    try:
        yield recorded
    finally:
        hook.remove()
