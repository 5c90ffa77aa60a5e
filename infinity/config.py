"""Settings of a run, as a tree of frozen dataclasses that can be read from a TOML file. All sizes are in bytes.

Every field carries its documentation. `make docs` generates `docs/reference/settings.md` from this module.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from infinity.config_fields import Settings, setting
from infinity.errors import ConfigError
from infinity.units import GIB, KIB, MIB
from infinity.untrusted_files import whose_folder, why_not_written

NODE_FOLDER = Path("/run/infinity")
"""Runtime folder of a daemon for the whole node. Each user has a subfolder in it, named after the user id, if the
daemon serves several users."""
_CONNECT_SECONDS = 2.0
_LEFT_CORES = 3
"""Number of a rank's cores left to the training thread, transfers, checksums and data loaders."""
_MOST_UPDATE_CORES = 8
"""Maximum number of cores for updates by default. More cores gain little because updates are limited by memory and
drives.
"""


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """Storage paths on NVMe drives, and the I/O engine that reads and writes them."""

    paths: tuple[str, ...] = setting(
        (),
        "One or more folders on NVMe drives. Pages are striped across all of them. A missing folder is created if its "
        "parent exists.",
    )
    engine: Literal["auto", "io_uring", "threads"] = setting(
        "auto",
        "I/O engine. `auto`: `io_uring` if it is available (Linux 6.1 or newer), otherwise `threads`.",
    )
    request_bytes: int = setting(
        2 * MIB,
        "Maximum size of a single request to a drive. Larger pages are transferred in several requests.",
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
        "Relative share of a drive's bandwidth when several runs use the drive at the same time. For example, of two "
        "runs with weights 3 and 1, the first gets three quarters. Requires `infinityd`.",
        minimum=1,
        maximum=1000,
    )
    retries: int = setting(
        3,
        "Number of times to retry a page transfer after EIO or a checksum mismatch before the run fails.",
        maximum=1000,
    )
    timeout_seconds: int = setting(
        120,
        "Time limit for a transfer. If it is exceeded, the run fails with an error that describes the pending "
        "operation.",
        minimum=1,
        maximum=10**6,
    )


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Memory for pages, which are the pieces in which state is transferred and cached. `host_bytes` sets the size of
    the pinned host cache. `device_bytes` limits the GPU memory for weights that are prefetched before the all-gather
    of their FSDP module. The rest of this GPU memory keeps whole FSDP modules permanently on the GPU (GPU-resident,
    together with their optimizer state if updates run on the GPU), and keeps the weights of other FSDP modules
    between two all-gathers within a step.
    """

    host_bytes: int = setting(
        0,
        "Size of the pinned host cache of each rank, allocated once at startup. 0: a quarter of the available memory "
        "(the free memory of the machine, or less if a cgroup limit of a container, Slurm or systemd is lower), "
        "divided equally among the node's ranks.",
        size=True,
    )
    page_bytes: int = setting(
        0,
        "Size of a cache slot and maximum size of a page. 0: chosen to suit the host cache and the model, at most 8 "
        "MiB. If this results in too many pages, larger ones are used: up to 256 MiB on a CPU (above 4,096 pages), up "
        "to 64 MiB on a GPU (above 128 pages).",
        size=True,
    )
    device_bytes: int = setting(
        0,
        "GPU memory for prefetched weights and GPU-resident FSDP modules. 0: the memory that is free after the first "
        "step, minus a reserve of one tenth of the GPU's memory (at least 1 GiB). Ignored on the CPU.",
        size=True,
    )


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """On-disk format of parameters and optimizer state. Sizes assume bf16 weights, fp32 master weights and Adam."""

    format: Literal["fp32", "split", "bf16-moments", "8bit"] = setting(
        "fp32",
        "State format. `fp32`: 14 bytes per parameter. `split`: 12.125 bytes, with bitwise identical results. "
        "`bf16-moments`: 8.125 bytes, with stochastic rounding. `8bit`: 6.1875 bytes, with one scale per 64 values. "
        "A checkpoint in a different format is converted when a run resumes from it.",
    )


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """Schedule and device of optimizer updates. All combinations give bitwise identical results. `auto` selects the
    schedule `after_backward` if ranks must exchange full parameters for an update.
    """

    schedule: Literal["auto", "in_backward", "in_forward", "after_backward"] = setting(
        "auto",
        "When parameters are updated. `in_backward`: as soon as their gradients are reduced. `in_forward`: in the "
        "next forward pass. `after_backward`: in `step()`. `auto`: `in_backward` if the first step has a single "
        "backward pass and does not clip gradients, otherwise `in_forward`.",
    )
    cores: int = setting(
        -1,
        "Number of CPU cores for updates, which then run on a separate thread. 0: run updates on the training thread. "
        "-1: when training on a GPU, this rank's share of the cores minus 3 (at least 1, at most 8); when training on "
        "a CPU, 1 if PyTorch leaves a core idle, otherwise 0.",
        minimum=-1,
        maximum=4096,
    )

    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "Device on which updates run. `cpu`: on the CPU, in the host cache. `cuda`: on the GPU, on copies of the "
        "state in GPU memory. `auto`: the device recorded in the checkpoint when resuming, otherwise the one that is "
        "measured to be faster. State formats other than `fp32` require the CPU.",
    )

    def thread_cores(self, device: str, *, cores: int, computing: int) -> int:
        """Return the number of cores for the update thread, or 0 if updates run on the training thread.

        Args:
            device: type of the device that trains, ``cuda`` or ``cpu``.
            cores: this rank's share of the node's cores.
            computing: number of cores that PyTorch computes on if the device is a CPU.
        """
        if self.cores >= 0:
            return self.cores
        if device == "cpu":
            return int(cores > computing)
        return min(max(1, cores - _LEFT_CORES), _MOST_UPDATE_CORES)


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig:
    """Storage of activations that the forward pass saves for the backward pass."""

    tier: Literal["device", "host", "nvme"] = setting(
        "device",
        "Where to keep the layer inputs that activation checkpointing or `micro_batches` saves. `device`: on the "
        "device, as in plain FSDP2. `host`: in the host cache (GPU training only). `nvme`: in the host cache, and on "
        "NVMe when it is full. All choices give bitwise identical results.",
    )
    host_bytes: int = setting(
        0,
        "Part of `memory.host_bytes` that is reserved for activations. 0: one eighth of it. Ignored if `tier` is "
        "`device`.",
        size=True,
    )


MOST_NAME: Final = 200
"""Maximum length of `run.name`."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Random seed, resuming, retention and copies of checkpoints, and detection of failed nodes. If the number of
    ranks, the hosts of the ranks, the page size or the paths differ from the checkpoint, resuming creates a new run
    that starts from the checkpoint. Ranks read the files on other nodes through the process group.
    """

    seed: int = setting(0, "Random seed for initializing models that were created on the meta device.")
    resume: str = setting(
        "",
        "Run to resume: a run id, or `latest` for the newest run with a complete checkpoint. `auto`: like `latest`, "
        "but start a new run if there is no checkpoint (a damaged or mismatched checkpoint still raises an error). "
        "With `mirror`, the run resumes from the mirror if `storage.paths` have no complete checkpoint, or only an "
        "older one. The address of a mirror: its newest run. Empty: start a new run.",
    )
    resume_paths: tuple[str, ...] = setting(
        (),
        "Folders of the run to resume, in the order of that run's `storage.paths`, if they differ from the current "
        "`storage.paths`. The old run is left in place. Empty: `storage.paths`.",
    )
    resume_step: int = setting(
        -1,
        "Step of the checkpoint to resume from. -1: the newest checkpoint. Checkpoints of later steps are removed.",
        minimum=-1,
    )
    resume_replica: int = setting(
        -1,
        "Replica from which all ranks resume, which copies the state. Replicas are numbered in the order of their "
        "smallest ranks. -1: any replica; an error if they differ and the state must be copied.",
        minimum=-1,
    )
    retained_checkpoints: int = setting(
        1,
        "Number of most recent checkpoints to keep. Each one takes as much NVMe space as the state. 0: no space is "
        "reserved for checkpoints, and `save_checkpoint()` raises an error.",
        minimum=0,
    )
    mirror: str = setting(
        "",
        "Address of fsspec to which checkpoints are copied in the background, such as `s3://bucket/run`, or "
        "`file:///shared/run` for a folder on another machine. NVMe space for one more checkpoint is reserved, because "
        "the pages are kept until they are copied. `resume` accepts the same address. Empty: no copies.",
    )
    mirror_rate: int = setting(
        0, "Maximum number of bytes per second that each rank copies to `mirror`. 0: no limit.", size=True
    )
    copies: int = setting(
        0,
        "Copy every n-th checkpoint to other nodes in the background, so that the run survives the loss of a node's "
        "drives. Requires `infinityd` with `copies.host` on each node. NVMe space for two more checkpoints and for the "
        "copies is reserved. 0: no copies.",
        minimum=0,
    )
    copy_nodes: int = setting(
        2,
        "Number of nodes over which a copy is spread. 2: each node stores a full copy of another node's state. n: each "
        "node stores parities, which take 1/(n-1) of that space, and the run survives the loss of one of n nodes.",
        minimum=2,
    )
    copy_rate: int = setting(
        0,
        "Maximum number of bytes per second that each rank copies from other nodes, or verifies because they have not "
        "changed. 0: no limit.",
        size=True,
    )
    heartbeat_timeout_seconds: int = setting(
        15,
        "Time after which the run fails because a node does not respond: its host is down, its link is cut, or its "
        "process is stopped. Shorter pauses are tolerated. Ignored if all ranks are on one node.",
        minimum=5,
        maximum=10**6,
    )
    name: str = setting(
        "",
        "Name of the run in `infinity top`, the dashboard, metrics, alerts and trackers. Empty: the name of the model "
        "and the last part of the first storage path, or of the output folder for `infinity train` and the Trainer.",
    )
    keep: Literal["auto", "always", "never"] = setting(
        "auto",
        "Whether `close()` keeps the files of the run. `auto`: only if the run has a checkpoint. `always`: keep all "
        "files. `never`: remove all files, including checkpoints.",
    )

    def __post_init__(self) -> None:
        for name in ("mirror", "resume"):
            check_address(f"run.{name}", getattr(self, name))

    @property
    def copied_checkpoints(self) -> int:
        """Maximum number of checkpoints that are kept for copying, in addition to `retained_checkpoints`."""
        # With copies on other nodes: the last checkpoint that was copied, and the one that is being copied.
        return bool(self.mirror) + 2 * bool(self.copies)


def is_address(text: str) -> bool:
    """Return whether a text is an address of fsspec, such as ``s3://bucket/run``."""
    return "://" in text


