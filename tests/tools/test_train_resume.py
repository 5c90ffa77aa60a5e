"""Tests of `infinity train --resume`: values of the recipe or the command line, and when a new run starts."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from infinity import torchrun
from infinity.errors import ConfigError
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder
from infinity_tools.train import resume
from infinity_tools.train.callbacks import _set_learning_rate
from support.command import SMALL, Finished, run_here, run_ranks

TRAIN = [*SMALL, "--lr_scheduler_type", "constant", "--out", "o"]


def error_text(ended: Finished) -> str:
    """Return stderr without line breaks."""
    return " ".join(ended.errors.split())


def rows(out: Path) -> list[dict[str, float]]:
    """Return the lines of steps.jsonl."""
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def test_given_values_change_the_run_or_conflict_with_it(tmp_path: Path) -> None:
    """A conflict leaves the run unchanged. The new recipe is stored."""
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "c.toml").write_text('[storage]\nqueue_depth = 8\nengine = "auto"\n[state]\nformat = "fp32"\n')
    first = ["--offload.storage.queue-depth=4", "--offload.storage.engine", "threads", "--learning_rate", "2e-3"]
    run_here(*TRAIN, "--data", "text", "--max_steps", "2", *first)
    for options, message in {
        ("--model", "llama-100m"): "model llama-100m (was tiny)",
        ("--weight_decay", "0.5"): "weight_decay 0.5 (was 0.1)",
        ("--peft.r", "4"): "peft.r 4 (was not set)",
        ("--per_device_train_batch_size", "2"): "a step draws 2 examples, but 4 in the run to resume",
    }.items():
        ended = run_here("train", "--resume", "--out", "o", "--max_steps", "3", *options)
        assert (ended.status, message in error_text(ended)) == (2, True), ended.errors
    more = ["--max_steps", "4", "--learning_rate", "1e-3", "--gradient_accumulation_steps", "2"]
    more += ["--per_device_train_batch_size", "2", "--config", "c.toml", "--adam_beta1", "0.9"]
    ended = run_here("train", "o/recipe.yaml", "--resume", *more)
    assert ended.status == 0, ended.errors
    assert (
        "recipe of the run: gradient_accumulation_steps 2 (was not set), learning_rate 0.001 (was 0.002), max_steps 4 "
        "(was 2), offload.storage.engine not set (was threads), offload.storage.queue_depth 8 (was 4), per_device"
    ) in error_text(ended)
    assert [row["learning_rate"] for row in rows(tmp_path / "o")] == [2e-3, 2e-3, 1e-3, 1e-3]
    assert "has already finished at step 4" in run_here("train", "--resume", "--out", "o").errors
    (tmp_path / "text").write_bytes(bytes(range(255, -1, -1)) * 40)
    ended = run_here("train", "--resume", "--out", "o", "--max_steps", "5")
    assert ended.status == 2
    assert "the prepared data differs" in error_text(ended)


def test_resume_auto_starts_or_resumes_run(tmp_path: Path) -> None:
    """The same command can be repeated until the run has finished."""
    train = [*TRAIN, "--nvme", "n", "--resume", "auto"]
    first = run_here(*train, "--max_steps", "2")
    assert first.status == 0
    assert "new (no checkpoint" in first.errors
    second = run_here(*train, "--max_steps", "3")
    assert "resumed at step 2" in second.errors
    assert "has already finished at step 3" in run_here(*train, "--max_steps", "3").errors
    assert len(list((tmp_path / "n").glob("*/checkpoints"))) == 1


def test_resume_auto_starts_again_after_an_interrupted_first_checkpoint(tmp_path: Path) -> None:
    """The Trainer's folder is written before the manifest. An empty drive is not proof of an interrupted checkpoint."""
    train = [*TRAIN, "--nvme", "n", "--max_steps", "1"]
    run_here(*train)
    (manifest,) = tmp_path.glob("n/*/checkpoints/step*.json")
    manifest.unlink()
    assert "nothing to resume" in error_text(run_here(*train, "--resume"))
    (tmp_path / "n").rename(tmp_path / "elsewhere")
    (tmp_path / "n").mkdir()
    assert "nothing to resume" in error_text(run_here(*train, "--resume", "auto"))
    (tmp_path / "n").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "n")
    ended = run_here(*train, "--resume", "auto")
    assert (ended.status, "new (no checkpoint to resume from)" in ended.errors) == (0, True), ended.errors
    assert "has already finished at step 1" in run_here(*train, "--resume", "auto").errors


