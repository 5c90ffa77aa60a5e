"""Output of `infinity plan`: tables for the terminal, and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from infinity.content.format import Role
from infinity.estimate.advice import Change
from infinity.estimate.estimate import DAY, HIDDEN, Estimate
from infinity.estimate.shardings import Shardings
from infinity.units import format_number, format_size
from infinity_tools.plan.recommended_batch import recommended_batch
from infinity_tools.tables import table

ROLES = {Role.PARAM: "weights", Role.UPDATE: "master, moments", Role.GRAD: "gradients", Role.ACTIVATION: "activations"}
"""Label of the pages of each role."""
RESOURCES = {
    "computation": "forward and backward",
    "weights": "weights to the device",
    "gradients": "gradients to the host",
    "collectives": "communication between ranks",
    "updates": "optimizer updates",
    "drives": "NVMe I/O",
    "hashing": "checksums",
    "interpreter": "Python, kernel launches",
    "fixed": "other fixed costs",
}
"""Label of each resource of `Seconds`."""
SHARDINGS = {"full_shard": "full shard", "hsdp": "HSDP"}
"""Label of each sharding of `Shardings`."""
_LEAST_SHOWN = 1e-3
"""Fraction of a step below which exposed time is shown as 0."""
_TIME_UNITS = (("years", 365 * DAY), ("days", DAY), ("hours", 3600.0))


def headline(found: Estimate) -> str:
    """Return a one-line summary of the planned run."""
    work, model = found.workload, found.model
    trained = model.trainable_parameters
    share = "" if trained == model.parameters else f" ({trained / model.parameters:.2%} trained)"
    ranks = f"{work.world_size} ranks" if work.world_size > 1 else "1 rank"
    return f"{model.name}: {count(model.parameters)} parameters{share}, {ranks}, {work.batch_tokens:,} tokens per step"


def count(number: float) -> str:
    """Return a large number with three significant digits and a suffix, such as ``70.6B``."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{format_number(number / factor)}{letter}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Return a duration with three significant digits, in years, days, hours, seconds or microseconds."""
    for unit, length in _TIME_UNITS:
        if seconds >= 2 * length:
            return f"{format_number(seconds / length)} {unit}"
    return f"{format_number(1e6 * seconds)} µs" if 0 < seconds < 1e-3 else f"{format_number(seconds)} s"


def show(
    found: Estimate,
    changes: Sequence[Change],
    assumptions: Sequence[str],
    console: Console,
    shardings: Shardings | None = None,
) -> None:
    """Print the estimate, and a comparison of shardings if there are several nodes."""
    console.print(Text(headline(found), style="bold"))
    for part in _parts(found, changes, shardings):
        console.print()
        console.print(part)
    console.print()
    for line in assumptions:
        console.print(Text(f"assumed: {line}", style="dim"))
    for problem in found.problems:
        console.print(Text.assemble(("does not fit: ", "bold red"), problem))


def _parts(found: Estimate, changes: Sequence[Change], shardings: Shardings | None) -> Iterator[RenderableType]:
    yield _places(found)
    yield _host_cache(found)
    yield _step(found)
    yield _facts(found)
    if shardings:
        yield _shardings(shardings)
    if changes:
        rows = [
            (change.what, f"{-change.saved:+.0%}", f"{-change.writes_saved:+.0%}", change.price) for change in changes
        ]
        headings = ("change", ">time per token", ">NVMe writes per token", "")
        yield table("changes that would help most", headings, rows)


def sizes_of(found: Estimate) -> dict[Role, tuple[int, int, int]]:
    """Return, for each role, the size of its pages and the bytes kept in host memory and on the device.

    Activations are included if they are paged.
    """
    sizes = {
        role: (found.layout.bytes_of(role), found.resident_bytes[role], found.gpu_resident_bytes[role]) for role in Role
    }
    kept, moved = found.activations.kept, found.activations.moved
    sizes[Role.ACTIVATION] = kept, kept - moved, 0
    return {role: size for role, size in sizes.items() if role is not Role.ACTIVATION or kept}


