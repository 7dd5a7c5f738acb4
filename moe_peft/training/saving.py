"""Trainers that save no weights which have diverged."""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor

logger = logging.getLogger("moe_peft")

_HALF = (torch.bfloat16, torch.float16)


class FiniteWeightsMixin:
    """
    Mixin for a Trainer: it saves no weights that are not finite. (ZeRO-3's, which are divided, it does not look at.)
    It warns where steps would be lost in rounding.
    """

    args: Any
    model: Any
    state: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    is_world_process_zero: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        keeps_float32 = self.is_fsdp_enabled or self.is_deepspeed_enabled  # beside the weights
        trained = [p for p in self.model.parameters() if p.requires_grad and p.dtype in _HALF]
        quantized = getattr(self.model, "is_quantized", False)  # TRL makes its adapters bfloat16
        if trained and not keeps_float32 and not quantized and self.is_world_process_zero():
            logger.warning(
                "learning_rate=%g: %s parameters are trained in %s, where a weight changes by no less than a %s of "
                "itself: smaller steps are lost; load the model in float32 (bf16=True still computes in bfloat16)",
                self.args.learning_rate,
                f"{sum(p.numel() for p in trained):,}",
                str(trained[0].dtype).removeprefix("torch."),
                "256th" if trained[0].dtype == torch.bfloat16 else "2048th",
            )
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Raises:
            ValueError: a trained weight is not finite; nothing is written then.
        """
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        bad = [name for name, parameter in trained if not _largest(parameter).isfinite()][:1]
        if self.is_fsdp_enabled:  # each process has parts of its own; all stop if one of them is not finite
            bad = gather_object(bad)
        for name in bad[:1]:
            raise ValueError(
                f"learning_rate={self.args.learning_rate}: after step {self.state.global_step}, {name} is not finite, "
                f"and {output_dir or self.args.output_dir} was not saved; use a lower rate, or max_grad_norm"
            )
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]


@torch.no_grad()
def _largest(parameter: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of what this process holds of a parameter, computed without a tensor of its size."""
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return torch.linalg.vector_norm(own, torch.inf) if own.numel() else torch.zeros(())
