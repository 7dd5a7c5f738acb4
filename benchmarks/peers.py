"""
Other packages' mixtures of LoRA experts beside ours, all against plain PEFT LoRA of the same active rank.

    pip install --no-deps mixlora==0.2.3    # without it, its rows are left out
    python -m benchmarks.peers              # writes benchmarks/results/peers.md; seven minutes of one core

X-LoRA is PEFT's own: 8 LoRAs of rank 8, the best 2 of each token, trained; it turns the cache off, so it has no decode.
MixLoRA is the package `mixlora`, with random weights. The case is that of `benchmarks/adapter.py`: a Llama-shaped
model, batch 4×256, 8 experts, top 2, rank 8; interleaved in one process, medians and quartiles of per-round ratios.
MoE-PEFT (PyPI: moe-peft) needs transformers < 4.47 and torch < 2.6 and has our import name: it cannot run here.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, XLoraConfig, get_peft_model

from .adapter import DEVICE, FFN, TASKS, Case
from .timing import interleave, ratio


def x_lora(case: Case, folder: Path) -> torch.nn.Module:
    """PEFT's X-LoRA: a classifier, which needs a forward pass of its own, scales all LoRAs in each layer."""
    paths = {}
    for expert in range(case.experts):
        lora = LoraConfig(r=case.r, lora_alpha=2 * case.r, target_modules=FFN, task_type="CAUSAL_LM")
        paths[str(expert)] = str(folder / f"{expert}")
        get_peft_model(case.base(), lora).save_pretrained(paths[str(expert)])
    base = case.base()
    base.config.use_cache = False
    config = XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=case.hidden, adapters=paths, layerwise_scalings=True, top_k_lora=case.k,
        use_trainable_adapters=True,
    )  # fmt: skip
    return get_peft_model(base, config)


def mixlora(case: Case) -> torch.nn.Module:
    """The package's layers on the FFNs, with random weights."""
    from mixlora.config import MixLoraConfig
    from mixlora.model import inject_adapter_in_model

    model = case.base().requires_grad_(False)
    config = MixLoraConfig(
        adapter_name_="default", dtype_=torch.float32, lora_init_="original", lora_r_=case.r, lora_alpha_=2 * case.r,
        lora_dropout_=0.05, target_modules_=dict.fromkeys(FFN, True), jitter_noise_=0.0, num_experts_=case.experts,
        act_fn_="silu", top_k_=case.k,
    )  # fmt: skip
    weights: dict[str, torch.Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        prefix = f"mixlora.layers.{layer}.mlp"
        weights[f"{prefix}.moe_gate.weight"] = torch.randn(case.experts, case.hidden).mul_(0.02).requires_grad_()
        for name in FFN:
            out, width = getattr(block.mlp, name).weight.shape
            for expert in range(case.experts):
                lora = f"{prefix}.{name}.experts.{expert}"
                weights[f"{lora}.lora_A.weight"] = torch.randn(case.r, width) * width**-0.5
                weights[f"{lora}.lora_B.weight"] = torch.randn(out, case.r) * 0.02
    inject_adapter_in_model(model, config, weights)
    for block in model.model.layers:  # they are not submodules of the model, which cannot switch their dropout off
        for linear in block.mlp.mixlora_moes["default"].experts_.values():
            linear.dropout_.p = 0.0
    return model


def table(case: Case, rounds: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        models: dict[str, Any] = {method: case.model(method) for method in ("lora", "output", "projection")}
        models["X-LoRA"] = x_lora(case, Path(folder))
    if importlib.util.find_spec("mixlora") is not None:
        models["MixLoRA"] = mixlora(case)
    ids, rows = case.ids(), {}
    for task, run in TASKS.items():
        jobs = {name: partial(run, model, ids) for name, model in models.items()}
        if task == "decode":
            del jobs["X-LoRA"]
        seconds = interleave(jobs, rounds)
        rows[task] = {name: str(ratio(times, seconds["lora"])) for name, times in seconds.items()}
    for name in models:
        if name != "lora":
            yield f"| {case.hidden} | {name} | {' | '.join(row.get(name, '–') for row in rows.values())} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 768])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/peers.md"))
    args = parser.parse_args()
    lines = [
        "# Other packages",
        "",
        "Made by `python -m benchmarks.peers`: multiples of the time of plain LoRA of the same rank, medians and",
        f"quartiles ({DEVICE}, threads: {torch.get_num_threads()}, torch {torch.__version__}).",
        "",
        "| hidden | method | " + " | ".join(TASKS) + " |",
        "|---" * (2 + len(TASKS)) + "|",
    ]
    for hidden in args.hidden:
        lines += table(Case(hidden, layers=args.layers), args.rounds)
        print("\n".join(lines), flush=True)
    args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
