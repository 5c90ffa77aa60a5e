"""Tests of layer-major accumulation: traffic does not depend on the number of slices, and sums match a loop."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import infinity
from infinity.accumulation.sliced_forward import SlicedNorm
from infinity.accumulation.slicing import Slicing
from infinity.errors import ConfigError, UnsupportedError
from support import models
from support.ranks import RankPool
from support.tables import all_but, alternate, variants
from support.train import Outcome, Paging, Recipe, batch, compare, evaluate, in_memory, local, offloaded, train

LEAST = {"least": Paging(host_cache="least")}
UPDATE_SCHEDULES = {
    update_schedule: Paging(host_cache="least", update_schedule=update_schedule)
    for update_schedule in ("in_backward", "in_forward", "after_backward")
}
SLICED = {"sequences": 4, "slices": 4, "steps": 4}
ONE_RANK = [
    *variants({"llama": Recipe(**SLICED), "tied": Recipe(model="tied", **SLICED)}, UPDATE_SCHEDULES),
    *variants(
        {
            "clip-eval-between": Recipe(clip=0.5, evaluate=True, **SLICED),
            "loop-fp32": Recipe(policy="fp32", micro=2, **SLICED),
        },
        LEAST,
    ),
    *variants(
        {
            "gpt2": Recipe(model="gpt2", sequences=4, slices=2, steps=4),  # dropout is on
            **{name: Recipe(model=name, **SLICED) for name in ("frozen", "toy", "repeated", "spare")},
        },
        LEAST,
        wide=True,
    ),
]
TWO_RANKS = [
    *variants(
        {"tied-clip": Recipe(model="tied", clip=0.5, **SLICED)},
        {"in_forward": UPDATE_SCHEDULES["in_forward"]},
    ),
    *variants(
        {
            "llama": Recipe(**SLICED),
            "fp32": Recipe(policy="fp32", **SLICED),
            "gpt2": Recipe(model="gpt2", sequences=4, slices=2, steps=4),
        },
        LEAST,
        wide=True,
    ),
]


@pytest.mark.parametrize(("recipe", "paging"), ONE_RANK)
def test_paging_changes_no_bit(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """Losses, norms, parameters and moments equal those of the same slices in memory."""
    assert compare(recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize(("recipe", "paging"), TWO_RANKS)
def test_paging_changes_no_bit_on_two_ranks(recipe: Recipe, paging: Paging, tmp_path: Path, pair: RankPool) -> None:
    assert pair.run(compare, recipe, paging, str(tmp_path)) == [[], []]


# The order of summation #


@pytest.mark.parametrize(("model", "policy"), alternate(["llama", "gpt2", "tied", "toy"], ["bf16", "fp32"]))
def test_one_slice_equals_the_full_batch(model: str, policy: str) -> None:
    """A single slice only adds recomputation, with the same random numbers."""
    full = in_memory(Recipe(model=model, policy=policy, steps=4))
    sliced = in_memory(Recipe(model=model, policy=policy, steps=4, slices=1))
    assert sliced.losses == full.losses
    assert all(
        torch.equal(value, sliced.state[name][kind])
        for name, states in full.state.items()
        for kind, value in states.items()
    )


def gradients(name: str, policy: str, count: int, how: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the local gradients for a batch of 8 sequences with some ignored labels.

    Args:
        how: ``sliced``, ``full``, a ``loop`` that reduces gradients once, or a loop that reduces ``each`` micro-batch.
    """
    model = models.build(name, policy=policy).eval()  # without dropout, which draws in a different order
    tokens = batch(model, 3, sequences=8)
    labels = tokens.where(tokens % 7 > 0, -100)
    count_of_labels = int((labels[:, 1:] >= 0).sum())
    if how == "sliced":
        infinity.micro_batches(model, count)
    parts = count if how in ("loop", "each") else 1
    total = 0.0
    for index, rows in enumerate(zip(tokens.chunk(parts), labels.chunk(parts), strict=True)):
        model.set_requires_gradient_sync(how != "loop" or index == parts - 1)
        given: dict[str, Any] = {} if parts == 1 else {"num_items_in_batch": count_of_labels}
        loss = model(input_ids=rows[0], labels=rows[1], use_cache=False, **given).loss
        loss.backward()
        total += loss.item()
    return total, {name: local(param.grad) for name, param in model.named_parameters() if param.requires_grad}


def compare_with_loop(name: str, policy: str, count: int, how: str) -> None:
    """Check that gradients equal the loop's, except that those of embeddings may differ by rounding."""
    loss, found = gradients(name, policy, count, "sliced")
    expected_loss, expected = gradients(name, policy, count, how)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    differing = {name for name, value in expected.items() if not torch.equal(value, found[name])}
    assert differing <= {name for name in expected if name.split(".")[1] in UNSLICED}
    for name in differing:
        distance = torch.linalg.vector_norm(found[name] - expected[name])
        assert distance < (1e-6 if policy == "fp32" else 2e-2) * torch.linalg.vector_norm(expected[name])


