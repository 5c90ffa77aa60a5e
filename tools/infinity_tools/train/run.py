"""A training run of `infinity train`: model, data, trainer and results."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from rich.console import Console

import infinity
from infinity import Config, PagedOptimizer
from infinity.config import check_config, runtime_dir, with_absolute_paths
from infinity.errors import ConfigError, InfinityError, is_lost_connection
from infinity.models.building import one_line
from infinity.ranks import Ranks
from infinity.run.run_directory import number_on_path
from infinity.run.run_name import with_name
from infinity.telemetry import read_stats_file
from infinity.telemetry.stats_file import Snapshot, StatsFileError, find_stats_files
from infinity.units import format_size
from infinity_tools.output import make_out, without_leftovers
from infinity_tools.plot import write_picture
from infinity_tools.presets import ModelSource, best_dtype
from infinity_tools.progress import View, open_view, short
from infinity_tools.signals import StopRequest
from infinity_tools.summary import claim, report, result_lines, summarize, summary_table, write_summary
from infinity_tools.train import recipe as recipes
from infinity_tools.train import resume
from infinity_tools.train.arguments import arguments_of, check_recipe, complete, defaults_for
from infinity_tools.train.batch import recommended
from infinity_tools.train.callbacks import LOG, RunCallback
from infinity_tools.train.model import build_model, count, find_source
from infinity_tools.train.recipe import Recipe

if TYPE_CHECKING:
    from infinity_tools.train.datasets import Data

_log = logging.getLogger("infinity")
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
_NOISE = (
    "parallel_mode != ParallelMode.DISTRIBUTED", "already on multiple devices", "has new PAD/BOS/EOS tokens",
    "tokenizer has been changed", "padding_free", "Mismatch between tokenized prompt",
)  # fmt: skip
"""Parts of log messages of transformers and TRL that do not apply here."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that concern one start of a run, which recipes therefore do not contain."""

    resume: str | None
    """None: start a new run. `latest`, `auto` (start a new run if there is no checkpoint), or a checkpoint folder."""
    trace: Path | None
    """File for a timeline."""
    metrics_port: int | None
    """Port on which the first rank of each node serves metrics. None: no metrics. 0: any free port."""
    metrics_host: str
    """Address on which metrics are served."""
    metrics_linger: float
    """Seconds for which metrics stay available after the last step."""
    json: bool
    """Whether to print only the summary, as JSON."""


def run_training(given: Callable[[], Mapping[str, Any]], options: RunOptions) -> int:
    """Train, and return the exit status: 0, or 128 and the number of the signal that ended the run early.

    Args:
        given: Reads the values of the recipe and the command line, with unchecked keys and types.
        options: Options of this start.

    Raises:
        InfinityError: if a value is invalid or training failed. The message gives the reason.
    """
    if options.metrics_port is not None:
        from infinity.telemetry import exporter  # noqa: F401  # report a missing extra before any work
    mesh, ranks = infinity.mesh(), Ranks.current()
    recipe, before, settings = _resolved_together(given, options, ranks)
    console = Console(stderr=True)
    _route_logs(console, ranks, quiet=options.json)
    out = Path(recipe.get("output_dir") or ranks.agree(time.strftime("runs/%Y%m%d-%H%M%S"))).absolute()
    recipe["output_dir"] = str(out)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore", category=FutureWarning))
        settings = stack.enter_context(_output_folder(out, settings, ranks, resumes=bool(options.resume)))
        stop = stack.enter_context(StopRequest() if ranks.rank == 0 else StopRequest(""))
        view = stack.enter_context(open_view(console, silent=options.json or ranks.rank != 0))
        start = resume.find_start(out, options.resume, settings, ranks)
        before = {key: value for key, value in before.items() if key not in recipes.SECRET}
        if start is not None and before and ranks.rank == 0:
            changed = recipes.shown({key: recipe.get(key) for key in before}, before)
            _log.warning("these values replace the recipe of the run: %s", changed)
        view.doing("loading the model's configuration")
        run = Run(recipe, settings, find_source(recipe, ranks), ranks, view, stop, options)
        stack.enter_context(run.open())
        trainer = run.trainer(mesh, start, before)
        summary, written = None, []
        if start is not None and (ended := resume.finished(start, trainer.args)):
            _show_finished(*ended, view, options, ranks)
        else:
            run.train(trainer, start)
            summary = run.summary(trainer)
            written = _write_results(out, summary) if ranks.rank == 0 else []
            if ranks.local_rank == 0 and options.metrics_port is not None:
                stop.sleep(options.metrics_linger)
    if ranks.rank == 0 and summary is not None:
        _show(summary, written, options)
    if ranks.world_size > 1:
        dist.destroy_process_group()
    return 128 + run.callback.stopped_by if run.callback.stopped_by else 0


