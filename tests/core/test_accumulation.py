"""Layer-major accumulation: any number of slices moves the same bytes, and adds up what a loop over them adds up."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import core_models
import pytest
import torch
from core_ranks import RankPool
from core_train import Outcome, Paging, Recipe, batch, compare, evaluate, in_memory, local, offloaded, train, variants
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import infinity
from infinity.errors import ConfigError, UnsupportedError

LEAST = {"least": Paging(arena="least")}
PLACEMENTS = {
    placement: Paging(arena="least", placement=placement)
    for placement in ("in_backward", "in_forward", "after_backward")
}
SLICED = {"sequences": 4, "slices": 4, "steps": 6}
ONE_RANK = {
    **variants(
        {
            "llama": Recipe(**SLICED),
            "gpt2": Recipe(model="gpt2", sequences=4, slices=2, steps=6),  # dropout is on
            "tied": Recipe(model="tied", **SLICED),
        },
        PLACEMENTS,
    ),
    **variants(
        {
            "fp32": Recipe(policy="fp32", **SLICED),
            "clip": Recipe(clip=0.5, **SLICED),
            "eval-between": Recipe(evaluate=True, **SLICED),
            "loop": Recipe(micro=2, **SLICED),
            "frozen": Recipe(model="frozen", **SLICED),
            "toy": Recipe(model="toy", **SLICED),
            "repeated": Recipe(model="repeated", **SLICED),
            "spare": Recipe(model="spare", **SLICED),
        },
        LEAST,
    ),
}
TWO_RANKS = {
    **variants({"llama": Recipe(**SLICED)}, PLACEMENTS),
    **variants(
        {
            "gpt2": Recipe(model="gpt2", sequences=4, slices=2, steps=4),
            "tied": Recipe(model="tied", **SLICED),
            "clip": Recipe(clip=0.5, **SLICED),
        },
        LEAST,
    ),
}


@pytest.mark.parametrize(("recipe", "paging"), ONE_RANK.values(), ids=ONE_RANK.keys())
def test_paging_changes_no_bit(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """Losses, norms, parameters and moments equal those of the same slices in memory."""
    assert compare(recipe, paging, str(tmp_path)) == []


@pytest.mark.parametrize(("recipe", "paging"), TWO_RANKS.values(), ids=TWO_RANKS.keys())
def test_paging_changes_no_bit_on_two_ranks(recipe: Recipe, paging: Paging, tmp_path: Path, pair: RankPool) -> None:
    """The same over gloo."""
    assert pair.run(compare, recipe, paging, str(tmp_path)) == [[], []]


# The order of summation #


@pytest.mark.parametrize("model", ["llama", "gpt2", "tied", "toy"])
@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_one_slice_is_the_whole_batch_to_the_bit(model: str, policy: str) -> None:
    """Nothing but recomputation, with the same random numbers."""
    whole = in_memory(Recipe(model=model, policy=policy, steps=4))
    sliced = in_memory(Recipe(model=model, policy=policy, steps=4, slices=1))
    assert sliced.losses == whole.losses
    assert all(
        torch.equal(value, sliced.state[name][kind])
        for name, states in whole.state.items()
        for kind, value in states.items()
    )


def gradients(name: str, policy: str, count: int, how: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and local gradients of a batch of 8 sequences, of which some labels are ignored.

    Args:
        how: ``sliced``, ``whole``, a ``loop`` that reduces once, or one that reduces ``each`` time.
    """
    model = core_models.build(name, policy=policy).eval()  # without dropout, as its order is another one
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
    return total, {name: local(param.grad) for name, param in model.named_parameters()}


def compare_with_a_loop(name: str, policy: str, count: int, how: str) -> None:
    """Check that no bit differs where slices are what is added up, and little where FSDP2 sees the whole batch."""
    loss, found = gradients(name, policy, count, "sliced")
    expected_loss, expected = gradients(name, policy, count, how)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    differing = {name for name, value in expected.items() if not torch.equal(value, found[name])}
    assert differing <= {name for name in expected if name.split(".")[1] in WHOLE}
    for name in differing:
        distance = torch.linalg.vector_norm(found[name] - expected[name])
        assert distance < (1e-6 if policy == "fp32" else 2e-2) * torch.linalg.vector_norm(expected[name])


