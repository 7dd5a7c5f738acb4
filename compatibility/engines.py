"""
Every engine with every kind of training, on a tiny model in two processes on a CPU: what works, beside plain LoRA.

    python -m compatibility.engines                                   # writes compatibility/results/engines.md
    python -m compatibility.engines --engines FSDP2 --kinds output

Each cell has three words. "equal": the training ends with the weights and losses of one process that takes the same
batches (to 2e-5; on a 4-bit base to two steps of bfloat16, in which TRL trains there). "saved": what `save_model`
writes is the folder that one process writes, with these weights. "resumed": stopped in the middle and started again,
it ends with the same weights. UpIT is stopped in its router initialization and in its last training, so its cell has
all three or none; so has the command's, which is stopped in the middle.

The processes are started by `accelerate launch` with the files in `recipes/accelerate`. accelerate has FSDP and
DeepSpeed for accelerators only, so each process tells it that its CPU is one; from there on, FSDP2's and DeepSpeed's
own code runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

# DeepSpeed asks for it when it is imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from accelerate import PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from datasets import Dataset
from peft import LoraConfig, PeftConfig
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, Trainer, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from benchmarks.adapter import FFN
from moe_peft import MoELoraConfig, MoESFTConfig, MoESFTTrainer
from moe_peft.cli import main as main_of_moe_peft
from moe_peft.native import UpcycleConfig, upcycle
from moe_peft.upit import UpIT, recipe_from_dict
from moe_peft.utils.messages import one_line
from tests.helpers.words import word_tokenizer

from .trainers import base_model, words

RESULT = Path(__file__).parent / "results" / "engines.md"
LAUNCH_FILES = Path(__file__).parent.parent / "recipes" / "accelerate"
ENGINES = {"DDP": "ddp.yaml", "FSDP2": "fsdp2.yaml", "ZeRO-2": "zero2.yaml", "ZeRO-3": "zero3.yaml"}
ALONE = "one process"
PROCESSES, STEPS, MIDDLE = 2, 4, 2
TOLERANCE = 2e-5
# In the dtype of the other weights, so that FSDP can shard them together.
PACKED = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "float32"}
# On a 4-bit base, TRL makes adapters of bfloat16, which has steps of 0.004 below 1: two of them.
TOLERANCE_4BIT = 8e-3
KINDS = {
    "LoRA": "plain LoRA",
    "output": "adapter, output",
    "projection": "adapter, projection",
    "LoRA-4bit": "plain LoRA, 4-bit base",
    "output-4bit": "adapter, output, 4-bit base",
    "native": "native MoE, all weights",
    "upit-lora": "UpIT, mode lora",
    "upit-lora-4bit": "UpIT, mode lora, 4-bit base",
    "upit-ffn": "UpIT, mode ffn",
    "sft": "`moe-peft sft`",
}
UNLISTED = ["upit-routers"]  # not in the table: UpIT, mode ffn, with attention routers in the place of gates
# Where in its folder a run leaves its result.
RESULTS = {
    "upit-lora": "adapter",
    "upit-lora-4bit": "adapter",
    "upit-ffn": "model",
    "upit-routers": "model",
    "sft": ".",
}
# The steps after which a run is stopped; one of UpIT in router initialization, and in post-training.
STOPS = {"upit-lora": (11, 23), "upit-lora-4bit": (11, 23), "upit-ffn": (11, 23), "upit-routers": (5,), "sft": (3,)}


# --- in each process -----------------------------------------------------------------------------------------------


def take_cpu_for_an_accelerator() -> None:
    """Have accelerate use FSDP or DeepSpeed on a CPU, over gloo; ZeRO-3 shards small parameters as well."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign]
    make = DeepSpeedPlugin.__post_init__

    def make_thorough(self: DeepSpeedPlugin) -> None:
        make(self)
        self.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    DeepSpeedPlugin.__post_init__ = make_thorough  # type: ignore[method-assign]
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        # A faster way on CPUs, which has to be compiled; a process that ends meanwhile leaves a lock, for which others
        # wait for ever. By its full name: in its package, the module's name has torch itself.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def is_sharded() -> bool:
    return any(os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("FSDP", "DEEPSPEED"))


