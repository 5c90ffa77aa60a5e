"""Map tensors in files to tensors in transformers models. No other module uses transformers' less public APIs.

Since version 5, transformers renames tensors while it loads a checkpoint, fuses or splits some of them (for example,
it fuses a layer's experts into one tensor), and reverses these conversions when it saves. The rules are objects of
`transformers.conversion_mapping`. This module uses them to determine which tensors in a checkpoint produce which
tensors in a model, and runs one conversion at a time. `tests/formats/test_conversions.py` documents the expected
behavior of each API.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from infinity import torch_private
from infinity.formats.adapters import base_model
from infinity.optional_dependencies import needs


@dataclass(frozen=True)
class Conversion:
    """Conversion of tensors in files to tensors in a model, or the reverse.

    `sources` and `targets` map names to tensors on the meta device, which give the shapes and dtypes. A plain
    conversion has one source and one target.
    """

    sources: Mapping[str, torch.Tensor]
    targets: Mapping[str, torch.Tensor]
    rule: Runs | None = None

    @property
    def plain(self) -> bool:
        """Whether the target is the unmodified source, possibly under a different name."""
        return self.rule is None

    def run(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the target tensors from the source tensors."""
        if self.rule is None:
            return dict(zip(self.targets, (values[name] for name in self.sources), strict=True))
        return self.rule.run(values)


class Runs(Protocol):
    """Rule that computes target tensors from source tensors."""

    def run(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the targets by name, given the sources by name."""


@dataclass
class _Rule:
    """Application of a `WeightConverter` to one set of tensors."""

    converter: Any
    first: str  # name of the first target, from which the converter derives the other names
    shapes: _Shapes
    renamings: Sequence[Any] = ()  # applied to the names of the targets when saving
    sources: list[tuple[str, str]] = field(default_factory=list)  # (matching pattern, name), in order

    def run(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.first, name, pattern, values[name])
        found = converter.convert(self.first, model=self.shapes, config=self.shapes.config)
        renamed = {_renamed(name, self.renamings): value for name, value in found.items()}
        return {name: value[0] if isinstance(value, list) else value for name, value in renamed.items()}


class _Shapes:
    """Stand-in for a model in conversions. It provides the configuration, and the shapes of full parameters by name."""

    def __init__(self, config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        self.config, self._tensors = config, tensors

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return a tensor on the meta device. Raises `AttributeError`, as a model does, if the name is unknown."""
        if name not in self._tensors:
            raise AttributeError(f"the model has no {name}")
        return self._tensors[name]

    get_parameter_or_buffer = get_buffer = get_parameter


@dataclass(frozen=True)
class Matched:
    """Result of matching the tensors of a checkpoint to the tensors of a model."""

    conversions: tuple[Conversion, ...]
    # names in the checkpoint that do not match any tensor of the model, and their names after conversion
    unexpected: Mapping[str, str]
    failed: Mapping[str, str]  # names in the model whose conversion failed, and the reasons


def pretrained_model(model: nn.Module) -> Any | None:
    """Return `model`, or its base if it has adapters, if this is a transformers model. Return None otherwise."""
    inner = base_model(model)
    modeling = sys.modules.get("transformers.modeling_utils")  # if it is not imported, no such model exists
    return inner if modeling is not None and isinstance(inner, modeling.PreTrainedModel) else None


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class before `fully_shard` was called and adapters were added."""
    inner = base_model(model)
    with torch_private.classes_of_before(inner):
        return type(inner).__name__


def saved_configs(model: nn.Module, *, dtype: str, default_generation: bool) -> dict[str, bytes]:
    """Return the files, by name, that `save_pretrained` would write for a model next to the weights and the tokenizer.

    These are config.json, generation_config.json and, for custom code, the Python files.

    Args:
        model: transformers model.
        dtype: dtype of the weights. The model does not know it while an FSDP module is gathered for computation.
        default_generation: whether to include a generation config that was derived from the configuration and has not
            been modified since.

    Raises:
        OSError: if a Python file cannot be read.
        TypeError, ValueError, AttributeError: if a configuration cannot be written as JSON.
    """
    inner: Any = base_model(model)
    config = deepcopy(inner.config)
    config.architectures = [class_name(model)]
    config.dtype = dtype
    files = _code_files(inner, config)
    files["config.json"] = config.to_json_string().encode()
    if inner.can_generate():
        generation = inner.generation_config
        derived = getattr(generation, "_from_model_config", False)
        modified = getattr(generation, "_original_object_hash", None) != hash(generation)
        if default_generation or modified or not derived:
            files["generation_config.json"] = generation.to_json_string().encode()
    return files


def _code_files(model: Any, config: Any) -> dict[str, bytes]:
    """Return the Python files that define the classes of a model and its configuration; register them in `config`."""
    custom = [own for own in (model, config) if getattr(own, "_auto_class", None) is not None]
    if not custom:
        return {}  # checkpoints call this, too
    from transformers.dynamic_module_utils import custom_object_save

    with tempfile.TemporaryDirectory() as folder, torch_private.classes_of_before(model):
        for own in custom:
            custom_object_save(own, folder, config=config)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Return the names of the parameters and buffers that `from_pretrained` keeps in fp32 if `dtype` is requested."""
    inner = base_model(model)
    plan: dict[str, torch.dtype] = getattr(inner, "_get_dtype_plan", lambda _: {})(dtype)
    if not plan:
        return set()
    from transformers.core_model_loading import build_glob_alternation

    pattern = build_glob_alternation(list(plan))[0]
    within = next(name for name, module in model.named_modules() if module is inner)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    own = (name for name, tensor in named if tensor.is_floating_point() and name.startswith(within))
    return {name for name in own if pattern.search(name.removeprefix(within).removeprefix("."))}


def match(tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], model: nn.Module) -> Matched:
    """Match the tensors of a checkpoint to the tensors of a model, by transformers' rules or by equal names.

    Args:
        tensors: tensors of the checkpoint by name, on the meta device.
        wanted: tensors of the model's `state_dict` by name, on the meta device.
        model: model whose class and configuration determine the rules.
    """
    targets, fused = _targets(tensors, wanted, model)
    plain: dict[str, str] = {}  # name in the checkpoint, by name in the model
    unexpected: dict[str, str] = {}
    clashing: dict[str, str] = {}
    for name, target in targets.items():
        if target not in wanted:
            unexpected[name] = target
        elif target in plain:
            clashing[target] = f"both {plain[target]} and {name} in the checkpoint map to it"
        else:
            plain[target] = name
    made, failed = _made(fused.values(), tensors)
    owner = dict(plain)
    for conversion in made:
        sources = ", ".join(conversion.sources)
        for target in conversion.targets:
            if target not in wanted:
                unexpected[sources] = target
            elif target in owner:
                clashing[target] = f"both {owner[target]} and {sources} in the checkpoint map to it"
            owner[target] = sources
    renamed = [Conversion({name: tensors[name]}, {target: tensors[name]}) for target, name in plain.items()]
    return Matched((*renamed, *made), unexpected, failed | clashing)


