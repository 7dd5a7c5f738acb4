"""General rows with the base's own answers: what they hold, where they stand, and that they are made once."""

from __future__ import annotations

import json
import re

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from peft import LoraConfig, get_peft_model

from moe_peft import MoELoraConfig, with_replay
from moe_peft.training import MoESFTTrainer, answers
from moe_peft.utils.messages import InputError
from tests.helpers.models import tiny_llama
from tests.helpers.training_case import MAPS, make_case, run, weights
from tests.helpers.upit_case import rows, run_as_two_processes

TEMPLATE = (
    "{% for m in messages %}{{ 'w3' if m.role == 'user' else 'w4' if m.role == 'system' else 'w5' }} {{ m.content }} "
    "{% if m.role == 'assistant' %}<eos> {% endif %}{% endfor %}{% if add_generation_prompt %}w5{% endif %}"
)
PART = {"type": "text", "text": "w6"}
REQUESTS = [f"w{20 + i} w{40 + 3 * i} w{90 - i}" for i in range(12)]
ENDS = [1, *range(96, 128)]  # a random model ends soon if many tokens do


def base() -> torch.nn.Module:
    model = tiny_llama(vocab=128).eval()
    model.generation_config.eos_token_id = ENDS
    return model


def answer(model: torch.nn.Module, ids: list[int]) -> list[int]:
    """The base's greedy answer, token by token."""
    said: list[int] = []
    while not said or said[-1] not in ENDS:
        said.append(int(model(torch.tensor([[*ids, *said]])).logits[0, -1].argmax()))
        if len(said) == 300:
            return []
    return said[:-1]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "w7 w8"}
FORMS = {
    "messages": lambda i: {"messages": [user(f"w{i + 9}"), said("w6")]},
    "system prompt": lambda i: {"messages": [SYSTEM, user(f"w{i + 9}"), said("w6")]},
    "conversational pairs": lambda i: {"prompt": [SYSTEM, user(f"w{i + 9}")], "completion": [said("w6")]},
    "pairs": lambda i: {"prompt": f"w{i + 9}", "completion": "w6"},
    "text": lambda i: {"text": f"w{i + 9} w6"},
}


@pytest.fixture
def chatting(tokenizer):
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


@pytest.mark.parametrize("form", FORMS)
def test_every_fifth_row_is_the_base_s_own_answer(form, chatting):
    own = Dataset.from_list([{**FORMS[form](i), "id": i} for i in range(80)])
    model = base()
    mixed = with_replay(own, model, chatting, REQUESTS)
    assert len(mixed) == 100 and mixed.features == own.features
    assert [row for i, row in enumerate(mixed) if i % 5 != 4] == list(own)
    general = [row for i, row in enumerate(mixed) if i % 5 == 4]
    expected = []
    for text in REQUESTS:
        system = [SYSTEM] if form in ("system prompt", "conversational pairs") else []
        words = f"{text}\n" if form in ("pairs", "text") else f"{'w4 w7 w8 ' if system else ''}w3 {text} w5"
        found = chatting.decode(answer(model, chatting(words)["input_ids"]), skip_special_tokens=True)
        chat = [*system, user(text)]
        if found:  # the random base ends most answers
            expected.append({
                "messages": {"messages": [*chat, said(found)]}, "system prompt": {"messages": [*chat, said(found)]},
                "conversational pairs": {"prompt": chat, "completion": [said(found)]},
                "pairs": {"prompt": words, "completion": found}, "text": {"text": words + found},
            }[form])  # fmt: skip
    assert 4 < len(expected) <= 12
    assert general == [{**expected[i % len(expected)], "id": None} for i in range(20)]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_the_share_is_of_all_rows(share, tokenizer):
    mixed = with_replay(Dataset.from_list(rows(60)).remove_columns("domain"), base(), tokenizer, REQUESTS, share)
    general = [row["prompt"].endswith("\n") for row in mixed]
    assert abs(sum(general) / len(mixed) - share) <= 0.01
    half = len(mixed) // 2
    assert abs(sum(general[:half]) - sum(general[half:])) <= 1  # evenly among the others


