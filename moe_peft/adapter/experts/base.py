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
from ..dispatch_choice import Routes
from ..ffn_layout import FFNLayout

# The shapes of the two tensors that hold the experts of one projection.
Shapes = tuple[tuple[int, ...], tuple[int, ...]]
Matrices = tuple[nn.ParameterDict, nn.ParameterDict]  # A and B by projection


class LinearHost(Protocol):
    """What experts read of the layer around them: of a tuner layer, or of a serving engine's."""

    def expert_parameters(self, adapter_name: str, /) -> Matrices: ...
    def shared_parameters(self, adapter_name: str, /) -> Matrices: ...
    def dropped(self, adapter_name: str, x_TM: torch.Tensor, count: int, /) -> list[torch.Tensor]: ...
    def route(self, adapter_name: str, x_TD: torch.Tensor, mixes_outputs: bool = False, /) -> Routes | None: ...


class FFNHost(LinearHost, Protocol):
    """The same around an FFN block."""

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
    """A and B of the given shapes, by name."""
    A, B = ({name: torch.empty(of_one[i]) for name, of_one in shapes.items()} for i in (0, 1))
    return nn.ParameterDict(A), nn.ParameterDict(B)


@dataclass(frozen=True)
class Experts:
    """
    The experts of one adapter on one module: their settings, after the config's patterns have been applied, and, in
    subclasses, everything that depends on what an expert is.

    The experts of each projection are two tensors, A and B, usually [n, …] each. They are parameters of the tuner
    layer (`MoELoraLayer.expert_parameters`), which is passed to the methods that compute.
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

    # --- traits: what the rest of the package reads ---
    unread: ClassVar[tuple[str, ...]] = ()  # fields of `MoELoraConfig` that would have no effect; they raise an error
    needs_ffn: ClassVar[bool] = False  # whether they stand behind an FFN; single linears then get LoRA experts
    holds_loras: ClassVar[bool] = False  # whether LoRAs that were trained apart can become such experts
    stacked: ClassVar[str] = "AB"  # which of the matrices have a part of their own for each expert
    no_lora: ClassVar[str] = ""  # why an expert is neither a LoRA nor a dense FFN with other weights; "": it is one

    @property
    def num_updates(self) -> int:
        """How many experts have matrices: all but the last, where that is the base."""
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
        """Whether a token's gates sum to something other than the constant 1; a single gate is 1 with a gradient."""
        return not self.normalize_top_k or self.top_k == 1

    # --- parameters ---

    def used_share(self, matrix: Literal["A", "B"]) -> Fraction:
        """The share of a matrix's parameters that one token uses, at most: routers may leave experts out."""
        n = self.num_updates
        return Fraction(min(self.top_k, n), n) if matrix in self.stacked else Fraction(1)

    def for_linear(self) -> Experts:
        """The experts of a single linear, which is not a part of a targeted FFN."""
        return self

    def shapes(self, projections: dict[str, tuple[int, int]]) -> dict[str, Shapes]:
        """
        The shapes of A and B by the name under which they are saved.

        Args:
            projections: in and out features of the module's projections, in the order of the forward pass.
        """
        raise NotImplementedError

    def shared_shapes(self, projections: dict[str, tuple[int, int]]) -> dict[str, Shapes]:
        """The same for the experts that serve every token, which are one LoRA of rank m·r."""
        size = self.num_shared_experts * self.rank
        shapes = self.shapes(projections) if size else {}
        return {name: ((1, size, A[-1]), (1, size, B[-1])) for name, (A, B) in shapes.items()}

    def reset(self, A_all: nn.ParameterDict, B_all: nn.ParameterDict) -> None:
        """
        Initialize the experts of all projections, as `MoELoraConfig.init_lora_weights` says: A uniform as in LoRA, or
        normal; B zero, so that the module's output does not change at first, or random, too.
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
        The output [T, d] of an FFN with the experts of `adapters`, which are all of this kind.

        Args:
            h_TD: for experts that stand behind an FFN, its output with the adapters inside; None: without any.
        """
        raise NotImplementedError

    def linear_output(
        self, layer: LinearHost, adapter: str, x_TM: torch.Tensor, y_TM: torch.Tensor, in_place: bool
    ) -> torch.Tensor:
        """The output of a single linear, from its input and the base's output, which `in_place` allows to overwrite."""
        raise NotImplementedError

    # --- an expert by itself ---

    def to_lora(self, A: torch.Tensor, B: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert with matrices as a LoRA, A [r, in] and B [out, r], of rank `r` and scaling `scaling`."""
        raise InputError(self.no_lora)

    def from_loras(self, A: Sequence[torch.Tensor], B: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of one projection from their LoRAs, A [r, in] and B [out, r] each."""
        raise InputError(self.no_lora)

    def merge(self, weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor, expert: int) -> torch.Tensor:
        """The projection's weight [out, in] with one expert merged, float32."""
        if expert == self.num_updates:  # the base
            return weight.float()
        A_RI, B_OR = self.to_lora(A, B, expert)
        return torch.addmm(weight.float(), B_OR.float(), A_RI.float(), alpha=self.scaling)

    # --- experts compared with each other ---

    def gram(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Inner products of what one projection's experts are compared by, float64 [n, n]."""
        raise NotImplementedError
