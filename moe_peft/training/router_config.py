"""Config fields of the router losses, and the coefficients they give a model's losses."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Literal, get_args

from peft import PeftModel

from ..adapter.config import MoELoraConfig
from ..adapter.router_outputs import installed
from ..models.introspection import base_model, text_config
from ..models.layer import AdapterLayer, RoutedLayer, routed_layers, router_parameters
from ..routing.losses import ROUTER_LOSSES, Scope, coefficient_field
from ..utils.messages import InputError, choice_error
from ..utils.settings import NOT_NEGATIVE

logger = logging.getLogger("moe_peft")

# --- config ----------------------------------------------------------------------------------------------------------

TrainedPart = Literal["joint", "routers", "rest"]
LabelTokens = Literal["all", "completion"]
Schedule = Literal["constant", "three_phase", "step_decay"]

# One coefficient field per loss in the table. A field without a default may be None, for the model's own coefficient.
_Coefficients: Any = make_dataclass(
    "_Coefficients",
    [
        (
            coefficient_field(name),
            float | None if loss.coefficient is None else float,
            field(default=loss.coefficient, metadata={"help": loss.help}),
        )
        for name, loss in ROUTER_LOSSES.items()
    ],
    namespace={"__module__": __name__},
)

# Fields with a fixed set of values.
_CHOICES = {
    "router_balancing": (*get_args(Scope), None),
    "training_stage": get_args(TrainedPart),
    "router_schedule": get_args(Schedule),
    "router_label_tokens": get_args(LabelTokens),
}


@dataclass
class RouterLossConfig(_Coefficients):
    """
    Fields of the router losses, to combine with a config of TRL's by inheritance.

    Each loss of `ROUTER_LOSSES` has a coefficient: `router_aux_loss_coef` (load balancing; None takes the model's),
    `router_z_loss_coef`, `router_label_loss_coef`, …

    Args:
        router_balancing: `"layer"` balances each layer; `"global"` pools the tokens of all layers, and in a deep model
            hardly balances at all. None: `"layer"` for an adapter, transformers' `"global"` for a native MoE.
        router_global_batch: True: the balancing loss counts the loads of all processes together (Qiu et al., 2025).
            False: each process counts its own loads. Accumulated batches are always counted separately.
        training_stage: `"joint"` trains all parameters with all losses. `"routers"` trains only the routers, with their
            losses. `"rest"` trains all other trainable parameters, with frozen routers and without router losses. To
            train in two stages, pass the same model to the second trainer.
        router_learning_rate: learning rate of the routers, with the schedule of all other parameters. None: the
            trainer's learning rate.
        router_schedule: `"three_phase"`: 5 % of the steps at a tenth of the learning rate with 5 times the balancing
            loss and twice the z-loss, 70 % as set, 25 % at a tenth of the learning rate with half of both losses.
            `"step_decay"`: the learning rate rises from 0 in the first 1 % of the steps and is multiplied by 0.316 at
            80 % and again at 90 % of them; losses as set (Router Upcycling, section 4.1).
        router_label_tokens: `"all"` applies the label loss to all real tokens. `"completion"` applies it only to tokens
            with a language loss (label not -100), e.g. to answers without their prompts. Compliance is logged for the
            same tokens.
        router_bias_anneal: with an adapter's `router_bias_update_rate`, the share of the training, at its end, for the
            routers' biases to go to 0, so that the result can be exported.
        router_label_mask: restrict tokens to the experts of their label, in training and in evaluation. The router
            losses use the logits without this mask, so routers can learn to do without it.

    Raises:
        ValueError: fields contradict each other, or the stage has no loss to train its parameters.
    """

    router_balancing: Scope | None = field(
        default=None,
        metadata={"help": "Scope of the balancing loss. None: layer for adapters, global for native MoEs."},
    )
    router_global_batch: bool = field(
        default=False, metadata={"help": "Balance the batches of all processes together."}
    )
    training_stage: TrainedPart = field(default="joint", metadata={"help": "What is trained."})
    router_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the routers. None: the same as the rest."}
    )
    router_schedule: Schedule = field(default="constant", metadata={"help": "Constant, three-phase or step decay."})
    router_label_tokens: LabelTokens = field(default="all", metadata={"help": "Tokens with a label loss."})
    router_bias_anneal: float = field(
        default=0.0, metadata={"help": "Final share of the steps, in which biases go to 0."}
    )
    router_label_mask: bool = field(default=False, metadata={"help": "Mask the experts of other labels."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InputError(choice_error(name, getattr(self, name), choices))
        for name in ("router_learning_rate", *map(coefficient_field, ROUTER_LOSSES)):
            value = getattr(self, name, None)
            if value is not None and value not in NOT_NEGATIVE:
                raise InputError(f"{name}={value!r}: must be a finite number, {NOT_NEGATIVE}")
        if not 0 <= self.router_bias_anneal <= 1:
            raise InputError(f"router_bias_anneal={self.router_bias_anneal!r}: must be a share of the steps, 0 to 1")
        has_labels = getattr(self, "expert_map", None) is not None
        defaults = {"router_label_mask": False, "router_label_tokens": "all", "router_label_loss_coef": 1.0}
        for name, default in defaults.items():
            if getattr(self, name) != default and not has_labels:
                raise InputError(
                    f"{name}={getattr(self, name)!r} needs label_column and expert_map, which MoESFTConfig has"
                )
        if self.training_stage == "routers" and not any(map(self._trains_routers, ROUTER_LOSSES)):
            labels = "label_column and expert_map, and router_label_loss_coef or "
            needs = f"{labels * hasattr(self, 'expert_map')}router_z_loss_coef above 0"
            raise InputError(f"training_stage='routers' needs {needs}: no loss trains the routers")
        if self.router_learning_rate is not None and self.training_stage == "rest":
            raise InputError(
                f"router_learning_rate={self.router_learning_rate!r}: training_stage='rest' trains no routers; set it "
                "where they are trained"
            )
        if self.router_schedule != "constant":
            for name, unused in (("lr_scheduler_type", ("linear", "constant")), ("warmup_steps", (0,))):
                value = getattr(self, name)
                if value not in unused:
                    value = getattr(value, "value", value)
                    raise InputError(
                        f"{name}={value!r}: router_schedule={self.router_schedule!r} sets the learning rate; leave it "
                        "out"
                    )

    def _trains_routers(self, name: str) -> bool:
        """Return whether a loss trains the routers in the stage "routers"."""
        loss = ROUTER_LOSSES[name]
        labeled = not loss.needs_labels or getattr(self, "expert_map", None) is not None
        return labeled and "routers" in loss.stages and bool(getattr(self, coefficient_field(name)))


# --- coefficients ----------------------------------------------------------------------------------------------------


def loss_coefficients(model: Any, args: Any) -> dict[str, float]:
    """
    Return the coefficient of each loss of `ROUTER_LOSSES`.

    Args:
        args: a config with the fields of `RouterLossConfig`.
    """
    if not router_parameters(model):
        if args.training_stage == "routers":
            raise InputError("training_stage='routers': these routers have no parameters; use 'joint'")
        if args.router_learning_rate is not None:
            raise InputError(
                f"router_learning_rate={args.router_learning_rate!r}: these routers have no parameters; leave it out"
            )
    coefficients = {name: getattr(args, coefficient_field(name)) for name in ROUTER_LOSSES}
    layers = routed_layers(model)
    constant = all(getattr(layer.router, "is_constant", False) for layer in layers)
    for name, loss in ROUTER_LOSSES.items():
        wanted = not loss.needs_labels or getattr(args, "expert_map", None) is not None
        if constant and wanted and coefficients[name]:
            raise InputError(
                f"{coefficient_field(name)}={coefficients[name]}: training cannot change these routers' logits, so the "
                "loss is a constant; set it to 0"
            )
    if args.gradient_checkpointing and any(getattr(layer.router, "needs_token_ids", False) for layer in layers):
        raise InputError(
            "gradient_checkpointing=True: these routers read token ids, and layers that run again do not have them; "
            "set it to false"
        )
    if coefficients["aux"] is None:
        adapters = {layer.adapter for layer in layers if isinstance(layer, AdapterLayer)}
        if constant:
            coefficients["aux"] = 0.0
        elif adapters and installed(base_model(model)) is None:  # a MoE base's own coefficient is for its own routers
            coefficients["aux"] = max(model.peft_config[name].router_aux_loss_coef for name in adapters)
        else:
            coefficients["aux"] = getattr(text_config(model), "router_aux_loss_coef", 0.0)
    if not all(layer.trains_reentrant for layer in layers) and is_reentrant(args) and any(coefficients.values()):
        raise InputError(
            "gradient_checkpointing_kwargs.use_reentrant=True: router losses need gradients of the router logits, and "
            "a native MoE then has none; set it to False"
        )
    return coefficients


def is_reentrant(args: Any) -> bool:
    """
    Return whether checkpointed layers run without gradients in the forward pass, and again inside the backward pass.
    """
    return bool(args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"))


def trains_adapter(arguments: Iterable[Any]) -> bool:
    """Return whether a trainer with these arguments trains a MoE-LoRA adapter."""
    configs = [c for arg in arguments for c in (arg.peft_config.values() if isinstance(arg, PeftModel) else [arg])]
    return any(isinstance(config, MoELoraConfig) for config in configs)


def warn_of_top_1(layers: Iterable[RoutedLayer]) -> None:
    """
    Warn if a native gate with one expert per token is divided by itself: it is always 1, so routers get no gradient
    from the model's loss. Adapters' gates pass a gradient on.
    """
    if any(layer.top_k == 1 and not layer.learns_at_top_1 for layer in layers):
        logger.warning(
            "num_experts_per_tok=1: the only gate of a token is divided by itself, so routers learn from the balancing "
            "loss alone; to train them by the model's loss, too, use moe_peft.replace_routers(model, 'linear')"
        )
