"""
`RequestGate` against plain loops: what it reads of a request and what it does not, the regression, adapters that come
and go, and files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen3MoeConfig,
)

from moe_peft import RequestGate
from moe_peft.combine.kernel_ridge import KernelRidge, thinning
from moe_peft.combine.request_gate import FILE, RequestReader, copy_without
from moe_peft.combine.request_texts import (
    PARTS,
    neutral_requests,
    one_form,
    parts_of,
    request_text,
    user_turns,
)
from moe_peft.native.folders import DenseFolder
from moe_peft.utils.messages import InputError
from tests.helpers.bad_input import cut, text, without
from tests.helpers.chat_model import save_chat_model
from tests.helpers.close import assert_near
from tests.helpers.gate_case import LETTERS, NEUTRAL, TEXTS, requests, save_base
from tests.helpers.native_case import SIZE


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("gate") / "base")


@pytest.fixture(scope="module")
def gate(base):
    return RequestGate.fit(base, TEXTS, NEUTRAL, chat=True)


# --- the regression --------------------------------------------------------------------------------------------------


def test_the_regression_minimizes_its_weighted_loss():
    generator, layers, d, counts, penalty = torch.Generator().manual_seed(0), 3, 8, (5, 3, 9), 0.1
    classes = [torch.randn(n, layers, d, generator=generator) * (i + 1) + i for i, n in enumerate(counts)]
    new = torch.randn(4, layers, d, generator=generator)
    rows = [(c, x.double()) for c, of_class in enumerate(classes) for x in of_class]

    def distance(x, y, variances):
        return sum(float((x[i] - y[i]).square().sum()) / variances[i] for i in range(layers)) / (2 * layers)

    mean = sum(x for _, x in rows) / len(rows)
    variances = [sum(float((x[i] - mean[i]).square().sum()) for _, x in rows) / len(rows) for i in range(layers)]
    kernel = torch.tensor([[math.exp(-distance(x, y, variances) / 2) for _, y in rows] for _, x in rows]).double()
    weight = torch.diag(torch.tensor([len(rows) / len(counts) / counts[c] for c, _ in rows]).double())
    target = torch.tensor([[float(c == i) for i in range(len(counts))] for c, _ in rows]).double()
    # where the gradient of Σ w (Ka − y)² + λ aᵀKa is 0
    coefficients = torch.linalg.solve(kernel @ weight @ kernel + penalty * kernel, kernel @ weight @ target)
    asked = torch.tensor([[math.exp(-distance(x.double(), y, variances) / 2) for _, y in rows] for x in new]).double()
    found = KernelRidge(classes, penalty)(new)
    assert found.dtype == torch.float64
    assert_near(found, asked @ coefficients, dtype=torch.float32)  # which distances are in
    assert KernelRidge(classes, penalty)(100 + new).abs().max() < 1e-6  # like none of the texts


def test_a_left_out_score_is_the_score_of_a_regression_without_the_text():
    """By another route: the regression is fitted again without each text and its copies, with the same scales."""
    generator, counts, penalty = torch.Generator().manual_seed(0), (5, 3, 9), 0.1
    classes = [torch.randn(n, 2, 8, generator=generator) + i for i, n in enumerate(counts)]
    number = [0, 1, 2, 3, 0, 5, 6, 2, 8, 9, 10, 11, 12, 9, 9, 15, 16]
    whole = KernelRidge(classes, penalty, torch.tensor(number).split(counts))
    kernel = whole._kernel(whole.x_RF)
    weight = torch.tensor([penalty * counts[c] * len(counts) / sum(counts) for c in whole.class_R]).double()
    for i in range(sum(counts)):
        others = [j for j in range(sum(counts)) if number[j] != number[i]]
        fitted = torch.linalg.solve(kernel[others][:, others] + weight[others].diag(), whole.target_RN[others])
        assert_near(whole.left_out_RN[i], kernel[i, others] @ fitted, dtype=torch.float32)  # of the distances


def test_a_text_that_two_classes_share_counts_for_both():
    generator = torch.Generator().manual_seed(0)
    own, third = (torch.randn(6, 2, 16, generator=generator) + 3 * i for i in (0, 2))
    digests = [torch.arange(6), torch.arange(6), torch.arange(6, 12)]
    shared = KernelRidge([own, own, third], 0.03, digests)(own)
    assert_near(shared[:, 0], shared[:, 1], dtype=torch.float32)
    assert shared[:, :2].min() > 0.8 and KernelRidge([own, own, third], 0.03)(own)[:, :2].max() < 0.6


@pytest.mark.parametrize(
    ("counts", "most", "kept"),
    [((3, 10), 8, (3, 5)), ((3, 10), 13, (3, 10)), ((4, 4, 100), 20, (4, 4, 12)), ((9,) * 8, 4, (1,) * 8)],
)
def test_of_many_texts_evenly_spaced_ones_are_used(monkeypatch, counts, most, kept):
    """Small classes keep all of theirs; a large class loses none for the others' sake that is not needed."""
    monkeypatch.setattr("moe_peft.combine.kernel_ridge.TEXTS", most)
    steps = thinning(counts)
    assert tuple(-(-count // step) for count, step in zip(counts, steps, strict=True)) == kept
    generator = torch.Generator().manual_seed(0)
    classes = [torch.randn(n, 2, 16, generator=generator) for n in counts]
    thinned = [x[::step] for x, step in zip(classes, steps, strict=True)]
    monkeypatch.setattr("moe_peft.combine.kernel_ridge.TEXTS", 10**6)
    expected = KernelRidge(thinned, 0.1)(classes[-1])
    monkeypatch.setattr("moe_peft.combine.kernel_ridge.TEXTS", most)
    assert torch.equal(KernelRidge(classes, 0.1)(classes[-1]), expected)


# --- what is read ----------------------------------------------------------------------------------------------------


def of_one(model, tokenizer, whole: str, part: slice) -> torch.Tensor:
    """The mean of what the first two FFNs read at the tokens of a part of a text, by itself."""
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    counted = [part.start <= a and b <= part.stop and a < b for a, b in encoded["offset_mapping"]]
    seen = []
    handles = [
        layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0][0])) for layer in model.model.layers[:2]
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([encoded["input_ids"]]))
    for handle in handles:
        handle.remove()
    means = []
    for x in seen:
        rows = [row for row, counts in zip(x, counted, strict=True) if counts]
        means.append(sum(rows) / len(rows))
    return torch.stack(means)


