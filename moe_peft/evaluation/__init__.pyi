from .evaluator import evaluate_model
from .harness import Harness
from .results import Score, read_scores
from .settings import EvalSettings, TaskSettings

__all__ = ["EvalSettings", "Harness", "Score", "TaskSettings", "evaluate_model", "read_scores"]
