"""
Gates without training, for existing experts (LoRA adapters, dense checkpoints). `GATE_INITS` is the table of
initializers. A new one is a class and a line there.

An initializer says which sums it needs of the inputs x of a routed layer, and computes gates from the sums. Sums do not
depend on the order of the calibration texts. All layers take their sums in one pass over the base.

Legend: B texts of a batch, S positions, T real tokens, n experts, d hidden size, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from ..adapter.ffn_layout import find_layout
from ..routing.routers import LinearRouter
from ..utils.distributed import check_whole
from ..utils.messages import InputError, choice_error
from ..utils.torch_contexts import double
from .gates import put_gates
from .introspection import base_passes
from .layer import Updates, adapter_layers

Sums = dict[str, torch.Tensor]

# --- initializers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchLabels:
    """
    Experts of a batch's calibration texts.

    Args:
        expert_B: the expert for each text, int64 [B].
        negative_B: whether the text is an example of what the expert is *not* for, bool [B].
        text_T: the text of each real token, int64 [T].
        num_experts: n.
    """

    expert_B: torch.Tensor
    negative_B: torch.Tensor
    text_T: torch.Tensor
    num_experts: int


class GateInit:
    """
    Base class of initializers: they set gates without training. Fields are settings.

    Example:

    ```python
    >>> import torch
    >>> from moe_peft.models.gate_init import GATE_INITS, GateInit
    >>> class Means(GateInit):
    ...     def sums(self, x_TD, labels):
    ...         one_hot_TN = torch.eye(labels.num_experts).to(x_TD)[
    ...             labels.expert_B[labels.text_T]
    ...         ]
    ...         return {"x": one_hot_TN.T @ x_TD}
    ...
    ...     def gates(self, sums, updates):
    ...         return torch.nn.functional.normalize(sums["x"], dim=-1)
    >>> GATE_INITS["means"] = Means
    ```
    """

    router_type: ClassVar[str] = "linear"  # the kind of router for such gates
    needs_texts: ClassVar[bool] = True
    top_k: ClassVar[int] = 1  # suitable number of experts per token for such gates

    def sums(self, x_TD: torch.Tensor, labels: BatchLabels) -> Sums:
        """Return the sums to add up over batches, from the inputs of a layer at real tokens, float64 [T, d]."""
        raise NotImplementedError

    def gates(self, sums: Sums, updates: Updates) -> torch.Tensor:
        """
        Return the gates [n, d].

        Args:
            sums: the added up `sums`; empty if `needs_texts` is False.
            updates: the LoRA experts of the layer, without their common scaling; empty for dense checkpoints.
        """
        raise NotImplementedError

    def with_kept_sums(self) -> GateInit | None:
        """
        Return the initializer of the same gates whose sums a mixture may keep, so that an expert can join or leave with
        only its own texts. None if there is none.

        The sums must be named `"{expert}.{kind}"`, and those of texts for no expert `"-1.{kind}"`. Gates must follow
        from the sums of any experts 0 to n-1. `"{expert}.xx"` is a symmetric matrix [d, d].
        """
        return None


@dataclass(frozen=True)
class RidgeGates(GateInit):
    """
    Ridge regression from a token's x to the expert of its text, `W = (XᵀX + λI)⁻¹ XᵀY` with the columns divided by
    their norms, and logits `Wᵀx / τ` (DUME, arXiv 2603.29765, without the column of ones: gates have no bias). 1/τ is
    part of the weight.

    Args:
        penalty: λ.
        temperature: τ.
        by_expert: keep XᵀX of each expert's texts, in n times the memory. An expert can then join with only its own
            texts. Gates without an expert are then the same as if the expert had never been there.
    """

    penalty: float = 1e-2
    temperature: float = 0.1
    by_expert: bool = False

    def sums(self, x_TD: torch.Tensor, labels: BatchLabels) -> Sums:
        if self.by_expert:
            expert_T = torch.where(labels.negative_B, -1, labels.expert_B)[labels.text_T]
            parts = {expert: x_TD[expert_T == expert] for expert in sorted({*expert_T.tolist()})}
            products = {f"{expert}.xx": x_PD.T @ x_PD for expert, x_PD in parts.items()}
            return products | {f"{expert}.x": x_PD.sum(0) for expert, x_PD in parts.items() if expert >= 0}
        target_BN = F.one_hot(labels.expert_B, labels.num_experts).to(x_TD) * ~labels.negative_B.unsqueeze(1)
        return {"xx": x_TD.T @ x_TD, "xy": x_TD.T @ target_BN[labels.text_T]}

    def gates(self, sums: Sums, updates: Updates) -> torch.Tensor:
        if self.by_expert:
            experts = sorted(int(name.removesuffix(".x")) for name in sums if name.endswith(".x"))
            products = [sums[name] for name in (*(f"{expert}.xx" for expert in experts), "-1.xx") if name in sums]
            sums = {
                "xx": torch.stack(products).sum(0),
                "xy": torch.stack([sums[f"{expert}.x"] for expert in experts], 1),
            }
        unit_DD = torch.eye(len(sums["xx"])).to(sums["xx"])
        weight_DN = torch.linalg.solve(sums["xx"] + self.penalty * unit_DD, sums["xy"])
        return F.normalize(weight_DN, dim=0).T / self.temperature

    def with_kept_sums(self) -> RidgeGates:
        return replace(self, by_expert=True)


@dataclass(frozen=True)
class PromptGates(GateInit):
    """
    Row i is the mean over expert i's texts minus the mean over its negative texts, divided by its norm. These are the
    gates "hidden" of mergekit's mixtures, but from the FFN's input, the input of the gate. For an expert without
    negative texts, the texts of the other experts are negative.

    Args:
        pooling: how to represent a text: by the `"mean"` of its tokens' x, or by the `"last"` token's.
    """

    top_k: ClassVar[int] = 2
    pooling: Literal["mean", "last"] = "mean"

    def sums(self, x_TD: torch.Tensor, labels: BatchLabels) -> Sums:
        B, n = len(labels.expert_B), labels.num_experts
        count_B = torch.bincount(labels.text_T, minlength=B)
        if self.pooling == "mean":
            x_BD = x_TD.new_zeros(B, x_TD.shape[1]).index_add_(0, labels.text_T, x_TD) / count_B.clamp(min=1)[:, None]
        else:
            x_BD = x_TD[count_B.cumsum(0) - 1]
        row_B = labels.expert_B + n * labels.negative_B  # negative texts follow the others
        member_2NB = F.one_hot(row_B, 2 * n).T.to(x_TD) * (count_B > 0)
        return {"x": member_2NB @ x_BD, "texts": member_2NB.sum(1)}

    def gates(self, sums: Sums, updates: Updates) -> torch.Tensor:
        (x_ND, without_ND), (count_N, without_N) = sums["x"].chunk(2), sums["texts"].chunk(2)
        others = without_N.unsqueeze(1) == 0
        without_ND = torch.where(others, x_ND.sum(0) - x_ND, without_ND)
        without_N = torch.where(others.squeeze(1), count_N.sum() - count_N, without_N)
        return F.normalize(x_ND / count_N[:, None] - without_ND / without_N.clamp(min=1)[:, None], dim=-1)


@dataclass(frozen=True)
class ArrowGates(GateInit):
    """
    Row i is the top right singular vector of expert i's updates B A on the projections of x, and a logit is `|v·x|`
    (Arrow, arXiv 2405.11157). It needs LoRA experts but no data, and does not fold into a linear gate.

    Args:
        iterations: number of steps of the power method.
    """

    router_type: ClassVar[str] = "arrow"
    needs_texts: ClassVar[bool] = False
    iterations: int = 15

    def gates(self, sums: Sums, updates: Updates) -> torch.Tensor:
        if not updates:
            raise InputError(
                "gates='arrow': no LoRA expert reads the input of a routed layer; use 'ridge' or 'prompts'"
            )
        factors = [(double(A), double(B).mT @ double(B)) for A, B in updates]  # B enters only as BᵀB [n, r, r]
        n, _, d = factors[0][0].shape
        generator = torch.Generator().manual_seed(0)
        v_ND1 = torch.randn(1, d, 1, generator=generator, dtype=torch.float64).to(factors[0][0]).expand(n, d, 1)
        for _ in range(self.iterations):
            v_ND1 = F.normalize(sum(A.mT @ (BB @ (A @ v_ND1)) for A, BB in factors), dim=1)  # type: ignore[arg-type]
        return v_ND1.squeeze(-1)  # zero for an expert without an update of x


GATE_INITS: dict[str, type[GateInit]] = {"ridge": RidgeGates, "prompts": PromptGates, "arrow": ArrowGates}

# --- models ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def init_gates(
    model: nn.Module,
    gates: str | GateInit,
    batches: Iterable[Mapping[str, Any]] | None = None,
    *,
    former: Sequence[Sums] | None = None,
    adapter_name: str | None = None,
) -> list[Sums]:
    """
    Set the gates of a MoE-LoRA adapter's experts without training.

    A router with linear logits keeps its kind. Other routers become linear gates, or Arrow routers with `"arrow"`.

    Args:
        model: a model with a MoE-LoRA adapter, for example from `lora_to_moe`.
        gates: a name in `GATE_INITS`, or an initializer with other settings, such as `RidgeGates(temperature=0.2)`.
        batches: calibration texts, for example from `moe_peft.training.preparation.calibration_batches`: `input_ids`
            [B, S]; with padding, `attention_mask` [B, S]; `expert` [B], the expert for each text; and, if some texts
            are examples of what their expert is not for, `negative` [B]. They run through the base once, without the
            adapter.
        former: sums of other experts' texts, returned by an earlier call with the same `gates`, such as
            `RidgeGates(by_expert=True)`, from `GateInit.with_kept_sums`. The batches are added to them.
        adapter_name: the adapter; the active one if None.

    Returns:
        the sums of each routed layer, as needed by the initializer.

    Raises:
        ValueError: the model has no such adapter; an expert has no text; or, with `"arrow"`, no LoRA reads a layer's
            input.

    Example:

    ```python
    >>> import torch
    >>> from peft import get_peft_model
    >>> from transformers import AutoModelForCausalLM
    >>> from moe_peft import MoELoraConfig, init_gates
    >>> base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> model = get_peft_model(
    ...     base, MoELoraConfig(num_experts=2, task_type="CAUSAL_LM")
    ... )
    >>> texts = {
    ...     "input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]]),
    ...     "expert": torch.tensor([0, 1]),
    ... }
    >>> init_gates(model, "ridge", [texts])
    ```
    """
    check_whole(model, "init_gates")
    way, layers = find_gate_init(gates), adapter_layers(model, adapter_name, "init_gates")
    routers = [layer.router for layer in layers]
    sizes = sorted({layer.num_experts for layer in layers})
    if len(sizes) > 1:
        raise InputError(f"init_gates: layers have {sizes} experts; texts for each need the same number in all")
    if not way.needs_texts and layers[0].experts.base_expert:
        raise InputError(f"init_gates: {gates!r} reads LoRAs, and the base_expert has none; use gates from texts")
    sums = _sums(model, [layer.module for layer in layers], sizes[0], way, batches, former)
    made = [way.gates(of_layer, layer.updates()) for of_layer, layer in zip(sums, layers, strict=True)]
    old_type = routers[0].settings.type
    keeps = isinstance(routers[0], LinearRouter) and way.router_type == "linear"
    router_type = old_type if keeps else way.router_type
    put_gates(model, layers, router_type, made)
    return sums


def dense_gates(
    dense: nn.Module, gates: str | GateInit, batches: Iterable[Mapping[str, Any]], num_experts: int
) -> list[torch.Tensor]:
    """Return gates [n, d] for the FFN of each layer of a dense model, float64; see `init_gates`."""
    way = find_gate_init(gates)
    ffns = [module for module in dense.modules() if find_layout(module) is not None]
    with torch.no_grad():
        sums = _sums(dense, ffns, num_experts, way, batches)
        return [way.gates(of_layer, ()).cpu() for of_layer in sums]


def find_gate_init(gates: str | GateInit) -> GateInit:
    """Return the initializer for a name. An initializer is returned unchanged."""
    if isinstance(gates, GateInit):
        return gates
    if gates not in GATE_INITS:
        raise InputError(choice_error("gates", gates, GATE_INITS))
    return GATE_INITS[gates]()


def _sums(
    model: nn.Module, modules: Sequence[nn.Module], n: int, way: GateInit, batches: Any,
    former: Sequence[Sums] | None = None,
) -> list[Sums]:  # fmt: skip
    """Return the sums of each module's inputs over all real tokens, in one pass over the base, added to `former`."""
    if not way.needs_texts:
        return [{} for _ in modules]
    sums = _Added(len(modules))
    experts_seen: set[int] = set()
    if former is not None:
        for i, of_layer in enumerate(former):
            sums.add(i, of_layer)
        experts_seen.update(int(name.partition(".")[0]) for name in former[0])

    def add(i: int, batch: Mapping[str, Any], mask_BS: torch.Tensor, x_BSD: torch.Tensor, output: torch.Tensor) -> None:
        expert_B = torch.as_tensor(batch["expert"], device=x_BSD.device).long()
        negative_B = torch.as_tensor(batch.get("negative", torch.zeros_like(expert_B)), device=x_BSD.device).bool()
        if i == 0:
            experts_seen.update(expert_B[~negative_B].tolist())
        x_TD = double(x_BSD.reshape(-1, x_BSD.shape[-1])[mask_BS.flatten().bool()])
        text_T = mask_BS.nonzero()[:, 0].to(x_TD.device)
        sums.add(i, way.sums(x_TD, BatchLabels(expert_B.to(x_TD.device), negative_B.to(x_TD.device), text_T, n)))

    base_passes(model, () if batches is None else batches, modules, add)
    missing = {*range(n)} - experts_seen
    if missing:
        raise InputError(f"init_gates: batches: expert {min(missing)} has no text; give each some")
    return sums.by_layer()


_MEMORY = 2**32  # bytes of sums beside the model on its device


class _Added:
    """
    Sums of each layer, added up in float64 where they come from, or on the CPU if they would take more than `_MEMORY`
    on their device. Sums of an 8B model take 4.3 GB.
    """

    def __init__(self, layers: int) -> None:
        self._sums: list[Sums] = [{} for _ in range(layers)]
        self._left = _MEMORY

    def add(self, i: int, values: Sums) -> None:
        """Add values to the sums of layer i."""
        of_layer = self._sums[i]
        for name, value in values.items():
            if name in of_layer:
                of_layer[name] = of_layer[name] + double(value).to(of_layer[name].device)
            else:
                self._left -= 8 * value.numel()
                of_layer[name] = double(value) if self._left >= 0 else double(value).cpu()

    def by_layer(self) -> list[Sums]:
        """Return each layer's sums, all of a layer on one device."""
        return [
            {name: value.cpu() for name, value in of_layer.items()}
            if len({value.device for value in of_layer.values()}) > 1
            else of_layer
            for of_layer in self._sums
        ]