@pytest.mark.parametrize("config", [LoraConfig(task_type="CAUSAL_LM"), MoELoraConfig(task_type="CAUSAL_LM")])
def test_adapters_do_not_answer(config, tokenizer):
    own = Dataset.from_list(rows(24))
    adapted = get_peft_model(base(), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    assert list(with_replay(own, adapted, tokenizer, REQUESTS)) == list(with_replay(own, base(), tokenizer, REQUESTS))


@pytest.mark.parametrize("kind", [Value("int64"), ClassLabel(names=["x", "y", "z"]), Value("string")])
def test_labels_stay_what_an_expert_map_calls_them(kind, tokenizer):
    features = Features({"prompt": Value("string"), "completion": Value("string"), "domain": kind})
    own = Dataset.from_list([{**row, "domain": i % 3} for i, row in enumerate(rows(24))], features=features)
    mixed = with_replay(own, base(), tokenizer, REQUESTS, label_column="domain")
    labels = {row["prompt"].endswith("\n"): set() for row in mixed}
    for row in mixed:
        labels[row["prompt"].endswith("\n")].add(row["domain"])
    assert labels == {False: {"0", "1", "2"}, True: {"general"}}


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def case(tmp_path, tokenizer) -> dict:
    settings = make_case(tmp_path, tokenizer)
    base().save_pretrained(tmp_path / "base")
    (tmp_path / "requests.txt").write_text("\n".join(REQUESTS))
    return {**settings, "replay": 0.2, "replay_file": str(tmp_path / "requests.txt")}


def trained_rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list, list]]:
    """The rows that each trainer is given: of training, of evaluation."""
    seen = []
    made = MoESFTTrainer.__init__

    def recorded(self, *args, train_dataset, eval_dataset, **kwargs):
        seen.append((list(train_dataset), list(eval_dataset or [])))
        made(self, *args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)

    monkeypatch.setattr(MoESFTTrainer, "__init__", recorded)
    return seen


EXPERTS = {**MAPS, "general": [0, 1, 2, 3, 4, 5]}
RUNS = {
    "plain": {},
    "labels": {"label_column": "domain", "expert_map": EXPERTS},
    "labels, packed": {"label_column": "domain", "expert_map": EXPERTS, "packing": True, "max_length": 64},
    "labels as masks": {"label_column": "domain", "expert_map": EXPERTS, "router_label_mask": True},
    "completions": {"completion_only_loss": True},
    "4 bits": {"load_in_4bit": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_trains_on_them_and_does_not_evaluate_on_them(kind, case, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows(24))))
    seen = trained_rows(monkeypatch)
    own = {**case, "dataset_name": str(folder), "eval_strategy": "steps", "eval_steps": 3, **RUNS[kind]}
    out = run("sft", tmp_path, own)
    assert len(seen) == (2 if kind in ("labels", "labels, packed") else 1)  # stages
    for train, held_out in seen:
        assert len(train) == 30 and sum(row["prompt"].endswith("\n") for row in train) == 6
        assert len(held_out) == 24 and not any(row["prompt"].endswith("\n") for row in held_out)
    assert len((out / "replay.jsonl").read_text().splitlines()) == 6


def test_answers_are_made_once(case, tmp_path, monkeypatch):
    """A resumed run reads them, a torn line is made anew, and so are those of another base."""
    out = run("sft", tmp_path, case)
    file, whole = out / "replay.jsonl", weights(out)
    lines = file.read_text()
    generate, made = answers.greedy_answers, []

    def answered(model, prompts, *args):
        made.append(len(prompts))
        return generate(model, prompts, *args)

    monkeypatch.setattr(answers, "greedy_answers", answered)
    longer = {**case, "max_steps": 8}
    run("sft", tmp_path, longer, "--resume_from_checkpoint", "true")
    assert not made and file.read_text() == lines
    file.write_text(lines[:-9])
    run("sft", tmp_path, {**case, "max_steps": 9}, "--resume_from_checkpoint", "true")
    assert made == [1]
    assert {*file.read_text().splitlines()} == {*lines.splitlines()}
    other = base()
    torch.nn.init.normal_(other.lm_head.weight)
    other.save_pretrained(tmp_path / "base")
    with pytest.raises(SystemExit):  # the checkpoint is of another training
        run("sft", tmp_path, case, "--resume_from_checkpoint", "true")
    assert made == [1, 6] and not {*file.read_text().splitlines()} & {*lines.splitlines()}
    assert len(whole) == len(weights(out))