def _places(found: Estimate) -> RenderableType:
    traffic, gpu_resident = found.traffic, any(found.gpu_resident_bytes.values())
    rows = {
        ROLES[role]: (size, stays, *([lives] if gpu_resident else []), traffic.read[role], traffic.written[role])
        for role, (size, stays, lives) in sizes_of(found).items()
    }
    gradients, *stored = rows[ROLES[Role.GRAD]]
    consumed = gradients > 0 and not any(stored)
    if consumed:
        del rows[ROLES[Role.GRAD]]
    rows["total"] = tuple(map(sum, zip(*rows.values(), strict=True)))
    shown = table(
        "state per rank, and NVMe traffic per step",
        ("", ">size", ">in host memory", *([">on device"] if gpu_resident else []), ">read", ">written"),
        [(name, *map(format_size, row)) for name, row in rows.items()],
    )
    note = f"gradients: {format_size(gradients)}, consumed in backward, not stored"
    return Group(shown, Text(note)) if consumed else shown


def _host_cache(found: Estimate) -> Table:
    size = found.layout.page_bytes
    names = {
        "resident": "resident pages",
        "streaming": "pages being read",
        "kept": "pages kept between uses",
        "writing": "pages being written" if found.traffic.written_bytes else "free",
        "activations": "activations",
    }
    rows = [(names[use], str(number), format_size(number * size)) for use, number in found.cache_slots_by_use.items()]
    total, slots = format_size(found.budget.host_bytes), found.budget.cache_slots
    title = f"host cache: {total} in {slots} slots of {format_size(size)}"
    return table(title, ("", ">cache slots", ">bytes"), rows)


def _step(found: Estimate) -> Table:
    seconds, traffic = found.seconds, found.traffic
    link, linked = found.link_traffic, found.machine.device.link > 0
    kept = found.activations.kept
    weights, gradients = (link.weights + kept) * linked, (link.gradients + kept) * linked
    moved: dict[str, float] = {"weights": weights, "gradients": gradients, "drives": traffic.total_bytes}
    if found.exchange.sent:
        moved["collectives"] = found.exchange.sent
    if found.updates_on_device:
        moved["updates"] = link.read + link.changed
    parts = {"reads": (traffic.read_bytes, seconds.reads), "writes": (traffic.written_bytes, seconds.writes)}
    least = _LEAST_SHOWN * seconds.step
    rows = []
    for name, load in seconds.loads.items():
        if load.busy:
            exposed = duration(load.exposed) if load.exposed >= least else "0 s"
            size = format_size(moved[name]) if name in moved else ""
            rows.append((resource(name, found), size, duration(load.busy), exposed))
        if load.busy and name == "drives":
            rows += [(f"  {part} alone", format_size(size), duration(time), "") for part, (size, time) in parts.items()]
    rows.append(("step, with overlap", "", duration(seconds.step), ""))
    title = "time per step (exposed: not overlapped)"
    return table(title, ("resource", ">bytes", ">total", ">exposed"), rows)


def _shardings(of: Shardings) -> RenderableType:
    rows = []
    for name, one in of.by_name.items():
        ranks, total = one.machine.ranks_per_node, one.traffic.total_bytes
        rows.append(
            (
                SHARDINGS[name],
                duration(one.seconds.step),
                duration(one.seconds.collectives.busy),
                format_size(one.exchange.sent),
                format_size(total * ranks),
                format_size(one.drive_bytes * ranks),
                format_size(one.budget.host_bytes * ranks),
            )
        )
    headings = ("sharding", ">step", ">network", ">sent", ">NVMe I/O", ">NVMe space", ">host cache")
    full = of.full_shard
    title = f"sharding over {full.workload.world_size // full.machine.ranks_per_node} nodes (bytes per node)"
    return Group(table(title, headings, rows), Text(verdict(of)))


def verdict(of: Shardings) -> str:
    """Return a sentence that says which sharding is faster."""
    if of.shortfall:
        return f"HSDP is not possible: {of.shortfall}"
    fitting = of.fitting
    if len(fitting) < 2:
        which = f"only {SHARDINGS[next(iter(fitting))]} fits" if fitting else "neither sharding fits"
        return f"{which} the drives and the device"
    slow, fast = sorted((one.seconds.step for one in fitting.values()), reverse=True)
    if not of.faster:
        return "both are equally fast; full shard needs less NVMe space"
    return f"{SHARDINGS[of.faster]} is faster: its step takes {1 - fast / slow:.0%} less time"


