"""Settings that an adapter would silently not read."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from moe_peft import MoELoraConfig
from moe_peft.routing import RouterSettings


@pytest.mark.parametrize("settings, words", [
    ({"router_type": "switch", "mixing": "projection", "top_k": 3}, "top_k=3: router_type='switch' has top_k=1"),
    ({"router_type": "soft", "top_k": 3}, "top_k=3: router_type='soft' has top_k=8"),
    ({"router_type": "hash", "router_aux_loss_coef": 0.5}, "router_aux_loss_coef=0.5: router_type='hash'"),
    ({"router_threshold": 0.5}, "router_threshold=0.5: router_type='linear' has no use for it"),
    ({"router_type": "top_p", "router_capacity_factor": 1.0}, "router_capacity_factor=1.0: router_type='top_p' has no"),
    ({"router_type": "hash", "router_jitter_noise": 0.5}, "router_jitter_noise=0.5: router_type='hash' reads"),
    ({"router_type": "hash", "normalize_top_k": False}, "normalize_top_k=False: router_type='hash' reads only token"),
])  # fmt: skip
def test_settings_that_a_router_does_not_read_raise_but_load_from_saved_adapters(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        MoELoraConfig(**settings)
    assert MoELoraConfig(**settings, inference_mode=True).router_type == settings.get("router_type", "linear")


def test_lora_experts_have_no_bottleneck():
    with pytest.raises(ValueError, match="bottleneck_size=32: expert_type='lora' has no use for it"):
        MoELoraConfig(bottleneck_size=32)


def test_a_loras_arguments_are_accepted_where_they_ask_for_nothing():
    arguments = {"r": 4, "lora_dropout": 0.1, "bias": "none", "fan_in_fan_out": False, "use_dora": False}
    arguments |= {"target_parameters": None}
    assert MoELoraConfig(**arguments, task_type="CAUSAL_LM") == MoELoraConfig(
        r=4, lora_dropout=0.1, task_type="CAUSAL_LM"
    )
    assert not {"bias", "use_dora"} & MoELoraConfig(**arguments).to_dict().keys()
    for name, value in (("bias", "all"), ("use_dora", True)):
        with pytest.raises(ValueError, match=f"MoELoraConfig: {name}={value!r}: LoRA experts have no such setting"):
            MoELoraConfig(**{name: value})


def test_every_setting_of_routers_is_one_of_a_config_and_reaches_the_router():
    settings = {"jitter_noise": 0.1, "num_heads": 3, "mixture": "max", "bias_update_rate": 0.1}
    config = MoELoraConfig(router_type="attention", **{f"router_{name}": value for name, value in settings.items()})
    assert config.expert_spec("mlp").router == RouterSettings("attention", **settings)


def test_the_routers_settings_are_the_configs():
    """Those with a help text, with the prefix `router_`: types, defaults, what is allowed, and the text."""
    ours = {each.name: each for each in fields(MoELoraConfig)}
    for theirs in (each for each in fields(RouterSettings) if "help" in each.metadata):
        field = ours[f"router_{theirs.name}"]
        assert (field.type, field.default, field.metadata) == (theirs.type, theirs.default, theirs.metadata), field.name
