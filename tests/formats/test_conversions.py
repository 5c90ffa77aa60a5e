"""Tests of checkpoints that transformers renames, fuses or splits.

Weights are loaded like `from_pretrained` does and exported like `save_pretrained` does.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import conversion_mapping, core_model_loading, modeling_utils

from infinity import torch_private
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import ConfigError
from infinity.formats import safetensors as export
from infinity.formats.safetensors import export_safetensors
from infinity.formats.transformers_names import Conversion
from infinity.formats.weight_files import WeightReader
from infinity.sources import pretrained_folder
from infinity.store.folder import RunFolder
from support import families
from support.families import FAMILIES
from support.ranks import RankPool

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Disable progress bars."""
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def checkpointed(name: str, weights: Path, folder: Path, **values: Any) -> tuple[nn.Module, RunFolder]:
    """Offload a meta model with a family's weights and checkpoint it; return a full copy and the run folder."""
    model = families.on_meta(name, **values)
    with families.offload(model, folder, weights=weights) as optimizer:
        optimizer.save_checkpoint()
        full = families.make(name, **values)
        with torch.no_grad():
            for own, other in zip(full.parameters(), model.parameters(), strict=True):
                own.copy_(other.full_tensor())
            for own, other in zip(full.buffers(), model.buffers(), strict=True):
                own.copy_(other)
        return full, optimizer.run.folder


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in a folder."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def unlike(expected: Path, found: Path) -> list[str]:
    """Return the names of tensors that are not bitwise equal in two folders."""
    one, other = saved_tensors(expected), saved_tensors(found)
    both = one.keys() & other.keys()
    differing = [
        name for name in both if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])
    ]
    return sorted(one.keys() ^ other.keys()) + sorted(differing)


