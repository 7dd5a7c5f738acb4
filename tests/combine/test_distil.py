"""One LoRA that learns from the answers of several: `distil`, and `mix` with `steps`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaForCausalLM, Trainer, set_seed
from trl import SFTConfig, SFTTrainer

import moe_peft.combine.distil as distilling
from examples.demo.smollm2 import smollm2_folder
from moe_peft import distil
from moe_peft.combine.mix import mix
from moe_peft.native.folders import DenseFolder
from moe_peft.utils.messages import InputError
from tests.helpers.close import assert_near
from tests.helpers.mix_case import DOMAINS, FFN, make_case, rows, settings, write_lora
from tests.helpers.warm import kill_at, start

STEPS, TOKENS = 4, 6
ENDS = [1, 2]  # of the tokenizer, and of the model


def of_case(case: Path, output: Path, data: Path | None = None, **changes: Any) -> Any:
    values = {"into": "lora", "steps": STEPS, "max_new_tokens": TOKENS, "test_examples": 4, "rank": 2}
    values |= {"data": [str(data or case / "prompts.jsonl")], "neutral": str(case / "general.txt")}
    return settings(case, output=str(output), **values | changes)


def write_prompts(file: Path, answer: str, chats: bool = False) -> Path:
    """Rows of three domains, all with one answer; chats may end without any."""
    made = []
    for row in rows(48):
        turns = [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": answer}]
        of_row = {"messages": turns if answer else turns[:1]}
        of_row = of_row if chats else {"prompt": row["text"], "completion": f" {answer}"}
        made.append({**of_row, "domain": row["domain"]})
    file.write_text("\n".join(map(json.dumps, made)))
    return file


@pytest.fixture(scope="module")
def case(tmp_path_factory, tokenizer):
    folder = make_case(tmp_path_factory.mktemp("distil"), tokenizer)
    write_lora(folder / "c", folder / "base", 2, targets=["q_proj", "down_proj"], r=2)
    write_prompts(folder / "prompts.jsonl", "w5 w9")
    (folder / "general.txt").write_text("\n".join(f"w{i} w{i + 9} w{i + 5}" for i in range(3, 100)))
    return folder


@pytest.fixture(scope="module")
def made(case, tmp_path_factory):
    """An output, and what the trainer was given."""
    out, given = tmp_path_factory.mktemp("out") / "one", {}
    with pytest.MonkeyPatch.context() as patch:

        class Seen(distilling._RowTrainer):
            def __init__(self, model: Any, args: Any, train_dataset: Dataset, **kwargs: Any) -> None:
                given["rows"] = train_dataset.to_list()
                super().__init__(model, args, train_dataset=train_dataset, **kwargs)

        patch.setattr(distilling, "_RowTrainer", Seen)
        measured = mix(of_case(case, out))
    return out, given["rows"], measured


def answers_of(out: Path) -> list[dict[str, Any]]:
    return answers_in(out.with_name(f"{out.name}.answers.jsonl"))


def answers_in(file: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, file.read_text().splitlines())]


def plain(case: Path, name: str) -> Any:
    base = AutoModelForCausalLM.from_pretrained(case / "base").eval()
    return base if name == "base" else PeftModel.from_pretrained(base, case / name).eval()


def test_each_prompt_has_the_greedy_answer_of_its_own_adapter(case, made, tokenizer):
    """As PEFT's model gives it alone, without padding. An answer that is cut has no end."""
    lines = answers_of(made[0])
    models = {name: plain(case, name) for name in (*DOMAINS, "base")}
    asked = {(row["text"], row["domain"]) for row in rows(48)}
    assert {line["by"] for line in lines} == models.keys()
    for line in (line for line in lines if "<unk>" not in line["prompt"]):  # of our own list of general requests
        assert line["by"] == "base" or (line["prompt"], line["by"]) in asked
        ids = torch.tensor([tokenizer(line["prompt"])["input_ids"]])
        expected = models[line["by"]].generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0,
            eos_token_id=ENDS,
        )  # fmt: skip
        assert line["tokens"] == expected[0, ids.shape[1] :].tolist()
        assert len(line["tokens"]) == TOKENS or line["tokens"][-1] in ENDS


def test_the_rows_of_the_training_are_these_answers_and_a_fifth_is_of_the_base(case, made, tokenizer):
    out, given, _ = made
    teacher = {(line["prompt"], *line["tokens"]): line["by"] for line in answers_of(out)}
    by = []
    for row in given:
        prompt = row["labels"].count(-100)
        assert row["labels"] == [-100] * prompt + row["input_ids"][prompt:]
        by.append(teacher[tokenizer.decode(row["input_ids"][:prompt]), *row["labels"][prompt:]])
    assert len(by) == 10 * STEPS and by.count("base") == 2 * STEPS
    different = {(*row["input_ids"],): name for row, name in zip(given, by, strict=True)}.values()
    assert {name: [*different].count(name) for name in by} == {"a": 8, "b": 8, "c": 8, "base": 6}  # of 16 rows of each


