"""`moe-peft chat`, with questions and commands from a pipe and in a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import select
import shutil
import signal
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from moe_peft import MoELoraConfig
from moe_peft.analysis.routes import PALETTE
from moe_peft.chat import Conversation
from moe_peft.chat.terminal import COMMANDS
from moe_peft.cli import main
from moe_peft.models.layer import router_parameters
from tests.helpers.chat_model import save_chat_model, slow_down
from tests.helpers.routed_models import COMMON
from tests.helpers.waiting import LIMIT, until
from tests.helpers.warm import start

NAMES = ["law", "math", "code", "prose"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """`base`, its adapters `mixture` (with names) and `linears`, a `lora`, and `native`, a Mixtral with 20 experts."""
    folder = tmp_path_factory.mktemp("chat")
    base = save_chat_model(folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    common = {"init_lora_weights": False, "task_type": "CAUSAL_LM"}
    configs = {
        "mixture": MoELoraConfig(num_experts=4, top_k=2, r=4, expert_names=NAMES, **common),
        "linears": MoELoraConfig(num_experts=4, r=4, target_modules=["q_proj", "v_proj"], **common),
        "lora": LoraConfig(target_modules=["q_proj"], **common),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    torch.manual_seed(0)
    native = MixtralForCausalLM(MixtralConfig(**COMMON | {"vocab_size": 320}, num_local_experts=20))
    for router in router_parameters(native).values():
        router.data.normal_()
    native.save_pretrained(folder / "native")
    tokenizer.save_pretrained(folder / "native")
    return folder


@pytest.fixture
def talk(models, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")

    def talk(model: str, *lines: str, flags: tuple[str, ...] = ()) -> str:
        torch.manual_seed(0)
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        main(["chat", "--model", str(models / model), "--max-new-tokens", "8", *flags])
        return capsys.readouterr().out

    return talk


def after(printed: str, line: str) -> str:
    """What follows a line of the user's, up to the next one."""
    return printed.partition(f"> {line}\n")[2].partition("\n> ")[0]


def test_a_conversation_shows_who_served_it(talk):
    printed = talk("mixture", "hello", "/why", "/why 1", "/why all", "/why mlp x", "/help")
    assert "experts: law, math, code, prose; 2 routers" in printed and printed.endswith("> \n")
    served = after(printed, "hello").splitlines()[-1]
    assert re.match(r"served by: (\w+ \d+ %, ){3}\w+ \d+ % \(gates, mean of 2 routers\)", served)
    assert "cut after 8 tokens · /why shows each token" in served
    # Each piece has the number of its expert, which the legend explains.
    why = after(printed, "/why").splitlines()
    assert "the most decisive of 2" in why[0]
    used = {*re.findall(r"\[(\d)\]", why[1])}
    assert used and all(f"[{i}] {NAMES[int(i)]} " in why[-1] for i in used)
    assert re.sub(r"\[\d\]", "", why[1]) == after(printed, "hello").splitlines()[0]
    assert after(printed, "/why 1").startswith("model.layers.1.mlp\n[")
    all_routers = after(printed, "/why all").splitlines()
    assert all_routers[0] == "mean of 2 routers"
    shares = dict(re.findall(r"(\w+) (\d+ %)", all_routers[2]))
    assert shares == dict(re.findall(r"(\w+) (\d+ %)", served))
    assert after(printed, "/why mlp x").startswith("layer mlp x: no such router; they are model.layers.0.mlp to ")
    assert all(command.usage in after(printed, "/help") for command in COMMANDS.values())


def test_steering_shows_both_answers_and_stays(talk):
    printed = talk("mixture", "hello", "/expert law", "more", "/forbid law, code", "/base", "/why", "/auto")
    columns = after(printed, "/expert law")
    assert re.search(r"auto +expert law", columns) and "law 100 %" in columns
    assert "served by: law 100 % (" in after(printed, "more")
    columns = after(printed, "/forbid law, code")
    assert re.search(r"expert law +without law, code", columns) and "prose" in columns and "math" in columns
    assert re.search(r"without law, code +base", after(printed, "/base"))
    assert "served by: the base, without the adapter" in after(printed, "/base")
    assert after(printed, "/why") == "the last answer has no routes: no router ran"
    assert re.search(r"base +auto", after(printed, "/auto"))


