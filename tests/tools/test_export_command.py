"""Tests of `infinity export` on runs of `infinity train`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from infinity.formats.companions import Companions, keep_tokenizer
from support.command import SMALL, run_here
from support.fine_tuning import make_tokenizer


def test_transformers_loads_exported_model(trained: Path, tmp_path: Path) -> None:
    """No model configuration has to be given, and training can start from the export."""
    done = run_here("export", trained / "nvme", "--out", tmp_path / "hf", "--file-size", "300KiB", "--json")
    assert done.status == 0, done.errors
    assert done.summary["step"] == 2
    assert {"model.safetensors.index.json", "config.json", "tokenizer.json"} <= {
        Path(file).name for file in done.summary["files"]
    }
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sum(4 * param.numel() for param in model.parameters()) == done.summary["bytes"]
    again = [tmp_path / "hf" if word == "tiny" else word for word in SMALL]
    (tmp_path / "text").write_text("some text\n" * 100)
    done = run_here(*again, "--data", "text", "--max_steps", "1", "--json", "--out", tmp_path / "again")
    assert done.status == 0, done.errors


def _pretrained(folder: Path) -> Path:
    """Save a small MoE model, whose stored names differ from its parameter names, with a tokenizer."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    config = MixtralConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=2, vocab_size=300, num_local_experts=4, bos_token_id=None,
                           eos_token_id=None, max_position_embeddings=64)  # fmt: skip
    model = MixtralForCausalLM(config)
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def test_export_restores_pretrained_folder_layout(tmp_path: Path) -> None:
    """The companion files are exported even if the pretrained folder has been removed."""
    folder = _pretrained(tmp_path / "hf")
    names, files = set(load_file(folder / "model.safetensors")), {file.name for file in folder.iterdir()}
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (tmp_path / "text").write_text("some text\n" * 100)
    words = [folder if word == "tiny" else word for word in SMALL]
    done = run_here(*words, "--data", "text", "--bf16", "false", "--max_steps", "1", "--json", "--out", "o")
    assert done.status == 0, done.errors
    shutil.rmtree(folder)
    assert run_here("export", tmp_path / "o" / "nvme", "--out", tmp_path / "out").status == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == files
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == names
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"] == tokenizer
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.5


def test_chat_templates_of_another_tokenizer_are_not_exported(tmp_path: Path) -> None:
    """Its own additional templates are."""
    old, new = make_tokenizer(tmp_path / "old"), make_tokenizer(tmp_path / "new")
    old.chat_template = {"default": "a", "rag": "b"}
    new.chat_template = {"default": "a", "tool_use": "c"}
    for tokenizer in (old, new):
        keep_tokenizer(tmp_path, tokenizer)
    found = Companions.of_run(tmp_path).files
    assert [name for name in found if "/" in name] == ["additional_chat_templates/tool_use.jinja"]


def test_unreadable_companion_stops_export(trained: Path, tmp_path: Path) -> None:
    """The message names the file, and no partial export remains."""
    (copies,) = trained.glob("nvme/*/checkpoints/model")
    (copies / "vocab.json").symlink_to("/proc/self/mem")  # EIO, for root too
    try:
        done = run_here("export", trained / "nvme", "--out", tmp_path / "hf")
    finally:
        (copies / "vocab.json").unlink()
    assert done.status == 2
    assert "model/vocab.json cannot be read: Input/output error" in done.errors
    assert not list(tmp_path.glob("*hf*"))


def test_export_selects_step_and_dtype(trained: Path, tmp_path: Path) -> None:
    done = run_here("export", trained / "nvme", "--out", tmp_path / "hf", "--step", 1, "--dtype", "bf16")
    assert done.status == 0, done.errors
    assert "step 1 of" in done.output
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_dcp_export_contains_model_and_optimizer(trained: Path, tmp_path: Path) -> None:
    """Every tensor is in a separate file."""
    done = run_here("export", trained / "nvme", "--out", tmp_path / "dcp", "--to", "dcp", "--json")
    assert done.status == 0, done.errors
    assert str(tmp_path / "dcp" / ".metadata") in done.summary["files"]
    assert len(done.summary["files"]) > 3
    stored = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert {key.split(".")[0] for key in stored} == {"model", "optim"}
    done = run_here("export", trained / "nvme", "--out", tmp_path / "person", "--to", "dcp")
    assert "step 2 of" in done.output
    assert "config.json" not in done.output
