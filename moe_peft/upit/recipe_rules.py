"""What a recipe's fields mean together: which values go with which, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from peft import PeftConfig
from pydantic import model_validator
from trl import SFTConfig

from ..adapter.config import EXPERT_FIELDS, MoELoraConfig
from ..adapter.experts import EXPERTS
from ..models.gate_init import GATE_INITS
from ..models.native_routers import check_router
from ..native.base import Base
from ..native.upcycle import UpcycleConfig
from ..routing.expert_map import check_allowed, read_expert_map
from ..routing.routers import ROUTERS, LinearRouter, Router, RouterSettings
from ..training.trainers import MoESFTConfig
from ..utils.messages import InputError, choice_error
from ..utils.validation import check_fields, prefixed
from .methods import METHODS, Method
from .recipe_fields import NONE, RecipeFields, require

# --- sections that are fields of other configurations ----------------------------------------------------------------

# Field → what to do instead, for fields that the recipe decides.
_ADAPTER = {
    **{field.name: "PEFT sets this" for field in fields(PeftConfig)},
    "num_experts": "set the recipe's num_experts",
    **dict.fromkeys(
        ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        "a recipe adapts the FFNs of all layers; choose their projections with target_projections",
    ),
    **dict.fromkeys(
        ("num_experts_pattern", "top_k_pattern", "rank_pattern", "alpha_pattern"),
        "the experts of a recipe are alike in all layers",
    ),
    **dict.fromkeys(
        ("modules_to_save", "trainable_token_indices", "ensure_weight_tying"),
        "an expert cannot hold complete modules or rows of embeddings; leave it out",
    ),
}
_MOE = {
    "num_experts": "set the recipe's num_experts",
    "router_weights": "stage 3 makes the routers; `router_init` says how",
    "seed": "set post_train.seed",
}
_ROUTER = {"attention_size": "it follows from the model"}
_SFT = {
    **dict.fromkeys(
        (
            "output_dir", "max_steps", "num_train_epochs", "save_strategy", "save_total_limit", "save_only_model",
            "seed", "data_seed", "resume_from_checkpoint", "load_best_model_at_end", "remove_unused_columns",
            "train_sampling_strategy", "auto_find_batch_size",
        ),
        "the recipe's budget and resuming decide this; use num_train_epochs, prepare_share and seed",
    ),
    **dict.fromkeys(
        ("eval_strategy", "eval_on_start", "eval_steps", "eval_delay", "do_eval"),
        "stages have no evaluation data; the section `evaluate` says what is measured",
    ),
    **dict.fromkeys(
        (
            "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push",
            "hub_revision",
        ),
        "push the result's folder when the run is done",
    ),
    "router_aux_loss_coef": (
        "set adapter.router_aux_loss_coef in the mode 'lora', moe.router_aux_loss_coef in the mode 'ffn'"
    ),
    "model_init_kwargs": "set the fields of the section `model`",
    "trust_remote_code": "code that comes with a model or with data is never run; leave it out",
}  # fmt: skip
_POST_TRAIN_SFT = {
    **_SFT,
    "label_column": "set data.label_column",
    "training_stage": "set post_train.train_experts",
}

# What `lora_to_moe` reads off the LoRA adapters that it stacks; their values are given, so they need no initial ones.
FROM_EXPERTS = frozenset(EXPERT_FIELDS)


def _check_fields(
    path: str, settings: Mapping[str, Any], kind: type, decided: Mapping[str, str], documented: str | None = None
) -> None:
    """Keys that are fields of another configuration, except those that the recipe decides."""
    for key in settings:
        if key in decided:
            raise InputError(f"{path}.{key}: {decided[key]}")
    check_fields(kind, settings, path, documented)


def _check_no_keys(section: str, settings: Mapping[str, Any], mode: str, other: str) -> None:
    for key in settings:
        raise InputError(f"{section}.{key}: unknown key in the mode {mode!r}, which has the section `{other}` instead")


# --- recipe ----------------------------------------------------------------------------------------------------------


class Recipe(RecipeFields):
    """
    A complete run, as a YAML file describes it; see `load_recipe`. A stage without a seed of its own uses `seed` (stage
    1), `seed + 1` (stage 2), and so on.

    Example:

    ```python
    >>> from moe_peft.upit import recipe_from_dict
    >>> data = {"train": "train.jsonl", "label_column": "domain"}
    >>> recipe = recipe_from_dict(
    ...     {
    ...         "output_dir": "upit",
    ...         "model": {"name_or_path": "Qwen/Qwen3-0.6B"},
    ...         "data": data,
    ...     }
    ... )
    >>> recipe.num_experts, recipe.router_init.buckets
    (8, 'perplexity')
    >>> recipe.moe_config().top_k
    2

    ```
    """

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.method not in METHODS[self.mode]:
            raise InputError(choice_error("method", self.method, METHODS[self.mode]))
        self._check_sft()
        {"lora": self._check_lora, "ffn": self._check_ffn}[self.mode]()
        self._check_labels()
        self._check_number_of_experts()
        return self

    def _forbid(self, path: str, forbidden: bool, allowed: str) -> None:
        """Raise an error for the value at a dotted path, if it is forbidden."""
        value: Any = self
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else getattr(value, name)
        require(path, value, not forbidden, allowed)

    def _check_sft(self) -> None:
        """Training arguments."""
        plain, moe = "TRL's SFTConfig", "TRL's SFTConfig and moe_peft's MoESFTConfig"
        _check_fields("sft", self.sft, SFTConfig, _SFT, plain)
        _check_fields("prepare.sft", self.prepare.sft, SFTConfig, _SFT, plain)
        _check_fields("router_init.sft", self.router_init.sft, SFTConfig, _SFT, plain)
        _check_fields("post_train.sft", self.post_train.sft, MoESFTConfig, _POST_TRAIN_SFT, moe)
        sections = {"sft": self.sft}
        sections |= {f"{n}.sft": getattr(self, n).sft for n in ("prepare", "router_init", "post_train")}
        for path, sft in sections.items():
            steps = sft.get("save_steps", 1)
            require(f"{path}.save_steps", steps, steps >= 1 and steps % 1 == 0, "a whole number of at least 1")
        # Stage 3 would compute another loss as if it were this one.
        sft = {**self.sft, **self.router_init.sft}
        for name, usual in (("loss_type", ("nll", "chunked_nll")), ("label_smoothing_factor", (0.0,))):
            value = sft.get(name, usual[0])
            if self.initializes_routers and value not in usual:
                field = f"router_init.sft.{name}"
                raise InputError(f"{field}={value!r}: stage 3 has the paper's loss; set {field}={usual[0]}")

    def _check_lora(self) -> None:
        _check_no_keys("moe", self.moe, "lora", "adapter")
        _check_no_keys("post_train.router", self.post_train.router, "lora", "adapter")
        _check_fields("adapter", self.adapter, MoELoraConfig, _ADAPTER)
        checkpoints = self.prepare.checkpoints
        self._forbid("prepare.checkpoints", checkpoints is not None, "null in the mode 'lora'; use prepare.adapters")
        with prefixed("adapter"):
            config = self.moe_config()
        stacks = self.facts.prepares and self.facts.assembles
        require(
            "adapter.expert_type",
            config.expert_type,
            EXPERTS[config.expert_type].holds_loras or not stacks,
            f"'lora' with the method {self.method!r}, which stacks LoRAs; or use the method loramoe_pt",
        )
        router, field = config.router_class, f"adapter.router_type={config.router_type!r}"
        if self.initializes_routers and not issubclass(router, LinearRouter):
            raise InputError(f"{field}: stage 3 makes linear gates; use one of these, or router_init.buckets=none")
        self._check_trains(router, field)

    def _check_trains(self, router: type[Router], field: str) -> None:
        """Check that stage 4 trains something in routers of this kind."""
        if not router.has_parameters and self.facts.assembles and not self.trains_experts:
            raise InputError(f"{field}: these routers have no parameters; use others: stage 4 trains nothing else")

    def _check_ffn(self) -> None:
        _check_no_keys("adapter", self.adapter, "ffn", "moe")
        _check_fields("moe", self.moe, UpcycleConfig, _MOE)
        adapters, similarity = self.prepare.adapters, self.expand.similarity
        self._forbid("prepare.adapters", adapters is not None, "null in the mode 'ffn'; use prepare.checkpoints")
        self._forbid("expand.similarity", similarity not in (None, "displacement"), "'displacement', or null")
        self._forbid("model.quantization", bool(self.model.quantization), "null: all weights are trained")
        half = self.dtype == "float32" and "flash" in (self.model.attn_implementation or "")
        self._forbid(
            "model.attn_implementation",
            half,
            f"another with model.dtype={self.dtype!r}, as it computes only in half precision",
        )
        one_checkpoint = self.moe.get("init") == "checkpoints" and not self.facts.specializes
        self._forbid("moe.init", one_checkpoint, "another: this method has one checkpoint")
        one_model = not self.facts.prepares or self.copies
        self._forbid(
            "moe.router_init",
            self.moe.get("router_init") == "attention" and (self.initializes_routers or not one_model),
            "another: attention gates are those of one dense model, and stage 3 would replace them",
        )
        texts = self.moe.get("router_init") in GATE_INITS
        self._forbid("moe.router_init", texts, "another: a recipe has no texts for each expert")
        split = self.moe.get("granularity", 1) != 1 and self.moe.get("fine_grained_split") == "independent"
        self._forbid(
            "moe.fine_grained_split",
            split and self.initializes_routers,
            "'partition': stage 3 makes a gate for each of num_experts, not for their parts",
        )
        with prefixed("moe"):
            self.upcycle_config()
        if self.post_train.router:
            self._check_router(self.post_train.router)

    def _check_router(self, settings: dict[str, Any]) -> None:
        """The router that stage 4 trains instead of plain gates."""
        field = "post_train.router"
        _check_fields(field, settings, RouterSettings, _ROUTER)
        self._forbid(field, not self.facts.assembles, f"left out: the method {self.method!r} has no gates")
        plain = "left out: stage 3 trains plain gates; or set router_init.buckets=none"
        self._forbid(field, self.initializes_routers, plain)
        with prefixed(field):
            check_router(RouterSettings(**settings), *self.routed)
        self._check_trains(self._router, f"{field}={settings!r}")
        moe = self.upcycle_config()
        other = "left out: post_train.router, which replaces the gates, has its own initial values"
        if moe.router_init == "attention":
            unused, allowed = not self._router.takes_attention, "attention does not initialize that post_train.router"
            self._forbid("moe.router_init", unused, f"left out: {allowed}")
        else:
            self._forbid("moe.router_init", moe.router_init != UpcycleConfig.router_init, other)
        self._forbid("moe.router_init_std", moe.router_init_std != UpcycleConfig.router_init_std, other)
        heads = moe.router_num_heads is not None and self._router.needs_attention
        self._forbid("moe.router_num_heads", heads, "left out: set post_train.router.num_heads")

    def _check_labels(self) -> None:
        rule, labeled = self.router_init.rule, self.data.label_column is not None
        if not labeled and rule and rule.needs_labels:
            raise InputError(
                f"data.label_column=None: router_init.buckets={self.router_init.buckets!r} needs a column of labels"
            )
        if self.router_init.expert_map is not None:
            read_expert_map(self.router_init.expert_map, self.num_experts, "router_init.expert_map")
        expert_map = self.expert_map
        if expert_map is not None:
            self._forbid("data.label_column", not labeled, "set for post_train.sft.expert_map")
            if self.masks_labels:
                check_allowed(expert_map, self._fewest_allowed(), "post_train.sft.router_label_mask=True")

    def _check_number_of_experts(self) -> None:
        n, m, method = self.num_experts, self.given_experts(), self.expand.method
        self._forbid("num_experts", n < 2 and self.facts.assembles, "at least 2")
        copies = self.copies and self.facts.averages
        self._forbid("prepare.experts", copies, "'checkpoints' with the method 'mean', as copies have none")
        if not self.facts.specializes or self.copies:
            return
        names = [f"prepare.{name}" for name in ("adapters", "checkpoints") if getattr(self.prepare, name)]
        source = names[0] if names else "stage 1"
        if m > n:
            raise InputError(f"num_experts={n}: {source} gives {m}; ask for that many or more")
        if m < n and (method == NONE or m < 2):
            why = f"expand.method={method!r} adds none" if method == NONE else "expansion needs two"
            raise InputError(f"num_experts={n}: {source} gives {m}, {why}")

    # --- what follows from the fields -------------------------------------------------------------------------------

    @property
    def facts(self) -> Method:
        """What the method does."""
        return METHODS[self.mode][self.method]

    @property
    def dtype(self) -> str:
        """The dtype of the base's weights. A step of 2e-5 is too small to change most weights in bfloat16."""
        return "float32" if self.mode == "ffn" and self.model.dtype == "auto" else self.model.dtype

    @property
    def base(self) -> Base:
        """The base model, whose files are not read yet."""
        return Base(**{**self.model.model_dump(), "dtype": self.dtype}, field="model.name_or_path")

    @property
    def copies(self) -> bool:
        """Whether all experts are copies of the last one that stage 1 gives."""
        return self.facts.copies or self.prepare.experts == "copies"

    @property
    def prepares(self) -> bool:
        """Whether stage 1 runs: it is not needed for a MoE, or a mean, whose experts are given."""
        return self.facts.prepares and (self.prepare.folders is None or not self.facts.collects)

    @property
    def expands(self) -> bool:
        """Whether stage 2 runs."""
        return self.facts.specializes and not self.copies and self.given_experts() < self.num_experts

    @property
    def initializes_routers(self) -> bool:
        """Whether stage 3 runs."""
        return self.facts.initializes_routers and self.router_init.rule is not None

    @property
    def trains_experts(self) -> bool:
        """Whether stage 4 trains more than the routers."""
        return self.post_train.train_experts and self.facts.trains_experts

    @property
    def expert_map(self) -> dict[str, list[int]] | None:
        """Label → the routed experts that stage 4 trains it with; None if the recipe names none."""
        expert_map = self.post_train.sft.get("expert_map")
        return None if expert_map is None else read_expert_map(expert_map, self.routed[0], "post_train.sft.expert_map")

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
        if self.prepare.folders is not None:
            return len(self.prepare.folders)
        return self.prepare.num_experts or self.num_experts

    def assembled_from(self, experts: Sequence[Path]) -> tuple[Path, ...]:
        """The experts that the MoE is assembled from, where stage 1 gives these: all, or copies of the last."""
        return (experts[-1],) * self.num_experts if self.copies and experts else tuple(experts)

    def seed_count(self, rows: int) -> int:
        """Examples in the seed set: its share of the data, and at least one per expert."""
        return min(rows, max(self.num_experts, round(self.router_init.seed_fraction * rows)))

    def bucketed(self, rows: int) -> int:
        """Examples of the seed set that the buckets take."""
        capacity = self.router_init.capacity
        return self.seed_count(rows) if capacity is None else min(self.seed_count(rows), self.num_experts * capacity)

    def moe_config(self) -> MoELoraConfig:
        """The MoE adapter's configuration."""
        kind = self.facts.expert_type or self.adapter.get("expert_type", "lora")
        # The section may serve several methods: what the kind of experts has no use for is left out.
        unread = EXPERTS[kind].unread if kind in EXPERTS else ()
        settings = {key: value for key, value in self.adapter.items() if key not in unread}
        settings |= {"num_experts": max(self.num_experts, 2), "task_type": "CAUSAL_LM", "expert_type": kind}
        return MoELoraConfig(**settings)

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

    def upcycle_config(self, **overrides: Any) -> UpcycleConfig:
        """The native MoE's configuration."""
        settings = {"num_experts": max(self.num_experts, 2), "seed": self.seed, "dtype": self.dtype}
        settings["router_aux_loss_coef"] = 0.01  # UpIT's load-balancing loss is Switch Transformers', as the adapter's
        return UpcycleConfig(**{**settings, **self.moe, **overrides})
