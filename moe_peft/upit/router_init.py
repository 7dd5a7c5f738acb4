"""
What routers learn in stage 3, on logits alone.

Legend: L layers, B rows, S positions, n experts.

One optimizer for all experts of an adapter, with the updates that each expert would get in a training of its own.

Experts are slices of stacked tensors [n, ...], so a step of the optimizer moves them all. For elementwise optimizers
(SGD, Adam, AdamW) the slices do not see each other; what is left is done here: clipping by each expert's own gradient
norm, and keeping still the experts whose own training is over.

Routing vectors beside a dense model, which become the rows of a router. L layers, d hidden units.

Stage 3, router initialisation: each seed example goes to the expert that knows it best, then every expert and its
routing vector learn from their bucket (UpIT, section 2.2, Equations 1 and 2, Algorithm 3).

All n experts train at once in one model, and each as it would in a training of its own. Every row of a batch is forced
to its own expert with gate 1, so that the row's loss has the gradient that it would have in a model with this expert
only. An optimizer step holds a batch of *each* expert, so that an expert takes the steps of its own training, and not
n times as many from parts of a batch; `OwnUpdates` sees to clipping and to experts with fewer steps than others.

Legend: B rows, S positions, L layers, n experts.

Stage 3 for experts that are whole models: dense checkpoints, whose FFNs become the experts of a native MoE and whose
other weights, the backbone, are averaged (UpIT, section 2.2 and Algorithm 3, FFN mode).

One model is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments
from trl import SFTConfig, SFTTrainer

from ..models.introspection import RoutedPass, adapter_layers, observed_routing, router_parameters, router_sizes
from ..models.steering import force_experts
from ..routing.gates import own_experts
from ..routing.routers import LinearRouter
from ..training.checkpointing import FiniteWeightsMixin, Trained, step_rows, train
from ..training.labels import IGNORED, RowCollator
from ..training.preflight import check_learnable, check_training, for_one_trainer
from ..training.router_losses import RouterLog, multiplicities
from ..training.scoring import example_losses
from ..utils.compat import loss_is_of_whole_step
from ..utils.distributed import Access, ZeROAccess, shape_of
from ..utils.torch_contexts import free_memory
from ..utils.validation import COUNT, FLAG, SHARE, TEXT, Rule, check, choice_error
from .buckets import BUCKETS, Buckets, expert_batches, fill_buckets
from .files import link_model, own_folders, read_tensor, write_without

# --- objectives ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objective:
    """
    A routing objective.

    Args:
        loss: router logits [L, B, S, n] and the index of each row's own expert [L, B, S, 1] → loss [L, B, S].
        own_logit_only: the loss reads the logit of a row's own expert alone, so experts can be trained apart, as in
            the mode `ffn`.
    """

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    own_logit_only: bool = False


def _positive(logits_LBSN: torch.Tensor, own_LBS1: torch.Tensor) -> torch.Tensor:
    """`BCE(sigmoid(x·r_i), 1)` of the row's own expert i (the paper's Equation 2)."""
    return F.softplus(-logits_LBSN.gather(-1, own_LBS1).squeeze(-1))


def _one_vs_rest(logits_LBSN: torch.Tensor, own_LBS1: torch.Tensor) -> torch.Tensor:
    """The binary cross-entropy of all experts, averaged: target 1 for the own expert, 0 for the others."""
    target = torch.zeros_like(logits_LBSN).scatter_(-1, own_LBS1, 1.0)
    own = own_experts(logits_LBSN)
    losses = F.binary_cross_entropy_with_logits(logits_LBSN, target, reduction="none")
    return (losses * own).sum(-1) / own.sum(-1)


def _softmax(logits_LBSN: torch.Tensor, own_LBS1: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of the softmax over experts: label-supervised routing with the bucket as the label."""
    return -logits_LBSN.log_softmax(-1).gather(-1, own_LBS1).squeeze(-1)


OBJECTIVES: dict[str, Objective] = {
    "positive": Objective(_positive, own_logit_only=True),
    "one_vs_rest": Objective(_one_vs_rest),
    "softmax": Objective(_softmax),
}


