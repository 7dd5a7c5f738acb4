"""
Stage 3, router initialisation: each seed example goes to the expert that knows it best, then every expert and its
routing vector learn from their bucket (UpIT, section 2.2, Equations 1 and 2, Algorithm 3).

All n experts train at once in one model, and each as it would in a training of its own. Every row of a batch is forced
to its own expert with gate 1, so that the row's loss has the gradient that it would have in a model with this expert
only. An optimizer step holds a batch of *each* expert, so that an expert takes the steps of its own training, and not
n times as many from parts of a batch; `OwnUpdates` sees to clipping and to experts with fewer steps than others.

Legend: B rows, S positions, L layers, n experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer

from ..checks import COUNT, FLAG, SHARE, TEXT, Rule, check
from ..compat import loss_is_of_whole_step
from ..messages import one_of
from ..models.steering import force_experts
from ..models.view import RoutedPass, observed_routing, router_parameters, router_sizes
from ..training.arguments import check_learnable, check_training, for_one_trainer
from ..training.checkpoints import Trained, step_rows, train
from ..training.labels import IGNORED, RowCollator
from ..training.router_log import RouterLog
from ..training.saving import FiniteWeightsMixin
from ..training.scoring import example_losses
from .buckets import BUCKETS, Buckets, expert_batches, fill_buckets
from .objectives import OBJECTIVES, routing_loss
from .own_updates import OwnUpdates, refuse_optimizer

# Of each row: its expert, and the answer tokens and all tokens of the expert's batch (0: a filler).
_COLUMNS = ("expert", "answer_tokens", "tokens")


@dataclass(frozen=True)
class RouterInit:
    """
    The buckets (indices into the tokenized seed set), the experts' perplexities [S, n] if the rule needed them, and
    the training's log.
    """

    buckets: Buckets
    perplexity: torch.Tensor | None
    trained: Trained


class RouterInitTrainer(FiniteWeightsMixin, SFTTrainer):
    """
    Trains experts and routing vectors under forced routing with `α·L_lm + (1-α)·L_aux`. Of an expert's batch, L_lm is
    the mean over its answer tokens, as in TRL's own training, and L_aux over all its real tokens.

    The loss of a step is the sum over experts. It does not depend on how rows are shared out among accumulation steps
    and processes.

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
        check_learnable("router_init", self.train_dataset, self.args)
        self.alpha, self.objective, self.log_of_losses = alpha, objective, RouterLog(self, ())
        self.aux_loss_enabled = False  # the buckets decide the experts' loads; the model's own setting stays for later

    def set_batches(self, batches: Sequence[Sequence[Sequence[int]]]) -> None:
        """
        Train on these batches of the training data: step t takes batch t of every expert that has one.

        The rows of a step fill as many micro-batches of `per_device_train_batch_size` rows as the largest step needs;
        rows of weight 0 fill up the others.

        Args:
            batches: expert → batches → indices into the training data.
        """
        counts = {i: self._count_tokens(i) for own in batches for batch in own for i in batch}
        steps: list[list[tuple[int, ...]]] = [[] for _ in range(max(map(len, batches)))]
        for expert, own in enumerate(batches):
            for step, batch in zip(steps, own, strict=False):
                totals = [sum(column) for column in zip(*(counts[i] for i in batch), strict=True)]
                step.extend((i, expert, *totals) for i in batch)
        micro = self.args.per_device_train_batch_size * self.args.world_size
        accumulated = -(-max(map(len, steps)) // micro)
        rows = [row for step in steps for row in step + [(*step[0][:2], 0, 0)] * (accumulated * micro - len(step))]
        examples, *columns = (list(column) for column in zip(*rows, strict=True))
        dataset = self.train_dataset.select(examples)
        dataset = dataset.remove_columns([name for name in _COLUMNS if name in dataset.column_names])  # a user's own
        for name, values in zip(_COLUMNS, columns, strict=True):
            dataset = dataset.add_column(name, values)
        self.train_dataset = dataset
        self.data_collator = RowCollator(self.data_collator, *_COLUMNS)
        self.args.gradient_accumulation_steps, self.args.max_steps = accumulated, len(steps)
        self.experts_in_step = [sum(t < len(own) for own in batches) for t in range(len(steps))]

    def _count_tokens(self, example: int) -> tuple[int, int]:
        """The tokens that an example's losses are on: of the answer, and all."""
        batch = self.data_collator([self.train_dataset[example]])
        return int((batch["labels"][:, 1:] != IGNORED).sum()), int(batch["attention_mask"].sum())

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        with force_experts(
            self.model, inputs["expert"].to(self.args.device)
        ):  # around backward, too: checkpointing runs layers again
            loss = super().training_step(model, inputs, *args, **kwargs)
        return loss / self.experts_in_step[self.state.global_step]  # for the log: the mean over experts

    def run_model(self, model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[Any, Sequence[torch.Tensor]]:
        """The model's outputs, with TRL's log-probabilities, and router logits, one [B·S, n] per layer."""
        passes: list[RoutedPass] = []
        with observed_routing(self.model, passes.append):
            outputs = model(**inputs, fused_lm_head=True)
        return outputs, passes[0].router_logits

    def row_losses(self, model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Of a batch under forced routing: the rows' sums of both losses over tokens, [B], and the model's outputs."""
        model_inputs = {name: value for name, value in inputs.items() if name not in _COLUMNS}
        outputs, router_logits = self.run_model(model, model_inputs)
        lm_B = -outputs.log_probs.sum(-1)
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
        answers_B, tokens_B = (inputs[name].clamp(min=1).to(lm_B.dtype) for name in _COLUMNS[1:])
        counts_B = inputs["tokens"] > 0
        loss = (counts_B * (self.alpha * lm_B / answers_B + (1 - self.alpha) * aux_B / tokens_B)).sum()
        self.log_of_losses.note({
            "lm_loss": ((lm_B * counts_B).sum(), (outputs.label_mask.sum(-1) * counts_B).sum()),
            "routing_loss": ((aux_B * counts_B).sum(), (inputs["attention_mask"].sum(-1) * counts_B).sum()),
        })  # fmt: skip
        # Gradients are averaged over processes, and over accumulation steps unless the loss is of the whole step.
        loss = loss * self.args.world_size
        if not loss_is_of_whole_step(self, num_items_in_batch):
            loss = loss * self.current_gradient_accumulation_steps
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
        dataset: the seed examples (in the paper a random 1 % of the data), in random order: rules with a capacity
            visit them in the order given.
        args: how to train each expert: `num_train_epochs` passes over its bucket, in batches of
            `per_device_train_batch_size` × `gradient_accumulation_steps` × processes of its own examples. Schedules
            other than constant have the length of the longest training. No packing.
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
    check_training("init_router", model, dataset, args, processing_class)
    check(
        "init_router",
        buckets=(buckets, Rule(lambda v: isinstance(v, str), f"use one of {', '.join(BUCKETS)}")),
        objective=(objective, Rule(lambda v: isinstance(v, str), f"use one of {', '.join(OBJECTIVES)}")),
        alpha=(alpha, SHARE),
        train_experts=(train_experts, FLAG),
        capacity=(capacity, COUNT.or_none()),
        label_column=(label_column, TEXT.or_none()),
    )
    _check(args)
    num_experts = min(n for n, _ in router_sizes(model, "router_init"))
    routers = router_parameters(model)
    if not routers:
        raise ValueError("router_init: these routers have no parameters to initialise; use another router_type")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in routers or (train_experts and "moe_lora_" in name))
    set_seed(args.seed)
    args = for_one_trainer(args)  # the caller's stay as they are
    args.remove_unused_columns, args.train_sampling_strategy = False, "sequential"
    trainer = RouterInitTrainer(
        model=model, args=args, train_dataset=dataset, processing_class=processing_class,
        alpha=alpha, objective=objective,
    )  # fmt: skip
    found, perplexity = fill_buckets(
        trainer.train_dataset,
        num_experts,
        buckets,
        lambda: _perplexities(trainer, num_experts),
        seed=args.seed,
        capacity=capacity,
        label_column=label_column,
        expert_map=expert_map,
    )
    _set_buckets(trainer, found)
    return RouterInit(found, perplexity, train(trainer))


def _set_buckets(trainer: RouterInitTrainer, buckets: Buckets) -> None:
    """Have each expert learn from its bucket as in a training of its own."""
    args = trainer.args
    rows, epochs = step_rows(args), int(args.num_train_epochs)
    batches = [expert_batches(bucket, epochs, rows, args.seed + i) for i, bucket in enumerate(buckets)]
    trainer.set_batches(batches)
    trainer.add_callback(OwnUpdates([len(own) for own in batches], args.max_grad_norm))
    args.max_grad_norm = 0.0  # `OwnUpdates` clips


def _check(args: SFTConfig) -> None:
    """
    Raises:
        ValueError: arguments that have no meaning in this stage.
    """
    if args.packing or args.padding_free:
        raise ValueError(
            "router_init: packing and padding_free must be off, because every example has an expert of its own"
        )
    if args.max_steps > 0 or args.num_train_epochs != int(args.num_train_epochs) or args.num_train_epochs < 1:
        raise ValueError(
            f"router_init: max_steps={args.max_steps}, num_train_epochs={args.num_train_epochs:g}: set "
            "num_train_epochs to a whole number of passes of each expert over its bucket, and leave max_steps out"
        )
    refuse_optimizer(args.optim, args.fp16, args.max_grad_norm)
    refuse_losses(args.loss_type, args.label_smoothing_factor)


def refuse_losses(loss_type: str, label_smoothing_factor: float) -> None:
    """
    Raises:
        ValueError: another loss than the mean negative log-likelihood, which is the one of this stage.
    """
    smoothing = ("label_smoothing_factor", label_smoothing_factor, (0.0,))
    for name, value, usual in (("loss_type", loss_type, ("nll", "chunked_nll")), smoothing):
        if value not in usual:
            raise ValueError(
                f"router_init: {name}={value!r}: this stage has the paper's loss, {name}={usual[0]!r}; set that in "
                "router_init.sft"
            )


def _perplexities(trainer: RouterInitTrainer, num_experts: int) -> torch.Tensor:
    """[S, n]"""
    rows = max(trainer.args.per_device_eval_batch_size, num_experts)
    losses_SN, counts_S = example_losses(trainer.model, trainer.train_dataset, trainer.data_collator, num_experts, rows)
    return (losses_SN / counts_S.unsqueeze(1)).exp()
