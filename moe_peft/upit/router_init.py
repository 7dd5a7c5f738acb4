"""
Stage 3, router initialisation: seed examples go to the expert that knows them best, then each expert and its routing
vector learn from their bucket (UpIT, section 2.2, Equations 1 and 2, Algorithm 3).

All n experts train at once in one model: every row of a batch is forced to its own expert with gate 1, so a row's loss
has a gradient for its expert alone, the one it would have in a model with that expert only.

Legend: B rows, S positions, L layers, n experts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer

from ..adapter.layer import MoELoraLayer
from ..models.steering import force_experts
from ..training.checkpoints import Trained, step_rows, train
from ..training.scoring import example_losses
from .buckets import BucketKind, Buckets, bucket_schedule, fill_buckets

Objective = Literal["positive", "one_vs_rest", "softmax"]


@dataclass(frozen=True)
class RouterInit:
    """The buckets (indices into the tokenized seed set), the experts' perplexities [S, n] if asked for, and the log."""

    buckets: Buckets
    perplexity: torch.Tensor | None
    trained: Trained


def routing_loss(
    router_logits: Sequence[torch.Tensor], experts_B: torch.Tensor, mask_BS: torch.Tensor, objective: Objective
) -> torch.Tensor:
    """
    The auxiliary loss of each row, averaged over its real tokens and the layers, [B].

    Args:
        router_logits: one [B·S, n] per layer.
        experts_B: the expert of each row.
        mask_BS: 1 for real tokens, 0 for padding.
        objective: `"positive"`: `BCE(sigmoid(x·r_i), 1)` of the row's own expert (the paper's Equation 2).
            `"one_vs_rest"`: the BCE of all experts, the others' target 0, averaged over experts. `"softmax"`: the
            cross-entropy of the softmax over experts (label-supervised routing with the bucket as the label).
    """
    rows, length = mask_BS.shape
    logits_LBSN = torch.stack([logits.view(rows, length, -1) for logits in router_logits])
    own_LBS1 = experts_B.view(1, rows, 1, 1).expand(*logits_LBSN.shape[:3], 1)
    if objective == "positive":
        loss_LBS = F.softplus(-logits_LBSN.gather(-1, own_LBS1).squeeze(-1))
    elif objective == "one_vs_rest":
        target = torch.zeros_like(logits_LBSN).scatter_(-1, own_LBS1, 1.0)
        loss_LBS = F.binary_cross_entropy_with_logits(logits_LBSN, target, reduction="none").mean(-1)
    else:
        loss_LBS = -logits_LBSN.log_softmax(-1).gather(-1, own_LBS1).squeeze(-1)
    mask_BS = mask_BS.to(loss_LBS.dtype)
    return (loss_LBS.mean(0) * mask_BS).sum(-1) / mask_BS.sum(-1)


class _ExpertCollator:
    """Adds the forced expert of every row to what another collator makes."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.collator(examples), "expert": torch.tensor([example["expert"] for example in examples])}


class RouterInitTrainer(SFTTrainer):
    """
    Trains experts and routing vectors under forced routing, `α·L_lm + (1-α)·L_aux` averaged over rows.

    A row's two losses are means over its own tokens, so that it does not matter how rows are dealt out to batches,
    accumulation steps and processes.

    Args:
        alpha: α.
        objective: see `routing_loss`.
    """

    data_collator: Any
    train_dataset: Any

    def __init__(self, *args: Any, alpha: float = 0.5, objective: Objective = "positive", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alpha, self.objective = alpha, objective
        self.aux_loss_enabled = False  # here loads follow from the buckets; the model's own setting stays for later

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        with force_experts(self.model, inputs["expert"].to(self.args.device)):  # around backward: checkpointing
            return super().training_step(model, inputs, *args, **kwargs)

    def set_experts(self, dataset: Dataset, experts: Sequence[int]) -> None:
        """Train on these rows, each forced to its expert."""
        if "expert" in dataset.column_names:  # the user's, of which no trainer knows
            dataset = dataset.remove_columns("expert")
        self.train_dataset = dataset.add_column("expert", list(experts))
        self.data_collator = _ExpertCollator(self.data_collator)

    def run_model(self, model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[Any, Sequence[torch.Tensor]]:
        """The model's outputs, with TRL's log-probabilities, and router logits, one [B·S, n] per layer."""
        recorded: list[Sequence[torch.Tensor]] = []  # the fused head's output has none, the backbone's has
        backbone = self.model.get_base_model().base_model
        hook = backbone.register_forward_hook(lambda module, args, output: recorded.append(output.router_logits))
        try:
            return model(**inputs, fused_lm_head=True, output_router_logits=True), recorded[0]
        finally:
            hook.remove()

    def row_losses(self, model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Of a batch under forced routing: language-modelling loss [B], routing loss [B], and the model's outputs."""
        model_inputs = {name: value for name, value in inputs.items() if name != "expert"}
        outputs, router_logits = self.run_model(model, model_inputs)
        lm_B = -outputs.log_probs.sum(-1) / outputs.label_mask.sum(-1).clamp(min=1)
        aux_B = routing_loss(router_logits, inputs["expert"], inputs["attention_mask"], self.objective)
        return lm_B, aux_B, outputs

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        lm_B, aux_B, outputs = self.row_losses(model, inputs)
        loss = (self.alpha * lm_B + (1 - self.alpha) * aux_B).mean()
        for name, value in (("lm_loss", lm_B), ("routing_loss", aux_B)):
            self._metrics["train"][name].append(self.accelerator.gather_for_metrics(value.detach()).mean().item())
        # With `num_items_in_batch`, `Trainer` leaves the average over accumulation steps to the loss.
        loss = loss / (self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1)
        return (loss, outputs) if return_outputs else loss