def resource(name: str, found: Estimate) -> str:
    """Return the label of a resource of `Seconds`."""
    if name != "updates":
        activations = name in ("weights", "gradients") and found.activations.kept > 0
        return f"activations and {RESOURCES[name]}" if activations else RESOURCES[name]
    return f"updates ({found.update_schedule}{', on the device' * found.updates_on_device})"


def _facts(found: Estimate) -> Table:
    work, machine = found.workload, found.machine
    hidden = found.hidden_from_tokens
    space, first = (each * machine.ranks_per_node for each in (found.drive_bytes, found.first_drive_bytes))
    free = f" of {format_size(machine.drives.space_bytes)} free" if machine.drives.space_bytes else ""
    daily = found.node_written_per_day
    if found.drive_days is not None:
        life = f"rated endurance reached in {duration(DAY * found.drive_days)}"
    elif daily:
        life = f"1 PB of rated endurance lasts {duration(DAY * 1e15 / daily)}"
    else:
        life = ""
    where = f"on {machine.device.name}" if machine.device.memory_bytes else "in addition to the host cache"
    if found.moves_nothing:
        storage = "at any batch size", "no state is moved"
    elif hidden is None:
        storage = "at no batch size", f"storage always adds more than {HIDDEN - 1:.0%} to a step"
    else:
        storage = f"from {hidden:,} tokens/step", f"storage then adds at most {HIDDEN - 1:.0%} to a step"
    size, parts = recommended_batch(found)
    number = size * parts
    rows = [
        ("tokens per second", format_number(work.batch_tokens / found.seconds.step), ""),
        ("I/O mostly overlapped", *storage),
        (
            "recommended batch",
            f"{number} sequence{'s' * (number > 1)} per rank",
            f"in {parts} micro-batches" * (parts > 1),
        ),
        ("NVMe space per node", format_size(space) + free, _checkpoints(found)),
        *([("NVMe space in steps 1-2", format_size(first), "step 1 may store gradients")] * (first > space)),
        ("NVMe writes per node", f"{format_number(daily / 1e12)} TB per day", life),
        *_copies(found),
        ("memory for computation", f"about {format_size(found.working_bytes)}", where),
    ]
    if found.device_bytes:
        rows.append(("GPU memory for infinity", f"{format_size(found.device_bytes)} available", _stays_there(found)))
    return table("summary", ("", "", ""), rows)


def _stays_there(found: Estimate) -> str:
    schedule, fsdp_modules = found.resolved_schedule, len(found.model.fsdp_modules)
    parts = []
    if schedule.prefetched:
        parts.append("the prefetched weights of the next FSDP module")
    if schedule.kept:
        parts.append(f"the weights of {len(schedule.kept)} of {fsdp_modules} FSDP modules from forward to backward")
    if schedule.gpu_resident:
        some = "all" if len(schedule.gpu_resident) == fsdp_modules else f"{len(schedule.gpu_resident)} of"
        parts.append(f"{some} {fsdp_modules} FSDP modules and their state")
    if not parts:
        return "too small for the weights of two FSDP modules, so weights are copied on demand"
    return f"holds {'; '.join(parts)}"


def _copies(found: Estimate) -> list[tuple[str, str, str]]:
    """Return the rows for copies on other nodes: if pages are frozen, the first two copies differ from later ones."""
    if not found.settings.run.copies:
        return []
    by_name = {"copy of a checkpoint": found.copy}
    if found.first_copy != found.copy:
        by_name["each of the first two copies"] = found.first_copy
    ranks = found.machine.ranks_per_node
    return [
        (
            name,
            f"{format_size(copy.received * ranks)} per node",
            f"received and sent; {format_size(copy.written * ranks)} are written",
        )
        for name, copy in by_name.items()
    ]


def _checkpoints(found: Estimate) -> str:
    number = found.settings.run.retained_checkpoints
    gradients = " and stored gradients" * (found.traffic.written[Role.GRAD] > 0)
    return f"with {number} retained checkpoint{'s' * (number != 1)}{gradients}"


