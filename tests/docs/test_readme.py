"""README's first program, as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

from infinity.checkpoint.manifest import published_in
from infinity.store.marker import look_for_runs
from support.processes import run_program

README = Path(__file__).parents[2] / "README.md"


def test_the_snippet_runs_in_an_empty_folder(tmp_path: Path) -> None:
    """It needs nothing that it does not make, and leaves a checkpoint."""
    snippet = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert snippet is not None
    (tmp_path / "snippet.py").write_text(snippet[1])
    done = run_program(tmp_path / "snippet.py", folder=tmp_path, environment={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    (run,) = look_for_runs([tmp_path / "run"])[0]
    assert published_in(run.roots[0] / "checkpoints")
