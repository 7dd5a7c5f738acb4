"""Evaluation on tasks of lm-evaluation-harness: complete models, forced and masked experts."""

from .evaluator import evaluate_model
from .harness import Harness, TaskSettings
from .results import Score, read_scores

__all__ = ["Harness", "Score", "TaskSettings", "evaluate_model", "read_scores"]