def settings(at_once: bool = False, **overrides: Any) -> dict[str, Any]:
    """Training arguments; alone, a process accumulates the batches that several have, or has them `at_once`."""
    times = PROCESSES if int(os.environ.get("WORLD_SIZE", "1")) == 1 else 1
    return {
        "per_device_train_batch_size": 2 * (times if at_once else 1),
        "gradient_accumulation_steps": 2 * (1 if at_once else times),
        "learning_rate": 1e-2, "adam_epsilon": 1e-4, "max_length": 64, "bf16": False, "use_cpu": not is_sharded(),
        "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False, **overrides,
    }  # fmt: skip


def make_trainer(kind: str, folder: Path) -> Trainer:
    """A trainer of the kind, as a user makes it: the model and the adapter by name and config."""
    set_seed(1)
    adapter: PeftConfig | None = None
    method = kind.removesuffix("-4bit")
    if method == "LoRA":
        adapter = LoraConfig(r=4, target_modules=FFN, init_lora_weights=False, task_type="CAUSAL_LM")
    elif method != "native":
        adapter = MoELoraConfig(
            num_experts=4, r=4, mixing=method, init_lora_weights=False, router_aux_loss_coef=0.1, task_type="CAUSAL_LM"
        )
    base: dict[str, Any] = {"dtype": "float32"}
    if method != kind:
        base["quantization_config"] = BitsAndBytesConfig(**PACKED)
    arguments = settings(
        at_once=method == "output", output_dir=str(folder / kind / "state"), max_steps=STEPS, save_steps=MIDDLE,
        model_init_kwargs=base,
    )  # fmt: skip
    inputs = {"train_dataset": Dataset.from_json(str(folder / "train.jsonl")), "processing_class": word_tokenizer(128)}
    if method in ("LoRA", "projection"):
        return SFTTrainer(str(folder / "base"), SFTConfig(**arguments), peft_config=adapter, **inputs)
    args = MoESFTConfig(**arguments, router_z_loss_coef=0.01, router_global_batch=method == "output")
    return MoESFTTrainer(str(folder / ("native" if adapter is None else "base")), args, peft_config=adapter, **inputs)


def train(kind: str, folder: Path) -> None:
    """Train, save, and train again from the middle."""
    trainer = make_trainer(kind, folder)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    trainer.save_model(str(folder / kind / "saved"))
    again = make_trainer(kind, folder)
    again.train(resume_from_checkpoint=str(folder / kind / "state" / f"checkpoint-{MIDDLE}"))
    again.save_model(str(folder / kind / "resumed"))
    if PartialState().is_main_process:
        (folder / kind / "losses.json").write_text(json.dumps(losses))


class Stop(TrainerCallback):
    """Ends the process, in the same step as the others, when it has taken so many steps."""

    steps = 0
    left: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Stop.steps += 1
        if Stop.steps == Stop.left:
            os._exit(7)