def _targets(
    tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], model: nn.Module
) -> tuple[dict[str, str], dict[str, _Rule]]:
    """Return the new names of tensors that are at most renamed, and the rules for others by their first target."""
    inner = pretrained_model(model)
    if inner is None:
        return {name: name for name in tensors}, {}
    from transformers import core_model_loading as loading

    with torch_private.classes_of_before(inner):
        rules = _model_rules(inner)
    shapes = _Shapes(inner.config, wanted)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known = dict(wanted)
    targets: dict[str, str] = {}
    fused: dict[str, _Rule] = {}
    for name in sorted(tensors, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, inner.base_model_prefix, known)
        if target not in wanted and name in wanted:  # the checkpoint already has the model's own names
            target, pattern = loading.rename_source_key(name, [], [], inner.base_model_prefix, known)
        if pattern is None or target not in wanted:
            targets[name] = target
        else:
            rule = fused.setdefault(target, _Rule(of_pattern[pattern], target, shapes))
            rule.sources.append((pattern, name))
    return targets, fused


@dataclass(frozen=True)
class Outgoing:
    """Names that `save_pretrained` uses for a model."""

    model: Any  # a transformers model, on the meta device
    kept: tuple[str, ...]  # names that it writes, in order; one name for tied tensors
    all: frozenset[str]  # names in its `state_dict`
    left_out: frozenset[str]  # names that it does not write, because the tensors are computed

    def converts(self, loaded_from: Iterable[str] | None) -> bool:
        """Return whether saving renames, fuses or splits any tensor. See `reverted`."""
        return bool(_rules_to_revert(self.model, self.model.state_dict(), loaded_from))


def outgoing(config: Mapping[str, Any]) -> Outgoing | None:
    """Build the model described by config.json on the meta device, or return None if it is not a transformers model.

    Raises:
        MissingPackageError: if transformers is not installed.
        ValueError: if the model cannot be built.
    """
    with needs("hf", "exporting a transformers model"):
        import transformers
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    cls = getattr(transformers, str(architecture), None) if "auto_map" not in config else None
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        return None
    try:
        with torch.device("meta"):
            kind: Any = cls.config_class
            # config.json stores infinities as text
            decoded = getattr(kind, "_decode_special_floats", lambda tree: tree)(dict(config))
            model: Any = cls(kind.from_dict(decoded))
        state = model.state_dict()
        left_out = frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ()) & state.keys()
        saved = {name: value for name, value in state.items() if name not in left_out}
        kept = remove_tied_weights_from_state_dict(saved, model)
    except Exception as error:  # the class raises any kind of error for the config of a different model
        raise ValueError(
            f"{architecture} cannot be created from its configuration: {type(error).__name__}: {error}"
        ) from error
    return Outgoing(model, tuple(kept), frozenset(state), left_out)


