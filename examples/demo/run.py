"""
`make demo`: four LoRAs become one model, which is compared with what else one could do with them, asked what no LoRA
is for, and exported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from datasets import Dataset
from peft import LoraConfig
from pydantic import Field
from rich.console import Console
from rich.table import Column, Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from moe_peft.adapter.lora_conversion import lora_to_moe
from moe_peft.analysis.figures import plot_bars, plot_shares
from moe_peft.analysis.html import Section, shares_section, who_serves_what, write_page
from moe_peft.cli.settings import SettingsParser
from moe_peft.combine.distil import Teachers, prompt_tokens, with_general
from moe_peft.combine.regmean import regmean
from moe_peft.combine.request_gate import RequestGate
from moe_peft.combine.request_texts import neutral_requests
from moe_peft.models.gate_init import init_gates
from moe_peft.models.gates import uniform_gates
from moe_peft.models.introspection import greedy_decoding
from moe_peft.models.steering import force_experts
from moe_peft.native import export_adapter, export_gguf
from moe_peft.training.answers import AnswersFile
from moe_peft.training.preparation import calibration_batches
from moe_peft.upit.evaluate import evaluate
from moe_peft.upit.lora_experts import ffn_projections
from moe_peft.utils.io import output_folder, remove
from moe_peft.utils.messages import InputError
from moe_peft.utils.model_card import last_part
from moe_peft.utils.validation import Count, Settings, Text

from .smollm2 import NAME, smollm2_folder
from .tasks import TASKS, make_rows, write_rows

_TRAIN, _TEST = 300, 20  # rows of each domain
_ASKED = 10  # of the held-out ones
_CALIBRATION = 24  # rows of each domain that set the gates
_PROMPTS = 60  # requests of each domain that the LoRAs answer, to distil them
_RANK = 8
_TRAINING: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "gradient_checkpointing": False,  # of a small model it costs a third of the time and saves little memory
    "bf16": False,
    "report_to": "none",
}
_LONGEST_ANSWER = 24  # tokens
Conversation = list[dict[str, str]]

# The ways to answer, in the order in which they are shown.
_WAYS = (
    "base", "mean of four LoRAs", "one LoRA, merged", "one LoRA, distilled", "mixture", "picked for each request",
    "each its own LoRA", "one LoRA for all",
)  # fmt: skip
_SYSTEM = {"role": "system", "content": "You are the assistant of a small hotel. Be friendly, and mention no prices."}
_GENERAL = ("What is the capital of France?", "Name a color.")


class DemoSettings(Settings):
    model: Text | None = Field(None, description="another causal LM with a chat template, by name or folder")
    output: Text = Field("demo", title="FOLDER", description="folder for everything that is made")
    steps: Count = Field(96, description="training steps of the four LoRAs together, of 4 rows each")


def parser(prog: str) -> SettingsParser:
    return SettingsParser(
        DemoSettings,
        "python -m examples.demo",
        description="See it work in about ten minutes on two cores: four LoRA adapters of SmolLM2-135M-Instruct become "
        "one model, or one of them is picked for each request; the model is exported to a native MoE.",
        epilog="example:\n  python -m examples.demo --output demo --steps 96",
    )


def run(settings: DemoSettings) -> None:
    run_demo(Path(settings.output), settings.model, settings.steps)


class Result(NamedTuple):
    """
    How one way to answer does on the held-out rows.

    Args:
        answers: to each row.
        exact: domain → how many answers are right, letter by letter.
    """

    answers: list[str]
    exact: dict[str, int]


def run_demo(output: Path, model: str | None = None, steps: int = 96) -> dict[str, Result]:
    """
    Train a LoRA for each of four kinds of short requests, make one mixture of them and a gate that picks one for a
    request, compare these with what else one could do, and export the mixture, with everything printed and kept in
    `output`.

    Args:
        output: a new folder, or that of an earlier demo.
        model: a causal LM with a chat template, by name or folder; None: SmolLM2-135M-Instruct.
        steps: of 4 rows, of the four LoRAs together, and of one LoRA for all.

    Returns:
        way to answer → what it does.
    """
    console, began = Console(markup=False, emoji=False, highlight=False, soft_wrap=True), time.monotonic()
    with output_folder(output, "--output", lambda folder: (folder / "demo.yaml").is_file()) as folder:
        base = model or str(smollm2_folder())
        tokenizer = AutoTokenizer.from_pretrained(base)
        if tokenizer.chat_template is None:
            raise InputError(f"--model {model}: its tokenizer has no chat template; name a chat model")
        _write_files(folder, base)
        train, test = (Dataset.from_list(rows) for rows in make_rows(_TRAIN, _TEST))
        test = test.select([row for task in TASKS for row in _of(test, task)[:_ASKED]])
        shown, answers = [test["domain"].index(domain) for domain in TASKS], {}

        console.print(f"{model or NAME} and four kinds of requests: {', '.join(TASKS)}.\n\n1. Before:")
        untrained = _load(base)
        targets = ffn_projections(untrained, None)  # experts are then FFNs, and a mixture can be exported
        answers["base"] = _generate(untrained, test["prompt"], tokenizer)
        del untrained
        console.print(_answer_table(test, shown, answers))

        each = max(steps // len(TASKS), 1)
        console.print(
            f"\n2. A LoRA of rank {_RANK} for each kind, as anyone has them: {each} steps of 4 rows. For comparison, "
            f"one LoRA of rank {2 * _RANK} for all, {each * len(TASKS)} steps."
        )
        often = 1.0 if sys.stderr.isatty() else 20.0  # seconds
        with tqdm(total=3 * each * len(TASKS), unit="step", mininterval=often, dynamic_ncols=True) as bar:
            trainer = _Trainer(base, tokenizer, folder, bar)
            for task in TASKS:
                trainer.train(task, _lora(targets, _RANK), train.select(_of(train, task)), each)
            one = trainer.train("one LoRA", _lora(targets, 2 * _RANK), train, each * len(TASKS))
            answers["one LoRA for all"] = _generate(one, test["prompt"], tokenizer)
            del one

            console.print(
                "\n   One LoRA of the four, without their rows' answers: `moe-peft mix --into lora`. Merged by least "
                f"squares, or trained on what the four answer to {_PROMPTS} requests of each kind, in as many steps."
            )
            merged = _merged(base, folder, train, tokenizer)
            answers["one LoRA, merged"] = _generate(merged, test["prompt"], tokenizer)
            del merged
            rows = _taught(base, folder, train, tokenizer)
            distilled = trainer.train("distilled", _lora(targets, 2 * _RANK), rows, each * len(TASKS))
            answers["one LoRA, distilled"] = _generate(distilled, test["prompt"], tokenizer)
            del distilled

        console.print("\n3. One model of the four: `moe-peft mix`, without training.")
        mixed = time.monotonic()
        mixture, gate = _mix(base, folder, train, tokenizer)
        console.print(
            f"   {time.monotonic() - mixed:.0f} seconds. For each token, a router picks its LoRA. Beside it, a gate "
            "picks one for a whole request, or the base (`moe-peft pick`)."
        )
        with uniform_gates(mixture, "projection"):
            answers["mean of four LoRAs"] = _generate(mixture, test["prompt"], tokenizer)
        answers["mixture"] = _generate(mixture, test["prompt"], tokenizer)
        answers["each its own LoRA"] = _served(mixture, test["prompt"], test["domain"], tokenizer)
        picks = gate.pick(test["prompt"])
        answers["picked for each request"] = _served(mixture, test["prompt"], picks, tokenizer)
        shares = _shares(mixture, test, tokenizer)

        console.print("\n4. The same requests:")
        results = {way: Result(answers[way], _exact(test, answers[way])) for way in _WAYS}
        console.print(_answer_table(test, shown, answers))
        console.print(_score_table(results))
        asked, others = _others(test, shown), {}
        console.print(
            "   And what no LoRA is for, a system prompt that none has seen, and a talk that changes its kind:"
        )
        picked = gate.pick(asked)
        others["base"] = _served(mixture, asked, [None] * len(asked), tokenizer)
        others["mixture"] = _generate(mixture, asked, tokenizer)
        others["picked"] = _served(mixture, asked, picked, tokenizer)
        console.print(_others_table(asked, others, picked))
        verdict = _verdict(results, others, picked)
        console.print(f"   {verdict}\n")

        console.print(f"5. Where do tokens go in the mixture? {who_serves_what(shares, [*TASKS])}")
        page = _write_page(folder, last_part(model or NAME), results, shares, verdict)
        console.print(f"   With pictures: {page}")

        console.print(f"\n6. {_exported(folder, base, test, shown, results['mixture'], tokenizer)}")
        console.print(
            f"\n7. Now yours. Talk with it; each question gets its LoRA, or the base, and /why shows a token's:\n"
            f"   moe-peft chat --model {folder / 'mixture'}\n"
            f"   Your own adapters: edit {folder / 'demo.yaml'}, and run\n"
            f"   moe-peft mix --config {folder / 'demo.yaml'}\n"
            f"That took {(time.monotonic() - began) / 60:.0f} minutes."
        )
    return results


def _write_files(folder: Path, base: str) -> None:
    """The data, a link to a base that is a folder, and a YAML file of the mixture."""
    write_rows(folder, _TRAIN, _TEST)
    link = folder / "base"
    link.unlink(missing_ok=True)
    if os.path.isdir(base):
        link.symlink_to(os.path.abspath(base), target_is_directory=True)
    settings = {
        "adapters": [str(folder / task) for task in TASKS],
        "data": [str(folder / "train.jsonl")],
        "label_column": "domain",
        "base": str(link) if link.exists() else base,
        "output": str(folder / "yours"),
    }
    text = yaml.safe_dump(settings, sort_keys=False)
    (folder / "demo.yaml").write_text(
        f"# One model of four LoRAs: moe-peft mix --config {folder / 'demo.yaml'}\n{text}", encoding="utf-8"
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


class _Trainer(NamedTuple):
    """Trains adapters one after the other, by TRL's trainer."""

    base: str
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    bar: Any

    def train(self, name: str, adapter: LoraConfig, rows: Dataset, steps: int) -> Any:
        """Train a new adapter of the base, and save it in a folder of its name."""
        folder = self.folder / name.replace(" ", "-")
        # The rows are short, so they need no truncation, and without padding take a sixth less time.
        args = SFTConfig(
            str(folder), max_steps=steps, logging_steps=5, save_strategy="no", disable_tqdm=True, seed=0,
            max_length=None, padding_free=True, **_TRAINING,
        )  # fmt: skip
        data = rows.remove_columns([name for name in rows.column_names if name in ("domain", "expert")])
        trainer = SFTTrainer(
            model=_load(self.base), args=args, train_dataset=data, processing_class=self.tokenizer,
            peft_config=adapter, callbacks=[_OneBar(self.bar, name)],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.save_model()
        self.tokenizer.save_pretrained(folder)
        return trainer.model.eval()


def _of(rows: Dataset, task: str) -> list[int]:
    return [i for i, domain in enumerate(rows["domain"]) if domain == task]


def _lora(targets: list[str], rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")


def _mix(base: str, folder: Path, train: Dataset, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, RequestGate]:
    """The mixture of the four LoRAs, and the gate that picks one for a request, as `moe-peft mix` makes both."""
    mixture = lora_to_moe(
        _load(base), [folder / task for task in TASKS], top_k=1, task_type="CAUSAL_LM", expert_names=[*TASKS]
    )
    init_gates(mixture, "ridge", calibration_batches(_texts(train), tokenizer, columns=["expert"]))
    gate = RequestGate.fit(base, {task: train.select(_of(train, task)[:_CALIBRATION])["prompt"] for task in TASKS})
    for part in (mixture, tokenizer, gate):
        part.save_pretrained(folder / "mixture")
    return mixture.eval(), gate


def _texts(train: Dataset, general: Sequence[str] = ()) -> Dataset:
    """Some rows of each domain, with the index of their LoRA, and general requests with the index after the last."""
    rows = [
        {"messages": [*row["prompt"], *row["completion"]], "expert": i}
        for i, task in enumerate(TASKS)
        for row in train.select(_of(train, task)[:_CALIBRATION])
    ]
    chats = [[{"role": "user", "content": text}] for text in general]
    return Dataset.from_list([*rows, *({"messages": chat, "expert": len(TASKS)} for chat in chats)])


def _merged(base: str, folder: Path, train: Dataset, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The four LoRAs as one, by least squares."""
    texts = _texts(train, neutral_requests()[:_CALIBRATION])
    batches = calibration_batches(texts, tokenizer, columns=["expert"])
    merged = regmean(_load(base), [folder / task for task in TASKS], batches)
    merged.save_pretrained(folder / "merged")
    return merged


def _taught(base: str, folder: Path, train: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Requests of each domain with their LoRA's answer, and general ones with the base's, as tokens."""
    chats = [train.select(_of(train, task)[-_PROMPTS:])["prompt"] for task in TASKS]
    general = [[{"role": "user", "content": text}] for text in neutral_requests()]
    *own, of_base = [[prompt_tokens(tokenizer, chat) for chat in of_one] for of_one in (*chats, general)]
    folders, file = [folder / task for task in TASKS], AnswersFile(folder / "answers.jsonl")
    teachers = Teachers(_load(base), folders, tokenizer, _LONGEST_ANSWER, 40, file)
    return Dataset.from_list(teachers.rows(with_general(own, of_base, seed=0)))


def _served(
    mixture: Any, prompts: Sequence[Conversation], by: Sequence[str | None], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Answers of the LoRA that each request is given to; of the base where that is None."""
    answers = [""] * len(prompts)
    for name in dict.fromkeys(by):
        rows = [i for i, other in enumerate(by) if other == name]
        with mixture.disable_adapter() if name is None else force_experts(mixture, name):
            found = _generate(mixture, [prompts[i] for i in rows], tokenizer)
        for i, answer in zip(rows, found, strict=True):
            answers[i] = answer
    return answers


def _others(test: Dataset, rows: Sequence[int]) -> list[Conversation]:
    """General requests; one of a kind behind a system prompt; one after a turn of another kind."""
    first, second = (test[row] for row in rows[:2])
    return [
        *([{"role": "user", "content": text}] for text in _GENERAL),
        [_SYSTEM, *first["prompt"]],
        [*first["prompt"], *first["completion"], *second["prompt"]],
    ]


def _shares(mixture: Any, test: Dataset, tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    """Domain → the share of its tokens that each expert of each layer serves, [L, n]."""
    shares = evaluate(mixture, test, SFTConfig(per_device_eval_batch_size=16, **_TRAINING), tokenizer, "domain").shares
    return {task: shares[task] for task in TASKS}


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
        with greedy_decoding(model):
            tokens = model.generate(**batch, max_new_tokens=_LONGEST_ANSWER, pad_token_id=tokenizer.pad_token_id)
        answers += tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [answer.strip() for answer in answers]


def _answer_table(test: Dataset, rows: Sequence[int], answers: Mapping[str, Sequence[str]]) -> Table:
    """A request of each kind: the right answer, and that of each way."""
    table = Table(Column(no_wrap=True), *(test[row]["prompt"][0]["content"] for row in rows), show_lines=True)
    table.add_row("right", *(test[row]["completion"][0]["content"] for row in rows))
    for way in (way for way in _WAYS if way in answers):
        lines = [answers[way][row].splitlines() or ["(nothing)"] for row in rows]
        table.add_row(way, *(first + (" …" if others else "") for first, *others in lines))
    return table


def _others_table(
    asked: Sequence[Conversation], answers: Mapping[str, Sequence[str]], picked: Sequence[str | None]
) -> Table:
    heads = [
        ("system prompt: " if c[0]["role"] == "system" else "then: " if len(c) > 1 else "") + c[-1]["content"]
        for c in asked
    ]
    table = Table(Column(no_wrap=True), *heads, show_lines=True)
    for way, texts in answers.items():
        lines = [text.splitlines()[0] if text else "(nothing)" for text in texts]
        if way == "picked":
            lines = [f"{name or 'base'}: {line}" for name, line in zip(picked, lines, strict=True)]
        table.add_row(way, *lines)
    return table


def _verdict(results: Mapping[str, Result], others: Mapping[str, Sequence[str]], picked: Sequence[str | None]) -> str:
    """Who won, in two sentences."""
    right = {way: sum(result.exact.values()) for way, result in results.items()}
    best = max(right.values())
    winners = [way for way, count in right.items() if count == best]
    ours = f"picked for each request {right['picked for each request']}, mixture {right['mixture']}"
    kept = sum(a == b for a, b in zip(others["picked"][:2], others["base"][:2], strict=True))
    changed = sum(a != b for a, b in zip(others["mixture"][:2], others["base"][:2], strict=True))
    return (
        f"Verdict: of {_ASKED * len(TASKS)} requests {' and '.join(winners)} had most right, {best} ({ours}). Of two "
        f"general requests, picking answered {kept} as the base does; the mixture answered {changed} otherwise."
    )


def _score_table(results: Mapping[str, Result]) -> Table:
    table = Table(f"right, of {_ASKED} held-out requests", *TASKS, "mean")
    for way, result in results.items():
        mean = f"{sum(result.exact.values()) / len(TASKS):.1f}"
        table.add_row(way, *(str(result.exact[task]) for task in TASKS), mean)
    return table


def _write_page(
    folder: Path, model: str, results: Mapping[str, Result], shares: Mapping[str, torch.Tensor], verdict: str
) -> Path:
    """`report.html`, with its pictures: `answers.png` and `routing.png`."""
    title = f"{model}: right answers to {_ASKED} new requests of each kind"
    plot_bars({way: result.exact for way, result in results.items()}, folder / "answers.png", title, "{:.0f}")
    own = {task: [expert] for expert, task in enumerate(TASKS)}
    plot_shares(shares, folder / "routing.png", "Where each kind's tokens go", own, names=[*TASKS])
    sections = [
        Section("Right answers", [f"To {_ASKED} held-out requests of each kind."], figure=folder / "answers.png"),
        shares_section(shares, folder / "routing.png", names=[*TASKS]),
    ]
    lead = [verdict, who_serves_what(shares, [*TASKS])]
    return write_page(folder / "report.html", f"One model of four LoRAs: {model}", lead, sections)


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
        moe = export_adapter(folder / "mixture", folder / "exported", base)
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
    params.cpuparams.n_threads = torch.get_num_threads()  # its threads spin while they wait for each other
    server = xllamacpp.Server(params)
    answers = []
    for request in requests:
        options = {"messages": request, "temperature": 0, "max_tokens": _LONGEST_ANSWER, "cache_prompt": False}
        reply = server.handle_chat_completions(options)
        answers.append(reply["choices"][0]["message"]["content"].strip())
    return answers
