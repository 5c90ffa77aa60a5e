"""The compared systems: one class each, which builds the model, trains, saves and resumes.

All systems train the same pretrained weights in bf16 with fp32 master weights, recompute activations layer by layer,
and update with Adam(W) and the same hyperparameters. The imports of a class are only available in the environment of
its system.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LR = 1e-4
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 0.01


def start_ranks() -> None:
    """Initialize the gloo process group. A single rank needs one too, because FSDP2 requires a mesh."""
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            os.environ.setdefault(name, value)
        dist.init_process_group("gloo")


def adamw(parameters: Any) -> torch.optim.AdamW:
    """Return the optimizer of all systems that use an optimizer of torch."""
    return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)


class System(ABC):
    """A model, its optimizer, and the folder that stores them."""

    model: Any
    optimizer: Any

    def __init__(self, model: str, work: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.folder, self.work, self.settings, self.resuming = model, work, settings, resume
        self.saved = work / "checkpoint"
        self.build()
        if resume:
            self.resume()
        self.parameters = self.count()
        self.vocabulary = int(self.model.config.vocab_size)

    @abstractmethod
    def build(self) -> None:
        """Load the weights and create the optimizer."""

    @abstractmethod
    def save(self) -> None:
        """Write the state that a new process needs to resume."""

    @abstractmethod
    def resume(self) -> None:
        """Restore the saved state in a new process, after `build`."""

    def count(self) -> int:
        """Return the number of parameters of the model."""
        return sum(param.numel() for param in self.model.parameters())

    def forward(self, tokens: torch.Tensor) -> Any:
        """Return the loss."""
        return self.model(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: Any) -> None:
        """Compute gradients."""
        loss.backward()

    def update(self) -> None:
        """Apply the gradients and free them."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def flush_updates(self) -> None:
        """Wait until no transfers are in flight."""
        return None

    def close(self) -> None:
        """Release the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def load(self) -> Any:
        """Return the pretrained model in memory and in fp32, with activation recomputation."""
        from transformers import AutoModelForCausalLM

        return self.recomputing(AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32))

    @staticmethod
    def recomputing(model: Any) -> Any:
        """Enable activation recomputation, so that each layer saves only its inputs."""
        model.train()
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model


class TorchMemory(System):
    """Plain torch with everything in memory, under autocast."""

    def build(self) -> None:
        self.model = self.load()
        self.optimizer = adamw(self.model.parameters())

    def forward(self, tokens: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens)

    def save(self) -> None:
        self.saved.mkdir(exist_ok=True)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.saved / "state.pt")

    def resume(self) -> None:
        state = torch.load(self.saved / "state.pt", mmap=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class FsdpMemory(System):
    """FSDP2 with everything in memory."""

    offload = False

    def build(self) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        start_ranks()
        self.model = self.load()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        where = CPUOffloadPolicy(pin_memory=False) if self.offload else OffloadPolicy()
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (*layers_of(self.model), self.model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=where)
        self.optimizer = adamw(self.model.parameters())

    def save(self) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=self.saved)

    def resume(self) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint.load({"model": model, "optimizer": optimizer}, checkpoint_id=self.saved)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


class FsdpCpuOffload(FsdpMemory):
    """FSDP2 with CPUOffloadPolicy."""

    offload = True


class Infinity(System):
    """This project. `settings` contains sections of its configuration."""

    def build(self) -> None:
        import infinity

        start_ranks()
        self.model = self.recomputing(infinity.from_pretrained(self.folder))
        sections = {"storage": {"paths": [str(self.work)]}, **self.settings}
        sections["run"] = {"resume": "latest" if self.resuming else "", **self.settings.get("run", {})}
        self.optimizer = infinity.offload(self.model, adamw(self.model.parameters()), sections)

    def save(self) -> None:
        self.optimizer.save_checkpoint()

    def resume(self) -> None:
        """Return immediately, because `build` has resumed the run."""

    def flush_updates(self) -> None:
        while any(self.optimizer.run.pager.in_flight().values()):
            time.sleep(0.01)

    def close(self) -> None:
        self.optimizer.close()
        super().close()


class DeepSpeed(System):
    """ZeRO-3 of DeepSpeed. Subclasses define where parameters and optimizer state are stored."""

    parameters_on: str
    optimizer_on: str

    def build(self) -> None:
        import deepspeed
        from transformers import AutoModelForCausalLM
        from transformers.integrations import HfDeepSpeedConfig

        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        deepspeed.init_distributed("gloo")
        if self.parameters_on == "nvme" and dist.get_world_size() == 1:
            keep_recycled_buffers()
        settings = self.configuration()
        self._zero3 = HfDeepSpeedConfig(settings)  # transformers looks it up when it loads weights
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16)
        self._count = sum(getattr(param, "ds_numel", param.numel()) for param in model.parameters())
        self.recomputing(model)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        self.model = self.engine.module

    def count(self) -> int:
        return self._count

    def configuration(self) -> dict[str, Any]:
        """Return the configuration: the best settings that were found, see docs/reference/results.md."""
        zero: dict[str, Any] = {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_max_live_parameters": 60_000_000,
            "stage3_max_reuse_distance": 0,  # otherwise weights of a small model stay, each in a swap buffer
            "stage3_prefetch_bucket_size": 20_000_000,
            "stage3_param_persistence_threshold": 0,  # each persistent parameter occupies a swap buffer
            "sub_group_size": 25_000_000,
        }
        largest = self.settings.get("largest_parameter", 60_000_000)
        if self.parameters_on != "none":
            zero["offload_param"] = {"device": self.parameters_on, "pin_memory": False}
        if self.parameters_on == "nvme":
            buffers = {"buffer_count": 32, "buffer_size": largest, "max_in_cpu": 0}
            zero["offload_param"] |= {"nvme_path": str(self.work), **buffers}
        zero["offload_optimizer"] = {"device": self.optimizer_on, "pin_memory": False}
        if self.optimizer_on == "nvme":
            # Both pipelines need three sets of the four state tensors of a sub-group; the default is one set.
            pipelined = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
            zero["offload_optimizer"] |= {"nvme_path": str(self.work), **pipelined}
        adam = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY, "adam_w_mode": True}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": adam},
            "zero_optimization": {**zero, **self.settings.get("zero_optimization", {})},
            "aio": {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True},
            **self.settings.get("top", {}),
        }

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.engine(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: Any) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()

    def save(self) -> None:
        self.engine.save_checkpoint(str(self.saved), tag="one")

    def resume(self) -> None:
        self.engine.load_checkpoint(str(self.saved), tag="one")

    def close(self) -> None:
        self.engine.destroy()
        super().close()


class DeepSpeedNvme(DeepSpeed):
    """Parameters and optimizer state on NVMe."""

    parameters_on = optimizer_on = "nvme"


class DeepSpeedOptimizerNvme(DeepSpeed):
    """Optimizer state on NVMe, parameters in memory."""

    parameters_on, optimizer_on = "none", "nvme"


class DeepSpeedCpu(DeepSpeed):
    """CPU offload of parameters and optimizer state."""

    parameters_on = optimizer_on = "cpu"


def keep_recycled_buffers() -> None:
    """Work around wrong gradients of DeepSpeed on the CPU with one rank.

    If a gather needs no collective, DeepSpeed lets the weights be views of a swap buffer, which it reuses while the
    weights are in use. With a copy in these handles, the losses equal the losses of the other systems.
    """
    from deepspeed.runtime.zero import partition_parameters as theirs

    def copying(handle: Any, of: Any) -> None:
        made = handle.__init__

        def init(self: Any, params: Any) -> None:
            made(self, params)
            for param in of(params):
                param.data = param.data.clone()

        handle.__init__ = init

    copying(theirs.NoGatherHandle, lambda param: [param])
    copying(theirs.NoGatherCoalescedHandle, list)


def layers_of(model: Any) -> Any:
    """Return the layers of a causal language model: its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len)


SYSTEMS: dict[str, type[System]] = {
    "infinity": Infinity,
    "fsdp-memory": FsdpMemory,
    "fsdp-cpu-offload": FsdpCpuOffload,
    "torch-memory": TorchMemory,
    "deepspeed-nvme": DeepSpeedNvme,
    "deepspeed-optimizer-nvme": DeepSpeedOptimizerNvme,
    "deepspeed-cpu": DeepSpeedCpu,
}
