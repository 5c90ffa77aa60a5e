"""Results of a run: measurements of each rank, `summary.json` and the final table."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from infinity import PagedOptimizer, torchrun
from infinity.checkpoint.durable import write_durably
from infinity.errors import ConfigError
from infinity.telemetry.ledger import StepRecord
from infinity.telemetry.metrics import OPS, PARTS, ROLES
from infinity.units import format_number, format_size
from infinity.untrusted_files import open_regular
from infinity_tools.progress import rate, short

_log = logging.getLogger("infinity")


WARM_STEPS = 2
"""Number of initial steps that per-step figures exclude: the first records the trace, and the second fills the host
cache.
"""


def peak_rss() -> int:
    """Return the peak resident memory in bytes."""
    # getrusage is not used because its peak includes memory of the parent process at the time of the fork.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def nvme_totals(optimizer: PagedOptimizer) -> tuple[int, int]:
    """Return the bytes read from and written to NVMe since the start of this process, from its metrics."""
    page = optimizer.run.stats.snapshot()
    read, written = (
        int(
            sum(
                page.value("io_bytes_total", op=op, state=state, device=device)
                for state in ROLES
                for device in page.header.devices
            )
        )
        for op in OPS
    )
    return read, written


def report(optimizer: PagedOptimizer) -> dict[str, Any]:
    """Return the measurements of this rank: the index of its node, the record of each step, the figures of the summary
    that are summed over ranks, and the planned seconds per step. Call it while no transfers are in flight.

    Planned figures are 0 without a plan. The bandwidth is the highest of any step while it moved pages.
    """
    read, written = nvme_totals(optimizer)
    traffic = optimizer.run.plan.traffic if optimizer.run.plan is not None else None
    activations = optimizer.run.activation_traffic
    bandwidth, seconds = _rates(optimizer)
    page = optimizer.run.stats.snapshot()
    return {
        "node": torchrun.number("GROUP_RANK", 0),
        "records": tuple(optimizer.records),
        "totals": {
            "state_bytes": optimizer.run.layout.state_bytes,
            "stored_bytes": int(page.value("tier_capacity_bytes", tier="nvme")),
            "host_memory_bytes": int(page.value("tier_capacity_bytes", tier="host")),
            "peak_rss_bytes": peak_rss(),
            "predicted_read_bytes_per_step": traffic.read_bytes + activations.read if traffic else 0,
            "predicted_written_bytes_per_step": traffic.written_bytes + activations.written if traffic else 0,
            "nvme_bandwidth_bytes_per_second": bandwidth,
            "nvme_read_bytes_total": read,
            "nvme_written_bytes_total": written,
            "nvme_retries_total": sum(int(page.value("io_retries_total", op=op)) for op in OPS),
        },
        "predicted_step_seconds": seconds,
    }


def steady(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the records that per-step figures are computed from."""
    return records[WARM_STEPS if len(records) > WARM_STEPS else 0 :]


def _rates(optimizer: PagedOptimizer) -> tuple[float, float]:
    """Return the bandwidth and the planned seconds per step of a report."""
    records = steady(optimizer.records)
    rates = [(r.read_bytes + r.written_bytes) / r.transfer_seconds for r in records if r.transfer_seconds]
    bandwidth = max(rates, default=0.0)
    if optimizer.run.plan is None or not bandwidth:
        return bandwidth, 0.0
    computation = median(record.seconds - record.stall_seconds for record in records)
    return bandwidth, optimizer.predict_seconds(bandwidth, computation)


