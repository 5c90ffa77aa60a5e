"""I/O engines that transfer data between memory and files on NVMe drives."""

from infinity.io.engine import DataFile, Engine, Op, Ticket
from infinity.io.paced import PacedEngine
from infinity.io.select import open_engine
from infinity.io.threads import ThreadEngine
from infinity.io.uring import UringEngine

__all__ = [
    "DataFile",
    "Engine",
    "Op",
    "PacedEngine",
    "ThreadEngine",
    "Ticket",
    "UringEngine",
    "open_engine",
]
