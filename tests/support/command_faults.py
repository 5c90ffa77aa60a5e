"""Run `infinity` with I/O faults on one rank: `python -m support.command_faults RANK KIND FIRST TIMES train …`.

Faults of type KIND affect TIMES transfers, beginning with transfer number FIRST.
"""

from __future__ import annotations

import importlib
import os
import sys

from infinity.config import StorageConfig
from infinity.io import Engine
from infinity_tools.cli import main
from support.fault_engine import Fault, FaultEngine, FaultKind


def inject_faults(kind: str, first: int, times: int) -> None:
    """Inject faults into all engines that are opened from now on."""
    module = importlib.import_module("infinity.run.run")
    original = module.open_engine
    fault = Fault(kind=FaultKind(kind), at=tuple(range(first, first + times)))

    def open_engine(config: StorageConfig) -> Engine:
        return FaultEngine(original(config), 0, [fault])

    module.open_engine = open_engine


if __name__ == "__main__":
    rank, kind, first, times = sys.argv[1:5]
    del sys.argv[1:5]
    if os.environ.get("RANK", "0") == rank:
        inject_faults(kind, int(first), int(times))
    main()
