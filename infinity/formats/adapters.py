"""PEFT adapters: the names of adapter and base parameters, and saving adapters.

A `PeftModel` wraps the base model, and wraps each adapted layer in another module. The name of a tensor in the model
therefore differs from its name in the base checkpoint: ``base_model.model.lm_head.base_layer.weight`` corresponds to
``lm_head.weight``.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from infinity import torch_private
from infinity.ranks import Ranks

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_AROUND = ("base_layer", "original_module", "token_adapter")
"""Attributes under which a PEFT module stores the module that it replaces, or a wrapper around that module."""
_COPIES = "modules_to_save"
"""Attribute under which a PEFT module stores trained copies of the replaced module, by adapter."""


def peft_model(model: nn.Module) -> Any | None:
    """Return the `PeftModel` in `model`, without other wrappers, or None if PEFT is not used."""
    inner = torch_private.unwrapped_module(model)
    peft = sys.modules.get("peft")  # a `PeftModel` cannot exist before peft is imported
    return inner if peft is not None and isinstance(inner, peft.PeftModel) else None


def base_model(model: nn.Module) -> nn.Module:
    """Return the model to which adapters were added, without wrappers, or `model` itself if it has no adapters."""
    found = peft_model(model)
    return torch_private.unwrapped_module(model if found is None else found.get_base_model())


def is_adapter(module: nn.Module) -> bool:
    """Return whether a module is a PEFT wrapper around a layer of the model."""
    return hasattr(type(module), "adapter_layer_names") and hasattr(type(module), "get_base_layer")


def _is_copied(module: nn.Module) -> bool:
    """Return whether a module is a PEFT wrapper that trains a copy of the wrapped module, or a part of it."""
    return hasattr(type(module), "adapter_layer_names") and "original_module" in {*dir(type(module)), *module._modules}


def base_names(model: nn.Module) -> Callable[[str], str | None]:
    """Return a function that maps the name of a parameter or buffer in `model` to its name in the base checkpoint.

    The function returns None for adapter parameters. A copy that PEFT trains in place of a module has the name of that
    module.
    """
    base = base_model(model)
    inside = [torch_private.unwrapped_name(f"{name}.") for name, module in model.named_modules() if module is base]
    prefix = inside[0].removeprefix(".") if inside else ""

    def name_of(name: str) -> str | None:
        if not torch_private.unwrapped_name(name).startswith(prefix):
            return None
        *path, key = name.split(".")
        module: nn.Module = model
        parts: list[str] = []
        copy = False
        for part in path:
            around, module = module, module.get_submodule(part)
            if copy or (_is_copied(around) and part == _COPIES):
                copy = not copy
            elif not (is_adapter(around) or _is_copied(around)):
                parts.append(part)
            elif part not in _AROUND:
                return None
        if is_adapter(module) or _is_copied(module):
            return None
        return torch_private.unwrapped_name(".".join([*parts, key])).removeprefix(prefix)

    return name_of


# Saved adapters #


@dataclass(frozen=True)
class Adapter:
    """Content that `PeftModel.save_pretrained` writes for one adapter."""

    name: str
    """Name of the adapter. Unless it is ``default``, it is also the name of its subfolder."""
    config: Mapping[str, Any]
    """Content of adapter_config.json."""
    tensors: Mapping[str, str] | None
    """Names in the model, by name in adapter_model.safetensors. None if a saved tensor is computed from several
    parameters.
    """


def adapters_of(model: nn.Module) -> tuple[Adapter, ...]:
    """Return the adapters of a sharded model, or an empty tuple without PEFT. No values are read."""
    found = peft_model(model)
    if found is None:
        return ()
    state = found.state_dict()
    name_of = {id(value): torch_private.unwrapped_name(name) for name, value in state.items()}
    adapters = []
    for name in found.peft_config:
        if (prompt := _prompt(found, name)) is None:
            with torch_private.classes_of_before(found):
                picked = _picked(found, state, name)
            names = {key: name_of.get(id(value), "") for key, value in picked.items()}
        else:
            names = {"prompt_embeddings": prompt}
        adapters.append(Adapter(name, _config(found, name), names if all(names.values()) else None))
    return tuple(adapters)


def _picked(model: Any, state: Mapping[str, Any], adapter: str) -> dict[str, Any]:
    from peft import get_peft_model_state_dict

    # To determine whether embeddings were resized, PEFT would load the base model's config.json from the Hub. This
    # avoids the network access.
    base = model.peft_config[adapter].base_model_name_or_path
    embeddings: Any = "auto" if not base or os.path.isdir(base) else False
    picked: dict[str, Any] = get_peft_model_state_dict(
        model, state_dict=dict(state), adapter_name=adapter, save_embedding_layers=embeddings
    )
    return picked


def _prompt(model: Any, adapter: str) -> str | None:
    """Return the name of the learned prompt parameter, "" for a computed prompt, or None without prompt learning."""
    config = model.peft_config[adapter]
    if not config.is_prompt_learning:
        return None
    plain = config.peft_type in ("PROMPT_TUNING", "PREFIX_TUNING") and not getattr(config, "prefix_projection", False)
    return f"prompt_encoder.{adapter}.embedding.weight" if plain else ""


def _config(model: Any, adapter: str) -> dict[str, Any]:
    """Return the content of adapter_config.json as `save_pretrained` would write it, for inference."""
    config = copy.copy(model.peft_config[adapter])
    base = model.get_base_model()
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or vars(base).get("name_or_path") or None
    mapping = None
    if config.task_type is None:
        cls = torch_private.original_class(base)
        mapping = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        with open(os.path.join(folder, ADAPTER_CONFIG), encoding="utf-8") as file:
            tree: dict[str, Any] = json.load(file)
    return tree


def save_whole_adapters(model: nn.Module) -> Callable[[], None]:
    """Make `PeftModel.save_pretrained` save full tensors although the model is sharded.

    Afterwards, all ranks must call `save_pretrained` together, and rank 0 writes the files. Adapters are small. Resized
    embeddings that are saved with them are loaded into memory like any other weight.

    Returns:
        Function that restores the original method.
    """
    found = peft_model(model)
    if found is None:
        return lambda: None
    found.__dict__["save_pretrained"] = partial(_save_whole, found)
    return lambda: found.__dict__.pop("save_pretrained", None)


def _save_whole(
    model: Any,
    save_directory: str | os.PathLike[str],
    safe_serialization: bool = True,
    selected_adapters: list[str] | None = None,
    save_embedding_layers: bool | str = "auto",
    is_main_process: bool | None = None,
    path_initial_model_for_weight_conversion: str | None = None,
    **settings: Any,
) -> None:
    """Save full tensors. Takes PEFT's arguments. All ranks must call this function together, and rank 0 writes.

    Raises:
        InfinityError: if another rank failed, for example rank 0 while it wrote the files.
    """
    given = settings.pop("state_dict", None)
    ranks = Ranks.current() if dist.is_initialized() else Ranks(0, 0, 1)
    state: dict[str, Any] = model.state_dict() if given is None else dict(given)
    chosen = selected_adapters or list(model.peft_config)
    wanted: set[int] = set()
    with _whole_prompts(model, chosen), torch_private.classes_of_before(model):
        for adapter in chosen:
            if not model.peft_config[adapter].is_prompt_learning:
                wanted.update(map(id, _picked(model, state, adapter).values()))
        state = {name: _whole(value) if id(value) in wanted else value for name, value in state.items()}
        save = partial(
            type(model).save_pretrained,
            model,
            os.fspath(save_directory),
            safe_serialization,
            selected_adapters,
            save_embedding_layers,
            ranks.rank == 0 if is_main_process is None else is_main_process,
            path_initial_model_for_weight_conversion,
            state_dict=state,
            **settings,
        )
        ranks.together("save_pretrained", save)  # the files exist on every rank when this returns


@contextmanager
def _whole_prompts(model: Any, adapters: list[str]) -> Iterator[None]:
    """Replace the sharded parameters of prompt encoders with full tensors inside the context."""
    encoders = [model.prompt_encoder[name] for name in adapters if model.peft_config[name].is_prompt_learning]
    held = [
        (module, key, param)
        for encoder in encoders
        for module in encoder.modules()
        for key, param in module._parameters.items()
        if param is not None
    ]
    try:
        for module, key, param in held:
            module._parameters[key] = nn.Parameter(_whole(param), requires_grad=False)
        yield
    finally:
        for module, key, param in held:
            module._parameters[key] = param


def _whole(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().to("cpu", copy=True)
