"""What single values of a recipe may be. YAML has truth values, numbers and texts: none is taken for another."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, Strict
from pydantic_core import PydanticCustomError


def _printable(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise PydanticCustomError("text", "must be a text of printable characters")
    return text


Integer = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict(), AfterValidator(_printable)]
Texts = Annotated[list[Text], Field(min_length=1)]
Count = Annotated[Integer, Field(ge=1, le=2**31 - 1)]
Experts = Annotated[Integer, Field(ge=1, le=4096)]
Seed = Annotated[Integer, Field(ge=0, le=2**31 - 1)]
