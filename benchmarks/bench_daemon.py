"""Benefit and cost of the node daemon for runs that share drives.

- `fair_worst_ratio`: fairness between two jobs that are limited by one drive, one of which keeps more requests in
  flight and would otherwise take a larger share. The value is the largest deviation of the shares of bytes from the
  weights, as a ratio (1.0 is exact). `fair_without` is the same ratio without a daemon. `fair_used` is the throughput
  of both jobs together, relative to their throughput without a daemon.
- `two_drives_of_sum`: throughput of a job on two drives of different speed, relative to the sum of its throughput on
  each drive alone. `two_drives_after_change`: the same after one of the drives has become slower during the run.
- `alone_over_without`: step time of a single job with a daemon, relative to its step time without one, in turns.
  `stopped_over_without`: the same with a daemon that accepts connections and never answers.
- `telemetry_share_of_step`: part of a step that is spent in calls that update counters. The calls are recorded during
  steps and then repeated on one thread, so that waiting for other threads is not included.
- `scrape_cpu_seconds`: CPU time of the daemon per scrape, with 8 ranks and 4 drives. `series`: number of series.

The drive is a loop device in memory whose speed is limited by the blkio controller of cgroup v1. This requires root.

    python benchmarks/bench_daemon.py [--model llama-100m] [--megabytes 300]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import loopdev
from bench_step import RESULTS, ROOT, build, machine, publish, replay, spread, train_step

BLKIO = Path("/sys/fs/cgroup/blkio")
WEIGHTS = ((1, 1), (3, 1))
FAST, MIDDLE, SLOW = 1.5, 0.5, 0.25
"""Speeds of two drives relative to `--megabytes`: fast and middle at first, then slow and middle."""
DEPTHS = (64, 4)
"""Requests in flight of each of the two jobs."""
RANKS, DRIVES = 8, 4


class SlowDrive:
    """A loop device whose speed for the processes of a cgroup can be changed at any time."""

    def __init__(self, folder: Path, group: Path) -> None:
        device = os.stat(folder).st_dev
        self.folder, self._group = folder, group
        self._name = f"{os.major(device)}:{os.minor(device)}"

    def set_speed(self, bytes_per_second: int) -> None:
        """Limit reads and writes to this many bytes per second each; 0 removes the limit."""
        for op in ("read", "write"):
            (self._group / f"blkio.throttle.{op}_bps_device").write_text(f"{self._name} {bytes_per_second}")


@contextmanager
def throttled_group() -> Iterator[Path]:
    """Create a cgroup of the blkio controller. Processes join it by writing their ID to `cgroup.procs`."""
    group = BLKIO / f"infinity-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise SystemExit(
            f"cannot create {group} ({error.strerror}): root and blkio of cgroup v1 are required"
        ) from error
    try:
        yield group
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:  # a process is still exiting
                time.sleep(0.1)


@contextmanager
def daemon(runtime: Path, *options: str) -> Iterator[int]:
    """Run infinityd, set `daemon.process`, and yield the port of its metrics."""
    log = runtime / "daemon.log"
    command = [sys.executable, "-m", "infinity_daemon.main", "--runtime-dir", str(runtime), "--port", "0", *options]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    try:
        while not (found := re.search(r" started .*port=(\d+)", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        daemon.process = process  # type: ignore[attr-defined]
        yield int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def job(pipe: Connection, options: argparse.Namespace, config: dict[str, Any], group: str, paths: list[str]) -> None:
    """Hold a run and execute the messages of the pipe.

    ``"run"`` transfers the pages of the plan and ``"train"`` takes steps, both until the next message arrives.
    ``"bytes"`` returns the transferred bytes, a number takes that many steps and returns their seconds, and None closes
    the run.
    """
    if group:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    import torch

    torch.set_num_threads(1)
    config = {**config, "storage": {**config.get("storage", {}), "paths": paths}}
    model, optimizer, vocabulary = build(options, "infinity", paths[0], **config)
    tokens = torch.randint(0, vocabulary, (1, options.seq))
    for _ in range(3):
        train_step(model, optimizer, tokens)
    pipe.send(optimizer.run.folder.run_id)
    while (message := pipe.recv()) is not None:
        if message in ("run", "train"):
            while not pipe.poll():
                if message == "run":
                    replay(optimizer)
                else:
                    train_step(model, optimizer, tokens)
        elif message == "bytes":
            pipe.send(sum(optimizer.run.ledger.total_bytes.values()))
        else:
            seconds = []
            for _ in range(message):
                began = time.perf_counter()
                train_step(model, optimizer, tokens)
                seconds.append(time.perf_counter() - began)
            pipe.send(seconds)
    optimizer.close()


def _end(pipe: Connection) -> None:
    with suppress(OSError):  # the process has already exited and printed its error
        pipe.send(None)


@contextmanager
def jobs(
    options: argparse.Namespace, configs: list[dict[str, Any]], group: Path | None, paths: list[str]
) -> Iterator[tuple[list[Connection], list[str]]]:
    """Start one process per job; yield the pipes of the jobs and their run IDs."""
    context = mp.get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for number, config in enumerate(configs):
            mine, theirs = context.Pipe()
            folders = [str(Path(path) / f"job{number}") for path in paths]
            for folder in folders:
                os.makedirs(folder, exist_ok=True)
            process = context.Process(target=job, args=(theirs, options, config, str(group or ""), folders))
            process.start()
            stack.callback(process.join)
            stack.callback(_end, mine)
            pipes.append(mine)
        yield pipes, [pipe.recv() for pipe in pipes]


def moved_while(runtime: Path, runs: list[str], seconds: float) -> list[float]:
    """Return the throughput of each run in bytes per second, from its stats file."""
    from infinity.telemetry import BY_NAME, read_stats_file
    from infinity.telemetry.stats_cells import label_sets

    transfers = BY_NAME["io_bytes_total"]

    def now() -> list[float]:
        pages = [read_stats_file(runtime / f"{run}.rank0.stats") for run in runs]
        return [
            sum(page.value_at(transfers, values) for values in label_sets(transfers, page.header.devices))
            for page in pages
        ]

    began, before = time.monotonic(), now()
    time.sleep(seconds)
    passed = time.monotonic() - began
    return [(after - first) / passed for after, first in zip(now(), before, strict=True)]


def fairness(options: argparse.Namespace, group: Path, folder: Path) -> dict[str, Any]:
    """Return how two jobs share a drive, without a daemon and with a daemon for several weights."""
    drive = SlowDrive(folder, group)
    found: dict[str, Any] = {}
    for weights in (None, *WEIGHTS):
        with ExitStack() as stack:
            runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="infinity-bench-")))
            drive.set_speed(0)
            configs = [
                {
                    "memory": {"host_bytes": options.host_memory},
                    "storage": {"queue_depth": depth, "request_bytes": 256 << 10, "bandwidth_weight": weight},
                    "telemetry": {"runtime_dir": str(runtime)},
                }
                for depth, weight in zip(DEPTHS, weights or (1, 1), strict=True)
            ]
            pipes, runs = stack.enter_context(jobs(options, configs, group, [str(folder)]))
            if weights is not None:
                stack.enter_context(daemon(runtime))
            drive.set_speed(options.megabytes << 20)
            for pipe in pipes:
                pipe.send("run")
            time.sleep(options.settle)
            rates = moved_while(runtime, runs, options.seconds)
            for pipe in pipes:
                pipe.send("bytes")
            drive.set_speed(0)
            for pipe in pipes:
                pipe.recv()
            shares = [rate / weight for rate, weight in zip(rates, weights or (1, 1), strict=True)]
            name = ":".join(map(str, weights)) if weights else "without"
            found[name] = {"bytes_per_second": rates, "ratio": max(shares) / min(shares)}
            print(name, found[name], file=sys.stderr)
    return found


def two_drives(options: argparse.Namespace, group: Path, folders: list[Path]) -> dict[str, Any]:
    """Return the throughput of a job on each of two drives and on both, before and after one has become slower."""
    drives = [SlowDrive(folder, group) for folder in folders]

    def moved(used: list[int], *speeds: dict[int, float]) -> list[float]:
        """Return bytes per second with these drives for each set of speeds in turn."""
        with ExitStack() as stack:
            runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="infinity-bench-")))
            config = {"memory": {"host_bytes": options.host_memory}, "telemetry": {"runtime_dir": str(runtime)}}
            set_speeds(speeds[0])  # before the start, because stripe weights follow the measured speeds
            paths = [str(folders[number]) for number in used]
            (pipe,), runs = stack.enter_context(jobs(options, [config], group, paths))
            pipe.send("train")
            rates = []
            for now in speeds:
                set_speeds(now)
                time.sleep(options.settle)
                rates += moved_while(runtime, runs, options.seconds)
            pipe.send("bytes")
            set_speeds({0: 0, 1: 0})
            pipe.recv()
            return rates

    def set_speeds(speeds: dict[int, float]) -> None:
        for number, speed in speeds.items():
            drives[number].set_speed(int(speed * (options.megabytes << 20)))

    first, then = moved([0, 1], {0: FAST, 1: MIDDLE}, {0: SLOW, 1: MIDDLE})
    fast, slow = moved([0], {0: FAST}, {0: SLOW})
    (middle,) = moved([1], {1: MIDDLE})
    found = {
        "bytes_per_second": {"fast": fast, "slow": slow, "middle": middle, "both": first, "both_after_change": then},
        "of_sum": first / (fast + middle),
        "after_change": then / (slow + middle),
    }
    print("two drives", found, file=sys.stderr)
    return found


def alone(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the step time of a job with a daemon, with a stopped daemon, and without one, in turns."""
    with tempfile.TemporaryDirectory(prefix="infinity-bench-") as name:
        runtime = Path(name)
        config = {"memory": {"host_bytes": options.host_memory}, "telemetry": {"runtime_dir": name}}
        with jobs(options, [config], None, [str(folder)]) as ((pipe,), _):
            kinds = ["without", "with", "stopped"]
            seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
            for turn in range(options.turns):
                for kind in kinds[turn % 3 :] + kinds[: turn % 3]:
                    with ExitStack() as stack:
                        if kind != "without":
                            stack.enter_context(daemon(runtime))
                            process = daemon.process  # type: ignore[attr-defined]
                            time.sleep(2)
                        if kind == "stopped":
                            process.send_signal(signal.SIGSTOP)
                            stack.callback(process.send_signal, signal.SIGCONT)
                        pipe.send(options.steps)
                        seconds[kind].append(statistics.median(pipe.recv()))
                print("alone", {kind: values[-1] for kind, values in seconds.items()}, file=sys.stderr)
            found: dict[str, Any] = {kind: spread(values) for kind, values in seconds.items()}
            for kind in kinds[1:]:
                pairs = zip(seconds[kind], seconds["without"], strict=True)
                found[f"{kind}_over_without"] = spread([mine / other for mine, other in pairs])
            return found


