"""Tests of the tutorials: files are saved and commands are run in the order of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.tables import all_but

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = sorted(page.stem for page in TUTORIALS.glob("*.md"))
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"`(\w+\.(?:py|toml))`:\s*\Z")  # a program follows a line such as "Save this as `train.py`:"


@pytest.mark.parametrize("page", all_but(PAGES, *(page for page in PAGES if page != "resume-after-a-crash")))
def test_tutorial_runs(page: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every ``bash`` block ends with status 0; ``text`` blocks show output and are not run."""
    text, commands = (TUTORIALS / f"{page}.md").read_text(), 0
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        # Not tmp_path: the runtime folder `infinity` would hide the package from programs in the same folder.
        "XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("runtime")),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    for block in _BLOCK.finditer(text):
        language, content = block.groups()
        if language in ("python", "toml"):
            name = _FILE.search(text[: block.start()])
            assert name is not None, f"no file name before the block {content[:60]!r}"
            (tmp_path / name[1]).write_text(content)
        elif language == "bash":
            commands += 1
            done = subprocess.run(
                ["bash", "-e", "-c", content],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{content}\n{done.stdout}\n{done.stderr}"
        else:
            assert language == "text", f"a block of {language} would not be tested"
    assert commands
