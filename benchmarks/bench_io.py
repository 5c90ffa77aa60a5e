"""I/O engines compared with fio: the same file, request size and depth, in turns.

    python benchmarks/bench_io.py --dir /path/on/nvme
    python benchmarks/bench_io.py --loop          # XFS on a loop device in memory; root only

Writes benchmarks/results/io.json. A ratio is the median over the rounds of an engine's throughput divided by the
throughput of fio in the same round, so that a drive whose speed drifts does not bias the result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.loopdev import LoopDeviceError, loop_device  # noqa: E402
from infinity.errors import InfinityError  # noqa: E402
from infinity.io import Engine, Op, ThreadEngine, Ticket, UringEngine  # noqa: E402
from infinity.memory.device import open_device  # noqa: E402
from infinity.memory.host_cache import HostCache  # noqa: E402
from infinity.units import KIB, MIB, format_size, parse_size  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Shape:
    """An access pattern: `depth` requests of `request_bytes`, submitted by engines as tickets of `ticket_bytes`."""

    name: str
    request_bytes: int
    depth: int
    ticket_bytes: int

    @property
    def tickets(self) -> int:
        """Number of outstanding tickets: enough to fill the depth, plus one page when pages are split."""
        exact = self.depth * self.request_bytes // self.ticket_bytes
        return exact if self.ticket_bytes == self.request_bytes else exact + 1


SHAPES = (
    Shape(name="1 MiB x 8", request_bytes=MIB, depth=8, ticket_bytes=MIB),
    Shape(name="256 KiB x 32", request_bytes=256 * KIB, depth=32, ticket_bytes=256 * KIB),
    Shape(name="8 MiB pages as 1 MiB x 8", request_bytes=MIB, depth=8, ticket_bytes=8 * MIB),
)
CONTESTANTS = ("fio", "io_uring", "threads")
REST_SECONDS = 0.5
RAMP_SECONDS = 1.0
"""Warm-up at the start of a run, not measured: virtual drives grant burst credit for idle time."""
HEADLINE = SHAPES[0].name


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The result of one measurement."""

    shape: str
    op: str
    contestant: str
    round: int
    bytes_per_second: float
    cpu_per_second: float
    """CPU seconds of the process per second, including time in the kernel."""


def run_fio(path: Path, shape: Shape, op: Op, seconds: float, size: int) -> tuple[float, float]:
    """Return the throughput of fio in bytes per second, and its CPU seconds per second."""
    command = [
        "fio", "--name=reference", f"--filename={path}", f"--rw={op.value}", f"--bs={shape.request_bytes}",
        f"--iodepth={shape.depth}", f"--size={size}", "--ioengine=io_uring", "--fixedbufs=1", "--direct=1",
        "--time_based=1", f"--runtime={seconds}", f"--ramp_time={RAMP_SECONDS}", "--numjobs=1",
        "--thread=1", "--fallocate=none", "--overwrite=1", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job[op.value]["bw_bytes"]), (job["usr_cpu"] + job["sys_cpu"]) / 100


class Load:
    """A load that keeps a fixed number of tickets outstanding; each completion submits the next ticket."""

    def __init__(self, engine: Engine, path: Path, op: Op, shape: Shape, memory: memoryview, size: int) -> None:
        self._engine, self._op, self._shape, self._memory = engine, op, shape, memory
        self._file = engine.open(str(path))
        self._places = size // shape.ticket_bytes
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._next = self._moved = 0
        self._left = shape.tickets
        self._stopping = False
        self._error: InfinityError | None = None

    def run(self, ramp: float, seconds: float) -> tuple[float, float]:
        """Return bytes per second and CPU seconds per second, measured for `seconds` after `ramp` seconds."""
        for slot in range(self._shape.tickets):
            self._submit(slot)
        time.sleep(ramp)
        moved, cpu, began = self._moved, time.process_time(), time.perf_counter()
        time.sleep(seconds)
        moved, cpu, wall = self._moved - moved, time.process_time() - cpu, time.perf_counter() - began
        self._stopping = True
        self._idle.wait()
        self._engine.forget(self._file)
        if self._error is not None:
            raise self._error
        return moved / wall, cpu / wall

    def _submit(self, slot: int) -> None:
        length = self._shape.ticket_bytes
        with self._lock:
            offset = self._next % self._places * length
            self._next += 1
        part = self._memory[slot * length : (slot + 1) * length]
        self._engine.submit(self._op, self._file, offset, part).on_done(lambda done: self._on_done(slot, done))

    def _on_done(self, slot: int, ticket: Ticket) -> None:
        with self._lock:
            self._error = self._error or ticket.error
            self._moved += ticket.length
            if self._error is not None or self._stopping:
                self._left -= 1
                if self._left == 0:
                    self._idle.set()
                return
        self._submit(slot)


def run_engine(name: str, path: Path, shape: Shape, op: Op, seconds: float, size: int) -> tuple[float, float]:
    """Return the throughput of an engine in bytes per second, and its CPU seconds per second."""
    kinds: dict[str, type[UringEngine] | type[ThreadEngine]] = {
        "io_uring": UringEngine,
        "threads": ThreadEngine,
    }
    engine = kinds[name](shape.depth, shape.request_bytes)
    host_cache = HostCache(shape.tickets, shape.ticket_bytes, device=open_device(torch.device("cpu")))
    host_cache.memory[:] = os.urandom(host_cache.nbytes)
    engine.register(host_cache.memory)
    result = Load(engine, path, op, shape, host_cache.memory, size).run(RAMP_SECONDS, seconds)
    engine.close()
    host_cache.close()
    return result