def _resolved_together(
    given: Callable[[], Mapping[str, Any]], options: RunOptions, ranks: Ranks
) -> tuple[Recipe, Recipe, Config]:
    """Call `_resolved` on all ranks. If its files are missing on some nodes only, all of them fail with the reason."""
    found, error = None, None
    try:
        found = _resolved(given(), options)
    except InfinityError as failure:
        error = failure
    if any(ranks.collect(found is not None)) and error is not None:
        error = ConfigError(f"{error}. The recipe and --out must be on a file system that all nodes share.")

    def result() -> tuple[Recipe, Recipe, Config]:
        if error is not None:
            raise error
        assert found is not None
        return found

    return ranks.together("reading the recipe", result)


def _resolved(given: Mapping[str, Any], options: RunOptions) -> tuple[Recipe, Recipe, Config]:
    """Return the recipe of a run, the previous values of keys that a resumed run changes, and the settings.

    Raises:
        ConfigError: if a value is invalid, or conflicts with the run to resume.
    """
    out: Any = given.get("output_dir")
    stored = resume.stored_recipe(out[-1] if isinstance(out, list) and out else out, options.resume)
    checked = recipes.checked(given, str(given.get("method", stored.get("method", "sft"))))
    recipe, before = resume.merged(checked, stored)
    check_recipe(recipe)
    settings = Config().with_values(**recipes.settings_of(recipe))
    recipe = recipes.with_settings(recipe, with_absolute_paths(settings))
    if options.resume:
        for values in (recipe, before):  # this resume moves the run to storage.paths and copies the replica
            values.pop("offload.run.resume_paths", None)
            values.pop("offload.run.resume_replica", None)
    before = {key: value for key, value in before.items() if value != recipe.get(key)}
    if options.trace:
        settings = settings.with_values(**{"telemetry.timeline": str(options.trace)})
    if settings.storage.paths:
        starts = {"run.resume": "auto" if options.resume == "auto" else "latest"} if options.resume else {}
        check_config(settings.with_values(**starts))
    return recipe, before, settings


@contextmanager
def _output_folder(out: Path, settings: Config, ranks: Ranks, *, resumes: bool) -> Iterator[Config]:
    """Create and claim the output folder. Yield the settings, with a folder for the state.

    Folders that are empty at the end are removed.

    Raises:
        ConfigError: if the folder cannot be used, or is not shared by all nodes.
    """
    made = [folder for folder in (out / "nvme", out, *out.parents) if not os.path.lexists(folder)]
    settings = ranks.together("creating the output folder", lambda: _with_folders(out, settings))
    claimed: Any = (lambda: claim(out, LOG, resumes=resumes)) if ranks.rank == 0 else nullcontext
    with without_leftovers(made):
        _check_shared(out, ranks)
        with ranks.together("claiming the output folder", claimed):
            yield settings


def _check_shared(out: Path, ranks: Ranks) -> None:
    """Check that all nodes see the same output folder, in which rank 0 writes files that all ranks read to resume."""
    host = socket.gethostname()
    first, lower = ranks.agree(host), number_on_path(out, ranks, host)

    def check() -> None:
        if host != first and not lower:
            raise ConfigError(
                f"--out {str(out)!r} on host {host} is a different folder than on host {first}. Choose a folder on a "
                "file system that all nodes share; --nvme stores the state on the drives of each node."
            )

    ranks.together("checking the output folder", check)


