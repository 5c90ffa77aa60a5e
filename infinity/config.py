"""Settings of a run: a frozen tree of dataclasses that is read from TOML, with all sizes in bytes.

Every field carries its documentation. `make docs` generates `docs/reference/settings.md` from this module.
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
"""Cores of a rank that updates leave to the training thread, transfers, checksums and data loaders."""
_MOST_UPDATE_CORES = 8
"""Most cores that updates use by default. More cores gain little because updates are bound by memory and drives."""


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """NVMe paths that store the pages, and the engine that transfers them."""

    paths: tuple[str, ...] = setting(
        (),
        "One or more folders on NVMe drives. Pages are striped over all of them. A missing folder is created if its "
        "parent exists.",
    )
    engine: Literal["auto", "io_uring", "threads"] = setting(
        "auto",
        "I/O engine. `auto` uses io_uring unless it is unavailable or threads measure over 3 % faster. A state of 1 "
        "GiB or more is measured once (about 2 s), and the result is kept in the runtime folder.",
    )
    request_bytes: int = setting(
        2 * MIB,
        "Largest single request to a drive. Larger pages are transferred as several requests.",
        size=True,
        minimum=4 * KIB,
        maximum=GIB,
    )
    queue_depth: int = setting(
        32,
        "Maximum number of requests in flight per path. With the `threads` engine, the limit applies to all paths "
        "together and is at most 32.",
        minimum=1,
        maximum=4096,
    )
    bandwidth_weight: int = setting(
        1,
        "Relative share of a drive's bandwidth when several runs use it at the same time: with weights 3 and 1, the "
        "first run gets three quarters. Requires `infinityd`.",
        minimum=1,
        maximum=1000,
    )
    balance: bool = setting(
        True,
        "Rebalance pages between paths when the bandwidth of a path changes. A page moves when it is next written. "
        "Data files grow for this if there is free space.",
    )
    retries: int = setting(
        3,
        "Number of times to retry a page transfer that failed with EIO or a checksum mismatch before the run fails.",
        maximum=1000,
    )
    timeout_seconds: int = setting(
        120,
        "Time limit for a transfer. If it is exceeded, the run fails with a report that names the pending operation.",
        minimum=1,
        maximum=10**6,
    )


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Memory that caches pages. `host_bytes` bounds the pinned host cache. `device_bytes` bounds a part of GPU memory,
    which holds the weights of the next FSDP module ahead of its all-gather. The rest of it keeps complete GPU-resident
    FSDP modules (with their state if updates run on the GPU), and weights of other FSDP modules from one all-gather of
    a step to the next."""

    host_bytes: int = setting(
        0,
        "Size of this rank's pinned host cache, allocated once. 0: a quarter of the memory that is free within the "
        "cgroup limits (containers, Slurm, systemd), divided among the node's ranks.",
        size=True,
    )
    page_bytes: int = setting(
        0,
        "Largest page and size of a cache slot. 0: chosen from the host cache and the model, up to 8 MiB; up to 256 "
        "MiB above 4096 pages on a CPU, up to 64 MiB above 1024 pages on a GPU.",
        size=True,
    )
    device_bytes: int = setting(
        0,
        "GPU memory for prefetched weights and GPU-resident FSDP modules. 0: the memory free after the first step "
        "minus a reserve of a tenth of the GPU, at least 1 GiB. Ignored on the CPU.",
        size=True,
    )


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """On-disk format of parameters and optimizer state. Sizes assume bf16 weights, an fp32 master copy and Adam."""

    format: Literal["fp32", "split", "bf16-moments", "8bit"] = setting(
        "fp32",
        "Bytes per parameter: `fp32` 14; `split` 12.125, bitwise equal; `bf16-moments` 8.125, stochastic rounding; "
        "`8bit` 6.1875, a scale per 64 values. A checkpoint in another format is converted.",
    )


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """Time and device of the optimizer update; all combinations give bitwise equal results. With `in_backward`, an FSDP
    module is updated as soon as its gradients are reduced, with `in_forward` when the next forward gathers it, and with
    `after_backward` in `step()`. `auto` chooses `after_backward` if ranks exchange full parameters for the update."""

    schedule: Literal["auto", "in_backward", "in_forward", "after_backward"] = setting(
        "auto",
        "Time of updates: once gradients are reduced, in the next forward, or in `step()`. `auto`: `in_backward` if "
        "the first step has no clipping and a single backward, else `in_forward`.",
    )
    cores: int = setting(
        -1,
        "Cores for updates, on a separate thread; 0: the training thread. -1: with a GPU, this rank's share of the "
        "cores minus 3, from 1 to 8; on a CPU, 1 if torch leaves a core idle, else 0.",
        minimum=-1,
        maximum=4096,
    )

    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "Device of updates. `cpu`: in the host cache. `cuda`: on copies in GPU memory. `auto`: as in the resumed "
        "checkpoint, else the one measured to be faster. Formats other than `fp32` require the CPU.",
    )

    def thread_cores(self, device: str, *, cores: int, computing: int) -> int:
        """Return the number of cores of the update thread, or 0 if updates run on the training thread.

        Args:
            device: device type that computes, ``cuda`` or ``cpu``.
            cores: this rank's share of the node's cores.
            computing: number of cores that torch computes on if the device is a CPU.
        """
        if self.cores >= 0:
            return self.cores
        if device == "cpu":
            return int(cores > computing)
        return min(max(1, cores - _LEFT_CORES), _MOST_UPDATE_CORES)


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig:
    """Storage of the activations that a forward pass saves for its backward pass."""

    tier: Literal["device", "host", "nvme"] = setting(
        "device",
        "Storage of layer inputs kept by activation checkpointing or `micro_batches`. `device`: as in plain FSDP2. "
        "`host`: host cache (GPU only). `nvme`: host cache, then NVMe. Results are bitwise equal.",
    )
    host_bytes: int = setting(
        0,
        "Part of `memory.host_bytes` that is used for activations. 0: one eighth. Ignored if `tier` is `device`.",
        size=True,
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Seed, resuming and retention of checkpoints. If the number of ranks, the page size or the paths differ from the
    checkpoint, a new run starts from it; this requires that all files of the old run are accessible."""

    seed: int = setting(0, "Random seed for the initialization of models on the meta device.")
    resume: str = setting(
        "",
        "Run to resume from its last checkpoint: a run id, or `latest`. `auto`: `latest`, or a new run if there is no "
        "checkpoint; a damaged or mismatched checkpoint is still an error. Empty: a new run.",
    )
    resume_paths: tuple[str, ...] = setting(
        (),
        "Folders of the run to resume from, in the order of its `storage.paths`, if they differ from the current ones. "
        "The old run stays there. Empty: `storage.paths`.",
    )
    resume_step: int = setting(
        -1,
        "Step of the checkpoint to resume from; -1: the newest. Checkpoints of later steps are removed.",
        minimum=-1,
    )
    retained_checkpoints: int = setting(
        1,
        "Number of newest checkpoints to keep. Each one takes the size of the state on NVMe again. 0: no space is "
        "reserved, and `save_checkpoint()` raises an error.",
        minimum=0,
    )
    keep: Literal["auto", "always", "never"] = setting(
        "auto",
        "Files kept by `close()`. `auto`: keep a run that has a checkpoint, remove one without. `always`: keep all "
        "files. `never`: remove all files, including checkpoints.",
    )


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Counters for the daemon and the exporter, and an optional timeline."""

    runtime_dir: str = setting(
        "",
        "Folder of the stats files that `infinityd` reads, writable only by its owner. Empty: the first usable of "
        "`$XDG_RUNTIME_DIR/infinity`, `/run/infinity` and `infinity-<user id>` in the temporary folder.",
    )
    timeline: str = setting(
        "",
        "Trace file for ui.perfetto.dev, written by each rank at exit: page transfers, gathers, updates and stalls. "
        "Ranks above 0 add their rank to the file name. Empty: no trace.",
    )
    timeline_events: int = setting(200_000, "Number of most recent events that the timeline keeps.", minimum=1)


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
        """Return a copy with some settings replaced, for example ``with_values(**{"memory.host_bytes": "2GiB"})``.

        Args:
            dotted: new values by setting name, ``section.key``.

        Raises:
            ConfigError: if a setting is unknown, or a value has the wrong type or is out of range.
        """
        return _SETTINGS.with_values(self, dotted)


_SETTINGS = Settings(Config)


def with_absolute_paths(config: Config) -> Config:
    """Return a copy with absolute paths, which stay valid if the program changes its working directory."""
    storage, telemetry = config.storage, config.telemetry
    named = {name: getattr(telemetry, name) for name in ("runtime_dir", "timeline")}
    absolute = {name: os.path.abspath(path) for name, path in named.items() if path}
    return replace(
        config,
        storage=replace(storage, paths=tuple(map(os.path.abspath, storage.paths))),
        telemetry=replace(telemetry, **absolute),
    )


def runtime_dir(config: TelemetryConfig) -> Path:
    """Return the folder of the stats files. The caller creates and checks it (`untrusted_files.own_folder`)."""
    if config.runtime_dir:
        return Path(config.runtime_dir)
    session = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if session.is_absolute() and _is_own(session):  # after `su` it still belongs to the other user
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
    """Return the settings of a TOML file, a nested mapping or a `Config`, or the defaults if `source` is None.

    Args:
        source: path of a TOML file, a mapping from sections to settings, a `Config`, or None.

    Raises:
        ConfigError: if a key is unknown (the message names the nearest known key), a value has the wrong type or is out
            of range, or the file is missing or is not valid TOML.
    """
    return _SETTINGS.load(source)


def check_config(config: Config) -> None:
    """Check constraints between settings, and between settings and this machine.

    Raises:
        ConfigError: if a constraint is violated. The message names the setting and the fix.
    """
    if not config.storage.paths:
        raise ConfigError('storage.paths is empty. Set it to one or more folders on NVMe, e.g. ["/nvme0/run"].')
    for path in config.storage.paths:
        if not path.strip():
            raise ConfigError(
                f"storage.paths contains an empty string: {list(config.storage.paths)}. Set each entry to a folder on "
                "NVMe."
            )
        if os.path.lexists(path) and not os.path.isdir(path):
            raise ConfigError(f"storage.paths: {path!r} is not a folder. Choose another path.")
        if not os.path.isdir(Path(path).parent):
            raise ConfigError(f"storage.paths: {path!r} cannot be created: {str(Path(path).parent)!r} is not a folder")
    for path in config.run.resume_paths:
        if not os.path.isdir(path):
            raise ConfigError(f"run.resume_paths: {path!r} is not a folder. Set it to the folder that stores the run.")
    if config.run.resume_paths and not config.run.resume:
        raise ConfigError(
            'run.resume_paths is set, but run.resume is empty. Set run.resume to "latest" or to a run id.'
        )
    if config.run.resume_step >= 0 and not config.run.resume:
        raise ConfigError(
            f'run.resume_step = {config.run.resume_step}, but run.resume is empty. Set run.resume to "latest" or to a '
            "run id."
        )
    if config.run.resume == "auto" and (config.run.resume_paths or config.run.resume_step >= 0):
        name = "run.resume_paths" if config.run.resume_paths else "run.resume_step"
        raise ConfigError(
            f'{name} with run.resume = "auto" would resume from the same point at every start. Use run.resume = '
            '"latest" for the first start.'
        )
    if (timeline := config.telemetry.timeline) and (why := why_not_written(Path(timeline))):
        raise ConfigError(f"telemetry.timeline = {timeline!r} cannot be written: {why}. Choose another file.")
    resolved = [str(Path(path).resolve()) for path in config.storage.paths]
    if len(set(resolved)) != len(resolved):
        raise ConfigError(f"storage.paths contains the same folder twice: {list(config.storage.paths)}")
    page, host = config.memory.page_bytes, config.memory.host_bytes
    if page and (page % (64 * KIB) or page < 64 * KIB):
        raise ConfigError(
            f"memory.page_bytes = {page} is not a multiple of 64 KiB. Use {max(1, page // 65536) * 65536}, for example."
        )
    if page and host and host < page:
        raise ConfigError(f"memory.host_bytes = {host} is smaller than one page (memory.page_bytes = {page})")
    if config.storage.request_bytes % 4096:
        raise ConfigError(f"storage.request_bytes = {config.storage.request_bytes} must be a multiple of 4096")


def settings_markdown() -> str:
    """Return the content of docs/reference/settings.md."""
    return _SETTINGS.markdown("Settings", "python -m infinity.config")


if __name__ == "__main__":
    print(settings_markdown(), end="")  # noqa: T201