COUNTED = ("moved", "copied", "stalled", "fetched", "moving", "spared", "enter", "end_step")
BLOCKS = ("part", "phase")
"""Methods of the ledger that count, and context managers that count when a block begins and ends."""


def telemetry(options: argparse.Namespace, folder: Path) -> float:
    """Return the part of a step that is spent in the ledger."""
    import torch

    from infinity.telemetry.ledger import Ledger

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def noting(method: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append((method, arguments, named))
            return method(*arguments, **named)

        return call

    with tempfile.TemporaryDirectory(prefix="infinity-bench-") as name:
        model, optimizer, vocabulary = build(
            options,
            "infinity",
            str(folder),
            memory={"host_bytes": options.host_memory},
            telemetry={"runtime_dir": name},
        )
        tokens = torch.randint(0, vocabulary, (1, options.seq))
        for _ in range(3):
            train_step(model, optimizer, tokens)
        began = time.perf_counter()
        for _ in range(options.steps):
            train_step(model, optimizer, tokens)
        seconds = time.perf_counter() - began
        originals = {method: getattr(Ledger, method) for method in COUNTED + BLOCKS}
        for method, original in originals.items():
            setattr(Ledger, method, noting(original))
        for _ in range(options.steps):
            train_step(model, optimizer, tokens)
        for method, original in originals.items():
            setattr(Ledger, method, original)
        blocks = {originals[method] for method in BLOCKS}
        began = time.thread_time()
        for method, arguments, named in calls:
            if method in blocks:
                with method(*arguments, **named):
                    pass
            else:
                method(*arguments, **named)
        spent = time.thread_time() - began
        optimizer.close()
    return spent / seconds


def scrape(options: argparse.Namespace) -> dict[str, Any]:
    """Return the CPU time of a scrape and its number of series, for several ranks and drives."""
    import psutil

    from infinity.telemetry import Stats

    with ExitStack() as stack:
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="infinity-bench-")))
        folders = [str(stack.enter_context(loopdev.loop_device(1 << 30))) for _ in range(DRIVES)]
        devices = [f"nvme{number}" for number in range(DRIVES)]
        for rank in range(RANKS):
            info = {"paths": json.dumps(folders), "io_engine": "io_uring"}
            stats = Stats.create(
                runtime, run_id="20261123-000000-bench", rank=rank, local_rank=rank, world_size=RANKS, devices=devices,
                info=info,
            )  # fmt: skip
            stack.callback(stats.close)
        given = [word for folder in folders for word in ("--device-path", folder)]
        port = stack.enter_context(daemon(runtime, *given))
        process = psutil.Process(daemon.process.pid)  # type: ignore[attr-defined]
        text = ""
        for _ in range(3):
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
        before, idle = process.cpu_times(), time.monotonic()
        for _ in range(options.scrapes):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read()
        after = process.cpu_times()
        passed = time.monotonic() - idle
        time.sleep(passed)
        rest = process.cpu_times()  # subtracts background work of the daemon in a period of the same length
        busy = (after.user + after.system) - (before.user + before.system)
        own = (rest.user + rest.system) - (after.user + after.system)
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {"cpu_seconds": max(0.0, busy - own) / options.scrapes, "series": len(lines)}


