"""Stage 4, post-training: fine-tunes the assembled MoE on the data, with the balancing loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import PeftModel
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from trl import SFTConfig

from ..models.layer import router_parameters
from ..training.checkpointing import copy_result
from ..training.preparation import for_one_trainer
from ..training.resuming import Trained, train
from ..training.trainable import train_only, unfreeze_stage
from ..training.trainers import MoESFTTrainer
from ..utils.messages import refused_settings


class _LoadWarning(TrainerCallback):
    """Writes a warning about the experts' load, if there is one, to the last record of the log."""

    def __init__(self, trainer: MoESFTTrainer) -> None:
        self.trainer = trainer

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if "load_cv" in state.log_history[-1]:
            for record in state.log_history:
                record.pop("load_warning", None)
            state.log_history[-1]["load_warning"] = self.trainer.load_warning()


def post_train(
    model: PeftModel | PreTrainedModel,
    dataset: Dataset,
    args: SFTConfig,
    processing_class: PreTrainedTokenizerBase,
    *,
    output_dir: str | Path,
    train_experts: bool = True,
    eval_dataset: Dataset | None = None,
    callbacks: list[TrainerCallback] | None = None,
) -> Trained:
    """
    Fine-tune a MoE-LoRA adapter, or a native MoE, with the losses on its routers, and save it.

    If the training was stopped, the next call resumes it from the last checkpoint in `args.output_dir`.

    Args:
        model: a base model with a MoE-LoRA adapter, or a native MoE. Its config sets the coefficient of the balancing
            loss.
        dataset: in a format that TRL accepts.
        args: training arguments, a `MoESFTConfig` for other losses; `num_train_epochs` or `max_steps` is the complete
            training of this stage.
        processing_class: the tokenizer; it is saved with the result.
        output_dir: the folder of the adapter or the model.
        train_experts: False trains only the routers (as the paper's Self-MoE baseline).
        eval_dataset, callbacks: as for the trainer.

    Returns:
        the training's log and checkpoints. Its last record of training steps has `load_warning`, a warning about the
        load of the experts (`moe_peft.routing.LoadHealth`), or "" if there is none.
    """
    routers = router_parameters(model)
    unfreeze_stage(model, routers)  # now, or the trainer would do it
    if isinstance(model, PeftModel):
        model.set_adapter(model.active_adapter)  # trainable again, whatever was frozen before
    if not train_experts:
        train_only(model, routers)
    set_seed(args.seed)
    with refused_settings():
        trainer = MoESFTTrainer(
            model=model,
            args=for_one_trainer(args),
            train_dataset=dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
        )
    trainer.add_callback(_LoadWarning(trainer))
    trained = train(trainer)
    if trainer.args.should_save:
        copy_result(trained.last, Path(output_dir), model.active_adapter if isinstance(model, PeftModel) else "default")
    trainer.accelerator.wait_for_everyone()
    return trained
