"""Page of `moe-peft chat --web`: conversations of any number of browsers with one model, one answer at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from peft import PeftModel

from ..analysis.markup import STYLE, legend, painted
from ..models.layer import router_names
from ..utils.hosts import trusted_hosts
from ..utils.messages import InputError
from .conversation import Answer, Conversation, SteeringKind

DECISIVE, MEAN = "most decisive layer", "mean of all layers"
_STEERING: dict[SteeringKind, str] = {
    "picked": "one expert for each question", "auto": "routers choose", "expert": "one expert for all tokens",
    "forbid": "without these experts", "base": "base",
}  # fmt: skip
_STYLE = f"""\
{STYLE}
.turn {{ border-bottom: 1px solid var(--border-color-primary); padding: 0.6rem 0; }}
.question {{ white-space: pre-wrap; overflow-wrap: anywhere; font-weight: 600; margin-bottom: 0.5rem; }}
.answers {{ display: flex; flex-wrap: wrap; gap: 1rem; }} .answer {{ flex: 1 1 18rem; min-width: 0; }}
.about {{ color: color-mix(in srgb, var(--body-text-color) 75%, transparent); font-size: 0.85rem; }}
.about {{ overflow-wrap: anywhere; }} #earlier:not(:has(.turn)) {{ display: none; }}
footer {{ display: none !important; }}
"""


@dataclass
class Visit:
    """State of one browser tab: its conversation, and the last turn's answer that "answer again" replaced."""

    conversation: Conversation
    before: Answer | None = None


class Page:
    """
    Actions of the page's buttons, without Gradio.

    Args:
        begin: creates a conversation; all conversations have the same model.
    """

    def __init__(self, begin: Callable[[], Conversation]) -> None:
        self.begin = begin
        self.sample = begin()
        # An answer of the base disables the adapter in the whole model, so it waits until no other answer runs.
        self._one_at_a_time = threading.Lock()

    def visit(self) -> Visit:
        return Visit(self.begin())

    def ask(
        self, visit: Visit, question: str, kind: SteeringKind, experts: Sequence[str], layer: str
    ) -> Iterator[tuple[str, str]]:
        """
        Answer a question. Yield the earlier turns and the last one as HTML, repeatedly while the answer grows.

        Args:
            kind, experts: as `Conversation.steer` takes them.
            layer: router to show the experts' colors of: its number, `DECISIVE` or `MEAN`.
        """
        if not question.strip():
            raise InputError("write a question first")
        with self._one_at_a_time:
            self._steer(visit, kind, experts)
            earlier = self._turns(visit.conversation.answers, layer)
            visit.before = None
            for text in _growing(visit.conversation.ask(question)):
                yield earlier, _turn(question, [_answer(visit.conversation.steering, text)])
        yield self.shown(visit, layer)

    def ask_again(
        self, visit: Visit, kind: SteeringKind, experts: Sequence[str], layer: str
    ) -> Iterator[tuple[str, str]]:
        """Answer the last question again, like `ask`. Its two answers are shown beside each other."""
        conversation = visit.conversation
        if not conversation.answers:
            raise InputError("no answer yet: ask something first")
        with self._one_at_a_time:
            self._steer(visit, kind, experts)
            *others, visit.before = conversation.answers
            earlier, before = self._turns(others, layer), _finished(visit.before, layer)
            for text in _growing(conversation.ask_again()):
                yield earlier, _turn(visit.before.question, [before, _answer(conversation.steering, text)])
        yield self.shown(visit, layer)

    def shown(self, visit: Visit, layer: str) -> tuple[str, str]:
        """Return the earlier turns and the last one, as HTML."""
        if not visit.conversation.answers:
            return "", ""
        *others, last = visit.conversation.answers
        answers = [last] if visit.before is None else [visit.before, last]
        return self._turns(others, layer), _turn(last.question, [_finished(answer, layer) for answer in answers])

    def stop(self, visit: Visit) -> None:
        visit.conversation.stop()

    def clear(self, visit: Visit) -> tuple[str, str]:
        with self._one_at_a_time:  # a running answer would come back
            visit.conversation.clear()
            visit.before = None
        return "", ""

    @property
    def kinds(self) -> list[tuple[str, SteeringKind]]:
        """Ways to steer this model, with their labels on the page."""
        possible: list[SteeringKind] = [] if self.sample.pick is None else ["picked"]
        possible += ["auto", *(("expert", "forbid") if self.sample.experts else ())]  # type: ignore[list-item]
        if isinstance(self.sample.model, PeftModel):
            possible.append("base")
        return [(_STEERING[kind], kind) for kind in possible]

    @property
    def layers(self) -> list[tuple[str, str]]:
        """Layers to pick from, as labels and values."""
        names = [f"{i}: {name}" for i, name in enumerate(router_names(self.sample.model))]
        return [(DECISIVE, DECISIVE), (MEAN, MEAN), *((name, str(i)) for i, name in enumerate(names))]

    def _steer(self, visit: Visit, kind: SteeringKind, experts: Sequence[str]) -> None:
        visit.conversation.steer(kind, experts if kind in ("expert", "forbid") else ())

    def _turns(self, answers: Sequence[Answer], layer: str) -> str:
        return "".join(_turn(answer.question, [_finished(answer, layer)]) for answer in answers)


def _growing(pieces: Iterator[str]) -> Iterator[str]:
    """Yield the text so far, at first empty."""
    text = ""
    yield text
    for piece in pieces:
        text += piece
        yield text


# --- HTML ------------------------------------------------------------------------------------------------------------


def _turn(question: str, answers: Sequence[Markup]) -> Markup:
    form = Markup('<div class="turn"><div class="question">{}</div><div class="answers">{}</div></div>')
    return form.format(question, Markup("").join(answers))


