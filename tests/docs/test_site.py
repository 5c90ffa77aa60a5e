"""The site of `make docs-site`: it is built without a warning, and has the reference of every public name."""

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
    """The built site; a warning would be an error (`strict` in mkdocs.yml)."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def text(page: Path) -> str:
    """Return what a reader sees of a page."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", "", page.read_text())))


def public() -> Iterator[tuple[str, object]]:
    """Yield the public names with what they are, members of classes too."""
    for name in set(infinity.__all__) - {"InfinityError"}:  # which is with the other errors
        yield f"infinity.{name}", getattr(infinity, name)
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and kind.__module__ == errors.__name__:
            yield f"infinity.errors.{name}", kind
    yield f"{StepRecord.__module__}.StepRecord", StepRecord
    for name, kind in (("infinity.PagedOptimizer", PagedOptimizer), ("infinity.Config", Config)):
        for member, value in vars(kind).items():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                yield f"{name}.{member}", value


def test_every_public_name_has_its_reference(site: Path) -> None:
    """With its docstring."""
    page = (site / "reference" / "api.html").read_text()
    seen = text(site / "reference" / "api.html")
    for name, value in public():
        assert f'id="{name}"' in page, name
        first = (inspect.getdoc(value) or "").partition("\n")[0]
        assert first, f"{name} has no docstring"
        assert re.sub(r"`+([^`]*)`+", r"\1", first) in seen, f"{name}: {first}"


def test_readme_is_the_first_page(site: Path) -> None:
    """Its picture is there, its links lead to pages of the site, and those to sources are text."""
    page = (site / "index.html").read_text()
    assert (site / "images" / "peers.png").exists()
    assert 'src="images/data-path.svg"' in page
    assert 'href="docs/' not in page
    assert 'href="tests/' not in page
    assert "test_paging_changes_no_bit" in text(site / "index.html")


def test_every_document_is_in_the_site(site: Path) -> None:
    """None is forgotten, and no source is copied."""
    for page in (ROOT / "docs").rglob("*.md"):
        built = (site / page.relative_to(ROOT / "docs")).with_suffix(".html")
        assert built.exists() or built.with_name("index.html").exists(), page.name
    assert not list(site.rglob("*.py"))
