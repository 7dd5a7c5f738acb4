"""The balancing loss of routers that leave experts out counts the experts that serve a token, not the best top_k."""

from __future__ import annotations

import pytest
import torch

from moe_peft.models.layer import router_parameters
from moe_peft.models.native_routers import replace_routers
from moe_peft.routing.routers import RouterSettings
from tests.helpers.adapters import COEF, adapted, batch
from tests.helpers.close import assert_near, near
from tests.helpers.routed_models import NATIVE, N
from tests.helpers.trainers import LABELS, logged, make_trainer, one_batch

LIMIT = {"top_p": 0.6, "threshold": 0.22}


def served(kind: str, p: list[float], k: int) -> list[int]:
    """The experts of one token, as the papers have them, at most k."""
    order = sorted(range(len(p)), key=lambda i: -p[i])[:k]
    if kind == "threshold":
        return [i for i in order if p[i] >= LIMIT[kind] or i == order[0]]
    taken: list[int] = []
    while len(taken) < k and sum(p[i] for i in taken) < LIMIT[kind]:
        taken.append(order[len(taken)])
    return taken


def balance(kind: str, layers, mask_T, k: int, scope: str = "global") -> torch.Tensor:
    """n Σ f P in float64, token by token."""
    f, P = [], []
    for logits_TN in layers:
        p_TN = logits_TN.double().softmax(-1)
        counts = torch.zeros(p_TN.shape[1], dtype=torch.float64)
        for p_N, real in zip(p_TN.tolist(), mask_T.tolist(), strict=True):
            for expert in served(kind, p_N, k) if real else []:
                counts[expert] += 1
        f.append(counts / mask_T.sum())
        P.append((p_TN * mask_T.unsqueeze(1)).sum(0) / mask_T.sum())
    n = layers[0].shape[1]
    if scope == "global":
        return n * (sum(f) * sum(P)).sum() / len(layers) ** 2
    return sum(n * (one * other).sum() for one, other in zip(f, P, strict=True)) / len(layers)


def spread(model) -> None:
    """Routers decided enough that tokens differ in their number of experts."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in router_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)


@pytest.mark.parametrize("kind", LIMIT)
def test_a_models_own_loss_counts_the_experts_that_serve(kind):
    model = adapted(router_type=kind, router_threshold=LIMIT[kind], num_experts=4, top_k=4).eval()
    spread(model)
    inputs = batch()
    out = model(**inputs)
    mask_T = inputs["attention_mask"].flatten()
    expected = balance(kind, out.router_logits, mask_T, 4, "layer")
    assert abs(expected.item() - 4) > 0.1  # what counting the best top_k = n always gives
    assert_near(out.aux_loss, expected)
    plain = model(**inputs, output_router_logits=False)
    assert_near(out.loss, plain.loss + COEF * out.aux_loss)
    parameters = [*router_parameters(model).values()]
    own = torch.autograd.grad(out.aux_loss, parameters, retain_graph=True)
    reference = torch.autograd.grad(expected, parameters)
    for one, other in zip(own, reference, strict=True):
        assert other.abs().max() > 1e-4
        assert_near(one, other)


def routed(where: str, kind: str, k: int):
    """A model whose routers, 6 experts, may leave some out."""
    if where == "adapter":
        model = adapted(router_type=kind, router_threshold=LIMIT[kind], num_experts=N, top_k=k)
    else:
        torch.manual_seed(0)
        model = NATIVE[where]()
        model.resize_token_embeddings(128)
        replace_routers(model, RouterSettings(type=kind, threshold=LIMIT[kind]), top_k=k)
    spread(model)
    return model


@pytest.mark.parametrize(
    ("where", "scope", "k"), [("adapter", "global", 2), ("mixtral", "global", N), ("olmoe", "layer", N)]
)
@pytest.mark.parametrize("kind", LIMIT)
def test_the_trainers_loss_counts_the_experts_that_serve(kind, scope, k, where, tokenizer, tmp_path):
    """Also where labels mask other experts: the loss sees the routers' own choice."""
    own = {"router_balancing": scope, "router_aux_loss_coef": 0.3, "router_label_loss_coef": 0.0, **LABELS}
    trainer = make_trainer(tmp_path, tokenizer, routed(where, kind, k), **own)
    masked = make_trainer(tmp_path, tokenizer, routed(where, kind, k), router_label_mask=True, **own)
    inputs = one_batch(trainer)
    with torch.no_grad():
        plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        trainer.model.eval()
        layers = trainer.model(**plain, output_router_logits=True).router_logits
        for one in (trainer, masked):
            one.model.eval()
            one.compute_loss(one.model, dict(inputs))
    mask_T = inputs["attention_mask"].flatten()
    expected = balance(kind, layers, mask_T, k, scope)
    assert logged(trainer)["aux_loss"] == near(expected.item())
    first = balance(kind, layers[:1], mask_T, k)
    assert first != pytest.approx(k, abs=0.05)
    assert len({len(served(kind, p, k)) for p in layers[0].double().softmax(-1).tolist()}) > 1
    assert logged(masked)["aux_loss"] != pytest.approx(k, abs=0.01)
