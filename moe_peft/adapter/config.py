"""`MoELoraConfig`: the configuration of a MoE-LoRA adapter, named after `LoraConfig` and transformers' MoE configs."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from peft import PeftConfig, PeftType

from ..routing.routers import ROUTERS, Mixture, Router, RouterSettings
from ..utils.compat import private
from ..utils.model_card import write_model_card
from ..utils.validation import (
    COUNT,
    EXPERTS,
    FLAG,
    MOST,
    TEXT,
    Rule,
    are_names,
    check_fields,
    is_a,
    is_regex,
    mapping_of,
    one_of,
    shown,
    within,
)

_get_pattern_key = private("peft.utils.other", "get_pattern_key")

# Fields that the LoRA adapters determine when they are stacked into a MoE adapter.
EXPERT_FIELDS = (
    "num_experts", "r", "lora_alpha", "use_rslora", "target_modules", "target_projections", "expert_type",
    "bottleneck_size", "exclude_modules", "layers_to_transform", "layers_pattern", "num_experts_pattern",
    "rank_pattern", "alpha_pattern", "init_lora_weights",
)  # fmt: skip

ExpertType = Literal["lora", "bottleneck"]
# Settings of routers that only some read.
_OWN_SETTINGS = {field.name for field in fields(RouterSettings)} - {"type", "jitter_noise", "attention_size"}


def unread_settings(router: type[Router]) -> list[Field]:
    """The fields of `RouterSettings` that routers of this class have no use for."""
    return [setting for setting in fields(RouterSettings) if setting.name in _OWN_SETTINGS - set(router.reads)]


@dataclass(frozen=True)
class ExpertSpec:
    """The settings of one adapter on one layer, after the patterns have been applied."""

    num_experts: int
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
    expert_type: ExpertType = "lora"  # of FFNs: a single linear always has LoRAs
    bottleneck_size: int = 64

    def bottleneck(self) -> ExpertSpec:
        """These settings for bottlenecks behind an FFN: matrices of `bottleneck_size` in place of `r`, and s = 1."""
        return replace(self, r=self.bottleneck_size, lora_alpha=self.bottleneck_size, use_rslora=False)

    @property
    def scaling(self) -> float:
        """s, the factor of every expert's update."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)


