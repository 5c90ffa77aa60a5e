"""The training loop of `infinity train`, from the model's name to `summary.json`."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import infinity
from infinity import Config, PagedOptimizer
from infinity.config import runtime_dir
from infinity.errors import ConfigError, InfinityError, is_lost_connection
from infinity.ranks import Ranks
from infinity.run.run_name import with_name
from infinity.telemetry import read_stats_file
from infinity.telemetry.stats_file import Snapshot, StatsFileError, find_stats_files
from infinity.units import format_size
from infinity_tools.evaluation import Evaluation
from infinity_tools.lora_options import add_lora, named
from infinity_tools.measure import KernelCounts, report
from infinity_tools.options import (
    TrainOptions,
    check_batch,
    check_clipping,
    check_options,
    check_settings,
    micro_batches,
)
from infinity_tools.plot import write_picture
from infinity_tools.presets import ModelSource, best_dtype, count_parameters, find_model, on_meta, shard
from infinity_tools.progress import StepView, View, open_view, short
from infinity_tools.recipe import Recipe, begun, kept
from infinity_tools.resume import (
    agreed_recipe,
    drawn_before,
    finished,
    last_step,
    next_commands,
    recorded_options,
    taken_up,
)
from infinity_tools.samples.pack import IGNORED
from infinity_tools.signals import SIGNALS, StopRequest
from infinity_tools.summary import Claim, RunFacts, StepLog, result_lines, summarize, summary_table, write_summary
from infinity_tools.tracking import Trackers
from infinity_tools.training_data import BatchSource, open_data

_log = logging.getLogger("infinity")
_LOG, _DATA = "steps.jsonl", "data"
"""In the folder of `--out`: the log, and the folder of data sets that are prepared."""


def run_training(options: TrainOptions, settings: Config) -> int:
    """Train, and return the exit status: 0, or 128 and the number of the signal that ended the run early.

    Raises:
        InfinityError: anything that a person can act on, see its message.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    check_settings(options, settings)
    mesh = infinity.mesh()
    ranks = Ranks.current()
    if settings.run.resume:
        options = taken_up(options, _with_paths(options.out, settings), ranks)
    check_options(options)
    source = find_model(options.model)
    check_batch(options, source, ranks.world_size)
    out = options.out or Path(ranks.agree(time.strftime("runs/%Y%m%d-%H%M%S")))
    made = [folder for folder in (out / "nvme", out / _DATA, out, *out.parents) if not os.path.lexists(folder)]
    settings = ranks.together("creating the output folder", lambda: _with_folders(out, settings))
    console = Console(stderr=True)
    _route_logs(console, ranks, quiet=options.json)
    torch.manual_seed(settings.run.seed + ranks.rank)
    written: list[Path] = []
    with ExitStack() as stack:
        stack.enter_context(_without_leftovers(made))
        stack.enter_context(ranks.together("claiming the output folder", lambda: _claimed(out, settings, ranks)))
        stop = stack.enter_context(StopRequest() if ranks.rank == 0 else StopRequest(""))
        view = stack.enter_context(open_view(console, silent=options.json or ranks.rank != 0))
        data = open_data(options, source, ranks, settings.run.seed, out / _DATA, view.doing)
        options = replace(options, steps=last_step(options, settings, data, ranks))
        if settings.run.resume and (ended := finished(settings, options, ranks)):
            if ranks.rank == 0:
                _show_finished(*ended, view, options)
            stack.close()
            _leave(ranks)
            return 0
        pages = LocalPages(runtime_dir(settings.telemetry))
        if options.metrics_port is not None and ranks.local_rank == 0:
            from infinity.telemetry.exporter import serve  # needs the extra `daemon`

            server = stack.enter_context(serve(options.metrics_port, pages, options.metrics_host))
            view.say(f"metrics: http://{options.metrics_host or socket.gethostname()}:{server.port}/metrics")
        dtype = best_dtype() if options.dtype == "auto" else options.dtype
        model = on_meta(source)
        architecture = type(model).__name__
        if options.lora is not None:
            model = add_lora(model, options.lora, named(options.model))
        parameters = count_parameters(model)
        sliced = options.micro_tokens is not None  # which recomputes activations, too
        shard(model, mesh, bf16=dtype == "bf16", checkpointing=options.activation_checkpointing and not sliced)
        if sliced:
            infinity.micro_batches(model, micro_batches(options, ranks))
        if options.loss_tokens is not None:
            infinity.sliced_loss(model, options.loss_tokens)
        recipe = begun(options.given, options.steps)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)
        view.doing(f"writing {short(parameters)} parameters to NVMe")
        settings = with_name(settings, source.name, out)
        paged = stack.enter_context(_offload(model, optimizer, settings, source, strict=options.strict))
        source.config.architectures = [architecture]
        facts = {
            "data": data.facts,
            "computation": {"dtype": options.dtype, "state.format": settings.state.format},
            "model_config": json.loads(source.config.to_json_string()),
            "options": recorded_options(options),
        }
        recipe = agreed_recipe(recipe, paged, facts, options, ranks)
        if recipe.max_grad_norm is not None:
            check_clipping(f"the checkpoint's --max-grad-norm {recipe.max_grad_norm:g}", settings)
        device = torch.device(mesh.device_type)
        training = Training(model, paged, recipe, facts, data.batches, options, ranks, view, stop, device, out)
        if data.held_out is not None:
            training.evaluation = Evaluation(
                data.held_out,
                every=options.eval_every,
                at_once=options.batch_tokens // options.seq // ranks.world_size,
                ranks=ranks,
                device=device,
            )
        training.not_packed = data.not_packed
        training.checkpoints_last = settings.run.keep != "never"
        pages.run_id = paged.run.folder.run_id
        view.say(_heading(f"{source.name}, {dtype}", _counted(model), training, settings, data.said))
        names, told = options.log if ranks.rank == 0 else (), {**facts, "recipe": kept(recipe)}
        run_id, title, first = paged.run.folder.run_id, settings.run.name, training.first_step
        trackers = ranks.together("opening the trackers", lambda: Trackers(names, out, run_id, title, first, told))
        training.trackers = stack.enter_context(trackers)
        try:
            training.train()
        except Exception as error:
            after = next_commands(options, settings, ranks, paged.run.folder, training.checkpointed, out, stopped=True)
            error.add_note(
                f"the last checkpoint is step {training.checkpointed}; resume with: {after['resume']}"
                if after
                else "no checkpoint was written; start the run again"
            )
            raise
        summary = _summarize(training, source.name, dtype, parameters)
        summary["next"] = next_commands(
            options, settings, ranks, paged.run.folder, training.checkpointed, out, stopped=bool(training.stopped_by)
        )
        if ranks.rank == 0:
            written = _write_results(out, summary)
        if ranks.local_rank == 0 and options.metrics_port is not None:
            stop.sleep(options.metrics_linger)
        status = 128 + training.stopped_by if training.stopped_by else 0
    if ranks.rank == 0:
        _show(summary, written, options)
    _leave(ranks)
    return status


