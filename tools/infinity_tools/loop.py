"""The training loop of `infinity train`, from the model's name to `summary.json`."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import infinity
from infinity import Config, PagedOptimizer
from infinity.checkpoint.commit import choose_run
from infinity.checkpoint.manifest import Published, choose_commit, complete_commits, published_in
from infinity.config import check_config, runtime_dir
from infinity.errors import ConfigError, InfinityError, is_lost_connection
from infinity.ranks import Ranks
from infinity.sources.reshard import folders_of
from infinity.telemetry import read_stats_page
from infinity.telemetry.page import Snapshot, StatsPageError, stats_page_files
from infinity.units import format_size
from infinity_tools.data import Batches, Corpus, tokenizer_of
from infinity_tools.measure import KernelCounts, report
from infinity_tools.plot import write_picture
from infinity_tools.presets import ModelSource, best_dtype, count_parameters, find_model, on_meta, shard
from infinity_tools.progress import StepView, View, open_view, short
from infinity_tools.recipe import Recipe, begun, kept, resumed
from infinity_tools.signals import SIGNALS, StopRequest
from infinity_tools.summary import RunFacts, StepLog, check_log, result_lines, summarise, summary_table, write_summary

_log = logging.getLogger("infinity")
_BYTE_VALUES = 256
_LOG = "steps.jsonl"
_NO_MODEL = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache"}
"""What a configuration says that is no matter of the model."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train and how; where the state lives is in `Config`."""

    model: str
    """Preset, or folder of a configuration or a pretrained model, see `find_model`."""
    strict: bool
    """Refuse a pretrained folder that lacks weights of the model, or has others."""
    data: tuple[Path, ...]
    """Files to train on, as bytes; none: the sources of Python's standard library."""
    out: Path | None
    """Folder of summary and log; None: `runs/` and the time."""
    batch_tokens: int
    """Tokens of a step, over all ranks."""
    micro_tokens: int | None
    """Tokens of a rank's forward pass; None: all of its tokens of a step."""
    seq: int
    """Tokens of a sequence."""
    steps: int
    """Step at which the run ends, counted from the very first."""
    given: Mapping[str, Any]
    """What the command line says of the recipe."""
    override: bool
    """Whether what is `given` replaces the recipe of a run that goes on."""
    again: tuple[str, ...]
    """The command line without what a run that goes on gets anew."""
    commit_every: int
    """Steps between commits; 0: only one, at the end."""
    dtype: str
    """What the model computes in: `bf16`, `fp32`, or `auto`: bf16 where the processor has it."""
    activation_checkpointing: bool
    """Whether blocks compute their forward again in backward."""
    threads: int
    """CPU threads of torch; 0: torch's default."""
    metrics_port: int | None
    """Where rank 0 serves its metrics; None: nowhere, 0: any free port."""
    metrics_host: str
    """Address that it listens on."""
    metrics_linger: float
    """Seconds that it still serves after the last step."""
    json: bool
    """Whether the summary goes to standard output as JSON, and nothing else."""


