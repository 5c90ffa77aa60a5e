"""Tests of optimizers with train and eval modes: pages are converted between training and evaluation weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import nn

import infinity
from infinity.errors import InfinityError, UnsupportedError
from infinity.optim.kernel import UpdateKernel
from infinity.optim.slicing_check import make_kernel
from infinity.optim.update import Update
from support import models
from support.optimizers import build, groups_of
from support.ranks import RankPool
from support.train import Paging, batch, evaluate, local, settings

Found = list[Any]
MAKES = {
    "adamw": lambda groups: schedulefree.AdamWScheduleFree(groups, lr=1e-2, warmup_steps=3),
    "sgd": lambda groups: schedulefree.SGDScheduleFree(groups, lr=1e-1),
}


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> Found:
    """Run steps and evaluate with averaged weights after every second one; return losses and averaged weights."""
    found: Found = []
    for step in range(first, last):
        optimizer.train()
        loss = models.loss_of(model, batch(model, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        if step % 2:
            optimizer.eval()
            found.append(evaluate(model))
            model.reshard()  # FSDP2 leaves the root's weights gathered after a forward without gradients
            found += [local(param) for param in model.parameters()]
    return found


def bitwise_equal(expected: Found, found: Found) -> bool:
    """Return whether all items are bitwise equal."""
    return len(expected) == len(found) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(expected, found, strict=True)
    )


def in_memory(name: str) -> Found:
    """Train with plain FSDP2."""
    model = build()
    return train(model, MAKES[name](groups_of(model)), 0, 6)


@pytest.mark.parametrize(
    ("name", "update_schedule", "format"),
    [
        ("adamw", "in_backward", "fp32"),
        ("sgd", "in_forward", "split"),
        pytest.param("adamw", "after_backward", "fp32", marks=pytest.mark.wide),
    ],
)
def test_evaluation_weights_match_training_in_memory(
    name: str, update_schedule: str, format: str, tmp_path: Path
) -> None:
    """Evaluation losses and further training match with every update schedule."""
    model = build()
    tree = settings(tmp_path, Paging(update_schedule=update_schedule, format=format), 4 << 20)
    with infinity.offload(model, MAKES[name](groups_of(model)), tree) as optimizer:
        assert bitwise_equal(in_memory(name), train(model, optimizer, 0, 6))
        assert optimizer.update_schedule == update_schedule


def test_run_resumes_from_a_checkpoint_in_eval_mode(tmp_path: Path) -> None:
    """The checkpoint records the mode, so exports contain averaged weights and `train()` can revert them."""
    found: Found = []
    for first, last in ((0, 4), (4, 6)):
        model = build()
        run = {"resume": "latest"} if first else {}
        base_optimizer = MAKES["adamw"](groups_of(model))
        with infinity.offload(model, base_optimizer, settings(tmp_path, Paging(), 4 << 20, run=run)) as optimizer:
            assert [group["train_mode"] for group in optimizer.param_groups] == [False, False]
            found += train(model, optimizer, first, last)
            optimizer.save_checkpoint()
    assert bitwise_equal(in_memory("adamw"), found)


def test_step_in_eval_mode_raises_before_any_update(tmp_path: Path) -> None:
    """A mode change between backward and step raises as well, and training can continue afterwards."""
    model = build()
    with infinity.offload(
        model, MAKES["adamw"](groups_of(model)), settings(tmp_path, Paging(update_schedule="after_backward"), 4 << 20)
    ) as optimizer:
        train(model, optimizer, 0, 2)
        before = [local(param) for param in model.parameters()]
        models.loss_of(model, batch(model, 2)).backward()
        with pytest.raises(InfinityError, match=r"AdamWScheduleFree .*Optimizer was not in train mode"):
            optimizer.step()
        with pytest.raises(InfinityError, match=r"train\(\) .*between backward and step\(\)"):
            optimizer.train()
        optimizer.zero_grad()
        assert bitwise_equal(before, [local(param) for param in model.parameters()])
        train(model, optimizer, 2, 4)


@pytest.mark.parametrize("where", ["after some pages", "after all pages"])
def test_interrupted_mode_change_is_never_checkpointed(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded mode would not match some of the weights."""
    model = build()
    with infinity.offload(model, MAKES["adamw"](groups_of(model)), settings(tmp_path, Paging(), 4 << 20)) as optimizer:
        train(model, optimizer, 0, 1)
        optimizer.save_checkpoint()
        calls: list[int] = []
        run = Update.run

        def interrupt() -> None:
            raise KeyboardInterrupt

        def run_and_interrupt(self: Any, opened: Any) -> None:
            run(self, opened)
            calls.append(len(opened))
            if len(calls) == 2:
                interrupt()

        if where == "after all pages":
            monkeypatch.setattr(UpdateKernel, "advance", lambda *_: interrupt())
        else:
            monkeypatch.setattr(Update, "run", run_and_interrupt)
        with pytest.raises((KeyboardInterrupt, InfinityError), match=r"^$|interrupted by KeyboardInterrupt"):
            optimizer.eval()
        monkeypatch.undo()
        for call in (optimizer.save_checkpoint, optimizer.eval, lambda: evaluate(model)):
            with pytest.raises(
                InfinityError, match="interrupted by KeyboardInterrupt; resume from the last checkpoint"
            ):
                call()


@pytest.mark.wide
def test_mode_change_on_two_ranks(tmp_path: Path, pair: RankPool) -> None:
    """Each rank converts its own pages."""
    assert pair.run(compare, str(tmp_path)) == [True, True]


def compare(folder: str) -> bool:
    """Return whether paged training matches training in memory. Runs on every rank."""
    model = build()
    with infinity.offload(model, MAKES["adamw"](groups_of(model)), settings(Path(folder), Paging(), 4 << 20)) as found:
        return bitwise_equal(in_memory("adamw"), train(model, found, 0, 6))


class MixingSGD(torch.optim.SGD):
    """Optimizer whose evaluation weights depend on all parameters, so pages cannot be converted one by one."""

    def train(self) -> None:
        self._set_mode("train", 1.0)

    def eval(self) -> None:
        self._set_mode("eval", -1.0)

    @torch.no_grad()
    def _set_mode(self, mode: str, sign: float) -> None:
        total = sum(float(param.sum()) for group in self.param_groups for param in group["params"])
        for group in self.param_groups:
            group["mode"] = mode
            for param in group["params"]:
                param.add_(sign * total)


def test_mode_change_that_mixes_parameters_is_unsupported(tmp_path: Path) -> None:
    """The slicing check converts modes during its trial; setting the current mode again is permitted."""
    assert make_kernel(schedulefree.SGDScheduleFree([nn.Parameter(torch.ones(2, 3))])).modes
    model = build()
    base_optimizer = MixingSGD(groups_of(model), lr=0.1)
    base_optimizer.train()
    with infinity.offload(model, base_optimizer, settings(tmp_path, Paging(), 4 << 20)) as optimizer:
        optimizer.train()
        with pytest.raises(UnsupportedError, match=r"eval\(\) of MixingSGD would have to change weights"):
            optimizer.eval()
        assert [group["mode"] for group in optimizer.param_groups] == ["train", "train"]
