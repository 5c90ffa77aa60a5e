"""Tests of the Accelerate integration: scripts change only `prepare`, with results bitwise equal to FSDP2 in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

import infinity
from infinity.config import load_config
from infinity.errors import CheckpointError, ConfigError, InfinityError, UnsupportedError
from infinity.integrations import accelerate as accelerate_integration
from infinity.integrations import checkpoint_folders
from infinity.integrations.accelerate import prepare
from infinity.integrations.checkpoint_folders import Record
from infinity.ranks import Ranks
from support import by_hand, models
from support.by_hand import BATCHES, CLIP, HALF, data, full_weights, scheduler_of
from support.ranks import RankPool
from support.train import MIB

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def bare(name: str = "llama", *, meta: bool = False) -> nn.Module:
    """Return an unsharded model."""
    torch.manual_seed(3)
    with torch.device("meta" if meta else "cpu"):
        return models.llama(tied=name == "tied")


def sharded(name: str = "llama", policy: MixedPrecisionPolicy = BF16) -> nn.Module:
    """Return a model that is sharded as in a user script."""
    model = bare(name)
    for layer in model.model.layers:
        fully_shard(layer, mesh=infinity.mesh("cpu"), mp_policy=policy)
    fully_shard(model, mesh=infinity.mesh("cpu"), mp_policy=policy)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two param groups."""
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, fused=True)


@contextmanager
def accelerator(**named: Any) -> Iterator[Accelerator]:
    """Yield an accelerator for the ranks of the existing process group."""
    infinity.mesh("cpu")
    ranks = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # unused: the process group exists already
    variables = {key: str(value) for key, value in (ranks | places).items()} if dist.get_world_size() > 1 else {}
    _forget()
    os.environ.update(variables)
    try:
        yield Accelerator(cpu=True, step_scheduler_with_optimizer=False, **named)
    finally:
        for key in variables:
            del os.environ[key]
        _forget()


def _forget() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def settings(folder: Path, **run: Any) -> dict[str, Any]:
    """Return settings with which most of the state is paged."""
    return {
        "storage": {"paths": [str(folder / "nvme")]},
        "memory": {"host_bytes": MIB, "page_bytes": "64KiB"},
        "telemetry": {"runtime_dir": str(folder / "runtime")},
        "run": run,
    }


def plugin(**named: Any) -> FullyShardedDataParallelPlugin:
    """Return a plugin that shards every layer."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", mixed_precision_policy=BF16, **named
    )


def loader_of() -> DataLoader[torch.Tensor]:
    """Return a loader of all sequences."""
    return DataLoader(data(), batch_size=2)  # type: ignore[arg-type]


def in_memory(model: nn.Module, accumulation: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with plain PyTorch; return the losses and weights."""
    batches = data().split(2)[dist.get_rank() :: dist.get_world_size()]
    return by_hand.train(model, optimizer_of(model), batches, accumulation), full_weights(model)


def loop(accelerator: Accelerator, parts: tuple[Any, ...], first: int = 0, last: int = BATCHES) -> list[float]:
    """Run a typical Accelerate training loop; return the losses of the batches from `first` on."""
    model, optimizer, loader, scheduler = parts
    losses = []
    for number, batch in enumerate(loader):
        if not first <= number < last:
            continue
        with accelerator.accumulate(model):
            loss = models.loss_of(model, batch)
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return losses


def pretend_fsdp2(accelerator: Accelerator) -> None:
    """Set the distributed type to FSDP2, which Accelerate does on GPUs only."""
    accelerator.state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin()
    assert accelerator.is_fsdp2


def parts_of(accelerator: Accelerator, model: nn.Module, folder: Path, **named: Any) -> tuple[Any, ...]:
    """Prepare the model, optimizer, data loader and scheduler of a script."""
    optimizer, loader = optimizer_of(model), loader_of()
    config = named.pop("config", None) or settings(folder)
    return prepare(accelerator, model, optimizer, loader, scheduler_of(optimizer), config=config, **named)