def stop_after(steps: int | None) -> None:
    """Have every trainer that is made from now on end the process after so many steps in all."""
    Stop.left = steps
    init = Trainer.__init__

    def make(self: Trainer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.add_callback(Stop)

    Trainer.__init__ = make  # type: ignore[method-assign]


def sft(folder: Path) -> None:
    """The command, as it is typed, or resumed; it leaves the other processes."""
    options = {
        "model_name_or_path": folder / "base", "dtype": "float32", "dataset_name": folder / "train.jsonl",
        "output_dir": folder / "sft", "num_experts": 4, "r": 4, "top_k": 2, "router_global_batch": True,
        "resume_from_checkpoint": True, "replay": 0.2, "replay_file": folder / "requests.txt",
        **settings(at_once=True, max_steps=STEPS, save_steps=MIDDLE), "use_cpu": not is_sharded(),
    }  # fmt: skip
    main_of_moe_peft(["sft", *(word for name, value in options.items() for word in (f"--{name}", str(value)))])


def upit(kind: str, folder: Path) -> None:
    """Run a recipe, or resume it."""
    method = kind.removesuffix("-4bit")
    model: dict[str, Any] = {"name_or_path": str(folder / "base"), "dtype": "float32"}
    if method != kind:
        model["quantization"] = PACKED
    # A large ε, because Adam blows rounding up where gradients are near zero. All experts at once, because rounding may
    # choose other ones.
    sft = settings(at_once=True, adam_epsilon=1e-2, max_grad_norm=0.5, save_steps=2)
    sft["gradient_accumulation_steps"] = 1
    recipe = {
        "output_dir": str(folder / kind), "mode": method.partition("-")[2], "num_experts": 3, "num_train_epochs": 2,
        "model": model,
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "train.jsonl"), "label_column": "domain"},
        "router_init": {"seed_fraction": 0.375, "num_train_epochs": 4}, "sft": sft,  # buckets that fill a batch
    }  # fmt: skip
    variant: dict[str, Any] = {"adapter": {"r": 4, "top_k": 3}} if method == "upit-lora" else {"moe": {"top_k": 3}}
    if method == "upit-routers":
        variant = {"mode": "ffn", "method": "upcycle_pt", "num_experts": 4}
        variant |= {"moe": {"top_k": 4, "router_init": "attention"}}
        variant |= {"post_train": {"router": {"type": "attention", "num_heads": 2}}}
    UpIT(recipe_from_dict({**recipe, **variant})).run()


def work(kinds: list[str], folder: Path, stop: int | None) -> None:
    """One process's part. The first failure ends it, as the others would wait for ever."""
    torch.set_num_threads(1)
    stop_after(stop)
    if is_sharded():
        take_cpu_for_an_accelerator()
    for kind in sorted(kinds, key="sft".__eq__):  # which comes last
        try:
            if kind == "sft":
                sft(folder)
            elif kind in RESULTS:
                upit(kind, folder)
            else:
                train(kind, folder)
            (folder / f"{kind}.done").touch()
        except (Exception, SystemExit) as error:
            if not (folder / f"{kind}.error").exists():
                (folder / f"{kind}.error").write_text(f"{type(error).__name__}: {one_line(error, 160)}")
            raise


# --- in the one that starts them -------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """The base, a native MoE made of it, and data."""
    base = base_model("SFT")
    base.generation_config.eos_token_id = [1, *range(4, 128, 3)]  # or random weights would end no answer
    base.save_pretrained(folder / "base")
    (folder / "requests.txt").write_text("\n".join(words(i, 4) for i in range(8)))
    word_tokenizer(128).save_pretrained(folder / "base")
    upcycle(folder / "base", folder / "native", UpcycleConfig(num_experts=4))
    rows = [{"text": words(i, 3) + " " + words(i + 5, 2 + i % 5), "domain": "abc"[i % 3]} for i in range(32)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def launch(
    engine: str, kinds: list[str], folder: Path, stop_after: int | None = None, flags: Sequence[str] = ()
) -> subprocess.CompletedProcess:
    """Start the processes of an engine, which share `folder` with no other; `flags` are accelerate's."""
    command = [sys.executable]
    if engine != ALONE:
        command += ["-m", "accelerate.commands.launch", "--config_file", str(LAUNCH_FILES / ENGINES[engine])]
        command += ["--num_processes", str(PROCESSES), "--mixed_precision", "no", "--main_process_port", "0"]
        command += flags
    command += ["-m", "compatibility.engines", "--folder", str(folder), "--kinds", *kinds, "--work"]
    command += [] if stop_after is None else ["--stop-after", str(stop_after)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=900, cwd=LAUNCH_FILES.parent.parent,
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(folder / "compiled")},
    )  # fmt: skip


