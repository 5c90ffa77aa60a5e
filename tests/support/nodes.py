"""Several nodes on this machine: network namespaces with a hostname, private folders, and links that can fail.

A node is a process with its own network, hostname (UTS), process-id and mount namespaces, on which a test starts
programs::

    with Nodes(tmp_path, 2) as nodes:
        agents = [node.torchrun(*nodes.rendezvous(ranks=1), script) for node in nodes]
        nodes[1].cut()
        nodes[0].start(function, argument).wait()

- Nodes are named `node0`, `node1`, …, resolve each other's names, and are connected by `eth0` to a bridge in a
  separate namespace. Names cannot collide, because nothing is created outside the namespaces.
- `nodes.local` is a path that leads to a different folder on each node, like `/nvme0` on real machines. Outside the
  nodes, this folder is `node.folder`. Other paths, for example `tmp_path`, lead to the same folder on all nodes.
- Programs are forked from a server that has imported torch and `infinity`. Scripts of `torchrun` import them again.
- When the test's process ends or closes its pipe, the kernel kills all processes of the nodes and removes the
  namespaces.

`Nodes` skips the test where the nodes cannot be made: it requires root, `ip`, `tc`, and kernel support for namespaces,
veth, bridges, and the `bpf` filter and `tbf` queue of `tc`. Packets cannot be delayed, because this requires `netem`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, overload

import pytest

from support.command import environment
from support.processes import fork_server

PATIENCE = 900.0
"""Seconds after which a program counts as lost."""
_NEW_MOUNTS, _NEW_UTS, _NEW_PROCESSES, _NEW_NETWORK = 0x20000, 0x4000000, 0x20000000, 0x40000000
_KILL_WITH_PARENT = 1
_DROP, _PASS = 2, 0
_SHUT_DOWN, _WITHOUT_FLUSH = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH
_DRIVE_BYTES = 64 << 20


class Program:
    """A process on a node. Its stdout and stderr are written to the file `log`."""

    def __init__(self, node: Node, pid: int, log: Path) -> None:
        self.node, self.pid, self.log = node, pid, log
        """`pid` is the process id on the node. It cannot be used outside the node."""
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process is running."""
        if self._status is None:
            self._status = self.node._ask("poll", self.pid)
        return self._status

    def wait(self, expected: int | None = 0) -> int:
        """Wait until the process exits; return its exit status, which must be `expected` unless this is None."""
        end = time.monotonic() + PATIENCE
        while (status := self.poll()) is None:
            assert time.monotonic() < end, f"{self.node.name}: no exit within {PATIENCE:.0f} s; output:\n{self.output}"
            time.sleep(0.02)
        assert expected in (None, status), f"{self.node.name}: exit status {status}; output:\n{self.output}"
        return status

    @property
    def output(self) -> str:
        """Output so far."""
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        self.node.signal(self.pid, number)


