"""Hooks for `mkdocs build`, named in mkdocs.yml.

In the repository, README.md is next to docs/, and documents link to sources and tests. On the site, README is the home
page. The site contains documents and pictures only, so links to other files are replaced by their text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Documents outside of docs/, and their names on the site."""
PICTURES = "benchmarks/results"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add documents and pictures from outside of docs/."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    for picture in sorted((ROOT / PICTURES).glob("*.png")):
        files.append(File.generated(config, f"images/{picture.name}", content=picture.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links by links to the same documents on the site."""
    here = page.file.src_uri
    folder = posixpath.dirname({site: source for source, site in PAGES.items()}.get(here, f"docs/{here}"))

    def moved(link: re.Match[str]) -> str:
        picture, text, address = link.groups()
        path, mark, anchor = address.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        target = _in_site(posixpath.normpath(posixpath.join(folder, path)))
        if files.get_file_from_path(target) is None:
            return text
        return f"{picture}[{text}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{mark}{anchor})"

    blocks = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(moved, part) for part in blocks)


def _in_site(path: str) -> str:
    """Return the name on the site of a file of the repository; a name that does not exist for other files."""
    if path.startswith(f"{PICTURES}/"):
        return f"images/{posixpath.basename(path)}"
    if path == "docs/README.md":  # the navigation of the site replaces the table of contents
        return "none"
    return PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else f"none/{path}")
