"""
The adapter's mathematics as plain loops over tokens and experts, in float64: the reference for the library's layers.

It takes the layer's definition, `by_loop`, from the library, and none of the code that computes it without the loop. It
reads only a layer's values: parameters, the layout's names of the FFN's parts, the activation module, and the settings
of an adapter (`moe_lora_spec`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from moe_peft.adapter.experts.lora import by_loop
from moe_peft.routing import RouterSettings
from tests.helpers.close import WIDTH, assert_near

Tensors = dict[str, torch.Tensor]


@dataclass
class Outcome:
    """A layer's output, and the gradients of its input ("x") and of its parameters, by name."""

    output: torch.Tensor
    gradients: Tensors


def run(layer: nn.Module, x: torch.Tensor, d_output: torch.Tensor) -> Outcome:
    """What the library computes, for the input and all parameters that are trained."""
    x = x.detach().clone().requires_grad_()
    leaves = {"x": x, **{name: p for name, p in layer.named_parameters() if p.requires_grad}}
    output = layer(x)
    gradients = torch.autograd.grad(output, list(leaves.values()), d_output.to(output.dtype), allow_unused=True)
    return Outcome(output.detach(), _by_name(leaves, gradients))


def reference(
    layer: nn.Module,
    x: torch.Tensor,
    d_output: torch.Tensor,
    adapters: Sequence[str] = ("default",),
    masks: Tensors | None = None,
) -> Outcome:
    """
    What a `MoELoraFFN` or `MoELoraLinear` has to compute with `adapters` active, for the input and all parameters.

    Args:
        layer: the layer; its values are taken as they are, in float64.
        x: its input [..., d].
        d_output: the gradient of its output [..., d].
        adapters: the active adapters, whose updates of the projections add up.
        masks: by projection the dropout masks (already scaled) on the experts' input: [T, in], or [T, k, f] for the
            input of down in mixing "output", where each chosen expert has a hidden activation of its own.
    """
    x = x.detach().double().requires_grad_()
    leaves = {"x": x, **{name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}}
    tokens = x.reshape(-1, x.shape[-1])
    loops = [_Loop(layer, leaves, adapter, tokens, masks) for adapter in adapters]
    output = torch.stack([compose(loops, t) for t in range(len(tokens))]).reshape(*x.shape[:-1], -1)
    gradients = torch.autograd.grad(output, list(leaves.values()), d_output.double(), allow_unused=True)
    return Outcome(output.detach(), _by_name(leaves, gradients))


def merged_weight(layer: nn.Module, adapter: str, projection: str, expert: int) -> torch.Tensor:
    """`W + s·B_iᵀ A_i`, [out, in] in float64, of one projection of a layer."""
    leaves = {name: p.detach().double() for name, p in layer.named_parameters()}
    return _Loop(layer, leaves, adapter, None).merged(projection, expert)


def chosen_experts(layer: nn.Module, x: torch.Tensor, adapter: str = "default") -> list[list[int]]:
    """Each token's experts, the most probable first."""
    leaves = {name: p.detach().double() for name, p in layer.named_parameters()}
    return [list(gates) for gates in _Loop(layer, leaves, adapter, x.detach().double().reshape(-1, x.shape[-1])).gates]


def routed(
    settings: RouterSettings, parameters: Tensors, x: torch.Tensor, k: int, normalize: bool
) -> tuple[torch.Tensor, list[dict[int, torch.Tensor]]]:
    """
    What a router by itself has to compute.

    Args:
        settings: the router's.
        parameters: its parameters by name, and the number of experts as "n".
        x: tokens [T, d].

    Returns:
        logits [T, n], and for each token its experts' gates.
    """
    n = int(parameters["n"])
    spec = SimpleNamespace(num_experts=n, top_k=k, normalize_top_k=normalize, router=settings)
    leaves = {f"moe_lora_router.own.{name}": p for name, p in parameters.items()}
    loop = _Loop(SimpleNamespace(moe_lora_spec={"own": spec}), leaves, "own", x)
    return torch.stack([loop._router_logits(token) for token in x]), loop.gates


def assert_same(
    actual: Outcome, expected: Outcome, dtype: torch.dtype | None = None, scale: torch.Tensor | float = 0.0
) -> None:
    """Output and every gradient agree; `dtype` and `scale` of the gradients are those of `assert_near`."""
    trained = {name for name in expected.gradients if "moe_lora_" in name}
    assert trained | {"x"} <= actual.gradients.keys(), "an adapter parameter is not trained"
    dtype = dtype or actual.output.dtype
    assert_near(actual.output, expected.output, "output", dtype=dtype)
    rule = {"terms": 2 * WIDTH, "dtype": dtype, "scale": scale}  # the sums of a forward and a backward pass
    for name, gradient in actual.gradients.items():
        assert_near(gradient, expected.gradients[name], f"gradient of {name}", **rule)


