"""What `moe-peft pick` tells its operator: a log of choices, and metrics in Prometheus' text form."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler

import prometheus_client as prometheus

from ..combine.request_gate import BASE, RequestChoice
from ..combine.request_texts import Request, request_text
from ..utils.messages import InputError


class Records:
    """
    Counts, times and a log of the requests for our model.

    Args:
        log: file to append a line of JSON to for each choice; None: no log. A file that is moved away is made anew.
        with_text: whether lines have the text.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, log: str | None = None, with_text: bool = False) -> None:
        self.with_text = with_text
        self.picked: Counter[str] = Counter()
        self.registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter(
            "moe_peft_pick_requests", "Requests, by the adapter picked", ["adapter"], registry=self.registry
        )
        self._failures = prometheus.Counter(
            "moe_peft_pick_failures", "Answers that failed or broke off", ["adapter"], registry=self.registry
        )
        self._seconds = prometheus.Histogram(
            "moe_peft_pick_answer_seconds", "Time from choice to an answer's end", ["adapter"], registry=self.registry,
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250),
        )  # fmt: skip
        self.choice_seconds = prometheus.Histogram(
            "moe_peft_pick_choice_seconds", "Time that a choice took, waiting included", registry=self.registry
        )
        self.log: logging.Handler | None = None
        if log is not None:
            try:
                self.log = WatchedFileHandler(log, encoding="utf-8")
            except OSError as error:
                raise InputError(f"log={log!r}: cannot be written: {error.strerror}") from error

    def names(self, adapters: Sequence[str]) -> None:
        """Begin to count adapters from 0."""
        for name in (*adapters, BASE):
            self.picked.setdefault(name, 0)
            for counted in (self._requests, self._failures, self._seconds):
                counted.labels(name)

    def chosen(self, name: str, choices: Sequence[RequestChoice], requests: Sequence[Request]) -> None:
        """Note a request's adapter, and log the choice for each of its texts."""
        self.picked[name] += 1
        self._requests.labels(name).inc()
        if self.log is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        for choice, request in zip(choices, requests, strict=True):
            scores = {name: round(score, 4) for name, score in choice.scores.items()}
            line = {"time": now, "adapter": choice.name or BASE, "scores": scores}
            line |= {"text": request_text(request)} if self.with_text else {}
            record = logging.makeLogRecord({"msg": json.dumps(line, ensure_ascii=False)})
            self.log.handle(record)

    def answered(self, name: str, seconds: float, failed: bool) -> None:
        """Note the end of an answer."""
        self._seconds.labels(name).observe(seconds)
        if failed:
            self._failures.labels(name).inc()

    def metrics(self) -> bytes:
        return prometheus.generate_latest(self.registry)
