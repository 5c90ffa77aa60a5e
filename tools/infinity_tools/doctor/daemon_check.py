"""The node: its daemon, and how ranks find each other."""

from __future__ import annotations

import os
import shlex
import socket
from typing import Final

import infinity
from infinity import torchrun
from infinity.daemon_client import SOCKET_NAME
from infinity.errors import ConfigError
from infinity.untrusted_files import whose_folder
from infinity_tools.doctor.finding import Group, Verdict, check, note, ok, problem, warning
from infinity_tools.doctor.world import World


@check("daemon")
def daemon(world: World) -> Verdict:
    """Whether infinityd runs, and is of this version. Training goes on without it, but then space is not reserved,
    runs do not share drives fairly, and what drives give is not kept."""
    runtime, found = world.daemon.runtime, world.daemon.status
    if found is not None:
        if found.get("version") != infinity.__version__:
            return warning(
                f"infinityd {found.get('version')} runs, infinity is {infinity.__version__}",
                f"start it again: systemctl restart infinityd; or kill {found.get('pid')}, and infinityd &",
            )
        return ok(f"infinityd {found['version']} runs")
    try:
        reason = whose_folder(runtime)
    except FileNotFoundError:
        reason = ""
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        return warning(f"{runtime} cannot be used: {reason}", "name another telemetry.runtime_dir")
    start = "infinityd &" if runtime == _default() else f"infinityd --runtime-dir {shlex.quote(str(runtime))} &"
    if (runtime / SOCKET_NAME).exists():
        return note(f"no infinityd of yours or root's answers in {runtime}", start)
    return note("infinityd does not run; training goes on without", start)


def _default() -> object:
    from infinity.config import TelemetryConfig, runtime_dir

    return runtime_dir(TelemetryConfig())


@check("host name")
def host_name(world: World) -> Verdict:
    """Whether the name of this host leads to an address of this host. Where it does not, gloo takes the loopback, so
    that ranks on other nodes do not find this one, and torchrun may wait in vain even on one node."""
    fix = 'as root: echo "127.0.0.1 $(hostname)" >> /etc/hosts; for several nodes its address in their network'
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return warning("does not resolve to an address", fix)
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as one:
                one.bind(address)
                return ok("resolves to an address of this host")
        except OSError:
            continue
    return warning("resolves to addresses of other hosts only", fix)


@check("loopback")
def loopback(world: World) -> Verdict:
    """Whether a process of this node can connect to another by 127.0.0.1, as ranks do when they start."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 3):
            return ok("ports can be opened and reached")
    except OSError as error:
        return problem(f"127.0.0.1 cannot be used: {error.strerror or error}", "as root: ip link set lo up")


@check("ranks")
def ranks(world: World) -> Verdict:
    """The variables of torchrun. Those that an earlier program has left in the environment make a single process wait
    for ranks that never come, or are refused."""
    try:
        launched = torchrun.launched()
    except ConfigError as error:
        return problem(str(error), "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT")
    if launched:
        return note(
            f"this process is rank {os.environ['RANK']} of {torchrun.number('WORLD_SIZE', 1)}",
            "if it is not meant to be: unset RANK WORLD_SIZE",
        )
    return ok("the environment names none, as it should outside of torchrun")


NODE: Final = Group("Node", (daemon, host_name, loopback, ranks))
