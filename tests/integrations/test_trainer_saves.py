"""`save_model` of a Trainer whose state is on NVMe."""

from __future__ import annotations

from pathlib import Path

import torch

from support.trainers import build, make


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


def test_save_only_model(tmp_path: Path) -> None:
    """Checkpoints are exports then, as many as are asked for, and no commit is made."""
    out, nvme = tmp_path / "out", tmp_path / "nvme"
    saved = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True, "save_total_limit": 2}
    trainer = make(out, build(), nvme=nvme, **saved)
    trainer.train()
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    found = {path.name for path in (out / "checkpoint-6").iterdir()}
    assert {"model.safetensors", "config.json", "trainer_state.json"} <= found
    assert not found & {"infinity.json", "optimizer.pt"}
    trainer.end()
    assert not nvme.exists()  # a run without a commit leaves nothing