WHOLE = {"embed_tokens", "norm", "wte", "wpe", "ln_f"}
"""Embeddings and last norm: the root runs them on the whole batch."""


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2"])
@pytest.mark.parametrize("policy", ["bf16", "fp32"])
@pytest.mark.parametrize("how", ["loop", "each"])
def test_layers_and_head_add_up_as_a_loop_does(name: str, policy: str, how: str) -> None:
    """The bits of FSDP2's own accumulation, in the reduce dtype; on one rank also where it reduces each time."""
    compare_with_a_loop(name, policy, 8, how)


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_layers_and_head_add_up_as_a_loop_does_on_two_ranks(policy: str, pair: RankPool) -> None:
    """Slices are added up before ranks are."""
    pair.run(compare_with_a_loop, "llama", policy, 4, "loop")


@pytest.mark.parametrize("count", [2, 8])
def test_slices_are_close_to_the_whole_batch(count: int) -> None:
    """In fp32 what differs is the order in which rows of the batch are added up."""
    (loss, found), (whole, expected) = (
        gradients("llama", "fp32", count, "sliced"),
        gradients("llama", "fp32", 1, "whole"),
    )
    assert loss == pytest.approx(whole, rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7)


SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "Gemma2Config": {**SHAPE, "num_key_value_heads": 2, "head_dim": 16},  # something is done to the logits
    "MixtralConfig": {**SHAPE, "num_key_value_heads": 2, "num_local_experts": 4},  # experts that some slices do not use
    "OPTConfig": {
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
    },
    "MambaConfig": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},  # no attention
}


def of_family(config: str, **values: Any) -> nn.Module:
    """Return a sharded causal language model of another architecture, without dropout."""
    import transformers

    torch.manual_seed(0)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    made = getattr(transformers, config)(vocab_size=300, **tokens, **FAMILIES[config], **values)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    for layer in layers_of(model):
        fully_shard(layer, mesh=infinity.mesh("cpu"), mp_policy=core_models.POLICIES["fp32"])
    return fully_shard(model, mesh=infinity.mesh("cpu"), mp_policy=core_models.POLICIES["fp32"])


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the layers of a model of transformers."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=lambda m: sum(1 for _ in m.modules()))


@pytest.mark.parametrize("config", FAMILIES)
def test_other_families_of_models(config: str) -> None:
    """Head and loss are the model's own, whatever it does between them."""
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


# Memory and traffic #


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes) if sizes else self.elements
        return result


def largest(slices: int, *, gradients: bool = True) -> int:
    """Return the largest tensor of a pass over 8 sequences of 24 tokens, with 1009 in the vocabulary."""
    model = core_models.shard(core_models.llama(width=16, layers=1, vocabulary=1009))
    if slices:
        infinity.micro_batches(model, slices)
    with Largest() as mode, nullcontext() if gradients else torch.no_grad():
        loss = core_models.loss_of(model, batch(model, 0, sequences=8))
        if gradients:
            loss.backward()
    return mode.elements


