"""Parts of a checkpoint: the files of each rank, the host that wrote them, and replicas with the same slices.

Every manifest lists the parts of all ranks. With HSDP, several ranks write the same slices, and the checkpoint can be
read without the parts of the other replicas. Replicas may differ, for example if the user averages them only
occasionally. Parts of different replicas are never combined unless the checksums of their pages are equal.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import xxhash

from infinity.checkpoint.description import RunDescription
from infinity.errors import CheckpointError
from infinity.store.page_store import Version

_SHOWN = 8  # ranks that a message lists


class Part(NamedTuple):
    """Part of a checkpoint that one rank has written."""

    host: str
    """Name of the host on which the rank ran."""
    slices: str
    """Digest that is equal on ranks that hold the same slices of the same tensors, whatever their page sizes."""
    content: str
    """Digest of the checksums of all pages. Parts with the same slices and content are interchangeable."""
    replica: int | None
    """Smallest rank of the replica that the rank belongs to, or None if it is unknown which ranks form a replica."""


def host_name() -> str:
    """Return the name of this host as it is written to manifests."""
    return re.sub(r"[^!-~]", "_", socket.gethostname())[:255] or "unknown"


def replica_of(groups: Iterable[Sequence[int]]) -> int | None:
    """Return the value for `Part.replica`. It is unknown if tensors are sharded over different ranks.

    Args:
        groups: Ranks over which each tensor is sharded.
    """
    replicas = {tuple(sorted(group)) for group in groups}
    return replicas.pop()[0] if len(replicas) == 1 else None


def digest_of_slices(described: RunDescription, rank: int, replica: int | None) -> str:
    """Return the digest for `Part.slices`.

    It includes the rank if `replica` is unknown, because the part is not interchangeable with any other part then.
    """
    alone = rank if replica is None else -1
    text = json.dumps([described.plain, alone], sort_keys=True)
    return f"{xxhash.xxh3_64_intdigest(text.encode()):016x}"


def digest_of_content(versions: Mapping[int, Version]) -> str:
    """Return the digest for `Part.content`."""
    digest = xxhash.xxh3_64()
    for page, version in sorted(versions.items()):
        digest.update(b"%d:%d;" % (page, version.checksum))
    return digest.hexdigest()


def replicas_differ(parts: Iterable[Part]) -> bool:
    """Return whether two ranks hold different contents of the same slices."""
    contents: dict[str, str] = {}
    return any(contents.setdefault(part.slices, part.content) != part.content for part in parts)


def replicas(parts: Sequence[Part]) -> list[list[int]]:
    """Return the ranks of each replica, in the order of their smallest ranks; none if they are unknown."""
    found: dict[int, list[int]] = {}
    for rank, part in enumerate(parts):
        if part.replica is None:
            return []
        found.setdefault(part.replica, []).append(rank)
    return list(found.values())


def sources(parts: Sequence[Part], present: Collection[int], replica: int = -1) -> tuple[list[int], list[int]]:
    """Return a rank to read each distinct part from, and the ranks whose parts are needed but missing.

    Args:
        parts: Parts of all ranks.
        present: Ranks whose files are present.
        replica: Replica to read, or -1 for any.

    Raises:
        CheckpointError: if the replicas differ and none was chosen, or if there is no such replica.
    """
    if replica >= 0:
        every = replicas(parts)
        if not every:
            raise CheckpointError(
                "no replica can be chosen, because parameters are tensor-parallel or sharded over different ranks"
            )
        if replica >= len(every):
            raise CheckpointError(f"there is no replica {replica}: the checkpoint has {_counted(len(every))}")
        chosen = every[replica]
        return chosen, [rank for rank in chosen if rank not in present]
    if replicas_differ(parts):
        raise CheckpointError(
            f"its replicas differ ({described_replicas(parts)}). Choose one with run.resume_replica or `infinity "
            "export --replica`"
        )
    found, missing = [], []
    for ranks in _by_slices(parts).values():
        there = [rank for rank in ranks if rank in present]
        found += there[:1] or ranks[:1]
        missing += [] if there else ranks
    return sorted(found), sorted(missing)


def described_replicas(parts: Sequence[Part]) -> str:
    """Return the replicas, with their ranks and hosts, for messages."""
    every = replicas(parts)
    return ", ".join(f"replica {number}: {located(parts, ranks)}" for number, ranks in enumerate(every[:_SHOWN]))


def located(parts: Sequence[Part], ranks: Sequence[int]) -> str:
    """Return some ranks and the hosts that wrote their parts, for messages: ``ranks 2, 3 on node1``."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(parts[rank].host, []).append(rank)
    return " and ".join(f"{named(found)} on {host}" for host, found in list(by_host.items())[:_SHOWN])


def named(ranks: Sequence[int]) -> str:
    """Return some ranks, for messages: ``rank 1`` or ``ranks 2, 3``."""
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks[:_SHOWN]))}{more}"


def _counted(number: int) -> str:
    return "a single replica" if number == 1 else f"{number} replicas"


def _by_slices(parts: Sequence[Part]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, part in enumerate(parts):
        found.setdefault(part.slices, []).append(rank)
    return found
