"""One io_uring instance, accessed through raw system calls with `ctypes`.

For the layout and the constants, see include/uapi/linux/io_uring.h. All methods must be called by the thread that
created the ring. The kernel then processes completions only on that thread (DEFER_TASKRUN, since Linux 6.1), never
interrupts other threads, and never cancels requests because the submitting thread has ended.

[Note: memory order] liburing accesses heads and tails with acquire and release semantics, but Python has only plain
loads and stores. These are sufficient: without a kernel polling thread (SQPOLL, not used here), the kernel reads the
submission queue only inside `enter`, on this thread. With DEFER_TASKRUN it also writes completions only there, and a
thread sees its own loads and stores in order. Older kernels may write completions at any time from another CPU, so they
are rejected.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct

from infinity.errors import InfinityError

NOP, READ_FIXED, WRITE_FIXED, READ, WRITE = 0, 4, 5, 22, 23
"""Operation codes."""

FIXED_PIECE_BYTES = 1 << 30
"""Maximum size of a registered buffer: 1 GiB, a limit of the kernel."""

FIXED_PIECES = 1024
"""Number of entries in the table of registered buffers."""

_SYS_SETUP, _SYS_ENTER, _SYS_REGISTER = 425, 426, 427
_SETUP_CLAMP, _SETUP_SINGLE_ISSUER, _SETUP_DEFER_TASKRUN = 1 << 4, 1 << 12, 1 << 13
_ENTER_GETEVENTS = 1
_OFFSET_SQES = 0x10000000
_REGISTER_BUFFERS2, _REGISTER_BUFFERS_UPDATE = 15, 16
_REGISTER_SPARSE = 1

_TRIES = 1000

_SQE = struct.Struct("=BBHiQQIIQHHiQQ")
_CQE = struct.Struct("=QiI")
_MASK = 0xFFFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

_U32 = ctypes.c_uint32


class _SqOffsets(ctypes.Structure):
    _fields_ = (
        *((name, _U32) for name in ("head", "tail", "mask", "entries", "flags", "dropped", "array", "zero")),
        ("address", ctypes.c_uint64),
    )


class _CqOffsets(ctypes.Structure):
    _fields_ = (
        *((name, _U32) for name in ("head", "tail", "mask", "entries", "overflow", "cqes", "flags", "zero")),
        ("address", ctypes.c_uint64),
    )


class _Params(ctypes.Structure):
    _fields_ = (
        ("sq_entries", _U32),
        ("cq_entries", _U32),
        ("flags", _U32),
        ("sq_thread_cpu", _U32),
        ("sq_thread_idle", _U32),
        ("features", _U32),
        ("wq_fd", _U32),
        ("reserved", _U32 * 3),
        ("sq", _SqOffsets),
        ("cq", _CqOffsets),
    )


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class RingRefusedError(InfinityError):
    """The kernel, the seccomp profile of a container, or a sysctl does not allow io_uring."""

    def __init__(self, code: int, call: str = "io_uring") -> None:
        self.errno = code
        super().__init__(f"{call} is not available: {errno.errorcode.get(code, code)} ({_refusal(code)})")


class Ring:
    """Submission queue and completion queue.

    Args:
        entries: maximum number of submissions between two calls of `enter`. The kernel rounds the value up to a power
            of two and limits it to 32768.

    Raises:
        RingRefusedError: if the kernel does not allow creating or using the ring, or is older than 6.1.
    """

    def __init__(self, entries: int) -> None:
        params, self._fd = _setup(entries)
        self.entries = int(params.sq_entries)
        """Capacity of the submission queue."""
        self._pending = 0
        """Number of pushed submissions that the kernel has not consumed. Changed by `push` and `enter`."""
        self._has_table = False
        """``True`` if the empty table of registered buffers exists. Set by `register`."""
        try:
            size = max(params.sq.array + 4 * params.sq_entries, params.cq.cqes + 16 * params.cq_entries)
            self._map = mmap.mmap(self._fd, size)
            self._sqes = mmap.mmap(self._fd, 64 * params.sq_entries, offset=_OFFSET_SQES)
        except BaseException:
            os.close(self._fd)
            raise
        # `_map` contains both index rings and the completions in the kernel's layout; `_sqes` contains the submissions.
        self._words = memoryview(self._map).cast("I")
        """`_map` as 32-bit words. Loads and stores of an aligned word are atomic."""
        self._sq_tail_at, self._cq_tail_at = params.sq.tail // 4, params.cq.tail // 4
        self._cq_head_at, self._cqes_at = params.cq.head // 4, params.cq.cqes
        # The first three are indices into `_words`; the last one is an offset into `_map`.
        self._sq_mask, self._cq_mask = params.sq_entries - 1, params.cq_entries - 1
        self._tail = self._head = 0
        """Local copies of the submission tail (changed by `push`) and of the completion head (changed by `reap`),
        modulo 2**32. Only this object changes their originals.
        """
        for index in range(params.sq_entries):
            self._words[params.sq.array // 4 + index] = index
        self._try()

    def _try(self) -> None:
        """Submit one no-op, because a seccomp profile may allow creating a ring but not using it."""
        self.push(NOP, -1, 0, 0, 0, 0)
        code = errno.EAGAIN
        for _ in range(_TRIES):
            try:
                self.enter(1)
            except OSError as error:
                code = error.errno or 0
                break
            if self.reap():
                return
        self.close()
        raise RingRefusedError(code, "io_uring_enter")

    def push(self, opcode: int, fd: int, address: int, length: int, offset: int, data: int, piece: int = 0) -> None:
        """Add a submission to the queue. `enter` passes it to the kernel.

        The caller must push fewer than `entries` submissions between two calls of `enter`.
        """
        at = (self._tail & self._sq_mask) << 6
        _SQE.pack_into(self._sqes, at, opcode, 0, 0, fd, offset, address, length, 0, data, piece, 0, 0, 0, 0)
        # A plain store, because the kernel reads it in `enter`, on this thread. [Note: memory order]
        self._tail = self._words[self._sq_tail_at] = (self._tail + 1) & _MASK
        self._pending += 1

    def enter(self, wait_for: int) -> None:
        """Submit pushed entries and wait for `wait_for` completions, without holding the GIL.

        The call may return early, for example after a signal or a temporary lack of memory. Entries that were not
        submitted are submitted by the next call.

        Raises:
            OSError: if the ring is broken.
        """
        count = _syscall(_SYS_ENTER, self._fd, self._pending, wait_for, _ENTER_GETEVENTS, None, 0)
        if count >= 0:
            self._pending -= count
            return
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
            raise OSError(code, os.strerror(code), "io_uring_enter")

    def reap(self) -> list[tuple[int, int]]:
        """Return (data, result) for every available completion. A negative result is a negated errno."""
        tail = self._words[self._cq_tail_at]  # a plain load, before the loads of the entries [Note: memory order]
        found: list[tuple[int, int]] = []
        while self._head != tail:
            data, result, _ = _CQE.unpack_from(self._map, self._cqes_at + ((self._head & self._cq_mask) << 4))
            found.append((data, result))
            self._head = (self._head + 1) & _MASK
        # Stored after the entries have been copied, because the kernel may then overwrite them.
        self._words[self._cq_head_at] = self._head
        return found

    def register(self, first: int, pieces: list[tuple[int, int]]) -> None:
        """Pin memory as registered buffers, numbered from `first`. Each piece is (address, length).

        Raises:
            OSError: EPERM or ENOMEM if the locked-memory limit is exceeded.
        """
        vectors = (_Iovec * len(pieces))(*(_Iovec(address, length) for address, length in pieces))
        if not self._has_table:
            self._register(_REGISTER_BUFFERS2, struct.pack("=IIQQQ", FIXED_PIECES, _REGISTER_SPARSE, 0, 0, 0))
            self._has_table = True
        update = struct.pack("=IIQQII", first, 0, ctypes.addressof(vectors), 0, len(pieces), 0)
        if self._register(_REGISTER_BUFFERS_UPDATE, update) < len(pieces):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), "io_uring_register")

    def close(self) -> None:
        """Unmap the queues, unpin registered memory and close the ring."""
        self._words.release()
        self._map.close()
        self._sqes.close()
        os.close(self._fd)

    def _register(self, opcode: int, argument: bytes) -> int:
        done = int(_syscall(_SYS_REGISTER, self._fd, opcode, argument, len(argument)))
        if done < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), "io_uring_register")
        return done


def _setup(entries: int) -> tuple[_Params, int]:
    params = _Params(flags=_SETUP_CLAMP | _SETUP_SINGLE_ISSUER | _SETUP_DEFER_TASKRUN)
    fd = int(_syscall(_SYS_SETUP, entries, ctypes.byref(params)))
    if fd < 0:
        raise RingRefusedError(ctypes.get_errno())
    return params, fd


def _refusal(code: int) -> str:
    if code == errno.EPERM:
        try:
            with open("/proc/sys/kernel/io_uring_disabled") as file:
                if file.read().strip() != "0":
                    return "disabled by sysctl kernel.io_uring_disabled"
        except OSError:
            pass
        return "probably blocked by the container's seccomp profile"
    if code == errno.ENOSYS:
        return "the kernel does not support io_uring, or a seccomp profile blocks it"
    if code == errno.EINVAL:
        return "the kernel is older than 6.1"
    if code == errno.ENOMEM:
        return "the locked-memory limit is too low, see ulimit -l"
    return os.strerror(code)