@pytest.mark.parametrize("chat", [True, False])
def test_vectors_are_means_over_the_requests_own_tokens(base, chat):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base).eval(), AutoTokenizer.from_pretrained(base)
    gate = RequestGate(model, RequestReader(tokenizer, chat), {})
    texts = ["What is 3 + 4?", "a", "assistant", "user", "  Sort a list,  in a language with\nmany words.\n", "ÄÖÜ → 3"]
    expected = []
    for each in ["what is 3 + 4", "a", "assistant", "user", "sort a list in a language with many words", "äöü → 3"]:
        before = "<|user|>" if chat else ""
        whole = f"{before}{each}<|end|><|assistant|>" if chat else f"{each}\n"
        expected.append(of_one(model, tokenizer, whole, slice(len(before), len(before) + len(each))))
    for batch_size in (1, 4, 16):
        assert_near(gate.read(texts, batch_size), torch.stack(expected), dtype=torch.float16)


@pytest.mark.parametrize("chat", [True, False])
def test_a_long_request_is_read_up_to_max_length(base, chat):
    """Its own tokens count, not the template's; what is far too long is not even tokenized."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base).eval(), AutoTokenizer.from_pretrained(base)
    before = "Always be brief, and friendly. " * 3
    tokenizer.chat_template = tokenizer.chat_template.replace("<|user|>", f"{before}<|user|>", 1)
    gate = RequestGate(model, RequestReader(tokenizer, chat, max_length=8), {})
    read = gate.read(["01234567" + "89" * 500, "01234567abc"])
    assert_near(read[0], read[1])
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "01234567"}], tokenize=False) if chat else ""
    start = whole.find("01234567") if chat else 0
    expected = of_one(model, tokenizer, whole or "01234567", slice(start, start + 8))
    assert_near(read[0], expected, dtype=torch.float16)
    assert gate.reader.batch(["7" * 10**8])["input_ids"].shape[1] < 200


@pytest.mark.parametrize("words", [1, 5000])
def test_system_prompts_and_answers_are_not_read_nor_turns_without_need(gate, words):
    asked = [[{"role": "user", "content": each}] for each in ("0x1x2", "{x}", "axexi")]
    earlier = [{"role": "user", "content": "first " * words}, {"role": "assistant", "content": "an answer"}]
    after = [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": "a result"}]
    longer = [[{"role": "system", "content": "word " * words}, *earlier, *chat, *after] for chat in asked]
    assert torch.equal(gate.scores(longer), gate.scores(asked))


def test_parts_of_a_message_are_its_texts():
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    parts = [
        {"type": "text", "text": "What is"},
        image,
        {"type": "text", "text": "this?"},
        {"type": "text", "text": None},
    ]
    assert request_text([{"role": "user", "content": parts}]) == "What is\nthis?"
    for chat in ([{"role": "user", "content": None}], [{"role": "user"}], [{"role": "system", "content": "x"}], []):
        assert request_text(chat) == ""


def test_an_empty_request_has_scores_and_leaves_others_theirs(gate):
    scores = gate.scores(["", "0x1x2", "  "])
    assert scores.isfinite().all() and torch.equal(scores[0], scores[2])
    assert_near(scores[1:2], gate.scores(["0x1x2"]), dtype=torch.float32)


class Slow:
    """A tokenizer in Python, which knows no offsets."""

    is_fast = False

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.apply_chat_template = tokenizer, tokenizer.apply_chat_template

    def __call__(self, text, return_offsets_mapping, **options):
        assert not return_offsets_mapping
        return self.tokenizer(text, **options)


def test_without_offsets_all_tokens_count(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    slow = RequestGate.fit(model, TEXTS, NEUTRAL, tokenizer=Slow(tokenizer), chat=True)
    whole = "<|user|>0x1x2<|end|><|assistant|>"
    expected = of_one(model, tokenizer, whole, slice(0, len(whole)))
    assert_near(slow.read(["0x1x2"])[0], expected, dtype=torch.float16)
    assert slow.pick(["0x1x2x3", "{x}x("]) == ["math", "code"]


# --- forms of a request ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["What is 3 + 4?", "what is 3 + 4", "WHAT IS 3 + 4!", " What  is\n3 + 4 ", "what is 3 + 4 ..."]
)
def test_writings_of_one_request_are_read_the_same(gate, text):
    assert torch.equal(gate.read([text]), gate.read(["what is 3 + 4"]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Cafe\u0301?", "caf\u00e9"), ("?", "?"), ("", "?"), ("x = 3.14; y", "x = 3.14 y"), ("ＡＢ。", "ａｂ。")],
)
def test_one_form(text, expected):
    assert one_form(text) == expected and one_form(expected) == expected


def test_parts_are_sentences_and_lines():
    text = "Hello! I pay 3.50 for it.\n\nWhat is  it: a or b?\n好。谢谢"
    assert parts_of(text) == ["Hello!", "I pay 3.50 for it.", "What is  it:", "a or b?", "好。", "谢谢"]
    many = parts_of("\n".join(map(str, range(1000))))
    assert len(many) == PARTS and many[0] == "0" and many[-1] == "999"


def test_a_text_of_60_mebibytes_is_split_as_fast_as_one_of_a_mebibyte():
    """A proxy does nothing else meanwhile. Its beginning and its end are read."""

    def seconds(text: str) -> float:
        times = []
        for _ in range(3):
            start = time.thread_time()
            assert parts_of(text)[0] == "Hello!" and parts_of(text)[-1] == "Bye?" and len(parts_of(text)) == 32
            times.append(time.thread_time() - start)
        return min(times)

    short, long = (f"Hello!\n{'x. ' * (size // 3)}\nBye?" for size in (1 << 20, 60 << 20))
    assert seconds(long) < 5 * seconds(short)


def test_turns_of_the_user_the_last_first():
    chat = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    assert user_turns(chat) == ["c", "a"] and user_turns("a") == ["a"] and user_turns([]) == []


def test_the_margin_loses_the_share_that_was_asked_for_or_lies_between_own_and_general_texts(gate):
    scores, own = gate.left_out()
    lead, is_own = scores[:, :-1].max(1).values - scores[:, -1], own < len(gate.names)
    general = max(0.0, float(lead[~is_own].quantile(0.99)))
    margins = []
    for lose in (0.0, 0.05, 0.25, 0.5):
        margins.append(dataclasses.replace(gate, lose=lose).margin)
        quantile = float(lead[is_own].quantile(lose))
        wanted = quantile if quantile <= general else (quantile + general) / 2
        assert margins[-1] == pytest.approx(max(0.0, wanted))
        assert float((lead[is_own] < margins[-1]).double().mean()) <= lose + 0.02
    assert margins == sorted(margins) and gate.margin == dataclasses.replace(gate, lose=0.03).margin


def test_adapters_with_the_same_texts_do_not_lose_them_to_the_base(base):
    """And their texts go to one of the two."""
    same = {**TEXTS, "again": TEXTS["math"], "and again": [text.upper() + "." for text in TEXTS["math"]]}
    gate = RequestGate.fit(base, same, NEUTRAL, chat=True)
    picked = gate.pick(requests("math", 20, seed=1))
    assert sum(name in ("math", "again", "and again") for name in picked) >= 18


# --- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [True, False])
def test_new_requests_go_to_their_adapters_and_others_to_the_base(base, chat):
    gate = RequestGate.fit(base, TEXTS, NEUTRAL, chat=chat)
    assert gate.names == [*TEXTS]
    for name in (*TEXTS, "neutral"):
        expected = None if name == "neutral" else name
        assert gate.pick(requests(name, 20, seed=1)).count(expected) >= 18
    forced = RequestGate.fit(base, TEXTS, [], chat=chat)
    assert None not in forced.pick(requests("neutral", 20, seed=1))


def test_an_adapter_must_be_above_the_base_by_a_margin(gate):
    asked = ["0x1", "+*(", *NEUTRAL]
    scores = gate.scores(asked)
    best, base = scores[:, :-1].max(1).values, scores[:, -1]
    for margin in (0.0, 0.1, 0.5, 2.0):
        picked = dataclasses.replace(gate, fixed_margin=margin).pick(asked)
        assert [name is not None for name in picked] == (best > base + margin).tolist()
    assert not any(dataclasses.replace(gate, fixed_margin=2.0).pick(asked))


def test_whether_requests_are_chats_follows_from_those_given(base):
    chats = {name: [[{"role": "user", "content": each}] for each in of_name] for name, of_name in TEXTS.items()}
    of_chats, of_texts = RequestGate.fit(base, chats, NEUTRAL), RequestGate.fit(base, TEXTS, NEUTRAL)
    assert (of_chats.reader.chat, of_texts.reader.chat) == (True, False)
    expected = RequestGate.fit(base, TEXTS, NEUTRAL, chat=True)
    assert torch.equal(of_chats.scores(NEUTRAL), expected.scores(NEUTRAL))


def test_ours_are_the_neutral_requests_by_default(base):
    assert len(RequestGate.fit(base, {"math": TEXTS["math"]}).texts["base"]) == len(neutral_requests()) > 300


def test_the_first_layers_choose_as_the_whole_model_does(base, gate):
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    whole = RequestGate.fit(model, TEXTS, NEUTRAL, tokenizer=AutoTokenizer.from_pretrained(base), chat=True)
    assert len(gate.model.model.layers) == len(whole.modules) == 2
    assert torch.equal(whole.scores(TEXTS["math"]), gate.scores(TEXTS["math"]))


def test_nothing_is_left_of_an_adapter_that_is_taken_out(base, gate):
    never = RequestGate.fit(base, {name: TEXTS[name] for name in ("math", "prose")}, NEUTRAL, chat=True)
    without_code = gate.without_adapter("code")
    assert without_code.names == never.names and torch.equal(without_code.scores(NEUTRAL), never.scores(NEUTRAL))
    back = without_code.with_adapter("code", TEXTS["code"])
    assert back.names == ["math", "prose", "code"] and back.columns[-1] == "base"
    order = [back.columns.index(name) for name in gate.columns]
    assert_near(back.scores(NEUTRAL)[:, order], gate.scores(NEUTRAL), dtype=torch.float32)
    assert gate.names == [*TEXTS]  # which is as it was
    with pytest.raises(InputError, match="adapter='law': must be one of math, code, prose"):
        gate.without_adapter("law")


def test_the_base_answers_for_an_adapter_that_is_gone(base, gate, tmp_path):
    asked = {name: requests(name, 8, seed=1) for name in TEXTS}
    gone = gate.without_adapter("code", to_base=True)
    assert gone.names == ["math", "prose"] and gate.names == [*TEXTS]
    # Its requests go to the base, and no other request goes elsewhere: the texts are still told apart as before.
    for each, names, best in ((gate, [*TEXTS, "base"], "code"), (gone, ["math", "prose", "base"], "base")):
        assert each.columns == names
        assert names[each.scores(asked["code"]).mean(0).argmax()] == best
    before, after = (g.pick([text for of in asked.values() for text in of] + NEUTRAL) for g in (gate, gone))
    assert "code" in before and after == [None if name == "code" else name for name in before]
    gone.save_pretrained(tmp_path)
    loaded = RequestGate.from_pretrained(tmp_path)
    assert loaded.names == gone.names and torch.equal(loaded.scores(NEUTRAL), gone.scores(NEUTRAL))
    (tmp_path / "pruned").mkdir()
    copy_without(tmp_path, tmp_path / "pruned", ["math"])  # as `prune` does
    assert RequestGate.from_pretrained(tmp_path / "pruned", base).pick(asked["code"]) == [None] * 8
    # It may come back, or leave without a trace.
    assert [*gone.with_adapter("code", TEXTS["code"]).texts] == ["math", "prose", "code", "base"]
    assert not gone.with_adapter("code", TEXTS["code"]).gone
    never = gone.without_adapter("code")
    assert not never.gone and torch.equal(never.scores(NEUTRAL), gate.without_adapter("code").scores(NEUTRAL))
    with pytest.raises(InputError, match="adapter='base': must be one of math, prose"):
        gone.without_adapter("base", to_base=True)


def test_an_adapter_of_the_same_name_replaces(base, gate):
    new = requests("code", 9, seed=2)
    expected = RequestGate.fit(base, {**TEXTS, "code": new}, NEUTRAL, chat=True)
    replaced = gate.with_adapter("code", new)
    assert replaced.names == gate.names and torch.equal(replaced.scores(NEUTRAL), expected.scores(NEUTRAL))


def test_the_order_of_requests_changes_nothing(base, gate):
    backwards = RequestGate.fit(base, {name: texts[::-1] for name, texts in TEXTS.items()}, NEUTRAL[::-1], chat=True)
    assert_near(backwards.scores(NEUTRAL), gate.scores(NEUTRAL), dtype=torch.float32)


def test_adapters_on_the_model_are_not_used(base, gate):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base).eval()
    expected = RequestGate(model, gate.reader, {}).read(["0x1"])
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    assert torch.equal(RequestGate(get_peft_model(model, config), gate.reader, {}).read(["0x1"]), expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"base": ["x"]}, "'base' is the name of the choice of no adapter"), ({"math": []}, "'math' has none with words")],
)
def test_requests_that_cannot_be(base, given, message):
    with pytest.raises(InputError, match=message):
        RequestGate.fit(base, given, NEUTRAL)


def test_one_text_or_chat_is_not_many(gate, base):
    chat = [{"role": "user", "content": "0x1"}]
    for one in ("0x1x2", chat):
        with pytest.raises(InputError, match="must be a list of texts, or of chats"):
            gate.pick(one)
        with pytest.raises(InputError, match="requests of 'math': must be a list of texts, or of chats"):
            RequestGate.fit(base, {"math": one}, NEUTRAL)
    with pytest.raises(InputError, match="requests of 'base': must be a list"):
        RequestGate.fit(base, TEXTS, "neutral.txt")
    assert gate.pick([]) == [] and gate.pick([[{"role": "user", "content": "0x1x2"}]]) == ["math"]


def test_chats_need_a_template_that_takes_them(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    for template in (None, "{{ raise_exception('system first') }}"):
        tokenizer.chat_template = template
        with pytest.raises(InputError, match="chat=True: the tokenizer's chat template: "):
            RequestGate.fit(base, TEXTS, NEUTRAL, chat=True, tokenizer=tokenizer)


def test_requests_without_words_are_for_none(gate):
    assert gate.pick(["", "0x1x2", "  ", [{"role": "system", "content": "0x1x2"}]]) == [None, "math", None, None]
    assert len(gate.with_adapter("law", ["", "  ", "§x§"]).texts["law"]) == 1
    with pytest.raises(InputError, match="'law' has none with words"):
        gate.with_adapter("law", ["", [{"role": "assistant", "content": "x"}]])


def test_half_precision_does_not_overflow_where_requests_are_long(base):
    model = AutoModelForCausalLM.from_pretrained(base).eval().half()
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.data.fill_(60.0)
    gate = RequestGate(model, RequestReader(AutoTokenizer.from_pretrained(base), False), {})
    assert gate.read(["9" * 1000]).isfinite().all()


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_saved_gate_is_the_same(base, gate, tmp_path):
    made = RequestGate.fit(base, TEXTS, NEUTRAL, chat=True, max_length=9)
    made.save_pretrained(tmp_path / "new" / "folder")
    loaded = RequestGate.from_pretrained(tmp_path / "new" / "folder")
    asked = [requests(name, 3, seed=1)[0] for name in LETTERS]
    assert torch.equal(loaded.scores(asked), made.scores(asked)) and loaded.names == made.names
    reader = loaded.reader
    assert (reader.chat, reader.max_length, loaded.base) == (True, 9, str(base))
    # On a base that moved, and on a model in memory.
    gate.save_pretrained(tmp_path)
    (tmp_path / "moved").symlink_to(base)
    for where in (str(tmp_path / "moved"), AutoModelForCausalLM.from_pretrained(base).eval()):
        again = RequestGate.from_pretrained(tmp_path, where, tokenizer=AutoTokenizer.from_pretrained(base))
        assert torch.equal(again.scores(asked), gate.scores(asked))


def test_a_gate_is_read_with_the_tokenizer_beside_it(base, tmp_path):
    """A mixture has its adapters' template, which the base may lack."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "Q: {{ messages[0]['content'] }} A:"
    made = RequestGate.fit(base, TEXTS, NEUTRAL, chat=True, tokenizer=tokenizer)
    made.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert torch.equal(RequestGate.from_pretrained(tmp_path).scores(["0x1x2"]), made.scores(["0x1x2"]))


