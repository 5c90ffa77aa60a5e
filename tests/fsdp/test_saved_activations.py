"""Tests of the selection of saved tensors for paging: only inputs of FSDP modules, for every kind of checkpointing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, T5Config, T5ForConditionalGeneration

import infinity
from infinity.errors import BudgetError, ConfigError
from infinity.run.run import Run
from support.device.simulation import simulation
from support.late_copies import late_copies
from support.tables import WIDE, all_but

WIDTH, LAYERS, ROWS, LENGTH = 64, 4, 4, 256
INPUT = ROWS * LENGTH * WIDTH * 2
"""Bytes of a layer's input."""
LLAMA = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
LEAST = {"tier": "nvme", "host_bytes": "256KiB"}


class Layer(nn.Module):
    """A residual block whose computation can be wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.wrap: Callable[..., torch.Tensor] | None = None

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrap(self.compute, x) if self.wrap else self.compute(x)


class Model(nn.Module):
    """Layers between an embedding and a head; `around` wraps the calls of the layers."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.around: Callable[..., torch.Tensor] | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.around(layer, x) if self.around else layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def sharded(change: Callable[[Model], object]) -> Model:
    torch.manual_seed(0)
    model = Model()
    change(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, mesh=infinity.mesh())
    return fully_shard(model, mp_policy=policy, mesh=infinity.mesh())


