"""The dispatch whose hidden part runs in Triton kernels (maps and legend: `dispatch.py`; kernels: `kernels.py`)."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .dispatch import Both, Dense

# The kernels keep a tile's rows for all columns n·r at once.
MOST_COLUMNS = 128

Activation = Callable[[torch.Tensor], torch.Tensor]

# Those of the kernels, by the names that the kernels know.
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def why_not_triton(num_columns: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """What keeps a batch from the kernels, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {device.type}, and Triton needs a GPU"
    if torch.compiler.is_compiling():
        return "the model is being compiled, which fuses these operations itself"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"there are no kernels for {dtype}"
    if num_columns > MOST_COLUMNS:
        return f"num_experts·r is {num_columns}, and the kernels take at most {MOST_COLUMNS}"
    return None


class Fused(Dense):
    """
    Products with all experts at once, like `Dense`; but no tensor of pairs [P, f] or updated pre-activation [T, f]
    exists: kernels compute the hidden activation from the base's pre-activations and low-rank inputs.
    """

    def of_pairs(
        self, G: torch.Tensor, U: torch.Tensor | None, low: Both, B: Both, A_down: torch.Tensor | None, act: Activation
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Mixing "output": `z = Σ_i g_i act(G + B_g h_g) (U + B_u h_u)` [T, f] and the pairs' `A_down a` [P, r], from
        G, U [T, f], low-rank inputs h [P, r], B [n, r, f] and A_down [n, r, f].
        """
        H_g, H_u = (None if h_PR is None else self._mask(h_PR) for h_PR in low)
        z_TF, low_PC = _run(G, U, (H_g, H_u), B, self.gates, A_down, act)
        return z_TF, None if low_PC is None else self._own_columns(low_PC)

    def of_updated(self, G: torch.Tensor, U: torch.Tensor | None, H: Both, B: Both, act: Activation) -> torch.Tensor:
        """Mixing "projection": `act(G + H_g B_g) (U + H_u B_u)` [T, f], with H of `weighted_columns`."""
        return _run(G, U, H, B, G.new_ones(self.tokens, 1), None, act)[0]


def _run(
    G: torch.Tensor, U: torch.Tensor | None, H: Both, B: Both, gates_TK: torch.Tensor, A_down: torch.Tensor | None,
    act: Activation,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    from .kernels import fused_hidden  # not before it is asked for: Triton may be missing

    name = _name(act)
    if name is None:
        raise refusal("there is no kernel for the block's activation")
    B_g, B_u, A_CF = (None if M is None else M.flatten(0, 1) for M in (*B, A_down))
    return fused_hidden(G, U, H, (B_g, B_u), gates_TK, A_CF, name)


def refusal(reason: str) -> ValueError:
    """What to raise where the kernels are pinned and cannot compute something."""
    return ValueError(f"pin_dispatch('triton'): {reason}; use 'dense-blocks'")


@functools.lru_cache(maxsize=1024)
def _name(act: Activation) -> str | None:
    """Which of the kernels' activations this one is, by its values; one with parameters is none of them."""
    if isinstance(act, nn.Module) and any(True for _ in act.parameters()):
        return None
    x = torch.linspace(-6, 6, 49, dtype=torch.float64)
    with torch.no_grad():
        values = act(x)
    return next((name for name, known in ACTIVATIONS.items() if torch.allclose(values, known(x), atol=1e-6)), None)
