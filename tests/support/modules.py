"""Modules of a package and their imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import infinity

PACKAGE = Path(infinity.__file__).parent


ROOT = PACKAGE.parent


def modules(folder: Path, package: str) -> dict[str, Path]:
    """Return the files of a package by dotted module name."""
    found = {}
    for file in folder.rglob("*.py"):
        parts = [package, *file.relative_to(folder).with_suffix("").parts]
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


@cache
def imported(file: Path) -> tuple[str, ...]:
    """Return the dotted names of all imports in a file, except imports under `TYPE_CHECKING`."""
    return tuple(_imports(ast.parse(file.read_text()), file))


def _imports(tree: ast.Module, file: Path) -> Iterator[str]:
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    typing_only = {id(inner) for test in tests for statement in test.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = modules(PACKAGE, "infinity")
