"""New virtual environments without network access, with packages linked from the environment of the tests.

The package under test is installed from its wheel. Its dependencies are linked according to the metadata of the
distributions, so that an environment contains only declared dependencies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

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


def _needed(requirements: Iterable[str], extras: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Return the installed distributions that satisfy requirements, and their dependencies, by name."""
    found: dict[str, metadata.Distribution] = {}
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
        distribution = found[name] = metadata.distribution(name)
        assert requirement.specifier.contains(distribution.version, prereleases=True), f"{requirement} is not installed"
        left += [(Requirement(line), inner) for line in distribution.requires or ()]
    return found


def without_checkout() -> dict[str, str]:
    """Return the environment variables of this process without variables that make Python import this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@dataclass(frozen=True)
class Environment:
    """A virtual environment, whose commands run as an unprivileged user."""

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
        for distribution in _needed(requirements, extras).values():
            for file in distribution.files or ():
                if ".." in file.parts or (target := self.site / file).exists():
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(str(distribution.locate_file(file)), str(target))

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
