"""Shapes of models, and the formats that optimizers give them."""

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
def test_a_decoder_has_the_parameters_that_were_asked_for(
    layers: int, hidden: int, vocabulary: int, width: float, tied: bool
) -> None:
    """To within what one more row of each matrix adds."""
    wanted = vocabulary * hidden * (1 if tied else 2) + layers * hidden * hidden * 4 * width
    model = decoder(parameters=wanted, layers=layers, hidden=hidden, vocabulary=vocabulary, tied=tied)
    assert abs(model.parameters - wanted) <= layers * 4 * hidden + 3 * hidden
    assert len(model.layers) == layers
    assert model.trainable_parameters == model.parameters


@pytest.mark.parametrize("parameters", [1e3, 5e5 / 8, 64 * 500 * 2])
def test_too_few_parameters_are_refused(parameters: float) -> None:
    """With what embedding and head take alone."""
    with pytest.raises(ConfigError, match=r"embedding and head alone.*64,064"):
        decoder(**{**SMALL, "parameters": parameters})


def test_operations_are_two_per_weight_and_those_of_attention() -> None:
    """Of a table of embeddings none; of a head that is the embedding, all."""
    model, tied = decoder(**SMALL), decoder(**SMALL, tied=True)
    root, layers = model.forward_flops(128)
    matrices = sum(p.numel for layer in model.layers for p in layer.parameters if len(p.shape) == 2)
    assert root == 2 * 500 * 64
    assert layers == 2 * matrices + 4 * 128 * 64 * 4
    assert tied.forward_flops(128)[0] == root


def test_lora_beside_some_matrices() -> None:
    """By the ends of their names, as peft takes them; one that no layer has is refused, with those that there are."""
    model = decoder(**SMALL)
    layers = len(model.layers)
    (name, shape), *_ = [(item.name, item.shape) for item in model.layers[0].parameters if len(item.shape) == 2]
    end = name.removesuffix(".weight").rsplit(".", 1)[-1]
    assert with_lora(model, 8, "bfloat16", [end]).trainable_parameters == layers * 8 * sum(shape)
    with pytest.raises(ConfigError, match=f"'other'.*{end}"):
        with_lora(model, 8, "bfloat16", ["other"])


def test_lora_freezes_all_and_adds_two_matrices_to_each() -> None:
    """Norms get none."""
    model = with_lora(decoder(**SMALL), 8, "bfloat16")
    matrices = [p.shape for layer in decoder(**SMALL).layers for p in layer.parameters if len(p.shape) == 2]
    assert model.trainable_parameters == sum(8 * (rows + columns) for rows, columns in matrices)
    frozen = [p for fsdp_module in model.fsdp_modules for p in fsdp_module.parameters if not p.trainable]
    assert {p.dtype for p in frozen} == {"bfloat16"}
    assert sum(p.numel for p in frozen) == decoder(**SMALL).parameters


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_a_share_is_trained_from_the_end(share: float) -> None:
    """Whole layers, as many as it takes."""
    model = with_trainable_share(decoder(**SMALL), share, "bfloat16")
    trained = [layer.trainable for layer in model.layers]
    assert trained == sorted(trained)
    layer = model.layers[0].numel
    assert min(share * model.parameters, 4 * layer) <= model.trainable_parameters < share * model.parameters + layer


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_rows_are_dealt_out_as_fsdp_does(ranks: int) -> None:
    """The first rank has as many as any."""
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
def test_states_are_those_that_the_probe_finds(name: str) -> None:
    """Of torch's optimizers."""
    param = nn.Parameter(torch.zeros(8, 8))
    optimizer = MAKE[name]([param])
    assert make_kernel(optimizer).discover(param, optimizer.param_groups[0]).kinds == OPTIMIZERS[name]


def test_lion_is_the_only_one_of_another_package() -> None:
    """What is not compared with torch here is compared where that package is installed."""
    assert set(OPTIMIZERS) - set(MAKE) == {"lion"}
