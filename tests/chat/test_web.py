"""The page of `moe-peft chat --web`: what its buttons do, by themselves and in a browser."""

from __future__ import annotations

import html
import json
import re
import runpy
import sys
import threading
import urllib.error
import urllib.request
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_peft import MoELoraConfig
from moe_peft.analysis.routes import PALETTE
from moe_peft.chat import Conversation, web
from moe_peft.chat.web import DECISIVE, MEAN, Page
from moe_peft.cli import main
from moe_peft.models.introspection import base_model
from moe_peft.models.layer import router_parameters
from moe_peft.utils.messages import InputError
from tests.helpers.browser import NEEDS_BROWSER, open_browser, resize
from tests.helpers.chat_model import save_chat_model, slow_down
from tests.helpers.waiting import LIMIT, until

NAMES = ["law", "math", "code", "prose"]
SPACE = Path(__file__).parents[2] / "examples" / "space"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An adapter whose experts have names."""
    folder = tmp_path_factory.mktemp("web")
    base = save_chat_model(folder / "base")
    torch.manual_seed(0)
    config = MoELoraConfig(num_experts=4, r=4, expert_names=NAMES, init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for router in router_parameters(model).values():
        router.data.normal_()
    model.save_pretrained(folder / "mixture")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "mixture")
    return folder / "mixture"


@pytest.fixture(scope="module")
def begin(folder):
    model, tokenizer = AutoPeftModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    return partial(Conversation, model, tokenizer, max_new_tokens=12)


def painted(part: str) -> list[list[tuple[str, str]]]:
    """(text, title) of each token, by answer."""
    answers = re.findall(r'<div class="tokens">(.*?)</div>', part, re.DOTALL)
    span = r'<span class="c-?\d" title="(.*?)">(.*?)</span>'
    return [
        [tuple(map(html.unescape, pair[::-1])) for pair in re.findall(span, answer, re.DOTALL)] for answer in answers
    ]


def leading(answer, router):
    return [NAMES[expert] for expert in answer.routes.leading_T(router)]


def test_an_answer_grows_and_is_painted_in_the_layer_that_is_picked(begin):
    page = Page(begin)
    visit = page.visit()
    seen = [last for _, last in page.ask(visit, "<b>hello", "auto", [], DECISIVE)]
    (answer,) = visit.conversation.answers
    growing = [html.unescape(re.search(r'class="tokens">(.*?)</div>', last, re.DOTALL)[1]) for last in seen[:-1]]
    assert len(growing) > 2 and growing[0] == "" and growing[-1] == answer.text
    assert all(more.startswith(less) for less, more in pairwise(growing))
    assert all("&lt;b&gt;hello" in last and "<b>" not in last for last in seen)
    picked = {DECISIVE: answer.routes.most_decisive, MEAN: None, "0": 0, "1": 1}
    assert [value for _, value in page.layers] == [*picked]
    for layer, router in picked.items():
        earlier, last = page.shown(visit, layer)
        (tokens,) = painted(last)
        assert earlier == "" and [text for text, _ in tokens] == answer.tokens
        assert [title.rpartition(" ")[0].rpartition(" ")[0] for _, title in tokens] == leading(answer, router)
    list(page.ask(visit, "more", "auto", [], "0"))
    earlier, last = page.shown(visit, "0")
    assert painted(earlier) == [painted(earlier)[0]] and "hello" in earlier and "more" in last


def test_a_question_that_is_answered_again_has_two_answers(begin):
    page = Page(begin)
    visit = page.visit()
    list(page.ask(visit, "hello", "auto", [], MEAN))
    before = visit.conversation.answers[0]
    *_, (_, last) = page.ask_again(visit, "expert", ["law"], MEAN)
    after = visit.conversation.answers[0]
    free, forced = painted(last)
    assert [text for text, _ in free] == before.tokens and [text for text, _ in forced] == after.tokens
    assert {title for _, title in forced} == {"law 100 %"} and before.text != after.text
    assert last.index(">auto<") < last.index(">expert law<") and len(visit.conversation.answers) == 1
    *_, (_, last) = page.ask_again(visit, "base", ["law"], MEAN)
    assert ">expert law<" in last and ">base<" in last and len(painted(last)[1]) == 0
    earlier, last = [*page.ask(visit, "more", "forbid", ["law", "code"], MEAN)][-1]
    assert ">base<" in earlier and ">without law, code<" in last
    assert {title.split()[0] for _, title in painted(last)[0]} <= {"math", "prose"}
    assert page.clear(visit) == ("", "") == page.shown(visit, MEAN) and visit.conversation.answers == []


def test_visitors_at_the_same_time_get_the_answers_that_each_would_get_alone(begin):
    page = Page(begin)
    wishes = [("auto", []), ("expert", ["law"]), ("forbid", ["law", "math"]), ("base", [])]
    alone = []
    for kind, experts in wishes:
        visit = page.visit()
        list(page.ask(visit, "hello", kind, experts, MEAN))
        alone.append(visit.conversation.answers[0].text)
    assert len({*alone}) == len(wishes)
    visits = [page.visit() for _ in wishes]

    def talk(visit, kind, experts):
        for _ in range(3):
            page.clear(visit)
            list(page.ask(visit, "hello", kind, experts, MEAN))

    threads = [threading.Thread(target=talk, args=(v, *wish)) for v, wish in zip(visits, wishes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert [visit.conversation.answers[0].text for visit in visits] == alone


def test_an_answer_is_stopped_and_one_that_nobody_reads_makes_way(begin, monkeypatch):
    slow_down(monkeypatch.setattr)
    page = Page(partial(begin, max_new_tokens=400))
    visit, other = page.visit(), page.visit()
    seen = page.ask(visit, "hello", "base", [], MEAN)
    next(seen), next(seen)
    assert page.visit().conversation.experts == NAMES  # of whoever comes meanwhile
    page.stop(visit)
    *_, (_, last) = seen
    assert "stopped" in last and 0 < len(visit.conversation.answers[0].tokens) < 400
    left = page.ask(visit, "more", "expert", ["law"], MEAN)
    next(left), next(left)
    left.close()  # its browser is gone
    seen = page.ask(other, "hello", "auto", [], MEAN)
    next(seen), next(seen)
    page.stop(other)
    list(seen)
    assert other.conversation.answers[0].steering == "auto"


def test_what_is_wrong_is_told_and_changes_nothing(begin):
    page = Page(begin)
    visit = page.visit()
    for wrong, message in (
        (page.ask(visit, " ", "auto", [], MEAN), "write a question first"),
        (page.ask_again(visit, "auto", [], MEAN), "no answer yet"),
        (page.ask(visit, "hello", "expert", [], MEAN), "expert: name one of the experts: law, math"),
        (page.ask(visit, "hello", "forbid", NAMES[:3], MEAN), "at least top_k=2"),
    ):
        with pytest.raises(InputError, match=message):
            list(wrong)
    assert visit.conversation.answers == [] and page.shown(visit, MEAN) == ("", "")
    dense = AutoModelForCausalLM.from_pretrained(Path(begin.args[0].peft_config["default"].base_model_name_or_path))
    assert Page(lambda: Conversation(dense, begin.args[1])).kinds == [("routers choose", "auto")]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--port", "80"], "port=80: is for the page; add --web"),
        (["--web", "--host", "nonsense"], "--host nonsense, --port None: taken, or not an address of this machine"),
        (["--host", "0.0.0.0"], "host='0.0.0.0': is for the page; add --web"),
        (["--web", "--port", "99999"], "port=99999"),
        (["--web"], "install the extra web: pip install '.[web]' in a clone of moe_peft"),
    ],
)
def test_settings_of_a_page_that_cannot_be_are_one_line(flags, line, folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(SystemExit) as end:
        main(["chat", "--model", str(folder), *flags])
    error = capsys.readouterr().err
    assert end.value.code == 2 and line in error and error.count("\n") == 1


def test_the_space_serves_what_its_variables_say(folder, monkeypatch):
    served = []
    monkeypatch.setattr("moe_peft.chat.web.import_gradio", lambda: None)
    monkeypatch.setattr("moe_peft.chat.web.serve_page", lambda *given: served.append(given))
    monkeypatch.setattr("moe_peft.cli.chat._check_address", lambda host, port: None)  # another page may be there
    monkeypatch.delenv("MODEL", raising=False)
    with pytest.raises(SystemExit, match="MODEL: set this variable"):
        runpy.run_path(str(SPACE / "app.py"))
    for name, value in {"MODEL": str(folder), "SYSTEM": "brief", "MAX_NEW_TOKENS": "7"}.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(str(SPACE / "app.py"))
    ((page, title, about, *where),) = served
    assert where == ["0.0.0.0", 7860, ()] and title == "mixture" and "experts: law, math" in about
    assert (page.sample.system, page.sample.max_new_tokens) == ("brief", 7)
    settings = yaml.safe_load((SPACE / "README.md").read_text().split("---")[1])
    assert settings["sdk"] == "gradio" and (SPACE / settings["app_file"]).exists()
    assert f"gradio=={settings['sdk_version']}" in (SPACE.parents[1] / "constraints.txt").read_text().split()


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(begin):
    pytest.importorskip("gradio", reason="needs the extra `web`")
    page = Page(partial(begin, max_new_tokens=30))
    demo = web.blocks(page, "<i>tiny</i>", "a & b")
    _, url, _ = demo.launch(**web.launch_settings("127.0.0.1", ["box.lan"]))
    yield url.rstrip("/")
    demo.close()


def test_other_names_do_not_reach_the_page(url):
    for host in ("localhost", "box.lan"):
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Host": host})) as page:
            assert page.status == 200
    for host in ("evil.example", "127.0.0.1.evil.example"):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(urllib.request.Request(url, headers={"Host": host}))


@pytest.fixture
def browser(url, tmp_path):
    with open_browser(tmp_path) as driver:
        resize(driver, 1280, 900)
        load(driver, url)
        yield driver


def load(browser, url: str) -> None:
    """Open the page, and wait until it has its conversation, the only answer that it asks for without a question."""
    browser.get(url)
    shows(browser, "document.querySelector('#question textarea')")
    shows(browser, "performance.getEntriesByType('resource').some(entry => entry.name.endsWith('/run/predict'))")


def shows(browser, condition: str) -> None:
    """Wait until JavaScript's condition is true on the page."""
    text = "return document.body.innerText"
    until(
        lambda: browser.execute_script(f"return {condition}"),
        lambda: f"{condition}; {browser.execute_script(text)}",
    )


