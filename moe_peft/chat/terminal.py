"""Conversation in a terminal, or with the lines of a file."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..analysis.routes import PALETTE, Routes, percent
from ..utils.messages import InputError
from .conversation import Answer, Conversation, SteeringKind

_MOST_ROUTERS = 8  # most routers that `/why 12` shows


class _Command(NamedTuple):
    usage: str
    about: str
    run: Callable[[Terminal, str], None]


class Terminal:
    """
    Reads questions and commands from standard input until it ends. Prints each answer and the experts that served it.

    Args:
        conversation: the conversation.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.console = Console(markup=False, emoji=False, highlight=False)
        self.leaves = False

    def run(self) -> None:
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  (lines can be edited, and earlier ones come back)
        elif hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        while not self.leaves and (line := self._read()) is not None:
            try:
                self._act(line)
            except InputError as error:
                self._note(str(error), "red")

    def _act(self, line: str) -> None:
        if not line.strip():
            return
        if not line.startswith("/"):
            self._print(self.conversation.ask(line))
            return
        name, _, rest = line.strip().partition(" ")
        if name not in COMMANDS:
            raise InputError(f"{name}: no such command; /help lists them, and a space in front makes it a question")
        if rest.strip() and " " not in COMMANDS[name].usage:
            raise InputError(f"{name}: stands alone; /help lists the commands")
        COMMANDS[name].run(self, rest.strip())

    def _read(self) -> str | None:
        """
        Read a question or a command; None at the end of input. A backslash at a line's end continues it on the next
        line.
        """
        lines: list[str] = []
        while True:
            try:
                line = input("… " if lines else "> ")
            except EOFError:
                print()
                return "\n".join(lines) or None
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                print()
                self._note("Ctrl-D or /quit leaves")
                lines = []
                continue
            if not sys.stdin.isatty():
                print(line)  # so that the output reads like a conversation
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)

    # --- answers -------------------------------------------------------------------------------------------------

    def _print(self, pieces: Iterator[str]) -> None:
        with self._stoppable():
            for piece in pieces:
                self.console.out(_harmless(piece), end="", highlight=False)
        self.console.print()
        self._note(self._served(self._last))

    def _compare(self) -> None:
        """Answer the last question again, and print the new answer beside the previous one."""
        if not self.conversation.answers:
            self._note(f"from now on: {self.conversation.steering}")
            return
        before, pieces, text = self._last, self.conversation.ask_again(), ""
        columns = [before.steering, self.conversation.steering]
        is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        view = Live(console=self.console, auto_refresh=False, transient=True)
        with self._stoppable(), view if is_live else nullcontext():
            for piece in pieces:
                text += _harmless(piece)
                if is_live:
                    view.update(_beside(columns, [_harmless(before.text), text]), refresh=True)
        served = [self._served(answer, short=True) for answer in (before, self._last)]
        self.console.print(_beside(columns, [_harmless(before.text), text], served))

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Stop the answer at the first Ctrl-C inside the block, and the program at the second."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.conversation.stopping:
                raise KeyboardInterrupt
            self.conversation.stop()

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _served(self, answer: Answer, short: bool = False) -> str:
        """Return a line with the experts that served an answer, and the reason for its end."""
        parts = ["an empty answer"]
        if answer.tokens:
            parts = []
            if answer.routes is not None:
                parts.append(f"served by: {answer.routes.summary()}")
            elif self.conversation.experts:
                parts.append("served by: the base, without the adapter")
        parts.append(answer.remark)
        if answer.routes is not None and answer.tokens and not short:
            parts.append("/why shows each token")
        return " · ".join(part for part in parts if part)

    def _note(self, text: str, style: str = "dim") -> None:
        if text:
            self.console.print(Text(text, style), soft_wrap=True)

    @property
    def _last(self) -> Answer:
        if not self.conversation.answers:
            raise InputError("no answer yet: ask something first")
        return self.conversation.answers[-1]

    # --- commands ------------------------------------------------------------------------------------------------

    def why(self, words: str) -> None:
        answer = self._last
        routes = answer.routes
        if not answer.tokens:
            raise InputError("the last answer is empty")
        if routes is None:
            raise InputError("the last answer has no routes: no router ran")
        if words == "all":
            self._explain(answer, routes, None, f"mean of {len(routes.layers)} routers")
            return
        if not words:
            router = routes.most_decisive
            note = f", the most decisive of {len(routes.layers)} routers; /why N shows layer N, /why all their mean"
            self._explain(answer, routes, router, f"{routes.layers[router]}{note}")
            return
        shown = routes.find(words.split())
        if len(shown) > _MOST_ROUTERS:
            such = routes.layers[shown[0]]
            raise InputError(f"{words}: {len(shown)} routers have this in their names, such as {such}; name fewer")
        for router in shown:
            self._explain(answer, routes, router, routes.layers[router])

    def _explain(self, answer: Answer, routes: Routes, router: int | None, title: str) -> None:
        """Print an answer's tokens in the colors of their experts, and the legend."""
        self._note(title)
        colors = routes.colors(router)
        self.console.print(self._painted(answer, router, colors), soft_wrap=self._is_plain)
        self.console.print(self._legend(routes, router, colors), soft_wrap=self._is_plain)

    @property
    def _is_plain(self) -> bool:
        """True if there are no colors: not a terminal, a dumb terminal, or NO_COLOR."""
        return self.console.no_color or self.console.color_system is None

    def _painted(self, answer: Answer, router: int | None, colors: dict[int, str]) -> Text:
        text = Text()
        for run, expert in answer.runs(router):
            if self._is_plain:
                text.append(f"[{expert if expert >= 0 else '-'}]")
            text.append(_harmless(run), _style(colors.get(expert)))
        return text

    def _legend(self, routes: Routes, router: int | None, colors: dict[int, str]) -> Text:
        """Return the experts with their colors, or with their numbers. All experts without a color are one entry."""
        text, rest = Text(), 0.0
        for expert, share in routes.ranked(router):
            if expert not in colors:
                rest += share
            elif self._is_plain:
                name = routes.experts[expert]
                text.append(f"[{expert}] {'' if name == str(expert) else f'{name} '}{percent(share)}  ")
            else:
                text.append(f" {routes.experts[expert]} ", _style(colors[expert]))
                text.append(f" {percent(share)}  ")
        if rest:
            text.append(f"others {percent(rest)}", _style(None))
        text.rstrip()
        return text

    def steer(self, kind: SteeringKind, names: str) -> None:
        given = [name.strip() for name in names.split(",") if name.strip()]
        self.conversation.steer(kind, names if names in self.conversation.experts else given)
        self._compare()

    def clear(self, rest: str) -> None:
        self.conversation.clear()
        self._note("all turns are forgotten")

    def help(self, rest: str) -> None:
        table = Table.grid(padding=(0, 2))
        for command in COMMANDS.values():
            table.add_row(command.usage, command.about)
        self.console.print(table)
        self._note("Ctrl-C stops an answer; a backslash at a line's end continues the question on the next line.")

    def quit(self, rest: str) -> None:
        self.leaves = True


