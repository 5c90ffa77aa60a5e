"""Checkpoints that are present on the drives of one node or of all nodes together, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from infinity.checkpoint.manifest import CheckpointName, Published, published_in, read_manifest
from infinity.checkpoint.parts import Part, located, replicas, sources
from infinity.errors import CheckpointError
from infinity.store.folder import RunFolder

_SHOWN = 3  # unusable checkpoints that a message describes

Seen = tuple[list[Published], dict[CheckpointName, Sequence[Part]]]
"""Manifests that a process sees, and the parts of the checkpoints that are incomplete on its node."""


@dataclass(frozen=True, kw_only=True)
class HeldCheckpoint:
    """A checkpoint, and the processes that can read the files of each rank."""

    name: CheckpointName
    holders: Mapping[int, Sequence[int]]
    """Processes that can read the files of a rank, by the rank that wrote them."""
    parts: Sequence[Part] = ()
    """Parts of all ranks; empty if no process needed to read them or could read them."""

    @property
    def absent(self) -> list[int]:
        """Ranks whose files are not present."""
        return [rank for rank in range(self.name.world_size) if rank not in self.holders]

    def problem(self, replica: int = -1) -> str:
        """Return the reason why the checkpoint cannot be resumed or exported, or an empty string.

        Args:
            replica: Replica to read, or -1 for any.
        """
        absent = self.absent
        if not absent:
            return ""
        if not self.parts:
            return self.count
        intact: list[int] = []
        try:
            missing = sources(self.parts, self.holders, replica)[1]
        except CheckpointError:  # the replicas differ
            missing = absent
            intact = [
                number
                for number, ranks in enumerate(replicas(self.parts))
                if all(rank in self.holders for rank in ranks)
            ]
        if not missing:
            return ""
        choice = f"; replica {intact[0]} is present (run.resume_replica = {intact[0]})" if intact else ""
        return f"{self.count}; {located(self.parts, absent)}{choice}"

    @property
    def count(self) -> str:
        """Number of ranks whose files are present, for messages."""
        return f"{len(self.holders)} of {self.name.world_size} ranks"

    @property
    def on_other_hosts(self) -> list[int]:
        """Ranks whose files are not present because they were written on hosts of which no files are present."""
        if not self.parts:
            return []
        here = {self.parts[rank].host for rank in self.holders}
        return [rank for rank in self.absent if self.parts[rank].host not in here]

    @property
    def elsewhere(self) -> str:
        """The ranks in `on_other_hosts`, and these hosts; or an empty string."""
        return located(self.parts, self.on_other_hosts)


def seen_in(folder: RunFolder) -> Seen:
    """Return the manifests in the folders of a run that this process sees. Raises `OSError`."""
    if not folder.roots:
        return [], {}
    published = published_in(folder.checkpoints)
    here = {checkpoint.name: checkpoint for checkpoint in held([(published, {})])}
    parts: dict[CheckpointName, Sequence[Part]] = {}
    for name, checkpoint in here.items():
        for rank in sorted(checkpoint.holders) if checkpoint.absent else ():
            with suppress(CheckpointError):  # an unreadable manifest is reported when it is used
                parts[name] = read_manifest(folder.checkpoints / name.of(rank).file_name, decode=False).parts
                break
    return published, parts


def held(seen: Iterable[Seen]) -> list[HeldCheckpoint]:
    """Return the checkpoints of which any process sees a manifest, in order.

    Args:
        seen: What each process sees, by its rank.
    """
    holders: dict[CheckpointName, dict[int, list[int]]] = {}
    parts: dict[CheckpointName, Sequence[Part]] = {}
    for process, (published, known) in enumerate(seen):
        parts.update(known)
        for name in published:
            holders.setdefault(name.checkpoint, {}).setdefault(name.rank, []).append(process)
    return [HeldCheckpoint(name=name, holders=holders[name], parts=parts.get(name, ())) for name in sorted(holders)]


def usable(checkpoints: Iterable[HeldCheckpoint], replica: int = -1) -> list[HeldCheckpoint]:
    """Return the checkpoints of which all slices are present."""
    return [checkpoint for checkpoint in checkpoints if not checkpoint.problem(replica)]


def choose(run_id: str, checkpoints: Sequence[HeldCheckpoint], step: int, replica: int = -1) -> HeldCheckpoint:
    """Return the newest usable checkpoint, or the newest usable checkpoint of a step.

    Checkpoints of all ranks take precedence. A newer one that only some replicas have published before the run was
    killed would have to be copied, for which there may be no space.

    Args:
        run_id: Run id, used in the error message.
        checkpoints: Checkpoints of the run, in order.
        step: Step of the checkpoint, or -1 for any step.
        replica: Replica to read, or -1 for any.

    Raises:
        CheckpointError: if there is no such checkpoint. The message lists the steps that have one, and explains why the
            other checkpoints are unusable.
    """
    found = usable(checkpoints, replica)
    if chosen := [checkpoint for checkpoint in found if step in (-1, checkpoint.name.step)]:
        return max(chosen, key=lambda checkpoint: (not checkpoint.absent, checkpoint.name))
    what = f"complete checkpoint of step {step}" if step >= 0 else "complete checkpoint"
    listed = ", ".join(map(str, sorted({checkpoint.name.step for checkpoint in found}))) or "none"
    lacking = [checkpoint for checkpoint in checkpoints if step in (-1, checkpoint.name.step)]
    raise CheckpointError(
        f"run {run_id} has no {what} (steps with a complete checkpoint: {listed}){problems(lacking, replica)}"
    )


def problems(checkpoints: Sequence[HeldCheckpoint], replica: int = -1) -> str:
    """Explain, for the end of a message, why the newest checkpoints are unusable, and how to fix this.

    The result is empty if all checkpoints are usable.
    """
    found = [(checkpoint, checkpoint.problem(replica)) for checkpoint in checkpoints]
    unusable = [f"step {checkpoint.name.step}: {problem}" for checkpoint, problem in found if problem][-_SHOWN:]
    if not unusable:
        return ""
    fix = (
        ". Include the named hosts, or restore their folders"
        if any(checkpoint.elsewhere for checkpoint, problem in found if problem)
        else ""
    )
    return f"; {', '.join(unusable)}{fix}"