def train_all(engine: str, kinds: list[str], folder: Path) -> None:
    """Have an engine train every kind; a kind that fails leaves its error in `<kind>.error`."""
    for kind in (kind for kind in kinds if kind in RESULTS and engine != ALONE):
        for stop in STOPS[kind]:
            launch(engine, [kind], folder, stop)
            if (folder / f"{kind}.done").exists():
                raise RuntimeError(f"{engine}: {kind}: has fewer than {stop} steps, so it was not stopped")
    left = list(kinds)
    while left:
        ended = launch(engine, left, folder)
        before = len(left)
        left = [kind for kind in left if not any((folder / f"{kind}.{end}").exists() for end in ("done", "error"))]
        if len(left) == before:
            raise RuntimeError(f"{engine}: {left}: {ended.stderr[-2000:]}")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def differences(actual: Path, expected: Path, tolerance: float) -> str:
    """What differs between two result folders; "" if nothing does."""
    ours, theirs = weights(actual), weights(expected)
    if not theirs or ours.keys() != theirs.keys():
        return f"other weights: {sorted(ours.keys() ^ theirs.keys())[:2]}"
    furthest = max((float((ours[name] - value).abs().max()), name) for name, value in theirs.items())
    return f"{furthest[1]} differs by {furthest[0]:.1e}" if furthest[0] > tolerance else ""


def compare(kind: str, folder: Path, alone: Path) -> str:
    """The cell of a kind: what holds, or why not."""
    if (error := folder / f"{kind}.error").exists():
        return f"no: {error.read_text()}"
    tolerance = TOLERANCE_4BIT if kind.endswith("-4bit") else TOLERANCE
    if kind in RESULTS:
        name = RESULTS[kind]
        return differences(folder / kind / name, alone / kind / name, tolerance) or "equal, saved, resumed"
    ours, theirs = (json.loads((root / kind / "losses.json").read_text()) for root in (folder, alone))
    near = torch.allclose(torch.tensor(ours), torch.tensor(theirs), atol=max(1e-4, tolerance / 4))
    saved, expected = folder / kind / "saved", alone / kind / "saved"
    checks = {
        "equal": "" if near else f"losses {ours}, not {theirs}",
        "saved": differences(saved, expected, tolerance) or missing_files(kind, folder, alone),
        "resumed": differences(folder / kind / "resumed", expected, tolerance),
    }
    return ", ".join(name if not failure else f"not {name}: {failure}" for name, failure in checks.items())


def missing_files(kind: str, folder: Path, alone: Path) -> str:
    wanted = {path.name for path in (alone / kind / "saved").iterdir()}
    missing = wanted - {path.name for path in (folder / kind / "saved").iterdir()}
    return f"lacks {sorted(missing)}" if missing else ""


def rows(engines: list[str], kinds: list[str], root: Path) -> Iterator[list[str]]:
    """One row for each engine: its name and the cells of the kinds."""
    folders = {engine: root / engine.replace(" ", "-") for engine in (ALONE, *engines)}
    for engine, folder in folders.items():
        folder.mkdir()
        prepare(folder)
        train_all(engine, kinds, folder)
        if engine != ALONE:
            yield [engine, *(compare(kind, folder, folders[ALONE]) for kind in kinds)]


@cache
def heading() -> str:
    import accelerate
    import deepspeed
    import transformers
    import trl

    return (
        "# Engines × trainings\n\n"
        f"Made by `python -m compatibility.engines` on a CPU: torch {torch.__version__}, accelerate "
        f"{accelerate.__version__}, deepspeed {deepspeed.__version__}, transformers {transformers.__version__}, trl "
        f"{trl.__version__}. {PROCESSES} processes over gloo,\na tiny Llama, {STEPS} steps of 2 × 2 rows in each. The "
        "module's first lines say what the words mean.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=[*KINDS, *UNLISTED])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stop-after", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.kinds, args.folder, args.stop_after)
    lines = [f"| engine | {' | '.join(KINDS[kind] for kind in args.kinds)} |", "|---" * (len(args.kinds) + 1) + "|"]
    with tempfile.TemporaryDirectory() as root:
        for row in rows(args.engines, args.kinds, Path(root)):
            lines.append(f"| {' | '.join(text.replace('|', '/') for text in row)} |")
            print(lines[-1], flush=True)
    args.out.write_text("\n".join([heading(), *lines, ""]))


if __name__ == "__main__":
    main()