# Command → its usage, its description, and its method.
COMMANDS: dict[str, _Command] = {
    "/why": _Command(
        "/why [N | all]", "color tokens by expert: in the most decisive layer, in N, by the mean", Terminal.why
    ),
    "/expert": _Command("/expert NAME", "one expert serves all tokens", lambda t, rest: t.steer("expert", rest)),
    "/forbid": _Command("/forbid NAME, …", "routers choose among the others", lambda t, rest: t.steer("forbid", rest)),
    "/base": _Command("/base", "without the adapter", lambda t, rest: t.steer("base", "")),
    "/pick": _Command("/pick", "one expert for each question, or the base", lambda t, rest: t.steer("picked", "")),
    "/auto": _Command("/auto", "routers choose freely again", lambda t, rest: t.steer("auto", "")),
    "/clear": _Command("/clear", "forget all turns", Terminal.clear),
    "/help": _Command("/help", "list the commands", Terminal.help),
    "/quit": _Command("/quit", "leave, like Ctrl-D", Terminal.quit),
}


def _beside(columns: list[str], texts: list[str], served: list[str] | None = None) -> Table:
    table = Table(box=SIMPLE_HEAD, expand=True)
    for name in columns:
        table.add_column(name, ratio=1)
    table.add_row(*map(Text, texts))
    if served is not None:
        table.add_row(*(Text(line, "dim") for line in served))
    return table


def _style(color: str | None) -> str:
    """Return the style of letters on an expert's color; gray letters for an expert without a color."""
    return "grey50" if color is None else f"{'white' if color == PALETTE[0] else 'black'} on {color}"


def _harmless(text: str) -> str:
    """Replace control characters of a model's text, which could send commands to the terminal."""
    return re.sub("[\x1b\x80-\x9f]", "␛", text)
