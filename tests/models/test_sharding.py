"""Tests of the selection of modules that become FSDP modules, for all families of the table."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity
from infinity import torch_private
from infinity.errors import UnsupportedError
from infinity.formats import transformers_names as names
from infinity.models.sharding import layers_of, shard
from support.ranks import RankPool
from support.tables import alternate
from support.train import full_copy
from support.wide_models import LLAVA, ROWS, ModelRow, build

transformers = pytest.importorskip("transformers")
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
needs_groups = pytest.mark.skipif(
    not torch_private.has_parameter_groups(), reason="FSDP2 of this torch release has one dtype per FSDP module"
)
FEATURES = {
    name: tuple(f"{name.lower()}.feature_extractor.conv_layers.{number}" for number in range(2))
    for name in ("Wav2Vec2", "Hubert")
}
"""Layers in addition to the table, which assigns convolutions of the input to the root."""


class Block(nn.Module):
    """A layer with a submodule that may be shared."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.own = part, nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.part(x))


class Pair(nn.Module):
    """A container that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block(nn.Linear(2, 2)) for _ in range(2))


class Stage(Block):
    """A layer that contains a list of layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self.blocks = nn.ModuleList(Block(nn.Linear(2, 2)) for _ in range(2))


def model_of(*lists: nn.Module, **rest: nn.Module) -> nn.Module:
    """Return a module with the given lists of layers and other modules."""
    model = nn.Module()
    for number, layers in enumerate(lists):
        model.add_module(f"list{number}", layers)
    for name, module in rest.items():
        model.add_module(name, module)
    return model


def names_of(model: nn.Module) -> list[str]:
    """Return the names of the detected layers."""
    names = {module: name for name, module in model.named_modules()}
    return [names[layer] for layer in layers_of(model)]


def expected(row: ModelRow, model: nn.Module) -> list[str]:
    """Return the names of the layers in the table."""
    found = list(FEATURES.get(row.name, ()))
    for path in row.layers:
        parent = path.removesuffix(".*")
        inner = [f"{parent}.{name}" for name, _ in model.get_submodule(parent).named_children()]
        found += inner if path.endswith(".*") else [path]
    return found


def test_layers_are_detected_in_every_family() -> None:
    """The layers match the table, and heads remain in the root, as `micro_batches` requires."""
    pytest.importorskip("transformers").logging.set_verbosity_error()
    mesh, sliced = infinity.mesh("cpu"), 0
    for row in (*ROWS, LLAVA):
        with torch.device("meta"):
            model = build(row)
        assert names_of(model) == expected(row, model), row.name
        if row.model.endswith("ForCausalLM"):
            shard(model.to("meta"), mesh=mesh, mp_policy=MixedPrecisionPolicy())
            infinity.micro_batches(model, 2)
            sliced += 1
    assert sliced > 40


def test_nested_lists_of_layers_are_detected() -> None:
    nested = nn.ModuleList([nn.ModuleList([Block(nn.Linear(2, 2))]), nn.ModuleList([Block(nn.Linear(2, 2))])])
    assert names_of(model_of(nested)) == ["list0.0.0", "list0.1.0"]
    assert names_of(model_of(nn.ModuleList([Pair()]))) == ["list0.0.inner.0", "list0.0.inner.1"]
    assert names_of(model_of(nn.ModuleList([Stage()]))) == ["list0.0"]


def test_no_split_modules_select_the_layers() -> None:
    model = model_of(nn.ModuleList([Stage()]))
    model._no_split_modules = ["Block"]
    assert names_of(model) == ["list0.0.blocks.0", "list0.0.blocks.1"]
    model._no_split_modules = ["Block", "Stage"]
    assert names_of(model) == ["list0.0"]


def test_lists_of_linear_modules_are_not_layers() -> None:
    """For example, a list of one head per output."""
    heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    assert names_of(model_of(heads, nn.ModuleList([Block(nn.Linear(2, 2))]))) == ["list1.0"]


def test_layers_with_shared_parameters_join_the_root(caplog: pytest.LogCaptureFixture) -> None:
    """An FSDP module owns its parameters, so it cannot share them with a different layer or module."""
    common, tied = nn.Linear(2, 2), nn.Linear(2, 2)
    layers = nn.ModuleList([Block(common), Block(nn.Linear(2, 2)), Block(common), Block(tied)])
    model = model_of(layers, head=tied)
    assert names_of(model) == ["list0.1"]
    again = model_of(layers, nn.ModuleList([Block(nn.Linear(2, 2))]), same=model_of(layers))
    assert names_of(again) == ["list0.1", "list0.3", "list1.0"], "a list that occurs twice counts once"
    with caplog.at_level(logging.WARNING, "infinity"):
        shard(model, mesh=infinity.mesh("cpu"), mp_policy=MixedPrecisionPolicy())
    assert "3 of the layers of Module" in caplog.text
    assert [name for name, _ in torch_private.parameter_groups(model)] == ["root", "list0.1"]


def test_model_without_layers_is_one_fsdp_module(caplog: pytest.LogCaptureFixture) -> None:
    """A warning reports this."""
    model = model_of(head=nn.Linear(2, 2))
    with caplog.at_level(logging.WARNING, "infinity"):
        shard(model, mesh=infinity.mesh("cpu"), mp_policy=MixedPrecisionPolicy())
    assert "Module has no list of layers" in caplog.text
    assert [name for name, _ in torch_private.parameter_groups(model)] == ["root"]


