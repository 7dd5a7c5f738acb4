"""
Stage 3, router initialisation: each seed example goes to the expert that knows it best, then every expert and its
routing vector learn from their bucket (UpIT, section 2.2, Equations 1 and 2, Algorithm 3).

All n experts train at once in one model. Every row of a batch is forced to its own expert with gate 1, so that the
row's loss has the gradient that it would have in a model with this expert only.

Legend: B rows, S positions, L layers, n experts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer

from ..messages import one_of
from ..models.steering import force_experts
from ..models.view import RoutedPass, observed_routing, router_parameters, router_sizes
from ..training.checkpoints import Trained, step_rows, train
from ..training.labels import RowCollator
from ..training.scoring import example_losses
from .buckets import Buckets, bucket_schedule, fill_buckets
from .objectives import OBJECTIVES, routing_loss


@dataclass(frozen=True)
class RouterInit:
    """
    The buckets (indices into the tokenized seed set), the experts' perplexities [S, n] if the rule needed them, and
    the training's log.
    """

    buckets: Buckets
    perplexity: torch.Tensor | None
    trained: Trained


class RouterInitTrainer(SFTTrainer):
    """
    Trains experts and routing vectors under forced routing with `α·L_lm + (1-α)·L_aux`, averaged over rows.

    Both losses of a row are means over its own tokens, so the result does not depend on how rows are shared out among
    batches, accumulation steps and processes.

    Args:
        alpha: α.
        objective: a name in `OBJECTIVES`.

    Raises:
        ValueError: the objective is unknown.
    """

    data_collator: Any
    train_dataset: Any

    def __init__(self, *args: Any, alpha: float = 0.5, objective: str = "positive", **kwargs: Any) -> None:
        if objective not in OBJECTIVES:
            raise ValueError(one_of("objective", objective, OBJECTIVES))
        super().__init__(*args, **kwargs)
        self.alpha, self.objective = alpha, objective
        self.aux_loss_enabled = False  # the buckets decide the experts' loads; the model's own setting stays for later

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        with force_experts(
            self.model, inputs["expert"].to(self.args.device)
        ):  # around backward, too: checkpointing runs layers again
            return super().training_step(model, inputs, *args, **kwargs)

    def set_experts(self, dataset: Dataset, experts: Sequence[int]) -> None:
        """Train on these rows, each forced to its expert."""
        if "expert" in dataset.column_names:  # a column of the user's, which no trainer reads
            dataset = dataset.remove_columns("expert")
        self.train_dataset = dataset.add_column("expert", list(experts))
        self.data_collator = RowCollator(self.data_collator, "expert")

    def run_model(self, model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[Any, Sequence[torch.Tensor]]:
        """The model's outputs, with TRL's log-probabilities, and router logits, one [B·S, n] per layer."""
        passes: list[RoutedPass] = []
        with observed_routing(self.model, passes.append):
            outputs = model(**inputs, fused_lm_head=True)
        return outputs, passes[0].router_logits

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
    buckets: str = "perplexity",
    objective: str = "positive",
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
        dataset: the seed examples (in the paper a random 1 % of the data).
        args: how to train; its `num_train_epochs` counts passes over the seed set. No packing.
        buckets: how examples are given to experts, a name in `BUCKETS`: by `"perplexity"` (Algorithm 3), by perplexity
            `"relative"` to the expert's mean, by `"label"`, at `"random"`.
        objective, alpha: see `RouterInitTrainer`.
        train_experts: also train the experts (as in the paper), or the routing vectors only.
        capacity: the most examples in a bucket (perplexity, relative); `ceil(S / n)` if None.
        label_column, expert_map: for `"label"`, see `label_buckets`.

    Returns:
        the buckets, the perplexities if the rule needed them, and the training's log.

    Raises:
        ValueError: settings that do not go together, an unknown name, or labels without experts.
    """
    if args.packing or args.padding_free:
        raise ValueError(
            "router_init: packing and padding_free must be off, because every example has an expert of its own"
        )
    num_experts = min(n for n, _ in router_sizes(model, "router_init"))
    routers = router_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in routers or (train_experts and "moe_lora_" in name))
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
    losses_SN, counts_S = example_losses(trainer.model, trainer.train_dataset, trainer.data_collator, num_experts, rows)
    return (losses_SN / counts_S.unsqueeze(1)).exp()
