"""mkdocs: results and recipe notes live beside their code; pages link to them by the paths that also work on GitHub."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

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
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files
