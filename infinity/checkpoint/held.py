"""Checkpoints that are present on the drives of one node or of all nodes together, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from infinity.checkpoint.manifest import CheckpointName, Published, published_in, read_manifest
from infinity.checkpoint.parity import Parity, ParityIndex, parities_in
from infinity.checkpoint.parts import Part, located, replicas, sources
from infinity.errors import CheckpointError
from infinity.store.folder import RunFolder

_SHOWN = 3  # unusable checkpoints that a message describes


class Seen(NamedTuple):
    """Files of a run that a process sees."""

    published: Sequence[Published] = ()
    """Manifests."""
    parts: Mapping[CheckpointName, Sequence[Part]] = {}
    """Parts of the checkpoints that are incomplete on its node."""
    parities: Sequence[Parity] = ()
    """Complete parities. [Note: copies on other nodes]"""
    ranks: Sequence[int] = ()
    """Ranks whose data files are next to a folder for manifests, whether they have published one or not."""


class HeldParity(NamedTuple):
    """Parity of a checkpoint, and the processes that can read it."""

    rank: int
    """Rank that stores the parity."""
    contents: ParityIndex
    processes: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class HeldCheckpoint:
    """A checkpoint, and the processes that can read the files of each rank."""

    name: CheckpointName
    holders: Mapping[int, Sequence[int]]
    """Processes that can read the files of a rank, by the rank that wrote them."""
    parts: Sequence[Part] = ()
    """Parts of all ranks; empty if no process needed to read them or could read them."""
    parities: Sequence[HeldParity] = ()
    """Parities of the checkpoint. A rank may store two, which are spread over different numbers of nodes."""

    @property
    def absent(self) -> list[int]:
        """Ranks whose files are not present."""
        return [rank for rank in range(self.name.world_size) if rank not in self.holders]

    def problem(self, replica: int = -1) -> str:
        """Return the reason why the checkpoint cannot be resumed or exported, or an empty string.

        Args:
            replica: Replica to read, or -1 for any.
        """
        absent = [rank for rank in self.absent if rank not in self.computed]
        if not absent:
            return ""
        if not self.parts:
            return self.count
        intact: list[int] = []
        try:
            missing = self.sources(self.parts, replica)[1]
        except CheckpointError:  # the replicas differ
            missing = absent
            intact = [
                number for number, ranks in enumerate(replicas(self.parts)) if not any(rank in absent for rank in ranks)
            ]
        if not missing:
            return ""
        choice = f"; replica {intact[0]} is present (run.resume_replica = {intact[0]})" if intact else ""
        return f"{self.count}; {located(self.parts, absent)}{choice}"

    @cached_property
    def computed(self) -> Mapping[int, Sequence[int]]:
        """Ranks whose files are not present but can be computed from copies on other nodes.

        The value lists the indices in `parities` of the parities of their parts, in the order of the parts. The other
        contributors to these parities are present.
        """
        found: dict[int, Sequence[int]] = {}
        for rank in self.absent:
            by_nodes: dict[int, dict[int, int]] = {}
            for number, (_, index, _) in enumerate(self.parities):
                part = next((part for part, peer in enumerate(index.peers) if peer.rank == rank), None)
                if part is not None and all(peer.rank in {rank, *self.holders} for peer in index.peers):
                    by_nodes.setdefault(index.nodes, {})[part] = number
            for nodes, by_part in by_nodes.items():
                if len(by_part) == nodes - 1:
                    found[rank] = [by_part[part] for part in sorted(by_part)]
        return found

    def sources(self, parts: Sequence[Part], replica: int = -1) -> tuple[list[int], list[int]]:
        """Return a rank to read each distinct part from, and the ranks whose parts are needed but missing.

        A part is computed from copies on other nodes only if no rank with the same slices is present. See
        `infinity.checkpoint.parts.sources`.
        """
        found, missing = sources(parts, self.holders, replica)
        if computed := self.computed.keys() & set(missing):
            found, missing = sources(parts, {*self.holders, *computed}, replica)
        return found, missing

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
        """The ranks in `on_other_hosts` that cannot be computed, and these hosts; or an empty string."""
        return located(self.parts, [rank for rank in self.on_other_hosts if rank not in self.computed])

    @property
    def from_copies(self) -> str:
        """The ranks in `computed`, and the hosts that wrote their files; or an empty string."""
        return located(self.parts, list(self.computed))


def seen_in(folder: RunFolder) -> Seen:
    """Return the manifests in the folders of a run that this process sees. Raises `OSError`."""
    if not folder.roots:
        return Seen()
    published = published_in(folder.checkpoints)
    here = {checkpoint.name: checkpoint for checkpoint in held([Seen(published)])}
    parts: dict[CheckpointName, Sequence[Part]] = {}
    for name, checkpoint in here.items():
        for rank in sorted(checkpoint.holders) if checkpoint.absent else ():
            with suppress(CheckpointError):  # an unreadable manifest is reported when it is used
                parts[name] = read_manifest(folder.checkpoints / name.of(rank).file_name, decode=False).parts
                break
    ranks = folder.ranks() if folder.checkpoints.is_dir() else []
    return Seen(published, parts, parities_in(folder.roots), ranks)


def held(seen: Iterable[Seen]) -> list[HeldCheckpoint]:
    """Return the checkpoints of which any process sees a manifest, in order.

    Args:
        seen: What each process sees, by its rank.
    """
    holders: dict[CheckpointName, dict[int, list[int]]] = {}
    parts: dict[CheckpointName, Sequence[Part]] = {}
    parities: dict[str, dict[tuple[int, ParityIndex], list[int]]] = {}
    for process, each in enumerate(seen):
        parts.update(each.parts)
        for rank, _, index in each.parities:
            processes = parities.setdefault(index.identity, {}).setdefault((rank, index), [])
            if process not in processes:  # both parity files may have the same contents
                processes.append(process)
        for name in each.published:
            holders.setdefault(name.checkpoint, {}).setdefault(name.rank, []).append(process)
    return [
        HeldCheckpoint(
            name=name,
            holders=holders[name],
            parts=parts.get(name, ()),
            parities=[HeldParity(*of, processes) for of, processes in parities.get(name.identity, {}).items()],
        )
        for name in sorted(holders)
    ]


def usable(checkpoints: Iterable[HeldCheckpoint], replica: int = -1) -> list[HeldCheckpoint]:
    """Return the checkpoints of which all slices are present."""
    return [checkpoint for checkpoint in checkpoints if not checkpoint.problem(replica)]


def never_complete(seen: Sequence[Seen], world_size: int = 0) -> bool:
    """Return whether it is certain that no checkpoint of a run has ever been complete.

    A rank removes a manifest only after all ranks have published a newer one. Therefore, a rank without a manifest has
    not taken part in a complete checkpoint. The files of all ranks must be present, because an absent host might have
    other files of this rank.

    Args:
        seen: What each process sees of the run.
        world_size: Number of ranks of the run, if there are no manifests. 0: unknown.
    """
    checkpoints = held(seen)
    numbers = range(max((checkpoint.name.world_size for checkpoint in checkpoints), default=world_size))
    present = {rank for each in seen for rank in each.ranks}
    published = {rank for checkpoint in checkpoints for rank in checkpoint.holders}
    return (
        present.issuperset(numbers)
        and not published.issuperset(numbers)
        and not any(each.parities for each in seen)
        # A replica that differs from the others is complete by itself, but only used if it is chosen.
        and all(
            checkpoint.parts and not any(usable([checkpoint], number) for number in numbers)
            for checkpoint in checkpoints
        )
    )


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
