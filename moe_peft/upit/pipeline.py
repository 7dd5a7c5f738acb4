"""Run of a recipe. UpIT and its baselines consist of the same stages."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import trl
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env, patch_environment

from .. import __version__
from ..training.preflight import check_arguments, check_loss
from ..utils.distributed import on_main_process
from ..utils.io import atomic_write, hash_file, link_folder, output_folder, read_json, reading, write_json
from ..utils.loading import EMPTY_IN_OTHERS
from ..utils.messages import InputError
from ..utils.torch_contexts import free_memory
from .context import RunContext
from .dense_experts import DenseStageKind
from .evaluate import Evaluate
from .experts import ExpertKind
from .lora_experts import LoraStageKind
from .recipe import Recipe
from .stage_cache import MANIFEST, Artifacts, Stage, is_run, keep_own_files, outlook, run_stage
from .stages import Expand, Mean, PostTrain, Prepare, RouterInit, TrainerStage


@dataclass
class Mode:
    """Kind of a mode's experts, and its stages in order. Further stages can be appended."""

    kind: type[ExpertKind]
    stages: list[type[Stage]] = field(default_factory=lambda: [Prepare, Expand, Mean, RouterInit, PostTrain, Evaluate])


MODES = {"lora": Mode(LoraStageKind), "ffn": Mode(DenseStageKind)}


