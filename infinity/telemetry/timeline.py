"""The timeline of a run: what happened when, for Perfetto or chrome://tracing.

A ring of the last events in memory, written as one JSON file of the Trace Event Format when the run is closed.
Timestamps are microseconds of the node's monotonic clock, so timelines of the ranks of a node can be laid together.
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
    """A stretch of time, in seconds of `time.perf_counter`; `args` is shown with it."""

    track: str
    name: str
    start: float
    end: float
    args: dict[str, Any]


class Timeline:
    """Spans of one rank; the rank is the process of its events, a track is a thread of it.

    Args:
        file: what `write` makes; ranks above 0 put their number into the name.
        limit: how many of the latest spans are kept.
        page_name: readable name of a page.
    """

    def __init__(self, file: Path, *, rank: int, limit: int, page_name: Callable[[int], str]) -> None:
        self.file = file if rank == 0 else file.with_suffix(f".rank{rank}{file.suffix}")
        self._rank, self._page_name = rank, page_name
        self._spans: deque[_Span] = deque(maxlen=limit)
        """The latest spans, in the order in which they ended. Any thread appends, which is one operation of a deque."""
        self._seen = 0
        """How many there were. Without a lock: two threads at once may lose one, and `write` says a lower "dropped"."""

    def span(self, track: str, name: str, what: str, start: float, end: float) -> None:
        """Note a stretch of time of the training thread, in seconds of `time.perf_counter`."""
        self._add(_Span(track, name, start, end, {"of": what} if what else {}))

    def stalled(self, cause: str, page: int, seconds: float) -> None:
        """Note a wait of the training thread that ends now; `page` is what it needed, or -1."""
        now = time.perf_counter()
        args = {"page": self._page_name(page)} if page >= 0 else {}
        self._add(_Span("thread", f"{cause} stall", now - seconds, now, args))

    def moved(self, op: str, device: int, page: int, nbytes: int, start: float, end: float) -> None:
        """Note a transfer of a page. From any thread."""
        name = self._page_name(page)
        self._add(_Span(f"nvme{device} {op}", name, start, end, {"page": name, "bytes": nbytes}))

    def _add(self, span: _Span) -> None:
        self._seen += 1
        self._spans.append(span)

    def write(self) -> None:
        """Write the file; it is there completely or not at all. Raises `OSError`."""
        spans = sorted(self._spans, key=lambda span: (span.start, -span.end))
        dropped = max(0, self._seen - len(spans))
        with replacing(self.file, 0o666) as file, io.TextIOWrapper(file) as out:
            out.write(f'{{"otherData": {{"dropped": {dropped}}}, "traceEvents": [\n')
            out.write(",\n".join(map(json.dumps, self._events(spans))))
            out.write("\n]}\n")

    def _events(self, spans: list[_Span]) -> Iterator[dict[str, Any]]:
        """Yield events; transfers that overlap lie in lanes of their track, so that spans of a thread nest."""
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
