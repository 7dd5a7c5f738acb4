"""
Peak memory of UpIT's expansion and router initialization by number of experts, one process per measurement.

    python -m benchmarks.upit_memory    # writes benchmarks/results/upit_memory.md

A Llama-shaped base of random weights in fp32 (hidden 768, 8 layers, vocabulary 8192), experts of rank 8 on all FFN
projections, 32 seed examples of 64 tokens, 8 rows per step. A row gives the growth of the process's peak over what it
held before, and the memory that as many copies of the base would take.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from moe_peft.upit import expand_experts, init_routers

from .processes import peak_growth, run_module

EXPERTS = (2, 4, 8, 16, 32)
FFN = ["gate_proj", "up_proj", "down_proj"]
MIB = 2**20


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=8,
            num_attention_heads=12,
            vocab_size=8192,
            pad_token_id=0,
        )
    )


def measure(stage: str, n: int, folder: Path) -> int:
    """Bytes by which a stage raises the peak; for "parents", which makes two experts, the size of the base."""
    parents = [folder / "parent-0", folder / "parent-1"]
    if stage == "parents":
        for i, parent in enumerate(parents):
            model = base()
            torch.manual_seed(i)
            config = LoraConfig(r=8, target_modules=FFN, init_lora_weights=False, task_type="CAUSAL_LM")
            get_peft_model(model, config).save_pretrained(parent)
        return sum(p.numel() * p.element_size() for p in base().parameters())
    if stage == "expansion":
        return peak_growth(lambda: expand_experts(parents, output_dir=folder / f"expanded-{n}", num_experts=n))
    experts = [parents[i % 2] for i in range(n)]
    vocabulary = {f"w{i}": i for i in range(8192)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w1")), pad_token="w0", eos_token="w2"
    )
    ids = torch.randint(3, 8192, (32, 64), generator=torch.Generator().manual_seed(0)).tolist()
    args = SFTConfig(
        output_dir=str(folder / f"state-{n}"),
        per_device_train_batch_size=8,
        num_train_epochs=1,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})

    def run() -> None:
        init_routers(lambda expert: base(), experts, data, args, tokenizer, output_dir=folder / f"routed-{n}")

    return peak_growth(run)


def spawn(stage: str, n: int, folder: str) -> int:
    return int(run_module("benchmarks.upit_memory", "--measure", stage, n, folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=Path("benchmarks/results/upit_memory.md"))
    parser.add_argument("--measure", nargs=3, metavar=("STAGE", "N", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        stage, n, folder = args.measure
        print(measure(stage, int(n), Path(folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        # In its own process too: a child's peak begins with what its parent holds.
        size = spawn("parents", 0, folder) / MIB
        lines = [
            "# Peak memory of UpIT's stages",
            "",
            f"Made by `python -m benchmarks.upit_memory`. One base: {size:.0f} MiB. Growth in MiB.",
            "",
            "| experts | expansion (2 → n) | router initialization | n copies of the base |",
            "|---|---|---|---|",
        ]
        for n in EXPERTS:
            cells = []
            for stage in ("expansion", "router"):
                cells.append(f"{spawn(stage, n, folder) / MIB:.0f}")
            lines.append(f"| {n} | {cells[0]} | {cells[1]} | {n * size:.0f} |")
            print(lines[-1], flush=True)
    args.table.parent.mkdir(parents=True, exist_ok=True)
    args.table.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
