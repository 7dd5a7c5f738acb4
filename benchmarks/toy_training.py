"""What the studies on the toy base have in common: training settings, a Mixtral of copies, held-out loss."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTTrainer

from moe_peft.native import UpcycleConfig, upcycle
from moe_peft.training.scoring import example_losses

SFT: dict[str, Any] = {
    "per_device_train_batch_size": 8, "assistant_only_loss": True, "max_length": 256, "bf16": False, "use_cpu": True,
    "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True,
}  # fmt: skip


def mixtral(base: Path, num_experts: int, seed: int = 0) -> Any:
    """A Mixtral with 2 active experts that computes what the base computes: every expert is a copy of its FFN."""
    with tempfile.TemporaryDirectory() as folder:
        made = upcycle(base, f"{folder}/moe", UpcycleConfig(num_experts=num_experts, top_k=2, seed=seed))
        # Upcycling unties embeddings and sets no balancing loss; the studies train the base's parameters and balance.
        return AutoModelForCausalLM.from_pretrained(made, tie_word_embeddings=True, router_aux_loss_coef=0.01)


def loss_per_token(trainer: SFTTrainer, rows: Dataset) -> float:
    """Mean loss over all scored tokens of prepared rows."""
    losses_S1, counts_S = example_losses(trainer.model, rows, trainer.data_collator)
    return float(losses_S1.sum() / counts_S.sum())
