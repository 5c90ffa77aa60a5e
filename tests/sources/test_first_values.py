"""First values and buffers of models on the meta device: those of the same model in memory, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import infinity
from infinity.errors import UnsupportedError
from support import models
from support.train import Paging, settings, whole
from support.values import unlike
from support.wide_models import ROWS, build

HOST = 8 << 20
FAMILIES = ("GPTNeo", "Gemma3", "DeepseekV3", "DistilBert", "Swin", "ResNet", "Wav2Vec2")


def offloaded(
    model: nn.Module, folder: Path, units: tuple[nn.Module, ...] = (), **more: Any
) -> infinity.PagedOptimizer:
    """Shard a model and offload it."""
    folder.mkdir(exist_ok=True)
    for module in (*units, model):
        fully_shard(module, mesh=infinity.mesh("cpu"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), fused=True)
    return infinity.offload(model, optimizer, settings(folder, Paging(), HOST), **more)


def values(
    make: Callable[[], nn.Module], folder: Path, units: Callable[[Any], Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Return whole parameters and buffers of a model that was offloaded from the meta device."""
    with torch.device("meta"):
        model = make()
    with offloaded(model, folder, tuple(units(model)) if units else (), **more):
        named = (*model.named_parameters(), *model.named_buffers())
        return {name: whole(value) for name, value in named}


def compare(make: Callable[[], nn.Module], found: dict[str, torch.Tensor]) -> None:
    """Check parameters by distribution and buffers by their bits against a model in memory."""
    torch.manual_seed(1)
    expected = make()
    for name, param in expected.named_parameters():
        assert not (words := unlike(param.detach(), found.pop(name))), f"{name}: {words}"
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffer, value := found.pop(name)), name
        assert buffer.dtype == value.dtype, name
    assert not found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_begins_as_in_memory(family: str, tmp_path: Path) -> None:
    """Masks, positions, rotary frequencies; statistics of norms; experts; relative positions; weight norms."""
    row = next(row for row in ROWS if row.name == family)

    def make() -> nn.Module:
        model = build(row)
        # Wav2Vec2 makes a parameter beside the device that it is built on.
        return model.to("meta") if any(param.is_meta for param in model.parameters()) else model

    compare(make, values(make, tmp_path))


# --- buffers ---------------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """Buffers of all kinds of dtype, which only the constructor sets."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Linear(config.width, config.width)
        self.register_buffer("ids", torch.arange(config.width).expand(1, -1), persistent=False)
        self.register_buffer("mask", torch.ones(config.width, config.width, dtype=torch.bool).tril())
        angles = torch.outer(torch.arange(config.width), torch.linspace(1.0, 0.1, 4))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("none", None)


class Kept(nn.Module):
    """A model that keeps its config, with a scale that only its constructor sets."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.positions = Positions(config)
        self.scale = nn.Parameter(torch.full((3,), 2.5))


class Reset(Positions):
    """Sets its buffers again, some by new tensors."""

    def reset_parameters(self) -> None:
        fresh = Positions(SimpleNamespace(width=self.weight.in_features))
        self.ids.copy_(fresh.ids)
        self.mask = fresh.mask
        self.turns.copy_(fresh.turns)
        self.count.zero_()


def test_buffers_of_every_dtype_are_computed(tmp_path: Path) -> None:
    """By building the model again from the config that it keeps, or by its own function: bit for bit, not zeros."""
    config = SimpleNamespace(width=8)
    compare(lambda: Kept(config), values(lambda: Kept(config), tmp_path / "kept"))
    compare(lambda: Reset(config), values(lambda: Reset(config), tmp_path / "reset"))


def test_buffers_that_nothing_computes_are_named(tmp_path: Path) -> None:
    """Of whatever dtype; and `init` may set them."""
    config = SimpleNamespace(width=8)
    with pytest.raises(UnsupportedError, match=r"buffers ids, mask, turns, count are .*init=function"):
        values(lambda: Positions(config), tmp_path / "a")

    def init(module: nn.Module) -> None:
        if isinstance(module, Positions):
            for key, buffer in Positions(config).named_buffers():
                getattr(module, key).copy_(buffer)

    compare(lambda: Positions(config), values(lambda: Positions(config), tmp_path / "b", init=init))


class Turning(nn.Module):
    """Keeps tensors as plain attributes, of which only one is another name of a buffer."""

    def __init__(self, *, plain: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("ids", torch.zeros(8))
        self.same = self.ids
        if plain:
            self.turns = torch.arange(8.0)
            self.tables = {"a": [torch.ones(2), 3]}

    def reset_parameters(self) -> None:
        self.ids.copy_(torch.arange(8.0))


def test_tensors_that_are_no_buffers_are_named(tmp_path: Path) -> None:
    """They would stay on the meta device until a forward fails; another name of a buffer stays one."""
    with pytest.raises(UnsupportedError, match=r"0\.turns, 0\.tables\['a'\]\[0\]: .*register_buffer"):
        values(lambda: nn.Sequential(Turning()), tmp_path / "a")

    with torch.device("meta"):
        model = Turning(plain=False)
    with offloaded(model, tmp_path / "b"):
        assert model.same is model.ids
        assert model.same.tolist() == list(range(8))

    def init(module: nn.Module) -> None:
        if isinstance(module, Turning):
            module.turns, module.tables = torch.linspace(1.0, 2.0, 2), {}

    with torch.device("meta"):
        model = Turning()
    with offloaded(model, tmp_path / "c", init=init):
        assert model.turns.tolist() == [1.0, 2.0]


def test_what_is_set_in_part_is_named(tmp_path: Path) -> None:
    """A function that leaves out elements of a parameter or buffer."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(4, 4))
            self.register_buffer("ids", torch.empty(4, dtype=torch.int64))

        def reset_parameters(self) -> None:
            self.table[1:] = 0.0
            self.ids.zero_() if self.whole else self.ids[:3].zero_()

        whole = False

    with pytest.raises(UnsupportedError, match="buffers ids are"):
        values(Partly, tmp_path / "a")
    Partly.whole = True
    with pytest.raises(UnsupportedError, match="nothing initialises table"):
        values(Partly, tmp_path / "b")