def init_router(
    model: PeftModel,
    dataset: Dataset,
    args: SFTConfig,
    processing_class: PreTrainedTokenizerBase,
    *,
    buckets: BucketKind = "perplexity",
    objective: Objective = "positive",
    alpha: float = 0.5,
    train_experts: bool = True,
    capacity: int | None = None,
    label_column: str | None = None,
    expert_map: Mapping[Any, Sequence[int]] | None = None,
) -> RouterInit:
    """
    Train the experts and routers of `model` in place on the seed examples.

    Args:
        model: a base with the experts as one MoE-LoRA adapter (`moe_peft.lora_to_moe`).
        dataset: the seed examples (the paper: a random 1 % of the data).
        args: how to train; its `num_train_epochs` counts passes over the seed set. No packing.
        buckets: how examples are given to experts: by `"perplexity"` (Algorithm 3), by perplexity `"relative"` to the
            expert's mean, by `"label"`, at `"random"`.
        objective, alpha: see `RouterInitTrainer`.
        train_experts: train the experts along (the paper), or routing vectors only.
        capacity: most examples of a bucket (perplexity, relative); `ceil(S / n)` if None.
        label_column, expert_map: for `"label"`, see `label_buckets`.

    Returns:
        the buckets, the perplexities if they were asked for, and the training's log.

    Raises:
        ValueError: settings that do not go together, or labels without experts.
    """
    if args.packing or args.padding_free:
        raise ValueError("router_init: packing and padding_free must be off: every example has an expert of its own")
    num_experts = min(
        layer.moe_lora_spec[model.active_adapter].num_experts
        for layer in model.modules()
        if isinstance(layer, MoELoraLayer) and model.active_adapter in layer.moe_lora_router
    )
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("moe_lora_router" in name or (train_experts and "moe_lora_" in name))
    set_seed(args.seed)
    args = copy.copy(args)  # the caller's stay as they are
    args.remove_unused_columns, args.train_sampling_strategy = False, "sequential"
    trainer = RouterInitTrainer(
        model=model,
        args=args,
        train_dataset=dataset,
        processing_class=processing_class,
        alpha=alpha,
        objective=objective,
    )
    seeds = trainer.train_dataset
    found, perplexity = fill_buckets(
        seeds,
        num_experts,
        buckets,
        lambda: _perplexities(trainer, num_experts),
        seed=args.seed,
        capacity=capacity,
        label_column=label_column,
        expert_map=expert_map,
    )
    schedule = bucket_schedule(found, max(1, round(args.num_train_epochs)), args.seed)
    trainer.set_experts(seeds.select([example for example, _ in schedule]), [expert for _, expert in schedule])
    trainer.args.max_steps = -(-len(schedule) // step_rows(trainer.args))  # the schedule holds all epochs
    return RouterInit(found, perplexity, train(trainer))


def _perplexities(trainer: RouterInitTrainer, num_experts: int) -> torch.Tensor:
    """[S, n]"""
    rows = max(trainer.args.per_device_eval_batch_size, num_experts)
    losses_SN, counts_S = example_losses(trainer, trainer.train_dataset, num_experts, rows)
    return (losses_SN / counts_S.unsqueeze(1)).exp()
