"""`moe-peft chat`."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..utils.messages import InputError
from ..utils.plugins import load_function
from ..utils.validation import Count, Flag, Number, Text, TextList, WeightSettings
from .settings import SettingsParser, check_models

EXAMPLE = r"""
examples:
  moe-peft chat --model out --system "Answer in one sentence."
  moe-peft chat --model out --web
"""


class ChatSettings(WeightSettings):
    """The settings of `moe-peft chat`."""

    model: Text = Field(title="FOLDER", description="an adapter, a native MoE or a dense model")
    base: Text | None = Field(None, title="PATH", description="an adapter's base; default: the one that it names")
    load_in_4bit: Flag = Field(False, description="hold the base's weights in 4 bits (bitsandbytes)")
    choose: Text | None = Field(
        None,
        title="M:F",
        description="module:function, from texts to names of experts, None for the base; default: the mixture's gate",
    )
    system: Text | None = Field(None, title="TEXT", description="a system prompt")
    max_new_tokens: Count = Field(512, description="maximum tokens per answer")
    temperature: Annotated[Number, Field(ge=0)] = Field(
        0.0,
        description="sampling temperature; 0, the default, takes the likeliest token, so that answers can be compared",
    )
    web: Flag = Field(False, description="open a page in the browser instead of the terminal")
    host: Text | None = Field(
        None, title="ADDRESS", description="the page's address; default: 127.0.0.1, this machine only"
    )
    allowed_hosts: TextList | None = Field(None, title="NAME", description="further names of a page on 127.0.0.1")
    port: Annotated[Count, Field(le=65535)] | None = Field(
        None, description="the page's port; default: the first free one from 7860"
    )


_GROUPS = {
    "Model": ("model", "base", "dtype", "load_in_4bit", "quantization"),
    "Answers": ("choose", "system", "max_new_tokens", "temperature"),
    "Page": ("web", "host", "allowed_hosts", "port"),
}


def parser(prog: str) -> SettingsParser:
    description = "Talk with a model, see which expert serves each token, and force or forbid experts."
    return SettingsParser(ChatSettings, prog, groups=_GROUPS, description=description, epilog=EXAMPLE)


def _check_address(host: str | None, port: int | None) -> None:
    """Raise if the page's address is taken or wrong. Gradio would wait for it for ever."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host or "127.0.0.1", port or 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
    except OSError as error:
        raise InputError(f"--host {host}, --port {port}: taken, or not an address of this machine") from error


def run(settings: ChatSettings) -> None:
    for name in ("host", "allowed_hosts", "port"):
        if getattr(settings, name) is not None and not settings.web:
            raise InputError(f"{name}={getattr(settings, name)!r}: is for the page; add --web")
    check_models(**{"--model": settings.model, "base": settings.base})
    # Only now: these imports take seconds.
    from ..analysis.inputs import describe
    from ..chat import Conversation
    from ..chat.terminal import Terminal
    from ..chat.web import Page, import_gradio, serve_page
    from ..combine.request_gate import FILE as REQUEST_GATE
    from ..combine.request_gate import RequestGate
    from ..models.layer import routed_layers
    from ..native.folders import MoELoraFolder, open_folder

    if settings.web:
        _check_address(settings.host, settings.port)  # before a model is loaded
        import_gradio()
    quantization = settings.quantization
    if settings.load_in_4bit:
        quantization = {"load_in_4bit": True, **(quantization or {})}
    folder = open_folder(settings.model, "--model", base=settings.base)
    model, tokenizer = folder.load(settings.dtype, quantization), folder.tokenizer
    choose, gate = None, None
    if settings.choose is not None:
        if not isinstance(folder, MoELoraFolder):
            raise InputError(f"choose={settings.choose!r}: {settings.model} is no mixture of adapters to choose from")
        choose = load_function(settings.choose, "choose")
    elif isinstance(folder, MoELoraFolder) and (folder.folder / REQUEST_GATE).is_file():
        gate = RequestGate.from_pretrained(folder.folder, model, tokenizer=tokenizer)
    begin = partial(
        Conversation,
        model,
        tokenizer,
        system=settings.system,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        pick=None if gate is None else gate.pick,
        choose=choose,
    )
    conversation, about = begin(), describe(model)
    name = Path(settings.model).name or settings.model
    lines = [f"{about['class']}, {about['dtype']}, {about['quantization'] or 'not quantized'}"]
    if conversation.experts:
        lines.append(f"experts: {', '.join(conversation.experts)}; {len(routed_layers(model))} routers")
    if conversation.pick is not None:
        lines.append("each question is answered by the expert that it is for, or by the base; /auto: token by token")
    if tokenizer.chat_template is None:
        lines.append("no chat template: each question is continued as text, on its own")
    print(f"{settings.model}: {lines[0]}", *lines[1:], sep="\n")
    if settings.web:
        hosts = settings.allowed_hosts or ()
        serve_page(Page(begin), name, " · ".join(lines), settings.host or "127.0.0.1", settings.port, hosts)
    else:
        print("/help lists the commands")
        Terminal(conversation).run()
