"""Tests of the package installed from the wheel, as another user. Run by `make test-wheel`."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.message import Message
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import infinity
from infinity.optional_dependencies import EXTRAS
from support import bare as program

_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


def _link(source: str, target: str) -> None:
    """Create a hard link, or a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _is_readable_by_all(path: Path) -> bool:
    return all(part.stat().st_mode & 0o005 == 0o005 for part in (path, *path.parents))


def public_python(place: Path) -> tuple[Path, dict[str, str]]:
    """Return a Python executable of this version that every user may run, and the environment variables that it needs.

    This is the Python of the tests or, if other users cannot read it, a linked copy in `place`.
    """
    base, python = Path(sys.base_prefix), Path(sys.base_prefix, "bin", _VERSION)
    if _is_readable_by_all(python.resolve()):
        return python, {}
    (place / "bin").mkdir(parents=True)
    _link(str(python), str(place / "bin" / _VERSION))
    unused = shutil.ignore_patterns("site-packages", "test", "idlelib", "config-*")
    shutil.copytree(base / "lib" / _VERSION, place / "lib" / _VERSION, copy_function=_link, ignore=unused)
    for library in base.glob("lib/libpython*"):
        _link(str(library.resolve()), str(place / "lib" / library.name))
    return place / "bin" / _VERSION, {"LD_LIBRARY_PATH": str(place / "lib")}


def _needed(requirements: Iterable[str], extras: Iterable[str]) -> dict[str, Distribution]:
    """Return the installed distributions that satisfy requirements, and their dependencies, by name."""
    found: dict[str, Distribution] = {}
    done = set()
    left = [(Requirement(line), frozenset(extras)) for line in requirements]
    while left:
        requirement, wanted = left.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
            continue
        name, inner = requirement.name.lower().replace("_", "-"), frozenset(requirement.extras)
        if name == "infinity-offload" or (name, inner) in done:
            continue
        done.add((name, inner))
        installed = found[name] = distribution(name)
        assert requirement.specifier.contains(installed.version, prereleases=True), f"{requirement} is not installed"
        left += [(Requirement(line), inner) for line in installed.requires or ()]
    return found