def deepseek() -> Any:
    """Return a small DeepSeek-V3 in bf16. transformers keeps its routers in fp32 when it is loaded."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, moe_intermediate_size=32, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, architectures=["DeepseekV3ForCausalLM"],
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config).to(torch.bfloat16)


@needs_groups
@pytest.mark.parametrize(("dtype", "slices"), alternate([torch.float32, "auto"], [1, 2]), ids=str)
def test_routers_are_computed_in_fp32(
    dtype: torch.dtype | str, slices: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers, parameters in `_keep_in_fp32_modules_strict` are stored, gathered and saved in fp32."""
    deepseek().save_pretrained(tmp_path / "model")
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype).train()
    in_fp32 = {name for name, value in expected.state_dict().items() if value.dtype == torch.float32}
    shard(expected, mesh=infinity.mesh(), mp_policy=BF16)
    losses = _losses(expected, torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True), slices)
    model = infinity.from_pretrained(tmp_path / "model", dtype=dtype)
    assert not caplog.records
    seen = set()
    gate = model.model.layers[1].mlp.gate
    gate.register_forward_pre_hook(lambda module, args: seen.add((module.weight.dtype, args[0].dtype)))
    settings = {"storage": {"paths": [str(tmp_path / "run")]}, "memory": {"host_bytes": "16MiB"}}
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with infinity.offload(model, adamw, settings) as optimizer:
        assert _losses(model, optimizer, slices) == losses
        assert seen == {(torch.float32, torch.bfloat16)}
        optimizer.save_pretrained(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.1.mlp.gate.weight" in in_fp32
    assert all(saved[name].dtype == torch.float32 for name in in_fp32 & saved.keys())


def routers_on_ranks(folder: str) -> list[str]:
    """Compare a paged DeepSeek-V3 with one in memory whose routers are FSDP modules of their own."""
    expected = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype="auto").train()
    mesh, fp32 = infinity.mesh("cpu"), MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
    fully_shard(expected.model.layers[1].mlp.gate, mesh=mesh, mp_policy=fp32)
    for layer in (*expected.model.layers, expected):
        fully_shard(layer, mesh=mesh, mp_policy=BF16)
    losses = _losses(expected, torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True))
    model = infinity.from_pretrained(Path(folder) / "model", dtype="auto", mesh=mesh)
    settings = {"storage": {"paths": [str(Path(folder) / "run")]}, "memory": {"host_bytes": "16MiB"}}
    with infinity.offload(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), settings) as optimizer:
        found = ["losses"] if _losses(model, optimizer) != losses else []
        for name, value in expected.named_parameters():
            if not torch.equal(full_copy(value), full_copy(model.get_parameter(name))):
                found.append(name)
    return found


@needs_groups
def test_routers_in_fp32_are_bitwise_equal_on_two_ranks(tmp_path: Path, pair: RankPool) -> None:
    deepseek().save_pretrained(tmp_path / "model")
    assert pair.run(routers_on_ranks, str(tmp_path)) == [[], []]


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer, slices: int = 0) -> list[float]:
    if slices:
        infinity.micro_batches(model, slices)
    losses = []
    for _ in range(3):
        tokens = torch.arange(20).reshape(2, 10)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_old_torch_computes_routers_in_bf16_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The FSDP2 of torch 2.11 computes with one dtype per FSDP module."""
    monkeypatch.setattr(torch_private, "has_parameter_groups", lambda: False)
    deepseek().save_pretrained(tmp_path / "model")
    model = infinity.from_pretrained(tmp_path / "model", dtype="auto")
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert "computes model.layers.1.mlp.gate.weight in torch.bfloat16" in caplog.text
    assert "install torch 2.13 or newer" in caplog.text


@needs_groups
def test_fsdp_module_with_only_fp32_parameters_has_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "kept_in_fp32", lambda model, dtype: {"norm.weight", "norm.bias", "list0.0.own.bias"})
    model = model_of(nn.ModuleList([Block(nn.Linear(2, 2))]), norm=nn.LayerNorm(2)).to(torch.bfloat16)
    shard(model, mesh=infinity.mesh("cpu"), mp_policy=BF16)
    groups = dict(torch_private.parameter_groups(model))
    dtypes = {
        name: {torch_private.compute_dtype(param) for param in torch_private.fsdp_params(group)}
        for name, group in groups.items()
    }
    assert dtypes == {"root": {torch.float32}, "list0.0": {torch.bfloat16}, "list0.0#1": {torch.float32}}


def test_mixed_dtypes_are_rejected_before_anything_is_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16))
    fully_shard(model, mesh=infinity.mesh())
    with pytest.raises(UnsupportedError, match=r"different dtypes .*0\.bias.*1\.bias.*fully_shard"):
        infinity.offload(model, torch.optim.AdamW(model.parameters()), {"storage": {"paths": [str(tmp_path / "run")]}})
    assert not (tmp_path / "run").exists()


def test_shard_rejects_unsupported_models_before_sharding() -> None:
    model = model_of(nn.ModuleList([Block(nn.Linear(2, 2))]))
    with pytest.raises(UnsupportedError, match=r"Module .*activation_checkpointing"):
        shard(model, mesh=infinity.mesh("cpu"), mp_policy=MixedPrecisionPolicy(), activation_checkpointing=True)
    assert not list(torch_private.parameter_groups(model))
