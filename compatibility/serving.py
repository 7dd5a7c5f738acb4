"""
Which programs compute, from what `moe-peft` writes, what the adapter computes: family × setting × engine.

    python -m compatibility.serving                                 # writes compatibility/results/serving.md
    python -m compatibility.serving --families llama --settings default
    python -m compatibility.serving --folder work --engines vLLM --python ~/vllm/bin/python   # adds a column

Every case is a tiny model with random weights, in float32: an adapter on its base, exported (with "shared experts",
upcycled). An engine gets the folder, or for llama.cpp its GGUF file, and gives the log-probabilities of the next token
after each of twelve. "exact": none differs by more than 1e-5 of the largest. "wrong by x": one differs by x. "refused":
`moe-peft export` writes no such file. "fails": the engine does not load it. What `moe-peft export` says of an engine
(`moe_peft.native.families`) must be what comes out.

An engine is a script that runs in a process of its own, without this package and by any interpreter: `--python` is that
of another environment. The table has all engines whose results are in `--folder`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig

from moe_peft.native import UpcycleConfig, export_adapter, export_gguf, upcycle
from moe_peft.native.families import inexact
from moe_peft.utils.messages import one_line
from tests.helpers.llama_cpp import letters
from tests.helpers.native_case import DENSE, IDS, adapter, dense_model, logits, saved

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "compatibility/results/serving.md"
TOLERANCE = 1e-5
FAMILIES = {
    "llama": "Llama", "mistral": "Mistral", "phi3": "Phi-3", "qwen2": "Qwen2", "qwen3": "Qwen3", "olmo2": "OLMo2",
    "granite": "Granite",
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "tie_word_embeddings": False,
}  # fmt: skip
# What every family's plainest model has beside that.
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": None}, "mistral": {"sliding_window": None}, "phi3": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False}, "qwen3": {"head_dim": 8},
}  # fmt: skip
# Setting → what the dense model and the adapter have; or how it is upcycled.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "tied embeddings": ({"tie_word_embeddings": True}, {}),
    "RoPE scaling (`llama3`)": ({"rope_parameters": DENSE["llama"]["rope_parameters"]}, {}),
    "own `head_dim`": ({"head_dim": 16}, {}),
    "sliding window": ({"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}, {}),
    "one active expert of 3": ({}, {"num_experts": 3, "top_k": 1}),
    "3 active experts of 5": ({}, {"num_experts": 5, "top_k": 3}),
    "2 active experts of 8": ({}, {"num_experts": 8}),
    "`normalize_top_k=False`": ({}, {"normalize_top_k": False}),
    "shared experts": ({}, {"granularity": 2, "num_shared_experts": 2, "init": "drop"}),
    "odd number of fine-grained experts": ({}, {"granularity": 2, "num_shared_experts": 1}),
}

# --- engines ---------------------------------------------------------------------------------------------------------

# Each defines `version` and `log_probs(folder, ids)`, [S, V]; of a text that is too long, of the first tokens.
ENGINES = {
    "transformers": """
import torch, transformers
version = transformers.__version__
def log_probs(folder, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1).detach().numpy()
""",
    "llama.cpp": """
sys.path.insert(0, os.environ["ROOT"])
from importlib.metadata import version as of
from tests.helpers.llama_cpp import LlamaCpp
version = of("xllamacpp") + " (`xllamacpp`)"
def log_probs(folder, ids):
    window = json.load(open(folder + "/config.json")).get("sliding_window")  # of which the last is for the answer
    return LlamaCpp(folder + "/moe.gguf").log_probs(ids[:window - 1] if window else ids, 128).numpy()
""",
    "mlx-lm": """
from importlib.metadata import version as of
from pathlib import Path
import mlx.core as mx, mlx.nn as nn
from mlx_lm.utils import load_model
version = of("mlx-lm")
mx.set_default_device(mx.cpu)
def log_probs(folder, ids):
    return np.array(nn.log_softmax(load_model(Path(folder))[0](mx.array([ids]))[0], axis=-1))
""",
}
_START = "import json, os, sys\nimport numpy as np\nsys.modules['moe_peft'] = None\n"
_LOOP = """
name, ids, root, folders = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4:]
for folder in folders:
    if not os.path.exists(f"{folder}/{name}.refused"):
        try:
            np.save(f"{folder}/{name}.npy", log_probs(folder, ids))
        except Exception as error:
            open(f"{folder}/{name}.fails", "w").write(f"{type(error).__name__}: {error}")
