"""Tests of `save_model` of a Trainer with its state on NVMe."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.formats.safetensors import export_safetensors
from infinity.integrations.run_folders import APART, finish_export, move_export
from support.trainers import build, make, outcome_of, with_adapters


def test_save_model_replaces_the_previous_export(tmp_path: Path) -> None:
    """The exports have different numbers of files; checkpoints and other files in the folder are kept."""
    from transformers import LlamaForCausalLM

    out = tmp_path / "out"
    trainer = make(out, build(), nvme=tmp_path / "nvme", save_strategy="steps", save_steps=2)
    trainer.save_model()
    (out / "model.txt").write_text("not part of an export")
    trainer.train()
    save_pretrained = trainer.optimizer.optimizer.save_pretrained
    for size, last in (("64KiB", "model.safetensors.index.json"), ("160KiB", None), ("1GiB", "model.safetensors")):
        trainer.optimizer.optimizer.save_pretrained = partial(save_pretrained, file_bytes=size)
        trainer.save_model()
        with torch.no_grad():
            loaded = LlamaForCausalLM.from_pretrained(out)
            for name, param in loaded.named_parameters():
                found = trainer.model.get_parameter(name)
                assert param.equal(found.full_tensor()), name
                found.mul_(2)
        save_pretrained(tmp_path / size, file_bytes=size)
        named = {path.name for path in (tmp_path / size).iterdir() if ".safetensors" in path.name}
        assert {path.name for path in out.iterdir() if ".safetensors" in path.name} == named
        assert len(named) == 1 or "model.safetensors" not in named
        assert last is None or last in named
    assert {"model.txt", "checkpoint-4", "config.json", "training_args.bin"} <= {path.name for path in out.iterdir()}
    assert not (out / APART).exists()
    trainer.end()


def test_saves_contain_the_current_configuration(tmp_path: Path) -> None:
    """Changes to the config and the generation config reach exports, checkpoint folders and `infinity export`.

    An export that contains folders can be replaced.
    """
    out = tmp_path / "out"
    build("plain").save_pretrained(tmp_path / "model")
    templates = Path("additional_chat_templates", "tools.jinja")
    (tmp_path / "model" / templates).parent.mkdir()
    (tmp_path / "model" / templates).write_text("{{ messages }}")
    model = infinity.from_pretrained(tmp_path / "model", mp_policy=MixedPrecisionPolicy())
    trainer = make(out, model, nvme=tmp_path / "nvme", save_strategy="steps", save_steps=3, max_steps=3)
    model.generation_config.eos_token_id = 7  # as the Trainer does for a tokenizer with a different end token
    trainer.train()
    model.config.note = "changed"
    for _ in range(2):
        trainer.save_model(tmp_path / "live")
        assert (tmp_path / "live" / templates).read_text() == "{{ messages }}"
    trainer.optimizer.optimizer.save_checkpoint()
    export_safetensors(
        CheckpointReader(trainer.optimizer.optimizer.run.folder), tmp_path / "export", file_bytes=1 << 30
    )
    for folder in (out / "checkpoint-3", tmp_path / "live", tmp_path / "export"):
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 7
    for folder in (tmp_path / "live", tmp_path / "export"):
        assert json.loads((folder / "config.json").read_text())["note"] == "changed"
    trainer.end()


@pytest.mark.parametrize("number", range(4))
def test_interrupted_move_never_mixes_weights(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a partially replaced export fails until the next export finishes the replacement."""
    old, new = tmp_path / "old", tmp_path / "old" / APART
    model = build("plain")
    model.save_pretrained(old, max_shard_size="200KB")
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.embed_tokens.weight.zero_()
    model.save_pretrained(new, max_shard_size="200KB")
    assert len(list(old.glob("model-*"))) == len(list(new.glob("model-*"))) > 2
    moved, move = [], Path.replace

    def interrupted_replace(self: Path, target: Path) -> Path:
        if len(moved) == number:
            raise OSError("interrupted")
        moved.append(target)
        return move(self, target)

    monkeypatch.setattr(Path, "replace", interrupted_replace)
    with pytest.raises(OSError, match="interrupted"):
        move_export(old)
    with pytest.raises(OSError, match="no file named"):
        type(model).from_pretrained(old)
    monkeypatch.undo()
    finish_export(old)
    assert not new.exists()
    assert not type(model).from_pretrained(old).lm_head.weight.any()


def test_save_only_model(tmp_path: Path) -> None:
    """Checkpoints are exports, limited by `save_total_limit`, and the run saves no checkpoints."""
    out, nvme = tmp_path / "out", tmp_path / "nvme"
    saved = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True, "save_total_limit": 2, "max_steps": 6}
    trainer = make(out, build(), nvme=nvme, **saved)
    trainer.train()
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    found = {path.name for path in (out / "checkpoint-6").iterdir()}
    assert {"model.safetensors", "config.json", "trainer_state.json"} <= found
    assert not found & {"infinity.json", "optimizer.pt"}
    trainer.end()
    assert not nvme.exists()  # a run without a checkpoint is removed


def test_save_model_with_adapters(tmp_path: Path) -> None:
    """Adapters of a peft model are trained and saved as by the unmodified Trainer."""
    pytest.importorskip("peft")
    saved = {"save_strategy": "steps", "save_steps": 2}
    ordinary = make(tmp_path / "memory", with_adapters("plain"), **saved)
    trainer = make(tmp_path / "out", with_adapters(), nvme=tmp_path / "nvme", **saved)
    for one in (ordinary, trainer):
        one.train()
        one.save_model()
    outcome_of(trainer).equals(outcome_of(ordinary))
    assert not list((tmp_path / "out").rglob("model.safetensors"))
    assert not (tmp_path / "out" / "checkpoint-4" / "adapter_model.safetensors").exists()
    found, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "memory"))
    assert found.keys() == expected.keys()
    assert all(value.equal(expected[name]) for name, value in found.items())
    trainer.end()
