"""A dispatch by each method, of the same tokens to the same experts."""

from __future__ import annotations

import torch

from moe_peft.adapter.dispatch import Blocks, Dense, Dispatch, Gather, Sorted

N, R, IN, OUT, SCALING = 5, 4, 8, 12, 0.7
METHODS = ["dense", "gather", "blocks", "sorted", "parts of blocks", "parts of sorted"]
# Grouped products take no float64.
DTYPES = {name: torch.float32 if "sorted" in name else torch.float64 for name in METHODS}


def make_dispatch(name, k, all_columns=False, tokens=11, seed=0, device="cpu", dtype=None):
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(tokens, N, generator=generator).topk(k).indices
    experts[experts == 3] = 4 if k == 1 else 3  # with one slot, expert 3 gets no token
    gates = (torch.rand(tokens, k, generator=generator) + 0.1).to(dtype or DTYPES[name])
    experts, gates = experts.to(device), gates.to(device)
    kinds = {"dense": Dense, "gather": Gather, "blocks": Blocks, "sorted": Sorted}
    kind = kinds[name.removeprefix("parts of ")]
    whole = type(kind.__name__, (kind,), {"slots": kind.slots if name.startswith("parts of ") else None})
    return Dispatch(whole, all_columns, experts, gates.requires_grad_(), N, SCALING)
