"""Progress of a training run: a progress bar on a terminal, or occasional lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TransferSpeedColumn

from infinity.units import format_number

_LINE_SECONDS = 10.0
_RECENT_STEPS = 8
_BAR, _LEAST_BAR = 30, 6  # columns


@dataclass(frozen=True, kw_only=True)
class StepView:
    """Displayed figures of a step. Bytes are summed over all ranks."""

    step: int
    loss: float
    """Mean loss over the tokens of the step."""
    seconds: float
    """Seconds since the end of the previous step."""
    tokens: int
    """Tokens of the step, summed over all ranks."""
    read_bytes: float
    """Bytes read from NVMe."""
    written_bytes: float
    """Bytes written to NVMe."""
    stall_share: float
    """Fraction of the step during which a rank waited for pages, from 0 to 1, averaged over the ranks."""

    def figures(self, left: str, room: int) -> str:
        """Return the loss and the time left, followed by the most detailed rates that fit in `room` columns."""
        first = f"loss {self.loss:.3f}  {left} left"
        fitting = (text for text in (self.rates, self.short_rates, self.speed) if len(first) + 2 + len(text) <= room)
        return "  ".join([first, *list(fitting)[:1]])

    @property
    def rates(self) -> str:
        """Tokens per second, NVMe throughput and stall fraction."""
        read, written = rate(self.read_bytes / self.seconds), rate(self.written_bytes / self.seconds)
        return f"{self.speed}  read {read}  write {written}  stall {self.stall_share:.0%}"

    @property
    def short_rates(self) -> str:
        """Shorter form of `rates`, for narrow terminals."""
        read, written = self.read_bytes / self.seconds / 1e9, self.written_bytes / self.seconds / 1e9
        return f"{self.speed}  r/w {read:.2f}/{written:.2f} GB/s  stall {self.stall_share:.0%}"

    @property
    def speed(self) -> str:
        """Tokens per second."""
        return f"{short(self.tokens / self.seconds)} tok/s"


class View:
    """Display of a run, as a context manager that restores the terminal on exit. This one shows nothing."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        """Print a permanent line."""

    def doing(self, text: str) -> None:
        """Show the activity before the first step."""

    def begin(self, done: int, total: int) -> None:
        """Start showing steps."""

    def stepped(self, view: StepView) -> None:
        """Show a finished step."""

    def evaluated(self, step: int, loss: float) -> None:
        """Show the evaluation loss after a step."""


def open_view(console: Console, *, silent: bool) -> View:
    """Return a view: silent, a bar on a terminal, or lines elsewhere."""
    if silent:
        return View()
    return _Bar(console) if console.is_terminal else _Lines(console)


class _Lines(View):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = 0  # last step of the run
        self._first = True  # whether no step has been shown yet
        self._last = 0.0  # time.monotonic() when the last line was printed

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def doing(self, text: str) -> None:
        self.say(text)

    def begin(self, done: int, total: int) -> None:
        self._total = total

    def stepped(self, view: StepView) -> None:
        now = time.monotonic()
        if self._first or view.step == self._total or now - self._last >= _LINE_SECONDS:
            self._first, self._last = False, now
            self.say(f"step {view.step}/{self._total}  loss {view.loss:.4f}  {view.rates}")

    def evaluated(self, step: int, loss: float) -> None:
        self.say(f"step {step}/{self._total}  evaluation loss {loss:.4f}")


class _Figures(RegexHighlighter):
    highlights: ClassVar[list[str]] = [r"loss (?P<bold>\S+)", r"(?P<cyan>[\d:]+ left)"]


class _Bar(View):
    """Progress on one line that always fits. On narrow terminals the bar shrinks first, then the rates are dropped."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # Shown before the first step.
        self._waiting = Progress(
            SpinnerColumn(), TextColumn("{task.description}", markup=False), console=console, transient=True
        )
        self._steps = Progress(
            SpinnerColumn(),
            TextColumn("step [bold]{task.completed:.0f}[/]/{task.total:.0f}"),
            BarColumn(bar_width=_BAR),  # the only column that shrinks
            TextColumn("{task.fields[figures]}", markup=False, highlighter=_Figures()),
            console=console,
        )
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)  # seconds of the last steps, for the time left
        self._total = 0  # last step of the run
        self._active: Progress | None = None  # the progress display on the screen
        self._task = TaskID(0)  # task of that display

    def __exit__(self, *_: object) -> None:
        if self._active is not None:
            self._active.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def doing(self, text: str) -> None:
        if self._active is None:
            self._active = self._waiting
            self._active.start()
            self._task = self._waiting.add_task(text, total=None)
        self._active.update(self._task, description=text)

    def begin(self, done: int, total: int) -> None:
        if self._active is not None:
            self._active.stop()
        self._active, self._total = self._steps, total
        self._task = self._steps.add_task("", total=total, completed=done, figures="first step")
        self._steps.start()

    def stepped(self, view: StepView) -> None:
        self._recent.append(view.seconds)
        left = (self._total - view.step) * sum(self._recent) / len(self._recent)
        beside = len(f"  step {view.step}/{self._total}  ") + _LEAST_BAR
        figures = view.figures(_clock(left), self._console.width - beside)
        self._steps.update(self._task, completed=view.step, figures=figures)

    def evaluated(self, step: int, loss: float) -> None:
        self.say(f"step {step}  evaluation loss {loss:.4f}")


def short(number: float) -> str:
    """Return a number with about three digits: ``85``, ``1.24k``, ``3.1M``."""
    for suffix in ("", "k", "M", "G"):
        if abs(number) < 999.5:
            return f"{number:.0f}{suffix}" if not suffix or number >= 100 else f"{number:.3g}{suffix}"
        number /= 1000
    return f"{format_number(number)}T"


def rate(bytes_per_second: float) -> str:
    """Return a data rate in GB/s or MB/s, the units in which drives are specified."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.0f} MB/s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def byte_progress(label: str, *, silent: bool) -> Progress:
    """Return a progress bar on stderr, measured in bytes, that disappears when it ends."""
    return Progress(
        TextColumn(label, markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        disable=silent,
        transient=True,
    )
