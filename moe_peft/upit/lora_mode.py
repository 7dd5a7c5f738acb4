"""The stages of a recipe whose experts are LoRA matrices: a MoE-LoRA adapter comes out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from accelerate import PartialState
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, set_seed

from ..adapter.convert import lora_to_moe
from . import inputs
from .expand import expand_experts
from .mode import Mode, metrics, write_buckets
from .post_train import post_train
from .router_init import init_router

# MoELoraConfig fields that follow from the experts when LoRA adapters are stacked.
_FROM_EXPERTS = ("r", "lora_alpha", "use_rslora", "target_projections", "init_lora_weights")


class LoraMode(Mode):
    result = "adapter"

    def expand(self, folder: Path) -> dict[str, Any]:
        section = self.recipe.expand
        descents = []
        if PartialState().is_main_process:
            initial = self.root / "prepare" / "initial"
            descents = expand_experts(
                self.experts(),
                output_dir=folder,
                num_experts=self.recipe.num_experts,
                method=section.method,
                similarity=section.similarity or "update",
                drop_rate=0.2 if section.drop_rate is None else section.drop_rate,
                seed=inputs.stage_seed(self.recipe, "expand"),
                initial=initial if "prepare" in self.run.records else None,
            )[1]
        PartialState().wait_for_everyone()
        return {"descents": [descent.as_dict() for descent in descents]}

    def router_init(self, folder: Path) -> dict[str, Any]:
        r, section = self.recipe, self.recipe.router_init
        model = self._assemble("router_init")
        args = self.run.sft_config(
            "router_init", folder, num_train_epochs=section.num_train_epochs, packing=False, padding_free=False
        )
        result = init_router(
            model,
            self.seed_data(),
            args,
            self.run.tokenizer,
            buckets=section.buckets,
            objective=section.objective,
            alpha=section.alpha,
            train_experts=section.train_experts,
            capacity=section.capacity,
            label_column=r.data.label_column,
            expert_map=section.expert_map,
        )
        if args.should_save:
            shutil.copytree(
                result.trained.checkpoints[max(result.trained.checkpoints)],
                folder / "adapter",
                ignore=lambda _, names: [name for name in names if not name.startswith("adapter_")],
            )
            write_buckets(folder, result.buckets, result.perplexity)
        PartialState().wait_for_everyone()
        return {"bucket_sizes": [len(bucket) for bucket in result.buckets], **metrics(result.trained)}

    def post_train(self, folder: Path) -> dict[str, Any]:
        r = self.recipe
        if "router_init" in self.run.records:
            base = inputs.load_model(r.model)
            model = PeftModel.from_pretrained(base, self.root / "router_init" / "adapter", is_trainable=True)
        else:
            model = self._assemble("post_train")
        trained = post_train(
            model,
            self.run.train_data,
            self.run.sft_config("post_train", folder, num_train_epochs=self.run.budget.post_train),
            self.run.tokenizer,
            output_dir=folder / "adapter",
            train_experts=r.trains_experts,
        )
        return metrics(trained)

    def load_result(self, folder: Path) -> tuple[PeftModel, None]:
        return PeftModel.from_pretrained(inputs.load_model(self.recipe.model), folder), None

    def sizes(self, model: PreTrainedModel) -> dict[str, tuple[int, int]]:
        adapted = get_peft_model(model, self.lora_config(model))
        lora = adapted.get_nb_trainable_parameters()[0]
        adapted.unload()
        sizes = {"prepare": (lora, lora)}
        if self.recipe.kind == "dense":
            return sizes
        adapted = get_peft_model(model, self.recipe.moe_config())
        parts = {name: p.numel() for name, p in adapted.named_parameters() if p.requires_grad}
        adapted.unload()
        moe, routers = sum(parts.values()), sum(size for name, size in parts.items() if "moe_lora_router" in name)
        sizes["router_init"] = (moe, moe if self.recipe.router_init.train_experts else routers)
        return {**sizes, "post_train": (moe, moe if self.recipe.trains_experts else routers)}

    # --- parts ------------------------------------------------------------------------------------------------------

    def _assemble(self, stage: str) -> PeftModel:
        """The base with all experts in one MoE adapter and random routers; with fresh experts where there are none."""
        r = self.recipe
        model = inputs.load_model(r.model)
        set_seed(inputs.stage_seed(r, stage))
        if r.kind == "fresh":
            return get_peft_model(model, r.moe_config())
        settings = {key: value for key, value in r.adapter.items() if key not in _FROM_EXPERTS}
        return lora_to_moe(model, self.experts(), task_type="CAUSAL_LM", **settings)

    def lora_config(self, model: PreTrainedModel) -> LoraConfig:
        """Stage 1's LoRA: what one expert of the MoE adapter is."""
        moe = self.recipe.moe_config()
        return LoraConfig(
            r=moe.r,
            lora_alpha=moe.lora_alpha,
            lora_dropout=moe.lora_dropout,
            use_rslora=moe.use_rslora,
            init_lora_weights=moe.init_lora_weights,
            target_modules=inputs.ffn_projections(model, moe.target_projections),
            task_type="CAUSAL_LM",
        )
