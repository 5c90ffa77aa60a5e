"""Checks of the installed software against the tested versions."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from typing import Final

from infinity.optional_dependencies import NEWEST_TORCH, OLDEST
from infinity_tools.doctor.finding import Group, Verdict, check, note, ok, problem, warning
from infinity_tools.doctor.world import World

_TORCH = f"pip install 'torch>={OLDEST['torch']}'"
_NUMBA = "pip install 'infinity-offload[jit]'"
_TRANSFORMERS = "pip install 'infinity-offload[hf]'"


def installed(package: str) -> str | None:
    """Return the version of a package without importing it, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, int]:
    """Return major and minor number of a version. Raises ValueError."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is not a version")
    return int(found[1]), int(found[2])


@check("python")
def python(world: World) -> Verdict:
    """Version of Python that runs this command and the training. Versions below the oldest supported one do not work;
    create an environment with a newer one."""
    version = platform.python_version()
    if release(version) < release(OLDEST["python"]):
        return problem(f"{version}, older than {OLDEST['python']}", f"install Python {OLDEST['python']} or newer")
    return ok(version)


@check("torch")
def torch(world: World) -> Verdict:
    """Version of torch, compared with the tested versions. infinity uses private names of FSDP2. If a newer torch has
    changed them, infinity fails at import with a clear error."""
    version = installed("torch")
    if version is None:
        return problem("not installed", _TORCH)
    if release(version) < release(OLDEST["torch"]):
        return problem(f"{version}, older than {OLDEST['torch']}", _TORCH)
    if release(version) > release(NEWEST_TORCH):
        newest, (major, minor) = NEWEST_TORCH, release(NEWEST_TORCH)
        return warning(
            f"{version}, newer than {newest}, the last one tested", f"pip install 'torch<{major}.{minor + 1}'"
        )
    return ok(version)


@check("transformers")
def transformers(world: World) -> Verdict:
    """Version of transformers, required by `infinity train`, `weights=` and exports, but not by custom models."""
    version = installed("transformers")
    if version is None:
        return note("not installed; custom models do not need it", _TRANSFORMERS)
    if release(version) < release(OLDEST["transformers"]):
        return warning(f"{version}, older than {OLDEST['transformers']}", _TRANSFORMERS)
    return ok(version)


@check("numba")
def numba(world: World) -> Verdict:
    """Version of numba, which compiles the CPU code of every `state.format` except `fp32`. Without it, torch does the
    same work in several times the time; a run reports this at start."""
    version = installed("numba")
    if version is None:
        return note("not installed; every state.format except fp32 is slower without it", _NUMBA)
    return ok(version)


SOFTWARE: Final = Group("Software", (python, torch, transformers, numba))