# --- ties, adapters --------------------------------------------------------------------------------------------------


def test_a_tied_embedding_has_the_values_of_its_source(tmp_path: Path) -> None:
    """transformers gives heads of GPT-2 and T5 values of their own, and throws them away."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=900, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    found = values(lambda: T5ForConditionalGeneration(config), tmp_path)
    assert found["shared.weight"].std().item() == pytest.approx(1.0, rel=0.05)
    compare(lambda: T5ForConditionalGeneration(config), found)


class Tied(nn.Module):
    """One parameter of two modules that construct it differently."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight


def test_a_tie_of_rivals_is_refused(tmp_path: Path) -> None:
    """An embedding and a head that are tied by hand: which one's values count is not to be seen."""
    with pytest.raises(UnsupportedError, match=r"head\.weight are one parameter.*Embedding and Linear"):
        values(Tied, tmp_path / "a")

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.fill_(0.5)

    assert values(Tied, tmp_path / "b", init=init)["embedding.weight"].eq(0.5).all()


def adapted(how: Any = True, **more: Any) -> Any:
    """Return a tiny Llama with adapters."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=how, **more)
    return peft.get_peft_model(models.llama(), config)


@pytest.mark.parametrize("how", [True, "gaussian", False])
def test_adapters_begin_as_peft_has_them(how: Any, tmp_path: Path) -> None:
    """`lora_B` is zero; the base model is initialised by transformers, also below the adapters."""
    found = values(lambda: adapted(how), tmp_path)
    zero = [name for name, value in found.items() if "lora_B" in name and not value.any()]
    assert len(zero) == (0 if how is False else 6)
    compare(lambda: adapted(how), found)


def test_a_copy_that_is_trained_begins_as_its_original(tmp_path: Path) -> None:
    """`modules_to_save`: peft trains a copy of the module."""
    found = values(lambda: adapted(modules_to_save=["lm_head"]), tmp_path)
    head = "base_model.model.lm_head"
    original, copy = found[f"{head}.original_module.weight"], found[f"{head}.modules_to_save.default.weight"]
    assert torch.equal(original, copy)
    assert original.std().item() == pytest.approx(0.02, rel=0.05)


def test_adapters_made_of_the_base_model_are_refused(tmp_path: Path) -> None:
    """Their first values depend on weights that are elsewhere."""
    with torch.device("meta"):
        dora, olora = adapted(use_dora=True), adapted()
    olora.peft_config["default"].init_lora_weights = "olora"
    with pytest.raises(UnsupportedError, match=r"nothing initialises .*lora_magnitude_vector"):
        offloaded(dora, tmp_path / "a")
    with pytest.raises(UnsupportedError, match="init_lora_weights='olora'"):
        offloaded(olora, tmp_path / "b")


class Around(nn.Module):
    """Somebody's module around a layer of the model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_modules_that_the_model_did_not_build(tmp_path: Path) -> None:
    """A new head is initialised by its constructor; what may be an original or a new module is refused by name."""

    def headed() -> nn.Module:
        model = models.llama()
        model.lm_head = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 300))
        return model

    found = values(headed, tmp_path / "a")
    assert found["lm_head.0.weight"].std().item() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.05)
    compare(headed, found)

    def wrapped() -> nn.Module:
        model = models.llama()
        model.model.layers[0].mlp = Around(model.model.layers[0].mlp)
        return model

    with pytest.raises(UnsupportedError, match=r"nothing initialises model\.layers\.0\.mlp\.inner\.gate_proj\.weight"):
        values(wrapped, tmp_path / "b")


# --- seeds and units -------------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Draws for its children, also by functions of torch that leave tensors without storage out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(12, 12) for _ in range(3))

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.trunc_normal_(self.first.weight, std=0.5, a=-0.3, b=0.3)
            nn.init.orthogonal_(self.second.weight)
            self.third.weight.copy_(torch.rand_like(self.third.weight))


