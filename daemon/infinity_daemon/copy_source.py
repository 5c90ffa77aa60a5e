"""Reading of a rank's checkpoint, for the daemons of other nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

import aiofiles
import xxhash

from infinity.checkpoint.manifest import Manifest, decode_manifest
from infinity.checkpoint.parity import Stream
from infinity.errors import CheckpointError, ConfigError
from infinity.untrusted_files import open_own, read_own
from infinity_daemon.copy_channel import MAX_DATA_BYTES

MAX_MANIFEST_BYTES: Final = 1 << 30
_T = TypeVar("_T")


class Source:
    """Checkpoint of a rank on this node.

    Args:
        file: Manifest of the rank.
        data_files: Data files of the rank, in the order of the paths in the manifest.
        identity: Identity that the checkpoint must have.
        run_id: Run id that the checkpoint must have.
        rank: Rank that the checkpoint must have.

    Raises:
        CheckpointError: if the manifest is malformed or belongs to a different checkpoint or rank.
        ConfigError: if the number of data files is wrong.
        OSError: if a file cannot be read, or does not belong to the user of the daemon or to root.
    """

    def __init__(self, file: Path, data_files: Sequence[str], identity: str, run_id: str, rank: int) -> None:
        self.manifest: Manifest = decode_manifest(file, read_own(file, MAX_MANIFEST_BYTES), decode=False)
        """Manifest of the rank."""
        found = self.manifest
        if (found.run_id, found.identity, found.rank) != (run_id, identity, rank):
            raise CheckpointError(f"{file} is not the manifest of rank {rank} of checkpoint {identity} of run {run_id}")
        if len(data_files) != len(found.stripe_weights):
            raise ConfigError(f"{len(data_files)} data files were given, but {file} has {len(found.stripe_weights)}")
        self._files = {"manifest": str(file), "state": str(file.with_name(found.state_file))}
        self._data_files, self._stream = data_files, Stream(found.pages)
        sizes = {name: size_of(path) for name, path in self._files.items()}
        self.sizes: dict[str, int] = {**sizes, "pages": self._stream.length}
        """Length of everything that can be read, in bytes."""

    def places(self, name: str, offset: int, length: int) -> list[tuple[str, int, int]]:
        """Return the files with a range of ``manifest``, ``state`` or ``pages``, and the positions in them."""
        if name != "pages":
            return [(self._files[name], offset, length)]
        return [
            (self._data_files[version.extent.path], version.extent.offset + start, stop - start)
            for _, version, start, stop in self._stream.pieces(offset, offset + length)
        ]


class SourceReader:
    """Reader of a source for one connection, which keeps the files open. Used by one task at a time."""

    def __init__(self, source: Source, threads: Executor) -> None:
        self.source = source
        """Source that is read."""
        self._threads, self._files, self._stack = threads, dict[str, Any](), AsyncExitStack()

    async def read(self, name: str, offset: int, length: int) -> bytearray:
        """Return a range of ``manifest``, ``state`` or ``pages``. Raises `OSError`."""
        data, done, places = bytearray(length), 0, self.source.places(name, offset, length)
        view = memoryview(data)
        for path, start, count in places:
            file = self._files.get(path)
            if file is None:
                opened = aiofiles.open(path, "rb", buffering=0, opener=open_own, executor=self._threads)
                file = self._files[path] = await self._stack.enter_async_context(opened)
            await file.seek(start)
            end = done + count
            while done < end:
                read = await file.readinto(view[done:end])
                if not read:
                    raise OSError(0, f"unexpected end of file, {end - done} bytes missing", path)
                done += read
        if name == "pages":  # each page is read once; caching it would evict data that is needed again
            await in_thread(self._threads, self._drop, places)
        return data

    async def verify(self, offset: int) -> None:
        """Verify the page that contains a byte of the stream. Raises `CheckpointError` or `OSError`."""
        manifest = self.source.manifest
        stream = Stream(manifest.pages)
        (piece,) = stream.pieces(offset, offset + 1)
        start, stop = stream.range_of(piece.page)
        digest = xxhash.xxh3_64(seed=piece.page)
        for at in range(start, stop, MAX_DATA_BYTES):
            data = await self.read("pages", at, min(MAX_DATA_BYTES, stop - at))
            await in_thread(self._threads, digest.update, data)
        if digest.intdigest() != piece.version.checksum:
            raise CheckpointError(f"{manifest.layout.page_name(piece.page)} does not match its checksum")

    def _drop(self, places: Sequence[tuple[str, int, int]]) -> None:
        for path, start, count in places:
            os.posix_fadvise(self._files[path].fileno(), start, count, os.POSIX_FADV_DONTNEED)

    async def close(self) -> None:
        """Close the files."""
        await self._stack.aclose()


def size_of(path: str) -> int:
    """Return the size of a file that belongs to the user of the daemon or to root. Raises `OSError`."""
    descriptor = open_own(path, os.O_RDONLY)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


async def in_thread(threads: Executor, act: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function in a thread. If the caller is cancelled, even repeatedly, wait for the end of the call.

    Otherwise, an abandoned call could change a file while the next copy writes it.
    """
    future = asyncio.get_running_loop().run_in_executor(threads, act, *arguments)
    await until_done(future)
    return future.result()


async def until_done(future: asyncio.Future[Any]) -> None:
    """Wait until a future is done. Only then, raise the `asyncio.CancelledError` of the caller, if it is cancelled."""
    cancelled = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # its error is of no interest anymore
        raise cancelled