def _by_name(leaves: Tensors, gradients: Sequence[torch.Tensor | None]) -> Tensors:
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


def compose(loops: Sequence[_Loop], t: int) -> torch.Tensor:
    """The output for token t with several adapters; the last one's experts have what the others add."""
    *others, last = sorted(loops, key=lambda loop: loop.order)
    last.others = others
    return last.token(t)


class _Loop:
    """One adapter of a layer (or None: the base alone), token by token."""

    def __init__(
        self,
        layer: nn.Module,
        leaves: Tensors,
        adapter: str | None,
        tokens: torch.Tensor | None,
        masks: Tensors | None = None,
    ) -> None:
        self.layer, self.leaves, self.adapter, self.tokens = layer, leaves, adapter, tokens
        self.masks = masks or {}
        self.layout = getattr(layer, "layout", None)  # a single linear has none
        self.spec = None if adapter is None else layer.moe_lora_spec[adapter]
        self.others: Sequence[_Loop] = ()  # whose updates come before this one's
        self.is_bottleneck = f"moe_lora_A.{adapter}.bottleneck" in leaves
        self.cache: dict[tuple[str, int], torch.Tensor] = {}
        self.gates = [] if tokens is None or adapter is None else [self._gates(x) for x in tokens]

    def token(self, t: int) -> torch.Tensor:
        """The output [d] for token t."""
        x = self.tokens[t]
        if self.adapter is None:
            return self._block(lambda name, v: self._base(name) @ v, x)
        gates = self.gates[t]
        if self.is_bottleneck:  # behind the FFN with the other adapters; several bottlenecks' changes of it add up
            beside = [loop for loop in self.others if loop.is_bottleneck]
            h = compose([loop for loop in self.others if not loop.is_bottleneck] or [self._base_alone()], t)
            return h + sum(
                sum(gate * loop._bottleneck(i, h, t) for i, gate in loop.gates[t].items()) - h
                for loop in (self, *beside)
            )
        return by_loop(
            x, gates, self._block, lambda name, v: self._base(name) @ v + self._of_others(name, v, t),
            lambda name, v, i: self._update(name, v, i, t), self.mixes_outputs,
        )  # fmt: skip

    def _base_alone(self) -> _Loop:
        return _Loop(self.layer, self.leaves, None, self.tokens)

    @property
    def mixes_outputs(self) -> bool:
        """Whether experts have activations of their own; with normalized gates, not if they are on down alone."""
        if self.spec is None or self.layout is None or self.spec.num_experts == 1 or self.spec.mixing == "projection":
            return False
        on_inputs = any(self._experts(name) is not None for name in self.layout.inputs)
        return on_inputs or not self.spec.normalize_top_k or self.spec.top_k == 1

    @property
    def order(self) -> int:
        return 2 if self.is_bottleneck else int(self.mixes_outputs)

    def _bottleneck(self, expert: int, h: torch.Tensor, t: int) -> torch.Tensor:
        """`U_i GELU(D_i h) + h`, where dropout acts on the input of D_i alone."""
        D, U = self._experts("bottleneck")
        if expert == len(U):
            return h
        inner = D[expert] @ (self.masks["bottleneck"][t] * h if "bottleneck" in self.masks else h)
        return U[expert].T @ (inner * 0.5 * (1 + torch.erf(inner / 2**0.5))) + h

    def merged(self, name: str, expert: int) -> torch.Tensor:
        """`W + s·B_iᵀ A_i`, [out, in]."""
        if (name, expert) not in self.cache:
            weight, experts = self._base(name), self._experts(name)
            if experts is not None and expert < len(experts[1]):  # the base, where there is one, is the last
                A, B = experts
                weight = weight + self._scaling() * (B[expert].T @ A[expert])
            self.cache[name, expert] = weight
        return self.cache[name, expert]

    def _block(self, product, x: torch.Tensor) -> torch.Tensor:
        """The whole FFN (or linear), whose products without bias are `product(projection, vector)`."""

        def project(name: str, v: torch.Tensor) -> torch.Tensor:
            bias = self._base(name, "bias")
            return product(name, v) if bias is None else product(name, v) + bias

        layout = self.layout
        if layout is None:
            return project("weight", x)
        functional = layout.act.startswith("F.")
        act = getattr(nn.functional, layout.act[2:]) if functional else getattr(self.layer.base_layer, layout.act)
        if layout.fused:
            both = project(layout.up, x)
            half = both.shape[0] // 2
            hidden = act(both[:half]) * both[half:]
        elif layout.gate is not None:
            hidden = act(project(layout.gate, x)) * project(layout.up, x)
        else:
            hidden = act(project(layout.up, x))
        return project(layout.down, hidden)

    def _update(self, name: str, v: torch.Tensor, expert: int, t: int) -> torch.Tensor | float:
        """`s B_iᵀ A_i v` of token t's expert i, with dropout where a mask is given; 0 of the base, the last expert."""
        experts = self._experts(name)
        if experts is None or expert == len(experts[1]):
            return 0.0
        A, B = experts
        if name in self.masks:
            mask = self.masks[name][t]
            v = v * (mask[list(self.gates[t]).index(expert)] if mask.dim() == 2 else mask)
        return self._scaling() * (B[expert].T @ (A[expert] @ v))

    def _of_others(self, name: str, v: torch.Tensor, t: int) -> torch.Tensor | float:
        """The updates of the other active adapters; none of those behind the FFN."""
        return sum(
            sum(gate * other._update(name, v, i, t) for i, gate in other.gates[t].items())
            + (other._base(name) - self._base_alone()._base(name)) @ v  # experts that serve every token
            for other in self.others
        )

    def _gates(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        """Expert to gate for one token, the most probable expert first."""
        spec = self.spec
        if spec.num_experts == 1:
            return {0: torch.ones((), dtype=x.dtype)}
        logits = self._router_logits(x)
        p = torch.softmax(logits, dim=0)
        score = torch.sigmoid(logits) if spec.router.type == "sigmoid" else p
        chosen = sorted(range(spec.num_experts), key=lambda i: -logits[i].item())[: spec.top_k]
        if spec.router.type == "top_p":
            while len(chosen) > 1 and sum(p[i] for i in chosen[:-1]) >= (spec.router.threshold or 0.8):
                chosen.pop()
        if spec.router.type == "threshold":
            least = spec.router.threshold or 1 / spec.num_experts
            chosen = chosen[:1] + [i for i in chosen[1:] if p[i] >= least]
        if spec.top_k == 1 and spec.normalize_top_k:  # straight-through: 1, with the probability's gradient
            return {chosen[0]: 1 + (score[chosen[0]] - score[chosen[0]].detach())}
        total = sum(score[i] for i in chosen) if spec.normalize_top_k else 1.0
        return {i: score[i] / total for i in chosen}

    def _router_logits(self, x: torch.Tensor) -> torch.Tensor:
        """One token's logits [n], by the kind of router."""
        router, n = self.spec.router, self.spec.num_experts
        own = {
            key: self.leaves.get(f"moe_lora_router.{self.adapter}.{key}")
            for key in ("weight", "hidden", "query", "mean_query", "key")
        }
        if router.type == "mlp":
            h = own["hidden"] @ x
            return own["weight"] @ (h * 0.5 * (1 + torch.erf(h / 2**0.5)))
        if router.type == "attention":
            width = own["key"].shape[2]
            if router.mixture == "sum":  # m matrices that move alike; the parameter's gradient is that of one
                mean = own["mean_query"][0]
                queries = [mean] + [mean.detach()] * ((router.num_heads or n) - 1)
            else:
                queries = list(own["query"])
            scores = [
                [torch.stack([(W @ x) @ K / width**0.5 for K in own["key"][i]]) for W in queries] for i in range(n)
            ]
            if router.mixture == "sum":  # an expert's best key, by the sum over all routers
                return torch.stack([sum(row).max() for row in scores])
            scores = [[each.max() for each in row] for row in scores]
            return torch.stack([max(row) for row in scores])
        if router.type == "locmoe":
            size = len(x) // n
            return torch.stack([x[i * size : (i + 1) * size].sum() / size for i in range(n)])
        logits = own["weight"] @ x
        return torch.sqrt(logits**2) if router.type == "arrow" else logits

    def _experts(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        A = self.leaves.get(f"moe_lora_A.{self.adapter}.{name}")
        if A is None:
            return None
        B = self.leaves[f"moe_lora_B.{self.adapter}.{name}"]
        return A.expand(len(B), -1, -1), B  # one A may be that of all experts

    def _base(self, name: str, what: str = "weight") -> torch.Tensor | None:
        """Weight [out, in] or bias of a base projection."""
        linear = self.layer.base_layer if self.layout is None else getattr(self.layer.base_layer, name)
        prefix = "base_layer." if self.layout is None else f"base_layer.{name}."
        value = self.leaves.get(prefix + what)
        value = value.T if what == "weight" and isinstance(linear, Conv1D) else value
        shared = self.leaves.get(f"moe_lora_shared_A.{self.adapter}.{name}")
        if what == "weight" and shared is not None:  # experts that serve every token
            value = value + self._scaling() * (self.leaves[f"moe_lora_shared_B.{self.adapter}.{name}"][0].T @ shared[0])
        return value

    def _scaling(self) -> float:
        return self.spec.lora_alpha / (self.spec.r**0.5 if self.spec.use_rslora else self.spec.r)
