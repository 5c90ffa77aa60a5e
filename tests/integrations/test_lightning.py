"""Tests of the Lightning integration: modules are unchanged, with results bitwise equal to FSDP2 in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

import infinity
from infinity.errors import CheckpointError, ConfigError, UnsupportedError
from infinity.integrations.lightning import PagedStrategy
from support import by_hand, models
from support.by_hand import CLIP, HALF, data, full_weights, scheduler_of
from support.ranks import RankPool
from support.train import MIB

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Shard a Llama model."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=BF16)
    fully_shard(model, mesh=mesh, mp_policy=BF16)
    return model


def make() -> nn.Module:
    """Return a model in memory."""
    torch.manual_seed(3)
    return models.llama()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)


class Llama(LightningModule):
    """Lightning module as written for FSDP2."""

    def __init__(self, meta: bool = False) -> None:
        super().__init__()
        self.meta, self.net, self.losses, self.evaluations = meta, None, [], []
        self.register_buffer("seen", torch.zeros(()))  # outside of the sharded model

    def get_extra_state(self) -> int:
        return len(self.losses)

    def set_extra_state(self, state: int) -> None:
        self.resumed = state

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta" if self.meta else "cpu"):
                self.net = make()
            shard(self.net, self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.seen += 1
        loss = models.loss_of(self.net, batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.evaluations.append(models.loss_of(self.net, batch).item())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = optimizer_of(self.net)
        scheduler = scheduler_of(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TwoOptimizers(Llama):
    """Module with two optimizers, which is not supported."""

    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        return [optimizer_of(self.net), optimizer_of(self.net)]


def strategy(folder: Path, run: dict[str, Any] | None = None, **named: Any) -> PagedStrategy:
    """Return a strategy with which most of the state is paged."""
    config = {
        "storage": {"paths": [str(folder / "nvme")]},
        "memory": {"host_bytes": MIB, "page_bytes": "64KiB"},
        "telemetry": {"runtime_dir": str(folder / "runtime")},
        "run": run or {},
    }
    return PagedStrategy(config, **named)


class ExistingProcessGroup(LightningEnvironment):
    """Environment of a rank whose process group exists already."""

    def creates_processes_externally(self) -> bool:  # type: ignore[override]
        return True

    creates_processes_externally = property(creates_processes_externally)

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def teardown(self) -> None:
        """Keep the process group."""


def trainer(folder: Path, steps: int = -1, paged: PagedStrategy | None = None, **named: Any) -> Trainer:
    """Return a trainer for one epoch."""
    infinity.mesh("cpu")
    return Trainer(
        strategy=paged or strategy(folder),
        accelerator="cpu",
        devices=dist.get_world_size(),
        plugins=[ExistingProcessGroup()],
        max_epochs=1,
        use_distributed_sampler=False,
        max_steps=steps,
        default_root_dir=folder / "root",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"gradient_clip_val": CLIP, "enable_checkpointing": False, **named},
    )


def loader(first: int = 0) -> DataLoader[torch.Tensor]:
    """Return the batches of this rank from `first` on, because Lightning would shuffle them."""
    infinity.mesh("cpu")
    return DataLoader(data()[dist.get_rank() :: dist.get_world_size()][2 * first :], batch_size=2)


def in_memory(accumulation: int = 1) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train with plain PyTorch; return the losses, the losses of a final evaluation, and the weights."""
    model = shard(make(), infinity.mesh("cpu"))
    batches = data()[dist.get_rank() :: dist.get_world_size()].split(2)
    losses = by_hand.train(model, optimizer_of(model), batches, accumulation)
    with torch.no_grad():
        evaluations = [models.loss_of(model, batch).item() for batch in batches]
    return losses, evaluations, full_weights(model)


