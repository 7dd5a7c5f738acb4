"""Model cards of trained models: how to load the model, and how it was trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trl
from peft import PeftModel

from ..models.introspection import base_model
from ..utils.model_card import load_card, write_model_card
from .mixins import FiniteWeightsMixin
from .schedule import schedule_name


class ModelCardMixin(FiniteWeightsMixin):
    """Mixin for a TRL trainer: `save_model`, checkpoints and `push_to_hub` write the card of `write_model_card`."""

    _best_step: int | None = None  # step of the model's weights, if not the last step

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = Path(output_dir or self.args.output_dir)
        card = folder / "README.md"
        if self.args.should_save and card.is_file() and load_card(card) is None:
            card.replace(f"{card}.unreadable")  # PEFT updates the card, and would fail to save the adapter
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            self.write_card(folder)

    def _load_best_model(self) -> None:
        super()._load_best_model()  # type: ignore[misc]
        self._best_step = self.state.best_global_step

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """
        Write the card of `args.output_dir`, once a model has been saved there.

        TRL's own card would show code that does not load an adapter. A card edited by its user keeps its text.

        Args:
            model_name: title of the card; None: the kind of model and its base model.
            dataset_name: the training data.
            tags: further tags.
        """
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            tags = [tags] if isinstance(tags, str) else list(tags or [])
            datasets = [] if dataset_name is None else [dataset_name]
            self.write_card(Path(self.args.output_dir), title=model_name, datasets=datasets, tags=tags)

    def write_card(self, folder: Path, tags: Sequence[str] = (), **options: Any) -> None:
        if not any((folder / name).is_file() for name in ("adapter_config.json", "config.json")):
            return  # TRL also asks for the card before a checkpoint is written
        model = self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        is_pushed = folder.resolve() == Path(self.args.output_dir).resolve()
        write_model_card(
            folder,
            base=None if isinstance(model, PeftModel) else model.config._name_or_path,
            training=self.training_facts(),
            tags=[*(getattr(base_model(model), "model_tags", None) or ()), *tags],
            repo=getattr(self, "hub_model_id", None) if is_pushed else None,
            **options,
        )

    def training_facts(self) -> list[str]:
        """Return the facts of this training, once it has made a step."""
        args, steps = self.args, self.state.global_step
        if not steps:
            return []
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        stage = getattr(args, "training_stage", "joint")
        alone = "" if stage == "joint" else f", training_stage `{stage}`"
        best = "" if self._best_step in (None, steps) else f"; its weights are of step {self._best_step:,}, the best"
        return [
            f"`{type(self).__name__}` with TRL {trl.__version__}{alone}",
            f"{steps:,} steps of {batch} rows, learning rate {args.learning_rate:g}, {schedule_name(args)}{best}",
        ]