def _answer(steering: str, text: str, *notes: str) -> Markup:
    """Return an answer as HTML, with `notes` below it."""
    form = Markup('<div class="answer"><div class="about">{}</div><div class="tokens">{}</div>{}</div>')
    below = Markup('<div class="about legend">{}</div>').format(Markup(" · ").join(notes)) if notes else ""
    return form.format(steering, text, below)


def _finished(answer: Answer, layer: str) -> Markup:
    """Return an answer as HTML, with its routes in a layer."""
    routes, remark = answer.routes, [answer.remark] if answer.remark else []
    if routes is None or not answer.tokens:
        return _answer(answer.steering, answer.text, *remark)
    router = routes.most_decisive if layer == DECISIVE else None if layer == MEAN else int(layer)
    shown = f"{routes.measure}, {MEAN if router is None else routes.layers[router]}"
    tokens = painted(answer.tokens, routes, router)
    return _answer(answer.steering, tokens, legend(routes, router), shown, *remark)


# --- Gradio ----------------------------------------------------------------------------------------------------------


def import_gradio() -> Any:
    """Import Gradio with its telemetry turned off."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio

    return gradio


def blocks(page: Page, title: str, about: str) -> Any:
    """
    Build the page as Gradio's `Blocks`.

    Args:
        title: its heading.
        about: a line below it.
    """
    gr = import_gradio()

    def showing_errors(act: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Return the handler with an `InputError` shown on the page."""

        def handler(visit: Visit | None, *inputs: Any) -> Iterator[Any]:
            if visit is None:
                raise gr.Error("this conversation is gone: load the page again", print_exception=False)
            try:
                yield from act(visit, *inputs)
            except InputError as error:
                raise gr.Error(str(error), print_exception=False) from error

        return handler

    def ask(*inputs: Any) -> Iterator[tuple[str, str, str]]:
        for html in page.ask(*inputs):
            yield "", *html  # the question's box is empty again

    with gr.Blocks(title=title, analytics_enabled=False) as demo:
        visit = gr.State()
        gr.HTML(Markup('<h2>{}</h2><div class="about">{}</div>').format(title, about))
        earlier, last = (gr.HTML(elem_id=name) for name in ("earlier", "last"))
        with gr.Row():
            question = gr.Textbox(
                show_label=False, placeholder="Ask something", lines=1, max_lines=8, scale=4, elem_id="question"
            )
            send = gr.Button("Ask", variant="primary", scale=1, min_width=80, elem_id="ask")
        with gr.Row():
            again = gr.Button("Answer again", min_width=80, elem_id="again")
            stop = gr.Button("Stop", min_width=80, elem_id="stop")
            clear = gr.Button("Clear", min_width=80, elem_id="clear")
        routed = bool(page.sample.experts)
        with gr.Row():
            kind = gr.Radio(
                page.kinds,
                value=page.kinds[0][1],
                label="Routing",
                visible=len(page.kinds) > 1,
                min_width=300,
                elem_id="kind",
            )
            experts = gr.Dropdown(
                page.sample.experts, value=[], label="Experts", multiselect=True, visible=False, elem_id="experts"
            )
            layer = gr.Dropdown(page.layers, value=DECISIVE, label="Colors of", visible=routed, elem_id="layer")
        alone = {
            "concurrency_id": "model",
            "concurrency_limit": 1,
            "show_progress": "minimal",
            "show_progress_on": question,
        }
        at_once = {"queue": False, "show_progress": "hidden"}
        steering, html = [visit, question, kind, experts, layer], [earlier, last]
        demo.load(page.visit, None, visit, **at_once)
        gr.on([question.submit, send.click], showing_errors(ask), steering, [question, *html], **alone)
        again.click(showing_errors(page.ask_again), [visit, kind, experts, layer], html, **alone)
        stop.click(page.stop, visit, None, **at_once)
        clear.click(page.clear, visit, html, **alone)
        layer.change(page.shown, [visit, layer], html, **at_once)
        kind.change(lambda kind: gr.update(visible=kind in ("expert", "forbid")), kind, experts, **at_once)
    return demo


def serve_page(
    page: Page, title: str, about: str, host: str = "127.0.0.1", port: int | None = None, names: Sequence[str] = ()
) -> None:
    """
    Serve the page until interrupted.

    Args:
        title, about: as in `blocks`.
        host: the page's address; "0.0.0.0" is open to everyone.
        port: the page's port; None: the first free port from 7860 on.
        names: further host names that requests may have.
    """
    demo = blocks(page, title, about)
    # Gradio requests the page once before it returns. A proxy in the environment does not reach this machine.
    direct = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    os.environ["no_proxy"] = f"localhost,{host},{direct}"
    try:
        _, url, _ = demo.launch(**launch_settings(host, names), server_port=port)
    except OSError as error:
        ports = "7860 to 7959" if port is None else port
        raise InputError(f"--host {host}, --port {ports}: taken, or not an address of this machine") from error
    print(f"open {url} (Ctrl-C to stop)")
    demo.block_thread()


def launch_settings(host: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """
    Return launch settings: nothing is sent to others or loaded from elsewhere, browsers keep no history, and only names
    of this machine, and `names`, reach a page of this machine alone.
    """
    from starlette.middleware import Middleware  # which Gradio brings
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    named = Middleware(TrustedHostMiddleware, allowed_hosts=trusted_hosts(host, names))
    theme = import_gradio().themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    return {
        "theme": theme, "css": _STYLE, "share": False, "run_history": False, "footer_links": [], "ssr_mode": False,
        "pwa": False, "mcp_server": False, "enable_monitoring": False, "quiet": True, "prevent_thread_lock": True,
        "server_name": host, "app_kwargs": {"middleware": [named]},
    }  # fmt: skip
