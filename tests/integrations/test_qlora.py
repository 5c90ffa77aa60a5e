"""Frozen weights that torchao has quantized: read as bytes, dequantized where they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import infinity
from infinity.errors import ConfigError, UnsupportedError
from infinity.formats.quantized import QuantizedLinear, quantize_
from support import adapted, models
from support.ranks import RankPool
from support.traffic import quiet
from support.train import Outcome, Paging, Recipe, settings, train

pytestmark = pytest.mark.wide  # torchao prints to stderr when transformers is imported, so `make test` goes without it


def sharded(how: str, *, meta: bool = False) -> Any:
    """Return a sharded model: a quantized base, and adapters."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        base = adapted.llama(width=128).to(torch.bfloat16)
    quantize_(base, adapted.quantization(how))
    with torch.device("meta" if meta else "cpu"):
        model = adapted.lora(lambda: base)
    return models.shard(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, fused=True)


def test_the_bits_of_torchao(tmp_path: Path) -> None:
    """A layer multiplies with what torchao dequantizes, in forward and in backward; bias included."""
    from torchao.quantization import quantize_

    for how in ("int8", "nf4"):
        layer = nn.Linear(128, 192, bias=True, dtype=torch.bfloat16)
        weight = nn.Sequential(nn.Linear(128, 192, bias=False, dtype=torch.bfloat16))
        weight[0].weight = nn.Parameter(layer.weight.detach().clone())
        quantize_(weight, adapted.quantization(how))
        quantized: Any = weight[0].weight
        whole = quantized.get_original_weight() if how == "nf4" else quantized.dequantize()
        assert not torch.equal(whole, layer.weight), "something is rounded"
        made = QuantizedLinear(layer, adapted.quantization(how))
        x = torch.randn(3, 128, dtype=torch.bfloat16, requires_grad=True)
        expected = nn.functional.linear(x, whole) + layer.bias
        (gradient,) = torch.autograd.grad(expected.float().square().sum(), x)
        assert torch.equal(made(x), expected)
        assert torch.equal(torch.autograd.grad(made(x).float().square().sum(), x)[0], gradient)
        assert torch.equal(made.weight, whole)


def test_no_dequantized_weight_stays_for_backward() -> None:
    """What is kept are the parameters themselves."""
    made = QuantizedLinear(nn.Linear(128, 192, bias=False, dtype=torch.bfloat16), adapted.quantization("int8"))
    kept: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        made(torch.randn(3, 128, dtype=torch.bfloat16, requires_grad=True))
    own = {param.data_ptr() for param in made.parameters()}
    assert kept
    assert all(tensor.data_ptr() in own for tensor in kept)


def filled(folder: Path, how: str) -> None:
    """Begin with the checkpoint of the plain base; compare with what is quantized in memory, and train."""
    model, memory = sharded(how, meta=True), sharded(how)
    tree = settings(folder, Paging(), "1MiB")  # type: ignore[arg-type]
    with infinity.offload(model, adamw(model), tree, weights=folder / "base") as optimizer:
        expected = dict(memory.named_parameters())
        for name, param in model.named_parameters():
            if "lora_A" not in name:  # it is drawn
                assert torch.equal(param.full_tensor(), expected[name].full_tensor()), name
        found = Outcome()
        train(Recipe(steps=2), model, optimizer, found)
        assert len(set(found.losses)) == 2


@pytest.mark.parametrize("how", ["int8", "nf4"])
def test_a_checkpoint_is_quantized_as_it_is_read(how: str, tmp_path: Path) -> None:
    """The model is never there as a whole, neither plain nor quantized."""
    torch.manual_seed(0)
    adapted.llama(width=128).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    filled(tmp_path, how)


def test_a_checkpoint_is_quantized_as_it_is_read_on_two_ranks(tmp_path: Path, pair: RankPool) -> None:
    """Each keeps its slices."""
    torch.manual_seed(0)
    adapted.llama(width=128).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    pair.run(filled, tmp_path, "int8")


@pytest.mark.parametrize(("how", "most"), [("int8", 2.4), ("nf4", 1.5)])
def test_bytes_of_a_step(how: str, most: float, tmp_path: Path) -> None:
    """About 2 bytes per quantized parameter, and 1 of NF4, instead of 4; nothing frozen is written."""
    model = sharded(how)
    tree = settings(tmp_path, Paging(), "512KiB")  # type: ignore[arg-type]
    with infinity.offload(model, adamw(model), tree) as optimizer:
        train(Recipe(steps=4), model, optimizer, Outcome())
        quiet(optimizer)
        before = optimizer.run.store.versions([p.index for p in optimizer.run.layout.pages if p.fixed])
        train(Recipe(steps=6), model, optimizer, Outcome(), first=4)
        quiet(optimizer)
        assert optimizer.run.store.versions(list(before)) == before
        quantized = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
        elements = sum(layer.in_features * layer.out_features for layer in quantized)
        assert len(quantized) == 21
        layers = [
            p
            for p in optimizer.run.layout.pages
            if p.fixed and optimizer.run.layout.fsdp_modules[p.fsdp_module].name != "root"
        ]
        assert 0 < 2 * sum(page.nbytes for page in layers) / elements <= most


@pytest.mark.parametrize("how", ["int8", "nf4"])
def test_adapters_are_not_merged_into_what_is_quantized(how: str) -> None:
    """They would be lost without a word; the layer is as it was."""
    with torch.device("cpu"):
        base = adapted.llama(width=128).to(torch.bfloat16)
    quantize_(base, adapted.quantization(how))
    model = adapted.lora(lambda: base)
    before = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.clone()
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(UnsupportedError, match="merge_and_unload"):
            merge()
    assert torch.equal(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight, before)


def test_a_model_without_linear_layers_is_refused() -> None:
    """Nothing would be quantized."""
    with pytest.raises(ConfigError, match="wanted="):
        quantize_(nn.Sequential(nn.Embedding(4, 4)), adapted.quantization("int8"))


def test_what_torchao_cannot_quantize_is_refused() -> None:
    """With its own words, and the shape."""
    from torchao.prototype._nf4tensor_api import NF4WeightOnlyConfig

    with pytest.raises(ConfigError, match=r"shape \(128, 64\): Number of scalers"):
        quantize_(nn.Sequential(nn.Linear(64, 128)), NF4WeightOnlyConfig())


def test_another_shape_is_refused(tmp_path: Path) -> None:
    """By the name that the weight has in the checkpoint."""
    adapted.llama(width=64).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = sharded("int8", meta=True)
    with pytest.raises(ConfigError, match=r"model.layers.0.self_attn.q_proj.weight: shape \(64, 64\) in the folder"):
        infinity.offload(model, adamw(model), settings(tmp_path, Paging(), "1MiB"), weights=tmp_path / "base")  # type: ignore[arg-type]