class Node:
    """A node. Programs run on it with the current folder `nodes.local`."""

    def __init__(self, nodes: Nodes, index: int) -> None:
        self.name, self.address = f"node{index}", f"10.77.0.{index + 1}"
        self.folder = nodes.folder / self.name
        """This node's folder as seen from outside. It contains `drive0`, `drive1`, …, `run` (runtime) and `tmp`."""
        self._nodes, self._port, self._programs = nodes, f"port{index}", 0
        self._drive, self._images = nodes.local / "drive0", 0
        self._image: Path | None = None
        self._space: _Namespace

    @property
    def local(self) -> Path:
        """Path that leads to this node's folder on the node."""
        return self._nodes.local

    @property
    def inside(self) -> Path:
        """This node's folder with its mounts, such as a drive of `new_drive`."""
        return Path(f"/proc/{self._space.pid}/root{self.local}")

    def start(self, function: Callable[..., object], *arguments: object, **variables: str) -> Program:
        """Start a process that calls an importable function, with these environment variables."""
        return self._start((function, arguments), variables)

    def command(self, *words: object, **variables: str) -> Program:
        """Start a command line."""
        return self._start(tuple(map(str, words)), variables)

    def infinity(self, *words: object, **variables: str) -> Program:
        """Start `infinity WORDS`."""
        return self.start(_infinity, *map(str, words), **variables)

    def torchrun(self, *words: object, **variables: str) -> Program:
        """Start `torchrun WORDS`; see `Nodes.rendezvous`."""
        return self.start(_torchrun, *map(str, words), **variables)

    def daemon(self, *options: str, before: Callable[[], object] | None = None) -> Program:
        """Start infinityd with the runtime folder, and wait until it serves. Its process first calls `before`."""
        program = self.start(_daemon, before, str(self._nodes.local / "run"), *options)
        end = time.monotonic() + PATIENCE
        while " started " not in program.output:
            assert program.poll() is None, program.output
            assert time.monotonic() < end, program.output
            time.sleep(0.02)
        return program

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process, by its process id on this node."""
        self._ask("signal", pid, number)

    def kill(self) -> None:
        """Kill all processes on the node with SIGKILL, and wait for their end. The kernel closes their connections."""
        self._ask("kill")

    def lose(self, fraction: float) -> None:
        """From now on, drop packets to and from this node at random. 0: drop none. 1: drop all."""
        for direction in ("ingress", "egress"):
            self._nodes._switch("tc", "filter", "delete", "dev", self._port, direction)
            if fraction:
                self._nodes._switch(
                    "tc", "filter", "add", "dev", self._port, direction, "bpf", "direct-action",
                    "bytecode", _losing(fraction),
                )  # fmt: skip

    def cut(self) -> None:
        """Cut the link. Both ends notice nothing but silence, as if a cable between two switches was unplugged."""
        self.lose(1)

    def restore(self) -> None:
        """Undo `cut` and `lose`."""
        self.lose(0)

    def limit(self, bits: int) -> None:
        """Limit the rate in each direction, in bits per second. 0: no limit."""
        rate = ["tbf", "rate", f"{bits}bit", "burst", "64kb", "latency", "1s"] if bits else []
        for run, device in ((self._nodes._switch, self._port), (self._run, "eth0")):
            run("tc", "qdisc", "replace" if bits else "delete", "dev", device, "root", *rate)

    def new_drive(self) -> None:
        """Replace `drive0` by an empty file system of its own, which is not visible outside the node."""
        self.plain_drive()
        self._images += 1
        self._image = self.folder / f"image{self._images}"
        with self._image.open("wb") as file:
            file.truncate(_DRIVE_BYTES)
        self._run("mkfs.ext4", "-q", str(self._image))
        self._run("mount", "-o", "loop", str(self._image), str(self._drive))

    def plain_drive(self) -> None:
        """Undo `new_drive`. No process may be using the drive."""
        if self._image is not None:
            self._run("umount", str(self._drive))
            self._image.unlink()
            self._image = None

    def remove_drive(self) -> None:
        """Make the file system of `new_drive` fail all requests with EIO. What was not synced is lost."""
        self.start(_shut_down, str(self._drive)).wait()

    def return_drive(self) -> None:
        """Mount the file system of `new_drive` again, which no process may be using."""
        self._run("umount", str(self._drive))
        self._run("mount", "-o", "loop", str(self._image), str(self._drive))

    def _start(self, action: Any, variables: Mapping[str, str]) -> Program:
        self._programs += 1
        log = self.folder / "tmp" / f"program{self._programs}.log"
        log.touch()
        values = {
            **environment(self._nodes.local / "tmp"),
            "XDG_RUNTIME_DIR": str(self._nodes.local / "run"),
            "GLOO_SOCKET_IFNAME": "eth0",
            **variables,
        }
        return Program(self, self._ask("start", action, values, str(log), str(self._nodes.local)), log)

    def _run(self, *words: str) -> None:
        self._ask("run", words)

    def _ask(self, request: str, *arguments: Any) -> Any:
        return self._space.ask(request, *arguments)


class Nodes:
    """Nodes that are connected by a bridge. `close` kills their processes; use it as a context manager."""

    def __init__(self, folder: Path, count: int, *, drives: int = 1) -> None:
        """Create nodes in an existing folder.

        Args:
            folder: Folder for the nodes' folders.
            count: Number of nodes.
            drives: Number of drive folders on each node.
        """
        self.folder = folder
        self.local = folder / "local"
        """Path that leads to another folder on each node."""
        self._spaces: list[_Namespace] = []
        self._nodes = [Node(self, index) for index in range(count)]
        if os.geteuid():
            pytest.skip("nodes require root")
        for tool in ("ip", "tc"):
            if not shutil.which(tool):
                pytest.skip(f"nodes require the command {tool} of iproute2")
        self.local.mkdir()
        names = "".join(f"{node.address} {node.name}\n" for node in self._nodes)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        try:
            self._create(drives)
        except _UnsupportedError as error:
            self.close()
            pytest.skip(f"nodes cannot be made on this machine: {error}")
        except BaseException:
            self.close()
            raise

    def _create(self, drives: int) -> None:
        self._bridge = self._open(_NEW_NETWORK)
        self._switch("ip", "link", "add", "bridge", "type", "bridge")
        self._switch("ip", "link", "set", "bridge", "up")
        for node in self._nodes:
            for part in ("run", "tmp", *(f"drive{index}" for index in range(drives))):
                (node.folder / part).mkdir(parents=True)
            (node.folder / "run").chmod(0o700)
            node._space = self._open(_NEW_NETWORK | _NEW_UTS | _NEW_PROCESSES | _NEW_MOUNTS)
            port = node._port
            self._switch(
                "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(node._space.pid)
            )
            self._switch("ip", "link", "set", port, "master", "bridge", "up")
            self._switch("tc", "qdisc", "add", "dev", port, "clsact")
            node._ask("name", node.name)
            node._run("mount", "--make-rprivate", "/")
            node._run("mount", "-t", "proc", "proc", "/proc")
            node._run("mount", "--bind", str(node.folder), str(self.local))
            node._run("mount", "--bind", str(self.folder / "hosts"), "/etc/hosts")
            node._run("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
            node._run("ip", "link", "set", "eth0", "up")
            node._run("ip", "link", "set", "lo", "up")
        first = self._nodes[0]
        for action in (partial(first.lose, 0.5), first.restore, partial(first.limit, 10**6), partial(first.limit, 0)):
            action()  # raises an error if the kernel lacks support

    def _open(self, kinds: int) -> _Namespace:
        space = _Namespace(kinds)
        self._spaces.append(space)
        space.enter()
        return space

    def _switch(self, *words: str) -> None:
        self._bridge.ask("run", words)

    def rendezvous(self, ranks: int, port: int = 29500) -> list[str]:
        """Return the arguments of `torchrun` for a run on all nodes, with a number of ranks per node."""
        return [
            f"--nnodes={len(self._nodes)}", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self._nodes[0].name}:{port}", "--rdzv-id=test",
        ]  # fmt: skip

    @overload
    def __getitem__(self, index: int) -> Node: ...

    @overload
    def __getitem__(self, index: slice) -> list[Node]: ...

    def __getitem__(self, index: int | slice) -> Node | list[Node]:
        return self._nodes[index]

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def close(self) -> None:
        """Kill all processes of the nodes. The kernel then removes the namespaces."""
        for space in self._spaces:
            space.close()
        self._spaces = []

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _UnsupportedError(Exception):
    """A namespace or a network device cannot be created."""


class _Namespace:
    """A process in new namespaces that starts programs. It is process 1 if it has its own process ids.

    It ends when its pipe is closed, and the kernel then kills all other processes in its process-id namespace.
    """

    def __init__(self, kinds: int) -> None:
        self._pipe, theirs = fork_server().Pipe()
        self._process = fork_server().Process(target=_enter, args=(theirs, kinds), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = 0
        """Process id outside the namespaces."""

    def enter(self) -> None:
        """Wait until the namespaces exist."""
        self.pid = self._receive()

    def ask(self, *request: Any) -> Any:
        """Send a request; return its result."""
        self._pipe.send(request)
        return self._receive()

    def _receive(self) -> Any:
        if not self._pipe.poll(PATIENCE):
            raise AssertionError("a node does not respond")
        good, value = self._pipe.recv()
        if not good:
            raise _UnsupportedError(value)
        return value

    def close(self) -> None:
        """Kill the process, and wait until its namespaces have no processes."""
        self._pipe.close()
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self._process.join(60)
        self._process.kill()
        self._process.join()


def _enter(pipe: Connection, kinds: int) -> None:
    """Create namespaces and a process in them, and wait for its end."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(kinds):
        pipe.send((False, f"unshare: {os.strerror(ctypes.get_errno())}"))
        return
    pid = os.fork()  # the first process in the new process-id namespace
    if pid:
        pipe.send((True, pid))
        pipe.close()
        os.waitpid(pid, 0)
        return
    try:
        libc.prctl(_KILL_WITH_PARENT, signal.SIGKILL)
        _serve(pipe)
    finally:
        os._exit(0)