def test_it_is_one_plain_lora_on_all_linears_of_the_adapters(case, made):
    out, _, measured = made
    config = PeftConfig.from_pretrained(out)
    assert (config.peft_type, config.r) == ("LORA", 2)
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in load_file(out / "adapter_model.safetensors")}
    assert names == {*FFN, "q_proj"}
    assert [*measured.losses][-2:] == ["each its own", "one LoRA (distilled)"]
    assert measured.agreement.keys() == {*DOMAINS}
    report = json.loads((out / "mix.json").read_text())
    assert report["kept"] == measured.kept and report["harm"] == measured.harm
    assert f"{STEPS} steps on the adapters' own answers to 24 prompts" in (out / "README.md").read_text()
    before = AutoModelForCausalLM.from_pretrained(case / "base")(torch.tensor([[5, 9, 50]])).logits
    after = AutoPeftModelForCausalLM.from_pretrained(out).eval()(torch.tensor([[5, 9, 50]])).logits
    assert not torch.equal(before, after)


def test_gold_answers_are_for_the_measurement_alone(case, made, tmp_path):
    """With others, the LoRA and the answers are the same to the bit, and so is a second run with them."""
    out, _, measured = made
    other = mix(of_case(case, tmp_path / "one", write_prompts(tmp_path / "other.jsonl", "w20 w21 w22")))
    files = [folder / "adapter_model.safetensors" for folder in (out, tmp_path / "one")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert answers_of(out) == answers_of(tmp_path / "one")
    assert other.agreement == measured.agreement and other.losses != measured.losses


def killed(point: tuple[str, int], given: Any) -> None:
    kill_at({"generate": LlamaForCausalLM, "train": Trainer}[point[0]], *point)
    mix(given)


@pytest.mark.parametrize("point", [("generate", 4), ("train", 1)])
def test_a_run_that_was_killed_does_not_ask_again(point, case, made, tmp_path, monkeypatch):
    given = of_case(case, tmp_path / "one", batch_size=2)
    process = start(killed, point, given)
    process.join()
    assert process.exitcode == -9 and not (tmp_path / "one" / "mix.json").exists()
    kept = tmp_path / "one.answers.jsonl"
    done = len(kept.read_text().splitlines())
    with kept.open("a") as lines:
        lines.write('{"by": "a", "prom')  # cut while it was written
    asked = []
    generate = LlamaForCausalLM.generate
    monkeypatch.setattr(
        LlamaForCausalLM, "generate", lambda model, **kw: (asked.extend(kw["input_ids"]), generate(model, **kw))[1]
    )
    mix(given)
    everything = answers_of(made[0])
    assert done > 0 and len(asked) == len(everything) - done
    key = {line["key"]: line["tokens"] for line in everything}
    assert {line["key"]: line["tokens"] for line in answers_of(tmp_path / "one")} == key
    files = [folder / "adapter_model.safetensors" for folder in (made[0], tmp_path / "one")]
    if point[0] == "train":
        assert not asked
    assert load_file(files[0]).keys() == load_file(files[1]).keys()


def test_each_row_has_the_same_weight_however_long_its_answer(case, tokenizer, tmp_path):
    model = get_peft_model(plain(case, "base"), LoraConfig(r=2, target_modules=FFN, init_lora_weights=False))
    of_rows = [([5, 9, 50, 2], 1), ([7, 8, 9, 10, 11, 12, 13, 2], 6), ([3, 4, 2], 2)]  # tokens, those of the answer
    data = [{"input_ids": ids, "labels": [-100] * (len(ids) - n) + ids[-n:]} for ids, n in of_rows]
    args = SFTConfig(str(tmp_path), max_length=None, report_to="none", use_cpu=True, bf16=False)
    trainer = distilling._RowTrainer(model, args, train_dataset=Dataset.from_list(data), processing_class=tokenizer)
    loss = trainer.compute_loss(model, trainer.data_collator(data), num_items_in_batch=9)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    wanted = 0
    for ids, n in of_rows:
        log_probs = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        wanted -= sum(log_probs[at - 1, ids[at]] for at in range(len(ids) - n, len(ids))) / n
    wanted = wanted / distilling.ROWS_PER_STEP
    assert_near(loss.detach(), wanted.detach(), dtype=torch.float32)
    wanted.backward()
    assert found
    for name, gradient in found.items():
        assert_near(gradient, model.get_parameter(name).grad, dtype=torch.float32)


@pytest.mark.parametrize("prompts", [[["w5"]], [["w5"], ["w6"], ["w7"]], ["w5", "w6"]])
def test_prompts_that_are_not_a_list_for_each_adapter_are_refused(prompts, case, tokenizer):
    with pytest.raises(InputError, match="distil: prompts: "):
        distil(plain(case, "base"), [str(case / "a"), str(case / "b")], prompts, tokenizer, ["w9"], steps=1)


def test_answers_of_another_adapter_or_length_are_not_taken(case, tmp_path):
    """A file may serve several runs, as when an adapter joins or is trained again."""
    kept = tmp_path / "kept.jsonl"
    mix(of_case(case, tmp_path / "one", answers=str(kept)))
    first = len(kept.read_text().splitlines())
    shutil.copytree(case / "d", tmp_path / "b")
    adapters = [str(case / "a"), str(tmp_path / "b"), str(case / "c")]
    mix(of_case(case, tmp_path / "two", answers=str(kept), adapters=adapters))
    lines = [*map(json.loads, kept.read_text().splitlines())]
    assert {line["by"] for line in lines[first:]} == {"b"}
    mix(of_case(case, tmp_path / "three", answers=str(kept), max_new_tokens=TOKENS - 1))
    lines = [*map(json.loads, kept.read_text().splitlines())][len(lines) :]
    assert len(lines) == first and all(len(line["tokens"]) < TOKENS for line in lines)


def test_answers_of_a_base_that_was_trained_again_are_not_taken(case, tmp_path):
    """Its folder has the same name as before."""
    base = shutil.copytree(case / "base", tmp_path / "base")
    mix(of_case(case, tmp_path / "one", base=str(base), answers=str(tmp_path / "kept.jsonl")))
    before = answers_in(tmp_path / "kept.jsonl")
    other = AutoModelForCausalLM.from_pretrained(base)
    torch.nn.init.normal_(other.lm_head.weight)
    other.save_pretrained(base)
    mix(of_case(case, tmp_path / "two", base=str(base), answers=str(tmp_path / "kept.jsonl")))
    after = answers_in(tmp_path / "kept.jsonl")
    assert len(after) == 2 * len(before) and after[: len(before)] == before


def test_prompts_alone_are_measured_by_the_adapters_own_answers(case, tmp_path):
    """Chats that end with the user: each adapter alone then answers its own as itself."""
    base = shutil.copytree(case / "base", tmp_path / "base")
    own = AutoTokenizer.from_pretrained(base)
    own.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}{{ 'w7 ' if add_generation_prompt }}"
    own.save_pretrained(base)
    data = write_prompts(tmp_path / "chats.jsonl", "", chats=True)
    measured = mix(of_case(case, tmp_path / "one", data, base=str(base)))
    assert measured.right["each its own"]["mean"] == 1
    right = measured.right["one LoRA (distilled)"]
    assert right == {**measured.agreement, "mean": sum(measured.agreement.values()) / 3}
    assert all(line["prompt"].endswith("w7") for line in answers_of(tmp_path / "one"))
    assert any("no right answers" in sentence for sentence in measured.verdict)


