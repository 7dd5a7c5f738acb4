from .evaluator import evaluate_model
from .harness import Harness
from .results import Score, read_scores
from .task_settings import TaskSettings

__all__ = ["Harness", "Score", "TaskSettings", "evaluate_model", "read_scores"]
