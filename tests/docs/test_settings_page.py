"""The generated pages say what the code says."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from infinity.config import Config, settings_markdown

DOCS = Path(__file__).parents[2] / "docs"


def test_the_settings_page_is_current() -> None:
    """`make docs` was run after the last change of a setting."""
    assert (DOCS / "settings.md").read_text() == settings_markdown()


def test_every_setting_is_documented() -> None:
    """No field without a sentence."""
    for section in fields(Config):
        for setting in fields(section.default_factory):
            assert setting.metadata["doc"].endswith("."), f"{section.name}.{setting.name}"
