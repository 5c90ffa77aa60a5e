"""Imports of private PyTorch APIs, with an error message for torch releases that lack one of them."""

from __future__ import annotations

import torch

from infinity.errors import UnsupportedError
from infinity.optional_dependencies import NEWEST_TORCH, OLDEST

__all__ = [
    "TESTED",
    "CheckpointWrapper",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "FSDPParam",
    "FSDPState",
    "ShardedState",
    "TrainingState",
    "_current_graph_task_id",
    "_disabled_torch_function_impl",
    "_no_grad_trunc_normal_",
    "_storage_Use_Count",
    "lacking",
]

TESTED = f"{OLDEST['torch']} to {NEWEST_TORCH}"
"""Range of supported torch releases."""


def lacking(missing: str) -> UnsupportedError:
    """Return the error to raise if this torch release lacks a private API."""
    return UnsupportedError(
        f"torch {torch.__version__} is not supported: {missing}; install torch {TESTED}, with which this release of "
        "infinity was tested, or a newer release of infinity"
    )


try:
    from torch._C import (
        _current_graph_task_id,
        _disabled_torch_function_impl,
        _storage_Use_Count,  # type: ignore[attr-defined]
    )
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.nn.init import _no_grad_trunc_normal_
except ImportError as error:
    raise lacking(str(error).partition(" (")[0]) from None  # without the file path
