"""The storage tier for PyTorch FSDP2: train models larger than memory, with their state on NVMe."""

from infinity.config import Config, load_config
from infinity.errors import InfinityError
from infinity.offload import mesh, offload
from infinity.optim.optimizer import PagedOptimizer

__version__ = "0.1.0"
__all__ = ["Config", "InfinityError", "PagedOptimizer", "load_config", "mesh", "offload"]
