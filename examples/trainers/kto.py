"""
KTO: tune an adapter by single answers that were liked or not. The data has the columns `prompt`, `completion` and
`label` (true or false).

    python -m examples.trainers.kto --model_name_or_path Qwen/Qwen3-0.6B-Base --dataset_name my-data \
        --output_dir kto --per_device_train_batch_size 4 --learning_rate 5e-6 --router_z_loss_coef 0.001

The flags are the fields of TRL's `ScriptArguments`, `KTOConfig` and `ModelConfig`, and of `RouterLossConfig`;
`flags.py` says what is read of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig, KTOTrainer, ModelConfig, ScriptArguments, TrlParser

from examples.trainers.flags import adapter, check_flags, checkpoint, model_settings, splits
from moe_peft import RouterLossConfig, RouterLossesMixin


@dataclass
class MoEKTOConfig(RouterLossConfig, KTOConfig):
    """`KTOConfig` with the fields of the routers' losses."""


class MoEKTOTrainer(RouterLossesMixin, KTOTrainer):
    """`KTOTrainer` with losses on the routers."""


def main(arguments: list[str] | None = None) -> MoEKTOTrainer:
    script, training, model = TrlParser((ScriptArguments, MoEKTOConfig, ModelConfig)).parse_args_and_config(arguments)
    check_flags(training, model)
    trainer = MoEKTOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model.model_name_or_path, **model_settings(model)),
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision),
        args=training,
        peft_config=adapter(model, "CAUSAL_LM"),
        **splits(script, training),
    )
    trainer.train(resume_from_checkpoint=checkpoint(training))
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
