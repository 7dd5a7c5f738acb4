"""
A reward model with experts: learn which of two answers is preferred. The data has the columns `chosen` and `rejected`.
TRL's `RewardTrainer` computes its loss from rewards alone, so the balancing loss needs the mixin.

    python -m examples.trainers.reward --model_name_or_path Qwen/Qwen3-0.6B-Base --dataset_name my-data \
        --output_dir reward --per_device_train_batch_size 4 --learning_rate 1e-4 --router_z_loss_coef 0.001

The flags are the fields of TRL's `ScriptArguments`, `RewardConfig` and `ModelConfig`, and of `RouterLossConfig`;
`flags.py` says what is read of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import ModelConfig, RewardConfig, RewardTrainer, ScriptArguments, TrlParser

from examples.trainers.flags import adapter, check_flags, checkpoint, model_settings, splits
from moe_peft import RouterLossConfig, RouterLossesMixin


@dataclass
class MoERewardConfig(RouterLossConfig, RewardConfig):
    """`RewardConfig` with the fields of the routers' losses."""


class MoERewardTrainer(RouterLossesMixin, RewardTrainer):
    """`RewardTrainer` with losses on the routers."""


def main(arguments: list[str] | None = None) -> MoERewardTrainer:
    script, training, model = TrlParser((ScriptArguments, MoERewardConfig, ModelConfig)).parse_args_and_config(
        arguments
    )
    check_flags(training, model)
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision)
    trainer = MoERewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(
            model.model_name_or_path, num_labels=1, pad_token_id=tokenizer.pad_token_id, **model_settings(model)
        ),
        processing_class=tokenizer,
        args=training,
        peft_config=adapter(model, "SEQ_CLS"),
        **splits(script, training),
    )
    trainer.train(resume_from_checkpoint=checkpoint(training))
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
