"""Which checkpoints become experts, against the rules written out."""

from __future__ import annotations

from fractions import Fraction

import pytest

from moe_peft.upit.prepare import checkpoint_steps, chosen_steps, select_checkpoints


def test_checkpoints_are_taken_at_equal_intervals_and_at_the_end():
    for total in range(1, 30):
        for count in range(1, total + 1):
            steps = checkpoint_steps(total, count)
            assert len(steps) == count and steps[-1] == total and steps == sorted(set(steps)) and steps[0] >= 1
            assert all(abs(step - Fraction(total * i, count)) <= Fraction(1, 2) for i, step in enumerate(steps, 1))


@pytest.mark.parametrize(
    ("selection", "num_experts", "chosen"),
    [
        ("back_half", 2, [6, 9]),  # of 5, 6, 7, 8, 9
        ("back_half", 5, [5, 6, 7, 8, 9]),
        ("back_half", 1, [9]),
        ("front_half", 2, [2, 5]),  # of 1, 2, 3, 4, 5
        ("front_half", 5, [1, 2, 3, 4, 5]),
        ("front_half", 1, [5]),
        ("uniform", 3, [3, 6, 9]),
        ("uniform", 9, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("uniform", 2, [4, 9]),
    ],
)
def test_experts_are_chosen_evenly_from_the_pool(selection, num_experts, chosen):
    assert select_checkpoints(list(range(1, 10)), num_experts, selection) == chosen


def test_the_back_half_of_twice_as_many_checkpoints_is_taken_unless_told_otherwise():
    assert select_checkpoints([10, 20, 30, 40], 2) == [30, 40]
    assert chosen_steps(80, 4, None, "back_half") == [50, 60, 70, 80]
    assert chosen_steps(80, 4, None, "front_half") == [10, 20, 30, 40]
    assert chosen_steps(80, 4, None, "uniform") == [20, 40, 60, 80]
    assert chosen_steps(80, 2, 8, "back_half") == [60, 80]


def test_more_than_there_are_is_an_error():
    for count in (0, 6):
        with pytest.raises(ValueError, match=f"^num_checkpoints={count}: .* number of steps, 5"):
            checkpoint_steps(5, count)
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"^num_experts={count}: selection='back_half' of 4 checkpoints leaves 2"):
            select_checkpoints([1, 2, 3, 4], count)
