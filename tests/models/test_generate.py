"""Tests of `generate` of encoder-decoders, which call the encoder outside of the forward of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import infinity
from support.train import MIB

transformers = pytest.importorskip("transformers")
STEPS = 4


def t5() -> nn.Module:
    """Return a small T5 in memory."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    tokens = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **tokens, dropout_rate=0.0))


def adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q", "v"], init_lora_weights=False)


def config(folder: Path, **sections: Any) -> dict[str, Any]:
    return {
        "storage": {"paths": [str(folder / "nvme")]},
        "memory": {"host_bytes": 16 * MIB},
        "telemetry": {"runtime_dir": str(folder / "runtime")},
        "run": {"keep": "never"},
        **sections,
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tokens generated before and after each step. Gradients are enabled, as in most programs."""
    ids, labels = torch.arange(2, 14).view(2, 6), torch.arange(20, 30).view(2, 5)
    generated = []
    for _ in range(STEPS):
        generated.append(model.eval().generate(input_ids=ids, max_new_tokens=5))
        model.train()(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*generated, model.eval().generate(input_ids=ids, max_new_tokens=5)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.02, fused=True)


@pytest.mark.parametrize("schedule", ["in_backward", "in_forward"])
def test_generate_of_an_encoder_decoder_between_steps_equals_memory(schedule: str, tmp_path: Path) -> None:
    """Generation is not part of the plan."""
    plain = t5()
    plain.save_pretrained(tmp_path / "saved")
    expected = train(plain, adamw(plain))
    model = infinity.from_pretrained(tmp_path / "saved", mp_policy=MixedPrecisionPolicy())
    with infinity.offload(model, adamw(model), config(tmp_path, update={"schedule": schedule})) as paged:
        found = train(model, paged)
        assert paged.run.stats.snapshot().value("plan_divergences_total") == 0
    assert len({str(tokens) for tokens in expected}) > 1
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_generate_with_adapters_equals_memory(tmp_path: Path) -> None:
    from peft import get_peft_model

    plain = t5()
    plain.save_pretrained(tmp_path / "saved")
    torch.manual_seed(1)
    plain = get_peft_model(plain, adapters())
    initial = {name: param.detach().clone() for name, param in plain.named_parameters()}
    model = infinity.from_pretrained(tmp_path / "saved", mp_policy=MixedPrecisionPolicy(), adapters=adapters())
    with infinity.offload(model, adamw(model), config(tmp_path)) as paged:
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.requires_grad:
                    param.copy_(torch.distributed.tensor.distribute_tensor(initial[name], param.device_mesh))
        found = train(model, paged)
    expected = train(plain, adamw(plain))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_methods_registered_with_fsdp_are_evaluations_under_no_grad(tmp_path: Path) -> None:
    """A method that the training loop itself registers gathers weights before any forward hook runs."""
    model = t5()
    for part in (*model.encoder.block, *model.decoder.block, model):
        fully_shard(part, mesh=infinity.mesh("cpu"))
    register_fsdp_forward_method(model, "generate")
    with infinity.offload(model, adamw(model), config(tmp_path)) as paged:
        with torch.no_grad():
            model.generate(torch.arange(2, 8)[None], max_new_tokens=2)
        train_ids = torch.arange(2, 8)[None]
        for _ in range(STEPS):
            model(input_ids=train_ids, labels=train_ids).loss.backward()
            paged.step()
            paged.zero_grad()
            with torch.no_grad():
                model.generate(train_ids, max_new_tokens=2)
        assert paged.run.stats.snapshot().value("plan_divergences_total") == 0