def check_address(what: str, address: str) -> None:
    """Check that an address contains no password, which would be shown in messages and files.

    Raises:
        ConfigError: if it does.
    """
    if re.search(r"://[^@]*:[^@]*@", address):
        raise ConfigError(
            f"{what} contains a password. Remove it, and pass credentials in the environment or in fsspec's "
            "configuration."
        )


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Metrics for the daemon and the exporter, and an optional timeline."""

    runtime_dir: str = setting(
        "",
        "Folder for the stats files that `infinityd` reads. Only its owner may have write access. Empty: the first "
        "usable folder among `/run/infinity/<user id>` (created by an `infinityd` that serves several users), "
        "`/run/infinity`, `$XDG_RUNTIME_DIR/infinity` and `infinity-<user id>` in the temporary folder.",
    )
    timeline: str = setting(
        "",
        "File to which each rank, at exit, writes a trace of page transfers, gathers, updates and stalls. Open it in "
        "ui.perfetto.dev. Ranks other than 0 append their rank to the file name. Empty: no trace.",
    )
    timeline_events: int = setting(200_000, "Number of most recent events to keep in the timeline.", minimum=1)


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
            ConfigError: if a setting is unknown, or if a value has the wrong type or is out of range.
        """
        return _SETTINGS.with_values(self, dotted)