def _write_results(out: Path, summary: dict[str, Any]) -> list[Path]:
    """Write summary.json and summary.png, and return those that were written.

    A folder that takes no more is no reason to fail a run that has ended.
    """
    written = []
    try:
        write_summary(out, summary)
        written.append(out / "summary.json")
        write_picture(out, summary)
        written.append(out / "summary.png")
    except OSError as error:
        _log.warning("the summary could not be written to %s: %s; the run itself is complete", out, error.strerror)
    return written


def _leave(ranks: Ranks) -> None:
    if ranks.world_size > 1:
        dist.destroy_process_group()


def _offload(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: Config, source: ModelSource, *, strict: bool
) -> PagedOptimizer:
    """Move the state to NVMe, with the weights of a pretrained folder.

    Raises:
        ConfigError: `--no-strict` without such a folder.
    """
    if source.weights is None and not strict:
        raise ConfigError(f"--no-strict requires a folder with weights; --model {source.name} has none")
    return infinity.offload(model, optimizer, settings, weights=source.weights, strict=strict)


class LocalPages:
    """What the exporter serves: the stats pages of this run's ranks on this node, once the run has its id."""

    def __init__(self, folder: Path) -> None:
        self.run_id = ""  # of the run whose counters are served; empty before it has begun
        self._folder = folder

    def __call__(self) -> list[Snapshot]:
        """Read them."""
        found = []
        for file in find_stats_files(self._folder):
            if self.run_id and file.name.startswith(f"{self.run_id}."):
                try:
                    found.append(read_stats_file(file))
                except StatsFileError:  # a rank of the run as it is now has not made its page
                    continue
        return found


