"""Command line of `infinityd`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.cli_errors import HELP, Command, Version, failures, write_any_text
from infinity_daemon.daemon_config import DaemonConfig, load_daemon_config
from infinity_daemon.log import start_logging
from infinity_daemon.service import run


def _daemon(
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with settings (docs/reference/daemon-settings.md). Options override it; SIGHUP reloads it."
        ),
    ] = None,
    runtime_folder: Annotated[
        str | None,
        typer.Option(
            "--runtime-dir",
            help="Runtime folder that contains the stats files. [default: same as telemetry.runtime_dir]",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="TCP port of the dashboard and /metrics; 0 for any free port. [default: 9470]"
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all addresses. [default: 127.0.0.1]")
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option(help="File that contains the token that HTTP clients must send. [default: no token required]"),
    ] = None,
    device_path: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder on an NVMe drive to monitor; may be repeated. Drives used by live ranks are always monitored."
        ),
    ] = None,
    socket: Annotated[
        str | None,
        typer.Option(
            help="Path of the Unix socket for requests from ranks. [default: infinityd.sock in the runtime folder]"
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help="Group whose members may use the daemon, which must run as root; '*' for all users. [default: none]"
        ),
    ] = None,
    keep_dead_seconds: Annotated[
        int | None,
        typer.Option(min=0, help="Time for which the metrics of a rank are exported after it has died. [default: 900]"),
    ] = None,
    version: Version = False,
) -> None:
    """Serve metrics and a dashboard of this node's ranks and drives, and answer requests from ranks."""
    options: dict[str, Any] = {
        "stats_files.runtime_dir": runtime_folder,
        "stats_files.keep_dead_seconds": keep_dead_seconds,
        "server.port": port,
        "server.host": host,
        "server.token_file": token_file,
        "server.socket": socket,
        "server.group": group,
        "drives.paths": device_path,
    }
    given = {name: value for name, value in options.items() if value is not None}

    def load() -> DaemonConfig:
        return load_daemon_config(config, given)

    with failures():
        settings = load()
        start_logging()
        asyncio.run(run(settings, load))


app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
app.command(cls=Command, context_settings=HELP)(_daemon)


def main() -> None:
    """Run the daemon. The exit status is 2 if a setting or a socket cannot be used."""
    write_any_text()
    app(prog_name="infinityd")


if __name__ == "__main__":
    main()
