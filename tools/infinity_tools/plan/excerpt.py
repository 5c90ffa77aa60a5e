"""Measurement of the compute speed of this machine, by training an excerpt of the model for a few steps.

The excerpt is the same model with one layer, then with three. The difference in time is the cost of two layers, and the
remaining time of the first excerpt is spent on the embedding, the head and the loss. The state of the excerpt is paged
as in a real run, so the measured time includes the slowdown that transfers cause.
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
from infinity import Config
from infinity.errors import BudgetError, ConfigError
from infinity.estimate.estimate import Workload
from infinity.memory.limits import available_memory
from infinity.units import MIB, align_up, format_size
from infinity_tools.plan.shapes import shape_of
from infinity_tools.presets import ModelSource, on_meta, shard
from infinity_tools.trial_folders import trial_folders

_LAYERS = (1, 3)
_WARM, _STEPS = 2, 4
_LEAST_HOST_CACHE = 64 * MIB
_BYTES_EACH = 24
"""Upper bound on the memory for training an excerpt, in bytes per parameter, including one gathered copy."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured or extrapolated times of a model on this machine."""

    computation: float
    """Time for forward and backward."""
    fixed: float
    """Time for copies into FSDP2's buffers, for hooks, and for Python overhead."""
    update: float
    """Time to update one parameter."""


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
    """Train an excerpt of a model and return the extrapolated times of the whole model.

    Args:
        source: Model to measure.
        work: Tokens, sequence length, micro-batches and dtype. A single rank is measured.
        share: Fraction of the state that fits in the host cache.
        state_format: Value of `state.format`.
        ranks: Number of ranks that share the cores of this machine.
        folder: Folder for the pages during the measurement. None: the system's temporary folder.
        on_progress: Callback that receives a description of the next activity.

    Raises:
        ConfigError: If the model has too few layers, or is too large to be measured here.
    """
    whole = shape_of(source)
    layers = len(whole.layers)
    if layers < _LAYERS[-1]:
        raise ConfigError(f"{source.name} has {layers} layers; measuring a layer requires at least {_LAYERS[-1]}")
    need = (whole.root.numel + _LAYERS[-1] * max(layer.numel for layer in whole.layers)) * _BYTES_EACH
    if need > available_memory():
        raise ConfigError(
            f"measuring three layers of {source.name} requires about {format_size(need)} of memory, but only "
            f"{format_size(available_memory())} is available; pass --gpu, or --tflops for this processor"
        )
    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(max(1, threads // ranks))
    try:
        for number in _LAYERS:
            on_progress(f"measuring {number} layer{'s' if number > 1 else ''}")
            with trial_folders([str(folder or tempfile.gettempdir())], Config().telemetry) as (place,):
                found.append(_train(_with_layers(source, number), work, share, state_format, place))
    finally:
        torch.set_num_threads(threads)
    one, more = found
    sharing = max(1.0, ranks / threads)  # ranks that share one core compute in turn

    def of_whole(first: float, second: float) -> float:
        each = max(0.0, (second - first) / (_LAYERS[1] - _LAYERS[0]))
        return sharing * (max(0.0, first - each) + layers * each)

    return Measured(
        computation=of_whole(one.computation, more.computation),
        fixed=of_whole(one.fixed, more.fixed),
        update=sharing * one.update,
    )


def _with_layers(source: ModelSource, number: int) -> ModelSource:
    config = copy.deepcopy(source.config)
    text = config.get_text_config()
    text.num_hidden_layers = number
    if isinstance(kinds := getattr(text, "layer_types", None), list):
        text.layer_types = kinds[:number]
    return ModelSource(name=source.name, config=config)


def _train(source: ModelSource, work: Workload, share: float, state_format: str, folder: str) -> Measured:
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
    return Measured(
        computation=median(record.compute_seconds for record in records),
        fixed=median(r.copy_seconds + r.python_seconds + r.collective_seconds for r in records),
        update=median(record.update_seconds for record in records) / shape.parameters,
    )


def _offload(model: torch.nn.Module, settings: dict[str, Any]) -> infinity.PagedOptimizer:
    """Offload the model. The host cache is doubled until it is large enough."""
    while True:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        try:
            return infinity.offload(model, optimizer, settings)
        except BudgetError:
            settings["memory"]["host_bytes"] *= 2
            if settings["memory"]["host_bytes"] > available_memory() // 2:
                raise
