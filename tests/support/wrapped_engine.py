"""Base class of engines that wrap another engine."""

from __future__ import annotations

from infinity.io.engine import DataFile, Engine, Op, Ticket


class WrappedEngine:
    """Forward all calls to `inner`, which is owned and closed by this engine."""

    kind: str

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        """Kind of this engine and name of the inner one, for example ``faulty(threads)``."""
        return f"{self.kind}({self._inner.name})"

    def open(self, path: str, *, create: bool = False) -> DataFile:
        return self._inner.open(path, create=create)

    def register(self, memory: memoryview) -> None:
        self._inner.register(memory)

    def submit(self, op: Op, file: DataFile, offset: int, memory: memoryview) -> Ticket:
        return self._inner.submit(op, file, offset, memory)

    def sync(self, file: DataFile) -> None:
        self._inner.sync(file)

    def forget(self, file: DataFile) -> None:
        self._inner.forget(file)

    def close(self) -> None:
        self._inner.close()
