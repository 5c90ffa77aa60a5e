"""Tests of rebuilding a run in one process: the old run is closed, or the error names the variable that uses it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import infinity
from infinity import referrers
from infinity.errors import FolderBusyError
from infinity.store.folder import holders
from infinity.store.marker import look_for_runs
from support import models
from support.ranks import RankPool
from support.session import RECIPE
from support.train import MIB, Paging, make_optimizer, settings

BUILD = """
model = build()
optimizer = paged(model)
"""
TRAIN = """
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
for _ in range(2):
    loss = loss_of(model, tokens())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def runs_in(folder: Path) -> list[str]:
    """Return the IDs of the runs in a folder."""
    return [run.run_id for run in look_for_runs([folder / "nvme0"])[0]]


def build() -> torch.nn.Module:
    return models.build(RECIPE.model)


def paged(model: torch.nn.Module, folder: Path) -> infinity.PagedOptimizer:
    return infinity.offload(model, make_optimizer(RECIPE, model), settings(folder, Paging(), 64 * MIB))


def tokens() -> torch.Tensor:
    return torch.randint(0, models.Toy.vocabulary, (2, 8))


class Notebook:
    """Interpreter that runs cells in the namespace of `__main__` and keeps displayed values."""

    def __init__(self, folder: Path) -> None:
        self.names = vars(sys.modules["__main__"])
        self.folder = folder
        self.names.update(infinity=infinity, torch=torch, build=build, tokens=tokens, loss_of=models.loss_of)
        self.names.update(paged=lambda model: paged(model, folder), Out={})

    def cell(self, source: str) -> None:
        """Run a cell; if it raises an exception, keep the exception as the last one, as interpreters do."""
        try:
            exec(compile(source, "<cell>", "exec"), self.names)
        except BaseException as error:
            sys.last_value, sys.last_traceback = error, error.__traceback__
            raise

    def show(self, name: str) -> None:
        """Display a variable at the end of a cell."""
        value = self.names[name]
        self.names["Out"][3] = self.names["_"] = self.names["_3"] = value

    def rebuilds(self) -> bool:
        """Build again; return whether the new run is the only one."""
        before = self.names["optimizer"].run.folder.run_id
        self.cell(BUILD)
        now = self.names["optimizer"].run.folder.run_id
        assert [owner.run_id for owner in holders(self.folder / "nvme0")] == [now]
        return before != now and runs_in(self.folder) == [now]


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """Notebook with a trained model. The search for variables passes over packages that a notebook would not import."""
    used = {"__main__", "torch", "infinity", "support", "my_models", *sys.stdlib_module_names}
    packages = {name.partition(".")[0] for name in sys.modules} - used
    monkeypatch.setattr(referrers, "_NO_USERS", (*referrers._NO_USERS, "torch._", *(f"{name}." for name in packages)))
    referrers._serves.cache_clear()
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    notebook = Notebook(tmp_path)
    notebook.cell(BUILD + TRAIN)
    yield notebook
    infinity.close_all()
    referrers._serves.cache_clear()
    for name in ("last_value", "last_traceback"):
        vars(sys).pop(name, None)


