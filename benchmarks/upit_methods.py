"""The methods, variants and sizes of `upit_study`, fixed before its first run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

SEEDS, ORDERS, TUNING_SEED = (0, 1, 2, 3), ("iid", "blocks"), 100
N, K, R = 8, 2, 8


@dataclass(frozen=True)
class Method:
    """
    Args:
        whole: what is trained once over all data: "lora", "moe" or "pesc". None: LoRA checkpoints become experts.
        experts: "checkpoints"; "copies" of the last one; or 4 of them and 4 merged by "genetic" or "random" expansion.
        buckets, objective, train_experts: of stage 3; without buckets there is none.
        schedule: of stage 1's rate.
        share: of the data that is used.
        tuned_as: the method whose tuned rate this one has; None: its own.
    """

    whole: str | None = None
    experts: str = "checkpoints"
    buckets: str | None = None
    objective: str = "positive"
    train_experts: bool = True
    schedule: str = "constant"
    num_experts: int = N
    top_k: int = K
    share: float = 1.0
    tuned_as: str | None = None


UPIT = Method(buckets="perplexity")
MAIN = {
    "LoRA, rank k·r": Method("lora"),
    "LoRAMoE-PT": Method("moe"),
    "PESC": Method("pesc"),
    "LoRAMoE-SFT": Method(experts="copies"),
    "UpIT": UPIT,
    "no router initialisation": Method(tuned_as="UpIT"),
    "random buckets": Method(buckets="random", tuned_as="UpIT"),
    "UpIT 4→8, genetic": replace(UPIT, experts="genetic", tuned_as="UpIT"),
    "UpIT 4→8, random": replace(UPIT, experts="random", tuned_as="UpIT"),
}
EXPANDED = ("UpIT 4→8, genetic", "UpIT 4→8, random")  # order iid alone
VARIED = {"UpIT": UPIT, "LoRAMoE-SFT": MAIN["LoRAMoE-SFT"]}
SHARES = {f"{share:g} of the data": {"share": share} for share in (0.125, 0.25, 0.5)}
CURVES = {
    f"{name}, {label}": replace(method, tuned_as=name, **own)
    for name, method in VARIED.items()
    for label, own in {
        **SHARES,
        **{f"{n} experts": {"num_experts": n} for n in (2, 4, 16)},
        **{f"{k} active": {"top_k": k} for k in (1, 2, 4)},  # 2: the method itself, again
    }.items()
}
WHOLE = ("LoRAMoE-PT", "LoRA, rank k·r")  # added later: over the share of the data alone
CURVES |= {
    f"{name}, {label}": replace(MAIN[name], tuned_as=name, **own)
    for name in WHOLE
    for label, own in {**SHARES, "1 of the data": {"share": 1.0}}.items()
}
IDEAS = {
    "relative perplexity": replace(UPIT, buckets="relative", tuned_as="UpIT"),
    "label buckets": replace(UPIT, buckets="label", num_experts=10, tuned_as="UpIT"),
    "UpIT, 10 experts": replace(UPIT, num_experts=10, tuned_as="UpIT"),
    "softmax objective": replace(UPIT, objective="softmax", tuned_as="UpIT"),
    "label buckets, softmax": replace(UPIT, buckets="label", objective="softmax", num_experts=10, tuned_as="UpIT"),
    "routing vectors only": replace(UPIT, train_experts=False, tuned_as="UpIT"),
    "cyclic rate in stage 1": replace(UPIT, schedule="cosine_with_restarts", tuned_as="UpIT"),
}
# Chosen after the runs of `IDEAS`: the one with the lowest loss, and the method that it varies, on the kept base.
CONFIRMED = "softmax objective"
UNVARIED = "UpIT, 2 active"
# Later runs on the kept base, by order. Stage 3's losses are means over tokens; in the runs above, means over rows.
_LATER = {f"{name}, later": replace(MAIN[name], tuned_as="UpIT") for name in ("UpIT", *EXPANDED)}
LATER = {"blocks": _LATER, "iid": {"UpIT, later": _LATER["UpIT, later"]}}
EVERY = {**MAIN, **CURVES, **IDEAS, **_LATER}


@dataclass(frozen=True)
class Size:
    """
    A base's size, and what is done with it.

    Args:
        hidden, layers, learning_rate: of the base.
        rates: that are tried first.
        orders, methods: of the main table.
        variants: whether curves and ideas run, too.
        dtype: in which the base is stored.
    """

    hidden: int
    layers: int
    learning_rate: float
    rates: tuple[float, ...]
    orders: tuple[str, ...]
    methods: tuple[str, ...]
    variants: bool
    dtype: torch.dtype = torch.float32


FIRST_STAGE = "LoRA, rank k·r"  # has the rate of stage 1
SIZES = {
    "1M": Size(128, 4, 3e-3, (1e-3, 2e-3, 4e-3), ORDERS, tuple(MAIN), variants=True),
    "5M": Size(
        256, 6, 1e-3, (1e-3, 2e-3), ("iid",), (FIRST_STAGE, "LoRAMoE-PT", "LoRAMoE-SFT", "UpIT"), variants=False,
        dtype=torch.bfloat16,  # its file is part of the repository
    ),
}  # fmt: skip
