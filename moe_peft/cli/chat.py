"""`moe-peft chat`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..analysis.inputs import describe
from ..chat import Conversation
from ..chat.terminal import Terminal
from ..models.layer import routed_layers
from ..native.folders import open_folder
from ..utils.validation import Count, Flag, Number, Text
from .settings import SettingsParser, WeightSettings

EXAMPLE = r"""
example:
  moe-peft chat --model out --system "Answer in one sentence."
"""


class ChatSettings(WeightSettings):
    """The settings of `moe-peft chat`."""

    model: Text = Field(title="FOLDER", description="an adapter, a native MoE or a dense model")
    base: Text | None = Field(None, description="an adapter's base; default: the one that it names")
    load_in_4bit: Flag = Field(False, description="hold the base's weights in 4 bits (bitsandbytes)")
    system: Text | None = Field(None, title="TEXT", description="a system prompt")
    max_new_tokens: Count = Field(512, description="the most tokens of an answer")
    temperature: Annotated[Number, Field(ge=0)] = Field(
        0.0, description="of sampling; 0, the default, takes the most probable token, so that answers can be compared"
    )


_GROUPS = {
    "Model": ("model", "base", "dtype", "load_in_4bit", "quantization"),
    "Answers": ("system", "max_new_tokens", "temperature"),
}


def parser(prog: str) -> SettingsParser:
    description = "Talk with a model, see which expert serves each token, and force or forbid experts."
    return SettingsParser(ChatSettings, prog, groups=_GROUPS, description=description, epilog=EXAMPLE)


def run(settings: ChatSettings) -> None:
    quantization = settings.quantization
    if settings.load_in_4bit:
        quantization = {"load_in_4bit": True, **(quantization or {})}
    folder = open_folder(settings.model, "--model", base=settings.base)
    model, tokenizer = folder.load(settings.dtype, quantization), folder.tokenizer
    conversation = Conversation(
        model,
        tokenizer,
        system=settings.system,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
    )
    about = describe(model)
    lines = [f"{settings.model}: {about['class']}, {about['dtype']}, {about['quantization'] or 'not quantized'}"]
    if conversation.experts:
        lines.append(f"experts: {', '.join(conversation.experts)}; {len(routed_layers(model))} routers")
    if tokenizer.chat_template is None:
        lines.append("no chat template: each line is a text to continue, by itself")
    print(*lines, "/help lists the commands", sep="\n")
    Terminal(conversation).run()