class Training:
    """A model, its paged optimizer and the batches, stepped to the end."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: PagedOptimizer,
        recipe: Recipe,
        facts: dict[str, Any],
        batches: BatchSource,
        options: TrainOptions,
        ranks: Ranks,
        view: View,
        stop: StopRequest,
        device: torch.device,
        out: Path,
    ) -> None:
        self.model, self.optimizer, self.batches, self.recipe = model, optimizer, batches, recipe
        self.options, self.ranks, self.view, self.stop = options, ranks, view, stop
        self.device, self.out = device, out
        self.losses: list[float] = []  # of every step that was taken here
        self.lr = 0.0  # of the step that was taken last
        self.kernel = KernelCounts()  # what the kernel has counted of this process
        self.first_step = optimizer.steps + 1  # the first step that is taken here
        self.stopped_by = 0  # number of the signal that ended training early; 0 if none did
        self.checkpoints_last = True  # whether the end is checkpointed
        self.checkpointed = optimizer.steps  # step of the newest checkpoint; 0: there is none
        self.evaluation: Evaluation | None = None  # on data that are held out
        self.eval_losses: list[tuple[int, float]] = []  # what it found, with the step after which
        self.not_packed = ""  # why sequences have one sample each; see `TrainingData`
        self.trackers: Trackers | None = None  # of rank 0, where there are any
        self.gradient_norm: float | None = None  # of the step that was taken last, before clipping
        drawn = drawn_before(optimizer.steps, optimizer.resumed_extra, facts["data"], batches)
        batches.start(optimizer.steps, drawn)
        self._extra = {
            **facts,
            "recipe": kept(recipe),
        }  # what every checkpoint is given besides the position in the data
        for group in optimizer.param_groups:
            group.update(lr=recipe.lr, initial_lr=recipe.lr, weight_decay=recipe.weight_decay)
        self.scheduler = LambdaLR(optimizer, recipe.factor, last_epoch=optimizer.steps - 1)

    def train(self) -> None:
        """Run all steps; stop early, after a complete step, when a signal arrives on any rank.

        Raises:
            InfinityError: the loss is not finite, or the storage failed.
        """
        options, optimizer = self.options, self.optimizer
        self.view.begin(optimizer.steps, options.steps)
        self.stop.patient = True
        with StepLog(self.out / _LOG, self.first_step) if self.ranks.rank == 0 else nullcontext() as log:
            self.kernel.begin()
            while optimizer.steps < options.steps and not self.stopped_by:
                self._step()
                shown = self._shown()
                if self.evaluation is not None and self.evaluation.is_due(optimizer.steps, options.steps):
                    shown["eval_loss"] = self._evaluate(self.evaluation)
                if log is not None:
                    log.write(shown)
                if self.trackers is not None:
                    self.trackers.log(shown)
                if options.checkpoint_every and optimizer.steps % options.checkpoint_every == 0:
                    self._checkpoint()
            if self.checkpoints_last and self.checkpointed != optimizer.steps:
                self._checkpoint()
        optimizer.drain()

    def _step(self) -> None:
        inputs = {name: value.to(self.device) for name, value in self.batches.at(self.optimizer.steps).items()}
        loss = self._loss(inputs)
        self._agree(loss.detach().float().item())
        loss.backward()
        if self.recipe.max_grad_norm is not None:
            self.gradient_norm = float(self.optimizer.clip_grad_norm_(self.recipe.max_grad_norm))
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        tokens = inputs["input_ids"].numel()
        self.optimizer.report(loss=self.losses[-1], tokens=tokens, total_steps=self.options.steps)
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.kernel.end()

    def _loss(self, inputs: dict[str, torch.Tensor]) -> Any:
        """Compute the loss; a model that cannot compute is one that its config.json does not describe.

        Every token that counts counts alike, on whichever rank it is: gradients are means over the ranks.
        """
        if self.ranks.world_size > 1 and self.batches.uneven:
            count = self._sum([float((inputs["labels"][:, 1:] != IGNORED).sum())])[0]
            inputs["num_items_in_batch"] = torch.tensor(count / self.ranks.world_size, device=self.device)
        try:
            return self.model(**inputs, use_cache=False).loss
        except InfinityError:
            raise
        except Exception as error:
            if self.optimizer.steps + 1 > self.first_step or is_lost_connection(error):
                raise
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"--model {self.options.model} failed in its first step: {type(error).__name__}: {reason}; check its "
                "config.json"
            ) from error

    def _agree(self, loss: float) -> None:
        """Share the loss and wishes to stop. Before backward, so that no rank updates from a loss of NaN."""
        signals = [float(self.stop.received == number) for number in SIGNALS]
        mean, *wishes = self._sum([loss / self.ranks.world_size, *signals])
        if not math.isfinite(mean):
            raise InfinityError(
                f"the loss of step {self.optimizer.steps + 1} is {mean}; try a lower --lr or --max-grad-norm 1"
            )
        self.losses.append(mean)
        self.stopped_by = next((int(number) for number, wish in zip(SIGNALS, wishes, strict=True) if wish), 0)

    def _evaluate(self, evaluation: Evaluation) -> float:
        loss = evaluation.loss(self.model)
        self.eval_losses.append((self.optimizer.steps, loss))
        self.view.evaluated(self.optimizer.steps, loss)
        self.optimizer.run.ledger.restart_step()  # the next step begins now
        self.kernel.begin()
        return loss

    def _shown(self) -> dict[str, Any]:
        record = self.optimizer.records[-1]
        shares = [record.read_bytes, record.written_bytes, record.stall_seconds / record.seconds, record.stall_seconds]
        read, written, stalled, stalled_seconds = self._sum([float(value) for value in shares])
        view = StepView(
            step=record.step,
            loss=self.losses[-1],
            seconds=record.seconds,
            tokens=self.options.batch_tokens,
            read_bytes=read,
            written_bytes=written,
            stall_share=stalled / self.ranks.world_size,
        )
        self.view.stepped(view)
        return {
            "step": record.step,
            "loss": self.losses[-1],
            "seconds": record.seconds,
            "tokens_per_second": self.options.batch_tokens / record.seconds,
            "nvme_read_bytes": int(read),
            "nvme_written_bytes": int(written),
            "stall_share": view.stall_share,
            "stall_seconds": stalled_seconds / self.ranks.world_size,
            "lr": self.lr,
            **({} if self.gradient_norm is None else {"grad_norm": self.gradient_norm}),
        }

    def _sum(self, values: list[float]) -> list[float]:
        if self.ranks.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        with self.optimizer.run.ledger.part("collective"):
            dist.all_reduce(total)
        return [float(value) for value in total]

    def _checkpoint(self) -> None:
        self.optimizer.save_checkpoint({**self._extra, "drawn": self.batches.drawn(self.optimizer.steps)})
        self.checkpointed = self.optimizer.steps
        self.kernel.begin()


def _with_folders(out: Path, settings: Config) -> Config:
    """Make the output folder, and the folder of the state where none was named."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if settings.storage.paths:
            return settings
        (out / "nvme").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {str(out)!r} cannot be created: {error.strerror}; choose a writable folder"
        ) from error
    return settings.with_values(**{"storage.paths": (str(out / "nvme"),)})


