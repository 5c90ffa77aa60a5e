"""Tests of the argument `adapters`: results equal those of calling `get_peft_model` and `fully_shard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import infinity
from infinity.errors import ConfigError, UnsupportedError
from support import adapted, models
from support.ranks import RankPool
from support.tables import all_but
from support.train import Outcome, Paging, Recipe, settings, train

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def config(**values: Any) -> Any:
    """Return a configuration of LoRA for every matrix of the layers."""
    import peft

    return peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **values})


def trained(model: Any, folder: Path, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a model with paging; return its losses and adapters."""
    given = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, fused=True)
    folder.mkdir(exist_ok=True)
    run = settings(folder, Paging(), "2MiB")  # type: ignore[arg-type]
    with infinity.offload(model, given, run, **options) as optimizer:
        outcome = Outcome()
        train(Recipe(steps=3), model, optimizer, outcome)
        values = {name: p.full_tensor().clone() for name, p in model.named_parameters() if p.requires_grad}
    return outcome.losses, values


def by_hand(folder: Path, asked: Any) -> Any:
    """Build the model as shown in docs/how-to/lora.md."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        model = peft.get_peft_model(base, asked)
    return models.shard(model)


def compare(folder: Path, **values: Any) -> None:
    """Compare the training of both ways of adding adapters."""
    mesh = infinity.mesh("cpu")
    base = folder / "base"
    expected = trained(by_hand(base, config(**values)), folder / "a", weights=base)
    model = infinity.from_pretrained(base, adapters=config(**values), dtype="auto", mp_policy=POLICY, mesh=mesh)
    assert type(model).__name__.endswith("PeftModelForCausalLM")
    assert model.peft_config["default"].base_model_name_or_path == str(base)
    losses, weights = trained(model, folder / "b")
    assert losses == expected[0]
    assert len(set(losses)) == 3
    assert weights.keys() == expected[1].keys()
    assert all(torch.equal(weights[name], expected[1][name]) for name in weights)


def save_base(folder: Path, **values: Any) -> None:
    """Save a base in bf16."""
    torch.manual_seed(1)
    adapted.llama(**values).to(torch.bfloat16).save_pretrained(folder / "base")  # type: ignore[operator]


KINDS = {"all": {}, "saved head": {"modules_to_save": ["lm_head"]}, "rank-stabilized": {"use_rslora": True}}


@pytest.mark.parametrize("kind", all_but(KINDS, "rank-stabilized"))
def test_adapters_argument_equals_get_peft_model(kind: str, tmp_path: Path) -> None:
    """The weights of the base are read without another `weights=`."""
    save_base(tmp_path)
    compare(tmp_path, **KINDS[kind])


@pytest.mark.wide
def test_adapters_argument_on_two_ranks(tmp_path: Path, pair: RankPool) -> None:
    save_base(tmp_path)
    pair.run(compare, tmp_path)


def test_from_config_with_activation_checkpointing_and_slices(tmp_path: Path) -> None:
    """Activation checkpointing and slices work through peft's modules."""
    base = adapted.llama().config
    mesh = infinity.mesh("cpu")
    architecture = {"auto_class": "AutoModelForCausalLM", "mesh": mesh, "mp_policy": MixedPrecisionPolicy()}
    plain = infinity.from_config(base, adapters=config(), **architecture)
    assert {name for name, p in plain.named_parameters() if p.requires_grad} == {
        name for name, _ in plain.named_parameters() if "lora_" in name
    }
    losses, _ = trained(plain, tmp_path / "a")
    again = infinity.from_config(base, adapters=config(), activation_checkpointing=True, **architecture)
    assert trained(again, tmp_path / "b")[0] == losses
    sliced = infinity.from_config(base, adapters=config(), **architecture)
    infinity.micro_batches(sliced, 1)
    assert trained(sliced, tmp_path / "c")[0] == losses


def test_invalid_adapter_configurations_are_rejected(tmp_path: Path) -> None:
    """The error lists valid values."""
    base, mesh = adapted.llama().config, infinity.mesh("cpu")
    with pytest.raises(ConfigError, match=r"adapters=16 .*peft.* of type int; .*peft\.LoraConfig"):
        infinity.from_config(base, adapters=16, auto_class="AutoModelForCausalLM", mesh=mesh)
    asked = config(target_modules=["wrong"])
    with pytest.raises(ConfigError, match=r"LoraConfig .*wrong.*: down_proj, gate_proj"):
        infinity.from_config(base, adapters=asked, auto_class="AutoModelForCausalLM", mesh=mesh)


def test_error_for_late_adapters_recommends_the_adapters_argument(tmp_path: Path) -> None:
    """The length of the message does not depend on the model size."""
    import peft

    base, mesh = adapted.llama().config, infinity.mesh("cpu")
    model = peft.get_peft_model(infinity.from_config(base, auto_class="AutoModelForCausalLM", mesh=mesh), config())
    count = sum("lora_" in name for name, _ in model.named_parameters())
    with pytest.raises(UnsupportedError) as caught:
        trained(model, tmp_path)
    text = str(caught.value)
    assert f" and {count - 3} more; " in text
    assert "(adapters=)" in text
    assert text.count("lora_A") + text.count("lora_B") == 3
    assert not list(tmp_path.glob("**/*.pages"))