def paged(name: str, folder: str, sharding: str, accumulation: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with the state on NVMe; return the losses and weights."""
    with accelerator(gradient_accumulation_steps=accumulation, mixed_precision="bf16") as acc:
        model = sharded(name) if sharding == "script" else bare(name)
        chosen_plugin = (
            plugin(activation_checkpointing=sharding == "plugin and checkpoints")
            if sharding.startswith("plugin")
            else None
        )
        if sharding == "FSDP2":
            pretend_fsdp2(acc)
        parts = parts_of(acc, model, Path(folder), fsdp_plugin=chosen_plugin)
        with parts[1].optimizer as optimizer:
            losses = loop(acc, parts)
            assert optimizer.records[-1].read_bytes > 0
            return losses, full_weights(parts[0])


def compare(name: str, folder: str, sharding: str, accumulation: int) -> list[str]:
    """Return the deviations from training in memory. Runs on every rank."""
    expected, weights = in_memory(sharded(name), accumulation)
    losses, found = paged(name, folder, sharding, accumulation)
    wrong = [] if losses == expected and len(set(losses)) > 1 else [f"losses: {losses} != {expected}"]
    return wrong + [name for name, value in weights.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize(
    ("name", "sharding", "accumulation"),
    [
        pytest.param("llama", "script", 1, marks=pytest.mark.wide),
        ("tied", "plugin and checkpoints", 1),
        ("llama", "FSDP2", 2),
    ],
)
def test_training_is_bitwise_equal_to_memory(name: str, sharding: str, accumulation: int, tmp_path: Path) -> None:
    """The script or Accelerate shards the model; training uses clipping, accumulation, a scheduler and a loader."""
    assert compare(name, str(tmp_path), sharding, accumulation) == []


def test_training_on_two_ranks_is_bitwise_equal_to_memory(pair: RankPool, tmp_path: Path) -> None:
    """Gradients are reduced for every micro-batch, as with `sync_each_batch`."""
    assert pair.run(compare, "llama", str(tmp_path), "plugin", 2) == [[], []]


def test_model_on_the_meta_device(tmp_path: Path) -> None:
    """Parameters without storage are found, and their weights are streamed."""
    bare().save_pretrained(tmp_path / "weights")
    expected, weights = in_memory(sharded())
    with accelerator() as acc:
        parts = parts_of(acc, bare(meta=True), tmp_path, fsdp_plugin=plugin(), weights=tmp_path / "weights")
        with parts[1].optimizer:
            assert loop(acc, parts) == expected
            assert all(torch.equal(value, weights[name]) for name, value in full_weights(parts[0]).items())


class Counter:
    """Object with state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def first_half(folder: str) -> list[float]:
    """Train to the middle and save. Runs on every rank."""
    with accelerator(project_dir=folder) as acc:
        pretend_fsdp2(acc)
        parts = parts_of(acc, sharded(), Path(folder))
        counter = Counter()
        acc.register_for_checkpointing(counter)
        with parts[1].optimizer:
            half = HALF // dist.get_world_size()
            losses = loop(acc, parts, last=half)
            counter.value = 17
            acc.save_state(str(Path(folder, "half")))
            return losses


def second_half(folder: str) -> list[float]:
    """Resume in the middle and train to the end. Runs on every rank."""
    with accelerator(project_dir=folder) as acc:
        parts = parts_of(acc, sharded(), Path(folder), resume_from=Path(folder, "half"))
        counter = Counter()
        acc.register_for_checkpointing(counter)
        with parts[1].optimizer as optimizer:
            acc.load_state(str(Path(folder, "half")))
            assert counter.value == 17
            assert optimizer.steps == HALF // dist.get_world_size() == parts[3].scheduler.last_epoch
            return loop(acc, parts, first=HALF // dist.get_world_size())


def memory_losses() -> list[float]:
    """Return the losses of training in memory. Runs on every rank."""
    return in_memory(sharded())[0]


def test_load_state_resumes_a_saved_run(tmp_path: Path) -> None:
    """The resumed run is bitwise equal to an uninterrupted one."""
    assert first_half(str(tmp_path)) + second_half(str(tmp_path)) == memory_losses()
    sizes = [file.stat().st_size for file in (tmp_path / "half").iterdir()]
    assert sum(sizes) < 64 << 10, "the folder must not contain a copy of the state"


def first_half_in_memory(folder: str) -> list[float]:
    """Train to the middle with plain FSDP2, and let Accelerate save all of the state. Runs on every rank."""
    with accelerator() as acc:
        pretend_fsdp2(acc)
        model = sharded()
        optimizer = acc.prepare_optimizer(optimizer_of(model))
        scheduler = acc.prepare_scheduler(scheduler_of(optimizer.optimizer))
        acc._models.append(model)
        losses = loop(acc, (model, optimizer, acc.prepare(loader_of()), scheduler), last=HALF // dist.get_world_size())
        acc.save_state(str(Path(folder, "half")))
        return losses


def second_half_from_memory(folder: str) -> list[float]:
    """Load the state that Accelerate has saved in memory, and train to the end. Runs on every rank."""
    with accelerator() as acc:
        pretend_fsdp2(acc)
        parts = parts_of(acc, sharded(), Path(folder))
        half = HALF // dist.get_world_size()
        with parts[1].optimizer:
            loop(acc, parts, last=1)
            acc.load_state(str(Path(folder, "half")))
            assert parts[3].scheduler.last_epoch == half
            losses = loop(acc, parts, first=half)
            acc.save_state(str(Path(folder, "end")))
            assert acc.state.distributed_type == DistributedType.FSDP
            return losses


def test_load_state_loads_a_run_in_memory(tmp_path: Path) -> None:
    """Accelerate's own code loads weights and optimizer into pages, whose values it replaces."""
    assert first_half_in_memory(str(tmp_path)) + second_half_from_memory(str(tmp_path)) == memory_losses()
    assert Record.read(tmp_path / "end").step == 1 + BATCHES - HALF


@pytest.mark.wide
def test_load_state_loads_a_run_in_memory_on_two_ranks(pair: RankPool, tmp_path: Path) -> None:
    halves = [pair.run(half, str(tmp_path)) for half in (first_half_in_memory, second_half_from_memory)]
    assert [first + second for first, second in zip(*halves, strict=True)] == pair.run(memory_losses)


@pytest.mark.parametrize("late", [False, True])
def test_load_state_restores_the_learning_rate(late: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A scheduler that was created after `prepare` has set the rate of the first step."""
    first_half(str(tmp_path))
    with accelerator() as acc:
        model = sharded()
        given = optimizer_of(model)
        before = [] if late else [scheduler_of(given)]
        resumed = {"config": settings(tmp_path), "resume_from": tmp_path / "half"}
        _, optimizer, loader, *schedulers = prepare(
            acc, model, given, DataLoader(data(), batch_size=2), *before, **resumed
        )
        with optimizer.optimizer:
            rate = given.param_groups[0]["lr"]
            if late:
                schedulers = [acc.prepare_scheduler(scheduler_of(optimizer.optimizer))]
                assert given.param_groups[0]["lr"] != rate
            acc.register_for_checkpointing(Counter())
            acc.load_state(str(tmp_path / "half"))
            assert given.param_groups[0]["lr"] == rate == schedulers[0].get_last_lr()[0]
            loop(acc, (model, optimizer, loader, *schedulers), first=HALF, last=HALF + 1)
    assert "by a scheduler" not in caplog.text


@pytest.mark.wide
def test_load_state_resumes_a_saved_run_on_two_ranks(pair: RankPool, tmp_path: Path) -> None:
    halves = zip(pair.run(first_half, str(tmp_path)), pair.run(second_half, str(tmp_path)), strict=True)
    assert [first + second for first, second in halves] == pair.run(memory_losses)


def test_automatic_checkpoint_naming(tmp_path: Path) -> None:
    """Accelerate numbers the folders and removes old ones; the newest is loaded."""
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    with accelerator(project_config=project) as acc:
        parts = parts_of(acc, sharded(), tmp_path)
        with parts[1].optimizer:
            for _ in range(3):
                loop(acc, parts, last=1)
                acc.save_state()
            acc.load_state()
    assert sorted(file.name for file in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]


def test_save_model_and_get_state_dict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are streamed to files, or gathered in memory if they are small."""
    with accelerator() as acc:
        parts = parts_of(acc, sharded(), tmp_path)
        with parts[1].optimizer as optimizer:
            model = acc.unwrap_model(parts[0])
            assert model is parts[0]
            loop(acc, parts, last=2)
            expected = full_weights(model)
            found = acc.get_state_dict(parts[0])
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            acc.save_model(parts[0], tmp_path / "saved", max_shard_size="100KB")
            monkeypatch.setattr(accelerate_integration, "_GATHERED", 1000)
            with pytest.raises(UnsupportedError, match=r"accelerator\.save_model\(model, folder\)"):
                acc.get_state_dict(model)
            with pytest.raises(ConfigError, match="shares parameters with the prepared model; pass that model"):
                acc.save_model(model.model, tmp_path / "other")
            with pytest.raises(UnsupportedError, match="safe_serialization=False"):
                acc.save_model(model, tmp_path / "other", safe_serialization=False)
            assert isinstance(optimizer, infinity.PagedOptimizer)
    loaded = type(bare()).from_pretrained(tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    assert all(torch.equal(loaded.get_parameter(name), value) for name, value in expected.items())


def test_model_in_memory_keeps_the_methods_of_accelerate(tmp_path: Path) -> None:
    """A second model that Accelerate has prepared is part of `save_state`, and can be saved on its own."""
    with accelerator() as acc:
        parts = parts_of(acc, sharded(), tmp_path)
        with parts[1].optimizer:
            other = acc.prepare(nn.Linear(2, 2))
            acc.save_state(str(tmp_path / "state"))
            acc.save_model(other, tmp_path / "other")
            expected = {name: value.clone() for name, value in acc.get_state_dict(other).items()}
            nn.init.zeros_(other.weight)
            acc.load_state(str(tmp_path / "state"))
    assert other.weight.equal(expected["weight"])
    assert load_file(tmp_path / "other" / "model.safetensors")["weight"].equal(expected["weight"])


def test_unsupported_configurations_are_rejected(tmp_path: Path) -> None:
    """Errors are raised before anything is written."""
    with accelerator() as acc:
        for named, kind, message in (
            ({}, ConfigError, "FSDP2 plugin.*fully_shard"),
            ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)}, UnsupportedError, "fsdp_version=2"),
            ({"fsdp_plugin": plugin(cpu_offload=True)}, UnsupportedError, "cpu_offload"),
            ({"resume_from": tmp_path}, ConfigError, r"infinity\.json cannot be read: No such file"),
        ):
            with pytest.raises(kind, match=message):
                parts_of(acc, bare(), tmp_path, **named)
        model = sharded()
        optimizer = optimizer_of(model)
        with pytest.raises(UnsupportedError, match=r"accelerator\.prepare"):
            prepare(acc, model, acc.prepare(optimizer_of(bare())), config=settings(tmp_path))
        with pytest.raises(UnsupportedError, match="Linear"):
            prepare(acc, model, optimizer, nn.Linear(1, 1), config=settings(tmp_path))
    with accelerator(mixed_precision="bf16") as acc, pytest.raises(ConfigError, match=r"compute in torch\.float32"):
        parts_of(acc, sharded(policy=MixedPrecisionPolicy()), tmp_path)
    with accelerator(dynamo_backend="eager") as acc, pytest.raises(UnsupportedError, match="dynamo_backend"):
        parts_of(acc, bare(), tmp_path)


def test_folder_with_a_replaced_checkpoint_is_rejected(tmp_path: Path) -> None:
    """Resuming from an older checkpoint removes later ones, so the folder is checked first."""
    config = settings(tmp_path, retained_checkpoints=2)
    with accelerator() as acc:
        parts = parts_of(acc, sharded(), tmp_path, config=config)
        with parts[1].optimizer as optimizer:
            loop(acc, parts, last=1)
            acc.save_state(str(tmp_path / "first"))
            optimizer.save_checkpoint()
            loop(acc, parts, last=1)
            acc.save_state(str(tmp_path / "second"))
            checkpoints = sorted(os.listdir(optimizer.run.folder.checkpoints))
            folder = optimizer.run.folder.checkpoints
    with accelerator() as acc:
        with pytest.raises(CheckpointError, match=r"first, at step 1 .* was replaced"):
            parts_of(acc, sharded(), tmp_path, config=config, resume_from=tmp_path / "first")
        assert {name for name in checkpoints if name.endswith(".json")} <= set(os.listdir(folder))
        parts = parts_of(acc, sharded(), tmp_path, config=config, resume_from=tmp_path / "second")
        with parts[1].optimizer as optimizer:
            acc.load_state(str(tmp_path / "second"))
            assert optimizer.steps == 2


@pytest.mark.parametrize("moment", ["written", "checkpointed"])
def test_interrupted_save_into_the_same_folder(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old folder is loaded if the checkpoint was not saved yet, otherwise the new one; user files are kept."""
    last = tmp_path / "last"
    with accelerator() as acc:
        parts = parts_of(acc, sharded(), tmp_path)
        with parts[1].optimizer as optimizer:
            loop(acc, parts, last=1)
            acc.save_state(str(last))
            (last / "notes.txt").write_text("mine")
            loop(acc, parts, last=1)
            with monkeypatch.context() as patch:
                if moment == "written":
                    patch.setattr(optimizer, "save_checkpoint", lambda *_, **__: 1 / 0)
                else:
                    patch.setattr(checkpoint_folders, "finish", lambda folder: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    acc.save_state(str(last))
    steps = 1 if moment == "written" else 2
    with accelerator() as acc:
        parts = parts_of(acc, sharded(), tmp_path, resume_from=last)
        with parts[1].optimizer as optimizer:
            acc.load_state(str(last))
            assert optimizer.steps == steps == parts[3].scheduler.last_epoch
            loop(acc, parts, last=1)
            acc.save_state(str(last))
            assert Record.read(last).step == steps + 1
    assert (last / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".last")] == []


def test_save_model_replaces_weights_in_a_folder(tmp_path: Path) -> None:
    """Files that do not contain weights are kept."""
    out = tmp_path / "out"
    with accelerator() as acc:
        parts = parts_of(acc, sharded(), tmp_path)
        with parts[1].optimizer:
            acc.save_model(parts[0], out, max_shard_size="100KB")
            acc.save_state(str(out))
            loop(acc, parts, last=1)
            files = acc.save_model(parts[0], out)
            assert all(file.is_file() for file in files)
            expected = full_weights(parts[0])
    assert [file.name for file in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert Record.read(out).step == 0
    loaded = type(bare()).from_pretrained(out)
    assert all(torch.equal(loaded.get_parameter(name), value) for name, value in expected.items())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")] == []


def read_record_of_rank_0(folder: str) -> int:
    """Read the record of a folder that only rank 0 can see. Runs on every rank."""
    checkpoint = Path(folder, "checkpoint" if dist.get_rank() == 0 else "elsewhere")
    ranks = Ranks.current()
    if ranks.rank == 0:
        checkpoint.mkdir()
        (checkpoint / "infinity.json").write_text('{"run_id": "20260131-142530-1a2b3c", "step": 7, "token": "x"}')
    return Record.of_checkpoint(checkpoint, load_config(settings(Path(folder))), ranks)[1].step


def test_rank_0_reads_the_record(pair: RankPool, tmp_path: Path) -> None:
    """Only rank 0 writes the record, and it broadcasts the content."""
    assert pair.run(read_record_of_rank_0, str(tmp_path)) == [7, 7]


def write_fails_on_rank_1(folder: str) -> str:
    """Return the error of a rank when a write fails on rank 1. Runs on every rank."""
    with accelerator() as acc:
        parts = parts_of(acc, sharded(), Path(folder))
        with parts[1].optimizer as optimizer:

            def write() -> Path:
                if dist.get_rank() == 1:
                    raise OSError("full")
                return Path(folder)

            try:
                checkpoint_folders.Checkpoints(optimizer, "{}").save("save_state", None, write)
            except (InfinityError, OSError) as error:
                return str(error)
    return "no error"


def test_write_error_on_one_rank_fails_all_ranks(pair: RankPool, tmp_path: Path) -> None:
    """Other ranks do not wait for the failed one."""
    errors = pair.run(write_fails_on_rank_1, str(tmp_path))
    assert errors == ["save_state failed on rank 1: OSError: full", "full"]


# At every moment of an accelerator #

MOMENTS = (
    "before training", "before an update", "between steps", "in evaluation", "between trainings",
    "in the second training", "after training",
)  # fmt: skip
PENDING = "before an update"
"""Moment at which gradients are pending."""
CLOSED = "after close"


class Life:
    """Two trainings of a model, with the result of each call at each moment.

    One life is in memory with plain PyTorch, and one has its state on NVMe. Results must be bitwise equal.
    """

    def __init__(self, folder: Path, accelerator: Any, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        self.folder, self.accelerator = folder, accelerator
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.found: dict[tuple[str, str], Any] = {}
        self.weights: dict[str, dict[str, torch.Tensor]] = {}

    def train(self) -> None:
        self.call_all("before training")
        self._train(PENDING, "between steps", "in evaluation")
        self.call_all("between trainings")
        self._train(None, "in the second training", None)
        self.call_all("after training")

    def _train(self, before_update: str | None, between_steps: str, evaluating: str | None) -> None:
        for number, batch in enumerate(data().split(2)[:2]):
            self.accelerator.backward(models.loss_of(self.model, batch))
            if before_update and number == 0:
                self.call_all(before_update)
            self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            if number == 0:
                self.call_all(between_steps)
        self.model.eval()
        with torch.no_grad():
            models.loss_of(self.model, data()[:2])
            if evaluating:
                self.call_all(evaluating)
        self.model.train()

    def call_all(self, moment: str) -> None:
        self.call_each(moment)
        self.weights[moment] = full_weights(self.model)

    def call_each(self, moment: str) -> None:
        for name, call in CALLS.items():
            try:
                self.found[name, moment] = call(self, moment)
            except InfinityError as error:
                self.found[name, moment] = str(error)


def gradients(life: Life, moment: str) -> Any:
    """Return the gradients of a micro-batch, which are added to pending ones or otherwise discarded."""
    with torch.enable_grad(), life.accelerator.no_sync(life.model):
        life.accelerator.backward(models.loss_of(life.model, data()[4:6]))
    found = {name: param.grad.full_tensor().clone() for name, param in life.model.named_parameters()}
    if moment != PENDING:
        life.optimizer.zero_grad()
    return found


def saved(life: Life, moment: str) -> Any:
    """Return the weights that `save_model` writes."""
    life.accelerator.save_model(life.model, life.folder / moment / "weights")
    if isinstance(life.accelerator, SimpleNamespace):
        return full_weights(life.model)
    return dict(type(bare()).from_pretrained(life.folder / moment / "weights").named_parameters())


def save_state(life: Life, moment: str) -> Any:
    """Save, and load again, which must not change the weights."""
    folder = life.folder / moment / "state"
    life.accelerator.save_state(str(folder))
    life.accelerator.load_state(str(folder))
    return full_weights(life.model)


CALLS: dict[str, Callable[[Life, str], Any]] = {
    "no_sync": gradients,
    "get_state_dict": lambda life, moment: life.accelerator.get_state_dict(life.model),
    "save_model": saved,
    "save_state": save_state,
    "load_state": lambda life, moment: life.accelerator.load_state(str(life.folder / MOMENTS[0] / "state")),
}
"""Replaced methods. `load_state` loads the first folder."""


def on_nvme(acc: Any, folder: Path, **named: Any) -> Life:
    """Return a life with the state on NVMe, in which all checkpoints are retained."""
    model = sharded(policy=MixedPrecisionPolicy())
    optimizer = optimizer_of(model)
    config = settings(folder, retained_checkpoints=len(MOMENTS))
    return Life(folder, acc, *prepare(acc, model, optimizer, scheduler_of(optimizer), config=config, **named))


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Life, Life]:
    """Return the life in memory and the one on NVMe, which has ended."""
    in_memory = SimpleNamespace(
        backward=lambda loss: loss.backward(), clip_grad_norm_=torch.nn.utils.clip_grad_norm_,
        no_sync=lambda model: nullcontext(), get_state_dict=full_weights, save_model=lambda *_: None,
        save_state=lambda folder: None, load_state=lambda folder: None,
    )  # fmt: skip
    model = sharded(policy=MixedPrecisionPolicy())
    optimizer = optimizer_of(model)
    memory = Life(Path(), in_memory, model, optimizer, scheduler_of(optimizer))
    memory.train()
    with accelerator() as acc:
        paged = on_nvme(acc, tmp_path_factory.mktemp("accelerate"))
        with paged.optimizer.optimizer:
            paged.train()
        paged.call_each(CLOSED)
    return memory, paged


def same(one: Any, other: Any) -> bool:
    return isinstance(other, dict) and one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def expected(call: str, moment: str, memory: Any, found: Any) -> bool:
    """Return whether the result of a call equals the result in memory, or is the documented error."""
    if call in ("save_model", "save_state") and moment == PENDING:
        return "was called between backward and step(); call it after step()" in found
    if call == "load_state" and moment not in MOMENTS[:2]:  # weights are only restored when a run starts
        return "belongs to step 0 " in found and "call prepare(…, resume_from=" in found
    return found is None if call == "load_state" else same(memory, found)


def test_calls_at_all_moments_equal_memory(lives: tuple[Life, Life]) -> None:
    """The calls do not change the training either."""
    memory, paged = lives
    cells = [(call, moment) for call in CALLS for moment in MOMENTS]
    assert {
        cell: paged.found[cell] for cell in cells if not expected(*cell, memory.found[cell], paged.found[cell])
    } == {}
    assert [moment for moment in MOMENTS if not same(memory.weights[moment], paged.weights[moment])] == []


def test_replaced_methods_are_in_the_table(tmp_path: Path) -> None:
    """Before `prepare`, the accelerator has its own methods."""
    with accelerator() as acc:
        before = {name for name, value in vars(acc).items() if callable(value)}
        with on_nvme(acc, tmp_path).optimizer.optimizer:
            assert {name for name, value in vars(acc).items() if callable(value)} - before == {*CALLS}


def test_states_saved_at_all_moments_can_be_resumed(lives: tuple[Life, Life]) -> None:
    """The last one is resumed first, because resuming removes later checkpoints."""
    for moment in reversed([moment for moment in MOMENTS if moment != PENDING]):
        folder = lives[1].folder / moment / "state"
        with accelerator() as acc:
            life = on_nvme(acc, lives[1].folder, resume_from=folder)
            with life.optimizer.optimizer as optimizer:
                acc.load_state(str(folder))
                assert life.scheduler.scheduler.last_epoch == optimizer.steps
                assert same(lives[0].weights[moment], full_weights(life.model)), moment


def test_calls_after_close_name_the_reason(lives: tuple[Life, Life]) -> None:
    for call in CALLS:
        assert ("belongs to step 0" if call == "load_state" else "closed") in lives[1].found[call, CLOSED]