@pytest.mark.parametrize("gradients", [True, False])
def test_logits_of_the_whole_batch_never_exist(gradients: bool) -> None:
    """Forward and backward; the largest tensor is one slice's logits, or the gathered unit of the head."""
    tokens, vocabulary = 8 * 24, 1009
    root = 2 * 16 * vocabulary + 16
    assert largest(0, gradients=gradients) == tokens * vocabulary
    assert largest(2, gradients=gradients) == tokens // 2 * vocabulary
    assert largest(8, gradients=gradients) <= max(tokens // 8 * vocabulary, root)


def kept(slices: int, layers: int) -> int:
    """Return the bytes that autograd keeps after a forward over 8 sequences, without parameters."""
    model = core_models.shard(core_models.llama(layers=layers), "fp32")
    if slices:
        infinity.micro_batches(model, slices)
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        return tensor  # so it stays alive, and no other has its place

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = core_models.loss_of(model, batch(model, 0, sequences=8))
    loss.backward()
    return sum(found.values())


@pytest.mark.parametrize("slices", [1, 2, 8])
def test_only_inputs_of_units_are_kept(slices: int) -> None:
    """A layer more is one tensor of the whole batch more, whatever the number of slices; without, more than ten."""
    inputs = 8 * 24 * 64 * 4
    assert kept(slices, layers=4) - kept(slices, layers=1) == 3 * inputs
    assert kept(0, layers=4) - kept(0, layers=1) > 30 * inputs


def moved(recipe: Recipe, placement: str, folder: Path) -> tuple[list[int], int]:
    """Return the bytes that steady steps read and wrote, and how many were planned."""
    with offloaded(recipe, Paging(arena="least", placement=placement), folder) as (model, optimizer):
        train(recipe, model, optimizer, Outcome())
        assert optimizer.update_placement == placement
        traffic = optimizer.plan.traffic
        steady = optimizer.records[4:]
        assert optimizer.layout.state_bytes == 14 * optimizer.layout.parameters
        total = [record.read_bytes + record.written_bytes for record in steady]
        return total, traffic.read_bytes + traffic.written_bytes


@pytest.mark.parametrize("placement", ["in_backward", "in_forward"])
def test_bytes_per_step_do_not_depend_on_the_number_of_slices(placement: str, tmp_path: Path) -> None:
    """1, 4 or 16 micro-batches: the plan is one and the same, and so are the bytes; a loop multiplies them.

    Only gradients that wait on NVMe are smaller where nothing is added up: they fit into bf16.
    """
    planned = {}
    for count in (1, 4, 16):
        recipe = Recipe(model="even", sequences=16, slices=count, steps=16)
        found, planned[count] = moved(recipe, placement, tmp_path)
        assert 0.85 * planned[count] < sum(found) / len(found) < 1.03 * planned[count]  # as in test_traffic.py
    assert planned[4] == planned[16]
    assert planned[1] == planned[4] or (placement == "in_forward" and 0.8 * planned[4] < planned[1] < planned[4])
    _, loop = moved(Recipe(model="even", sequences=4, micro=4, steps=6), "in_forward", tmp_path)
    assert loop > 1.8 * planned[4]


# What is refused, and what else works #


def test_batches_that_cannot_be_shared_equally() -> None:
    """The error names both numbers, in training and in evaluation."""
    model = core_models.build("llama")
    infinity.micro_batches(model, 4)
    with pytest.raises(ConfigError, match="a batch of 6, which 4 micro-batches"):
        core_models.loss_of(model, batch(model, 0, sequences=6))
    with pytest.raises(ConfigError, match="a batch of 2, which 4 micro-batches"):
        evaluate(model, 2)


def test_evaluation_is_sliced_and_keeps_nothing() -> None:
    """No graph; the same loss as with gradients."""
    model = core_models.build("llama")
    infinity.micro_batches(model, 4)
    tokens = batch(model, 0, sequences=4)
    with torch.no_grad():
        loss = core_models.loss_of(model, tokens)
    assert not loss.requires_grad
    assert loss.item() == core_models.loss_of(model, tokens).item()


def test_without_labels_there_are_logits() -> None:
    """The layers are sliced, the head is not: it is for the caller to say what becomes of logits."""
    model, plain = core_models.build("llama"), core_models.build("llama")
    infinity.micro_batches(model, 2)
    tokens = batch(model, 0, sequences=2)
    found, expected = (m(input_ids=tokens, use_cache=False).logits for m in (model, plain))
    torch.testing.assert_close(found, expected)
    with pytest.raises(UnsupportedError, match="pass use_cache=False"):
        model(input_ids=tokens, use_cache=True)


def test_masks_and_positional_arguments() -> None:
    """A mask with a row per sequence is sliced; labels may come by position."""
    model, plain = core_models.build("llama", policy="fp32"), core_models.build("llama", policy="fp32")
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


def test_it_may_be_called_after_offload(tmp_path: Path) -> None:
    """And changes what the next step does."""
    sliced, plain = Recipe(**SLICED), Recipe(sequences=4, steps=6)
    outcome = Outcome()
    with offloaded(plain, Paging(arena="least"), tmp_path) as (model, optimizer):
        infinity.micro_batches(model, 4)
        train(plain, model, optimizer, outcome)
    assert outcome.losses == in_memory(sliced).losses


def test_a_later_call_changes_the_number() -> None:
    """And does not slice slices."""
    model = core_models.build("llama")
    infinity.micro_batches(model, 2)
    infinity.micro_batches(model, 3)
    assert core_models.loss_of(model, batch(model, 0, sequences=3)).item() > 0


class Pair(nn.Module):
    """Several outputs, one of them none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, *, scale: int) -> dict[str, Any]:
        return {"twice": x * self.weight * scale, "parts": (x + 1, None), "rows": torch.tensor([len(x)])}


class Scalar(Pair):
    """A layer that adds up over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


def sharded(layer: nn.Module) -> nn.Sequential:
    """Return a model of one layer."""
    return fully_shard(nn.Sequential(fully_shard(layer, mesh=infinity.mesh("cpu"))), mesh=infinity.mesh("cpu"))


def test_outputs_of_any_structure_are_joined() -> None:
    """Along the first dimension."""
    model = sharded(Pair())
    infinity.micro_batches(model, 2)
    model.forward = lambda x: model[0](x, scale=2)
    x = torch.arange(12.0).view(4, 3)
    found = model(x)
    assert torch.equal(found["twice"], 2 * x)
    assert torch.equal(found["parts"][0], x + 1)
    assert found["parts"][1] is None
    assert found["rows"].tolist() == [2, 2]
    found["twice"].sum().backward()
    assert model[0].weight.grad.to_local().tolist() == [2 * column for column in x.sum(0).tolist()]


def test_a_scalar_output_is_refused() -> None:
    """Nobody knows whether it is a sum or a mean."""
    model = sharded(Scalar())
    infinity.micro_batches(model, 2)
    with pytest.raises(UnsupportedError, match="return one value per sequence"):
        model(torch.ones(2, 3))


def test_the_loss_of_routers_is_refused() -> None:
    """It is no sum over slices."""
    model = of_family("MixtralConfig", output_router_logits=True)
    infinity.micro_batches(model, 2)
    with pytest.raises(UnsupportedError, match="output_router_logits=False"):
        core_models.loss_of(model, batch(model, 0))


def test_models_that_cannot_be_sliced_are_refused() -> None:
    """Each with the reason."""
    mesh = infinity.mesh("cpu")
    with pytest.raises(ConfigError, match="got 0"):
        infinity.micro_batches(core_models.build("toy"), 0)
    with pytest.raises(UnsupportedError, match="call fully_shard on its layers and on itself"):
        infinity.micro_batches(nn.Linear(2, 2), 2)
    with pytest.raises(UnsupportedError, match="call fully_shard on its layers and on itself"):
        infinity.micro_batches(fully_shard(nn.Linear(2, 2), mesh=mesh), 2)
    with pytest.raises(UnsupportedError, match="recomputes its activations already"):
        infinity.micro_batches(core_models.build("llama", checkpointing=True), 2)
    with pytest.raises(UnsupportedError, match="0 recomputes its activations already"):
        infinity.micro_batches(sharded(checkpoint_wrapper(Pair())), 2)
    with pytest.raises(UnsupportedError, match=r"0 contains 0\.0"):
        infinity.micro_batches(sharded(nn.Sequential(fully_shard(Pair(), mesh=mesh))), 2)
    head = core_models.llama()
    fully_shard(head.lm_head, mesh=mesh)
    with pytest.raises(UnsupportedError, match="lm_head is a unit"):
        infinity.micro_batches(core_models.shard(head), 2)