def _serve(pipe: Connection) -> None:
    ended: dict[int, int] = {}
    while True:
        try:
            request, *arguments = pipe.recv()
        except EOFError:
            return
        result: tuple[bool, Any] = (True, None)
        if request == "start":
            result = (True, _fork(pipe, *arguments))
        elif request == "poll":
            _reap(ended, os.WNOHANG)
            result = (True, ended.get(arguments[0]))
        elif request == "signal":
            with suppress(ProcessLookupError):
                os.kill(*arguments)
        elif request == "kill":
            assert os.getpid() == 1  # otherwise, -1 would mean all processes of the machine
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            _reap(ended, 0)  # orphans are children of this process, too
        elif request == "name":
            socket.sethostname(*arguments)
        else:
            done = subprocess.run(arguments[0], capture_output=True, text=True, check=False)
            if done.returncode:
                result = (False, f"{' '.join(arguments[0])}: {done.stderr.strip()}")
        pipe.send(result)


def _reap(ended: dict[int, int], options: int) -> None:
    """Record the exit status of all child processes that have exited, or, without `os.WNOHANG`, wait for all."""
    while True:
        try:
            pid, status = os.waitpid(-1, options)
        except ChildProcessError:
            return
        if not pid:
            return
        ended[pid] = os.waitstatus_to_exitcode(status)


