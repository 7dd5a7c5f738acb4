"""Cosines of experts' values, and their summary."""

from __future__ import annotations

import torch

from moe_peft.utils.expert_likeness import likeness, similarities, value_gram
from tests.helpers.close import assert_near, near


def test_likeness_is_of_two_different_experts():
    cosines = [[1.0, -0.5, 0.25], [-0.5, 1.0, -0.75], [0.25, -0.75, 1.0]]
    assert likeness(cosines) == likeness(torch.tensor(cosines)) == (near(-1 / 3), -0.75, 0.25)
    assert likeness(None) is likeness([[1.0]]) is likeness([]) is None


def test_likeness_of_two_experts_alone_and_of_single_precision():
    assert likeness([[1.0, 0.5], [0.5, 1.0]]) == (0.5, 0.5, 0.5)
    values = torch.tensor([[1.0, 0.1, 0.7], [0.1, 1.0, 0.2], [0.7, 0.2, 1.0]])
    three = [float(values[1, 0]), float(values[2, 0]), float(values[2, 1])]
    assert likeness(values).mean == near(sum(three) / 3, dtype=torch.float64)  # float32 would keep seven digits


def test_similarities_are_cosines():
    vectors = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    assert_near(similarities(vectors @ vectors.T), wanted)
    # Rounding may leave products of an expert whose own norm is 0.
    rounded = torch.tensor([[0.0, 1.0, -1.0], [1.0, 4.0, 0.0], [-1.0, 0.0, 4.0]], dtype=torch.float64)
    assert torch.equal(similarities(rounded), torch.eye(3, dtype=torch.float64))


def test_value_gram_of_more_experts_than_values():
    values = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    for chunk in (1, 2, 3, 4):
        found = value_gram(values, chunk=chunk)
        assert_near(found, values.double() @ values.double().T)
    assert value_gram(values.to("meta")).device.type == "meta"
    assert torch.equal(value_gram(values[:, :0]), torch.zeros(7, 7, dtype=torch.float64))
