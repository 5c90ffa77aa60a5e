"""Processes of tests in which all that takes long to import is there already, so that one starts in a moment."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

from infinity import torchrun

_LOADED = ["infinity.run.offload", "torch._dynamo", "transformers.trainer", "peft"]


def ready_made() -> ForkServerContext:
    """Return how to start processes by forking one that has imported torch and transformers and has never computed.

    It is started at the first use, with the environment of that moment, and is there as long as this process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    return context


def free_port() -> int:
    """Return a port of this machine that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def run_program(
    file: Path, *arguments: object, folder: Path, environment: Mapping[str, str], ranks: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, in a process of its own that is `ready_made`, as `python FILE ARGUMENTS` would.

    Args:
        environment: added to that of this process.
        ranks: run so many, each told who it is as torchrun tells it.

    Returns:
        What they printed together, and the first status that is not 0.
    """
    with tempfile.TemporaryDirectory() as apart:
        said = [Path(apart, name) for name in ("out", "err")]
        told = [dict(environment)]
        if ranks:
            port = free_port()
            told = [{**environment, **torchrun.variables(rank, ranks, port)} for rank in range(ranks)]
        words = [str(file), *map(str, arguments)]
        inherited = dict(os.environ)
        processes = [
            ready_made().Process(target=_be, args=(words, str(folder), inherited | each, [*map(str, said)]))
            for each in told
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(900)
            process.kill()
            process.join()
        failed = [process.exitcode for process in processes if process.exitcode]
        out, err = (file.read_text() if file.exists() else "" for file in said)
        return subprocess.CompletedProcess(words, failed[0] if failed else 0, out, err)


def _be(words: list[str], folder: str, environment: dict[str, str], said: list[str]) -> None:
    """Become a program."""
    for descriptor, name in enumerate(said, start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, sys.path[0:1] = words, [str(Path(words[0]).parent)]
    runpy.run_path(words[0], run_name="__main__")
