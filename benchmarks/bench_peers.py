"""infinity compared with other systems: the same model, tokens, precision and optimizer on the same drive.

    python benchmarks/bench_peers.py --sizes 354m --tokens 512,2048 --ranks 1 --nvme DIR
    python benchmarks/bench_peers.py --parts time,saves,limits,failures

DeepSpeed is installed into a separate environment (`--environment`), where it compiles its extensions on first use.
Each part adds its figures to `benchmarks/results/peers.json`, by system, size, ranks and tokens:

- `time`: another system and infinity (fp32) are alive at the same time and take turns of two steps, of which the
  second is timed. `over_infinity` is the median of the ratios by round. This part also reports bytes, peak memory,
  drive space, start time and the first step.
- `saves`: time and space of a save, and whether a new process resumes with the same losses.
- `limits`: the smallest memory control group in which three steps run.
- `failures`: behavior of infinity and DeepSpeed when a process is killed, a file is damaged, writes are incomplete, a
  second job uses the same folder, or a run resumes with another number of ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench_step import RESULTS, machine  # noqa: E402
from peers import environment, failures, limits  # noqa: E402
from peers.live import Live, SystemFailedError, clear, occupied  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from infinity.units import parse_size  # noqa: E402

SIZES = {"tiny": "tiny", "100m": "llama-100m", "354m": "llama-354m", "gpt2-354m": "gpt2-354m", "1b": "llama-1b"}
"""Presets of `infinity train`. The first one only tries the benchmark. DeepSpeed cannot train GPT-2 with prefetch."""
SEQ = 512
TURN = 2
PARTS = ("time", "saves", "limits", "failures")
MAKE_MODEL = """
import sys
import torch
from transformers import AutoModelForCausalLM
from infinity_tools.presets import find_model

torch.manual_seed(0)
AutoModelForCausalLM.from_config(find_model(sys.argv[1]).config).save_pretrained(sys.argv[2])
"""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A system and its settings."""

    name: str
    system: str
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (1, 2)
    memory: float = 0.0
    """Approximate memory in bytes per parameter. The system is skipped on machines with less."""

    @property
    def foreign(self) -> bool:
        """``True`` if the system requires the environment of DeepSpeed."""
        return self.system.startswith("deepspeed")


def ours(name: str, **sections: Any) -> Contestant:
    """Return infinity with the host cache size of the comparison and further settings."""
    return Contestant(name=name, system="infinity", settings={"memory": {"host_bytes": "256MiB"}, **sections})


BASE = ours("infinity fp32")
CONTESTANTS = (
    BASE,
    ours("infinity split", state={"format": "split"}),
    ours("infinity bf16-moments", state={"format": "bf16-moments"}),
    ours("infinity 8bit", state={"format": "8bit"}),
    Contestant(name="DeepSpeed, all on NVMe", system="deepspeed-nvme", memory=10),
    Contestant(name="DeepSpeed, optimizer on NVMe", system="deepspeed-optimizer-nvme", memory=10),
    Contestant(name="DeepSpeed, CPU offload", system="deepspeed-cpu", memory=26),
    Contestant(name="FSDP2 in memory", system="fsdp-memory", memory=19),
    Contestant(name="FSDP2, CPUOffloadPolicy", system="fsdp-cpu-offload", memory=20),
    Contestant(name="torch in memory", system="torch-memory", ranks=(1,), memory=18),
)