def measure(folder: Path, rounds: int, seconds: float, size: int, console: Console) -> list[Sample]:
    """Run all contestants in turn, `rounds` times for each shape and direction."""
    samples = []
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=folder) as work:
        path = Path(work) / "data"
        with open(path, "wb") as file:
            for _ in range(size // (8 * MIB)):
                file.write(os.urandom(8 * MIB))
            file.flush()
            os.fsync(file.fileno())
        for shape in SHAPES:
            for op in Op:
                # The headline shape gets more rounds, because a few rounds on a shared drive are too noisy.
                for number in range(rounds * (3 if shape.name == HEADLINE else 1)):
                    # Rotate, so that each contestant is first equally often.
                    turn = number % len(CONTESTANTS)
                    for contestant in CONTESTANTS[turn:] + CONTESTANTS[:turn]:
                        time.sleep(REST_SECONDS)
                        if contestant == "fio":
                            speed, cpu = run_fio(path, shape, op, seconds, size)
                        else:
                            speed, cpu = run_engine(contestant, path, shape, op, seconds, size)
                        samples.append(
                            Sample(
                                shape=shape.name,
                                op=op.value,
                                contestant=contestant,
                                round=number,
                                bytes_per_second=speed,
                                cpu_per_second=cpu,
                            )
                        )
                console.print(f"{shape.name} {op.value}: done", style="dim")
    return samples


def median(samples: list[Sample], shape: str, op: Op, contestant: str, what: str = "bytes_per_second") -> float:
    """Return the median of one field over the rounds."""
    return statistics.median(
        getattr(sample, what)
        for sample in samples
        if (sample.shape, sample.op, sample.contestant) == (shape, op.value, contestant)
    )


def ratios(samples: list[Sample], op: Op) -> dict[str, dict[str, float]]:
    """Return, by engine and shape, the median ratio to the throughput of fio in the same round."""
    speeds = {(s.shape, s.op, s.contestant, s.round): s.bytes_per_second for s in samples}
    return {
        engine: {
            shape.name: round(
                statistics.median(
                    speeds[shape.name, op.value, engine, number] / speeds[shape.name, op.value, "fio", number]
                    for number in sorted({s.round for s in samples if (s.shape, s.op) == (shape.name, op.value)})
                ),
                4,
            )
            for shape in SHAPES
        }
        for engine in CONTESTANTS[1:]
    }


def machine() -> dict[str, Any]:
    """Return the properties of the machine that influence the results."""
    cpu = ""
    with open("/proc/cpuinfo") as file:
        cpu = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "fio": subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip(),
    }


def commit() -> str:
    """Return the git commit, with a suffix if the working tree differs."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT).stdout.strip()

    return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "infinity", "benchmarks") else "")


def table(samples: list[Sample]) -> Table:
    """Return a table of medians and ratios."""
    made = Table(title="median GB/s (CPU cores used), ratio to fio")
    for heading in ("shape", "op", *CONTESTANTS, "io_uring / fio", "threads / fio"):
        made.add_column(heading, justify="left" if heading in ("shape", "op") else "right")
    by_op = {op: ratios(samples, op) for op in Op}
    for shape in SHAPES:
        for op in Op:
            cells = [
                f"{median(samples, shape.name, op, who) / 1e9:.2f} "
                f"({median(samples, shape.name, op, who, 'cpu_per_second'):.2f})"
                for who in CONTESTANTS
            ]
            parts = [f"{by_op[op][engine][shape.name]:.3f}" for engine in CONTESTANTS[1:]]
            made.add_row(shape.name, op.value, *cells, *parts)
    return made


def main() -> None:
    """Parse the command line and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--dir", type=Path, default=Path("."), help="folder on the drive (default: the current directory)"
    )
    where.add_argument("--loop", action="store_true", help="use XFS on a loop device in memory (root only)")
    parser.add_argument("--size", default="2GiB", help="size of the file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each measurement")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "io.json")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio, the reference of this benchmark, is not installed. Install it, e.g. with apt-get install fio.")
    if not options.dir.is_dir():
        sys.exit(f"{options.dir} is not a folder")
    size = parse_size(options.size, name="--size") // (8 * MIB) * 8 * MIB
    console = Console()
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(loop_device(size + 512 * MIB)) if options.loop else options.dir
        except LoopDeviceError as error:
            sys.exit(f"--loop: {error}")
        samples = measure(folder, options.rounds, options.seconds, size, console)
    read, write = ratios(samples, Op.READ), ratios(samples, Op.WRITE)
    console.print(table(samples))
    result = {
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": {
            "device": "xfs on a loop device in memory" if options.loop else "folder given by --dir",
            "file_size": format_size(size),
            "rounds": options.rounds,
            "seconds": options.seconds,
            "ramp_seconds": RAMP_SECONDS,
            "shapes": [asdict(shape) for shape in SHAPES],
            "fio": "io_uring, direct, registered buffers, one job, its own default memory",
            "infinity": "transfers from and to a host cache, as in training: huge pages where the kernel has them",
        },
        "machine": machine(),
        "read_ratio": {engine: shapes[HEADLINE] for engine, shapes in read.items()},
        "write_ratio": {engine: shapes[HEADLINE] for engine, shapes in write.items()},
        "ratios": {"read": read, "write": write},
        "samples": [asdict(sample) for sample in samples],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