open(f"{root}/{name}.version", "w").write(version)
"""


def run_engine(engine: str, root: Path, folders: Sequence[Path], python: str) -> None:
    """Have an engine write its results into the cases' folders, and its version into `root`."""
    script, ids = _START + ENGINES[engine] + _LOOP, json.dumps(IDS[0].tolist())
    for path in (folder / f"{engine}{end}" for folder in folders for end in (".npy", ".fails")):
        path.unlink(missing_ok=True)
    command = [python, "-c", script, engine, ids, str(root), *map(str, folders)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ROOT": str(ROOT)}, cwd="/")
    if ended.returncode:
        raise RuntimeError(f"{engine}: {ended.stderr[-2000:]}")


# --- cases -----------------------------------------------------------------------------------------------------------


def make(folder: Path, family: str, setting: str) -> Path | None:
    """A case's model, what it should compute, and its GGUF file; None where the family has no such setting."""
    dense, rest = SETTINGS[setting]
    values = {**DENSE[family], **PLAIN, **OF_FAMILY.get(family, {})}
    fields = type(dense_model(family).config)().to_dict()
    if not dense.keys() - {"use_sliding_window", "max_window_layers"} <= fields.keys():
        return None
    try:
        base = dense_model(family, **{**values, **{key: value for key, value in dense.items() if key in fields}})
        name = saved(base, folder / "base")
        letters().save_pretrained(name)
        if "granularity" in rest:
            model: Any = upcycle(name, folder / "moe", UpcycleConfig(4, 2, **rest))
        else:
            model = adapter(base, folder / "adapter", name, **rest)
            export_adapter(folder / "adapter", folder / "moe")
    except Exception as error:  # the family, or its MoE, has no such setting
        print(f"{family}, {setting}: {one_line(error)}", flush=True)
        return None
    np.save(folder / "moe/expected.npy", logits(model)[0].log_softmax(-1).numpy())
    try:
        export_gguf(folder / "moe", folder / "moe/moe.gguf")
    except ValueError as error:
        (folder / "moe/llama.cpp.refused").write_text(str(error).rpartition("compute this: ")[2])
    return folder / "moe"


def outcome(folder: Path, engine: str) -> tuple[str, str]:
    """The word for a case, and the reason where an engine does not compute it."""
    for word in ("refused", "fails"):
        if (reason := folder / f"{engine}.{word}").exists():
            return word, one_line(reason.read_text(), 160)
    actual, expected = np.load(folder / f"{engine}.npy"), np.load(folder / "expected.npy")
    difference = np.abs(actual - expected[: len(actual)]).max()
    if not difference <= TOLERANCE * np.abs(expected).max():
        return ("NaN" if np.isnan(difference) else f"wrong by {difference:.1g}"), ""
    return "exact" if len(actual) == len(expected) else "exact up to the window", ""


def table(cases: dict[tuple[str, str], Path], engines: list[str]) -> list[str]:
    """Settings × engines, with the families of each outcome, and the reasons below."""
    lines = [f"| setting | {' | '.join(engines)} |", "|---" * (len(engines) + 1) + "|"]
    reasons: dict[str, list[str]] = defaultdict(list)
    for setting in SETTINGS:
        families = [family for family in FAMILIES if (family, setting) in cases]
        cells = []
        for engine in engines:
            groups: dict[str, list[str]] = defaultdict(list)
            for family in families:
                word, reason = outcome(cases[family, setting], engine)
                groups[word].append(FAMILIES[family])
                config = AutoConfig.from_pretrained(cases[family, setting])
                says = inexact(config, has_shared="shared" in setting or "odd" in setting)
                if engine in ("llama.cpp", "mlx-lm") and (engine in says) == word.startswith("exact"):
                    raise RuntimeError(f"{engine}, {family}, {setting}: {word}, but we say {says.get(engine)}")
                if reason and FAMILIES[family] not in (of := reasons[f"{engine}, {word}: {reason}"]):
                    of.append(FAMILIES[family])
            names = {word: "all" if len(of) == len(families) > 1 else ", ".join(of) for word, of in groups.items()}
            cells.append("; ".join(f"**{word}**: {names[word]}" for word in sorted(names)))
        if families:
            lines.append(f"| {setting} | {' | '.join(cells)} |")
    lines += ["", *(f"- {reason} ({', '.join(of)})" for reason, of in reasons.items())]
    return [line.replace("\n", " ") for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES), help="those to run now")
    parser.add_argument("--python", default=sys.executable, help="interpreter for them, of any environment")
    parser.add_argument("--folder", type=Path, help="where cases and results stay, for further engines")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.folder or Path(temporary)).absolute()
        cases = {}
        for family in args.families:
            for setting in args.settings:
                folder = root / f"{family}-{''.join(filter(str.isalnum, setting))}"
                moe = folder / "moe" if (folder / "moe/expected.npy").exists() else make(folder, family, setting)
                if moe is not None:
                    cases[family, setting] = moe
        for engine in args.engines:
            run_engine(engine, root, list(cases.values()), args.python)
        engines = {engine: root / f"{engine}.version" for engine in ENGINES}
        engines = {engine: version.read_text() for engine, version in engines.items() if version.exists()}
        rows = "\n".join(table(cases, list(engines)))
    made = f"Made by `python -m compatibility.serving` on a CPU: {', '.join(map(' '.join, engines.items()))}."
    print(rows)
    args.out.write_text(f"# Serving\n\n{made}\nThe module's first lines say what the words mean.\n\n{rows}\n")


if __name__ == "__main__":
    main()
