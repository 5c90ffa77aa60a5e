"""Print docs/reference/doctor.md: a description of the command and of each check (``make docs``)."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from rich.console import Console

from infinity_tools.doctor.doctor_command import GROUPS, shown
from infinity_tools.doctor.finding import Check, Finding, Group, Status
from infinity_tools.doctor.world import Folder, World

_HEAD = """# infinity doctor

`infinity doctor /nvme0/run /nvme1/run` checks whether a machine is ready for infinity and suggests fixes. Run it before
the first training on a machine, in the same container and as the same user, with the folders for `storage.paths`. It
writes small temporary files to the folders and changes nothing else.

Each check prints a line with its status and, if the status is not ok, a fix:

```text
{sample}
```

| status | meaning | exit status |
|---|---|---|
| ok | no action needed | 0 |
| note | worth knowing | 0 |
| warning | training works, but more slowly or not in every case | 1 |
| problem | training does not work | 2 |

The command exits with the highest exit status among its findings. An invalid command line also exits with 2 and prints
one line to stderr that begins with `error:`. A check that fails or times out is reported as a warning, and the other
checks continue.

`--json` prints a list of objects with `check`, `status`, `value`, `fix` (empty if the status is ok) and `folder` (null
if the check applies to the machine). The output contains paths, which may contain your user name.

If a folder is not usable, only the check `folder` runs for it. `make docs` generates the lists below from the checks.
"""

_SAMPLE = (
    Finding(check="file system", status=Status.OK, value="xfs"),
    Finding(check="bandwidth", status=Status.NOTE, value="not measured", fix="infinity probe /nvme0/run"),
    Finding(
        check="io_uring",
        status=Status.WARNING,
        value="io_uring is not available: EPERM (disabled by sysctl kernel.io_uring_disabled); "
        'engine = "auto" uses threads',
        fix="as root: sysctl kernel.io_uring_disabled=0",
    ),
)


def page() -> str:
    """Return the text of docs/reference/doctor.md."""
    return "\n".join([_HEAD.replace("{sample}", _sample()), *map(_section, GROUPS)])


def _sample() -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(shown("", _SAMPLE))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().strip().splitlines())


def _section(group: Group) -> str:
    text = ""
    if group.of_folders:
        text += f"## Each folder\n\n{_list(group.of_folders)}\n"
    return text + f"## {group.title}\n\n{_list(group.checks)}"


def _list(checks: Sequence[Check[World]] | Sequence[Check[Folder]]) -> str:
    return "".join(
        textwrap.fill(f"- **{one.name}**: {one.meaning}", 120, subsequent_indent="  ", break_on_hyphens=False) + "\n"
        for one in checks
    )


if __name__ == "__main__":
    print(page(), end="")
