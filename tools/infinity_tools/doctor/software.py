"""Checks of the versions of installed software."""

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
    """Return the major and minor number of a version. Raises `ValueError` if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is not a version")
    return int(found[1]), int(found[2])


@check("python")
def python(world: World) -> Verdict:
    """Version of Python in this environment. If it is not supported, create an environment with a newer version."""
    version = platform.python_version()
    if release(version) < release(OLDEST["python"]):
        return problem(f"{version}, older than {OLDEST['python']}", f"install Python {OLDEST['python']} or newer")
    return ok(version)


@check("torch")
def torch(world: World) -> Verdict:
    """Version of torch, compared with the tested versions. infinity uses private FSDP2 APIs. If they have changed in a
    newer version of torch, importing infinity fails with an error."""
    version = installed("torch")
    if version is None:
        return problem("not installed", _TORCH)
    if release(version) < release(OLDEST["torch"]):
        return problem(f"{version}, older than {OLDEST['torch']}", _TORCH)
    if release(version) > release(NEWEST_TORCH):
        newest, (major, minor) = NEWEST_TORCH, release(NEWEST_TORCH)
        return warning(
            f"{version}, newer than {newest}, the newest tested version", f"pip install 'torch<{major}.{minor + 1}'"
        )
    return ok(version)


@check("transformers")
def transformers(world: World) -> Verdict:
    """Version of transformers, which is required for `infinity train`, `weights=` and exports, but not for custom
    models."""
    version = installed("transformers")
    if version is None:
        return note("not installed; not required for custom models", _TRANSFORMERS)
    if release(version) < release(OLDEST["transformers"]):
        return warning(f"{version}, older than {OLDEST['transformers']}", _TRANSFORMERS)
    return ok(version)


@check("numba")
def numba(world: World) -> Verdict:
    """Version of numba, which compiles the CPU code for every `state.format` except `fp32`. Without numba, torch
    executes this code, which is several times slower; a run reports this at startup."""
    version = installed("numba")
    if version is None:
        return note("not installed; every state.format except fp32 is slower on the CPU without it", _NUMBA)
    return ok(version)


SOFTWARE: Final = Group("Software", (python, torch, transformers, numba))