_SETTINGS = Settings(Config)


def with_absolute_paths(config: Config) -> Config:
    """Return a copy with absolute paths, which remain valid if the process changes its working directory."""
    storage, telemetry = config.storage, config.telemetry
    named = {name: getattr(telemetry, name) for name in ("runtime_dir", "timeline")}
    absolute = {name: os.path.abspath(path) for name, path in named.items() if path}
    return replace(
        config,
        storage=replace(storage, paths=tuple(map(os.path.abspath, storage.paths))),
        telemetry=replace(telemetry, **absolute),
    )


def runtime_dir(config: TelemetryConfig) -> Path:
    """Return the folder for stats files. The caller creates and checks it with `untrusted_files.own_folder`."""
    if config.runtime_dir:
        return Path(config.runtime_dir)
    if _is_own(folder := _folder_in_node_folder()):
        return folder
    if _is_own(NODE_FOLDER):
        return NODE_FOLDER
    session = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if session.is_absolute() and _is_own(session):  # after `su`, it still belongs to the other user
        return session / "infinity"
    return Path(tempfile.gettempdir()) / f"infinity-{os.geteuid()}"


def _folder_in_node_folder() -> Path:
    """Return this user's subfolder of `NODE_FOLDER`. A daemon that serves this user creates it when the user connects.

    No request is necessary: the daemon closes the connection only after it has created the folder.
    """
    folder = NODE_FOLDER / str(os.geteuid())
    # Path.exists would raise PermissionError if another user has a private folder there.
    if not os.path.exists(folder / "infinityd.sock") and os.path.exists(NODE_FOLDER / "infinityd.sock"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CONNECT_SECONDS)
            connection.connect(str(NODE_FOLDER / "infinityd.sock"))
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
    return folder


