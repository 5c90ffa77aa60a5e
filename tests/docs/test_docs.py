"""Tests of the documentation: links resolve, tables hold data, and lists are complete."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def prose(page: Path) -> str:
    """Return a page without code blocks, in which `#` starts a comment and brackets are not links."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> Iterator[str]:
    """Yield the targets of a page's relative links."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            yield unquote(target)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings in GitHub's form; repeated headings are numbered."""
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.+?) *#*$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        seen[name] = seen.get(name, -1) + 1
        if seen[name]:
            seen[f"{name}-{seen[name]}"] = 0
    return set(seen)


def broken_links(page: Path) -> Iterator[str]:
    """Yield the links of a page whose file or heading does not exist."""
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


def test_relative_links_resolve() -> None:
    assert [(page, link) for page in PAGES for link in broken_links(page)] == []


def test_broken_links_are_detected(tmp_path: Path) -> None:
    """Links in code blocks are ignored."""
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n## D\n## D\n[1](#a-b-c) [2](#d-1) [3](gone.md) [4](#e)\n```\n[5](gone.md)\n```\n")
    assert list(broken_links(page)) == ["gone.md", "#e"]


def test_table_cells_are_short() -> None:
    """A table cell has at most 200 characters, counted as rendered."""
    rows = [(page, line) for page in PAGES for line in prose(page).splitlines() if line.startswith("|")]
    cells = [
        (page, re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).strip())
        for page, row in rows
        for cell in re.split(r"(?<!\\)\|", row)
    ]
    assert [(page, cell) for page, cell in cells if len(cell) > 200] == []


def test_every_decision_is_in_the_index() -> None:
    """Each file of docs/explanation/decisions is linked from its README."""
    index = ROOT / "docs" / "explanation" / "decisions" / "README.md"
    assert set(links(index)) >= {page.name for page in index.parent.glob("*.md")} - {"README.md"}


def test_quick_test_files_exist() -> None:
    """The files listed in the Makefile for `make quick` exist and include this one."""
    printed = subprocess.run(["make", "-pn", "clean"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = re.search(r"^QUICK := (.+)$", printed, re.MULTILINE)
    assert listed is not None
    missing = [name for name in listed[1].split() if not (ROOT / name).exists()]
    assert missing == []
    assert "tests/docs/test_docs.py" in listed[1].split()


def test_python_blocks_are_valid_syntax() -> None:
    count = 0
    for page in PAGES:
        for code in re.findall(r"^```(?:python|py)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            compile(code, str(page), "exec", dont_inherit=True)
            count += 1
    assert count >= 20
