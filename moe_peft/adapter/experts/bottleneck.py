"""
Bottleneck experts after the FFN (PESC, Wu et al., 2024, arXiv 2401.02731, section 3).

Legend: T tokens, n experts, b the bottleneck's size, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
import torch.nn.functional as F

from ...utils.expert_likeness import value_gram
from ...utils.torch_contexts import without_autocast
from .base import Experts, FFNHost, Shapes
from .lora import LoraExperts

_NAME = "bottleneck"  # the name of the parameters; LoRA experts use a projection's name


class BottleneckExperts(Experts):
    """
    `y = Σ_i g_i (U_i GELU(D_i h) + h)` for the FFN's output h, with D_i [b, d] and U_i [d, b]. D is stored as A, and Uᵀ
    as B, both [n, b, d]. `r`, `lora_alpha` and their patterns do not apply.
    """

    unread = ("mixing", "target_projections", "num_shared_experts")
    needs_ffn = True
    no_lora = "such an expert stands behind the FFN, with a non-linearity between; only expert_type='lora' has this"

    @property
    def rank(self) -> int:
        return self.bottleneck_size

    @property
    def scaling(self) -> float:
        return 1.0

    def for_linear(self) -> Experts:
        return LoraExperts(**{field.name: getattr(self, field.name) for field in fields(self)}).for_linear()

    def shapes(self, projections: dict[str, tuple[int, int]]) -> dict[str, Shapes]:
        d = list(projections.values())[-1][1]  # the down projection's
        return {_NAME: ((self.num_updates, self.rank, d), (self.num_updates, self.rank, d))}

    @classmethod
    def ffn_output(
        cls, ffn: FFNHost, adapters: Sequence[str], x_TD: torch.Tensor, h_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        # The FFN, once for all adapters: the experts read its output.
        if h_TD is None:
            h_TD = ffn.base_output(x_TD)
        outputs = [ffn.moe_lora_spec[adapter]._behind(ffn, adapter, x_TD, h_TD) for adapter in adapters]
        y_TD = outputs[0]
        for other_TD in outputs[1:]:
            y_TD = y_TD + other_TD - h_TD
        return y_TD

    def _behind(self, ffn: FFNHost, adapter: str, x_TD: torch.Tensor, h_TD: torch.Tensor) -> torch.Tensor:
        """Return one adapter's output. The residual is `(Σ_i g_i) h`, equal to h if gates sum to 1."""
        routes = ffn.route(adapter, x_TD)
        dispatch = None if routes is None else routes.dispatch(h_TD.dtype)
        cast = torch.Tensor.to if dispatch is None else dispatch.cast
        D_NBD, U_NBD = (cast(weights[_NAME], h_TD.dtype) for weights in ffn.expert_parameters(adapter))
        inputs = ffn.dropped(adapter, h_TD, 1)  # one mask for all experts; the residual has none
        with without_autocast(h_TD):
            if dispatch is None:
                return torch.addmm(h_TD, F.gelu(inputs[0] @ D_NBD[0].T), U_NBD[0])
            (low,) = dispatch.shrink_tokens(inputs, [D_NBD])
            if self.sum_of_gates_counts:
                h_TD = h_TD * dispatch.gates.sum(-1, keepdim=True)
            return dispatch.expand_collect([F.gelu(low_PB) for low_PB in low], U_NBD, h_TD)

    def gram(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """
        Return inner products of the weights. Hidden units are compared one by one, because of the non-linearity between
        the matrices.
        """
        return value_gram(A.flatten(1)) + value_gram(B.flatten(1))
