"""Files of strangers are read by names and patterns that end."""

from __future__ import annotations

import json

import pytest
from peft import LoraConfig

from moe_peft.utils.loading import read_adapter_config

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
