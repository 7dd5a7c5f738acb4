"""The methods that a recipe can run: UpIT and what it is compared with, as facts that the stages ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    """
    What a method does.

    Args:
        prepares: stage 1 trains what the experts are made of. Otherwise they are new LoRAs or copies of the base's
            FFNs, and the complete budget is stage 4's.
        assembles: the result is a MoE. Otherwise it is what stage 1 trained, with the complete budget, or `averages`.
        averages: the result is the mean of the experts, after stage 1's share of the budget alone.
        copies: every expert is a copy of stage 1's last checkpoint. Otherwise several checkpoints become experts.
        initializes_routers: stage 3 runs.
        trains_experts: stage 4 trains more than the routers.
        expert_type: what the experts of the mode `lora` are, as `MoELoraConfig.expert_type`; None: the recipe's choice.
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
        """Whether the result is made of several experts."""
        return self.assembles or self.averages

    @property
    def specializes(self) -> bool:
        """Whether the experts differ: they come from several checkpoints, and expansion adds those that are missing."""
        return self.prepares and self.assembles and not self.copies


_DENSE = Method(assembles=False)
_MEAN = Method(assembles=False, averages=True)
_FRESH = Method(prepares=False)
_COPIES = Method(copies=True)
_UPIT = Method(initializes_routers=True)
_SELF_MOE = Method(trains_experts=False)
_PESC = Method(prepares=False, expert_type="bottleneck")

# Mode → name → method. A mode says what an expert is: LoRA matrices, or a complete FFN.
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

# Mode → training arguments that the method rests on, for all stages; a recipe's `sft` overrides them. Learning rates
# and context are the paper's (section 3.1), and so is the constant schedule: checkpoints of a learning rate that falls
# to zero hardly differ.
TRAINING: dict[str, dict[str, Any]] = {
    mode: {"learning_rate": learning_rate, "lr_scheduler_type": "constant", "max_length": 2048}
    for mode, learning_rate in (("lora", 2e-4), ("ffn", 2e-5))
}
