"""Exported models without this package: in transformers alone, and in another implementation of the architectures."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from moe_peft.native import export_adapter, upcycle
from tests.helpers.native_case import IDS, adapter, dense_model, logits, saved

# Run with the model's folder, a file of tokens and one for logits; importing the package raises ImportError there.
BARRED = """
import sys
sys.modules["moe_peft"] = None
import numpy as np
try:
    import moe_peft
    sys.exit("it can be imported")
except ImportError:
    pass
"""
TRANSFORMERS = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
np.save(sys.argv[3], model(input_ids=torch.tensor(np.load(sys.argv[2]))).logits.detach().numpy())
"""
MLX = """
from pathlib import Path
import mlx.core as mx
from mlx_lm.utils import load_model
mx.set_default_device(mx.cpu)
model, _ = load_model(Path(sys.argv[1]))
np.save(sys.argv[3], np.array(model(mx.array(np.load(sys.argv[2])))))
"""
# What mlx-lm reads of a family: no sliding windows in these, no rope scaling or own head size in Mixtral's, and in
# Qwen2-MoE's no gates that sum to 1.
PLAIN = {
    "llama": {"head_dim": None, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "granite": {},
}


def elsewhere(script: str, model: str, tmp_path) -> torch.Tensor:
    np.save(tmp_path / "ids.npy", IDS.numpy())
    files = [str(tmp_path / name) for name in ("ids.npy", "logits.npy")]
    subprocess.run([sys.executable, "-c", BARRED + script, str(model), *files], check=True)
    return torch.tensor(np.load(tmp_path / "logits.npy"))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "granite"])
def test_transformers_alone_computes_what_the_adapter_does(kind, tmp_path):
    name = saved(dense_model(kind), tmp_path / "base")
    model = adapter(dense_model(kind), tmp_path / "adapter", name)
    assert_close(
        elsewhere(TRANSFORMERS, export_adapter(tmp_path / "adapter", tmp_path / "moe"), tmp_path), logits(model)
    )


@pytest.mark.parametrize("kind", PLAIN)
def test_mlx_lm_computes_what_the_adapter_does(kind, tmp_path):
    pytest.importorskip("mlx_lm", reason="mlx-lm has no wheel for this machine")
    own = {"normalize_top_k": False} if kind == "qwen2" else {}
    name = saved(dense_model(kind, **PLAIN[kind]), tmp_path / "base")
    model = adapter(dense_model(kind, **PLAIN[kind]), tmp_path / "adapter", name, **own)
    assert_close(elsewhere(MLX, export_adapter(tmp_path / "adapter", tmp_path / "moe"), tmp_path), logits(model))


def test_mlx_lm_computes_what_the_upcycled_dense_model_did(tmp_path):
    pytest.importorskip("mlx_lm", reason="mlx-lm has no wheel for this machine")
    name = saved(dense_model("llama", **PLAIN["llama"]), tmp_path / "dense")
    assert_close(elsewhere(MLX, upcycle(name, tmp_path / "moe"), tmp_path), logits(name))
