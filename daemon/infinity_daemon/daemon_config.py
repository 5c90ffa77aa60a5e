"""Settings of the daemon, in the same format as the settings of a run.

`docs/reference/daemon-settings.md` is generated from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from infinity.config import TelemetryConfig, runtime_dir
from infinity.config_fields import Settings, setting
from infinity.daemon_client import SOCKET_NAME
from infinity.errors import ConfigError
from infinity.telemetry.http_server import LOOPBACK
from infinity.units import GIB, MIB

_DAY: Final = 86_400


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Addresses of the daemon. Changes take effect at the next start."""

    host: str = setting(LOOPBACK, "Address to listen on; 0.0.0.0 means all addresses. In that case, set `token_file`.")
    port: int = setting(9470, "TCP port of the dashboard, /metrics and /healthz; 0 for any free port.", maximum=65535)
    token_file: str = setting(
        "",
        "File with a token that HTTP clients must send as `Authorization: Bearer <token>`, except for /healthz. "
        "Read at start; must not be readable by other users. Empty: no token.",
    )
    socket: str = setting("", f"Unix socket for ranks. Empty: `{SOCKET_NAME}` in the runtime folder.")


@dataclass(frozen=True, kw_only=True)
class StatsFilesConfig:
    """Stats files of the ranks."""

    runtime_dir: str = setting(
        "",
        "Folder of the stats files; changes take effect at the next start. Empty: default of `telemetry.runtime_dir`.",
    )
    keep_dead_seconds: int = setting(900, "Time for which the metrics of a dead rank are still served.")
    keep_ended_seconds: int = setting(
        120, "Time for which the metrics of an ended rank are still served. Allow for two scrapes."
    )


@dataclass(frozen=True, kw_only=True)
class DrivesConfig:
    """Drives of the node."""

    paths: tuple[str, ...] = setting(
        (),
        "Folders on NVMe drives, the same as `storage.paths` of runs. Their drives are reported, measured and "
        "searched for stale runs. Drives of live ranks are found automatically.",
    )
    endurance: Mapping[str, int] = setting(
        {},
        'Rated endurance of a drive in bytes (TBW), by a folder on it: `"/nvme0" = "1200000GB"`.',
        size=True,
        minimum=1,
    )
    daily_share: float = setting(
        0.001,
        "Fraction of `endurance` that a run may write per day before a warning. 0: no warning.",
        maximum=1,
    )


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Bandwidth measurement of idle drives, and the history of all measurements."""

    enabled: bool = setting(True, "Measure the drives of `drives.paths`, each alone and all together.")
    every_seconds: int = setting(86_400, "Maximum age of a measurement before it is repeated.", minimum=60)
    idle_seconds: int = setting(60, "Time for which a drive must be idle before it is measured.", minimum=1)
    load_seconds: int = setting(
        1, "Maximum duration of the measurement of each load (read, write, mixed).", minimum=1, maximum=60
    )
    most_bytes: int = setting(
        3 * GIB,
        "Maximum bytes written to a drive by one measurement round (alone and with the others). The temporary file "
        "takes a sixth of it.",
        size=True,
        minimum=96 * MIB,
    )
    state_dir: str = setting(
        "",
        "Folder of the history; changes take effect at the next start. Empty: `$STATE_DIRECTORY` (systemd), "
        "`stats_files.runtime_dir` if set, `$XDG_STATE_HOME/infinity`, or `~/.local/state/infinity`.",
    )


@dataclass(frozen=True, kw_only=True)
class StaleConfig:
    """Runs in `drives.paths` without a live process. By default they are only listed; a removed run is lost."""

    remove_after_seconds: int = setting(
        0, "Time since the last change after which a stale run without a checkpoint is removed. 0: never."
    )
    remove_checkpointed_after_seconds: int = setting(
        0,
        "The same for a stale run with a checkpoint, which could still be resumed; at least a day (86400). 0: never.",
    )


@dataclass(frozen=True, kw_only=True)
class FairnessConfig:
    """Drives that are shared by several runs."""

    enabled: bool = setting(
        True,
        "Limit runs that exceed their share of a drive (`storage.bandwidth_weight`) while other runs are stalled on it.",
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

    @property
    def runtime_dir(self) -> Path:
        """Folder of the stats files."""
        return runtime_dir(TelemetryConfig(runtime_dir=self.stats_files.runtime_dir))

    @property
    def state_dir(self) -> Path:
        """Folder of data that is kept across restarts of the node, or the runtime folder if there is no home folder."""
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
    """Return the settings in a TOML file, or the defaults, with the `given` values replaced.

    Args:
        source: Path of the TOML file, or None for the defaults.
        given: Values that override the file, by dotted name.

    Raises:
        ConfigError: as `infinity.config.load_config`; or if a folder of a drive does not exist, or checkpoints would be
            removed in less than a day.
    """
    config = _SETTINGS.with_values(_SETTINGS.load(source), given)
    if 0 < (grace := config.stale.remove_checkpointed_after_seconds) < _DAY:
        raise ConfigError(
            f"stale.remove_checkpointed_after_seconds = {grace} is less than a day ({_DAY}), so an ended run would "
            "soon lose its checkpoints. Set at least a day, or 0 for never"
        )
    for name, paths in (("paths", config.drives.paths), ("endurance", config.drives.endurance)):
        for path in paths:
            if not os.path.isdir(path):
                raise ConfigError(f"drives.{name}: {path!r} is not a folder. Name a folder on a mounted drive")
    return config


def settings_markdown() -> str:
    """Return the text of docs/reference/daemon-settings.md."""
    return _SETTINGS.markdown("Settings of infinityd", "python -m infinity_daemon.daemon_config")


if __name__ == "__main__":
    print(settings_markdown(), end="")  # noqa: T201