def test_a_run_killed_while_it_answers_goes_on(case, tmp_path, monkeypatch):
    """With the answers that it had: 16 requests are answered at once."""
    (tmp_path / "requests.txt").write_text("\n".join(f"w{3 + i} w{100 - i}" for i in range(40)))
    case["replay"] = 0.6  # 36 of 60 rows
    run("sft", tmp_path, {**case, "output_dir": str(tmp_path / "whole")})
    expected = weights(tmp_path / "whole")
    generate, made = answers.greedy_answers, []

    def answered(model, prompts, *args):
        if len(made) == 1:
            raise KeyboardInterrupt
        made.append(len(prompts))
        return generate(model, prompts, *args)

    monkeypatch.setattr(answers, "greedy_answers", answered)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run("sft", tmp_path, case)
    made.append(0)
    out = run("sft", tmp_path, case, "--resume_from_checkpoint", "true")
    assert made == [16, 0, 16, 4]
    found = weights(out)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_two_processes_make_them_once(case, tmp_path):
    (tmp_path / "alone").mkdir()
    alone = run("sft", tmp_path / "alone", {**case, "max_steps": 1})
    run_as_two_processes({**case, "max_steps": 1, "output_dir": str(tmp_path / "two")}, tmp_path, "sft")
    assert (tmp_path / "two" / "replay.jsonl").read_text() == (alone / "replay.jsonl").read_text()


def test_the_plan_counts_them(case, tmp_path, capsys):
    run("sft", tmp_path, case, "--dry_run", "true")
    said = capsys.readouterr().out
    assert "30 examples" in said and "replay: 6 more rows" in said
    assert not (tmp_path / "out").exists()


REFUSED = {
    "share": ("sft", {"replay": 1.0}, "replay=1.0: must be a share of all rows"),
    "not a number": ("sft", {"replay": float("nan")}, "replay=nan: "),
    "tokens": ("sft", {"replay_max_new_tokens": 0}, "replay_max_new_tokens=0: must be"),
    "file": ("sft", {"replay_file": "none.txt"}, "replay_file='none.txt': "),
    "file alone": ("sft", {"replay": 0.0}, "set replay, the share of such rows, too"),
    "map": (
        "sft", {"label_column": "domain", "expert_map": MAPS}, "general rows have the label 'general'; give it experts",
    ),
    "never ends": ("sft", {"replay_max_new_tokens": 1}, "the base ends its answers to 0 of 6 requests in 1 tokens"),
    "dpo": ("dpo", {}, "replay: not a setting here; instead: moe-peft sft, which has this setting"),
    "stage": ("sft", {"stages": {"joint": {"replay": 0.2}}}, "stages.joint.replay: unknown key"),
    "one expert": ("sft", {"num_experts": 1, "top_k": 1}, "num_experts=1: "),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_one_line(what, case, tmp_path, capsys):
    command, own, line = REFUSED[what]
    with pytest.raises(SystemExit) as end:
        run(command, tmp_path, {**case, **own})
    assert end.value.code == 2
    errors = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error: ")]
    assert len(errors) == 1 and line in errors[0]
    assert what == "never ends" or not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"input_ids": [3, 4, 5]}, "rows are tokens (input_ids)"),
        ({"text": "w3 w9 w5 w6"}, "has a chat in the words of its template"),
        ({"messages": [{"role": role, "content": [PART]} for role in ("user", "assistant")]}, "content as text"),
    ],
)
def test_rows_without_an_honest_form_are_refused(row, line, chatting):
    with pytest.raises(InputError, match=re.escape(line)):
        with_replay(Dataset.from_list([row] * 8), base(), chatting, REQUESTS)
