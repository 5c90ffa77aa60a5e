"""`plan.png`: time per step by resource, throughput by batch size, and where the state is stored."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from infinity.estimate.estimate import STORAGE, Estimate
from infinity_tools.plan.plan_report import ROLES, headline, resource, sizes_of

_POINTS = 9
"""Number of batch sizes in the plot. Each is twice the previous one, and the planned one is in the middle."""
_COLOURS = {"read": "#ee6677", "written": "#ccbb44", "stays": "#4477aa", "lives": "#228833"}


def figure(found: Estimate) -> Figure:
    drawn = Figure(figsize=(13, 4.4), layout="constrained")
    causes, tokens, state = drawn.subplots(1, 3)
    _causes(causes, found)
    _tokens(tokens, found)
    _state(state, found)
    drawn.suptitle(headline(found))
    return drawn


def _causes(axes: Axes, found: Estimate) -> None:
    seconds = found.seconds
    loads = {resource(name, found): load for name, load in seconds.loads.items() if load.busy}
    shown = dict(reversed(loads.items()))
    axes.barh(["step"], [seconds.step], color="#222222")
    axes.barh(list(shown), [load.busy for load in shown.values()], color="#bbbbbb", label="total")
    axes.barh(list(shown), [load.exposed for load in shown.values()], color="#ee6677", label="exposed (not overlapped)")
    axes.set_ylim(bottom=-2.5)  # leaves space for the legend
    axes.set_title("seconds per step, by resource")
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower right")


def _tokens(axes: Axes, found: Estimate) -> None:
    work = found.workload
    least = work.sequence * work.world_size
    counts = [count for k in range(_POINTS) if (count := work.batch_tokens * 2 ** (k - _POINTS // 2)) >= least]
    axes.plot(counts, [count / found.step_seconds(count) for count in counts], marker="o", label="planned")
    without = [count / found.step_seconds(count, *STORAGE) for count in counts]
    axes.plot(counts, without, linestyle="--", color="#bbbbbb", label="if storage took no time")
    axes.axvline(work.batch_tokens, color="#222222", alpha=0.3)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens per step")
    axes.set_title("tokens per second")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _state(axes: Axes, found: Estimate) -> None:
    sizes = sizes_of(found)
    names = [ROLES[role] for role in sizes]
    columns = {
        "size": [size / 1e9 for size, _, _ in sizes.values()],
        "kept in host memory": [stays / 1e9 for _, stays, _ in sizes.values()],
        "kept on the device": [lives / 1e9 for _, _, lives in sizes.values()],
        "read per step": [found.traffic.read[role] / 1e9 for role in sizes],
        "written per step": [found.traffic.written[role] / 1e9 for role in sizes],
    }
    colors = ("#bbbbbb", _COLOURS["stays"], _COLOURS["lives"], _COLOURS["read"], _COLOURS["written"])
    for number, ((label, heights), color) in enumerate(zip(columns.items(), colors, strict=True)):
        axes.bar([x + (number - 2) * 0.16 for x in range(len(names))], heights, 0.16, label=label, color=color)
    axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    axes.set_title("GB per rank")
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    axes.set_ylim(0, 1.6 * max(map(max, columns.values())))
    axes.legend(frameon=False, loc="upper right")
