"""
KTO: tune an adapter by single answers that were liked or not. The data has the columns `prompt`, `completion` and
`label` (true or false).

    python -m examples.trainers.kto --model_name_or_path my-base-model --dataset_name my-data --output_dir kto \
        --per_device_train_batch_size 4 --learning_rate 1e-4 --router_z_loss_coef 0.001

The flags are the fields of TRL's `ScriptArguments`, `KTOConfig` and `ModelConfig`, and of `RouterLossConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig, KTOTrainer, ModelConfig, ScriptArguments, TrlParser

from moe_peft import MoELoraConfig, RouterLossConfig, RouterLossesMixin


@dataclass
class MoEKTOConfig(RouterLossConfig, KTOConfig):
    """`KTOConfig` with the fields of the routers' losses."""


class MoEKTOTrainer(RouterLossesMixin, KTOTrainer):
    """`KTOTrainer` with losses on the routers."""


def main(arguments: list[str] | None = None) -> MoEKTOTrainer:
    script, training, model = TrlParser((ScriptArguments, MoEKTOConfig, ModelConfig)).parse_args_and_config(arguments)
    trainer = MoEKTOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model.model_name_or_path, dtype=model.dtype),
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path),
        args=training,
        train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
        peft_config=MoELoraConfig(
            num_experts=4, top_k=2, r=model.lora_r, lora_alpha=model.lora_alpha, task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
