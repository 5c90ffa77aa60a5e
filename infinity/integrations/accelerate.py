"""Accelerate: a `prepare` function that replaces `Accelerator.prepare` in scripts that use FSDP2.

`prepare` shards the model as Accelerate would (unless it is already sharded), offloads it with `infinity.offload`, and
replaces the accelerator's methods that would load the whole state into memory. All other methods are unchanged.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

import infinity
from infinity import torch_private
from infinity.config import Config, load_config
from infinity.errors import ConfigError, UnsupportedError
from infinity.formats.safetensors import FILE_BYTES
from infinity.fsdp.sharded_model import ShardedModel
from infinity.integrations.checkpoint_folders import Checkpoints, Record, restore_settings, settings_of
from infinity.optional_dependencies import needs
from infinity.ranks import Ranks
from infinity.run.optimizer import PagedOptimizer
from infinity.sources.initialize import InitFunction
from infinity.units import MIB, format_size

with needs("accelerate", "infinity.integrations.accelerate"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model

_GATHERED = 256 * MIB  # limit, in bytes, for a state dict that is gathered in memory
_SERVED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *others: Any,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    strict: bool = True,
    init: InitFunction | None = None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
    resume_from: str | os.PathLike[str] | None = None,
) -> tuple[Any, ...]:
    """Prepare objects as `accelerator.prepare(model, optimizer, *others)` does, but with the training state on NVMe.

    Some methods of the accelerator change. `no_sync` and `accumulate` reduce the gradients of every micro-batch (as
    with `sync_each_batch`), because unreduced gradients of the whole model would stay in memory. `save_state` saves an
    infinity checkpoint, and the files that Accelerate writes in addition to the weights and the optimizer.
    `load_state` checks that the run has resumed from that checkpoint. `save_model` writes the weights in bounded
    memory. `get_state_dict` raises an error if the model is too large to gather in memory.

    Args:
        accelerator: accelerator with one process, with several processes on CPUs or GPUs, or with FSDP2.
        model: model to train. Unless it is already sharded with `fully_shard`, it is sharded as the FSDP2 plugin
            specifies. A model on the meta device is initialized from `weights`, or by its own code.
        optimizer: optimizer of the model's parameters, which must not be prepared yet.
        others: data loaders and schedulers for Accelerate to prepare.
        config: settings; see `infinity.offload`.
        weights: see `infinity.offload`.
        strict: see `infinity.offload`.
        init: see `infinity.offload`.
        fsdp_plugin: plugin that describes the sharding. Default: the accelerator's plugin, which does not exist on
            CPUs.
        resume_from: folder that `save_state` wrote. The run resumes from its checkpoint. Call `load_state` with the
            same folder afterwards.

    Returns:
        The model, the optimizer and `others`. The optimizer is wrapped by Accelerate; its `optimizer` attribute is the
        result of `infinity.offload`.

    Raises:
        UnsupportedError: if the accelerator is configured for an unsupported feature. The message gives the reason.
        ConfigError: if the model is not sharded, does not compute in the accelerator's precision, or `resume_from`
            was not written by `save_state`.
        CheckpointError: if the checkpoint of `resume_from` was replaced. In that case, nothing is changed.
        Exception: any exception that `infinity.offload` raises.
    """
    _check(accelerator, optimizer, others)
    settings = load_config(config)
    infinity.mesh(accelerator.device.type)
    if resume_from is not None:
        _, record = Record.of_checkpoint(Path(resume_from).expanduser(), settings, Ranks.current())
        settings = record.resumed(settings)
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        _shard(accelerator, model, optimizer, fsdp_plugin)
    _check_precision(accelerator, model)
    paged = infinity.offload(model, optimizer, settings, weights=weights, strict=strict, init=init)
    _Served(accelerator, model, paged).take_over()
    wrapped = accelerator.prepare_optimizer(paged, device_placement=False)  # placement would load the whole state
    accelerator._models.append(model)
    for item in (model, wrapped):
        item._is_accelerate_prepared = True
    return (model, wrapped, *(_prepared(accelerator, other) for other in others))


def _prepared(accelerator: Accelerator, other: Any) -> Any:
    if isinstance(other, torch.utils.data.DataLoader):
        return accelerator.prepare_data_loader(other)
    return accelerator.prepare_scheduler(other) if hasattr(other, "step") else other


def _check(accelerator: Accelerator, optimizer: torch.optim.Optimizer, others: tuple[Any, ...]) -> None:
    """Raise `UnsupportedError` if the arguments use an unsupported feature of Accelerate."""
    kind = str(accelerator.distributed_type.value)
    if kind not in _SERVED:
        raise UnsupportedError(f"Accelerate with {kind} is not supported: it shards the model itself; use FSDP2")
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UnsupportedError("FSDP1 is not supported: it keeps flat parameters in memory; set fsdp_version: 2")
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UnsupportedError(
            f"mixed_precision = {accelerator.mixed_precision!r} is not supported: Accelerate would scale losses or "
            "convert layers; use 'bf16' or 'no'"
        )
    if accelerator.state.dynamo_plugin.backend != "NO":
        raise UnsupportedError(
            "dynamo_backend is not supported: it compiles the whole model; remove it, and compile the layers before "
            "calling prepare"
        )
    parallel = accelerator.parallelism_config
    if parallel is not None and (parallel.tp_enabled or parallel.cp_enabled):
        raise UnsupportedError(
            "Accelerate's tensor and context parallelism are not supported; shard across data-parallel ranks only"
        )
    if isinstance(optimizer, AcceleratedOptimizer):
        raise UnsupportedError("the optimizer is already prepared; call this function instead of accelerator.prepare")
    for other in others:
        if isinstance(other, nn.Module | torch.optim.Optimizer):
            raise UnsupportedError(
                f"a {type(other).__name__} in addition to the model and the optimizer is not supported; if it stays "
                "in memory, prepare it with accelerator.prepare"
            )


def _shard(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    given: FullyShardedDataParallelPlugin | None,
) -> None:
    """Shard a model as Accelerate does, and replace the optimizer's parameters with the sharded ones by name.

    Accelerate matches parameters by memory address, but parameters on the meta device do not have one.
    """
    plugin = given if given is not None else getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        raise ConfigError(
            "the model is not sharded, and this accelerator has no FSDP2 plugin; create it with "
            "infinity.from_pretrained or from_config, call fully_shard on its layers and on the model, or pass "
            "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, …)"
        )
    if plugin.fsdp_version != 2:
        raise UnsupportedError("the FSDP plugin has fsdp_version=1; set fsdp_version=2")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise UnsupportedError("the FSDP plugin enables cpu_offload, which keeps the state in memory; remove it")
    on_meta = all(param.is_meta for param in model.parameters())
    if plugin.cpu_ram_efficient_loading and not on_meta and accelerator.num_processes > 1:
        raise ConfigError(
            "cpu_ram_efficient_loading loads all weights into the memory of rank 0; create the model on the meta "
            "device and pass weights=folder, or turn it off (fsdp_cpu_ram_efficient_loading: false)"
        )
    plugin = copy.copy(plugin)
    plugin.cpu_ram_efficient_loading = False
    if plugin.mixed_precision_policy is None and accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    asked = SimpleNamespace(  # attributes that the two functions below read from an accelerator
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=accelerator.torch_device_mesh,
        parallelism_config=accelerator.parallelism_config,
        mixed_precision=accelerator.mixed_precision,
        is_main_process=accelerator.is_main_process,
        device=accelerator.device,
    )
    before = {id(param): torch_private.unwrapped_name(name) for name, param in model.named_parameters()}
    plugin.set_auto_wrap_policy(model)
    if plugin.activation_checkpointing:
        fsdp2_apply_ac(asked, model)
    fsdp2_prepare_model(asked, model)
    after = {
        torch_private.unwrapped_name(name): param for name, param in model.named_parameters(remove_duplicate=False)
    }
    for group in optimizer.param_groups:
        group["params"] = [after[before[id(p)]] if id(p) in before else p for p in group["params"]]


def _check_precision(accelerator: Accelerator, model: nn.Module) -> None:
    """Check that FSDP modules compute in the accelerator's precision, because nothing else casts.

    Raises `ConfigError` if they do not.
    """
    if accelerator.mixed_precision != "bf16":
        return
    for member in ShardedModel.inspect(model).shards:
        dtype = torch_private.compute_dtype(member.param)
        if dtype != torch.bfloat16:
            raise ConfigError(
                f"mixed_precision = 'bf16', but {member.names[0]} was sharded to compute in {dtype}; pass "
                "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32) to fully_shard"
            )


class _Served:
    """Replacements for the accelerator's methods that read or write the training state."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, paged: PagedOptimizer) -> None:
        self._accelerator, self._model, self._paged = accelerator, model, paged
        self._checkpoints = Checkpoints(paged, "call prepare(…, resume_from={})")
        self._save, self._load = accelerator.save_state, accelerator.load_state
        self._save_other, self._state_of_other = accelerator.save_model, accelerator.get_state_dict
        self._settings, self._began = settings_of(paged), paged.steps

    def take_over(self) -> None:
        for name in ("no_sync", "save_state", "load_state", "save_model", "get_state_dict"):
            setattr(self._accelerator, name, getattr(self, name))

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Do not defer the reduction, because unreduced gradients of the whole model would stay in memory."""
        yield

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **named: Any) -> Any:
        """Write the files that Accelerate saves in addition to weights and optimizer, and then save a checkpoint.

        All ranks must call this method together. If it is interrupted, the previous folder and checkpoint can still be
        resumed from, even if the new folder has the same name, because the previous folder is kept under a different
        name until the new checkpoint exists. This does not apply if Accelerate itself removes the previous folder
        (`total_limit=1`).

        Raises:
            InfinityError: if gradients are pending (call this method after `step`), or another rank failed.
            StorageError, OSError: if a drive reports an error. The previous checkpoint stays intact.
        """

        def write() -> Path:
            with self._apart():
                return Path(self._save(output_dir, safe_serialization, **named))

        new = self._accelerator.project_configuration.automatic_checkpoint_naming
        folder = None if output_dir is None or new else Path(output_dir).expanduser()
        return self._checkpoints.save("save_state", folder, write)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **named: Any) -> None:
        """Load the files that Accelerate saved in addition to weights and optimizer.

        The run must have resumed from the checkpoint of this folder. With FSDP2, the folder may also have been saved
        without infinity. In that case, Accelerate loads all of it, one tensor at a time.

        Raises:
            ConfigError: if `save_state` did not write the folder.
            CheckpointError: if the run did not resume from its checkpoint, or has trained since. The message states
                the fix.
        """
        folder = Path(input_dir if input_dir is not None else self._newest()).expanduser()
        if self._accelerator.is_fsdp2 and not self._checkpoints.has_record(folder):
            self._paged.check_between("load_state")
            self._load(str(folder), load_kwargs, **named)
            return
        folder = self._checkpoints.check(folder)
        with self._apart():
            self._load(str(folder), load_kwargs, **named)
        if self._paged.steps == self._began:  # schedulers may have been constructed after `prepare`
            restore_settings(self._paged, self._settings)

    def _newest(self) -> Path:
        """Return the folder that Accelerate would load. Raises `ConfigError`."""
        folders = Path(self._accelerator.project_dir or "", "checkpoints")
        found = sorted(folders.glob("checkpoint_*"), key=lambda folder: int(folder.name.rpartition("_")[2]))
        if not found:
            raise ConfigError(f"{folders} does not contain a checkpoint_* folder; pass the folder to load")
        return found[-1]

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str | None = None,
        safe_serialization: bool = True,
    ) -> Any:
        """Write the weights in bounded memory, as `PagedOptimizer.save_pretrained` does, and replace earlier weights.

        Raises the same exceptions as `save_pretrained`. In that case, the folder is unchanged. A model that is kept in
        memory is saved by Accelerate.
        """
        if not self._is_offloaded(model):
            size = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
            return self._save_other(model, save_directory, safe_serialization=safe_serialization, **size)
        if not safe_serialization:
            raise UnsupportedError("safe_serialization=False is not supported, because it pickles the whole model")
        return self._checkpoints.export(
            Path(save_directory).expanduser(), file_bytes=FILE_BYTES if max_shard_size is None else max_shard_size
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full weights on rank 0, and an empty dict on other ranks.

        Accelerate itself returns the weights of a model that is kept in memory.

        Raises:
            UnsupportedError: if the weights are too large to gather in memory.
        """
        if not self._is_offloaded(model):
            return dict(self._state_of_other(model, unwrap))
        nbytes = sum(param.numel() * param.itemsize for param in self._model.parameters())
        if nbytes > _GATHERED:
            raise UnsupportedError(
                f"get_state_dict() would gather {format_size(nbytes)} in memory (limit {format_size(_GATHERED)}); "
                "to write the weights in bounded memory, call accelerator.save_model(model, folder) or "
                "optimizer.optimizer.save_pretrained(folder) on all ranks"
            )
        found = get_model_state_dict(self._model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()}

    def _is_offloaded(self, model: nn.Module) -> bool:
        """Return whether a model is the offloaded one. Raises `ConfigError` if it is only a part of it."""
        if self._accelerator.unwrap_model(model) is self._accelerator.unwrap_model(self._model):
            return True
        own = {id(param) for param in self._model.parameters()}
        if any(id(param) in own for param in model.parameters()):
            raise ConfigError(f"this {type(model).__name__} shares parameters with the prepared model; pass that model")
        return False

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Hide the model and the optimizer from Accelerate, because the infinity checkpoint contains their state."""
        accelerator = self._accelerator
        models, optimizers = accelerator._models, accelerator._optimizers
        accelerator._models = [model for model in models if model is not self._model]
        accelerator._optimizers = [wrapped for wrapped in optimizers if wrapped.optimizer is not self._paged]
        try:
            yield
        finally:
            accelerator._models, accelerator._optimizers = models, optimizers
