"""Trainers of our own on generated data: models, arguments of three steps, labels and preferences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from datasets import Dataset
from peft import get_peft_model
from trl import KTOConfig, KTOTrainer

from moe_peft import MoELoraConfig
from moe_peft.models.layer import router_parameters
from moe_peft.training.router_config import RouterLossConfig
from moe_peft.training.router_losses import RouterLossesMixin
from moe_peft.training.trainers import MoESFTConfig, MoESFTTrainer
from tests.helpers.models import tiny_llama
from tests.helpers.routed_models import NATIVE, K, N
from tests.helpers.upit_case import rows

EXPERTS = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}
LABELS = {"label_column": "domain", "expert_map": EXPERTS}
# Experts 4 and 5 serve no label.
NARROW = {"label_column": "domain", "expert_map": {"a": [0, 1], "b": [2, 3], "c": [1, 2, 3]}}
MASKED = {"router_label_mask": True, **NARROW}


def make_model(kind="adapter", **settings):
    if kind != "adapter":
        torch.manual_seed(0)
        model = NATIVE[kind]()
        model.resize_token_embeddings(128)
        with torch.no_grad():
            for parameter in router_parameters(model).values():
                parameter.normal_(std=0.2)
        return model
    base = tiny_llama()
    torch.manual_seed(1)
    config = MoELoraConfig(num_experts=N, top_k=K, r=4, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    return get_peft_model(base, config)


def arguments(folder, cls=MoESFTConfig, **own):
    defaults = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": 3,
    }
    return cls(output_dir=str(folder), **{**defaults, **own})


def make_trainer(folder, tokenizer, model=None, data=None, eval_data=None, **own):
    return MoESFTTrainer(
        model=make_model() if model is None else model,
        args=arguments(folder, **own),
        train_dataset=Dataset.from_list(rows(24)) if data is None else data,
        eval_dataset=eval_data,
        processing_class=tokenizer,
    )


def one_batch(trainer, count=4):
    return trainer.data_collator([trainer.train_dataset[i] for i in range(count)])


@dataclass
class MoEKTOConfig(RouterLossConfig, KTOConfig):
    pass


class MoEKTOTrainer(RouterLossesMixin, KTOTrainer):
    pass


def words(seed: int, count: int) -> str:
    return " ".join(f"w{3 + (7 * seed + 3 * j) % 120}" for j in range(count))


def preferences(kind: str) -> Dataset:
    """Rows of different lengths, so that means of means would differ from means."""
    rows = []
    for i in range(16):
        prompt, good, bad = words(i, 3), " " + words(i + 5, 2 + i % 5), " " + words(i + 9, 1 + i % 7)
        if kind == "kto":
            rows.append({"prompt": prompt, "completion": good if i % 2 else bad, "label": bool(i % 2)})
        else:
            rows.append({"prompt": prompt, "chosen": good, "rejected": bad})
    return Dataset.from_list(rows)


def logged(trainer) -> dict[str, float]:
    """What the trainer logs of its routers now, without the prefix of evaluation."""
    logs: dict[str, float] = {}
    trainer._log_of_routers.add_to(logs, "" if trainer.model.training else "eval_")
    return {name.removeprefix("eval_"): value for name, value in logs.items()}
