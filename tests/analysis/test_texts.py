"""The texts of `report.html`, against plain forward passes and in a browser."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch
from peft import AutoPeftModelForCausalLM, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from moe_peft import MoELoraConfig
from moe_peft.analysis.routes import PALETTE
from moe_peft.cli import main
from moe_peft.models.layer import router_parameters
from tests.helpers.browser import NEEDS_BROWSER, open_browser, resize
from tests.helpers.chat_model import save_chat_model
from tests.helpers.routed_models import COMMON, K

NAMES = ["law", "math", "code <b>", "prose"]
TEXTS = {
    "a": ["in <script>alert(1)</script> & so on", "世界 é\n\n in", "x" * 300, "short", "not shown"],
    "b </h3>": ["</div>", '"quoted"'],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """`base`; `mixture`, an adapter whose experts have names; `native`, a Mixtral with 20 experts; `data.jsonl`."""
    folder = tmp_path_factory.mktemp("texts")
    base = save_chat_model(folder / "base")
    torch.manual_seed(0)
    mixture = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        MoELoraConfig(num_experts=4, top_k=K, r=4, expert_names=NAMES, init_lora_weights=False, task_type="CAUSAL_LM"),
    )
    native = MixtralForCausalLM(MixtralConfig(**COMMON | {"vocab_size": 320}, num_local_experts=20))
    for name, model in (("mixture", mixture), ("native", native)):
        for router in router_parameters(model).values():
            router.data.normal_()
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(base).save_pretrained(folder / name)
    rows = [{"text": text, "domain": domain} for domain, texts in TEXTS.items() for text in texts]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def report(models):
    def report(name, *options):
        folder = models / f"report-{name}"
        command = ["inspect", "--model", models / name, "--data", models / "data.jsonl", "--output", folder, "--html"]
        main([*map(str, command), *options])
        return folder / "report.html"

    return report


class Texts(HTMLParser):
    """The texts' tokens, their classes and titles, and what the page's script paints them with."""

    def __init__(self, path):
        super().__init__()
        self.texts, self.labels, self.layers, self.picked, self.scripts, self._open = [], [], [], None, [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        if tag in ("img", "meta"):
            return
        attributes = dict(attrs)
        self._open.append((tag, attributes.get("class"), attributes.get("title")))
        if tag == "div" and attributes.get("class") == "tokens":
            self.texts.append([])
        elif tag == "span" and self._open[-2][1] == "tokens":
            self.texts[-1].append(["", attributes["class"], attributes["title"]])
        elif tag == "option":
            self.layers.append("")
            self.picked = len(self.layers) - 1 if "selected" in attributes else self.picked

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        if self._open and self._open[-1][0] == "script":
            self.scripts.append(data)
        elif self._open and self._open[-1][0] == "option":
            self.layers[-1] += data
        elif self._open and self._open[-1][0] == "span" and self._open[-2][1] == "tokens":
            self.texts[-1][-1][0] += data
        elif self._open and self._open[-1][0] == "h3":
            self.labels.append(data)

    def routes(self, layer):
        """(expert, share in percent) of each token."""
        of_layer = json.loads(self.scripts[0])["layers"][layer]
        return list(zip(of_layer["experts"], of_layer["shares"], strict=True))


def shares_of(model, tokenizer, texts):
    """Each token's gates as routers' logits say, [layers, tokens, experts]: a pass of each text by itself."""
    passes = []
    for text in texts:
        ids = tokenizer(text + tokenizer.eos_token, return_tensors="pt")["input_ids"][:, :200]
        with torch.no_grad():
            logits_LTN = torch.stack(model(input_ids=ids, output_router_logits=True).router_logits)
        gates, experts = logits_LTN.softmax(-1).topk(K, -1)
        gates = gates / gates.sum(-1, keepdim=True)
        passes.append(torch.zeros_like(logits_LTN).scatter(-1, experts, gates))
    return torch.cat(passes, 1)


@pytest.mark.parametrize("kind", ["mixture", "native"])
def test_the_experts_of_a_report_are_those_of_a_plain_forward(kind, models, report):
    page = Texts(report(kind, "--label-column", "domain"))
    loader = AutoPeftModelForCausalLM if kind == "mixture" else AutoModelForCausalLM
    model, tokenizer = loader.from_pretrained(models / kind).eval(), AutoTokenizer.from_pretrained(models / kind)
    shown = [text for of_domain in TEXTS.values() for text in of_domain[:4]]
    assert page.labels == ["a"] * 4 + ["b </h3>"] * 2
    cut = ["".join(token[0] for token in text) for text in page.texts]
    assert cut == [text[:200] if len(text) > 200 else f"{text}{tokenizer.eos_token}" for text in shown]
    shares_LTN = shares_of(model, tokenizer, shown)
    assert len(page.layers) == 3 and page.layers[-1] == "mean of all layers" and page.layers[1].startswith("1: model.")
    for layer, shares_TN in enumerate([*shares_LTN, shares_LTN.mean(0)]):
        shares_T, experts_T = shares_TN.max(-1)
        routes = page.routes(layer)
        assert [expert for expert, _ in routes] == experts_T.tolist()
        assert [share for _, share in routes] == pytest.approx((100 * shares_T).tolist(), abs=0.51)
    # Without a script, the page shows the layer whose shares differ most between the domains.
    share_LN, ends = shares_LTN.mean(1), [0]
    for text in page.texts:
        ends.append(ends[-1] + len(text))
    by_text = [shares_LTN[:, a:b].mean(1) for a, b in pairwise(ends)]
    difference_LN = sum(by_text[:4]) / 4 - sum(by_text[4:]) / 2
    assert page.picked == int(difference_LN.square().sum(-1).argmax())
    names = NAMES if kind == "mixture" else [f"expert {i}" for i in range(20)]
    colors = json.loads(page.scripts[0])["layers"][page.picked]["colors"]
    assert colors == sorted(share_LN[page.picked].topk(min(len(names), 7)).indices.tolist())
    tokens = [token for text in page.texts for token in text]
    for (_, color, title), (expert, share) in zip(tokens, page.routes(page.picked), strict=True):
        assert title == f"{names[expert]} {share} %"
        assert color == f"c{colors.index(expert) if expert in colors else -1}"


def test_without_labels_the_first_texts_are_shown(report):
    page = Texts(report("mixture"))
    assert page.labels == [] and ["".join(t[0] for t in text)[:2] for text in page.texts] == ["in", "世界", "xx", "sh"]


@pytest.mark.slow
@NEEDS_BROWSER
def test_another_layer_paints_the_tokens_anew(report, tmp_path):
    path = report("native", "--label-column", "domain")
    page = Texts(path)
    with open_browser(tmp_path) as browser:
        resize(browser, 390, 844)
        browser.get(path.as_uri())
        layer = browser.find_element("id", "layer")
        for picked, key in ((page.picked, ""), (0, "\ue011"), (1, "\ue015"), (2, "\ue010")):  # home, down, end
            layer.send_keys(key)
            seen = browser.execute_script(
                "return [...document.querySelectorAll('.tokens span')].map("
                "token => [token.title, getComputedStyle(token).backgroundColor])"
            )
            colors = json.loads(page.scripts[0])["layers"][picked]["colors"]
            expected = []
            for expert, share in page.routes(picked):
                code = PALETTE[colors.index(expert)] if expert in colors else None
                color = "rgba(0, 0, 0, 0)" if code is None else f"rgb{tuple(bytes.fromhex(code[1:]))}"
                expected.append([f"expert {expert} {share} %", color])
            assert seen == expected
            legends = browser.execute_script(
                "return [...document.querySelectorAll('.legend')].map(legend => legend.offsetHeight > 0)"
            )
            assert legends == [i == picked for i in range(3)]
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        assert not browser.get_log("browser")
        requests = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        urls = [r["params"]["request"]["url"] for r in requests if r["method"] == "Network.requestWillBeSent"]
        assert path.as_uri() in urls and not [url for url in urls if url.startswith(("http", "ws"))]
