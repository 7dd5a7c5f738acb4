"""
`MoELoraConfig`, the configuration of a MoE-LoRA adapter. Fields are named as in `LoraConfig` and in transformers' MoE
configs.
"""

from __future__ import annotations

import re
from dataclasses import Field, InitVar, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from peft import PeftConfig, PeftType
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME

from ..routing.routers import ROUTERS, Mixture, Router, RouterSettings
from ..utils.io import read_json, write_json
from ..utils.messages import InputError
from ..utils.model_card import write_model_card
from ..utils.settings import ALPHA, COUNT, NOT_NEGATIVE, Range, check_patterns, check_settings, same_setting, setting
from .experts import EXPERTS, Experts

# Fields determined by the LoRA adapters when they are stacked into a MoE adapter.
EXPERT_FIELDS = (
    "num_experts", "r", "lora_alpha", "use_rslora", "target_modules", "target_projections",
    "bottleneck_size", "exclude_modules", "layers_to_transform", "layers_pattern", "num_experts_pattern",
    "rank_pattern", "alpha_pattern", "init_lora_weights", "trainable_token_indices", "mean_loras",
)  # fmt: skip

# PEFT's names in a saved adapter: trained rows of tokens, and complete embeddings (saved if they were resized).
TOKEN_ROWS, ALL_ROWS = ".token_adapter.trainable_tokens_delta", ".token_adapter.base_layer"
Mixing = Literal["output", "projection"]

# Router settings with a field `router_…` in the config.
_ROUTER_SETTINGS = {each.name: each for each in fields(RouterSettings) if "help" in each.metadata}


def name_in_base(key: str) -> str:
    """Return the base's name for a tensor of an adapter, without the names of PEFT's wrapper modules."""
    return key.removeprefix("base_model.model.").replace(ALL_ROWS, "").replace(".base_layer", "")


def unread_settings(router: type[Router]) -> list[Field]:
    """Return the fields of `RouterSettings` not read by routers of this class. All routers read the jitter noise."""
    return [each for name, each in _ROUTER_SETTINGS.items() if name not in ("jitter_noise", *router.reads)]


