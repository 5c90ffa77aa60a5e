"""Results of a run: `summary.json` and the final table."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from infinity.checkpoint.durable import write_durably
from infinity.errors import ConfigError
from infinity.telemetry.ledger import StepRecord
from infinity.telemetry.metrics import PARTS
from infinity.units import format_number, format_size
from infinity.untrusted_files import open_regular
from infinity_tools.measure import WARM_STEPS, RankReport, steady
from infinity_tools.progress import rate, short

_log = logging.getLogger("infinity")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run that are not counted per step."""

    run_id: str
    """Id of the run, which is also the name of its folders."""
    model: str
    """Value of `--model`."""
    dtype: str
    """Compute dtype."""
    parameters: int
    """Number of parameters of the whole model."""
    world_size: int
    """Number of ranks."""
    first_step: int
    """First step of this process, counted from the first step of the run."""
    last_step: int
    """Last step of this process."""
    tokens_per_step: float
    """Mean number of tokens per step, summed over all ranks. Padding does not count."""
    micro_batches: int
    """Micro-batches per rank per step."""
    losses: tuple[tuple[int, float], ...]
    """Steps, and the logged loss of each."""
    io_engine: str
    """I/O engine."""
    update_schedule: str
    """Update schedule."""
    update_device: str
    """Type of the device that runs the updates."""
    nvme_paths: tuple[str, ...]
    """Folders on NVMe."""
    interrupted: bool
    """``True`` if a signal ended the run early."""
    checkpointed_step: int | None
    """Step of the newest checkpoint, or None without a checkpoint."""
    recipe: Mapping[str, Any]
    """Recipe of the run."""
    eval_losses: tuple[tuple[int, float], ...]
    """Steps, and the evaluation loss after each."""


def summarize(facts: RunFacts, reports: Sequence[RankReport]) -> dict[str, Any]:
    """Return the content of `summary.json`.

    Bytes are sums over the ranks of this node, and seconds are means over them. Figures per step are means over the
    steady steps that have records. A long run only has records of its last steps. The first two steps are left out,
    unless there are no others.

    Args:
        facts: Facts about the run.
        reports: Reports of the ranks of this node.
    """
    records = reports[0].records

    def total(of: Callable[[RankReport], int]) -> int:
        return sum(of(report) for report in reports)

    def per_step(of: Callable[[StepRecord], float]) -> float:
        return fmean(sum(map(of, together)) for together in zip(*(steady(r.records) for r in reports), strict=True))

    def seconds(of: Callable[[StepRecord], float]) -> float:
        return per_step(of) / len(reports)

    def kernel(index: int) -> float | None:
        counts = [count for report in reports for count in report.kernel[-len(steady(records)) :]]
        known = [count[index] for count in counts if count is not None]
        return sum(known) / (len(counts) / len(reports)) if len(known) == len(counts) else None

    step_seconds = median(record.seconds for record in steady(records))
    host_cache, peak = total(lambda r: r.host_cache_bytes), total(lambda r: r.peak_rss_bytes)
    return {
        **asdict(facts),
        "steps": facts.last_step - facts.first_step + 1,
        "step_seconds": step_seconds,
        "tokens_per_second": facts.tokens_per_step / step_seconds,
        "state_bytes": total(lambda r: r.state_bytes),
        "stored_bytes": total(lambda r: r.stored_bytes),
        "host_memory_bytes": host_cache,
        "peak_rss_bytes": peak,
        "process_memory_bytes_outside_host_cache": max(0, peak - host_cache),
        "nvme_read_bytes_per_step": per_step(lambda r: r.read_bytes),
        "nvme_written_bytes_per_step": per_step(lambda r: r.written_bytes),
        "predicted_read_bytes_per_step": total(lambda r: r.predicted_read_bytes),
        "predicted_written_bytes_per_step": total(lambda r: r.predicted_written_bytes),
        "nvme_bandwidth_bytes_per_second": sum(r.bandwidth for r in reports),
        "predicted_transfer_seconds_per_step": max(
            r.predicted_bytes / r.bandwidth if r.bandwidth else 0.0 for r in reports
        ),
        "predicted_step_seconds": max(r.predicted_seconds for r in reports),
        "kernel_read_bytes_per_step": kernel(0),
        "kernel_written_bytes_per_step": kernel(1),
        "nvme_read_bytes_total": total(lambda r: r.read_bytes_total),
        "nvme_written_bytes_total": total(lambda r: r.written_bytes_total),
        "nvme_retries_total": total(lambda r: r.retries_total),
        "transfer_seconds_per_step": seconds(lambda r: r.transfer_seconds),
        "stall_seconds_per_step": seconds(lambda r: r.stall_seconds),
        **{f"{part}_seconds_per_step": seconds(attrgetter(f"{part}_seconds")) for part in PARTS},
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

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


class Claim:
    """Exclusive use of the `--out` folder by one run. A context manager that releases the folder on exit."""

    def __init__(self, out: Path, log: str, *, resumes: bool) -> None:
        """Claim the folder.

        Args:
            out: Existing folder.
            log: File name of the `StepLog` in the folder.
            resumes: Whether the run may continue an existing log.

        Raises:
            ConfigError: If another run writes to the folder, the folder has the log of an earlier run, or the log
                cannot be written.
        """
        self._descriptor = _locked(out)
        try:
            _check_log(out / log, resumes=resumes)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


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
