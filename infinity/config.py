"""Settings: one frozen tree of dataclasses, TOML at the edge, sizes in bytes inside.

Every field carries its documentation; `docs/settings.md` is generated from here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from infinity.config_fields import Settings, setting
from infinity.errors import ConfigError
from infinity.units import GIB, KIB, MIB
from infinity.untrusted_files import whose_folder, why_not_written

_SYSTEM = Path("/run/infinity")
_LEFT_CORES = 3
"""Cores of a rank that updates leave to the training thread, to transfers and checksums, and to data loaders."""
_MOST_UPDATE_CORES = 8
"""Cores that updates take by themselves at most: more gain little, as memory and drives are what updates wait for."""


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """Where pages live and how they are moved."""

    paths: tuple[str, ...] = setting(
        (),
        "Folders on NVMe drives, one or more; pages are spread over them. One that is missing is made, if the folder "
        "that it lies in is there.",
    )
    engine: Literal["auto", "io_uring", "threads"] = setting(
        "auto",
        "I/O engine. `auto` takes io_uring where the kernel allows it, unless threads are measured to be faster on "
        "these drives by more than 3 %; else threads. The first run of 1 GiB of state or more measures for about two "
        "seconds, and the result is kept in the runtime folder.",
    )
    request_bytes: int = setting(
        2 * MIB,
        "Largest single request to a drive; a page is moved as several.",
        size=True,
        minimum=4 * KIB,
        maximum=GIB,
    )
    queue_depth: int = setting(
        32,
        "Requests in flight on each path, at most. With `threads` as engine, on all paths together, and up to 32.",
        minimum=1,
        maximum=4096,
    )
    weight: int = setting(
        1,
        "Share of a drive that several runs use at the same time, relative to theirs: of 3 and 1, the first gets three "
        "quarters. Needs `infinityd`.",
        minimum=1,
        maximum=1000,
    )
    balance: bool = setting(
        True,
        "Move pages to other paths when one has become slower or faster than the others: each when it is next written. "
        "Data files grow for it if there is room.",
    )
    retries: int = setting(
        3,
        "How often a transfer of a page that failed with EIO, or brought a page that does not match its checksum, is "
        "submitted again before it ends the run.",
        maximum=1000,
    )
    timeout_seconds: int = setting(
        120, "A transfer that takes longer ends the run with a report of what is waited for.", minimum=1, maximum=10**6
    )


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The host cache."""

    host_bytes: int = setting(
        0,
        "Size of the pinned host cache of this rank, allocated once. 0: a quarter of what the machine has free and the "
        "limits of this process's control groups (containers, Slurm, systemd) leave, shared by the ranks of the node.",
        size=True,
    )
    page_bytes: int = setting(
        0,
        "Largest page, and the size of a cache slot. 0: derived from the host cache and the model, up to 8 MiB; up to 256 MiB "
        "where there are more than 4096 pages; where a GPU computes, up to 64 MiB where there are more than 1024.",
        size=True,
    )
    device_bytes: int = setting(
        0,
        "Memory of this rank's GPU for weights: those of the next FSDP module are copied there ahead of its gather. What is "
        "left has whole FSDP modules that never leave it, with their state, where updates run there, and keeps weights of "
        "others from one gather of a step to the next. 0: what is free after the first step, but for a tenth of all, "
        "at least 1 GiB. Not used on the CPU.",
        size=True,
    )


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """How the state of a parameter is stored. Bytes are those of bf16 weights, an fp32 master and Adam."""

    format: Literal["fp32", "split", "bf16-moments", "8bit"] = setting(
        "fp32",
        "`fp32`: 14 bytes per parameter. `split`: the same values, bit for bit, in 12.125: weight and master share 16 "
        "bits. `bf16-moments` (8.125) also stores the optimizer's fp32 states in bf16, rounded at random without bias; "
        "`8bit` (6.1875) in 8 bits with a scale for every 64. A run may go on from a checkpoint in another format.",
    )


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """Where in the step the optimizer's update runs."""

    schedule: Literal["auto", "in_backward", "in_forward", "after_backward"] = setting(
        "auto",
        "`in_backward` updates an FSDP module as soon as its gradients are reduced, `in_forward` when the next forward gathers "
        "it, `after_backward` in `step()`. `auto` takes in_backward when the first step shows that nothing global is "
        "needed (no clipping, one backward per step), else in_forward; after_backward where ranks exchange whole "
        "parameters.",
    )
    cores: int = setting(
        -1,
        "Cores that updates may take, on a thread beside the training thread; 0: they run on that thread. -1: where a "
        "GPU computes, this rank's share of the node's cores less 3, at least 1 and at most 8; else 1 if torch leaves "
        "a core of the share idle, or 0, as they would take turns.",
        minimum=-1,
        maximum=4096,
    )

    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "Where updates compute. `cpu`: on the host, in the host cache. `cuda`: pages are copied to the GPU, updated there, "
        "and copied back; the bits are those of training in its memory. `auto`: where a checkpoint that is continued was "
        "updated, else where it is faster, as measured at the start. Formats other than `fp32` are for the CPU.",
    )

    def cores_beside(self, device: str, *, cores: int, computing: int) -> int:
        """Return the cores of the thread for updates; 0: there is none.

        Args:
            device: that computes, ``cuda`` or ``cpu``.
            cores: this rank's share of the cores of its node.
            computing: how many cores torch computes on, where that is a CPU.
        """
        if self.cores >= 0:
            return self.cores
        if device == "cpu":
            return int(cores > computing)
        return min(max(1, cores - _LEFT_CORES), _MOST_UPDATE_CORES)


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig:
    """Where what a forward keeps for its backward waits for it."""

    tier: Literal["device", "host", "nvme"] = setting(
        "device",
        "Where the inputs of layers wait for backward, which activation checkpointing or `micro_batches` leave of a "
        "layer. `device`: in the memory that computes, as without infinity. `host`: in the host cache; from a GPU only. "
        "`nvme`: in the host cache, and on the drives what it has no room for. Changes no bit.",
    )
    host_bytes: int = setting(
        0,
        "Part of `memory.host_bytes` for activations. 0: an eighth of it. Not used with `device` as tier.",
        size=True,
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Identity of a run."""

    seed: int = setting(0, "Seed of the initialisation of models on the meta device.")
    resume: str = setting(
        "",
        "`latest`, or the id of a run in the first path, to continue from its last checkpoint. `auto`: as `latest`, but a "
        "new run begins where there is none; a checkpoint that is damaged, or of another model, is still refused. With "
        "another number of ranks, page size or paths a new run begins from that checkpoint; all files of the old one must "
        "be reachable.",
    )
    resume_paths: tuple[str, ...] = setting(
        (),
        "Where the run to continue from lies, in the order of its storage.paths, if that is elsewhere; it stays there. "
        "Empty: storage.paths.",
    )
    resume_step: int = setting(
        -1,
        "Step of the checkpoint to continue from; -1: the newest. Checkpoints of later steps are removed.",
        minimum=-1,
    )
    retained_checkpoints: int = setting(
        1,
        "Checkpoints that are kept, the newest ones; each takes the size of the state on NVMe, once more. 0: there is no "
        "room for any, and `save_checkpoint()` is refused.",
        minimum=0,
    )
    keep: Literal["auto", "always", "never"] = setting(
        "auto",
        "What `close()` leaves on disk: `auto` keeps a run that has a checkpoint and removes one that has none; `always` "
        "keeps everything, `never` nothing, checkpoints included.",
    )


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Counters for the daemon and the exporter."""

    runtime_dir: str = setting(
        "",
        "Folder of the stats pages that `infinityd` reads; the user's or root's, and nobody else's to write. Empty: "
        "`infinity` in the folder that `XDG_RUNTIME_DIR` names, if that is the user's; else `/run/infinity`, if that "
        "is; else `infinity-<user id>` in the system's temporary folder.",
    )
    timeline: str = setting(
        "",
        "File that each rank writes at its end for ui.perfetto.dev: when which page was moved, which FSDP module gathered and "
        "updated, and what was waited for. Ranks above 0 put their number into the name. Empty: none.",
    )
    timeline_events: int = setting(200_000, "How many of the latest events the timeline keeps.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one rank."""

    storage: StorageConfig = field(default_factory=StorageConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    state: StateConfig = field(default_factory=StateConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    run: RunConfig = field(default_factory=RunConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def with_values(self, **dotted: Any) -> Config:
        """Return a copy with settings replaced, ``with_values(**{"memory.host_bytes": "2GiB"})``.

        Raises:
            ConfigError: an unknown setting, or a value of the wrong type or range.
        """
        return _SETTINGS.with_values(self, dotted)


_SETTINGS = Settings(Config)


def with_absolute_paths(config: Config) -> Config:
    """Return settings whose folders and files stay the same when the program changes its folder."""
    storage, telemetry = config.storage, config.telemetry
    named = {name: getattr(telemetry, name) for name in ("runtime_dir", "timeline")}
    absolute = {name: os.path.abspath(path) for name, path in named.items() if path}
    return replace(
        config,
        storage=replace(storage, paths=tuple(map(os.path.abspath, storage.paths))),
        telemetry=replace(telemetry, **absolute),
    )


def runtime_dir(config: TelemetryConfig) -> Path:
    """Return the folder of the stats pages, which whoever uses it makes and checks (`access.own_folder`)."""
    if config.runtime_dir:
        return Path(config.runtime_dir)
    session = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if session.is_absolute() and _is_own(session):  # `su` leaves that of another user
        return session / "infinity"
    if _is_own(_SYSTEM):
        return _SYSTEM
    return Path(tempfile.gettempdir()) / f"infinity-{os.geteuid()}"


def _is_own(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.geteuid() and not whose_folder(folder)
    except OSError:
        return False


def load_config(source: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
    """Return the settings from a TOML file, a nested mapping, a ready `Config`, or the defaults.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), a value of the wrong type or range,
            or a file that is missing or is not TOML.
    """
    return _SETTINGS.load(source)


def check_config(config: Config) -> None:
    """Check what concerns several fields or the machine.

    Raises:
        ConfigError: naming the setting and the fix.
    """
    if not config.storage.paths:
        raise ConfigError("storage.paths is empty; name at least one folder on an NVMe drive")
    for path in config.storage.paths:
        if not path.strip():
            raise ConfigError(
                f"storage.paths has an empty name: {list(config.storage.paths)}; name folders on NVMe drives"
            )
        if os.path.lexists(path) and not os.path.isdir(path):
            raise ConfigError(f"storage.paths: {path!r} is not a folder; name another one")
        if not os.path.isdir(Path(path).parent):
            raise ConfigError(f"storage.paths: {path!r} cannot be made: {str(Path(path).parent)!r} is not a folder")
    for path in config.run.resume_paths:
        if not os.path.isdir(path):
            raise ConfigError(f"run.resume_paths: {path!r} is not a folder; name the one that the run lies in")
    if config.run.resume_paths and not config.run.resume:
        raise ConfigError('run.resume_paths is set, but nothing is resumed; set run.resume to "latest" or a run\'s id')
    if config.run.resume_step >= 0 and not config.run.resume:
        raise ConfigError(
            f'run.resume_step = {config.run.resume_step}, but nothing is resumed; set run.resume to "latest" or a '
            "run's id"
        )
    if config.run.resume == "auto" and (config.run.resume_paths or config.run.resume_step >= 0):
        name = "run.resume_paths" if config.run.resume_paths else "run.resume_step"
        raise ConfigError(
            f'{name} with run.resume = "auto" would go back there at every start; take "latest" for the first one'
        )
    if (timeline := config.telemetry.timeline) and (why := why_not_written(Path(timeline))):
        raise ConfigError(f"telemetry.timeline = {timeline!r} cannot be written: {why}; name another file")
    resolved = [str(Path(path).resolve()) for path in config.storage.paths]
    if len(set(resolved)) != len(resolved):
        raise ConfigError(f"storage.paths names the same folder twice: {list(config.storage.paths)}")
    page, host = config.memory.page_bytes, config.memory.host_bytes
    if page and (page % (64 * KIB) or page < 64 * KIB):
        raise ConfigError(
            f"memory.page_bytes = {page} must be a multiple of 64 KiB; try {max(1, page // 65536) * 65536}"
        )
    if page and host and host < page:
        raise ConfigError(f"memory.host_bytes = {host} is smaller than one page (memory.page_bytes = {page})")
    if config.storage.request_bytes % 4096:
        raise ConfigError(f"storage.request_bytes = {config.storage.request_bytes} must be a multiple of 4096")


def settings_markdown() -> str:
    """Return the text of docs/settings.md."""
    return _SETTINGS.markdown("Settings", "python -m infinity.config")


if __name__ == "__main__":
    print(settings_markdown(), end="")  # noqa: T201
