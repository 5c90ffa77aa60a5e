"""Damaged states of the files of a run, and the output of each command for them.

    PYTHONPATH=tests python -m support.states        generates a section of docs/reference/failures.md

There is a run with one rank and a run with two ranks, with checkpoints of steps 3 and 6. States are created in copies.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from typer.testing import CliRunner

from infinity.checkpoint.manifest import checksum_of, published_in, read_manifest
from infinity.errors import InfinityError
from infinity_tools.cli import app
from support.ranks import RankPool
from support.session import Session

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "failures.md"
BEGIN, END = "<!-- states at rest: begin -->\n", "<!-- states at rest: end -->\n"


@dataclass(frozen=True)
class State:
    """Damage to the files of a run with `ranks` ranks.

    `make` receives the folder of the run, and the folder of another branch of the same run.
    """

    name: str
    make: Callable[[Path, Path], None]
    ranks: int = 1


def manifest(root: Path, step: int, rank: int = 0) -> Path:
    """Return the path of a manifest."""
    (found,) = (root / "checkpoints").glob(f"step{step:012d}.rank{rank:05d}-of-*.json")
    return found


def state_file(root: Path, step: int) -> Path:
    """Return the path of the state file of rank 0."""
    (found,) = (root / "checkpoints").glob(f"step{step:012d}.rank00000.*.safetensors")
    return found


def flip(file: Path, offset: int | None = None) -> None:
    """Invert one bit, by default in the middle of the file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if offset is None else offset] ^= 1
    file.write_bytes(content)


def damage(file: Path) -> None:
    """Invert one bit of a manifest in a string, so that it stays valid JSON and messages are always the same."""
    flip(file, file.read_bytes().index(b"AdamW"))


def flip_page(root: Path) -> None:
    """Invert one bit of a page that only the newest checkpoint contains."""
    newest, older = (read_manifest(manifest(root, step)).pages for step in (6, 3))
    page = next(page for page in newest if newest[page] != older[page])
    flip(root / "rank00000.pages", newest[page].extent.offset)


def data_of_another_branch(root: Path, other: Path) -> None:
    """Replace the data file with that of the other branch."""
    shutil.copy2(other / "rank00000.pages", root / "rank00000.pages")


def swap(root: Path, other: Path, step: int, rank: int) -> None:
    """Replace the files of a checkpoint of one rank with those of the other branch."""
    for file in (root / "checkpoints").glob(f"step{step:012d}.rank{rank:05d}*"):
        file.unlink()
    for file in (other / "checkpoints").glob(f"step{step:012d}.rank{rank:05d}*"):
        shutil.copy2(file, root / "checkpoints")


def manifest_of_another_run(root: Path) -> None:
    """Replace the newest manifest with that of another run."""
    file = manifest(root, 6)
    body = json.loads(json.loads(file.read_text())["body"]) | {"run_id": "20200101-000000-aaaaaa"}
    text = json.dumps(body)
    file.write_text(json.dumps({"checksum": checksum_of(text.encode()), "body": text}))


