"""Tests of frozen weights that torchao has quantized: they are read as bytes and dequantized on use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import infinity
from infinity.errors import ConfigError, UnsupportedError
from infinity.formats.quantized import QuantizedLinear, quantize_
from support import adapted, fine_tuning, models
from support.command import run_here
from support.ranks import RankPool
from support.traffic import wait_until_idle
from support.train import Outcome, Paging, Recipe, settings, train

pytestmark = pytest.mark.wide  # torchao prints to stderr when transformers is imported, so `make test` goes without it


def sharded(scheme: str, *, meta: bool = False) -> Any:
    """Return a sharded model with a quantized base and adapters."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        base = adapted.llama(width=128).to(torch.bfloat16)
    quantize_(base, adapted.quantization(scheme))
    with torch.device("meta" if meta else "cpu"):
        model = adapted.lora(lambda: base)
    return models.shard(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the trainable parameters."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, fused=True)


def test_quantized_linear_equals_torchao(tmp_path: Path) -> None:
    """Forward and backward use the weight that torchao dequantizes, and the bias."""
    from torchao.quantization import quantize_

    for scheme in ("int8", "nf4"):
        layer = nn.Linear(128, 192, bias=True, dtype=torch.bfloat16)
        weight = nn.Sequential(nn.Linear(128, 192, bias=False, dtype=torch.bfloat16))
        weight[0].weight = nn.Parameter(layer.weight.detach().clone())
        quantize_(weight, adapted.quantization(scheme))
        quantized: Any = weight[0].weight
        dequantized = quantized.get_original_weight() if scheme == "nf4" else quantized.dequantize()
        assert not torch.equal(dequantized, layer.weight), "quantization must change the weight"
        made = QuantizedLinear(layer, adapted.quantization(scheme))
        x = torch.randn(3, 128, dtype=torch.bfloat16, requires_grad=True)
        expected = nn.functional.linear(x, dequantized) + layer.bias
        (gradient,) = torch.autograd.grad(expected.float().square().sum(), x)
        assert torch.equal(made(x), expected)
        assert torch.equal(torch.autograd.grad(made(x).float().square().sum(), x)[0], gradient)
        assert torch.equal(made.weight, dequantized)


def test_backward_saves_no_dequantized_weight() -> None:
    """Only the parameters themselves are saved."""
    made = QuantizedLinear(nn.Linear(128, 192, bias=False, dtype=torch.bfloat16), adapted.quantization("int8"))
    kept: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        made(torch.randn(3, 128, dtype=torch.bfloat16, requires_grad=True))
    own = {param.data_ptr() for param in made.parameters()}
    assert kept
    assert all(tensor.data_ptr() in own for tensor in kept)


def compare_loaded_weights(folder: Path, scheme: str) -> None:
    """Start from the checkpoint of the unquantized base; compare with quantization in memory, and train."""
    model, memory = sharded(scheme, meta=True), sharded(scheme)
    tree = settings(folder, Paging(), "1MiB")  # type: ignore[arg-type]
    with infinity.offload(model, adamw(model), tree, weights=folder / "base") as optimizer:
        expected = dict(memory.named_parameters())
        for name, param in model.named_parameters():
            if "lora_A" not in name:  # random values
                assert torch.equal(param.full_tensor(), expected[name].full_tensor()), name
        found = Outcome()
        train(Recipe(steps=2), model, optimizer, found)
        assert len(set(found.losses)) == 2


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_base_checkpoint_is_quantized_while_loading(scheme: str, tmp_path: Path) -> None:
    """Memory never contains the full model, neither unquantized nor quantized."""
    torch.manual_seed(0)
    adapted.llama(width=128).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    compare_loaded_weights(tmp_path, scheme)


def test_base_checkpoint_is_quantized_while_loading_on_two_ranks(tmp_path: Path, pair: RankPool) -> None:
    torch.manual_seed(0)
    adapted.llama(width=128).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    pair.run(compare_loaded_weights, tmp_path, "int8")


@pytest.mark.parametrize(("scheme", "max_bytes"), [("int8", 2.4), ("nf4", 1.5)])
def test_quantization_reduces_bytes_per_step(scheme: str, max_bytes: float, tmp_path: Path) -> None:
    """A step reads about 2 bytes per int8 parameter and 1 byte per NF4 parameter instead of 4, and writes none."""
    model = sharded(scheme)
    tree = settings(tmp_path, Paging(), "512KiB")  # type: ignore[arg-type]
    with infinity.offload(model, adamw(model), tree) as optimizer:
        train(Recipe(steps=4), model, optimizer, Outcome())
        wait_until_idle(optimizer)
        before = optimizer.run.store.versions([p.index for p in optimizer.run.layout.pages if p.fixed])
        train(Recipe(steps=6), model, optimizer, Outcome(), first=4)
        wait_until_idle(optimizer)
        assert optimizer.run.store.versions(list(before)) == before
        quantized = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
        elements = sum(layer.in_features * layer.out_features for layer in quantized)
        assert len(quantized) == 21
        layers = [
            p
            for p in optimizer.run.layout.pages
            if p.fixed and optimizer.run.layout.fsdp_modules[p.fsdp_module].name != "root"
        ]
        assert 0 < 2 * sum(page.nbytes for page in layers) / elements <= max_bytes


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_merging_into_quantized_weights_is_unsupported(scheme: str) -> None:
    """Otherwise the adapters would be lost silently; the layer is unchanged."""
    with torch.device("cpu"):
        base = adapted.llama(width=128).to(torch.bfloat16)
    quantize_(base, adapted.quantization(scheme))
    model = adapted.lora(lambda: base)
    before = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.clone()
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(UnsupportedError, match="merge_and_unload"):
            merge()
    assert torch.equal(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight, before)


def test_quantizing_a_model_without_linear_layers_is_rejected() -> None:
    with pytest.raises(ConfigError, match="wanted="):
        quantize_(nn.Sequential(nn.Embedding(4, 4)), adapted.quantization("int8"))


def test_shape_that_torchao_cannot_quantize_is_rejected() -> None:
    """The error contains torchao's message and the shape."""
    from torchao.prototype._nf4tensor_api import NF4WeightOnlyConfig

    with pytest.raises(ConfigError, match=r"shape \(128, 64\): Number of scalers"):
        quantize_(nn.Sequential(nn.Linear(64, 128)), NF4WeightOnlyConfig())


def test_weights_with_a_different_shape_are_rejected(tmp_path: Path) -> None:
    """The error contains the name of the weight in the checkpoint."""
    adapted.llama(width=64).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = sharded("int8", meta=True)
    with pytest.raises(ConfigError, match=r"model.layers.0.self_attn.q_proj.weight: shape \(64, 64\) in the folder"):
        infinity.offload(model, adamw(model), settings(tmp_path, Paging(), "1MiB"), weights=tmp_path / "base")  # type: ignore[arg-type]


@pytest.mark.parametrize(("scheme", "max_bytes"), [("int8", 1.8), ("nf4", 1.4)])
def test_train_command_quantizes_base(
    scheme: str, max_bytes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run can be resumed and exported, but its base model cannot be exported."""
    monkeypatch.chdir(tmp_path)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=320, bos_token_id=None, eos_token_id=1, **shape)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    fine_tuning.make_tokenizer(tmp_path / "model")
    fine_tuning.write_jsonl(tmp_path / "chats.jsonl", fine_tuning.chats(16))
    command = ["train", "--model", "model", "--data", "chats.jsonl", "--quantize", scheme, "--peft.r", "2"]
    command += ["--peft.target_modules", "q_proj", "--max_length", "64", "--host-memory", "1MiB", "--json"]
    command += ["--per_device_train_batch_size", "2", "--learning_rate", "1e-2", "--out", "o"]
    found = run_here(*command, "--max_steps", "1").summary
    embeddings = 2 * 320 * 256
    layers = found["parameters"] - embeddings
    assert 1_310_000 < layers < 1_320_000
    assert found["state_bytes"] - 2 * embeddings < max_bytes * layers, "includes adapters and parts of pages"
    assert run_here("train", "--resume", "--out", "o", "--max_steps", "2", "--json").summary["first_step"] == 2
    assert run_here("export", "o/nvme", "--out", "adapter").status == 0
    base = transformers.AutoModelForCausalLM.from_pretrained("model")
    loaded = peft.PeftModel.from_pretrained(base, "adapter")
    assert any(value.any() for name, value in loaded.named_parameters() if "lora_B" in name)
    ended = run_here("export", "o/nvme", "--merge", "--out", "merged")
    assert (ended.status, "quantized weight" in ended.errors) == (2, True), ended.errors