class Run:
    """Parts of a run."""

    def __init__(
        self,
        recipe: Recipe,
        settings: Config,
        source: ModelSource,
        ranks: Ranks,
        view: View,
        stop: StopRequest,
        options: RunOptions,
    ) -> None:
        self._recipe, self._source, self._ranks, self._view = recipe, source, ranks, view
        self._options, self._out = options, Path(recipe["output_dir"])
        self._settings = with_name(settings, source.name, self._out)
        bf16 = recipe.get("bf16")
        self._dtype = best_dtype() if bf16 is None else ("bf16" if bf16 else "fp32")
        self._run_id = ""  # empty until the run has begun
        self._said = ""  # description of the data
        self._data: dict[str, Any] = {}  # checksum of the data, and number of examples per step
        self._parameters, self._trainable = 0, 0
        self.callback = RunCallback(self._out, ranks, view, stop, self._began)

    def trainer(self, mesh: Any, start: Path | None, changed: Container[str]) -> Any:
        """Return the trainer, which stores its state on NVMe when training starts.

        Args:
            mesh: Device mesh.
            start: Checkpoint folder from which training will resume, if any.
            changed: Keys of the recipe whose values differ from the run to resume.
        """
        from infinity.integrations.transformers import attach
        from infinity_tools.train import datasets

        recipe, source = self._recipe, self._source
        tokenizer = datasets.load_tokenizer(recipe.get("tokenizer"), source, recipe.get("chat_template_path"))
        self._view.doing("preparing the data")
        datasets.cache_in(self._out)
        data = datasets.load(recipe, tokenizer, source)
        self._said = data.said
        keeps = start is not None and not any(key in changed for key in _BATCH)
        args = self._arguments(data, keeps_batch=keeps)
        model = build_model(recipe, source, mesh, bf16=self._dtype == "bf16")
        self._parameters, self._trainable = count(model)
        try:
            trainer = self._new_trainer(model, args, data, tokenizer)
        except InfinityError:
            raise
        except (ValueError, TypeError, RuntimeError, ImportError) as error:
            raise ConfigError(one_line(error)) from error
        datasets.check_packing(trainer, source.name, data.why_not_packed)
        if trainer.eval_dataset is not None:
            datasets.check_prepared(trainer.eval_dataset)
        self._data = resume.check_data(
            self._out, datasets.check_prepared(trainer.train_dataset), args, start, self._ranks
        )
        if args.save_strategy == "no" and self._settings.run.keep == "auto":
            self._settings = self._settings.with_values(**{"run.keep": "never"})
        attach(trainer, self._settings)
        return trainer

    def _arguments(self, data: Data, *, keeps_batch: bool) -> Any:
        """Return the arguments of the trainer, and complete the recipe.

        Args:
            data: Training data.
            keeps_batch: Whether a step draws as many examples as in the run to resume, on any number of ranks.
        """
        recipe, source, evaluates = self._recipe, self._source, data.evaluation is not None
        defaults = defaults_for(recipe, data.defaults, pretrained=source.weights is not None, evaluates=evaluates)
        args = arguments_of(recipe, {**defaults, "run_name": self._settings.run.name}, source)
        if source.weights is not None and "per_device_train_batch_size" not in recipe:
            self._view.doing("planning the batch")
            batch = self._ranks.on_first(
                "planning the batch",
                partial(recommended, recipe, self._settings, args, self._dtype, data.train, self._ranks),
            )
            self._set_batch(args, batch)
            defaults |= batch
        complete(recipe, defaults, args, bf16=self._dtype == "bf16")
        if keeps_batch:  # the recipe keeps the batch for the original number of ranks
            same = partial(resume.batch_on, self._ranks, self._out, args)
            self._set_batch(args, self._ranks.on_first("dividing the batch", same))
        return args

    def _set_batch(self, args: Any, batch: dict[str, int]) -> None:
        """Set the batch per rank, and add it to the description of the data."""
        for name, value in batch.items():
            setattr(args, name, value)
        if batch:
            self._said += "\nbatch per rank: " + ", ".join(f"--{name} {value}" for name, value in batch.items())

    def _new_trainer(self, model: Any, args: Any, data: Data, tokenizer: Any) -> Any:
        from transformers import EarlyStoppingCallback
        from transformers.trainer_callback import PrinterCallback

        kind: Any
        if self._recipe["method"] == "dpo":
            from infinity_tools.train.preferences import PreferenceTrainer as kind
        else:
            from trl import SFTTrainer as kind
        trainer = kind(
            model,
            args=args,
            train_dataset=data.train,
            eval_dataset=data.evaluation,
            processing_class=tokenizer,
            callbacks=[self.callback],
        )
        trainer.remove_callback(PrinterCallback)
        if patience := self._recipe.get("early_stopping_patience"):
            trainer.add_callback(EarlyStoppingCallback(patience))
        return trainer

    @contextmanager
    def open(self) -> Iterator[None]:
        """Serve metrics if requested. At the end, close the log and the state, or tell the other ranks the reason."""
        options = self._options
        with ExitStack() as stack:
            if options.metrics_port is not None and self._ranks.local_rank == 0:
                from infinity.telemetry.exporter import serve

                server = stack.enter_context(serve(options.metrics_port, self._local_stats, options.metrics_host))
                host = options.metrics_host or socket.gethostname()
                self._view.say(f"metrics: http://{host}:{server.port}/metrics")
            callback = self.callback
            stack.callback(callback.close)
            stack.push(lambda *error: callback.paged.__exit__(*error) if callback.paged is not None else None)
            yield

    def _local_stats(self) -> list[Snapshot]:
        """Read the stats files of this run's ranks on this node, for the metrics exporter."""
        found = []
        for file in find_stats_files(runtime_dir(self._settings.telemetry)):
            if self._run_id and file.name.startswith(f"{self._run_id}."):
                with suppress(StatsFileError):  # a rank has not created its file yet
                    found.append(read_stats_file(file))
        return found

    def _began(self, paged: PagedOptimizer) -> None:
        """Show the run and store its recipe when its state is on NVMe."""
        self._run_id = paged.run.folder.run_id
        if self._ranks.rank == 0:
            resume.write(self._recipe, self._data)
        ranks, layout = self._ranks, paged.run.layout
        host_cache = int(paged.run.stats.snapshot().value("tier_capacity_bytes", tier="host"))
        share = f" ({host_cache / layout.state_bytes:.0%} of the state)" if layout.state_bytes else ""
        if host_cache >= len(layout.pages) * layout.page_bytes:
            share = " (holds the whole state: no paging)"
        each = " per rank" if ranks.world_size > 1 else ""
        trained = f", {short(self._trainable)} of them trainable" if self._trainable < self._parameters else ""
        resumed = f", resumed at step {paged.steps}" if paged.steps else ""
        if self._options.resume == "auto" and not resumed:
            resumed = ", new (no checkpoint to resume from)"
        self._view.say(
            f"run {paged.run.folder.run_id}{resumed}\n"
            f"{self._source.name}, {self._dtype}: {short(self._parameters)} parameters{trained}, "
            f"{format_size(layout.state_bytes)} of state{each} on {', '.join(self._settings.storage.paths)}, "
            f"{ranks.world_size} rank{'s' if ranks.world_size > 1 else ''}\n"
            f"host cache {format_size(host_cache)}{each}{share}, pages of {format_size(layout.page_bytes)}, "
            f"{paged.run.stats.header.info['io_engine']}\n{self._said}"
        )

    def train(self, trainer: Any, start: Path | None) -> None:
        """Train to the end, or until a signal. Errors name the last checkpoint and how to resume."""
        callback = self.callback
        self._view.doing(f"writing {short(self._parameters)} parameters to NVMe")
        try:
            if self._recipe["method"] == "dpo":
                self._view.doing("computing log probabilities of the initial weights")
                trainer.compute_references(self._out, resumed=start is not None)
            trainer.train(resume_from_checkpoint=None if start is None else str(start))
            trainer.optimizer.optimizer.drain()
        except Exception as error:
            if callback.paged is None:
                if isinstance(error, ValueError | TypeError | ImportError):
                    raise ConfigError(one_line(error)) from error
                raise
            commands = self._next(stopped=True)
            error.add_note(
                f"the last checkpoint is step {callback.checkpointed}; resume with: {commands['resume']}"
                if commands
                else "no checkpoint was written; start the run again"
            )
            if not callback.steps and not isinstance(error, InfinityError) and not is_lost_connection(error):
                raise ConfigError(
                    f"--model {self._recipe['model']} failed in its first step: {one_line(error)}; check its "
                    "config.json and the data (--debug shows the traceback)"
                ) from error
            raise

    def _next(self, *, stopped: bool) -> dict[str, str]:
        """Return the commands that export, resume and free the run, or {} without a checkpoint."""
        paged, step = self.callback.paged, self.callback.checkpointed
        if paged is None or not step:
            return {}
        return resume.next_commands(
            self._recipe, paged.run.folder, self.callback.best or step, self._ranks, stopped=stopped
        )

    def summary(self, trainer: Any) -> dict[str, Any]:
        """Return the content of `summary.json`, and close the run."""
        callback, ranks, args = self.callback, self._ranks, trainer.args
        paged = trainer.optimizer.optimizer
        reports = ranks.collect(report(paged))
        facts = dict(
            run_id=paged.run.folder.run_id,
            model=self._source.name,
            dtype=self._dtype,
            parameters=self._parameters,
            world_size=ranks.world_size,
            first_step=callback.first_step,
            last_step=callback.first_step + callback.steps - 1,
            tokens_per_step=callback.tokens / max(1, callback.logged_steps),
            micro_batches=args.gradient_accumulation_steps,
            losses=tuple(callback.losses),
            io_engine=paged.run.stats.header.info["io_engine"],
            update_schedule=paged.update_schedule,
            update_device=paged.update_device,
            nvme_paths=tuple(str(root.parent.resolve()) for root in paged.run.folder.roots),
            interrupted=bool(callback.stopped_by),
            checkpointed_step=callback.checkpointed or None,
            recipe=self._recipe,
            eval_losses=tuple(callback.eval_losses),
        )
        mine = reports[ranks.rank]["node"]
        summary = summarize(facts, [found for found in reports if found["node"] == mine])
        return summary | {"next": self._next(stopped=bool(callback.stopped_by))}


