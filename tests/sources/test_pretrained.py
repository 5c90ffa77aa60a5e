"""Tests of the files and names that are read from a weights folder; mismatches raise before anything is written."""

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
    """A model with a norm with running statistics and a persistent buffer that no code computes."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.register_buffer("offsets", torch.empty(3))
        self.register_buffer("order_of", torch.arange(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.statistics(self.embedding(tokens).flatten(0, 1))
        return self.head(x).float().mean() + self.offsets.sum()


class Headed(nn.Module):
    """A model inside a wrapper whose own parts have names that end like those of the inner model."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Toy(blocks=1)
        self.v_head = Block()
        self.second = Toy(blocks=1)


def filled(model: nn.Module) -> nn.Module:
    """Fill all tensors with values that no initialization produces."""
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.rand(value.shape) * 8 + 1 if value.is_floating_point() else torch.full_like(value, 7))
    return model


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a sharded model on the meta device."""
    with torch.device("meta"):
        model = make()
    return families.shard(model) if not isinstance(model, Toy) else shard(model, "fp32")


def save(model: nn.Module, folder: Path, name: str = "model.safetensors") -> Path:
    """Save the tensors of a model to a file and return the folder."""
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, folder / name)
    return folder


def rejection(make: Callable[[], nn.Module], folder: Path, weights: Path, **options: Any) -> str:
    """Return the error for the given weights, and check that no run was created."""
    with pytest.raises(ConfigError) as caught:
        offload(on_meta(make), folder, weights=weights, **options)
    assert look_for_runs([folder])[0] == []
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the weights of a Toy."""
    return save(filled(Toy()), tmp_path / "saved")


# Files.


def test_model_safetensors_takes_precedence(folder: Path, tmp_path: Path) -> None:
    """Other weight files and an index in the same folder are ignored."""
    expected = load_file(folder / "model.safetensors")
    for other in ("model_old.safetensors", "zzz.safetensors", "model-00001-of-00001.safetensors"):
        save(filled(Toy()), folder, other)
    index = {"weight_map": dict.fromkeys(expected, "zzz.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = on_meta(Toy)
    with offload(model, tmp_path, weights=folder):
        assert all(torch.equal(param.full_tensor(), expected[name]) for name, param in model.named_parameters())


def test_weight_file_or_index_can_be_selected(folder: Path, tmp_path: Path) -> None:
    """By path, or by `transformers_weights` in config.json."""
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
        (("latest", "global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt"), "DeepSpeed checkpoint.*zero_to_fp32.py"),
        (("zero_pp_rank_0_mp_rank_00_optim_states.pt",), "DeepSpeed checkpoint.*optimizer state cannot be imported"),
        (("mp_rank_00_model_states.pt", "zero/head.weight/fp32.pt"), "DeepSpeed checkpoint.*zero_to_fp32.py"),
    ],
)
def test_folder_without_weights_raises_with_a_remedy(files: tuple[str, ...], message: str, tmp_path: Path) -> None:
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
def test_malformed_weight_files_raise(
    change: Callable[[Path], None], message: str, folder: Path, tmp_path: Path
) -> None:
    change(folder)
    with pytest.raises(ConfigError, match=message):
        offload(on_meta(Toy), tmp_path, weights=folder)
    assert look_for_runs([tmp_path])[0] == []


@pytest.mark.parametrize(("dtype", "fits"), [(torch.int32, True), (torch.bool, False), (torch.float32, False)])
def test_integer_buffers_are_only_widened(dtype: torch.dtype, fits: bool, tmp_path: Path) -> None:
    """An int64 buffer accepts int32 values, but no bool or float values."""
    tensors = filled(Normed()).state_dict()
    (tmp_path / "saved").mkdir()
    save_file({**tensors, "order_of": torch.ones(5).to(dtype)}, tmp_path / "saved" / "model.safetensors")
    if fits:
        found = buffers_of(tmp_path / "saved", tmp_path)["order_of"]
        assert torch.equal(found, torch.ones(5, dtype=torch.int64))
    else:
        assert f"order_of: {dtype} in the folder, torch.int64" in rejection(Normed, tmp_path, tmp_path / "saved")


# Names.