def routing_loss(
    router_logits: Sequence[torch.Tensor], experts_B: torch.Tensor, mask_BS: torch.Tensor, objective: str
) -> torch.Tensor:
    """
    The routing loss of each row, summed over its real tokens and averaged over the layers, [B].

    Args:
        router_logits: one [B·S, n] per layer.
        experts_B: the expert of each row.
        mask_BS: 1 for real tokens, 0 for padding.
        objective: a name in `OBJECTIVES`.
    """
    rows, length = mask_BS.shape
    logits_LBSN = torch.stack([logits.view(rows, length, -1) for logits in router_logits])
    own_LBS1 = experts_B.view(1, rows, 1, 1).expand(*logits_LBSN.shape[:3], 1)
    loss_LBS = OBJECTIVES[objective].loss(logits_LBSN, own_LBS1)
    return (loss_LBS.mean(0) * mask_BS.to(loss_LBS.dtype)).sum(-1)


# --- own updates -----------------------------------------------------------------------------------------------------

_NOT_ELEMENTWISE = ("adafactor", "galore", "apollo", "lomo", "muon", "stable_adamw", "grokadamw")


class OwnUpdates(TrainerCallback):
    """
    Works on one process, under DistributedDataParallel, under FSDP2 and under DeepSpeed's ZeRO.

    Args:
        steps: optimizer steps of each expert's own training, [n].
        max_grad_norm: the largest norm of an expert's gradient over all layers, its rows of linear routers included;
            0 clips nothing. What belongs to no single expert (MLP and attention routers, layers with a single LoRA) is
            clipped together, apart from the experts; a parameter that stands for several counts as often.
    """

    def __init__(self, steps: Sequence[int], max_grad_norm: float | None) -> None:
        self.steps, self.max_grad_norm = torch.tensor(steps), max_grad_norm or 0.0
        self.access: Access = Access()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Look up the parameters, which FSDP has replaced by now."""
        self.stacked = [p for p in _of_experts(model) if p.requires_grad]
        # Experts that only some layers have are never trained, so they are over from the start.
        missing = max((shape_of(p)[0] for p in self.stacked), default=0) - len(self.steps)
        self.steps = torch.nn.functional.pad(self.steps, (0, max(missing, 0)))
        known = {id(p) for p in self.stacked}
        self.shared = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
        self.counts = multiplicities(model)
        if PartialState().distributed_type == DistributedType.DEEPSPEED:
            self.access = ZeROAccess()
            self._step_with(optimizer.optimizer, state)

    def _step_with(self, zero: Any, state: TrainerState) -> None:
        """Have DeepSpeed's optimizer do what the callbacks do: it steps in the backward pass, where none is called."""
        step, zero.clip_grad = zero.step, 0.0

        def own_step(*args: Any, **kwargs: Any) -> Any:
            self._before_step(state.global_step)
            result = step(*args, **kwargs)
            self._after_step(state.global_step)
            return result

        zero.step = own_step

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not isinstance(self.access, ZeROAccess):
            self._before_step(state.global_step)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not isinstance(self.access, ZeROAccess):
            self._after_step(state.global_step)

    def _before_step(self, step: int) -> None:
        if self.max_grad_norm > 0:
            self._clip()
        over = bool((self.steps <= step).any())
        self.kept = [self.access.value(p).clone() for p in self.stacked] if over else []

    def _after_step(self, step: int) -> None:
        # Without gradients they would still move, by momentum and weight decay.
        over_N = self.steps <= step
        for parameter, values in zip(self.stacked if self.kept else [], self.kept, strict=True):
            now = self.access.value(parameter)
            self.access.set_value(parameter, torch.where(_rows(over_N, values), values, now))
        self.kept = []

    def _clip(self) -> None:
        square_N = torch.zeros(len(self.steps))
        for parameter in self.stacked:
            grad = self.access.grad(parameter)
            if grad is not None:
                own_N = _whole(_squares(grad).flatten(1).sum(1))
                square_N = square_N.to(own_N.device, torch.promote_types(square_N.dtype, own_N.dtype))
                square_N[: len(own_N)] += own_N
        self._scale(self.stacked, self._factor(square_N))
        shared = [(p, grad) for p in self.shared if (grad := self.access.grad(p)) is not None]
        squares = [self.counts.get(p, 1) * _whole(_squares(grad).sum()) for p, grad in shared]
        if squares:
            self._scale(self.shared, self._factor(torch.stack(squares).sum()))

    def _factor(self, square: torch.Tensor) -> torch.Tensor:
        return (self.max_grad_norm / (square.sqrt() + 1e-6)).clamp(max=1)

    def _scale(self, parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
        for parameter in parameters:
            grad = self.access.grad(parameter)
            if grad is not None:
                rows = _rows(factor, grad) if factor.dim() else factor.to(grad.device)
                self.access.set_grad(parameter, grad * rows)


def _squares(grad: torch.Tensor) -> torch.Tensor:
    """In float32, or float64 if the gradient is."""
    return grad.to(torch.promote_types(grad.dtype, torch.float32)).square()


def refuse_optimizer(optim: Any, fp16: bool, max_grad_norm: float | None) -> None:
    """
    Raises:
        ValueError: the optimizer's steps mix the entries of a tensor, or gradients are scaled when experts are clipped.
    """
    name = str(getattr(optim, "value", optim))
    if any(part in name for part in _NOT_ELEMENTWISE):
        raise ValueError(f"router_init: optim={name!r}: mixes the experts of a tensor; use adamw_torch, or sgd")
    if fp16 and max_grad_norm:
        raise ValueError(
            f"router_init: fp16=True, max_grad_norm={max_grad_norm:g}: scaled gradients would be clipped; use bf16, or "
            "max_grad_norm=0"
        )


def _of_experts(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of which every expert has a slice, [n, ...]."""
    for layer in adapter_layers(model):
        for name, router in layer.moe_lora_router.items():
            for of_layer in layer.expert_parameters(name):
                yield from of_layer.values()
            if isinstance(router, LinearRouter):
                yield router.weight


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _rows(values_N: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values of the experts in the shape of a stacked tensor, [n, 1, …], on its device or devices."""
    shaped = values_N[: like.shape[0]].view(-1, *[1] * (like.dim() - 1)).to(like.device)
    return distribute_tensor(shaped, like.device_mesh, like.placements) if isinstance(like, DTensor) else shaped


# --- routing vectors -------------------------------------------------------------------------------------------------


class RoutingVectors(nn.Module):
    """
    One vector r per layer of a dense model, [L, d]; records `x·r` of each FFN's input while the model runs.

    The scores of a forward pass are in `scores`, one [B·S, 1] per layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config = model.config
        weight = torch.empty(config.num_hidden_layers, config.hidden_size)
        self.weight = nn.Parameter(nn.init.normal_(weight, std=0.02).to(model.device))
        self.scores: list[torch.Tensor] = []
        self.layers = config.num_hidden_layers
        for layer in range(config.num_hidden_layers):
            model.get_submodule(f"model.layers.{layer}.mlp").register_forward_pre_hook(self._recorder(layer))

    def forward(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """`x·r` [..., 1] in float32. Not a matrix product, which autocast would compute in half precision."""
        return (x.float() * self.weight[layer].float()).sum(-1, keepdim=True)

    def _recorder(self, layer: int) -> Callable[[nn.Module, tuple], tuple]:
        def record(ffn: nn.Module, args: tuple) -> tuple:
            score = self(args[0], layer)  # a call, for which ZeRO-3 gathers the vectors
            self.scores.append(score.reshape(-1, 1))
            # The same input, but tied to the score: DistributedDataParallel would take the vectors for unused if no
            # output depended on them.
            return (args[0] + 0 * score.to(args[0].dtype),)

        return record


def router_weights(vectors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The experts' routing vectors [L, d] as the routers' weights, layer → [n, d]."""
    return dict(enumerate(torch.stack(list(vectors), dim=1)))


# --- router init -----------------------------------------------------------------------------------------------------

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
            raise ValueError(choice_error("objective", objective, OBJECTIVES))
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
    return RouterInit(found, perplexity, train(trainer, alpha=trainer.alpha, objective=trainer.objective))


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


# --- dense experts ---------------------------------------------------------------------------------------------------

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
        trained = train(trainer, alpha=alpha, objective=objective)
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
