"""
GRPO on SmolLM2-135M with rollouts by vLLM and by transformers: are they the adapter's, does it learn, what does it
cost?

    python -m benchmarks.rollouts          # in the environment of `make test-vllm`

The adapter has 8 experts of rank 8 on FFNs, 2 for a token, and LoRAs on q_proj and v_proj. The task can be checked: the
reward is the share of a completion's characters that are digits. Float32 on one core; seconds are those of the
process's CPU, medians of steps from the second on. "Difference" is the largest between log-probabilities of sampled
tokens, as vLLM gave them with the rollouts, and the trainer's own. Writes benchmarks/results/rollouts.md.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.smollm2 import smollm2_folder
from moe_peft import MoELoraConfig, RouterLossesMixin

RESULT = Path(__file__).parent / "results" / "rollouts.md"
ATTENTION = ["q_proj", "v_proj"]
WORDS = ("numbers", "dates", "cats", "money", "trees", "time", "food", "cars")


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def make_trainer(use_vllm: bool, steps: int, folder: Path) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    name = str(smollm2_folder())
    torch.manual_seed(0)
    config = MoELoraConfig(
        target_modules=["mlp", "q_proj", "v_proj"],
        num_experts_pattern={"q_proj": 1, "v_proj": 1},
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), config)
    args = GRPOConfig(
        str(folder), use_vllm=use_vllm, vllm_mode="colocate", vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=128, num_generations=8, per_device_train_batch_size=16,
        max_completion_length=24, max_steps=steps, seed=0,
        learning_rate=1e-3, lr_scheduler_type="constant", use_cpu=True, bf16=False, report_to="none", logging_steps=1,
        save_strategy="no", gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"Here is something about {word}:"} for word in WORDS] * steps)
    trainer_class = type("MoEGRPOTrainer", (RouterLossesMixin, GRPOTrainer), {})
    return trainer_class(model, reward, args, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(name))


def by_vllm(steps: int, folder: Path) -> dict[str, Any]:
    import trl.generation.vllm_generation as generation
    from vllm import LLM

    generation.LLM = functools.partial(LLM, dtype="float32", enforce_eager=True)
    trainer = make_trainer(True, steps, folder)
    vllm, seconds, synchronized, differences, sizes = trainer.vllm_generation, [], [], [], []
    iterate, generate, synchronize = vllm._iter_named_params, vllm.generate, vllm.sync_weights

    def named_params() -> Any:
        sizes.append(0)
        for name, tensor in iterate():
            sizes[-1] += tensor.nbytes
            yield name, tensor

    def timed_sync() -> None:
        start = time.process_time()
        synchronize()
        synchronized.append(time.process_time() - start)

    @torch.no_grad()
    def compared(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        outputs = generate(prompts, *args, **kwargs)
        seconds.append(time.process_time() - start)
        trainer.model.eval()
        largest = 0.0
        for prompt, completion, logprobs in zip(*outputs[:3], strict=True):
            logits = trainer.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1))
            largest = max(largest, float((own - torch.tensor(logprobs)).abs().max()))
        trainer.model.train()
        differences.append(largest)
        return outputs

    vllm._iter_named_params, vllm.generate, vllm.sync_weights = named_params, compared, timed_sync
    trainer.train()
    return {
        "rewards": [entry["reward"] for entry in trainer.state.log_history if "reward" in entry],
        "seconds": statistics.median(seconds[1:]), "synchronize": statistics.median(synchronized[1:]),
        "differences": differences, "sent": sizes[-1], "whole": sum(p.nbytes for p in trainer.model.parameters()),
    }  # fmt: skip


def by_transformers(steps: int, folder: Path) -> float:
    trainer, seconds = make_trainer(False, steps, folder), []
    generate = trainer.model.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        outputs = generate(*args, **kwargs)
        seconds.append(time.process_time() - start)
        return outputs

    trainer.model.generate = timed
    trainer.train()
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    folder = args.out.parent / "rollouts"
    plain = by_transformers(5, folder)
    ours = by_vllm(args.steps, folder)
    size = 5  # steps of a column
    fives = [ours["rewards"][i : i + size] for i in range(0, args.steps, size)]
    differences, sent, whole = ours["differences"], ours["sent"] / 2**20, ours["whole"] / 2**20
    made = f"vllm-cpu {version('vllm-cpu')} and trl {version('trl')} on one core"
    lines = [
        "# Rollouts by vLLM",
        f"Made by `python -m benchmarks.rollouts` with {made}; the module's first lines say what is measured.",
        f"| steps | {' | '.join(f'from {size * i + 1}' for i in range(len(fives)))} |\n{'|---' * (len(fives) + 1)}|\n"
        f"| mean reward | {' | '.join(f'{statistics.mean(five):.3f}' for five in fives)} |",
        f"Difference before the first update: {differences[0]:.1e}; after the tenth: {differences[10]:.1e}; the "
        f"largest of {args.steps} steps: {max(differences):.1e}.",
        f"Sent at each step: {sent:.0f} MiB in {ours['synchronize']:.2f} s; the whole model has {whole:.0f} MiB.",
        f"Generation of 16 completions of 24 tokens: vLLM {ours['seconds']:.2f} s, transformers {plain:.2f} s.",
    ]
    args.out.write_text("\n\n".join(lines) + "\n")
    print(args.out.read_text())


if __name__ == "__main__":
    main()
