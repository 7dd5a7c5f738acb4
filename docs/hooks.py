"""mkdocs: results and recipe notes live beside their code; pages link to them by the paths that also work on GitHub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

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
        markdown = re.sub(r"\[([^\]]+)\]\(((?:\.\./)+)docs/([\w/-]+)\.md(#[\w-]+)?\)", to_page, markdown)
    if page.file.src_uri.startswith("../recipes/"):
        recipe = path.with_suffix(".yaml")
        text = recipe.read_text(encoding="utf-8")
        markdown += f'\n\n## The recipe\n\n```yaml title="{recipe.name}"\n{text}```\n'
    return markdown


def on_template_context(context: dict[str, Any], template_name: str, config: MkDocsConfig) -> dict[str, Any]:
    """Without an address, mkdocs would have the page of wrong links look for its parts at the root of the disk."""
    if template_name == "404.html" and not config.site_url:
        context["base_url"] = "."
    return context
