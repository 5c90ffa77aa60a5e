"""Tests of the programs in examples/: they run in the same way as a user starts them.

Programs whose APIs `tests/integrations` and `tests/models` test are only run by `make test-wide`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from support.processes import run_program
from support.tables import WIDE

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, name: str, *arguments: object, ranks: int = 0, torchrun: bool = False) -> str:
    """Run an example in an empty folder and return its output. Without `torchrun`, ranks start more quickly."""
    (work := folder / "work").mkdir(exist_ok=True)
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "XDG_RUNTIME_DIR": str(folder)}
    if torchrun:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        done = subprocess.run(
            [sys.executable, *launcher, EXAMPLES / name, *map(str, arguments)],
            cwd=work, capture_output=True, text=True, check=False, env=os.environ | environment,
        )  # fmt: skip
    else:
        done = run_program(EXAMPLES / name, *arguments, folder=work, environment=environment, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert not list(work.iterdir()), "the example wrote to its working directory"
    return done.stdout


def losses(printed: str) -> list[float]:
    """Return the losses of all steps."""
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]


def test_training_loop_resumes(tmp_path: Path) -> None:
    """The second call resumes from the checkpoint of the first."""
    first = run(tmp_path, "training_loop.py", tmp_path / "nvme", "--steps", 2)
    assert len(losses(first)) == 2
    assert first.endswith("checkpointed step 2\n")
    again = run(tmp_path, "training_loop.py", tmp_path / "nvme", "--steps", 1)
    assert again.startswith("resumed after step 2\nstep 3: ")
    assert again.endswith("checkpointed step 3\n")


@WIDE
def test_pretrained_exports_trained_weights(tmp_path: Path) -> None:
    """The exported tensors have the names of the original ones and different values."""
    printed = run(tmp_path, "pretrained.py", tmp_path / "run", "--out", tmp_path / "out")
    assert len(losses(printed)) == 3
    with (
        safe_open(tmp_path / "run" / "weights" / "model.safetensors", "pt") as began,
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as ended,
    ):
        assert sorted(began.keys()) == sorted(ended.keys())
        name = "model.layers.0.mlp.up_proj.weight"
        assert not began.get_tensor(name).equal(ended.get_tensor(name))


@WIDE
def test_lora_exports_an_adapter(tmp_path: Path) -> None:
    printed = run(tmp_path, "lora.py", tmp_path / "run", "--out", tmp_path / "out")
    assert len(losses(printed)) == 3
    assert printed.endswith(f"{tmp_path / 'out'}: 19520 adapter parameters\n")
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as ended:
        assert ended.get_tensor("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight").any()


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=WIDE)])
def test_two_ranks_share_a_checkpoint(torchrun: bool, tmp_path: Path) -> None:
    printed = run(tmp_path, "two_ranks.py", tmp_path / "nvme", ranks=2, torchrun=torchrun)
    assert losses(printed)[-1] < losses(printed)[0]
    assert printed.endswith("checkpointed by 2 ranks\n")


@WIDE
def test_muon_trains_with_two_optimizers(tmp_path: Path) -> None:
    printed = run(tmp_path, "muon.py", tmp_path / "nvme")
    assert losses(printed)[-1] < losses(printed)[0]
    assert printed.endswith("checkpointed step 5\n")


def test_plain_torch_trains_with_a_settings_file(tmp_path: Path) -> None:
    printed = run(tmp_path, "plain_torch.py", tmp_path / "run")
    assert losses(printed)[1] < losses(printed)[0]
    assert "'momentum_buffer': (128,)" in printed
    assert (tmp_path / "run" / "infinity.toml").exists()


def test_trainer_resumes_and_exports(tmp_path: Path) -> None:
    """The second call resumes from the checkpoint of the first and exports the trained model."""
    first = run(tmp_path, "trainer.py", tmp_path / "nvme", "--steps", 2)
    again = run(tmp_path, "trainer.py", tmp_path / "nvme", ranks=2)
    assert len(losses(first)) < len(losses(again)) == 4
    assert [path.name for path in (tmp_path / "nvme" / "out").glob("checkpoint-*")]
    with safe_open(tmp_path / "nvme" / "exported" / "model.safetensors", "pt") as ended:
        assert "model.layers.0.mlp.up_proj.weight" in ended.keys()  # noqa: SIM118


@WIDE
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_fine_tuning_exports_model_and_tokenizer(method: str, tmp_path: Path) -> None:
    """SFT runs on two ranks."""
    ranks = {"sft": 2, "dpo": 0}[method]
    printed = run(tmp_path, "fine_tuning.py", tmp_path / "run", "--method", method, ranks=ranks)
    assert len(losses(printed)) == 4
    trained = {file.name for file in (tmp_path / "run" / "trained").iterdir()}
    assert trained >= {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"}


def test_distributed_checkpoint_continues_in_memory(tmp_path: Path) -> None:
    """The losses of plain FSDP2 equal those of the offloaded run, after a save to a folder or to an object store."""
    printed = run(tmp_path, "distributed_checkpoint.py", tmp_path / "one", "--checkpoint", "memory://bucket/step-3")
    assert len(losses(printed)) == 3
    printed = run(tmp_path, "distributed_checkpoint.py", tmp_path / "two", ranks=2)
    assert len(losses(printed)) == 3
    assert (tmp_path / "two" / "step-3" / ".metadata").exists()


@WIDE
def test_accelerate_loop_resumes(tmp_path: Path) -> None:
    """The second call resumes from the folder that Accelerate's `save_state` wrote."""
    arguments = (tmp_path / "nvme", "--checkpoint", tmp_path / "checkpoint")
    first = run(tmp_path, "accelerate_loop.py", *arguments)
    assert len(losses(first)) == 4
    assert first.endswith("saved step 4\n")
    again = run(tmp_path, "accelerate_loop.py", *arguments, "--resume")
    assert again.startswith("resumed after step 4\nstep 5: ")
    assert again.endswith("saved step 8\n")


@WIDE
def test_lightning_loop_resumes(tmp_path: Path) -> None:
    """The second call resumes from the checkpoint of the first."""
    arguments = (tmp_path / "nvme", "--saves", tmp_path / "saves")
    first = run(tmp_path, "lightning_loop.py", *arguments)
    assert len(losses(first)) == 4
    assert first.endswith("saved step 4\n")
    again = run(tmp_path, "lightning_loop.py", *arguments, "--resume", tmp_path / "saves" / "last.ckpt")
    assert "step 5: loss" in again
    assert "step 4: loss" not in again
    assert again.endswith("saved step 8\n")


@WIDE
@pytest.mark.usefixtures("ray_folder")
def test_ray_train_trains_two_workers(tmp_path: Path) -> None:
    """`tests/wide/test_ray_train.py` compares the losses, and kills a worker."""
    printed = run(tmp_path, "ray_train.py", tmp_path / "run", "--steps", 2)
    assert "step 2: loss " in printed
    assert [path.name for path in (tmp_path / "run/nvme").glob("*/checkpoints/step*")]


def test_every_example_is_documented_and_tested() -> None:
    """Every program is listed in examples/README.md and run by a test in this file."""
    programs = {file.name for file in EXAMPLES.glob("*.py")}
    assert set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())) == programs
    assert set(re.findall(r'run\(tmp_path, "(\w+\.py)"', Path(__file__).read_text())) == programs