def test_empty_answers_are_left_out_with_a_count(case, tokenizer, caplog):
    """Of an adapter that ends some of its answers at once."""
    base = AutoModelForCausalLM.from_pretrained(case / "base").eval()
    prompts = [row["text"] for row in rows(48)]
    teacher = plain(case, "a")
    first = [int(teacher(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0, -1].argmax()) for text in prompts]
    end = max({*first}, key=first.count)
    assert 0 < first.count(end) < len(first)
    base.generation_config.eos_token_id = end
    asked = [prompts, prompts[:1] + [text for text, token in zip(prompts, first, strict=True) if token != end][:1]]
    with caplog.at_level("WARNING", "moe_peft"):
        distil(base, [case / "a", case / "b"], asked, tokenizer, ["w50 w60"], steps=1, rank=1, max_new_tokens=3)
    assert f"{first.count(end)} of {len(prompts)} answers of {case / 'a'} are empty" in caplog.text


@pytest.mark.parametrize("kind", ["4-bit", "8-bit", "bfloat16"])
def test_the_base_may_be_quantized_or_half_precision(kind, case, tokenizer):
    bits = {"4-bit": {"load_in_4bit": True}, "8-bit": {"load_in_8bit": True}}.get(kind)
    config = None if bits is None else BitsAndBytesConfig(**bits)
    dtype = torch.bfloat16 if bits is None else torch.float32
    base = AutoModelForCausalLM.from_pretrained(case / "base", quantization_config=config, dtype=dtype)
    prompts = [["w5 w9", "w20"], ["w50 w60", "w70"]]
    one = distil(base, [case / "a", case / "b"], prompts, tokenizer, ["w100"], steps=2, rank=2, max_new_tokens=3)
    updates = [value for name, value in one.named_parameters() if "lora_B" in name]
    assert updates and all(value.isfinite().all() and value.any() for value in updates)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"into": "moe"}, "steps=4: of one LoRA"),
        ({"steps": None}, "rank: of a LoRA that is trained"),
        ({"into": "moe", "add_to": "x", "adapters": ["a"]}, "steps=4: no adapter can join a distilled LoRA"),
        ({"add_to": "x", "adapters": ["a"]}, "steps=4: no adapter can join a distilled LoRA"),
        (
            {"into": "moe", "steps": None, "rank": None, "learning_rate": 0.1},
            "learning_rate: of a LoRA that is trained",
        ),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"data": "data.jsonl"}, "steps=4: rows of --data are texts"),
        ({"answers": "data.jsonl"}, "answers='.*data.jsonl'"),
        ({"answers": "one line.json"}, "answers='.*one line.json'"),
        ({"answers": "none/x.jsonl"}, "answers='.*none/x.jsonl'"),
        ({"max_length": 1}, "max_length=1"),
    ],
)
def test_what_cannot_be_distilled_is_refused_in_one_line(own, message, case, tmp_path, monkeypatch):
    """Before the base is loaded. A file with something else stays as it is."""
    monkeypatch.setattr(DenseFolder, "load", lambda *_, **__: pytest.fail("the base is loaded"))
    (case / "one line.json").write_text('[{"text": "w5"}]')
    before = {file: file.read_bytes() for file in case.glob("*.json*")}
    own = {name: str(case / value) if name in ("data", "answers") else value for name, value in own.items()}
    with pytest.raises(InputError, match=message) as error:
        mix(of_case(case, tmp_path / "one", **own))
    assert "\n" not in str(error.value) and not (tmp_path / "one").exists()
    assert {file: file.read_bytes() for file in case.glob("*.json*")} == before


