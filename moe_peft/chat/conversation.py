"""
Conversation with a model. Each answer has the experts of its tokens. The module does not depend on a terminal.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from jinja2 import TemplateError
from markupsafe import Markup
from peft import PeftModel
from transformers.generation.streamers import BaseStreamer

from ..analysis.markup import STYLE, Pieces, legend, painted
from ..analysis.routes import Routes, record_routes
from ..models.introspection import end_tokens, expert_names, greedy_decoding, text_config
from ..models.layer import routed_layers
from ..models.steering import Expert, allow_experts, force_experts, only_expert
from ..utils.messages import InputError, choice_error, one_line
from ..utils.plugins import names_for

SteeringKind = Literal["auto", "picked", "expert", "forbid", "base"]


@dataclass(frozen=True, eq=False)
class Answer:
    """
    An answer, with the experts of its tokens.

    Args:
        question: the question.
        tokens: the text of each token, [T]; joined, they are the answer. A character of several tokens belongs to the
            last of them.
        routes: the experts of the same T tokens; None if no router ran.
        steering: routing of the answer: "auto", "picked: law", "expert law", "without law" or "base".
        ending: "end" (the model ended it), "length" (`max_new_tokens`) or "stopped".
    """

    question: str
    tokens: list[str]
    routes: Routes | None
    steering: str
    ending: Literal["end", "length", "stopped"]

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def remark(self) -> str:
        """Reason for the answer's end; "" if the model ended it."""
        return {"end": "", "length": f"cut after {len(self.tokens)} tokens", "stopped": "stopped"}[self.ending]

    def _repr_html_(self) -> str:
        """Return the tokens as HTML, in the colors of their experts in the most decisive layer, for a notebook."""
        routes = self.routes
        if routes is None or not self.tokens:
            return Markup('<p style="white-space: pre-wrap">{}</p>').format(self.text)
        router = routes.most_decisive
        return Markup('<style>{}</style><p class="tokens">{}</p><p class="legend">{} · {}, {}</p>').format(
            Markup(STYLE), painted(self.tokens, routes, router), legend(routes, router), routes.measure,
            routes.layers[router],
        )  # fmt: skip

    def runs(self, router: int | None) -> list[tuple[str, int]]:
        """
        Split the text into pieces of tokens with the same leading expert, of a router or averaged over all (`None`).
        Expert -1 stands for none.
        """
        runs: list[tuple[str, int]] = []
        experts = self.routes.leading_T(router) if self.routes is not None else [-1] * len(self.tokens)
        for text, expert in zip(self.tokens, experts, strict=True):
            if runs and (runs[-1][1] == expert or not text):
                runs[-1] = (runs[-1][0] + text, runs[-1][1])
            elif text:
                runs.append((text, expert))
        return runs