def _claimed(out: Path, settings: Config, ranks: Ranks) -> AbstractContextManager[object]:
    """Take the output folder for this run; rank 0 does."""
    return Claim(out, _LOG, resumes=bool(settings.run.resume)) if ranks.rank == 0 else nullcontext()


def _with_paths(out: Path | None, settings: Config) -> Config:
    """Return settings that name the folder of the state: that of `--out` where none is named."""
    return settings if settings.storage.paths else settings.with_values(**{"storage.paths": (str(out) + "/nvme",)})


@contextmanager
def _without_leftovers(made: Sequence[Path]) -> Iterator[None]:
    """Remove folders again that were made for a run, the innermost first, if they are empty at its end."""
    try:
        yield
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _counted(model: nn.Module) -> str:
    """Return how many parameters a model has, and how many of them are trained."""
    total = count_parameters(model)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{short(total)} parameters" + (f", {short(trained)} of them trainable" if trained < total else "")


def _heading(name: str, parameters: str, training: Training, settings: Config, data: Sequence[str]) -> str:
    run, layout = training.optimizer.run, training.optimizer.run.layout
    host_cache = int(run.stats.snapshot().value("tier_capacity_bytes", tier="host"))
    share = f" ({host_cache / layout.state_bytes:.0%} of the state)" if layout.state_bytes else ""
    if host_cache >= len(layout.pages) * layout.page_bytes:
        share = " (holds the whole state: no paging)"
    ranks = training.ranks.world_size
    each = " per rank" if ranks > 1 else ""
    went_on = f", resumed at step {training.first_step - 1}" if training.first_step > 1 else ""
    if settings.run.resume == "auto" and not went_on:
        went_on = ", new (no checkpoint to resume from)"
    return (
        f"run {run.folder.run_id}{went_on}\n"
        f"{name}: {parameters}, {format_size(layout.state_bytes)} of state{each} on "
        f"{', '.join(settings.storage.paths)}, {ranks} rank{'s' if ranks > 1 else ''}\n"
        f"host cache {format_size(host_cache)}{each}{share}, pages of {format_size(layout.page_bytes)}, "
        f"{run.stats.header.info['io_engine']}\n" + "\n".join(data)
    )