def ask(browser, question: str) -> None:
    browser.find_element("css selector", "#question textarea").send_keys(question, "\n")


def titles(browser) -> list[list[str]]:
    """Those of the tokens of each finished answer of the last turn."""
    spans = "[...answer.querySelectorAll('span')].map(token => token.title)"
    return browser.execute_script(f"return [...document.querySelectorAll('#last .tokens')].map(answer => {spans})")


def pick(browser, chooser: str, text: str) -> None:
    """In a dropdown, by keyboard."""
    box = browser.find_element("css selector", f"#{chooser} input")
    box.click()
    box.send_keys("\ue009a\ue000", text)  # control-a, and what is typed replaces it
    options = f"[...document.querySelectorAll('#{chooser} [role=option]')].map(option => option.ariaLabel)"
    shows(browser, f"{options}.length == 1 && {options}[0].includes({text!r})")
    box.send_keys("\n")
    shows(browser, f"!{options}.length || document.querySelector('#{chooser} .token')")


FINISHED = "document.querySelectorAll('#last .legend').length"


@pytest.mark.slow
@NEEDS_BROWSER
def test_the_page_answers_paints_steers_and_loads_nothing_from_elsewhere(begin, url, browser):
    ask(browser, "hello <b>")
    shows(browser, FINISHED)
    assert browser.find_element("css selector", "#last .question").text == "hello <b>"
    (decisive,) = titles(browser)
    conversation = begin(max_new_tokens=30)
    list(conversation.ask("hello <b>"))
    (answer,) = conversation.answers
    assert [title.partition(" ")[0] for title in decisive] == leading(answer, answer.routes.most_decisive)
    shows(browser, "document.querySelector('#question textarea').value === ''")
    color = "getComputedStyle(document.querySelector('#last .tokens span')).backgroundColor"
    assert browser.execute_script(f"return {color}") in [f"rgb{tuple(bytes.fromhex(c[1:]))}" for c in PALETTE[:4]]
    # Another layer: the same tokens, painted anew.
    for name, shown in (("0: ", "layers.0."), ("1: ", "layers.1."), ("mean of", MEAN)):
        pick(browser, "layer", name)
        shows(browser, f"document.querySelector('#last .legend').textContent.includes({shown!r})")
    assert titles(browser) != [decisive]
    # One expert: both answers beside each other.
    browser.find_element("css selector", "#kind input[value=expert]").click()
    shows(browser, "document.querySelector('#experts input')")
    pick(browser, "experts", "math")
    browser.find_element("id", "again").click()
    shows(browser, f"{FINISHED} == 2")
    free, forced = titles(browser)
    assert {*forced} == {"math 100 %"} and len({*free}) > 1
    left, right = (answer.rect for answer in browser.find_elements("css selector", "#last .answer"))
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    resize(browser, 390, 844)
    left, right = (answer.rect for answer in browser.find_elements("css selector", "#last .answer"))
    assert left["x"] == right["x"] and left["y"] < right["y"]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    # Another browser's steering is its own.
    browser.execute_cdp_cmd("Network.clearBrowserCookies", {})
    browser.switch_to.new_window("tab")
    load(browser, url)
    ask(browser, "hello <b>")
    shows(browser, FINISHED)
    assert titles(browser) == [decisive]
    browser.find_element("id", "clear").click()
    shows(browser, "!document.querySelector('#last .turn')")
    # What is wrong is told on the page.
    browser.find_element("id", "again").click()
    shows(browser, "document.body.textContent.includes('no answer yet')")
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    requests = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [r["params"]["request"]["url"] for r in requests if r["method"] == "Network.requestWillBeSent"]
    assert len(urls) > 20 and not [u for u in urls if not u.startswith((url, "data:", "chrome", "blob:"))]


