"""
What the scripts of this folder do with the flags of TRL's `ScriptArguments` and `ModelConfig`; copy it with a script.
They always train an adapter, of the script's task, so `--use_peft` and `--lora_task_type` change nothing.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset, load_dataset
from transformers import TrainingArguments
from trl import ModelConfig, ScriptArguments, get_quantization_config

from moe_peft import MoELoraConfig

# Flags that nothing here reads, and what to do instead.
_UNREAD = {
    "use_dora": "an expert is a plain LoRA; leave it out",
    "lora_target_parameters": "experts are on modules; use lora_target_modules",
    "model_init_kwargs": "use model_revision, dtype and attn_implementation",
    "trust_remote_code": "no code that comes with a model is run; leave it out",
}


def check_flags(*parts: Any) -> None:
    """
    Raises:
        ValueError: a flag is given that would change nothing.
    """
    for part in parts:
        for name, remedy in _UNREAD.items():
            if value := getattr(part, name, None):
                raise ValueError(f"{name}={value!r}: is not read here; {remedy}")


def model_settings(model: ModelConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained`."""
    return {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        "quantization_config": get_quantization_config(model),
    }


def adapter(model: ModelConfig, task_type: str) -> MoELoraConfig:
    """4 experts, 2 for each token, on what `--lora_target_modules` names; without it, on all FFNs."""
    targets = model.lora_target_modules
    if isinstance(targets, str) and targets.isidentifier():  # TRL unpacks a single name, which PEFT takes for a regex
        targets = [targets]
    return MoELoraConfig(
        num_experts=4,
        top_k=2,
        r=model.lora_r,
        lora_alpha=2 * model.lora_alpha,  # each of two experts counts a half
        lora_dropout=model.lora_dropout,
        use_rslora=model.use_rslora,
        target_modules=targets,
        modules_to_save=model.lora_modules_to_save,
        task_type=task_type,
        revision=model.model_revision,
    )


def splits(script: ScriptArguments, training: TrainingArguments) -> dict[str, Dataset | None]:
    """The training split, and the test split if the training evaluates."""

    def load(split: str) -> Dataset:
        return load_dataset(script.dataset_name, script.dataset_config, split=split, streaming=script.dataset_streaming)

    evaluates = training.eval_strategy != "no"
    return {
        "train_dataset": load(script.dataset_train_split),
        "eval_dataset": load(script.dataset_test_split) if evaluates else None,
    }


def checkpoint(training: TrainingArguments) -> str | bool | None:
    """Where the training goes on, as `Trainer.train` takes it: true and false come from a command line as texts."""
    given = training.resume_from_checkpoint
    return {"true": True, "false": None}.get(str(given).lower(), given)
