"""Methods of a recipe: UpIT and its baselines, as properties that the stages read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    """
    Properties of a method.

    Args:
        prepares: stage 1 trains the experts. Otherwise they start as new LoRAs or as copies of the base's FFNs, and
            stage 4 has the complete budget.
        assembles: the result is a MoE. Otherwise it is stage 1's model, with the complete budget, or the mean
            (`averages`).
        averages: the result is the mean of the experts, after stage 1's share of the budget.
        copies: every expert is a copy of stage 1's last checkpoint. Otherwise several checkpoints become experts.
        initializes_routers: stage 3 runs.
        trains_experts: stage 4 trains more than the routers.
        expert_type: type of the experts in the mode `lora`, as `MoELoraConfig.expert_type`; None: the recipe's choice.
    """

    prepares: bool = True
    assembles: bool = True
    averages: bool = False
    copies: bool = False
    initializes_routers: bool = False
    trains_experts: bool = True
    expert_type: str | None = None

    @property
    def collects(self) -> bool:
        """True if the result is made from several experts."""
        return self.assembles or self.averages

    @property
    def specializes(self) -> bool:
        """True if the experts differ: they come from several checkpoints, and expansion adds the missing ones."""
        return self.prepares and self.assembles and not self.copies


_DENSE = Method(assembles=False)
_MEAN = Method(assembles=False, averages=True)
_FRESH = Method(prepares=False)
_COPIES = Method(copies=True)
_UPIT = Method(initializes_routers=True)
_SELF_MOE = Method(trains_experts=False)
_PESC = Method(prepares=False, expert_type="bottleneck")

# Mode → name → method. In the mode "lora" an expert is LoRA matrices, in "ffn" a complete FFN.
METHODS: dict[str, dict[str, Method]] = {
    "lora": {
        "lora": _DENSE,
        "loramoe_pt": _FRESH,
        "loramoe_sft": _COPIES,
        "upit": _UPIT,
        "self_moe": _SELF_MOE,
        "pesc": _PESC,
        "mean": _MEAN,
    },
    "ffn": {
        "sft": _DENSE,
        "upcycle_pt": _FRESH,
        "upcycle_sft": _COPIES,
        "upit": _UPIT,
        "self_moe": _SELF_MOE,
        "mean": _MEAN,
    },
}

# Mode → default training arguments of all stages; a recipe's `sft` overrides them. Learning rates and context are the
# paper's (section 3.1). The constant schedule is also the paper's: if the learning rate decayed to zero, checkpoints
# would hardly differ.
TRAINING: dict[str, dict[str, Any]] = {
    mode: {"learning_rate": learning_rate, "lr_scheduler_type": "constant", "max_length": 2048}
    for mode, learning_rate in (("lora", 2e-4), ("ffn", 2e-5))
}
