"""`moe-peft pick`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from ..utils.hosts import trusted_hosts
from ..utils.messages import InputError, choice_error
from ..utils.plugins import load_function
from ..utils.validation import Count, Flag, Integer, Number, Settings, Text, TextList, check_rules
from .settings import SettingsParser, check_files, check_models

if TYPE_CHECKING:
    from ..combine.request_texts import Request

EXAMPLE = r"""
examples:
  moe-peft pick --fit --base Qwen/Qwen3-0.6B --data math.jsonl code.jsonl \
    --gate gate
  vllm serve Qwen/Qwen3-0.6B --enable-lora --lora-modules math=lora-math \
    code=lora-code
  moe-peft pick --test requests.jsonl --label-column adapter --gate gate
  moe-peft pick --gate gate
"""


class PickSettings(Settings):
    """The settings of `moe-peft pick`."""

    gate: Text | None = Field(None, title="FOLDER", description="the gate, made by --fit or by moe-peft mix")
    choose: Text | None = Field(
        None,
        title="M:F",
        description="instead of a gate: module:function, from texts to names of adapters, None for the base",
    )
    base: Text | None = Field(
        None,
        title="PATH",
        description="the adapters' base; default, without --fit: the one that the gate was made with",
    )
    max_length: Count | None = Field(
        None, description="tokens of a request that are read; default: 1024, or the gate's"
    )
    server: Text = Field("http://127.0.0.1:8000", title="URL", description="the server that has the adapters by name")
    names: dict[Text, Text] | None = Field(None, description='its names of adapters: {"math": "lora-math"}')
    base_name: Text | None = Field(
        None, title="NAME", description="its name of the base; default: its first model that is no adapter"
    )
    server_kind: Literal["vllm", "sglang", "llama-server", "ollama", "names"] | None = Field(
        None, title="KIND", description="vllm, sglang, llama-server, ollama or names; default: detected"
    )
    skip_check: Flag = Field(False, description="compare no adapter's answers with the base's")
    api_key: Text | None = Field(None, title="KEY", description="its key, for our own questions; default: VLLM_API_KEY")
    timeout: Count = Field(600, description="seconds that it may be silent during an answer")
    host: Text = Field("127.0.0.1", title="ADDRESS", description="the proxy's address; 0.0.0.0 is everyone's")
    port: Annotated[Integer, Field(ge=0, le=65535)] = Field(8100, description="the proxy's port; 0: a free one")
    served_model_name: Text = Field("auto", title="NAME", description="the model that stands for the choice")
    max_body: Count = Field(64, description="MiB of a request")
    allowed_hosts: TextList | None = Field(None, title="NAME", description="further names of a proxy on 127.0.0.1")
    log: Text | None = Field(None, title="FILE", description="log choices and scores as lines of JSON")
    log_text: Flag = Field(False, description="log the texts, too")
    fit: Flag = Field(False, description="make the gate, and stop")
    data: TextList | None = Field(
        None, title="FILE", description="requests that each adapter is for: a file for each, or one with --label-column"
    )
    test: TextList | None = Field(
        None,
        title="FILE",
        description="requests as in --data, held out: say where the gate sends them, and stop; base: general requests",
    )
    report: Text | None = Field(None, title="FOLDER", description="with --test: folder for its JSON and picture")
    label_column: Text | None = Field(
        None, title="NAME", description="column of --data or --test with the adapters' names"
    )
    labels: TextList | None = Field(
        None, title="NAME", description="the adapters' names; default: those of the files, or all of the column"
    )
    neutral: Text | None = Field(
        None, title="FILE", description="general requests for the base, one a line, in addition to the built-in list"
    )
    neutral_only: Flag = Field(False, description="leave out the built-in list of general requests")
    lose: Annotated[Number, Field(ge=0, lt=1)] = Field(
        0.03, title="SHARE", description="share of the adapters' own requests that may go to the base"
    )
    max_examples: Count = Field(512, description="rows of each adapter that are read")

    @model_validator(mode="after")
    def _check(self) -> PickSettings:
        field, files = ("test", self.test) if self.test else ("data", self.data or [])
        labels = self.labels or [Path(file).stem for file in files]
        rules: list[tuple[Any, str]] = [
            (self.gate is None and (self.fit or self.test or self.choose is None), "gate=None: name the gate's folder"),
            (self.test and self.fit, "test: goes without fit"),
            (self.report and not self.test, "report: goes with test"),
            (self.gate and self.choose, "choose: goes without gate"),
            (self.log_text and self.log is None, "log_text=True: goes with log"),
            (self.fit and not (self.base and files), "fit=True: give base and data, too"),
            (not self.fit and (self.data or self.neutral), "data, neutral: go with fit"),
            (self.neutral_only and not self.neutral, "neutral_only=True: goes with neutral"),
            (not files and (self.labels or self.label_column), "labels, label_column: go with data"),
            (self.label_column and len(files) > 1, f"{field}={files}: give one file with label_column"),
            (
                files and not self.label_column and self.labels and len(self.labels) != len(files),
                f"labels={self.labels}: {len(files)} files; give a name for each",
            ),
            (
                not self.label_column and len({*labels}) < len(labels),
                f"labels={labels}: two adapters have the same name; give others (--labels)",
            ),
        ]
        check_rules(rules)
        return self


_GROUPS = {
    "Gate": ("gate", "base", "max_length", "choose"),
    "Server": ("server", "server_kind", "names", "base_name", "skip_check", "api_key", "timeout"),
    "Proxy": ("host", "port", "allowed_hosts", "served_model_name", "max_body", "log", "log_text"),
    "Making a gate, testing it": (
        "fit",
        "data",
        "test",
        "report",
        "label_column",
        "labels",
        "neutral",
        "neutral_only",
        "lose",
        "max_examples",
    ),
}


def parser(prog: str) -> SettingsParser:
    description = (
        "Answer each request with the LoRA that it is for: a proxy in front of a server that has them by name."
    )
    return SettingsParser(PickSettings, prog, groups=_GROUPS, description=description, epilog=EXAMPLE)


def run(settings: PickSettings) -> None:
    check_files(**{"--data": settings.data, "--test": settings.test})
    check_models(base=settings.base)
    if settings.fit or settings.test:
        (fit if settings.fit else test)(settings)
        return
    from ..combine.request_gate import FILE, RequestGate  # only now: these imports take seconds
    from ..serving.engines import Engine, find_engine
    from ..serving.pick import Gatekeeper, Proxy, serve
    from ..serving.picker import ByFunction, ByGate, Chooser
    from ..serving.records import Records

    def load() -> Chooser:
        if settings.choose is not None:
            function = load_function(settings.choose, "choose")
            return ByFunction(function, settings.choose, [*settings.names] if settings.names else None)
        gate = RequestGate.from_pretrained(str(settings.gate), settings.base)
        if settings.max_length is not None:
            gate.reader = dataclasses.replace(gate.reader, max_length=settings.max_length)
        gate.pick(["a first request"])  # computes its constants before a user waits
        return ByGate(gate)

    def find(choose: Chooser) -> Engine:
        return find_engine(
            settings.server, choose.names, settings.names or {}, settings.base_name, settings.served_model_name,
            settings.api_key or os.environ.get("VLLM_API_KEY"), settings.server_kind,
        )  # fmt: skip

    records = Records(settings.log, settings.log_text)
    choose = load()
    proxy = Proxy(
        choose, find(choose), settings.served_model_name, settings.timeout, settings.max_body << 20, records,
        trusted_hosts(settings.host, settings.allowed_hosts or ()), not settings.skip_check,
    )  # fmt: skip
    if settings.gate is not None:
        proxy.gate = Gatekeeper(Path(settings.gate, FILE), load, find)
    serve(proxy, settings.host, settings.port)


def fit(settings: PickSettings) -> None:
    """Fit a gate to the requests of `settings.data`, write it, and print how it chooses for its own texts."""
    from ..combine.gate_report import concerns, left_out_report
    from ..combine.request_gate import RequestGate
    from ..combine.request_texts import read_neutral
    from ..native.folders import DenseFolder, NativeFolder, open_folder
    from ..utils.io import new_folder

    with new_folder(str(settings.gate), "gate") as folder:
        tokenizer = open_folder(settings.base or "", "base", DenseFolder, NativeFolder).tokenizer
        requests = requests_by_label(settings, settings.data or [], "--data", tokenizer)
        neutral = read_neutral(settings.neutral, settings.neutral_only)
        gate = RequestGate.fit(
            settings.base, requests, neutral, max_length=settings.max_length or 1024, lose=settings.lose
        )
        gate.save_pretrained(folder)
    for concern in concerns(gate):
        print(f"warning: {concern}")
    print("Each text, by the gate without it:", *left_out_report(gate).lines(), sep="\n")
    print(f"an adapter must lead the base by more than {gate.margin:.2f} (--lose {gate.lose:g})")
    print("held-out requests: moe-peft pick --test FILE")
    print(settings.gate)


def test(settings: PickSettings) -> None:
    """Print where a gate sends the requests of `settings.test`."""
    from ..combine.gate_report import report_on
    from ..combine.request_gate import BASE, RequestGate
    from ..utils.io import new_folder

    gate = RequestGate.from_pretrained(str(settings.gate), settings.base)
    requests = requests_by_label(settings, settings.test or [], "--test", gate.reader.tokenizer)
    for label in requests:
        if label not in (*gate.names, BASE):
            raise InputError(f"{choice_error('labels', label, [*gate.names, BASE])}, which the gate has")
    report = report_on(gate, requests)
    print(*report.lines(), sep="\n")
    if settings.report is not None:
        with new_folder(settings.report, "report") as folder:
            report.write(folder)
        print(settings.report)


def requests_by_label(
    settings: PickSettings, files: Sequence[str], field: str, tokenizer: Any
) -> dict[str, list[Request]]:
    """Read the requests of each adapter from the files of a setting."""
    from ..combine.texts import rows_by_label
    from ..routing.expert_map import label_text
    from ..training.data import check_rows, drawn

    labels = settings.labels and [*map(label_text, settings.labels)]
    requests = {}
    for label, part in rows_by_label(files, field, settings.label_column, labels).items():
        of_format = next((kind for kind in _FORMATS if {*kind} <= {*part.column_names}), None)
        if of_format is None:
            raise InputError(f"{field}: columns {part.column_names}: needs messages, prompt and completion, or text")
        part = drawn(part.select_columns([*of_format]), settings.max_examples, 0)
        check_rows(part, field, tokenizer)
        requests[label] = [row[of_format[0]] for row in part]
    return requests


_FORMATS = (("prompt", "completion"), ("messages",), ("text",))  # a format's first column is the request
