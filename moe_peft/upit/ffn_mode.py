"""The stages of a recipe whose experts are whole FFNs: a native MoE checkpoint comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..models.view import router_parameters
from ..native.families import FAMILIES
from ..native.upcycle import check_same_architecture, upcycle, upcycled_config
from ..native.writing import add_older_names, open_dense
from . import inputs
from .buckets import fill_buckets
from .ffn_stages import expand_checkpoints, init_expert_routers, score_checkpoints, tokenize
from .mode import Mode, metrics, write_buckets
from .post_train import post_train
from .stages import STATE

_ROUTERS = "routers.safetensors"


class FFNMode(Mode):
    result = "model"

    def check(self) -> None:
        r = self.recipe
        if r.kind == "dense":
            return
        upcycled_config(inputs.load_config(r.model), r.upcycle_config())
        base = open_dense(str(inputs.model_folder(r.model)), r.moe.get("family"), "upit")
        for folder in r.prepare.given or []:
            check_same_architecture(open_dense(folder, r.moe.get("family"), "upit"), base, "prepare.checkpoints")

    def expand(self, folder: Path) -> dict[str, Any]:
        section = self.recipe.expand
        descents = []
        if PartialState().is_main_process:
            descents = expand_checkpoints(
                self.experts(),
                inputs.model_folder(self.recipe.model),
                output_dir=folder,
                num_experts=self.recipe.num_experts,
                num_layers=inputs.load_config(self.recipe.model).num_hidden_layers,
                method=section.method,
                drop_rate=0.9 if section.drop_rate is None else section.drop_rate,
                seed=inputs.stage_seed(self.recipe, "expand"),
            )[1]
        PartialState().wait_for_everyone()
        return {"descents": [descent.as_dict() for descent in descents]}

    def router_init(self, folder: Path) -> dict[str, Any]:
        r, section = self.recipe, self.recipe.router_init
        args = self.run.sft_config(
            "router_init", folder, num_train_epochs=section.num_train_epochs, packing=False, padding_free=False
        )
        experts = self.experts()
        data = tokenize(self._load, experts[0], self.seed_data(), args, self.run.tokenizer)
        buckets, perplexity = fill_buckets(
            data,
            r.num_experts,
            section.buckets,
            lambda: self._perplexities(folder, data, experts, args),
            seed=args.seed,
            capacity=section.capacity,
            label_column=r.data.label_column,
            expert_map=section.expert_map,
        )
        found = init_expert_routers(
            self._load,
            experts,
            buckets,
            data,
            args,
            self.run.tokenizer,
            output_dir=folder,
            alpha=section.alpha,
            train_experts=section.train_experts,
        )
        if args.should_save:
            save_file({str(layer): weight.contiguous() for layer, weight in found.vectors.items()}, folder / _ROUTERS)
            write_buckets(folder, buckets, perplexity)
        PartialState().wait_for_everyone()
        result: dict[str, Any] = {"bucket_sizes": [len(bucket) for bucket in buckets]}
        if found.trained:  # of the last expert; steps of all
            result |= {**metrics(found.trained[-1]), "steps": sum(max(t.checkpoints) for t in found.trained)}
        return result

    def post_train(self, folder: Path) -> dict[str, Any]:
        r = self.recipe
        assembled = folder / STATE / "assembled"
        if PartialState().is_main_process and not assembled.exists():
            self._assemble(assembled)
        PartialState().wait_for_everyone()
        model = self._load(assembled)
        model.config.output_router_logits = True  # TRL adds the balancing loss then
        model.config.router_aux_loss_coef = r.moe.get("router_aux_loss_coef", 0.01)
        trained = post_train(
            model,
            self.run.train_data,
            self.run.sft_config("post_train", folder, num_train_epochs=self.run.budget.post_train),
            self.run.tokenizer,
            output_dir=folder / "model",
            train_experts=r.trains_experts,
        )
        if PartialState().is_main_process:
            path = folder / "model" / "config.json"
            values = json.loads(path.read_text())
            path.write_text(json.dumps({**values, "output_router_logits": False}))
            add_older_names(path, FAMILIES[model.config.model_type], model.config)
        PartialState().wait_for_everyone()
        return metrics(trained)

    def load_result(self, folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
        return self._load(folder), inputs.load_model(self.recipe.model)

    def sizes(self, model: PreTrainedModel) -> dict[str, tuple[int, int]]:
        base = model.num_parameters()
        sizes = {"prepare": (0, base)}
        if self.recipe.kind == "dense":
            return sizes
        with torch.device("meta"):
            native = AutoModelForCausalLM.from_config(upcycled_config(model.config, self.recipe.upcycle_config())[1])
        vectors = model.config.num_hidden_layers * model.config.hidden_size
        ffns = sum(p.numel() for name, p in model.named_parameters() if ".mlp." in name)
        sizes["router_init"] = (vectors, vectors + (ffns if self.recipe.router_init.train_experts else 0))
        moe, routers = native.num_parameters(), sum(p.numel() for p in router_parameters(native).values())
        return {**sizes, "post_train": (moe - base, moe if self.recipe.trains_experts else routers)}

    # --- parts ------------------------------------------------------------------------------------------------------

    def _load(self, folder: Path) -> PreTrainedModel:
        section = self.recipe.model
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", attn_implementation=section.attn_implementation
        )

    def _perplexities(self, folder: Path, data: Any, experts: list[Path], args: Any) -> torch.Tensor:
        """[S, n]; kept while the stage is not done."""
        kept = folder / STATE / "perplexity.safetensors"
        if not kept.exists():
            found = score_checkpoints(self._load, experts, data, args, self.run.tokenizer)
            if args.should_save:
                kept.parent.mkdir(parents=True, exist_ok=True)
                save_file({"perplexity": found.contiguous()}, kept.with_suffix(".partial"))
                kept.with_suffix(".partial").rename(kept)
            return found
        return load_file(kept)["perplexity"]

    def _assemble(self, folder: Path) -> None:
        """The native MoE before stage 4: its experts from the folders of stage 3, 2 or 1, or copies of the base."""
        r = self.recipe
        seed = inputs.stage_seed(r, "post_train")
        if r.kind == "fresh":
            upcycle(inputs.model_folder(r.model), folder, r.upcycle_config(seed=seed))
            return
        if "router_init" in self.run.records:
            stage = self.root / "router_init"
            experts = [stage / "experts" / str(i) for i in range(r.num_experts)]
            own = {"router_init": "given", "router_weights": str(stage / _ROUTERS)}
        else:
            experts, own = self.experts(), {}
        experts = experts[:1] if r.copies else experts
        upcycle(experts, folder, r.upcycle_config(seed=seed, **own))
