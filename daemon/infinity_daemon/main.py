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


def _option(name: str) -> Any:
    """Return the command-line option for a setting. Its value is None if the option is not passed."""
    section, key = name.split(".")
    settings = getattr(DaemonConfig(), section)
    text, default = settings.__dataclass_fields__[key].metadata["doc"], getattr(settings, key)
    return typer.Option(help=f"{text} [default: {default}]" if default else text)


def _daemon(
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with settings (docs/reference/daemon-settings.md). Options override it; SIGHUP reloads it."
        ),
    ] = None,
    runtime_dir: Annotated[str | None, _option("stats_files.runtime_dir")] = None,
    port: Annotated[int | None, _option("server.port")] = None,
    host: Annotated[str | None, _option("server.host")] = None,
    token_file: Annotated[str | None, _option("server.token_file")] = None,
    device_path: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder on an NVMe drive, usually one of the `storage.paths` of runs. The daemon reports and measures "
            "the drive, and searches the folder and up to three levels of subfolders for stale runs. It also reports "
            "drives used by live ranks. Can be repeated."
        ),
    ] = None,
    socket: Annotated[str | None, _option("server.socket")] = None,
    group: Annotated[str | None, _option("server.group")] = None,
    keep_dead_seconds: Annotated[int | None, _option("stats_files.keep_dead_seconds")] = None,
    version: Version = False,
) -> None:
    """Serve metrics and a dashboard of this node's ranks and drives, and answer requests from ranks."""
    options: dict[str, Any] = {
        "stats_files.runtime_dir": runtime_dir,
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
