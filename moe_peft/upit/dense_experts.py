"""Experts that are complete FFNs, each in a dense model. The result is a native MoE checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from trl import SFTConfig

from ..models.attention_init import init_attention_routers
from ..models.gate_init import dense_gates
from ..models.gates import fold_routers
from ..models.native_routers import replace_routers
from ..native.folders import DenseFolder, open_dense, open_folder
from ..native.model_folder import NOT_WEIGHTS, TERMS, copy_companions
from ..native.safetensors_io import Checkpoint, ShardedWriter
from ..native.upcycle import UpcycleConfig, check_same_architecture, mean_model, upcycle, upcycled_config
from ..routing.routers import RouterSettings
from ..training.preparation import calibration_batches
from ..training.scoring import to_device
from ..utils.distributed import on_main_process
from ..utils.loading import NO_CODE, empty_model, without_zero3
from ..utils.messages import InputError
from ..utils.validation import prefixed
from .expand import expand_checkpoints
from .expansion import Descent
from .experts import Batches, ExpertKind, Load
from .files import finish_native, link_model, mean_weight, write_without
from .routing_vectors import VECTORS, put_vectors

logger = logging.getLogger("moe_peft")


class DenseStageKind(ExpertKind):
    """Experts that are complete FFNs, each in a dense model."""

    output = "model"
    part = ".mlp."
    copy = staticmethod(link_model)

    # --- folders ----------------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> PreTrainedModel:
        """Load a model from a stage's or the user's folder, with the recipe's dtype and attention implementation."""
        return replace(self.base, name_or_path=str(folder), revision=None, field="model").load()

    @staticmethod
    def scored(load: Load, folders: Sequence[Path]) -> Iterator[PreTrainedModel]:
        yield from (load(folder) for folder in folders)

    def merge(self, experts: Sequence[Path], folder: Path, seed: int) -> list[Descent]:
        section = self.recipe.expand
        return expand_checkpoints(
            experts,
            self.base.folder,
            output_dir=folder,
            num_experts=self.recipe.num_experts,
            method=section.method,
            drop_rate=0.9 if section.drop_rate is None else section.drop_rate,
            seed=seed,
        )[1]

    def mean(self, experts: Sequence[Path], folder: Path) -> None:
        """Write a dense model with the mean weights, with one tensor in memory at a time."""
        models = [Checkpoint(expert) for expert in experts]
        link_model(experts[0], folder, weights=False)
        names = [name for name in models[0] if not name.endswith(NOT_WEIGHTS)]
        with ShardedWriter(folder, {name: (models[0].dtype(name), models[0].shape(name)) for name in names}) as writer:
            for name in names:
                writer.write(name, mean_weight(models, name))
        copy_companions(self.base.folder, folder, TERMS)

    # --- stages 1 and 3 ---------------------------------------------------------------------------------------------

    def planned_expert(self, base: PreTrainedModel) -> PreTrainedModel:
        return base

    @staticmethod
    def routed_modules(model: PreTrainedModel, folders: Sequence[Path]) -> list[str]:
        """Return the name of every layer's FFN."""
        return [f"model.layers.{layer}.mlp" for layer in range(model.config.num_hidden_layers)]

    @staticmethod
    def add_vectors(model: PreTrainedModel, folder: Path, names: Sequence[str], seed: int) -> PreTrainedModel:
        put_vectors(model, names, seed)
        return model

    @staticmethod
    def vectors(checkpoint: Path, count: int) -> list[torch.Tensor]:
        model = Checkpoint(checkpoint)
        return [model.tensor(f"{VECTORS}.vectors.{i}").float() for i in range(count)]

    @staticmethod
    def without_vectors(checkpoint: Path, source: Path, target: Path) -> None:
        write_without(checkpoint, f"{VECTORS}.", source, target)

    @staticmethod
    def gates(load: Load, folders: Sequence[Path], way: str, texts: Batches) -> list[torch.Tensor]:
        """Compute gates by running the texts through the model with the mean weights."""
        mean = mean_model([open_folder(folder, "experts", DenseFolder) for folder in folders])
        to_device(mean)
        return [weight.float() for weight in dense_gates(mean, way, texts, len(folders))]

    def planned_with_vectors(self, base: PreTrainedModel) -> PreTrainedModel:
        return self.add_vectors(base, self.base.folder, self.routed_modules(base, ()), seed=0)

    # --- stage 4 and later ------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        moe, data = self.recipe.moe, self.recipe.data
        settings = {f"moe.{name}": value for name, value in moe.items()}
        if self._by_attention:
            names = ("calibration_examples", "calibration_length")
            settings |= {f"data.{name}": getattr(data, name) for name in names}
        return settings

    @property
    def _by_attention(self) -> bool:
        """True if the routers are initialized by attention."""
        return self.recipe.moe.get("router_init") == "attention"

    def check_base(self) -> None:
        r = self.recipe
        base = open_dense(str(self.base.folder), r.moe.get("family"))
        self.put_routers(empty_model(self._config(self.base.config), "moe"))
        for folder in r.prepare.folders or []:
            check_same_architecture(open_dense(folder, r.moe.get("family")), base)

    def calibration(
        self, experts: Sequence[Path], data: Dataset, args: SFTConfig, seed: int
    ) -> list[dict[str, torch.Tensor]] | None:
        """
        Return batches to initialize routers by attention, or None. Without experts, tokens unknown to the base are
        masked.
        """
        if not self._by_attention:
            return None
        section = self.recipe.data
        batches = calibration_batches(
            data, self.base.tokenizer, section.calibration_examples, max_length=section.calibration_length, seed=seed,
            args=args,
        )  # fmt: skip
        if not experts:  # the base has no embeddings for tokens added by a chat template
            vocab_size = self.base.config.get_text_config().vocab_size
            for batch in batches:
                batch["attention_mask"] = batch["attention_mask"] * (batch["input_ids"] < vocab_size)
                batch["input_ids"] = batch["input_ids"].clamp(max=vocab_size - 1)
        return batches

    def assemble(
        self, experts: Sequence[Path], routers: Path | None, data: Dataset, args: SFTConfig, seed: int, state: Path
    ) -> PreTrainedModel:
        """Assemble a native MoE from the experts, or from copies of the base's FFNs."""
        r, assembled = self.recipe, state / "assembled"
        calibration = self.calibration(experts, data, args, seed)  # in every process: TRL's preparation waits for all
        with without_zero3():  # ZeRO-3 would shard the main process's models among all processes
            on_main_process(
                lambda: None if assembled.exists() else self.write_moe(assembled, experts, routers, calibration, seed)
            )
        model = self.load(assembled)
        self.put_routers(model, seed)
        if calibration is not None and r.post_train.router:
            dense: Any = self.load(experts[0]) if experts else self.base.load()
            dense.to(PartialState().device)
            init_attention_routers(model, calibration, num_heads=r.moe.get("router_num_heads"), dense=dense)
        return model

    def write_moe(
        self, folder: Path, experts: Sequence[Path], routers: Path | None, calibration: Any, seed: int
    ) -> None:
        """Write the native MoE to train."""
        r = self.recipe
        overrides: dict[str, Any] = {}
        if calibration is not None and r.post_train.router:  # these routers replace the gates
            calibration, overrides = None, {"router_init": UpcycleConfig.router_init, "router_num_heads": None}
        if routers is not None:
            overrides = {
                "router_init": "given",
                "router_weights": str(routers),
                "router_init_std": UpcycleConfig.router_init_std,  # the recipe's value is for methods without stage 3
            }
        models: Any = list(experts)
        if not r.facts.prepares:
            models = self.base.folder
        elif r.facts.copies:
            models = models[:1]
        upcycle(models, folder, r.upcycle_config(seed=seed, **overrides), calibration=calibration)

    def planned(self, base: PreTrainedModel) -> PreTrainedModel:
        with base.device:
            native = AutoModelForCausalLM.from_config(self._config(base.config), dtype=base.dtype, **NO_CODE)
        self.put_routers(native)
        return native

    def _config(self, base: PreTrainedConfig) -> PreTrainedConfig:
        """Return the native MoE's config."""
        return upcycled_config(base, self.recipe.upcycle_config())[1]

    def put_routers(self, model: PreTrainedModel, seed: int = 0) -> None:
        """Replace a native MoE's gates by the recipe's routers, with random values."""
        if router := self.recipe.post_train.router:
            with prefixed("post_train.router"):
                replace_routers(model, RouterSettings(**router), seed=seed)

    def finish(self, folder: Path, model: Any) -> None:
        if self.recipe.post_train.router:
            self._fold(folder)
        finish_native(folder, model.config)
        copy_companions(self.base.folder, folder, TERMS)

    def _fold(self, folder: Path) -> None:
        """Replace the recipe's routers in the folder by plain gates, if they can be folded."""
        model = self.load(folder)
        try:
            fold_routers(model)
        except InputError as error:
            logger.info("%s; the result keeps its routers, which moe_peft.native.load_routers loads", error)
        else:
            model.save_pretrained(folder)

    def load_result(self, folder: Path, seed: int) -> tuple[PreTrainedModel, PreTrainedModel]:
        model, base = self.load(folder), self.base.load()
        base_rows, rows = (m.get_input_embeddings().weight.shape[0] for m in (base, model))
        if rows > base_rows:  # a chat template added tokens; their embeddings began like this in training
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                base.resize_token_embeddings(rows)
        return model, base