UNSLICED = {"embed_tokens", "wte", "wpe"}
"""Embeddings, which the root applies to the full batch."""


@pytest.mark.parametrize(
    ("name", "policy_and_loop"),
    alternate(["llama", "tied", "gpt2", "lora-saved-head"], product(["bf16", "fp32"], ["loop", "each"])),
)
def test_sliced_gradients_equal_a_loop(name: str, policy_and_loop: tuple[str, str]) -> None:
    """On one rank, they also equal a loop that reduces the gradients of each micro-batch."""
    policy, how = policy_and_loop
    compare_with_loop(name, policy, 8, how)


@pytest.mark.parametrize("policy", all_but(["bf16", "fp32"], "fp32"))
def test_sliced_gradients_equal_a_loop_on_two_ranks(policy: str, pair: RankPool) -> None:
    """Slices are summed before ranks are."""
    pair.run(compare_with_loop, "llama", policy, 4, "loop")


SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "Gemma2Config": {**SHAPE, "num_key_value_heads": 2, "head_dim": 16},  # soft-caps the logits
    "MixtralConfig": {**SHAPE, "num_key_value_heads": 2, "num_local_experts": 4},  # some slices do not use all experts
    "OPTConfig": {
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
    },
    "MambaConfig": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},  # no attention
}


def of_family(config: str, policy: str = "fp32", **values: Any) -> nn.Module:
    """Return a sharded causal language model of the given architecture, without dropout."""
    import transformers

    torch.manual_seed(0)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    made = getattr(transformers, config)(vocab_size=300, **tokens, **FAMILIES[config], **values)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    for layer in layers_of(model):
        fully_shard(layer, mesh=infinity.mesh("cpu"), mp_policy=models.POLICIES[policy])
    return fully_shard(model, mesh=infinity.mesh("cpu"), mp_policy=models.POLICIES[policy])


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the layers of a transformers model."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=lambda m: sum(1 for _ in m.modules()))


