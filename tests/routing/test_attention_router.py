"""The attention router's mixture "sum" learns what m separate query matrices learn, and its old files load."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from torch import nn

from moe_peft import MoELoraConfig
from moe_peft.routing.routers import RouterSettings, make_router
from moe_peft.training.mixins import full_norm
from moe_peft.training.trainers import MoESFTConfig, MoESFTTrainer
from tests.helpers.close import assert_near, near
from tests.helpers.models import tiny_llama

N, D, SIZE, STEPS = 4, 10, 16, 6
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.03, momentum=0.8, weight_decay=0.05),
    "adam": partial(torch.optim.Adam, lr=0.05, eps=1e-4),
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.3),
}


class Separate(nn.Module):
    """The router as in the paper: m query matrices, each with every key of every expert."""

    def __init__(self, query_MWD: torch.Tensor, key_NCW: torch.Tensor) -> None:
        super().__init__()
        self.queries = nn.ParameterList([nn.Parameter(query_WD.clone()) for query_WD in query_MWD])
        self.keys = nn.ParameterList([nn.Parameter(key_CW.clone()) for key_CW in key_NCW])

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        rows = []
        for x in x_TD:
            row, queries = [], [query @ x for query in self.queries]
            for key_CW in self.keys:
                of_keys = [sum(query @ key for query in queries) / len(key) ** 0.5 for key in key_CW]
                row.append(torch.stack(of_keys).max())
            rows.append(torch.stack(row))
        return torch.stack(rows)


def pair(m: int) -> tuple[nn.Module, Separate]:
    generator = torch.Generator().manual_seed(m)
    query = torch.randn(m, SIZE // m, D, generator=generator, dtype=torch.float64) * 0.3
    key = torch.randn(N, max(1, m // N), SIZE // m, generator=generator, dtype=torch.float64)
    router = make_router(D, N, RouterSettings("attention", num_heads=m, attention_size=SIZE)).double()
    router.set_heads(query, key)
    return router, Separate(query, key)


def losses(m: int):
    """A loss of the logits for every step, the same for both models."""
    generator = torch.Generator().manual_seed(100 + m)
    for _ in range(STEPS):
        x = torch.randn(6, D, generator=generator, dtype=torch.float64)
        target = torch.randint(0, N, (6,), generator=generator)

        def loss(model, x=x, target=target):
            logits = model(x)
            return nn.functional.cross_entropy(logits, target) + 0.01 * logits.logsumexp(1).square().mean()

        yield loss


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("m", [4, 2, 8, 1])
def test_the_sum_of_the_queries_moves_like_that_of_separate_ones(m, optimizer):
    ours, separate = pair(m)
    before = ours.mean_query.detach().clone()
    steps = [OPTIMIZERS[optimizer](model.parameters()) for model in (ours, separate)]
    for loss in losses(m):
        for model, step in zip((ours, separate), steps, strict=True):
            step.zero_grad()
            loss(model).backward()
        gradients = [query.grad for query in separate.queries]
        assert_near(ours.mean_query.grad[0], gradients[0])
        assert_near(ours.key.grad, torch.stack([k.grad for k in separate.keys]))
        for step in steps:
            step.step()
    assert (ours.mean_query - before).abs().mean() > 0.01
    assert_near(ours.mean_query.data[0] * m, sum(query.data for query in separate.queries))
    assert_near(ours.key.data, torch.stack([key.data for key in separate.keys]))
    x = torch.randn(20, D, dtype=torch.float64)
    assert_near(ours(x), separate(x))
    if m <= N:
        assert_near(x @ ours.fold().T, separate(x))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("m", [4, 8])
def test_clipped_sums_move_like_clipped_separate_queries(m, optimizer):
    ours, separate = pair(m)
    steps = [OPTIMIZERS[optimizer](model.parameters()) for model in (ours, separate)]
    for loss in losses(m):
        norms = []
        for model, step in zip((ours, separate), steps, strict=True):
            step.zero_grad()
            loss(model).backward()
            with full_norm(model):
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            step.step()
        assert norms[1] > 0.05
        assert_near(*norms)
    assert_near(ours.mean_query.data[0] * m, sum(query.data for query in separate.queries))
    assert_near(ours.key.data, torch.stack([key.data for key in separate.keys]))


@pytest.mark.parametrize("limit", [0.01, 0.0])
def test_trainers_count_a_stored_mean_as_often_as_the_matrices_it_stands_for(limit, tmp_path, tokenizer):
    """By the weights after a step of SGD, and in the logged norm."""
    torch.manual_seed(0)
    config = MoELoraConfig(num_experts=4, router_type="attention", init_lora_weights=False, router_aux_loss_coef=100.0)
    model = get_peft_model(tiny_llama(vocab=64), config)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    args = MoESFTConfig(
        output_dir=str(tmp_path), max_steps=1, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant",
        max_grad_norm=limit, logging_steps=1, report_to="none", use_cpu=True, bf16=False, save_strategy="no",
        per_device_train_batch_size=2, gradient_checkpointing=False,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]})
    trainer = MoESFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    after = dict(model.named_parameters())
    squares = {name: float(((after[name] - old) / 0.1).square().sum()) for name, old in before.items()}
    of_means = sum(square for name, square in squares.items() if "mean_query" in name)
    norm = (sum(squares.values()) + 3 * of_means) ** 0.5
    logged = next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)
    assert of_means > 0.1 * norm**2  # otherwise it would not tell
    weights = max(float(old.abs().max()) for old in before.values())
    assert norm == near(limit or logged, scale=weights / 0.1) and logged > 0.01


def test_random_values_give_logits_as_large_as_a_linear_gates():
    torch.manual_seed(0)
    x = torch.randn(500, 256)
    for m in (2, 8, 32):
        for mixture in ("sum", "max"):
            settings = RouterSettings("attention", num_heads=m, mixture=mixture, attention_size=1024)
            router = make_router(256, 8, settings)
            with torch.no_grad():
                query = router.mean_query * m if mixture == "sum" else router.query
                scores = torch.einsum("mwd,td,ncw->tmnc", query, x, router.key) / (1024 / m) ** 0.5
            assert float(scores.std()) == pytest.approx(0.02 * 256**0.5, rel=0.3)
