"""Cosines, their summary, and means of experts' values."""

from __future__ import annotations

import pytest
import torch

from moe_peft.utils.expert_merging import likeness, mean_updates, similarities, value_gram
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


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 7), (7, 3), (3, 3), (9, 8)])
def test_the_mean_of_updates_in_a_layer_narrower_than_their_rank(inputs, outputs):
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(3, 5, inputs, generator=generator, dtype=torch.float64)
    B = torch.randn(3, 5, outputs, generator=generator, dtype=torch.float64)
    mean_A, mean_B = mean_updates(A, B, [[0, 2], [1]], [torch.tensor([0.25, 0.75]).double(), torch.ones(1).double()])
    assert mean_A.shape == (2, 5, inputs) and mean_B.shape == (2, 5, outputs)
    exact = 0.25 * B[0].T @ A[0] + 0.75 * B[2].T @ A[2]
    left, values, right = torch.linalg.svd(exact)
    nearest = left[:, :5] * values[:5] @ right[: len(values[:5])] if min(inputs, outputs) > 5 else exact
    assert_near(mean_B[0].T @ mean_A[0], nearest)
    assert_near(mean_B[1].T @ mean_A[1], B[1].T @ A[1])