def _write_results(out: Path, summary: dict[str, Any]) -> list[Path]:
    """Write summary.json and summary.png, and return the written files.

    If they cannot be written, for example because the drive is full, a warning is shown, because the run is complete.
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


def _with_folders(out: Path, settings: Config) -> Config:
    """Create the output folder, and a folder for the state if none is set."""
    make_out(out)
    if settings.storage.paths:
        return settings
    make_out(out / "nvme")
    return settings.with_values(**{"storage.paths": (str(out / "nvme"),)})


def _show_finished(run_id: str, step: int, view: View, options: RunOptions, ranks: Ranks) -> None:
    if options.json and ranks.rank == 0:
        Console().file.write(json.dumps({"run_id": run_id, "finished": True, "steps": 0, "last_step": step}) + "\n")
    view.say(
        f"run {run_id} has already finished at step {step}; to continue, pass a larger --max_steps or "
        "--num_train_epochs"
    )


def _show(summary: dict[str, Any], written: Sequence[Path], options: RunOptions) -> None:
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
    """Send warnings to the console on which the progress bar is drawn, so that neither garbles the other."""
    import datasets
    from rich.logging import RichHandler

    datasets.disable_progress_bars()
    handler = RichHandler(console=console, show_time=False, show_path=False, markup=False, highlighter=None)
    handler.addFilter(lambda record: not any(part in record.getMessage() for part in _NOISE))
    if ranks.world_size > 1:
        handler.setFormatter(logging.Formatter(f"rank {ranks.rank}: %(message)s"))
    for name in ("infinity", "transformers", "trl", "datasets", "accelerate", "peft"):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.setLevel(logging.ERROR if quiet or (name != "infinity" and ranks.rank) else logging.WARNING)
        log.propagate = False
