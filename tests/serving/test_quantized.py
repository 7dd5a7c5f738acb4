"""vLLM serves adapters on GPTQ and AWQ bases as PEFT computes them on the dequantized weights."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.helpers.native_case import adapter, dense_model, saved

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM has an environment of its own", allow_module_level=True)
if not torch.cpu._is_avx512_supported():
    pytest.skip("vLLM's kernels for 4-bit weights on a CPU need AVX-512", allow_module_level=True)

from tests.helpers.vllm_case import KINDS, PROMPTS, SIZE, distributions, engine, expected

GROUP = 32  # input features that share a scale
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in an integer


def packed(values: torch.Tensor, dim: int, order=range(8)) -> torch.Tensor:
    """Eight values of 4 bits in each int32."""
    eights = values.long().movedim(dim, -1).unflatten(-1, (-1, 8))[..., list(order)]
    words = (eights << (4 * torch.arange(8))).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int().movedim(-1, dim).contiguous()


def quantized(model, folder: Path, method: str) -> str:
    """Round the linears of a model to 4 bits, and save it in the method's format."""
    tensors: dict[str, torch.Tensor] = {}
    for name, linear in model.model.layers.named_modules(prefix="model.layers"):
        if not isinstance(linear, nn.Linear):
            continue
        groups = linear.weight.detach().T.unflatten(0, (-1, GROUP))  # [groups, 32, out]
        scales = (groups.abs().amax(1) / 7).bfloat16()
        steps = (groups / scales[:, None].float()).round().clamp(-8, 7)
        linear.weight.data = (steps * scales[:, None].float()).flatten(0, 1).T.contiguous()
        values, zeros = steps.flatten(0, 1) + 8, torch.full_like(scales, 8)
        of_linear = {"scales": scales}
        if method == "gptq":  # which stores zero points less one
            of_linear |= {"qweight": packed(values, 0), "qzeros": packed(zeros - 1, 1)}
            of_linear["g_idx"] = (torch.arange(len(values)) // GROUP).int()
        else:
            of_linear |= {"qweight": packed(values, 1, AWQ_ORDER), "qzeros": packed(zeros, 1, AWQ_ORDER)}
        tensors |= {f"{name}.{key}": tensor for key, tensor in of_linear.items()}
    saved(model, folder)
    file = folder / "model.safetensors"
    kept = {k: v for k, v in load_file(file).items() if f"{k.removesuffix('.weight')}.qweight" not in tensors}
    save_file(kept | tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
        "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    }[method]
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def error(outputs, reference) -> float:
    """The largest difference of prompts' log-probabilities, by the largest of them."""
    tables = [(table, of_reference) for (_, table), (_, of_reference) in zip(outputs, reference, strict=True)]
    errors = [
        (table[: len(ids) - 1] - exact[: len(ids) - 1]).abs().max() / exact.abs().max()
        for ids, (table, exact) in zip(PROMPTS, tables, strict=True)
        if len(ids) > 1
    ]
    return float(max(errors))


# All experts are active: near to a tie, another rounding takes another expert.
FFN = {"top_k": 4, "num_shared_experts": 1}
LINEARS = {"top_k": 4, "lora_alpha": 1, "target_modules": ["mlp", "q_proj", "k_proj", "v_proj", "o_proj"]}


@pytest.mark.parametrize(
    ("method", "kind", "settings", "options"),
    [
        ("gptq", "llama", FFN, {}),
        ("gptq", "mistral", {**FFN, "mixing": "projection", "lora_alpha": 2}, {"tensor_parallel_size": 2}),
        ("gptq", "qwen3", LINEARS, {}),
        ("awq", "qwen3", FFN, {}),
        ("awq", "llama", LINEARS, {"hf_overrides": {"architectures": ["MoELoraLlamaForCausalLM"]}}),
    ],
)
def test_log_probabilities_are_those_of_peft_on_dequantized_weights(tmp_path, method, kind, settings, options):
    base = dense_model(kind, **SIZE, **KINDS[kind])
    name = quantized(base, tmp_path / "base", method)
    trained_on, folder = name, str(tmp_path / "adapter")
    if "hf_overrides" in options:  # an adapter of the full-precision model, which is not needed
        trained_on = "full/precision"
        folder, options = name, {"hf_overrides": {**options["hf_overrides"], "moe_lora_adapter": folder}}
    model = adapter(base, tmp_path / "adapter", trained_on, **settings)
    reference = [expected(model, ids) for ids in PROMPTS]
    with model.disable_adapter():
        of_base = error([expected(model, ids) for ids in PROMPTS], reference)
    rounding = error([expected(copy.deepcopy(model).bfloat16(), ids) for ids in PROMPTS], reference)
    found = error([*distributions(engine(folder, dtype="bfloat16", **options))], reference)
    assert found < 2 * rounding and 4 * found < of_base
