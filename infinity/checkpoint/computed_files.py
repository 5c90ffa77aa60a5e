"""Access to a checkpoint that lacks the files of some ranks, which are computed from copies on other nodes."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

from infinity.checkpoint import manifest as files
from infinity.checkpoint.checkpoint_files import CheckpointFiles
from infinity.checkpoint.held import HeldCheckpoint
from infinity.checkpoint.manifest import Manifest, Published
from infinity.checkpoint.parity import Stream, part_range, xor
from infinity.errors import CheckpointError, CorruptPageError
from infinity.store.page_store import checksum


def with_computed(access: CheckpointFiles, held: HeldCheckpoint) -> CheckpointFiles:
    """Return the access to all files of a checkpoint, including computed ones.

    Args:
        access: Access to the files that are present.
        held: The checkpoint.
    """
    return ComputedFiles(access, held) if held.computed else access


class ComputedFiles(CheckpointFiles):
    """Files of a checkpoint of which some are computed from parities. [Note: copies on other nodes]

    A computed page is verified like a stored one. Therefore a wrong parity is an error and never a wrong value.
    """

    def __init__(self, access: CheckpointFiles, held: HeldCheckpoint) -> None:
        super().__init__(access.folder)
        self._access, self._held = access, held
        most = max(held.parities[holder].contents.nodes for holders in held.computed.values() for holder in holders)
        self._peer = lru_cache(access.manifest)
        self._stream = cache(self._stream_of)
        # Consecutive pages need the same pages of the other peers.
        self._page_of_peer = lru_cache(2 * (most - 2))(self._read_page_of_peer)

    def manifest(self, name: Published) -> Manifest:
        """Return a manifest. Raises `CheckpointError`."""
        if name.rank not in self._held.computed:
            return self._access.manifest(name)
        content = self._copied(name.rank, state=False)
        return files.decode_manifest(Path(self.folder.run_id, "checkpoints", name.file_name), content)

    def state_path(self, manifest: Manifest) -> Path:
        """Return the path of a state file, for messages."""
        if manifest.rank in self._held.computed:
            return Path(manifest.state_file)
        return self._access.state_path(manifest)

    def state_file(self, manifest: Manifest) -> bytes:
        """Return the verified contents of a state file. Raises `CheckpointError`."""
        if manifest.rank not in self._held.computed:
            return self._access.state_file(manifest)
        content = self._copied(manifest.rank, state=True)
        if files.checksum_of(content) != manifest.state_checksum:
            raise CheckpointError(f"the copy of {manifest.state_file} does not match its checksum")
        return bytes(content)

    def page(self, manifest: Manifest, page: int) -> memoryview:
        """Return the verified contents of a page.

        Raises:
            StorageError, CorruptPageError: if the page cannot be read or computed.
            CheckpointError: if a file on another node cannot be read.
            LostRankError: if another rank exits.
        """
        if manifest.rank not in self._held.computed:
            return self._access.page(manifest, page)
        stream = self._stream(manifest.rank)
        first, last = stream.range_of(page)
        content = bytearray()
        for part, holder in enumerate(self._held.computed[manifest.rank]):
            start, stop = part_range(stream.length, self._held.parities[holder].contents.nodes, part)
            low, high = max(start, first), min(stop, last)
            if low < high:
                content += self._compute(manifest.rank, holder, low - start, high - start)
        version = manifest.pages[page]
        if (found := checksum(page, memoryview(content))) != version.checksum:
            name, where = manifest.layout.page_name(page), f"the copies of rank {manifest.rank} on other nodes"
            raise CorruptPageError(name, where, first, last - first, version.checksum, found)
        return memoryview(content)

    def _compute(self, rank: int, holder: int, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of the part of a rank that is in parity `holder`."""
        index = self._held.parities[holder].contents
        contents = [self._access.parity(self._held.parities[holder], start, stop)]
        for part, peer in enumerate(index.peers):
            if peer.rank != rank:
                first, last = part_range(peer.length, index.nodes, part)
                low, high = min(first + start, last), min(first + stop, last)
                pieces = self._stream(peer.rank).pieces(low, high)
                contents.append(
                    b"".join(self._page_of_peer(peer.rank, piece.page)[piece.start : piece.stop] for piece in pieces)
                )
        return xor(*contents)[: stop - start]

    def _stream_of(self, rank: int) -> Stream:
        name = self._held.name.of(rank)
        return Stream((self.manifest(name) if rank in self._held.computed else self._peer(name)).pages)

    def _read_page_of_peer(self, rank: int, page: int) -> memoryview:
        return self._access.page(self._peer(self._held.name.of(rank)), page)

    def _copied(self, rank: int, *, state: bool) -> bytes | bytearray:
        """Return the contents of a manifest or state file. Every rank that stores a part of a rank has both files."""
        held = self._held.parities[self._held.computed[rank][0]]
        return self._access.copied(held, self._held.name.of(rank), state=state)

    @property
    def checkpoints(self) -> Path:
        """Checkpoint folder with the files for exports."""
        return self._access.checkpoints

    def close(self) -> None:
        """Release connections to other ranks, if any."""
        self._access.close()