SKILLS = {
    "fruit": ["apple", "banana", "cherry", "peach", "lemon", "grape", "mango", "papaya", "plum", "melon", "kiwi",
              "fig"],
    "animal": ["dog", "cat", "horse", "cow", "sheep", "lion", "tiger", "rabbit", "goat", "wolf", "bear", "mouse"],
}  # fmt: skip


def trained(folder: Path, tokenizer: Any, name: str) -> Any:
    """A LoRA of SmolLM2 that says one word, whatever it is asked."""
    set_seed(0)
    base = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=FFN, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    rows_of = [{"prompt": f"{word}:", "completion": f" {name}"} for word in SKILLS[name][:4]]
    args = SFTConfig(
        str(folder / "state"), max_steps=5, per_device_train_batch_size=4, learning_rate=3e-3,
        lr_scheduler_type="constant", save_strategy="no",
        report_to="none", bf16=False, use_cpu=True, gradient_checkpointing=False,
    )  # fmt: skip
    SFTTrainer(model, args, train_dataset=Dataset.from_list(rows_of), processing_class=tokenizer).train()
    model.save_pretrained(folder / name)


def right(model: Any, tokenizer: Any) -> dict[str, int]:
    """How many of the last four words of each skill have its answer, and nothing after it."""
    found = {}
    for name, words in SKILLS.items():
        asked = tokenizer([f"{word}:" for word in words[8:]], return_tensors="pt", padding=True, padding_side="left")
        ids = model.generate(**asked, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        made = tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        found[name] = sum(answer == f" {name}" for answer in made)
    return found


@pytest.mark.slow
def test_one_lora_of_smollm2_has_the_skills_of_two(tmp_path):
    """Which of them is asked for, no LoRA knows alone, and their mean does not either."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    for name in SKILLS:
        trained(tmp_path, tokenizer, name)
    base = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
    mean = PeftModel.from_pretrained(base, tmp_path / "fruit", adapter_name="fruit")
    mean.load_adapter(tmp_path / "animal", "animal")
    mean.add_weighted_adapter([*SKILLS], [0.5, 0.5], "mean", "cat")
    of_ways = {}
    for way in ("mean", *SKILLS):
        mean.set_adapter(way)
        of_ways[way] = right(mean.eval(), tokenizer)
    prompts = [[f"{word}:" for word in words[:8]] for words in SKILLS.values()]
    one = distil(
        mean.unload(), [tmp_path / name for name in SKILLS], prompts, tokenizer, ["Hello!", "Name a color."], steps=10,
        learning_rate=3e-3, max_new_tokens=4,
    )  # fmt: skip
    found = right(one, tokenizer)
    assert of_ways["fruit"]["fruit"] == of_ways["animal"]["animal"] == 4
    assert min(found.values()) >= 2
    assert sum(found.values()) > max(sum(of_way.values()) for of_way in of_ways.values())
