"""
Every trainer with every adapter and setting, on a tiny model or a real one: what works, beside plain LoRA.

    python -m compatibility.trainers                                    # writes compatibility/results/trainers.md
    python -m compatibility.trainers --trainers SFT DPO --settings plain packing
    python -m compatibility.trainers --real --trainers SFT DPO KTO GRPO --settings plain   # …/trainers_smollm2.md

With `--real` the model is SmolLM2-135M-Instruct, and the rows are chats.

A cell is "yes" if the adapter trained with finite losses and every part of it moved, the balancing loss is in the loss
exactly once (a coefficient of 1 and one of 0 differ by it in the first step), the saved adapter loads with the same
logits, and what the setting itself promises holds. Liger's kernels need a GPU: a stand-in patches the model as Liger
does (`tests/fakes/liger.py`).
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils import load_peft_weights
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)  # fmt: skip

from examples.demo.smollm2 import NAME, smollm2_folder
from moe_peft import MoELoraConfig, RouterLossConfig, RouterLossesMixin
from moe_peft.utils.messages import one_line
from tests.fakes.liger import installed
from tests.helpers.words import word_tokenizer

RESULTS = Path(__file__).parent / "results"
STEPS, ROWS = 4, 16
REAL = False  # whether the model is a real one; `main` sets it


@dataclass
class MoERewardConfig(RouterLossConfig, RewardConfig):
    """`RewardTrainer` computes its loss from rewards alone; the mixin adds the balancing loss."""


class MoERewardTrainer(RouterLossesMixin, RewardTrainer):
    pass


class LanguageTrainer(Trainer):
    """The plain `Trainer`, which notes the balancing loss that its first step had."""

    aux_loss: float | None = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if self.aux_loss is None and model.training and outputs.get("aux_loss") is not None:
            self.aux_loss = outputs.aux_loss.item()
        return (loss, outputs) if return_outputs else loss


TRAINERS: dict[str, tuple[Any, Any]] = {
    "SFT": (SFTTrainer, SFTConfig),
    "DPO": (DPOTrainer, DPOConfig),
    "KTO": (KTOTrainer, KTOConfig),
    "GRPO": (GRPOTrainer, GRPOConfig),
    "RLOO": (RLOOTrainer, RLOOConfig),
    "Reward": (RewardTrainer, RewardConfig),
    "Trainer": (LanguageTrainer, TrainingArguments),
    "accelerate loop": (None, None),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packing": {"packing": True, "max_length": 24},
    "padding-free": {"padding_free": True, "max_length": None},
    "streaming": {},
    "eval, best model": {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
    },
    "resume": {"save_strategy": "steps", "save_steps": STEPS // 2},
    "Liger": {"use_liger_kernel": True},
    "compile": {"torch_compile": True, "torch_compile_backend": "eager", "gradient_checkpointing": True},
}  # fmt: skip
IN_LOOP = ("plain", "resume", "compile")
COMMON = {
    "max_steps": STEPS, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-2,
    "logging_steps": 1, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no",
    "disable_tqdm": True,
}  # fmt: skip
GENERATES = {"num_generations": 2, "max_completion_length": 6}
MODULES = ["gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, Any] = {
    "LoRA": lambda task: LoraConfig(r=4, target_modules=MODULES, init_lora_weights=False, task_type=task),
    "output": lambda task: _experts("output", task),
    "projection": lambda task: _experts("projection", task),
}


class NotOffered(Exception):
    """The trainer lacks the setting, whatever the adapter."""


def _experts(mixing: str, task: str) -> MoELoraConfig:
    return MoELoraConfig(num_experts=4, top_k=2, r=4, mixing=mixing, init_lora_weights=False, task_type=task)


# --- a model and data ----------------------------------------------------------------------------------------------


def base_model(trainer: str) -> Any:
    if REAL:
        return AutoModelForCausalLM.from_pretrained(smollm2_folder())
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, pad_token_id=0, bos_token_id=None, eos_token_id=1, num_labels=1,
    )  # fmt: skip
    return (LlamaForSequenceClassification if trainer == "Reward" else LlamaForCausalLM)(config)


def adapted(trainer: str, adapter: str, coefficient: float) -> Any:
    config: PeftConfig = ADAPTERS[adapter]("SEQ_CLS" if trainer == "Reward" else "CAUSAL_LM")
    if isinstance(config, MoELoraConfig):
        config.router_aux_loss_coef = coefficient
    base = base_model(trainer)
    torch.manual_seed(1)
    return get_peft_model(base, config)


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(smollm2_folder()) if REAL else word_tokenizer(128)


def chat(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def chats(trainer: str) -> Dataset:
    """Conversations with one answer each."""
    rows = []
    for i in range(ROWS):
        prompt = chat("user", f"What is {i} plus {i + 1}?")
        good, bad = chat("assistant", f"It is {2 * i + 1}."), chat("assistant", f"Perhaps {2 * i}?")
        rows.append(
            {
                "SFT": {"messages": prompt + good},
                "DPO": {"prompt": prompt, "chosen": good, "rejected": bad},
                "KTO": {"prompt": prompt, "completion": good if i % 2 else bad, "label": bool(i % 2)},
            }.get(trainer, {"prompt": prompt})
        )
    return Dataset.from_list(rows)


def words(seed: int, count: int) -> str:
    return " ".join(f"w{3 + (7 * seed + 3 * j) % 120}" for j in range(count))


def data(trainer: str) -> Dataset:
    """Rows of different lengths."""
    if REAL:
        return chats(trainer)
    rows = []
    for i in range(ROWS):
        prompt, good, bad = words(i, 3), " " + words(i + 5, 2 + i % 5), " " + words(i + 9, 1 + i % 7)
        rows.append(
            {
                "SFT": {"text": prompt + good},
                "KTO": {"prompt": prompt, "completion": good if i % 2 else bad, "label": bool(i % 2)},
                "GRPO": {"prompt": prompt},
                "RLOO": {"prompt": prompt},
                "DPO": {"prompt": prompt, "chosen": good, "rejected": bad},
                "Reward": {"chosen": prompt + good, "rejected": prompt + bad},
            }.get(trainer)
            or {"input_ids": (ids := [3 + (7 * i + 3 * j) % 120 for j in range(8)]), "labels": ids}
        )
    return Dataset.from_list(rows)


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]  # of chats, messages
    return [float(len(set(text.split()))) + 0.1 * len(text) for text in texts]


# --- one training --------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A finished training."""

    model: PeftModel
    losses: list[float]
    aux_loss: float | None  # of the first step; None: the adapter has none
    folder: Path
    best: str | None = None