class Bench:
    """State shared by all parts: models, work folders, Python interpreters and the current result."""

    def __init__(self, options: argparse.Namespace, folder: Path, console: Console) -> None:
        self.options, self.folder, self.console = options, folder, console
        self.result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
        self._models: dict[str, Path] = {}
        self._number = 0

    def model(self, size: str) -> Path:
        """Return the folder of a model of this size with random weights, which are the same for all systems."""
        if size not in self._models:
            folder = self.folder / f"model-{size}"
            subprocess.run([sys.executable, "-W", "ignore", "-c", MAKE_MODEL, SIZES[size], str(folder)], check=True)
            self._models[size] = folder
        return self._models[size]

    @contextmanager
    def live(self, who: Contestant, size: str, ranks: int, **how: Any) -> Iterator[Live]:
        """Start a system in a temporary folder, or in `work`, which is kept."""
        self._number += 1
        work = how.pop("work", None)
        place = self.folder / f"work-{self._number}" if work is None else work
        python = self.options.environment / "bin" / "python" if who.foreign else Path(sys.executable)
        extra = {"largest_parameter": largest_parameter(self.model(size))} if who.foreign else {}
        threads = max(1, self.options.cores // ranks)
        settings = {**who.settings, **extra, **how.pop("settings", {})}
        try:
            with Live(
                who.system, python, self.model(size), place, settings, ranks=ranks, threads=threads, **how
            ) as system:
                yield system
        finally:
            if work is None:
                clear(place)

    def note(self, who: Contestant, size: str, ranks: int, tokens: int | None, found: dict[str, Any]) -> None:
        """Add figures to the result and write the result."""
        row = self.result.setdefault(who.name, {}).setdefault(size, {}).setdefault(f"{ranks} ranks", {})
        if tokens is not None:
            slow = f", drive of {self.options.drive}" if self.options.drive else ""
            row = row.setdefault(f"{tokens} tokens{slow}", {})
        row.update(found, machine=machine())
        self.options.out.write_text(json.dumps(self.result, indent=2) + "\n")

    def chosen(self, ranks: int, size: str) -> list[Contestant]:
        """Return the requested contestants for which this machine has enough memory."""
        found = []
        for who in CONTESTANTS:
            if self.options.only and not any(word in who.name for word in self.options.only):
                continue
            if ranks not in who.ranks:
                continue
            needed, there = who.memory * parameters_of(self.model(size)), memory_of_machine()
            if needed > 0.85 * there:
                said = f"needs about {needed / 2**30:.0f} GiB of memory, the machine has {there / 2**30:.0f}"
                self.note(who, size, ranks, None, {"left_out": said})
                self.console.print(f"{who.name}, {size}: {said}")
                continue
            found.append(who)
        return found


def parameters_of(model: Path) -> int:
    """Return the number of parameters of the model in a folder."""
    return sum(numels(model))


def largest_parameter(model: Path) -> int:
    """Return the size of the largest parameter in elements, rounded up because DeepSpeed's buffers must be larger."""
    return max(numels(model)) + 1024


def numels(model: Path) -> list[int]:
    """Return the number of elements of each tensor of a pretrained model, from the headers of its files."""
    from math import prod

    from safetensors import safe_open

    found = []
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found += [prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()]  # noqa: SIM118
    return found


def memory_of_machine() -> int:
    """Return the available memory in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)


def measure_time(bench: Bench, size: str, ranks: int, progress: Callable[[str], None]) -> None:
    """Measure each contestant in turns with infinity."""
    for who in bench.chosen(ranks, size):
        progress(f"{size}, {ranks} ranks: {who.name}")
        try:
            take_turns(bench, who, size, ranks)
        except SystemFailedError as error:
            bench.note(who, size, ranks, None, {"failed": str(error)[:400]})
            bench.console.print(f"{who.name}: {error}", markup=False)


def take_turns(bench: Bench, who: Contestant, size: str, ranks: int) -> None:
    """Measure one contestant, in turns with infinity unless the contestant is infinity itself."""
    options = bench.options
    with ExitStack() as stack:
        mine = stack.enter_context(bench.live(who, size, ranks))
        base = None if who is BASE else stack.enter_context(bench.live(BASE, size, ranks))
        at = 0
        first = mine.steps(0, TURN, options.tokens[0], SEQ)
        if base is not None:
            base.steps(0, TURN, options.tokens[0], SEQ)
        for tokens in options.tokens:
            rounds: list[dict[str, Any]] = []
            ratios = []
            for _ in range(options.rounds):
                at += TURN
                rounds.append(mine.steps(at, TURN, tokens, SEQ))
                if base is not None:
                    other = base.steps(at, TURN, tokens, SEQ)
                    ratios.append(rounds[-1]["steps"][-1]["seconds"] / other["steps"][-1]["seconds"])
            last = [found["steps"][-1] for found in rounds]
            parameters = mine.facts["parameters"]
            figures = {
                "step_seconds": spread([step["seconds"] for step in last]),
                **{
                    f"{phase}_seconds": statistics.median(step[phase] for step in last)
                    for phase in ("forward", "backward", "update")
                },
                "read_per_parameter": statistics.median(found["read"] for found in rounds) / TURN / parameters,
                "written_per_parameter": statistics.median(found["written"] for found in rounds) / TURN / parameters,
                "losses": [step["loss"] for step in last],
            }
            moved = figures["read_per_parameter"] + figures["written_per_parameter"]
            figures["bytes_per_parameter"] = moved
            if ratios:
                figures["over_infinity"] = spread(ratios)
            figures["first_step_seconds"] = first["steps"][0]["seconds"]
            figures["peak_rss_bytes"] = rounds[-1]["peak_rss_bytes"]
            figures["drive_bytes"] = occupied(mine.work)
            bench.note(who, size, ranks, tokens, figures)
        bench.note(who, size, ranks, None, {"start_seconds": mine.facts["ready"], "parameters": parameters})
        mine.end()
        if base is not None:
            base.end()


def measure_saves(bench: Bench, size: str, ranks: int, progress: Callable[[str], None]) -> None:
    """Save, continue training, and resume from the save in a new process."""
    for who in bench.chosen(ranks, size):
        progress(f"{size}, {ranks} ranks, save and resume: {who.name}")
        tokens, work = bench.options.tokens[0], bench.folder / "saves"
        clear(work)
        found: dict[str, Any] = {}
        try:
            with bench.live(who, size, ranks, work=work) as system:
                system.steps(0, 3, tokens, SEQ)
                found["drive_bytes"] = occupied(work)
                found["save_seconds"] = system.save()["seconds"]
                found["drive_bytes_saved"] = occupied(work)
                went_on = [step["loss"] for step in system.steps(3, 3, tokens, SEQ)["steps"]]
                found["drive_bytes_behind_a_save"] = occupied(work)
                system.end()
            with bench.live(who, size, ranks, work=work, resume=True) as system:
                found["resume_seconds"] = system.facts["ready"]
                resumed = [step["loss"] for step in system.steps(3, 3, tokens, SEQ)["steps"]]
                found |= {"resume_equal": resumed == went_on, "resume_losses": [went_on, resumed]}
                system.end()
        except SystemFailedError as error:
            found |= {"resume_equal": False, "resume_failed": str(error)[:400]}
        if who is BASE:
            with bench.live(who, size, ranks, settings={"run": {"retained_checkpoints": 0}}) as system:
                system.steps(0, 3, tokens, SEQ)
                found["drive_bytes_without_checkpoints"] = occupied(system.work)
                system.end()
        clear(work)
        bench.note(who, size, ranks, None, found)


def measure_limits(bench: Bench, size: str, ranks: int, progress: Callable[[str], None]) -> None:
    """Find the smallest memory control group of each contestant."""
    if said := limits.why_not():
        bench.console.print(f"skipping limits: {said}")
        return
    for who in bench.chosen(ranks, size):
        progress(f"{size}, {ranks} ranks, smallest memory: {who.name}")

        def trains(within: list[str], who: Contestant = who) -> bool:
            try:
                with bench.live(who, size, ranks, within=within) as system:
                    system.steps(0, 3, bench.options.tokens[0], SEQ)
                    system.end()
            except (SystemFailedError, subprocess.TimeoutExpired):
                return False
            return True

        least = limits.smallest(trains, most=memory_of_machine())
        bench.note(who, size, ranks, None, {"smallest_cgroup_bytes": least})


def measure_failures(bench: Bench, size: str, ranks: int, progress: Callable[[str], None]) -> None:
    """Inject each failure into infinity and DeepSpeed."""
    if ranks != 1:
        return
    for who in bench.chosen(1, size):
        if who is not BASE and who.system != "deepspeed-nvme":
            continue
        for name, fail in failures.FAILURES.items():
            progress(f"{size}: {name}: {who.name}")
            work = bench.folder / "failures"
            clear(work)

            def start(ranks: int = 1, who: Contestant = who, work: Path = work, **how: Any) -> Any:
                return bench.live(who, size, ranks, work=work, **how)

            try:
                said = fail(start, work, bench.options.tokens[0], SEQ)
            except SystemFailedError as error:
                said = f"cannot train: {error}"[:400]
            bench.result.setdefault("failures", {}).setdefault(name, {})[who.name] = said
            bench.options.out.write_text(json.dumps(bench.result, indent=2) + "\n")
            bench.console.print(f"{name}: {who.name}: {said}", markup=False)
        clear(bench.folder / "failures")


MEASURE = {"time": measure_time, "saves": measure_saves, "limits": measure_limits, "failures": measure_failures}


def spread(values: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(result: dict[str, Any], size: str, ranks: int, tokens: int) -> Table:
    """Return the results for one size and number of tokens."""
    columns = ("s/step", "/infinity", "B/param/step", "first step (s)", "peak memory", "smallest cgroup",
               "drive space", "same losses after resume")  # fmt: skip
    found = Table("", *columns, title=f"{size}, {ranks} ranks, {tokens} tokens per rank per step")
    for who in CONTESTANTS:
        of_size = result.get(who.name, {}).get(size, {}).get(f"{ranks} ranks", {})
        row = of_size.get(f"{tokens} tokens", {})
        said = of_size.get("left_out") or of_size.get("failed")
        if not row and said:
            found.add_row(who.name, said[:60])
        elif of_size:
            drive, equal = row.get("drive_bytes", of_size.get("drive_bytes")), of_size.get("resume_equal")
            found.add_row(
                who.name,
                cell("{:.2f}", row.get("step_seconds", {}).get("median")),
                cell("{:.2f}", row.get("over_infinity", {}).get("median")),
                cell("{:.1f}", row.get("bytes_per_parameter")),
                cell("{:.2f}", row.get("first_step_seconds")),
                cell("{:.2f} GiB", row.get("peak_rss_bytes"), 2**30),
                cell("{:.2f} GiB", of_size.get("smallest_cgroup_bytes"), 2**30),
                cell("{:.2f} GB", drive, 1e9),
                "" if equal is None else "yes" if equal else "no",
            )
    return found


def cell(form: str, value: float | None, unit: float = 1.0) -> str:
    """Return a formatted figure in its unit, or an empty string if it was not measured."""
    return "" if value is None else form.format(value / unit)


def draw(result: dict[str, Any], size: str, ranks: int, tokens: int, to: Path) -> None:
    """Plot the results for one size and number of tokens."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = {}
    for who in CONTESTANTS:
        found = result.get(who.name, {}).get(size, {}).get(f"{ranks} ranks", {}).get(f"{tokens} tokens")
        if found:
            rows[who.name] = found
    if not rows:
        return
    panels: dict[str, Callable[[dict[str, Any]], float]] = {
        "seconds per step": lambda row: row["step_seconds"]["median"],
        "NVMe traffic, bytes\nper parameter per step": lambda row: row["bytes_per_parameter"],
        "peak memory, GiB": lambda row: row["peak_rss_bytes"] / 2**30,
        "drive space, GB": lambda row: row["drive_bytes"] / 1e9,
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 0.4 * len(rows) + 1.2), sharey=True, layout="constrained")
    names = list(rows)[::-1]
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        values = [value(rows[name]) for name in names]
        colors = ["tab:blue" if name.startswith("infinity") else "tab:gray" for name in names]
        axis.barh(names, values, color=colors)
        for at, number in enumerate(values):
            axis.annotate(f"{number:.1f}", (number, at), va="center", xytext=(2, 0), textcoords="offset points")
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{size} parameters, {tokens} tokens per rank per step, ranks: {ranks}")
    figure.savefig(to, dpi=120)
    plt.close(figure)


