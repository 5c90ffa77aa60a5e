"""Tests of the site that `make docs-site` builds: no warnings, all pages, and a reference of every public name."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

import infinity
from infinity import Config, PagedOptimizer, errors
from infinity.telemetry.ledger import StepRecord

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; `strict` in mkdocs.yml turns warnings into errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def text(page: Path) -> str:
    """Return the visible text of a page."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", "", page.read_text())))


def public_names() -> Iterator[tuple[str, object]]:
    """Yield every public name with its object, including members of classes."""
    for name in set(infinity.__all__) - {"InfinityError"}:  # listed with the other errors
        yield f"infinity.{name}", getattr(infinity, name)
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and kind.__module__ == errors.__name__:
            yield f"infinity.errors.{name}", kind
    yield f"{StepRecord.__module__}.StepRecord", StepRecord
    for name, kind in (("infinity.PagedOptimizer", PagedOptimizer), ("infinity.Config", Config)):
        for member, value in vars(kind).items():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                yield f"{name}.{member}", value


def test_every_public_name_has_a_reference(site: Path) -> None:
    """The reference contains the first line of its docstring."""
    page = (site / "reference" / "api.html").read_text()
    seen = text(site / "reference" / "api.html")
    for name, value in public_names():
        assert f'id="{name}"' in page, name
        first = (inspect.getdoc(value) or "").partition("\n")[0]
        assert first, f"{name} has no docstring"
        assert re.sub(r"`+([^`]*)`+", r"\1", first) in seen, f"{name}: {first}"


def test_readme_is_the_home_page(site: Path) -> None:
    """Its image exists, its links lead to pages of the site, and links to source files become text."""
    page = (site / "index.html").read_text()
    assert (site / "images" / "peers.png").exists()
    assert 'src="images/data-path.svg"' in page
    assert 'href="docs/' not in page
    assert 'href="tests/' not in page
    assert "test_paging_changes_no_bit" in text(site / "index.html")


def test_every_document_is_in_the_site(site: Path) -> None:
    """The site contains no source files."""
    for page in (ROOT / "docs").rglob("*.md"):
        built = (site / page.relative_to(ROOT / "docs")).with_suffix(".html")
        assert built.exists() or built.with_name("index.html").exists(), page.name
    assert not list(site.rglob("*.py"))
