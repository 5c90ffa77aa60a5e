"""Imports point downwards only (docs/architecture.md): the structure of the package as a test."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import infinity
from infinity_tools.cli import COMMANDS
from support.modules import MODULES, ROOT, imported, modules

LEVELS = {
    "config": 0, "settings": 0, "schema": 0, "errors": 0, "fsdp_modules": 0, "hugepages": 0, "access": 0, "ending": 0,
    "variables": 0, "extras": 0, "torchrun": 0, "command": 0, "processor": 0, "waiting": 0, "interrupts": 0,
    "io": 1, "memory": 1, "telemetry": 1, "content": 1, "node": 1, "ranks": 1, "peers": 1,
    "store": 2, "schedule": 2, "budget": 2, "checkpoint": 2,
    "fsdp": 3, "accumulation": 3, "optim": 3, "formats": 3, "sources": 3, "estimate": 3, "models": 3,
    "run": 4,
    "integrations": 5,
    "": 5,
}  # fmt: skip
NO_TORCH = (
    "config",
    "settings",
    "schema",
    "errors",
    "fsdp_modules",
    "hugepages",
    "access",
    "ending",
    "variables",
    "torchrun",
    "extras",
    "processor",
    "waiting",
    "interrupts",
    "content.format",
    "content.layout",
    "io",
    "telemetry",
    "store",
    "schedule.trace",
    "schedule.update_schedule",
    "schedule.tier",
    "schedule.turn",
    "schedule.timing",
    "schedule.planner",
    "schedule.stack",
    "schedule.choice",
    "budget",
    "estimate",
)
DAEMON_MAY = {
    "command", "config", "settings", "schema", "errors", "fsdp_modules", "hugepages", "access", "extras", "io", "node",
    "telemetry",
}  # fmt: skip
DAEMON_MAY_ALSO = ("infinity.store.folder.", "infinity.store.marker.")  # what is a run, and who holds it


def room(name: str) -> str:
    """Return the room of a dotted name inside of `infinity`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVELS else ""


def test_every_room_has_a_level() -> None:
    """A new module or folder says where it stands."""
    assert {name.split(".")[1] for name in MODULES if "." in name} == set(LEVELS) - {""}


def test_the_document_has_the_same_levels() -> None:
    """The table of rooms in docs/architecture.md: what stands there in backticks outside of brackets."""
    table = re.findall(r"^\| (\d) \| (.+) \|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    named = [
        (name, int(level)) for level, rooms in table for name in re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", rooms))
    ]
    assert sorted(named) == sorted((name, level) for name, level in LEVELS.items() if name)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_downwards(name: str) -> None:
    """To a lower level, or to a neighbour of the same level."""
    if name == "infinity":
        return
    for target in imported(MODULES[name]):
        if target.split(".")[0] == "infinity" and target != "infinity":
            assert LEVELS[room(target)] <= LEVELS[room(name)], f"{name} imports {target}"


def test_store_and_schedule_do_not_know_each_other() -> None:
    """The pager is handed a reader and writer."""
    for name, file in MODULES.items():
        rooms = {room(target) for target in imported(file) if target.startswith("infinity.")}
        if room(name) == "schedule":
            assert "store" not in rooms, name
        if room(name) == "store":
            assert "schedule" not in rooms, name


def test_rooms_have_no_cycles() -> None:
    """Neighbours of one level are ordered too."""
    graph: dict[str, set[str]] = {}
    for name, file in MODULES.items():
        targets = {room(target) for target in imported(file) if target.startswith("infinity.")}
        graph.setdefault(room(name), set()).update(targets - {room(name), ""})
    order: list[str] = []
    while graph:
        ready = [name for name, targets in graph.items() if targets <= set(order)]
        assert ready, f"a cycle among {sorted(graph)}"
        order += ready
        for name in ready:
            del graph[name]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_what_is_free_of_torch_does_not_name_it(name: str) -> None:
    """Storage and planning are plain Python."""
    if any(name == f"infinity.{prefix}" or name.startswith(f"infinity.{prefix}.") for prefix in NO_TORCH):
        assert "torch" not in {target.split(".")[0] for target in imported(MODULES[name])}


@pytest.mark.parametrize("name", sorted(modules(ROOT / "daemon" / "infinity_daemon", "infinity_daemon")))
def test_the_daemon_stays_small(name: str) -> None:
    """It imports telemetry, config, errors, I/O and what tells runs, and never torch."""
    file = modules(ROOT / "daemon" / "infinity_daemon", "infinity_daemon")[name]
    for target in imported(file):
        head = target.split(".")[0]
        assert head not in {"torch", "transformers", "infinity_tools"}, target
        known = target == "infinity.__version__" or target.startswith(DAEMON_MAY_ALSO)
        assert head != "infinity" or known or room(target) in DAEMON_MAY, target


def test_nothing_imports_the_tools() -> None:
    """The command line is on top."""
    files = [*MODULES.values(), *(ROOT / "daemon").rglob("*.py")]
    assert not [file for file in files for target in imported(file) if target.startswith("infinity_tools")]


def test_loading_them_does_not_load_torch() -> None:
    """Not by a detour either."""
    wanted = [*(f"infinity.{name}" for name in NO_TORCH), "infinity_daemon.main"]
    code = f"import sys, {', '.join(wanted)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout.strip() == "False", done.stderr


def test_the_package_has_nothing_for_tests_alone() -> None:
    """Every module is reached from a public name or a command; what only a package re-exports is not."""
    files = MODULES | modules(ROOT / "daemon" / "infinity_daemon", "infinity_daemon")
    files |= modules(ROOT / "tools" / "infinity_tools", "infinity_tools")
    packages = {name for name, file in files.items() if file.name == "__init__.py"}
    exported = {
        f"{package}.{target.rpartition('.')[2]}": target
        for package in packages - {"infinity"}
        for target in imported(files[package])
    }
    gpu_resident_pages = {getattr(infinity, name).__module__ for name in infinity.__all__}
    started = {"infinity_tools.__main__", "infinity_tools.cli", "infinity_daemon.__main__", "infinity_daemon.main"}
    started |= {place.partition(":")[0] for place in COMMANDS.values()}
    started |= {"infinity_tools.migrate.reference_page"}  # by `make docs`
    started |= {name for name in files if name.startswith("infinity.integrations.")}  # users name them
    reached, left = set(packages), [*gpu_resident_pages, *started]
    while left:
        target = exported.get(left[-1], left[-1])
        left.pop()
        name = target if target in files else target.rpartition(".")[0]
        if name in files and name not in reached:
            reached.add(name)
            left += imported(files[name])
    assert set(files) == reached


def test_public_names_can_be_completed() -> None:
    """An interpreter offers what `dir` names: also what is imported when it is first used."""
    program = "import infinity; print(*sorted({*infinity.__all__, '__version__'} - {*dir(infinity)}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
