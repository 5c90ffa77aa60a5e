"""How fast this machine computes a model: a few steps of an excerpt of it, trained as a run would train it.

The excerpt is the same model with one layer, then with three. What the second takes longer is two layers; what is left
of the first is embedding, head and loss. Its state is paged like that of a run, so what transfers take from computation
is in what is measured.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import infinity
from infinity.errors import BudgetError, ConfigError
from infinity.estimate.estimate import Workload
from infinity.memory.limits import available_memory
from infinity.units import MIB, align_up, format_size
from infinity_tools.plan.shapes import shape_of
from infinity_tools.presets import ModelSource, on_meta, shard

_LAYERS = (1, 3)
_WARM, _STEPS = 2, 4
_LEAST_HOST_CACHE = 64 * MIB
_BYTES_EACH = 24
"""Memory that a parameter of an excerpt may take: it is trained in a host cache of any size, and gathered once."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of a step of the whole model on this machine, at the tokens that were measured."""

    computation: float
    """Forward and backward."""
    fixed: float
    """Copies into FSDP2's buffers, hooks, Python."""
    update: float
    """To update one parameter."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step of an excerpt, in seconds."""

    computation: float
    fixed: float
    updates: float


def measure(
    source: ModelSource,
    work: Workload,
    *,
    share: float,
    state_format: str,
    ranks: int,
    folder: Path | None,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Measured:
    """Train an excerpt of a model and return what the whole one would take.

    Args:
        source: the model.
        work: tokens, sequence, micro-batches and dtype; one rank is measured.
        share: of its state that the host cache has room for.
        state_format: setting `state.format`.
        ranks: of this machine, which share its cores.
        folder: where its pages lie meanwhile; None: the system's temporary folder.
        on_progress: is told what is done next.

    Raises:
        ConfigError: it has too few layers, or is too large to be measured here.
    """
    whole = shape_of(source)
    layers = len(whole.layers)
    if layers < _LAYERS[-1]:
        raise ConfigError(f"{source.name} has {layers} layers; at least {_LAYERS[-1]} are needed to measure one")
    need = (whole.root.numel + _LAYERS[-1] * max(layer.numel for layer in whole.layers)) * _BYTES_EACH
    if need > available_memory():
        raise ConfigError(
            f"measuring three layers of {source.name} takes about {format_size(need)} of memory, and "
            f"{format_size(available_memory())} are left; name --gpu, or --tflops that the processor reaches"
        )
    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(max(1, threads // ranks))
    try:
        for number in _LAYERS:
            on_progress(f"measuring {number} layer{'s' if number > 1 else ''}")
            with tempfile.TemporaryDirectory(dir=folder, prefix="infinity-plan-") as place:
                found.append(_train(_with_layers(source, number), work, share, state_format, place))
    finally:
        torch.set_num_threads(threads)
    (one, parameters), (more, _) = found
    updates = one.updates / parameters

    def of_whole(first: float, second: float) -> float:
        each = max(0.0, (second - first) / (_LAYERS[1] - _LAYERS[0]))
        return max(0.0, first - each) + layers * each

    return Measured(
        computation=of_whole(one.computation, more.computation),
        fixed=of_whole(one.fixed, more.fixed),
        update=updates,
    )


def _with_layers(source: ModelSource, number: int) -> ModelSource:
    """Return the model with so many of its layers."""
    config = copy.deepcopy(source.config)
    text = config.get_text_config()
    text.num_hidden_layers = number
    if isinstance(kinds := getattr(text, "layer_types", None), list):
        text.layer_types = kinds[:number]
    return ModelSource(name=source.name, config=config)


def _train(source: ModelSource, work: Workload, share: float, state_format: str, folder: str) -> tuple[_Step, int]:
    """Take some steps; return the median of those after the first two, and the number of parameters."""
    model = on_meta(source)
    shape = shape_of(source)
    mesh = infinity.mesh("cpu")
    shard(model, mesh, bf16=work.computed == "bfloat16", checkpointing=work.checkpointing and work.micro_batches == 1)
    settings: dict[str, Any] = {
        "storage": {"paths": [folder]},
        "state": {"format": state_format},
        "run": {"keep": "never"},
        "memory": {"host_bytes": max(_LEAST_HOST_CACHE, align_up(int(18 * share * shape.parameters), MIB))},
    }
    optimizer = _offload(model, settings)
    rows = max(1, int(work.tokens) // work.sequence)
    if work.micro_batches > 1 and work.layer_major:
        infinity.micro_batches(model, work.micro_batches)
    if work.loss_tokens is not None:
        infinity.sliced_loss(model, work.loss_tokens)
    try:
        for _ in range(_WARM + _STEPS):
            batch = torch.randint(shape.vocabulary, (rows, work.sequence))
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        records = optimizer.records[_WARM:]
    finally:
        optimizer.close()
    return _Step(
        computation=median(record.compute_seconds for record in records),
        fixed=median(r.copy_seconds + r.python_seconds + r.collective_seconds for r in records),
        updates=median(record.update_seconds for record in records),
    ), shape.parameters


def _offload(model: torch.nn.Module, settings: dict[str, Any]) -> infinity.PagedOptimizer:
    """Offload with a host cache that is large enough."""
    while True:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        try:
            return infinity.offload(model, optimizer, settings)
        except BudgetError:
            settings["memory"]["host_bytes"] *= 2
            if settings["memory"]["host_bytes"] > available_memory() // 2:
                raise
