"""The generated pages say what the code says."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import infinity.config as of_runs
import infinity_daemon.daemon_config as of_the_daemon
from infinity_tools.migrate import reference_page as migration
from support import cli_page, doctor_page

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "module"), [("settings.md", of_runs), ("daemon-settings.md", of_the_daemon)])
def test_the_settings_page_is_current(page: str, module: Any) -> None:
    """`make docs` was run after the last change of a setting."""
    assert (DOCS / "reference" / page).read_text() == module.settings_markdown()


def test_the_page_about_deepspeed_is_current() -> None:
    """`make docs` was run after the last change of the table of keys."""
    assert (DOCS / "how-to" / "migrate.md").read_text() == migration.markdown()


def test_the_doctor_page_is_current() -> None:
    """`make docs` was run after the last change of a check."""
    assert (DOCS / "reference" / "doctor.md").read_text() == doctor_page.page()


def test_the_command_line_page_is_current() -> None:
    """`make docs` was run after the last change of a help text."""
    assert (DOCS / "reference" / "cli.md").read_text() == cli_page.page()


@pytest.mark.parametrize("tree", [of_runs.Config, of_the_daemon.DaemonConfig])
def test_every_setting_is_documented(tree: Any) -> None:
    """No field without a sentence."""
    for section in fields(tree):
        for setting in fields(section.default_factory):  # type: ignore[arg-type]
            assert setting.metadata["doc"].rstrip("`").endswith("."), f"{section.name}.{setting.name}"
