"""One io_uring instance, reached through raw system calls with `ctypes`.

Layout and constants: include/uapi/linux/io_uring.h. All methods belong to one thread, the one that made
the ring: the kernel then runs completions in that thread only (DEFER_TASKRUN), never interrupts another,
and never cancels requests because the thread that submitted them ended.

[Note: memory order] liburing reads and writes heads and tails with acquire and release; Python has plain loads and
stores only. They are enough for submissions: without a polling thread of the kernel (SQPOLL, not used here) it reads
that queue only inside `enter`, on this very thread, and a thread sees its own stores in order. They are enough for
completions since 6.1: with DEFER_TASKRUN the kernel writes these inside `enter` too, on this thread. Older kernels may
write them at any time from another processor: the entry first, then the tail. There it takes a processor that does not
reorder loads, as x86-64 does not; the interpreter does not either: the tail is loaded by one call, each entry by a
later one. On other processors `_setup` refuses such a kernel. A tail that is too old does no harm: what is missing
comes with the next `reap`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct

from infinity.errors import InfinityError

NOP, READ_FIXED, WRITE_FIXED, READ, WRITE = 0, 4, 5, 22, 23
"""Operation codes."""

FIXED_PIECE_BYTES = 1 << 30
"""The kernel registers at most 1 GiB as one buffer."""

FIXED_PIECES = 1024
"""Pieces that the table of registered buffers has room for."""

_SYS_SETUP, _SYS_ENTER, _SYS_REGISTER = 425, 426, 427
_SETUP_CLAMP, _SETUP_SINGLE_ISSUER, _SETUP_DEFER_TASKRUN = 1 << 4, 1 << 12, 1 << 13
_ENTER_GETEVENTS = 1
_FEAT_SINGLE_MMAP, _FEAT_NODROP, _FEAT_RW_CUR_POS = 1 << 0, 1 << 1, 1 << 3
_NEEDED = _FEAT_SINGLE_MMAP | _FEAT_NODROP | _FEAT_RW_CUR_POS  # RW_CUR_POS came with READ and WRITE, in 5.6
_OFFSET_SQES = 0x10000000
_REGISTER_BUFFERS, _REGISTER_BUFFERS2, _REGISTER_BUFFERS_UPDATE = 0, 15, 16
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
    """The kernel, a container's seccomp profile or a sysctl does not allow io_uring."""

    def __init__(self, code: int, call: str = "io_uring") -> None:
        self.errno = code
        super().__init__(f"{call} refused: {errno.errorcode.get(code, code)} ({_refusal(code)})")


