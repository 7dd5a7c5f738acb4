"""Shares, colors and pieces of a text by expert."""

from __future__ import annotations

from threading import Barrier, Thread

import pytest
import torch
from peft import get_peft_model

from moe_peft import MoELoraConfig, force_experts
from moe_peft.analysis import Routes, record_routes
from moe_peft.analysis.routes import PALETTE
from moe_peft.chat import Answer
from moe_peft.utils.messages import InputError
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama
from tests.helpers.waiting import LIMIT


def routes(experts_LTK, gates_LTK, n, layers=None):
    experts_LTK = torch.tensor(experts_LTK)
    layers = layers or [f"model.layers.{i}.mlp" for i in range(len(experts_LTK))]
    return Routes(experts_LTK, torch.tensor(gates_LTK), "gates", layers, [f"e{i}" for i in range(n)])


def test_shares_are_gates_of_tokens_and_means_over_routers():
    of_two = routes([[[0, 1], [0, 2]], [[2, 1], [2, 0]]], [[[3.0, 1.0], [0.5, 0.5]], [[0.9, 0.0], [0.0, 0.0]]], 3)
    expected = [[[0.75, 0.25, 0], [0.5, 0, 0.5]], [[0, 0, 1], [0, 0, 0]]]
    assert_near(of_two.shares_LTN, torch.tensor(expected))
    assert_near(of_two.shares_LN, torch.tensor([[0.625, 0.125, 0.25], [0, 0, 1.0]]))
    assert of_two.most_decisive == 1
    assert [expert for expert, _ in of_two.ranked()] == [2, 0, 1] and of_two.ranked(1) == [(2, 1.0)]
    assert (of_two.leading_T(0), of_two.leading_T(1), of_two.leading_T(None)) == ([0, 0], [2, -1], [2, 0])
    assert of_two.summary() == "e2 62 %, e0 31 %, e1 6 % (gates, mean of 2 routers)"
    assert of_two.summary(1) == "e2 62 %, … (gates, mean of 2 routers)"


def test_pieces_of_a_text_join_to_it():
    of_one = routes([[[1], [1], [0], [0], [2]]], [[[1.0], [1.0], [1.0], [1.0], [0.0]]], 3)
    answer = Answer("?", ["a ", "b", "", "é", "!"], of_one, "auto", "end")
    assert answer.runs(0) == [("a b", 1), ("é", 0), ("!", -1)]
    assert Answer("?", ["a ", "b"], None, "base", "end").runs(0) == [("a b", -1)]


def test_of_many_experts_the_most_used_have_colors():
    few = routes([[[2], [0]]], [[[1.0], [1.0]]], 3)
    assert few.colors(0) == dict(enumerate(PALETTE[:3]))
    used = [15, 3, 3, 9, 9, 9, 11, 1, 2, 2, 4, 4, 5, 5]
    many = routes([[[i] for i in used]], [[[1.0]] * len(used)], 16)
    assert sorted(many.colors(0)) == [1, 2, 3, 4, 5, 9, 11] and set(many.colors(0).values()) == set(PALETTE)


def test_routers_are_found_by_the_parts_of_their_names():
    layers = [f"model.layers.{i}.{part}" for i in (1, 11) for part in ("self_attn.q_proj", "mlp")]
    found = routes([[[0]]] * 4, [[[1.0]]] * 4, 2, layers)
    assert found.find(["1"]) == [0, 1] and found.find(["11", "mlp"]) == [3] and found.find(["q_proj"]) == [0, 2]
    with pytest.raises(InputError, match=r"layer 7: no such router; they are model\.layers\.1\.self_attn\.q_proj to "):
        found.find(["7"])


@pytest.mark.parametrize(
    "settings",
    [{"top_k_pattern": {r"layers\.1\.mlp": 3}}, {"router_type": "threshold", "top_k": 4}, {"router_type": "top_p"}],
)
def test_routers_of_several_kinds_are_recorded(settings):
    torch.manual_seed(0)
    config = MoELoraConfig(
        **{"num_experts": 4, "top_k": 2, "r": 4, "init_lora_weights": False, "task_type": "CAUSAL_LM", **settings}
    )
    model = get_peft_model(tiny_llama(), config).eval()
    ids = torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), record_routes(model) as tape:
        cache = model(ids[:, :6]).past_key_values
        for i in range(6, 9):
            model(ids[:, i : i + 1], past_key_values=cache)
    with torch.no_grad(), record_routes(model) as whole:
        model(ids)
    assert tape.routes(2, 8).experts_LTK.shape[:2] == (2, 6)
    assert_near(tape.routes(2, 8).shares_LTN, whole.routes().shares_LTN[:, 2:8])
    sums_LT = whole.routes().shares_LTN.sum(-1)
    assert_near(sums_LT, (whole.routes().gates_LTK.abs().sum(-1) > 0).float())


def test_each_thread_records_its_own_texts():
    config = MoELoraConfig(num_experts=4, top_k=2, r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), config).eval()
    ids, both, tapes = torch.arange(3, 12)[None], Barrier(2, timeout=LIMIT), {}

    def run(expert: int) -> None:
        with torch.no_grad(), force_experts(model, expert), record_routes(model) as tapes[expert]:
            both.wait()
            for _ in range(3):
                model(ids)
            both.wait()

    threads = [Thread(target=run, args=(expert,)) for expert in (0, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    for expert, tape in tapes.items():
        assert tape.routes().experts_LTK.shape[1] == 27
        assert [i for i, _ in tape.routes().ranked()] == [expert]
