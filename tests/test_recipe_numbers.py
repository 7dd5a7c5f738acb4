"""The numbers of the recipes are those of their sources, each with the words that it is from."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from moe_peft.routing.expert_map import read_expert_map

RECIPES = Path(__file__).parents[1] / "recipes"
# UpIT, section 3.1, for both modes.
_UPIT = {
    "sft.lr_scheduler_type": ("constant", "a constant learning rate of 2e-4 and 2e-5"),
    "sft.max_length": (2048, "a context length of 2048"),
    "num_train_epochs": (4, "trained for 4 epochs in total"),
    "prepare_share": (0.5, "first train the dense model for 2 epochs"),
    "prepare.selection": ("back_half", "checkpoints between epochs 1 and 2"),
    "router_init.alpha": (0.5, "the balance coefficient, which we set to 0.5"),
    "router_init.seed_fraction": (0.01, "1 % of the training data"),
    "router_init.num_train_epochs": (4, "4 epochs of the routing vectors"),
    "router_init.buckets": ("perplexity", "Algorithm 3"),
}
_ADAM = {
    "sft.adam_beta1": (0.9, "β1 = 0.9"),
    "sft.adam_beta2": (0.95, "β2 = 0.95"),
    "sft.adam_epsilon": (1e-8, "ε = 1e-8"),
    "sft.weight_decay": (0.1, "weight decay of 0.1"),
    "sft.max_grad_norm": (1.0, "gradient clipping of 1.0"),
    "sft.max_length": (4096, "sequence length of 4096"),
}
# Recipe → key → value and the source's words.
NUMBERS = {
    "upit/llama2-7b-paper": _UPIT
    | {
        "sft.learning_rate": (2e-4, "2e-4 for LoRA-based settings"),
        "num_experts": (8, "8 experts"),
        "adapter.top_k": (2, "2 activated"),
    },
    "upit/sheared-llama-2.7b-paper-ffn": _UPIT
    | {
        "sft.learning_rate": (2e-5, "2e-5 for FFN-based settings"),
        "num_experts": (4, "4 experts"),
        "moe.top_k": (2, "2 activated"),
    },
    "upcycling/drop-upcycling": _ADAM
    | {
        "num_experts": (8, "8 experts"),
        "moe.top_k": (2, "top-2"),
        "moe.drop_rate": (0.5, "the re-initialization ratio r = 0.5"),
        "moe.router_init": ("uniform", "a uniform distribution with a standard deviation of 0.02"),
        "moe.router_init_std": (0.02, "a uniform distribution with a standard deviation of 0.02"),
        "moe.router_aux_loss_coef": (0.02, "load balancing loss coefficient 0.02"),
        "sft.learning_rate": (2e-4, "from 2e-4"),
        "sft.lr_scheduler_kwargs.min_lr": (2e-5, "to 2e-5, cosine"),
    },
    "upcycling/router-upcycling": _ADAM
    | {
        "num_experts": (8, "8 experts"),
        "moe.top_k": (2, "2 activated"),
        "moe.init": ("copy", "copies of the FFN"),
        "moe.router_init": ("attention", "queries and mean keys of the dense model"),
        "post_train.router.type": ("attention", "a mixture of attention routers"),
        "post_train.router.num_heads": (8, "m = n = 8"),
        "moe.router_aux_loss_coef": (0.02, "an auxiliary loss of 0.02"),
        "post_train.sft.router_z_loss_coef": (0.001, "and a router z-loss of 0.001"),
        "sft.learning_rate": (5e-4, "a maximum of 5e-4"),
        "data.calibration_examples": (10 * 1024, "10 batches of 1024"),
        "data.calibration_length": (4096, "sequence length 4096"),
        "post_train.sft.router_schedule": ("step_decay", "warm-up-and-step-decay"),
    },
    "upcycling/three-phase": {
        "num_experts": (8, "8 experts"),
        "moe.top_k": (2, "top 2"),
        "moe.noise_scale": (0.01, "noise_scale=0.01"),
        "moe.router_init_std": (0.01, "std=0.01"),
        "moe.router_aux_loss_coef": (0.01 / 2, "0.01, of a loss that divides by k"),
        "post_train.sft.router_z_loss_coef": (0.001, "z-loss 0.001"),
        "post_train.sft.router_schedule": ("three_phase", "warm-up, specialization, refinement"),
        "sft.learning_rate": (2e-5, "2e-5"),
    },
    "sft/label-routing-llama3.2-1b": {
        "stages.routers.learning_rate": (5e-4, "a fixed rate of 5e-4"),
        "stages.routers.num_train_epochs": (1, "one pass"),
        "per_device_train_batch_size": (4, "batch size 4"),
        "gradient_accumulation_steps": (8, "8 accumulation steps"),
        "lr_scheduler_type": ("constant", "a fixed rate"),
        "router_label_tokens": ("completion", "on response tokens"),
    },
}
# Rows of a batch; on 8 GPUs but for the last.
BATCHES = {
    "upit/llama2-7b-paper": 128, "upit/sheared-llama-2.7b-paper-ffn": 128, "upcycling/drop-upcycling": 1024,
    "upcycling/router-upcycling": 1024,
}  # fmt: skip


def settings_of(recipe: str) -> dict:
    return yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())


def numbers() -> list:
    return [(recipe, key, value) for recipe, own in NUMBERS.items() for key, (value, _) in own.items()]


@pytest.mark.parametrize(("recipe", "key", "value"), numbers(), ids=str)
def test_a_number_is_its_sources(recipe, key, value):
    found = settings_of(recipe)
    for part in key.split("."):
        found = found[part]
    assert type(found) is type(value) and found == value


@pytest.mark.parametrize("recipe", BATCHES)
def test_batches_are_the_sources(recipe):
    sft = settings_of(recipe)["sft"]
    assert sft["per_device_train_batch_size"] * sft["gradient_accumulation_steps"] * 8 == BATCHES[recipe]


def test_labels_have_two_experts_of_six_each():
    found = read_expert_map(settings_of("sft/label-routing-llama3.2-1b")["expert_map"], 6, "expert_map")
    assert {name: list(experts) for name, experts in found.items()} == {
        "math": [0, 1],
        "code": [2, 3],
        "medical": [4, 5],
    }