def without_checkout() -> dict[str, str]:
    """Return the environment variables of this process without variables that make Python import this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@dataclass(frozen=True)
class Environment:
    """A virtual environment, whose commands run as an unprivileged user.

    It has no network access. The package under test is installed from its wheel, and its declared dependencies are
    linked from the environment of the tests.
    """

    folder: Path
    variables: dict[str, str]
    """Environment variables that Python needs."""

    @classmethod
    def make(cls, folder: Path, python: Path, variables: dict[str, str]) -> Environment:
        """Create an empty virtual environment."""
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, env=variables)
        return cls(folder, variables)

    @property
    def site(self) -> Path:
        """Folder site-packages."""
        return self.folder / "lib" / _VERSION / "site-packages"

    def link(self, requirements: Iterable[str], extras: Iterable[str] = ()) -> None:
        """Link the distributions that satisfy requirements. Nothing is downloaded."""
        for needed in _needed(requirements, extras).values():
            for file in needed.files or ():
                if ".." in file.parts or (target := self.site / file).exists():
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(str(needed.locate_file(file)), str(target))

    def pip(self, *arguments: str) -> None:
        """Run pip for this environment."""
        python = str(self.folder / "bin" / "python")
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**without_checkout(), **self.variables},
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *command: str, folder: str = "readonly") -> subprocess.CompletedProcess[str]:
        """Run a command of this environment without HOME and, if the current user is root, as an unprivileged user.

        Args:
            command: Command and arguments.
            folder: Current directory: `readonly`, or `tmp` for temporary files, next to this environment.
        """
        place = self.folder.parent
        nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            capture_output=True,
            text=True,
            check=False,
            cwd=place / folder,
            env={"PATH": os.defpath, "TMPDIR": str(place / "tmp"), "COLUMNS": "200", **self.variables},
            **nobody,
        )


pytestmark = pytest.mark.wheel
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"infinity": ROOT, "infinity_daemon": ROOT / "daemon", "infinity_tools": ROOT / "tools"}
MODULES = {str(file.relative_to(folder)) for name, folder in PACKAGES.items() for file in (folder / name).rglob("*.py")}
SITE = {f"infinity_daemon/site/{file.name}" for file in (ROOT / "daemon/infinity_daemon/site").iterdir()}
NAME = f"infinity_offload-{infinity.__version__}"


@pytest.fixture(scope="module")
def work_folder() -> Iterator[Path]:
    """Folder that every user may enter, with writable subfolders `tmp` and `nvme`."""
    folder = Path(tempfile.mkdtemp(prefix="infinity-wheel-"))
    folder.chmod(0o755)
    for name in ("tmp", "nvme"):
        (folder / name).mkdir()
        (folder / name).chmod(0o1777)
    (folder / "readonly").mkdir(mode=0o555)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def distributions(work_folder: Path) -> Path:
    """Folder with the sdist and the wheel built from it, without the modules of the test environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):  # `build` may contain files of earlier builds
        if (ROOT / name).is_file():
            (work_folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, work_folder / "source" / name)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(work_folder / "dist"), str(work_folder / "source")],
        capture_output=True, text=True, check=False, env=without_checkout(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return work_folder / "dist"


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    return distributions / f"{NAME}-py3-none-any.whl"


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    """Metadata of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"{NAME}.dist-info/METADATA"))


@pytest.fixture(scope="module")
def bare(work_folder: Path, wheel: Path, metadata: Message) -> Environment:
    """Environment with the wheel and its required dependencies."""
    made = Environment.make(work_folder / "bare", *public_python(work_folder / "python"))
    made.link(metadata.get_all("Requires-Dist", ()))
    made.pip("install", "--quiet", "--no-deps", "--no-index", str(wheel))
    return made


@pytest.fixture(scope="module")
def full_environment(bare: Environment, metadata: Message) -> Environment:
    """The same environment, with the packages of the extra `all` added."""
    extras = metadata.get_all("Provides-Extra", ())
    assert set(extras) == {*EXTRAS, "all", "dev", "wide"}
    bare.link(metadata.get_all("Requires-Dist", ()), ("cli", "daemon", "hf", "peft", "tensorboard", "train"))
    return bare


def test_the_sdist_contains_the_sources_only(distributions: Path) -> None:
    """It contains sources, license and README, but no tests, benchmarks or local files."""
    with tarfile.open(distributions / f"{NAME}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {f"{PACKAGES[module.partition('/')[0]].relative_to(ROOT) / module}" for module in MODULES}
    assert names >= sources | {"LICENSE", "README.md", "pyproject.toml", "infinity/py.typed"}
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "docs", "docker", "."))]


def test_the_wheel_contains_every_package_and_no_tests(wheel: Path) -> None:
    """It contains exactly the modules of this checkout, the web page, the py.typed marker and the license."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(f"{NAME}.dist-info/")}
        license = archive.read(f"{NAME}.dist-info/licenses/LICENSE")
    assert names == {*MODULES, *SITE, "infinity/py.typed"}
    assert license == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_metadata_is_correct(metadata: Message) -> None:
    """Only required dependencies are unconditional."""
    assert metadata["Version"] == infinity.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The infinity authors"
    always = [line for line in metadata.get_all("Requires-Dist", ()) if "extra ==" not in line]
    names = {re.match(r"[\w-]+", line)[0] for line in always}
    assert names == {"torch", "numpy", "fsspec", "xxhash", "safetensors"}


def test_the_library_runs_without_extras(bare: Environment, work_folder: Path) -> None:
    """It trains, checkpoints, resumes and exports as another user; the commands name their missing extra."""
    bare.pip("check")
    optional = sorted({package for packages in EXTRAS.values() for package in packages})
    find = f"from importlib.util import find_spec as find; print(find('infinity').origin, *filter(find, {optional}))"
    found = bare.run("python", "-c", find)
    assert found.stdout == f"{bare.site / 'infinity' / '__init__.py'}\n", found.stderr
    shutil.copy(program.__file__, work_folder / "program.py")
    (work_folder / "program.py").chmod(0o644)
    done = bare.run("python", str(work_folder / "program.py"), str(work_folder / "nvme"))
    assert (done.returncode, done.stdout) == (0, "2 4\n"), done.stderr
    for command, extra in (("infinity", "cli"), ("infinityd", "daemon")):
        done = bare.run(command, "--help")
        assert done.returncode == 2
        assert done.stderr.endswith(f"pip install 'infinity-offload[{extra}]'\n"), done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_the_extras_declare_all_dependencies(full_environment: Environment) -> None:
    full_environment.pip("check")


def test_commands_run_as_another_user(full_environment: Environment, work_folder: Path) -> None:
    """Training in a read-only folder writes only to `--out`, and with `--json` prints only the summary."""
    out = work_folder / "tmp" / "out"
    train = ["infinity", "train", "--model", "tiny", "--max_steps", "3", "--json"]
    failed = full_environment.run(*train)
    assert failed.returncode == 2
    assert "--out" in failed.stderr
    assert len(failed.stderr.splitlines()) == 1, failed.stderr
    done = full_environment.run(*train, "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads((out / "summary.json").read_text())
    assert {file.name for file in out.iterdir()} >= {"summary.json", "summary.png", "steps.jsonl"}
    assert not [*(work_folder / "readonly").iterdir()]
    assert out.stat().st_uid == (65534 if os.geteuid() == 0 else os.geteuid())
    for command, expected in ((["infinity", "--version"], infinity.__version__), (["infinityd", "--help"], "--port")):
        done = full_environment.run(*command)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_the_readme_program_runs(full_environment: Environment, work_folder: Path) -> None:
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    (work_folder / "snippet.py").write_text(snippet)
    (work_folder / "snippet.py").chmod(0o644)
    done = full_environment.run("python", str(work_folder / "snippet.py"), folder="tmp")
    assert done.returncode == 0, done.stderr
