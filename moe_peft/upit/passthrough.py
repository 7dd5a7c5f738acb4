"""Sections of a recipe whose keys are fields of other configurations: which ones it may set, and why not the others."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peft import PeftConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig

from ..adapter.config import EXPERT_FIELDS, MoELoraConfig
from ..messages import unknown_key
from ..native.upcycle import UpcycleConfig
from ..routing.routers import RouterSettings
from ..training.limits import check_settings
from ..training.sft import MoESFTConfig


@dataclass(frozen=True)
class Passthrough:
    """
    The keys of one section.

    Args:
        fields: all fields of the configuration that gets them.
        decided: field → what to do instead, for fields that the recipe decides.
        documented: where the fields are documented, if they are too many to list.
        arguments: the class of training arguments that the fields are of; other configurations check their values.
    """

    fields: frozenset[str]
    decided: Mapping[str, str]
    documented: str | None = None
    arguments: type | None = None

    def check(self, path: str, settings: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: a key is no field, or the recipe decides it; or a value cannot be.
        """
        for key in settings:
            if key in self.decided:
                raise ValueError(f"{path}.{key}: {self.decided[key]}")
            if key not in self.fields:
                raise ValueError(unknown_key(f"{path}.{key}", self.fields - self.decided.keys(), self.documented))
        if self.arguments is not None:
            check_settings(self.arguments, settings, f"{path}.")


def _names(configuration: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(configuration))


def _for_each(fields: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(fields.split(), reason)


ADAPTER = Passthrough(
    _names(MoELoraConfig),
    {
        **dict.fromkeys(_names(PeftConfig), "PEFT sets this"),
        "num_experts": "set the recipe's num_experts",
        "expert_type": "the method decides this; `method: pesc` has bottleneck experts",
        **_for_each(
            "target_modules exclude_modules layers_to_transform layers_pattern",
            "a recipe adapts the FFNs of all layers; choose their projections with target_projections",
        ),
        **_for_each(
            "num_experts_pattern rank_pattern alpha_pattern", "the experts of a recipe are alike in all layers"
        ),
        "modules_to_save": "an expert cannot hold whole modules; leave it out",
    },
)
# What `lora_to_moe` reads off the LoRA adapters that it stacks; their values are given, so they need no initial ones.
FROM_EXPERTS = frozenset(EXPERT_FIELDS)
# What has no meaning for other experts than LoRAs, or than bottlenecks, and would be refused.
OF_LORAS = frozenset({"mixing", "target_projections"})
OF_BOTTLENECKS = frozenset({"bottleneck_size"})

ROUTER = Passthrough(_names(RouterSettings), {"attention_size": "it follows from the model"})
MOE = Passthrough(
    _names(UpcycleConfig),
    {
        "num_experts": "set the recipe's num_experts",
        "router_weights": "stage 3 makes the routers; `router_init` says how",
        "seed": "set post_train.seed",
    },
)

_BUDGET = "the recipe's budget and resuming decide this; use num_train_epochs, prepare_share and seed"
SFT = Passthrough(
    _names(SFTConfig),
    {
        **_for_each(
            "output_dir max_steps num_train_epochs save_strategy save_total_limit save_only_model seed data_seed "
            "resume_from_checkpoint load_best_model_at_end remove_unused_columns train_sampling_strategy "
            "auto_find_batch_size",
            _BUDGET,
        ),
        "router_aux_loss_coef": (
            "set adapter.router_aux_loss_coef in the mode 'lora', moe.router_aux_loss_coef in the mode 'ffn'"
        ),
        "model_init_kwargs": "set the fields of the section `model`",
        **_for_each(
            "eval_strategy eval_on_start eval_steps eval_delay do_eval",
            "stages have no evaluation data; the section `evaluate` says what is measured",
        ),
        **_for_each(
            "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision",
            "push the result's folder when the run is done",
        ),
        "trust_remote_code": "code that comes with a model or with data is never run; leave it out",
    },
    documented="TRL's SFTConfig",
    arguments=SFTConfig,
)

# Stage 4 also takes the routers' losses.
POST_TRAIN = Passthrough(
    SFT.fields | _names(MoESFTConfig),
    {
        **SFT.decided,
        "label_column": "set data.label_column",
        "training_stage": "set post_train.train_experts",
    },
    documented="TRL's SFTConfig and moe_peft's MoESFTConfig",
    arguments=MoESFTConfig,
)

QUANTIZATION = Passthrough(frozenset(inspect.signature(BitsAndBytesConfig).parameters) - {"kwargs"}, {})
