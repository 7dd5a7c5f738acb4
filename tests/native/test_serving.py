"""Exported models without this package: in transformers alone, and in another implementation of the architectures."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_peft.native import export_adapter, upcycle
from tests.helpers.native_case import IDS, adapter, dense_model, logits, saved

pytestmark = pytest.mark.slow

# Run with a file of tokens and models' folders, each of which gets its logits; the package cannot be imported there.
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
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    np.save(folder + "/logits.npy", model(input_ids=torch.tensor(np.load(sys.argv[1]))).logits.detach().numpy())
"""
MLX = """
from pathlib import Path
import mlx.core as mx
from mlx_lm.utils import load_model
mx.set_default_device(mx.cpu)
for folder in sys.argv[2:]:
    model, _ = load_model(Path(folder))
    np.save(folder + "/logits.npy", np.array(model(mx.array(np.load(sys.argv[1])))))
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


def elsewhere(script: str, folders: list[str], tmp_path: Path) -> None:
    """Have a process without this package write each folder's logits: starting it takes most of the time."""
    np.save(tmp_path / "ids.npy", IDS.numpy())
    subprocess.run([sys.executable, "-c", BARRED + script, str(tmp_path / "ids.npy"), *folders], check=True)


def assert_close(folder: str | Path, expected: torch.Tensor) -> None:
    actual = torch.tensor(np.load(Path(folder) / "logits.npy"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def export(kind: str, folder: Path, settings: dict, **adapter_settings) -> tuple[str, torch.Tensor]:
    """The folder of an adapter's export, and the adapter's logits."""
    name = saved(dense_model(kind, **settings), folder / "base")
    model = adapter(dense_model(kind, **settings), folder / "adapter", name, **adapter_settings)
    return str(export_adapter(folder / "adapter", folder / "moe")), logits(model)


def test_transformers_alone_computes_what_the_adapter_does(tmp_path):
    exports = [export(kind, tmp_path / kind, {}) for kind in ("llama", "qwen2", "granite")]
    elsewhere(TRANSFORMERS, [folder for folder, _ in exports], tmp_path)
    for folder, expected in exports:
        assert_close(folder, expected)


@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="mlx-lm has no wheel for this machine")
def test_mlx_lm_computes_what_the_adapter_and_the_dense_model_do(tmp_path):
    exports = [
        export(kind, tmp_path / kind, settings, **({"normalize_top_k": False} if kind == "qwen2" else {}))
        for kind, settings in PLAIN.items()
    ]
    dense = saved(dense_model("llama", **PLAIN["llama"]), tmp_path / "dense")
    exports.append((str(upcycle(dense, tmp_path / "upcycled")), logits(dense)))
    elsewhere(MLX, [folder for folder, _ in exports], tmp_path)
    for folder, expected in exports:
        assert_close(folder, expected)
