"""Collectives of FSDP2 in process groups with one rank."""

from __future__ import annotations

import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter, foreach_reduce
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


@contextmanager
def collectives_with_one_rank() -> Iterator[Counter[tuple[str, str]]]:
    """Make FSDP2 gather and reduce with one rank as it does with several ranks, instead of copying the tensors.

    Then one GPU suffices to use the streams and the collectives of NCCL.

    Yields:
        The number of collectives by class and backend.
    """
    found: Counter[tuple[str, str]] = Counter()
    with ExitStack() as stack:
        for owner, function, module in (
            (FSDPParamGroup, FSDPParamGroup.unshard, _fsdp_param_group),
            (FSDPParamGroup, FSDPParamGroup.wait_for_unshard, _fsdp_param_group),
            (_fsdp_param_group, foreach_reduce, _fsdp_collectives),
        ):
            changed = _without_shortcuts(function, module)
            stack.enter_context(patch.object(owner, function.__name__, changed))
        for collective in (DefaultAllGather, DefaultReduceScatter):
            stack.enter_context(patch.object(collective, "__call__", _counted(collective, found)))
        yield found


def _without_shortcuts(function: Any, module: Any) -> Any:
    """Return a function whose source does not treat a single rank differently."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    for before, after in (("world_size == 1", "world_size == 0"), ("world_size > 1", "world_size > 0")):
        source = source.replace(before, after)
    local: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + source, module.__file__, "exec"), vars(module), local)
    return local[function.__name__]


def _counted(collective: Any, found: Counter[tuple[str, str]]) -> Any:
    original = collective.__call__

    def call(self: Any, *args: Any, **settings: Any) -> Any:
        backend = settings["group"]._get_backend(settings["output_tensor"].device).name()
        found[collective.__name__, backend] += 1
        return original(self, *args, **settings)

    return call
