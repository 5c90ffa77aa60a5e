"""Tests of docs/how-to/trainer.md: its program runs, and its table matches the unsupported arguments."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from infinity.integrations.transformers.unsupported_arguments import UNSUPPORTED
from support.trainers import build

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "trainer.md").read_text()


def test_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program writes the checkpoints and weights that the page describes."""
    monkeypatch.chdir(tmp_path)
    program = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert program is not None
    build("plain").save_pretrained("model")
    names: dict[str, Any] = {}
    exec(program[1], names)
    assert sorted(path.name for path in Path("out").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert Path("trained", "model.safetensors").exists()
    names["trainer"].end()


def test_releases_match_the_trainer_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    required = [requirement.partition(",")[0] for requirement in project["optional-dependencies"]["trainer"]]
    statement = ", ".join(f"{' '.join(each.split('>='))} or newer" for each in required)
    assert statement in " ".join(PAGE.split())


def test_the_table_lists_all_unsupported_arguments() -> None:
    """Names and reasons have the same wording."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert rows[1:] == [(name, reason) for name, _, reason in UNSUPPORTED]
