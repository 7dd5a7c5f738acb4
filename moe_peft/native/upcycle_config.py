"""Settings of upcycling, in a module without torch, so that `moe-peft upcycle --help` needs none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..utils.io import parse_size
from ..utils.messages import InputError, choice_error
from ..utils.settings import Range, check_settings, setting

InitialGates = Literal["normal", "uniform", "zeros", "given", "attention"]
Split = Literal["partition", "independent"]
# The settings of `ExpertInit` that each initialization reads.
INITIALISATION_READS: dict[str, tuple[str, ...]] = {
    "copy": (),
    "noise": ("noise_scale",),
    "random_noise": ("noise_std", "noise_share"),
    "subset": (),
    "permute": (),
    "permute_columns": (),
    "drop": ("drop_rate", "shared_indices"),
    "checkpoints": (),
    "random": ("noise_std",),
    "scratch": ("noise_std",),
}
ROUTER_READS: dict[str, tuple[str, ...]] = {
    "normal": ("router_init_std",),
    "uniform": ("router_init_std",),
    "zeros": (),
    "given": ("router_weights",),
    "attention": ("router_num_heads",),
}

# Fields with choices → the settings that each choice reads.
_READS = {"init": INITIALISATION_READS, "router_init": ROUTER_READS}
# More experts would take all memory, and more noise would overflow in half precision.
_COUNT, _COUNT_OR_NONE = Range(1, 2**16, whole=True), Range(0, 2**16, whole=True)
_SHARE, _SIZE = Range(0, 1), Range(0, 1000)


def router_inits() -> tuple[str, ...]:
    """Return the names of all initial gates: random, given, or from data."""
    from ..models.gate_init import GATE_INITS

    of_texts = [name for name, way in GATE_INITS.items() if way.needs_texts and way.router_type == "linear"]
    return (*get_args(InitialGates), *of_texts)


@dataclass
class UpcycleConfig:
    """
    Settings to upcycle a dense model to a MoE.

    Args:
        num_experts: n, before they are split (`granularity`).
        top_k: experts per token, before they are split.
        family: the MoE's model type; None takes the first match.
        init: initial values of the experts, see `ExpertInit`. With `"scratch"`, all other weights are random as well:
            N(0, noise_std²), norms 1, biases 0. Only the model's shape and tokenizer are used then. This is the
            baseline "from scratch" of Router Upcycling, Drop-Upcycling and others.
        noise_scale, noise_std, noise_share, drop_rate, shared_indices: settings of `init`.
        granularity: m. Every expert is split into m fine-grained experts of f/m neurons, and m·top_k are active
            (Drop-Upcycling, appendix C.6.1).
        fine_grained_split: neurons of a fine-grained expert. `"partition"`: the m parts of an expert are a random
            partition of the FFN. They share their initial gate, so they are chosen together at first, and the function
            is kept. (If shared experts leave some parts of an expert inactive, gates get noise of a hundredth of their
            standard deviation.) `"independent"`: every fine-grained expert has its own f/m random neurons and its own
            gate, for every `router_init` (the paper's choice). The function is kept on average only.
        num_shared_experts: k_s of the m·n fine-grained experts are always active, as one shared block of k_s·f/m random
            neurons. m·n - k_s experts are routed and m·top_k - k_s of them are active, so that the active width stays
            top_k·f (Drop-Upcycling, appendix C.6.2). Needs a family with a shared expert (Qwen2-MoE).
        weight_scaling: scale up and down projections so that the active experts add up to the dense FFN. The shared
            block's gate in a Qwen2-MoE, one half at first, is always compensated.
        router_init: initial gates: `"normal"` N(0, std²), `"uniform"` with the same standard deviation, `"zeros"` (all
            experts tie, so the parts of an expert are not chosen together), `"given"`, or `"attention"`: an attention
            router with the dense model's queries and keys, folded (Router Upcycling, section 3.2).
        router_init_std: std, the gates' standard deviation; `"uniform"` is U(-√3·std, √3·std).
        router_num_heads: for `"attention"`, m: the number of routers, each for a group of attention heads. None: the
            largest number that divides the number of gates and the attention's size (n itself, if it does).
        router_weights: for `"given"`, a safetensors file with a tensor per layer, named "0", "1", …: [m·n, d], a gate
            for each fine-grained expert, or, with the split `"partition"`, also [n, d].
        router_aux_loss_coef: coefficient of the load-balancing loss in the MoE's config (Drop-Upcycling, A.4: 0.02).
        dtype: dtype of the weights; None keeps the model's.
        max_shard_size: maximum size of an output file.
        seed: seed of all random numbers. The same seed gives the same bytes.
    """

    num_experts: int = setting(8, "experts per layer", _COUNT)
    top_k: int = setting(2, "experts per token", _COUNT)
    family: str | None = setting(None, "model type of the MoE, e.g. mixtral")
    init: str = setting("copy", f"initial experts: {', '.join(INITIALISATION_READS)}", INITIALISATION_READS)
    noise_scale: float = setting(0.01, "noise: standard deviation, in multiples of the weight's", _SIZE)
    noise_std: float = setting(0.02, "random_noise, random, scratch: standard deviation", _SIZE)
    noise_share: float = setting(0.5, "random_noise: share of the weights that get noise", _SHARE)
    drop_rate: float = setting(0.5, "drop: share of the neurons that are drawn again", _SHARE)
    shared_indices: bool = setting(True, "drop: the same neurons in gate, up and down")
    granularity: int = setting(1, "fine-grained experts that each expert is split into", _COUNT)
    fine_grained_split: str = setting(
        "partition", f"neurons of fine-grained experts: {', '.join(get_args(Split))}", get_args(Split)
    )
    num_shared_experts: int = setting(0, "fine-grained experts that are always active", _COUNT_OR_NONE)
    weight_scaling: bool = setting(True, "keep the size of the FFN's output")
    router_init: str = setting("normal", f"initial gates: {', '.join(get_args(InitialGates))}")
    router_init_std: float = setting(0.02, "standard deviation of random gates", _SIZE)
    router_num_heads: int | None = setting(None, "attention: groups of heads (m)", _COUNT)
    router_weights: str | None = setting(None, "safetensors file with the given gates")
    router_aux_loss_coef: float = setting(0.02, "load-balancing loss coefficient", _SIZE)
    dtype: str | None = setting(
        None, "float32, bfloat16 or float16; default: the model's", ("float32", "bfloat16", "float16")
    )
    max_shard_size: str = setting("5GB", "size of the output's files")
    seed: int = setting(0, "seed of everything random")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.router_init not in router_inits():
            raise InputError(choice_error("router_init", self.router_init, router_inits()))
        parse_size(self.max_shard_size)
        if self.top_k > self.num_experts:
            raise self._error("top_k", f"must be at most num_experts={self.num_experts}")
        if self.num_shared_experts >= self.granularity * self.top_k:
            raise self._error("num_shared_experts", f"must be below granularity·top_k={self.granularity * self.top_k}")
        if self.granularity == 1 and not self.num_shared_experts and self.fine_grained_split != "partition":
            raise self._error("fine_grained_split", "granularity=1 splits no expert; set granularity, or leave it out")
        if self.router_init == "given" and self.router_weights is None:
            raise self._error("router_weights", "goes with router_init='given'")
        # Refuse settings that the chosen initialization would ignore.
        for choice, reads in _READS.items():
            for name in dict.fromkeys(name for settings in reads.values() for name in settings):
                changed = getattr(self, name) != type(self).__dataclass_fields__[name].default
                if changed and name not in reads.get(getattr(self, choice), (name,)):
                    readers = " or ".join(repr(option) for option, settings in reads.items() if name in settings)
                    raise self._error(name, f"goes with {choice}={readers}")

    @property
    def num_gates(self) -> int:
        """
        Number of a layer's initial gates, before shared experts are left out. The parts of a partition share a gate.
        """
        return self.num_experts * (1 if self.fine_grained_split == "partition" else self.granularity)

    def _error(self, name: str, remedy: str) -> InputError:
        return InputError(f"{name}={getattr(self, name)!r}: {remedy}")