class Ring:
    """Submission and completion queue.

    Args:
        entries: submissions that fit the queue between two calls of `enter`; the kernel rounds up to a
            power of two and clamps at 32768.

    Raises:
        RingRefusedError: the kernel refuses to make it or to enter it, or is older than 5.6.
    """

    def __init__(self, entries: int) -> None:
        params, self._fd = _setup(entries)
        self.entries = int(params.sq_entries)
        """Submissions that fit the queue."""
        self._pending = 0
        """Submissions that have been pushed and that the kernel has not taken; changed by `push` and `enter`."""
        self._sparse: bool | None = None
        """Whether registered buffers can be added one after the other; None until it is tried by `register`."""
        try:
            if params.features & _NEEDED != _NEEDED:
                raise RingRefusedError(errno.ENOSYS)
            size = max(params.sq.array + 4 * params.sq_entries, params.cq.cqes + 16 * params.cq_entries)
            self._map = mmap.mmap(self._fd, size)
            self._sqes = mmap.mmap(self._fd, 64 * params.sq_entries, offset=_OFFSET_SQES)
        except BaseException:
            os.close(self._fd)
            raise
        # `_map` is both rings of indices and the completions, as the kernel lays them out; `_sqes` the submissions.
        self._words = memoryview(self._map).cast("I")
        """`_map` as words of 32 bits: an aligned one is loaded and stored in one piece."""
        self._sq_tail_at, self._cq_tail_at = params.sq.tail // 4, params.cq.tail // 4
        self._cq_head_at, self._cqes_at = params.cq.head // 4, params.cq.cqes
        # The first three are words of `_words`, the last one is a byte of `_map`.
        self._sq_mask, self._cq_mask = params.sq_entries - 1, params.cq_entries - 1
        self._tail = self._head = 0
        """Own copies of the tail of submissions (changed by `push`) and of the head of completions (by `reap`), modulo
        2**32: nobody else changes these two."""
        for index in range(params.sq_entries):
            self._words[params.sq.array // 4 + index] = index
        self._try()

    def _try(self) -> None:
        """Send one operation that does nothing: a seccomp profile may allow a ring but not its use."""
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
        """Put one submission into the queue; `enter` hands it to the kernel.

        The caller keeps fewer than `entries` submissions between two calls of `enter`.
        """
        at = (self._tail & self._sq_mask) << 6
        _SQE.pack_into(self._sqes, at, opcode, 0, 0, fd, offset, address, length, 0, data, piece, 0, 0, 0, 0)
        # A plain store: the kernel looks at it in `enter`, on this thread. [Note: memory order]
        self._tail = self._words[self._sq_tail_at] = (self._tail + 1) & _MASK
        self._pending += 1

    def enter(self, wait_for: int) -> None:
        """Submit what was pushed and wait for `wait_for` completions, without the GIL.

        May return early (a signal, a momentary lack of memory); what was not submitted goes with the
        next call.

        Raises:
            OSError: the ring is broken.
        """
        count = _syscall(_SYS_ENTER, self._fd, self._pending, wait_for, _ENTER_GETEVENTS, None, 0)
        if count >= 0:
            self._pending -= count
            return
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
            raise OSError(code, os.strerror(code), "io_uring_enter")

    def reap(self) -> list[tuple[int, int]]:
        """Return (data, result) of every completion there is; a negative result is minus an errno."""
        tail = self._words[self._cq_tail_at]  # a plain load, before those of the entries [Note: memory order]
        found: list[tuple[int, int]] = []
        while self._head != tail:
            data, result, _ = _CQE.unpack_from(self._map, self._cqes_at + ((self._head & self._cq_mask) << 4))
            found.append((data, result))
            self._head = (self._head + 1) & _MASK
        # A plain store, when the entries have been copied: from here on the kernel may write others there.
        self._words[self._cq_head_at] = self._head
        return found

    def register(self, first: int, pieces: list[tuple[int, int]]) -> None:
        """Pin memory as registered buffers number `first` and up; each piece is (address, length).

        Kernels before 5.19 take one call of this only.

        Raises:
            OSError: EPERM or ENOMEM (locked-memory limit), EBUSY (a second call on an old kernel).
        """
        vectors = (_Iovec * len(pieces))(*(_Iovec(address, length) for address, length in pieces))
        if self._sparse is None:
            sparse = struct.pack("=IIQQQ", FIXED_PIECES, _REGISTER_SPARSE, 0, 0, 0)
            self._sparse = self._register(_REGISTER_BUFFERS2, sparse, len(sparse)) >= 0
        if self._sparse:
            update = struct.pack("=IIQQII", first, 0, ctypes.addressof(vectors), 0, len(pieces), 0)
            done = self._register(_REGISTER_BUFFERS_UPDATE, update, len(update))
        else:
            done = self._register(_REGISTER_BUFFERS, vectors, len(pieces))
        if done < 0 or (self._sparse and done < len(pieces)):
            code = ctypes.get_errno() if done < 0 else errno.ENOMEM
            raise OSError(code, os.strerror(code), "io_uring_register")

    def close(self) -> None:
        """Unmap the queues and close the ring; registered memory is unpinned."""
        self._words.release()
        self._map.close()
        self._sqes.close()
        os.close(self._fd)

    def _register(self, opcode: int, argument: object, count: int) -> int:
        return int(_syscall(_SYS_REGISTER, self._fd, opcode, argument, count))


def _setup(entries: int) -> tuple[_Params, int]:
    choices = [_SETUP_CLAMP | _SETUP_SINGLE_ISSUER | _SETUP_DEFER_TASKRUN]
    if platform.machine() == "x86_64":  # kernels before 6.1, only where loads stay in order. [Note: memory order]
        choices.append(_SETUP_CLAMP)
    for flags in choices:
        params = _Params(flags=flags)
        fd = int(_syscall(_SYS_SETUP, entries, ctypes.byref(params)))
        if fd >= 0:
            return params, fd
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            break
    raise RingRefusedError(code)


def _refusal(code: int) -> str:
    if code == errno.EPERM:
        try:
            with open("/proc/sys/kernel/io_uring_disabled") as file:
                if file.read().strip() != "0":
                    return "sysctl kernel.io_uring_disabled"
        except OSError:
            pass
        return "seccomp profile of the container?"
    if code == errno.ENOSYS:
        return "kernel without io_uring or older than 5.6, or a seccomp profile"
    if code == errno.EINVAL and platform.machine() != "x86_64":
        return f"kernel older than 6.1 on {platform.machine()}, which reorders loads"
    if code == errno.ENOMEM:
        return "limit of locked memory, ulimit -l"
    return os.strerror(code)