def document(
    found: Estimate, changes: Sequence[Change], assumptions: Sequence[str], shardings: Shardings | None = None
) -> dict[str, Any]:
    """Return the estimate as a document that can be encoded as JSON."""
    model, work, machine = found.model, found.workload, found.machine

    linked = machine.device.link > 0

    def by_role(values: Any) -> dict[str, int]:
        return {role.value: values[role] for role in Role}

    return {
        "fits": not found.problems,
        "problems": list(found.problems),
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "trainable_parameters": model.trainable_parameters,
            "layers": len(model.layers),
            "hidden": model.hidden,
            "vocabulary": model.vocabulary,
        },
        "workload": asdict(work),
        "machine": asdict(machine),
        "assumptions": list(assumptions),
        "schedule": found.update_schedule,
        "updates_on_device": found.updates_on_device,
        "device": {
            "bytes": found.device_bytes,
            "prefetched": found.resolved_schedule.prefetched,
            "fsdp_modules_with_kept_weights": len(found.resolved_schedule.kept),
            "gpu_resident_fsdp_modules": len(found.resolved_schedule.gpu_resident),
            "gpu_resident_bytes": by_role(found.gpu_resident_bytes),
            "to_device_bytes_per_step": (found.link_traffic.to_device + found.activations.kept) * linked,
            "from_device_bytes_per_step": (found.link_traffic.from_device + found.activations.kept) * linked,
        },
        "page_bytes": found.layout.page_bytes,
        "pages": len(found.layout.pages),
        "state_bytes": found.layout.state_bytes,
        "bytes": {role.value: found.layout.bytes_of(role) for role in Role}
        | {Role.ACTIVATION.value: found.activations.kept},
        "resident_bytes": by_role(found.resident_bytes),
        "host_cache": {
            "bytes": found.budget.host_bytes,
            "cache_slots": found.budget.cache_slots,
            **found.cache_slots_by_use,
        },
        "read_bytes": by_role(found.traffic.read),
        "written_bytes": by_role(found.traffic.written),
        "read_bytes_per_step": found.traffic.read_bytes,
        "written_bytes_per_step": found.traffic.written_bytes,
        "bytes_per_parameter": found.traffic.total_bytes / max(1, found.layout.parameters),
        "seconds": asdict(found.seconds),
        "network": _exchanged(found),
        "shardings": None
        if shardings is None
        else {
            "faster": shardings.faster,
            "says": verdict(shardings),
            **{name: _sharding(one) for name, one in shardings.by_name.items()},
        },
        "tokens_per_second": work.batch_tokens / found.seconds.step,
        "hidden_from_tokens": found.hidden_from_tokens,
        "recommended_batch": dict(
            zip(("sequences_per_micro_batch", "micro_batches"), recommended_batch(found), strict=True)
        ),
        "drive_bytes": found.drive_bytes,
        "first_drive_bytes": found.first_drive_bytes,
        "node_drive_bytes": found.drive_bytes * machine.ranks_per_node,
        "node_first_drive_bytes": found.first_drive_bytes * machine.ranks_per_node,
        "node_written_bytes_per_day": found.node_written_per_day,
        "copy": asdict(found.copy),
        "first_copy": asdict(found.first_copy),
        "drive_days": found.drive_days,
        "working_bytes": found.working_bytes,
        "changes": [
            {
                "change": change.what,
                "price": change.price,
                "saved": change.saved,
                "writes_saved": change.writes_saved,
                "step_seconds": change.result.step_seconds(change.result.workload.batch_tokens),
                "batch_tokens": change.result.workload.batch_tokens,
            }
            for change in changes
        ],
    }


def _exchanged(found: Estimate) -> dict[str, float]:
    exchange = found.exchange
    return {
        "gathering_seconds": exchange.gathering,
        "reducing_seconds": exchange.reducing,
        "sent_bytes_per_node": exchange.sent,
    }


def _sharding(one: Estimate) -> dict[str, Any]:
    ranks = one.machine.ranks_per_node
    return {
        "fits": not one.shortfalls,
        "step_seconds": one.seconds.step,
        "network": _exchanged(one),
        "node_read_bytes_per_step": one.traffic.read_bytes * ranks,
        "node_written_bytes_per_step": one.traffic.written_bytes * ranks,
        "node_drive_bytes": one.drive_bytes * ranks,
        "node_host_cache_bytes": one.budget.host_bytes * ranks,
        "working_bytes": one.working_bytes,
    }