def test_what_is_wrong_is_one_line_and_the_conversation_goes_on(talk):
    lines = {
        "/why": "no answer yet: ask something first",
        "/sing": "/sing: no such command; /help lists them, and a space in front makes it a question",
        "/expert": "expert: name one of the experts: law, math, code, prose",
        "/expert tax": "expert='tax': must be one of law, math, code, prose",
        "/forbid law, math, code": "allow_experts: some row allows only 1 of the experts; allow at least top_k=2",
        "/forbid": "forbid: name some of the experts: law, math, code, prose",
        "/base 1": "/base: stands alone; /help lists the commands",
        "/base": "from now on: base",
        "/clear": "all turns are forgotten",
    }
    printed = talk("mixture", *lines, " /sing", "/why 12", "/quit", "not asked")
    assert {line: after(printed, line) for line in lines} == lines
    assert "served by: the base" in after(printed, " /sing")
    assert "not asked" not in printed


def test_a_name_may_have_a_comma(models, talk):
    shutil.copytree(models / "mixture", models / "commas")
    config = json.loads((models / "commas/adapter_config.json").read_text())
    config["expert_names"] = ["a, b", "a", "b", "c"]
    (models / "commas/adapter_config.json").write_text(json.dumps(config))
    printed = talk("commas", "/expert a, b", "/forbid a, b", "/forbid a, c")
    assert after(printed, "/expert a, b") == "from now on: expert a, b"
    assert after(printed, "/forbid a, b") == "from now on: without a, b"
    assert after(printed, "/forbid a, c") == "from now on: without a, c"


def test_lines_with_a_backslash_go_on(talk, monkeypatch):
    asked, ask = [], Conversation.ask
    monkeypatch.setattr(Conversation, "ask", lambda self, question: asked.append(question) or ask(self, question))
    assert "> one\\\n… two\n" in talk("mixture", "", "one\\", "two")
    assert asked == ["one\ntwo"]


@pytest.mark.parametrize("model", ["base", "lora"])
def test_a_model_without_routers_answers(talk, model):
    printed = talk(model, "hello", "/why", "/expert 0")
    assert "experts" not in printed.partition("> ")[0]
    assert after(printed, "hello").splitlines()[-1] == "cut after 8 tokens"
    assert after(printed, "/why") == "the last answer has no routes: no router ran"
    assert after(printed, "/expert 0") == "the model has no router: every token takes the same path"


def test_routers_of_one_layer_are_shown_together(talk):
    why = after(talk("linears", "hello", "/why 1"), "/why 1")
    assert re.findall(r"^model\S+$", why, re.MULTILINE) == [
        f"model.layers.1.self_attn.{part}_proj" for part in ("q", "v")
    ]


def test_of_many_experts_the_most_used_are_colored_and_the_others_gray(talk, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm")
    flags = ("--max-new-tokens", "100", "--temperature", "9")  # tokens of all kinds
    printed = talk("native", "hello", "/why", flags=flags)
    why = printed.partition("> /why\n")[2]
    backgrounds = {*re.findall(r"48;2;(\d+;\d+;\d+)", why)}
    assert backgrounds <= {";".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5)) for color in PALETTE}
    assert len(backgrounds) > 2 and "others" in why and not re.search(r"\[\d+\]", re.sub(r"\x1b\[[\d;]*m", "", why))
    monkeypatch.setenv("NO_COLOR", "1")
    why = talk("native", "hello", "/why", flags=flags).partition("> /why\n")[2]
    assert "48;2" not in why and re.search(r"\[\d+\]", why) and "others" in why


def test_settings_reach_the_conversation(talk, monkeypatch):
    made, make = {}, Conversation.__init__

    def spy(self, *given, **named):
        made.update(named)
        make(self, *given, **named)

    monkeypatch.setattr(Conversation, "__init__", spy)
    talk("base", flags=("--system", "brief", "--temperature", "0.5"))
    assert made == {"system": "brief", "max_new_tokens": 8, "temperature": 0.5, "pick": None, "choose": None}


