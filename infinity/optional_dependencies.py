"""Optional packages, the extras that install them, and supported versions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from infinity.errors import MissingPackageError

EXTRAS = {
    "cli": ("typer", "rich", "matplotlib", "transformers", "tokenizers"),
    "daemon": ("typer", "prometheus_client", "aiofiles"),
    "hf": ("transformers", "tokenizers"),
    "qlora": ("torchao", "peft", "transformers", "tokenizers"),
    "peft": ("peft", "transformers", "tokenizers"),
    "trainer": ("transformers", "tokenizers", "accelerate"),
    "train": (
        "trl", "datasets", "pyarrow", "yaml", "peft", "accelerate", "transformers", "tokenizers", "typer", "rich",
        "matplotlib",
    ),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "torchtitan": ("torchtitan", "tyro"),
    "jit": ("numba", "llvmlite"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}  # fmt: skip
"""Import names of the packages in each extra."""

OLDEST = {"python": "3.11", "torch": "2.11", "transformers": "5.14"}
"""Oldest supported versions, as in pyproject.toml."""

NEWEST_TORCH = "2.15"
"""Newest torch version with which the parity tests pass. They also pass with the oldest supported version."""


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Turn a failed import of an optional package into an error that tells the user what to install.

    Args:
        extra: extra that contains the packages imported in the block.
        what: name of the feature that requires the packages. It is the first part of the message.

    Raises:
        MissingPackageError: if one of the packages is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS[extra]:
            raise
        raise MissingPackageError(
            f"{what} needs the package {package}, which is not installed: pip install 'infinity-offload[{extra}]'"
        ) from error


def import_command(name: str, extra: str, module: str) -> Callable[[], None]:
    """Return the `main` function of a console script's module, whose imports require an extra.

    If a package is missing, one rank per node prints one line to stderr, and the process exits with status 2.
    """
    try:
        with needs(extra, f"the command {name}"):
            main: Callable[[], None] = import_module(module).main
    except MissingPackageError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"{name}: {error}\n")
        sys.exit(2)
    return main