def test_resume_auto_rejects_unusable_checkpoint(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """No new run is started, and nothing is changed."""
    for name in ("p", "q"):
        (tmp_path / name).mkdir()
    run_here(*TRAIN, "--max_steps", "2", "--nvme", "p", "--nvme", "q")
    (manifest,) = tmp_path.glob("p/**/checkpoints/step*.json")
    marker, other = manifest.parent.parent / "infinity.run", manifest.name.replace("-of-00001", "-of-00002")
    content = {file: file.read_bytes() for file in (manifest, marker)}
    for state, damage in {
        "damaged": lambda: manifest.write_bytes(content[manifest][:-100]),
        "part of the ranks": lambda: manifest.rename(manifest.with_name(other)),
        "no marker": marker.unlink,
        "other drive": lambda: shutil.rmtree(tmp_path / "p"),
    }.items():
        with subtests.test(state):
            damage()
            before = sorted(tmp_path.glob("[pq]/**/*"))
            folders = ["--nvme", "q"] if state == "other drive" else ["--nvme", "p", "--nvme", "q"]
            ended = run_here(*TRAIN, *folders, "--max_steps", "3", "--resume", "auto")
            assert ended.status == 2, ended.errors
            assert sorted(tmp_path.glob("[pq]/**/*")) == before
            if state == "part of the ranks":
                manifest.with_name(other).unlink()
            for file, kept in content.items():
                if file.parent.is_dir():
                    file.write_bytes(kept)


@pytest.mark.wide
def test_ranks_resume_together_and_their_number_changes() -> None:
    first = run_ranks(*TRAIN, "--resume", "auto", "--json", "--max_steps", "1").summary
    second = run_ranks(*TRAIN, "--resume", "auto", "--json", "--max_steps", "2").summary
    assert (first["first_step"], second["first_step"]) == (1, 2)
    assert first["run_id"] == second["run_id"]
    few = ["train", "--resume", "--out", "o", "--json", "--max_steps", "3"]
    ended = run_here(*few, "--gradient_accumulation_steps", "3")
    assert "a step draws 12 examples, but 8 in the run to resume" in error_text(ended)
    third = run_here(*few).summary
    fourth = run_ranks(*TRAIN, "--resume", "auto", "--json", "--max_steps", "4").summary
    assert [found["micro_batches"] for found in (second, third, fourth)] == [1, 2, 1]
    assert (third["first_step"], fourth["first_step"]) == (3, 4)
    assert second["tokens_per_step"] == third["tokens_per_step"] == fourth["tokens_per_step"]


@pytest.mark.parametrize(
    ("ranks", "size", "steps", "expected"),
    [(2, 4, 3, {}), (1, 4, 3, (4, 6)), (3, 4, 3, (4, 2)), (4, 4, 3, (3, 2)), (24, 4, 3, (1, 1)), (5, 4, 3, {})],
)
def test_batch_is_divided_among_another_number_of_ranks(
    ranks: int, size: int, steps: int, expected: object, tmp_path: Path
) -> None:
    """A step of the run has drawn 24 examples. Micro-batches are at most as large as before."""
    (tmp_path / "data.json").write_text('{"checksum": "c", "batch": 24}')
    args = SimpleNamespace(per_device_train_batch_size=size, gradient_accumulation_steps=steps)
    found = resume.batch_on(Ranks(rank=0, local_rank=0, world_size=ranks), tmp_path, args)
    assert (tuple(found.values()) if expected else found) == expected


def test_batch_that_cannot_be_divided_raises_an_error(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('{"checksum": "c", "batch": 8}')
    args = SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=1)
    three = SimpleNamespace(world_size=3, on_first=lambda _, check: check())
    with pytest.raises(ConfigError, match=r"8 examples, which cannot be divided equally among 3 ranks"):
        resume.check_data(tmp_path, "c", args, tmp_path, three)


def test_suggested_commands_work_after_training(tmp_path: Path) -> None:
    """The commands run exactly as the summary prints them, in any folder."""
    ended = run_here(*TRAIN[:-1], "my out", "--max_steps", "2")
    summary = json.loads((tmp_path / "my out/summary.json").read_text())
    assert summary["checkpointed_step"] == 2
    assert f"step 2 of run {summary['run_id']} is checkpointed in" in ended.output
    commands = summary["next"]
    assert all(command in ended.output for command in commands.values())
    assert run_here(*shlex.split(commands["export"])[1:]).status == 0
    assert (tmp_path / "my out/step2/model.safetensors").exists()
    again = run_here(*shlex.split(commands["resume"])[1:])
    assert "resumed at step 2" in again.errors
    assert "step 4/4" in again.errors
    late = run_here(*shlex.split(commands["export"])[1:], "--out", "late")
    assert late.status == 2
    assert "no complete checkpoint of step 2" in late.errors
    assert run_here(*shlex.split(commands["free"])[1:], "--yes").status == 0
    assert not list((tmp_path / "my out/nvme").glob("*/*.pages"))


def test_values_replace_stored_values_that_contradict_them() -> None:
    stored = {"max_steps": 4, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    recipe, before = resume.merged({"num_train_epochs": 2.0, "lr_scheduler_type": "constant"}, stored)
    assert recipe == {
        "max_steps": -1, "num_train_epochs": 2.0, "lr_scheduler_type": "constant", "lr_scheduler_kwargs": None
    }  # fmt: skip
    assert {**stored, **before} == {**stored, "num_train_epochs": None}
    assert resume.merged({"lr_scheduler_type": "cosine_with_min_lr"}, stored) == (stored, {})


def test_values_are_those_of_the_method_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("method: dpo\nmodel: tiny\n")
    ended = run_here("train", "--resume", "--out", tmp_path, "--beta", "0.2", "--model", "llama-100m")
    assert "model llama-100m (was tiny)" in error_text(ended)


STATIC = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "a", "--master-port", "29500", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("parent", "options", "comment"),
    [
        ([], STATIC, "# on each of 2 nodes, with its own --node-rank"),
        (
            ["python", "/bin/torchrun", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "train.py", "--x"],
            ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1"],
            "# on each of 2 nodes",
        ),
        (
            ["python", "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "0", "-m", "infinity_tools", "x"],
            ["--nnodes", "2", "--node-rank", "0"],
            "# on each of 2 nodes, with its own --node-rank",
        ),
    ],
)
def test_resume_command_starts_all_nodes_as_before(
    parent: list[str], options: list[str], comment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options are those of the torchrun that started this rank, or fixed node ranks with another launcher."""
    for name, value in {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    cmdline = "".join(f"{word}\0" for word in parent)
    monkeypatch.setattr(torchrun.Path, "read_text", lambda file, **_: cmdline)
    run = RunFolder("run", (tmp_path / "n/run",))
    commands = resume.next_commands({"output_dir": "/o", "max_steps": 2}, run, 2, Ranks(0, 0, 4), stopped=True)
    start = shlex.join(["torchrun", *options])
    assert commands["resume"] == f"{start} -m infinity_tools train /o/recipe.yaml --resume  {comment}"


def test_run_of_epochs_with_few_logs_has_results(tmp_path: Path) -> None:
    """Only tokens of logged steps are counted."""
    (tmp_path / "text").write_bytes(bytes(range(256)))
    options = ["--max_steps", "-1", "--logging_steps", "4", "--hub_token", "secret", "--data", "text", "--out", "o"]
    ended = run_here(*SMALL, *options, "--lr_scheduler_type", "constant", "--json")
    last = rows(tmp_path / "o")[-1]
    assert (ended.summary["steps"], last["step"]) == (9, 8)
    assert ended.summary["tokens_per_step"] == last["num_tokens"] / 8
    assert ended.summary["next"]["resume"].endswith(" --num_train_epochs 6")
    stored = (tmp_path / "o/recipe.yaml").read_text()
    assert all(word not in stored + ended.output for word in ("secret", "min_lr_rate"))


def test_resuming_keeps_learning_rate_of_scheduler_without_base_rate() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    _set_learning_rate(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), optimizer, 0.1)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("option", ["--save_strategy=no", "--save_only_model"])
def test_run_without_checkpoints_removes_its_state(option: str, tmp_path: Path) -> None:
    ended = run_here(*TRAIN, "--max_steps", "1", option)
    assert "no state was kept on NVMe" in ended.output
    assert not list((tmp_path / "o").glob("nvme/*"))
    assert json.loads((tmp_path / "o/summary.json").read_text())["next"] == {}
    if option == "--save_strategy=no":
        again = run_here(*TRAIN, "--max_steps", "2", option, "--resume", "auto", "--json")
        assert again.summary["first_step"] == 1
        assert len(rows(tmp_path / "o")) == 2, "the log of the earlier run is replaced"


def test_resume_selects_checkpoint_and_logs_every_step_once(tmp_path: Path) -> None:
    """Steps after the checkpoint are repeated with the same losses, and a truncated line is dropped."""
    run_here(*TRAIN, "--save_steps", "2", "--save_total_limit", "2", "--max_steps", "4")
    log = tmp_path / "o/steps.jsonl"
    first = rows(tmp_path / "o")
    log.write_text(log.read_text() + '{"step": 5, "los')  # as if killed
    run_here("train", "--resume", "o/checkpoint-2", "--max_steps", "5")
    second = rows(tmp_path / "o")
    assert [row["step"] for row in second] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in second[:4]] == [row["loss"] for row in first]


def test_run_whose_drives_are_lost_resumes_from_its_mirror(tmp_path: Path) -> None:
    """Losses equal those of a run that was not interrupted."""
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    words = [*TRAIN[:-1], "o", "--data", "text", "--save_strategy", "steps", "--save_steps", "2"]
    assert run_here(*words, "--max_steps", "3").status == 0
    expected = [row["loss"] for row in rows(tmp_path / "o")]
    shutil.rmtree(tmp_path / "o")
    assert run_here(*words, "--max_steps", "2", "--offload.run.mirror", f"file://{tmp_path}/mirror").status == 0
    shutil.rmtree(tmp_path / "o" / "nvme")
    ended = run_here("train", "o/recipe.yaml", "--resume", "--max_steps", "3")
    assert ended.status == 0, ended.errors
    assert [row["loss"] for row in rows(tmp_path / "o")] == expected
