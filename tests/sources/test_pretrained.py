"""Which files and which names of a folder are the weights; what does not fit is refused before anything is written."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import ConfigError
from infinity.formats.companions import companion_files
from infinity.formats.safetensors import export_safetensors
from infinity.formats.weight_files import WeightFiles
from infinity.store.marker import look_for_runs
from support import families, models
from support.families import offload
from support.models import WIDTH, Block, Toy, shard
from support.ranks import RankPool

LATEST = {"resume": "latest"}


class Normed(Toy):
    """A norm with running statistics, and a persistent buffer that nothing computes."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.register_buffer("offsets", torch.empty(3))
        self.register_buffer("order_of", torch.arange(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.statistics(self.embedding(tokens).flatten(0, 1))
        return self.head(x).float().mean() + self.offsets.sum()


class Headed(nn.Module):
    """A model inside of another, whose own parts have names that end like those of the inner one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Toy(blocks=1)
        self.v_head = Block()
        self.second = Toy(blocks=1)


def filled(model: nn.Module) -> nn.Module:
    """Give every tensor values that no initialization gives."""
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.rand(value.shape) * 8 + 1 if value.is_floating_point() else torch.full_like(value, 7))
    return model


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model on the meta device, sharded as one FSDP module."""
    with torch.device("meta"):
        model = make()
    return families.shard(model) if not isinstance(model, Toy) else shard(model, "fp32")


def save(model: nn.Module, folder: Path, name: str = "model.safetensors") -> Path:
    """Write the tensors of a model to a file; return the folder."""
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, folder / name)
    return folder


def refused(make: Callable[[], nn.Module], folder: Path, weights: Path, **options: Any) -> str:
    """Return why weights are refused; nothing may be left on the paths."""
    with pytest.raises(ConfigError) as caught:
        offload(on_meta(make), folder, weights=weights, **options)
    assert look_for_runs([folder])[0] == []
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a Toy's weights."""
    return save(filled(Toy()), tmp_path / "saved")


# Which files.


def test_other_files_do_not_count(folder: Path, tmp_path: Path) -> None:
    """`model.safetensors` alone, whatever lies beside it; not an index either."""
    expected = load_file(folder / "model.safetensors")
    for other in ("model_old.safetensors", "zzz.safetensors", "model-00001-of-00001.safetensors"):
        save(filled(Toy()), folder, other)
    index = {"weight_map": dict.fromkeys(expected, "zzz.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = on_meta(Toy)
    with offload(model, tmp_path, weights=folder):
        assert all(torch.equal(param.full_tensor(), expected[name]) for name, param in model.named_parameters())


def test_a_file_or_its_index_may_be_named(folder: Path, tmp_path: Path) -> None:
    """A variant, by its path; or by config.json, as in transformers."""
    variant = save(filled(Toy()), folder, "model.fp16.safetensors") / "model.fp16.safetensors"
    expected = load_file(variant)
    index = folder / "model.fp16.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(expected, variant.name)}))
    (tmp_path / "explicit").mkdir()
    variant.with_name("x.safetensors").write_bytes(variant.read_bytes())
    for path in (variant, index):
        found = WeightFiles(path)
        assert found.folder == folder
        assert all(torch.equal(found.reader()(name), value) for name, value in expected.items())
    (folder / "config.json").write_text('{"transformers_weights": "x.safetensors"}')
    assert torch.equal(WeightFiles(folder).reader()("head.bias"), expected["head.bias"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "save_pretrained"),
        (("pytorch_model.bin",), r"pytorch_model\.bin.*save_pretrained"),
        (("adapter_model.safetensors",), "adapter.*merge"),
        (("model.fp16.safetensors",), r"weights='.*/model\.fp16\.safetensors'"),
        (("unet/model.safetensors",), r"/unet"),
    ],
)
def test_a_folder_without_weights_says_what_to_do(files: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """By what there is instead."""
    for file in files:
        (tmp_path / "saved" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "saved" / file).touch()
    (tmp_path / "saved").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=message):
        WeightFiles(tmp_path / "saved")


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _indexed(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(text)

    return change


def _cast(dtype: torch.dtype) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        save_file({**tensors, "head.bias": tensors["head.bias"].to(dtype)}, file)

    return change


def _quantized(folder: Path) -> None:
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_truncated, r"model\.safetensors.*safetensors:"),
        (_indexed("{"), r"index\.json cannot be read: "),
        (_indexed("[]"), r"index\.json .*JSON object"),
        (_indexed('{"weight_map": {}}'), r"index\.json .*weight_map"),
        (_indexed('{"weight_map": {"head.bias": "b.safetensors"}}'), r"index\.json .*b\.safetensors"),
        (
            _indexed('{"weight_map": {"head.bias": "../saved/a.safetensors"}}'),
            r"index\.json .*\.\./saved/a\.safetensors",
        ),
        (_indexed('{"weight_map": {"more": "a.safetensors"}}'), r"more is in a\.safetensors"),
        (_cast(torch.int32), r"head\.bias: torch\.int32 in the folder, torch\.float32 in the model"),
        (_cast(torch.float8_e4m3fn), r"head\.bias: torch\.float8_e4m3fn in the folder"),
        (_quantized, r"\(fp8\).*save_pretrained"),
    ],
)
def test_malformed_files_are_named(change: Callable[[Path], None], message: str, folder: Path, tmp_path: Path) -> None:
    """With what to do about them."""
    change(folder)
    with pytest.raises(ConfigError, match=message):
        offload(on_meta(Toy), tmp_path, weights=folder)
    assert look_for_runs([tmp_path])[0] == []


