"""Tests of the nodes themselves: names, private folders, links that fail, and cleanup."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from support.daemon_process import until
from support.nodes import Nodes

PACKETS = 200


def receive(port: int) -> None:
    """Print each packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("", port))
        print("ready")
        while True:
            print(f"got {peer.recv(100).decode()}")


def send(host: str, port: int, last: str) -> None:
    """Send packets."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        for _ in range(PACKETS):
            peer.sendto(last.encode(), (host, port))
            time.sleep(0.001)


def test_nodes_have_names_drives_and_failing_links(tmp_path: Path) -> None:
    with Nodes(tmp_path, 2, drives=2) as nodes:
        for node in nodes:
            shell = node.command("sh", "-c", "hostname; ls; echo $$ > drive1/pid; cat /proc/1/comm > /dev/null")
            shell.wait()
            assert shell.output.split() == [node.name, "drive0", "drive1", "run", "tmp"]
        assert nodes.local.is_dir()
        assert [(node.folder / "drive1" / "pid").exists() for node in nodes] == [True, True]
        assert not list(nodes.local.iterdir())  # nothing is mounted outside the nodes
        receiver = nodes[0].start(receive, 5000)
        until(lambda: "ready" in receiver.output)

        def received(word: str) -> int:
            nodes[1].start(send, "node0", 5000, word).wait()
            return receiver.output.count(f"got {word}")

        until(lambda: received("first"))  # the first packets may be lost while addresses are resolved
        nodes[1].cut()
        assert received("cut") == 0
        nodes[1].lose(0.5)
        until(lambda: received("lost"))
        nodes[1].restore()
        nodes[0].limit(10**6)
        nodes[0].limit(0)
        until(lambda: received("restored"))
        nodes[0].kill()
        receiver.wait(-9)


def test_daemon_on_a_node(tmp_path: Path) -> None:
    with Nodes(tmp_path, 1) as nodes:
        daemon = nodes[0].daemon()
        assert (nodes[0].folder / "run" / "infinityd.sock").is_socket()
        daemon.signal(15)
        daemon.wait()


def test_processes_end_with_a_failed_test(tmp_path: Path) -> None:
    def fail() -> None:
        with Nodes(tmp_path, 1) as nodes:
            found.append(nodes[0]._space.pid)
            nodes[0].command("sleep", "1000")
            raise ValueError

    found: list[int] = []
    with pytest.raises(ValueError):  # noqa: PT011
        fail()
    assert not os.path.exists(f"/proc/{found[0]}")
