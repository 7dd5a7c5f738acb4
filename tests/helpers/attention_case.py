"""Padded batches, and the mean keys of their tokens computed row by row: what attention routers are made from."""

from __future__ import annotations

import torch

IDS = torch.randint(3, 64, (4, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 5:] = 0
MASK[3, :3] = 0
BATCHES = [
    {"input_ids": IDS[:2], "attention_mask": MASK[:2], "labels": IDS[:2]},
    {"input_ids": IDS[2:], "attention_mask": MASK[2:]},
]


@torch.no_grad()
def mean_keys(model) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """
    Per layer, the mean key of all key heads [heads·w] and the attention's mean input [d] over real tokens: row by row,
    without padding.
    """
    sums, tokens = None, 0
    for ids, mask in zip(IDS, MASK, strict=True):
        real = ids[mask.bool()].unsqueeze(0)
        states = model(input_ids=real, output_hidden_states=True).hidden_states
        inputs = [layer.input_layernorm(x)[0] for layer, x in zip(model.model.layers, states, strict=False)]
        own = [
            (layer.self_attn.k_proj(x).double().sum(0), x.double().sum(0))
            for layer, x in zip(model.model.layers, inputs, strict=True)
        ]
        sums = own if sums is None else [(a + k, b + x) for (a, b), (k, x) in zip(sums, own, strict=True)]
        tokens += real.shape[1]
    return [((key / tokens).float(), (total / tokens).float()) for key, total in sums]
