"""Stage 1, expert preparation: ordinary fine-tuning, whose checkpoints become experts (UpIT, section 2.2)."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer

from ..training.checkpoints import Trained, link_weights, total_steps, train

Selection = Literal["back_half", "uniform", "front_half"]
_MODEL_FILES = ("config.json", "generation_config.json")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class Prepared:
    """The chosen checkpoints as folders, the adapter before training (of LoRA experts), and the training's log."""

    experts: list[Path]
    initial: Path | None
    steps: list[int]
    trained: Trained


def checkpoint_steps(total: int, num_checkpoints: int) -> list[int]:
    """Equal intervals: the steps after which checkpoints are taken, the last one at the end."""
    if not 1 <= num_checkpoints <= total:
        raise ValueError(f"num_checkpoints={num_checkpoints}: must be from 1 to the number of steps, {total}")
    return [round(total * (i + 1) / num_checkpoints) for i in range(num_checkpoints)]


def select_checkpoints(steps: list[int], num_experts: int, selection: Selection = "back_half") -> list[int]:
    """
    Which checkpoints become experts: evenly from all, or from the second or first half of them.

    Raises:
        ValueError: there are fewer to choose from than experts.
    """
    half = len(steps) // 2
    pool = {"back_half": steps[half:], "uniform": steps, "front_half": steps[: len(steps) - half]}[selection]
    if not 1 <= num_experts <= len(pool):
        raise ValueError(
            f"num_experts={num_experts}: selection={selection!r} of {len(steps)} checkpoints leaves {len(pool)}; save "
            "more (num_checkpoints) or make more by expansion"
        )
    return [pool[round(len(pool) * (i + 1) / num_experts) - 1] for i in range(num_experts)]


def chosen_steps(total: int, num_experts: int, num_checkpoints: int | None, selection: Selection) -> list[int]:
    """The steps whose checkpoints become experts, of a training of `total` steps; see `prepare_experts`."""
    count = num_checkpoints or (num_experts if selection == "uniform" else 2 * num_experts)
    return select_checkpoints(checkpoint_steps(total, count), num_experts, selection)


def link_model(source: Path, target: Path, weights: bool = True) -> None:
    """A model folder's config, and its weights if asked for, into another folder (see `link_weights`)."""
    for pattern in (*_MODEL_FILES, *(_WEIGHT_FILES if weights else ())):
        for path in source.glob(pattern):
            link_weights(str(path), str(target / path.name))


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
    selection: Selection = "back_half",
    eval_dataset: Dataset | None = None,
) -> Prepared:
    """
    Fine-tune plain LoRA, or the whole model, with TRL and keep checkpoints as experts.

    Run again after having been stopped, it goes on from the last checkpoint in `args.output_dir`.

    Args:
        model: the base.
        args: how to train; its `num_train_epochs` or `max_steps` is this stage's whole training.
        lora_config: what to train, as a rule on the FFN projections. None trains all weights.
        output_dir: gets `experts/0`, `experts/1`, …, oldest first: PEFT LoRA adapter folders, with the untrained one as
            `initial`; or model folders.
        num_experts: m.
        num_checkpoints: taken at equal intervals; m for `"uniform"`, else 2 m, if None.
        selection: which of them become experts; `"back_half"` did best in the paper (Table 2).

    Raises:
        ValueError: more checkpoints than steps, more experts than checkpoints to choose from, or a LoRA that trains
            more than linear layers.
    """
    output_dir = Path(output_dir)
    set_seed(args.seed)
    trainer = SFTTrainer(
        model=model,
        args=copy.copy(args),  # `train` sets steps; the caller's stay as they are
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        processing_class=processing_class,
        peft_config=lora_config,
    )
    own = None if lora_config is None else trainer.model.peft_config[trainer.model.active_adapter]
    if own is not None and (own.modules_to_save or getattr(own, "trainable_token_indices", None)):
        raise ValueError(
            f"prepare_experts: modules_to_save={own.modules_to_save}: an expert cannot hold these; take a chat "
            "template that adds no tokens (chat_template_path), and none in lora_config"
        )
    chosen = chosen_steps(total_steps(trainer), num_experts, num_checkpoints, selection)
    initial = None if own is None else output_dir / "initial"
    if trainer.args.should_save and initial is not None:
        trainer.model.save_pretrained(initial)
    trained = train(trainer, keep=chosen)
    experts = [output_dir / "experts" / str(i) for i in range(num_experts)]
    if trainer.args.should_save:
        for step, folder in zip(chosen, experts, strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            if own is None:
                link_model(trained.checkpoints[step], folder)
            for name in ADAPTER_FILES if own is not None else ():
                shutil.copy(trained.checkpoints[step] / name, folder / name)
    trainer.accelerator.wait_for_everyone()
    return Prepared(experts, initial, chosen, trained)
