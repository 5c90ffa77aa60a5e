"""Test of Ray Train: workers are started again after one is killed, and resume from the newest checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.command import environment

pytestmark = pytest.mark.wide
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


def train(folder: Path, *launcher: str) -> dict[str, list[str]]:
    """Run `support.ray_training`; return the losses of each start and rank, with all digits."""
    folder.mkdir()
    words = [sys.executable, "-m", *launcher, "support.ray_training", str(folder)]
    done = subprocess.run(
        words, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {str(file.relative_to(folder)): file.read_text().split() for file in folder.glob("from-*/rank*")}


@pytest.mark.usefixtures("ray_folder")
def test_killed_worker_is_restarted_with_the_same_losses(tmp_path: Path) -> None:
    """The workers resume from the checkpoint of step 3. All losses equal those of torchrun without a failure."""
    expected = train(tmp_path / "torchrun", *TORCHRUN)
    losses = expected["from-0/rank0"]
    assert expected == dict.fromkeys(("from-0/rank0", "from-0/rank1"), losses)
    assert len(set(losses)) == 9
    found = train(tmp_path / "ray")
    for rank in ("rank0", "rank1"):
        assert found.pop(f"from-0/{rank}") == losses[:4]
        assert found.pop(f"from-3/{rank}") == losses[3:]
    assert found == {}
