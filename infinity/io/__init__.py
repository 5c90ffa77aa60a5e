"""Moving bytes between memory and files on NVMe."""

from infinity.io.engine import DataFile, Engine, Op, Ticket
from infinity.io.faults import Fault, FaultEngine, FaultKind
from infinity.io.powerloss import VolatileEngine
from infinity.io.select import open_engine
from infinity.io.threads import ThreadEngine
from infinity.io.uring import UringEngine
from infinity.io.wrapped import WrappedEngine

__all__ = [
    "DataFile",
    "Engine",
    "Fault",
    "FaultEngine",
    "FaultKind",
    "Op",
    "ThreadEngine",
    "Ticket",
    "UringEngine",
    "VolatileEngine",
    "WrappedEngine",
    "open_engine",
]
