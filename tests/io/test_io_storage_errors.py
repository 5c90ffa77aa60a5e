"""Tests of errors from drives, limits and file systems: each one reports where it occurred."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from infinity.config import StorageConfig
from infinity.errors import ConfigError, InfinityError, StallError, StorageError
from infinity.io import Engine, Op, Ticket, UringEngine, open_engine
from infinity.io import alignment as alignment_module
from infinity.io import files as files_module
from infinity.io import ring as ring_module
from infinity.io import select as select_module
from infinity.io.ring import Ring, RingRefusedError
from infinity.io.uring import RingThread
from support.engines import BLOCK, PATIENCE, make_engine, mapped, open_descriptors

_ROOT = Path(__file__).parents[2]
_IMPORTED = (_ROOT, _ROOT / "tests")

_LIMITED = """
import mmap, resource, sys
sys.path[:0] = sys.argv[3:]
from support.engines import make_engine
from infinity.errors import StorageError
from infinity.io import Op
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
engine = make_engine(sys.argv[1])
file = engine.open(sys.argv[2], create=True)
ticket = engine.submit(Op.WRITE, file, 0, memoryview(mmap.mmap(-1, 2 << 20)))
try:
    ticket.wait(300)
except StorageError as error:
    print(error.errno, error.op, error.offset, error.length, error.path)
engine.close()
"""


def test_write_past_the_file_size_limit_raises_efbig(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    command = [
        sys.executable,
        "-c",
        _LIMITED,
        kind,
        path,
        *map(str, (_ROOT, _ROOT / "tests")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == [str(errno.EFBIG), "write", "0", str(2 << 20), path], done.stderr


def test_errno_of_a_completion_is_raised(engine: Engine, filled: str) -> None:
    """The descriptor is replaced by a read-only one, so the write fails with EBADF."""
    file = engine.open(filled)
    reading = os.open(filled, os.O_RDONLY | os.O_DIRECT)
    os.dup2(reading, file.fd)
    os.close(reading)
    with mapped(BLOCK) as memory:
        with pytest.raises(StorageError) as caught:
            engine.submit(Op.WRITE, file, BLOCK, memory).wait(PATIENCE)
        engine.submit(Op.READ, file, BLOCK, memory).wait(PATIENCE)
    assert (caught.value.errno, caught.value.offset, caught.value.length) == (errno.EBADF, BLOCK, BLOCK)


def test_file_system_without_direct_io_warns_once(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def open_without_direct_io(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real(path, flags, mode)

    monkeypatch.setattr(alignment_module.os, "open", open_without_direct_io)
    path = str(tmp_path / "file")
    with pytest.warns(RuntimeWarning, match=path) as caught:
        file = engine.open(path, create=True)
    assert len(caught) == 1
    assert (file.direct, file.alignment) == (False, 1)
    with mapped(BLOCK) as memory:
        memory[:] = os.urandom(BLOCK)
        engine.submit(Op.WRITE, file, 7, memory[3:1000]).wait(PATIENCE)
        assert Path(path).read_bytes()[7:] == memory[3:1000]


def test_direct_file_has_a_valid_alignment(engine: Engine, filled: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = engine.open(filled)
    assert file.direct
    assert BLOCK % file.alignment == 0


def test_default_alignment_is_used_without_statx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment_module, "_libc", object())
    assert alignment_module.direct_alignment(0) == alignment_module.DEFAULT_ALIGNMENT


def _failing_ring(code: int) -> type[Ring]:
    class FailingRing(Ring):
        def __init__(self, entries: int) -> None:
            raise RingRefusedError(code)

    return FailingRing


def test_auto_engine_uses_threads_without_io_uring(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=select_module.__name__)
    for code in [errno.EPERM, errno.ENOSYS, errno.ENOMEM]:
        with subtests.test(errno.errorcode[code]):
            monkeypatch.setattr("infinity.io.uring.Ring", _failing_ring(code))
            before = open_descriptors()
            engine = open_engine(StorageConfig(engine="auto"))
            engine.close()
            assert engine.name == "threads"
            said = caplog.records[-1].getMessage()
            assert said.startswith("I/O engine threads: io_uring ")
            assert errno.errorcode[code] in said
            assert open_descriptors() <= before  # an engine of another test may close meanwhile
            with pytest.raises(ConfigError, match=r"storage\.engine .*'io_uring'"):
                open_engine(StorageConfig(engine="io_uring"))


def test_auto_engine_uses_threads_if_io_uring_enter_is_blocked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A seccomp profile may block one system call; this is detected before the first transfer and logged once."""
    real = ring_module._syscall

    def block_enter(number: int, *arguments: object) -> int:
        if number == ring_module._SYS_ENTER:
            ctypes.set_errno(errno.EPERM)
            return -1
        return real(number, *arguments)

    make_engine("io_uring").close()
    monkeypatch.setattr(ring_module, "_syscall", block_enter)
    select_module._say_once.cache_clear()
    before = open_descriptors()
    for _ in range(2):
        engine = open_engine(StorageConfig(engine="auto"))
        engine.close()
        assert engine.name == "threads"
    assert "EPERM" in caplog.text
    assert open_descriptors() <= before
    assert caplog.text.count("io_uring_enter") == 1
    with pytest.raises(ConfigError, match=r"storage\.engine .*'io_uring'.* io_uring_enter "):
        open_engine(StorageConfig(engine="io_uring"))


