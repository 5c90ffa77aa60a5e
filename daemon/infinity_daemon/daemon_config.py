"""Settings of the daemon, in the same format as the settings of a run.

`docs/reference/daemon-settings.md` is generated from this module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from infinity.config import NODE_FOLDER, TelemetryConfig, runtime_dir
from infinity.config_fields import Settings, setting
from infinity.daemon_client import SOCKET_NAME
from infinity.errors import ConfigError
from infinity.telemetry.http_server import LOOPBACK
from infinity.units import GIB, MIB

_DAY: Final = 86_400


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Addresses and access control of the daemon. Changes take effect when the daemon is restarted."""

    host: str = setting(
        LOOPBACK, "Address to listen on; 0.0.0.0 for all addresses. If other machines can connect, set `token_file`."
    )
    port: int = setting(9470, "TCP port of the dashboard, /metrics and /healthz; 0 for any free port.", maximum=65535)
    token_file: str = setting(
        "",
        "File with a token that HTTP clients must send as `Authorization: Bearer <token>`, except to /healthz. "
        "It must not be readable by other users and is read at startup. Empty: no token is required.",
    )
    socket: str = setting(
        "", f"Path of the Unix socket for requests from ranks. Empty: `{SOCKET_NAME}` in the runtime folder."
    )
    group: str = setting(
        "",
        "Group whose members may use a daemon that runs as root, in addition to root; `*` for all users. Their stats "
        "files are in one subfolder per user of the runtime folder, by default `/run/infinity`. It does not apply to "
        "the TCP port, which `token_file` protects. Empty: only the daemon's user and root.",
    )


@dataclass(frozen=True, kw_only=True)
class StatsFilesConfig:
    """Stats files in which ranks record their metrics."""

    runtime_dir: str = setting(
        "",
        "Runtime folder that contains the stats files. Changes take effect when the daemon is restarted. Empty: the "
        "default of `telemetry.runtime_dir`.",
    )
    keep_dead_seconds: int = setting(
        900,
        "Time for which the metrics of a rank are still exported after it has died. The rank is reported as dead until "
        "its run is resumed or removed.",
    )
    keep_ended_seconds: int = setting(
        120,
        "Time for which the metrics of a rank are still exported after it has ended. Allow for at least two scrapes.",
    )


