"""Results of a search: `infinity.toml`, `tune.json`, `tune.png` and the summary on the terminal."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.config import Config
from infinity.units import format_number, format_size
from infinity_tools.output import write_out
from infinity_tools.progress import short
from infinity_tools.toml import settings_toml
from infinity_tools.tune.outcome import Result, Trial
from infinity_tools.tune.search_space import changes, describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def summarize(result: Result, trials: Sequence[Trial], facts: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the contents of tune.json."""
    kinds = [trial.outcome.kind for trial in trials]
    return {
        **facts,
        "faster": result.is_faster,
        "gain": {
            "over_start": result.gain if result.is_faster else 1.0,
            "min": min(result.gains, default=1.0) if result.is_faster else 1.0,
            "max": max(result.gains, default=1.0) if result.is_faster else 1.0,
            "rounds": len(result.gains),
            "over_worst": result.worst_ratio,
        },
        "noise": result.noise,
        "step_seconds": {"start": result.start_seconds, "best": result.step_seconds},
        "start": result.start,
        "best": result.best,
        "changes": changes(result.best, result.start),
        "seconds": seconds,
        "candidates": result.tried,
        "trials": {kind: kinds.count(kind) for kind in ("measured", "slow", "skipped", "failed")},
        "failures": {
            describe(trial.changes, "the start"): trial.outcome.reason
            for trial in trials
            if trial.outcome.kind == "failed"
        },
        "written_bytes": sum(trial.outcome.total_written for trial in trials),
        "effects": list(effects(trials)),
    }


def effects(trials: Sequence[Trial]) -> Iterator[dict[str, Any]]:
    """Yield the effect of each value in single changes: the median of the step times relative to the best candidate."""
    found: dict[tuple[str, Any], list[float]] = {}
    for trial in trials:
        single = trial.role in ("change", "again") and len(trial.changes) == 1
        if single and trial.ratio is not None and trial.outcome.counts:
            found.setdefault(next(iter(trial.changes.items())), []).append(trial.ratio)
    for (name, value), ratios in sorted(found.items(), key=lambda row: row[0][0]):
        yield {"setting": name, "value": value, "ratio": statistics.median(ratios), "trials": len(ratios)}


def result_lines(summary: Mapping[str, Any], out: Path) -> list[str]:
    """Return the lines of the summary."""
    gain, trials = summary["gain"], summary["trials"]
    before, after = summary["step_seconds"]["start"], summary["step_seconds"]["best"]
    start, verb = ("the defaults", "are") if summary["start_is_defaults"] else ("the start", "is")
    if summary["faster"]:
        rounds = f"{gain['rounds']} round{'s' if gain['rounds'] > 1 else ''}"
        lines = [
            f"{gain['over_start']:.2f} times as fast as {start} ({gain['min']:.2f} to {gain['max']:.2f} in {rounds}): "
            f"{format_number(before)} → {format_number(after)} s per step",
            f"with {describe(summary['changes'])}",
        ]
    else:
        noise = f"± {summary['noise']:.1%}"
        now = format_number(before)
        lines = [f"no gain: {start} {verb} as fast as any other candidate ({noise}), {now} s per step"]
    lines += [
        f"the slowest of {summary['candidates']} combinations takes {gain['over_worst']:.2f} times as long",
        f"{sum(trials.values())} trials in {summary['seconds']:.0f} s wrote "
        f"{format_size(summary['written_bytes'])} to the drives",
    ]
    if trials["failed"]:
        failed = f"{trials['failed']} trial{'s' * (trials['failed'] > 1)}"
        lines.append(f"{failed} failed; see {out / 'tune.json'} for the reasons")
    return lines


def write_results(
    out: Path, settings: Config, heading: Sequence[str], summary: dict[str, Any], trials: Sequence[Trial]
) -> None:
    """Write infinity.toml, tune.json and tune.png. Raises `ConfigError` if they cannot be written."""
    trial_records = [asdict(trial) for trial in trials]
    for row in trial_records:
        row["outcome"] = {key: row["outcome"][key] for key in ("kind", "seconds", "wall", "reason")}
    texts = {
        "infinity.toml": settings_toml(settings, heading),
        "tune.json": json.dumps({**summary, "trial_records": trial_records}, indent=1) + "\n",
    }
    write_out(out, texts, {"tune.png": _figure(summary, trials)})


def _figure(summary: Mapping[str, Any], trials: Sequence[Trial]) -> Figure:
    """Draw the best candidate over time and the effect of each value."""
    from matplotlib.figure import Figure

    rows = summary["effects"]
    figure = Figure(figsize=(12, max(4.2, 1.2 + 0.24 * len(rows))), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_time(left, trials)
    _draw_effects(right, rows, summary["noise"])
    figure.suptitle(f"{summary['model']} · {short(summary['parameters'])} parameters · {summary['device']}")
    return figure


def _draw_time(axes: Axes, trials: Sequence[Trial]) -> None:
    counted = [trial for trial in trials if trial.outcome.counts and trial.relative is not None]
    times, ratios = [trial.at for trial in counted], [trial.relative or 0.0 for trial in counted]
    axes.plot(times, ratios, "o", color="#bbbbbb", markersize=4, label="trial")
    bests, best = [], 1.0
    for trial in counted:
        best = min(best, trial.best_relative)
        bests.append(best)
    axes.step(times, bests, where="post", color="#4477aa", label="best so far")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("search time (s)")
    axes.set_ylabel("step time relative to the start")
    axes.set_title("Best candidate")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_effects(axes: Axes, rows: Sequence[Mapping[str, Any]], noise: float) -> None:
    names = [describe({row["setting"]: row["value"]}) for row in rows]
    ratios = [row["ratio"] for row in rows]
    colors = ["#228833" if ratio < 1 - noise else "#ee6677" if ratio > 1 + noise else "#bbbbbb" for ratio in ratios]
    places = range(len(rows))
    axes.axvspan(1 - noise, 1 + noise, color="#000000", alpha=0.08, linewidth=0)
    axes.axvline(1, color="#888888", linewidth=1)
    axes.scatter(ratios, places, color=colors, zorder=3)
    axes.hlines(places, 1, ratios, color=colors)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("step time relative to the best candidate at that time (grey: noise)")
    axes.set_title("Effect of each value")
    axes.grid(alpha=0.3, axis="x")