def test_engine_choice_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger=select_module.__name__):
        engine = open_engine(StorageConfig(engine="threads"))
    engine.close()
    assert [record.getMessage() for record in caplog.records] == ["I/O engine threads: set by storage.engine"]


def test_failed_buffer_registration_is_not_fatal(
    filled: str, blob: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = OSError(errno.ENOMEM, "Cannot allocate memory")
    monkeypatch.setattr(ring_module.Ring, "register", mock.Mock(side_effect=error))
    engine = make_engine("io_uring")
    file = engine.open(filled)
    with mapped(len(blob)) as memory:
        with caplog.at_level("INFO", logger="infinity"):  # a CLI test in this process may have changed the level
            engine.register(memory)
        engine.submit(Op.READ, file, 0, memory).wait(PATIENCE)
        assert memory == blob
        engine.close()
    assert "Cannot allocate memory" in caplog.text


def test_broken_ring_fails_all_tickets(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("io_uring")
    monkeypatch.setattr(ring_module.Ring, "enter", mock.Mock(side_effect=OSError(errno.EBADF, "broken")))
    file = engine.open(filled)
    with mapped(1 << 20) as memory:
        tickets = [engine.submit(Op.READ, file, 0, memory)]
        with contextlib.suppress(InfinityError):  # the engine may have failed already and reject requests
            tickets.append(engine.submit(Op.READ, file, 0, memory))
        for ticket in tickets:
            with pytest.raises(StorageError, match="io_uring failed"):
                ticket.wait(PATIENCE)
        for thread in threading.enumerate():
            if thread.name == "infinity-io-uring":
                thread.join(PATIENCE)  # its wake-up descriptor is closed with it
        engine.close()


class InterruptedLock:
    """Lock that calls `then` once, after the ring's thread has released it and is about to sleep."""

    def __init__(self, ring: RingThread, then: Callable[[], None]) -> None:
        self._ring, self._then = ring, then
        self._lock, self._pending = threading.Lock(), True

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        now = self._pending and self._ring._asleep and threading.current_thread() is self._ring.thread
        self._lock.release()
        if now:
            self._pending = False
            self._then()


def test_request_submitted_before_the_ring_sleeps_is_not_lost(filled: str, blob: bytes) -> None:
    """The request arrives between the thread's last look at its queue and its wait."""
    make_engine("io_uring").close()  # skips the test if io_uring is not available
    engine = UringEngine(4, BLOCK, rings=1)
    (ring,) = engine._rings
    file = engine.open(filled)
    with mapped(len(blob)) as memory, mapped(BLOCK) as other:
        tickets: list[Ticket] = []

        def submit() -> None:
            thread = threading.Thread(target=lambda: tickets.append(engine.submit(Op.READ, file, 0, memory)))
            thread.start()
            thread.join()

        ring._lock = InterruptedLock(ring, submit)  # type: ignore[assignment]
        engine.register(other)  # wakes the thread, which then has no more requests
        while not tickets:
            time.sleep(0.01)
        tickets[0].wait(60)
        assert memory == blob
        tickets.clear()
        engine.close()


def test_old_kernels_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels before 6.1 post completions at any time, and Python's plain loads could read a stale entry."""

    def without_deferred_work(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(ring_module, "_syscall", without_deferred_work)
    with pytest.raises(RingRefusedError, match=r"EINVAL \(the kernel is older than 6.1\)"):
        Ring(8)


def test_close_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the device does not respond, the file stays open, and a second close succeeds after it has responded."""
    answer = threading.Event()
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: (answer.wait(PATIENCE), preadv(*arguments))[1])
    monkeypatch.setattr(files_module, "CLOSE_SECONDS", 0.1)
    (tmp_path / "file").write_bytes(bytes(BLOCK))
    with mapped(BLOCK) as memory:
        engine = make_engine("threads")
        file = engine.open(str(tmp_path / "file"))
        ticket = engine.submit(Op.READ, file, 0, memory)
        with pytest.raises(StallError, match=r"device .* \d+ s"):
            engine.close()
        os.fstat(file.fd)
        answer.set()
        ticket.wait(PATIENCE)
        engine.close()