@dataclass(frozen=True, kw_only=True)
class DrivesConfig:
    """Drives on this node."""

    paths: tuple[str, ...] = setting(
        (),
        "Folders on NVMe drives, usually the same as `storage.paths` of runs. The daemon reports and measures their "
        "drives, and searches the folders and up to three levels of subfolders for stale runs. It also reports drives "
        "used by live ranks.",
    )
    endurance: Mapping[str, int] = setting(
        {},
        'Rated endurance (TBW) of each drive, by a folder on the drive, e.g. `"/nvme0" = "1200000GB"`.',
        size=True,
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Bandwidth measurements of idle drives, and the history of all measurements."""

    enabled: bool = setting(True, "Measure the drives in `drives.paths`: each drive alone, then all of them together.")
    every_seconds: int = setting(86_400, "Interval between two measurements of a drive.", minimum=60)
    idle_seconds: int = setting(60, "Time for which a drive must have been idle before it is measured.", minimum=1)
    load_seconds: int = setting(
        1, "Maximum duration of the measurement for each load (read, write and mixed).", minimum=1, maximum=60
    )
    most_bytes: int = setting(
        3 * GIB,
        "Maximum bytes written to each drive per round of measurements (alone, and together with the others). The "
        "temporary file uses one sixth of this size.",
        size=True,
        minimum=96 * MIB,
    )
    state_dir: str = setting(
        "",
        "Folder for the history. Changes take effect when the daemon is restarted. Empty: the first that is set of "
        "`$STATE_DIRECTORY` (set by systemd), `stats_files.runtime_dir` and `$XDG_STATE_HOME/infinity`, or else "
        "`~/.local/state/infinity`.",
    )


@dataclass(frozen=True, kw_only=True)
class StaleConfig:
    """Interrupted runs in `drives.paths` and their subfolders. By default, they are reported but never removed."""

    remove_after_seconds: int = setting(
        0, "Remove a stale run without a checkpoint if it has not changed for this time. 0: never."
    )
    remove_checkpointed_after_seconds: int = setting(
        0,
        "Remove a stale run with a checkpoint, which could still be resumed, if it has not changed for this time; at "
        "least 86400 (one day). 0: never.",
    )


@dataclass(frozen=True, kw_only=True)
class FairnessConfig:
    """Bandwidth of drives that several runs share."""

    enabled: bool = setting(
        True,
        "Limit the bandwidth of runs that exceed their share of a drive (see `storage.bandwidth_weight`) while other "
        "runs are stalled on it.",
    )


@dataclass(frozen=True, kw_only=True)
class CopiesConfig:
    """Copies of checkpoints on other nodes (`run.copies`), which daemons exchange over a private network.

    Changes take effect when the daemon is restarted.
    """

    host: str = setting(
        "",
        "Address or name of the interface on which the daemons of other nodes connect, e.g. `eth1`. It must be one "
        "interface. Empty: no copies.",
    )
    port: int = setting(9471, "TCP port for the daemons of other nodes; 0 for any free port.", maximum=65535)
    certificate: str = setting(
        "",
        "File with the certificate of this node, to encrypt copies with TLS. It requires `key` and `authority`. Empty: "
        "copies are authenticated but not encrypted.",
    )
    key: str = setting("", "File with the key of the certificate. It must not be readable by other users.")
    authority: str = setting(
        "",
        "File with the certificate of the authority that has signed the certificates of all nodes. Use an authority of "
        "your own, because every certificate that it has signed is accepted.",
    )


@dataclass(frozen=True, kw_only=True)
class DaemonConfig:
    """Settings of the daemon."""

    server: ServerConfig = field(default_factory=ServerConfig)
    stats_files: StatsFilesConfig = field(default_factory=StatsFilesConfig)
    drives: DrivesConfig = field(default_factory=DrivesConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    stale: StaleConfig = field(default_factory=StaleConfig)
    fairness: FairnessConfig = field(default_factory=FairnessConfig)
    copies: CopiesConfig = field(default_factory=CopiesConfig)

    @property
    def runtime_dir(self) -> Path:
        """Runtime folder, which contains the stats files, or a subfolder with them for each of several users."""
        if self.server.group and not self.stats_files.runtime_dir:
            return NODE_FOLDER
        return runtime_dir(TelemetryConfig(runtime_dir=self.stats_files.runtime_dir))

    @property
    def state_dir(self) -> Path:
        """Folder for data that outlives a restart of the node; the runtime folder if the user has no home folder."""
        given = self.measure.state_dir or os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
        if given or self.stats_files.runtime_dir:
            return Path(given or self.stats_files.runtime_dir)
        home, state = os.environ.get("HOME", ""), os.environ.get("XDG_STATE_HOME", "")
        if os.path.isabs(state):
            return Path(state) / "infinity"
        return Path(home) / ".local/state/infinity" if os.path.isabs(home) else self.runtime_dir

    @property
    def socket(self) -> Path:
        """Path of the Unix socket."""
        return Path(self.server.socket) if self.server.socket else self.runtime_dir / SOCKET_NAME


_SETTINGS = Settings(DaemonConfig)


def load_daemon_config(source: str | os.PathLike[str] | None, given: Mapping[str, Any]) -> DaemonConfig:
    """Return the settings of the daemon from a TOML file and from overrides.

    Args:
        source: Path of the TOML file, or None for the defaults.
        given: Settings that override the file, by dotted name.

    Raises:
        ConfigError: if a setting is unknown or invalid, if settings exclude each other, if a folder on a drive does not
            exist, or if checkpoints would be removed in less than one day.
    """
    config = _SETTINGS.with_values(_SETTINGS.load(source), given)
    if 0 < (grace := config.stale.remove_checkpointed_after_seconds) < _DAY:
        raise ConfigError(
            f"stale.remove_checkpointed_after_seconds = {grace} would soon delete checkpoints that could be resumed; "
            f"set it to at least {_DAY} (one day), or to 0 to keep them"
        )
    if config.server.group and config.server.socket:
        raise ConfigError(
            f"server.socket = {config.server.socket!r} cannot be combined with server.group, because users would not "
            "find the socket; remove one of them"
        )
    for name, paths in (("paths", config.drives.paths), ("endurance", config.drives.endurance)):
        for path in paths:
            if not os.path.isdir(path):
                raise ConfigError(f"drives.{name}: {path!r} is not a folder; use an existing folder on a mounted drive")
    return config
