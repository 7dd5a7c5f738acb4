"""Router modules: hidden states [..., d] to float32 router logits [T, n], T the number of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class LinearRouter(nn.Module):
    """
    A linear gate, logits = x Wᵀ, computed in float32 whatever the storage type or the autocast context.

    Args:
        hidden_size: d, the size of the FFN's input.
        num_experts: n.
        jitter_noise: in training, the input is multiplied by U(1 - ε, 1 + ε) (Fedus et al., 2021, section 2.4).
        std: standard deviation of the initial weight (transformers' `initializer_range`).
    """

    def __init__(self, hidden_size: int, num_experts: int, jitter_noise: float = 0.0, std: float = 0.02) -> None:
        super().__init__()
        self.jitter_noise = jitter_noise
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.normal_(self.weight, std=std)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Router logits of hidden states [..., d]: float32 [T, n]."""
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1]).float()
        if self.training and self.jitter_noise:
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - self.jitter_noise, 1 + self.jitter_noise)
        if torch.is_autocast_enabled(x_TD.device.type):
            with torch.autocast(x_TD.device.type, enabled=False):
                return F.linear(x_TD, self.weight.float())
        return F.linear(x_TD, self.weight.float())

    def extra_repr(self) -> str:
        return f"hidden_size={self.weight.shape[1]}, num_experts={self.weight.shape[0]}"