class UpIT:
    """
    A recipe and its run.

    Args:
        recipe: the recipe to run; see `load_recipe`.

    Example:

    ```python
    >>> from moe_peft.upit import UpIT, recipe_from_dict
    >>> recipe = recipe_from_dict(
    ...     {
    ...         "output_dir": "upit",
    ...         "model": {"name_or_path": "Qwen/Qwen3-0.6B"},
    ...         "data": {"train": "train.jsonl"},
    ...         "num_experts": 2,
    ...         "num_train_epochs": 2,
    ...         "adapter": {"r": 4, "top_k": 1},
    ...         "sft": {
    ...             "bf16": False,
    ...             "use_cpu": True,
    ...             "per_device_train_batch_size": 2,
    ...         },
    ...     }
    ... )
    >>> pipeline = UpIT(recipe)
    >>> [stage.name for stage in pipeline.stages]
    ['prepare', 'router_init', 'post_train']
    >>> adapter = pipeline.run()  # a PEFT adapter: upit/adapter

    ```
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.context = RunContext(recipe, MODES[recipe.mode].kind(recipe))
        self.root, self.records = self.context.root, self.context.records

    @cached_property
    def stages(self) -> list[Stage]:
        """Recipe's stages, in order, each with the artifacts of the previous ones."""
        experts = [Path(folder) for folder in self.recipe.prepare.folders or []]
        artifacts, stages = Artifacts(experts=self.recipe.assembled_from(experts)), []
        for stage in MODES[self.recipe.mode].stages:
            if stage.wanted(self.recipe):
                stages.append(stage(self.context, artifacts))
                artifacts = stages[-1].result
        return stages

    @cached_property
    def trainer_stages(self) -> list[TrainerStage]:
        return [stage for stage in self.stages if isinstance(stage, TrainerStage)]

    @property
    def result(self) -> Path:
        """Folder of the result, even before it exists."""
        return self.root / self._trained.name

    @property
    def _trained(self) -> Path:
        """Result in the folder of its stage."""
        folder = self.stages[-1].result.model
        assert folder is not None  # every method trains something
        return folder

    def run(self, redo: bool = False) -> Path:
        """
        Run every stage that is not done.

        Args:
            redo: whether done stages may be removed and run again if the recipe has changed.

        Returns:
            the result, with the tokenizer: `<output_dir>/adapter`, an adapter folder; in the mode "ffn"
            `<output_dir>/model`, a native MoE.
        """
        self.join_processes()
        self.check()
        with ExitStack() as stack:
            folder = output_folder(self.recipe.output_dir, "output_dir", is_run)
            on_main_process(lambda: str(stack.enter_context(folder)))
            self.records.clear()
            before = on_main_process(self._earlier)
            for number, stage in enumerate(self.stages, start=1):
                with _tracked(self.root, stage.name):
                    self.records[stage.name] = run_stage(stage, redo, f"stage {number} of {len(self.stages)}")
                free_memory()
            on_main_process(lambda: self._publish(before))
        return self.result

    def join_processes(self, **overrides: Any) -> None:
        """
        Join the other processes of a launcher, on the devices set by the training arguments.

        The arguments set up accelerate's state. Code that read the state before would see this process alone. The
        arguments of all stages are created here, so a wrong value ends a run before it begins.

        Args:
            overrides: training arguments for this machine, for the plan of a run on another one.
        """
        for stage in self.trainer_stages:
            _ = stage.arguments(**overrides).device
        if PartialState().num_processes > 1 and parse_flag_from_env(EMPTY_IN_OTHERS):
            raise InputError(
                "fsdp_cpu_ram_efficient_loading=true: all processes but the first would score examples with empty "
                "weights; set it to false in accelerate's config"
            )

    def check(self, weights: bool = True, **overrides: Any) -> None:
        """
        Check all that can be checked before the first stage.

        Args:
            weights: whether to check the base's weights, too. A plan does not need them.
            overrides: see `join_processes`.
        """
        self.context.check_data({path: field for field, path in (stage.template for stage in self.trainer_stages)})
        for stage in self.stages:
            stage.check()
        for trainer in self.trainer_stages:
            args, section = trainer.example_arguments(**overrides), f"{trainer.name}." if trainer.section_sft else ""
            check_arguments(args, f"{section}sft", on_this_machine=weights)
            check_loss(args, trainer.examples(), self.context.base.tokenizer, f"{section}sft")
        if weights:
            self.context.check_base()

    def outlook(self) -> dict[str, str]:
        """Return stage → status for the next `run`: "done", "to do", "resumes", or "again" with the reason."""
        self.records.clear()
        return outlook(self.stages)

    def _earlier(self) -> dict[str, Any]:
        """Return the manifest of an earlier run in this folder, and the names of files in its result; {} if none."""
        path = self.root / MANIFEST
        if not path.is_file():
            return {}
        manifest = read_json(path)
        with reading(path, "move it away, and what you have put into the result"):
            files = [Path(name) for record in manifest["stages"].values() for name in record["files"]]
            written = {file.relative_to(file.parts[0]).as_posix() for file in files}
            seconds = {name: manifest["seconds"][name] for name in manifest["stages"]}
            return {"stages": manifest["stages"], "result": manifest["result"], "seconds": seconds, "written": written}

    def _publish(self, before: Mapping[str, Any]) -> None:
        """Write the result and the manifest. An unchanged result and its edited card stay as they are."""
        packages = {"torch": torch, "transformers": transformers, "peft": peft, "trl": trl}
        manifest = {
            "recipe": self.recipe.model_dump(),
            "versions": {
                **{name: package.__version__ for name, package in packages.items()},
                "moe-peft-hf": __version__,
            },
            "stages": json.loads(json.dumps(self.records, default=str)),
        }
        if before.get("stages") != manifest["stages"] or _weights(self.result) != before.get("result"):
            with atomic_write(self.result) as partial:
                link_folder(self._trained, partial)
                if before:
                    keep_own_files(self.result, partial, {*before["written"], "README.md"})
        manifest |= {"result": _weights(self.result), "seconds": self._seconds(before)}
        write_json(self.root / MANIFEST, manifest)

    def _seconds(self, before: Mapping[str, Any]) -> dict[str, float | None]:
        """
        Return each stage's duration, from this run or an earlier one. A stage that was stopped and resumed has None.
        """
        seconds = {stage.name: stage.seconds for stage in self.stages}
        for name, record in before.get("stages", {}).items():
            if record == self.records.get(name) and seconds[name] is None:
                seconds[name] = before["seconds"][name]
        return seconds


def _weights(folder: Path) -> dict[str, str]:
    return {path.name: hash_file(path) for path in sorted(folder.glob("*.safetensors"))}


@contextmanager
def _tracked(root: Path, stage: str) -> Iterator[None]:
    """
    Set up trackers for a stage inside this block. TensorBoard writes to `<root>/logs/<stage>`, which stays when the
    stage's state is removed. Weights & Biases makes one run, in a group for the complete run. The user's environment
    variables take precedence.
    """
    defaults = {"TENSORBOARD_LOGGING_DIR": str(root / "logs" / stage), "WANDB_RUN_GROUP": root.name}
    with patch_environment(**{key: value for key, value in defaults.items() if key not in os.environ}):
        try:
            yield
        finally:
            wandb = sys.modules.get("wandb")
            if wandb is not None and wandb.run is not None:
                wandb.finish()
