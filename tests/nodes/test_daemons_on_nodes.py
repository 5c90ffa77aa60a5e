"""A run on several nodes, as shown by `infinity top` and by the daemon of each node."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.node_training import train
from support.nodes import Node, Nodes, start_ranks

SETTINGS = """
[server]
host = "0.0.0.0"
port = 9470
[stats_files]
keep_ended_seconds = 86400
"""
FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"


def run_shown(node: Node, *options: object) -> tuple[Any, str]:
    """Return the only run of a node as JSON and as text."""
    words = ["top", "--interval", "0.1", *options]
    programs = [node.infinity(*words, "--json"), node.infinity(*words, "--once", COLUMNS="100")]
    for program in programs:
        program.wait()
    (run,) = json.loads(programs[0].output)["runs"]
    return run, programs[1].output


@pytest.mark.slow
def test_each_node_names_and_links_the_other_one(tmp_path: Path) -> None:
    """Two nodes with two ranks each and their own daemon, and then without the daemons."""
    (results := tmp_path / "results").mkdir()
    (settings := tmp_path / "infinityd.toml").write_text(SETTINGS)
    with Nodes(tmp_path, 2) as nodes:
        runtime = nodes.local / "runtime"
        daemons = [
            node.daemon("--runtime-dir", str(runtime), "--config", str(settings), "--port", "9470") for node in nodes
        ]
        for program in start_ranks(nodes, 2, train, str(nodes.local), str(results)):
            program.wait()
        ids = set()
        for node, other in ((nodes[0], nodes[1]), (nodes[1], nodes[0])):
            run, text = run_shown(node, "--runtime-dir", runtime)
            ids.add(run["id"])
            assert (run["hosts"], run["other_hosts"]) == ([node.name], [other.name])
            assert run["pages"] == {other.name: f"http://{other.name}:9470/#{run['id']}"}
            ranks = sorted(rank["rank"] for rank in run["ranks"])
            assert f"ranks {ranks[0]}-{ranks[1]} of 4" in text
            assert f"also on {other.name}" in text
            page = node.command(sys.executable, "-c", FETCH, run["pages"][other.name].partition("#")[0] + "api/state")
            page.wait()
            state = json.loads(page.output)
            assert (state["node"]["host"], [found["id"] for found in state["runs"]]) == (other.name, [run["id"]])
        assert len(ids) == 1
        for daemon in daemons:
            daemon.signal(15)
            daemon.wait()
        run, text = run_shown(nodes[0], "--runtime-dir", runtime)
        assert run["other_hosts"] == ["node1"]
        assert "pages" not in run
        assert "also on node1" in text
