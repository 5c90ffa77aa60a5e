"""`infinity export` on a run that `infinity train` has committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools_command import SMALL, Finished, run_here
from torch.distributed.checkpoint import FileSystemReader


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with commits of steps 1 and 2."""
    monkeypatch.chdir(tmp_path)
    options = ["--steps", "2", "--commit-every", "1", "--retained-commits", "2", "--json", "--out", "o"]
    assert run_here(*SMALL, *options).status == 0
    return tmp_path / "o" / "nvme"


def _export(*arguments: object) -> Finished:
    return run_here("export", *arguments)


def test_transformers_loads_what_was_exported(committed: Path, tmp_path: Path) -> None:
    """Without a word from the user about the model; and it can be trained on."""
    done = _export(committed, "--out", tmp_path / "hf", "--file-size", "300KiB", "--json")
    assert done.status == 0, done.errors
    assert (done.summary["step"], len(done.summary["files"])) == (2, 5)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sum(4 * param.numel() for param in model.parameters()) == done.summary["bytes"]
    again = [tmp_path / "hf" if word == "tiny" else word for word in SMALL]
    assert run_here(*again, "--steps", "1", "--json", "--out", tmp_path / "again").status == 0


def test_another_step_and_dtype(committed: Path, tmp_path: Path) -> None:
    """Half the bytes, of the commit before; the person is told where."""
    done = _export(committed, "--out", tmp_path / "hf", "--step", 1, "--dtype", "bf16")
    assert done.status == 0, done.errors
    assert "step 1 of" in done.output
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_everything_for_plain_fsdp2(committed: Path, tmp_path: Path) -> None:
    """Weights, moments and what `infinity train` had committed beside them, in several files."""
    done = _export(committed, "--out", tmp_path / "dcp", "--to", "dcp", "--file-size", "300KiB", "--json")
    assert done.status == 0, done.errors
    assert str(tmp_path / "dcp" / ".metadata") in done.summary["files"]
    assert len(done.summary["files"]) > 3
    stored = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert {key.split(".")[0] for key in stored} == {"model", "optim", "infinity"}
    done = _export(committed, "--out", tmp_path / "person", "--to", "dcp")
    assert "step 2 of" in done.output
    assert "config.json" not in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--step", 9), "no commit of step 9"),
        (("--run", "20000101-000000-abcdef"), "no commit of 20000101-000000-abcdef"),
        (("--dtype", "fp64"), "'fp64' is not one of"),
        (("--to", "gguf"), "'gguf' is not known"),
        (("--to", "dcp", "--dtype", "bf16"), "--dtype and --model-config are for --to safetensors"),
        (("--file-size", "many"), "--file-size"),
        (("--model-config", "missing.json"), "missing.json"),
    ],
)
def test_nonsense_is_refused(options: tuple[object, ...], message: str, committed: Path, tmp_path: Path) -> None:
    """With the value; nothing is written."""
    done = _export(committed, "--out", tmp_path / "hf", *options)
    assert done.status == 2
    assert message in done.errors
    assert not (tmp_path / "hf").exists()


def test_a_folder_without_runs(tmp_path: Path) -> None:
    """Is an error."""
    done = _export(tmp_path, "--out", tmp_path / "hf")
    assert done.status == 2
    assert "no commit of any run" in done.errors
