"""Answers and the experts of their tokens, against `generate` and plain forward passes."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from examples.demo.smollm2 import smollm2_folder
from moe_peft import MoELoraConfig, allow_experts, force_experts, lora_to_moe, record_routing
from moe_peft.analysis import Routes, record_routes
from moe_peft.chat import Answer, Conversation
from moe_peft.combine.mix import mix
from moe_peft.combine.mix_settings import MixSettings
from moe_peft.models.introspection import observed_routing
from moe_peft.models.layer import router_parameters
from moe_peft.native.folders import open_folder
from moe_peft.utils.messages import InputError
from moe_peft.utils.validation import validate
from tests.helpers.chat_model import save_chat_model, slow_down
from tests.helpers.close import assert_near
from tests.helpers.models import tiny_llama
from tests.helpers.routed_models import COMMON, K, N

NATIVE = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**COMMON | {"vocab_size": 320}, num_local_experts=N)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**COMMON | {"vocab_size": 320}, num_experts=N, moe_intermediate_size=16)
    ),
}
ADAPTERS = {
    "output": {"mixing": "output"},
    "projection": {"mixing": "projection"},
    "linears": {"target_modules": ["q_proj", "v_proj", "mlp"]},
    "named": {"expert_names": ["law", "math", "code", "prose", "news", "mail"]},
}
KINDS = [*ADAPTERS, *NATIVE]
LENGTH = 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def load(kind, folder):
    torch.manual_seed(0)
    if kind in NATIVE:
        model = NATIVE[kind]()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        if kind == "lora":
            config = LoraConfig(init_lora_weights=False, target_modules=["q_proj"], task_type="CAUSAL_LM")
            model = get_peft_model(model, config)
        elif kind != "dense":
            config = MoELoraConfig(
                num_experts=N, top_k=K, r=4, init_lora_weights=False, task_type="CAUSAL_LM", **ADAPTERS[kind]
            )
            model = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in router_parameters(model).values():
            parameter.normal_(std=0.5)
    return model.eval()


def prompt_of(tokenizer, *messages):
    """The ids of a history: a system prompt, then questions and answers in turn."""
    roles = ["system", *["user", "assistant"] * len(messages)]
    history = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
    return tokenizer.apply_chat_template(history, add_generation_prompt=True, return_tensors="pt")["input_ids"]


def prompt_of_question(tokenizer, question):
    history = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(history, add_generation_prompt=True, return_tensors="pt")["input_ids"]


def generated(model, tokenizer, prompt_1S, length=LENGTH):
    ids = model.generate(
        input_ids=prompt_1S, max_new_tokens=length, do_sample=False, eos_token_id=tokenizer.eos_token_id
    )
    return ids[:, prompt_1S.shape[1] :]


@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_experts_are_those_of_a_plain_forward_over_the_whole_text(kind, folder, tokenizer):
    model = load(kind, folder)
    conversation = Conversation(model, tokenizer, system="brief", max_new_tokens=LENGTH)
    pieces = list(conversation.ask("Où est-ce ? 世界"))
    answer = conversation.answers[-1]
    prompt = prompt_of(tokenizer, "brief", "Où est-ce ? 世界")
    ids = generated(model, tokenizer, prompt)
    assert "".join(pieces) == answer.text == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert answer.ending == "length" and len(answer.tokens) == LENGTH
    seen = []
    with torch.no_grad(), observed_routing(model, seen.append):
        model(torch.cat((prompt, ids), 1), use_cache=False)
    # What routers want by their logits, without what the recorder reads.
    probabilities_LTN = torch.stack(seen[0].router_logits)[:, prompt.shape[1] :].softmax(-1)
    gates_LTK, experts_LTK = probabilities_LTN.topk(K, -1)
    routes = answer.routes
    assert torch.equal(routes.experts_LTK, experts_LTK)
    normalizes = kind != "qwen3_moe"  # by its config's default
    expected_LTK = gates_LTK / gates_LTK.sum(-1, keepdim=True) if normalizes else gates_LTK
    assert_near(routes.gates_LTK, expected_LTK)
    routers = [name.rpartition(".moe_lora_router")[0] or name for name in router_parameters(model)]
    routers = [name.removeprefix("base_model.model.").removesuffix(".weight") for name in routers]
    assert [*routes.layers] == [*dict.fromkeys(routers)]
    # The shares are those of `record_routing` on the answer alone, up to gates.
    with torch.no_grad(), record_routing(model) as statistics:
        cache = model(prompt, use_cache=True).past_key_values
        statistics.counts.zero_()
        model(ids, past_key_values=cache)
    chosen_LN = (routes.shares_LTN > 0).sum(1)
    assert torch.equal(chosen_LN.double(), statistics.counts[0])
    assert_near(routes.shares_LN.sum(-1), torch.ones(len(routes.layers)))


def test_a_model_that_keeps_no_cache_by_itself_is_read_token_by_token(folder, tokenizer):
    routes = []
    for keeps in (True, False):
        model = load("output", folder)
        model.generation_config.use_cache = model.get_base_model().generation_config.use_cache = keeps
        conversation = Conversation(model, tokenizer, max_new_tokens=LENGTH)
        list(conversation.ask("hello"))
        routes.append(conversation.answers[0].routes.experts_LTK)
    assert torch.equal(*routes)


@pytest.mark.parametrize("kind", KINDS)
def test_steered_answers_are_those_of_generate(kind, folder, tokenizer):
    model = load(kind, folder)
    conversation = Conversation(model, tokenizer, system="brief", max_new_tokens=LENGTH)
    prompt = prompt_of(tokenizer, "brief", "hello")
    names = ADAPTERS.get(kind, {}).get("expert_names", [str(i) for i in range(N)])
    free = "".join(conversation.ask("hello"))
    conversation.steer("expert", names[4])
    forced = "".join(conversation.ask_again())
    with force_experts(model, 4):
        assert forced == tokenizer.decode(generated(model, tokenizer, prompt)[0], skip_special_tokens=True) != free
    routes = conversation.answers[-1].routes
    assert (routes.shares_LTN[..., 4] == 1).all() and routes.ranked() == [(4, 1.0)]
    conversation.steer("forbid", [names[0], 1])
    masked = "".join(conversation.ask_again())
    with allow_experts(model, [2, 3, 4, 5]):
        assert masked == tokenizer.decode(generated(model, tokenizer, prompt)[0], skip_special_tokens=True)
    assert conversation.steering == f"without {names[0]}, {names[1]}"
    assert not conversation.answers[-1].routes.shares_LTN[..., :2].any()
    # It stays in force for the next turn, and what is refused changes nothing.
    for refused in ([*range(N - 1)], "nobody", N, []):
        with pytest.raises(InputError):
            conversation.steer("forbid" if refused else "expert", refused)
    list(conversation.ask("more"))
    assert not conversation.answers[-1].routes.shares_LTN[..., :2].any() and len(conversation.answers) == 2
    conversation.clear()
    conversation.steer("auto")
    assert "".join(conversation.ask("hello")) == free


@pytest.mark.parametrize("kind", ["output", "lora"])
def test_the_base_is_the_adapter_disabled(kind, folder, tokenizer):
    model = load(kind, folder)
    conversation = Conversation(model, tokenizer, system="brief", max_new_tokens=LENGTH)
    adapted = "".join(conversation.ask("hello"))
    conversation.steer("base")
    base = "".join(conversation.ask_again())
    with model.disable_adapter():
        ids = generated(model, tokenizer, prompt_of(tokenizer, "brief", "hello"))
    assert base == tokenizer.decode(ids[0], skip_special_tokens=True) != adapted
    assert conversation.answers[-1].routes is None and conversation.answers[-1].steering == "base"
    conversation.steer("auto")
    assert "".join(conversation.ask_again()) == adapted


@pytest.mark.parametrize("kind", ["dense", "lora"])
def test_a_model_without_routers_answers_and_cannot_be_steered(kind, folder, tokenizer):
    conversation = Conversation(load(kind, folder), tokenizer, max_new_tokens=4)
    assert "".join(conversation.ask("hello")) == conversation.answers[0].text
    assert conversation.answers[0].routes is None and conversation.experts == []
    with pytest.raises(InputError, match="no router"):
        conversation.steer("expert", 0)
    if kind == "dense":
        with pytest.raises(InputError, match="no adapter"):
            conversation.steer("base")


def test_in_a_notebook_an_answer_has_the_colors_of_its_experts():
    experts_LTK = torch.tensor([[[0], [1]]])
    routes = Routes(experts_LTK, torch.ones(1, 2, 1), "gates", ["layers.0.mlp"], ["law", "<b>"])
    page = Answer("Who?", ["The ", "<law>"], routes, "auto", "end")._repr_html_()
    assert '<span class="c0" title="law 100 %">The </span>' in page
    assert "&lt;law&gt;</span>" in page and "&lt;b&gt;" in page and "<b>" not in page
    assert Answer("Who?", ["<law>"], None, "base", "end")._repr_html_().count("&lt;law&gt;") == 1


def test_turns_are_the_template_of_the_whole_history(folder, tokenizer):
    model = load("output", folder)
    conversation = Conversation(model, tokenizer, system="brief", max_new_tokens=6)
    history = ["brief"]
    for question in ("one", "two", "three"):
        history.append(question)
        answer = "".join(conversation.ask(question))
        ids = generated(model, tokenizer, prompt_of(tokenizer, *history), 6)
        assert answer == tokenizer.decode(ids[0], skip_special_tokens=True)
        history.append(answer)


def test_half_a_pair_of_surrogates_is_read(folder, tokenizer):
    conversation = Conversation(load("output", folder), tokenizer, max_new_tokens=6)
    answer = "".join(conversation.ask("half \ud800"))
    assert answer == "".join(Conversation(load("output", folder), tokenizer, max_new_tokens=6).ask("half ?"))


def test_the_token_that_ends_an_answer_is_not_of_it(folder, tokenizer):
    model = load("output", folder)
    free = Conversation(model, tokenizer, max_new_tokens=LENGTH)
    list(free.ask("hello"))
    history = [{"role": "user", "content": "hello"}]
    prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    ids = generated(model, tokenizer, prompt)[0].tolist()
    stop = next(i for i in range(2, LENGTH) if ids[i] not in ids[:i])
    model.generation_config.eos_token_id = [ids[stop]]
    for most, ending in ((LENGTH, "end"), (stop, "end"), (stop - 1, "length")):
        conversation = Conversation(model, tokenizer, max_new_tokens=most)
        list(conversation.ask("hello"))
        answer, length = conversation.answers[0], min(most, stop)
        assert answer.ending == ending and len(answer.tokens) == length
        assert torch.equal(answer.routes.experts_LTK, free.answers[0].routes.experts_LTK[:, :length])
    model.generation_config.eos_token_id = [ids[0]]
    conversation = Conversation(model, tokenizer)
    assert list(conversation.ask("hello")) == [] and conversation.answers[0].routes.experts_LTK.shape == (2, 0, K)
    assert conversation.answers[0].routes.summary() == "no expert"


def test_characters_of_several_tokens_belong_to_the_last(folder, tokenizer, monkeypatch):
    model = load("output", folder)
    ids = tokenizer("a世é🙂b", add_special_tokens=False)["input_ids"]
    ids += tokenizer("é", add_special_tokens=False)["input_ids"][:1]  # half a character

    def generate(streamer, **kwargs):
        streamer.put(torch.zeros(1, 3, dtype=torch.long))
        for token in [*ids, tokenizer.eos_token_id]:
            streamer.put(torch.tensor([token]))

    monkeypatch.setattr(model, "generate", generate)
    conversation = Conversation(model, tokenizer)
    assert list(conversation.ask("?")) == ["a", "世", "é", "🙂", "b", "\ufffd"]
    assert conversation.answers[0].tokens == ["a", "", "", "世", "", "é", "", "", "", "🙂", "b", "\ufffd"]


@pytest.mark.parametrize("closes", [False, True])
def test_an_answer_can_be_stopped(closes, folder, tokenizer, monkeypatch):
    slow_down(monkeypatch.setattr)
    conversation = Conversation(load("qwen3_moe", folder), tokenizer, max_new_tokens=400)
    pieces = conversation.ask("hello")
    first = next(pieces)
    if closes:
        pieces.close()
        shown = conversation.answers[0].text
    else:
        conversation.stop()
        shown = first + "".join(pieces)
    answer = conversation.answers[0]
    assert answer.ending == "stopped" and shown == answer.text and shown.startswith(first)
    assert 0 < len(answer.tokens) < 400 and answer.routes.experts_LTK.shape[1] == len(answer.tokens)
    monkeypatch.undo()
    list(conversation.ask("and then"))  # it goes on
    assert len(conversation.answers) == 2


def test_without_a_template_a_text_is_continued_by_itself(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    model = load("output", folder)
    conversation = Conversation(model, tokenizer, max_new_tokens=5)
    for question in ("a", "b"):  # one token each
        ids = tokenizer(question, return_tensors="pt")["input_ids"]
        expected = tokenizer.decode(generated(model, tokenizer, ids, 5)[0], skip_special_tokens=True)
        assert "".join(conversation.ask(question)) == expected
        assert conversation.answers[-1].routes.experts_LTK.shape == (2, 5, K)
    with pytest.raises(InputError, match="no chat template"):
        Conversation(model, tokenizer, system="brief")


def test_what_a_model_or_a_template_cannot_take_is_said_at_once(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load("output", folder)
    model.get_base_model().config.max_position_embeddings = 40
    conversation = Conversation(model, tokenizer)
    list(conversation.ask("hello"))
    assert len(conversation.answers[0].tokens) < 40
    with pytest.raises(InputError, match="the model takes 40; clear it"):
        list(conversation.ask("hello" * 10))
    assert len(conversation.answers) == 1
    tokenizer.chat_template = "{{ raise_exception('no system role') if messages[0]['role'] == 'system' else '' }}x"
    with pytest.raises(InputError, match="no system role"):
        Conversation(model, tokenizer, system="brief")
    tokenizer.chat_template = {"rag": "x", "tool_use": "y"}
    with pytest.raises(InputError, match="multiple chat templates with no default"):
        list(Conversation(model, tokenizer).ask("hello"))


def test_errors_of_generate_reach_the_caller(folder, tokenizer, monkeypatch):
    model = load("output", folder)
    conversation = Conversation(model, tokenizer)

    def generate(**kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(model, "generate", generate)
        with pytest.raises(RuntimeError, match="out of memory"):
            list(conversation.ask("hello"))
    assert conversation.answers == []


def test_a_temperature_samples(folder, tokenizer):
    model, texts = load("output", folder), set()
    for _ in range(3):
        conversation = Conversation(model, tokenizer, max_new_tokens=12, temperature=2.0)
        texts.add("".join(conversation.ask("hello")))
    assert len(texts) > 1


@pytest.mark.slow
def test_a_mixture_of_smollm2s_adapters_answers_and_shows_its_routes(tmp_path):
    base = smollm2_folder()
    for seed, name in enumerate(("law", "math")):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules=["gate_proj", "down_proj"], task_type="CAUSAL_LM")
        lora = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        for key, weight in lora.named_parameters():
            if "lora_B" in key:
                weight.data.normal_(std=0.003)  # as after a few steps
        lora.save_pretrained(tmp_path / name)
    adapters = [str(tmp_path / name) for name in ("law", "math")]
    out = str(tmp_path / "mixed")
    mix(validate(MixSettings, {"adapters": adapters, "base": str(base), "gates": "arrow", "output": out}))
    folder = open_folder(out, "model", base=base)
    model, tokenizer = folder.load("float32"), folder.tokenizer
    conversation = Conversation(model, tokenizer, max_new_tokens=24)
    question = "What is the capital of France? Write “é 世界 🙂”, too."
    text = "".join(conversation.ask(question))
    answer = conversation.answers[0]
    assert "Paris" in text == answer.text and conversation.experts == ["law", "math"]
    history = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    ids = generated(model, tokenizer, prompt, 24)
    with torch.no_grad(), record_routes(model) as tape:
        model(torch.cat((prompt, ids), 1), use_cache=False)
    start = prompt.shape[1]
    assert torch.equal(answer.routes.experts_LTK, tape.routes(start, start + len(answer.tokens)).experts_LTK)
    assert len(answer.routes.layers) == 30 and (answer.routes.shares_LN > 0).sum(-1).max() == 2
    conversation.steer("expert", "math")
    list(conversation.ask_again())
    assert conversation.answers[0].routes.ranked() == [(1, 1.0)]


def test_a_picked_adapter_has_its_own_part_of_a_mean_on_attention(tmp_path, tokenizer):
    """And the base has none, though that LoRA has no router."""
    folders = [tmp_path / name for name in "ab"]
    for seed, path in enumerate(folders):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(tiny_llama(vocab=320), config).save_pretrained(path)
    base = tiny_llama(vocab=320).eval()
    mixture = lora_to_moe(tiny_llama(vocab=320), folders, attention="mean", expert_names=["a", "b"]).eval()
    for picked in ("a", "b", None):
        conversation = Conversation(mixture, tokenizer, max_new_tokens=LENGTH, pick=lambda _, name=picked: [name])
        answer = "".join(conversation.ask("Hi"))
        plain = base if picked is None else PeftModel.from_pretrained(tiny_llama(vocab=320), tmp_path / picked).eval()
        ids = generated(plain, tokenizer, prompt_of_question(tokenizer, "Hi"))
        assert answer == tokenizer.decode(ids[0], skip_special_tokens=True)


def test_a_question_is_answered_by_the_expert_that_is_picked_for_it_or_by_the_base(folder, tokenizer):
    """As if it had been forced, or the adapter disabled. What picks is told all of the user's turns."""
    model = load("named", folder)
    asked = []

    def pick(chats):
        turns = [[message["content"] for message in chat if message["role"] == "user"] for chat in chats]
        asked.extend(turns)
        return ["law" if "law" in of_chat[-1] else None for of_chat in turns]

    conversation = Conversation(model, tokenizer, max_new_tokens=LENGTH, pick=pick)
    first = "".join(conversation.ask("a law"))
    with force_experts(model, "law"):
        ids = generated(model, tokenizer, prompt_of_question(tokenizer, "a law"))
    assert first == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert conversation.answers[-1].steering == "picked: law"
    list(conversation.ask("Hi"))
    assert conversation.answers[-1].steering == "picked: base" and asked == [["a law"], ["a law", "Hi"]]
    assert conversation.answers[-1].routes is None
    conversation.steer("auto")
    list(conversation.ask_again())
    assert conversation.answers[-1].steering == "auto" and len(asked) == 2
    with pytest.raises(ValueError, match="picked: the model comes without a gate for requests"):
        Conversation(model, tokenizer).steer("picked")


def test_what_is_asked_of_a_conversation_in_another_way_is_refused(folder):
    conversation = Conversation(load("output", folder), AutoTokenizer.from_pretrained(folder))
    with pytest.raises(ValueError, match="kind='force': must be one of auto, picked, expert, forbid, base"):
        conversation.steer("force", 1)
    with pytest.raises(ValueError, match="there is no question yet"):
        conversation.ask_again()
