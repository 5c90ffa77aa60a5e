"""`infinity export`: write a checkpoint for `from_pretrained` or `torch.distributed.checkpoint`."""

from __future__ import annotations

import json as json_format
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from infinity import torchrun
from infinity.cli_errors import Version, failures
from infinity.config import RunConfig, is_address
from infinity.errors import CheckpointError, ConfigError
from infinity.units import MIB, format_size
from infinity.untrusted_files import read_regular
from infinity_tools.progress import byte_progress
from infinity_tools.shared_options import Json

if TYPE_CHECKING:
    from infinity.checkpoint.reader import CheckpointReader

_DTYPES = {"loaded": None, "trained": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_CONFIG_LIMIT = 16 * MIB
_PATIENCE = timedelta(days=7)
"""Time that ranks may wait while rank 0 writes an export."""
_SILENCE_SECONDS = RunConfig().heartbeat_timeout_seconds
"""Time after which the export fails because another node does not respond."""


def export(
    paths: Annotated[
        list[str], typer.Argument(help="The folders in storage.paths, in the same order, or the address in run.mirror.")
    ],
    out: Annotated[Path, typer.Option(help="New folder to write to.")],
    to: Annotated[
        str, typer.Option(help="Format: safetensors (weights) or dcp (weights and optimizer state).")
    ] = "safetensors",
    run: Annotated[str, typer.Option(help="Id of the run. [default: the newest run with a checkpoint]")] = "",
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint. [default: the newest checkpoint]")
    ] = None,
    replica: Annotated[
        int | None,
        typer.Option(min=0, help="Replica to export, if replicas hold different values (see run.resume_replica)."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Dtype of the safetensors weights: loaded (as in the initial weights; for a model that was trained "
            "from scratch, as trained), trained (usually fp32), fp32, bf16 or fp16."
        ),
    ] = "loaded",
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Write the base model with the LoRA adapter folded into its weights, instead of the adapter. Only one "
            "weight is in memory at a time.",
        ),
    ] = False,
    file_size: Annotated[
        str,
        typer.Option(
            help="Maximum size of a safetensors file, which is also the amount of memory used. [default: 1GiB]"
        ),
    ] = "",
    model_config: Annotated[
        Path | None, typer.Option(help="config.json to write to the safetensors folder. [default: the trained model's]")
    ] = None,
    json: Json = False,
    version: Version = False,
) -> None:
    """Export a checkpoint as weights for `from_pretrained`, or with optimizer state for plain FSDP2.

    --to safetensors writes the same names, shapes and values as `save_pretrained`, and the tokenizer, if any. --to dcp
    writes a torch.distributed.checkpoint folder, from which plain FSDP2 resumes bitwise exactly with `dcp.load` and
    `set_state_dict`.

    If the files of a run are on several nodes, start the command with torchrun on all of them: `torchrun … -m --
    infinity_tools export …`. Rank 0 writes the export.
    """
    with failures():
        if to not in ("safetensors", "dcp"):
            raise ConfigError(f"--to {to!r} is not one of safetensors, dcp")
        if dtype not in _DTYPES:
            raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
        if to == "dcp" and (dtype not in ("loaded", "trained") or merge or file_size or model_config is not None):
            raise ConfigError(
                "--dtype, --merge, --file-size and --model-config require --to safetensors; dcp exports the state as "
                "trained, with one file per tensor"
            )
        from infinity.formats.safetensors import FILE_BYTES
        from infinity.formats.safetensors import file_size as size_of_file

        file_bytes = size_of_file(file_size or FILE_BYTES, name="--file-size")
        config = None if model_config is None else _config(model_config)

        def write(reader: CheckpointReader) -> None:
            _write(reader, out, to, dtype, merge=merge, file_bytes=file_bytes, config=config, json=json)

        wanted = -1 if step is None else step, -1 if replica is None else replica
        if is_address(paths[0]):
            write(_mirrored(paths, run, *wanted))
        elif torchrun.launched() and torchrun.number("WORLD_SIZE", 1) > 1:
            _export_together([Path(path) for path in paths], run, *wanted, write)
        else:
            write(_open([Path(path) for path in paths], run, *wanted))


def _open(paths: list[Path], run: str, step: int, replica: int) -> CheckpointReader:
    """Return a reader of a checkpoint whose files are on this node. Raises `CheckpointError` or `ConfigError`."""
    from infinity.checkpoint.reader import CheckpointReader
    from infinity.store.marker import passed_over
    from infinity_tools.stored_runs import stored_runs

    passed: dict[Path, str] = {}
    runs = {found.run_id: found for found in stored_runs(paths, passed)}
    checkpointed = [found.run_id for found in runs.values() if found.checkpoints]
    if (run and run not in runs) or (not run and not checkpointed):
        raise CheckpointError(f"no checkpoint of {run or 'any run'} in {', '.join(map(str, paths))} "
                              f"(runs with a checkpoint: {', '.join(checkpointed) or 'none'})"
                              f"{'; ' + passed_over(passed) if passed else ''}")  # fmt: skip
    chosen = runs[run or checkpointed[-1]]
    if chosen.owner is not None:
        raise ConfigError(f"{chosen.owner} is running and replaces its pages; export it after it has ended")
    return CheckpointReader(chosen.folder, step, replica=replica)