def halve(file: Path) -> None:
    """Truncate a file to half of its size."""
    os.truncate(file, file.stat().st_size // 2)


def half_written(root: Path) -> None:
    """Create the files of an interrupted checkpoint of step 9."""
    name = manifest(root, 6).name.replace("6", "9", 1)
    (root / "checkpoints" / f"{name}.tmp").write_bytes(manifest(root, 6).read_bytes()[:1000])
    name = state_file(root, 6).name.replace("6", "9", 1)
    (root / "checkpoints" / name).write_bytes(state_file(root, 6).read_bytes())


STATES = (
    State("undamaged run", lambda root, other: None),
    State("data file: flipped bit in a page of the newest checkpoint", lambda root, other: flip_page(root)),
    State("data file: missing", lambda root, other: (root / "rank00000.pages").unlink()),
    State("data file: truncated", lambda root, other: halve(root / "rank00000.pages")),
    State("data file: from another branch", data_of_another_branch),
    State("newest manifest: damaged", lambda root, other: damage(manifest(root, 6))),
    State("newest manifest: missing", lambda root, other: manifest(root, 6).unlink()),
    State("newest manifest: truncated", lambda root, other: halve(manifest(root, 6))),
    State("newest manifest: from another run", lambda root, other: manifest_of_another_run(root)),
    State("older manifest: damaged", lambda root, other: damage(manifest(root, 3))),
    State("newest state file: damaged", lambda root, other: flip(state_file(root, 6))),
    State("newest state file: missing", lambda root, other: state_file(root, 6).unlink()),
    State("newest state file: truncated", lambda root, other: halve(state_file(root, 6))),
    State(
        "newest state file: replaced by the older one",
        lambda root, other: shutil.copy2(state_file(root, 3), state_file(root, 6)) and None,
    ),
    State("interrupted checkpoint", lambda root, other: half_written(root)),
    State("both manifests: missing", lambda root, other: (manifest(root, 6).unlink(), manifest(root, 3).unlink())[0]),
    State("folder `checkpoints`: missing", lambda root, other: shutil.rmtree(root / "checkpoints")),
    State("marker `infinity.run`: flipped bit", lambda root, other: flip(root / "infinity.run")),
    State("marker `infinity.run`: missing", lambda root, other: (root / "infinity.run").unlink()),
    State("rank 1 of 2: newest manifest missing", lambda root, other: manifest(root, 6, 1).unlink(), 2),
    State("rank 1 of 2: newest checkpoint from another branch", lambda root, other: swap(root, other, 6, 1), 2),
    State("rank 1 of 2: newest manifest damaged", lambda root, other: damage(manifest(root, 6, 1)), 2),
    State("rank 1 of 2: data file missing", lambda root, other: (root / "rank00001.pages").unlink(), 2),
)


def train(folder: str, branch: int) -> None:
    """Train with checkpoints after steps 3 and 6, and then train further branches. Called on every rank."""
    with Session(Path(folder), run={"retained_checkpoints": 2}) as session:
        session.run(6, every=3)
    for _ in range(branch):
        run = {"retained_checkpoints": 2, "resume": "latest", "resume_step": 3}
        with Session(Path(folder), run=run) as session:
            torch.rand(3)
            session.run(6, every=3)


def resume(folder: str) -> tuple[str, float]:
    """Resume and train a step; return the messages and the loss. Called on every rank."""
    output: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: output.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("infinity")
    logger.addHandler(handler)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        with Session(Path(folder), run={"retained_checkpoints": 2, "resume": "latest"}) as session:
            step = session.optimizer.steps
            passing = ("earlier run", "computes in bf16")  # depends on earlier runs and on the machine
            output[:] = [text for text in output if not any(words in text for words in passing)]
            return "; ".join([f"step {step}", *output]), session.run(step + 1, every=0)[0]
    except InfinityError as error:
        return f"{type(error).__name__}: {error}", float("nan")
    finally:
        logger.removeHandler(handler)
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])


def command(*arguments: object) -> tuple[int, str]:
    """Run a command; return its exit status and output."""
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "1000"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@dataclass(frozen=True)
class Results:
    """Output of each command for a state.

    `resumed` and `exported` are the steps that were resumed and exported, or -1.
    """

    resume: str
    verify: str
    scrub: str
    export: str
    gc: str
    resumed: int
    exported: int
    verified: int
    loss: float
    after_gc: str


class DamagedRuns:
    """Train the two runs, and execute the commands for damaged copies of them."""

    def __init__(self, place: Path, pair: RankPool) -> None:
        self._place, self._pair = place, pair
        for ranks in (1, 2):
            for name, branch in (("run", 1), ("other", 0)):
                folder = place / f"{ranks}-{name}"
                folder.mkdir()
                self._on(ranks, train, str(folder), branch)
            _same_run(place / f"{ranks}-run", place / f"{ranks}-other")

    def _on(self, ranks: int, function: Callable[..., object], *arguments: object) -> list[object]:
        return self._pair.run(function, *arguments) if ranks == 2 else [function(*arguments)]

    def results(self, state: State) -> Results:
        """Create a state, and return the output of all commands."""
        found: dict[str, object] = {}
        texts: dict[str, str] = {}
        for name in ("resume", "verify", "scrub", "export", "gc"):
            folder = self._copy(state)
            nvme = folder / "nvme0"
            if name == "resume":
                outputs = self._on(state.ranks, resume, str(folder))
                texts[name] = "; ".join(dict.fromkeys(self._plain(str(text), folder) for text, _ in outputs))  # type: ignore[misc]
                found["resumed"] = _step(texts[name])
                found["loss"] = outputs[0][1]  # type: ignore[index]
                continue
            if name == "export":
                status, output = command("export", nvme, "--out", folder / "out")
            elif name == "gc":
                status, output = command("store", "gc", nvme, "--yes")
                outputs = self._on(state.ranks, resume, str(folder))
                found["after_gc"] = "; ".join(dict.fromkeys(self._plain(str(text), folder) for text, _ in outputs))  # type: ignore[misc]
            else:
                status, output = command("store", name, nvme)
            if name == "verify":
                found["verified"] = status
            if name == "export":
                found["exported"] = _step(output) if status == 0 else -1
            texts[name] = _brief(status, self._plain(output, folder))
        return Results(**texts, **found)  # type: ignore[arg-type]

    def _copy(self, state: State) -> Path:
        folder = self._place / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._place / f"{state.ranks}-run", folder)
        state.make(_root(folder), _root(self._place / f"{state.ranks}-other"))
        return folder

    def _plain(self, text: str, folder: Path) -> str:
        """Return a text without values that differ between runs."""
        text = text.replace(f"{folder / 'nvme0'}/", "").replace(str(folder / "nvme0"), "PATH").replace(f"{folder}/", "")
        text = re.sub(r"\d{8}-\d{6}-[0-9a-f]{6}", "RUN", text)
        text = re.sub(r"\b[0-9a-f]{24}\b", "ID", text)
        text = re.sub(r"checksum [0-9a-f]{16}, expected [0-9a-f]{16}", "checksum …, expected …", text)
        text = re.sub(r"\b\d+ (bad pages?) of \d+|(all) \d+ (pages)", r"\2… \1\3", text)
        text = re.sub(r"page \d+:|page [\w.]+/\w+\[\d+\]|which has (?:only )?[1-9]\d+", _numberless, text)
        numbers = r"\b\d+(\.\d+)? (KiB|MiB|B|bytes)|offset \d+|line 1 column \d+|char \d+|\(process \d+\)"
        return re.sub(numbers, "…", text)


