"""Writes docs/reference/doctor.md: what the command is, and what each check means."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console

from infinity_tools.doctor.control_groups import GROUPS
from infinity_tools.doctor.finding import Check, Finding, Group, Status
from infinity_tools.doctor.show import shown
from infinity_tools.doctor.world import Folder, World

_HEAD = """# infinity doctor

`infinity doctor /nvme0/run /nvme1/run` looks at what this machine can do for infinity, and says why not more. Run it
before the first training on a machine, in the same container and as the same user, with the folders that are to be in
`storage.paths`. It changes nothing; small files that it writes into the folders are gone afterwards.

Each check is a line with a verdict and, where that is not ok, a fix:

```text
{sample}
```

| verdict | means | exit status |
|---|---|---|
| ok | nothing to do | 0 |
| note | worth to know | 0 |
| warning | training works, but slower, or not in every case | 1 |
| problem | training cannot work | 2 |

The worst one counts. A wrong command line is 2, too, with one line on stderr that begins with `error:`. A check that
fails itself, or gets no answer in time, is a warning that says so, and the others go on.

`--json` prints a list of objects with `check`, `status`, `value`, `fix` (empty where it is ok) and `folder` (null where
it is about the machine). `--report` prints Markdown for a bug report: versions, verdicts, mounts of the folders, limits
and variables that matter, without the names of host and user. Look over it before you publish it: folders are named.

Of a folder that cannot be used only `folder` is checked. The lists below are made from the checks by `make docs`.
"""

_SAMPLE = (
    Finding(check="file system", status=Status.OK, value="xfs"),
    Finding(check="bandwidth", status=Status.NOTE, value="not measured", fix="infinity probe /nvme0/run"),
    Finding(
        check="io_uring",
        status=Status.WARNING,
        value='io_uring refused: EPERM (sysctl kernel.io_uring_disabled); engine = "auto" takes threads',
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
        text += f"## Each folder\n\n{_rows(group.of_folders)}\n"
    return text + f"## {group.title}\n\n{_rows(group.checks)}"


def _rows(checks: Sequence[Check[World]] | Sequence[Check[Folder]]) -> str:
    lines = ["| check | what it looks at |", "|---|---|"]
    lines += [f"| {one.name} | {one.meaning} |" for one in checks]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
