"""Packages that only a part of `infinity` needs, the extras that bring them, and which releases are supported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from infinity.errors import MissingPackageError

EXTRAS = {
    "cli": ("typer", "rich", "matplotlib", "transformers", "tokenizers"),
    "daemon": ("typer", "prometheus_client"),
    "data": ("datasets", "pyarrow"),
    "hf": ("transformers", "tokenizers"),
    "qlora": ("torchao", "peft", "transformers", "tokenizers"),
    "peft": ("peft", "transformers", "tokenizers"),
    "trainer": ("transformers", "tokenizers", "accelerate"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "torchtitan": ("torchtitan", "tyro"),
    "jit": ("numba", "llvmlite"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
"""Import names by extra; the `pip install` of the extra brings them."""

OLDEST = {"python": "3.11", "torch": "2.11", "transformers": "5.14"}
"""The oldest releases that are supported, as in pyproject.toml."""

NEWEST_TORCH = "2.15"
"""The newest release of torch that the parity tests passed with; with the oldest they did, too."""


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Turn the failed import of a package of an extra into one line that says what to install.

    Args:
        extra: whose packages are imported inside.
        what: needs them: the beginning of the message.

    Raises:
        MissingPackageError: one of them is not installed.
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


def run_command(name: str, extra: str, module: str) -> None:
    """Run a console script: the `main` of a module whose imports need an extra.

    Without them it ends with status 2 and one line on stderr, of one rank of each node.
    """
    try:
        with needs(extra, f"the command {name}"):
            main = import_module(module).main
    except MissingPackageError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"{name}: {error}\n")
        sys.exit(2)
    main()
