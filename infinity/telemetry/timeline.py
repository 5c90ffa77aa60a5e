"""Timeline of a run for Perfetto or chrome://tracing.

The most recent events are kept in a ring buffer and written to a JSON file in the Trace Event Format when the run is
closed. Timestamps are in microseconds of the node's monotonic clock, so the timelines of all ranks on a node can be
merged.
"""

from __future__ import annotations

import io
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from infinity.untrusted_files import replacing

_TRACKS = {"phase": "steps and phases", "thread": "training thread"}


class _Span(NamedTuple):
    """Interval in seconds of `time.perf_counter`. The trace viewer shows `args` as its details."""

    track: str
    name: str
    start: float
    end: float
    args: dict[str, Any]


class Timeline:
    """Timeline of one rank. The trace viewer shows the rank as a process and each track as a thread.

    Args:
        file: Path of the file that `write` creates. Ranks above 0 add the rank to the file name.
        rank: Rank of this process.
        limit: Maximum number of spans. The oldest spans are dropped.
        page_name: Function that returns a human-readable name for a page index.
    """

    def __init__(self, file: Path, *, rank: int, limit: int, page_name: Callable[[int], str]) -> None:
        self.file = file if rank == 0 else file.with_suffix(f".rank{rank}{file.suffix}")
        self._rank, self._page_name = rank, page_name
        self._spans: deque[_Span] = deque(maxlen=limit)
        """The most recent spans, in the order in which they ended. Appending is atomic, so it needs no lock."""
        self._seen = 0
        """Number of recorded spans. It is not protected by a lock: if two threads increment it at the same time,
        `write` reports one dropped span too few."""

    def span(self, track: str, name: str, what: str, start: float, end: float) -> None:
        """Record an interval of the training thread, from `start` to `end` in seconds of `time.perf_counter`."""
        self._add(_Span(track, name, start, end, {"of": what} if what else {}))

    def stalled(self, cause: str, page: int, seconds: float) -> None:
        """Record a wait of the training thread that ends now. `page` is the page that it waited for, or -1."""
        now = time.perf_counter()
        args = {"page": self._page_name(page)} if page >= 0 else {}
        self._add(_Span("thread", f"{cause} stall", now - seconds, now, args))

    def moved(self, op: str, device: int, page: int, nbytes: int, start: float, end: float) -> None:
        """Record the transfer of a page. Thread-safe."""
        name = self._page_name(page)
        self._add(_Span(f"nvme{device} {op}", name, start, end, {"page": name, "bytes": nbytes}))

    def _add(self, span: _Span) -> None:
        self._seen += 1
        self._spans.append(span)

    def write(self) -> None:
        """Write the file atomically. Raises `OSError` if that fails."""
        spans = sorted(self._spans, key=lambda span: (span.start, -span.end))
        dropped = max(0, self._seen - len(spans))
        with replacing(self.file, 0o666) as file, io.TextIOWrapper(file) as out:
            out.write(f'{{"otherData": {{"dropped": {dropped}}}, "traceEvents": [\n')
            out.write(",\n".join(map(json.dumps, self._events(spans))))
            out.write("\n]}\n")

    def _events(self, spans: list[_Span]) -> Iterator[dict[str, Any]]:
        """Yield the trace events. Overlapping transfers get separate threads, because spans of a thread must nest."""
        numbers: dict[tuple[str, int], int] = {}
        ends: dict[str, list[float]] = {}
        fresh = count(1)
        yield {"ph": "M", "name": "process_name", "pid": self._rank, "args": {"name": f"rank {self._rank}"}}
        for span in spans:
            lane = 0
            if span.track not in _TRACKS:
                lanes = ends.setdefault(span.track, [])
                lane = next((index for index, end in enumerate(lanes) if end <= span.start), len(lanes))
                lanes[lane : lane + 1] = [span.end]
            if (span.track, lane) not in numbers:
                number = numbers[span.track, lane] = next(fresh)
                name = _TRACKS.get(span.track, span.track) + (f" ({lane + 1})" if lane else "")
                yield {"ph": "M", "name": "thread_name", "pid": self._rank, "tid": number, "args": {"name": name}}
            start, end = round(span.start * 1e9), round(span.end * 1e9)
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.track,
                "pid": self._rank,
                "tid": numbers[span.track, lane],
                "ts": start / 1e3,
                "dur": (end - start) / 1e3,
                "args": span.args,
            }
