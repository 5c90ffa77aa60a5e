"""Tests of the generated reference pages: they match the code. `make docs` regenerates them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import infinity.config as run_config
import infinity_daemon.daemon_config as daemon_config
from support import reference_pages

DOCS = Path(__file__).parents[2] / "docs"


def test_generated_pages_are_current(subtests: pytest.Subtests) -> None:
    for name, generate in reference_pages.PAGES.items():
        with subtests.test(name):
            assert (DOCS / f"reference/{name}.md").read_text() == generate()


def test_every_setting_is_documented() -> None:
    """Every setting has a description that ends with a period."""
    settings = [
        (f"{section.name}.{setting.name}", setting.metadata["doc"])
        for tree in (run_config.Config, daemon_config.DaemonConfig)
        for section in fields(tree)
        for setting in fields(section.default_factory)  # type: ignore[arg-type]
    ]
    assert [name for name, text in settings if not text.rstrip("`").endswith(".")] == []
