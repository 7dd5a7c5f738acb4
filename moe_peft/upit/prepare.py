"""
Stage 1, expert preparation: ordinary fine-tuning. Some of its checkpoints become experts (UpIT, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer

from ..training.data import check_learnable
from ..training.mixins import FiniteWeightsMixin
from ..training.preparation import for_one_trainer
from ..training.resuming import Trained, total_steps, train
from ..utils.messages import InputError, refused_settings
from .files import copy_adapter, expert_folders, link_model

# --- selection -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """
    Rule to select the checkpoints that become experts.

    Args:
        pool: the steps of all checkpoints → the steps to choose from evenly.
        per_expert: number of checkpoints per expert, unless `num_checkpoints` is given.
    """

    pool: Callable[[list[int]], list[int]]
    per_expert: int


SELECTIONS: dict[str, Selection] = {
    "back_half": Selection(lambda steps: steps[len(steps) // 2 :], per_expert=2),
    "uniform": Selection(lambda steps: steps, per_expert=1),
    "front_half": Selection(lambda steps: steps[: len(steps) - len(steps) // 2], per_expert=2),
}


def checkpoint_steps(total: int, num_checkpoints: int) -> list[int]:
    """Return the steps to save checkpoints at: at equal intervals, the last one at the end."""
    if not 1 <= num_checkpoints <= total:
        raise InputError(f"num_checkpoints={num_checkpoints}: must be from 1 to the number of steps, {total}")
    return [round(total * (i + 1) / num_checkpoints) for i in range(num_checkpoints)]


def select_checkpoints(steps: list[int], num_experts: int, selection: str = "back_half") -> list[int]:
    """Select the checkpoints to become experts, evenly from the selection's pool (see `SELECTIONS`)."""
    pool = SELECTIONS[selection].pool(steps)
    if not 1 <= num_experts <= len(pool):
        raise InputError(
            f"num_experts={num_experts}: selection={selection!r} of {len(steps)} checkpoints leaves {len(pool)}; save "
            "more (num_checkpoints) or make more by expansion"
        )
    return [pool[round(len(pool) * (i + 1) / num_experts) - 1] for i in range(num_experts)]


def chosen_steps(total: int, num_experts: int, num_checkpoints: int | None, selection: str) -> list[int]:
    """Return the steps of the checkpoints to become experts, in a training of `total` steps; see `prepare_experts`."""
    count = num_checkpoints or SELECTIONS[selection].per_expert * num_experts
    if num_checkpoints is None and count > total:
        raise InputError(
            f"num_experts={num_experts}: are chosen from {count} checkpoints, and the training has {total} steps; "
            "train longer, or take fewer experts"
        )
    return select_checkpoints(checkpoint_steps(total, count), num_experts, selection)


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """The chosen checkpoints as folders, their steps, and the training's log."""

    experts: list[Path]
    steps: list[int]
    trained: Trained


class _PrepareTrainer(FiniteWeightsMixin, SFTTrainer):
    """TRL's trainer, for the training that saves the experts."""


def prepare_experts(
    model: PreTrainedModel,
    dataset: Dataset,
    args: SFTConfig,
    lora_config: LoraConfig | None,
    processing_class: PreTrainedTokenizerBase,
    *,
    output_dir: str | Path,
    num_experts: int,
    num_checkpoints: int | None = None,
    selection: str = "back_half",
    eval_dataset: Dataset | None = None,
) -> Prepared:
    """
    Fine-tune plain LoRA, or all weights, with TRL and keep checkpoints as experts.

    If the training was stopped, the next call resumes it from the last checkpoint in `args.output_dir`.

    Args:
        model: the base model.
        dataset: in a format that TRL accepts.
        args: training arguments; `num_train_epochs` or `max_steps` is the complete training of this stage.
        lora_config: LoRA to train, usually on the FFN projections. None trains all weights.
        processing_class: the tokenizer.
        output_dir: gets `experts/0`, `experts/1`, …, oldest first: PEFT LoRA adapter folders, or model folders.
        num_experts: m, the number of checkpoints to become experts.
        num_checkpoints: number of checkpoints, at equal intervals. If None: m for `"uniform"`, else 2 m.
        selection: rule to select experts among them, a name in `SELECTIONS`; `"back_half"` did best in the paper (Table
            2).
        eval_dataset: held-out data, if `args` evaluates.

    Returns:
        the experts' folders, oldest first, and the training's log.

    Raises:
        ValueError: there are more checkpoints than steps or more experts than checkpoints to choose from, or the LoRA
            trains more than linear layers.
    """
    output_dir = Path(output_dir)
    set_seed(args.seed)
    with refused_settings():
        trainer = _PrepareTrainer(
            model=model,
            args=for_one_trainer(args),  # a copy, as `train` sets the steps
            train_dataset=dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            peft_config=lora_config,
        )
    check_learnable("prepare_experts", trainer.train_dataset, args)
    lora = None if lora_config is None else trainer.model.peft_config[trainer.model.active_adapter]
    for name in ("modules_to_save", "trainable_token_indices"):
        if value := getattr(lora, name, None):
            raise InputError(
                f"prepare_experts: {name}={value}: an expert cannot hold these; use a chat template that adds no "
                f"tokens (chat_template_path), and leave {name} out of lora_config"
            )
    chosen = chosen_steps(total_steps(trainer), num_experts, num_checkpoints, selection)
    trained = train(trainer, keep=chosen)
    experts = expert_folders(output_dir, num_experts)
    if trainer.args.should_save:
        keep = link_model if lora is None else copy_adapter
        for step, folder in zip(chosen, experts, strict=True):
            keep(trained.checkpoints[step], folder)
    trainer.accelerator.wait_for_everyone()
    return Prepared(experts, chosen, trained)
