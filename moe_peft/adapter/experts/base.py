"""
The base class of the kinds of experts.

Legend: T tokens, n experts, r rank, m, d, f widths (in or out features), A a kind's first matrices, B its second ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from ...routing.routers import RouterSettings
from ...utils.messages import InputError
from ..dispatch_choice import BatchRoutes
from ..ffn_layout import FFNLayout

# The shapes of the two tensors that hold the experts of one projection.
Shapes = tuple[tuple[int, ...], tuple[int, ...]]
Matrices = tuple[nn.ParameterDict, nn.ParameterDict]  # A and B by projection


class LinearHost(Protocol):
    """Interface of the layer around experts: a tuner layer, or a layer of a serving engine."""

    def expert_parameters(self, adapter_name: str, /) -> Matrices: ...
    def shared_parameters(self, adapter_name: str, /) -> Matrices: ...
    def dropped(self, adapter_name: str, x_TM: torch.Tensor, count: int, /) -> list[torch.Tensor]: ...
    def route(self, adapter_name: str, x_TD: torch.Tensor, mixes_outputs: bool = False, /) -> BatchRoutes | None: ...


class FFNHost(LinearHost, Protocol):
    """Interface of an FFN block around experts."""

    layout: FFNLayout
    training: bool

    @property
    def base_layer(self) -> Any: ...  # the block
    def dropout_rate(self, adapter_name: str, /) -> float: ...
    @property
    def moe_lora_spec(self) -> Mapping[str, Any]: ...  # adapter → its experts
    def projection(self, name: str, /) -> nn.Module: ...
    def input_projections(self, x_TD: torch.Tensor, /) -> Sequence[torch.Tensor]: ...
    def base_output(self, x_TD: torch.Tensor, /) -> torch.Tensor: ...


def empty_parameters(shapes: dict[str, Shapes]) -> Matrices:
    """Return uninitialized A and B of the given shapes, by name."""
    A, B = ({name: torch.empty(of_one[i]) for name, of_one in shapes.items()} for i in (0, 1))
    return nn.ParameterDict(A), nn.ParameterDict(B)


@dataclass(frozen=True)
class Experts:
    """
    The experts of one adapter on one module: their settings, with the config's patterns applied. Subclasses add
    everything specific to a kind of expert.

    The experts of each projection are two tensors, A and B, usually [n, …] each. They are parameters of the tuner layer
    (`MoELoraLayer.expert_parameters`). The methods that compute get the layer as an argument.
    """

    num_experts: int
    base_expert: bool
    num_shared_experts: int
    top_k: int
    r: int
    lora_alpha: float
    use_rslora: bool
    lora_dropout: float
    mixing: Literal["output", "projection"]
    normalize_top_k: bool
    router: RouterSettings
    init_lora_weights: bool | Literal["gaussian"]
    target_projections: frozenset[str] | None
    bottleneck_size: int

    # --- traits: read by the rest of the package ---
    unread: ClassVar[tuple[str, ...]] = ()  # fields of `MoELoraConfig` without an effect; they raise an error
    needs_ffn: ClassVar[bool] = False  # whether experts run after an FFN; single linears then get LoRA experts
    holds_loras: ClassVar[bool] = False  # whether separately trained LoRAs can become such experts
    stacked: ClassVar[str] = "AB"  # the matrices with a separate part for each expert
    no_lora: ClassVar[str] = ""  # why an expert is neither a LoRA nor a dense FFN with other weights; "": it is one

    @property
    def num_updates(self) -> int:
        """Number of experts with matrices: one less than `num_experts` if the last is the base."""
        return self.num_experts - self.base_expert

    @property
    def rank(self) -> int:
        """r, the size of each expert's inner dimension."""
        return self.r

    @property
    def scaling(self) -> float:
        """s, the factor of every expert's update."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)

    @property
    def sum_of_gates_counts(self) -> bool:
        """True if the sum of a token's gates is not the constant 1. A single gate is 1, but with a gradient."""
        return not self.normalize_top_k or self.top_k == 1

    # --- parameters ---

    def used_share(self, matrix: Literal["A", "B"]) -> Fraction:
        """Return the largest share of a matrix's parameters used by one token. Routers may leave experts out."""
        n = self.num_updates
        return Fraction(min(self.top_k, n), n) if matrix in self.stacked else Fraction(1)

    def for_linear(self) -> Experts:
        """Return the experts for a single linear outside a targeted FFN."""
        return self

    def shapes(self, projections: dict[str, tuple[int, int]]) -> dict[str, Shapes]:
        """
        Return the shapes of A and B, by the name under which they are saved.

        Args:
            projections: in and out features of the module's projections, in the order of the forward pass.
        """
        raise NotImplementedError

    def shared_shapes(self, projections: dict[str, tuple[int, int]]) -> dict[str, Shapes]:
        """
        Return the shapes of the m shared experts' A and B. Shared experts serve every token and are one LoRA of rank
        m·r.
        """
        size = self.num_shared_experts * self.rank
        shapes = self.shapes(projections) if size else {}
        return {name: ((1, size, A[-1]), (1, size, B[-1])) for name, (A, B) in shapes.items()}

    def reset(self, A_all: nn.ParameterDict, B_all: nn.ParameterDict) -> None:
        """
        Initialize the experts of all projections, as described in `MoELoraConfig.init_lora_weights`. A is uniform as in
        LoRA, or normal. B is zero, so the module's output does not change at first, or random.
        """
        for A in A_all.values():
            if self.init_lora_weights == "gaussian":
                nn.init.normal_(A, std=1 / self.rank)
            else:  # Kaiming uniform with a = √5, whose bound is 1/√fan_in
                nn.init.uniform_(A, -(A.shape[-1] ** -0.5), A.shape[-1] ** -0.5)
        for B in B_all.values():
            if self.init_lora_weights is False:
                nn.init.uniform_(B, -(self.rank**-0.5), self.rank**-0.5)
            else:
                nn.init.zeros_(B)

    # --- forward ---

    @classmethod
    def ffn_output(
        cls, ffn: FFNHost, adapters: Sequence[str], x_TD: torch.Tensor, h_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        Return the output [T, d] of an FFN with the experts of `adapters`, all of this kind.

        Args:
            h_TD: for experts after an FFN, its output with the adapters inside it; None: there are none inside.
        """
        raise NotImplementedError

    def linear_output(
        self, layer: LinearHost, adapter: str, x_TM: torch.Tensor, y_TM: torch.Tensor, in_place: bool
    ) -> torch.Tensor:
        """
        Return the output of a single linear, from its input and the base's output. With `in_place`, the base's output
        may be overwritten.
        """
        raise NotImplementedError

    # --- an expert by itself ---

    def to_lora(self, A: torch.Tensor, B: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one expert with matrices as a LoRA, A [r, in] and B [out, r], of rank `rank` and scaling `scaling`."""
        raise InputError(self.no_lora)

    def from_loras(self, A: Sequence[torch.Tensor], B: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the A and B of one projection's experts, from each expert's LoRA, A [r, in] and B [out, r]."""
        raise InputError(self.no_lora)

    def merge(self, weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the projection's weight [out, in] with one expert merged, float32."""
        if expert == self.num_updates:  # the base
            return weight.float()
        A_RI, B_OR = self.to_lora(A, B, expert)
        return torch.addmm(weight.float(), B_OR.float(), A_RI.float(), alpha=self.scaling)

    # --- experts compared with each other ---

    def gram(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Return the inner products of one projection's experts, to compare the experts, float64 [n, n]."""
        raise NotImplementedError