def _export_together(
    paths: list[Path], run: str, step: int, replica: int, write: Callable[[CheckpointReader], None]
) -> None:
    """Export on rank 0, to which the other ranks send the pages on their nodes.

    Raises:
        InfinityError: If the export failed on any rank.
    """
    import torch.distributed as dist

    from infinity.checkpoint.publish import choose_run, list_checkpoints
    from infinity.checkpoint.reader import CheckpointReader
    from infinity.checkpoint.remote_files import open_files
    from infinity.peer_failures import Peers
    from infinity.ranks import Ranks
    from infinity.sources.reshard import folders_of

    dist.init_process_group("gloo", timeout=_PATIENCE)
    ranks = Ranks.current()
    peers = Peers(ranks, _SILENCE_SECONDS)
    try:
        chosen = choose_run(paths, run or "latest", ranks, replica)
        there = [path for path in paths if os.path.lexists(path)]  # all of them may be on other nodes
        folder = ranks.together("finding the run's folders", lambda: folders_of(there, chosen, ()))
        checkpoint = list_checkpoints(folder, ranks, step, replica)[-1]
        access = open_files(folder, ranks, checkpoint)
        try:
            ranks.on_first(
                "exporting", lambda: write(CheckpointReader(folder, checkpoint, replica=replica, access=access))
            )
        finally:
            access.close()
    except BaseException as error:
        reason = peers.explain(error)
        peers.leave(reason or error)
        raise (reason or error) from None
    peers.leave(None)
    dist.destroy_process_group()


def _write(
    reader: CheckpointReader,
    out: Path,
    to: str,
    dtype: str,
    *,
    merge: bool,
    file_bytes: int,
    config: dict[str, Any] | None,
    json: bool,
) -> None:
    """Write the export, with a progress bar, and report it. See `export` for the arguments."""
    from infinity.content.views import torch_dtype
    from infinity.formats.adapters import ADAPTER_CONFIG
    from infinity.formats.companions import Companions
    from infinity.formats.dcp import dcp_bytes, export_dcp
    from infinity.formats.safetensors import export_bytes, export_safetensors

    kept = Companions.of_run(reader.checkpoints)
    name = _DTYPES[dtype]
    if dtype == "loaded" and to == "safetensors" and not kept.adapters:
        name = kept.loaded_dtype
    console = Console(highlight=False)
    write: Callable[..., list[Path]]
    if to == "dcp":
        total, write = dcp_bytes(reader), partial(export_dcp, reader)
    else:
        chosen_dtype = torch_dtype(name) if name else None
        total = export_bytes(reader, chosen_dtype, merge=merge)
        write = partial(
            export_safetensors, reader, config=config, dtype=chosen_dtype, merge=merge, file_bytes=file_bytes
        )
    with byte_progress(f"exporting step {reader.step}", silent=json) as bar:
        task = bar.add_task("", total=total)
        written = write(out, advance=lambda nbytes: bar.advance(task, nbytes))
    if json:
        facts = {"run_id": reader.folder.run_id, "step": reader.step, "bytes": total}
        typer.echo(json_format.dumps({**facts, "files": [str(file) for file in written]}))
        return
    files = f"{len(written)} file{'s' * (len(written) != 1)}"
    report = f"{out}: step {reader.step} of {reader.folder.run_id}, {format_size(total)} in {files}"
    console.print(report, soft_wrap=True, markup=False)
    if to == "safetensors" and not {out / "config.json", out / ADAPTER_CONFIG} & {*written}:
        console.print(
            "no config.json was written because the checkpoint has none; pass one with --model-config", style="yellow"
        )


def _mirrored(paths: list[str], run: str, step: int, replica: int) -> CheckpointReader:
    """Return a reader of a checkpoint in a mirror."""
    from infinity.checkpoint.mirror import Mirror

    if len(paths) > 1:
        raise ConfigError(f"a mirror has one address, but {len(paths)} were given")
    mirror = Mirror(paths[0])
    found = mirror.newest(step, run, replica)
    if found is None:
        raise CheckpointError(f"the mirror {mirror} contains no complete checkpoint{' of ' * bool(run)}{run}")
    return mirror.reader(*found, replica)


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json_format.loads(read_regular(os.path.realpath(file), _CONFIG_LIMIT))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--model-config {str(file)!r} cannot be read: {reason}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model-config {str(file)!r} does not contain a JSON object")
    return config
