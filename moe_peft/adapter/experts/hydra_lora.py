"""LoRA experts that share their first matrix (HydraLoRA, Tian et al., 2024, arXiv 2404.19245, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...utils.expert_likeness import update_gram
from ...utils.messages import InputError
from .base import Shapes
from .lora import LoraExperts


class HydraLoraExperts(LoraExperts):
    """
    `W_i = W + s·B_i A`: one A for all experts of a projection, stored as [1, r, in], and one B_i per expert. Products
    see it as n equal matrices, and its gradient is their sum.
    """

    holds_loras = False
    stacked = "B"

    def shapes(self, projections: dict[str, tuple[int, int]]) -> dict[str, Shapes]:
        return {name: ((1, *A[1:]), B) for name, (A, B) in super().shapes(projections).items()}

    def each(self, A: torch.Tensor) -> torch.Tensor:
        return A.expand(self.num_updates, -1, -1)

    def to_lora(self, A: torch.Tensor, B: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return A[0], B[expert].T

    def from_loras(self, A: Sequence[torch.Tensor], B: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        used = [A_RI for A_RI, B_OR in zip(A, B, strict=True) if B_OR.any()] or list(A[:1])
        if any(not torch.equal(A_RI, used[0]) for A_RI in used):
            raise InputError("the LoRAs differ in A, but these experts share one; use expert_type='lora'")
        return used[0].unsqueeze(0), torch.stack([B_OR.T for B_OR in B])

    def gram(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return self.scaling**2 * update_gram(self.each(A), B)
