"""`moe-peft demo`: the same few minutes of training for LoRA and for LoRA experts, before and after, and the export."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, PeftConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from ..adapter.config import MoELoraConfig
from ..analysis.figures import method_name, plot_bars, plot_shares
from ..analysis.html import (
    Section,
    load_line,
    losses_line,
    losses_section,
    model_name,
    shares_section,
    who_serves_what,
    write_page,
)
from ..models.layer import routed_layers
from ..native import export_adapter, export_gguf
from ..upit.evaluate import evaluate
from ..utils.io import output_folder, remove
from ..utils.messages import InputError
from .smollm2 import NAME, smollm2_folder
from .tasks import TASKS, make_rows, write_rows

_TRAIN, _TEST = 300, 20  # rows of each domain
_EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2, "r": 8}
_TRAINING: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "gradient_checkpointing": False,  # of a small model it costs a third of the time and saves little memory
    "bf16": False,
    "max_length": 256,
    "report_to": "none",
}
_LONGEST_ANSWER = 24  # tokens
Conversation = list[dict[str, str]]


class Result(NamedTuple):
    """
    What one model does with the held-out rows.

    Args:
        answers: to each row.
        exact: domain → how many answers are right, letter by letter.
        losses: domain → mean loss per token of the answers.
    """

    answers: list[str]
    exact: dict[str, int]
    losses: dict[str, float]


def run_demo(output: Path, model: str | None = None, steps: int = 50) -> dict[str, Result]:
    """
    Train LoRA and LoRA experts on four kinds of short requests, compare them with the base, show which experts serve
    what, and export the experts to a native MoE, with everything printed and kept in `output`.

    Args:
        output: a new folder, or that of an earlier demo.
        model: a causal LM with a chat template, by name or folder; None: SmolLM2-135M-Instruct.
        steps: of 8 rows, for each of the two.

    Returns:
        "base", "LoRA" and "experts" → what they do.
    """
    console, began = Console(markup=False, emoji=False, highlight=False, soft_wrap=True), time.monotonic()
    with output_folder(output, "--output", lambda folder: (folder / "demo.yaml").is_file()) as folder:
        base = model or str(smollm2_folder())
        tokenizer = AutoTokenizer.from_pretrained(base)
        if tokenizer.chat_template is None:
            raise InputError(f"--model {model}: its tokenizer has no chat template; name a chat model")
        _write_files(folder, base, steps)
        train, test = (Dataset.from_list(rows) for rows in make_rows(_TRAIN, _TEST))
        console.print(f"{model or NAME} learns four kinds of requests: {', '.join(TASKS)}.\n\n1. Before:")
        shown = [test["domain"].index(domain) for domain in TASKS]
        untrained = _load(base)
        answers = {"base": _generate(untrained, test["prompt"], tokenizer)}
        console.print(_answer_table(test, shown, answers))

        console.print(
            f"\n2. Training, {steps} steps of 8 rows: a LoRA of rank 16; and 4 LoRA experts of rank 8, of which each "
            "token takes 2."
        )
        experts = MoELoraConfig(**_EXPERTS, task_type="CAUSAL_LM")
        layer: Any = routed_layers(get_peft_model(untrained, experts))[0].module
        # On the same projections, with as many parameters as are active for each token.
        lora = LoraConfig(
            r=16, lora_alpha=32, target_modules=sorted(layer.moe_lora_A["default"]), task_type="CAUSAL_LM"
        )
        losses = {}
        with tqdm(total=2 * steps, unit="step", mininterval=1.0, dynamic_ncols=True) as bar:
            for name, config in {"LoRA": lora, "experts": experts}.items():
                trained = _train(base, config, train, tokenizer, folder / name.lower(), steps, _OneBar(bar, name))
                answers[name] = _generate(trained.eval(), test["prompt"], tokenizer)
                args = SFTConfig(per_device_eval_batch_size=16, **_TRAINING)
                evaluation = evaluate(trained, test, args, tokenizer, "domain")
                losses[name] = evaluation.losses["adapted"]

        console.print("\n3. After:")
        console.print(_answer_table(test, shown, answers))
        results = {
            name: Result(texts, _exact(test, texts), {"base": evaluation.losses["base"], **losses}[name])
            for name, texts in answers.items()
        }
        console.print(_score_table(results))
        shares = {domain: evaluation.shares[domain] for domain in TASKS}
        console.print(f"4. Who serves what? {who_serves_what(shares)}")
        page = _write_page(folder, model_name(model or NAME), results, shares, evaluation.health)
        console.print(f"   With pictures: {page}")

        console.print(f"\n5. {_exported(folder, base, test, shown, results['experts'], tokenizer)}")
        console.print(
            f"\n6. Now yours: edit {folder / 'demo.yaml'} (your model, your data), and run\n"
            f"   moe-peft sft --config {folder / 'demo.yaml'}\n"
            f"That took {(time.monotonic() - began) / 60:.0f} minutes."
        )
    return results


def _write_files(folder: Path, base: str, steps: int) -> None:
    """The data, a link to a base that is a folder, and a YAML file of the experts' training."""
    write_rows(folder, _TRAIN, _TEST)
    link = folder / "base"
    link.unlink(missing_ok=True)
    if os.path.isdir(base):
        link.symlink_to(os.path.abspath(base), target_is_directory=True)
    settings = {
        "model_name_or_path": str(link) if link.exists() else base,
        "dataset_name": str(folder / "train.jsonl"),
        "output_dir": str(folder / "yours"),
        "max_steps": steps,
        **_EXPERTS,
        **_TRAINING,
    }
    text = yaml.safe_dump(settings, sort_keys=False)
    (folder / "demo.yaml").write_text(
        f"# LoRA experts, trained by: moe-peft sft --config {folder / 'demo.yaml'}\n{text}"
    )


