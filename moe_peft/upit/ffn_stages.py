"""The stages of the mode `ffn`, whose experts are complete FFNs: the result is a native MoE checkpoint."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..models.attention_init import check_attention, fold_routers, init_attention_routers
from ..models.introspection import router_parameters
from ..models.native_routers import replace_routers
from ..native.folders import open_dense
from ..native.model_folder import TERMS, copy_companions
from ..native.upcycle import UpcycleConfig, check_same_architecture, upcycle, upcycled_config
from ..routing.routers import RouterSettings
from ..training.preparation import calibration_batches
from ..training.trainable import train_only
from ..utils.distributed import on_main_process
from ..utils.expert_merging import Descent
from ..utils.loading import empty_model, without_zero3
from ..utils.messages import InputError
from ..utils.validation import prefixed
from .evaluate import Evaluate
from .expand import expand_checkpoints
from .expert_similarity import of_ffns
from .files import finish_native
from .router_init import add_routing_vectors, train_expert
from .stage_cache import Stage
from .stages import Expand, PostTrain, Prepare, RouterInit

logger = logging.getLogger("moe_peft")

_MODEL = "model"


class _OfFFNs(Stage):
    """A stage whose experts are complete FFNs, of dense models or of a native MoE."""

    def similarity(self, folder: Path) -> dict[str, Any]:
        return of_ffns(folder, self.context.base_folder)


class FFNPrepare(_OfFFNs, Prepare):
    output = _MODEL

    def planned(self, base: PreTrainedModel) -> PreTrainedModel:
        return base


class FFNExpand(_OfFFNs, Expand):
    def expand(self, folder: Path) -> list[Descent]:
        section = self.recipe.expand
        return expand_checkpoints(
            self.given.experts,
            self.context.base_folder,
            output_dir=folder,
            num_experts=self.recipe.num_experts,
            method=section.method,
            drop_rate=0.9 if section.drop_rate is None else section.drop_rate,
            seed=self.seed,
        )[1]


class FFNRouterInit(_OfFFNs, RouterInit):
    def load(self, folder: Path) -> PreTrainedModel:
        return self.context.load_checkpoint(folder)

    def planned(self, base: PreTrainedModel) -> PreTrainedModel:
        """One expert's dense model, with a routing vector for each FFN."""
        add_routing_vectors(base, [name for name, _ in base.named_modules() if name.endswith(".mlp")], self.seed)
        train_expert(base, self.recipe.router_init.train_experts)
        return base