def test_the_base_is_that_of_the_gates_revision(base, gate, tmp_path, monkeypatch):
    opened = []

    def open_at(path, field, revision):
        opened.append((path, revision))
        return DenseFolder(base, field)

    monkeypatch.setattr("moe_peft.combine.request_gate.open_model", open_at)
    dataclasses.replace(gate, base="org/base", revision="v2").save_pretrained(tmp_path)
    loaded = RequestGate.from_pretrained(tmp_path)
    assert opened == [("org/base", "v2")] and loaded.revision == "v2"


def test_a_gate_finds_its_base_from_anywhere(base, tmp_path, monkeypatch):
    monkeypatch.chdir(base.parent)
    RequestGate.fit(base.name, TEXTS, NEUTRAL).save_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert RequestGate.from_pretrained(tmp_path).pick(["0x1x2x3"]) == ["math"]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma3"])
def test_bases_that_are_a_moe_or_see_images(kind, base, tmp_path):
    """A MoE's first layers; of a multimodal model the language part's, not those of its images."""
    if kind == "qwen3_moe":
        config = Qwen3MoeConfig(
            **{**SIZE, "vocab_size": 320, "num_hidden_layers": 4}, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=16, head_dim=16,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = Gemma3ForConditionalGeneration(Gemma3Config(
            text_config={**SIZE, "vocab_size": 320, "head_dim": 16, "num_hidden_layers": 4},
            vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 6,
                           "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
            mm_tokens_per_image=1,
        ))  # fmt: skip
    model.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "base")
    whole = RequestGate.fit(model.eval(), TEXTS, NEUTRAL, tokenizer=AutoTokenizer.from_pretrained(base))
    assert whole.pick([TEXTS["math"][0], TEXTS["code"][0]]) == ["math", "code"]
    if kind == "qwen3_moe":
        assert_near(RequestGate.fit(tmp_path / "base", TEXTS, NEUTRAL).read(["0x1"]), whole.read(["0x1"]))


