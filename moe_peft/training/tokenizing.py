"""Prepares data sets as TRL does, without training."""

from __future__ import annotations

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from .arguments import for_one_trainer
from .scoring import Collator


def tokenized(dataset: Dataset, processing_class: PreTrainedTokenizerBase, args: SFTConfig) -> tuple[Dataset, Collator]:
    """
    The examples as `SFTTrainer` would train on them (without those that have no tokens to learn), and the collator that
    makes batches of them.

    TRL's preparation is a method of its trainer, so this creates a trainer around a tiny model.
    """
    stand_in = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(processing_class), hidden_size=2, intermediate_size=2, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1,
        )
    )  # fmt: skip
    args = for_one_trainer(args)
    args.router_aux_loss_coef = None  # TRL refuses one for a dense model
    trainer = SFTTrainer(model=stand_in, args=args, train_dataset=dataset, processing_class=processing_class)
    return trainer.train_dataset, trainer.data_collator
