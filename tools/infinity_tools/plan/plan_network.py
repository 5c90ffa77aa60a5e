"""Measured collectives for an estimate, from the file that `infinity probe --interconnect --out` writes."""

from __future__ import annotations

import json
from pathlib import Path

from infinity.errors import ConfigError
from infinity.estimate.network import Network, network_of_measurements


def is_file(text: str) -> bool:
    """Return whether a value of `--interconnect` is the name of a file instead of a bandwidth."""
    return text.endswith(".json") or Path(text).is_file()


def measured_network(path: str, nodes: int, ranks_per_node: int) -> Network:
    """Return the collectives of a file.

    Args:
        path: Name of the file.
        nodes: Number of nodes of the run.
        ranks_per_node: Number of ranks per node of the run.

    Raises:
        ConfigError: If the file cannot be read, or was measured on other numbers of nodes or ranks.
    """
    try:
        network = network_of_measurements(json.loads(Path(path).read_text()))
    except OSError as error:
        raise ConfigError(
            f"--interconnect {path!r} cannot be read: {error.strerror}; write it with "
            "`infinity probe --interconnect --out FOLDER`, or pass a bandwidth such as 10GbE"
        ) from None
    except (ValueError, RecursionError):
        raise ConfigError(
            f"--interconnect {path!r} is not a result of `infinity probe --interconnect`; "
            "pass interconnect.json from its --out folder, or a bandwidth such as 10GbE"
        ) from None
    if (network.nodes, network.ranks_per_node) != (nodes, ranks_per_node):
        raise ConfigError(
            f"--interconnect {path!r} was measured with --nodes {network.nodes} --ranks {network.ranks_per_node}, not "
            f"with --nodes {nodes} --ranks {ranks_per_node}; pass the former, or a bandwidth such as 10GbE"
        )
    return network
