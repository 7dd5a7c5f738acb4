"""mkdocs: results and recipe notes live beside their code; pages link to them by the paths that also work on GitHub."""

from __future__ import annotations

import json
import os
import re
import textwrap
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from moe_peft.cli import COMMANDS, main
from moe_peft.upit import Recipe
from moe_peft.utils.validation import Settings

ROOT = Path(__file__).parents[1]
LINKED = (
    "SECURITY.md",
    "benchmarks/results/*.md",
    "studies/results/*.md",
    "studies/results/*.png",
    "studies/results/*.svg",
    "compatibility/results/*.md",
    "recipes/*/*.md",
)
# What a recipe must say, as the page of its fields does.
REQUIRED = {
    "output_dir": "upit-defaults",
    "model.name_or_path": "Qwen/Qwen3-0.6B-Base",
    "data.train": "train.jsonl",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of `LINKED`, which are outside `docs/`, to the site."""
    for path in sorted(path.relative_to(ROOT) for pattern in LINKED for path in ROOT.glob(pattern)):
        uri = path.with_suffix(".html") if path.suffix == ".md" else path
        file = File(f"../{path}", config.docs_dir, config.site_dir, config.use_directory_urls, dest_uri=str(uri))
        file.inclusion = InclusionLevel.INCLUDED
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links into `docs/` lead to the site's pages (mkdocs would look for them in `docs/docs/`); recipes are shown."""
    path = Path(page.file.abs_src_path or "")
    if page.file.src_uri.startswith("../"):
        to_page = r'<a href="\2\3.html\4">\1</a>'
        markdown = re.sub(r"\[([^\]]+)\]\(((?:\.\./)*)docs/([\w/-]+)\.md(#[\w-]+)?\)", to_page, markdown)
    if page.file.src_uri == "api/commands.md":
        markdown = markdown.replace("<!-- help -->", all_help())
    if page.file.src_uri == "api/upit-fields.md":
        block = f'```yaml title="every-field.yaml"\n{recipe_fields()}```'
        markdown = markdown.replace("<!-- fields -->", block)
    if page.file.src_uri.startswith("../recipes/"):
        recipe = path.with_suffix(".yaml")
        text = recipe.read_text(encoding="utf-8")
        markdown += f'\n\n## The recipe\n\n```yaml title="{recipe.name}"\n{text}```\n'
    return markdown


def all_help() -> str:
    """Every command's `--help-all`, as wide as a page's code."""
    os.environ["COLUMNS"] = "80"
    sections = []
    for command in COMMANDS:
        with redirect_stdout(StringIO()) as printed, suppress(SystemExit):
            main([command, "--help-all"])
        sections.append(f"## moe-peft {command}\n\n```text\n{printed.getvalue()}```\n")
    return "\n".join(sections)


def recipe_fields() -> str:
    """A recipe with every field at its default, and what its description says."""
    lines: list[str] = []
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            lines += ["", *_commented(f"{name}:", field.annotation.__doc__, "")]
            for own, value in field.annotation.model_fields.items():
                lines += _commented(f"  {own}: {_text(f'{name}.{own}', value)}", value.description, "  ")
        else:
            lines += _commented(f"{name}: {_text(name, field)}", field.description, "")
    return "\n".join(lines) + "\n"


def _text(path: str, field: Any) -> str:
    return REQUIRED.get(path) or json.dumps(field.get_default(call_default_factory=True)).strip('"')


def _commented(line: str, description: str | None, indent: str) -> list[str]:
    """A line with its comment, which stands above it where both do not fit on a page."""
    if description is None or len(f"{line} # {description}") < 80:
        return [line + (f" # {description}" if description else "")]
    return [*textwrap.wrap(description, 79, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "), line]


def on_template_context(context: dict[str, Any], template_name: str, config: MkDocsConfig) -> dict[str, Any]:
    """Without an address, mkdocs would have the page of wrong links look for its parts at the root of the disk."""
    if template_name == "404.html" and not config.site_url:
        context["base_url"] = "."
    return context