OF_EACH_KIND = {"llama", "qwen2", "gpt2", "t5", "mixtral", "swin", "clip_text", "resnet"}
"""One family per kind: plain, tied, transposed, encoder-decoder, fused experts, buffers, prefixes, convolutions."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OF_EACH_KIND else pytest.mark.wide) for name in FAMILIES]
)
def test_load_and_export_match_transformers(name: str, tmp_path: Path) -> None:
    """Parameters, buffers, file names, tensor names and shapes are equal."""
    model = families.filled(name)
    model.save_pretrained(tmp_path / "saved")
    expected, info = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"]
    found, run = checkpointed(name, tmp_path / "saved", tmp_path)
    assert families.differing(expected, found) == []
    out = tmp_path / "exported"
    export_safetensors(CheckpointReader(run), out, file_bytes=MIB)
    assert {file.name for file in out.iterdir()} == {file.name for file in (tmp_path / "saved").iterdir()}
    assert unlike(tmp_path / "saved", out) == []
    loaded = type(model).from_pretrained(out, attn_implementation=model.config._attn_implementation)
    assert torch.equal(families.output(loaded), families.output(expected))


@pytest.mark.parametrize("name", ["mixtral", "swin"])
def test_conversion_across_several_files(name: str, tmp_path: Path) -> None:
    """The sources and targets of one conversion are in several files."""
    model = families.filled(name)
    model.save_pretrained(tmp_path / "saved", max_shard_size="6KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 3
    found, run = checkpointed(name, tmp_path / "saved", tmp_path)
    assert families.differing(model, found) == []
    seen: list[int] = []
    export_safetensors(CheckpointReader(run), tmp_path / "out", file_bytes=6 * KIB, advance=seen.append)
    assert sum(seen) == sum(param.nbytes for param in model.parameters())
    assert unlike(tmp_path / "saved", tmp_path / "out") == []
    assert families.differing(model, type(model).from_pretrained(tmp_path / "out")) == []


def on_a_rank(name: str, weights: str, folder: str) -> list[str]:
    """Return the names of tensors that differ from the folder. Runs on every rank."""
    found, _ = checkpointed(name, Path(weights), Path(folder))
    return families.differing(families.filled(name), found)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_conversion_on_two_ranks(name: str, tmp_path: Path, pair: RankPool) -> None:
    """Each rank keeps its slices of the converted tensors."""
    families.filled(name).save_pretrained(tmp_path / "saved")
    assert pair.run(on_a_rank, name, str(tmp_path / "saved"), str(tmp_path)) == [[], []]


def test_bf16_weights_are_trained_in_fp32_and_exported_in_bf16(tmp_path: Path) -> None:
    model = families.filled("mixtral")
    rounded = {name: param.to(torch.bfloat16).float() for name, param in model.named_parameters()}
    model.to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    found, run = checkpointed("mixtral", tmp_path / "saved", tmp_path)
    assert all(torch.equal(param, rounded[name]) for name, param in found.named_parameters())
    export_safetensors(CheckpointReader(run), tmp_path / "out", dtype=torch.bfloat16, file_bytes=MIB)
    assert unlike(tmp_path / "saved", tmp_path / "out") == []
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_initialized_model_is_exported_in_the_original_format(tmp_path: Path) -> None:
    """The export matches `save_pretrained` of a model that was not loaded."""
    model = families.on_meta("mixtral")
    with families.offload(model, tmp_path) as optimizer:
        optimizer.save_checkpoint()
        export_safetensors(CheckpointReader(optimizer.run.folder), tmp_path / "out", file_bytes=MIB)
    families.make("mixtral").save_pretrained(tmp_path / "saved")
    assert saved_tensors(tmp_path / "out").keys() == saved_tensors(tmp_path / "saved").keys()
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        file.name for file in (tmp_path / "saved").iterdir()
    }


def _prefixed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"text_model.{name}": value for name, value in tensors.items()}


def _legacy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }


@pytest.mark.parametrize(("name", "change"), [("clip_text", _prefixed), ("bert", _legacy), ("mixtral", dict)])
def test_export_uses_the_names_of_the_source(
    name: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """If a family has several naming schemes, the export matches `from_pretrained` and `save_pretrained`."""
    families.filled(name).save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    loaded = getattr(transformers, FAMILIES[name][0]).from_pretrained(tmp_path / "saved")
    loaded.save_pretrained(tmp_path / "again")
    found, run = checkpointed(name, tmp_path / "saved", tmp_path)
    assert families.differing(loaded, found) == []
    export_safetensors(CheckpointReader(run), tmp_path / "out", file_bytes=MIB)
    assert unlike(tmp_path / "again", tmp_path / "out") == []


def test_fused_checkpoint_is_loaded_without_conversion(tmp_path: Path) -> None:
    model = families.filled("mixtral")
    model.save_pretrained(tmp_path / "saved", save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in saved_tensors(tmp_path / "saved"))
    found, _ = checkpointed("mixtral", tmp_path / "saved", tmp_path)
    assert families.differing(model, found) == []


@pytest.mark.parametrize("wrap", ["checkpoint", pytest.param("compile", marks=pytest.mark.wide)])
def test_wrapped_layers_are_converted(wrap: str, tmp_path: Path) -> None:
    """Wrappers for checkpointing and compilation do not affect names or the rules for submodels."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    expected = families.filled("vit")
    expected.save_pretrained(tmp_path / "saved")
    around = checkpoint_wrapper if wrap == "checkpoint" else torch.compile
    with torch.device("meta"):
        model = families.make("vit")
    model.vit = around(model.vit)
    families.shard(model)
    with families.offload(model, tmp_path, weights=tmp_path / "saved") as optimizer:
        found = {torch_private.unwrapped_name(name): param.full_tensor() for name, param in model.named_parameters()}
        assert all(torch.equal(found[name], value) for name, value in expected.named_parameters())
        optimizer.save_checkpoint()
        export_safetensors(CheckpointReader(optimizer.run.folder), tmp_path / "out", file_bytes=MIB)
    assert unlike(tmp_path / "saved", tmp_path / "out") == []


