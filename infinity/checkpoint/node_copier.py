"""Copying of checkpoints to other nodes by their daemons. `infinity.checkpoint.parity` describes the files, and
`infinity.checkpoint.copier` when checkpoints are copied.

A rank asks the daemon of its node to serve the pages of its checkpoint, and to compute its parity from the pages that
the daemons of other nodes serve. Until all ranks have done so, the run retains the checkpoint, and the last one that
was copied, because a parity is useful only together with the other ranks' checkpoints.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity import interrupts
from infinity.checkpoint.copier import CHECK_SECONDS, Copier, Progress
from infinity.checkpoint.manifest import CheckpointName, Manifest
from infinity.checkpoint.parity import (
    SLOTS,
    folder_of,
    parities_in,
    parity_file,
    parity_length,
    peers_of,
    ring_of,
)
from infinity.checkpoint.parts import host_name
from infinity.config import RunConfig
from infinity.daemon_client import NodeDaemon
from infinity.errors import BudgetError, ConfigError
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder, allocated_bytes, reserve
from infinity.untrusted_files import own_folder

_log = logging.getLogger("infinity")
_REQUESTS = 3
"""Number of requests for the progress without a response after which the copy counts as failed. A busy node answers
slowly."""


class NodeCopier(Copier):
    """Copies the checkpoints of one rank to other nodes, and stores the parity of other ranks. All ranks construct it
    together.

    Args:
        settings: settings of the run.
        folder: folders of the run, which exist.
        ranks: ranks of the run.
        daemon: daemon of this node.
        state_bytes: size of the pages that a checkpoint of this rank contains.
        file_bytes: maximum size of the manifest and the state file of a checkpoint of this rank.
        retained: checkpoints of this run that the drives contain.

    Raises:
        ConfigError: if the nodes do not suffice, or a node has no daemon that copies checkpoints.
        BudgetError, StorageError: if there is no space for the parity files.
    """

    def __init__(
        self,
        settings: RunConfig,
        folder: RunFolder,
        ranks: Ranks,
        daemon: NodeDaemon,
        state_bytes: int,
        file_bytes: int,
        retained: Collection[CheckpointName] = (),
    ) -> None:
        self._settings, self._folder, self._ranks, self._daemon = settings, folder, ranks, daemon
        self._token = ranks.agree(secrets.token_hex(32))
        everywhere = ranks.collect((host_name(), state_bytes, file_bytes))
        ring = ring_of(_nodes([host for host, _, _ in everywhere], settings), ranks.rank)
        self._peers = peers_of(ring, ranks.rank, settings.copy_nodes)
        self._address = ranks.together("asking infinityd to copy checkpoints", self._join)
        addresses = ranks.collect(self._address)
        self._addresses = [addresses[peer] for peer in self._peers]
        self._peer_hosts = ", ".join(dict.fromkeys(everywhere[peer][0] for peer in self._peers))
        self._targets = self._slots()
        length = parity_length([everywhere[peer][1] for peer in self._peers], settings.copy_nodes)
        nbytes = sum(everywhere[peer][2] for peer in self._peers)
        ranks.together("reserving space for copies", lambda: self._reserve(length, nbytes))
        super().__init__(settings.copies, self._find_complete(retained))
        self._running: CheckpointName | None = None
        """Checkpoint that is being copied."""
        self._stalled = False
        """``True`` if the daemon has not received anything for `run.heartbeat_timeout_seconds`."""
        self._warned = ""
        """Last error that was logged."""

    @property
    def needed(self) -> set[CheckpointName]:
        """The last checkpoint that all ranks have copied, and the one that is being copied."""
        return {checkpoint for checkpoint in (self._complete, self._running) if checkpoint is not None}

    def _slots(self) -> list[Path]:
        """Return the two parity files, on different paths if there are several."""
        roots, first = self._folder.roots, 2 * self._ranks.local_rank
        return [
            parity_file(roots[(first + number) % len(roots)], self._ranks.rank, slot)
            for number, slot in enumerate(SLOTS)
        ]

    def _reserve(self, length: int, file_bytes: int) -> None:
        """Allocate the parity files, if there is also space for the manifests and state files of the peers."""
        for target in self._targets:
            for folder in (target.parent, folder_of(target)):
                own_folder(folder, parents=False)
        existing = (sum(map(allocated_bytes, folder_of(target).iterdir())) for target in self._targets)
        missing = sum(max(file_bytes - nbytes, 0) for nbytes in existing)  # not allocated: each copy writes new files
        for target in self._targets:
            size = length - allocated_bytes(target) + missing
            try:
                with self._daemon.space_reserved(str(target.parent.resolve()), size, self._folder.run_id):
                    reserve(target, length, self._folder.roots)
            except BudgetError as error:
                raise BudgetError(f"copies of other nodes: {error}, or set run.copies = 0") from error

    def _find_complete(self, retained: Collection[CheckpointName]) -> CheckpointName | None:
        """Return the newest of the retained checkpoints that all ranks have copied. Its file becomes the last slot.

        The number of nodes of the copy may differ from ``run.copy_nodes``: until the next checkpoint has been copied,
        it is the only copy. If the run goes back to a checkpoint that was not copied, the file of the newest copy
        becomes the last slot, because its checkpoint is kept if the start fails.
        """
        found = {
            (parity.contents.identity, parity.contents.nodes): parity.target
            for parity in parities_in(self._folder.roots)
            if parity.target in self._targets
        }
        names = {checkpoint.identity: checkpoint for checkpoint in retained}
        good = set.intersection(*map(set, self._ranks.collect(list(found))))
        newest = max((copy for copy in good if copy[0] in names), default=None)
        last = newest or max(found, default=None)
        if last is not None and found[last] == self._targets[0]:
            self._targets.reverse()
        return names[newest[0]] if newest is not None else None

    # Requests to the daemon #

    def _join(self) -> str:
        """Register with the daemon. Return the address at which it serves this rank's pages. Raises `ConfigError`."""
        answer = self._daemon.answer(
            "copies_join", run_id=self._folder.run_id, rank=self._ranks.rank, token=self._token
        )
        if answer.get("ok") is True and isinstance(answer.get("address"), str):
            return str(answer["address"])
        reason = f": {answer['error']}." if answer.get("error") else " does not respond."
        raise ConfigError(
            f"run.copies = {self._settings.copies}, but infinityd on {host_name()}{reason} Start infinityd on "
            "each node with copies.host in its settings, or set run.copies = 0."
        )

    def _ask(self, op: str, **values: object) -> Mapping[str, Any]:
        return self._daemon.answer(op, run_id=self._folder.run_id, rank=self._ranks.rank, **values)

    def close(self) -> None:
        """Stop copying."""
        self._ask("copies_stop")

    # Copying #

    @property
    def progress(self) -> Progress:
        """Progress of this rank, and its address, which changes if the daemon has restarted on another port."""
        return super().progress._replace(address=self._address, stalled=self._stalled)

    def _busy(self) -> bool:
        answer = next(filter(None, (self._ask("copies_progress") for _ in range(_REQUESTS))), {})
        if answer and answer.get("ok") is not True:  # the daemon has been restarted
            joined = self._ask("copies_join", token=self._token)
            self._address = str(joined.get("address") or self._address)
        waited = answer.get("waited", 0.0)
        self._stalled = isinstance(waited, float) and waited > self._settings.heartbeat_timeout_seconds
        if self._running is None:
            return False
        if answer.get("ok") is True and answer.get("copied") == self._running.identity:
            self._copied = self._running
            return False
        if answer.get("ok") is True and answer.get("busy") is True:
            return True
        if self._copied != self._running:
            self._warn(self._running, answer)
        return False

    def exchanged(self, progress: Sequence[Progress]) -> None:
        before = self._complete
        self._addresses = [progress[peer].address for peer in self._peers]
        super().exchanged(progress)
        if self._complete != before:
            if self._ranks.rank == 0:
                _log.info("copied %s to other nodes", self._complete)
            self._targets.reverse()  # the next copy replaces the one before
        if self._running is not None and (self._idle or self._failed(progress)):
            if self._complete != self._running:
                self._since = self._every - 1  # the copy failed, so the next checkpoint is due
            self._idle, self._running = True, None
            self._ask("copies_stop")

    def _failed(self, progress: Collection[Progress]) -> bool:
        """Return whether a rank has failed to copy the checkpoint, so that the copies of the others are useless.

        Their daemons might wait for minutes for the daemon of this rank.
        """
        assert self._running is not None
        return any(each.idle and each.copied != self._running.identity for each in progress)

    def _has_copied(self, checkpoint: CheckpointName) -> bool:
        return self._complete == checkpoint

    def _start(self, manifest: Manifest, retained: Collection[CheckpointName]) -> None:
        if manifest.name.checkpoint == self._complete:
            return
        self._running = manifest.name.checkpoint
        values = {
            "identity": manifest.identity,
            "manifest": os.path.abspath(self._folder.checkpoints / manifest.file_name),
            "roots": [
                os.path.abspath(self._folder.data_file(path, self._ranks.rank))
                for path in range(len(self._folder.roots))
            ],
            "target": os.path.abspath(self._targets[0]),
            "peers": [
                {"rank": rank, "address": address} for rank, address in zip(self._peers, self._addresses, strict=True)
            ],
            "nodes": self._settings.copy_nodes,
            "rate": self._settings.copy_rate,
        }
        answer = self._ask("copies_start", **values)
        if answer.get("ok") is not True:
            self._warn(self._running, answer)

    def _wait(self) -> bool:
        while True:
            everywhere = self._ranks.collect(self.progress)
            self.exchanged(everywhere)
            if self._idle:
                return True
            if all(each.idle or each.stalled for each in everywhere):  # the same on all ranks
                self._abandon()
                return False
            time.sleep(CHECK_SECONDS)
            interrupts.check()

    def _abandon(self) -> None:
        """Stop a copy for which no rank has received anything for a while."""
        if self._stalled and self._running is not None:
            seconds = self._settings.heartbeat_timeout_seconds
            self._warn(self._running, {"error": f"no progress for {seconds} s from {self._peer_hosts}"})
        self._idle, self._running = True, None
        self._ask("copies_stop")

    def _warn(self, checkpoint: CheckpointName, answer: Mapping[str, Any]) -> None:
        text = f"{answer.get('error') or 'infinityd does not respond'}"
        message = f"rank {self._ranks.rank}: the {checkpoint} could not be copied to this node: {text}"
        if message != self._warned:
            _log.warning("%s", message)
        self._warned = message


def _nodes(hosts: Sequence[str], settings: RunConfig) -> list[list[int]]:
    """Return the ranks of each node, in the order of their first ranks.

    Raises:
        ConfigError: if checkpoints cannot be copied with this number of nodes or ranks.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    if len(by_host) < 2:
        raise ConfigError(
            f"run.copies = {settings.copies}, but all ranks report the host name {hosts[0]}. Use several nodes with "
            "different host names, or copy checkpoints with run.mirror."
        )
    if len(by_host) < settings.copy_nodes:
        raise ConfigError(
            f"run.copy_nodes = {settings.copy_nodes}, but the run has {len(by_host)} nodes. Set it to at most "
            f"{len(by_host)}."
        )
    if len({len(ranks) for ranks in by_host.values()}) > 1:
        counts = ", ".join(f"{host} has {len(ranks)}" for host, ranks in list(by_host.items())[:8])
        raise ConfigError(
            f"run.copies = {settings.copies} requires the same number of ranks on each node, but {counts}. Start the "
            "same number on each, or set run.copies = 0."
        )
    return list(by_host.values())