@pytest.mark.parametrize("config", FAMILIES)
def test_slicing_supports_other_architectures(config: str) -> None:
    """Head and loss are the model's own code."""
    losses, found = [], []
    for slices in (0, 4):
        model = of_family(config)
        if slices:
            infinity.micro_batches(model, slices)
        tokens = batch(model, 0, sequences=4)
        result = model(input_ids=tokens, labels=tokens)
        assert (result.logits is None) is (slices > 0)
        result.loss.backward()
        losses.append(result.loss.item())
        found.append({name: local(param.grad) for name, param in model.named_parameters()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-7)


# Head and loss by tokens #


def sliced_by_tokens(
    name: str, policy: str, tokens: int, slices: int = 0, *, later: bool = False
) -> dict[str, torch.Tensor]:
    """Return the loss and gradients of 4 sequences of 24 tokens; `tokens` limits the slices of head and loss."""
    model = models.build(name, policy=policy).eval()
    given = batch(model, 3, sequences=4)
    labels = given.where(given % 7 > 0, -100)
    if tokens and not later:
        infinity.sliced_loss(model, tokens)
    if slices:
        infinity.micro_batches(model, slices)
    if tokens and later:
        infinity.sliced_loss(model, tokens)
    result = model(input_ids=given, labels=labels, use_cache=False)
    assert (result.logits is None) is (tokens > 0 or slices > 0)
    result.loss.backward()
    found = {name: local(param.grad) for name, param in model.named_parameters() if param.requires_grad}
    return found | {"loss": result.loss.detach()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", all_but(["llama", "tied", "gpt2"], "gpt2"))
def test_sliced_loss_matches_the_full_loss(name: str) -> None:
    """Bitwise equal for a single slice and for slices of full rows, otherwise close."""
    full = sliced_by_tokens(name, "fp32", 0)
    assert same(sliced_by_tokens(name, "fp32", 4 * 24), full)
    assert same(sliced_by_tokens(name, "fp32", 10_000), full)
    rows = sliced_by_tokens(name, "fp32", 0, slices=4)
    assert same(sliced_by_tokens(name, "fp32", 24, slices=4), rows)
    assert same(sliced_by_tokens(name, "fp32", 24, slices=4, later=True), rows)
    for tokens in (1, 7, 10, 95):
        for key, value in sliced_by_tokens(name, "fp32", tokens).items():
            torch.testing.assert_close(value, full[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["lora", "lora-saved-head", "prompt", "prefix"])
def test_sliced_loss_supports_peft_adapters(name: str) -> None:
    """Prefix tuning passes a cache of keys and values to the layers."""
    full = sliced_by_tokens(name, "fp32", 0)
    assert same(sliced_by_tokens(name, "fp32", 10_000), full)
    for key, value in sliced_by_tokens(name, "fp32", 10).items():
        torch.testing.assert_close(value, full[key], rtol=1e-4, atol=1e-6)


def test_micro_batches_with_prefix_tuning_raises() -> None:
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        sliced_by_tokens("prefix", "fp32", 10, slices=2)


@pytest.mark.parametrize(
    ("name", "policy", "slices"),
    [
        ("llama", "bf16", 0),
        ("lora", "fp32", 2),
        pytest.param("llama", "fp32", 2, marks=pytest.mark.wide),
        pytest.param("lora", "bf16", 0, marks=pytest.mark.wide),
    ],
)
def test_paging_with_sliced_loss_changes_no_bit(name: str, policy: str, slices: int, tmp_path: Path) -> None:
    recipe = Recipe(model=name, policy=policy, slices=slices, loss_tokens=10)
    assert compare(recipe, Paging(host_cache="least"), str(tmp_path)) == []


@pytest.mark.parametrize("tokens", [1, 24, 50])
def test_sliced_loss_limits_the_size_of_logits(tokens: int) -> None:
    """This applies to forward and backward, and to one long row as well as several rows."""
    for rows in (1, 8):
        model = models.shard(models.llama(width=16, layers=1, vocabulary=1009))
        infinity.sliced_loss(model, tokens)
        given = torch.randint(1009, (rows, 8 * 24 // rows))
        with Largest() as mode:
            model(input_ids=given, labels=given).loss.backward()
        root = 2 * 16 * 1009 + 16
        assert mode.elements <= max(tokens * 1009, root)


def test_sliced_loss_requires_a_sharded_causal_language_model() -> None:
    with pytest.raises(ConfigError, match=r"sliced_loss .*got 0"):
        infinity.sliced_loss(models.build("llama"), 0)
    with pytest.raises(UnsupportedError, match=r"is not a .*causal language model"):
        infinity.sliced_loss(models.build("toy"), 8)
    with pytest.raises(UnsupportedError, match="call fully_shard on its layers and on the model first"):
        infinity.sliced_loss(models.llama(width=16, layers=1), 8)


def test_micro_batches_warns_if_the_loss_is_not_sliced(caplog: pytest.LogCaptureFixture) -> None:
    """`sliced_loss` raises an error for the same model."""
    import transformers

    config = models.llama(width=16, layers=1).config
    config.pad_token_id = 0
    model = models.shard(transformers.LlamaForSequenceClassification(config))
    with pytest.raises(UnsupportedError, match=r"is not a .*causal language model"):
        infinity.sliced_loss(model, 8)
    assert not caplog.records
    infinity.micro_batches(model, 2)
    assert "head and loss of FSDPLlamaForSequenceClassification" in caplog.text


def test_only_the_norm_after_the_layers_is_sliced() -> None:
    """For example, the inputs of a vision tower's norm have a different number of rows."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)

    model = models.llama(width=16, layers=2)
    before = dict(model.model.named_children())
    for name in before:
        delattr(model.model, name)
    model.model.tower, model.model.first = Tower(), nn.LayerNorm(16)
    for name, module in before.items():
        setattr(model.model, name, module)
    models.shard(model, "fp32")
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: output + model.model.first(torch.ones(3, 16)).sum() * 0
    )
    infinity.micro_batches(model, 4)
    given = batch(model, 0, sequences=4)
    model(input_ids=given, labels=given).loss.backward()
    assert isinstance(model.model.norm.forward, SlicedNorm)
    assert not isinstance(model.model.tower.norm.forward, SlicedNorm)


def test_final_norm_that_mixes_rows_is_not_sliced(caplog: pytest.LogCaptureFixture) -> None:
    """The layers are sliced nevertheless."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / (x.norm(dim=0, keepdim=True) + 1)

    losses = []
    for slices in (0, 4):
        torch.manual_seed(0)
        model = models.llama(width=16, layers=2)
        model.model.norm = Mixing()
        models.shard(model, "fp32")
        if slices:
            infinity.micro_batches(model, slices)
        given = batch(model, 0, sequences=4)
        losses.append(model(input_ids=given, labels=given).loss.item())
        assert model(input_ids=given, labels=given).loss.item() == losses[-1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert caplog.text.count("Mixing is not sliced") == 1


# Memory and traffic #


class Largest(TorchDispatchMode):
    """Dispatch mode that records the number of elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes) if sizes else self.elements
        return result


def largest(slices: int, *, gradients: bool = True) -> int:
    """Return the size of the largest tensor in a pass over 8 sequences of 24 tokens with a vocabulary of 1009."""
    model = models.shard(models.llama(width=16, layers=1, vocabulary=1009))
    if slices:
        infinity.micro_batches(model, slices)
    with Largest() as mode, nullcontext() if gradients else torch.no_grad():
        loss = models.loss_of(model, batch(model, 0, sequences=8))
        if gradients:
            loss.backward()
    return mode.elements


@pytest.mark.parametrize("gradients", [True, False])
def test_logits_of_the_full_batch_never_exist(gradients: bool) -> None:
    """The largest tensor is the logits of one slice or the gathered root FSDP module."""
    tokens, vocabulary = 8 * 24, 1009
    root = 2 * 16 * vocabulary + 16
    assert largest(0, gradients=gradients) == tokens * vocabulary
    assert largest(2, gradients=gradients) == tokens // 2 * vocabulary
    assert largest(8, gradients=gradients) <= max(tokens // 8 * vocabulary, root)


def kept(slices: int, layers: int) -> int:
    """Return the number of bytes that autograd saves in a forward over 8 sequences, without parameters."""
    model = models.shard(models.llama(layers=layers), "fp32")
    if slices:
        infinity.micro_batches(model, slices)
    with torch.no_grad():
        models.loss_of(model, batch(model, 0, sequences=8))  # run the slicing trials first
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        return tensor  # keeps the tensor alive, so that its address is not reused

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = models.loss_of(model, batch(model, 0, sequences=8))
    loss.backward()
    return sum(found.values())


@pytest.mark.parametrize("slices", [1, 2, 8])
def test_autograd_saves_only_module_inputs(slices: int) -> None:
    """With slices, each layer adds one tensor of the full batch; without slices, it adds more than ten."""
    inputs = 8 * 24 * 64 * 4
    assert kept(slices, layers=4) - kept(slices, layers=1) == 3 * inputs
    assert kept(0, layers=4) - kept(0, layers=1) > 30 * inputs


def moved(recipe: Recipe, update_schedule: str, folder: Path) -> tuple[list[int], int]:
    """Return the bytes moved in each steady step and the planned number of bytes."""
    with offloaded(recipe, Paging(host_cache="least", update_schedule=update_schedule), folder) as (model, optimizer):
        train(recipe, model, optimizer, Outcome())
        assert optimizer.update_schedule == update_schedule
        traffic = optimizer.run.plan.traffic
        steady = optimizer.records[4:]
        assert optimizer.run.layout.state_bytes == 14 * optimizer.run.layout.parameters
        total = [record.read_bytes + record.written_bytes for record in steady]
        return total, traffic.read_bytes + traffic.written_bytes


@pytest.mark.parametrize("update_schedule", ["in_backward", pytest.param("in_forward", marks=pytest.mark.wide)])
def test_traffic_does_not_depend_on_the_number_of_slices(update_schedule: str, tmp_path: Path) -> None:
    """A loop over micro-batches multiplies the traffic.

    The exception are gradients stored on NVMe: without accumulation, they fit in bf16.
    """
    planned = {}
    for count in (1, 4, 16):
        recipe = Recipe(model="even", sequences=16, slices=count, steps=10)
        found, planned[count] = moved(recipe, update_schedule, tmp_path)
        assert 0.85 * planned[count] < sum(found) / len(found) < 1.03 * planned[count]  # as in test_traffic.py
    assert planned[4] == planned[16]
    assert planned[1] == planned[4] or (update_schedule == "in_forward" and 0.8 * planned[4] < planned[1] < planned[4])
    _, loop = moved(Recipe(model="even", sequences=4, micro=4, steps=6), "in_forward", tmp_path)
    assert loop > 1.8 * planned[4]


# Errors and further inputs #


def test_batch_size_must_be_divisible_by_the_slices() -> None:
    """The error states both numbers, in training and in evaluation."""
    model = models.build("llama")
    infinity.micro_batches(model, 4)
    with pytest.raises(ConfigError, match=r"batch of size 6, .*4 micro-batches"):
        models.loss_of(model, batch(model, 0, sequences=6))
    with pytest.raises(ConfigError, match=r"batch of size 2, .*4 micro-batches"):
        evaluate(model, 2)
    infinity.micro_batches(model, 3)  # replaces the number
    assert models.loss_of(model, batch(model, 0, sequences=6)).item() > 0


def test_sliced_evaluation_builds_no_graph() -> None:
    """The loss equals the loss with gradients."""
    model = models.build("llama")
    infinity.micro_batches(model, 4)
    tokens = batch(model, 0, sequences=4)
    with torch.no_grad():
        loss = models.loss_of(model, tokens)
    assert not loss.requires_grad
    assert loss.item() == models.loss_of(model, tokens).item()


def test_model_returns_logits_without_labels() -> None:
    """The layers are sliced, but the head is not, because the caller uses the logits."""
    model, plain = models.build("llama"), models.build("llama")
    infinity.micro_batches(model, 2)
    tokens = batch(model, 0, sequences=2)
    found, expected = (m(input_ids=tokens, use_cache=False).logits for m in (model, plain))
    torch.testing.assert_close(found, expected)
    with pytest.raises(UnsupportedError, match="pass use_cache=False"):
        model(input_ids=tokens, use_cache=True)


def test_masks_and_positional_arguments_are_sliced() -> None:
    model, plain = models.build("llama", policy="fp32"), models.build("llama", policy="fp32")
    infinity.micro_batches(model, 4)
    tokens = batch(model, 0, sequences=4)
    mask = torch.ones_like(tokens)
    for row in range(4):
        mask[row, 20 - row :] = 0
    labels = tokens.where(mask > 0, -100)
    expected = plain(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False).loss
    found = model(tokens, mask, None, None, None, labels)
    assert found.logits is None
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_micro_batches_may_be_called_after_offload(tmp_path: Path) -> None:
    sliced, plain = Recipe(**SLICED), Recipe(sequences=4)
    outcome = Outcome()
    with offloaded(plain, Paging(host_cache="least"), tmp_path) as (model, optimizer):
        infinity.micro_batches(model, 4)
        train(plain, model, optimizer, outcome)
    assert outcome.losses == in_memory(sliced).losses


class Pair(nn.Module):
    """A layer with several outputs, one of which is None."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, *, scale: int) -> dict[str, Any]:
        return {"twice": x * self.weight * scale, "parts": (x + 1, None), "turned": x.T * scale}


def sharded(layer: nn.Module) -> nn.Sequential:
    """Return a sharded model that consists of one layer."""
    return fully_shard(nn.Sequential(fully_shard(layer, mesh=infinity.mesh("cpu"))), mesh=infinity.mesh("cpu"))


def test_nested_outputs_are_concatenated() -> None:
    """Each output is concatenated along its own batch dimension."""
    model = sharded(Pair())
    infinity.micro_batches(model, 2)
    model.forward = lambda x: model[0](x, scale=2)
    x = torch.arange(12.0).view(4, 3)
    found = model(x)
    assert torch.equal(found["twice"], 2 * x)
    assert torch.equal(found["parts"][0], x + 1)
    assert found["parts"][1] is None
    assert torch.equal(found["turned"], 2 * x.T)
    found["twice"].sum().backward()
    assert model[0].weight.grad.to_local().tolist() == [2 * column for column in x.sum(0).tolist()]


def mlp() -> nn.Module:
    """Return a layer whose dimensions are all independent except the last one."""
    return nn.Sequential(nn.Linear(12, 12), nn.GELU())


def encoder_layer(**settings: Any) -> nn.Module:
    """Return PyTorch's encoder layer."""
    return nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, **settings)


class Encoder(nn.Module):
    """A user-defined layer around PyTorch's, without its `batch_first` attribute."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.inner = encoder_layer(**settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Attention(nn.Module):
    """User-defined attention with the sequence dimension first, optionally causal."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.query, self.causal = nn.Linear(12, 12), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 1)
        return nn.functional.scaled_dot_product_attention(self.query(y), y, y, is_causal=self.causal).transpose(0, 1)


class Masked(nn.Module):
    """Attention with a mask for positions, or for rows and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, unused: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(self.query(x), x, x, attn_mask=mask)


class Returning(nn.Module):
    """A layer that applies a function to its output."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.up, self.returned = nn.Linear(12, 12), returned

    def forward(self, x: Any) -> Any:
        return self.returned(self.up(x if isinstance(x, torch.Tensor) else x.value))


@dataclass
class Bundle:
    """Dataclass that a layer may accept and return."""

    value: torch.Tensor
    name: str = "bundle"


class Recurrent(nn.Module):
    """An LSTM that returns its outputs and final state."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 12, **settings)

    def forward(self, x: torch.Tensor) -> Any:
        return self.lstm(x)


def within_capacity(y: torch.Tensor, factor: float) -> torch.Tensor:
    """Return 1 for tokens that fit in the capacity of the first of four experts that they select, else 0."""
    chosen = nn.functional.one_hot(y[..., :4].argmax(-1).flatten(), 4)
    before = (chosen.cumsum(0) * chosen).sum(1)
    return (before <= factor * len(chosen) / 4).view(*y.shape[:-1], 1)


X = (6, 4, 12)
SQUARE = (4, 4, 12)


def given(shape: tuple[int, ...] = X, **others: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the arguments of a layer."""
    torch.manual_seed(1)
    return torch.randn(shape), others


def causal(size: int) -> torch.Tensor:
    """Return a causal mask."""
    return torch.triu(torch.full((size, size), float("-inf")), diagonal=1)


def padding(rows: int, columns: int) -> torch.Tensor:
    """Return a padding mask."""
    return torch.arange(columns).expand(rows, columns) > torch.arange(rows).unsqueeze(1) % 3 + 1


EXACT: dict[str, tuple[Any, Any, Any, int]] = {
    "rows": (mlp, None, given((4, 12)), 2),
    "any dimension, where rows are independent": (mlp, None, given(), 2),
    "TransformerEncoderLayer (S, B, D), S == B": (encoder_layer, None, given(SQUARE), 4),
    "TransformerEncoderLayer (B, S, D)": (lambda: encoder_layer(batch_first=True), None, given(), 3),
    "src_mask, S == B": (encoder_layer, None, given(SQUARE, src_mask=causal(4), is_causal=True), 2),
    "both masks": (
        encoder_layer, None, given(src_mask=causal(6), src_key_padding_mask=padding(4, 6).float() * -9), 2,
    ),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(12, 2, 16, dropout=0.0), None, given(memory=torch.randn(5, 4, 12)), 2,
    ),
    "a user's layer with batch_dim": (Encoder, 1, given(), 2),
    "a user's layer, B first": (lambda: Encoder(batch_first=True), None, given(), 2),
    "attention without a flag": (Attention, 1, given(), 4),
    "a mask over rows and positions": (Masked, None, given((4, 6, 12), mask=~padding(4, 6).unsqueeze(1)), 2),
    "a mask over positions, S == B": (Masked, None, given(SQUARE, mask=causal(4)), 2),
    "an argument that is not used": (Masked, None, given(SQUARE, mask=causal(4), unused=torch.zeros(4)), 2),
    "a mask of two rows, batch_dim by name": (Masked, {"x": 0, "mask": None}, given((2, 2, 12), mask=causal(2)), 2),
    "LSTM (S, B, D), with its state": (lambda: nn.LSTM(12, 12), None, given(), 2),
    "a layer around an LSTM": (lambda: Recurrent(batch_first=True), None, given(), 3),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(12, 2), None,
        (given()[0], {"key": given()[0], "value": given()[0], "need_weights": False}), 2,
    ),
    "a dataclass": (lambda: Returning(Bundle), None, (Bundle(given()[0]), {}), 3),
    "flattened rows and positions": (lambda: Returning(lambda y: (y, y.flatten(0, 1))), None, given(), 2),
    "BatchNorm in evaluation": (lambda: nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(4)).eval(), None, given(), 2),
}  # fmt: skip
"""Layer, batch_dim, arguments and number of slices, by description."""


def outputs_and_gradients(layer: nn.Module, arguments: tuple[Any, dict[str, Any]]) -> list[torch.Tensor]:
    """Return the outputs and the gradients of the first argument and of all parameters."""
    x, others = arguments
    tensor = (x.value if isinstance(x, Bundle) else x).clone().requires_grad_()
    returned = layer(Bundle(tensor) if isinstance(x, Bundle) else tensor, **others)
    outputs = tree_leaves(vars(returned) if isinstance(returned, Bundle) else returned)
    outputs = [value for value in outputs if isinstance(value, torch.Tensor)]
    sum((value * torch.arange(value.numel()).view(value.shape).sin()).sum() for value in outputs).backward()
    return [*outputs, tensor.grad, *(local(param.grad) for param in layer.parameters())]


@pytest.mark.parametrize("name", EXACT)
def test_sliced_layers_match_the_full_batch(name: str) -> None:
    """Matrix products over fewer rows may round differently."""
    make, batch_dim, arguments, count = EXACT[name]
    found = []
    for slices in (0, count):
        torch.manual_seed(0)
        model = sharded(make())
        if slices:
            infinity.micro_batches(model, slices, batch_dim=batch_dim)
        found.append(outputs_and_gradients(model[0], arguments))
    assert len(found[0]) == len(found[1])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


NOT_SLICED: dict[str, tuple[Any, Any, Any, str]] = {
    "a user's layer with sequences first": (Encoder, None, given(), r"Encoder along dimension 0.*batch_dim=1"),
    "the same with S == B": (Encoder, None, given(SQUARE), r"depend on each other.*batch_dim=1"),
    "attention without a flag": (Attention, None, given(), r"Attention along dimension 0"),
    "causal attention": (lambda: Attention(causal=True), None, given(), r"along dimension 0.*batch_dim=1"),
    "torch's layer, wrong batch_dim": (encoder_layer, 0, given(), r"TransformerEncoderLayer along dimension 0"),
    "BatchNorm": (lambda: nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(4)), None, given(), r"BatchNorm in training"),
    "centred over the batch": (lambda: Returning(lambda y: y - y.mean(0)), None, given(), "depend on each other"),
    "a mask of two rows": (Masked, None, given((2, 2, 12), mask=causal(2)), r"how to slice mask .*batch_dim=\{"),
    "a scale of all rows": (lambda: Returning(lambda y: y / y.detach().abs().amax()), None, given(), "depend on each"),
    "steps of all rows": (
        lambda: Returning(lambda y: y + torch.round(y * 10 / y.abs().max().item())), None, given(), "scales, ranks",
    ),
    "a capacity": (lambda: Returning(lambda y: y * within_capacity(y, 1.25)), None, given((4, 64, 12)), "capacities"),
    "a small part with a capacity": (
        lambda: Returning(lambda y: y + 0.1 * y * within_capacity(y, 2.0)), None, given((4, 64, 12)), "capacities",
    ),
    "the best tokens of all rows": (
        lambda: Returning(lambda y: y * (y[..., :1] >= y[..., 0].flatten().topk(3).values[-1])), None, given(),
        "depend on each other",
    ),
    "ranks of rows": (
        lambda: Returning(lambda y: y * y.sum((1, 2)).argsort().view(-1, 1, 1)), None, given(), "ranks or capacities",
    ),
    "scaled by the number of rows": (lambda: Returning(lambda y: y * len(y)), None, given(), r"x\.shape\[0\]"),
    "divided by it, with dropout": (
        lambda: nn.Sequential(nn.Dropout(0.5), Returning(lambda y: y / y.shape[0])), None, given(), r"x\.shape\[0\]",
    ),
    "scaled by indices of rows": (
        lambda: Returning(lambda y: y * torch.arange(len(y)).view(-1, 1, 1)), None, given(), r"row indices",
    ),
    "a sum": (lambda: Returning(lambda y: y.sum()), None, given(), "a scalar.*return one row per sequence"),
    "an auxiliary loss": (lambda: Returning(lambda y: (y, y.mean())), None, given(), "a scalar"),
    "a number of rows": (lambda: Returning(lambda y: (y, len(y))), None, given(), "returns a int"),
    "packed": (
        lambda: nn.LSTM(12, 12), None,
        (nn.utils.rnn.pack_padded_sequence(torch.randn(6, 4, 12), torch.tensor([6, 5, 3, 2])), {}), "PackedSequence",
    ),
    "an object with tensors": (Masked, None, given(mask=SimpleNamespace(mask=causal(6))), "mask of type Simple"),
    "an unknown name": (Encoder, {"y": 1}, given(), r"batch_dim .* y, but Encoder"),
    "an unknown dimension": (Encoder, 3, given(), r"batch_dim=3 .* x of Encoder"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_SLICED)
def test_layers_that_slicing_would_change_raise(name: str) -> None:
    """The first forward raises an error that states a remedy."""
    make, batch_dim, (x, others), words = NOT_SLICED[name]
    model = sharded(make())
    infinity.micro_batches(model, 2, batch_dim=batch_dim)
    with pytest.raises((UnsupportedError, ConfigError), match=words):
        model[0](x, **others)
    with pytest.raises((UnsupportedError, ConfigError), match=words), torch.no_grad():
        model[0](x, **others)


@pytest.mark.parametrize("name", ["a scale of all rows", "scaled by the number of rows", "scaled by indices of rows"])
def test_layers_that_slicing_would_change_raise_in_bf16(name: str) -> None:
    """The tolerance is larger in bf16."""
    make, _, (x, _), words = NOT_SLICED[name]
    model = sharded(make().bfloat16())
    infinity.micro_batches(model, 2)
    with pytest.raises(UnsupportedError, match=words):
        model[0](x.bfloat16())


class Noisy(nn.Module):
    """A layer that draws random numbers in both modes, or that supports only training."""

    def __init__(self, evaluated: bool) -> None:
        super().__init__()
        self.up, self.evaluated = nn.Linear(12, 12), evaluated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and not self.evaluated:
            raise RuntimeError("only for training")
        return self.up(x) + torch.rand_like(x)


@pytest.mark.parametrize("evaluated", [True, False])
def test_random_numbers_do_not_count_as_row_dependence(evaluated: bool) -> None:
    """The modules are in training mode afterwards."""
    model = sharded(Noisy(evaluated))
    infinity.micro_batches(model, 2)
    assert model[0](given()[0]).shape == X
    assert all(module.training for module in model.modules())


class Modes(nn.Module):
    """A layer that mixes rows for one value of an argument."""

    def __init__(self, mixing: Any) -> None:
        super().__init__()
        self.up, self.mixing = nn.Linear(12, 12), mixing

    def forward(self, x: torch.Tensor, mode: Any = None) -> torch.Tensor:
        y = self.up(x)
        mode = getattr(mode, "mode", mode)
        return y - y.mean(0) if type(mode) is type(self.mixing) and mode == self.mixing else y


@pytest.mark.parametrize(
    ("good", "mixing"),
    [(0, 1), (0.5, 1.5), ("none", "batch"), (False, True), (1, True), (1, 1.0), (None, 0), (3, None)],
)
def test_new_argument_values_are_tried_again(good: Any, mixing: Any) -> None:
    """The result for known values is cached."""
    model = sharded(Modes(mixing))
    infinity.micro_batches(model, 2)
    for _ in range(2):
        model[0](given()[0], good)
    assert len(model[0].forward._finder._found) == 1
    with pytest.raises(UnsupportedError, match="depend on each other"):
        model[0](given()[0], mixing)


def test_trials_are_repeated_once_the_cache_is_full(caplog: pytest.LogCaptureFixture) -> None:
    """The number of cached calls is limited, for example for arguments that count steps."""
    model = sharded(Modes(70))
    infinity.micro_batches(model, 2)
    for step in range(70):
        model[0](given()[0], step)
    assert len(model[0].forward._finder._found) == 64
    assert sum("micro_batches repeats its trials" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(UnsupportedError, match="depend on each other"):
        model[0](given()[0], 70)


def test_calls_with_mutable_objects_are_not_cached() -> None:
    model = sharded(Modes("batch"))
    infinity.micro_batches(model, 2)
    settings = SimpleNamespace(mode="none")
    model[0](given()[0], settings)
    settings.mode = "batch"
    with pytest.raises(UnsupportedError, match="depend on each other"):
        model[0](given()[0], settings)


def test_layers_with_integer_inputs_are_checked() -> None:
    """Such inputs have no gradients."""

    class Words(nn.Module):
        def __init__(self, mixed: bool) -> None:
            super().__init__()
            self.table, self.mixed = nn.Embedding(9, 12), mixed

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.table(tokens)
            return x + x.mean(0) if self.mixed else x

    tokens = torch.arange(12).view(4, 3) % 9
    good = sharded(Words(mixed=False))
    expected = good[0](tokens)
    infinity.micro_batches(good, 2)
    assert torch.equal(good[0](tokens), expected)
    bad = sharded(Words(mixed=True))
    infinity.micro_batches(bad, 2)
    with pytest.raises(UnsupportedError, match="depend on each other"):
        bad[0](tokens)


def test_trials_preserve_generator_and_buffers() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(12, 12)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return nn.functional.dropout(self.up(x), 0.5)

    outputs = []
    for tried in (True, False):
        torch.manual_seed(0)
        model = sharded(Counting())
        infinity.micro_batches(model, 2)
        if not tried:
            model[0].forward._finder.find = lambda *_: Slicing((0,), (0,))
        with torch.no_grad():
            outputs.append(model[0](torch.ones(4, 12)))
        assert model[0].calls == 2
    assert torch.equal(*outputs)


def test_trials_are_separate_for_training_and_evaluation() -> None:
    """For example, BatchNorm mixes rows only in training."""
    model = sharded(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(4))).eval()
    infinity.micro_batches(model, 2)
    model[0](torch.randn(X))
    model.train()
    with pytest.raises(UnsupportedError, match="BatchNorm in training"):
        model[0](torch.randn(X))


def test_router_loss_raises() -> None:
    """It is not a sum over slices."""
    model = of_family("MixtralConfig", output_router_logits=True)
    infinity.micro_batches(model, 2)
    with pytest.raises(UnsupportedError, match="output_router_logits=False"):
        models.loss_of(model, batch(model, 0))


def test_unsupported_models_raise() -> None:
    mesh = infinity.mesh("cpu")
    with pytest.raises(ConfigError, match="got 0"):
        infinity.micro_batches(models.build("toy"), 0)
    with pytest.raises(UnsupportedError, match="call fully_shard on its layers"):
        infinity.micro_batches(nn.Linear(2, 2), 2)
    with pytest.raises(UnsupportedError, match="call fully_shard on its layers"):
        infinity.micro_batches(fully_shard(nn.Linear(2, 2), mesh=mesh), 2)
    with pytest.raises(UnsupportedError, match=r"^model .*activation checkpointing"):
        infinity.micro_batches(models.build("llama", checkpointing=True), 2)
    with pytest.raises(UnsupportedError, match=r"0 .*activation checkpointing"):
        infinity.micro_batches(sharded(checkpoint_wrapper(Pair())), 2)
    with pytest.raises(UnsupportedError, match=r"0 contains 0\.0"):
        infinity.micro_batches(sharded(nn.Sequential(fully_shard(Pair(), mesh=mesh))), 2)
    head = models.llama()
    fully_shard(head.lm_head, mesh=mesh)
    with pytest.raises(UnsupportedError, match=r"root FSDP module, .*lm_head"):
        infinity.micro_batches(models.shard(head), 2)
