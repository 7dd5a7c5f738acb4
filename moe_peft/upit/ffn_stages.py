"""The stages of the mode `ffn`, whose experts are whole FFNs: the result is a native MoE checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations import unset_hf_deepspeed_config

from ..models.attention_init import check_attention, fold_routers, init_attention_routers
from ..models.introspection import router_parameters
from ..models.model_size import model_size
from ..models.native_routers import replace_routers
from ..native.model_folder import copy_terms, open_dense
from ..native.upcycle import UpcycleConfig, check_same_architecture, upcycle, upcycled_config
from ..routing.routers import RouterSettings
from ..training.preparation import calibration_batches, tokenized
from ..training.scoring import Collator, score_checkpoints
from ..utils.loading import empty_model
from .buckets import fill_buckets
from .evaluate import Evaluate
from .expand import expand_checkpoints
from .expert_similarity import of_ffns
from .files import expert_folders, finish_native, read_perplexity, write_buckets, write_perplexity, write_vectors
from .inputs import load_checkpoint, load_config, load_empty, load_model, model_folder
from .post_train import post_train
from .router_init import init_expert_routers
from .stage_cache import STATE, Artefacts, Stage
from .stages import Expand, PostTrain, Prepare, RouterInit, Sizes, metrics

logger = logging.getLogger("moe_peft")

_MODEL, _ROUTERS = "model", "routers.safetensors"


class _OfFFNs(Stage):
    """A stage whose experts are whole FFNs, of dense models or of a native MoE."""

    def likeness(self, folder: Path) -> dict[str, Any]:
        return of_ffns(folder, model_folder(self.recipe.model))


class FFNPrepare(_OfFFNs, Prepare):
    output = _MODEL

    def sizes(self, model: PreTrainedModel) -> Sizes:
        return Sizes(0, model.num_parameters())


class FFNExpand(_OfFFNs, Expand):
    def run(self, folder: Path) -> dict[str, Any]:
        section, descents = self.recipe.expand, []
        if PartialState().is_main_process:
            descents = expand_checkpoints(
                self.given.experts,
                model_folder(self.recipe.model),
                output_dir=folder,
                num_experts=self.recipe.num_experts,
                method=section.method,
                drop_rate=0.9 if section.drop_rate is None else section.drop_rate,
                seed=self.seed,
            )[1]
        PartialState().wait_for_everyone()
        return {"descents": [descent.as_dict() for descent in descents]}


class FFNRouterInit(_OfFFNs, RouterInit):
    @property
    def result(self) -> Artefacts:
        experts = tuple(expert_folders(self.folder, self.recipe.num_experts))
        return replace(self.given, experts=experts, routers=self.folder / _ROUTERS)

    def run(self, folder: Path) -> dict[str, Any]:
        r, section, experts = self.recipe, self.recipe.router_init, self.given.experts
        args, load = self.example_arguments(folder), partial(load_checkpoint, r.model)
        data, collator = tokenized(self.seed_data(), self.context.tokenizer, args)
        buckets, perplexity = fill_buckets(
            data,
            r.num_experts,
            section.buckets,
            partial(self._perplexities, folder, load, data, collator),
            seed=args.seed,
            capacity=section.capacity,
            label_column=r.data.label_column,
            expert_map=section.expert_map,
        )
        found = init_expert_routers(
            load,
            experts,
            buckets,
            data,
            args,
            self.context.tokenizer,
            output_dir=folder,
            objective=section.objective,
            alpha=section.alpha,
            train_experts=section.train_experts,
        )
        if args.should_save:
            write_vectors(folder / _ROUTERS, found.vectors)
            write_buckets(folder, buckets, perplexity)
        PartialState().wait_for_everyone()
        result: dict[str, Any] = {"bucket_sizes": [len(bucket) for bucket in buckets]}
        if found.trained:  # losses of the last expert, steps of all
            result |= {**metrics(found.trained[-1]), "steps": sum(max(t.checkpoints) for t in found.trained)}
        return result

    def steps(self, rows: int, processes: int) -> int:
        """Experts are trained one after the other, each on its bucket."""
        return self.recipe.num_experts * super().steps(rows, processes)

    def sizes(self, model: PreTrainedModel) -> Sizes:
        vectors = model.config.num_hidden_layers * model.config.hidden_size
        ffns = sum(p.numel() for name, p in model.named_parameters() if ".mlp." in name)
        return Sizes(vectors, vectors + (ffns if self.recipe.router_init.train_experts else 0))

    def _perplexities(
        self, folder: Path, load: Callable[[Path], PreTrainedModel], data: Dataset, collator: Collator
    ) -> torch.Tensor:
        """[S, n]; kept until the stage is done."""
        path = folder / STATE / "perplexity.safetensors"
        kept = read_perplexity(path)
        if kept is not None:
            return kept
        found = score_checkpoints(load, self.given.experts, data, collator)
        if PartialState().is_main_process:
            write_perplexity(path, found)
        return found


class FFNPostTrain(_OfFFNs, PostTrain):
    output = _MODEL

    def check_base(self) -> None:
        r = self.recipe
        base = open_dense(str(model_folder(r.model)), r.moe.get("family"))
        plugin = self.arguments(self.folder).deepspeed_plugin if r.post_train.router else None
        if plugin is not None and plugin.zero_stage == 3:
            raise ValueError(f"post_train.router={r.post_train.router}: ZeRO-3 divides the gates; use FSDP2 or ZeRO-2")
        self.put_routers(self._empty(load_config(r.model)))
        self._check_attention()
        for folder in r.prepare.given or []:
            check_same_architecture(open_dense(folder, r.moe.get("family")), base)

    def _check_attention(self) -> None:
        """Raise if the base's attention cannot initialise the routers, which happens after stage 1."""
        r, config = self.recipe, self.recipe.upcycle_config()
        if config.router_init != "attention":
            return
        n, heads = config.num_gates, config.router_num_heads
        if given := r.post_train.router:
            n = r.routed[0]
            heads = given.get("num_heads") or heads or n
        try:
            check_attention(load_empty(r.model), n, heads, linear=given.get("type") != "attention")
        except ValueError as error:
            raise ValueError(f"moe.router_init='attention': {error}") from error

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "moe": self.recipe.moe}

    def run(self, folder: Path) -> dict[str, Any]:
        r = self.recipe
        assembled = folder / STATE / "assembled"
        calibration = None
        if r.moe.get("router_init") == "attention":  # in every process: TRL's preparation waits for all
            calibration = self._calibration(folder)
        if PartialState().is_main_process and not assembled.exists():
            unset_hf_deepspeed_config()  # or ZeRO-3 would divide the models of one process among all
            self.assemble(assembled, calibration)
        PartialState().wait_for_everyone()
        args = self.arguments(folder, num_train_epochs=self.epochs)  # before the model, which ZeRO-3 then divides
        model = load_checkpoint(r.model, assembled)
        self.put_routers(model)
        if calibration is not None and r.post_train.router:
            dense: Any = load_checkpoint(r.model, self.given.experts[0]) if self.given.experts else load_model(r.model)
            dense.to(PartialState().device)
            init_attention_routers(model, calibration, num_heads=r.moe.get("router_num_heads"), dense=dense)
            del dense
        size = model_size(model)
        trained = post_train(
            model,
            self.context.train_data,
            args,
            self.context.tokenizer,
            output_dir=folder / self.output,
            train_experts=r.trains_experts,
        )
        if PartialState().is_main_process:
            self.fold(folder / self.output)
            finish_native(folder / self.output, model.config)
            copy_terms(model_folder(r.model), folder / self.output)
            self.write_card(folder / self.output)
        PartialState().wait_for_everyone()
        return {**metrics(trained), "size": asdict(size)}

    def _calibration(self, folder: Path) -> list[dict[str, torch.Tensor]]:
        """Batches for the dense model's attention: of a stage before this one, or the base's."""
        args, tokenizer = self.arguments(folder), self.context.tokenizer
        batches = calibration_batches(self.context.train_data, tokenizer, seed=self.seed, args=args)
        if not self.given.experts:  # the base knows no tokens that a chat template adds
            known = load_config(self.recipe.model).get_text_config().vocab_size
            for batch in batches:
                batch["attention_mask"] = batch["attention_mask"] * (batch["input_ids"] < known)
                batch["input_ids"] = batch["input_ids"].clamp(max=known - 1)
        return batches

    def sizes(self, model: PreTrainedModel) -> Sizes:
        native = self._empty(model.config)
        self.put_routers(native)
        moe, routers = native.num_parameters(), sum(p.numel() for p in router_parameters(native).values())
        trained = moe if self.recipe.trains_experts else routers
        return Sizes(moe - model.num_parameters(), trained, model_size(native))

    def _empty(self, base: PreTrainedConfig) -> PreTrainedModel:
        """The native MoE without weights."""
        return empty_model(upcycled_config(base, self.recipe.upcycle_config())[1], "moe")

    def put_routers(self, model: PreTrainedModel) -> None:
        """
        Put the recipe's routers, with random values, in the place of a native MoE's gates.

        Raises:
            ValueError: they do not fit the model.
        """
        given = self.recipe.post_train.router
        if given:
            try:
                replace_routers(model, RouterSettings(**given), seed=self.seed)
            except ValueError as error:
                raise ValueError(f"post_train.router: {error}") from error

    def fold(self, folder: Path) -> None:
        """Write plain gates for the recipe's routers, if they fold into such."""
        if not self.recipe.post_train.router:
            return
        model = load_checkpoint(self.recipe.model, folder)
        try:
            fold_routers(model)
        except ValueError as error:
            logger.info("%s; the result keeps its routers, which moe_peft.native.load_routers loads", error)
        else:
            model.save_pretrained(folder)

    def assemble(self, folder: Path, calibration: list[dict[str, torch.Tensor]] | None = None) -> None:
        """Write the native MoE that is trained: of the experts that there are, or of copies of the base's FFNs."""
        r = self.recipe
        own: dict[str, Any] = {}
        if calibration is not None and r.post_train.router:  # which take the place of the gates
            calibration, own = None, {"router_init": UpcycleConfig.router_init, "router_num_heads": None}
        if not r.facts.prepares:
            upcycle(model_folder(r.model), folder, r.upcycle_config(seed=self.seed, **own), calibration=calibration)
            return
        if self.given.routers is not None:
            own = {"router_init": "given", "router_weights": str(self.given.routers)}
            own["router_init_std"] = UpcycleConfig.router_init_std  # a recipe may have one for methods without stage 3
        same = r.copies and self.given.routers is None  # stage 3 makes even copies differ
        config = r.upcycle_config(seed=self.seed, **own)
        experts = self.given.experts[:1] if same else self.given.experts
        upcycle(experts, folder, config, calibration=calibration)


class FFNEvaluate(Evaluate):
    def load(self, folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
        model, base = load_checkpoint(self.recipe.model, folder), load_model(self.recipe.model)
        known, learned = (one.get_input_embeddings().weight.shape[0] for one in (base, model))
        if learned > known:  # a chat template brought tokens, of which the training's embeddings began like this
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                base.resize_token_embeddings(learned)
        return model, base


FFN_STAGES: tuple[type[Stage], ...] = (FFNPrepare, FFNExpand, FFNRouterInit, FFNPostTrain, FFNEvaluate)
