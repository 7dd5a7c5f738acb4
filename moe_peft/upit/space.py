"""How much disk a run takes."""

from __future__ import annotations

from collections.abc import Sequence

from ..training.planning import base_dtype
from .inputs import load_empty
from .recipe import Recipe
from .shared_stages import Expand, PostTrain, Prepare, RouterInit, TrainingStage
from .stages import Stage


def needed_space(recipe: Recipe, stages: Sequence[Stage]) -> int:
    """
    Bytes that some stages of a run write at most at the same time, an estimate: what they keep, and of the training
    that keeps most two checkpoints, each with Adam's two moments.
    """
    empty = load_empty(recipe.model)
    whole, each = 0, 4  # parameters beside the experts that a checkpoint holds, and bytes of one
    if recipe.mode == "ffn":
        whole, each = empty.num_parameters(), base_dtype(empty, recipe.model.dtype).itemsize
    kept = passing = 0
    for stage in stages:
        if isinstance(stage, Expand) and whole:  # the given ones are linked
            kept += (recipe.num_experts - recipe.given_experts()) * whole * each
        if not isinstance(stage, TrainingStage):
            continue
        sizes = stage.sizes(empty)
        weights = (whole + sizes.held) * each
        if isinstance(stage, Prepare) and recipe.facts.assembles:
            copies = stage.num_experts
        else:
            copies = recipe.num_experts if isinstance(stage, RouterInit) and whole else 1
        kept += copies * weights
        assembled = weights if isinstance(stage, PostTrain) and whole else 0  # what the training starts from
        passing = max(passing, assembled + 2 * (weights + 8 * sizes.trained))
    return kept + passing
