"""
A reward model with experts: learn which of two answers is preferred. The data has the columns `chosen` and `rejected`.
TRL's `RewardTrainer` computes its loss from rewards alone, so the balancing loss needs the mixin.

    python -m examples.trainers.reward --model_name_or_path my-base-model --dataset_name my-data --output_dir reward \
        --per_device_train_batch_size 4 --learning_rate 1e-4 --router_z_loss_coef 0.001

The flags are the fields of TRL's `ScriptArguments`, `RewardConfig` and `ModelConfig`, and of `RouterLossConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import ModelConfig, RewardConfig, RewardTrainer, ScriptArguments, TrlParser

from moe_peft import MoELoraConfig, RouterLossConfig, RouterLossesMixin


@dataclass
class MoERewardConfig(RouterLossConfig, RewardConfig):
    """`RewardConfig` with the fields of the routers' losses."""


class MoERewardTrainer(RouterLossesMixin, RewardTrainer):
    """`RewardTrainer` with losses on the routers."""


def main(arguments: list[str] | None = None) -> MoERewardTrainer:
    script, training, model = TrlParser((ScriptArguments, MoERewardConfig, ModelConfig)).parse_args_and_config(
        arguments
    )
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path)
    trainer = MoERewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(
            model.model_name_or_path, dtype=model.dtype, num_labels=1, pad_token_id=tokenizer.pad_token_id
        ),
        processing_class=tokenizer,
        args=training,
        train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
        peft_config=MoELoraConfig(
            num_experts=4, top_k=2, r=model.lora_r, lora_alpha=model.lora_alpha, task_type="SEQ_CLS"
        ),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
