"""Access to the files of a checkpoint that are on the drives of other nodes.

Every rank has a thread that answers requests of the other ranks: for a manifest, a state file, a page, the files for
exports, or copies of files of a lost node. Requests and answers are messages of a gloo process group. A rank has at
most one request at a time, so an answer needs memory for one page, or for one manifest or state file. The rank that
reads a file verifies its checksum before it sends the contents, and the rank that requested it verifies them again.
"""

from __future__ import annotations

import io
import logging
import shutil
import socket
import tarfile
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from infinity.checkpoint import manifest as files
from infinity.checkpoint.checkpoint_files import MODEL_FOLDER, CheckpointFiles
from infinity.checkpoint.computed_files import with_computed
from infinity.checkpoint.held import HeldCheckpoint, HeldParity
from infinity.checkpoint.manifest import Manifest, Published
from infinity.errors import CheckpointError, CorruptPageError
from infinity.ranks import Ranks, naming_loss
from infinity.store.folder import RunFolder
from infinity.store.page_store import checksum

_log = logging.getLogger("infinity")
_STOP, _MANIFEST, _STATE, _PAGE, _COMPANIONS, _PARITY, _COPIED = range(7)
_REQUEST, _HEADER, _DATA = 1, 2, 3  # tags of messages
_WORDS = 4  # integers of a request
_IDLE = timedelta(days=7)  # a rank may not be asked for anything while others read for hours
_CLOSE_SECONDS = 30.0


def open_files(folder: RunFolder, ranks: Ranks, checkpoint: HeldCheckpoint) -> CheckpointFiles:
    """Return the access to a checkpoint, which uses the process group unless every rank sees all files.

    All ranks must call it together, and close the result together.
    """
    needed = {holder for holders in checkpoint.computed.values() for holder in holders}
    seen = [*checkpoint.holders.values(), *(checkpoint.parities[holder].processes for holder in needed)]
    everywhere = all(len(processes) == ranks.world_size for processes in seen)
    access = CheckpointFiles(folder) if everywhere else RemoteFiles(folder, ranks, checkpoint)
    return with_computed(access, checkpoint)