def _fork(pipe: Connection, action: Any, variables: dict[str, str], log: str, folder: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        pipe.close()
        os.setsid()
        os.chdir(folder)
        for descriptor in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(variables)
        if isinstance(action[0], str):
            os.execvp(action[0], action)
        status = _call(*action)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _call(function: Callable[..., object], arguments: tuple[Any, ...]) -> int:
    import tempfile

    import torch

    tempfile.tempdir = None  # TMPDIR has changed
    torch.set_num_threads(1)
    try:
        function(*arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def _infinity(*words: str) -> None:
    from infinity_tools.cli import main

    sys.argv = ["infinity", *words]
    main()


def _torchrun(*words: str) -> None:
    from torch.distributed.run import main

    main(list(words))


def _daemon(before: Callable[[], object] | None, folder: str, *options: str) -> None:
    from support.daemon_process import run

    if before is not None:
        before()
    run(["infinityd", "--runtime-dir", folder, "--port", "0", *options], 2)


def _shut_down(place: str) -> None:
    folder = os.open(place, os.O_RDONLY)
    fcntl.ioctl(folder, _SHUT_DOWN, struct.pack("I", _WITHOUT_FLUSH))


def start_ranks(
    nodes: Sequence[Node], ranks: int, function: Callable[..., object], *arguments: object
) -> list[Program]:
    """Start a function on a number of ranks per node, with the environment of `torchrun`. Return them by rank."""
    return [
        nodes[rank // ranks].start(
            function, *arguments,
            RANK=str(rank), LOCAL_RANK=str(rank % ranks), WORLD_SIZE=str(len(nodes) * ranks),
            LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR=nodes[0].name, MASTER_PORT="29500",
        )
        for rank in range(len(nodes) * ranks)
    ]  # fmt: skip


def _losing(fraction: float) -> str:
    """Return a filter that drops a fraction of packets, as instructions of the classic packet filter."""
    if fraction >= 1:
        return f"1,6 0 0 {_DROP}"
    random = (1 << 32) - 0x1000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM: the position that reads as a random number
    return f"4,32 0 0 {random},53 1 0 {int(fraction * (1 << 32))},6 0 0 {_DROP},6 0 0 {_PASS}"
