"""Recipes: which ones are refused, and with which message."""

from __future__ import annotations

import pytest
import yaml

from moe_peft.upit import load_recipe, recipe_from_dict
from moe_peft.upit.buckets import BUCKETS
from moe_peft.upit.context import budget
from tests.helpers.close import near

MINIMAL = {"output_dir": "out", "model": {"name_or_path": "base"}, "data": {"train": "train.jsonl"}}


def recipe(**settings):
    return recipe_from_dict({**MINIMAL, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_expert": 4}, "num_expert: unknown key; did you mean 'num_experts'?"),
        ({"prepare": {"selectoin": "uniform"}}, "prepare.selectoin: unknown key; did you mean 'selection'?"),
        ({"sft": {"learning_rat": 1}}, "sft.learning_rat: unknown key; did you mean 'learning_rate'?"),
        (
            {"post_train": {"sft": {"foo": 1}}},
            "^post_train.sft.foo: unknown key; see TRL's SFTConfig and moe_peft's MoESFTConfig$",
        ),
        (
            {"sft": {"router_aux_loss_coef": 0.1}},
            "sft.router_aux_loss_coef: set adapter.router_aux_loss_coef in the mode 'lora', "
            "moe.router_aux_loss_coef in the mode 'ffn'",
        ),
        (
            {"post_train": {"sft": {"max_steps": 9}}},
            "post_train.sft.max_steps: the recipe's budget and resuming decide",
        ),
        ({"adapter": {"rank": 3}}, "^adapter.rank: not a setting here; instead: r, the rank of one expert.{,60}$"),
        ({"lora_r": 3}, r"^lora_r: not a setting here; instead: adapter\.r"),
        ({"base_model": "x", "zzz": 1}, r"^base_model: .*instead: model\.name_or_path \| zzz: unknown key"),
        ({"adapter": {"rank": 3, "num_experts": 2}, "sft": {"x": 1}}, r"^adapter\.num_experts: .* \| sft\.x: unknown"),
        ({"adapter": {"num_experts": 3}}, "adapter.num_experts: set the recipe's num_experts"),
        ({"adapter": {"target_modules": ["mlp"]}}, "adapter.target_modules: a recipe adapts the FFNs of all layers"),
        (
            {"adapter": {"expert_type": "bottleneck"}},
            "adapter.expert_type='bottleneck': must be 'lora' with the method 'upit'",
        ),
        ({"method": "pesc", "adapter": {"bottleneck_size": 0}}, "bottleneck_size=0"),
        ({"mode": "ffn", "method": "pesc"}, "method='pesc': must be one of sft, upcycle_pt"),
        ({"adapter": {"peft_type": "LORA"}}, "adapter.peft_type: PEFT sets this"),
        ({"moe": {"top_k": 1}}, r"moe=\{'top_k': 1\}: must be left out in the mode 'lora': use the section adapter"),
        ({"mode": "dense"}, "mode='dense': must be 'lora' or 'ffn'"),
        (
            {
                "mode": "ffn",
                "router_init": {"buckets": "none"},
                "moe": {"router_init": "zeros"},
                "post_train": {"router": {"type": "sigmoid"}},
                "adapter": {},
            },
            "moe.router_init='zeros': must be left out beside post_train.router",
        ),
        ({"prepare": {"selection": "best"}}, "prepare.selection='best': must be one of back_half, uniform, front_half"),
        (
            {"router_init": {"buckets": "domain"}},
            "router_init.buckets='domain': must be one of perplexity, label, random, none",
        ),
        ({"adapter": {"r": 0}}, "r=0"),
        ({"adapter": {"top_k": 9}}, "top_k=9"),
        ({"adapter": {"base_expert": True}}, "adapter.base_expert: a recipe's experts are all trained"),
        ({"method": "mola"}, "method='mola': must be one of lora, loramoe_pt, loramoe_sft, upit, self_moe, pesc, mean"),
        ({"num_experts": "many"}, "num_experts='many': must be a valid integer"),
        ({"num_experts": 1}, "num_experts=1: must be at least 2"),
        ({"prepare_share": 1.0}, "prepare_share=1.0: must be below 1"),
        ({"prepare_share": 0.0}, "prepare_share=0.0: must be above 0"),
        ({"num_train_epochs": 0}, "num_train_epochs=0: must be above 0"),
        ({"prepare": {"num_checkpoints": 0}}, "prepare.num_checkpoints=0: must be at least 1"),
        ({"router_init": {"alpha": 1.1}}, "router_init.alpha=1.1: must be at most 1"),
        ({"expand": {"drop_rate": 1.0}}, "expand.drop_rate=1.0: must be below 1"),
        ({"router_init": {"seed_fraction": 0}}, "router_init.seed_fraction=0: must be above 0"),
        ({"router_init": {"buckets": "label"}}, "data.label_column=None"),
        ({"prepare": {"adapters": []}}, r"prepare.adapters=\[\]: must have at least 1 item"),
        ({"prepare": {"num_experts": 4}, "expand": {"method": "none"}}, "stage 1 gives 4, expand.method='none'"),
        ({"prepare": {"num_experts": 9}}, "num_experts=8: stage 1 gives 9; ask for that many or more"),
        ({"prepare": {"num_experts": 1}}, "stage 1 gives 1, expansion needs two"),
        (
            {"method": "self_moe", "prepare": {"num_experts": 4}, "expand": {"method": "none"}},
            "stage 1 gives 4, expand.method='none'",
        ),
        ({"prepare": {"adapters": ["a", "b"], "num_experts": 2}}, "prepare.num_experts=2: must be null: experts are"),
        ({"prepare": {"adapters": ["a", "b"], "num_checkpoints": 4}}, "prepare.num_checkpoints=4: must be null"),
        (
            {"router_init": {"expert_map": {"a": [0, 1]}}},
            "router_init.buckets='perplexity': must be 'label' with router_init.expert_map",
        ),
        ({"router_init": {"num_train_epochs": 0}}, "router_init.num_train_epochs=0: must be at least 1"),
        ({"sft": {"save_steps": 0.1}}, "sft.save_steps=0.1: must be a whole number of at least 1"),
        ({"prepare": {"sft": {"save_steps": 0}}}, "sft.save_steps=0: must be"),
        ({"model": {"name_or_path": "m", "dtype": "bf16"}}, "model.dtype='bf16': must be 'auto', 'float32'"),
        (
            {"model": {"name_or_path": "m", "quantization": {"load_in_4bits": True}}},
            "model.quantization.load_in_4bits: unknown key; did you mean 'load_in_4bit'?",
        ),
        ({"model": {}}, "model.name_or_path: must be given"),
        ({"data": {"train": 3}}, "data.train=3"),
        ({"router_init": 3}, "router_init=3"),
    ],
)
def test_wrong_settings_are_refused_by_name_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as raised:
        recipe(**settings)
    assert "\n" not in str(raised.value)


