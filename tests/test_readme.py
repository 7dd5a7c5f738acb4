"""Every Python snippet of the README runs, in order, where a user would have a base model and a data file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from conftest import tiny_llama

README = Path(__file__).parents[1] / "README.md"


def test_snippets_run(tmp_path, tokenizer):
    tiny_llama(vocab=128).save_pretrained(tmp_path / "my-base-model")
    tokenizer.save_pretrained(tmp_path / "my-base-model")
    rows = [{"text": " ".join(f"w{3 + (7 * i + j) % 120}" for j in range(12))} for i in range(24)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(snippets) >= 6
    # One process: imports are most of the time. Each snippet has a namespace of its own.
    script = "".join(
        f"exec(compile({snippet!r}, 'README snippet {i}', 'exec'), {{}})\n" for i, snippet in enumerate(snippets)
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "'aux_loss'" in result.stdout and "trainable params" in result.stdout
    assert (tmp_path / "lora-prose-again" / "adapter_model.safetensors").exists()
    assert "import moe_peft" in (tmp_path / "out" / "README.md").read_text()
