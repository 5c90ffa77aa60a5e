"""docs/how-to/trainer.md says what the code does: its program runs, and its table is that of the refusals."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from infinity.integrations.transformers.unsupported_arguments import UNSUPPORTED
from support.trainers import build, dataset

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "trainer.md").read_text()


def test_the_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any sharded model and data; what is left is what the page says."""
    monkeypatch.chdir(tmp_path)
    program = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert program is not None
    names = {"model": build("meta"), "data": dataset()}
    exec(program[1], names)
    assert sorted(path.name for path in Path("out").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert Path("trained", "model.safetensors").exists()
    names["trainer"].end()


def test_the_releases_are_those_of_the_extra() -> None:
    """What pyproject asks for."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [requirement.partition(",")[0] for requirement in project["optional-dependencies"]["trainer"]]
    said = ", ".join(f"{' '.join(each.split('>='))} or newer" for each in wanted)
    assert said in " ".join(PAGE.split())


def test_the_table_has_all_that_is_refused() -> None:
    """Name and reason, in the same words."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert rows[1:] == [(name, reason) for name, _, reason in UNSUPPORTED]


def test_the_model_says_that_it_is_placed(tmp_path: Path) -> None:
    """Else the Trainer itself fails to move it."""
    from support.trainers import make

    model = build("meta")
    del model.hf_device_map
    with pytest.raises(NotImplementedError, match="meta"):
        make(tmp_path, model)