def _summarize(training: Training, name: str, dtype: str, parameters: int) -> dict[str, Any]:
    optimizer, ranks = training.optimizer, training.ranks
    reports = ranks.collect(report(optimizer, training.kernel.steps, ranks))
    mine = reports[ranks.rank].node
    facts = RunFacts(
        run_id=optimizer.run.folder.run_id,
        model=name,
        dtype=dtype,
        parameters=parameters,
        world_size=ranks.world_size,
        first_step=training.first_step,
        tokens_per_step=training.options.batch_tokens,
        micro_batches=micro_batches(training.options, ranks),
        sequence_length=training.options.seq,
        losses=tuple(training.losses),
        io_engine=optimizer.run.stats.header.info["io_engine"],
        update_schedule=optimizer.update_schedule,
        update_device=optimizer.update_device,
        nvme_paths=tuple(str(root.parent.resolve()) for root in optimizer.run.folder.roots),
        interrupted=bool(training.stopped_by),
        checkpointed_step=training.checkpointed or None,
        recipe=kept(training.recipe),
        eval_losses=tuple(training.eval_losses),
        not_packed=training.not_packed,
    )
    return summarize(facts, [found for found in reports if found.node == mine])


def _show_finished(run_id: str, step: int, view: View, options: TrainOptions) -> None:
    """Say that there is nothing to do, which is no mistake: who restarts runs until they end is told that it has."""
    if options.json:
        Console().file.write(json.dumps({"run_id": run_id, "finished": True, "steps": 0, "last_step": step}) + "\n")
        return
    how = "a larger --steps" if options.epochs is None else f"--epochs above {options.epochs:g}"
    view.say(f"run {run_id} has already finished at step {step}; to continue, pass {how}")


def _show(summary: dict[str, Any], written: Sequence[Path], options: TrainOptions) -> None:
    console = Console()
    if options.json:
        console.file.write(json.dumps(summary) + "\n")
        return
    console.print()
    console.print(summary_table(summary))
    console.print()
    for line in result_lines(summary):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if written:
        console.print()
        console.print(", ".join(map(str, written)), markup=False, highlight=False, soft_wrap=True)


def _route_logs(console: Console, ranks: Ranks, *, quiet: bool) -> None:
    """Send warnings to the console that the bar is drawn on, so that neither spoils the other."""
    from rich.logging import RichHandler
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    handler = RichHandler(console=console, show_time=False, show_path=False, markup=False, highlighter=None)
    if ranks.world_size > 1:
        handler.setFormatter(logging.Formatter(f"rank {ranks.rank}: %(message)s"))
    log = logging.getLogger("infinity")
    log.handlers[:] = [handler]
    log.setLevel(logging.ERROR if quiet else logging.WARNING)
    log.propagate = False
