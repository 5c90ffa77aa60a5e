"""Whether what is installed is what infinity was tested with."""

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
    """Return the version of a package without importing it; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version. Raises ValueError."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is no version")
    return int(found[1]), int(found[2])


@check("python")
def python(world: World) -> Verdict:
    """The version of Python that runs this command, and so the training. Below the oldest supported one nothing
    works: make an environment with a newer one."""
    version = platform.python_version()
    if release(version) < release(OLDEST["python"]):
        return problem(f"{version}, older than {OLDEST['python']}", f"install Python {OLDEST['python']} or newer")
    return ok(version)


@check("torch")
def torch(world: World) -> Verdict:
    """The installed version of torch, against those that the tests pass with. infinity uses private names of FSDP2,
    which a newer torch may have changed: it then refuses to start, in one line, and trains no wrong bit."""
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
    """The installed version of transformers, which `infinity train`, `weights=` and exports need; models of your own
    do not."""
    version = installed("transformers")
    if version is None:
        return note("not installed; models of your own need none", _TRANSFORMERS)
    if release(version) < release(OLDEST["transformers"]):
        return warning(f"{version}, older than {OLDEST['transformers']}", _TRANSFORMERS)
    return ok(version)


@check("numba")
def numba(world: World) -> Verdict:
    """The installed version of numba, which compiles what a `state.format` other than `fp32` costs on the CPU. Without
    it, or where it does not compile, torch does the same in several times the time, and a run says so at its start."""
    version = installed("numba")
    if version is None:
        return note("not installed; a state.format other than fp32 is slower without", _NUMBA)
    return ok(version)


SOFTWARE: Final = Group("Software", (python, torch, transformers, numba))
