"""
Routing statistics, collected while a model runs.

Legend: B rows, S positions, T = B·S tokens, L layers, n experts, D domains, C token classes, P position buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from ..models.view import observed_routing, router_sizes, text_config
from ..routing.expert_map import expert_masks, read_expert_map
from ..routing.statistics import load_health
from .token_classes import TOKEN_CLASSES

POSITION_BUCKETS = 16  # of doubling width: 0, 1–2, 3–6, …


class RoutingStatistics:
    """
    Sums over all tokens seen; memory does not grow with the number of tokens.

    Args:
        sizes: experts of each layer.
        k: experts per token.
        domains: the names of the D domains.
        expert_map: domain → experts that should serve it, for compliance.
        token_classes: the class (index into `TOKEN_CLASSES`) of every token of the vocabulary, [V].

    Attributes:
        counts: number of (token, slot) assignments, float64 [D, L, n].
        tokens: number of tokens, [D].
        coactivation: number of tokens that both experts serve, [L, n, n].
        class_counts: number of assignments by token class, [C, L, n].
        compliance_sums: sum of compliance by layer and position bucket, [L, P].
        compliance_tokens: number of tokens by position bucket, [P].
    """

    def __init__(
        self,
        sizes: Sequence[int],
        k: int,
        domains: Sequence[str] = ("all",),
        expert_map: Mapping[str, Sequence[int]] | None = None,
        token_classes: torch.Tensor | None = None,
    ) -> None:
        L, n, D = len(sizes), max(sizes), len(domains)
        self.sizes, self.k, self.domains = list(sizes), k, list(domains)
        self.token_classes = token_classes
        self.allowed = None
        if expert_map is not None:
            known = read_expert_map(expert_map, n, "expert_map")
            missing = [domain for domain in domains if domain not in known]
            if missing:
                raise ValueError(f"expert_map: no experts for the domains {missing}; add them")
            self.allowed = expert_masks({domain: known[domain] for domain in domains}, n)
        self.counts = torch.zeros(D, L, n, dtype=torch.float64)
        self.tokens = torch.zeros(D, dtype=torch.float64)
        self.coactivation = torch.zeros(L, n, n, dtype=torch.float64)
        self.class_counts = torch.zeros(len(TOKEN_CLASSES), L, n, dtype=torch.float64)
        self.compliance_sums = torch.zeros(L, POSITION_BUCKETS, dtype=torch.float64)
        self.compliance_tokens = torch.zeros(POSITION_BUCKETS, dtype=torch.float64)
        self.current: str | Sequence[str] = self.domains[0]

    @torch.no_grad()
    def update(self, router_logits: Sequence[torch.Tensor], mask_BS: torch.Tensor, ids_BS: torch.Tensor | None) -> None:
        """
        Add a batch; `current` is its domain, or the list of its rows' domains.

        Args:
            router_logits: one [T, n] per layer.
            mask_BS: 1 for real tokens. If the batch continues a cache, the mask is longer than S; its end is used.
            ids_BS: the tokens, for token classes.
        """
        first = router_logits[0].device  # layers may be on different ones
        logits_LTN = torch.stack([logits.detach().to(first) for logits in router_logits]).float()
        device, tokens = logits_LTN.device, logits_LTN.shape[1]
        rows = mask_BS.shape[0]
        positions_BS = (mask_BS.cumsum(1) - 1).clamp(min=0)[:, -(tokens // rows) :]
        weight_T = mask_BS[:, -(tokens // rows) :].flatten().float()
        names = [self.current] * rows if isinstance(self.current, str) else list(self.current)
        if len(names) != rows:
            raise ValueError(f"RoutingStatistics: current names {len(names)} domains, the batch has {rows} rows")
        domain_T = torch.tensor([self.domains.index(name) for name in names], device=device).repeat_interleave(
            tokens // rows
        )
        domain_TD = F.one_hot(domain_T, len(self.domains)).float() * weight_T.unsqueeze(1)
        chosen_LTN = torch.zeros_like(logits_LTN).scatter_(-1, logits_LTN.topk(self.k, dim=-1).indices, 1.0)
        self.counts += torch.einsum("ltn,td->dln", chosen_LTN, domain_TD).double().cpu()
        self.tokens += domain_TD.sum(0).double().cpu()
        weighted_LTN = chosen_LTN * weight_T.unsqueeze(-1)
        self.coactivation += torch.einsum("ltn,ltm->lnm", weighted_LTN, chosen_LTN).double().cpu()
        if self.token_classes is not None and ids_BS is not None:
            class_TC = F.one_hot(self.token_classes.to(device)[ids_BS.flatten()], len(TOKEN_CLASSES)).float()
            self.class_counts += torch.einsum("ltn,tc->cln", weighted_LTN, class_TC).double().cpu()
        if self.allowed is not None:
            inside_LT = (logits_LTN.softmax(-1) * self.allowed.to(device)[domain_T]).sum(-1)
            bucket_T = (positions_BS.flatten() + 1).float().log2().floor().long().clamp(max=POSITION_BUCKETS - 1)
            bucket_TP = F.one_hot(bucket_T, POSITION_BUCKETS).float() * weight_T.unsqueeze(1)
            self.compliance_sums += (inside_LT @ bucket_TP).double().cpu()
            self.compliance_tokens += bucket_TP.sum(0).double().cpu()

    def shares(self) -> dict[str, torch.Tensor]:
        """Domain → each expert's share of its layer's assignments, [L, n]; only for domains with tokens."""
        seen = [i for i in range(len(self.domains)) if self.tokens[i]]
        return {self.domains[i]: self.counts[i] / self.counts[i].sum(1, keepdim=True) for i in seen}

    def compliance(self) -> torch.Tensor:
        """Mean compliance by layer and position bucket, [L, P]; NaN for buckets without tokens."""
        if self.allowed is None:
            raise ValueError("RoutingStatistics: compliance needs an expert_map")
        return self.compliance_sums / self.compliance_tokens

    def mean_compliance(self) -> float:
        """Mean compliance over all tokens and layers."""
        if self.allowed is None:
            raise ValueError("RoutingStatistics: compliance needs an expert_map")
        return float(self.compliance_sums.sum() / self.compliance_tokens.sum() / len(self.sizes))

    def warnings(self) -> list[str]:
        """Layers with collapsed routing: an expert gets less than 1 % of the assignments, or one gets most of them."""
        found = []
        for layer, (counts_N, n) in enumerate(zip(self.counts.sum(0), self.sizes, strict=True)):
            health = load_health(counts_N.unsqueeze(0), [n])
            if health.dead:
                found.append(f"layer {layer}: {health.dead} of {n} experts get less than 1 % of the assignments")
            if health.largest > 0.9 / self.k and n > 2 * self.k:
                found.append(f"layer {layer}: one expert gets {health.largest:.0%} of the assignments")
        return found

    def as_dict(self) -> dict[str, Any]:
        """All statistics as plain lists, ready for JSON."""
        health = load_health(self.counts.sum(0), self.sizes)
        return {
            "experts": self.sizes,
            "top_k": self.k,
            "tokens": dict(zip(self.domains, self.tokens.tolist(), strict=True)),
            "shares": {domain: share.tolist() for domain, share in self.shares().items()},
            "load": vars(health),
            "coactivation": self.coactivation.tolist(),
            "token_classes": dict(zip(TOKEN_CLASSES, self.class_counts.tolist(), strict=True)),
            "compliance": None if self.allowed is None else self.compliance().nan_to_num(-1).tolist(),
            "mean_compliance": None if self.allowed is None else self.mean_compliance(),
            "warnings": self.warnings(),
        }


@contextmanager
def record_routing(
    model: Any,
    domains: Sequence[str] = ("all",),
    expert_map: Mapping[str, Sequence[int]] | None = None,
    token_classes: torch.Tensor | None = None,
) -> Iterator[RoutingStatistics]:
    """
    Collect routing statistics of every forward pass inside the block. Nothing stays on the model afterwards.

    Set `statistics.current` to the domain of the next batch, or to one domain per row.

    Args:
        model: a model with a MoE-LoRA adapter, or a native MoE.
        domains: the names of the domains.
        expert_map: domain → experts that should serve it, for compliance.
        token_classes: the class of every token of the vocabulary, see `RoutingStatistics`.

    Raises:
        ValueError: the model has no router, or a domain has no experts in `expert_map`.
    """
    sizes = [n for n, _ in router_sizes(model, "record_routing")]
    k = text_config(model).num_experts_per_tok
    statistics = RoutingStatistics(sizes, k, domains, expert_map, token_classes)
    with observed_routing(model, lambda seen: statistics.update(seen.router_logits, seen.mask, seen.input_ids)):
        yield statistics