def run_training(options: TrainOptions, settings: Config) -> int:
    """Train, and return the exit status: 0, or 128 and the number of the signal that ended the run early.

    Raises:
        InfinityError: anything that a person can act on, see its message.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    _check(options, settings)
    corpus = Corpus.of(options.data) if options.data else Corpus.of_standard_library()
    source = find_model(options.model)
    mesh = infinity.mesh()
    ranks = Ranks.current()
    check_batch(options, source, ranks)
    out = options.out or Path(ranks.agree(time.strftime("runs/%Y%m%d-%H%M%S")))
    made = [folder for folder in (out / "nvme", out, *out.parents) if not os.path.lexists(folder)]
    settings = ranks.together("making the output folder", lambda: _with_folders(out, settings, ranks))
    console = Console(stderr=True)
    _route_logs(console, ranks, quiet=options.json)
    torch.manual_seed(settings.run.seed + ranks.rank)
    written: list[Path] = []
    with ExitStack() as stack:
        stack.enter_context(_without_leftovers(made))
        stop = stack.enter_context(StopRequest())
        view = stack.enter_context(open_view(console, silent=options.json or ranks.rank != 0))
        if settings.run.resume and (ended := _finished(settings, options, ranks)):
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
        parameters = count_parameters(model)
        sliced = options.micro_tokens is not None  # which recomputes activations, too
        shard(model, mesh, bf16=dtype == "bf16", checkpointing=options.activation_checkpointing and not sliced)
        if sliced:
            infinity.micro_batches(model, _micro_batches(options, ranks))
        recipe = begun(options.given, options.steps)
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)
        view.doing(f"placing {short(parameters)} parameters on NVMe")
        paged = stack.enter_context(_offload(model, optimizer, settings, source, strict=options.strict))
        batches = Batches(
            corpus,
            sequences=options.batch_tokens // options.seq,
            length=options.seq,
            seed=settings.run.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
            encode=tokenizer_of(source.weights),
        )
        source.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        facts = {
            "data": _data_facts(options, settings, corpus),
            "computation": {"dtype": options.dtype, "state.format": settings.state.format},
            "model_config": json.loads(source.config.to_json_string()),
        }
        recipe = _agreed_recipe(recipe, paged, facts, options, ranks)
        if recipe.max_grad_norm is not None:
            check_clipping(f"the commit's --max-grad-norm {recipe.max_grad_norm:g}", settings)
        training = Training(
            model, paged, recipe, facts, batches, options, ranks, view, stop, torch.device(mesh.device_type), out
        )
        training.commits_last = settings.run.keep != "never"
        pages.run_id = paged.run.folder.run_id
        view.say(_heading(f"{source.name}, {dtype}", parameters, training, settings, corpus))
        training.train()
        summary = _summarise(training, source.name, dtype, parameters)
        summary["next"] = _next_commands(training, settings, ranks)
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
        _log.warning("the summary cannot be written to %s: %s; the run itself is complete", out, error.strerror)
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
        raise ConfigError(f"--no-strict is for a folder with weights; --model {source.name} has none")
    return infinity.offload(model, optimizer, settings, weights=source.weights, strict=strict)


class LocalPages:
    """What the exporter serves: the stats pages of this run's ranks on this node, once the run has its id."""

    def __init__(self, folder: Path) -> None:
        self.run_id = ""  # of the run whose counters are served; empty before it has begun
        self._folder = folder

    def __call__(self) -> list[Snapshot]:
        """Read them."""
        found = []
        for file in stats_page_files(self._folder):
            if self.run_id and file.name.startswith(f"{self.run_id}."):
                try:
                    found.append(read_stats_page(file))
                except StatsPageError:  # a rank of the run as it is now has not made its page
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
        batches: Batches,
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
        self.commits_last = True  # whether the end is committed
        self.committed = optimizer.steps  # step of the newest commit; 0: there is none
        self._extra = {**facts, "recipe": kept(recipe)}  # what every commit is given besides the position in the data
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
                if log is not None:
                    log.write(shown)
                if options.commit_every and optimizer.steps % options.commit_every == 0:
                    self._commit()
            if self.commits_last and self.committed != optimizer.steps:
                self._commit()
        optimizer.drain()

    def _step(self) -> None:
        tokens = self.batches.at(self.optimizer.steps).to(self.device)
        loss = self._loss(tokens)
        self._agree(loss.detach().float().item())
        loss.backward()
        if self.recipe.max_grad_norm is not None:
            self.optimizer.clip_grad_norm_(self.recipe.max_grad_norm)
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.optimizer.report(loss=self.losses[-1], tokens=tokens.numel())
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.kernel.end()

    def _loss(self, tokens: torch.Tensor) -> Any:
        """Compute the loss; a model that cannot compute is one that its config.json does not describe."""
        try:
            return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        except InfinityError:
            raise
        except Exception as error:
            if self.optimizer.steps + 1 > self.first_step or is_lost_connection(error):
                raise
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"--model {self.options.model} cannot compute its first step: {type(error).__name__}: {reason}; look "
                "at its config.json"
            ) from error

    def _agree(self, loss: float) -> None:
        """Share the loss and wishes to stop. Before backward, so that no rank updates from a loss of NaN."""
        signals = [float(self.stop.received == number) for number in SIGNALS]
        mean, *wishes = self._sum([loss / self.ranks.world_size, *signals])
        if not math.isfinite(mean):
            kept = f"the last commit is of step {self.committed}" if self.committed else "nothing was committed"
            raise InfinityError(
                f"the loss of step {self.optimizer.steps + 1} is {mean}; try a lower --lr or --max-grad-norm 1; {kept}"
            )
        self.losses.append(mean)
        self.stopped_by = next((int(number) for number, wish in zip(SIGNALS, wishes, strict=True) if wish), 0)

    def _shown(self) -> dict[str, Any]:
        record = self.optimizer.records[-1]
        shares = [record.read_bytes, record.written_bytes, record.stall_seconds / record.seconds]
        read, written, stalled = self._sum([float(value) for value in shares])
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
            "lr": self.lr,
        }

    def _sum(self, values: list[float]) -> list[float]:
        if self.ranks.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        with self.optimizer.run.ledger.part("collective"):
            dist.all_reduce(total)
        return [float(value) for value in total]

    def _commit(self) -> None:
        self.optimizer.commit(self._extra)
        self.committed = self.optimizer.steps
        self.kernel.begin()


