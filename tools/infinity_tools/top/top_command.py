"""The command `infinity top`."""

from __future__ import annotations

import json as json_format
import os
import sys
import time
from dataclasses import asdict, replace
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.live import Live

from infinity.cli_errors import Version, finite
from infinity.errors import ConfigError
from infinity.telemetry.trees import plain
from infinity_tools.shared_options import Runtime, runtime_folder
from infinity_tools.top.keyboard import Terminal
from infinity_tools.top.minute import Minute
from infinity_tools.top.reading import Reader, word
from infinity_tools.top.view import view
from infinity_tools.top.view_state import State

_LOOKS: Final = 4
"""Number of snapshots taken during the interval with ``--once``, because step figures require two observed steps."""
_ANY_HEIGHT: Final = 100_000
_REDRAW_SECONDS: Final = 0.5
"""Maximum time until the view fits a terminal whose size has changed."""


def top(
    interval: Annotated[float, typer.Option(min=0.1, max=3600, callback=finite, help="Seconds between updates.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Observe the node for one interval, print the result as text, and exit.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Like --once, but print only JSON.")] = False,
    run: Annotated[str, typer.Option(help="Show only runs whose id starts with this text.")] = "",
    runtime: Runtime = "",
    version: Version = False,
) -> None:
    """Monitor the runs on this node: steps, tokens, loss, step time and drives.

    Run it in a second terminal on the training node. Press **q** to quit and **?** for help. It does not affect
    training. If infinityd is running, the view includes the measured bandwidth and the wear of drives. Otherwise, all
    figures come from the stats files of the ranks.

    If standard output is not a terminal, the command prints one update and exits, as with `--once`.

    Exit status: 0 on success, 2 if an option is invalid.
    """
    folder = runtime_folder(runtime)
    if runtime and not folder.is_dir():
        raise ConfigError(f"--runtime-dir {runtime!r} is not a folder; pass the telemetry.runtime_dir of the runs")
    reader, console = Reader(folder), Console(highlight=False)
    plain_text = not console.encoding.lower().startswith("utf")
    if once or json or not _can_draw(console):
        state = _look_once(reader, run, interval)
        if json:
            typer.echo(json_format.dumps(plain({**asdict(state.snapshot), "runs": state.runs})))
        else:
            text = view(replace(state, ascii=plain_text), console.width, _ANY_HEIGHT)
            console.print(text, soft_wrap=True)
        return
    _watch(reader, console, run, interval, ascii=plain_text)


def _can_draw(console: Console) -> bool:
    return sys.stdin.isatty() and console.is_terminal and sys.stdout.isatty() and not console.is_dumb_terminal


def _look_once(reader: Reader, run: str, interval: float) -> State:
    """Observe the node for one interval and return its state. Raises `ConfigError` if no run id starts with `run`."""
    snapshot, minute = reader.read(), Minute()
    for _ in range(_LOOKS):
        time.sleep(interval / _LOOKS)
        snapshot = reader.read()
        curves = minute.add(snapshot)
    state = State(snapshot=snapshot, curves=curves, only=run, interval=interval, interactive=False)
    if run and not state.runs:
        known = ", ".join(word(one, "id") for one in snapshot.runs) or "none"
        raise ConfigError(f"--run {run!r} does not match any run on this node; available runs: {known}")
    return state


def _watch(reader: Reader, console: Console, run: str, interval: float, *, ascii: bool) -> None:
    """Draw in full-screen mode until a key or a signal ends it."""
    minute = Minute()
    state = State(snapshot=reader.read(), only=run, interval=interval, ascii=ascii)
    due = time.monotonic()  # time of the next update
    with Terminal(sys.stdin.fileno()) as terminal, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            now = time.monotonic()
            if now >= due and not state.paused:
                snapshot = reader.read()
                state = replace(state, snapshot=snapshot, curves=minute.add(snapshot))
                due = max(due, now - interval) + interval
            console.size = os.get_terminal_size(sys.stdout.fileno())  # not COLUMNS and LINES, which a resize leaves
            live.update(view(state, console.width, console.height), refresh=True)
            wait = _REDRAW_SECONDS if state.paused else due - time.monotonic()
            key = terminal.key(min(wait, _REDRAW_SECONDS))
            if key == "q":
                return
            if key == "suspend":
                live.stop()
                terminal.suspend()
                live.start()
            elif key is not None:
                state = state.pressed(key)
