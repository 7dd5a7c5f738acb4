"""Trainers that save no weights which have diverged."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor


class FiniteWeightsMixin:
    """
    Mixin for a Trainer: it saves no weights that are not finite. (ZeRO-3's, which are divided, it does not look at.)
    """

    args: Any
    model: Any
    state: Any
    is_fsdp_enabled: bool

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
