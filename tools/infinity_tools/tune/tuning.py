"""A run of `infinity tune`, from option checks to output files."""

from __future__ import annotations

import os
import platform
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.config import Config, check_config
from infinity.errors import ConfigError, InfinityError
from infinity.memory.limits import default_host_cache
from infinity.units import MIB, align_down, format_size
from infinity.untrusted_files import why_not_written
from infinity_tools.output import check_out, make_out, without_leftovers, write_out
from infinity_tools.progress import short
from infinity_tools.signals import StopRequest
from infinity_tools.toml import settings_toml
from infinity_tools.trial_folders import trial_folders
from infinity_tools.tune.outcome import Bounds, Outcome, Result, Role, Trial
from infinity_tools.tune.progress_view import View
from infinity_tools.tune.search import Search, SearchFailed
from infinity_tools.tune.search_space import ALLOWED, Candidate, Limits, candidate_of, changes, describe, make_space
from infinity_tools.tune.trial import Workload
from infinity_tools.tune.trial_worker import Worker
from infinity_tools.tune.tune_report import summarize, write_results

FILES = ("infinity.toml", "tune.json", "tune.png")
"""Output files."""
SETTINGS = FILES[0]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a search, checked as far as possible without a model."""

    workload: Workload
    settings: Config
    """Initial settings, including the folders and the maximum size of the host cache."""
    limits: Limits
    minutes: float
    repeats: int

    @property
    def start(self) -> dict[str, Any]:
        """Initial values of the tuned settings."""
        return candidate_of(self.settings, self.limits.host_bytes)


def make_plan(workload: Workload, settings: Config, allow_format: str, *, minutes: float, repeats: int) -> Plan:
    """Return the plan of a search. Raises `ConfigError` if an option or a setting is invalid."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: infinity tune trains on a single rank in its own process; start "
            "it without torchrun"
        )
    if workload.dtype not in ("auto", "bf16", "fp32"):
        raise ConfigError(f"--dtype {workload.dtype!r} is not one of auto, bf16, fp32")
    if allow_format not in ALLOWED:
        raise ConfigError(f"--allow-format {allow_format!r} is not one of {', '.join(ALLOWED)}")
    norm = workload.max_grad_norm
    if norm is not None and not norm > 0:
        raise ConfigError(f"--max-grad-norm {norm:g} must be greater than 0; omit it to train without clipping")
    if norm is not None and settings.update.schedule == "in_backward":
        raise ConfigError(
            'update.schedule = "in_backward" updates before the global norm is known, which --max-grad-norm requires; '
            "remove one of them"
        )
    if not settings.storage.paths:
        raise ConfigError("--nvme is missing; pass a folder on the drive that the training run will use")
    if workload.batch_tokens % workload.seq:
        near = max(1, round(workload.batch_tokens / workload.seq)) * workload.seq
        raise ConfigError(
            f"--batch-tokens {workload.batch_tokens} is not a multiple of --seq {workload.seq}; try {near}"
        )
    host = settings.memory.host_bytes or align_down(default_host_cache(1), MIB)
    settings = settings.with_values(**{"memory.host_bytes": host})
    check_config(settings)
    paths = [os.path.abspath(path) for path in settings.storage.paths]  # the file must work from any folder
    settings = settings.with_values(**{"storage.paths": paths})
    limits = Limits(
        host_bytes=host, cores=len(os.sched_getaffinity(0)), formats=allow_format, clipping=norm is not None
    )
    return Plan(workload=workload, settings=settings, limits=limits, minutes=minutes, repeats=repeats)


