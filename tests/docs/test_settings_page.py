"""Tests of the generated reference pages: they match the code. `make docs` regenerates them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import infinity.config as run_config
import infinity_daemon.daemon_config as daemon_config
from infinity_tools.migrate import reference_page as migration
from support import cli_page, doctor_page

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "module"), [("settings.md", run_config), ("daemon-settings.md", daemon_config)])
def test_settings_pages_are_current(page: str, module: Any) -> None:
    assert (DOCS / "reference" / page).read_text() == module.settings_markdown()


def test_the_migration_page_is_current() -> None:
    assert (DOCS / "how-to" / "migrate.md").read_text() == migration.markdown()


def test_the_doctor_page_is_current() -> None:
    assert (DOCS / "reference" / "doctor.md").read_text() == doctor_page.page()


def test_the_command_line_page_is_current() -> None:
    assert (DOCS / "reference" / "cli.md").read_text() == cli_page.page()


@pytest.mark.parametrize("tree", [run_config.Config, daemon_config.DaemonConfig])
def test_every_setting_is_documented(tree: Any) -> None:
    """Every setting has a description that ends with a period."""
    for section in fields(tree):
        for setting in fields(section.default_factory):  # type: ignore[arg-type]
            assert setting.metadata["doc"].rstrip("`").endswith("."), f"{section.name}.{setting.name}"
