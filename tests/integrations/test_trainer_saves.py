"""`save_model` of a Trainer whose state is on NVMe."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infinity.integrations.transformers.exports import move_export
from support.ranks import RankPool
from support.tables import WIDE
from support.trainer_ranks import adapters, adapters_nowhere
from support.trainers import build, make, outcome_of, with_adapters


def test_what_is_exported_loads(tmp_path: Path) -> None:
    """Into the output folder, where checkpoints are too, before training, behind it and once more."""
    from transformers import LlamaForCausalLM

    out = tmp_path / "out"
    trainer = make(out, build("meta"), nvme=tmp_path / "nvme", save_strategy="steps", save_steps=3)
    trainer.save_model(tmp_path / "before")
    trainer.train()
    for folder in (out, out, tmp_path / "elsewhere" / "inside"):
        trainer.save_model(None if folder == out else str(folder))
        assert {"model.safetensors", "config.json", "training_args.bin"} <= {path.name for path in folder.iterdir()}
        assert not (folder / "infinity-export").exists()
        loaded = LlamaForCausalLM.from_pretrained(folder)
        for name, param in loaded.named_parameters():
            assert param.equal(trainer.model.get_parameter(name).full_tensor()), name
    assert (out / "checkpoint-6").exists()
    before = LlamaForCausalLM.from_pretrained(tmp_path / "before")
    assert not before.lm_head.weight.equal(loaded.lm_head.weight)
    batch = {name: value[None] for name, value in trainer.eval_dataset[0].items()}
    trainer.model.eval()
    with torch.no_grad():
        assert trainer.model(**batch).logits.equal(loaded.eval()(**batch).logits)
    trainer.end()


def test_an_export_replaces_the_one_before(tmp_path: Path) -> None:
    """Of one file, of several, of others, of one again: what is loaded is the last one, and no more lies there."""
    from transformers import LlamaForCausalLM

    out = tmp_path / "out"
    trainer = make(out, build(), nvme=tmp_path / "nvme")
    trainer.save_model()
    (out / "model.txt").write_text("not a part of any")
    trainer.train()
    whole = trainer.optimizer.optimizer.save_pretrained
    for size, last in (("64KiB", "model.safetensors.index.json"), ("160KiB", None), ("1GiB", "model.safetensors")):
        trainer.optimizer.optimizer.save_pretrained = partial(whole, file_bytes=size)
        trainer.save_model()
        with torch.no_grad():
            loaded = LlamaForCausalLM.from_pretrained(out)
            for name, param in loaded.named_parameters():
                found = trainer.model.get_parameter(name)
                assert param.equal(found.full_tensor()), name
                found.mul_(2)
        whole(tmp_path / size, file_bytes=size)
        named = {path.name for path in (tmp_path / size).iterdir() if ".safetensors" in path.name}
        assert {path.name for path in out.iterdir() if ".safetensors" in path.name} == named
        assert len(named) == 1 or "model.safetensors" not in named
        assert last is None or last in named
    assert (out / "model.txt").exists()
    trainer.end()


@pytest.mark.parametrize("number", range(4))
def test_moving_that_is_cut_off(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old and new weights are never mixed: they are whole, or loading fails."""
    old, new = tmp_path / "old", tmp_path / "new"
    model = build("plain")
    model.save_pretrained(old, max_shard_size="200KB")
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.embed_tokens.weight.zero_()
    model.save_pretrained(new, max_shard_size="200KB")
    assert len(list(old.glob("model-*"))) == len(list(new.glob("model-*"))) > 2
    moved, move = [], Path.replace

    def cut_off(self: Path, target: Path) -> Path:
        if len(moved) == number:
            raise OSError("cut off")
        moved.append(target)
        return move(self, target)

    monkeypatch.setattr(Path, "replace", cut_off)
    with pytest.raises(OSError, match="cut off"):
        move_export(new, old)
    with pytest.raises(OSError, match="no file named"):
        type(model).from_pretrained(old)


def test_save_only_model(tmp_path: Path) -> None:
    """Checkpoints are exports then, as many as are asked for, and no checkpoint is made."""
    out, nvme = tmp_path / "out", tmp_path / "nvme"
    saved = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True, "save_total_limit": 2}
    trainer = make(out, build(), nvme=nvme, **saved)
    trainer.train()
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    found = {path.name for path in (out / "checkpoint-6").iterdir()}
    assert {"model.safetensors", "config.json", "trainer_state.json"} <= found
    assert not found & {"infinity.json", "optimizer.pt"}
    trainer.end()
    assert not nvme.exists()  # a run without a checkpoint leaves nothing


def test_adapters(tmp_path: Path) -> None:
    """Of a model of peft, adapters are trained and saved, as by the ordinary Trainer; checkpoints are checkpoints."""
    pytest.importorskip("peft")
    saved = {"save_strategy": "steps", "save_steps": 3}
    ordinary = make(tmp_path / "memory", with_adapters("plain"), **saved)
    trainer = make(tmp_path / "out", with_adapters(), nvme=tmp_path / "nvme", **saved)
    for one in (ordinary, trainer):
        one.train()
        one.save_model()
    outcome_of(trainer).equals(outcome_of(ordinary))
    assert not list((tmp_path / "out").rglob("model.safetensors"))
    assert not (tmp_path / "out" / "checkpoint-6" / "adapter_model.safetensors").exists()
    found, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "memory"))
    assert found.keys() == expected.keys()
    assert all(value.equal(expected[name]) for name, value in found.items())
    trainer.end()


@WIDE
def test_adapters_of_two_ranks(tmp_path: Path) -> None:
    """They are put together."""
    pytest.importorskip("peft")
    pool = RankPool(2)
    try:
        shapes = pool.run(adapters, tmp_path)[0]
    finally:
        pool.close()
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name: tuple(value.shape) for name, value in found.items()} == shapes


@WIDE
def test_adapters_that_cannot_be_written(tmp_path: Path) -> None:
    """Both ranks are told, with rank 0's reason; none waits for it."""
    pytest.importorskip("peft")
    pool = RankPool(2)
    try:
        first, second = pool.run(adapters_nowhere, tmp_path)
    finally:
        pool.close()
    assert "should be a directory, not a file" in first
    assert "save_pretrained failed on rank 0" in second
    assert "should be a directory, not a file" in second
