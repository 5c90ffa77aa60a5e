"""Trials in the worker process: a model is offloaded with the settings of a candidate and trained for a few steps."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.config import Config, RunConfig
from infinity.errors import ConfigError, InfinityError
from infinity_tools.trial_folders import empty
from infinity_tools.tune.outcome import Bounds, Outcome

if TYPE_CHECKING:
    from infinity import PagedOptimizer
    from infinity_tools.presets import ModelSource

WARM = 2
"""Steps that are not counted: the first records the trace, and the second fills the host cache."""
_LEAST_STEPS, _LEAST_SECONDS, _MOST_STEPS = 3, 1.0, 20
"""Minimum number of counted steps, their minimum duration in seconds, and their maximum number."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model and batch of a training run, named like the options of `infinity tune`."""

    model: str
    dtype: str
    activation_checkpointing: bool
    batch_tokens: int
    micro_tokens: int | None
    loss_tokens: int | None
    seq: int
    max_grad_norm: float | None
    threads: int


class Trials:
    """A workload that can be trained with any settings."""

    def __init__(self, workload: Workload, stopped: Callable[[], bool] = lambda: False) -> None:
        """Check the workload. `stopped` is called before every step.

        Raises:
            ConfigError: if the model is invalid, or the batch does not suit it.
        """
        import torch

        import infinity
        from infinity_tools.presets import best_dtype, find_model

        if workload.threads:
            torch.set_num_threads(workload.threads)
        self._workload, self._stopped = workload, stopped
        self._runs: list[str] = []  # ids of the runs of all trials
        self._source = find_model(workload.model)
        self._mesh = infinity.mesh()
        _check_batch(workload, self._source)
        self._dtype = best_dtype() if workload.dtype == "auto" else workload.dtype

    def facts(self) -> dict[str, Any]:
        """Return facts about model and device."""
        import torch

        from infinity_tools.presets import count_parameters, on_meta

        cuda, threads = self._mesh.device_type == "cuda", torch.get_num_threads()
        return {
            "model": self._source.name,
            "parameters": count_parameters(on_meta(self._source)),
            "dtype": self._dtype,
            "device": torch.cuda.get_device_name() if cuda else f"cpu, {threads} thread{'s' if threads > 1 else ''}",
            "torch": torch.__version__,
        }

    def run(self, settings: Config, candidate: Mapping[str, Any], folders: Sequence[str], bounds: Bounds) -> Outcome:
        """Train with a candidate in folders that are emptied afterwards. A failure is returned as an outcome."""
        began = time.perf_counter()
        try:
            outcome = self._run(settings, candidate, folders, bounds)
        except Exception as error:  # conflicting settings or too little memory may raise any exception
            outcome = Outcome(kind="failed", reason=_reason(error), usage=is_usage(error))
        finally:
            gc.collect()
            for folder in folders:
                empty(Path(folder), settings.telemetry, self._runs)
        return replace(outcome, wall=time.perf_counter() - began)

    def _run(self, settings: Config, candidate: Mapping[str, Any], folders: Sequence[str], bounds: Bounds) -> Outcome:
        import torch

        import infinity
        from infinity_tools.presets import on_meta, shard

        workload, sliced = self._workload, self._workload.micro_tokens is not None
        model = on_meta(self._source)
        checkpointing = workload.activation_checkpointing and not sliced  # sliced layers recompute activations anyway
        shard(model, self._mesh, bf16=self._dtype == "bf16", checkpointing=checkpointing)
        if workload.micro_tokens is not None:
            infinity.micro_batches(model, workload.batch_tokens // workload.micro_tokens)
        if workload.loss_tokens is not None:
            infinity.sliced_loss(model, workload.loss_tokens)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        with infinity.offload(model, optimizer, _trial(settings, candidate, folders),
                              weights=self._source.weights) as paged:  # fmt: skip
            self._runs.append(paged.run.folder.run_id)
            self._step(model, paged)
            rates = (bounds.bandwidth, bounds.computation)
            predicted = paged.predict_seconds(*rates) if bounds.skip_above and rates[0] else 0.0
            if bounds.skip_above and predicted > bounds.skip_above:
                return Outcome(kind="skipped", predicted=predicted, total_written=_written(paged))
            return self._measure(model, paged, bounds)

    def _measure(self, model: Any, paged: PagedOptimizer, bounds: Bounds) -> Outcome:
        for _ in range(1, WARM):
            self._step(model, paged)
        slow = False
        first = len(paged.records)
        while not _are_enough(counted := paged.records[first:]) and not slow:
            self._step(model, paged)
            slow = bool(bounds.slow_above) and len(counted) == 0 and paged.records[-1].seconds > bounds.slow_above
        counted = paged.records[first:]
        moving = sum(record.transfer_seconds for record in counted)
        nbytes = sum(record.read_bytes + record.written_bytes for record in counted)
        computation = statistics.median(record.seconds - record.stall_seconds for record in counted)
        bandwidth = nbytes / moving if moving else 0.0
        run = paged.run
        return Outcome(
            kind="slow" if slow else "measured",
            seconds=statistics.median(record.seconds for record in counted),
            predicted=paged.predict_seconds(bandwidth, computation) if bandwidth else 0.0,
            bandwidth=bandwidth,
            computation=computation,
            total_written=_written(paged),
            effective={
                "update.schedule": paged.update_schedule,
                "memory.page_bytes": run.layout.page_bytes,
                "storage.engine": run.stats.header.info["io_engine"],
                "update.cores": run.update_cores,
            },
        )

    def _step(self, model: Any, paged: PagedOptimizer) -> None:
        import torch

        if self._stopped():
            raise SystemExit
        workload = self._workload
        shape = (workload.batch_tokens // workload.seq, workload.seq)
        tokens = torch.randint(0, self._source.config.vocab_size, shape, device=self._mesh.device_type)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        if workload.max_grad_norm is not None:
            paged.clip_grad_norm_(workload.max_grad_norm)
        paged.step()
        paged.zero_grad()


def _check_batch(options: Workload, source: ModelSource) -> None:
    """Check that the batch can be divided into micro-batches and suits the model. Raises `ConfigError`."""
    if options.micro_tokens is not None and (
        options.micro_tokens % options.seq or options.batch_tokens % options.micro_tokens
    ):
        sequences = options.batch_tokens // options.seq
        possible = ", ".join(str(number * options.seq) for number in range(1, sequences + 1) if sequences % number == 0)
        raise ConfigError(
            f"--micro-tokens {options.micro_tokens} does not divide the {options.batch_tokens} tokens of a batch into "
            f"equal slices of whole sequences of {options.seq}; possible: {possible}"
        )
    from infinity_tools.presets import check_language_model

    check_language_model(source)
    longest = getattr(source.config, "max_position_embeddings", None)
    if longest is not None and options.seq > longest:
        raise ConfigError(f"--seq {options.seq} exceeds the {longest} positions of the model (max_position_embeddings)")


def _are_enough(records: Sequence[Any]) -> bool:
    if len(records) >= _MOST_STEPS:
        return True
    return len(records) >= _LEAST_STEPS and sum(record.seconds for record in records) >= _LEAST_SECONDS


def _trial(settings: Config, candidate: Mapping[str, Any], folders: Sequence[str]) -> Config:
    """Return the settings of a trial, which never resumes, keeps no data and writes no checkpoints or timeline."""
    changed = settings.with_values(**candidate, **{"storage.paths": list(folders), "telemetry.timeline": ""})
    return replace(changed, run=RunConfig(keep="never"))


def _written(paged: PagedOptimizer) -> int:
    return paged.run.ledger.total_bytes["write"]


def _reason(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return first if isinstance(error, InfinityError) else f"{type(error).__name__}: {first}"


def is_usage(error: Exception) -> bool:
    """Return whether the error is caused by options or settings rather than by a bug."""
    from infinity.errors import BudgetError, FolderBusyError, UnsupportedError

    return isinstance(error, ConfigError | BudgetError | FolderBusyError | UnsupportedError)
