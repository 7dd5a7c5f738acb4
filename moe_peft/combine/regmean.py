"""
Merges several LoRAs into one, in closed form: RegMean (Jin et al., 2023, arXiv 2212.09849) for LoRAs.

In each linear, the merged update D is the least-squares fit to all LoRAs at once, `min Σ_i E|D x - D_i x|²`, where x
are the linear's inputs in texts of adapter i: `D = Σ_i D_i G_i (Σ_j G_j + λI)⁻¹` with `G_i = E[x xᵀ]`. D is itself a
LoRA, because `D_i = s_i B_i A_i`: it keeps every B_i, and replaces A_i by `A_i G_i (Σ_j G_j + λI)⁻¹`. Its rank is
Σ_i r_i. General texts should keep the base's answers: they add their G to the sum, with an update of 0.

Legend: B texts of a batch, S positions, T tokens, d input size of a linear, n adapters, r rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from torch import nn

from ..adapter.layers import linear_features
from ..adapter.plain_lora import Adapter, PlainLora, lora_scaling, read_loras
from ..utils.messages import InputError
from ..utils.torch_contexts import double, evaluating

logger = logging.getLogger("moe_peft")

_TOKENS = 512  # tokens per product in float32; products are summed in float64
_MEMORY = 2**32  # bytes for the sums of one pass over the texts


def regmean(
    model: nn.Module,
    adapters: Sequence[Adapter],
    batches: Sequence[Mapping[str, torch.Tensor]],
    penalty: float = 1e-3,
    memory: int = _MEMORY,
) -> PeftModel:
    """
    Merge LoRA adapters of one base into one LoRA, without training.

    Args:
        model: the adapters' base, full precision or quantized; it gets the merged LoRA.
        adapters: n LoRA adapters: folders, PEFT models, or pairs of config and tensors. Ranks, scalings and adapted
            linears may differ.
        batches: texts with `input_ids` and `attention_mask` [B, S] and `expert` [B]: the index of the adapter for each
            text, or n for general texts. Each adapter needs some texts.
        penalty: λ, as a share of the mean of the diagonal of Σ_j G_j.
        memory: bytes for the sums of one pass over the texts. If the sums of all linears need more, there are several
            passes.

    Returns:
        the base with a LoRA of rank Σ_i r_i. It saves, merges and serves like any other LoRA.

    Raises:
        ValueError: an adapter has no texts, or has other parts than LoRAs on linears.

    Example:

    ```python
    >>> import torch
    >>> from peft import LoraConfig, get_peft_model
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from moe_peft import regmean
    >>> for name in ("math", "code"):
    ...     base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    ...     lora = get_peft_model(
    ...         base, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    ...     )
    ...     lora.save_pretrained(name)
    >>> base = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    >>> tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
    >>> texts = {0: "What is 3 + 4?", 1: "Write a loop in Python.", 2: "Hello!"}
    >>> batches = [
    ...     {**tokenizer(text, return_tensors="pt"), "expert": torch.tensor([i])}
    ...     for i, text in texts.items()
    ... ]
    >>> model = regmean(base, ["math", "code"], batches)
    >>> model.save_pretrained("math-and-code")
    ```
    """
    loras = read_loras(model, adapters)[0]
    for lora in loras:
        if lora.tokens or lora.saved:
            raise InputError(f"regmean: {lora.name}: has more than LoRAs on linears; merge LoRAs without it")
    counts = torch.cat([batch["expert"] for batch in batches]).bincount(minlength=len(loras))
    if missing := [lora.name for lora, count in zip(loras, counts.tolist(), strict=False) if not count]:
        raise InputError(f"regmean: {missing[0]}: no text is for it; give some for each adapter")

    modules = dict(model.named_modules())
    linears = {path: modules[path] for path in modules if any(path in lora.A for lora in loras)}
    owner = _shared_inputs(model, linears, batches[0])
    merged: dict[str, torch.Tensor] = {}
    for paths in _groups(linears, owner, memory):
        merged |= _merged_A(model, loras, linears, owner, paths, batches, penalty)
    return _as_peft(model, loras, merged)


def _merged_A(
    model: Any,
    loras: Sequence[PlainLora],
    linears: Mapping[str, nn.Module],
    owner: Mapping[str, str],
    paths: Sequence[str],
    batches: Sequence[Mapping[str, torch.Tensor]],
    penalty: float,
) -> dict[str, torch.Tensor]:
    """Compute the merged A [Σ_i r_i, d] of the linears `paths`, float64 on the CPU, in one pass over the texts."""
    total: dict[str, torch.Tensor] = {}  # Σ_j G_j
    numerator: dict[str, list[torch.Tensor]] = {path: [] for path in paths}  # A_i G_i
    for i in range(len(loras) + 1):
        lora = loras[i] if i < len(loras) else None
        for path, gram_DD in _grams(model, lora, linears, {owner[path] for path in paths}, batches, i).items():
            total[path] = total[path] + gram_DD if path in total else gram_DD
            for of_path in paths:
                if owner[of_path] == path and lora is not None and of_path in lora.A:
                    numerator[of_path].append(double(lora.A[of_path]).to(gram_DD.device) @ gram_DD)
    factors = {}
    for path, sum_DD in total.items():
        ridge = penalty * sum_DD.diagonal().mean()
        factors[path] = torch.linalg.cholesky(sum_DD + ridge * torch.eye(len(sum_DD)).to(sum_DD))
    return {
        path: torch.cholesky_solve(torch.cat(numerator[path]).T, factors[owner[path]]).T.cpu().contiguous()
        for path in paths
    }


@torch.no_grad()
def _grams(
    model: Any,
    lora: PlainLora | None,
    linears: Mapping[str, nn.Module],
    owners: set[str],
    batches: Sequence[Mapping[str, torch.Tensor]],
    expert: int,
) -> dict[str, torch.Tensor]:
    """
    Compute `G = E[x xᵀ]` [d, d] of the inputs of the linears `owners` at real tokens, float64.

    Args:
        lora: the LoRA active while the texts run; None: the base alone.
        expert: index of an adapter, or n for general texts. Only texts with this index run.
    """
    grams: dict[str, torch.Tensor] = {}
    tokens = 0
    with with_lora(linears, lora, model.device), evaluating(model), ExitStack() as hooks:
        mask_BS = torch.empty(0)

        def add(module: nn.Module, args: tuple[torch.Tensor, ...], path: str) -> None:
            x_TD = args[0].reshape(-1, args[0].shape[-1])[mask_BS.flatten()].float()
            for part_PD in x_TD.split(_TOKENS):
                gram_DD = double(part_PD.T @ part_PD)
                grams[path] = grams[path].add_(gram_DD) if path in grams else gram_DD

        for path in owners:
            hook = linears[path].register_forward_pre_hook(lambda m, args, path=path: add(m, args, path))
            hooks.callback(hook.remove)
        for batch in batches:
            rows = batch["expert"] == expert
            if rows.any():
                ids_BS, mask_BS = (batch[name][rows].to(model.device) for name in ("input_ids", "attention_mask"))
                mask_BS = mask_BS.bool()
                tokens += int(mask_BS.sum())
                model(input_ids=ids_BS, attention_mask=mask_BS.long(), use_cache=False)
    return {path: gram_DD / tokens for path, gram_DD in grams.items()}


@contextmanager
def with_lora(linears: Mapping[str, nn.Module], lora: PlainLora | None, device: torch.device) -> Iterator[None]:
    """Add a LoRA's updates to the outputs of linears inside the block."""
    with ExitStack() as hooks:
        for path in linears.keys() & (lora.A.keys() if lora is not None else ()):
            A, B = (matrix.to(device, torch.float32) for matrix in (lora.A[path], lora.B[path]))  # type: ignore[union-attr]
            update = partial(_updated, A=A, B=lora_scaling(lora.config, path) * B)  # type: ignore[union-attr]
            hooks.callback(linears[path].register_forward_hook(update).remove)
        yield