class Tuning:
    """A search with its resources: folders, trial process and progress display."""

    def __init__(self, plan: Plan, out: Path, console: Console, *, json: bool) -> None:
        self._plan, self._out, self._console, self._json = plan, out, console, json

    def run(self) -> dict[str, Any]:
        """Search, write the results, and return the contents of tune.json.

        Raises:
            InfinityError: if an option or a setting is invalid, or the search failed.
            SystemExit: on a signal. If a candidate was faster than the start, its settings are written first.
        """
        plan, began = self._plan, time.monotonic()
        with ExitStack() as stack:
            made = [folder for folder in (self._out, *self._out.parents) if not os.path.lexists(folder)]
            stack.enter_context(without_leftovers(made))
            check_out(self._out)
            make_out(self._out)
            for name in FILES:
                if why := why_not_written(self._out / name):
                    raise ConfigError(
                        f"--out {str(self._out)!r}: {name} cannot be written, because {why}; choose another folder"
                    )
            stop = stack.enter_context(
                StopRequest("" if self._json else "stopping; press Ctrl-C again to stop immediately")
            )
            stop.patient = True  # polled while a trial runs, because an exception raised anywhere might get lost
            view = stack.enter_context(View(self._console, plan.start, minutes=plan.minutes, silent=self._json))
            folders = stack.enter_context(trial_folders(plan.settings.storage.paths, plan.settings.telemetry))
            worker = stack.enter_context(Worker(plan.workload, plan.settings, folders, lambda: stop.received))
            worker.start()
            self._say_workload(view, worker)
            result, trials, seconds = self._search(view, worker, began)
        facts = {
            **self._about(worker),
            "minutes": plan.minutes,
            "start_is_defaults": plan.start == candidate_of(Config(), plan.limits.host_bytes),
        }
        summary = summarize(result, trials, facts, seconds)
        found = plan.settings.with_values(**result.best)
        write_results(self._out, found, self._heading(summary), summary, trials)
        return summary

    def _search(self, view: View, worker: Worker, began: float) -> tuple[Result, list[Trial], float]:
        plan = self._plan

        def clock() -> float:
            return time.monotonic() - began

        def measure(candidate: Candidate, role: Role, bounds: Bounds) -> Outcome:
            view.trying(role, candidate, search.best)
            return worker.measure(candidate, bounds)

        view.begin(clock)
        search = Search(
            measure,
            lambda effective: make_space(plan.start, plan.limits, effective),
            clock,
            seconds=60 * plan.minutes,
            repeats=plan.repeats,
            on_trial=view.tried,
            on_best=view.improved,
        )
        try:
            return search.run(), search.trials, clock()
        except SearchFailed as error:
            reason = f"cannot train with the initial settings: {error.outcome.reason}"
            raise (ConfigError if error.outcome.usage else InfinityError)(reason) from None
        except SystemExit:
            kept = self._keep(search.best)
            with suppress(OSError):  # stderr has been closed
                view.say(f"stopped: {kept}")
            raise

    def _say_workload(self, view: View, worker: Worker) -> None:
        plan, facts = self._plan, worker.facts
        view.say(
            f"{facts['model']}, {facts['dtype']}, {short(facts['parameters'])} parameters, "
            f"{plan.workload.batch_tokens} tokens per step, on {facts['device']}\n"
            f"host cache up to {format_size(plan.limits.host_bytes)}, folders {', '.join(plan.settings.storage.paths)}"
        )

    def _about(self, worker: Worker) -> dict[str, Any]:
        """Return the workload and the machine, named like the options."""
        plan = self._plan
        return {
            **asdict(plan.workload),
            **worker.facts,
            "nvme": list(plan.settings.storage.paths),
            "host_memory": plan.limits.host_bytes,
            "allow_format": plan.limits.formats,
            "activations": plan.settings.activations.tier,
            "machine": f"{platform.node()}, {os.cpu_count()} cores, {platform.machine()}",
        }

    def _heading(self, summary: dict[str, Any]) -> list[str]:
        gain = summary["gain"]
        how = f"{gain['over_start']:.2f} times as fast as the start" if summary["faster"] else "no candidate was faster"
        return [
            f"Found by infinity tune: {how}.",
            f"{summary['model']}, {summary['dtype']}, {summary['batch_tokens']} tokens per step, {summary['device']}.",
        ]

    def _keep(self, best: Candidate) -> str:
        """Write the best settings of a stopped search, unless no candidate was faster. Return a description.

        The other files of an earlier search are removed after that, because they do not describe these settings.
        """
        if best == self._plan.start:
            return "no candidate was faster yet"
        found = self._plan.settings.with_values(**best)
        heading = ["Found by infinity tune, which was stopped before the final comparison had finished."]
        write_out(self._out, {SETTINGS: settings_toml(found, heading)}, {})
        for name in FILES[1:]:
            (self._out / name).unlink(missing_ok=True)
        return f"wrote {self._out / SETTINGS} with {describe(changes(best, self._plan.start))}"
