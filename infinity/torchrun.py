"""Environment variables that torchrun or an equivalent launcher sets for each rank."""

from __future__ import annotations

import os

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
