"""Files of strangers are read by names and patterns that end."""

from __future__ import annotations

import json

import pytest
from peft import LoraConfig

from moe_peft import MoELoraConfig
from moe_peft.utils.loading import read_adapter_config
from moe_peft.utils.messages import InputError
from moe_peft.utils.settings import PATTERNS

UNSLOTH = (  # what its adapters have
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|linear).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj)))"
)


@pytest.mark.parametrize("field", ["target_modules", "rank_pattern"])
@pytest.mark.parametrize(
    ("pattern", "ends"),
    [
        (r"(.*.*.*.*.*.*.*.*)*x", False),
        (r".*.*.*.*.*.*.*.*x", False),
        (r"((a|b+)+\.mlp)?", False),
        (r"(?:\w+\.?){2,}x", False),
        (r"(([a-z]+)){0,}x", False),
        (r"(.*\.)?layers\.\d+\.(mlp|self_attn\.[qkv]_proj)", True),
        (r".*(q_proj|v.*)", True),
        (r"(\d+\.){2}[(*+)]*(\(a*\))?", True),
        (UNSLOTH, True),
    ],
)
def test_a_pattern_that_may_take_for_ever_is_refused(pattern, ends, field, tmp_path):
    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    value = pattern if field == "target_modules" else {pattern: 4}
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    if ends:
        read_adapter_config(tmp_path, "adapter")
        return
    with pytest.raises(ValueError, match=f"^adapter: adapter_config.json: {field}=.* may take forever") as error:
        read_adapter_config(tmp_path, "adapter")
    assert "\n" not in str(error.value)


TEXTS = ("target_modules", "exclude_modules", "layers_pattern")


@pytest.mark.parametrize("field", [*TEXTS, "target_projections", "modules_to_save", *PATTERNS])
@pytest.mark.parametrize(
    "wrong", ["[", "(", "*a", "a{2,1}", r"(?P<x", "\\", "(.*)*x", 3, 3.5, True, [3], [None], 0, {3: 1}]
)
def test_what_is_no_name_and_no_regex_is_said_of_files_and_of_configs_alike(field, wrong, tmp_path):
    if field in PATTERNS:
        wrong = {wrong: 1} if isinstance(wrong, str) else wrong
    elif isinstance(wrong, str) and field not in TEXTS:
        wrong = [wrong]
    more = {"layers_to_transform": [0]} if field == "layers_pattern" else {}
    with pytest.raises(InputError, match=f"^MoELoraConfig: {field}=") as error:
        MoELoraConfig(**{"target_modules": ["mlp"], **more, field: wrong})
    assert "\n" not in str(error.value)
    if isinstance(wrong, dict) and 3 in wrong:
        return  # keys of JSON are texts
    for config in (LoraConfig(target_modules=["q_proj"]), MoELoraConfig(target_modules=["mlp"])):
        config.save_pretrained(tmp_path)
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), field: wrong}))
        with pytest.raises(InputError, match=f"^adapter: adapter_config.json: {field}="):
            read_adapter_config(tmp_path, "adapter")


@pytest.mark.parametrize("alpha", [1e39, float("inf"), float("-inf"), float("nan"), 0, -0.0, 1e-50, -1, True, "8", [8]])
def test_an_alpha_is_one_that_half_precision_holds(alpha, tmp_path):
    for settings in ({"lora_alpha": alpha}, {"alpha_pattern": {"mlp": alpha}}):
        with pytest.raises(InputError, match=r"^MoELoraConfig: (lora_alpha|alpha_pattern)="):
            MoELoraConfig(**settings)
        LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        with pytest.raises(
            InputError, match=r"(lora_alpha|alpha_pattern.mlp)=.*: must be a number from 1e-06 to 65536"
        ):
            read_adapter_config(tmp_path, "adapter")
