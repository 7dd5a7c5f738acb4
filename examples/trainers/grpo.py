"""
GRPO: train an adapter by rewards of its completions. The data has the columns `prompt` (a string or the messages of a
chat) and `answer`. The reward is the share of the answer's words that a completion has: replace it by yours.

    python -m examples.trainers.grpo --model_name_or_path Qwen/Qwen3-0.6B-Base --dataset_name my-data \
        --output_dir grpo --num_generations 8 --max_completion_length 256 --learning_rate 1e-5 --router_z_loss_coef 0.001

The flags are the fields of TRL's `ScriptArguments`, `GRPOConfig` and `ModelConfig`, and of `RouterLossConfig`;
`flags.py` says what is read of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser

from examples.trainers.flags import adapter, check_flags, checkpoint, model_settings, splits
from moe_peft import RouterLossConfig, RouterLossesMixin


@dataclass
class MoEGRPOConfig(RouterLossConfig, GRPOConfig):
    """`GRPOConfig` with the fields of the routers' losses."""


class MoEGRPOTrainer(RouterLossesMixin, GRPOTrainer):
    """`GRPOTrainer` with losses on the routers."""


def text_of(answer: str | list[dict[str, str]]) -> str:
    """TRL passes completions of chats as messages."""
    return answer if isinstance(answer, str) else "".join(message["content"] for message in answer)


def shared_words(completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    """The share of each answer's words that the completion has."""
    pairs = [
        (set(text_of(text).split()), set(text_of(right).split()))
        for text, right in zip(completions, answer, strict=True)
    ]
    return [len(words & right) / max(1, len(right)) for words, right in pairs]


def main(arguments: list[str] | None = None) -> MoEGRPOTrainer:
    script, training, model = TrlParser((ScriptArguments, MoEGRPOConfig, ModelConfig)).parse_args_and_config(arguments)
    check_flags(training, model)
    trainer = MoEGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model.model_name_or_path, **model_settings(model)),
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision),
        reward_funcs=shared_words,
        args=training,
        peft_config=adapter(model, "CAUSAL_LM"),
        **splits(script, training),
    )
    trainer.train(resume_from_checkpoint=checkpoint(training))
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
