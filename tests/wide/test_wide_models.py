"""Tests of transformers model families: initialization from config, import, training, checkpoint and export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import InfinityError
from infinity.formats.safetensors import export_safetensors
from support.fine_tune import adamw, load, loss_of, seed, shard, train
from support.rows import UNSUPPORTED
from support.train import Outcome, Paging, differences, full_copy, host_bytes, settings, state_in_memory, state_on_nvme
from support.wide_models import ROWS, ModelRow, build

pytestmark = pytest.mark.wide
PAGING = Paging(host_cache="least")
FP32 = MixedPrecisionPolicy()


def output_of(row: ModelRow, model: nn.Module) -> torch.Tensor:
    """Return the loss of one batch in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return loss_of(row, model, 77)


def distribution_difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    """Return how the distribution of `found` differs from that of `expected`, or ``""``. Constants must be equal.

    The tolerances of mean and standard deviation are about six standard errors for the number of elements.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{found.shape} {found.dtype}, not {expected.shape} {expected.dtype}"
    a, b, count = expected.double(), found.double(), expected.numel()
    if a.unique().numel() == 1 or b.unique().numel() == 1:
        return "" if torch.equal(a, b) else f"{b.flatten()[:2].tolist()}, not {a.flatten()[:2].tolist()}"
    if a.ndim > 1 and not torch.equal((a == 0).flatten(1).all(1), (b == 0).flatten(1).all(1)):
        return "different rows are zero"
    means, stds = abs(a.mean() - b.mean()), abs((a.std() / b.std()).log())
    if means > 6 * a.std() * (2 / count) ** 0.5 or stds > 6 / (count - 1) ** 0.5:
        return f"mean {b.mean():.4g}, std {b.std():.4g}; not {a.mean():.4g}, {a.std():.4g}"
    return ""


@contextmanager
def offloaded(row: ModelRow, folder: Path, model: nn.Module) -> Iterator[tuple[nn.Module, infinity.PagedOptimizer]]:
    """Offload the model of a row."""
    folder.mkdir()
    passed_in = adamw(model)
    config = settings(folder, PAGING, host_bytes(PAGING, model, passed_in, folder))
    with infinity.offload(model, passed_in, config) as optimizer:
        yield model, optimizer


def initialization_differences(row: ModelRow, folder: Path, expected: nn.Module) -> list[str]:
    """Return the differences between a model's initial values and those of a model built in memory."""
    made = infinity.from_config(expected.config, auto_class=row.model, mp_policy=FP32, mesh=infinity.mesh("cpu"))
    with offloaded(row, folder, made) as (model, _):
        params = {name: full_copy(param) for name, param in model.named_parameters()}
        differing_buffer_names = differing_buffers(model, expected)
    wanted = dict(expected.named_parameters())
    assert params.keys() == wanted.keys()
    found = ((name, distribution_difference(wanted[name].detach(), value)) for name, value in params.items())
    return [f"{name}: {words}" for name, words in found if words] + differing_buffer_names


def differing_buffers(model: nn.Module, expected: nn.Module) -> list[str]:
    """Return the buffers that are not bitwise equal to those of a model in memory."""
    found = dict(model.named_buffers())
    wanted = dict(expected.named_buffers())
    assert found.keys() == wanted.keys()
    return [f"buffer {n}" for n, b in wanted.items() if b.dtype != found[n].dtype or not torch.equal(b, found[n])]


def trained_in_memory(row: ModelRow, saved: Path) -> tuple[Outcome, nn.Module]:
    """Train under plain FSDP2; return the outcome and the model."""
    model = build(row)  # a loaded model may train parameters that are frozen when it is built
    model.load_state_dict(load(row, saved).state_dict())
    shard(row, model, FP32)
    optimizer, outcome = adamw(model), Outcome()
    train(row, model.train(), optimizer, outcome)
    outcome.state = state_in_memory(model, optimizer)
    return outcome, model


def trained_paged(row: ModelRow, saved: Path, folder: Path) -> tuple[Outcome, list[str]]:
    """Train and export a paged model from the weights in a folder; return the outcome and differing buffers."""
    outcome = Outcome()
    made = infinity.from_pretrained(saved, mp_policy=FP32, mesh=infinity.mesh("cpu"), attn_implementation="eager")
    with offloaded(row, folder, made) as (model, optimizer):
        differing_buffer_names = differing_buffers(model, load(row, saved))
        train(row, model.train(), optimizer, outcome)
        outcome.state = state_on_nvme(model, optimizer)
        optimizer.save_checkpoint()
        reader = CheckpointReader(optimizer.run.folder)
        export_safetensors(reader, folder / "exported", file_bytes=1 << 30)
    return outcome, differing_buffer_names


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging = pytest.importorskip("transformers").logging
    logging.set_verbosity_error()


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_model_family_is_bitwise_equal(row: ModelRow, tmp_path: Path) -> None:
    """Initialization, training and the exported model match transformers and plain FSDP2."""
    seed(1)
    source = build(row)
    if row.outcome == UNSUPPORTED:
        with pytest.raises(InfinityError, match=row.words):
            initialization_differences(row, tmp_path / "first", source)
        return
    assert initialization_differences(row, tmp_path / "first", source) == []
    source.save_pretrained(tmp_path / "saved")
    expected, trained = trained_in_memory(row, tmp_path / "saved")
    found, differing_buffer_names = trained_paged(row, tmp_path / "saved", tmp_path / "paged")
    assert differing_buffer_names == []
    assert differences(expected, found) == []
    assert len(set(found.losses)) > 1
    loaded = load(row, tmp_path / "paged" / "exported")
    values = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    differing = [name for name, value in (*trained.named_parameters(), *trained.named_buffers())
                 if not torch.equal(full_copy(value), values[name])]  # fmt: skip
    assert differing == []
    assert torch.equal(output_of(row, loaded), output_of(row, trained))