def test_names_with_equal_suffixes_do_not_match(folder: Path, tmp_path: Path) -> None:
    """Prefixes are only adapted for transformers models."""
    message = rejection(Headed, tmp_path, folder)
    assert "missing     v_head.norm.weight" in message
    assert "missing     second.blocks.0.up.weight" in message
    assert "missing     base.blocks.0.up.weight" in message
    assert "unexpected  blocks.{0, 1, 2}.norm.weight" in message
    headed = filled(Headed())
    model = on_meta(Headed)
    with offload(model, tmp_path, weights=save(headed, tmp_path / "headed")):
        assert families.differing(headed, model) == []


@pytest.mark.parametrize(("there", "here"), [(3, 2), (2, 3)])
def test_different_number_of_layers_raises(there: int, here: int, tmp_path: Path) -> None:
    """The message lists all missing or unexpected names and recommends `strict=False`."""
    families.filled("llama", num_hidden_layers=there).save_pretrained(tmp_path / "saved")
    message = rejection(lambda: families.make("llama", num_hidden_layers=here), tmp_path, tmp_path / "saved")
    kind = "unexpected" if there > here else "missing"
    assert "LlamaForCausalLM" in message
    assert message.count(f"  {kind}  model.layers.2.") == 9
    assert "strict=False" in message


def test_different_shape_raises_even_if_not_strict(tmp_path: Path) -> None:
    families.filled("llama").save_pretrained(tmp_path / "saved")
    for strict in (True, False):
        message = rejection(lambda: families.make("llama", vocab_size=56), tmp_path, tmp_path / "saved", strict=strict)
        assert "model.embed_tokens.weight: shape (64, 32) in the folder, (56, 32) in the model" in message
        assert "config.json" in message


def test_strict_false_initializes_missing_parameters(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The seed determines their values, and unexpected tensors are ignored with a warning."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    lost = ("blocks.1.up.weight", "head.bias")
    save_file({"other": torch.ones(2), **{name: value for name, value in tensors.items() if name not in lost}}, file)
    assert "missing     blocks.1.up.weight" in rejection(Toy, tmp_path, folder)
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
    messages = "\n".join(record.getMessage() for record in caplog.records)
    assert "by the model: head.bias, blocks.1.up.weight" in messages
    assert ": other" in messages


def test_strict_false_requires_safetensors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"strict=False .*safetensors"):
        offload(on_meta(Toy), tmp_path, strict=False)
    dcp.save({"model": get_model_state_dict(models.build("toy"))}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(ConfigError, match=r"strict=False .*safetensors"):
        offload(on_meta(Toy), tmp_path, strict=False, weights=tmp_path / "dcp")


def test_base_model_prefix_is_added_or_removed(tmp_path: Path) -> None:
    """A base model's folder loads into a model with a head, and vice versa, as with `from_pretrained`."""
    import transformers

    full = families.filled("qwen2")  # its head is tied to the embedding
    full.model.save_pretrained(tmp_path / "base")
    full.save_pretrained(tmp_path / "full")
    assert "embed_tokens.weight" in load_file(tmp_path / "base" / "model.safetensors")
    model = families.on_meta("qwen2")
    with offload(model, tmp_path, weights=tmp_path / "base"):
        assert families.differing(full, model) == []
    with torch.device("meta"):
        base = transformers.Qwen2Model(full.config)
    families.shard(base)
    with offload(base, tmp_path, weights=tmp_path / "full"):
        assert families.differing(full.model, base) == []


def test_tied_weights_with_different_values_raise(tmp_path: Path) -> None:
    """Equal copies, or either one alone, are accepted."""
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
    message = rejection(lambda: families.make("qwen2"), tmp_path, tmp_path / "saved")
    assert "tie_word_embeddings=False" in message


def test_names_ignored_by_transformers_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For example, buffers that older releases saved. No warning is logged."""
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
    """Return the buffers of a run that starts or resumes and then checkpoints."""
    model = on_meta(Normed)
    with offload(model, folder, weights=weights, **options) as optimizer:
        optimizer.save_checkpoint()
        return {name: buffer.clone() for name, buffer in model.named_buffers()}


def on_two_ranks(folder: str) -> dict[str, torch.Tensor]:
    """Resume from a checkpoint of one rank. Runs on every rank."""
    return buffers_of(None, Path(folder), run=LATEST)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two models have equal buffers."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_buffers_are_loaded_resumed_and_resharded(tmp_path: Path, pair: RankPool) -> None:
    """Covers running statistics, counters and buffers that no code computes."""
    expected = filled(Normed())
    buffers = dict(expected.named_buffers())
    assert len(buffers) == 5
    save(expected, tmp_path / "saved")
    assert same(buffers, buffers_of(tmp_path / "saved", tmp_path))
    assert same(buffers, buffers_of(None, tmp_path, run=LATEST))
    for on_rank in pair.run(on_two_ranks, str(tmp_path)):
        assert same(buffers, on_rank)


def test_buffers_are_loaded_from_dcp(tmp_path: Path) -> None:
    """They keep the dtypes of the model."""
    model = shard(filled(Normed()), "fp32")
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path / "dcp")
    assert same(expected, buffers_of(tmp_path / "dcp", tmp_path))


def test_missing_buffers_raise_unless_not_strict(tmp_path: Path) -> None:
    """With `strict=False`, the model's own code computes them."""
    save(filled(Normed()), tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "running" not in name}, file)
    assert "missing  statistics.running_mean" in rejection(Normed, tmp_path, tmp_path / "saved")
    found = buffers_of(tmp_path / "saved", tmp_path, strict=False)
    assert torch.equal(found["statistics.running_var"], torch.ones(WIDTH))
    assert found["statistics.num_batches_tracked"] == 7