class Conversation:
    """
    A conversation of several turns.

    Args:
        model: a model of any kind, in evaluation mode. A MoE-LoRA adapter and a native MoE have routes.
        tokenizer: its chat template writes the turns. Without one, each question is continued as text, on its own.
        system: the system prompt.
        max_new_tokens: maximum number of tokens in an answer.
        temperature: 0 takes the most probable token each time.
        pick: chats, each a list of messages → the expert for each, or None for the base, such as `RequestGate.pick`.
            Answers are routed by it unless `steer` sets another routing.
        choose: in the place of `pick`, texts of questions → the expert for each, or None for the base.

    Attributes:
        answers: the answers of all turns so far.
        experts: the experts' names, or their numbers; empty if the model has no router.

    Raises:
        ValueError: the chat template takes no system prompt, or the tokenizer has no chat template.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from moe_peft.chat import Conversation
    >>> name = "Qwen/Qwen3-0.6B"
    >>> conversation = Conversation(
    ...     AutoModelForCausalLM.from_pretrained(name),
    ...     AutoTokenizer.from_pretrained(name),
    ...     max_new_tokens=8,
    ... )
    >>> pieces = list(conversation.ask("Write 12 in words."))
    >>> "".join(pieces) == conversation.answers[-1].text
    True
    ```
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        pick: Callable[[Sequence[list[dict[str, str]]]], list[str | None]] | None = None,
        choose: Callable[[Sequence[str]], Sequence[str | None]] | None = None,
    ) -> None:
        self.pick = pick if choose is None else partial(self._chosen, choose)
        self.model, self.tokenizer, self.system = model, tokenizer, system
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.answers: list[Answer] = []
        n = max((layer.num_experts for layer in routed_layers(model)), default=0)
        self.experts = (expert_names(model) or [str(i) for i in range(n)]) if n else []
        self._kind: SteeringKind = "auto" if self.pick is None else "picked"
        self._steered: list[int] = []
        self._stop = threading.Event()
        if system is not None:
            if tokenizer.chat_template is None:
                raise InputError(f"system={one_line(system, 60)!r}: the tokenizer has no chat template; leave it out")
            self._prompt("", [])

    # --- turns ---------------------------------------------------------------------------------------------------

    def ask(self, question: str) -> Iterator[str]:
        """
        Answer a question. Yield the text piece by piece. Afterwards, `answers[-1]` is the answer, even if the iterator
        is closed early.
        """
        # JSON can hold half a pair of surrogates. A tokenizer cannot read it.
        return self._answer(question.encode(errors="replace").decode(), self.answers)

    def ask_again(self) -> Iterator[str]:
        """Answer the last question again under the current steering. The new answer replaces the last one."""
        if not self.answers:
            raise InputError("there is no question yet")
        return self._answer(self.answers[-1].question, self.answers[:-1])

    def stop(self) -> None:
        """End the running answer after its current token, from any thread."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """True if the running answer is about to end."""
        return self._stop.is_set()

    def clear(self) -> None:
        """Forget all turns. The steering stays."""
        self.answers = []

    def messages(self, question: str, before: Sequence[Answer]) -> list[dict[str, str]]:
        """Return the messages for the chat template."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in before:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.text})
        return [*messages, {"role": "user", "content": question}]

    # --- steering ------------------------------------------------------------------------------------------------

    @property
    def steering(self) -> str:
        """Routing of the next answers: "auto", "picked", "expert law", "without law, math" or "base"."""
        names = ", ".join(self.experts[expert] for expert in self._steered)
        return {"expert": f"expert {names}", "forbid": f"without {names}"}.get(self._kind, self._kind)

    def steer(self, kind: SteeringKind, experts: Expert | Sequence[Expert] = ()) -> None:
        """
        Set the routing of all further answers.

        Args:
            kind: "auto": as in the model; "picked": one expert for each question, or the base; "expert": one expert
                serves all tokens; "forbid": routers choose among the other experts; "base": the adapter is disabled.
            experts: the experts of "expert" or "forbid", as names or numbers.
        """
        before = self._kind, self._steered
        given = [experts] if isinstance(experts, (int, str)) else experts
        if kind not in get_args(SteeringKind):
            raise InputError(choice_error("kind", kind, get_args(SteeringKind)))
        if kind in ("expert", "forbid") and not self.experts:
            raise InputError("the model has no router: every token takes the same path")
        if (kind == "expert" and len(given) != 1) or (kind == "forbid" and not given):
            raise InputError(f"{kind}: name {'one' if kind == 'expert' else 'some'} of the experts: {self._known()}")
        self._kind, self._steered = kind, sorted({self._index(expert) for expert in given})
        try:
            with self._routing():
                pass
        except InputError:
            self._kind, self._steered = before
            raise

    def _index(self, expert: Expert) -> int:
        if str(expert) in self.experts:
            return self.experts.index(str(expert))
        if str(expert).isdecimal() and int(expert) < len(self.experts):
            return int(expert)
        raise InputError(f"expert={expert!r}: must be one of {self._known()}")

    def _known(self) -> str:
        return ", ".join(self.experts) if expert_names(self.model) else f"0 to {len(self.experts) - 1}"

    def _routing(self) -> AbstractContextManager:
        if self._kind == "expert":
            return force_experts(self.model, self._steered)
        if self._kind == "forbid":
            return allow_experts(self.model, [i for i in range(len(self.experts)) if i not in self._steered])
        if self._kind == "picked":
            if self.pick is None:
                raise InputError("picked: the model comes without a gate for requests; make it with moe-peft mix")
            return nullcontext()
        if self._kind == "base":
            if not isinstance(self.model, PeftModel):
                raise InputError("base: the model has no adapter to disable")
            return self.model.disable_adapter()
        return nullcontext()

    # --- answers -------------------------------------------------------------------------------------------------

    def _answer(self, question: str, before: list[Answer]) -> Iterator[str]:
        prompt_1S, steering, routing = self._prompt(question, before), self.steering, self._routing()
        by_base = False
        if self._kind == "picked" and self.pick is not None:
            (expert,) = self.pick([self.messages(question, before)])
            steering, by_base = f"picked: {expert or 'base'}", expert is None
            routing = only_expert(self.model, expert)
        length = self._longest(prompt_1S.shape[1])
        self._stop.clear()
        run, pieces = _Run(self._stop), Pieces(self.tokenizer)
        # In a thread, so that `stop` can be called while the caller waits for a piece.
        thread = threading.Thread(target=self._generate, args=(prompt_1S, length, run, routing), daemon=True)
        thread.start()
        try:
            for token in run:
                if piece := pieces.add(token):
                    yield piece
        finally:
            self._stop.set()
            thread.join()
            self._stop.clear()
            for token in run.ids[len(pieces.ids) : -1]:
                pieces.add(token)
            rest = pieces.end()
            if run.error is None:
                ended = run.ids[-1] in end_tokens(self.model, self.tokenizer)
                ending: Any = "end" if ended else "length" if len(run.ids) > length else "stopped"
                routes = None if by_base else run.routes
                self.answers = [*before, Answer(question, pieces.tokens, routes, steering, ending)]
        if run.error is not None:
            raise run.error
        if rest:
            yield rest

    def _chosen(
        self, choose: Callable[[Sequence[str]], Any], chats: Sequence[list[dict[str, str]]]
    ) -> list[str | None]:
        """Return the experts for chats by a user's function of their last messages."""
        path = getattr(choose, "__name__", "function")
        try:
            names = names_for([chat[-1]["content"] for chat in chats], choose, path)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"choose={path!r}: {type(error).__name__}: {one_line(error)}") from error
        for name in names:
            if name is not None and name not in self.experts:
                raise InputError(f"choose={path!r}: {choice_error('the name', name, [*self.experts, None])}")
        return [*names]

    def _prompt(self, question: str, before: Sequence[Answer]) -> torch.Tensor:
        """Return the prompt's token ids, [1, S]."""
        if self.tokenizer.chat_template is None:
            ids = self.tokenizer(question, return_tensors="pt")["input_ids"]
            if ids.numel() == 0:
                raise InputError("nothing to continue: write some text")
            return ids.to(self.model.device)
        try:
            inputs = self.tokenizer.apply_chat_template(
                self.messages(question, before), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except (TemplateError, ValueError) as error:  # also for several templates without a default
            raise InputError(f"the tokenizer's chat template refuses the messages: {one_line(error)}") from error
        return inputs["input_ids"].to(self.model.device)

    def _longest(self, prompt: int) -> int:
        """Return the maximum number of tokens in the answer."""
        most = getattr(text_config(self.model), "max_position_embeddings", None)
        if most is not None and prompt >= most:
            raise InputError(f"the conversation has {prompt} tokens, the model takes {most}; clear it")
        return self.max_new_tokens if most is None else min(self.max_new_tokens, most - prompt)

    def _generate(self, prompt_1S: torch.Tensor, length: int, run: _Run, routing: AbstractContextManager) -> None:
        """
        Generate an answer and one more token: a token is routed when it is read. The last, often the end, is left out.
        """
        samples = self.temperature > 0
        choose: dict[str, Any] = {"do_sample": True, "temperature": self.temperature} if samples else {}
        ends = end_tokens(self.model, self.tokenizer)
        pad = self.tokenizer.pad_token_id
        try:
            decoding = nullcontext() if samples else greedy_decoding(self.model)
            with routing, decoding, record_routes(self.model) as tape:
                self.model.generate(
                    input_ids=prompt_1S,
                    attention_mask=torch.ones_like(prompt_1S),
                    max_new_tokens=length + 1,
                    eos_token_id=ends,
                    pad_token_id=ends[0] if pad is None else pad,
                    num_beams=1,
                    use_cache=True,  # reads each token once
                    streamer=run,
                    stopping_criteria=[run.stops],
                    **choose,
                )
            start = prompt_1S.shape[1]
            run.routes = tape.routes(start, start + len(run.ids) - 1)
        except BaseException as error:
            run.error = error
        finally:
            run.finished()


class _Run(BaseStreamer):
    """A call of `generate`. Iteration gives each token except the last, as soon as the next token is known."""

    def __init__(self, stop: threading.Event) -> None:
        self.ids: list[int] = []
        self.routes: Routes | None = None
        self.error: BaseException | None = None
        self._stop, self._has_prompt = stop, False
        self._counts: queue.Queue[int | None] = queue.Queue()

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self.ids += value.flatten().tolist()
            self._counts.put(len(self.ids))
        self._has_prompt = True

    def end(self) -> None:
        pass

    def finished(self) -> None:
        self._counts.put(None)

    def stops(self, ids_1S: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether to stop, as a stopping criterion of `generate`."""
        return torch.full((1,), self._stop.is_set(), device=ids_1S.device)

    def __iter__(self) -> Iterator[int]:
        while (count := self._counts.get()) is not None:
            if count > 1:
                yield self.ids[count - 2]
