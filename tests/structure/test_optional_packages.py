"""Tests of optional dependencies: the library needs no extra, and a missing one is reported in one line."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from infinity.optional_dependencies import EXTRAS, NEWEST_TORCH, OLDEST
from support import bare
from support.daemon_process import get, until
from support.modules import MODULES, ROOT, imported, modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {package for packages in EXTRAS.values() for package in packages}
WITH_EXTRA = {"infinity.cli_errors", "infinity.content.kernels", "infinity.telemetry.exporter"}
"""Modules that need an extra: the command line, compiled encodings and the metrics exporter."""
FRAMEWORKS = {name for name in MODULES if name.startswith("infinity.integrations.")}
"""Modules that need the framework that they integrate."""
HIDE = f"""
import runpy, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(OPTIONAL)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def run_without_extras(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which no package of an extra can be imported."""
    return subprocess.run(
        [sys.executable, "-c", HIDE + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", **variables},
    )


def distributions(extra: str) -> set[str]:
    """Return the import names of the packages that an extra in pyproject.toml installs, including nested extras."""
    found = set()
    for requirement in PROJECT["optional-dependencies"][extra]:
        name, inner = re.match(r"([\w-]+)(?:\[(.*)\])?", requirement).groups()
        if inner is None:
            found.add("yaml" if name == "pyyaml" else name.replace("-", "_"))
        else:
            found |= set().union(*map(distributions, inner.split(",")))
    return found


def test_supported_releases_are_consistent() -> None:
    """`infinity.optional_dependencies`, pyproject.toml and the documents state the same releases."""
    python, torch, transformers = OLDEST["python"], OLDEST["torch"], OLDEST["transformers"]
    assert PROJECT["requires-python"] == f">={python}"
    assert f"torch>={torch}" in PROJECT["dependencies"]
    assert PROJECT["optional-dependencies"]["hf"] == [f"transformers>={transformers}"]
    statement = f"Python {python} or newer, torch {torch} to {NEWEST_TORCH}, and transformers {transformers} or newer"
    for page in ("README.md", "docs/tutorials/first-run.md"):
        assert statement in " ".join((ROOT / page).read_text().split()), page


def test_extras_match_pyproject(subtests: pytest.Subtests) -> None:
    """tokenizers is a dependency of transformers, and llvmlite of numba."""
    for extra in sorted(EXTRAS):
        with subtests.test(extra=extra):
            assert set(EXTRAS[extra]) - {"tokenizers", "llvmlite"} == distributions(extra)


def test_every_import_is_declared() -> None:
    """Imports are from the standard library, a declared dependency or a package of an extra."""
    declared = {re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in PROJECT["dependencies"]}
    assert declared == {"torch", "numpy", "fsspec", "xxhash", "safetensors"}
    known = {*declared, *OPTIONAL, *sys.stdlib_module_names, "infinity", "infinity_daemon", "infinity_tools"}
    daemon = modules(ROOT / "daemon" / "infinity_daemon", "infinity_daemon")
    tools = modules(ROOT / "tools" / "infinity_tools", "infinity_tools")
    for name, file in (MODULES | daemon | tools).items():
        found = {target.partition(".")[0] for target in imported(file)}
        assert found <= known, name
        if name in daemon:
            assert not (found & OPTIONAL) - set(EXTRAS["daemon"]), name


def test_the_daemon_runs_without_torch(tmp_path: Path) -> None:
    """It needs only the packages in daemon/requirements.txt, which agree with pyproject.toml."""
    lines = (ROOT / "daemon" / "requirements.txt").read_text().splitlines()
    required = {line for line in lines if not line.startswith("#")}
    assert required <= {*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["daemon"]}
    assert required >= set(PROJECT["optional-dependencies"]["daemon"])
    others = {re.match(r"[\w-]+", one)[0] for one in {*PROJECT["dependencies"]} - required} | OPTIONAL
    hidden = others - {re.match(r"[\w-]+", one)[0].replace("-", "_") for one in required}
    assert {"torch", "rich"} <= hidden
    drive = tmp_path / "drive"
    drive.mkdir()
    code = HIDE.replace(str(sorted(OPTIONAL)), str(sorted(hidden)))
    code += "from infinity.io.probe.points import latency_of\nassert latency_of([2.0]).p99 == 2.0\n"  # of measurements
    code += "import infinity_daemon.main as m; m.main()"
    options = ["--runtime-dir", str(tmp_path), "--port", "0", "--device-path", str(drive)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options],
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    try:
        assert process.stderr is not None
        started = process.stderr.readline()
        assert " started " in started, started + process.stderr.read()
        port = re.search(r"port=(\d+)", started)[1]
        until(lambda: "infinity_device_capacity_bytes{" in get(port, "/metrics"))
    finally:
        process.terminate()
        assert process.wait(300) == 0
        process.stderr.close()


def test_the_library_needs_no_extra(tmp_path: Path) -> None:
    """The library trains, checkpoints, resumes and exports, and all modules that need no extra can be imported.

    The error of a module that needs one has one line with the command to install.
    """
    calls = {
        "import infinity.telemetry.exporter": "daemon",
        "import infinity.integrations.accelerate": "accelerate",
        "import infinity.integrations.lightning": "lightning",
        "import infinity.integrations.torchtitan": "torchtitan",
        "from infinity.formats.transformers_names import outgoing; outgoing({'architectures': ['Gpt']})": "hf",
        "import infinity.integrations.transformers": "trainer",
        "import infinity; infinity.from_pretrained('org/small')": "hf",
        "import infinity; infinity.from_config(None)": "hf",
    }
    program = f"""
runpy.run_path({bare.__file__!r}, run_name="__main__")
for name in {sorted(MODULES.keys() - WITH_EXTRA - FRAMEWORKS)}:
    __import__(name)
from infinity.errors import MissingPackageError
for call in {list(calls)}:
    try:
        exec(call)
    except MissingPackageError as error:
        print(error)
"""
    done = run_without_extras(program, str(tmp_path))
    assert done.returncode == 0, done.stderr
    steps, *errors = done.stdout.splitlines()
    assert steps == "2 4"
    assert {path.name for path in tmp_path.iterdir()} == {"nvme", "weights", "dcp"}
    found = [line.rpartition(" ")[2] for line in errors]
    assert found == [f"'infinity-offload[{extra}]'" for extra in calls.values()], done.stdout


def test_a_command_without_its_extra_names_it(subtests: pytest.Subtests) -> None:
    """One rank prints one line with the command to install, and the exit status is 2."""
    for command, extra, rank in [("infinity", "cli", "0"), ("infinityd", "daemon", "0"), ("infinity", "cli", "1")]:
        with subtests.test(f"{command} on rank {rank}"):
            module, main = PROJECT["scripts"][command].split(":")
            done = run_without_extras(f"import {module}; {module}.{main}()", "--help", LOCAL_RANK=rank)
            assert (done.returncode, done.stdout) == (2, ""), done.stderr
            assert len(done.stderr.splitlines()) == (rank == "0"), done.stderr
            if rank == "0":
                assert done.stderr.startswith(f"{command}: ")
                assert done.stderr.endswith(f"pip install 'infinity-offload[{extra}]'\n")
