"""Tests of the package structure: imports follow the order in docs/explanation/architecture.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import infinity
from infinity_tools.cli import COMMANDS
from support.modules import MODULES, ROOT, imported, modules

ORDER = (
    "errors", "untrusted_files", "deadline", "cleanup", "interrupts", "processor", "referrers", "units", "torchrun",
    "optional_dependencies", "schema", "config_fields", "config", "cli_errors", "hugepages", "heap", "torch_private",
    "ranks", "daemon_client", "io", "content", "memory", "telemetry", "heartbeats", "peer_failures", "store",
    "schedule", "budget", "checkpoint", "fsdp", "optim", "formats", "accumulation", "estimate", "sources", "models",
    "run", "integrations",
)  # fmt: skip
"""Packages and top-level modules of `infinity`, lowest first: each one imports only those listed before it."""
NO_TORCH = (
    "config", "config_fields", "schema", "errors", "units", "hugepages", "heap", "untrusted_files", "cleanup",
    "referrers", "torchrun", "optional_dependencies", "processor", "deadline", "interrupts", "content.format",
    "content.layout", "io", "telemetry", "store", "schedule.trace", "schedule.update_schedule", "schedule.tier",
    "schedule.cycle", "schedule.timing", "schedule.planner", "schedule.stack", "schedule.schedule_choice", "budget",
    "estimate",
)  # fmt: skip
DAEMON_MAY_IMPORT = {
    "cli_errors", "config", "config_fields", "schema", "errors", "units", "hugepages", "untrusted_files",
    "optional_dependencies", "io", "daemon_client", "telemetry",
}  # fmt: skip
DAEMON_MAY_ALSO_IMPORT = (
    "infinity.__version__", "infinity.store.folder.", "infinity.store.marker.", "infinity.checkpoint.manifest.",
    "infinity.checkpoint.parity.",
)  # fmt: skip
"""The folder and marker of a run, to find runs and their owners, and the files of checkpoints, to copy them."""


def package(name: str) -> str:
    """Return the package or top-level module of a dotted name, or "" for `infinity` itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ORDER else ""


def packages_imported(file: Path) -> set[str]:
    """Return the packages of `infinity` that a module imports."""
    targets = {target for target in imported(file) if target.startswith("infinity.")}
    return {package(target) for target in targets} - {""}


def test_every_package_is_in_the_order() -> None:
    assert {name.split(".")[1] for name in MODULES if "." in name} == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


def test_architecture_page_has_the_same_order() -> None:
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    table = re.search(r"^\| package \|.*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    assert table is not None
    cells = re.findall(r"^\| (`[^|]+) \|", table[0], re.MULTILINE)
    assert tuple(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == ORDER


def test_imports_follow_the_order() -> None:
    """Every module imports only packages that come before its own, so cycles are impossible."""
    wrong = [
        f"{name} imports {target}"
        for name, file in MODULES.items()
        if name != "infinity"
        for target in packages_imported(file) - {package(name)}
        if ORDER.index(target) > ORDER.index(package(name))
    ]
    assert wrong == []


def test_store_and_schedule_are_independent() -> None:
    """The pager receives a reader and a writer as arguments."""
    for name, file in MODULES.items():
        if package(name) == "schedule":
            assert "store" not in packages_imported(file), name
        if package(name) == "store":
            assert "schedule" not in packages_imported(file), name


def test_the_daemon_imports_only_allowed_packages() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, file in modules(ROOT / "daemon" / "infinity_daemon", "infinity_daemon").items()
        for target in imported(file)
        if target.split(".")[0] in {"torch", "transformers", "infinity_tools"}
        or (
            target.startswith("infinity.")
            and package(target) not in DAEMON_MAY_IMPORT
            and not target.startswith(DAEMON_MAY_ALSO_IMPORT)
        )
    ]
    assert wrong == []


def test_no_package_imports_the_tools() -> None:
    files = [*MODULES.values(), *(ROOT / "daemon").rglob("*.py")]
    assert not [file for file in files for target in imported(file) if target.startswith("infinity_tools")]


def test_importing_torch_free_modules_does_not_load_torch() -> None:
    """Indirect imports count, too."""
    wanted = [*(f"infinity.{name}" for name in NO_TORCH), "infinity_daemon.main"]
    code = f"import sys, {', '.join(wanted)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout.strip() == "False", done.stderr


def test_every_module_is_reachable_from_a_public_name() -> None:
    """A re-export in a package does not count as use."""
    files = MODULES | modules(ROOT / "daemon" / "infinity_daemon", "infinity_daemon")
    files |= modules(ROOT / "tools" / "infinity_tools", "infinity_tools")
    packages = {name for name, file in files.items() if file.name == "__init__.py"}
    exported = {
        f"{package}.{target.rpartition('.')[2]}": target
        for package in packages - {"infinity"}
        for target in imported(files[package])
    }
    public = {getattr(infinity, name).__module__ for name in infinity.__all__}
    started = {"infinity_tools.__main__", "infinity_tools.cli", "infinity_daemon.__main__", "infinity_daemon.main"}
    started |= {place.partition(":")[0] for place in COMMANDS.values()}
    started |= {name for name in files if name.startswith("infinity.integrations.")}  # imported by users
    reached, left = set(packages), [*public, *started]
    namespaces = {"infinity.torch_private"}  # imported as a whole, and used through its attributes
    while left:
        target = left.pop()
        if target in namespaces:
            namespaces.remove(target)
            left += imported(files[target])
        target = exported.get(target, target)
        name = target if target in files else target.rpartition(".")[0]
        if name in files and name not in reached:
            reached.add(name)
            left += imported(files[name])
    assert set(files) == reached


def test_dir_lists_all_public_names() -> None:
    """Interpreters complete names from `dir`, including names that are imported lazily."""
    program = "import infinity; print(*sorted({*infinity.__all__, '__version__'} - {*dir(infinity)}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