def _numberless(found: re.Match[str]) -> str:
    return found.group().split()[0] + (
        " has only …"
        if "has only" in found.group()
        else " has …"
        if "has" in found.group()
        else " …" + ":" * found.group().endswith(":")
    )


def _root(folder: Path) -> Path:
    (found,) = (entry for entry in (folder / "nvme0").iterdir() if entry.is_dir())
    return found


def _same_run(run: Path, other: Path) -> None:
    """Rename another run to the id of this run."""
    root, foreign_root = _root(run), _root(other)
    renamed = foreign_root.rename(foreign_root.with_name(root.name))
    for name in published_in(renamed / "checkpoints"):
        file = renamed / "checkpoints" / name.file_name
        body = json.loads(json.loads(file.read_text())["body"]) | {"run_id": root.name}
        text = json.dumps(body)
        file.write_text(json.dumps({"checksum": checksum_of(text.encode()), "body": text}))


def _step(text: str) -> int:
    found = re.search(r"step (\d+)", text)
    return int(found.group(1)) if found and not re.match(r"\w+Error|error", text) else -1


def _brief(status: int, output: str) -> str:
    lines = [
        line.strip() for line in output.splitlines() if line.strip() and not line.startswith(("exporting", "verifying"))
    ]
    lines = [line for line in lines if not line.startswith("no config.json")]
    text = " / ".join(dict.fromkeys(line for line in lines))
    if len(lines) > 3 and "bad page" in lines[0]:  # the order of pages depends on their locations
        text = f"{lines[0]} / {re.sub(r'step [0-9]+, ', '', lines[1])} / … / {lines[-1]}"
    return f"{text} (status {status})" if status else text


def report(runs: DamagedRuns, results: Mapping[str, Results] | None = None) -> str:
    """Return a table of the results and all messages as Markdown.

    Args:
        runs: Runs to damage.
        results: Results by name of the state. By default, every command is executed for every state.
    """
    found = {state.name: results[state.name] if results else runs.results(state) for state in STATES}
    lines = ["| state | resume | verify, scrub | export | gc |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join((name, *_results(result)))} |" for name, result in found.items()]
    for name, result in found.items():
        messages = (("resume", result.resume), ("verify", result.verify), ("export", result.export), ("gc", result.gc))
        lines += [
            "",
            f"**{name}**",
            "",
            "```text",
            *(line for label, output in messages for line in _block(label, output)),
            "```",
        ]
    return "\n".join(lines) + "\n"


def _results(result: Results) -> tuple[str, ...]:
    removed = re.search(r"removed (\d+) item", result.gc)
    return (
        f"step {result.resumed}" if result.resumed >= 0 else result.resume.split(":")[0],
        f"status {result.verified}",
        f"step {result.exported}" if result.exported >= 0 else result.export.rpartition("(")[2].rstrip(")"),
        f"removes {removed[1] if removed else '?'}",
    )


def _block(label: str, output: str) -> list[str]:
    first, *rest = output.split(" / ")
    return [f"{label}:".ljust(8) + first, *(" " * 8 + line for line in rest)]


def written(text: str, content: str) -> str:
    """Return the text of a page in which the generated section is replaced."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + content + END + rest.partition(END)[2]


if __name__ == "__main__":
    two = RankPool(2)
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(written(PAGE.read_text(), report(DamagedRuns(Path(folder), two))))
    two.close()
    sys.exit(0)