def test_the_division_into_units_changes_no_value(tmp_path: Path) -> None:
    """A call that sets tensors of several units draws for all of them; and nobody else's generators are touched."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    alone = values(Drawing, tmp_path / "a")
    apart = values(Drawing, tmp_path / "b", units=lambda model: (model.first, model.second, model.third))
    again = values(Drawing, tmp_path / "c", units=lambda model: (model.third,))
    assert torch.equal(before, torch.get_rng_state())
    for name, value in alone.items():
        assert torch.equal(value, apart[name]), name
        assert torch.equal(value, again[name]), name
    eye = alone["second.weight"] @ alone["second.weight"].T
    assert torch.allclose(eye, torch.eye(12), atol=1e-5)


def test_a_call_that_reads_another_unit_is_refused(tmp_path: Path) -> None:
    """Its values are not in memory."""

    class Reading(Drawing):
        def _init_weights(self, module: nn.Module) -> None:
            if module is self:
                self.second.weight.copy_(self.first.weight * 2)

    found = values(Reading, tmp_path / "a")
    assert torch.equal(found["second.weight"], 2 * found["first.weight"])
    with pytest.raises(UnsupportedError, match=r"cannot be initialised on the meta device.*init=function"):
        values(Reading, tmp_path / "b", units=lambda model: (model.first, model.second))


# --- partly on the meta device ---------------------------------------------------------------------------------------


def test_what_is_real_already_stays(tmp_path: Path) -> None:
    """A head that was made later, with a buffer of its own."""
    with torch.device("meta"):
        model = models.Toy(blocks=1)
    model.head = nn.Linear(models.WIDTH, model.vocabulary)
    model.head.register_buffer("seen", torch.full((2,), 7))
    wanted = model.head.weight.detach().clone()
    with offloaded(model, tmp_path):
        assert torch.equal(whole(model.head.weight), wanted)
        assert model.head.seen.tolist() == [7, 7]
        assert not whole(model.embedding.weight).isnan().any()


def test_parameters_beside_the_meta_device_are_refused(tmp_path: Path) -> None:
    """transformers builds them with whatever is in their memory, and initialises nothing."""
    with torch.device("meta"):
        model = build(next(row for row in ROWS if row.name == "XLNet"))
    with pytest.raises(UnsupportedError, match=r"transformer\.mask_emb.*call model\.to\('meta'\) before"):
        offloaded(model, tmp_path)


def test_weights_need_no_initialisers(tmp_path: Path) -> None:
    """What a folder has is not initialised; buffers that it does not have are computed."""
    from safetensors.torch import save_file

    config = SimpleNamespace(width=8)

    class Bare(Positions):
        def __init__(self) -> None:
            super().__init__(config)
            self.bare = nn.Parameter(torch.full((5,), 3.0))

        def reset_parameters(self) -> None:
            for key in ("ids", "turns"):
                getattr(self, key).copy_(getattr(Positions(config), key))

    source = Bare()
    source.mask.zero_()
    source.count.fill_(9)
    (tmp_path / "saved").mkdir()
    save_file(source.state_dict(), tmp_path / "saved" / "model.safetensors")
    found = values(Bare, tmp_path, weights=tmp_path / "saved")
    for name, value in (*source.named_parameters(), *source.named_buffers()):
        assert torch.equal(found[name], value), name


class Rescaled(nn.Linear):
    """Its constructor changes what `reset_parameters` has set."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        with torch.no_grad():
            self.weight.mul_(0.1)


class Zeroed(nn.Module):
    """Its constructor changes what it has built, by a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self._begin()

    def _begin(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.weight)


class Applied(nn.Module):
    """What its constructor runs is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)


def rescale(module: nn.Module) -> None:
    """Do what the constructor of `Rescaled` does."""
    if isinstance(module, Rescaled):
        module.weight.mul_(0.1)


def begun(kind: type[nn.Module], folder: Path, init: Any = None) -> torch.Tensor:
    """Return the first matrix of a model on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(kind(), nn.Linear(8, 8))
    fully_shard(model, mesh=infinity.mesh("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    with infinity.offload(model, optimizer, settings(folder, Paging(), 4 << 20), init=init):
        return whole(next(iter(model.parameters())))


@pytest.mark.parametrize("kind", [Rescaled, Zeroed])
def test_what_constructors_set_is_refused(kind: type[nn.Module], tmp_path: Path) -> None:
    """On the meta device it leaves no trace: the class is named, and nothing is left behind."""
    with pytest.raises(UnsupportedError, match=rf"constructor of {kind.__name__} sets .* init=function"):
        begun(kind, tmp_path)
    assert list((tmp_path / "nvme0").iterdir()) == []


def test_a_function_does_what_constructors_do(tmp_path: Path) -> None:
    """Given one, nothing is refused; nor is what a constructor does by `_init_weights`."""
    assert begun(Rescaled, tmp_path, rescale).abs().max() < 0.04
    assert (begun(Applied, tmp_path) == 0.5).all()
