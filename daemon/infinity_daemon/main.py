"""Console script `infinityd`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from infinity.command import HELP, Command, Version, failures, finite
from infinity.config import TelemetryConfig, runtime_dir
from infinity.errors import ConfigError
from infinity.node import SOCKET_NAME
from infinity.telemetry.exporter import LOOPBACK
from infinity_daemon.log import start_logging
from infinity_daemon.service import Options, run


def _daemon(
    runtime_folder: Annotated[
        str,
        typer.Option("--runtime-dir", help="Folder of the stats pages; default as telemetry.runtime_dir."),
    ] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port of /metrics and /healthz; 0 takes any.")] = 9470,
    host: Annotated[str, typer.Option(help="Address to listen on, without authentication; 0.0.0.0 is all.")] = LOOPBACK,
    device_path: Annotated[
        list[str] | None,
        typer.Option(help="Folder on an NVMe drive to report; may be repeated. Those of live ranks are found."),
    ] = None,
    socket: Annotated[
        str, typer.Option(help=f"Unix socket for ranks; default {SOCKET_NAME} in the runtime folder.")
    ] = "",
    keep_dead_minutes: Annotated[
        float, typer.Option(min=0, max=10**9, callback=finite, help="How long the page of a dead rank is still served.")
    ] = 15.0,
    version: Version = False,
) -> None:
    """Serve the metrics of this node's ranks and drives, and answer the ranks' questions about space."""
    with failures():
        for path in device_path or ():
            if not os.path.isdir(path):
                raise ConfigError(f"--device-path {path!r} is not a folder; name one on a drive that is mounted")
    folder = runtime_dir(TelemetryConfig(runtime_dir=runtime_folder))
    start_logging()
    options = Options(
        runtime_dir=folder,
        socket=Path(socket) if socket else folder / SOCKET_NAME,
        host=host,
        port=port,
        device_paths=tuple(device_path or ()),
        keep_dead_seconds=60 * keep_dead_minutes,
    )
    with failures():
        asyncio.run(run(options))


app = typer.Typer(pretty_exceptions_enable=False)
app.command(cls=Command, context_settings=HELP)(_daemon)


def main() -> None:
    """Run the daemon; exit status 2 for a setting or a socket that cannot be used."""
    app(prog_name="infinityd")


if __name__ == "__main__":
    main()