def test_settings_of_loras_in_a_shared_recipe_do_not_apply_to_bottlenecks():
    adapter = {"r": 2, "mixing": "projection", "target_projections": ["up_proj"], "bottleneck_size": 6, "top_k": 3}
    config = recipe(method="pesc", adapter=adapter).moe_config()
    assert (config.expert_type, config.bottleneck_size, config.top_k) == ("bottleneck", 6, 3)
    assert (config.mixing, config.target_projections) == ("output", None)
    lora = recipe(method="loramoe_pt", adapter=adapter).moe_config()
    assert (lora.expert_type, lora.mixing, lora.target_projections) == ("lora", "projection", {"up_proj"})


def test_new_experts_may_be_of_any_kind():
    config = recipe(method="loramoe_pt", adapter={"expert_type": "hydra_lora", "bottleneck_size": 6}).moe_config()
    assert config.expert_type == "hydra_lora"


def test_yaml_and_overrides(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "sft": {"packing": False}}) + "num_train_epochs: 2e0\n")
    loaded = load_recipe(path, ["sft.learning_rate=1e-4", "prepare.selection=uniform", "method=lora", "num_experts=6"])
    assert loaded.sft == {"packing": False, "learning_rate": 1e-4}
    assert (loaded.num_train_epochs, loaded.prepare.selection, loaded.method, loaded.num_experts) == (
        2,
        "uniform",
        "lora",
        6,
    )
    for override, message in (
        ("foo", "an override is key=value"),
        ("=4", "an override is key=value"),
        ("method.x=1", "'method' is not a section"),
    ):
        path.write_text(yaml.safe_dump({**MINIMAL, "method": "upit"}))
        with pytest.raises(ValueError, match=message):
            load_recipe(path, [override])
    with pytest.raises(ValueError, match=r"'method=\[': cannot be read as YAML: while parsing a flow"):
        load_recipe(path, ["method=["])
    path.write_text("a: [1\n")
    with pytest.raises(ValueError, match="while parsing a flow sequence") as raised:
        load_recipe(path)
    assert "\n" not in str(raised.value)
    path.write_text("- 1\n")
    with pytest.raises(ValueError, match="must be a mapping of keys"):
        load_recipe(path)
    with pytest.raises(ValueError, match="no such file"):
        load_recipe(tmp_path / "none.yaml")


def test_every_method_has_the_same_budget():
    for method in ("upit", "lora", "loramoe_pt", "loramoe_sft", "self_moe", "pesc"):
        passes = budget(recipe(method=method, num_train_epochs=4, prepare_share=0.5), 1000)
        assert passes.prepare + passes.post_train == 4, method
        within = recipe(method=method, num_train_epochs=4, router_init={"within_budget": True})
        passes = budget(within, 1000)
        assert passes.prepare + passes.router_init + passes.post_train == near(4), method
    upit = budget(recipe(router_init={"seed_fraction": 0.1, "num_train_epochs": 4}), 1000)
    assert (upit.prepare, upit.router_init, upit.post_train) == (2, 0.4, 2)
    assert budget(recipe(), 100).router_init == 8 / 100 * 4  # never less than one example an expert
    passes = budget(recipe(prepare={"adapters": ["a", "b"]}, router_init={"buckets": "none"}), 1000)
    assert (passes.prepare, passes.router_init, passes.post_train) == (0, 0, 4)
    with pytest.raises(ValueError, match="no passes are left for stage 4"):
        budget(recipe(router_init={"seed_fraction": 1, "num_train_epochs": 2, "within_budget": True}), 1000)


def test_plugins_are_imported_first(tmp_path, monkeypatch):
    """They may add what the rest of the recipe names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_buckets.py").write_text(
        "from moe_peft.upit.buckets import BUCKETS, BucketRule\n"
        "BUCKETS['mine'] = BucketRule(lambda seeds: [[] for _ in range(seeds.num_experts)])\n"
    )
    try:
        read = recipe(plugins=["my_buckets"], router_init={"buckets": "mine"})
        assert read.router_init.rule is BUCKETS["mine"]
    finally:
        BUCKETS.pop("mine", None)
    with pytest.raises(ValueError, match=r"^plugins='no_such_module': cannot be imported"):
        recipe(plugins=["no_such_module"])


def test_a_quantization_without_bits_is_refused_before_the_model_is_read():
    base = recipe(model={"name_or_path": "nowhere", "quantization": {"bnb_4bit_quant_type": "nf4"}}).base
    with pytest.raises(ValueError, match=r"^model\.quantization=\{.*\}: give load_in_4bit or load_in_8bit"):
        base.load()