def summarize(facts: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of `summary.json`.

    Bytes are sums over the ranks of this node, and seconds are means over them. Figures per step are means over the
    steady steps that have records. A long run only has records of its last steps. The first two steps are left out,
    unless there are no others.

    Args:
        facts: Entries that are not counted per step: ids, settings, losses, first and last step of this process.
        reports: Results of `report` for the ranks of this node.
    """
    records = reports[0]["records"]
    each = [report["totals"] for report in reports]
    totals = {name: sum(figures[name] for figures in each) for name in each[0]}

    def per_step(name: str) -> float:
        of = attrgetter(name)
        together = zip(*(steady(report["records"]) for report in reports), strict=True)
        return fmean(sum(map(of, records)) for records in together)

    def transfer_seconds(figures: Mapping[str, Any]) -> float:
        planned = figures["predicted_read_bytes_per_step"] + figures["predicted_written_bytes_per_step"]
        bandwidth = figures["nvme_bandwidth_bytes_per_second"]
        return planned / bandwidth if bandwidth else 0.0

    step_seconds = median(record.seconds for record in steady(records))
    spent = ("transfer", "stall", *PARTS)
    return {
        **facts,
        "steps": facts["last_step"] - facts["first_step"] + 1,
        "step_seconds": step_seconds,
        "tokens_per_second": facts["tokens_per_step"] / step_seconds,
        **totals,
        "process_memory_bytes_outside_host_cache": max(0, totals["peak_rss_bytes"] - totals["host_memory_bytes"]),
        "nvme_read_bytes_per_step": per_step("read_bytes"),
        "nvme_written_bytes_per_step": per_step("written_bytes"),
        "predicted_transfer_seconds_per_step": max(map(transfer_seconds, each)),
        "predicted_step_seconds": max(report["predicted_step_seconds"] for report in reports),
        **{f"{part}_seconds_per_step": per_step(f"{part}_seconds") / len(reports) for part in spent},
        "step_records": [asdict(record) for record in records],
    }


def write_summary(out: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json` atomically. Raises `OSError`."""
    write_durably(out / "summary.json", (json.dumps(summary, indent=2) + "\n").encode(), mode=0o666)


class StepLog:
    """`steps.jsonl`, with one line per step, written as soon as the step has finished.

    A file that cannot be opened is an error before the first step. If a later write fails, for example because the
    drive is full, training continues without the log after one warning.
    """

    def __init__(self, file: Path, first_step: int) -> None:
        """Open the file and remove all lines from `first_step` on.

        A run that was killed may have logged steps after its last checkpoint, which will run again, and may have left
        an incomplete line.

        Raises:
            ConfigError: If the file cannot be written.
        """
        self._lost = False  # set once a write has failed
        try:
            self._descriptor = _open_log(file)
            os.ftruncate(self._descriptor, _bytes_before(file, first_step))
        except OSError as error:
            raise _unwritable(file, error) from error

    def write(self, row: dict[str, Any]) -> None:
        line = (json.dumps(row) + "\n").encode()
        try:
            if not self._lost and os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._lost = True
            _log.warning("steps.jsonl is missing steps from %s on: %s", row.get("step"), error.strerror)

    def close(self) -> None:
        os.close(self._descriptor)


def claim(out: Path, log: str, *, resumes: bool) -> ExitStack:
    """Reserve the existing `--out` folder for this run. The result is a context manager that releases it on exit.

    Args:
        out: Existing folder.
        log: File name of the `StepLog` in the folder.
        resumes: Whether the run may continue an existing log.

    Raises:
        ConfigError: If another run writes to the folder, the folder has the log of an earlier run, or the log cannot
            be written.
    """
    with ExitStack() as held:
        held.callback(os.close, _locked(out))
        _check_log(out / log, resumes=resumes)
        return held.pop_all()


def _locked(out: Path) -> int:
    """Return a descriptor of the folder, locked exclusively. Raises `ConfigError`."""
    try:
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unwritable(out, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(f"another run is writing to --out {str(out)!r}; choose another folder") from error
    except OSError:  # some file systems do not support locks
        pass
    return descriptor


def _check_log(file: Path, *, resumes: bool) -> None:
    """Check that `steps.jsonl` can be written, and that an existing one belongs to the run that is resumed."""
    if not os.path.lexists(file):
        return
    try:
        descriptor = _open_log(file)
        length = os.fstat(descriptor).st_size
        os.close(descriptor)
    except OSError as error:
        raise _unwritable(file, error) from error
    if length and not resumes:
        raise ConfigError(f"{file} belongs to an earlier run; choose another --out, or continue that run with --resume")


def _unwritable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{file} cannot be written: {error.strerror}; choose another --out")


def _bytes_before(file: Path, step: int) -> int:
    """Return the length of a log up to its first line from `step` on, or up to an incomplete line."""
    length = 0
    with open(file, "rb") as lines:
        for line in lines if step > 1 else ():
            try:
                found = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                found = 0  # not written by this class; keep the line
            if not line.endswith(b"\n") or (isinstance(found, int) and found >= step):
                break
            length += len(line)
    return length


def _open_log(file: Path) -> int:
    """Return a descriptor of a regular file to append to, without following links or blocking on pipes."""
    try:
        return os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return open_regular(file, os.O_WRONLY | os.O_APPEND)


def summary_table(summary: dict[str, Any]) -> Table:
    """Return the table that is printed at the end of a run."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(summary):
        table.add_row(name, value)
    return table


def result_lines(summary: dict[str, Any]) -> list[str]:
    """Return the remaining state of a run and the commands that use it, as unwrapped lines that can be copied."""
    last, checkpointed, commands = summary["last_step"], summary["checkpointed_step"], summary["next"]
    if not commands:
        return ["no state was kept on NVMe (--save_strategy no)"]
    lost = f"; later steps up to {last} are not included" if checkpointed != last else ""
    return [
        f"step {checkpointed} of run {summary['run_id']} is checkpointed in {', '.join(summary['nvme_paths'])}{lost}",
        f"to export:       {commands['export']}",
        f"to resume:       {commands['resume']}",
        f"to free {format_size(summary['stored_bytes'])}: {commands['free']}",
    ]


def _rows(s: dict[str, Any]) -> list[tuple[str, str]]:
    losses, seconds = s["losses"], s["step_seconds"]
    state, host_cache, outside = s["state_bytes"], s["host_memory_bytes"], s["process_memory_bytes_outside_host_cache"]
    traffic = s["nvme_read_bytes_per_step"] + s["nvme_written_bytes_per_step"]
    parts = {part: s[f"{part}_seconds_per_step"] for part in PARTS}
    shares = {part.replace("_", " "): spent / sum(parts.values()) for part, spent in parts.items()}
    ended = [("ended", "early, by a signal")] if s["interrupted"] else []
    retries = s["nvme_retries_total"]
    retried = [("retries", f"{retries} transfers were retried; check the drives")] if retries else []
    found = s["eval_losses"]
    shown = [f"{loss:.4f} at step {step}" for step, loss in (found if len(found) < 2 else (found[0], found[-1]))]
    held_out = [("evaluation loss", ", ".join(shown))] if shown else []
    micro = s["micro_batches"]
    batch = [("batch", f"{s['tokens_per_step']:.0f} tokens, {micro} micro-batches per rank")] if micro > 1 else []
    return [
        *ended,
        ("loss", ", ".join(f"{loss:.4f} at step {step}" for step, loss in dict([losses[0], losses[-1]]).items()))
        if losses
        else ("loss", "not logged"),
        *held_out,
        *batch,
        ("step", f"{format_number(seconds)} s, {short(s['tokens_per_second'])} tokens/s"),
        (
            "time per step",
            ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share >= 0.005),
        ),
        ("updates", f"{s['update_schedule']}, on the {s['update_device']}"),
        ("state on NVMe", f"{format_size(state)} for {short(s['parameters'])} parameters"),
        ("host cache", format_size(host_cache) + _share(host_cache, state)),
        ("peak memory", f"{format_size(s['peak_rss_bytes'])}, {format_size(outside)} outside the host cache"),
        ("read per step", _moved(s, "read", seconds)),
        ("written per step", _moved(s, "written", seconds)),
        *_plan(s),
        ("bytes/parameter", f"{format_number(traffic / s['parameters'])} per step"),
        *retried,
    ]  # fmt: skip


def _share(host_cache: float, state: float) -> str:
    if not state:
        return ""
    return f" ({host_cache / state:.0%} of the state)" if host_cache < state else " (holds the whole state: no paging)"


def _plan(s: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the planned time per step, or no row if the run has no steady steps."""
    bandwidth, seconds = s["nvme_bandwidth_bytes_per_second"], s["predicted_step_seconds"]
    if not seconds or s["steps"] <= WARM_STEPS:
        return []
    alone = s["predicted_transfer_seconds_per_step"]
    planned = f"{format_number(seconds)} s; transfers alone {format_number(alone)} s at {rate(bandwidth)}"
    return [("planned step", planned)]


def _moved(s: dict[str, Any], direction: str, seconds: float) -> str:
    moved, predicted = s[f"nvme_{direction}_bytes_per_step"], s[f"predicted_{direction}_bytes_per_step"]
    planned = f", {moved / predicted:.1%} of the plan" if predicted and s["steps"] > WARM_STEPS else ""
    return f"{format_size(moved)} at {rate(moved / seconds)}{planned}"
