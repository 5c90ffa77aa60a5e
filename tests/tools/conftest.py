"""Running the command line in processes of its own, as a person does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["train", "--model", "tiny", "--seq", "32", "--batch-tokens", "128", "--host-memory", "1MiB"]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A command that has ended."""

    status: int
    output: str
    errors: str

    @property
    def summary(self) -> dict[str, Any]:
        """What `--json` printed."""
        return json.loads(self.output)


def environment(runtime: Path) -> dict[str, str]:
    """Return an environment in which this checkout is imported and stats pages are kept apart."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    paths = [str(ROOT), str(ROOT / "tools"), inherited.get("PYTHONPATH", "")]
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TMPDIR": str(runtime),
        # Threads of several test processes that spin on the same cores take many times as long as one.
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }


@pytest.fixture
def infinity_command(tmp_path: Path) -> Callable[..., Finished]:
    """Run `infinity` with arguments in an empty folder; with `ranks`, under torchrun."""
    (tmp_path / "tmp").mkdir()

    def run(*arguments: str, ranks: int = 0) -> Finished:
        launcher: Sequence[str] = (
            ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks else ()
        )
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "infinity_tools", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env=environment(tmp_path / "tmp"),
            check=False,
        )
        return Finished(status=done.returncode, output=done.stdout, errors=done.stderr)

    return run