PARTS = ("drives", "fair", "alone", "telemetry", "scrape")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the requested parts; return them together with the stored results of the other parts."""
    parts = options.parts.split(",")
    before = json.loads(options.out.read_text()) if set(parts) != set(PARTS) else {}
    result: dict[str, Any] = {**before, "machine": machine(), "model": options.model}
    with ExitStack() as stack:
        group = stack.enter_context(throttled_group())
        folder = stack.enter_context(loopdev.loop_device(options.device_bytes))
        if "drives" in parts:
            with loopdev.loop_device(options.device_bytes) as other:
                drives = two_drives(options, group, [folder, other])
            result |= {
                "two_drives": drives,
                "two_drives_of_sum": drives["of_sum"],
                "two_drives_after_change": drives["after_change"],
            }
        if "fair" in parts:
            shared = fairness(options, group, folder)
            by_weights = [shared[":".join(map(str, weights))] for weights in WEIGHTS]
            without = sum(shared["without"]["bytes_per_second"])
            result |= {
                "fair": shared,
                "fair_worst_ratio": max(found["ratio"] for found in by_weights),
                "fair_without": shared["without"]["ratio"],
                "fair_used": min(sum(found["bytes_per_second"]) / without for found in by_weights),
            }
        if "alone" in parts:
            by_itself = alone(options, folder)
            result |= {
                "alone": by_itself,
                "alone_over_without": by_itself["with_over_without"]["median"],
                "stopped_over_without": by_itself["stopped_over_without"]["median"],
            }
        if "telemetry" in parts:
            result["telemetry_share_of_step"] = telemetry(options, folder)
    if "scrape" in parts:
        scraped = scrape(options)
        result |= {"scrape_cpu_seconds": scraped["cpu_seconds"], "series": scraped["series"]}
    return result


def show(result: dict[str, Any]) -> None:
    """Print the figures."""
    for name, value in result.items():
        if isinstance(value, (int, float)):
            print(f"{name:28} {value:.4g}")


def draw(result: dict[str, Any], file: Path) -> None:
    """Plot the shares of two jobs by weight, and the throughput of two drives alone and together."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes, right = figure.subplots(1, 2)
    names = list(result["fair"])
    for number, label in enumerate(("many requests in flight", "few requests in flight")):
        values = [result["fair"][name]["bytes_per_second"][number] / 1e6 for name in names]
        axes.bar([at + 0.4 * number for at in range(len(names))], values, width=0.38, label=label)
    axes.set_xticks([at + 0.2 for at in range(len(names))], [name.replace("without", "no daemon") for name in names])
    axes.set(ylabel="MB/s", title="Two jobs on one drive, by weight")
    axes.legend(loc="upper center")
    rates = {name: rate / 1e6 for name, rate in result["two_drives"]["bytes_per_second"].items()}
    for at, (first, both) in enumerate((("fast", "both"), ("slow", "both_after_change"))):
        right.bar(2.5 * at, rates[first], label="first drive alone" if not at else None, color="#4477aa")
        right.bar(
            2.5 * at,
            rates["middle"],
            bottom=rates[first],
            label="second drive alone" if not at else None,
            color="#88ccee",
        )
        right.bar(2.5 * at + 1, rates[both], label="both drives, one run" if not at else None, color="#228833")
    right.set_xticks([0.5, 3.0], ["at the start", "after one became slower"])
    right.set(ylabel="MB/s", title="One run on two drives of different speed")
    right.legend()
    figure.savefig(file, dpi=130)


def main() -> None:
    """Run the benchmark and write results/daemon.json and its plot."""
    sys.path.insert(0, str(ROOT))
    from infinity.units import parse_size

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--seq", type=int, default=32, help="tokens per step")
    parser.add_argument("--megabytes", type=int, default=300, help="drive speed in MiB/s, in each direction")
    parser.add_argument("--host-memory", type=parse_size, default=256 << 20)
    parser.add_argument("--device-bytes", type=parse_size, default=9 << 30)
    parser.add_argument("--settle", type=float, default=40, help="seconds before throughput is measured")
    parser.add_argument("--seconds", type=float, default=40, help="seconds in which throughput is measured")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8, help="steps per turn")
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="parts to measure; stored results of other parts are kept"
    )
    parser.add_argument("--scrapes", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULTS / "daemon.json")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    publish(measure(options), options, draw, show)


if __name__ == "__main__":
    main()
