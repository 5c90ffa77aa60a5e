"""Print docs/reference/compatibility.md, generated from the tables of the wide suite (``make docs``)."""

from __future__ import annotations

from collections.abc import Sequence

from support import wide_models
from support.rows import EQUAL, Row
from wide import loop_patterns, wide_optimizers

HEAD = """# Compatibility

Optimizers, transformers models and training-loop patterns that were compared with plain FSDP2 in memory. *Equal* means
that all results are bitwise equal. *Not supported* means that an error with the reason and a fix is raised before any
result is wrong. The notes of some patterns name values of `update.schedule` with which they are not supported. Every
row is a test: `make test` runs a selection and `make test-wide` runs all of them. `make docs` generates this page.
"""


def tables() -> dict[str, Sequence[Row]]:
    """Return the rows of each table by its title."""
    return {
        "Optimizers": wide_optimizers.ROWS,
        "Transformers models": wide_models.ROWS,
        "Training-loop patterns": loop_patterns.ROWS,
    }


_FIRST_COLUMN = {"Optimizers": "optimizer", "Transformers models": "model", "Training-loop patterns": "pattern"}


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for title, rows in tables().items():
        equal = sum(row.outcome == EQUAL for row in rows)
        parts.append(f"\n## {title}\n\n{len(rows)} tested: {equal} equal, {len(rows) - equal} not supported.\n\n")
        parts.append(f"| {_FIRST_COLUMN[title]} | outcome | note |\n|---|---|---|\n")
        parts += [f"| {row.name} | {row.outcome} | {row.note} |\n" for row in rows]
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