def changed(**values):
    """Another description; of the value `...` without that key."""

    def damage(folder) -> None:
        content = (folder / FILE).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["request_gate"])
        about = {key: value for key, value in {**about, **values}.items() if value is not ...}
        save_file(load_file(folder / FILE), folder / FILE, metadata={"request_gate": json.dumps(about)})

    return damage


BAD = {
    "no file": (without(FILE), "has no request_gate.safetensors; make it with moe-peft mix"),
    "empty": (text(FILE, ""), "cannot be read"),
    "cut off": (cut(FILE), "cannot be read"),
    "noise": (text(FILE, bytes(range(256)) * 8), "cannot be read"),
    "of another kind": (lambda folder: save_file({"x": torch.ones(2)}, folder / FILE), "cannot be read: KeyError"),
    "no names": (changed(names=...), "cannot be read: KeyError: 'names'"),
    "names a number": (changed(names=3), "cannot be read: TypeError"),
    "more names": (changed(names=["math", "code", "prose", "base", "law"]), "cannot be read"),
    "nothing": (changed(names=[]), "has no texts"),
    "no penalty": (changed(penalty=...), "cannot be read: KeyError: 'penalty'"),
    "penalty of 0": (changed(penalty=0), "settings that cannot be"),
    "penalty NaN": (changed(penalty=float("nan")), "settings that cannot be"),
    "penalty inf": (changed(penalty=float("inf")), "settings that cannot be"),
    "share NaN": (changed(lose=float("nan")), "settings that cannot be"),
    "share of 1": (changed(lose=1), "settings that cannot be"),
    "a list gone": (changed(lists=["filler"]), "settings that cannot be"),
    "margin NaN": (changed(margin=float("nan")), "settings that cannot be"),
    "margin inf": (changed(margin=float("inf")), "settings that cannot be"),
    "a name twice": (changed(names=["math", "math", "prose", "base"]), "settings that cannot be"),
    "chat a text": (changed(chat="false"), "settings that cannot be"),
    "length a text": (changed(max_length="long"), "cannot be read: invalid literal"),
    "length of 0": (changed(max_length=0), "settings that cannot be"),
    "base gone": (changed(base="nowhere"), "base='nowhere'"),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_and_foreign_files_end_with_one_line(gate, tmp_path, case):
    damage, message = BAD[case]
    gate.save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as error:
        RequestGate.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (torch.full((3, 2, 64), torch.nan), "was made with the base"),
        (torch.zeros(3, 2, 32), "with 64 features in 2 layers that decide"),
        (torch.zeros(3, 3, 64), "was made with the base"),
        (torch.zeros(3, 64), "has no texts"),
        (torch.zeros(0, 2, 64), "has no texts"),
    ],
)
def test_vectors_of_another_base(gate, tmp_path, vectors, message):
    code = dataclasses.replace(gate.texts["code"], vectors=vectors, digests=torch.arange(len(vectors)))
    dataclasses.replace(gate, texts={**gate.texts, "code": code}).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message):
        RequestGate.from_pretrained(tmp_path)


