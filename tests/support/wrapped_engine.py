"""An engine around another one: what it does not change passes through."""

from __future__ import annotations

from infinity.io.engine import DataFile, Engine, Op, Ticket


class WrappedEngine:
    """Passes everything to `inner`, which it owns and closes."""

    kind: str

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        """``faulty(threads)``: its kind, with the name of the inner engine."""
        return f"{self.kind}({self._inner.name})"

    def open(self, path: str, *, create: bool = False) -> DataFile:
        """Open (or create) a file with the inner engine. Raises `StorageError`."""
        return self._inner.open(path, create=create)

    def register(self, memory: memoryview) -> None:
        """Register memory with the inner engine."""
        self._inner.register(memory)

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        """Start a transfer. Raises `ValueError` or `InfinityError` as any engine."""
        return self._inner.submit(op, file, offset, memory)

    def sync(self, file: DataFile) -> None:
        """Make completed writes durable. Raises `StorageError`."""
        self._inner.sync(file)

    def forget(self, file: DataFile) -> None:
        """Close a file that has no request in flight."""
        self._inner.forget(file)

    def close(self) -> None:
        """Close the inner engine. Idempotent. Raises `StallError`."""
        self._inner.close()