def test_build_cell_can_be_run_again(notebook: Notebook) -> None:
    """What references the old run but cannot use it does not keep it open.

    This includes a loss with its graph, a scheduler, layers and parameters, values that the interpreter displays, the
    local variables of functions that raised an exception, and reference cycles of user objects.
    """
    notebook.cell("for layer in model.blocks: weight = layer.weight if hasattr(layer, 'weight') else None")
    notebook.cell("output, parameters = model(tokens()), list(model.parameters())")
    notebook.show("model")
    notebook.cell("class Trainer: pass")
    notebook.cell("trainer = Trainer(); trainer.model = model; model.trainer = trainer; trainer.itself = trainer")
    notebook.cell("del trainer")
    notebook.cell("def train(net, optimizer):\n    loss_of(net, tokens()).backward()\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        notebook.cell("train(model, optimizer)")
    frame = sys.last_traceback.tb_next.tb_next.tb_frame  # type: ignore[union-attr]
    assert "net" in frame.f_locals
    assert notebook.rebuilds()
    notebook.cell(TRAIN)


def test_model_and_optimizer_can_be_rebuilt_in_one_line(notebook: Notebook) -> None:
    """The old optimizer still has a name at that time, but its model is gone."""
    first = notebook.names["optimizer"]
    notebook.cell("model = build(); optimizer = paged(model)")
    with pytest.raises(infinity.InfinityError, match="this optimizer was closed"):
        first.step()


def test_error_names_the_variable_that_holds_the_model(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stays open, and the calls that the error suggests close it.

    A local variable of a function is in use until the function returns.
    """
    notebook.cell("class Trainer: pass")
    notebook.cell("trainer = Trainer(); trainer.parts = {'models': [model]}")
    optimizer = notebook.names["optimizer"]
    with pytest.raises(FolderBusyError, match=r"referenced by `trainer`\. Call close\(\) of `optimizer`"):
        notebook.cell("model = build(); paged(model)")
    notebook.cell("loss_of(trainer.parts['models'][0], tokens()).backward(); optimizer.step()")
    optimizer.close()
    notebook.cell("optimizer = paged(model)")
    with pytest.raises(FolderBusyError, match=r"referenced by `model`\. Call infinity.close_all\(\)"):
        notebook.cell("optimizer = None; paged(build())")
    notebook.cell("infinity.close_all(); trainer = None; model = build(); optimizer = paged(model)")
    notebook.cell("def run(net, first):\n    globals().pop('model')\n    paged(build())\n")
    local = r"referenced by `net` of run\(\)\. Call close\(\) of `first` of run\(\), or"
    with pytest.raises(FolderBusyError, match=local):
        notebook.cell("run(model, optimizer)")
    infinity.close_all()
    notebook.cell("model = build(); optimizer = paged(model)")
    module = ModuleType("my_models")
    monkeypatch.setitem(sys.modules, "my_models", module)
    module.registry = [notebook.names.pop("model")]  # type: ignore[attr-defined]
    with pytest.raises(FolderBusyError, match="`registry` of my_models"):
        notebook.cell(BUILD)


def test_rebuild_keeps_checkpoints_and_runs_in_other_folders(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    notebook.names["elsewhere"] = lambda model: paged(model, tmp_path / "other")
    notebook.cell("kept = optimizer; kept.save_checkpoint(); other = build(); optimizer = elsewhere(other)")
    notebook.cell("loss_of(model, tokens()).backward(); kept.step(); kept.save_checkpoint()")
    notebook.cell("model = build(); paged(model)")
    assert len(runs_in(tmp_path)) == 2
    notebook.cell("loss_of(other, tokens()).backward(); optimizer.step()")


def test_close_all_closes_all_runs_and_raises_the_first_error(notebook: Notebook, tmp_path: Path) -> None:
    """A run that fails to close does not keep other runs open."""
    (tmp_path / "other").mkdir()
    notebook.names["elsewhere"] = lambda model: paged(model, tmp_path / "other")
    notebook.cell("other = build(); second = elsewhere(other)")

    def fail() -> None:
        raise OSError("cannot be closed")

    optimizer: Any = notebook.names["optimizer"]
    optimizer.run.undo.push(fail)
    with pytest.raises(OSError, match="cannot be closed"):
        infinity.close_all()
    assert not holders(tmp_path / "nvme0")
    assert not holders(tmp_path / "other" / "nvme0")
    infinity.close_all()


def rebuild(folder: str) -> tuple[str, list[str]]:
    """Build twice; return the ID of the second run and the IDs of all runs in the folder."""
    model = build()
    optimizer = paged(model, Path(folder))
    model = build()
    optimizer = paged(model, Path(folder))
    found = optimizer.run.folder.run_id, runs_in(Path(folder))
    infinity.close_all()
    return found


def test_rebuild_with_two_ranks(pair: RankPool, tmp_path: Path) -> None:
    """Both ranks close the old run before either starts the new one."""
    for run_id, found in pair.run(rebuild, str(tmp_path)):
        assert found == [run_id]