@pytest.mark.slow
@NEEDS_BROWSER
def test_on_the_page_an_answer_is_stopped_and_a_closed_tab_frees_the_model(begin, tmp_path, monkeypatch):
    pytest.importorskip("gradio", reason="needs the extra `web`")
    # The second prompt has the first answer up to where it was stopped, so that any answer may follow it.
    model, tokenizer = begin.args
    monkeypatch.setattr(base_model(model).generation_config, "suppress_tokens", [tokenizer.eos_token_id])
    slow_down(monkeypatch.setattr)
    made = []
    page = Page(lambda: made.append(begin(max_new_tokens=1900)) or made[-1])
    demo = web.blocks(page, "tiny", "")
    _, url, _ = demo.launch(**web.launch_settings("127.0.0.1"))
    begun = "document.querySelector('#last .tokens')?.textContent.length > 3"
    try:
        with open_browser(tmp_path) as browser:
            load(browser, url)
            ask(browser, "hello")
            shows(browser, begun)
            browser.find_element("id", "stop").click()
            shows(browser, FINISHED)
            assert "stopped" in browser.find_element("css selector", "#last .legend").text
            ask(browser, "and then")
            shows(browser, "document.querySelector('#last .question').textContent == 'and then'")
            shows(browser, begun)
            first = browser.current_window_handle
            browser.switch_to.new_window("tab")
            second = browser.current_window_handle
            browser.switch_to.window(first)
            browser.close()
            browser.switch_to.window(second)
            load(browser, url)
            ask(browser, "hello")
            shows(browser, begun)
            assert [answer.ending for answer in made[1].answers] == ["stopped", "stopped"]
            browser.find_element("id", "stop").click()
            shows(browser, FINISHED)
    finally:
        demo.close()


def test_a_port_that_is_taken_is_one_line(url, begin):
    with pytest.raises(InputError, match=r"--port \d+: taken"):
        web.serve_page(Page(begin), "", "", port=int(url.rpartition(":")[2]))


def test_a_proxy_of_the_environment_is_not_asked_for_the_page(begin, monkeypatch, capsys):
    gradio = pytest.importorskip("gradio", reason="needs the extra `web`")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr(gradio.Blocks, "block_thread", gradio.Blocks.close)
    web.serve_page(Page(begin), "", "")
    assert "open http://127.0.0.1:" in capsys.readouterr().out


def test_the_page_is_for_this_machine_and_has_no_telemetry(url):
    config = json.loads(urllib.request.urlopen(f"{url}/config").read())
    assert url.startswith("http://127.0.0.1:") and config["analytics_enabled"] is False
    page = urllib.request.urlopen(url).read().decode()
    assert not re.findall(r'(?:src|href)="(?:https?:)?//(?!127)[^"]*"', page)