def test_a_function_of_the_users_own_picks_an_expert_for_each_question(talk, tmp_path, monkeypatch):
    """It reads the question alone, and what is wrong with its answer is one line."""
    (tmp_path / "chat_rules.py").write_text(
        "def by_word(texts):\n    return [{'hello': 'math', 'bye': None, 'oh': 'cooking', 'no': 1 / 0 if 'no' in texts "
        "else 1}[text] for text in texts]\n\n\ndef too_many(texts):\n    return ['law'] * 9\n"
    )
    monkeypatch.chdir(tmp_path)
    printed = talk("mixture", "hello", "bye", "oh", "no", "/auto", flags=("--choose", "chat_rules:by_word"))
    assert "each question is answered by the expert that it is for, or by the base" in printed
    assert "served by: math 100 %" in after(printed, "hello")
    assert "served by: the base, without the adapter" in after(printed, "bye")
    assert "the name='cooking': must be one of law, math, code, prose, None" in after(printed, "oh")
    assert "choose='by_word': ZeroDivisionError: division by zero" in after(printed, "no")
    printed = talk("mixture", "hello", flags=("--choose", "chat_rules:too_many"))
    assert "choose='too_many': must return 1 names for as many texts" in after(printed, "hello")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--choose", "chat_rules"), "is no mixture of adapters to choose from"),
        (("--allowed-hosts", "box.lan"), "--allowed-hosts=['box.lan']: is for the page; add --web"),
        (("--temperature", "-1"), "temperature=-1"),
        (("--base", "."), "base='.': is for an adapter"),
        (("--load-in-4bit", "--quantization", '{"load_in_3bit": true}'), "load_in_3bit: unknown key"),
    ],
)
def test_settings_that_cannot_be_right_are_one_line(talk, capsys, flags, line):
    with pytest.raises(SystemExit) as end:
        talk("base", flags=flags)
    error = capsys.readouterr().err
    assert end.value.code == 2 and line in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_base_in_4_bits_is_chatted_with(talk):
    pytest.importorskip("bitsandbytes")
    printed = talk("mixture", "hello", "/expert law", flags=("--load-in-4bit",))
    assert "bitsandbytes, load_in_4bit" in printed and "law 100 %" in printed


@pytest.mark.slow
def test_in_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_leaves(models):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    process = start(_chat, os.ttyname(theirs), "--model", str(models / "mixture"), "--max-new-tokens", "2000")
    printed = b""

    def reads(pattern: bytes, key: bytes = b"") -> None:
        """Read until a pattern is printed. Press a key, again if nothing happens: the prompt may not read yet."""
        nonlocal printed

        def found() -> re.Match[bytes] | None:
            nonlocal printed
            assert process.is_alive(), printed
            if (match := re.search(pattern, printed, re.DOTALL)) is None:
                if select.select([ours], [], [], 30)[0]:
                    printed += os.read(ours, 4096)
                else:
                    os.write(ours, key)
            return match

        os.write(ours, key)
        match = until(found, lambda: printed)
        printed = printed[match.end() :]

    try:
        reads(rb"> ")
        os.write(ours, b"hello\n")
        reads(rb"hello\r\n...")  # the answer has begun
        os.write(ours, b"\x03")
        reads(rb"stopped")
        reads(rb"> ")
        reads(rb"/quit leaves", key=b"\x03")
        reads(rb"> ")
        os.write(ours, b"/why\n")
        reads(rb"the most decisive of 2")
        reads(rb"> ")
        os.write(ours, b"\x04")
        process.join(LIMIT)
        assert process.exitcode == 0
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)


def _chat(terminal: str, *flags: str) -> None:
    """`moe-peft chat` in a session that begins in a terminal."""
    os.setsid()
    tty = os.open(terminal, os.O_RDWR)
    os.dup2(tty, 0)
    os.dup2(tty, 1)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    os.environ["TERM"] = "dumb"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background, it is ignored
    slow_down()
    main(["chat", *flags])