@pytest.mark.parametrize(("there", "fits"), [(torch.int32, True), (torch.bool, False), (torch.float32, False)])
def test_integers_are_widened_only(there: torch.dtype, fits: bool, tmp_path: Path) -> None:
    """A buffer of int64 takes int32; nothing of another kind."""
    tensors = filled(Normed()).state_dict()
    (tmp_path / "saved").mkdir()
    save_file({**tensors, "order_of": torch.ones(5).to(there)}, tmp_path / "saved" / "model.safetensors")
    if fits:
        found = buffers_of(tmp_path / "saved", tmp_path)["order_of"]
        assert torch.equal(found, torch.ones(5, dtype=torch.int64))
    else:
        assert f"order_of: {there} in the folder, torch.int64" in refused(Normed, tmp_path, tmp_path / "saved")


# Which names.


def test_names_that_end_alike_are_not_taken_for_each_other(folder: Path, tmp_path: Path) -> None:
    """A model that is not of transformers has its own names and no others."""
    message = refused(Headed, tmp_path, folder)
    assert "missing     v_head.norm.weight" in message
    assert "missing     second.blocks.0.up.weight" in message
    assert "missing     base.blocks.0.up.weight" in message
    assert "unexpected  blocks.{0, 1, 2}.norm.weight" in message
    headed = filled(Headed())
    model = on_meta(Headed)
    with offload(model, tmp_path, weights=save(headed, tmp_path / "headed")):
        assert families.differing(headed, model) == []


@pytest.mark.parametrize(("there", "here"), [(3, 2), (2, 3)])
def test_other_layers_are_refused(there: int, here: int, tmp_path: Path) -> None:
    """A folder of three layers for a model of two, and the other way round; all at once, with what to do."""
    families.filled("llama", num_hidden_layers=there).save_pretrained(tmp_path / "saved")
    message = refused(lambda: families.make("llama", num_hidden_layers=here), tmp_path, tmp_path / "saved")
    kind = "unexpected" if there > here else "missing"
    assert "LlamaForCausalLM" in message
    assert message.count(f"  {kind}  model.layers.2.") == 9
    assert "strict=False" in message


def test_another_shape_is_refused_in_any_case(tmp_path: Path) -> None:
    """`strict=False` does not make a model of other sizes."""
    families.filled("llama").save_pretrained(tmp_path / "saved")
    for strict in (True, False):
        message = refused(lambda: families.make("llama", vocab_size=72), tmp_path, tmp_path / "saved", strict=strict)
        assert "model.embed_tokens.weight: shape (64, 32) in the folder, (72, 32) in the model" in message
        assert "config.json" in message


