"""
What experts cost in vLLM: tokens per second and memory of a base, of a LoRA by vLLM itself, of MoE-LoRA adapters by our
plugin, and of an export, in one run.

    python -m benchmarks.vllm          # in the environment of `make test-vllm`; writes benchmarks/results/vllm.md

    python -m benchmarks.vllm --parts  # where the time goes; writes benchmarks/results/vllm_parts.md

The base is SmolLM2-135M, adapters have 8 experts of rank 8, 2 for a token, on FFNs, and the LoRA is on all linears.
Each variant is an engine in a process of its own with one thread, and seconds are those of its CPU, which other
programs hardly change. "Prompts": tokens of prompts alone. "Generation": new tokens, with as many requests at once as
the column says. "Memory": what the process holds more than before the engine was made, with a key-value cache of 64
MiB; "on disk": all that is read.

Parts are seconds of the CPU inside attention, FFNs and the head, by hooks, in one generation of each kind; what is left
of a step is vLLM's own Python, its scheduler and sampler. Of our operator, shares by torch's profiler, which slows what
is many small operations.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LORA = "a LoRA of rank 16, `--enable-lora`"
RESULT = Path(__file__).parent / "results" / "vllm.md"
PROMPT, NEW, REQUESTS = 64, 16, 8
# Operators that are products of matrices, and those that move or choose.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "einsum", "onednn_mm")
CHOICES = ("softmax", "topk", "sort", "argsort", "index", "index_select", "gather", "scatter", "bincount", "cumsum",
           "searchsorted", "index_add_", "div", "sum")  # fmt: skip
JOBS = {"prompts": (REQUESTS, 1), "generation, 1": (1, NEW), f"generation, {REQUESTS}": (REQUESTS, NEW)}


class Parts:
    """
    Seconds of the CPU in kinds of modules.

    Args:
        model: vLLM's.
    """

    def __init__(self, model: Any) -> None:
        self.seconds: dict[str, float] = {}
        kinds = {"self_attn": "attention", "mlp": "FFN", "block_sparse_moe": "FFN"}
        for name, module in model.named_modules():
            if (kind := kinds.get(name.rpartition(".")[2])) is not None:
                module.register_forward_pre_hook(lambda *_, kind=kind: self._add(kind, -time.process_time()))
                module.register_forward_hook(lambda *_, kind=kind: self._add(kind, time.process_time()))
        compute = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            self._add("head", -time.process_time())
            logits = compute(*args, **kwargs)
            self._add("head", time.process_time())
            return logits

        model.compute_logits = compute_logits

    def _add(self, kind: str, seconds: float) -> None:
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds


def operator_shares(generate: Any) -> dict[str, float]:
    """Of the time inside our operator: products of matrices, choices and moves, other operations, and Python."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        generate()
    ours = [event for event in profiled.events() if event.name == "vllm::moe_lora_ffn"]
    shares = dict.fromkeys(("products", "choices", "others", "Python"), 0.0)
    for event in ours:
        shares["Python"] += event.self_cpu_time_total
        for child in event.cpu_children:
            name = child.name.rpartition("::")[2].removeprefix("_")
            kind = "products" if name in PRODUCTS else "choices" if name in CHOICES else "others"
            shares[kind] += child.cpu_time_total
    total = sum(shares.values())
    return {kind: of_kind / total for kind, of_kind in shares.items()} if total else {}


def measure(folder: str, lora: str | None, dtype: str, rounds: int, pipe: Connection, parts: bool = False) -> None:
    """
    Send an engine's memory in bytes, and the seconds of each job in each round; or their parts. A LoRA is one of vLLM's
    own.
    """
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR",
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    import psutil
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    held = psutil.Process().memory_info().rss
    llm = LLM(
        folder, dtype=dtype, max_model_len=256, max_num_seqs=REQUESTS, enforce_eager=True, enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20, enable_lora=lora is not None,
    )  # fmt: skip
    request = None if lora is None else LoRARequest("lora", 1, lora)
    memory = psutil.Process().memory_info().rss - held
    jobs = {
        job: (
            [{"prompt_token_ids": [(7 * i + j) % 900 + 20 for j in range(PROMPT)]} for i in range(requests)],
            SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False),
        )
        for job, (requests, new) in JOBS.items()
    }
    timed = Parts(llm.llm_engine.model_executor.driver_worker.get_model()) if parts else None
    by_part: dict[str, dict[str, float]] = {job: {} for job in JOBS}
    seconds: dict[str, list[float]] = {job: [] for job in JOBS}
    for _ in range(rounds + 1):
        for job, work in jobs.items():
            if timed is not None:
                timed.seconds = {}
            start = time.process_time()
            llm.generate(*work, use_tqdm=False, lora_request=request)
            seconds[job].append(time.process_time() - start)
            if timed is not None:
                found = {**timed.seconds, "rest": seconds[job][-1] - sum(timed.seconds.values())}
                by_part[job] = {kind: min(value, by_part[job].get(kind, value)) for kind, value in found.items()}
    if timed is None:
        pipe.send((memory, {job: times[1:] for job, times in seconds.items()}))  # the first round warms up
        return
    shares = {
        job: operator_shares(partial(llm.generate, *work, use_tqdm=False, lora_request=request))
        for job, work in jobs.items()
    }
    pipe.send((by_part, shares))


