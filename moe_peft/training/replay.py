"""General requests among training rows, with the base's own answers: training then keeps what the base can do."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset, Value, concatenate_datasets
from peft import PeftModel

from ..models.introspection import end_tokens
from ..routing.expert_map import label_text
from ..utils.distributed import is_sharded, on_main_process
from ..utils.messages import InputError
from ..utils.settings import COUNT, Range
from .answers import AnswersFile, KeptAnswer, Tokens, answers_in_batches, base_digest
from .checkpointing import hash_value
from .data import check_rows

logger = logging.getLogger("moe_peft")

FILE = "replay.jsonl"  # the answers, in the output folder
LABEL = "general"  # of these rows, in a label column
SHARE = Range(above=0, below=1)
MAX_NEW_TOKENS = 256
_BATCH = 16  # requests answered at once
# For plans: tokens of an answer, and tokens · parameters in a second on one core of a CPU.
_MEAN_TOKENS = 100
_PER_SECOND = 1.2e10


def with_replay(
    rows: Dataset,
    model: Any,
    tokenizer: Any,
    requests: Sequence[str],
    share: float = 0.2,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    max_length: int | None = 1024,
    chat_template: str | None = None,
    label_column: str | None = None,
    file: str | os.PathLike | None = None,
) -> Dataset:
    """
    Mix general requests with the base's own greedy answers into training rows, for any trainer of TRL. A request has
    the form of the rows: their columns, chat template, system prompts and tools. Requests repeat if there are too few.
    An answer that the base does not end is left out, as a row would end it.

    Args:
        rows: rows with `messages`, `prompt` and `completion`, or `text`.
        model: the base before training. Its adapters are disabled.
        tokenizer: the base's tokenizer.
        requests: general requests, such as `neutral_requests()`.
        share: share of the general rows among all rows of the result. With 0.2, every fifth row is one.
        max_new_tokens: maximum number of tokens of an answer.
        max_length: maximum number of tokens of a request and its answer; None: no maximum.
        chat_template: the chat template of the training; None: the tokenizer's.
        label_column: column of labels. A general row has the label "general".
        file: JSONL file that keeps the answers. An answer in it is made anew only if the base, the request in its chat
            template or a limit has changed.

    Raises:
        ValueError: the rows are tokens; `share` or `max_new_tokens` is out of range; or the base ends less than a
            quarter of its answers.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from moe_peft import neutral_requests, with_replay
    >>> rows = with_replay(
    ...     load_dataset("json", data_files="train.jsonl", split="train"),
    ...     AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"),
    ...     AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B"),
    ...     neutral_requests(),
    ... )
    ```
    """
    columns = () if label_column is None else (label_column,)
    replay = Replay(share, requests, tokenizer, max_new_tokens, max_length, chat_template, columns)
    return replay.mixed(rows, model, file)


@dataclass(frozen=True)
class Replay:
    """
    Makes general rows. For the arguments see `with_replay`.

    Args:
        ends: further tokens that end an answer.
    """

    share: float
    requests: Sequence[str]
    tokenizer: Any
    max_new_tokens: int = MAX_NEW_TOKENS
    max_length: int | None = None
    template: str | None = None
    label_columns: Sequence[str] = ()
    ends: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.share not in SHARE:
            raise InputError(f"replay={self.share!r}: must be a share of all rows, {SHARE}")
        if self.max_new_tokens not in COUNT:
            raise InputError(f"replay_max_new_tokens={self.max_new_tokens!r}: must be {COUNT}")

    def count(self, rows: Dataset) -> int:
        """Return the number of general rows for these training rows."""
        return max(1, round(len(rows) * self.share / (1 - self.share)))

    def asked(self, rows: Dataset) -> list[Asked]:
        """
        Return the requests, at most one for each general row, each in the form of one of the training rows. The rows
        are evenly spaced, so that their system prompts and tools keep their shares.
        """
        form = self.form(rows)
        count = min(self.count(rows), len(self.requests))
        texts = [self.requests[i * len(self.requests) // count] for i in range(count)]
        contexts = rows.select([i * len(rows) // count for i in range(count)])
        return [self._asked(text, row, form) for text, row in zip(texts, contexts, strict=True)]

    def form(self, rows: Dataset) -> tuple[str, ...]:
        """Return the columns of a general row's text. Raise if these training rows cannot have general rows."""
        names, field = set(rows.column_names), f"replay={self.share!r}"
        if "input_ids" in names:
            raise InputError(f"{field}: rows are tokens (input_ids); give messages, prompt and completion, or text")
        form = next(form for form in (("prompt", "completion"), ("messages",), ("text",)) if names >= {*form})
        first, start = rows[0][form[0]], self._turn_start()
        if isinstance(first, str) and start and start in first:
            raise InputError(
                f"{field}: column {form[0]!r}: has a chat in the words of its template; give messages instead, whose "
                "system prompts and requests can be told apart"
            )
        if not isinstance(first, str) and any(isinstance(message.get("content"), list) for message in first):
            raise InputError(f"{field}: column {form[0]!r}: has messages in parts; give each message's content as text")
        return form

    def _turn_start(self) -> str:
        """Return the words with which the chat template begins an answer; "" without a template."""
        if (self.template or self.tokenizer.chat_template) is None:
            return ""
        chat = [{"role": "user", "content": "a"}]
        options = {"chat_template": self.template, "tokenize": False}
        whole = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, **options)
        return whole.removeprefix(self.tokenizer.apply_chat_template(chat, **options)).strip()

    def _asked(self, text: str, row: dict[str, Any], form: tuple[str, ...]) -> Asked:
        if isinstance(row[form[0]], str):
            return Asked(text, f"{text}\n", form, {}, self.tokenizer(f"{text}\n")["input_ids"])
        context = {name: row[name] for name in ("tools", "chat_template_kwargs") if row.get(name)}
        system = takewhile(lambda message: message["role"] in ("system", "developer"), row[form[0]])
        chat = [{"role": message["role"], "content": message["content"]} for message in system]
        chat.append({"role": "user", "content": text})
        tools = context.get("tools")
        ids = self.tokenizer.apply_chat_template(
            chat, tools=json.loads(tools) if isinstance(tools, str) else tools, add_generation_prompt=True,
            return_dict=True, chat_template=self.template, **context.get("chat_template_kwargs", {}),
        )["input_ids"]  # fmt: skip
        return Asked(text, chat, form, context, ids)

    def limit(self, asked: Asked) -> int:
        """Return the maximum number of tokens of an answer, with the token that ends it."""
        return min(self.max_new_tokens, (self.max_length or 2**31) - len(asked.ids))

    # --- rows --------------------------------------------------------------------------------------------------------

    def planned(self, rows: Dataset) -> Dataset:
        """Return the rows with general rows of about the length to expect, for a plan: the base answers nothing yet."""
        asked = self.asked(rows)
        words = [" ".join(["the"] * min(_MEAN_TOKENS, max(1, self.limit(each)))) for each in asked]
        return self._interleaved(rows, asked, words)

    def plan(self, rows: Dataset, parameters: int) -> str:
        """Return a line for a plan: number of general rows, and roughly how long a base of this size answers."""
        asked = self.asked(rows)
        tokens = sum(max(0, self.limit(each)) for each in asked)  # a batch ends with its longest answer
        seconds = tokens * parameters / _PER_SECOND
        time = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:,.0f} min"
        return (
            f"replay: {self.count(rows):,} more rows, which the base answers before training: {len(asked):,} requests, "
            f"up to {self.max_new_tokens:,} tokens each; about {time} on one core, less on a GPU"
        )

    def mixed(self, rows: Dataset, model: Any, file: str | os.PathLike | None = None) -> Dataset:
        """Return the rows with general rows, answered by the base. All processes must call this."""
        asked = [each for each in self.asked(rows) if self.limit(each) > 0]
        answers = self._answers(model, asked, None if file is None else Path(file))
        pairs = [(each, answer) for each, answer in zip(asked, answers, strict=True) if answer is not None]
        left_out = f"the base ends its answers to {len(pairs)} of {len(asked)} requests in {self.max_new_tokens} tokens"
        if 4 * len(pairs) < max(1, len(asked)):
            raise InputError(
                f"replay={self.share!r}: {left_out}; raise replay_max_new_tokens (max_length={self.max_length}), or "
                "give requests with shorter answers in replay_file"
            )
        if len(pairs) < len(asked) and PartialState().is_main_process:
            logger.info("replay=%s: %s; the others are left out", self.share, left_out)
        return self._interleaved(rows, *map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]

    def _interleaved(self, rows: Dataset, asked: Sequence[Asked], answers: Sequence[str]) -> Dataset:
        """Return the rows with the answered requests between them, at equal distances; the requests repeat."""
        count = self.count(rows)
        for column in self.label_columns:
            if rows.features[column] != Value("string"):
                labels = [label_text(label) for label in rows[column]]
                rows = rows.remove_columns(column).add_column(column, labels)
        label = dict.fromkeys(self.label_columns, LABEL)
        made = [{**each.row(answer), **label} for each, answer in zip(asked, answers, strict=True)]
        complete = [{name: row.get(name) for name in rows.column_names} for row in made]
        general = Dataset.from_list(complete, features=rows.features)
        check_rows(general, f"replay={self.share!r}", self.tokenizer, None, self.template)
        after = np.arange(1, count + 1) * len(rows) / count - 0.5
        order = np.concatenate([np.arange(len(rows)), after]).argsort(kind="stable")
        places = np.concatenate([np.arange(len(rows)), len(rows) + np.arange(count) % len(general)])
        return concatenate_datasets([rows, general]).select(places[order])

    # --- answers -----------------------------------------------------------------------------------------------------

    def _answers(self, model: Any, asked: Sequence[Asked], file: Path | None) -> list[str | None]:
        """Return the base's answer to each request, from the file or new; None if the base does not end it."""
        base, kept = base_digest(model), AnswersFile(file, "replay: answers")
        ends = sorted({*end_tokens(model, self.tokenizer), *self.ends})
        keys = [hash_value([base, each.text, each.ids, self.limit(each), ends]) for each in asked]
        known: dict[str, Tokens] = on_main_process(lambda: kept.read(only={*keys}))
        missing = {key: each for key, each in zip(keys, asked, strict=True) if key not in known}
        prompts = {key: each.ids for key, each in missing.items()}
        limits = {key: self.limit(each) for key, each in missing.items()}
        alone = model.disable_adapter() if isinstance(model, PeftModel) else nullcontext()
        with _moved(model) if missing else nullcontext(), alone:
            for made in answers_in_batches(model, prompts, limits, ends, _BATCH, "Answers of the base"):
                known |= made
                lines = [
                    KeptAnswer("base", missing[key].text, self._text(tokens, ends), tokens, key)
                    for key, tokens in made.items()
                ]
                on_main_process(partial(kept.append, lines))
        return [self._ended(known[key], self.limit(each), ends) for key, each in zip(keys, asked, strict=True)]

    def _text(self, tokens: Tokens, ends: Sequence[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if token not in ends], skip_special_tokens=True)

    def _ended(self, tokens: Tokens, limit: int, ends: Sequence[int]) -> str | None:
        """Return an answer's text. None if the answer has no words, or no end within its limit."""
        text = self._text(tokens, ends)
        return text if tokens[-1] in ends and len(tokens) <= limit and text.strip() else None


@dataclass(frozen=True)
class Asked:
    """
    A general request in the form of the training rows.

    Args:
        text: the request.
        prompt: messages, or text.
        form: the columns of a row's text.
        context: further columns of a row that its chat template reads.
        ids: tokens of the prompt.
    """

    text: str
    prompt: Any
    form: tuple[str, ...]
    context: dict[str, Any]
    ids: list[int]

    def row(self, answer: str) -> dict[str, Any]:
        """Return a training row with an answer to the request."""
        said = answer if isinstance(self.prompt, str) else [{"role": "assistant", "content": answer.strip()}]
        parts = (self.prompt, said) if len(self.form) == 2 else (self.prompt + said,)
        return {**dict(zip(self.form, parts, strict=True)), **self.context}


@contextmanager
def _moved(model: Any) -> Iterator[None]:
    """Move a model from the CPU to the training's device inside the block, in the process that runs it."""
    state, on_cpu = PartialState(), next(model.parameters()).device.type == "cpu"
    moves = state.is_main_process and on_cpu and state.device.type != "cpu"
    moves = moves and not hasattr(model, "hf_device_map") and not any(map(is_sharded, model.parameters()))
    if moves:
        model.to(state.device)
    try:
        yield
    finally:
        if moves:
            model.to("cpu")
