"""Print a seccomp profile that allows io_uring: `python deploy/seccomp.py < default.json > infinity.json`.

The input is Docker's default profile (`profiles/seccomp/default.json` of the moby project). The output is a profile in
the OCI format, which Docker and Kubernetes read, for containers without capabilities on processors like this one.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from typing import Any, Final

IO_URING: Final = ("io_uring_setup", "io_uring_enter", "io_uring_register")
ARCHITECTURES: Final = {"x86_64": ("SCMP_ARCH_X86_64", "amd64"), "aarch64": ("SCMP_ARCH_AARCH64", "arm64")}
"""Names of a processor architecture in seccomp and in the conditions of Docker's profile."""
_KEPT: Final = ("names", "action", "errnoRet", "args")


def with_io_uring(default: Mapping[str, Any], machine: str) -> dict[str, Any]:
    """Return Docker's profile with io_uring, and without the rules that do not apply.

    The OCI format has no conditions, so a rule for containers with a capability would apply to all containers.
    """
    architecture, condition = ARCHITECTURES[machine]
    (others,) = (one["subArchitectures"] or [] for one in default["archMap"] if one["architecture"] == architecture)
    rules = [
        {key: rule[key] for key in _KEPT if key in rule} for rule in default["syscalls"] if _applies(rule, condition)
    ]
    return {
        "defaultAction": default["defaultAction"],
        "defaultErrnoRet": default.get("defaultErrnoRet", 1),
        "architectures": [architecture, *others],
        "syscalls": [*rules, {"names": [*IO_URING], "action": "SCMP_ACT_ALLOW"}],
    }


def _applies(rule: Mapping[str, Any], architecture: str) -> bool:
    includes, excludes = rule.get("includes") or {}, rule.get("excludes") or {}
    return (
        not includes.get("caps")
        and architecture in includes.get("arches", [architecture])
        and architecture not in excludes.get("arches", [])
    )


if __name__ == "__main__":
    json.dump(with_io_uring(json.load(sys.stdin), platform.machine()), sys.stdout, indent=1)
    sys.stdout.write("\n")