class Alive:
    """Tracks the total size of live tensors."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.most = 0

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            self._alive[id(tensor)] = (weakref.ref(tensor), tensor.nbytes)
            self.most = max(self.most, sum(size for ref, size in self._alive.values() if ref() is not None))
        return tensor


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Alive:
    """Track the tensors that readers return and that conversions create."""
    found = Alive()

    def watched(cls: type, name: str) -> None:
        before = getattr(cls, name)

        def after(*arguments: Any, **options: Any) -> Any:
            result = before(*arguments, **options)
            if isinstance(result, dict):
                return {key: found.seen(value) for key, value in result.items()}
            return found.seen(result)

        monkeypatch.setattr(cls, name, after)

    watched(WeightReader, "__call__")
    watched(Conversion, "run")
    watched(pretrained_folder.PretrainedFolder, "_local")
    watched(export._Outgoing, "value")
    return found


def test_conversion_memory_is_limited_to_one_fsdp_module(tmp_path: Path, alive: Alive) -> None:
    """The peak does not depend on the number of layers."""
    model = families.filled("mixtral", num_hidden_layers=6)
    model.save_pretrained(tmp_path / "saved")
    experts = sum(param.nbytes for name, param in model.model.layers[0].named_parameters() if "experts" in name)
    assert sum(param.nbytes for param in model.parameters()) > 6 * experts
    _, run = checkpointed("mixtral", tmp_path / "saved", tmp_path, num_hidden_layers=6)
    assert 0 < alive.most < 3 * experts
    alive.most = 0
    export_safetensors(CheckpointReader(run), tmp_path / "out", file_bytes=16 * KIB)
    assert 0 < alive.most < 3 * experts + 16 * KIB


def test_missing_conversion_source_raises(tmp_path: Path) -> None:
    """The error names the target tensor, before anything is written."""
    families.filled("mixtral").save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if ".1." in name and ".experts.2." in name)
    save_file({name: value for name, value in tensors.items() if name != lost}, file)
    with pytest.raises(ConfigError, match=r"not convertible +model\.layers\.1\.\S*experts"):
        families.offload(families.on_meta("mixtral"), tmp_path, weights=tmp_path / "saved")


def test_export_rejects_the_config_of_a_different_model(tmp_path: Path) -> None:
    """Nothing is written."""
    families.filled("mixtral").save_pretrained(tmp_path / "saved")
    _, run = checkpointed("mixtral", tmp_path / "saved", tmp_path)
    config = {**json.loads((tmp_path / "saved" / "config.json").read_text()), "num_hidden_layers": 1}
    with pytest.raises(ConfigError, match=r"config\.json .*layers\.1\..*--model-config"):
        export_safetensors(CheckpointReader(run), tmp_path / "out", config=config, file_bytes=MIB)
    config["num_hidden_layers"] = "many"
    with pytest.raises(ConfigError, match=r"config\.json .*MixtralForCausalLM"):
        export_safetensors(CheckpointReader(run), tmp_path / "out", config=config, file_bytes=MIB)
    assert not (tmp_path / "out").exists()


def test_export_rejects_a_config_with_more_layers(tmp_path: Path) -> None:
    """Otherwise, loading the export would initialize the additional layers at random, even without conversions."""
    families.filled("llama").save_pretrained(tmp_path / "saved")
    _, run = checkpointed("llama", tmp_path / "saved", tmp_path)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    config["num_hidden_layers"] += 1
    with pytest.raises(ConfigError, match=r"config\.json .*layers\..*--model-config"):
        export_safetensors(CheckpointReader(run), tmp_path / "out", config=config, file_bytes=MIB)
    assert not (tmp_path / "out").exists()


# Expectations of transformers' private APIs. A release that changes one fails the test of that API.


def test_conversion_rules_are_found_by_the_original_class() -> None:
    """`get_model_conversion_mapping` looks classes up by name and module, which `fully_shard` changes."""
    plain = conversion_mapping.get_model_conversion_mapping(families.make("gpt_neox"), add_legacy=False)
    assert [rule.source_patterns for rule in plain] == [["^embed_out\\."]]
    sharded = families.on_meta("gpt_neox")
    assert conversion_mapping.get_model_conversion_mapping(sharded, add_legacy=False) == []
    with torch_private.classes_of_before(sharded):
        assert type(sharded).__name__ == "GPTNeoXForCausalLM"
        assert len(conversion_mapping.get_model_conversion_mapping(sharded, add_legacy=False)) == 1
    assert type(sharded).__name__ == "FSDPGPTNeoXForCausalLM"
    assert sharded.is_custom_code()


def test_weight_converter_can_be_reversed() -> None:
    """Covers `add_tensor`, `convert`, `reverse_transform` and `deepcopy`, on the meta device as well."""
    with torch.device("meta"):
        model = families.make("mixtral")
    rules = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    rule = next(rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)
                and rule.target_patterns == [".experts.gate_up_proj"])  # fmt: skip
    first = "model.layers.0.mlp.experts.gate_up_proj"
    for device in ("meta", "cpu"):
        for pattern in rule.source_patterns:
            for expert in range(2):
                rule.add_tensor(first, f"{expert}", pattern, torch.ones(3, 4, device=device))
        found = rule.convert(first, model=model, config=model.config)
        assert {name: tuple(value.shape) for name, value in found.items()} == {first: (2, 6, 4)}
    back = rule.reverse_transform()
    back.add_tensor("x", first, back.source_patterns[0], found[first])
    assert len(back.convert("x", model=model, config=model.config)) == 4


def test_rename_source_key_handles_the_base_model_prefix() -> None:
    """It adds or removes the prefix only if the model requires it, and returns the matching converter pattern."""
    rename = core_model_loading.rename_source_key
    wanted = {"model.a": torch.ones(1), "b": torch.ones(1)}
    assert rename("a", [], [], "model", wanted) == ("model.a", None)
    assert rename("model.b", [], [], "model", wanted) == ("b", None)
    assert rename("other.a", [], [], "model", wanted) == ("other.a", None)
    rule = core_model_loading.WeightRenaming("old", "new")
    assert not rule.was_used()
    assert core_model_loading.rename_source_key("x.old.y", [rule], []) == ("x.new.y", None)
    assert rule.was_used()
    names = ["layers.10.w", "layers.2.w", "layers.2.b1"]
    assert sorted(names, key=core_model_loading.dot_natural_key) == ["layers.2.b1", "layers.2.w", "layers.10.w"]


def test_tied_weights_are_removed_on_the_meta_device() -> None:
    """`remove_tied_weights_from_state_dict` keeps the embedding and all weights that are not tied."""
    for name, tied in (("qwen2", True), ("llama", False)):
        with torch.device("meta"):
            model = families.make(name)
        kept = modeling_utils.remove_tied_weights_from_state_dict(model.state_dict(), model)
        assert ("lm_head.weight" in kept) is not tied
        assert "model.embed_tokens.weight" in kept


def test_unused_and_missing_weights_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    families.filled("mixtral", num_hidden_layers=3).save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if name != "lm_head.weight"}, file)
    with (
        caplog.at_level(logging.WARNING, "infinity"),
        families.offload(families.on_meta("mixtral"), tmp_path, weights=tmp_path / "saved", strict=False),
    ):
        messages = [record.getMessage() for record in caplog.records if str(tmp_path / "saved") in record.getMessage()]
    assert len(messages) == 2
    assert messages[0].endswith("by the model: lm_head.weight")
    assert "model.layers.2.block_sparse_moe.experts.{0, 1, 2, 3}.w1.weight" in messages[1]
