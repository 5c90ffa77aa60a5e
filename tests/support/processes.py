"""Processes forked from a server that has imported torch and transformers, so that they start quickly."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest.mock import patch

from infinity import torchrun

_LOADED = ["infinity.run.offload", "torch._dynamo", "transformers.trainer", "peft", "trl.trainer.sft_trainer"]
_LOADED += ["infinity_tools.train.run"]
server_environment: dict[str, str] = {}
"""Environment of the server, without variables that a single test sets. conftest fills it."""


def fork_server() -> ForkServerContext:
    """Return a multiprocessing context whose server has imported torch and transformers, but never used them.

    The server starts at first use and runs until this process ends.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    with patch.dict(os.environ, server_environment, clear=bool(server_environment)):
        forkserver.ensure_running()
    return context


def free_port() -> int:
    """Return a port that is currently unused on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def run_program(
    file: Path, *arguments: object, folder: Path, environment: Mapping[str, str], ranks: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, in a process of `fork_server`, like `python FILE ARGUMENTS`.

    Args:
        file: Script.
        arguments: Command-line arguments.
        folder: Current directory of the script.
        environment: Environment variables in addition to those of this process.
        ranks: Number of processes, each with the variables that torchrun sets. 0: one process without them.

    Returns:
        Output of all processes, and the first exit status that is not 0.
    """
    with tempfile.TemporaryDirectory() as temporary:
        outputs = [Path(temporary, name) for name in ("out", "err")]
        variables = [dict(environment)]
        if ranks:
            port = free_port()
            variables = [{**environment, **torchrun.variables(rank, ranks, port)} for rank in range(ranks)]
        words = [str(file), *map(str, arguments)]
        inherited = dict(os.environ)
        processes = [
            fork_server().Process(target=_run_script, args=(words, str(folder), inherited | each, [*map(str, outputs)]))
            for each in variables
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(900)
            process.kill()
            process.join()
        failed = [process.exitcode for process in processes if process.exitcode]
        out, err = (file.read_text() if file.exists() else "" for file in outputs)
        return subprocess.CompletedProcess(words, failed[0] if failed else 0, out, err)


def _run_script(words: list[str], folder: str, environment: dict[str, str], outputs: list[str]) -> None:
    for descriptor, name in enumerate(outputs, start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, sys.path[0:1] = words, [str(Path(words[0]).parent)]
    import torch

    torch.set_num_threads(1)  # threads of several processes that spin on the same cores are many times slower
    runpy.run_path(words[0], run_name="__main__")
