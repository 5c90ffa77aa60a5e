"""The base model of a run with LoRA adapters, with the adapters folded into its weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import torch

from infinity import torch_private
from infinity.checkpoint.description import TensorSpec
from infinity.checkpoint.full_state import FullState
from infinity.errors import ConfigError
from infinity.formats.adapters import Adapter
from infinity.store.folder import RunFolder

_PREFIX = "base_model.model."
_FACTORS = re.compile(r"(.*)\.lora_(embedding_)?([AB])\.default(?:\.weight)?")
_COPY, _ORIGINAL = ".modules_to_save.default.", ".original_module."


class MergedState(FullState):
    """Base model of a run. Adapters are added to a weight when it is read, so memory is limited to one weight.

    The values equal the result of `PeftModel.merge_and_unload`.
    """

    def __init__(self, state: FullState, adapters: tuple[Adapter, ...]) -> None:
        """Match the factors of the adapters with the weights, without reading any.

        Raises:
            ConfigError: if the run does not train a single plain LoRA adapter, or its base model is quantized.
        """
        if not adapters:
            raise ConfigError(
                f"run {state.folder.run_id} trains no adapters, so there is nothing to merge; omit --merge"
            )
        config = adapters[0].config
        kind = str(config.get("peft_type"))
        others = [name for name in ("use_dora", "lora_bias", "target_parameters") if config.get(name)]
        if len(adapters) > 1 or adapters[0].name != "default" or kind != "LORA" or others:
            what = ", ".join(others) or (f"{len(adapters)} adapters" if len(adapters) > 1 else kind)
            raise ConfigError(
                f"--merge supports one plain LoRA adapter, and this run trains {what}; export the adapter, and merge "
                "it with PeftModel.merge_and_unload"
            )
        self._state, self._config = state, config
        self._factors: dict[str, dict[str, int]] = {}  # positions of the factors, by the name of the adapted module
        self._embeddings: set[str] = set()  # modules that are embeddings
        self._positions: list[int] = []  # position of each tensor in the state of the run
        names: list[tuple[str, ...]] = []
        known = [torch_private.unwrapped_name(name) for spec in state.tensors for name in spec.names]
        copied = {name.replace(_COPY, _ORIGINAL) for name in known if _COPY in name}
        for position, spec in enumerate(state.tensors):
            own = [torch_private.unwrapped_name(name) for name in spec.names]
            if found := _FACTORS.fullmatch(own[0]):
                module = _base_name(found[1])
                self._factors.setdefault(module, {})[found[3]] = position
                self._embeddings.update([module] if found[2] else [])
            elif not copied.issuperset(own):
                self._positions.append(position)
                names.append(tuple(_base_name(name) for name in own if name not in copied))
        merged = {name.removesuffix(".weight") for own in names for name in own}
        if quantized := self._factors.keys() - merged:
            raise ConfigError(
                f"--merge does not support the quantized weight of {min(quantized)}; export the adapter, and merge it "
                "into the original model with PeftModel.merge_and_unload"
            )
        self._tensors = tuple(
            replace(state.tensors[position], names=own) for position, own in zip(self._positions, names, strict=True)
        )

    @property
    def folder(self) -> RunFolder:
        """Folders of the run."""
        return self._state.folder

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Parameters of the base model."""
        return self._tensors

    def dtype(self, index: int) -> torch.dtype:
        """Return the dtype of a parameter."""
        return self._state.dtype(self._positions[index])

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of the base model."""
        for name, value in self._state.buffers():
            yield _base_name(torch_private.unwrapped_name(name)), value

    def read(self, index: int) -> torch.Tensor:
        """Return a parameter, with the adapter added to it.

        Raises:
            StorageError, CorruptPageError, CheckpointError: see `FullState`.
        """
        value = self._state.read(self._positions[index])
        for name in self._tensors[index].names:
            module = name.removesuffix(".weight")
            if name != module and (factors := self._factors.get(module)):
                first, second = (self._state.read(factors[side]).float() for side in ("A", "B"))
                delta = second @ first
                if module in self._embeddings or self._config.get("fan_in_fan_out"):
                    delta = delta.T
                value += delta * self._scaling(module, first.shape[0])
                break
        return value

    def _scaling(self, module: str, rank: int) -> float:
        patterns = self._config.get("alpha_pattern") or {}
        matching = (key for key in patterns if re.fullmatch(rf"(.*\.)?({key})", module))
        alpha = patterns.get(next(matching, ""), self._config["lora_alpha"])
        return float(alpha) / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


def _base_name(name: str) -> str:
    """Return the name of a tensor of a `PeftModel` in its base model."""
    return name.removeprefix(_PREFIX).replace(".base_layer", "").replace(_ORIGINAL, ".").replace(_COPY, ".")