def _is_own(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.geteuid() and not whose_folder(folder)
    except OSError:
        return False


def load_config(source: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
    """Return the settings from a TOML file, a nested mapping or a `Config`, or the defaults if `source` is None.

    Args:
        source: path to a TOML file, a mapping from sections to settings, a `Config`, or None.

    Raises:
        ConfigError: if a key is unknown (the message suggests the most similar known key), if a value has the wrong
            type or is out of range, or if the file is missing or is not valid TOML.
    """
    return _SETTINGS.load(source)


def check_config(config: Config) -> None:
    """Check that settings are consistent with each other and with this machine.

    Raises:
        ConfigError: if they are inconsistent. The message contains the setting and the fix.
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
            raise ConfigError(f"storage.paths: {path!r} is not a folder. Choose a different path.")
        if not os.path.isdir(Path(path).parent):
            raise ConfigError(f"storage.paths: {path!r} cannot be created: {str(Path(path).parent)!r} is not a folder")
    for path in config.run.resume_paths:
        if not os.path.isdir(path):
            raise ConfigError(f"run.resume_paths: {path!r} is not a folder. Set it to the folder that stores the run.")
    if len(config.run.name) > MOST_NAME or not config.run.name.isprintable():
        raise ConfigError(
            f"run.name = {config.run.name!r:.80} is not a name of at most {MOST_NAME} printable characters. Choose "
            "another name."
        )
    if config.run.resume_paths and not config.run.resume:
        raise ConfigError(
            'run.resume_paths is set, but run.resume is empty. Set run.resume to "latest" or to a run id.'
        )
    if config.run.mirror and not is_address(config.run.mirror):
        raise ConfigError(
            f"run.mirror = {config.run.mirror!r} has no protocol. For a folder, set it to "
            f'"file://{os.path.abspath(config.run.mirror)}".'
        )
    if (config.run.mirror or config.run.copies) and not config.run.retained_checkpoints:
        raise ConfigError(
            f"run.{'mirror' if config.run.mirror else 'copies'} is set, but run.retained_checkpoints = 0, so there are "
            "no checkpoints to copy. Set it to 1 or more."
        )
    if config.run.resume_step >= 0 and not config.run.resume:
        raise ConfigError(
            f'run.resume_step = {config.run.resume_step}, but run.resume is empty. Set run.resume to "latest" or to a '
            "run id."
        )
    if is_address(config.run.resume) and config.run.resume_paths:
        raise ConfigError("run.resume is the address of a mirror, so run.resume_paths has no effect. Remove it.")
    if config.run.resume == "auto" and (config.run.resume_paths or config.run.resume_step >= 0):
        name = "run.resume_paths" if config.run.resume_paths else "run.resume_step"
        raise ConfigError(
            f'{name} cannot be combined with run.resume = "auto", which would resume from the same checkpoint at every '
            'start. Set run.resume to "latest" for the first start.'
        )
    if (timeline := config.telemetry.timeline) and (why := why_not_written(Path(timeline))):
        raise ConfigError(f"telemetry.timeline = {timeline!r} cannot be written: {why}. Choose a different file.")
    resolved = [str(Path(path).resolve()) for path in config.storage.paths]
    if len(set(resolved)) != len(resolved):
        raise ConfigError(
            f"storage.paths contains the same folder twice: {list(config.storage.paths)}. Remove the duplicate."
        )
    page, host = config.memory.page_bytes, config.memory.host_bytes
    if page and (page % (64 * KIB) or page < 64 * KIB):
        raise ConfigError(
            f"memory.page_bytes = {page} is not a multiple of 64 KiB. Use {max(1, page // 65536) * 65536}, for example."
        )
    if page and host and host < page:
        raise ConfigError(
            f"memory.host_bytes = {host} is smaller than one page (memory.page_bytes = {page}). Increase it."
        )
    if config.storage.request_bytes % 4096:
        raise ConfigError(f"storage.request_bytes = {config.storage.request_bytes} is not a multiple of 4096")
