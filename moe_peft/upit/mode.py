"""What the modes of a recipe share: which data a stage gets, and which experts there are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from accelerate import PartialState
from datasets import Dataset

from ..analysis.figures import plot_shares
from ..training.checkpoints import Trained, copy_result
from ..training.data import in_blocks
from . import inputs
from .buckets import Buckets
from .evaluate import evaluate
from .prepare import Selection, chosen_steps, prepare_experts
from .stages import write_json

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

    from .pipeline import UpIT


class Mode:
    """
    The stages of a run, each a method that gets its folder and returns metrics.

    Args:
        run: the run, which knows recipe, data and what has been done.
    """

    result: ClassVar[str]  # the result's folder

    def __init__(self, run: UpIT) -> None:
        self.run, self.recipe, self.root = run, run.recipe, run.root

    def check(self) -> None:
        """
        Before any stage.

        Raises:
            ValueError: the recipe does not fit the base.
        """

    def lora_config(self, model: PreTrainedModel) -> LoraConfig | None:
        """What stage 1 trains; None: all weights."""
        return None

    def load_result(self, folder: Path) -> tuple[PeftModel | PreTrainedModel, PreTrainedModel | None]:
        """The result of a training stage, and its base, where the model does not hold that itself."""
        raise NotImplementedError

    def prepare(self, folder: Path) -> dict[str, Any]:
        data, order = self.prepare_data()
        model = inputs.load_model(self.recipe.model)
        num_experts, num_checkpoints, selection = self.selection()
        prepared = prepare_experts(
            model,
            data,
            self.run.sft_config("prepare", folder, **order),
            self.lora_config(model),
            self.run.tokenizer,
            output_dir=folder,
            num_experts=num_experts,
            num_checkpoints=num_checkpoints,
            selection=selection,
        )
        if self.recipe.kind == "dense" and PartialState().is_main_process:  # the last checkpoint is the result
            copy_result(prepared.trained.checkpoints[max(prepared.trained.checkpoints)], folder / self.result)
        PartialState().wait_for_everyone()
        return {"checkpoint_steps": prepared.steps, **metrics(prepared.trained)}

    def expand(self, folder: Path) -> dict[str, Any]:
        raise NotImplementedError

    def router_init(self, folder: Path) -> dict[str, Any]:
        raise NotImplementedError

    def post_train(self, folder: Path) -> dict[str, Any]:
        raise NotImplementedError

    def evaluate(self, folder: Path) -> dict[str, Any]:
        r, data = self.recipe, self.run.eval_data
        assert data is not None
        last = "prepare" if r.kind == "dense" else "post_train"
        model, base = self.load_result(self.root / last / self.result)
        args = self.run.sft_config("evaluate", folder)
        losses, shares = evaluate(model, data, args, self.run.tokenizer, r.data.label_column, base)
        if args.should_save and shares:
            plot_shares(shares, folder / "routing.png", f"{r.method}: where each domain's tokens go")
        return {"loss": losses, "shares": {domain: share.tolist() for domain, share in shares.items()}}

    def sizes(self, model: PreTrainedModel) -> dict[str, tuple[int, int]]:
        """
        For each training stage the parameters in memory beside the base's, and those that are trained.

        Args:
            model: the base, without weights.

        Raises:
            ValueError: the recipe does not fit the base.
        """
        raise NotImplementedError

    # --- data -------------------------------------------------------------------------------------------------------

    def prepare_data(self) -> tuple[Dataset, dict[str, Any]]:
        """Stage 1's data, and the training arguments that follow from their order."""
        r = self.recipe
        data, epochs = self.run.train_data, self.run.budget.prepare
        if r.prepare.order != "blocks":
            return data, {"num_train_epochs": epochs}
        data = in_blocks(data, str(r.data.label_column), epochs, inputs.stage_seed(r, "prepare"))
        return data, {"num_train_epochs": 1.0, "train_sampling_strategy": "sequential"}

    def seed_data(self) -> Dataset:
        """Stage 3's examples."""
        count = inputs.seed_count(self.recipe, len(self.run.train_data))
        return inputs.seed_set(self.run.train_data, count, inputs.stage_seed(self.recipe, "router_init"))

    # --- experts ----------------------------------------------------------------------------------------------------

    def selection(self) -> tuple[int, int | None, Selection]:
        """How many of how many checkpoints become experts, and which."""
        section = self.recipe.prepare
        if self.recipe.kind == "dense" or self.recipe.copies:
            return 1, 1, "uniform"
        return self.recipe.given_experts(), section.num_checkpoints, section.selection

    def checkpoints(self, steps: int) -> list[int]:
        """The steps of stage 1's training whose checkpoints become experts."""
        return chosen_steps(steps, *self.selection())

    def experts(self) -> list[Path]:
        """The folders of the experts that there are before stage 3."""
        r, given = self.recipe, self.recipe.prepare.given
        if "expand" in self.run.records:
            return [self.root / "expand" / "experts" / str(i) for i in range(r.num_experts)]
        if given is not None:
            folders = [Path(folder) for folder in given]
        else:
            count = 1 if r.copies else r.given_experts()
            folders = [self.root / "prepare" / "experts" / str(i) for i in range(count)]
        return [folders[-1]] * r.num_experts if r.copies else folders


def write_buckets(folder: Path, buckets: Buckets, perplexity: torch.Tensor | None) -> None:
    """`buckets.json`: the examples of each expert, and where they decided, the perplexities."""
    scores = None if perplexity is None else perplexity.tolist()
    write_json(folder / "buckets.json", {"buckets": buckets, "perplexity": scores})


def metrics(trained: Trained) -> dict[str, Any]:
    """What a stage's record holds of a training."""
    return {**trained.metrics(), "history": trained.history}