def main() -> None:
    """Measure the requested parts; write results/peers.json and results/peers.png."""
    import os

    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    said = f"parts to measure, of {', '.join(PARTS)}; none: print and plot stored results"
    parser.add_argument("--parts", type=words, default=list(PARTS), help=said)
    parser.add_argument(
        "--sizes", type=words, default=["100m", "354m", "1b"], help=f"model sizes, of {', '.join(SIZES)}"
    )
    parser.add_argument("--tokens", type=numbers, default=[512, 2048, 8192], help="tokens per rank per step")
    parser.add_argument("--ranks", type=numbers, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5, help="measured turns of each system")
    parser.add_argument(
        "--drive", metavar="RATE", help="limit reads and writes of the drive to this rate per second, e.g. 600MB"
    )
    parser.add_argument(
        "--only", type=words, default=[], help="only measure systems whose name contains one of these words"
    )
    parser.add_argument("--nvme", type=Path, default=Path(), help="folder on the drive")
    parser.add_argument("--environment", type=Path, default=HERE.parent / ".peers", help="environment of DeepSpeed")
    parser.add_argument("--out", type=Path, default=RESULTS / "peers.json")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    options = parser.parse_args()
    options.parts = [] if options.parts == ["none"] else options.parts
    for name, known in (("parts", PARTS), ("sizes", SIZES)):
        if unknown := sorted(set(getattr(options, name)) - set(known)):
            parser.error(f"--{name}: unknown value {', '.join(unknown)}. Choose from {', '.join(known)}.")
    options.environment, options.cores = options.environment.resolve(), os.cpu_count() or 1
    console = Console(stderr=True)
    wanted = [who for who in CONTESTANTS if not options.only or any(word in who.name for word in options.only)]
    if options.parts and any(who.foreign for who in wanted):
        try:
            seconds = environment.make(options.environment)
        except environment.MissingToolError as error:
            sys.exit(str(error))
        if seconds:
            console.print(f"installed DeepSpeed in {seconds:.0f} s; it compiles its extensions on first use")
    with tempfile.TemporaryDirectory(dir=options.nvme, prefix="peers-") as folder, ExitStack() as stack:
        bench = Bench(options, Path(folder), console)
        if options.drive:
            stack.enter_context(limits.slow_drive(Path(folder), parse_size(options.drive)))
        with console.status("") as status:
            for size in options.sizes:
                for ranks in options.ranks:
                    for part in options.parts:
                        MEASURE[part](bench, size, ranks, lambda text: status.update(text))
    for size in options.sizes:
        for ranks in options.ranks:
            for tokens in options.tokens:
                if not options.json:
                    Console().print(table(bench.result, size, ranks, tokens))
    draw(bench.result, options.sizes[-1], options.ranks[0], options.tokens[0], options.out.with_suffix(".png"))
    if options.json:
        print(json.dumps(bench.result))


if __name__ == "__main__":
    main()
