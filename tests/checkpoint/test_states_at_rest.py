"""Tests of damaged files of an idle run: the results of all commands match the table in docs/reference/failures.md."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from infinity.checkpoint.manifest import checksum_of, read_manifest
from infinity.errors import InfinityError
from support.command import ROOT, run_here
from support.published import flip, root_of
from support.ranks import RankPool
from support.session import Session

PAGE = ROOT / "docs" / "reference" / "failures.md"
RETAINED = {"retained_checkpoints": 2}
UNDAMAGED = {"undamaged run", "marker `infinity.run`: flipped bit"}
"""States in which nothing is lost, because a marker is stored three times."""


def manifest(root: Path, step: int = 2, rank: int = 0) -> Path:
    """Return the path of a manifest, by default of the newest one."""
    (found,) = (root / "checkpoints").glob(f"step{step:012d}.rank{rank:05d}-of-*.json")
    return found


def state_file(root: Path, step: int = 2) -> Path:
    """Return the path of the state file of rank 0."""
    (found,) = (root / "checkpoints").glob(f"step{step:012d}.rank00000.*.safetensors")
    return found


def damage(file: Path) -> None:
    """Invert one bit of a manifest in a string, so that it stays valid JSON."""
    flip(file, file.read_bytes().index(b"AdamW"))


def flip_page(root: Path) -> None:
    """Invert one bit of a page that only the newest checkpoint contains."""
    newest, older = (read_manifest(manifest(root, step)).pages for step in (2, 1))
    page = next(page for page in newest if newest[page] != older[page])
    flip(root / "rank00000.pages", newest[page].extent.offset)


def swap_checkpoint(root: Path, other: Path) -> None:
    """Replace the files of rank 1 in the newest checkpoint with files from the other branch."""
    for file in (root / "checkpoints").glob("step000000000002.rank00001*"):
        file.unlink()
    for file in (other / "checkpoints").glob("step000000000002.rank00001*"):
        shutil.copy2(file, root / "checkpoints")


def rename_run(file: Path) -> None:
    """Change the run id in a manifest."""
    body = json.loads(json.loads(file.read_text())["body"]) | {"run_id": "20200101-000000-aaaaaa"}
    text = json.dumps(body)
    file.write_text(json.dumps({"checksum": checksum_of(text.encode()), "body": text}))


def halve(file: Path) -> None:
    """Truncate a file to half of its size."""
    os.truncate(file, file.stat().st_size // 2)


def half_written(root: Path) -> None:
    """Create the files of an interrupted checkpoint of step 3."""
    for file, suffix in ((manifest(root), ".tmp"), (state_file(root), "")):
        (file.parent / (file.name.replace("2", "3", 1) + suffix)).write_bytes(file.read_bytes()[:1000])


STATES: dict[str, Callable[[Path, Path], object]] = {
    "undamaged run": lambda root, other: None,
    "data file: flipped bit in a page of the newest checkpoint": lambda root, other: flip_page(root),
    "data file: missing": lambda root, other: (root / "rank00000.pages").unlink(),
    "data file: truncated": lambda root, other: halve(root / "rank00000.pages"),
    "data file: from another branch": lambda root, other: shutil.copy2(other / "rank00000.pages", root),
    "newest manifest: damaged": lambda root, other: damage(manifest(root)),
    "newest manifest: missing": lambda root, other: manifest(root).unlink(),
    "newest manifest: truncated": lambda root, other: halve(manifest(root)),
    "newest manifest: from another run": lambda root, other: rename_run(manifest(root)),
    "older manifest: damaged": lambda root, other: damage(manifest(root, 1)),
    "newest state file: damaged": lambda root, other: flip(state_file(root)),
    "newest state file: missing": lambda root, other: state_file(root).unlink(),
    "newest state file: truncated": lambda root, other: halve(state_file(root)),
    "newest state file: replaced by the older one": lambda root, other: shutil.copy2(
        state_file(root, 1), state_file(root)
    ),
    "interrupted checkpoint": lambda root, other: half_written(root),
    "both manifests: missing": lambda root, other: (manifest(root, 2).unlink(), manifest(root, 1).unlink()),
    "folder `checkpoints`: missing": lambda root, other: shutil.rmtree(root / "checkpoints"),
    "marker `infinity.run`: flipped bit": lambda root, other: flip(root / "infinity.run"),
    "marker `infinity.run`: missing": lambda root, other: (root / "infinity.run").unlink(),
    "rank 1 of 2: newest manifest missing": lambda root, other: manifest(root, rank=1).unlink(),
    "rank 1 of 2: newest checkpoint from another branch": swap_checkpoint,
    "rank 1 of 2: newest manifest damaged": lambda root, other: damage(manifest(root, rank=1)),
    "rank 1 of 2: data file missing": lambda root, other: (root / "rank00001.pages").unlink(),
}
"""Damage by name. The functions receive the folder of a run, and the folder of another branch of the same run."""


def train(folder: str) -> None:
    """Save steps 1 and 2 in `run`, and step 2 with different data in `other`, a copy of it. Runs on every rank."""
    run, other = Path(folder, "run"), Path(folder, "other")
    run.mkdir(exist_ok=True)
    with Session(run, run=RETAINED) as session:
        session.run(2, every=1)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(run, other)
    dist.barrier()
    with Session(other, run={**RETAINED, "resume": "latest", "resume_step": 1}) as session:
        torch.rand(3)
        session.run(2, every=1)


def resume(folder: str) -> tuple[str, float]:
    """Resume and train one step; return the step and the loss, or the type of the error. Runs on every rank."""
    try:
        with Session(Path(folder), run={**RETAINED, "resume": "latest"}) as session:
            step = session.optimizer.steps
            return f"step {step}", session.step()
    except InfinityError as error:
        return type(error).__name__, 0.0


def test_commands_agree_with_the_failures_page(subtests: pytest.Subtests, pair: RankPool, tmp_path: Path) -> None:
    """A checkpoint that resume rejects is reported, export rejects it as well, and `gc` does not change the result."""
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
    train(str(tmp_path / "1"))
    pair.run(train, str(tmp_path / "2"))
    losses: dict[tuple[int, str], list[float]] = {}

    def resume_all(folder: Path, ranks: int) -> str:
        """Resume on all ranks; return the result of rank 0. The loss depends only on the ranks and the step."""
        found = pair.run(resume, str(folder)) if ranks == 2 else [resume(str(folder))]
        results = [result for result, _ in found]
        if any(result.startswith("step") for result in results):
            assert len(set(results)) == 1
            of_ranks = [loss for _, loss in found]
            assert losses.setdefault((ranks, results[0]), of_ranks) == of_ranks
        return results[0]

    section = PAGE.read_text().partition("## Damaged files of an idle run")[2]
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \| (.+) \| (.+) \|$", section, re.MULTILINE)[1:]
    assert [row[0] for row in rows] == list(STATES)
    for name, *expected in rows:
        ranks = 2 if "of 2" in name else 1
        folder = shutil.copytree(tmp_path / str(ranks) / "run", tmp_path / "copy")
        nvme = folder / "nvme0"
        STATES[name](root_of(folder), root_of(tmp_path / str(ranks) / "other"))
        with subtests.test(name):
            verified, scrubbed = run_here("store", "verify", nvme), run_here("store", "scrub", nvme)
            assert scrubbed.status == verified.status
            texts = [re.sub("scrubbing|verifying", "", each.output + each.errors) for each in (verified, scrubbed)]
            assert texts[0] == texts[1]
            exported = run_here("export", nvme, "--out", tmp_path / "out")
            read = re.search(r"step \d+", exported.output + exported.errors)
            if expected[-1] != "removes 0":
                before = shutil.copytree(folder, tmp_path / "before")
                assert resume_all(before, ranks) == expected[0]
            removed = re.search(r"removed (\d+) item", run_here("store", "gc", nvme, "--yes").output)
            assert removed
            found = [
                resume_all(folder, ranks),
                f"status {verified.status}",
                read[0] if exported.status == 0 and read else f"status {exported.status}",
                f"removes {removed[1]}",
            ]
            assert found == expected, verified.output + exported.output + exported.errors
            if verified.status == 0 and name not in UNDAMAGED:
                assert re.search("ignored|no manifest|no checkpoint", texts[0]), "the damage is not reported"
        shutil.rmtree(folder)
        for place in ("out", "before"):
            shutil.rmtree(tmp_path / place, ignore_errors=True)