def tokens(step: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


@contextmanager
def offloaded(
    model: nn.Module, folder: Path, activations: dict[str, Any], **sections: Any
) -> Iterator[infinity.PagedOptimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {
        "storage": {"paths": [str(folder)], "timeout_seconds": 20},
        "memory": {"host_bytes": "4MiB", "page_bytes": "64KiB"},
        "activations": activations,
        "telemetry": {"runtime_dir": str(folder / "runtime")},
        **sections,
    }
    with infinity.offload(model, optimizer, settings) as paged:
        yield paged


def train(optimizer: Any, loss_of: Callable[[int], torch.Tensor], steps: int = 3) -> list[float]:
    """Train with the losses that a function computes for each step; return them."""
    losses = []
    for step in range(steps):
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(model: nn.Module, folder: Path, activations: dict[str, Any]) -> tuple[list[float], Run]:
    with offloaded(model, folder, activations) as optimizer:
        return train(optimizer, lambda step: model(tokens(step))), optimizer.run


def in_memory_and(folder: Path, activations: dict[str, Any] = LEAST) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yield the settings of activations in memory, then those given, each with a folder for the run."""
    for number, each in enumerate(({}, activations)):
        place = folder / str(number)
        place.mkdir()
        yield each, place


def _all(model: Model, wrap: Callable[..., torch.Tensor]) -> None:
    for layer in model.layers:
        layer.wrap = wrap


def _compiled(model: Model) -> None:
    for layer in model.layers:
        layer.compute = torch.compile(layer.compute, backend="aot_eager")


WAYS: dict[str, Callable[[Model], object]] = {
    "none": lambda _: None,
    "inside, reentrant": lambda model: _all(model, partial(checkpoint, use_reentrant=True)),
    "inside": lambda model: _all(model, partial(checkpoint, use_reentrant=False)),
    "around, reentrant": lambda model: setattr(model, "around", partial(checkpoint, use_reentrant=True)),
    "around": lambda model: setattr(model, "around", partial(checkpoint, use_reentrant=False)),
    "torch's wrapper": lambda model: apply_activation_checkpointing(
        model, partial(wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT), lambda module: isinstance(module, Layer)
    ),
    "compiled": _compiled,
    "compiled model": lambda model: model.compile(backend="aot_eager"),
}


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses with activations in memory, which are the same for every kind of checkpointing."""
    return trained(sharded(WAYS["none"]), tmp_path_factory.mktemp("in_memory"), {})[0]


@pytest.mark.parametrize("way", all_but(WAYS, "inside, reentrant", "around", "compiled"))
def test_each_layer_input_is_saved_once(way: str, in_memory: list[float], tmp_path: Path) -> None:
    """The losses equal those with activations in memory, for every kind of checkpointing."""
    found, run = trained(sharded(WAYS[way]), tmp_path, LEAST)
    assert found == in_memory
    assert run.activations is not None
    assert run.activations.traffic.kept == LAYERS * INPUT
    assert run.activations.traffic.written == LAYERS * INPUT - 2 * 65536


def test_slices_are_saved_separately(tmp_path: Path) -> None:
    """Together they have the size of one input."""
    model = sharded(WAYS["none"])
    infinity.micro_batches(model, 4)
    _, run = trained(model, tmp_path, LEAST)
    assert run.activations is not None
    assert run.activations.traffic.kept == LAYERS * INPUT


def test_activation_traffic_matches_the_prediction(tmp_path: Path) -> None:
    """On a slow machine, backward may use pages that are still being written, or have not been written yet."""
    model = sharded(WAYS["inside"])
    with offloaded(model, tmp_path, LEAST) as optimizer:
        train(optimizer, lambda step: model(tokens(step)), 5)
        page, predicted = optimizer.run.stats.snapshot(), optimizer.run.activations.traffic.written
        written, read = (
            page.value("io_bytes_total", op=op, state="activation", device="nvme0") for op in ("write", "read")
        )
        spared = page.value("prefetch_spared_bytes_total")
        assert page.value("plan_predicted_bytes_per_step", op="write") == (
            optimizer.run.plan.traffic.written_bytes + predicted
        )
    assert 0 < written <= 5 * predicted
    assert 5 * predicted - spared <= read <= 5 * predicted


def test_interleaved_forwards_and_backwards_match_memory(tmp_path: Path) -> None:
    """Two forwards precede the first backward, and one graph is used twice."""
    losses = []
    for activations, folder in in_memory_and(tmp_path):
        model = sharded(WAYS["inside"])
        model.set_reshard_after_backward(True)
        with offloaded(model, folder, activations, update={"schedule": "after_backward"}) as optimizer:
            found = []
            for step in range(2):
                first, second = model(tokens(step)), model(tokens(step + 10))
                first.backward(retain_graph=True)
                second.backward()
                first.backward()
                optimizer.step()
                optimizer.zero_grad()
                found += [first.item(), second.item()]
        losses.append(found)
    assert losses[0] == losses[1]


def test_no_activations_remain_after_no_grad_or_an_error(tmp_path: Path) -> None:
    model = sharded(WAYS["inside"])
    with offloaded(model, tmp_path, LEAST) as optimizer:
        pages = optimizer.run.activations
        with torch.no_grad():
            model(tokens())
        assert pages._stack == {}
        model.layers[-1].wrap = lambda compute, x: 1 // 0
        with pytest.raises(ZeroDivisionError):
            model(tokens())
        model.layers[-1].wrap = None
        hook = model.layers[-1].register_forward_pre_hook(
            lambda *_: 1 // 0, prepend=True
        )  # runs before all other hooks
        with pytest.raises(ZeroDivisionError):
            model(tokens())
        hook.remove()
        gc.collect()
        model.layers[-1].wrap = partial(checkpoint, use_reentrant=False)
        model(tokens()).backward()
        optimizer.step()
        assert pages._stack == {}
        assert pages.traffic.kept > 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_interrupted_forward_is_discarded(tmp_path: Path) -> None:
    """The next forward pages its inputs as before, and an evaluation is not mistaken for training."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model = sharded(WAYS["around"])
    with offloaded(model, tmp_path, LEAST) as optimizer:
        train(optimizer, lambda step: model(tokens(step)))
        kept = optimizer.run.activations.traffic.kept
        hook = model.layers[2].norm.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(tokens())
        hook.remove()
        gc.collect()
        with torch.no_grad():
            model(tokens())
        assert not optimizer._runner._grad_enabled
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        train(optimizer, lambda _: model(tokens()), 2)  # the first step includes pages of the interrupted forward
        assert optimizer.run.activations.traffic.kept == kept > 0
        hook = model.layers[2].norm.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(tokens())
        hook.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_saved_outputs_create_no_reference_cycle(tmp_path: Path) -> None:
    """A graph releases its saved outputs when it is freed."""
    model = sharded(WAYS["none"])
    outputs = []
    model.head.register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)) or output.exp())
    with offloaded(model, tmp_path, LEAST) as optimizer:
        loss = model(tokens())
        loss.backward()
        del loss
        optimizer.step()
        gc.collect()
        assert [output() for output in outputs] == [None]


def test_in_place_modification_of_a_saved_tensor_raises(tmp_path: Path) -> None:
    """The message equals autograd's."""

    def spoil(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        saved = output.exp()
        result = saved * 1
        saved.add_(1)
        return result

    for activations, folder in in_memory_and(tmp_path):
        model = sharded(WAYS["none"])
        model.layers[1].up.register_forward_hook(spoil)
        with offloaded(model, folder, activations):
            loss = model(tokens())
            with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("reentrant", [pytest.param(True, marks=WIDE), False])
def test_transformers_gradient_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    """transformers wraps the call of a layer; masks and positions are not paged."""
    losses = []
    for activations, folder in in_memory_and(tmp_path):
        model = infinity.from_config(LlamaConfig(**LLAMA), dtype=torch.bfloat16)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        ids = torch.randint(0, 64, (8, 128), generator=torch.Generator().manual_seed(0))
        with offloaded(model, folder, activations) as optimizer:
            mask = torch.ones_like(ids)
            losses += train(optimizer, lambda _: model(input_ids=ids, labels=ids, attention_mask=mask).loss)
            if activations:
                config = model.config
                size = 8 * 128 * config.hidden_size * 2
                assert optimizer.run.activations.traffic.kept == config.num_hidden_layers * size
                assert optimizer.run.stats.snapshot().value("plan_divergences_total") == 0
    assert losses[:3] == losses[3:]


def test_invalid_activation_settings_raise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'activations\.tier = "host".*"nvme" or "device"'):
        trained(sharded(WAYS["none"]), tmp_path, {"tier": "host"})
    with pytest.raises(BudgetError, match=r"activations.host_bytes = 64 KiB .* set it to 256KiB"):
        trained(sharded(WAYS["none"]), tmp_path, {"tier": "nvme", "host_bytes": "64KiB"})
    with pytest.raises(BudgetError, match=r"3.94 MiB for activations"):
        trained(sharded(WAYS["none"]), tmp_path, {"tier": "nvme", "host_bytes": 4 * 1024 * 1024 - 65536})


def test_insufficient_host_memory_names_the_layer(tmp_path: Path) -> None:
    """The layer number indicates wrap much more memory is needed."""
    with simulation("order"):
        model = sharded(WAYS["inside"])
        with (
            offloaded(model, tmp_path, {"tier": "host", "host_bytes": 2 * INPUT + 65536}),
            pytest.raises(BudgetError, match=r"activations\.host_bytes.* layer 3 of 4"),
        ):
            model(tokens())


def test_input_saved_in_two_shapes_is_stored_once(tmp_path: Path) -> None:
    """Each reference gets its own shape."""

    def flat(compute: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, WIDTH)
        return compute(x) + (rows * rows).view_as(x) / 8

    losses = []
    for activations, folder in in_memory_and(tmp_path):
        found, run = trained(sharded(lambda model: _all(model, flat)), folder, activations)
        losses.append(found)
    assert losses[0] == losses[1]
    assert run.activation_traffic.kept == LAYERS * INPUT


def on_cpu(model: nn.Module, step: int) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(tokens(step))


AROUND = {
    "checkpoint": lambda model, step: checkpoint(model, tokens(step), use_reentrant=False),
    "save_on_cpu": on_cpu,
}


@pytest.mark.parametrize("around", all_but(AROUND, "checkpoint"))
def test_outer_saved_tensor_hooks_disable_paging(around: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning is logged once."""
    losses = []
    for activations, folder in in_memory_and(tmp_path):
        model = sharded(WAYS["inside"])
        with offloaded(model, folder, activations) as optimizer:
            losses += train(optimizer, partial(AROUND[around], model))
            assert optimizer.run.activation_traffic.kept == 0
    assert losses[:3] == losses[3:]
    warnings = [record.message for record in caplog.records if "activations.tier has no effect" in record.message]
    assert len(warnings) == 1
    assert "save_on_cpu" in warnings[0]


@pytest.mark.wide
def test_shared_inputs_of_decoder_layers_match_the_prediction(tmp_path: Path) -> None:
    """All decoder layers of T5 use the encoder's output and the same position bias."""
    config = T5Config(
        vocab_size=64, d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=2, num_decoder_layers=3, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    losses = []
    for activations, folder in in_memory_and(tmp_path, {"tier": "nvme", "host_bytes": "768KiB"}):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(config)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in (*model.encoder.block, *model.decoder.block):
            fully_shard(block, mp_policy=policy, mesh=infinity.mesh())
        fully_shard(model, mp_policy=policy, mesh=infinity.mesh())
        ids = torch.randint(2, 64, (8, 128), generator=torch.Generator().manual_seed(0))
        with offloaded(model, folder, activations) as optimizer:
            losses += train(optimizer, lambda _: model(input_ids=ids, labels=ids).loss)
            if activations:
                traffic, page = optimizer.run.activation_traffic, optimizer.run.stats.snapshot()
                written, read = (
                    page.value("io_bytes_total", op=op, state="activation", device="nvme0") for op in ("write", "read")
                )
                spared = page.value("prefetch_spared_bytes_total")
                assert written == 3 * traffic.written > 0
                assert 3 * traffic.read - spared <= read <= 3 * traffic.read
                size = 8 * 128 * 64 * 2
                assert traffic.kept == (2 + 3 + 1 + 2) * size
                assert traffic.read == traffic.written
                assert page.value("tier_used_bytes", tier="nvme", state="activation") >= traffic.kept
    assert losses[:3] == losses[3:]


def test_modifying_an_input_during_its_copy_raises(tmp_path: Path) -> None:
    """The copy may contain any values. Modifications after the copy do not affect it."""
    model = sharded(WAYS["inside"])
    with offloaded(model, tmp_path, {"tier": "nvme", "host_bytes": "2MiB"}):
        with late_copies() as passed:

            def spoil(module: nn.Module, args: Any, output: torch.Tensor) -> None:
                with torch.no_grad():
                    args[0].add_(1)
                passed.set()

            model.layers[1].register_forward_hook(spoil)
            loss = model(tokens())
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation while it was copied.* \(4, 256, 64\)"
        ):
            loss.backward()
