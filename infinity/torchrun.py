"""Environment variables that torchrun or an equivalent launcher sets for each rank."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from infinity.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FIX = "launch with torchrun, or unset the variable"


def number(name: str, default: int) -> int:
    """Return the value of an environment variable as a non-negative integer, or `default` if it is not set.

    Raises:
        ConfigError: if the value is not a non-negative integer.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise ConfigError(f"{name}={text!r} in the environment is not a non-negative integer; {_FIX}")
    return int(text)


def variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment variables for one of `count` ranks on this machine that rendezvous at a local port."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def several_nodes(nodes: int, ranks_per_node: int) -> tuple[list[str], str]:
    """Return the torchrun command that starts ranks on the same nodes again, without the script, and a shell comment.

    The options are taken from the torchrun that started this process. With another launcher, node ranks are fixed, and
    the first node is the one at MASTER_ADDR.
    """
    options = _options_of_parent()
    if not options:
        address, port = os.environ.get("MASTER_ADDR", "HOST"), os.environ.get("MASTER_PORT", "29500")
        options = ["--nnodes", str(nodes), "--node-rank", "0", "--master-addr", address, "--master-port", port]
        options += ["--nproc-per-node", str(ranks_per_node)]
    dynamic = any(word.replace("_", "-").startswith(("--rdzv-backend", "--rdzv-endpoint")) for word in options)
    own = "" if dynamic else ", with its own --node-rank"
    return ["torchrun", *options], f"# on each of {nodes} nodes{own}"


def _options_of_parent() -> list[str]:
    """Return the options of torchrun if it is the parent of this process, and otherwise an empty list."""
    with suppress(OSError):
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").split("\0")[:-1]
        for start, word in enumerate(words[:4]):
            if os.path.basename(word) == "torchrun" or word == "torch.distributed.run":
                from torch.distributed.run import get_args_parser

                given = get_args_parser().parse_args(words[start + 1 :])
                options = words[start + 1 : len(words) - 1 - len(given.training_script_args)]
                return [word for word in options if word not in ("-m", "--module", "--")]
    return []


def check_slurm(nproc: int | None) -> None:
    """Check that srun has not started several processes that would each train alone.

    Args:
        nproc: number of ranks that this process starts itself, if any.

    Raises:
        ConfigError: if it has. The message contains the line to type.
    """
    tasks = number("SLURM_NTASKS", 1)
    if tasks > 1 and "RANK" not in os.environ and (nproc is None or "SLURM_STEP_ID" in os.environ):
        raise ConfigError(
            f"SLURM_NTASKS={tasks}, but srun does not set RANK, so {tasks} processes would train the same model; type: "
            "srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=$SLURM_GPUS_ON_NODE "
            "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout=100 "
            "--rdzv-backend=c10d --rdzv-endpoint=$(scontrol show hostnames $SLURM_NODELIST | head -1):29500 "
            "-m infinity_tools train …"
        )


def launched() -> bool:
    """Return whether the environment says that a launcher started this process as a rank.

    Raises:
        ConfigError: if the variables are incomplete or contradict each other.
    """
    world_size = number("WORLD_SIZE", 1)
    if "RANK" not in os.environ:
        if world_size > 1:
            raise ConfigError(f"WORLD_SIZE={world_size} is set in the environment, but RANK is not set; {_FIX}")
        return False
    if missing := [name for name in _NEEDED if not os.environ.get(name)]:
        raise ConfigError(f"RANK is set in the environment without {', '.join(missing)}; launch with torchrun")
    if not 0 < number("MASTER_PORT", 0) < 1 << 16:
        raise ConfigError(f"MASTER_PORT={os.environ['MASTER_PORT']!r} in the environment is not a valid port; {_FIX}")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if number(rank, 0) >= number(size, world_size):
            raise ConfigError(
                f"{rank}={number(rank, 0)} in the environment is not below {size}={number(size, world_size)}; {_FIX}"
            )
    return True