def _load(base: str | Path) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device)


class _OneBar(TrainerCallback):
    """Moves a bar that several trainings share."""

    def __init__(self, bar: Any, name: str) -> None:
        self.bar, self.name = bar, name

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.bar.set_description(f"{self.name}, loss {logs['loss']:.2f}")


def _train(
    base: str,
    config: PeftConfig,
    train: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    steps: int,
    callback: TrainerCallback,
) -> Any:
    # The rows are short, so they need no truncation, and without padding take a sixth less time.
    options = {**_TRAINING, "max_length": None, "padding_free": True}
    args = SFTConfig(
        str(folder), max_steps=steps, logging_steps=5, save_strategy="no", disable_tqdm=True, seed=0, **options
    )
    trainer = SFTTrainer(
        model=_load(base), args=args, train_dataset=train.remove_columns("domain"), processing_class=tokenizer,
        peft_config=config, callbacks=[callback],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()
    tokenizer.save_pretrained(folder)
    return trainer.model


def _exact(test: Dataset, answers: Sequence[str]) -> dict[str, int]:
    """Domain → right answers."""
    exact = dict.fromkeys(TASKS, 0)
    for answer, row in zip(answers, test, strict=True):
        exact[row["domain"]] += answer == row["completion"][0]["content"]
    return exact


@torch.no_grad()
def _generate(model: Any, prompts: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Greedy answers."""
    answers = []
    for start in range(0, len(prompts), 40):
        batch = tokenizer.apply_chat_template(
            list(prompts[start : start + 40]), add_generation_prompt=True, padding=True,
            tokenizer_kwargs={"padding_side": "left"}, return_tensors="pt", return_dict=True,
        ).to(model.device)  # fmt: skip
        tokens = model.generate(
            **batch, max_new_tokens=_LONGEST_ANSWER, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        answers += tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [answer.strip() for answer in answers]


def _answer_table(test: Dataset, rows: Sequence[int], answers: Mapping[str, Sequence[str]]) -> Table:
    """Some requests beside the right answers and the models'."""
    table = Table("request", "right", *answers, show_lines=True)
    for row in rows:
        texts = [of_model[row].splitlines() for of_model in answers.values()]
        first = [lines[0] + (" …" if len(lines) > 1 else "") if lines else "(nothing)" for lines in texts]
        table.add_row(test[row]["prompt"][0]["content"], test[row]["completion"][0]["content"], *first)
    return table


def _score_table(results: Mapping[str, Result]) -> Table:
    columns = [f"{name} {measure}" for measure in ("right", "loss") for name in results]
    table = Table(f"of {_TEST} held-out requests", *columns)
    for domain in [*TASKS, "mean"]:
        right = [
            f"{sum(result.exact.values()) / len(TASKS):.1f}" if domain == "mean" else str(result.exact[domain])
            for result in results.values()
        ]
        table.add_row(domain, *right, *(f"{result.losses[domain]:.3f}" for result in results.values()))
    return table


def _write_page(
    folder: Path, model: str, results: Mapping[str, Result], shares: Mapping[str, torch.Tensor], health: Any
) -> Path:
    """`report.html`, with its pictures: `answers.png`, `losses.png` and `routing.png`."""
    names = {name: method_name(name) for name in results}
    exact = {names[name]: result.exact for name, result in results.items()}
    losses = {names[name]: {d: result.losses[d] for d in [*TASKS, "mean"]} for name, result in results.items()}
    title = f"{model}: right answers to {_TEST} new requests of each kind"
    plot_bars(exact, folder / "answers.png", title, "{:.0f}")
    plot_shares(shares, folder / "routing.png", "Where each domain's tokens go")
    sections = [
        Section("Right answers", [f"To {_TEST} held-out requests of each kind."], figure=folder / "answers.png"),
        losses_section(losses, folder / "losses.png"),
        shares_section(shares, folder / "routing.png"),
    ]
    lead = [losses_line(losses), load_line(health), who_serves_what(shares)]
    return write_page(folder / "report.html", f"MoE-LoRA on {model}", lead, sections)


def _exported(
    folder: Path,
    base: str,
    test: Dataset,
    rows: Sequence[int],
    result: Result,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Export, and ask plain transformers and llama.cpp the same."""
    gguf = folder / "exported.gguf"
    remove(folder / "exported")  # of an earlier demo
    remove(gguf)
    try:
        moe = export_adapter(folder / "experts", folder / "exported", base)
    except InputError as error:
        return f"Not exported: {error}"
    requests = [test[row]["prompt"] for row in rows]
    answers = {"plain transformers": _generate(_load(moe).eval(), requests, tokenizer)}
    if importlib.util.find_spec("xllamacpp") is not None:
        with suppress(InputError):  # llama.cpp lacks the family
            answers["llama.cpp"] = _ask_llama_cpp(export_gguf(moe, gguf), requests)
    same = [
        f"{sum(text == result.answers[row] for text, row in zip(texts, rows, strict=True))} in {name}"
        for name, texts in answers.items()
    ]
    size = sum(file.stat().st_size for file in moe.iterdir()) / 1e9
    return (
        f"Exported as a native MoE ({size:.1f} GB in float32), which no longer needs moe_peft: {moe}\n"
        f"   Answers that are the adapter's, of the {len(rows)} above: {', '.join(same)}."
    )


def _ask_llama_cpp(gguf: Path, requests: Sequence[Conversation]) -> list[str]:
    """Greedy answers of llama.cpp, by the chat template in the file."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx, params.n_parallel, params.verbosity = 512, 1, -1
    server = xllamacpp.Server(params)
    answers = []
    for request in requests:
        options = {"messages": request, "temperature": 0, "max_tokens": _LONGEST_ANSWER, "cache_prompt": False}
        reply = server.handle_chat_completions(options)
        answers.append(reply["choices"][0]["message"]["content"].strip())
    return answers