def make_trainer(trainer: str, setting: str, adapter: str, folder: Path, coefficient: float, steps: int) -> Trainer:
    cls, config_class = TRAINERS[trainer]
    if trainer == "Reward" and adapter != "LoRA":
        cls, config_class = MoERewardTrainer, MoERewardConfig
    settings = {"gradient_checkpointing": False, **SETTINGS[setting]}
    names = {field.name for field in fields(config_class)}
    if not settings.keys() <= names:
        raise NotOffered
    if setting == "Liger" and trainer == "Reward":  # else Liger gives a reward model a language model's forward
        settings["liger_kernel_config"] = {"fused_linear_cross_entropy": False}
    settings |= GENERATES if "num_generations" in names else {}
    rows = data(trainer)
    more = {} if trainer == "Trainer" else {"processing_class": tokenizer()}
    more |= {"reward_funcs": reward} if "num_generations" in names else {}
    more |= {"eval_dataset": data(trainer).select(range(8))} if "eval_strategy" in settings else {}
    return cls(
        model=adapted(trainer, adapter, coefficient),
        args=config_class(output_dir=str(folder), **{**COMMON, **settings, "max_steps": steps}),
        train_dataset=rows.to_iterable_dataset() if setting == "streaming" else rows,
        **more,
    )


def with_trainer(
    trainer: str, setting: str, adapter: str, folder: Path, coefficient: float, steps: int = STEPS,
    resume: str | None = None,
) -> Run:  # fmt: skip
    made = make_trainer(trainer, setting, adapter, folder, coefficient, steps)
    made.train(resume_from_checkpoint=resume)
    history = [record for record in made.state.log_history if "loss" in record]
    aux_loss = made.aux_loss if isinstance(made, LanguageTrainer) else history[0].get("aux_loss")
    model = made.accelerator.unwrap_model(made.model)
    return Run(model, [record["loss"] for record in history], aux_loss, folder, made.state.best_model_checkpoint)


def in_loop(
    setting: str, adapter: str, folder: Path, coefficient: float, steps: int = STEPS, resume: str | None = None
) -> Run:
    """A hand-written training loop, as accelerate's documentation has it."""
    if setting not in IN_LOOP:
        raise NotOffered
    accelerator = Accelerator(cpu=True)
    model = adapted("loop", adapter, coefficient)
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = data("loop").with_format("torch")
    prepared = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2), DataLoader(rows, batch_size=4))
    module, optimizer, loader = prepared
    if setting == "compile":
        module = torch.compile(module, backend="eager", fullgraph=True)
    first = 0
    if resume is not None:
        accelerator.load_state(resume)
        first = steps // 2
    losses, aux_losses = [], []
    for step, batch in enumerate(loader):
        if not first <= step < steps:
            continue
        output = module.train()(**batch)
        accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
        if output.get("aux_loss") is not None:
            aux_losses.append(output.aux_loss.item())
        if setting == "resume" and step + 1 == steps // 2:
            accelerator.save_state(str(folder / f"checkpoint-{steps // 2}"))
    return Run(accelerator.unwrap_model(model), losses, aux_losses[0] if aux_losses else None, folder)


# --- the checks ----------------------------------------------------------------------------------------------------


