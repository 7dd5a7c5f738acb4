"""
Router losses for any TRL trainer, for a MoE-LoRA adapter or a native transformers MoE.

    class MoEDPOTrainer(RouterLossesMixin, DPOTrainer): ...

Its config inherits from `RouterLossConfig` and `DPOConfig` in the same way. The table
`moe_peft.routing.losses.ROUTER_LOSSES` lists the losses; each has its own coefficient field and log entry.

T tokens of all passes, n experts, L layers with routers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ..adapter import router_outputs
from ..adapter.base_model import is_encoder_decoder
from ..models.introspection import RoutedPass, base_model, observed_routing, text_config
from ..models.layer import NativeLayer, routed_layers, router_parameters
from ..models.steering import steered
from ..routing.gates import AllowedExperts, stacked
from ..routing.losses import ROUTER_LOSSES, RouterBatch, Scope
from ..routing.statistics import LoadHealth, compliance, counted_experts, entropies, load_health
from ..utils.compat import loss_is_of_whole_step
from ..utils.messages import InputError
from .labels import COLUMN, NO_LABEL, completion_tokens, real_tokens
from .mixins import FullNormMixin
from .router_bias import RouterBiasCallback, has_biases
from .router_config import RouterLossConfig, is_reentrant, loss_coefficients, trains_adapter, warn_of_top_1
from .schedule import FACTORS, phase_at
from .trainable import freeze_for_stage, give_rate
from .training_card import ModelCardMixin

Sum = tuple[torch.Tensor, torch.Tensor]  # sum of values, and their number


class RouterLossesMixin(FullNormMixin, ModelCardMixin):
    """
    Adds the losses of `ROUTER_LOSSES` to a TRL trainer and logs them as `aux_loss`, `router_z_loss`, … It also logs
    `router_entropy`, `load_cv`, `load_cv_by_chance`, `dead_experts` and, with labels, `compliance`. Its config is a
    `RouterLossConfig`. A trainer's plain config gets these fields with their defaults.

    The load counts the routers' choices since the last log, after masks and dropped slots. `load_cv_by_chance` is the
    variation of as many random, even assignments. `dead_experts` is the share of experts with next to no tokens.

    Per-token losses are averaged over all real tokens of an optimizer step, for any number of accumulation steps and
    processes; the label loss over the tokens of `router_label_tokens`. If a trainer's batches hold no token ids, the
    average is over the tokens of each micro-batch. The balancing loss is not a mean over tokens. As in TRL, it is
    computed for each micro-batch and averaged; with `router_global_batch`, it is computed for the micro-batches of all
    processes together.

    If a trainer runs the model several times for one loss, only the passes with gradients count. Saved models have the
    card of `ModelCardMixin`.

    Args:
        kwargs: the trainer's arguments; put this class before the trainer's among the bases.

    Raises:
        ValueError: the model has no routers, no parameter is left to train, or `use_vllm` with an adapter in a trainer
            that would merge it.
        RuntimeError: the trainer computes its loss without `compute_loss`, like TRL's `OnlineDPOTrainer`.

    Example:

    ```python
    >>> from trl import RewardTrainer
    >>> from moe_peft import RouterLossesMixin
    >>> class MoERewardTrainer(RouterLossesMixin, RewardTrainer):
    ...     pass
    ```
    """

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = (*args, *kwargs.values())
        with ExitStack() as stack:
            if trains_adapter(arguments) and any(getattr(arg, "use_vllm", None) is True for arg in arguments):
                from .rollouts import rollouts_of_adapters  # imports vLLM

                stack.enter_context(rollouts_of_adapters(type(self)))
            super().__init__(*args, **kwargs)
        for f in fields(RouterLossConfig):
            if not hasattr(self.args, f.name):  # a plain config
                setattr(self.args, f.name, f.default)
        if self.args.n_gpu > 1:  # nn.DataParallel would mix up the passes of its replicas
            raise InputError(f"one process has {self.args.n_gpu} GPUs; start one process per GPU: accelerate launch")
        layers = routed_layers(self.model, type(self).__name__)
        base = base_model(self.model)
        if is_encoder_decoder(base):
            raise InputError(
                f"{type(self).__name__}: {type(base).__name__} is an encoder-decoder, whose routers see other tokens "
                "in each half; train it with a trainer that adds no losses of routers"
            )
        # An adapter on a MoE leaves the config's fields and the balancing loss to the MoE's own routers.
        is_native = any(isinstance(layer, NativeLayer) for layer in layers)
        self._owns_fields = is_native or router_outputs.installed(base) is not None
        self._sizes, self._ks = [layer.num_experts for layer in layers], [layer.top_k for layer in layers]
        self._routers = [layer.router for layer in layers]
        self._default_balancing = layers[0].default_balancing
        self._coefficients = loss_coefficients(self.model, self.args)
        self._check_rate()
        if self._owns_fields:
            self.aux_loss_enabled = False  # TRL would add its own balancing loss
        warn_of_top_1(layers)
        self._balance_by_bias()
        self._frozen = freeze_for_stage(self.model, router_parameters(self.model), self.args.training_stage)
        self._added = False  # whether the current step's loss includes the routers' losses
        self._log_of_routers = RouterLog(self, self._sizes)
        self._allowed: torch.Tensor | None = None  # experts of each label, bool [labels, n]
        self._step_tokens: torch.Tensor | None = None  # None: count per micro-batch
        self._step_label_tokens: torch.Tensor | None = None  # step tokens with a label loss

    def _check_rate(self) -> None:
        """Check that the routers' learning rate can be applied."""
        if (rate := self.args.router_learning_rate) is None:
            return
        plugin, field = self.accelerator.state.deepspeed_plugin, f"router_learning_rate={rate!r}"  # type: ignore[attr-defined]
        for name in ("optimizer", "scheduler"):
            if plugin is not None and name in plugin.deepspeed_config:
                raise InputError(f"{field}: DeepSpeed's config has a key {name!r}; leave that out")
        if self.optimizer is not None:
            raise InputError(f"{field}: does not apply to an optimizer of your own; give its groups an lr")

    def _balance_by_bias(self) -> None:
        """Add the callback for the routers' biases, if they have biases and are trained."""
        anneal, callbacks = self.args.router_bias_anneal, self.callback_handler.callbacks  # type: ignore[attr-defined]
        if not has_biases(self.model):
            if anneal:
                raise InputError(f"router_bias_anneal={anneal}: no router has biases (router_bias_update_rate)")
        elif self.args.training_stage != "rest" and not any(isinstance(c, RouterBiasCallback) for c in callbacks):
            self.add_callback(RouterBiasCallback(anneal))  # type: ignore[attr-defined]

    def load_warning(self) -> str:
        """
        Return a warning about the experts' load with a remedy, or "" if the load is fine or labels ask for uneven
        loads.

        The load is of the tokens since the last log; without such tokens, of the last log (see
        `moe_peft.routing.LoadHealth`).
        """
        health = self._log_of_routers.load_health()
        return "" if health is None or self._allowed is not None else health.warning

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, and in training add the routers' statistics since the last log."""
        if self.model.training:
            self._log_of_routers.add_to(logs)
        trainer: Any = super()
        trainer.log(logs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Evaluate, and add the routers' statistics on this dataset to the metrics."""
        trainer: Any = super()
        output = trainer.evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        self._log_of_routers.add_to(output.metrics, f"{metric_key_prefix}_")
        return output

    def _keep_frozen(self) -> None:
        """
        Freeze again the parameters that PEFT has unfrozen. PEFT does so when adapters are disabled, e.g. for a
        reference pass.
        """
        for parameter in self._frozen:
            parameter.requires_grad_(False)

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimizer, with separate parameter groups for the routers if they have their own learning rate."""
        trainer: Any = super()
        self._keep_frozen()
        is_new, rate = self.optimizer is None, self.args.router_learning_rate
        optimizer = trainer.create_optimizer(model)
        if rate is not None and is_new:
            give_rate(optimizer, router_parameters(self.model if model is None else model).values(), rate)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LRScheduler:
        trainer: Any = super()
        factor = FACTORS.get(self.args.router_schedule)
        if factor is not None and self.lr_scheduler is None:
            by_step = partial(factor, steps=num_training_steps)  # a partial has no state for resuming to restore
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, by_step)
            self._created_lr_scheduler = True
        return trainer.create_scheduler(num_training_steps, optimizer)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Get the batches of the next optimizer step, and count its real tokens over all batches and processes."""
        trainer: Any = super()
        samples, items = trainer.get_batch_samples(epoch_iterator, num_batches, device)
        counts = [self._token_counts(batch) for batch in samples]
        self._step_tokens = self._step_label_tokens = None
        if counts and all(count is not None for count in counts):
            tokens = torch.stack([count.to(device) for count in counts if count is not None]).sum(0)
            self._step_tokens, self._step_label_tokens = self.accelerator.reduce(tokens, "sum").clamp(min=1)  # type: ignore[attr-defined]
        return samples, items

    def _token_counts(self, batch: Any) -> torch.Tensor | None:
        """
        Return a batch's numbers of real tokens and of tokens with a label loss, [2]. None for a batch without token
        ids.
        """
        mask = real_tokens(batch)
        return None if mask is None else torch.stack([mask.sum(), self._label_tokens(batch, mask).sum()])

    def _label_tokens(self, inputs: Any, mask: torch.Tensor) -> torch.Tensor:
        """Return the mask of real tokens with a label loss."""
        completion = completion_tokens(inputs) if self.args.router_label_tokens == "completion" else None
        return mask if completion is None else mask * completion.to(mask.device).view_as(mask)

    def _masked(self, inputs: Any) -> AbstractContextManager:
        """
        Restrict tokens to the experts of their label inside the block, if the config says so. Padding may go to any
        expert.
        """
        labels = inputs.get(COLUMN) if self.args.router_label_mask else None
        if labels is None or self._allowed is None:
            return nullcontext()
        labels_T = labels.flatten()
        allowed_TN = self._allowed.to(labels.device)[labels_T.clamp(min=0)] | (labels_T == NO_LABEL).unsqueeze(1)
        return steered(self.model, AllowedExperts(allowed_TN))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        trainer: Any = super()
        with self._masked(inputs):  # in the backward pass too: gradient checkpointing runs layers again
            self._added = False
            loss = trainer.training_step(model, inputs, *args, **kwargs)
        if not self._added:
            raise RuntimeError(
                f"{type(self).__name__}: the trainer's training_step does not call compute_loss, so it cannot get "
                "router losses; use another trainer, or a plain LoraConfig"
            )
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        trainer: Any = super()
        # Compute the trainer's own loss, and record the routing of all its passes.
        inputs = dict(inputs)
        masked = self._masked(inputs)
        token_labels = inputs.pop(COLUMN, None)
        self._keep_frozen()
        passes: list[RoutedPass] = []
        unbalanced = _without_balancing(text_config(self.model)) if self._owns_fields else nullcontext()
        with masked, observed_routing(self.model, passes.append), unbalanced:
            result = trainer.compute_loss(
                model, dict(inputs), return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        self._keep_frozen()  # checkpointed layers run again in the backward pass
        loss, *rest = result if return_outputs else (result,)
        # The stage "routers" has no language loss.
        if self.args.training_stage == "routers":  # keep its graph if routers get gradients as layers run again
            loss = (loss if is_reentrant(self.args) else loss.detach()) * 0
        # Of several passes, such as of a policy and a reference, count the passes with gradients. In an evaluation,
        # count the first pass on the batch's own tokens: KTO's first pass reads other rows.
        counted = [seen for seen in passes if seen.trains]
        if not counted and len(passes) > 1:
            counted = [seen for seen in passes if _is_of(seen, inputs)][:1]
        counted = counted or passes[:1]
        if not counted:
            raise RuntimeError(
                f"{type(self).__name__}: the model ran without its hooks, so there are no router logits; do not run a "
                "compiled model before training begins"
            )
        if len(counted) > 1:
            self._step_tokens = self._step_label_tokens = None  # they count one pass's tokens
        # Add and log the router losses.
        batch = self._router_batch(counted, token_labels, inputs)
        loss = self._with_router_losses(loss, batch, loss_is_of_whole_step(self, num_items_in_batch))
        self._log_of_routers.note_load(counted, batch.mask)
        self._added = True
        return (loss, *rest) if return_outputs else loss

    def _router_batch(self, passes: list[RoutedPass], token_labels: torch.Tensor | None, inputs: Any) -> RouterBatch:
        """Return the inputs of the router losses: the tokens of all passes, concatenated."""
        # Concatenate each layer's logits and the mask over the passes.
        device = passes[0].router_logits[0].device  # layers may be on different ones
        logits_LTN = torch.cat([stacked(seen.router_logits) for seen in passes], dim=1)
        mask_T = torch.cat([seen.mask.flatten().to(device) for seen in passes])
        # Look up each token's allowed experts, if there are labels.
        allowed_TN = label_mask_T = None
        if token_labels is not None and self._allowed is not None:
            labels_T = token_labels.flatten().to(device)
            mask_T = mask_T * (labels_T != NO_LABEL)
            allowed_TN = self._allowed.to(device)[labels_T.clamp(min=0)]
            label_mask_T = self._label_tokens(inputs, mask_T)
        # Choose how to balance the loads.
        scope: Scope = self.args.router_balancing or self._default_balancing
        chosen = counted_experts(self._routers, logits_LTN, self._ks)
        mean = self._mean_over_processes if self.args.router_global_batch and self.model.training else None
        return RouterBatch(logits_LTN, mask_T, self._ks[0], scope, allowed_TN, label_mask_T, mean, self._sizes, chosen)

    def _logged(self, name: str) -> str:
        """
        Return a loss's name in the log. The balancing loss has TRL's name, unless the model has its own balancing loss.
        """
        return "aux_loss" if name == "aux" and self._owns_fields else f"router_{name}_loss"

    def _mean_over_processes(self, values: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(values.detach(), "mean")  # type: ignore[attr-defined]

    def _with_router_losses(self, loss: torch.Tensor, batch: RouterBatch, of_step: bool) -> torch.Tensor:
        """Add the losses of the training stage, and log them."""
        token_scale, batch_scale = self._scales(of_step)
        noted: dict[str, Sum] = {}
        for name, entry in ROUTER_LOSSES.items():
            coefficient = self._coefficient(name)
            counts = coefficient != 0 and self.args.training_stage in entry.stages
            if (entry.needs_labels and batch.allowed is None) or not (counts or entry.always_logged):
                continue
            value = entry.function(batch)
            # Average over the tokens of the whole step, or of the micro-batch.
            if value.dim():  # one value per token
                mask_T, step_tokens = batch.mask, self._step_tokens
                if entry.needs_labels and batch.label_mask is not None:
                    mask_T, step_tokens = batch.label_mask, self._step_label_tokens
                total, tokens = (value * mask_T).sum(), mask_T.sum().clamp(min=1)
                noted[self._logged(name)] = (total, mask_T.sum())
                if self.model.training and step_tokens is not None:
                    tokens = step_tokens.to(tokens.device)
                value = token_scale * total / tokens
            else:
                noted[self._logged(name)] = (value, torch.ones_like(value))
                value = batch_scale * value
            if counts:
                loss = loss + (coefficient * value).to(loss.device)
        noted["router_entropy"] = token_sum(entropies(batch.router_logits).mean(0), batch.mask)
        if batch.allowed is not None and batch.label_mask is not None:
            noted["compliance"] = token_sum(compliance(batch.router_logits, batch.allowed).mean(0), batch.label_mask)
        self._log_of_routers.note(noted)
        return loss

    def _scales(self, of_step: bool) -> tuple[float, float]:
        """
        Return two factors that turn this micro-batch's losses into its share of the optimizer step's loss.

        The first is for losses summed over tokens and divided by the step's number of tokens, the second for losses of
        a whole micro-batch. DDP averages over processes. Unless the loss is `of_step`, the trainer averages over
        accumulation steps.
        """
        if not self.model.training:
            return 1.0, 1.0
        steps = getattr(self, "current_gradient_accumulation_steps", 1)  # set when training begins
        batch_scale = 1 / steps if of_step else 1.0
        if self._step_tokens is None:
            return batch_scale, batch_scale
        return float(self.accelerator.num_processes) * (1 if of_step else steps), batch_scale  # type: ignore[attr-defined]

    def _coefficient(self, name: str) -> float:
        """Return a loss's coefficient at the current step."""
        coefficient = self._coefficients[name]
        if self.args.router_schedule != "three_phase" or self.state.max_steps <= 0:  # type: ignore[attr-defined]
            return coefficient
        if not self.model.training:
            return coefficient  # keeps evaluation losses comparable between phases
        return coefficient * ROUTER_LOSSES[name].phases[phase_at(self.state.global_step, self.state.max_steps)]  # type: ignore[attr-defined]


@contextmanager
def _without_balancing(config: Any) -> Iterator[None]:
    """Keep the model from adding its own balancing loss inside the block."""
    before, config.output_router_logits = getattr(config, "output_router_logits", False), False
    try:
        yield
    finally:
        config.output_router_logits = before


def _is_of(seen: RoutedPass, inputs: Mapping[str, Any]) -> bool:
    """Return whether a pass read the batch's own tokens."""
    ids = inputs.get("input_ids")
    return seen.input_ids is not None and isinstance(ids, torch.Tensor) and torch.equal(seen.input_ids, ids)


# --- the log --------------------------------------------------------------------------------------------------------


def token_sum(values_T: torch.Tensor, mask_T: torch.Tensor) -> Sum:
    """Return the sum over the tokens of the mask, and their number."""
    return (values_T * mask_T).sum(), mask_T.sum()


class RouterLog:
    """
    Statistics of a trainer's routers for its log: means over all tokens since the last log, of all batches and
    processes. Sums stay on the device, so the CPU waits for it only once per log.

    Args:
        trainer: the trainer; its `log` calls `add_to`.
        sizes: each router's n.
    """

    def __init__(self, trainer: Any, sizes: Sequence[int]) -> None:
        self.trainer, self.sizes = trainer, sizes
        # Both by mode, True in training and False in evaluation. `_sums`: name → a sum of values and their number, [2].
        # `_loads`: each layer's number of assignments per expert, then of tokens, [L, n + 1].
        self._sums: dict[bool, dict[str, torch.Tensor]] = {True: {}, False: {}}
        self._loads: dict[bool, torch.Tensor] = {}
        self._last_health: LoadHealth | None = None

    @torch.no_grad()
    def note(self, noted: Mapping[str, Sum]) -> None:
        """Add the values of one batch, by name."""
        sums = self._sums[self.trainer.model.training]
        device = next(iter(noted.values()))[0].device
        batch = torch.stack([part.detach().to(device).float() for pair in noted.values() for part in pair]).view(-1, 2)
        for name, sum_2 in zip(noted, batch, strict=True):
            sums[name] = sums[name] + sum_2 if name in sums else sum_2

    @torch.no_grad()
    def note_load(self, passes: Sequence[RoutedPass], mask_T: torch.Tensor) -> None:
        """Add the experts' loads in these passes."""
        by_layer = zip(*(seen.chosen for seen in passes), strict=True)
        chosen_LTN = torch.stack([
            torch.cat([chosen_TN.to(mask_T.device) for chosen_TN in of_layer]) for of_layer in by_layer
        ])  # fmt: skip
        real_T1 = mask_T.bool().unsqueeze(1)
        counts_LN = (chosen_LTN & real_T1).sum(1)
        load = torch.cat([counts_LN, real_T1.sum().expand(len(counts_LN), 1)], dim=1)
        training = self.trainer.model.training
        self._loads[training] = self._loads[training] + load if training in self._loads else load

    def add_to(self, logs: dict[str, float], prefix: str = "") -> None:
        """
        Add the means since the last call to a training log or, with a prefix, to an evaluation's metrics. Then start
        anew.
        """
        training = not prefix
        health, values = self._load_health(training), {}
        if sums := self._sums[training]:
            totals, counts = self._of_all(torch.stack([*sums.values()])).T.tolist()
            values = {name: total / max(count, 1.0) for name, total, count in zip(sums, totals, counts, strict=True)}
        if health is not None:
            values |= {
                "load_cv": health.variation,
                "load_cv_by_chance": health.by_chance,
                "dead_experts": health.dead / health.experts,
            }
            self._last_health = health if training else self._last_health
        logs.update({f"{prefix}{name}": value for name, value in values.items()})
        self._sums[training] = {}
        self._loads.pop(training, None)

    def load_health(self) -> LoadHealth | None:
        """Return the health of the training load since the last log, or, without new tokens, of the last log."""
        return self._load_health(True) or self._last_health

    def _load_health(self, training: bool) -> LoadHealth | None:
        if training not in self._loads:
            return None
        load = self._of_all(self._loads[training])
        return load_health(load[:, :-1].double(), self.sizes, float(load[0, -1]))

    def _of_all(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum over all processes. The result is on the CPU."""
        return self.trainer.accelerator.reduce(sums, "sum").cpu()