def compare(folder: str, accumulation: int, meta: bool) -> list[str]:
    """Return the deviations from training in memory. Runs on every rank."""
    root = Path(folder)
    if meta and dist.get_rank() == 0:
        make().save_pretrained(root / "weights")
    infinity.mesh("cpu")
    dist.barrier()
    losses, evaluations, weights = in_memory(accumulation)
    module, paged = Llama(meta), strategy(root, weights=root / "weights" if meta else None)
    run = trainer(root, paged=paged, accumulate_grad_batches=accumulation)
    run.fit(module, loader(), loader())
    run.validate(module, loader(), verbose=False)
    with paged.paged as optimizer:
        wrong = [] if module.losses == losses and len(set(losses)) > 1 else [f"losses: {module.losses} != {losses}"]
        wrong += [] if module.evaluations[-2 * len(evaluations) :] == 2 * evaluations else ["evaluations"]
        wrong += [] if optimizer.records[-1].read_bytes > 0 else ["nothing was paged"]
        found = full_weights(module.net)
    return wrong + [name for name, value in weights.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize(("accumulation", "meta"), [pytest.param(1, False, marks=pytest.mark.wide), (2, True)])
def test_training_is_bitwise_equal_to_memory(accumulation: int, meta: bool, tmp_path: Path) -> None:
    """The training uses clipping, accumulation, a scheduler and an evaluation."""
    assert compare(str(tmp_path), accumulation, meta) == []


def test_training_on_two_ranks_is_bitwise_equal_to_memory(pair: RankPool, tmp_path: Path) -> None:
    assert pair.run(compare, str(tmp_path), 1, False) == [[], []]


def halves(folder: str) -> tuple[list[float], list[float]]:
    """Stop in the middle and resume; return the losses and those of training in memory. Runs on every rank."""
    root, _ = Path(folder), infinity.mesh("cpu")
    half = HALF // dist.get_world_size()
    first, second = Llama(), Llama()
    saves = ModelCheckpoint(root, filename="half", every_n_train_steps=half)
    for module, steps, path, begin in ((first, half, None, 0), (second, -1, root / "half.ckpt", half)):
        named = {"enable_checkpointing": True, "callbacks": [saves]} if path is None else {}
        run = trainer(root, steps, **named)
        run.fit(module, loader(begin), ckpt_path=path)
        run.strategy.paged.close()
    return first.losses + second.losses, in_memory()[0]


@pytest.mark.wide
def test_resume_on_two_ranks_is_exact(pair: RankPool, tmp_path: Path) -> None:
    for losses, expected in pair.run(halves, str(tmp_path)):
        assert losses == expected


def test_model_checkpoint_callback(tmp_path: Path) -> None:
    """The callback saves and removes folders, whose weights are only restored when a run starts."""
    saves = ModelCheckpoint(tmp_path / "saves", every_n_train_steps=3, save_top_k=1, monitor=None)
    run = trainer(tmp_path, enable_checkpointing=True, callbacks=[saves])
    module = Llama()
    run.fit(module, loader())
    with run.strategy.paged:
        assert [file.name for file in (tmp_path / "saves").iterdir()] == ["epoch=0-step=6.ckpt"]
        with pytest.raises(CheckpointError, match=r"step=6\.ckpt belongs to step 6 .* is at step 8"):
            run.validate(
                module, loader(), ckpt_path=saves.best_model_path or tmp_path / "saves" / "epoch=0-step=6.ckpt"
            )


def test_resume_from_either_of_two_folders_of_one_step_is_exact(tmp_path: Path) -> None:
    """`save_last` writes a second folder for the same step. The folders contain no copy of the state.

    Buffers and extra state outside of the sharded model are restored as well.
    """
    saves = ModelCheckpoint(tmp_path / "saves", every_n_train_steps=HALF, save_top_k=-1, save_last=True)
    first = Llama()
    run = trainer(tmp_path, HALF, enable_checkpointing=True, callbacks=[saves])
    run.fit(first, loader())
    run.strategy.paged.close()
    names = sorted(path.name for path in (tmp_path / "saves").iterdir())
    assert names == ["epoch=0-step=4.ckpt", "last.ckpt"]
    expected, _, _ = in_memory()
    for name in names:  # no checkpoint is saved in these runs
        module, run = Llama(), trainer(tmp_path)
        run.fit(module, loader(HALF), ckpt_path=tmp_path / "saves" / name)
        run.strategy.paged.close()
        assert first.losses + module.losses == expected
        assert (module.seen.item(), module.resumed) == (len(expected), HALF)
        assert sum(file.stat().st_size for file in (tmp_path / "saves" / name).iterdir()) < 64 << 10


def test_weights_only_checkpoint_is_replaced(tmp_path: Path) -> None:
    """Lightning replaces `last.ckpt` at every save. It can be loaded with `from_pretrained`."""
    saves = ModelCheckpoint(
        tmp_path / "saves", every_n_train_steps=3, save_top_k=0, save_last=True, save_weights_only=True
    )
    run = trainer(tmp_path, 6, enable_checkpointing=True, callbacks=[saves])
    module = Llama()
    run.fit(module, loader())
    with run.strategy.paged:
        assert [path.name for path in (tmp_path / "saves").iterdir()] == ["last.ckpt"]
        loaded = type(make()).from_pretrained(tmp_path / "saves" / "last.ckpt")
        assert all(torch.equal(loaded.get_parameter(name), value) for name, value in full_weights(module.net).items())


def test_unsupported_configurations_are_rejected(tmp_path: Path) -> None:
    class WithoutConfigureModel(LightningModule):
        def training_step(self, batch: torch.Tensor, index: int) -> None:
            pass

        def configure_optimizers(self) -> None:
            pass

    with pytest.raises(UnsupportedError, match=r"has no configure_model\(\)"):
        trainer(tmp_path).fit(WithoutConfigureModel(), loader())
    with pytest.raises(UnsupportedError, match="returned 2 optimizers"):
        trainer(tmp_path, gradient_clip_val=None).fit(TwoOptimizers(), loader())
    with pytest.raises(UnsupportedError, match=r"precision='bf16-true'.*mp_policy"):
        trainer(tmp_path, precision="bf16-true").fit(Llama(), loader())
    with pytest.raises(UnsupportedError, match="tensor_parallel_size"):
        strategy(tmp_path, tensor_parallel_size=2)
    with pytest.raises(UnsupportedError, match=r"predict\(\).*fit\(\)"):
        trainer(tmp_path).validate(Llama(), loader())
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"infinity\.json cannot be read: No such file"):
        trainer(tmp_path).fit(Llama(), loader(), ckpt_path=tmp_path / "other")
    assert not (tmp_path / "nvme").exists() or not os.listdir(tmp_path / "nvme")


