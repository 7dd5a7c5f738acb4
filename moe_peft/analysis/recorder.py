"""
Routing statistics, collected while a model runs.

Legend: B rows, S positions, T = B·S tokens, L layers, n experts, D domains, C token classes, P position buckets.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..models.introspection import RoutedPass, base_model, observed_routing
from ..models.layer import routed_layers
from ..routing.expert_map import expert_masks, label_text, read_expert_map
from ..routing.gates import pad_logits
from ..routing.statistics import LoadHealth, chosen_experts, effective_experts, load_health, variation
from ..utils.messages import InputError
from .token_classes import TOKEN_CLASSES

POSITION_BUCKETS = 16  # of doubling width: 0, 1–2, 3–6, …


class RoutingStatistics:
    """
    Sums over all tokens seen. Memory does not grow with the number of tokens.

    Assignments are the routers' actual choices. Slots with a gate of 0 do not count (a threshold or a capacity left the
    expert out), and forced or masked routing counts as it happened. Compliance is the routers' preference: the
    probability in their logits for the experts of the token's domain, without steering.

    Args:
        sizes: number of experts of each layer.
        ks: experts per token of each layer.
        domains: the names of the D domains.
        expert_map: domain → experts that should serve it, for compliance; see `read_expert_map`.
        token_classes: the class (index into `TOKEN_CLASSES`) of every token of the vocabulary, [V].

    Attributes:
        counts: number of (token, slot) assignments, float64 [D, L, n].
        tokens: number of tokens, [D].
        effective_sums: sum of the tokens' effective numbers of experts, float64 [D, L].
        class_counts: number of assignments by token class, [C, L, n].
        broken: whether a layer's logits were NaN or infinite, so that its numbers mean nothing, bool [L].
        compliance_sums: sum of compliance by domain, layer and position bucket, [D, L, P]. The 16 buckets have doubling
            widths: they begin at 0, 1, 3, 7, ….
        compliance_tokens: number of tokens by domain and position bucket, [D, P].

    Raises:
        ValueError: `expert_map` lacks a domain or has no valid form.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        ks: Sequence[int],
        domains: Sequence[str] = ("all",),
        expert_map: Mapping[str, Sequence[int]] | None = None,
        token_classes: torch.Tensor | None = None,
    ) -> None:
        L, n, D = len(sizes), max(sizes), len(domains)
        self.sizes, self.ks, self.domains = list(sizes), list(ks), [label_text(domain) for domain in domains]
        self.token_classes = token_classes
        self.expert_map, self.allowed = None, None
        if expert_map is not None:
            experts = read_expert_map(expert_map, n, "expert_map")
            missing = [domain for domain in self.domains if domain not in experts]
            if missing:
                raise InputError(f"expert_map: no experts for the domains {missing}; add them")
            self.expert_map = {domain: experts[domain] for domain in self.domains}
            self.allowed = expert_masks(self.expert_map, n)
        self.counts = torch.zeros(D, L, n, dtype=torch.float64)
        self.tokens = torch.zeros(D, dtype=torch.float64)
        self.effective_sums = torch.zeros(D, L, dtype=torch.float64)
        self.class_counts = torch.zeros(len(TOKEN_CLASSES), L, n, dtype=torch.float64)
        self.broken = torch.zeros(L, dtype=torch.bool)
        self.compliance_sums = torch.zeros(D, L, POSITION_BUCKETS, dtype=torch.float64)
        self.compliance_tokens = torch.zeros(D, POSITION_BUCKETS, dtype=torch.float64)
        self.current: Any = self.domains[0]  # domain of the next batch, or a list with one for each row

    @torch.no_grad()
    def update(
        self,
        router_logits: Sequence[torch.Tensor],
        mask_BS: torch.Tensor,
        ids_BS: torch.Tensor | None,
        chosen: Sequence[torch.Tensor] | None = None,
        effective: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """
        Add a batch. `current` is its domain, or the list of its rows' domains.

        Args:
            router_logits: one [T, n] per layer.
            mask_BS: 1 for real tokens. If the batch continues a cache, the mask is longer than S; its end is used.
            ids_BS: the tokens, for token classes.
            chosen: the experts that served each token, bool [T, n] per layer; None: the k with the largest logits.
            effective: the effective number of experts, [T] per layer; None: from the probabilities of the chosen
                experts.
        """
        first, n = router_logits[0].device, max(self.sizes)  # layers may be on different devices
        broken = [(logits.isnan() | logits.isposinf()).any().to(first) for logits in router_logits]
        self.broken |= torch.stack(broken).cpu()
        logits_LTN = torch.stack([pad_logits(logits.detach().to(first).float(), n) for logits in router_logits])
        if chosen is None:
            best = (logits_TN.topk(k, dim=-1).indices for logits_TN, k in zip(logits_LTN, self.ks, strict=True))
            chosen = [chosen_experts(experts_TK, None, n) for experts_TK in best]
        chosen_LTN = torch.stack(
            [F.pad(of_layer.to(first), (0, n - of_layer.shape[-1])) for of_layer in chosen]
        ).float()
        if effective is None:
            effective = [effective_experts(of_layer) for of_layer in logits_LTN.softmax(-1) * chosen_LTN]
        effective_LT = torch.stack([of_layer.to(first) for of_layer in effective])
        rows, length = mask_BS.shape[0], logits_LTN.shape[1] // max(mask_BS.shape[0], 1)
        start = mask_BS.shape[1] - length
        weight_T = mask_BS[:, start:].flatten().float().to(first)
        domain_T = self._domains_of(rows).to(first).repeat_interleave(length)
        domain_TD = F.one_hot(domain_T, len(self.domains)).float() * weight_T.unsqueeze(1)
        self.counts += torch.einsum("ltn,td->dln", chosen_LTN, domain_TD).cpu().double()
        self.tokens += domain_TD.sum(0).cpu().double()
        self.effective_sums += (effective_LT @ domain_TD).T.cpu().double()
        if self.token_classes is not None and ids_BS is not None:
            class_TC = F.one_hot(self.token_classes.to(first)[ids_BS.to(first).flatten()], len(TOKEN_CLASSES)).float()
            class_TC *= weight_T.unsqueeze(1)
            self.class_counts += torch.einsum("ltn,tc->cln", chosen_LTN, class_TC).cpu().double()
        if self.allowed is not None:
            inside_LT = (logits_LTN.softmax(-1) * self.allowed.to(first)[domain_T]).sum(-1)
            positions_T = (mask_BS.cumsum(1) - 1).clamp(min=0)[:, start:].flatten().to(first)
            buckets_T = (positions_T + 1).float().log2().floor().long().clamp(max=POSITION_BUCKETS - 1)
            bucket_TP = F.one_hot(buckets_T, POSITION_BUCKETS).float()
            self.compliance_sums += torch.einsum("lt,td,tp->dlp", inside_LT, domain_TD, bucket_TP).cpu().double()
            self.compliance_tokens += (domain_TD.T @ bucket_TP).cpu().double()

    def _domains_of(self, rows: int) -> torch.Tensor:
        """Return the index of each row's domain, [B]."""
        several = isinstance(self.current, Sequence) and not isinstance(self.current, str)
        names = list(self.current) if several else [self.current] * rows
        return torch.tensor([self._index(name) for name in names], dtype=torch.long)

    def _index(self, domain: Any) -> int:
        """Return the index of a domain, by its name."""
        if label_text(domain) not in self.domains:
            raise InputError(f"domain {domain!r}: no such domain; there is {self.domains}")
        return self.domains.index(label_text(domain))

    @property
    def position_starts(self) -> list[int]:
        """First position of each bucket, [P]."""
        return [2**p - 1 for p in range(POSITION_BUCKETS)]

    def shares(self) -> dict[str, torch.Tensor]:
        """Return domain → each expert's share of its layer's assignments, [L, n]; only for domains with tokens."""
        seen = [i for i in range(len(self.domains)) if self.tokens[i]]
        return {self.domains[i]: self.counts[i] / self.counts[i].sum(1, keepdim=True).clamp(min=1) for i in seen}

    def _repr_png_(self) -> bytes:
        """Draw the routing of each domain's tokens, for a notebook."""
        from .figures import plot_shares

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "load.png")
            plot_shares(self.shares(), path, "Where the tokens go", self.expert_map, self.sizes)
            return path.read_bytes()

    def effective(self) -> dict[str, torch.Tensor]:
        """
        Return domain → the mean effective number of experts per token and layer, [L]; only for domains with tokens.
        """
        seen = [i for i in range(len(self.domains)) if self.tokens[i]]
        return {self.domains[i]: self.effective_sums[i] / self.tokens[i] for i in seen}

    def compliance_by_domain(self) -> dict[str, torch.Tensor]:
        """Return domain → mean compliance by layer and position bucket, [L, P]; NaN without tokens there."""
        self._needs_map()
        sums, tokens = self.compliance_sums, self.compliance_tokens
        return {d: sums[i] / tokens[i] for i, d in enumerate(self.domains) if tokens[i].any()}

    def mean_compliance(self, domain: str | None = None) -> float:
        """Return mean compliance over all tokens and layers, or of one domain if it is named. NaN without tokens."""
        self._needs_map()
        at = slice(None) if domain is None else self._index(domain)
        tokens = self.compliance_tokens[at].sum()
        return float(self.compliance_sums[at].sum() / tokens / len(self.sizes))

    def chance(self) -> dict[str, float]:
        """Return domain → the compliance of uniform routers: its share of the experts, averaged over layers."""
        self._needs_map()
        assert self.allowed is not None
        shares_DL = torch.stack([self.allowed[:, :n].double().mean(1) for n in self.sizes], dim=1)
        return dict(zip(self.domains, shares_DL.mean(1).tolist(), strict=True))

    def _needs_map(self) -> None:
        if self.allowed is None:
            raise InputError("compliance needs an expert_map")

    def health(self) -> LoadHealth:
        """Measure how evenly the experts are used."""
        return load_health(self.counts.sum(0), self.sizes, float(self.tokens.sum()))

    def variations(self) -> list[float]:
        """Return the coefficient of variation of each layer's load, [L]."""
        return [variation(counts_N[:n]) for counts_N, n in zip(self.counts.sum(0), self.sizes, strict=True)]

    def warning(self) -> str:
        """Return a warning about the load, with advice; "" if it is fine, or an expert map asks for uneven loads."""
        return self.health().warning if self.allowed is None else ""

    def specialization(self) -> dict[str, torch.Tensor]:
        """
        Return domain → specialization of each layer, [L]: the share of the domain's assignments that go to other
        experts than the average domain's (half the sum of absolute differences). 0: the router treats the domain like
        all text. 1: the domain has its own experts.
        """
        shares = self.shares()
        mean_LN = sum(shares.values()) / max(len(shares), 1)
        return {domain: (share_LN - mean_LN).abs().sum(1) / 2 for domain, share_LN in shares.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return all statistics as plain lists, ready for JSON."""
        health = self.health()
        return {
            "experts": self.sizes,
            "top_k": self.ks,
            "tokens": dict(zip(self.domains, self.tokens.tolist(), strict=True)),
            "shares": {domain: share.tolist() for domain, share in self.shares().items()},
            "effective_experts": {domain: of_layers.tolist() for domain, of_layers in self.effective().items()},
            "load": {**vars(health), "status": health.status},
            "token_classes": dict(zip(TOKEN_CLASSES, self.class_counts.tolist(), strict=True)),
            "mean_compliance": None,
            **({} if self.allowed is None else self._compliance_as_dict()),
            "specialization": {domain: of_layers.tolist() for domain, of_layers in self.specialization().items()},
            "warning": self.warning(),
        }

    def _compliance_as_dict(self) -> dict[str, Any]:
        """Return the statistics of compliance. -1 stands for buckets without tokens."""
        by_domain = self.compliance_by_domain()
        return {
            "mean_compliance": self.mean_compliance() if by_domain else None,
            "position_starts": self.position_starts,
            "compliance_by_domain": {name: share_LP.nan_to_num(-1).tolist() for name, share_LP in by_domain.items()},
            "mean_compliance_by_domain": {name: self.mean_compliance(name) for name in by_domain},
            "chance": self.chance(),
        }


@contextmanager
def record_routing(
    model: Any,
    domains: Sequence[str] = ("all",),
    expert_map: Mapping[str, Sequence[int]] | None = None,
    token_classes: torch.Tensor | None = None,
    training_only: bool = False,
) -> Iterator[RoutingStatistics]:
    """
    Collect routing statistics of every forward pass inside the block, in all threads. Nothing stays on the model
    afterwards. In `generate`, ended rows do not count while other rows go on. The end and padding tokens of the model's
    generation config mark ended rows.

    The context manager's value is a `RoutingStatistics`. Set its `current` to the domain of the next batch, or to one
    domain per row.

    Args:
        model: a model with a MoE-LoRA adapter, or a native MoE.
        domains: the names of the domains.
        expert_map: domain → experts that should serve it, for compliance; indices or masks, see `read_expert_map`.
        token_classes: the class of every token of the vocabulary, see `RoutingStatistics`.
        training_only: leave out passes without gradients, such as an evaluation's or a DPO trainer's reference passes.

    Raises:
        ValueError: the model has no router, or a domain has no experts in `expert_map`.

    Example:

    ```python
    >>> import torch
    >>> from peft import get_peft_model
    >>> from transformers import AutoModelForCausalLM
    >>> from moe_peft import MoELoraConfig, record_routing
    >>> base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> model = get_peft_model(
    ...     base, MoELoraConfig(num_experts=4, r=4, task_type="CAUSAL_LM")
    ... )
    >>> with record_routing(model) as statistics:
    ...     outputs = model(input_ids=torch.tensor([[3, 4, 5]]))
    >>> shares = statistics.shares()["all"]  # [layers, experts]
    ```
    """
    layers = routed_layers(model, "record_routing")
    sizes, ks = [layer.num_experts for layer in layers], [layer.top_k for layer in layers]
    statistics = RoutingStatistics(sizes, ks, domains, expert_map, token_classes)

    generation = getattr(base_model(model), "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    after_end = {*(ends if isinstance(ends, list) else [ends]), getattr(generation, "pad_token_id", None)} - {None}

    def add(seen: RoutedPass) -> None:
        if seen.trains or not training_only:
            mask = seen.mask
            if seen.input_ids is not None and seen.input_ids.shape[1] == 1 and after_end:
                # `generate` continues ended rows, and its mask does not show it.
                has_ended = torch.stack([seen.input_ids == token for token in after_end]).any(0)
                mask = torch.cat([mask[:, :-1], mask[:, -1:] * ~has_ended.to(mask.device)], dim=1)
            statistics.update(seen.router_logits, mask, seen.input_ids, seen.chosen, seen.effective())

    with observed_routing(model, add):
        yield statistics
