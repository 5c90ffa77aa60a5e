"""Building again in the same process: what is left of the run before is closed, or its variable is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import infinity
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
    """Return the ids of the runs there."""
    return [run.run_id for run in look_for_runs([folder / "nvme0"])[0]]


def build() -> torch.nn.Module:
    """Return a sharded model."""
    return models.build(RECIPE.model)


def paged(model: torch.nn.Module, folder: Path) -> infinity.PagedOptimizer:
    """Return its optimizer."""
    return infinity.offload(model, make_optimizer(RECIPE, model), settings(folder, Paging(), 64 * MIB))


def tokens() -> torch.Tensor:
    """Return a batch."""
    return torch.randint(0, models.Toy.vocabulary, (2, 8))


class Notebook:
    """Runs cells as interpreters do: names are those of `__main__`, and what was shown last is kept."""

    def __init__(self, folder: Path) -> None:
        self.names = vars(sys.modules["__main__"])
        self.folder = folder
        self.names.update(infinity=infinity, torch=torch, build=build, tokens=tokens, loss_of=models.loss_of)
        self.names.update(paged=lambda model: paged(model, folder), Out={})

    def cell(self, source: str) -> None:
        """Run one; the error that ends it is kept as the last exception, and raised."""
        try:
            exec(compile(source, "<cell>", "exec"), self.names)
        except BaseException as error:
            sys.last_value, sys.last_traceback = error, error.__traceback__
            raise

    def show(self, name: str) -> None:
        """Show a variable at the end of a cell."""
        value = self.names[name]
        self.names["Out"][3] = self.names["_"] = self.names["_3"] = value

    def builds_again(self) -> bool:
        """Build once more, and return whether that is the only run then."""
        before = self.names["optimizer"].run.folder.run_id
        self.cell(BUILD)
        now = self.names["optimizer"].run.folder.run_id
        assert [owner.run_id for owner in holders(self.folder / "nvme0")] == [now]
        return before != now and runs_in(self.folder) == [now]


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """An empty one, with a model that is trained."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    notebook = Notebook(tmp_path)
    notebook.cell(BUILD + TRAIN)
    yield notebook
    infinity.close_all()
    for name in ("last_value", "last_traceback"):
        vars(sys).pop(name, None)


def test_cells_can_be_run_again(notebook: Notebook) -> None:
    """The build, whatever training has left: a loss with its graph, a scheduler, single layers and parameters."""
    notebook.cell("for layer in model.blocks: weight = layer.weight if hasattr(layer, 'weight') else None")
    notebook.cell("output, parameters = model(tokens()), list(model.parameters())")
    assert notebook.builds_again()
    notebook.cell(TRAIN)
    assert notebook.builds_again()


def test_models_that_were_shown_are_no_longer_used(notebook: Notebook) -> None:
    """Interpreters keep what a cell has shown under names of their own."""
    notebook.show("model")
    assert notebook.builds_again()


def test_an_exception_keeps_nothing_open(notebook: Notebook) -> None:
    """Though its traceback has all variables of the functions that it came from."""
    notebook.cell("def train(net, optimizer):\n    loss_of(net, tokens()).backward()\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        notebook.cell("train(model, optimizer)")
    frame = sys.last_traceback.tb_next.tb_next.tb_frame  # type: ignore[union-attr]
    assert "net" in frame.f_locals
    assert notebook.builds_again()


def test_reference_cycles_keep_nothing_open(notebook: Notebook) -> None:
    """Objects of the user's own that hold one another and the model."""
    notebook.cell("class Trainer: pass")
    notebook.cell("trainer = Trainer(); trainer.model = model; model.trainer = trainer; trainer.itself = trainer")
    notebook.cell("del trainer")
    assert notebook.builds_again()


def test_the_optimizer_may_be_made_on_the_way(notebook: Notebook) -> None:
    """In one line, so that the old one still has its name then: without its model it trains nothing."""
    first = notebook.names["optimizer"]
    notebook.cell("model = build(); optimizer = paged(model)")
    with pytest.raises(infinity.InfinityError, match="closed"):
        first.step()


def test_a_model_that_is_held_is_named(notebook: Notebook) -> None:
    """With the variable, and with how to close it; nothing is closed, and what is said works."""
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
    notebook.cell("infinity.close_all(); paged(build())")


def test_a_variable_of_a_function_that_runs_is_named(notebook: Notebook) -> None:
    """It is in use as long as the function has not returned."""
    notebook.cell("def run(net, first):\n    globals().pop('model')\n    paged(build())\n")
    with pytest.raises(
        FolderBusyError, match=r"referenced by `net` of run\(\)\. Call close\(\) of `first` of run\(\), or"
    ):
        notebook.cell("run(model, optimizer)")


def test_a_variable_of_a_module_is_named(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is imported from."""
    module = ModuleType("my_models")
    monkeypatch.setitem(sys.modules, "my_models", module)
    module.registry = [notebook.names.pop("model")]  # type: ignore[attr-defined]
    with pytest.raises(FolderBusyError, match="`registry` of my_models"):
        notebook.cell(BUILD)


def test_a_checkpoint_stays_and_other_folders_are_left_alone(notebook: Notebook, tmp_path: Path) -> None:
    """What is closed on the way is closed as ever."""
    (tmp_path / "other").mkdir()
    notebook.names["elsewhere"] = lambda model: paged(model, tmp_path / "other")
    notebook.cell("kept = optimizer; kept.save_checkpoint(); other = build(); optimizer = elsewhere(other)")
    notebook.cell("loss_of(model, tokens()).backward(); kept.step(); kept.save_checkpoint()")
    notebook.cell("model = build(); paged(model)")
    assert len(runs_in(tmp_path)) == 2
    notebook.cell("loss_of(other, tokens()).backward(); optimizer.step()")


def test_all_runs_are_closed_and_the_first_error_is_shown(notebook: Notebook, tmp_path: Path) -> None:
    """One that cannot be closed keeps none of the others open."""
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
    """Build twice; return the id of the second run, and the runs that there are."""
    model = build()
    optimizer = paged(model, Path(folder))
    model = build()
    optimizer = paged(model, Path(folder))
    found = optimizer.run.folder.run_id, runs_in(Path(folder))
    infinity.close_all()
    return found


def test_two_ranks_build_again(pair: RankPool, tmp_path: Path) -> None:
    """Both close what they have before either begins."""
    for run_id, found in pair.run(rebuild, str(tmp_path)):
        assert found == [run_id]
