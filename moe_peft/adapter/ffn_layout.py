"""FFN layouts: the projections and the activation of an FFN block in a dense model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..utils.distributed import gathered
from ..utils.messages import InputError
from ..utils.torch_contexts import evaluating
from .liger import plain_forward


@dataclass(frozen=True)
class FFNLayout:
    """
    Names of the parts of an FFN block. Its forward is `down(act(gate(x)) * up(x))`, `down(act(up(x)))`, or, with
    `fused=True`, `down(act(g) * u)` where `g, u = up(x).chunk(2)`.

    Args:
        up: the projection d → f (d → 2f, gate first, when `fused`).
        down: the projection f → d.
        act: the activation, a module or a function. `"F.silu"` is torch's function, for blocks that call it.
        gate: the gate projection d → f, if it is separate.
        fused: whether `up` computes gate and up in one product.
        dropout: the dropout on the block's output, a module or a probability.
        residual: whether the block takes a second argument and adds it to its output after the dropout (BLOOM, MPT).

    Example:

    ```python
    >>> from moe_peft import FFNLayout
    >>> layout = FFNLayout(gate="w1", up="w3", down="w2", act="act_fn")
    >>> layout.projections
    ('w1', 'w3', 'w2')
    ```
    """

    up: str
    down: str
    act: str
    gate: str | None = None
    fused: bool = False
    dropout: str | None = None
    residual: bool = False

    def __post_init__(self) -> None:
        if self.act.startswith("F.") and not hasattr(F, self.act[2:]):
            raise InputError(f"FFNLayout: act={self.act!r}: torch.nn.functional has no such function")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Projections of the block's input."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    @property
    def projections(self) -> tuple[str, ...]:
        return (*self.inputs, self.down)

    def matches(self, module: nn.Module) -> bool:
        """
        Return whether `module` has every part named by the layout, and the projections' sizes agree. If the activation
        is torch's function, the projections must be the only parts: another part might be another activation.
        """
        parts = [*self.projections, *(part for part in (self.act, self.dropout) if part and not part.startswith("F."))]
        if not all(hasattr(module, part) for part in parts):
            return False
        if self.act.startswith("F.") and {name for name, _ in module.named_children()} != set(self.projections):
            return False
        f = getattr(getattr(module, self.down), "in_features", None)
        out = getattr(getattr(module, self.up), "out_features", None)
        return f is None or out is None or out == (2 * f if self.fused else f)

    def split(self, pre: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the activation's input and, in gated FFNs, the factor of its output, from the outputs of `inputs`."""
        if self.fused:
            gate, up = pre[0].chunk(2, dim=-1)
            return gate, up
        return pre[0], (pre[1] if len(pre) == 2 else None)

    def join(self, gate: torch.Tensor, up: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the outputs of `inputs`, the inverse of `split`."""
        if up is None:
            return [gate]
        return [torch.cat([gate, up], dim=-1)] if self.fused else [gate, up]

    def activation(self, ffn: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the block's activation as a function that does not change its input."""
        if self.act.startswith("F."):
            return getattr(F, self.act[2:])
        act = getattr(ffn, self.act)
        in_place = getattr(act, "__dict__", {}).get("inplace", False)  # a module's `getattr` is slow for a missing name
        return (lambda x: act(x.clone())) if in_place else act

    def hidden(self, ffn: nn.Module, pre: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the hidden activation [..., f], from the outputs of `inputs`."""
        gate, up = self.split(pre)
        activated = self.activation(ffn)(gate)
        return activated if up is None else activated * up

    def drop(self, ffn: nn.Module, output: torch.Tensor) -> torch.Tensor:
        """Apply the block's dropout to its output [..., d]."""
        if self.dropout is None:
            return output
        dropout = getattr(ffn, self.dropout)
        if isinstance(dropout, nn.Module):
            return dropout(output)
        return F.dropout(output, p=dropout, training=ffn.training)

    def block(self, forward: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Run a block, or its forward, without a residual, [..., d] to [..., d]."""
        return forward(x, torch.zeros_like(x)) if self.residual else forward(x)


# The first layout that matches a module is used, so a layout comes before layouts with fewer of its parts.
_LAYOUTS: list[FFNLayout] = [
    FFNLayout(gate="gate_proj", up="up_proj", down="down_proj", act="act_fn"),  # Llama, Qwen, Gemma, OLMo2, Granite, …
    FFNLayout(up="gate_up_proj", down="down_proj", act="activation_fn", fused=True),  # Phi-3, GLM
    FFNLayout(up="c_fc", down="c_proj", act="act", dropout="dropout"),  # GPT-2
    FFNLayout(up="c_fc", down="c_proj", act="act", dropout="residual_dropout"),  # StarCoder2
    FFNLayout(up="dense_h_to_4h", down="dense_4h_to_h", act="act"),  # GPT-NeoX, Falcon
    FFNLayout(up="fc1", down="fc2", act="activation_fn"),  # Phi
    FFNLayout(up="fc1", down="fc2", act="activation_fn", fused=True),  # Moshi
    FFNLayout(gate="gate_proj", up="up_proj", down="down_proj", act="activation_fn"),  # Llama 4's dense layers
    FFNLayout(up="up_proj", down="down_proj", act="act_fn"),  # Nemotron
    FFNLayout(up="up_proj", down="down_proj", act="act", dropout="hidden_dropout", residual=True),  # MPT
    FFNLayout(
        up="dense_h_to_4h", down="dense_4h_to_h", act="gelu_impl", dropout="hidden_dropout", residual=True
    ),  # BLOOM
    FFNLayout(up="fc_in", down="fc_out", act="act", dropout="dropout"),  # GPT-J, CodeGen
    FFNLayout(up="Wi", down="Wo", act="act", fused=True),  # ModernBERT decoder
    FFNLayout(up="input_linear", down="output_linear", act="activation", fused=True),  # GraniteMoeHybrid's shared MLP
    FFNLayout(gate="w1", up="w3", down="w2", act="F.silu"),  # LFM2
]


def register_ffn_layout(layout: FFNLayout) -> None:
    """
    Add a layout. It is tried before the built-in ones.

    Args:
        layout: names of the parts of an FFN.

    Example:

    ```python
    >>> from moe_peft import FFNLayout, register_ffn_layout
    >>> register_ffn_layout(FFNLayout(up="lin1", down="lin2", act="activation"))
    ```
    """
    if layout not in _LAYOUTS:
        _LAYOUTS.insert(0, layout)


def find_layout(module: nn.Module) -> FFNLayout | None:
    """Return the layout of an FFN block, or None if no registered layout names its parts."""
    return None if isinstance(module, GradientCheckpointingLayer) else _layout_of_parts(module)


def layout_in_layer(module: nn.Module) -> FFNLayout | None:
    """
    Return the layout of an FFN without a block: its parts are children of the decoder layer `module` (OPT). Otherwise,
    return None.
    """
    return _layout_of_parts(module) if isinstance(module, GradientCheckpointingLayer) else None


def _layout_of_parts(module: nn.Module) -> FFNLayout | None:
    return next((layout for layout in _LAYOUTS if layout.matches(module)), None)


def dense_forward(layout: FFNLayout, ffn: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute the FFN from its parts, [..., d] to [..., d]."""
    pre = [getattr(ffn, name)(x) for name in layout.inputs]
    return layout.drop(ffn, getattr(ffn, layout.down)(layout.hidden(ffn, pre)))


@torch.no_grad()
def probe_ffn(layout: FFNLayout, ffn: nn.Module, in_features: int, device: torch.device, dtype: torch.dtype) -> bool:
    """
    Return whether the layout computes the same as the block's own forward on a few random tokens, and names every
    dropout of the block.

    Weights sharded by ZeRO-3 are gathered. Blocks that cannot run pass: their weights are not available (on the meta
    device, or sharded by FSDP2), or they are of Liger's classes, whose kernels do not run on a CPU.
    """
    dropouts = [m for m in ffn.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    if any(m is not getattr(ffn, layout.dropout or "", None) for m in dropouts):
        return False
    if device.type == "meta" or any(_is_sharded(p) for p in ffn.parameters()):
        return True
    forward = plain_forward(ffn)
    if forward is None:
        return True
    x = torch.randn(1, 4, in_features, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    try:
        with evaluating(ffn), gathered(ffn.parameters()):
            expected, output = layout.block(forward, x), dense_forward(layout, ffn, x)
    except TypeError:  # the block needs more arguments than its input
        return False
    if not isinstance(expected, torch.Tensor) or expected.shape != output.shape:
        return False
    tolerance = max(1e-5, 8 * torch.finfo(expected.dtype).eps)
    return bool((expected - output).abs().max() <= tolerance * expected.abs().max())


def _is_sharded(parameter: nn.Parameter) -> bool:
    return parameter.device.type == "meta" or hasattr(parameter, "placements")