def _check(options: TrainOptions, settings: Config) -> None:
    check_sequences(options)
    if "max_grad_norm" in options.given:
        check_clipping("--max-grad-norm", settings)
    if settings.storage.paths:
        check_config(settings)
    elif settings.run.resume and options.out is None:
        raise ConfigError("--resume needs --nvme, or the --out of the run that is to go on")


def check_clipping(by: str, settings: Config) -> None:
    """Refuse clipping where updates run in backward; `by` asks for it. Raises `ConfigError`."""
    if settings.update.placement == "in_backward":
        raise ConfigError(
            f"--update in_backward updates before the global norm is known, which {by} needs; "
            "use --update in_forward or leave --update out"
        )


class Batch(Protocol):
    """The tokens of a step, as `TrainOptions` names them."""

    @property
    def batch_tokens(self) -> int: ...

    @property
    def micro_tokens(self) -> int | None: ...

    @property
    def seq(self) -> int: ...


def check_sequences(options: Batch) -> None:
    """Refuse a batch that is no whole number of sequences. Raises `ConfigError`."""
    if options.batch_tokens % options.seq:
        near = max(1, round(options.batch_tokens / options.seq)) * options.seq
        raise ConfigError(f"--batch-tokens {options.batch_tokens} is not a multiple of --seq {options.seq}; try {near}")