def reverted(
    tensors: Mapping[str, torch.Tensor], model: Any, loaded_from: Iterable[str] | None = None
) -> tuple[Conversion, ...]:
    """Return the conversions from a model's tensors to the tensors that `save_pretrained` writes.

    Args:
        tensors: tensors of the model's `state_dict` on the meta device. Each tied tensor occurs once.
        model: transformers model, possibly on the meta device.
        loaded_from: names in the checkpoint from which the model was loaded, if any. `save_pretrained` reverses the
            rules that were used while loading, or all rules if the model was not loaded.

    Raises:
        ValueError: if a conversion cannot be reversed.
    """
    from transformers import core_model_loading as loading

    rules = _rules_to_revert(model, tensors, loaded_from)
    shapes = _Shapes(model.config, tensors)
    backwards = [rule.reverse_transform() for rule in reversed(rules)]
    renamings = [rule for rule in backwards if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in backwards if isinstance(rule, loading.WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, Conversion | _Rule] = {}
    for name in sorted(tensors, key=loading.dot_natural_key) if rules else tensors:
        target, pattern = loading.rename_source_key(name, [], converters)
        if pattern is None:
            target = _renamed(name, renamings)
            found[target] = Conversion({name: tensors[name]}, {target: tensors[name]})
            continue
        rule = found.setdefault(target, _Rule(of_pattern[pattern], target, shapes, renamings))
        if not isinstance(rule, _Rule):
            raise ValueError(f"both {name} and {next(iter(rule.sources))} would be saved as {target}")
        rule.sources.append((pattern, name))
    made, failed = _made((rule for rule in found.values() if isinstance(rule, _Rule)), tensors)
    if failed:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    by_first = {rule.rule.first: rule for rule in made if isinstance(rule.rule, _Rule)}
    return tuple(by_first[name] if isinstance(rule, _Rule) else rule for name, rule in found.items())


def _rules_to_revert(model: Any, tensors: Mapping[str, torch.Tensor], loaded_from: Iterable[str] | None) -> list[Any]:
    from transformers import core_model_loading as loading

    if loaded_from is None:
        rules = _model_rules(model, add_legacy=False)
        return [rule for rule in rules if not isinstance(rule, loading.PrefixChange)]
    rules = _model_rules(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    known = dict(tensors)
    for name in sorted(loaded_from, key=loading.dot_natural_key):
        loading.rename_source_key(name, renamings, converters, model.base_model_prefix, known)
    return [rule for rule in rules if rule.was_used()]


def _made(rules: Iterable[_Rule], tensors: Mapping[str, torch.Tensor]) -> tuple[list[Conversion], dict[str, str]]:
    """Return the targets of conversions, determined on the meta device, and the reasons for those that failed."""
    made: list[Conversion] = []
    failed: dict[str, str] = {}
    for rule in rules:
        sources = {name: tensors[name] for _, name in rule.sources}
        try:
            made.append(Conversion(sources, rule.run(sources), rule))
        except Exception as error:  # transformers operations raise any kind of error
            failed[rule.first] = f"{type(error).__name__}: {error} (of {len(sources)} tensors: {', '.join(sources)})"
    return made, failed


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _model_rules(model: Any, *, add_legacy: bool = True) -> list[Any]:
    """Return the conversion rules of a model, in order, adapted to the model's names without wrappers."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules: list[Any] = get_model_conversion_mapping(model, add_legacy=add_legacy)
    for rule in rules:
        if rule.scope_prefix:
            rule.scope_prefix = torch_private.unwrapped_name(f"{rule.scope_prefix}.").removesuffix(".")
    return rules


def ignored(model: nn.Module, missing: Iterable[str], unexpected: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the missing names and the unexpected names that `from_pretrained` ignores for this model."""
    inner = pretrained_model(model)
    if inner is None:
        return set(), set()
    may_miss = set(getattr(inner, "_keys_to_ignore_on_load_missing", None) or ())
    may_have = set(getattr(inner, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in inner.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):  # such buffers used to be persistent
        may_have.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        may_have.add(r"(^|\.)position_ids$")
    return _found(may_miss, missing), _found(may_have, unexpected)


def _found(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}