class RemoteFiles(CheckpointFiles):
    """Files of a checkpoint in folders of all nodes. All ranks construct the object together, and close it together.

    Only the training thread sends requests. The serving thread uses the local files and the manifests in `_served`.
    """

    def __init__(self, folder: RunFolder, ranks: Ranks, held: HeldCheckpoint) -> None:
        """Connect to the other ranks and start serving.

        Args:
            folder: Folders of the run on this node. They may not exist.
            ranks: Ranks of this run.
            held: Checkpoint to read.
        """
        super().__init__(folder)
        self._ranks, self._held = ranks, held
        self._hosts = ranks.collect(socket.gethostname())
        self._group = dist.new_group(backend="gloo", timeout=_IDLE)
        self._served: dict[int, Manifest] = {}
        self._thread: threading.Thread | None = threading.Thread(
            target=self._serve, name="infinity-serve-checkpoint", daemon=True
        )
        self._thread.start()
        self._temporary: str | None = None

    def manifest(self, name: Published) -> Manifest:
        """Return a manifest, from this node if it has the files. Raises `CheckpointError`."""
        if self._here(name.rank):
            return super().manifest(name)
        file = Path(self._held.name.of(name.rank).file_name)
        content = self._ask(self._holder(name.rank), _MANIFEST, name.rank)
        return files.decode_manifest(Path(self.folder.run_id, "checkpoints", file), content)

    def state_path(self, manifest: Manifest) -> Path:
        """Return the path of a state file, for messages."""
        return super().state_path(manifest) if self._here(manifest.rank) else Path(manifest.state_file)

    def state_file(self, manifest: Manifest) -> bytes:
        """Return the verified contents of a state file. Raises `CheckpointError`."""
        if self._here(manifest.rank):
            return super().state_file(manifest)
        content = self._ask(self._holder(manifest.rank), _STATE, manifest.rank)
        if files.checksum_of(content) != manifest.state_checksum:
            raise CheckpointError(f"{manifest.state_file} does not match its checksum after the transfer")
        return bytes(content)

    def page(self, manifest: Manifest, page: int) -> memoryview:
        """Return the verified contents of a page.

        Raises:
            StorageError, CorruptPageError: if the page cannot be read on this node, or was damaged in transit.
            CheckpointError: if it cannot be read on another node.
            LostRankError: if another rank exits.
        """
        if self._here(manifest.rank):
            return super().page(manifest, page)
        version = manifest.pages[page]
        holder = self._holder(manifest.rank)
        data = memoryview(self._ask(holder, _PAGE, manifest.rank, page))
        if (found := checksum(page, data)) != version.checksum:
            name, (_, offset, length) = manifest.layout.page_name(page), version.extent
            raise CorruptPageError(name, f"rank {holder}", offset, length, version.checksum, found)
        return data

    def parity(self, held: HeldParity, start: int, stop: int) -> bytes | bytearray:
        """Return bytes of a parity, without verifying them. Raises `CheckpointError`."""
        if self._ranks.rank in held.processes:
            return super().parity(held, start, stop)
        number = self._held.parities.index(held)  # the same on all ranks
        return self._ask(self._one_of(held.processes), _PARITY, number, start, stop)

    def copied(self, held: HeldParity, name: Published, *, state: bool) -> bytes | bytearray:
        """Return the contents of a manifest or state file that is stored next to a parity. Raises `CheckpointError`."""
        if self._ranks.rank in held.processes:
            return super().copied(held, name, state=state)
        number = self._held.parities.index(held)
        return self._ask(self._one_of(held.processes), _COPIED, number, name.rank, state)

    @property
    def checkpoints(self) -> Path:
        """Checkpoint folder with the files for exports, or a copy of these files if they are on another node.

        Raises:
            CheckpointError: if the files cannot be copied.
            LostRankError: if another rank exits.
        """
        if self._temporary is not None:
            return Path(self._temporary)
        mine = self.folder.checkpoints if self.folder.roots else Path(self.folder.run_id, "missing")
        complete, me = self._held.holders.get(0, ()), self._ranks.rank  # other nodes may only have some of the files
        for rank in sorted(range(self._ranks.world_size), key=lambda rank: (rank not in complete, rank != me)):
            if rank == me:
                if (mine / MODEL_FOLDER).is_dir():
                    return mine
            elif content := self._ask(rank, _COMPANIONS):
                self._temporary = tempfile.mkdtemp(prefix="infinity-")
                return unpacked(content, Path(self._temporary))
        return mine

    def close(self) -> None:
        """Stop serving. No rank may send requests any more."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        thread, self._thread = self._thread, None
        if thread is None:
            return
        stop, neighbor = torch.tensor([_STOP, *[0] * (_WORDS - 1)]), (self._ranks.rank + 1) % self._ranks.world_size
        with suppress(RuntimeError):  # another rank has exited
            if (sent := dist.isend(stop, neighbor, group=self._group, tag=_REQUEST)) is not None:
                sent.wait(timedelta(seconds=_CLOSE_SECONDS))
        thread.join(_CLOSE_SECONDS)
        if not thread.is_alive():
            dist.destroy_process_group(self._group)

    def _here(self, rank: int) -> bool:
        return self._ranks.rank in self._held.holders[rank]

    def _holder(self, rank: int) -> int:
        """Return the process that serves the files of a rank to this process. The load is spread over all holders."""
        return self._one_of(self._held.holders[rank])

    def _one_of(self, processes: Sequence[int]) -> int:
        return processes[self._ranks.rank % len(processes)]

    def _ask(self, holder: int, *request: int) -> bytearray:
        """Return the answer to a request.

        Raises:
            CheckpointError: if the other rank cannot read the file.
            LostRankError: if the other rank exits.
        """
        header = torch.empty(2, dtype=torch.int64)
        with naming_loss():
            self._send([*request, *[0] * (_WORDS - len(request))], holder)
            dist.recv(header, holder, group=self._group, tag=_HEADER)
            failed, nbytes = header.tolist()
            content = bytearray(nbytes)
            if nbytes:
                dist.recv(torch.frombuffer(content, dtype=torch.uint8), holder, group=self._group, tag=_DATA)
        if failed:
            raise CheckpointError(f"rank {holder} on host {self._hosts[holder]}: {content.decode(errors='replace')}")
        return content

    def _send(self, request: list[int], rank: int) -> None:
        dist.send(torch.tensor(request), rank, group=self._group, tag=_REQUEST)

    def _serve(self) -> None:
        try:
            while True:
                request = torch.empty(_WORDS, dtype=torch.int64)
                asking = dist.recv(request, group=self._group, tag=_REQUEST)
                kind, *values = request.tolist()
                if kind == _STOP:
                    return
                failed = False
                try:
                    content = bytearray(self._read(kind, *values))
                except Exception as error:  # without an answer, the asking rank would wait
                    failed, content = True, bytearray(f"{type(error).__name__}: {error}".encode())
                dist.send(torch.tensor([failed, len(content)]), asking, group=self._group, tag=_HEADER)
                if content:
                    data = torch.frombuffer(content, dtype=torch.uint8)
                    dist.send(data, asking, group=self._group, tag=_DATA)
        except RuntimeError as error:  # another rank has exited, and this rank's next collective reports it
            _log.debug("serving the checkpoint ended: %s", error)

    def _read(self, kind: int, rank: int, page: int, stop: int) -> bytes | bytearray | memoryview:
        if kind == _COMPANIONS:
            return packed(self.folder.checkpoints) if self.folder.roots else b""
        if kind == _PARITY:
            return super().parity(self._held.parities[rank], page, stop)
        if kind == _COPIED:
            return super().copied(self._held.parities[rank], self._held.name.of(page), state=bool(stop))
        if rank not in self._served:
            self._served[rank] = super().manifest(self._held.name.of(rank))
        manifest = self._served[rank]
        if kind == _MANIFEST:
            return files.content_of(self.folder.checkpoints / manifest.file_name)
        return super().state_file(manifest) if kind == _STATE else super().page(manifest, page)


def packed(checkpoints: Path) -> bytes:
    """Return an archive of the files for exports in a checkpoint folder, or an empty string if there are none.

    Links are left out, because they are not copied to other runs either.
    """
    folder, content = checkpoints / MODEL_FOLDER, io.BytesIO()
    if not folder.is_dir():
        return b""
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.add(folder, MODEL_FOLDER, filter=lambda entry: entry if entry.isfile() or entry.isdir() else None)
    return content.getvalue()


def unpacked(content: bytes | bytearray, place: Path) -> Path:
    """Unpack an archive of the files for exports into a folder, and return the folder. Raises `CheckpointError`."""
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(place, filter="data")
    except tarfile.TarError as error:
        raise CheckpointError(f"the files for exports cannot be copied from another rank: {error}") from error
    return place
