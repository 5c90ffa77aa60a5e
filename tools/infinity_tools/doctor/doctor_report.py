"""Markdown report of findings and system details for bug reports, without host and user names."""

from __future__ import annotations

import getpass
import os
import platform
import re
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import infinity
from infinity.io.block_devices import mount_of
from infinity_tools.doctor.finding import Finding
from infinity_tools.doctor.software import installed
from infinity_tools.doctor.world import World

PACKAGES: Final = (
    "torch", "transformers", "numpy", "safetensors", "xxhash", "psutil", "typer", "rich", "prometheus-client",
)  # fmt: skip
"""Packages whose versions are included in the report."""

VARIABLES: Final = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "THP_MEM_ALLOC_ENABLE", "RANK",
    "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME",
    "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "MALLOC_ARENA_MAX", "LD_PRELOAD", "TMPDIR", "XDG_RUNTIME_DIR",
)  # fmt: skip
"""Environment variables that are included in the report if set. Others are omitted because they may contain secrets."""

PRESENCE: Final = ("MASTER_ADDR",)
"""Environment variables whose values are omitted because they contain host names."""

_LIMITS: Final = ("MEMLOCK", "NOFILE", "AS", "FSIZE", "DATA", "STACK", "NPROC")


def report_of(findings: Sequence[Finding], world: World) -> str:
    parts = [
        "### infinity doctor",
        _table(("component", "version"), _versions(world)),
        _table(("check", "", "found"), _found(findings)),
        _table(("folder", "file system", "options"), _mounts(world)),
        _table(("limit", "soft", "hard"), _limits()),
        _table(("variable", "value"), _variables(os.environ)),
    ]
    return without_names("\n\n".join(parts) + "\n")


def without_names(text: str) -> str:
    """Replace the home folder by `~`, and the host and user names by placeholders."""
    host, home = socket.gethostname(), os.path.expanduser("~").rstrip("/")
    if home not in ("", "~"):  # for example, root in a container, or a user without a home folder
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    for name, instead in ((host, "<host>"), (host.partition(".")[0], "<host>"), (_user(), "<user>")):
        if name and name not in ("root", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # the user has no name
        return ""


def _table(headings: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in line)} |" for line in lines)


def _versions(world: World) -> Iterator[tuple[str, ...]]:
    yield "infinity", infinity.__version__
    yield "Python", f"{platform.python_implementation()} {platform.python_version()}"
    for package in PACKAGES:
        yield package, installed(package) or "not installed"
    yield "system", " ".join((platform.system(), platform.release(), platform.version(), platform.machine()))
    named = re.search(r'^PRETTY_NAME="?([^"\n]*)', world.read("etc/os-release") or "", re.MULTILINE)
    yield "distribution", named[1] if named else "unknown"
    yield "C library", " ".join(platform.libc_ver()) or "unknown"
    yield "seccomp, uid_map", f"{world.own('Seccomp') or '?'}, {world.read('proc/self/uid_map') or '?'}"


def _found(findings: Sequence[Finding]) -> Iterator[tuple[str, ...]]:
    for one in findings:
        yield f"{one.check}{f' of {one.folder}' if one.folder else ''}", one.status, one.value


def _mounts(world: World) -> Iterator[tuple[str, ...]]:
    for at in world.folders:
        try:
            mount = mount_of(at.place, at.root / "proc/self/mountinfo")
        except OSError as error:
            yield at.path, f"? ({error.strerror})", ""
            continue
        harmless = [
            word for word in mount.options.split(",") if not re.match(r"(addr|clientaddr|user\w*|pass\w*)=", word)
        ]
        yield at.path, mount.kind, ",".join(harmless)


def _limits() -> Iterator[tuple[str, ...]]:
    for name in _LIMITS:
        soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        yield name, *("unlimited" if value == resource.RLIM_INFINITY else str(value) for value in (soft, hard))


def _variables(environment: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    for name in VARIABLES:
        if name in environment:
            yield name, environment[name]
    for name in PRESENCE:
        if name in environment:
            yield name, "is set"
