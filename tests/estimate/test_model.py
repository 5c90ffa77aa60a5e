"""Tests of model shapes and of the state formats that optimizers require."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infinity.errors import ConfigError
from infinity.estimate.model import OPTIMIZERS, decoder, with_lora, with_trainable_share
from infinity.optim.slicing_check import make_kernel

SMALL = {"parameters": 1e6, "layers": 4, "hidden": 64, "vocabulary": 500}


@given(
    st.integers(1, 120),
    st.sampled_from([64, 768, 4096, 16384]),
    st.integers(100, 200_000),
    st.floats(1.5, 20.0),
    st.booleans(),
)
def test_decoder_has_the_requested_parameter_count(
    layers: int, hidden: int, vocabulary: int, width: float, tied: bool
) -> None:
    """The error is at most one row per matrix."""
    wanted = vocabulary * hidden * (1 if tied else 2) + layers * hidden * hidden * 4 * width
    model = decoder(parameters=wanted, layers=layers, hidden=hidden, vocabulary=vocabulary, tied=tied)
    assert abs(model.parameters - wanted) <= layers * 4 * hidden + 3 * hidden
    assert len(model.layers) == layers
    assert model.trainable_parameters == model.parameters


@pytest.mark.parametrize("parameters", [1e3, 5e5 / 8, 64 * 500 * 2])
def test_too_few_parameters_raise(parameters: float) -> None:
    """The error states the size of embedding and head."""
    with pytest.raises(ConfigError, match=r"embedding and head alone.*64,064"):
        decoder(**{**SMALL, "parameters": parameters})


def test_flops_are_two_per_weight_plus_attention() -> None:
    """An embedding table needs no operations, unless it is also the head."""
    model, tied = decoder(**SMALL), decoder(**SMALL, tied=True)
    root, layers = model.forward_flops(128)
    matrices = sum(p.numel for layer in model.layers for p in layer.parameters if len(p.shape) == 2)
    assert root == 2 * 500 * 64
    assert layers == 2 * matrices + 4 * 128 * 64 * 4
    assert tied.forward_flops(128)[0] == root


def test_lora_selects_matrices_by_name_suffix() -> None:
    """A suffix that no layer has raises an error that lists the valid ones."""
    model = decoder(**SMALL)
    layers = len(model.layers)
    (name, shape), *_ = [(item.name, item.shape) for item in model.layers[0].parameters if len(item.shape) == 2]
    end = name.removesuffix(".weight").rsplit(".", 1)[-1]
    assert with_lora(model, 8, "bfloat16", [end]).trainable_parameters == layers * 8 * sum(shape)
    with pytest.raises(ConfigError, match=f"'other'.*{end}"):
        with_lora(model, 8, "bfloat16", ["other"])


def test_lora_freezes_the_base_and_adds_two_matrices_each() -> None:
    """Norms get no adapter."""
    model = with_lora(decoder(**SMALL), 8, "bfloat16")
    matrices = [p.shape for layer in decoder(**SMALL).layers for p in layer.parameters if len(p.shape) == 2]
    assert model.trainable_parameters == sum(8 * (rows + columns) for rows, columns in matrices)
    frozen = [p for fsdp_module in model.fsdp_modules for p in fsdp_module.parameters if not p.trainable]
    assert {p.dtype for p in frozen} == {"bfloat16"}
    assert sum(p.numel for p in frozen) == decoder(**SMALL).parameters


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_trainable_share_selects_the_last_layers(share: float) -> None:
    """The number of layers is rounded up."""
    model = with_trainable_share(decoder(**SMALL), share, "bfloat16")
    trained = [layer.trainable for layer in model.layers]
    assert trained == sorted(trained)
    layer = model.layers[0].numel
    assert min(share * model.parameters, 4 * layer) <= model.trainable_parameters < share * model.parameters + layer


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_largest_shard_matches_fsdp(ranks: int) -> None:
    """The first rank has a shard of the maximum size."""
    for fsdp_module in decoder(**SMALL).fsdp_modules:
        for parameter in fsdp_module.parameters:
            chunks = torch.chunk(torch.empty(parameter.shape, device="meta"), ranks)
            assert math.prod(parameter.shard(ranks)) == chunks[0].numel()


MAKE = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "adam": lambda p: torch.optim.Adam(p),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
    "momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p),
}


@pytest.mark.parametrize("name", sorted(MAKE))
def test_optimizer_states_match_discovery(name: str) -> None:
    param = nn.Parameter(torch.zeros(8, 8))
    optimizer = MAKE[name]([param])
    assert make_kernel(optimizer).discover(param).kinds == OPTIMIZERS[name]


def test_only_lion_is_not_a_torch_optimizer() -> None:
    """Its state is compared in the tests that require its package."""
    assert set(OPTIMIZERS) - set(MAKE) == {"lion"}
