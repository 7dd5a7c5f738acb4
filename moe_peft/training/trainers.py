"""
`MoESFTTrainer` and `MoEDPOTrainer`: TRL's trainers with router losses, for MoE-LoRA adapters and native MoEs.

Label-supervised routing: each example has a label (such as its domain), and `expert_map` lists the experts of each
label. Routers learn to choose among these experts, or can choose no others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer, pack_dataset

from ..models.layer import routed_layers
from ..models.steering import common_size, fewest_allowed
from ..routing.expert_map import check_allowed, expert_masks, label_text, read_expert_map
from ..utils.distributed import is_sharded
from ..utils.loading import changed_embeddings, read_config, read_tokenizer
from ..utils.messages import InputError
from .data import check_answers, check_learnable
from .labels import COLUMN, LabelCollator, check_labels, with_token_labels
from .mixins import NativeResumeMixin
from .router_config import RouterLossConfig, trains_adapter
from .router_losses import RouterLossesMixin

# --- sft -------------------------------------------------------------------------------------------------------------


@dataclass
class MoESFTConfig(RouterLossConfig, SFTConfig):
    """
    `SFTConfig` with the fields of `RouterLossConfig` and labels.

    Args:
        router_aux_loss_coef, router_z_loss_coef, …: see `RouterLossConfig` for the fields of router losses, and
            `SFTConfig` for all others.
        label_column: the data's column with the labels.
        expert_map: label → its experts: their indices, or masks with 0 or 1 for every expert (see
            `moe_peft.routing.read_expert_map`). Labels are compared as text.

    Raises:
        ValueError: fields contradict each other.
    """

    label_column: str | None = field(default=None, metadata={"help": "The data's label column."})
    expert_map: dict[str, list[int]] | None = field(default=None, metadata={"help": "Label → experts."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.label_column is None) != (self.expert_map is None):
            raise InputError(f"label_column={self.label_column!r}, expert_map={self.expert_map!r}: set both or neither")
        if self.training_stage == "routers" and self.expert_map is None:
            raise InputError("training_stage='routers' needs label_column and expert_map")


class MoESFTTrainer(RouterLossesMixin, NativeResumeMixin, SFTTrainer):
    """
    `SFTTrainer` with router losses; see `MoESFTConfig` and `RouterLossesMixin`. A plain `SFTConfig` suffices if no
    field of `MoESFTConfig` is needed.

    Args:
        model: a model with or without an adapter, or its name.
        args: training arguments.
        kwargs: the other arguments of `SFTTrainer`, such as `train_dataset` and `peft_config`.

    Raises:
        ValueError: the model has no routers; labels are missing or unknown; `expert_map` names experts that the model
            lacks; an adapter would not fit its base model with the tokens of `chat_template_path`.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
    >>> trainer = MoESFTTrainer(
    ...     "Qwen/Qwen3-0.6B",
    ...     MoESFTConfig(
    ...         "out", max_steps=1, router_z_loss_coef=0.001, use_cpu=True
    ...     ),
    ...     train_dataset=load_dataset(
    ...         "json", data_files="train.jsonl", split="train"
    ...     ),
    ...     peft_config=MoELoraConfig(
    ...         task_type="CAUSAL_LM", num_experts=4, top_k=2, r=8
    ...     ),
    ... )
    >>> result = trainer.train()
    ```
    """

    data_collator: Any
    _signature_columns: Any

    def __init__(self, model: Any, args: SFTConfig | None = None, *positional: Any, **kwargs: Any) -> None:
        dataset = kwargs.get("train_dataset", positional[1] if len(positional) > 1 else None)
        args = _as_moe_config(args)
        unmarked = bool(args.packing or args.padding_free) and args.label_column is None
        check_padding(args.pad_to_multiple_of, unmarked)
        check_answers("", dataset, args.completion_only_loss, args.assistant_only_loss)
        self._labels = [label_text(label) for label in args.expert_map or {}]
        _check_template(model, args, (*positional, *kwargs.values()))
        super().__init__(model, args, *positional, **kwargs)
        check_learnable("", self.train_dataset, args)
        if args.expert_map is not None:
            columns = getattr(self.train_dataset, "column_names", None)
            if columns and COLUMN not in columns:
                raise InputError(
                    "dataset_kwargs: with skip_prepare_dataset, no token gets the label of its row; leave it out, or "
                    f"give a column {COLUMN}"
                )
            self._allowed = expert_masks(_experts_of_labels(self.model, args), max(self._sizes))
            self.data_collator = LabelCollator(self.data_collator)

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        """Prepare a dataset as TRL does. Before packing, repeat each row's label for its tokens."""
        column = args.label_column
        if column is None:
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        if COLUMN in dataset.column_names:
            raise InputError(
                f"{COLUMN}: the {dataset_name} dataset has this column, which label_column creates; rename it"
            )
        check_labels(dataset, column, self._labels, dataset_name)
        unpacked = copy.copy(args)
        if packing:
            unpacked.max_length = None  # packing limits the length
        dataset = super()._prepare_dataset(dataset, processing_class, unpacked, False, formatting_func, dataset_name)
        description = f"Labeling tokens of {dataset_name} dataset"
        dataset = with_token_labels(dataset, column, self._labels, args.dataset_num_proc, description)
        if packing:
            dataset = dataset.select_columns(["input_ids", "labels", COLUMN])
            dataset = pack_dataset(dataset, args.max_length, args.packing_strategy)
        return dataset

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self._labels and COLUMN not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, COLUMN]


def _check_template(model: Any, args: MoESFTConfig, others: Sequence[Any]) -> None:
    """Raise if another tokenizer's chat template would give a MoE-LoRA adapter that does not fit its base model."""
    if args.chat_template_path is None or not trains_adapter((model, *others)):
        return
    config = read_config(model, f"model={model!r}") if isinstance(model, str) else model.config
    tokenizer = next((other for other in others if isinstance(other, PreTrainedTokenizerBase)), None)
    if tokenizer is None:  # then TRL's choice
        tokenizer = read_tokenizer(config.name_or_path, "processing_class=None")
    change = changed_embeddings(args.chat_template_path, "chat_template_path", tokenizer, config)
    if change is not None:
        raise InputError(change)


def _experts_of_labels(model: Any, args: MoESFTConfig) -> dict[str, list[int]]:
    """Return label → indices of its experts."""
    sizes = [layer.num_experts for layer in routed_layers(model, "MoESFTTrainer")]
    expert_map = read_expert_map(args.expert_map or {}, max(sizes), "expert_map")
    for label, experts in expert_map.items():
        if min(experts) >= min(sizes):
            raise InputError(
                f"expert_map: {label!r} has experts {list(experts)}, but a layer has only {min(sizes)}; give it "
                f"one of the first {min(sizes)}"
            )
    if args.router_label_mask:
        common_size(model, "router_label_mask=True")
        check_allowed(expert_map, fewest_allowed(model), "router_label_mask=True")
    return expert_map


def check_padding(pad_to_multiple_of: int | None, unmarked: bool) -> None:
    """
    Raise for padding that nothing marks: routers would be trained on it.

    Args:
        unmarked: True if rows are packed, and no labels mark the real tokens.
    """
    if pad_to_multiple_of and unmarked:
        raise InputError(
            f"pad_to_multiple_of={pad_to_multiple_of}: nothing marks this padding in packed rows, so routers "
            "would be trained on it; leave it out"
        )


def _as_moe_config(args: SFTConfig | None) -> MoESFTConfig:
    """Return the trainer's config: a plain `SFTConfig` is converted, None gives the defaults."""
    if args is None:
        return MoESFTConfig()
    if isinstance(args, MoESFTConfig):
        return args
    return MoESFTConfig(**{f.name: getattr(args, f.name) for f in fields(args) if f.init})


# --- dpo -------------------------------------------------------------------------------------------------------------


@dataclass
class MoEDPOConfig(RouterLossConfig, DPOConfig):
    """
    `DPOConfig` with the fields of `RouterLossConfig`. Losses that need labels are skipped.

    Args:
        router_aux_loss_coef, router_z_loss_coef, …: see `RouterLossConfig`, and `DPOConfig` for all others.
    """


class MoEDPOTrainer(RouterLossesMixin, NativeResumeMixin, DPOTrainer):
    """
    `DPOTrainer` with router losses; see `MoEDPOConfig` and `RouterLossesMixin`.

    Args:
        model: a model with or without an adapter, or its name.
        ref_model: the reference model. None, without an adapter: a copy of `model`; TRL would load the checkpoint named
            in its config.
        kwargs: the other arguments of `DPOTrainer`, such as `args`, `train_dataset` and `peft_config`.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from moe_peft import MoEDPOConfig, MoEDPOTrainer, MoELoraConfig
    >>> pairs = [
    ...     {
    ...         "prompt": "The sky is",
    ...         "chosen": " blue.",
    ...         "rejected": " a kind of cheese.",
    ...     }
    ... ] * 8
    >>> trainer = MoEDPOTrainer(
    ...     "Qwen/Qwen3-0.6B",
    ...     args=MoEDPOConfig("out", max_steps=1, use_cpu=True),
    ...     train_dataset=Dataset.from_list(pairs),
    ...     peft_config=MoELoraConfig(
    ...         task_type="CAUSAL_LM", num_experts=4, top_k=2, r=8
    ...     ),
    ... )
    >>> result = trainer.train()
    ```
    """

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **kwargs: Any) -> None:
        without_adapter = isinstance(model, PreTrainedModel) and kwargs.get("peft_config") is None
        # TRL precomputes with the policy itself, before training. A copy of a model sharded by ZeRO-3 would be empty.
        precomputes = getattr(args, "precompute_ref_log_probs", False)
        if ref_model is None and without_adapter and not precomputes and not any(map(is_sharded, model.parameters())):
            ref_model = _copied(model)
        super().__init__(model, ref_model, args, **kwargs)
        check_learnable("", self.train_dataset, self.args)


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    """Copy a model with its class's forward; an earlier trainer may have patched the model's forward."""
    forward = model.__dict__.pop("forward", None)
    try:
        return copy.deepcopy(model)
    finally:
        if forward is not None:
            model.forward = forward
