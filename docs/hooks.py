"""mkdocs: results and recipe notes live beside their code; pages link to them by the paths that also work on GitHub."""

from __future__ import annotations

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
    """A recipe's note ends with the recipe."""
    recipe = Path(page.file.abs_src_path or "").with_suffix(".yaml")
    if not (page.file.src_uri.startswith("../recipes/") and recipe.exists()):
        return markdown
    text = recipe.read_text(encoding="utf-8")
    return f'{markdown}\n\n## The recipe\n\n```yaml title="{recipe.name}"\n{text}```\n'


def on_template_context(context: dict[str, Any], template_name: str, config: MkDocsConfig) -> dict[str, Any]:
    """Without an address, mkdocs would have the page of wrong links look for its parts at the root of the disk."""
    if template_name == "404.html" and not config.site_url:
        context["base_url"] = "."
    return context