@dataclass
class MoELoraConfig(PeftConfig):
    """
    Configuration of a MoE-LoRA adapter. Every targeted FFN block or single linear layer gets `num_experts` LoRA experts
    and a router. The router picks `top_k` experts for each token.

    Expert i replaces a projection W by `W + s·B_i A_i` with `s = lora_alpha / r` (`lora_alpha / sqrt(r)` with
    `use_rslora`). The mathematics follow LoRA (Hu et al., 2021), MixLoRA (Li et al., 2024; mixing "output") and LoRAMoE
    (Dou et al., 2023; mixing "projection").

    With `expert_type="bottleneck"`, the experts of an FFN are the adapters of PESC (Wu et al., 2024, arXiv 2401.02731),
    applied to its output: `y = Σ g_i A_i(FFN(x))` with `A_i(h) = U_i GELU(D_i h) + h`, D_i [b, d], U_i [d, b], no
    biases. The router reads x. Single linears in `target_modules` still get LoRA experts.

    Args:
        r: Rank of every LoRA expert.
        lora_alpha: Numerator of the scaling. None: `2·top_k·r` (`2·top_k·sqrt(r)` with `use_rslora`), computed for each
            module. As gates sum to 1, k experts then change an output as much as a LoRA of rank k·r with the usual
            alpha of twice its rank.
        lora_dropout: Dropout on the experts' input, as in LoRA.
        use_rslora: Scale by `lora_alpha / sqrt(r)`.
        num_experts: Experts in every targeted module.
        base_expert: Make the last expert the base: it has no update and no weights. For tokens routed to it, the FFN
            (or linear) is unchanged.
        top_k: Experts per token. A module with one expert has no router and is an ordinary, always active LoRA.
        num_shared_experts: LoRA experts for every token in addition to the routed ones, with gate 1. Together they are
            one LoRA of rank `num_shared_experts · r`, added to every routed expert: `W_i = W + s·B_0 A_0 + s·B_i A_i`.
        normalize_top_k: Divide the gates of the chosen experts by their sum (as Mixtral does).
        mixing: `"output"`: `y = Σ g_i FFN_i(x)`, a native MoE block of complete FFNs, which can be exported as one.
            `"projection"`: `Wx + s Σ g_i B_i A_i x` at every projection, with one set of gates per FFN. It is cheaper,
            but not a native MoE.
        target_modules: FFN blocks or single linear layers, or both: names (matched by suffix) or one regex. `None`
            finds every FFN of the language model, or the linears of FFNs without a block of their own (OPT). A single
            linear always mixes as "projection".
        target_projections: The FFN projections that get experts, e.g. `["gate_proj", "up_proj"]`; `None` takes all.
        exclude_modules: Names or a regex of modules to leave alone.
        layers_to_transform: Layer index or indices to adapt; not with a regex in `target_modules`.
        layers_pattern: Name of the model's layer list, with `layers_to_transform`.
        expert_type: Kind of experts, a name in `moe_peft.adapter.experts.EXPERTS`. `"lora"`: LoRAs on projections.
            `"hydra_lora"`: LoRAs with one A for all experts of a projection (HydraLoRA, arXiv 2404.19245).
            `"bottleneck"`: PESC's bottleneck adapters after an FFN, only with mixing "output" and without
            `target_projections`.
        bottleneck_size: b, the size of every bottleneck expert (PESC: 64). `r`, `lora_alpha` and their patterns do not
            apply to bottlenecks.
        modules_to_save: Other modules to train in full and save with the adapter.
        trainable_token_indices: Token ids to train: their rows of the input embeddings are trained and saved with the
            adapter. Either one list, or lists by the names of embeddings and heads. All experts share the rows. A head
            tied to the embeddings has the same rows.
        ensure_weight_tying: Train one copy of tied embeddings and head in `modules_to_save`.
        expert_names: Names of the experts, in order, for reports and `moe_peft.force_experts`; None: 0, 1, ….
        num_experts_pattern: Maps a module name or regex to a number of experts other than `num_experts` (as in MoLA).
        top_k_pattern: Maps a module name or regex to a number of experts per token other than `top_k`.
        mean_loras: A linear with a single LoRA (`num_experts_pattern` of 1) holds the mean of all experts' LoRAs,
            concatenated along the rank. Set by `moe_peft.lora_to_moe`.
        rank_pattern: Maps a module name or regex to a rank other than `r`.
        alpha_pattern: Maps a module name or regex to an alpha other than `lora_alpha`.
        router_type: Kind of router; see `moe_peft.routing.routers`. `"linear"`: the top k of a softmax over a linear
            gate's logits. `"mlp"`: the same with a gate of two layers. `"attention"`: a mixture of routers in the form
            of attention heads, see `moe_peft.init_attention_routers`. `"switch"`: top-1 with the probability as gate;
            only with mixing "projection". `"sigmoid"`: an independent score for each expert. `"arrow"`: the absolute
            values of a linear gate's logits, see `moe_peft.init_gates`. `"soft"`: all experts. `"top_p"`,
            `"threshold"`: the experts of the top k kept by `router_threshold`. `"locmoe"`: means of equal parts of the
            hidden state. `"hash"`: a fixed map from token ids to experts.
        router_threshold, router_capacity_factor, …: Settings of `moe_peft.routing.RouterSettings` with the prefix
            `router_`. They are described there.
        router_aux_loss_coef: Coefficient of the load-balancing loss; 0 turns it off.
        init_lora_weights: `True`: A is uniform as in LoRA and B is zero, so the model's output does not change at
            first. `"gaussian"`: A is normal with std 1/r and B is zero. `False`: B is random too. In bottlenecks, A is
            D and B is U.
        bias, fan_in_fan_out, use_dora, lora_bias, loftq_config, layer_replication, target_parameters: Arguments of
            `LoraConfig`, accepted at values without effect, so they can stay in code from a LoRA tutorial.

    Raises:
        ValueError: A field has a value that cannot work. The message names the field, the value and the remedy.

    Example:

    ```python
    >>> from moe_peft import MoELoraConfig
    >>> config = MoELoraConfig(num_experts=8, top_k=2, r=8)
    >>> paper = MoELoraConfig(
    ...     expert_type="hydra_lora", mixing="projection", router_type="soft"
    ... )
    ```
    """

    r: int = setting(8, "Rank of every expert.", COUNT)
    lora_alpha: float | None = setting(None, "Scaling numerator: s = lora_alpha / r; None: 2 * top_k * r.", ALPHA)
    lora_dropout: float = setting(0.0, "Dropout on the experts' input.", Range(at_least=0, below=1))
    use_rslora: bool = setting(False, "Scale by lora_alpha / sqrt(r).")
    num_experts: int = setting(8, "Experts in every targeted module.", COUNT)
    base_expert: bool = setting(False, "The last expert is the base, without an update.")
    top_k: int = setting(2, "Experts per token.", COUNT)
    num_shared_experts: int = setting(0, "LoRA experts that serve every token.", Range(at_least=0, whole=True))
    normalize_top_k: bool = setting(True, "Make the chosen experts' gates sum to 1.")
    mixing: Mixing = setting(
        "output", "Mix the outputs of complete FFNs, or the updates of every projection.", get_args(Mixing)
    )
    target_modules: list[str] | set[str] | str | None = setting(
        None, "FFN blocks and single linears to adapt; None: every FFN."
    )
    target_projections: list[str] | set[str] | None = setting(None, "The FFN projections that get experts; None: all.")
    exclude_modules: list[str] | set[str] | str | None = setting(None, "Modules to leave alone.")
    layers_to_transform: list[int] | int | None = setting(None, "Layer indices to adapt.")
    layers_pattern: list[str] | str | None = setting(None, "Name of the layer list.")
    modules_to_save: list[str] | None = setting(None, "Other modules to train in full and save.")
    trainable_token_indices: list[int] | dict[str, list[int]] | None = setting(
        None, "Token ids whose rows of the embeddings are trained."
    )
    ensure_weight_tying: bool = setting(False, "Train one copy of embeddings and head that the model ties.")
    expert_names: list[str] | None = setting(None, "Names of the experts, in order.")
    num_experts_pattern: dict[str, int] = setting(dict, "Number of experts by module name or regex.", COUNT)
    top_k_pattern: dict[str, int] = setting(dict, "Experts per token by module name or regex.", COUNT)
    mean_loras: bool = setting(False, "A single LoRA is the mean of all experts' LoRAs, along the rank.")
    rank_pattern: dict[str, int] = setting(dict, "Rank by module name or regex.", COUNT)
    alpha_pattern: dict[str, float] = setting(dict, "Alpha by module name or regex.", ALPHA)
    router_type: str = setting("linear", f"One of {', '.join(ROUTERS)}.", ROUTERS)
    router_jitter_noise: float = same_setting(RouterSettings, "jitter_noise")
    router_threshold: float | None = same_setting(RouterSettings, "threshold")
    router_capacity_factor: float | None = same_setting(RouterSettings, "capacity_factor")
    router_num_heads: int | None = same_setting(RouterSettings, "num_heads")
    router_mixture: Mixture = same_setting(RouterSettings, "mixture")
    router_bias_update_rate: float = same_setting(RouterSettings, "bias_update_rate")
    router_aux_loss_coef: float = setting(0.01, "Load-balancing loss coefficient.", NOT_NEGATIVE)
    init_lora_weights: bool | Literal["gaussian"] = setting(
        True, "True, False or 'gaussian'.", (True, False, "gaussian")
    )
    expert_type: str = setting("lora", f"One of {', '.join(EXPERTS)}.", EXPERTS)
    bottleneck_size: int = setting(64, "Size of every bottleneck expert.", COUNT)
    # Settings of `LoraConfig`, accepted at values without effect.
    bias: InitVar[Any] = "none"
    fan_in_fan_out: InitVar[Any] = False
    use_dora: InitVar[Any] = False
    lora_bias: InitVar[Any] = False
    loftq_config: InitVar[Any] = None
    layer_replication: InitVar[Any] = None
    target_parameters: InitVar[Any] = None

    def __post_init__(self, *of_lora: Any) -> None:
        super().__post_init__()
        self.peft_type = PeftType.MOE_LORA
        for name, value in zip(_LORA_SETTINGS, of_lora, strict=False):  # none to check a changed config again
            if value != getattr(MoELoraConfig, name):
                raise InputError(f"MoELoraConfig: {name}={value!r}: LoRA experts have no such setting; leave it out")
        for name in ("target_modules", "exclude_modules", "target_projections"):
            if isinstance(value := getattr(self, name), (list, tuple)):
                setattr(self, name, set(value))
        self._check_values()
        router = self.router_class
        if not self.inference_mode:  # a saved adapter may have settings overridden by its router
            self._check_combinations()
        if router.only_top_k is not None:
            self.top_k, self.normalize_top_k = router.only_top_k, False
        if router.all_experts:
            self.top_k = max([self.num_experts, *self.num_experts_pattern.values()])
        if router.all_experts or router.is_constant:
            self.router_aux_loss_coef = 0.0  # the balancing loss would be a constant
        for n in () if self.top_k_pattern else {self.num_experts, *self.num_experts_pattern.values()}:
            self._check_top_k(self.top_k, n)

    @property
    def num_updates(self) -> int:
        """Number of experts with weights: one less than `num_experts` if the last is the base."""
        return self.num_experts - self.base_expert

    @property
    def router_class(self) -> type[Router]:
        """Class named by `router_type`. Its attributes say which settings the router needs and allows."""
        return ROUTERS[self.router_type]

    def _check_values(self) -> None:
        """Raise if a value would give NaN or compute something else than requested."""
        check_settings(self, "MoELoraConfig: ")
        check_patterns(vars(self), "MoELoraConfig: ")
        if isinstance(self.target_modules, str) and self.target_modules != "all-linear":
            for name in ("layers_to_transform", "layers_pattern"):
                if getattr(self, name) is not None:
                    self._fail(name, "give target_modules as a list of names, not as a regex, to choose layers")
        if self.layers_pattern is not None and self.layers_to_transform is None:
            self._fail("layers_pattern", "set layers_to_transform too")
        if self.target_projections is not None and not self.target_projections:
            self._fail("target_projections", "name at least one, or leave it out for all")
        most = max([self.num_experts, *self.num_experts_pattern.values()])
        if self.base_expert and most == 1:
            self._fail("base_expert", "needs a second expert to choose; give num_experts=2 or more")
        if self.num_shared_experts and most == 1:
            self._fail("num_shared_experts", "without routed experts, raise r instead")
        tokens = self.trainable_token_indices
        for ids in tokens.values() if isinstance(tokens, dict) else [] if tokens is None else [tokens]:
            are_ids = isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)
            if not are_ids or not 0 < len({*ids}) == len(ids):
                self._fail("trainable_token_indices", "give different token ids, as a list, or lists by module name")
        names = self.expert_names
        are_texts = isinstance(names, (list, tuple)) and all(isinstance(name, str) and name for name in names)
        if names is not None and (not are_texts or len({*names}) < len(names) or len(names) != most):
            self._fail("expert_names", f"give {most} different names, one for each expert, or leave them out")
        experts = EXPERTS[self.expert_type]
        if self.mixing == "output" and (reason := self.router_class.no_output_mixing):
            other = "" if "mixing" in experts.unread else "mixing='projection', or "
            self._fail("router_type", f"{reason}; use {other}router_type='linear'")
        for name in experts.unread:
            self._check_unread(name, self._default(name), f"expert_type={self.expert_type!r} has no use for it")

    def _check_top_k(self, k: int, n: int) -> None:
        if 1 < n < k and not self.router_class.all_experts:
            field = "top_k_pattern" if self.top_k_pattern else "top_k"
            self._fail(field, f"must be at most the number of experts ({n}), or give that module a single expert")

    def _check_combinations(self) -> None:
        """Raise if the router overrides a setting or does not read it."""
        router, kind = self.router_class, f"router_type={self.router_type!r}"
        for unread in unread_settings(router):
            self._check_unread(f"router_{unread.name}", unread.default, f"{kind} has no use for it")
        if router.is_constant:
            for name in ("router_jitter_noise", "normalize_top_k"):
                self._check_unread(name, self._default(name), f"{kind} reads only token ids")
        if router.only_top_k is not None or router.all_experts:
            self._check_unread("top_k_pattern", {}, f"{kind} has one top_k")
        if router.only_top_k is not None:
            self._check_fixed("top_k", router.only_top_k)
        if router.all_experts:
            self._check_fixed("top_k", max([self.num_experts, *self.num_experts_pattern.values()]))
        if router.all_experts or router.is_constant:
            self._check_fixed("router_aux_loss_coef", 0.0)

    def _check_fixed(self, name: str, value: Any) -> None:
        if getattr(self, name) != value:
            self._check_unread(name, self._default(name), f"router_type={self.router_type!r} has {name}={value}")

    def _check_unread(self, name: str, default: Any, reason: str) -> None:
        if getattr(self, name) != default:
            self._fail(name, f"{reason}; leave it out")

    def _default(self, name: str) -> Any:
        return getattr(type(self), name)

    def _fail(self, name: str, remedy: str) -> None:
        value = getattr(self, name)
        value = sorted(value) if isinstance(value, set) else value
        raise InputError(f"MoELoraConfig: {name}={value!r}: {remedy}")

    def expert_spec(self, module_name: str, model_config: Any = None) -> Experts:
        """
        Return the settings of one module, with the patterns applied.

        Args:
            module_name: the module's name in the model.
            model_config: the base's text config, for the size of routers that depend on its attention.

        Raises:
            ValueError: the router's size depends on the attention, and the config has no number of heads; or the module
                has fewer experts than `top_k_pattern` says.
        """

        needs_attention = self.router_class.needs_attention and model_config is not None
        num_experts = by_pattern(self.num_experts_pattern, module_name, self.num_experts)
        top_k = by_pattern(self.top_k_pattern, module_name, self.top_k)
        self._check_top_k(top_k, num_experts)
        top_k, r = min(top_k, num_experts), by_pattern(self.rank_pattern, module_name, self.r)
        alpha = self.lora_alpha or usual_alpha(r, top_k, self.use_rslora)
        projections = self.target_projections
        return EXPERTS[self.expert_type](
            num_experts=num_experts,
            base_expert=self.base_expert and num_experts > 1,
            num_shared_experts=self.num_shared_experts if num_experts > 1 else 0,
            top_k=top_k,
            r=r,
            lora_alpha=by_pattern(self.alpha_pattern, module_name, alpha),
            use_rslora=self.use_rslora,
            lora_dropout=self.lora_dropout,
            mixing=self.mixing,
            normalize_top_k=self.normalize_top_k,
            router=RouterSettings(
                type=self.router_type,
                attention_size=_attention_size(model_config) if needs_attention else 0,
                **{name: getattr(self, f"router_{name}") for name in _ROUTER_SETTINGS},
            ),
            init_lora_weights=self.init_lora_weights,
            target_projections=None if projections is None else frozenset(projections),
            bottleneck_size=self.bottleneck_size,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, with sets as sorted lists, so every process saves the same bytes."""
        values = super().to_dict()
        return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """
        Save the config. If the folder holds the adapter's weights, which PEFT saves first, write the adapter's model
        card too (see `moe_peft.utils.model_card.write_model_card`).
        """
        super().save_pretrained(save_directory, **kwargs)
        # PEFT sorts pattern keys on save, but the first match wins: restore the user's order.
        path = Path(save_directory, CONFIG_NAME)
        saved = read_json(path)
        in_order = {name: value for name in saved if isinstance(value := getattr(self, name, None), dict)}
        write_json(path, saved | in_order)
        if any(Path(save_directory, name).is_file() for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
            write_model_card(save_directory)


# Settings of `LoraConfig` without an equivalent for experts, in the order in which `__post_init__` gets them.
_LORA_SETTINGS = [name for name, kind in MoELoraConfig.__annotations__.items() if kind.startswith("InitVar")]


def by_pattern(pattern: dict[str, Any] | None, module_name: str, default: Any) -> Any:
    """
    Return a module's value in `rank_pattern` or another of PEFT's patterns: the value of the first key that matches the
    end of the module's name.
    """
    return next(
        (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module_name)), default
    )


def usual_alpha(r: int, top_k: int = 1, use_rslora: bool = False) -> float:
    """Return the alpha for a scaling of `2 * top_k` (of 2 for a LoRA)."""
    return 2 * top_k * (r**0.5 if use_rslora else r)


def trained_tokens(config: Any, module: str) -> list[int]:
    """Return the tokens trained by a LoRA or MoE-LoRA adapter in a module, in the order of the saved rows."""
    tokens = config.trainable_token_indices or {}
    if not isinstance(tokens, dict):
        return tokens
    return next((ids for name, ids in tokens.items() if module.endswith(name)), [])


def _attention_size(config: Any) -> int:
    """Return the total width of a layer's queries over all heads, from the model's text config."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise InputError(
            "MoELoraConfig: router_type='attention': the model's config has no num_attention_heads; use another router"
        )
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
