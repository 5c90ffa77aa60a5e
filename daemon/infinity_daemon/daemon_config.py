"""Settings of the daemon, read as those of a run are; `docs/reference/daemon-settings.md` is generated from here."""

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
    """Where the daemon listens. Changes count from the next start on."""

    host: str = setting(LOOPBACK, "Address to listen on; 0.0.0.0 is all of them: then set `token_file`.")
    port: int = setting(9470, "TCP port of the page, /metrics and /healthz; 0 takes any that is free.", maximum=65535)
    token_file: str = setting(
        "",
        "File with a token; who asks over HTTP must send it as `Authorization: Bearer <token>`, but for /healthz; the "
        "page asks for it. Read at the start; others must not be able to read it. Empty: nobody is asked for one.",
    )
    socket: str = setting("", f"Unix socket for ranks. Empty: `{SOCKET_NAME}` in the runtime folder.")


@dataclass(frozen=True, kw_only=True)
class PagesConfig:
    """The stats pages of ranks."""

    runtime_dir: str = setting(
        "", "Folder of the pages, which counts from the next start on. Empty: as `telemetry.runtime_dir` of a run."
    )
    keep_dead_seconds: int = setting(900, "How long the page of a rank that died is still served.")
    keep_ended_seconds: int = setting(
        120, "How long the page of a rank that ended in order is still served: two scrapes should fit."
    )


@dataclass(frozen=True, kw_only=True)
class DrivesConfig:
    """The drives of the node."""

    paths: tuple[str, ...] = setting(
        (),
        "Folders on NVMe drives: those of `storage.paths` of runs. Their drives are reported and measured, and stale "
        "runs are found in them; drives of live ranks are reported by themselves.",
    )
    endurance: Mapping[str, int] = setting(
        {},
        'Bytes that a drive may be written with in its life (TBW), by a folder on it: `"/nvme0" = "1200000GB"`.',
        size=True,
        minimum=1,
    )
    daily_share: float = setting(
        0.001,
        "Share of `endurance` that a run may write to a drive in a day before it is warned. 0: it never is.",
        maximum=1,
    )


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """What drives can do, measured by the daemon while nobody uses them; and the history of all measurements."""

    enabled: bool = setting(True, "Measure the drives of `drives.paths`, each alone and all together.")
    every_seconds: int = setting(86_400, "How old a measurement may become until the next one is taken.", minimum=60)
    idle_seconds: int = setting(60, "How long nobody has used a drive before it is measured.", minimum=1)
    load_seconds: int = setting(
        1, "Length of a measurement of each load (read, write, mixed), at most.", minimum=1, maximum=60
    )
    most_bytes: int = setting(
        3 * GIB,
        "Bytes that measuring a drive alone and with the others writes to it, at most; a sixth is the size of the file "
        "that is on it meanwhile. What came to nothing is tried again, ever more rarely.",
        size=True,
        minimum=96 * MIB,
    )
    state_dir: str = setting(
        "",
        "Folder of the history, which counts from the next start on. Empty: `$STATE_DIRECTORY` (systemd's), else "
        "`pages.runtime_dir` where that is set, else `$XDG_STATE_HOME/infinity`, else `~/.local/state/infinity`.",
    )


@dataclass(frozen=True, kw_only=True)
class StaleConfig:
    """Runs in `drives.paths` that nobody holds any more. They are listed; what is removed is lost."""

    remove_after_seconds: int = setting(
        0, "How long after its last change a run without a checkpoint is removed. 0: never."
    )
    remove_checkpointed_after_seconds: int = setting(
        0,
        "The same of a run with a checkpoint, from which training could go on: a day (86400) at least. 0: never.",
    )


@dataclass(frozen=True, kw_only=True)
class FairnessConfig:
    """Drives that several runs use at the same time."""

    enabled: bool = setting(
        True, "Hold runs back that move more than their share of a drive (`storage.weight`) while others wait for it."
    )


@dataclass(frozen=True, kw_only=True)
class DaemonConfig:
    """All settings of a daemon."""

    server: ServerConfig = field(default_factory=ServerConfig)
    pages: PagesConfig = field(default_factory=PagesConfig)
    drives: DrivesConfig = field(default_factory=DrivesConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    stale: StaleConfig = field(default_factory=StaleConfig)
    fairness: FairnessConfig = field(default_factory=FairnessConfig)

    @property
    def runtime_dir(self) -> Path:
        """Folder of the stats pages."""
        return runtime_dir(TelemetryConfig(runtime_dir=self.pages.runtime_dir))

    @property
    def state_dir(self) -> Path:
        """Folder of what is kept across restarts of the node; the runtime folder where there is no home."""
        given = self.measure.state_dir or os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
        if given or self.pages.runtime_dir:
            return Path(given or self.pages.runtime_dir)
        home, state = os.environ.get("HOME", ""), os.environ.get("XDG_STATE_HOME", "")
        if os.path.isabs(state):
            return Path(state) / "infinity"
        return Path(home) / ".local/state/infinity" if os.path.isabs(home) else self.runtime_dir

    @property
    def socket(self) -> Path:
        """The Unix socket."""
        return Path(self.server.socket) if self.server.socket else self.runtime_dir / SOCKET_NAME


_SETTINGS = Settings(DaemonConfig)


def load_daemon_config(source: str | os.PathLike[str] | None, given: Mapping[str, Any]) -> DaemonConfig:
    """Return the settings of a TOML file, or the defaults, with those replaced that are `given` by their dotted names.

    Raises:
        ConfigError: as `infinity.config.load_config`; a folder of a drive that is not there; checkpoints that would be
            removed soon.
    """
    config = _SETTINGS.with_values(_SETTINGS.load(source), given)
    if 0 < (grace := config.stale.remove_checkpointed_after_seconds) < _DAY:
        raise ConfigError(
            f"stale.remove_checkpointed_after_seconds = {grace} is less than a day ({_DAY}), in which a run that ended "
            "would lose its checkpoints; give more, or 0 for never"
        )
    for name, paths in (("paths", config.drives.paths), ("endurance", config.drives.endurance)):
        for path in paths:
            if not os.path.isdir(path):
                raise ConfigError(f"drives.{name}: {path!r} is not a folder; name one on a drive that is mounted")
    return config


def settings_markdown() -> str:
    """Return the text of docs/reference/daemon-settings.md."""
    return _SETTINGS.markdown("Settings of infinityd", "python -m infinity_daemon.daemon_config")


if __name__ == "__main__":
    print(settings_markdown(), end="")  # noqa: T201