def measured(args: argparse.Namespace, parts: bool = False) -> Iterator[tuple[str, list[Path], tuple[Any, Any]]]:
    """Each variant with its folders and what `measure` sends, from a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as root:
        for name, folders in make(Path(root)).items():
            here, there = spawn.Pipe()
            lora = str(folders[-1]) if name == LORA else None
            process = spawn.Process(target=measure, args=(str(folders[0]), lora, args.dtype, args.rounds, there, parts))
            process.start()
            there.close()  # so that an engine that dies ends the wait
            found = here.recv()
            process.join()
            yield name, folders, found


def make(root: Path) -> dict[str, list[Path]]:
    """Each variant's folders; the first is what vLLM is given, and the last a LoRA in the variant of one."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from examples.demo.smollm2 import smollm2_folder
    from moe_peft import MoELoraConfig
    from moe_peft.native import export_adapter

    base = smollm2_folder()
    torch.manual_seed(0)
    variants = {"base": [base]}
    linears = ["q_proj", "k_proj", "v_proj", "o_proj"]
    one, ffns = dict.fromkeys(linears, 1), ["gate_proj", "up_proj", "down_proj"]
    configs: dict[str, Any] = {
        LORA: LoraConfig(r=16, target_modules=[*linears, *ffns], init_lora_weights=False),
        'adapter, `mixing="output"`': MoELoraConfig(mixing="output", init_lora_weights=False),
        'adapter, `mixing="projection"`': MoELoraConfig(mixing="projection", init_lora_weights=False),
        "the last, and LoRAs on attention": MoELoraConfig(
            mixing="projection", target_modules=["mlp", *linears], num_experts_pattern=one, init_lora_weights=False
        ),
        "the last, and experts on attention": MoELoraConfig(
            mixing="projection", target_modules=["mlp", *linears], init_lora_weights=False
        ),
    }
    for i, (name, config) in enumerate(configs.items()):
        config.task_type = "CAUSAL_LM"
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(root / str(i))
        variants[name] = [base, root / str(i)] if name == LORA else [root / str(i), base]
    variants["its export, a Mixtral"] = [export_adapter(root / "1", root / "exported")]
    return variants


def measure_parts(args: argparse.Namespace) -> None:
    kinds, of_operator = ("attention", "FFN", "head", "rest"), ("products", "choices", "others", "Python")
    head = ["", "work", *(f"{kind}, ms" for kind in kinds), *(f"{kind}, %" for kind in of_operator)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, _, (by_part, shares) in measured(args, parts=True):
        for job, (_, new) in JOBS.items():
            # Per step, of which a generation has as many as new tokens; the prompts' is among them.
            cells = [f"{1e3 * by_part[job].get(kind, 0) / new:.1f}" for kind in kinds]
            cells += [f"{100 * shares[job][kind]:.0f}" if shares[job] else "" for kind in of_operator]
            lines.append(f"| {' | '.join([name, job, *cells])} |")
            print(lines[-1], flush=True)
    made = (
        f"Made by `python -m benchmarks.vllm --parts` with vllm-cpu {version('vllm-cpu')}, {args.dtype}: milliseconds "
        f"of one core for a step, the least of {args.rounds + 1} runs, and shares of our operator's time. The "
        "module's first lines say what is measured."
    )
    table = "\n".join(lines)
    args.out.with_name("vllm_parts.md").write_text(f"# Serving in vLLM, by part\n\n{made}\n\n{table}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    if args.parts:
        return measure_parts(args)
    header = ["", *JOBS, "memory, MiB", "on disk, MiB"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    base: dict[str, float] = {}
    for name, folders, (memory, seconds) in measured(args):
        cells = []
        for job, (requests, new) in JOBS.items():
            taken = statistics.median(seconds[job])
            base.setdefault(job, taken)
            cells.append(f"{requests * (PROMPT if new == 1 else new) / taken:.0f} (×{taken / base[job]:.2f})")
        disk = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
        lines.append(f"| {' | '.join([name, *cells])} | {memory >> 20} | {disk >> 20} |")
        print(lines[-1], flush=True)
    made = (
        f"Made by `python -m benchmarks.vllm` with vllm-cpu {version('vllm-cpu')}, {args.dtype}, on a CPU: tokens per "
        f"second of one core, and the time as a multiple of the base's; medians of {args.rounds} rounds. Prompts have "
        f"{PROMPT} tokens, {NEW} new ones follow. The module's first lines say what is measured."
    )
    table = "\n".join(lines)
    args.out.write_text(f"# Serving in vLLM\n\n{made}\n\n{table}\n")


if __name__ == "__main__":
    main()