def check(holds: bool, failure: str) -> None:
    if not holds:
        raise AssertionError(failure)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def check_moved(run: Run, start: Any) -> None:
    check(all(map(math.isfinite, run.losses)), f"losses {run.losses}")
    after = dict(run.model.named_parameters())
    still = [name for name, before in weights(start).items() if torch.equal(before, after[name])]
    check(not still, f"did not move: {still[:2]}")


def check_balancing(run: Run, without: Run, adapter: str) -> None:
    """The balancing loss is in the first step's loss exactly once."""
    if adapter == "LoRA":
        check(run.aux_loss is None, "a balancing loss without routers")
        check(math.isclose(run.losses[0], without.losses[0], rel_tol=1e-4), "two losses of one step")
        return
    check(run.aux_loss is not None, "no balancing loss is logged")
    added = run.losses[0] - without.losses[0]
    check(math.isclose(added, run.aux_loss or 0, rel_tol=1e-3), f"the loss has {added:.4f} of {run.aux_loss:.4f}")


@torch.no_grad()
def check_saved(run: Run, trainer: str) -> None:
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(2))
    run.model.save_pretrained(str(run.folder / "adapter"), selected_adapters=["default"])
    loaded = PeftModel.from_pretrained(base_model(trainer), str(run.folder / "adapter"))
    ours, theirs = (model.eval()(input_ids=ids).logits for model in (run.model, loaded))
    check(torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), "other logits once loaded")


def check_setting(setting: str, run: Run, again: Any) -> None:
    if setting == "resume":
        other = again(resume=str(run.folder / f"checkpoint-{STEPS // 2}"))
        ours, theirs = weights(run.model), weights(other.model)
        check(all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours), "other weights when resumed")
    if setting == "eval, best model":
        best = load_peft_weights(str(run.best), device="cpu")
        parameters = dict(run.model.named_parameters())
        for name, value in best.items():
            head, _, last = name.rpartition(".")
            values = [parameters[key] for key in (f"{name}.default", f"{head}.default.{last}") if key in parameters]
            check(not values or torch.equal(values[0], value), f"{name} is not the best checkpoint's")


def cell(trainer: str, setting: str, adapter: str) -> str:
    """ "yes", "no: why" or "not with this trainer"."""

    def train(coefficient: float = 1.0, folder: str = "run", how: str = setting, **options: Any) -> Run:
        output = Path(root) / folder
        if trainer == "accelerate loop":
            return in_loop(how, adapter, output, coefficient, **options)
        return with_trainer(trainer, how, adapter, output, coefficient, **options)

    def train_without() -> Run:  # uncompiled, so that a compiled model is compared with one that is not
        return train(0.0, "without", how="plain" if setting == "compile" else setting, steps=1)

    torch._dynamo.reset()
    with (
        tempfile.TemporaryDirectory() as root,
        installed(with_ffn=adapter == "LoRA") if setting == "Liger" else nullcontext(),
    ):
        try:
            run = train(steps=1 if setting == "compile" else STEPS)
            check_moved(run, adapted(trainer, adapter, 1.0))
            check_balancing(run, train_without(), adapter)
            check_saved(run, trainer)
            check_setting(setting, run, lambda resume: train(folder="again", resume=resume))
        except NotOffered:
            return "not with this trainer"
        except Exception as error:  # what a trainer or torch cannot do is the result
            return f"no: {type(error).__name__}: {one_line(error, 160)}"
    return "yes"


# --- the table -----------------------------------------------------------------------------------------------------


def cells(trainers: list[str], settings: list[str]) -> Iterator[list[str]]:
    for trainer in trainers:
        for setting in settings:
            yield [trainer, setting, *(cell(trainer, setting, adapter) for adapter in ADAPTERS)]


@cache
def heading() -> str:
    import peft
    import transformers
    import trl

    return (
        f"# Trainers × adapters{', SmolLM2' * REAL}\n\n"
        f"Made by `python -m compatibility.trainers{' --real' * REAL}` on a CPU: torch {torch.__version__}, "
        f"transformers {transformers.__version__}, peft {peft.__version__}, trl {trl.__version__}. "
        f"{f'{NAME} with chats' if REAL else 'A tiny Llama'}, {STEPS} steps (compiled: 1).\n"
        'The module\'s first lines say what "yes" means. `RewardTrainer` has `RouterLossesMixin` with MoE-LoRA '
        '(its own loss leaves balancing out). "Liger" is a stand-in that patches the model as Liger does.\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", nargs="+", default=list(TRAINERS), choices=list(TRAINERS))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--real", action="store_true", help=f"with {NAME}, for trainers of language models")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    global REAL
    REAL = args.real
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    lines = ["| trainer | setting | LoRA | MoE-LoRA, output | MoE-LoRA, projection |", "|---|---|---|---|---|"]
    for row in cells(args.trainers, args.settings):
        lines.append(f"| {' | '.join(text.replace('|', '/') for text in row)} |")
        print(lines[-1], flush=True)
    out = args.out or RESULTS / ("trainers_smollm2.md" if REAL else "trainers.md")
    out.write_text("\n".join([heading(), *lines, ""]))


if __name__ == "__main__":
    main()
