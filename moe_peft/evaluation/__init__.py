"""Evaluation on tasks of lm-evaluation-harness: whole models, forced and masked experts."""

from .harness import Harness, TaskSettings
from .run import evaluate_model
from .scores import Score, read_scores

__all__ = ["Harness", "Score", "TaskSettings", "evaluate_model", "read_scores"]