def _updated(
    linear: nn.Module, args: tuple[torch.Tensor, ...], y: torch.Tensor, A: torch.Tensor, B: torch.Tensor
) -> torch.Tensor:
    return y + (args[0].float() @ A.T @ B.T).to(y.dtype)


@torch.no_grad()
def _shared_inputs(model: Any, linears: Mapping[str, nn.Module], batch: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Map each linear to the first linear with the same input. An FFN's gate and up projections share one."""
    owner: dict[str, str] = {}
    last: tuple[torch.Tensor | None, str] = (None, "")

    def note(path: str, x: torch.Tensor) -> None:
        nonlocal last
        last = last if x is last[0] else (x, path)
        owner[path] = last[1]

    with evaluating(model), ExitStack() as hooks:
        for path, linear in linears.items():
            hook = linear.register_forward_pre_hook(lambda module, args, path=path: note(path, args[0]))
            hooks.callback(hook.remove)
        ids_1S, mask_1S = (batch[name][:1].to(model.device) for name in ("input_ids", "attention_mask"))
        model(input_ids=ids_1S, attention_mask=mask_1S, use_cache=False)
    return owner


def _groups(linears: Mapping[str, nn.Module], owner: Mapping[str, str], memory: int) -> Iterable[list[str]]:
    """Group linears so the sums of a group fit the memory. Linears with a common input share sums and a group."""
    of_owner: dict[str, list[str]] = {}
    for path, first in owner.items():
        of_owner.setdefault(first, []).append(path)
    groups: list[list[str]] = []
    left = 0
    for first, paths in of_owner.items():
        size = 3 * 8 * linear_features(linears[first])[0] ** 2  # the total, an adapter's sum, a factor
        if size > left:
            groups.append([])
            left = memory
        groups[-1] += paths
        left -= size
    return groups


def _as_peft(model: nn.Module, loras: Sequence[PlainLora], merged: Mapping[str, torch.Tensor]) -> PeftModel:
    """Return the base with one LoRA of the merged A and all adapters' B, each B multiplied by its scaling."""
    rank = {path: len(A) for path, A in merged.items()}
    r = max(rank.values())
    others = {path: of for path, of in rank.items() if of != r}
    first = loras[0].config
    config = LoraConfig(
        r=r, lora_alpha=r, target_modules=sorted(merged), rank_pattern=others, alpha_pattern=dict(others),
        task_type=first.task_type, base_model_name_or_path=first.base_model_name_or_path, init_lora_weights=False,
    )  # fmt: skip
    result = get_peft_model(model, config)
    state: dict[str, Any] = {}
    for path, A in merged.items():
        B = [lora_scaling(lora.config, path) * lora.B[path].double() for lora in loras if path in lora.A]
        state[f"base_model.model.{path}.lora_A.weight"] = A.float()
        state[f"base_model.model.{path}.lora_B.weight"] = torch.cat(B, 1).float()
    set_peft_model_state_dict(result, state)
    return result.eval()
