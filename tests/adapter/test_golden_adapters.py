"""Adapters that earlier versions saved can be loaded and compute the same as when they were saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

import moe_peft  # noqa: F401  (adds the adapter type)
from tests.helpers.models import tiny_llama

ADAPTERS = sorted((Path(__file__).parents[1] / "golden" / "adapters").iterdir())


@pytest.mark.parametrize("folder", ADAPTERS, ids=lambda folder: folder.name)
def test_old_adapter_computes_what_it_did(folder):
    model = PeftModel.from_pretrained(tiny_llama(), folder).eval()
    ids = torch.arange(3, 19).view(2, 8)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, -1, :8]
        base = model.get_base_model()
        with model.disable_adapter():
            plain = base(input_ids=ids).logits[:, -1, :8]
    expected = load_file(folder / "expected.safetensors")["logits"]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert (plain - expected).abs().max() > 1e-3
