"""
How much disk a run takes.

Where trackers write what a stage's trainer reports.

The run of a recipe: UpIT and the methods it is compared with, all made of the same stages.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import trl
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env, patch_environment
from datasets import Dataset
from transformers.integrations import unset_hf_deepspeed_config

from ..training.estimate import base_dtype
from ..training.preflight import check_answers, check_launched, check_packages, refuse_arguments
from ..training.preparation import rehearse
from ..utils.distributed import in_first_process
from ..utils.io import check_space, held, writable
from ..utils.loading import EMPTY_IN_OTHERS
from ..utils.model_card import write_model_card
from ..utils.torch_contexts import free_memory
from ..utils.validation import check, is_a
from .context import RunContext
from .ffn_stages import FFN_STAGES
from .files import publish, read_json, write_json
from .fingerprint import damage, hash_folder
from .inputs import load_empty
from .lora_stages import LORA_STAGES
from .recipe import Recipe, as_dict
from .stage_cache import MANIFEST, Artefacts, Stage, check_places, outlook, run_stage
from .stages import Expand, PostTrain, Prepare, RouterInit, TrainerStage, TrainingStage, shared_out

# --- space -----------------------------------------------------------------------------------------------------------


def needed_space(recipe: Recipe, stages: Sequence[Stage]) -> int:
    """
    Bytes that some stages of a run write at most at the same time, an estimate: what they keep, and of the training
    that keeps most two checkpoints, each with Adam's two moments.
    """
    empty = load_empty(recipe.model)
    whole, each = 0, 4  # parameters beside the experts that a checkpoint holds, and bytes of one
    if recipe.mode == "ffn":
        whole, each = empty.num_parameters(), base_dtype(empty, recipe.model.dtype).itemsize
    kept = passing = 0
    for stage in stages:
        if isinstance(stage, Expand) and whole:  # the given ones are linked
            kept += (recipe.num_experts - recipe.given_experts()) * whole * each
        if not isinstance(stage, TrainingStage):
            continue
        sizes = stage.sizes(empty)
        weights = (whole + sizes.held) * each
        if isinstance(stage, Prepare) and recipe.facts.assembles:
            copies = stage.num_experts
        else:
            copies = recipe.num_experts if isinstance(stage, RouterInit) and whole else 1
        kept += copies * weights
        assembled = weights if isinstance(stage, PostTrain) and whole else 0  # what the training starts from
        passing = max(passing, assembled + 2 * (weights + 8 * sizes.trained))
    return kept + passing


# --- tracking --------------------------------------------------------------------------------------------------------


@contextmanager
def tracked(root: Path, stage: str) -> Iterator[None]:
    """
    Inside this block, TensorBoard writes to `<root>/logs/<stage>`, which stays when the stage's state is removed, and
    Weights & Biases makes one run, which belongs to the group of the whole run. Variables of the user's go first.
    """
    defaults = {"TENSORBOARD_LOGGING_DIR": str(root / "logs" / stage), "WANDB_RUN_GROUP": root.name}
    with patch_environment(**{key: value for key, value in defaults.items() if key not in os.environ}):
        try:
            yield
        finally:
            wandb = sys.modules.get("wandb")
            if wandb is not None and wandb.run is not None:
                wandb.finish()


# --- pipeline --------------------------------------------------------------------------------------------------------

_FIGURE = "routing.png"
MODES: dict[str, tuple[type[Stage], ...]] = {"lora": LORA_STAGES, "ffn": FFN_STAGES}


class UpIT:
    """
    A recipe and its run.

    Args:
        recipe: what to do; see `load_recipe`.
    """

    def __init__(self, recipe: Recipe) -> None:
        check("UpIT", recipe=(recipe, is_a(Recipe, remedy="give what load_recipe or recipe_from_dict returns")))
        self.recipe = recipe
        self.context = RunContext(recipe)

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages that this recipe goes through, in order, each with what those before it hand on."""
        experts = [Path(folder) for folder in self.recipe.prepare.given or []]
        given, stages = Artefacts(experts=shared_out(self.recipe, experts)), []
        for kind in MODES[self.recipe.mode]:
            if kind.wanted(self.recipe):
                stages.append(kind(self.context, given))
                given = stages[-1].result
        return stages

    def stage_names(self) -> list[str]:
        return [stage.name for stage in self.stages]

    @property
    def root(self) -> Path:
        """The folder of the run."""
        return self.context.root

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        """Of the stages that are done, by name: identity, metrics, hashes of files."""
        return self.context.records

    @property
    def result(self) -> Path:
        """Where the result is, or will be."""
        return self.root / self._trained.name

    def run(self, redo: bool = False) -> Path:
        """
        Do every stage that is missing.

        Args:
            redo: whether finished stages that the recipe has changed may be removed and done again.

        Returns:
            the result, with the tokenizer: `<output_dir>/adapter`, an adapter folder; in the mode "ffn"
            `<output_dir>/model`, a native MoE.

        Raises:
            ValueError: the recipe, its base or its data do not fit together; before anything is written, if this can
                be known then. A finished stage would have to be done again, and `redo` is not set.
        """
        self.join_processes()
        self.check()
        what = f"output_dir={str(self.root)!r}"
        check_space(self.root, self.space(), what)
        with ExitStack() as stack:
            in_first_process(lambda: stack.enter_context(held(self.root, what)))
            self._run(redo)
        return self.result

    def check(self, weights: bool = True, **own: Any) -> None:
        """
        Check what can be known before the first stage.

        Args:
            weights: whether to look at the base's weights, too, which a plan does not need.
            own: training arguments for this machine, which a plan may be made for another one on.

        Raises:
            ValueError: the recipe, its base, its data and its folders do not fit together.
        """
        writable(self.root, f"output_dir={str(self.root)!r}")
        names = self.stage_names()
        in_first_process(partial(check_places, self.recipe, self.root, names, self._trained.name))  # it writes
        trainers = [stage for stage in self.stages if isinstance(stage, TrainerStage)]
        self.context.check_data({path: field for field, path in (stage.template for stage in trainers)})
        for stage in self.stages:
            stage.check()
        for trainer in trainers:
            trainer.check_length()
            only = (trainer.sft.get(name) for name in ("completion_only_loss", "assistant_only_loss"))
            check_answers(f"{trainer.name}.sft.", self.context.train_data, *only)
        self._rehearse(trainers, **own)
        for trainer in trainers if weights else ():
            check_launched(trainer.arguments(self.root), f"{trainer.name}.sft.")
        unset_hf_deepspeed_config()  # or ZeRO-3 would divide empty models; a stage makes its arguments anew
        if weights:
            self.context.check_base()
            for stage in self.stages:
                stage.check_base()

    def _rehearse(self, stages: Sequence[TrainerStage], **own: Any) -> None:
        """Let every stage prepare some of its examples; those that prepare the same ones alike, once."""
        seen: list[tuple[Dataset, dict[str, Any]]] = []
        for stage in stages:
            data = stage.examples()
            if data is None or any(data is other and stage.sft == sft for other, sft in seen):
                continue
            seen.append((data, stage.sft))
            section = f"{stage.name}.sft" if getattr(stage.section, "sft", None) else "sft"
            rehearse(data, self.context.tokenizer, stage.example_arguments(self.root, **own), section)

    def _run(self, redo: bool) -> None:
        self.context.records = {}
        for number, stage in enumerate(self.stages, start=1):
            with tracked(self.root, stage.name):
                place = f"stage {number} of {len(self.stages)}"
                self.records[stage.name] = run_stage(self.root, stage, redo, place)
            free_memory()
        if PartialState().is_main_process:
            self._publish()
        PartialState().wait_for_everyone()

    def space(self) -> int:
        """Bytes on the disk, about, that the stages take that are not done, beside what is there of them."""
        unset_hf_deepspeed_config()
        what = self.outlook()
        left = [stage for stage in self.stages if what[stage.name] != "done"]
        there = [path for stage in left for path in stage.folder.with_name(f"{stage.name}.partial").rglob("*")]
        return max(0, needed_space(self.recipe, left) - sum(p.stat().st_size for p in there if p.is_file()))

    def outlook(self) -> dict[str, str]:
        """What `run` would do with each stage, by name: "done", "to do", "goes on", or "again" and why."""
        self.context.records = {}
        return outlook(self.stages)

    def join_processes(self, **own: Any) -> None:
        """
        Meet the other processes of a launcher, on the devices that the training arguments ask for.

        The arguments set up accelerate's state; whoever asks it before would take this process for the only one. They
        are made for all stages, so that a wrong value ends a run before it begins.
        """
        for stage in self.stages:
            if isinstance(stage, TrainerStage):
                args = stage.arguments(self.root, **own)
                _ = args.device
                check_packages(args, f"{stage.name}.sft.")
                refuse_arguments(args, f"{stage.name}.sft.")
        if PartialState().num_processes > 1 and parse_flag_from_env(EMPTY_IN_OTHERS):
            raise ValueError(
                "fsdp_cpu_ram_efficient_loading=true: all processes but the first would score examples with empty "
                "weights; set it to false in accelerate's config"
            )

    @property
    def _trained(self) -> Path:
        """The result in the folder of the stage that makes it."""
        folder = self.stages[-1].result.model
        assert folder is not None  # every method trains something
        return folder

    def _publish(self) -> None:
        """Write the result and the manifest. A result that is there already stays, and so do files of others in it."""
        manifest: dict[str, Any] = {}
        with suppress(ValueError):
            manifest = read_json(self.root / MANIFEST) or {}
        files, records = manifest.get("result"), json.loads(json.dumps(self.records, default=str))
        files = files if isinstance(files, dict) else None
        there = self.result.is_dir() and manifest.get("stages") == records
        if files is None or not there or damage(self.result, files) is not None:
            own = [*hash_folder(self._trained), _FIGURE]  # where no manifest says what an earlier run wrote
            publish(self._trained, self.result, own if files is None else files)
            self._add_figure()
            files = {name: digest for name, digest in hash_folder(self.result).items() if self._writes(name)}
        write_json(self.root / MANIFEST, {**self._manifest(), "result": files})

    def _writes(self, name: str) -> bool:
        """Whether a file of the result is ours."""
        return (self._trained / name).is_file() or name == _FIGURE

    def _add_figure(self) -> None:
        """Show in the result's model card where its tokens go, if that was measured."""
        figure = self.root / "evaluate" / _FIGURE
        if "evaluate" in self.records and figure.is_file():
            shutil.copy(figure, self.result / figure.name)
            write_model_card(self.result)

    def _manifest(self) -> dict[str, Any]:
        packages = {"torch": torch, "transformers": transformers, "peft": peft, "trl": trl}
        versions = {name: module.__version__ for name, module in packages.items()}
        return {
            "recipe": as_dict(self.recipe),
            "versions": {**versions, "moe-peft-hf": version("moe-peft-hf")},
            "stages": self.records,
        }
