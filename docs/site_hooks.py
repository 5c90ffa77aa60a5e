"""What `mkdocs build` does with this repository's documents beyond its own rules (mkdocs.yml names this file).

In the repository, README.md lies beside docs/, and documents link to sources and tests. In the site README is the first
page, and only documents and pictures are there: links to them are kept, of all others the text.
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
"""Documents outside of docs/, and where they are in the site."""
PICTURES = "benchmarks/results"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside of docs/: the documents of the root, and the pictures of results."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    for picture in sorted((ROOT / PICTURES).glob("*.png")):
        files.append(File.generated(config, f"images/{picture.name}", content=picture.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where their targets are in the site."""
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
    """Return where a file of the repository is in the site, if it is there."""
    if path.startswith(f"{PICTURES}/"):
        return f"images/{posixpath.basename(path)}"
    return PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else f"none/{path}")