@dataclass
class MoELoraConfig(PeftConfig):
    """
    Configuration of a MoE-LoRA adapter: every targeted FFN block (or single linear layer) gets `num_experts` LoRA
    experts and a router that picks `top_k` of them for each token.

    Expert i replaces a projection W by `W + s·B_i A_i` with `s = lora_alpha / r` (`lora_alpha / sqrt(r)` with
    `use_rslora`). The mathematics are those of LoRA (Hu et al., 2021), MixLoRA (Li et al., 2024; mixing "output") and
    LoRAMoE (Dou et al., 2023; mixing "projection").

    With `expert_type="bottleneck"`, the experts of an FFN are the adapters of PESC (Wu et al., 2024, arXiv 2401.02731)
    behind it: `y = Σ g_i A_i(FFN(x))` with `A_i(h) = U_i GELU(D_i h) + h`, D_i [b, d], U_i [d, b], no biases, and the
    router on x. Single linears in `target_modules` still get LoRA experts.

    Args:
        r: Rank of every LoRA expert.
        lora_alpha: The scaling's numerator.
        lora_dropout: Dropout on the experts' input, as in LoRA.
        use_rslora: Scale by `lora_alpha / sqrt(r)`.
        num_experts: Experts in every targeted module.
        top_k: Experts per token. A module with one expert has no router and is an ordinary, always active LoRA.
        normalize_top_k: Divide the gates of the chosen experts by their sum (as Mixtral does).
        mixing: `"output"`: `y = Σ g_i FFN_i(x)`, which is a native MoE block of whole FFNs and can be exported as one.
            `"projection"`: `Wx + s Σ g_i B_i A_i x` at every projection, with one set of gates per FFN; cheaper, but
            not a native MoE.
        target_modules: FFN blocks or single linear layers, or both: names (matched by suffix) or one regex. `None`
            finds every FFN of the language model, or the linears of FFNs that have no block of their own (OPT). A
            single linear always mixes as "projection".
        target_projections: The FFN projections that get experts, e.g. `["gate_proj", "up_proj"]`; `None` takes all.
        exclude_modules: Names or a regex of modules to leave alone.
        layers_to_transform: Layer index or indices to adapt; not with a regex in `target_modules`.
        layers_pattern: Name of the model's layer list, with `layers_to_transform`.
        expert_type: What the experts of an FFN are. `"lora"`: LoRAs on its projections. `"bottleneck"`: PESC's
            bottleneck adapters behind it; only with mixing "output" and without `target_projections`.
        bottleneck_size: b, the size of every bottleneck expert (PESC: 64). `r`, `lora_alpha` and their patterns do not
            apply to bottlenecks.
        modules_to_save: Other modules to train in full and save with the adapter.
        num_experts_pattern: Maps a module name or regex to a number of experts other than `num_experts` (as in MoLA).
        rank_pattern: Maps a module name or regex to a rank other than `r`.
        alpha_pattern: Maps a module name or regex to an alpha other than `lora_alpha`.
        router_type: How tokens are routed; see `moe_peft.routing.routers`. `"linear"`: the top k of a softmax over a
            linear gate's logits. `"mlp"`: the same with a gate of two layers. `"attention"`: a mixture of routers in
            the form of attention heads, see `moe_peft.init_attention_routers`. `"switch"`: top-1 with the probability
            as gate; only with mixing "projection". `"sigmoid"`: an independent score for each expert. `"soft"`: all
            experts. `"top_p"`, `"threshold"`: those of the top k that `router_threshold` keeps. `"locmoe"`: means of
            equal parts of the hidden state. `"hash"`: the same random experts for a token id everywhere.
        router_threshold: With `"top_p"`, the probability that the chosen experts must reach together (None: 0.8). With
            `"threshold"`, the probability that each chosen expert must have (None: 1/n).
        router_capacity_factor: With `"switch"`, limits the tokens that an expert takes in training to this multiple of
            an even share of the batch. Padding counts, so pack or pad on the right. Tokens over the limit get no
            update. None: no limit.
        router_num_heads: With `"attention"`, the number of routers in the mixture. None: the number of experts.
        router_mixture: With `"attention"`, how the routers' scores are combined: `"sum"`, which can be folded into a
            linear gate, or `"max"`.
        router_jitter_noise: ε. In training, the router's input is multiplied by noise from U(1 - ε, 1 + ε).
        router_aux_loss_coef: Coefficient of the load-balancing loss; 0 turns it off.
        init_lora_weights: `True`: A is uniform as in LoRA and B is zero, so the model's output does not change at
            first. `"gaussian"`: A is normal with std 1/r and B is zero. `False`: B is random too. In bottlenecks, A is
            D and B is U.

    Raises:
        ValueError: A field has a value that cannot work; the message names the field, the value and the remedy.
    """

    r: int = field(default=8, metadata={"help": "Rank of every expert."})
    lora_alpha: float = field(default=16, metadata={"help": "Scaling numerator: s = lora_alpha / r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout on the experts' input."})
    use_rslora: bool = field(default=False, metadata={"help": "Scale by lora_alpha / sqrt(r)."})
    num_experts: int = field(default=8, metadata={"help": "Experts in every targeted module."})
    top_k: int = field(default=2, metadata={"help": "Experts per token."})
    normalize_top_k: bool = field(default=True, metadata={"help": "Make the chosen experts' gates sum to 1."})
    mixing: Literal["output", "projection"] = field(
        default="output", metadata={"help": "Mix the outputs of whole FFNs, or the updates of every projection."}
    )
    target_modules: list[str] | set[str] | str | None = field(
        default=None, metadata={"help": "FFN blocks and single linears to adapt; None: every FFN."}
    )
    target_projections: list[str] | set[str] | None = field(
        default=None, metadata={"help": "The FFN projections that get experts; None: all."}
    )
    exclude_modules: list[str] | set[str] | str | None = field(
        default=None, metadata={"help": "Modules to leave alone."}
    )
    layers_to_transform: list[int] | int | None = field(default=None, metadata={"help": "Layer indices to adapt."})
    layers_pattern: list[str] | str | None = field(default=None, metadata={"help": "Name of the layer list."})
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Other modules to train in full and save."}
    )
    num_experts_pattern: dict[str, int] = field(
        default_factory=dict, metadata={"help": "Number of experts by module name or regex."}
    )
    rank_pattern: dict[str, int] = field(default_factory=dict, metadata={"help": "Rank by module name or regex."})
    alpha_pattern: dict[str, float] = field(default_factory=dict, metadata={"help": "Alpha by module name or regex."})
    router_type: str = field(default="linear", metadata={"help": f"One of {', '.join(ROUTERS)}."})
    router_threshold: float | None = field(default=None, metadata={"help": "Probability for 'top_p' and 'threshold'."})
    router_capacity_factor: float | None = field(default=None, metadata={"help": "Capacity of experts for 'switch'."})
    router_num_heads: int | None = field(default=None, metadata={"help": "Routers in an attention router's mixture."})
    router_mixture: Mixture = field(default="sum", metadata={"help": "How their scores combine: 'sum' or 'max'."})
    router_jitter_noise: float = field(default=0.0, metadata={"help": "Training noise on the router's input."})
    router_aux_loss_coef: float = field(default=0.01, metadata={"help": "Load-balancing loss coefficient."})
    init_lora_weights: bool | Literal["gaussian"] = field(default=True, metadata={"help": "True, False or 'gaussian'."})
    expert_type: ExpertType = field(
        default="lora", metadata={"help": "LoRAs on an FFN's projections, or bottleneck adapters behind it (PESC)."}
    )
    bottleneck_size: int = field(default=64, metadata={"help": "Size of every bottleneck expert."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType.MOE_LORA
        for name in ("target_modules", "exclude_modules", "target_projections"):
            value = getattr(self, name)
            if isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
                setattr(self, name, set(value))
        given, top_k = self.top_k, self.router_class.only_top_k
        if top_k is not None:
            self.top_k, self.normalize_top_k = top_k, False
        self._check()
        if self.router_class.all_experts:
            top_k = self.top_k = max([self.num_experts, *self.num_experts_pattern.values()])
        self._refuse_other("top_k", given, top_k)
        if self.router_class.all_experts or self.router_class.by_token_id:
            self._refuse_other("router_aux_loss_coef", self.router_aux_loss_coef, 0.0)
            self.router_aux_loss_coef = 0.0  # the balancing loss would be a constant

    @property
    def router_class(self) -> type[Router]:
        """The class that `router_type` names; its attributes say what it needs and allows."""
        known = isinstance(self.router_type, str) and self.router_type in ROUTERS
        return ROUTERS[self.router_type] if known else Router

    def _check(self) -> None:
        check_fields("MoELoraConfig", self, {**_RULES, "router_type": one_of(ROUTERS)})
        for n in {self.num_experts, *self.num_experts_pattern.values()}:
            if 1 < n < self.top_k and not self.router_class.all_experts:
                self._refuse("top_k", f"use at most the number of experts ({n}), or give that module a single expert")
        if self.mixing == "output" and (reason := self.router_class.no_output_mixing):
            other = "" if self.expert_type == "bottleneck" else "mixing='projection', or "
            self._refuse("router_type", f"{reason}; use {other}router_type='linear'")
        if self.expert_type == "bottleneck":
            self._check_bottlenecks()
        elif self.bottleneck_size != type(self).bottleneck_size and not self.inference_mode:
            self._refuse(
                "bottleneck_size", "LoRA experts have the rank r; leave it out, or set expert_type='bottleneck'"
            )
        if self.router_class.by_token_id and not self.inference_mode:
            for name in ("router_jitter_noise", "normalize_top_k"):
                if getattr(self, name) != getattr(type(self), name):
                    self._refuse(name, f"router_type={self.router_type!r} reads token ids alone; leave it out")
        if isinstance(self.target_modules, str) and self.target_modules != "all-linear":
            for name in ("layers_to_transform", "layers_pattern"):
                if getattr(self, name) is not None:
                    self._refuse(name, "give target_modules as a list of names, not as a regex, to choose layers")
        if self.layers_pattern is not None and self.layers_to_transform is None:
            self._refuse("layers_pattern", "set layers_to_transform too")
        for setting in () if self.inference_mode else unread_settings(self.router_class):
            name = f"router_{setting.name}"
            if getattr(self, name) != setting.default:
                self._refuse(name, f"router_type={self.router_type!r} has no use for it; leave it out")

    def _refuse_other(self, name: str, given: Any, fixed: Any) -> None:
        """Raise if a field that the router fixes was given another value; saved adapters may have one."""
        if fixed is not None and given not in (fixed, getattr(type(self), name)) and not self.inference_mode:
            setattr(self, name, given)
            self._refuse(name, f"router_type={self.router_type!r} has {name}={fixed}; leave it out")

    def _check_bottlenecks(self) -> None:
        if self.mixing != "output":
            self._refuse("mixing", "bottleneck experts follow the whole FFN; use mixing='output'")
        if self.target_projections is not None:
            self._refuse("target_projections", "bottleneck experts follow the whole FFN; leave it out")

    def _refuse(self, name: str, remedy: str) -> None:
        raise ValueError(f"MoELoraConfig: {name}={shown(getattr(self, name))}: {remedy}")

    def expert_spec(self, module_name: str, model_config: Any = None) -> ExpertSpec:
        """
        The settings of one module, with `num_experts_pattern`, `rank_pattern` and `alpha_pattern` applied.

        Args:
            module_name: the module's name in the model.
            model_config: the base's text config, which gives the size of routers that depend on its attention.

        Raises:
            ValueError: the router's size depends on the attention, and the config has no number of heads.
        """

        def by_pattern(pattern: dict[str, Any], default: Any) -> Any:
            return pattern.get(_get_pattern_key(pattern.keys(), module_name), default)

        needs_attention = self.router_class.needs_attention and model_config is not None
        num_experts = by_pattern(self.num_experts_pattern, self.num_experts)
        r = by_pattern(self.rank_pattern, self.r)
        alpha = by_pattern(self.alpha_pattern, self.lora_alpha)
        projections = self.target_projections
        return ExpertSpec(
            num_experts=num_experts,
            top_k=min(self.top_k, num_experts),
            r=r,
            lora_alpha=alpha,
            use_rslora=self.use_rslora,
            lora_dropout=self.lora_dropout,
            mixing=self.mixing,
            normalize_top_k=self.normalize_top_k,
            router=RouterSettings(
                self.router_type,
                self.router_jitter_noise,
                self.router_threshold,
                self.router_capacity_factor,
                self.router_num_heads,
                self.router_mixture,
                _attention_size(model_config) if needs_attention else 0,
            ),
            init_lora_weights=self.init_lora_weights,
            target_projections=None if projections is None else frozenset(projections),
            expert_type=self.expert_type,
            bottleneck_size=self.bottleneck_size,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields, with sets as sorted lists, so that every process saves the same bytes."""
        fields = super().to_dict()
        return {name: sorted(value) if isinstance(value, set) else value for name, value in fields.items()}

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the config, and the adapter's model card beside it, see `moe_peft.utils.model_card.write_model_card`."""
        super().save_pretrained(save_directory, **kwargs)
        write_model_card(save_directory)


def _attention_size(config: Any) -> int:
    """Total width of a layer's queries over all heads, from the model's text config."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise ValueError(
            "MoELoraConfig: router_type='attention': the model's config has no num_attention_heads; use another router"
        )
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


def _are_modules(value: Any) -> bool:
    """None, one regex, or a list of names that is not empty."""
    return value is None or (is_regex(value) and value != "") or (are_names(value) and len(value) > 0)


def _are_layers(value: Any) -> bool:
    layers = value if isinstance(value, (list, tuple, set)) else [value]
    return len(layers) > 0 and all(type(layer) is int and layer >= 0 for layer in layers)


# Fields and what they may be.
_RULES: dict[str, Rule] = {
    "r num_experts bottleneck_size": EXPERTS,
    "top_k": COUNT,
    "num_experts_pattern rank_pattern": mapping_of(
        lambda v: type(v) is int and EXPERTS.allows(v), f"use a dict of module name to a whole number from 1 to {MOST}"
    ),
    "alpha_pattern": mapping_of(within(0, above=True).allows, "use a dict of module name to a finite number above 0"),
    "lora_alpha": within(0, above=True),
    "lora_dropout router_jitter_noise": within(0, 1, below=True),
    "router_aux_loss_coef": Rule(within(0).allows, "use 0 (off) or a finite positive number"),
    "use_rslora normalize_top_k inference_mode": FLAG,
    "router_type": one_of(ROUTERS),
    "router_threshold": within(0, 1, above=True).or_none(),
    "router_capacity_factor": within(0, above=True).or_none(),
    "router_num_heads": EXPERTS.or_none(),
    "router_mixture": one_of(get_args(Mixture)),
    "mixing": one_of(("output", "projection")),
    "expert_type": one_of(get_args(ExpertType)),
    "init_lora_weights": Rule(
        lambda v: isinstance(v, bool) or (isinstance(v, str) and v == "gaussian"), "use True, False or 'gaussian'"
    ),
    "target_modules": Rule(_are_modules, "use None, a list of module names, or one regex"),
    "exclude_modules": Rule(lambda v: v in ([], set()) or _are_modules(v), "use None, a list of names, or one regex"),
    "target_projections": Rule(
        lambda v: v is None or (are_names(v) and len(v) > 0), "use None or a list of projections"
    ),
    "modules_to_save": Rule(are_names, "use a list of module names").or_none(),
    "layers_to_transform": Rule(_are_layers, "use a layer index or a list of them").or_none(),
    "layers_pattern": Rule(
        lambda v: TEXT.allows(v) or (are_names(v) and len(v) > 0), "use the name of the layer list"
    ).or_none(),
    "revision": TEXT.or_none(),
    "base_model_name_or_path": is_a(str, remedy="give a text").or_none(),
}
