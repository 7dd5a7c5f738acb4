"""`moe-peft export`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from pydantic import Field

from ..native.formats import FORMATS
from ..utils.io import read_text
from ..utils.messages import InputError, choice_error, one_line
from ..utils.validation import Settings, Text
from .settings import SettingsParser, check_models

_ABOUT = [f"{name}: {form.about}{f' (extra {form.extra})' * bool(form.extra)}" for name, form in FORMATS.items()]
_DTYPES = [f"{', '.join(form.dtypes)} ({name})" for name, form in FORMATS.items()]


class ExportSettings(Settings):
    """The settings of `moe-peft export`."""

    adapter: Text | None = Field(None, title="FOLDER", description="a MoE-LoRA adapter")
    model: Text | None = Field(
        None, title="FOLDER", description="a native MoE (upcycled, exported, pruned), for another format"
    )
    base: Text | None = Field(
        None, title="PATH", description="the base in full precision; default: the one that the adapter names"
    )
    output: Text = Field(title="PATH", description="folder for the MoE, new or empty, or a file")
    format: Text = Field("safetensors", title="NAME", description="; ".join(_ABOUT))
    family: Text | None = Field(
        None, title="NAME", description="model type of the MoE, e.g. mixtral; default: the one that fits"
    )
    dtype: Text | None = Field(None, title="NAME", description=f"{'; '.join(_DTYPES)}; default: the base's")
    max_shard_size: Text | None = Field(
        None, title="SIZE", description="largest size of an output file of a folder; default: 5GB"
    )
    verify: str | None = Field(
        None, title="TEXT", description="compare logits on this text, or on each line of a text file"
    )


def parser(prog: str) -> SettingsParser:
    return SettingsParser(
        ExportSettings,
        prog,
        usage="%(prog)s (--adapter | --model) FOLDER --output PATH [options]",
        description="Make a native MoE from a MoE-LoRA adapter and its base, or a GGUF file from either.",
        epilog='example:\n  moe-peft export --adapter adapter --output exported --verify "Hello, world."',
    )


def run(settings: ExportSettings) -> None:
    if settings.format not in FORMATS:  # plugins may add formats
        raise InputError(choice_error("format", settings.format, FORMATS))
    # Raise for settings that the format does not read.
    written, source = FORMATS[settings.format], settings.adapter or settings.model
    if source is None or (settings.adapter and settings.model):
        raise InputError("adapter, model: give one of the two")
    if settings.model is not None and (settings.base or settings.family):
        raise InputError(f"model={settings.model!r}: base and family go with adapter")
    for name in {name for form in FORMATS.values() for name in form.reads} - {*written.reads}:
        if (value := getattr(settings, name)) is not None:
            readers = " or ".join(each for each, form in FORMATS.items() if name in form.reads)
            raise InputError(f"{name}={value!r}: goes with --format {readers}")
    texts = None if settings.verify is None else _texts(settings.verify)
    check_models(adapter=settings.adapter, model=settings.model, base=settings.base)
    # Only now: these imports take seconds.
    from ..native.export import check_verifiable, verify_export
    from ..utils.loading import CONFIG

    if texts is not None:
        check_verifiable(source, settings.base)
    # Write the result.
    own = {name: getattr(settings, name) for name in written.reads if name not in ("model", "verify")}
    own = {name: value for name, value in own.items() if value is not None}
    path = written.export(source, settings.output, settings.base, family=settings.family, dtype=settings.dtype, **own)
    print(path)
    # Report the programs that compute it differently, and the verification.
    if (path / CONFIG).is_file():
        print_engines(path)
    if texts is not None:
        c = verify_export(source, path, texts, settings.base)
        print(
            f"{'verified' if c.passed else 'not verified'}: of {c.tokens} tokens, {c.within:.1%} have logits within "
            f"{c.tolerance:.0e} of the largest ({c.largest:.3g}; the largest difference is {c.difference:.2g}), "
            f"{c.agreement:.1%} the same most probable next token"
        )
        if not c.passed:
            sys.exit(1)


def print_engines(folder: Path) -> None:
    """
    Print the programs that compute the model differently from transformers. It never raises: the model is written.
    """
    from ..native.families import inexact
    from ..utils.loading import read_config

    try:
        reasons = inexact(read_config(folder, folder))
    except Exception as error:
        reasons = {"other programs": f"not known ({type(error).__name__}: {one_line(error, 80)})"}
    for engine, reason in reasons.items():
        print(f"not for {engine}: {reason}")


def _texts(text_or_file: str) -> list[str]:
    """Return the text, or the lines of a file. The file is read before anything is written."""
    is_file = len(os.fsencode(text_or_file)) < 256 and Path(text_or_file).exists()
    if not is_file and re.fullmatch(r"\S+\.(txt|md|jsonl?|csv)", text_or_file):
        raise InputError(f"--verify {text_or_file!r}: no such file; give text, or a text file")
    text = read_text(text_or_file, f"--verify {text_or_file!r}") if is_file else text_or_file
    texts = [line for line in text.splitlines() if line.strip()]
    if not texts:
        raise InputError(f"--verify {text_or_file!r}: give text, or a text file")
    return texts
