"""NVMe storage tier for PyTorch FSDP2: train models whose state exceeds GPU and host memory."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from infinity.config import Config, load_config
from infinity.errors import InfinityError
from infinity.hugepages import use_for_tensors

if TYPE_CHECKING:
    from infinity.accumulation.micro_batches import micro_batches, sliced_loss
    from infinity.fsdp.mesh import mesh
    from infinity.fsdp.offload_policy import NVMeOffloadPolicy
    from infinity.models.pretrained import from_config, from_pretrained
    from infinity.run.offload import offload
    from infinity.run.open_runs import close_all
    from infinity.run.optimizer import PagedOptimizer

__version__ = "0.1.0"
__all__ = [
    "Config",
    "InfinityError",
    "NVMeOffloadPolicy",
    "PagedOptimizer",
    "close_all",
    "from_config",
    "from_pretrained",
    "load_config",
    "mesh",
    "micro_batches",
    "offload",
    "sliced_loss",
]

use_for_tensors()

# Imported on first use, because the daemon and the telemetry import this package and must not import torch.
_DEFINED_IN = {
    "NVMeOffloadPolicy": "infinity.fsdp.offload_policy",
    "PagedOptimizer": "infinity.run.optimizer",
    "close_all": "infinity.run.open_runs",
    "from_config": "infinity.models.pretrained",
    "from_pretrained": "infinity.models.pretrained",
    "mesh": "infinity.fsdp.mesh",
    "micro_batches": "infinity.accumulation.micro_batches",
    "offload": "infinity.run.offload",
    "sliced_loss": "infinity.accumulation.micro_batches",
}


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_DEFINED_IN[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_DEFINED_IN})