def check_batch(options: Batch, source: ModelSource, ranks: Ranks) -> None:
    """Refuse a batch that the ranks cannot share, or a model that cannot be trained on it. Raises `ConfigError`."""
    sequences = options.batch_tokens // options.seq
    if sequences % ranks.world_size:
        raise ConfigError(
            f"--batch-tokens {options.batch_tokens} makes {sequences} sequences of {options.seq} tokens, which "
            f"{ranks.world_size} ranks cannot share equally; try {options.seq * ranks.world_size}"
        )
    if options.micro_tokens is not None and (
        options.micro_tokens % options.seq or options.batch_tokens % (options.micro_tokens * ranks.world_size)
    ):
        each = sequences // ranks.world_size
        possible = ", ".join(str(number * options.seq) for number in range(1, each + 1) if each % number == 0)
        raise ConfigError(
            f"--micro-tokens {options.micro_tokens} cannot share the {options.batch_tokens // ranks.world_size} tokens "
            f"per rank equally in sequences of {options.seq}; possible: {possible}"
        )
    vocabulary = getattr(source.config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise ConfigError(f"--model {source.name} is no language model: its configuration has no vocab_size")
    if (layers := getattr(source.config, "num_hidden_layers", 1)) < 1:
        raise ConfigError(f"--model {source.name} has {layers} layers (num_hidden_layers); it needs 1 or more")
    if vocabulary < _BYTE_VALUES and tokenizer_of(source.weights) is None:
        raise ConfigError(f"the model knows {vocabulary} tokens, but the text has {_BYTE_VALUES} different bytes")
    longest = getattr(source.config, "max_position_embeddings", None)
    if longest is not None and options.seq > longest:
        raise ConfigError(f"--seq {options.seq} is above the {longest} positions of the model")


def _micro_batches(options: TrainOptions, ranks: Ranks) -> int:
    """Return the number of micro-batches of a rank in a step."""
    return options.batch_tokens // (options.micro_tokens * ranks.world_size) if options.micro_tokens else 1


def _with_folders(out: Path, settings: Config, ranks: Ranks) -> Config:
    """Make the output folder, and the folder of the state where none was named."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:
            check_log(out / _LOG)
        if settings.storage.paths:
            return settings
        (out / "nvme").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {str(out)!r} cannot be made: {error.strerror}; name a folder of yours with --out"
        ) from error
    return settings.with_values(**{"storage.paths": (str(out / "nvme"),)})


@contextmanager
def _without_leftovers(made: Sequence[Path]) -> Iterator[None]:
    """Remove folders again that were made for a run, the innermost first, if they are empty at its end."""
    try:
        yield
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _agreed_recipe(
    asked: Recipe, paged: PagedOptimizer, facts: dict[str, Any], options: TrainOptions, ranks: Ranks
) -> Recipe:
    """Return the recipe to train with; say what of the command line is not as it was in the run that goes on."""
    found = paged.resumed_extra
    if not paged.steps:
        return asked
    recipe, says = resumed(options.given, found.get("recipe"), options.steps, override=options.override)
    before, now = found.get("data", {}), facts["data"]
    if other := [
        f"{name} {now[name]} (was {before[name]})" for name in now if now[name] != before.get(name, now[name])
    ]:
        says.append(
            f"the command line holds, not the commit: {', '.join(other)}; batches are others than they would be"
        )
    before, now = found.get("computation", {}), facts["computation"]
    if other := [f"{name} {now[name]} (was {before[name]})" for name in before if before[name] != now.get(name)]:
        says.append(f"the command line holds, not the commit: {', '.join(other)}")
    before, now = found.get("model_config", {}), facts["model_config"]
    if other := [
        f"{name} {now.get(name)} (was {before[name]})"
        for name in before
        if name not in _NO_MODEL and before[name] != now.get(name)
    ]:
        says.append(f"the model is another one than that of the commit: {', '.join(other)}")
    if ranks.rank == 0:
        for text in says:
            _log.warning("%s", text)
    return recipe


def _data_facts(options: TrainOptions, settings: Config, corpus: Corpus) -> dict[str, Any]:
    return {
        "seed": settings.run.seed,
        "batch_tokens": options.batch_tokens,
        "seq": options.seq,
        "text_bytes": corpus.size,
    }


def _heading(name: str, parameters: int, training: Training, settings: Config, corpus: Corpus) -> str:
    run, layout = training.optimizer.run, training.optimizer.run.layout
    arena = int(run.stats.snapshot().value("tier_capacity_bytes", tier="host"))
    share = f" ({arena / layout.state_bytes:.0%} of the state)" if layout.state_bytes else ""
    if arena >= len(layout.pages) * layout.page_bytes:
        share = ", all of the state fits: nothing needs paging"
    ranks = training.ranks.world_size
    each = " per rank" if ranks > 1 else ""
    went_on = f", resumed at step {training.first_step - 1}" if training.first_step > 1 else ""
    if settings.run.resume == "auto" and not went_on:
        went_on = ", new: there was nothing to resume"
    return (
        f"run {run.folder.run_id}{went_on}\n"
        f"{name}: {short(parameters)} parameters, {format_size(layout.state_bytes)} of state{each} on "
        f"{', '.join(settings.storage.paths)}, {ranks} rank{'s' if ranks > 1 else ''}\n"
        f"host arena {format_size(arena)}{each}{share}, pages of {format_size(layout.page_bytes)}, "
        f"{run.stats.header.info['io_engine']}\n"
        f"text: {short(corpus.size)} bytes in {corpus.files} files"
    )


def _summarise(training: Training, name: str, dtype: str, parameters: int) -> dict[str, Any]:
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
        micro_batches=_micro_batches(training.options, ranks),
        sequence_length=training.options.seq,
        losses=tuple(training.losses),
        io_engine=optimizer.run.stats.header.info["io_engine"],
        update_placement=optimizer.update_placement,
        nvme_paths=tuple(str(root.parent.resolve()) for root in optimizer.run.folder.roots),
        interrupted=bool(training.stopped_by),
        committed_step=training.committed or None,
        recipe=kept(training.recipe),
    )
    return summarise(facts, [found for found in reports if found.node == mine])


def _next_commands(training: Training, settings: Config, ranks: Ranks) -> dict[str, str]:
    """Return the commands for what a run has left: to export it, to go on, and to free its space. None: {}.

    They name the run: by the time that they are used, another one may be the newest in these folders.
    """
    if settings.run.keep == "never" or not training.committed:
        return {}
    options, run = training.options, training.optimizer.run.folder
    folders = shlex.join(str(root.parent) for root in run.roots)
    train = ["infinity", "train"]
    if ranks.world_size > 1:
        train = ["torchrun", "--nproc-per-node", str(ranks.local_world_size), "-m", "infinity_tools", "train"]
    again = [*train, *options.again]
    steps = options.steps if training.stopped_by else 2 * options.steps
    out = training.out / f"step{training.committed}"
    return {
        "export": f"infinity export {folders} --run {run.run_id} --step {training.committed} "
        f"--out {shlex.quote(str(out))}",
        "resume": shlex.join([*again, "--out", str(training.out), "--resume", run.run_id, "--steps", str(steps)]),
        "free": f"infinity store rm {folders} {run.run_id}",
    }


def _finished(settings: Config, options: TrainOptions, ranks: Ranks) -> tuple[str, int] | None:
    """Return id and step of the run to resume if it has no step left to take. Nothing is opened of it or changed.

    Raises:
        CommitError: there is none.
    """
    paths = settings.run.resume_paths or settings.storage.paths
    run_id = choose_run(paths, settings.run.resume, ranks)
    if not run_id:
        return None
    folder = ranks.together("finding the run's folders", lambda: folders_of(paths, run_id, settings.storage.paths))
    published = set[Published]().union(*ranks.collect(published_in(folder.commits)))
    step = choose_commit(run_id, complete_commits(published), settings.run.resume_step).step
    return (run_id, step) if step >= options.steps else None


def _show_finished(run_id: str, step: int, view: View, options: TrainOptions) -> None:
    """Say that there is nothing to do, which is no mistake: who restarts runs until they end is told that it has."""
    if options.json:
        Console().file.write(json.dumps({"run_id": run_id, "finished": True, "steps": 0, "last_step": step}) + "\n")
        return
    view.say(f"run {run_id} is at step {step} already: finished; to go on, raise --steps above it")


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
