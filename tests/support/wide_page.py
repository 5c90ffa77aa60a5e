"""Prints docs/reference/compatibility.md from the tables of the wide suite: ``make docs``."""

from __future__ import annotations

from collections.abc import Sequence

from support import habits, wide_models, wide_optimizers
from support.rows import EQUAL, Row

HEAD = """# Compatibility

What was tried against plain FSDP2 in memory, and how it ends. *Equal*: the same bits. *Refused*: an error that says why
and what to do, before anything is wrong. Every line is a test; `make test` runs the quick ones and `make test-wide`
all of them. This page is made from their tables by `make docs`.
"""


def tables() -> dict[str, Sequence[Row]]:
    """Return the rows of every table by its title."""
    return {
        "Optimizers": wide_optimizers.ROWS,
        "Model families of transformers": wide_models.ROWS,
        "Habits of training loops": habits.ROWS,
    }


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for title, rows in tables().items():
        equal = sum(row.outcome == EQUAL for row in rows)
        parts.append(f"\n## {title}\n\n{len(rows)} tried: {equal} equal, {len(rows) - equal} refused.\n\n")
        parts.append("| | outcome | |\n|---|---|---|\n")
        parts += [f"| {row.name} | {row.outcome} | {_note(row)} |\n" for row in rows]
    return "".join(parts)


def _note(row: Row) -> str:
    """Return what a reader should know: of a refusal without a note, the words of its error."""
    return row.note or (f"*… {row.words} …*" if row.words and row.words.replace(" ", "").isalnum() else "")


if __name__ == "__main__":
    print(page(), end="")