class FFNPostTrain(_OfFFNs, PostTrain):
    output = _MODEL

    def check_base(self) -> None:
        r = self.recipe
        base = open_dense(str(self.context.base_folder), r.moe.get("family"))
        plugin = self.arguments().deepspeed_plugin if r.post_train.router else None
        if plugin is not None and plugin.zero_stage == 3:
            raise InputError(f"post_train.router={r.post_train.router}: ZeRO-3 shards the gates; use FSDP2 or ZeRO-2")
        self.put_routers(self._empty(self.context.base.config))
        self._check_attention()
        for folder in r.prepare.folders or []:
            check_same_architecture(open_dense(folder, r.moe.get("family")), base)

    def _check_attention(self) -> None:
        """Raise if the base's attention cannot initialise the routers, which happens after stage 1."""
        r, config = self.recipe, self.recipe.upcycle_config()
        if config.router_init != "attention":
            return
        n, heads = config.num_gates, config.router_num_heads
        if router := r.post_train.router:
            n = r.routed[0]
            heads = router.get("num_heads") or heads or n
        with prefixed("moe.router_init='attention'"):
            check_attention(self.context.base.empty(), n, heads, linear=router.get("type") != "attention")

    def settings(self) -> dict[str, Any]:
        moe, data = self.recipe.moe, self.recipe.data
        settings = {**super().settings(), **{f"moe.{name}": value for name, value in moe.items()}}
        if moe.get("router_init") == "attention":
            names = ("calibration_examples", "calibration_length")
            settings |= {f"data.{name}": getattr(data, name) for name in names}
        return settings

    @property
    def assembled(self) -> Path:
        return self.state / "assembled"

    @cached_property
    def calibration(self) -> list[dict[str, torch.Tensor]] | None:
        """Batches for the attention that initialises routers: of a stage before this one, or the base's."""
        if self.recipe.moe.get("router_init") != "attention":
            return None
        data, base = self.context.train_data, self.context.base
        section = self.recipe.data
        batches = calibration_batches(
            data, base.tokenizer, section.calibration_examples, max_length=section.calibration_length, seed=self.seed,
            args=self.arguments(),
        )  # fmt: skip
        if not self.given.experts:  # the base knows no tokens that a chat template adds
            vocab_size = base.config.get_text_config().vocab_size
            for batch in batches:
                batch["attention_mask"] = batch["attention_mask"] * (batch["input_ids"] < vocab_size)
                batch["input_ids"] = batch["input_ids"].clamp(max=vocab_size - 1)
        return batches

    def write_parts(self) -> None:
        _ = self.calibration  # in every process: TRL's preparation waits for all
        with without_zero3():  # which would shard the models of one process among all
            on_main_process(lambda: None if self.assembled.exists() else self.write_moe(self.assembled))

    def write_moe(self, folder: Path) -> None:
        """Write the native MoE that is trained: of the experts that there are, or of copies of the base's FFNs."""
        r, calibration = self.recipe, self.calibration
        overrides: dict[str, Any] = {}
        if calibration is not None and r.post_train.router:  # which take the place of the gates
            calibration, overrides = None, {"router_init": UpcycleConfig.router_init, "router_num_heads": None}
        if self.given.routers is not None:
            overrides = {
                "router_init": "given",
                "router_weights": str(self.given.routers),
                "router_init_std": UpcycleConfig.router_init_std,  # the recipe's is for methods without stage 3
            }
        models: Any = self.given.experts
        if not r.facts.prepares:
            models = self.context.base_folder
        elif r.copies and self.given.routers is None:  # stage 3 makes even copies differ
            models = models[:1]
        upcycle(models, folder, r.upcycle_config(seed=self.seed, **overrides), calibration=calibration)

    def assemble(self) -> PreTrainedModel:
        r, experts, model = self.recipe, self.given.experts, self.context.load_checkpoint(self.assembled)
        self.put_routers(model)
        if self.calibration is not None and r.post_train.router:
            dense: Any = self.context.load_checkpoint(experts[0]) if experts else self.context.base.load()
            dense.to(PartialState().device)
            init_attention_routers(model, self.calibration, num_heads=r.moe.get("router_num_heads"), dense=dense)
        return model

    def planned(self, base: PreTrainedModel) -> PreTrainedModel:
        config = upcycled_config(base.config, self.recipe.upcycle_config())[1]
        with base.device:
            native = AutoModelForCausalLM.from_config(config, dtype=base.dtype)
        self.put_routers(native)
        if not self.recipe.trains_experts:
            train_only(native, router_parameters(native))
        return native

    def _empty(self, base: PreTrainedConfig) -> PreTrainedModel:
        """The native MoE without weights."""
        return empty_model(upcycled_config(base, self.recipe.upcycle_config())[1], "moe")

    def put_routers(self, model: PreTrainedModel) -> None:
        """
        Put the recipe's routers, with random values, in the place of a native MoE's gates.

        Raises:
            ValueError: they do not fit the model.
        """
        if router := self.recipe.post_train.router:
            with prefixed("post_train.router"):
                replace_routers(model, RouterSettings(**router), seed=self.seed)

    def finish(self, folder: Path, model: Any) -> None:
        if self.recipe.post_train.router:
            self._fold(folder)
        finish_native(folder, model.config)
        copy_companions(self.context.base_folder, folder, TERMS)

    def _fold(self, folder: Path) -> None:
        """Write plain gates for the recipe's routers, if they fold into such."""
        model = self.context.load_checkpoint(folder)
        try:
            fold_routers(model)
        except InputError as error:
            logger.info("%s; the result keeps its routers, which moe_peft.native.load_routers loads", error)
        else:
            model.save_pretrained(folder)


class FFNEvaluate(Evaluate):
    def load(self, folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
        model, base = self.context.load_checkpoint(folder), self.context.base.load()
        base_rows, rows = (m.get_input_embeddings().weight.shape[0] for m in (base, model))
        if rows > base_rows:  # a chat template brought tokens, of which the training's embeddings began like this
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                base.resize_token_embeddings(rows)
        return model, base


FFN_STAGES: tuple[type[Stage], ...] = (FFNPrepare, FFNExpand, FFNRouterInit, FFNPostTrain, FFNEvaluate)
