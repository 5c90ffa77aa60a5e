"""Checks of the node: the daemon, and connections between ranks."""

from __future__ import annotations

import os
import shlex
import socket
from typing import Final

import infinity
from infinity import torchrun
from infinity.config import TelemetryConfig, runtime_dir
from infinity.daemon_client import SOCKET_NAME
from infinity.errors import ConfigError
from infinity.untrusted_files import whose_folder
from infinity_tools.doctor.finding import Finding, Group, check, note, ok, problem, warning
from infinity_tools.doctor.world import World


@check("daemon")
def daemon(world: World) -> Finding:
    """Status and version of infinityd. Training works without it, but then runs cannot reserve space, share drives
    fairly or use recorded drive bandwidth."""
    runtime, state = world.daemon.runtime, world.daemon.state
    if state is not None:
        found = state["node"]
        if found["version"] != infinity.__version__:
            return warning(
                f"infinityd has version {found['version']}, but infinity has version {infinity.__version__}",
                f"restart it: `systemctl restart infinityd`, or `kill {found['pid']}` and then `infinityd &`",
            )
        return ok(f"infinityd {found['version']} is running")
    try:
        reason = whose_folder(runtime)
    except FileNotFoundError:
        reason = ""
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        return warning(f"runtime folder {runtime} cannot be used: {reason}", "set a different telemetry.runtime_dir")
    start = (
        "infinityd &"
        if runtime == runtime_dir(TelemetryConfig())
        else f"infinityd --runtime-dir {shlex.quote(str(runtime))} &"
    )
    if (runtime / SOCKET_NAME).exists():
        return note(f"no infinityd of this user or root answers in {runtime}", start)
    return note("infinityd is not running (optional)", start)


@check("host name")
def host_name(world: World) -> Finding:
    """Resolution of the host name. If it does not resolve to an address of this host, gloo uses the loopback interface,
    so that ranks on other nodes cannot connect, and torchrun may hang even on a single node."""
    fix = 'as root: echo "127.0.0.1 $(hostname)" >> /etc/hosts; for several nodes, use a network address of this node'
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return warning("the host name does not resolve to an address", fix)
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as one:
                one.bind(address)
                return ok("the host name resolves to an address of this host")
        except OSError:
            continue
    return warning("the host name only resolves to addresses of other hosts", fix)


@check("loopback")
def loopback(world: World) -> Finding:
    """Connections between processes on this node through 127.0.0.1, which ranks use at startup."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 3):
            return ok("processes can connect to each other")
    except OSError as error:
        return problem(f"127.0.0.1 cannot be used: {error.strerror or error}", "as root: ip link set lo up")


@check("ranks")
def ranks(world: World) -> Finding:
    """Environment variables that torchrun sets. If they are left over from an earlier launch, a single process waits
    for ranks that do not exist, or fails at startup."""
    try:
        launched = torchrun.launched()
    except ConfigError as error:
        return problem(str(error), "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT")
    if launched:
        return note(
            f"this process is rank {os.environ['RANK']} of {torchrun.number('WORLD_SIZE', 1)}",
            "if this is not intended: unset RANK WORLD_SIZE",
        )
    return ok("no torchrun variables are set")


NODE: Final = Group("Node", (daemon, host_name, loopback, ranks))
