"""
The tensors of the MoE that an adapter on its base is: expert i is the base's FFN with LoRA i merged, the gate is the
router, folded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..adapter.config import ExpertSpec, MoELoraConfig
from ..reading import reading
from ..routing.routers import make_router
from .families import DENSE_BLOCK
from .initialise import FFN, zero_ffn
from .moe_config import EMPTY_SHARED
from .writing import DenseModel


class _Update(NamedTuple):
    """The LoRAs of one weight W: expert i has `W + scaling·B_iᵀ A_i`."""

    A: torch.Tensor  # [n, r, in]
    B: torch.Tensor  # [n, r, out]
    scaling: float


@dataclass
class Adapted:
    """A MoE's content, from the base's tensors and the adapter's."""

    dense: DenseModel
    spec: ExpertSpec = field(init=False)  # of the FFNs that have a router
    state: Mapping[str, torch.Tensor]  # the adapter's tensors
    routers: dict[int, torch.Tensor] = field(default_factory=dict)
    specs: dict[int, ExpertSpec] = field(default_factory=dict)  # of each adapted FFN
    updates: dict[str, _Update] = field(default_factory=dict)  # by the weight's name in the base

    def backbone(self, name: str) -> torch.Tensor:
        return self.dense.family.backbone(name, self.dense.config, lambda own: self._updated(own, self._read(own), 0))

    def router(self, layer: int) -> torch.Tensor:
        return self.routers[layer]

    def experts(self, layer: int) -> Iterator[FFN]:
        names = self.dense.family.ffn(layer)
        weights = {name: self._read(name) for name in (*names.inputs, names.down)}
        for expert in range(self.spec.num_experts if layer in self.routers else 1):
            yield names.split(lambda name, i=expert: self._updated(name, weights[name], i))  # type: ignore[misc]

    def shared(self, layer: int) -> FFN:
        return zero_ffn(EMPTY_SHARED, self.dense.config.hidden_size)

    def _read(self, name: str) -> torch.Tensor:
        """The adapter's tensor where it trained a whole one, otherwise the base's."""
        return self.state[name] if name in self.state else self.dense.read(name)

    def _updated(self, name: str, weight: torch.Tensor, expert: int) -> torch.Tensor:
        """Expert `expert`'s weight, in float32; a weight without LoRAs as it is."""
        if name not in self.updates:
            return weight
        A, B, scaling = self.updates[name]
        return torch.addmm(weight.float(), B[expert].float().T, A[expert].float(), alpha=scaling)


def adapted_content(state: Mapping[str, torch.Tensor], config: MoELoraConfig, dense: DenseModel) -> Adapted:
    """
    What a MoE is to be filled with, checked against what a native MoE can hold.

    Args:
        state: the adapter's tensors, by their names below the base model.

    Raises:
        ValueError: a tensor is not finite or does not fit the base, or the adapter computes what no native MoE does.
    """
    if config.expert_type != "lora":
        raise ValueError(
            f"export: expert_type={config.expert_type!r}: these experts stand behind the FFN, with a non-linearity "
            "between, so no native MoE computes this; train with expert_type='lora'"
        )
    content = Adapted(dense, state)
    layers = {DENSE_BLOCK.format(layer=layer): layer for layer in range(dense.config.num_hidden_layers)}
    shapes = dense.shapes()
    for key, tensor in state.items():
        if not tensor.isfinite().all():
            raise ValueError(f"export: {key} holds NaN or infinity; save the adapter again")
        module, _, kind = key.partition(".moe_lora_")
        matrix, _, projection = kind.partition(".")
        if not kind:  # a module that was trained and saved whole
            _check_size(key, tuple(tensor.shape), tuple(shapes.get(key, ())))
            continue
        spec = config.expert_spec(module, dense.config)
        if matrix in ("A", "B"):
            weight = f"{module}.{projection}.weight" if module in layers else f"{module}.weight"
            size = shapes[weight][matrix == "A"] if weight in shapes else None  # of [out, in]
            place = () if size is None else (spec.num_experts, spec.r, size)
            _check_size(key, tuple(tensor.shape), place, "its config and the base say")
            other = f"{module}.moe_lora_{'B' if matrix == 'A' else 'A'}.{projection}"
            if other not in state:
                raise ValueError(f"export: the adapter has {key}, but no {other}; save it again")
            if matrix == "A":
                content.updates[weight] = _Update(tensor, state[other], spec.scaling)
        if module in layers:
            content.specs[layers[module]] = spec
        elif spec.num_experts > 1:
            raise ValueError(
                f"export: {module} is a single linear with {spec.num_experts} experts, which no native MoE has; train "
                "it with one (num_experts_pattern)"
            )
    _read_routers(content)
    return content


def _check_size(key: str, own: tuple[int, ...], place: tuple[int, ...], says: str = "the base has") -> None:
    if own != place:
        there = f"{says} {list(place)}" if place else "the base has no such place"
        raise ValueError(f"export: {key} has {list(own)}, {there}; give the adapter's own base")


def _read_routers(content: Adapted) -> None:
    routed = {layer: spec for layer, spec in sorted(content.specs.items()) if spec.num_experts > 1}
    if not routed:
        raise ValueError("export: the adapter has no FFN with more than one expert; merge it as a LoRA instead")
    first = content.spec = next(iter(routed.values()))
    d = content.dense.config.hidden_size
    for layer, spec in routed.items():
        if spec.mixing != "output":
            raise ValueError(
                f"export: mixing={spec.mixing!r}: the FFN's non-linearity stands between the experts' updates, so no "
                "native MoE computes this; train with mixing='output'"
            )
        if (spec.num_experts, spec.top_k) != (first.num_experts, first.top_k):
            raise ValueError(
                f"export: num_experts: layer {layer} has {spec.num_experts}, another {first.num_experts}; a native MoE "
                "has as many in every layer"
            )
        prefix = f"{DENSE_BLOCK.format(layer=layer)}.moe_lora_router."
        own = {key.removeprefix(prefix): t for key, t in content.state.items() if key.startswith(prefix)}
        router = make_router(d, spec.num_experts, spec.router)
        with reading(f"export: {prefix}* do not fit the config", "use the config that the adapter was saved with"):
            router.load_state_dict(own)
        try:
            content.routers[layer] = router.fold(spec.top_k, spec.normalize_top_k)
        except ValueError as error:
            raise ValueError(f"export: {error}") from error
