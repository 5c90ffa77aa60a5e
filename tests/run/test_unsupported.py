"""Tests of models, settings and calls that are not supported, and of their error messages."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import infinity
from infinity.config import Config, load_config
from infinity.errors import ConfigError, InfinityError, UnsupportedError
from infinity.units import format_size, parse_size
from support import models
from support.ranks import RankPool
from support.train import KIB, MIB, Paging, Recipe, batch, make_optimizer, offloaded, settings, step

IN_BACKWARD = Paging(host_cache="all", update_schedule="in_backward")


def backward(model: nn.Module, seed: int = 0) -> None:
    """Run one forward and backward pass."""
    models.loss_of(model, batch(model, seed)).backward()


def offload_error(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **sections: dict[str, Any]) -> str:
    """Check that `offload` raises and leaves no files; return the error type and message."""
    tree = settings(folder, Paging(), 64 * MIB, **sections)
    with pytest.raises(InfinityError) as caught:
        infinity.offload(model, optimizer, tree)
    assert list((folder / "nvme0").iterdir()) == []
    return f"{type(caught.value).__name__}: {caught.value}"


def test_config_object_is_accepted_by_load_config(tmp_path: Path) -> None:
    """`Config.with_values` also rejects unknown settings, with an error that callers may catch as a `ValueError`."""
    config = Config().with_values(**{"memory.host_bytes": "1GiB", "storage.paths": [str(tmp_path)]})
    assert load_config(config) == config
    assert config.memory.host_bytes == 1 << 30
    with pytest.raises(ValueError, match=r"memory\.host_byte"):
        Config().with_values(**{"memory.host_byte": 1})
    model = models.build("toy")
    with pytest.raises(ConfigError, match=r"storage\.paths is empty"):
        infinity.offload(model, make_optimizer(Recipe(), model))


@pytest.mark.parametrize("page", [64 * KIB, 192 * KIB, 448 * KIB])
def test_suggested_host_cache_size_is_accepted(page: int, tmp_path: Path) -> None:
    """The error reports the available and the minimum size, and a value that can be copied into the settings."""
    model = models.build("gpt2")
    optimizer = make_optimizer(Recipe(), model)
    text = offload_error(model, optimizer, tmp_path, memory={"host_bytes": page, "page_bytes": page})
    assert text.startswith("BudgetError")
    sentence, details = text.split("\n")
    size = r"[0-9.]+ [KMG]iB"
    assert re.search(rf"{size}\D*{size} \(\d+ pages of {size}\); set memory\.host_bytes to", sentence)
    for part in ("weights in the compute dtype", "master weights and moments", "gradients"):
        assert re.search(rf"{size} of {part}", details), part
    suggested = re.search(r'set memory\.host_bytes to "?([0-9.]+ ?[KMGT]?i?B)"? or more', text)[1]
    tree = settings(tmp_path, Paging(), parse_size(suggested), memory={"page_bytes": page})
    infinity.offload(model, optimizer, tree).close()


def test_printed_sizes_can_be_parsed() -> None:
    """Sizes in messages have no exponents."""
    for size in range(8 * 64 * KIB, 40 * 64 * KIB, 64 * KIB):
        text = format_size(size)
        assert "e" not in text.split()[0]
        assert abs(parse_size(text) - size) < 0.01 * size


def test_unsharded_model_is_rejected(tmp_path: Path) -> None:
    """A partially sharded model is rejected as well."""
    model = models.Toy()
    optimizer = make_optimizer(Recipe(), model)
    assert "fully_shard" in offload_error(model, optimizer, tmp_path)
    for layer in model.blocks:
        fully_shard(layer, mesh=infinity.mesh("cpu"))
    text = offload_error(model, make_optimizer(Recipe(), model), tmp_path)
    assert "embedding.weight" in text
    assert "fully_shard(model)" in text


def test_other_wrappers_are_named_in_the_error(tmp_path: Path) -> None:
    """FSDP1 users have sharded their model, so the error must not claim that it is unsharded."""
    for name in ("FullyShardedDataParallel", "DistributedDataParallel"):
        model = type(name, (nn.Sequential,), {})(models.build("toy"))
        text = offload_error(model, make_optimizer(Recipe(), model), tmp_path)
        assert f"wrapped in {name}" in text
        assert "fully_shard" in text


def test_wrong_argument_types_are_rejected(tmp_path: Path) -> None:
    """The error names the type."""
    model = models.build("toy")
    optimizer = make_optimizer(Recipe(), model)
    assert "type OrderedDict" in offload_error(model.state_dict(), optimizer, tmp_path)  # type: ignore[arg-type]
    assert "is a dict" in offload_error(model, {"optimizer": optimizer}, tmp_path)  # type: ignore[arg-type]
    assert "contains a list" in offload_error(model, [[optimizer], optimizer], tmp_path)  # type: ignore[list-item]


def test_file_system_without_a_size_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, ramfs reports a size of 0, which must not be reported as a full drive."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (0, 0, 0))
    model = models.build("toy")
    text = offload_error(model, make_optimizer(Recipe(), model), tmp_path)
    assert "ramfs" in text
    assert "0 B free" not in text


def test_cpu_offload_policy_is_unsupported(tmp_path: Path) -> None:
    """FSDP2's CPU offload and `infinity` cannot both manage the shards."""
    model = fully_shard(models.Toy(), mesh=infinity.mesh("cpu"), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert "CPUOffloadPolicy" in offload_error(model, make_optimizer(Recipe(), model), tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_different_grad_dtype_is_unsupported(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """FSDP2 respects `grad_dtype` since PyTorch 2.15, but pages hold gradients in the dtype of the parameter."""
    model = models.build("toy")
    model.blocks[0].up.weight.grad_dtype = dtype
    text = offload_error(model, torch.optim.AdamW(model.parameters()), tmp_path)
    assert text.startswith(f"UnsupportedError: blocks.0.up.weight has grad_dtype = {dtype}, but")
    assert "set blocks.0.up.weight.grad_dtype = torch.float32" in text


def test_different_grad_dtype_set_after_offload_is_unsupported(tmp_path: Path) -> None:
    """The next forward raises the error."""
    with offloaded(Recipe(model="toy"), IN_BACKWARD, tmp_path) as (model, optimizer):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        model.head.bias.grad_dtype = torch.bfloat16
        with pytest.raises(UnsupportedError, match=r"head\.bias has grad_dtype = torch\.bfloat16"):
            backward(model, 1)


def test_trainable_parameter_missing_from_the_optimizer_is_rejected(tmp_path: Path) -> None:
    """Otherwise it would silently not be trained."""
    model = models.build("toy")
    named = dict(model.named_parameters())
    named.pop("blocks.1.up.bias")
    assert "blocks.1.up.bias" in offload_error(model, torch.optim.AdamW(named.values()), tmp_path)


def test_optimizer_created_before_fully_shard_is_rejected(tmp_path: Path) -> None:
    """`fully_shard` replaces the parameters of the model."""
    model = models.Toy()
    early = make_optimizer(Recipe(), model)
    models.shard(model)
    assert "after fully_shard" in offload_error(model, early, tmp_path)


def test_optimizer_with_state_is_rejected(tmp_path: Path) -> None:
    """The state would be lost."""
    model = models.build("toy")
    optimizer = make_optimizer(Recipe(), model)
    backward(model)
    optimizer.step()
    assert "state" in offload_error(model, optimizer, tmp_path)


def test_offloading_twice_is_rejected(tmp_path: Path) -> None:
    """A new optimizer over paged parameters is rejected as well."""
    with offloaded(Recipe(model="toy"), IN_BACKWARD, tmp_path) as (model, optimizer):
        other = settings(tmp_path / "nvme0", Paging(), 64 * MIB)
        with pytest.raises(UnsupportedError, match="the model is already offloaded"):
            infinity.offload(model, optimizer, other)
        with pytest.raises(UnsupportedError, match="the model is already offloaded"):
            infinity.offload(model, make_optimizer(Recipe(), model), other).close()


def test_calls_between_updates_in_backward_and_step_are_rejected(tmp_path: Path) -> None:
    """The gradients have already been applied, and updates cannot be undone or repeated."""
    with offloaded(Recipe(model="toy"), IN_BACKWARD, tmp_path) as (model, optimizer):
        step(model, optimizer)
        backward(model)
        for call, message in (
            (lambda: optimizer.clip_grad_norm_(1.0), r"clip_grad_norm_.*update\.schedule"),
            (lambda: backward(model, 1), r"several backward passes .*update\.schedule"),
            (optimizer.zero_grad, r"zero_grad.*update\.schedule"),
        ):
            with pytest.raises(InfinityError, match=message):
                call()


def test_clipping_in_the_first_step_rules_out_updates_in_backward(tmp_path: Path) -> None:
    with offloaded(Recipe(model="toy"), IN_BACKWARD, tmp_path) as (model, optimizer):
        backward(model)
        optimizer.clip_grad_norm_(1.0)
        with pytest.raises(InfinityError, match=r"in_backward.*impossible"):
            optimizer.step()


def test_error_if_nonfinite_raises(tmp_path: Path) -> None:
    """The error is the same as PyTorch's."""
    with offloaded(Recipe(model="toy"), Paging(update_schedule="after_backward"), tmp_path) as (model, optimizer):
        (models.loss_of(model, batch(model, 0)) * float("inf")).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("update_schedule", ["after_backward", "in_backward"])
def test_checkpoint_with_pending_gradients_is_rejected(update_schedule: str, tmp_path: Path) -> None:
    """The checkpoint would contain a part of a step."""
    with offloaded(Recipe(model="toy"), Paging(update_schedule=update_schedule), tmp_path) as (model, optimizer):
        step(model, optimizer)
        backward(model)
        with pytest.raises(InfinityError, match=r"checkpoint\(\) .*between backward and step"):
            optimizer.save_checkpoint()
        optimizer.step()
        optimizer.save_checkpoint()


def test_reads_that_are_not_possible_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a shard above the load limit, the error recommends an alternative that does not exhaust memory."""
    with offloaded(Recipe(model="toy"), Paging(), tmp_path) as (model, optimizer):
        monkeypatch.setattr(optimizer._reader._shards, "_load_limit", 1000)
        with pytest.raises(UnsupportedError, match=r"head\.weight.*checkpoint"):
            model.head.weight.full_tensor().clone()
        with pytest.raises(InfinityError, match="'nothing'"):
            optimizer.read_state("nothing")


def test_closed_run_raises(tmp_path: Path) -> None:
    """Every method raises, as do loading a shard and running the model. Closing again has no effect."""
    with offloaded(Recipe(model="toy"), Paging(), tmp_path) as (model, optimizer):
        step(model, optimizer)
    optimizer.close()
    for call in (
        optimizer.step,
        optimizer.zero_grad,
        optimizer.save_checkpoint,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.save_pretrained(tmp_path / "out"),
    ):
        with pytest.raises(InfinityError, match="this optimizer was closed"):
            call()
    for use in (lambda: model.blocks[0].up.weight.full_tensor().clone(), lambda: backward(model)):
        with pytest.raises(InfinityError, match="optimizer of this model was closed"):
            use()


def test_weights_for_an_initialized_model_are_rejected(tmp_path: Path) -> None:
    """The weights would be ignored."""
    model = models.build("toy")
    with pytest.raises(ConfigError, match="meta device"):
        infinity.offload(model, make_optimizer(Recipe(), model), settings(tmp_path, Paging(), MIB), weights=tmp_path)


def test_missing_or_mismatched_weights_are_rejected(tmp_path: Path) -> None:
    """For a tensor with a different shape, the error reports both shapes."""
    from safetensors.torch import save_file

    model = models.build("toy", meta=True)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        infinity.offload(
            model, make_optimizer(Recipe(), model), settings(tmp_path, Paging(), 64 * MIB), weights=tmp_path
        )
    state = {name: value.clone() for name, value in models.Toy().state_dict().items()}
    state["blocks.0.up.weight"] = torch.zeros(3, 5)
    save_file(state, tmp_path / "model.safetensors")
    model = models.build("toy", meta=True)
    with pytest.raises(ConfigError, match=r"blocks\.0\.up\.weight.*\(3, 5\).*\(202, 67\)"):
        infinity.offload(
            model, make_optimizer(Recipe(), model), settings(tmp_path, Paging(), 64 * MIB), weights=tmp_path
        )
    assert list((tmp_path / "nvme0").iterdir()) == []


def _offload_with_different_arguments(folder: str, name: str) -> str:
    """Offload with a setting or argument that differs on the last rank; return the error message."""
    rank = dist.get_rank()
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    fully_shard(model, mesh=infinity.mesh("cpu"))
    section, _, key = name.partition(".")
    values = {"run.resume": ("", "auto"), "run.seed": (0, 1), "state.format": ("fp32", "split")}
    chosen: dict[str, Any] = {section: {key: values[name][rank]}} if key else {}
    config = settings(Path(folder), Paging(), 64 * MIB, **chosen)
    init = models.loss_of if name == "init" and rank else None
    with pytest.raises(ConfigError) as caught:
        infinity.offload(model, torch.optim.AdamW(model.parameters()), config, init=init)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run.resume", "run.resume differs between ranks: '' on rank 0, 'auto' on rank 1"),
        ("run.seed", "run.seed differs between ranks: 0 on rank 0, 1 on rank 1"),
        ("state.format", "state.format differs between ranks: 'fp32' on rank 0, 'split' on rank"),
        ("init", "init differs between ranks: False on rank 0, True on rank 1"),
    ],
)
def test_arguments_that_differ_between_ranks_are_rejected(
    pair: RankPool, tmp_path: Path, name: str, message: str
) -> None:
    """All ranks report the difference before they open files; otherwise one could wait for the other forever."""
    assert all(message in found for found in pair.run(_offload_with_different_arguments, str(tmp_path), name))
    assert not list(tmp_path.glob("nvme*/*"))