# Companion files.


def test_export_includes_companion_files(folder: Path, tmp_path: Path) -> None:
    """For example, tokenizer files: from the weights folder, the run's copies, or an explicit folder."""
    for name in ("tokenizer.json", "spiece.model", "chat_template.jinja", "generation_config.json", "vocab.txt"):
        (folder / name).write_text(f'{{"of": "{name}"}}')
    for name in ("trainer_state.json", "model.safetensors.index.json", ".hidden.json", "pytorch_model.bin", "x.gguf"):
        (folder / name).write_text("{}")
    (folder / "tokenization_own.py").write_text("")
    assert "tokenization_own.py" not in companion_files(folder)  # no configuration refers to code
    (folder / "tokenizer_config.json").write_text('{"auto_map": {}, "of": "tokenizer_config.json"}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    wanted = {"tokenizer.json", "spiece.model", "chat_template.jinja", "generation_config.json", "vocab.txt"}
    wanted |= {"tokenizer_config.json", "tokenization_own.py", "additional_chat_templates/tools.jinja"}
    assert companion_files(folder).keys() == wanted
    with offload(on_meta(Toy), tmp_path, weights=folder) as optimizer:
        optimizer.save_checkpoint()
        run = optimizer.run.folder
        for file in folder.rglob("*"):
            if file.is_file():
                file.unlink()
    with offload(on_meta(Toy), tmp_path, run={**LATEST, "retained_checkpoints": 2}) as optimizer:
        optimizer.save_checkpoint()
        written = export_safetensors(CheckpointReader(run), tmp_path / "out", file_bytes=1 << 20)
        assert {file.relative_to(tmp_path / "out").as_posix() for file in written} == {"model.safetensors", *wanted}
        assert (tmp_path / "out" / "spiece.model").read_text() == '{"of": "spiece.model"}'


def carried(folder: str) -> list[str]:
    """Resume from a checkpoint of one rank and list its companion files. Runs on every rank."""
    with offload(on_meta(Toy), Path(folder), run=LATEST) as optimizer:
        run = optimizer.run.folder
        kept = run.checkpoints / "model"
        return sorted(file.relative_to(kept).as_posix() for file in kept.rglob("*") if file.is_file())


def test_resharded_run_copies_the_companion_files(folder: Path, tmp_path: Path, pair: RankPool) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    with offload(on_meta(Toy), tmp_path, weights=folder) as optimizer:
        optimizer.save_checkpoint()
    expected = ["additional_chat_templates/tools.jinja", "names.json", "tokenizer.json"]
    assert pair.run(carried, str(tmp_path))[0] == expected