def test_what_is_missing_may_be_initialized(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As without a folder, from the seed; the rest is the folder's, and what it has besides is passed over."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    lost = ("blocks.1.up.weight", "head.bias")
    save_file({"other": torch.ones(2), **{name: value for name, value in tensors.items() if name not in lost}}, file)
    assert "missing     blocks.1.up.weight" in refused(Toy, tmp_path, folder)
    plain = on_meta(Toy)
    with offload(plain, tmp_path):
        initial = {name: plain.get_parameter(name).full_tensor().clone() for name in lost}
    model = on_meta(Toy)
    with (
        caplog.at_level(logging.WARNING, "infinity"),
        offload(model, tmp_path, weights=folder, strict=False) as optimizer,
    ):
        for name, param in model.named_parameters():
            assert torch.equal(param.full_tensor(), initial.get(name, tensors[name])), name
        optimizer.step()
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "by the model: head.bias, blocks.1.up.weight" in said
    assert ": other" in said


def test_strict_is_for_safetensors(folder: Path, tmp_path: Path) -> None:
    """Without weights, and for a folder of DCP, it means nothing."""
    with pytest.raises(ConfigError, match=r"strict=False .*safetensors"):
        offload(on_meta(Toy), tmp_path, strict=False)
    dcp.save({"model": get_model_state_dict(models.build("toy"))}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(ConfigError, match=r"strict=False .*safetensors"):
        offload(on_meta(Toy), tmp_path, strict=False, weights=tmp_path / "dcp")


def test_the_prefix_of_the_base_model_is_added_and_removed(tmp_path: Path) -> None:
    """A base model's folder for a model with a head, and the other way round, as `from_pretrained` does."""
    import transformers

    whole = families.filled("qwen2")  # tied: its head is in the embedding
    whole.model.save_pretrained(tmp_path / "base")
    whole.save_pretrained(tmp_path / "whole")
    assert "embed_tokens.weight" in load_file(tmp_path / "base" / "model.safetensors")
    model = families.on_meta("qwen2")
    with offload(model, tmp_path, weights=tmp_path / "base"):
        assert families.differing(whole, model) == []
    with torch.device("meta"):
        base = transformers.Qwen2Model(whole.config)
    families.shard(base)
    with offload(base, tmp_path, weights=tmp_path / "whole"):
        assert families.differing(whole.model, base) == []


def test_tied_weights_of_different_values_are_refused(tmp_path: Path) -> None:
    """One parameter cannot have both; equal ones, or either alone, are it."""
    model = families.filled("qwen2")
    model.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors.pop("model.embed_tokens.weight")
    for more in ({"lm_head.weight": embedding}, {"lm_head.weight": embedding, "model.embed_tokens.weight": embedding}):
        save_file({**tensors, **{name: value.clone() for name, value in more.items()}}, file)
        loaded = families.on_meta("qwen2")
        with offload(loaded, tmp_path, weights=tmp_path / "saved"):
            assert families.differing(model, loaded) == []
    other = embedding.clone()
    other[-1, -1] += 1
    save_file({**tensors, "model.embed_tokens.weight": embedding, "lm_head.weight": other}, file)
    message = refused(lambda: families.make("qwen2"), tmp_path, tmp_path / "saved")
    assert "tie_word_embeddings=False" in message
    assert "tie_word_embeddings=False" in message


def test_what_transformers_passes_over_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Buffers that were persistent once, without a word; Marian's computed positions need not be there."""
    model = families.filled("llama")
    model.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    loaded = families.on_meta("llama")
    with caplog.at_level(logging.WARNING, "infinity"), offload(loaded, tmp_path, weights=tmp_path / "saved"):
        assert families.differing(model, loaded) == []
    assert "inv_freq" not in caplog.text


# Buffers.


def buffers_of(weights: Path | None, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Return the buffers of a run that begins or goes on; it checkpoints."""
    model = on_meta(Normed)
    with offload(model, folder, weights=weights, **options) as optimizer:
        optimizer.save_checkpoint()
        return {name: buffer.clone() for name, buffer in model.named_buffers()}


def on_two_ranks(folder: str) -> dict[str, torch.Tensor]:
    """Go on from a checkpoint of one rank. Runs on every rank."""
    return buffers_of(None, Path(folder), run=LATEST)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two models have equal buffers."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_buffers_are_those_of_the_folder(tmp_path: Path, pair: RankPool) -> None:
    """Running statistics, counts, and what nothing computes; also after resuming and resharding."""
    expected = filled(Normed())
    buffers = dict(expected.named_buffers())
    assert len(buffers) == 5
    save(expected, tmp_path / "saved")
    assert same(buffers, buffers_of(tmp_path / "saved", tmp_path))
    assert same(buffers, buffers_of(None, tmp_path, run=LATEST))
    for on_rank in pair.run(on_two_ranks, str(tmp_path)):
        assert same(buffers, on_rank)


def test_buffers_are_those_of_a_folder_of_dcp(tmp_path: Path) -> None:
    """In the dtypes of the model."""
    model = shard(filled(Normed()), "fp32")
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path / "dcp")
    assert same(expected, buffers_of(tmp_path / "dcp", tmp_path))


def test_a_missing_buffer_is_missing(tmp_path: Path) -> None:
    """It is in the list; not strictly, the model's own code computes it."""
    save(filled(Normed()), tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "running" not in name}, file)
    assert "missing  statistics.running_mean" in refused(Normed, tmp_path, tmp_path / "saved")
    found = buffers_of(tmp_path / "saved", tmp_path, strict=False)
    assert torch.equal(found["statistics.running_var"], torch.ones(WIDTH))
    assert found["statistics.num_batches_tracked"] == 7


# What goes along.


def test_companions_go_along(folder: Path, tmp_path: Path) -> None:
    """Tokenizers and the like, from the folder of the weights, a run's own copies, or a folder that is named."""
    for name in ("tokenizer.json", "spiece.model", "chat_template.jinja", "generation_config.json", "vocab.txt"):
        (folder / name).write_text(f'{{"of": "{name}"}}')
    for name in ("trainer_state.json", "model.safetensors.index.json", ".hidden.json", "pytorch_model.bin", "x.gguf"):
        (folder / name).write_text("{}")
    wanted = {"tokenizer.json", "spiece.model", "chat_template.jinja", "generation_config.json", "vocab.txt"}
    assert {file.name for file in companion_files(folder)} == wanted
    with offload(on_meta(Toy), tmp_path, weights=folder) as optimizer:
        optimizer.save_checkpoint()
        run = optimizer.run.folder
        for file in folder.iterdir():
            file.unlink()
    with offload(on_meta(Toy), tmp_path, run={**LATEST, "retained_checkpoints": 2}) as optimizer:
        optimizer.save_checkpoint()
        written = export_safetensors(CheckpointReader(run), tmp_path / "out", file_bytes=1 << 20)
        assert {file.name for file in written} == {"model.safetensors", *wanted}
        assert (tmp_path / "out" / "spiece.model").read_text() == '{"of": "spiece.model"}'
        (folder / "merges.txt").write_text("a b")
        written = export_safetensors(CheckpointReader(run), tmp_path / "b", companions=folder, file_bytes=1 << 20)
        assert {file.name for file in written} == {"model.safetensors", "merges.txt"}


def carried(folder: str) -> list[str]:
    """Go on from a checkpoint of one rank and export. Runs on every rank."""
    with offload(on_meta(Toy), Path(folder), run=LATEST) as optimizer:
        run = optimizer.run.folder
        return sorted(file.name for file in (run.checkpoints / "model").iterdir())


def test_companions_are_carried_to_a_resharded_run(folder: Path, tmp_path: Path, pair: RankPool) -> None:
    """The new run has its own copies."""
    (folder / "tokenizer.json").write_text("{}")
    with offload(on_meta(Toy), tmp_path, weights=folder) as optimizer:
        optimizer.save_checkpoint()
    assert pair.run(carried, str(tmp_path))[0] == ["names.json", "tokenizer.json"]