def test_another_base_of_the_same_shape_is_refused(base, gate, tmp_path):
    """With such a base each request would go to the base, without a word."""
    gate.save_pretrained(tmp_path)
    other = AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        other.model.embed_tokens.weight.copy_(other.model.embed_tokens.weight.flip(0))
    with pytest.raises(InputError, match="was made with the base"):
        RequestGate.from_pretrained(tmp_path, other, tokenizer=AutoTokenizer.from_pretrained(base))
    half = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval()
    RequestGate.from_pretrained(tmp_path, half, tokenizer=AutoTokenizer.from_pretrained(base))


def test_a_damaged_base_ends_with_one_line(base, tmp_path):
    save_chat_model(tmp_path / "base")
    cut("model.safetensors")(tmp_path / "base")
    with pytest.raises(InputError, match=r"base='.*'"):
        RequestGate.fit(tmp_path / "base", TEXTS, NEUTRAL)


def test_a_base_that_lacks_weights_of_its_first_layers_is_refused(base, tmp_path):
    save_chat_model(tmp_path / "base")
    file = tmp_path / "base/model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lack model.layers.0.mlp.up_proj.weight"):
        RequestGate.fit(tmp_path / "base", TEXTS, NEUTRAL)


@torch.no_grad()
def test_the_template_before_a_request_is_read_once_and_vectors_are_those_of_whole_texts(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    template = "{{ 'You are helpful. Be brief.' }}{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}"
    tokenizer.chat_template = template
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    lengths: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda m, args, y: lengths.append(y.shape[1]))
    gate = RequestGate(model, RequestReader(tokenizer, True), {})
    texts = ["0x1x2x3", "(x)x{x}", "αxβ" * 9, "a"]
    found, prefix = gate.read(texts), len(gate.reader.prefix)
    longest = max(
        len(tokenizer.apply_chat_template([{"role": "user", "content": t}], return_dict=False)) for t in texts
    )
    assert prefix > 4 and max(lengths[-1:]) <= longest - prefix
    # The FFNs' inputs of whole texts, one by one.
    seen: list[torch.Tensor] = []
    for module in gate.modules:
        module.register_forward_pre_hook(lambda m, args: seen.append(args[0][0]))
    for request, vector_LD in zip(texts, found, strict=True):
        batch = gate.reader.batch([one_form(request)])
        seen.clear()
        model(input_ids=batch["input_ids"])
        own_S = batch["counted"][0].bool()
        assert_near(vector_LD, torch.stack([x_SD[own_S].double().mean(0) for x_SD in seen]), dtype=torch.float16)


def test_a_model_may_move_between_two_requests(base):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base).eval(), AutoTokenizer.from_pretrained(base)
    gate = RequestGate.fit(model, TEXTS, NEUTRAL, tokenizer=tokenizer, chat=True)
    asked = [TEXTS["math"][0], TEXTS["code"][0]]
    assert gate.reader.prefix and gate.pick(asked) == ["math", "code"]
    model.bfloat16()
    assert gate.pick(asked) == ["math", "code"]
