"""The settings of upcycling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from ..checks import COUNT, EXPERTS, FLAG, MOST, SEED, SHARE, TEXT, Rule, check_fields, one_of, whole, within
from .initialise import INITIALISATION_READS, INITIALISATIONS, ROUTER_READS, RouterInit, Split
from .writing import parse_dtype, parse_size

# Fields and what they may be.
_RULES: dict[str, Rule] = {
    "num_experts granularity": EXPERTS,
    "top_k": COUNT,
    "num_shared_experts num_added_shared_experts": whole(0, MOST),
    "router_num_heads": EXPERTS.or_none(),
    "router_aux_loss_coef": within(0),
    "noise_scale noise_std router_init_std": within(0, 1000),  # more would not be finite in half precision
    "noise_share drop_rate": SHARE,
    "shared_indices weight_scaling": FLAG,
    "router_init": one_of(get_args(RouterInit)),
    "fine_grained_split": one_of(get_args(Split)),
    "family dtype router_weights": TEXT.or_none(),
    "max_shard_size": TEXT,
    "seed": SEED,
}
# Fields with choices → the settings that each choice reads.
_READS = {"init": INITIALISATION_READS, "router_init": ROUTER_READS}


@dataclass
class UpcycleConfig:
    """
    How a dense model becomes a MoE.

    Args:
        num_experts: n, before they are split (`granularity`).
        top_k: experts per token, before they are split.
        family: the MoE's model type; None takes the one that fits.
        init: initial values of the experts, see `ExpertInit`.
        noise_scale, noise_std, noise_share, drop_rate, shared_indices: its settings.
        granularity: m. Every expert is split into m fine-grained ones of f/m neurons, and m·top_k are active
            (Drop-Upcycling, appendix C.6.1).
        fine_grained_split: the neurons of a fine-grained expert. `"partition"`: the m parts of an expert are a random
            partition of the FFN. They share their initial gate, so they are chosen together at first, and the function
            is kept. `"independent"`: every fine-grained expert has f/m random neurons of its own and a gate of its own,
            however gates are made (the paper's choice); the function is kept on average only.
        num_shared_experts: k_s of the m·n fine-grained experts are always active, as one shared block of k_s·f/m
            random neurons. m·n - k_s experts are routed and m·top_k - k_s of them are active, so that the active width
            stays top_k·f (Drop-Upcycling, appendix C.6.2). Needs a family with a shared expert (Qwen2-MoE).
        num_added_shared_experts: whole copies of the dense FFN that are always active *beside* all routed experts, as
            one shared block; the active width grows by as many f. Not the paper's shared experts.
        weight_scaling: scale up and down projections so that the active experts add up to the dense FFN. The shared
            block's gate in a Qwen2-MoE, one half at first, is made up for in any case.
        router_init: initial gates: `"normal"` N(0, std²), `"uniform"` with that standard deviation, `"zeros"` (all
            experts tie; the parts of one are then not chosen together), `"given"`, or `"attention"`: what an attention
            router folds into whose queries and keys are the dense model's (Router Upcycling, section 3.2).
        router_init_std: std, the gates' standard deviation; of `"uniform"`, U(-√3·std, √3·std).
        router_num_heads: for `"attention"`, m: routers that the attention's heads are grouped into. None: the largest
            number that divides the number of gates and the attention's size (n itself, if it does).
        router_weights: for `"given"`, a safetensors file with a tensor per layer, named "0", "1", …: [m·n, d], a gate
            for each fine-grained expert, or, with the split `"partition"`, also [n, d].
        router_aux_loss_coef: coefficient of the load-balancing loss in the MoE's config (Drop-Upcycling, A.4: 0.02).
        dtype: of the weights; None keeps the model's.
        max_shard_size: of the output's files.
        seed: of everything random. The same seed gives the same bytes.

    Raises:
        ValueError: a field has a value that cannot work; the message names it and the remedy.
    """

    num_experts: int = field(default=8, metadata={"help": "Experts per layer."})
    top_k: int = field(default=2, metadata={"help": "Experts per token."})
    family: str | None = field(default=None, metadata={"help": "Model type of the MoE, e.g. mixtral."})
    init: str = field(default="copy", metadata={"help": f"Initial experts: {', '.join(INITIALISATIONS)}."})
    noise_scale: float = field(
        default=0.01, metadata={"help": "noise: standard deviation, in multiples of the weight's."}
    )
    noise_std: float = field(default=0.02, metadata={"help": "random_noise: standard deviation."})
    noise_share: float = field(default=0.5, metadata={"help": "random_noise: share of the weights that get noise."})
    drop_rate: float = field(default=0.5, metadata={"help": "drop: share of the neurons that are drawn anew."})
    shared_indices: bool = field(default=True, metadata={"help": "drop: the same neurons in gate, up and down."})
    granularity: int = field(default=1, metadata={"help": "Fine-grained experts that each expert is split into."})
    fine_grained_split: str = field(
        default="partition",
        metadata={"help": f"Neurons of fine-grained experts: {', '.join(Split.__args__)}."},  # type: ignore[attr-defined]
    )
    num_shared_experts: int = field(default=0, metadata={"help": "Fine-grained experts that are always active."})
    num_added_shared_experts: int = field(
        default=0, metadata={"help": "Whole FFNs that are always active, beside all routed experts."}
    )
    weight_scaling: bool = field(default=True, metadata={"help": "Keep the size of the FFN's output."})
    router_init: str = field(default="normal", metadata={"help": f"Initial gates: {', '.join(RouterInit.__args__)}."})  # type: ignore[attr-defined]
    router_init_std: float = field(default=0.02, metadata={"help": "Standard deviation of random gates."})
    router_num_heads: int | None = field(default=None, metadata={"help": "attention: groups of heads (m)."})
    router_weights: str | None = field(default=None, metadata={"help": "Safetensors file with the given gates."})
    router_aux_loss_coef: float = field(default=0.02, metadata={"help": "Load-balancing loss coefficient."})
    dtype: str | None = field(default=None, metadata={"help": "float32, bfloat16 or float16; default: the model's."})
    max_shard_size: str = field(default="5GB", metadata={"help": "Size of the output's files."})
    seed: int = field(default=0, metadata={"help": "Seed of everything random."})

    def __post_init__(self) -> None:
        check_fields("upcycle", self, {**_RULES, "init": one_of(INITIALISATIONS)})
        parse_dtype(self.dtype, None, "upcycle")
        parse_size(self.max_shard_size, "upcycle")
        if self.top_k > self.num_experts:
            self._refuse("top_k", f"use at most num_experts={self.num_experts}")
        if self.num_shared_experts >= self.granularity * self.top_k:
            self._refuse("num_shared_experts", f"use fewer than granularity·top_k={self.granularity * self.top_k}")
        if self.num_shared_experts and self.num_added_shared_experts:
            self._refuse("num_added_shared_experts", "use this or num_shared_experts")
        whole = self.granularity == 1 and not self.num_shared_experts
        if whole and self.fine_grained_split != type(self).fine_grained_split:
            self._refuse("fine_grained_split", "granularity=1 splits no expert; set granularity, or leave it out")
        if self.router_init == "given" and self.router_weights is None:
            self._refuse("router_weights", "goes with router_init='given'")
        for field_name, reads in _READS.items():
            self._check_read(field_name, reads)

    @property
    def num_gates(self) -> int:
        """Initial gates of a layer, before shared experts are left out: the parts of a partition have one together."""
        return self.num_experts * (1 if self.fine_grained_split == "partition" else self.granularity)

    def _check_read(self, of: str, reads: dict[str, tuple[str, ...]]) -> None:
        """Refuse settings that the choice of a field does not read."""
        chosen = getattr(self, of)
        for name in dict.fromkeys(setting for settings in reads.values() for setting in settings):
            changed = getattr(self, name) != type(self).__dataclass_fields__[name].default
            if changed and name not in reads.get(chosen, (name,)):
                readers = " or ".join(repr(choice) for choice, settings in reads.items() if name in settings)
                self._refuse(name, f"goes with {of}={readers}")

    def _refuse(self, name: str, remedy: str) -> None:
        raise ValueError(f"upcycle: {name}={getattr(self, name)!r}: {remedy}")
