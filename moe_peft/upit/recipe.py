"""
The recipe of a run: one YAML file, one section per stage (`sections`). What a field means is said here, beside it.

Unknown keys and wrong values are refused with the key, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as validated

from ..adapter.config import MoELoraConfig
from ..messages import one_of
from ..models.native_routers import check_router
from ..native.upcycle import UpcycleConfig
from ..routing.expert_map import check_allowed, read_expert_map
from ..routing.routers import ROUTERS, Router, RouterSettings
from . import passthrough
from .buckets import BUCKETS, BucketRule
from .methods import METHODS, Method
from .objectives import OBJECTIVES
from .sections import (
    NONE,
    STRICT,
    DataSection,
    ExpandSection,
    ModelSection,
    PostTrainSection,
    PrepareSection,
    RouterInitSection,
    name_in,
)
from .tasks import EvaluateSection
from .values import Experts, Number, Seed, Text


@validated(config=STRICT)
class Recipe:
    """A whole run. A stage without a seed of its own uses `seed` (stage 1), `seed + 1` (stage 2), and so on."""

    output_dir: Text
    model: ModelSection
    data: DataSection
    # What an expert is: `lora` (the result is an adapter) or `ffn`, a whole FFN (the result is a native MoE).
    mode: Annotated[Text, name_in(METHODS)] = "lora"
    # A name in the table `METHODS` of the mode: which stages run and how the budget is split.
    method: Text = "upit"
    num_experts: Experts = 8
    # The budget of stages 1 and 4 together, in passes over the data.
    num_train_epochs: Annotated[Number, Field(gt=0, le=1e6)] = 4.0
    # Stage 1's share of it.
    prepare_share: Annotated[Number, Field(gt=0, lt=1)] = 0.5
    seed: Seed = 0
    # Mode `lora`: fields of MoELoraConfig. Stage 1's LoRA takes its rank, alpha, dropout and projections from them.
    adapter: dict[str, Any] = field(default_factory=dict)
    # Mode `ffn`: fields of UpcycleConfig for the native MoE; its `router_aux_loss_coef` is 0.01 here.
    moe: dict[str, Any] = field(default_factory=dict)
    # Fields of TRL's SFTConfig for all stages; a stage's own `sft` overrides them. What is left out has the method's
    # value: a constant rate of 2e-4 (mode `ffn`: 2e-5) and a context of 2048 tokens, or of as many as the base has
    # positions for.
    sft: dict[str, Any] = field(default_factory=dict)
    prepare: PrepareSection = field(default_factory=PrepareSection)
    expand: ExpandSection = field(default_factory=ExpandSection)
    router_init: RouterInitSection = field(default_factory=RouterInitSection)
    post_train: PostTrainSection = field(default_factory=PostTrainSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)

    def __post_init__(self) -> None:
        if self.method not in METHODS[self.mode]:
            raise ValueError(one_of("method", self.method, METHODS[self.mode]))
        self._check_passed_on()
        {"lora": self._check_lora, "ffn": self._check_ffn}[self.mode]()
        self._check_labels()
        self._check_expert_maps()
        self._check_number_of_experts()
        _ = self.evaluate.settings

    def _check_passed_on(self) -> None:
        """Keys that are fields of other configurations."""
        passthrough.SFT.check("sft", self.sft)
        passthrough.QUANTIZATION.check("model.quantization", self.model.quantization or {})
        steps = {"sft.save_steps": self.sft.get("save_steps", 1)}
        for section in dataclasses.fields(self):
            own = getattr(getattr(self, section.name), "sft", {})
            known = passthrough.POST_TRAIN if section.name == "post_train" else passthrough.SFT
            known.check(f"{section.name}.sft", own)
            steps[f"{section.name}.sft.save_steps"] = own.get("save_steps", 1)
        for path, value in steps.items():
            _require(path, value, type(value) is int and value >= 1, "a whole number of at least 1")

    def _check_lora(self) -> None:
        _require_no_keys("moe", self.moe, "lora", "adapter")
        _require_no_keys("post_train.router", self.post_train.router, "lora", "adapter")
        passthrough.ADAPTER.check("adapter", self.adapter)
        given = self.prepare.checkpoints
        _require("prepare.checkpoints", given, given is None, "null in the mode 'lora'; use prepare.adapters")
        config = self.moe_config()
        if not config.router_class.has_parameters and self.facts.assembles:
            remedy = "these routers have no parameters; use another router_type"
            if self.initialises_routers:
                raise ValueError(f"adapter.router_type={config.router_type!r}: {remedy}, or router_init.buckets=none")
            if not self.trains_experts:
                raise ValueError(f"adapter.router_type={config.router_type!r}: {remedy}: stage 4 trains nothing else")
        if config.router_class.by_token_id and self.facts.assembles:
            sft = self.post_train.sft
            labels = float(sft.get("expert_map") is not None)
            for name, default in (("router_z_loss_coef", 0.0), ("router_label_loss_coef", labels)):
                value = sft.get(name, default)
                _require(f"post_train.sft.{name}", value, not value, "0: these routers go by token ids alone")

    def _check_ffn(self) -> None:
        if self.model.dtype == "auto":  # a step of 2e-5 is too small to change most weights in bfloat16
            object.__setattr__(self, "model", dataclasses.replace(self.model, dtype="float32"))
        attention, exact = self.model.attn_implementation, self.model.dtype == "float32"
        half = f"another with model.dtype={self.model.dtype!r}, as it computes in half precision alone"
        _require("model.attn_implementation", attention, not (exact and "flash" in (attention or "")), half)
        _require_no_keys("adapter", self.adapter, "ffn", "moe")
        passthrough.MOE.check("moe", self.moe)
        init, given = self.moe.get("init"), self.prepare.adapters
        objective, similarity = self.router_init.objective, self.expand.similarity
        apart = [name for name, other in OBJECTIVES.items() if other.own_logit_only]
        several = init != "checkpoints" or self.facts.specialises
        unquantized = not self.model.quantization
        split = self.moe.get("fine_grained_split")
        gates, one_model = self.moe.get("router_init"), not self.facts.prepares or self.copies
        for path, value, good, allowed in (
            ("moe.init", init, several, "another: this method has one checkpoint"),
            (
                "moe.router_init",
                gates,
                gates != "attention" or (one_model and not self.initialises_routers),
                "another: attention gates are those of one dense model, and stage 3 would replace them",
            ),
            (
                "moe.fine_grained_split",
                split,
                split != "independent" or self.moe.get("granularity", 1) == 1 or not self.initialises_routers,
                "'partition': stage 3 makes a gate for each of num_experts, not for their parts",
            ),
            ("prepare.adapters", given, given is None, "null in the mode 'ffn'; use prepare.checkpoints"),
            ("model.quantization", self.model.quantization, unquantized, "null: all weights are trained"),
            (
                "router_init.objective",
                objective,
                objective in apart,
                f"{' or '.join(map(repr, apart))}: experts are trained apart",
            ),
            ("expand.similarity", similarity, similarity in (None, "displacement"), "'displacement', or null"),
        ):
            _require(path, value, good, allowed)
        self.upcycle_config()
        self._check_router()

    def _check_router(self) -> None:
        """The router that stage 4 trains in the place of plain gates."""
        given = self.post_train.router
        if not given:
            return
        passthrough.ROUTER.check("post_train.router", given)
        _require("post_train.router", given, self.facts.assembles, f"left out: the method {self.method!r} has no gates")
        plain = "left out: stage 3 trains plain gates; or set router_init.buckets=none"
        _require("post_train.router", given, not self.initialises_routers, plain)
        try:
            check_router(RouterSettings(**given), *self.routed)
        except ValueError as error:
            raise ValueError(f"post_train.router: {error}") from error
        router, moe = self._router, self.upcycle_config()
        init, std, heads = moe.router_init, moe.router_init_std, moe.router_num_heads
        own = "left out: post_train.router, in the place of the gates, has its own initial values"
        other = "left out: attention does not initialise that post_train.router" if init == "attention" else own
        by_attention = init == "attention" and router.takes_attention
        one = heads is None or not router.needs_attention
        for path, value, good, allowed in (
            ("moe.router_init", init, init == UpcycleConfig.router_init or by_attention, other),
            ("moe.router_init_std", std, std == UpcycleConfig.router_init_std, own),
            ("moe.router_num_heads", heads, one, "left out: set post_train.router.num_heads"),
        ):
            _require(path, value, good, allowed)

    def _check_labels(self) -> None:
        rule = self.bucket_rule
        needed = self.prepare.order == "blocks" or (rule is not None and rule.needs_labels)
        if needed and self.data.label_column is None:
            raise ValueError(
                f"data.label_column=None: prepare.order={self.prepare.order!r} with "
                f"router_init.buckets={self.router_init.buckets!r} needs a column of labels"
            )

    def _check_expert_maps(self) -> None:
        if self.router_init.expert_map is not None:
            read_expert_map(self.router_init.expert_map, self.num_experts, "router_init.expert_map")
            fits = self.bucket_rule is None or self.bucket_rule.needs_labels  # None: a recipe for several methods
            _require("router_init.buckets", self.router_init.buckets, fits, "'label' beside router_init.expert_map")
        known = self.expert_map
        if known is None:
            return
        _require("data.label_column", None, self.data.label_column is not None, "set for post_train.sft.expert_map")
        if self.masks_labels:
            check_allowed(known, self._fewest_allowed(), "post_train.sft.router_label_mask=True")

    def _check_number_of_experts(self) -> None:
        n, given, method = self.num_experts, self.given_experts(), self.expand.method
        for name in ("num_experts", "num_checkpoints"):
            value = getattr(self.prepare, name)
            _require(f"prepare.{name}", value, value is None or not self.prepare.given, "null: experts are given")
        taken, copies = self.prepare.num_checkpoints, self.prepare.experts == "copies"
        _require("prepare.num_checkpoints", taken, taken is None or not copies, "null: all are copies of the last one")
        capacity, rule = self.router_init.capacity, self.bucket_rule
        takes = rule is None or rule.needs_perplexities  # None: a recipe for several methods
        _require("router_init.capacity", capacity, capacity is None or takes, "null: it is for perplexity rules")
        _require("num_experts", n, n >= 2 or not self.facts.assembles, "at least 2")
        if not self.facts.specialises or self.copies:
            return
        fields = [f"prepare.{name}" for name in ("adapters", "checkpoints") if getattr(self.prepare, name)]
        named = fields[0] if fields else "stage 1"
        if given > n:
            raise ValueError(f"num_experts={n}: {named} gives {given}; ask for that many or more")
        if given < n and (method == NONE or given < 2):
            why = f"expand.method={method!r} adds none" if method == NONE else "expansion needs two"
            raise ValueError(f"num_experts={n}: {named} gives {given}, {why}")

    # --- what follows from the fields -------------------------------------------------------------------------------

    @property
    def facts(self) -> Method:
        """What the method does."""
        return METHODS[self.mode][self.method]

    @property
    def bucket_rule(self) -> BucketRule | None:
        """How stage 3 gives examples to experts; None leaves the stage out."""
        return None if self.router_init.buckets == NONE else BUCKETS[self.router_init.buckets]

    @property
    def copies(self) -> bool:
        """Whether all experts are copies of the last one that stage 1 gives."""
        return self.facts.copies or self.prepare.experts == "copies"

    @property
    def prepares(self) -> bool:
        """Whether stage 1 runs: it is not needed for a MoE whose experts are given."""
        return self.facts.prepares and (self.prepare.given is None or not self.facts.assembles)

    @property
    def expands(self) -> bool:
        """Whether stage 2 runs."""
        return self.facts.specialises and not self.copies and self.given_experts() < self.num_experts

    @property
    def initialises_routers(self) -> bool:
        """Whether stage 3 runs."""
        return self.facts.initialises_routers and self.bucket_rule is not None

    @property
    def trains_experts(self) -> bool:
        """Whether stage 4 trains more than the routers."""
        return self.post_train.train_experts and self.facts.trains_experts

    @property
    def expert_map(self) -> dict[str, list[int]] | None:
        """Label → the routed experts that stage 4 trains it with; None if the recipe names none."""
        given = self.post_train.sft.get("expert_map")
        return None if given is None else read_expert_map(given, self.routed[0], "post_train.sft.expert_map")

    @property
    def masks_labels(self) -> bool:
        """Whether tokens may only go to the experts of their label, in stage 4 and in evaluation."""
        return self.facts.assembles and bool(self.post_train.sft.get("router_label_mask"))

    @property
    def _router(self) -> type[Router]:
        """Mode `ffn`: the kind of router that stage 4 trains."""
        return ROUTERS[self.post_train.router.get("type", "linear")]

    def given_experts(self) -> int:
        """m, the number of experts that stage 1 gives."""
        if self.prepare.given is not None:
            return len(self.prepare.given)
        return self.prepare.num_experts or self.num_experts

    def seed_count(self, rows: int) -> int:
        """Examples in the seed set: its share of the data, and at least one per expert."""
        return min(rows, max(self.num_experts, round(self.router_init.seed_fraction * rows)))

    def bucketed(self, rows: int) -> int:
        """Examples of the seed set that the buckets take."""
        capacity = self.router_init.capacity
        return self.seed_count(rows) if capacity is None else min(self.seed_count(rows), self.num_experts * capacity)

    def moe_config(self) -> MoELoraConfig:
        """The MoE adapter's configuration."""
        kind = self.facts.expert_type
        others = passthrough.OF_BOTTLENECKS if kind == "lora" else passthrough.OF_LORAS  # it may serve several methods
        settings = {key: value for key, value in self.adapter.items() if key not in others}
        return MoELoraConfig(num_experts=max(self.num_experts, 2), task_type="CAUSAL_LM", expert_type=kind, **settings)

    @property
    def routed(self) -> tuple[int, int]:
        """The MoE's routed experts, and those of them that serve a token."""
        if self.mode == "lora":
            return self.num_experts, self.moe_config().top_k
        c = self.upcycle_config()
        return c.num_experts * c.granularity - c.num_shared_experts, c.top_k * c.granularity - c.num_shared_experts

    def _fewest_allowed(self) -> int:
        """How many experts a label needs: those of a token, or one if routers may leave experts out."""
        n, k = self.routed
        router = self.moe_config().router_class if self.mode == "lora" else self._router
        k = router.only_top_k or k
        return 1 if router.leaves_out or k == n else k

    def upcycle_config(self, **own: Any) -> UpcycleConfig:
        """The native MoE's configuration."""
        settings = {"num_experts": max(self.num_experts, 2), "seed": self.seed, "dtype": self.model.dtype}
        settings["router_aux_loss_coef"] = 0.01  # UpIT's load-balancing loss is Switch Transformers', as the adapter's
        return UpcycleConfig(**{**settings, **self.moe, **own})


def as_dict(settings: Any) -> dict[str, Any]:
    """A section or recipe as plain dictionaries."""
    return dataclasses.asdict(settings)


def _require(path: str, value: Any, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{path}={value!r}: must be {allowed}")


def _require_no_keys(section: str, keys: dict[str, Any], mode: str, other: str) -> None:
    for key in keys:
        raise ValueError(f"{section}.{key}: unknown key in the mode {mode!r}, which has the section `{other}` instead")
