"""DPO without a reference model in memory: the initial weights on NVMe compute its log probabilities in advance."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from trl import DPOTrainer  # type: ignore[attr-defined]

from infinity import torch_private
from infinity.checkpoint.durable import write_durably
from infinity.errors import ConfigError
from infinity.integrations.transformers.trainer import reshard
from infinity.ranks import Ranks
from infinity_tools.train.datasets import check_prepared

_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


class PreferenceTrainer(DPOTrainer):  # type: ignore[misc]
    """`DPOTrainer` for a model that is larger than memory. It works like `precompute_ref_log_probs`.

    TRL itself computes the log probabilities in the constructor, before `attach`, when a model on the meta device has
    no weights. Call `compute_references` after `attach` and before `train`.
    """

    args: Any
    model: Any

    def __init__(self, model: Any, **arguments: Any) -> None:
        args = arguments["args"]
        if args.sync_ref_model:
            raise ConfigError("sync_ref_model is not supported, because no reference model is kept; remove it")
        args.precompute_ref_log_probs = False
        # Without a reference model, TRL would load one, or add a reference adapter to the sharded model.
        reference: Any = _Nothing(model.config)
        super().__init__(model, ref_model=reference, **arguments)
        self.ref_model, self.precompute_ref_logps = None, True

    def compute_references(self, folder: Path, *, resumed: bool) -> None:
        """Add the log probabilities of the initial weights to the datasets. All ranks call this function together.

        Args:
            folder: folder of the run, in which a new run stores them.
            resumed: whether the weights are trained already, so that the stored values are required.

        Raises:
            ConfigError: if a resumed run has no stored values for these datasets, or a stored file is damaged.
        """
        self.train_dataset = self._with_references(self.train_dataset, folder, "train", resumed)
        if self.eval_dataset is not None:
            self.eval_dataset = self._with_references(self.eval_dataset, folder, "eval", resumed)

    def _with_references(self, dataset: Any, folder: Path, name: str, resumed: bool) -> Any:
        args, ranks = self.args, Ranks.current()
        given = [check_prepared(dataset), args.max_length, args.truncation_mode, self.ld_alpha]
        key = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]
        file = folder / f"reference-{name}-{key}.npz"
        if not resumed:
            computed = self._computed(dataset)
            ranks.together("writing reference log probabilities", lambda: ranks.local_rank or _write(computed, file))
        found = ranks.together("reading reference log probabilities", lambda: _read(file))
        for column, values in found.items():
            dataset = dataset.add_column(column, values)
        return dataset

    def _computed(self, dataset: Any) -> dict[str, Any]:
        """Return the columns that TRL expects, computed with the current weights."""
        self.create_optimizer()  # starts the run, so that the weights exist
        # FSDP2 prepares the parameters in the first forward. Here, it runs without adapters, whose parameters then
        # require no gradients, so FSDP2 would not learn the dtype of their gradients.
        torch_private.initialize_state(next(filter(torch_private.is_sharded_module, self.model.modules())))
        self.model.eval()
        size = self.args.precompute_ref_batch_size or self.args.per_device_train_batch_size
        loader = self.accelerator.prepare(DataLoader(dataset, size, collate_fn=self.data_collator))
        compute: Any = self.compute_ref_log_probs
        try:
            parts = [self.accelerator.gather_for_metrics(compute(self.model, batch)) for batch in loader]
        finally:
            reshard(self.model)
        return {
            name: torch.cat(values).cpu().numpy()
            for name, values in zip(_COLUMNS, zip(*parts, strict=True), strict=True)
        }


def _write(columns: dict[str, Any], file: Path) -> int:
    buffer = io.BytesIO()
    np.savez(buffer, **columns)  # contains checksums
    file.parent.mkdir(parents=True, exist_ok=True)
    write_durably(file, buffer.getvalue())
    return 0


def _read(file: Path) -> dict[str, Any]:
    try:
        with np.load(file) as found:
            return {name: found[name] for name in _COLUMNS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{file} with the reference log probabilities of these datasets cannot be read, and resumed weights cannot "
            f"compute them again; restore it, or start a new run: {error}"
        ) from error


class _Nothing(nn.Module):
    """Reference model with no weights, for the constructor of `DPOTrainer`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, **_: torch.Tensor) -> None:
        raise NotImplementedError