# At every moment of a trainer #


@pytest.mark.parametrize("keep", [pytest.param("auto", marks=pytest.mark.wide), "never"])
def test_learning_rate_finder_restores_weights_and_optimizer(keep: str, tmp_path: Path) -> None:
    """The training that follows equals training without the callback."""
    paged = strategy(tmp_path, run={"keep": keep})
    module = Llama()
    find = LearningRateFinder(num_training_steps=4, early_stop_threshold=None, update_attr=False)
    run = trainer(tmp_path, paged=paged, callbacks=[find])
    run.fit(module, loader())
    run.validate(module, loader(), verbose=False)
    with paged.paged as optimizer:
        losses, _, weights = in_memory()
        assert len(module.losses) == 4 + len(losses)
        assert module.losses[:4] != losses[:4]
        assert module.losses[4:] == losses
        assert optimizer.steps == len(losses)
        found = full_weights(module.net)
        assert [name for name, value in weights.items() if not torch.equal(found[name], value)] == []


def test_second_fit_keeps_the_weights_and_starts_a_new_optimizer(tmp_path: Path) -> None:
    """The module can also be evaluated between the fits."""
    model = shard(make(), infinity.mesh("cpu"))
    batches = data().split(2)
    expected = by_hand.train(model, optimizer_of(model), batches, 1)
    with torch.no_grad():
        evaluations = [models.loss_of(model, batch).item() for batch in batches]
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    expected += by_hand.train(model, optimizer_of(model), batches, 1)
    module, run = Llama(), trainer(tmp_path)
    run.fit(module, loader())
    first = run.strategy.paged
    run.validate(module, loader(), verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(module, loader())
    with run.strategy.paged as optimizer:
        assert first.closed
        assert module.losses == expected
        assert module.evaluations == evaluations
        assert optimizer.steps == len(expected)
        found = full_weights(module.net)
        assert all(torch.equal(found[name], value) for name, value in full_weights(model).items())


def test_second_fit_of_a_module_resumes_from_a_folder(tmp_path: Path) -> None:
    """The weights of the first fit are replaced by those of the checkpoint, also if the first run was closed."""
    losses = in_memory()[0]
    saves = ModelCheckpoint(tmp_path, filename="half", every_n_train_steps=HALF)
    module, run = Llama(), trainer(tmp_path, enable_checkpointing=True, callbacks=[saves])
    run.fit(module, loader())
    assert module.losses == losses
    for closed in (False, True):
        if closed:
            run.strategy.paged.close()
        run.fit(module, loader(HALF), ckpt_path=tmp_path / "half.ckpt")
        assert module.losses[-len(losses[HALF:]) :] == losses[HALF:]
    run.strategy.paged.close()
    with pytest.raises(UnsupportedError, match=r"its run was closed.*run\.resume"):
        run.fit(module, loader())


def test_second_fit_that_fails_leaves_the_first_run_open(tmp_path: Path) -> None:
    paged = strategy(tmp_path, run={"retained_checkpoints": 0})
    module, run = Llama(), trainer(tmp_path, paged=paged)
    run.fit(module, loader())
    weights = full_weights(module.net)
    with pytest.raises(UnsupportedError, match=r"retained_checkpoints = 0"):
        run.fit(module, loader())
    with paged.paged as optimizer:
        optimizer.save_pretrained(tmp_path / "rescued")
    loaded = type(make()).from_pretrained(tmp_path / "rescued")
    assert all(torch.equal(loaded.get_parameter(name), value) for name, value in weights.items())


def test_saving_before_a_fit_is_rejected(tmp_path: Path) -> None:
    paged, run = strategy(tmp_path), trainer(tmp_path)
    run.strategy.connect(Llama())
    with pytest.raises(UnsupportedError, match=r"no state to save yet.*fit\(\)"):
        run.save_checkpoint(tmp_path / "early")
    with pytest.raises(UnsupportedError, match=r"no optimizer yet.*fit\(\)"):
        _ = paged.paged
