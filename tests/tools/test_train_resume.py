"""Tests of `infinity train --resume`: values from the checkpoint or the command line, and when a new run starts."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from infinity_tools.presets import find_model
from support.command import SMALL, Finished, run_here, run_process


def error_text(ended: Finished) -> str:
    """Return stderr without line breaks."""
    return " ".join(ended.errors.split())


def test_checkpoint_values_override_command_line(tmp_path: Path) -> None:
    """Ignored options are listed, and the losses match an uninterrupted run bitwise."""
    recipe = ["--lr", "2e-3", "--weight-decay", "0.3", "--warmup-steps", "1", "--lr-steps", "6", "--max-grad-norm", "1"]
    straight = run_here(*SMALL, *recipe, "--steps", "6", "--out", "a", "--json").summary
    run_here(*SMALL, *recipe, "--steps", "3", "--out", "b")
    other = ["--lr", "9e-3", "--weight-decay", "0.1", "--warmup-steps", "3", "--max-grad-norm", "1"]
    ended = run_here(*SMALL, *other, "--steps", "6", "--out", "b", "--resume")
    assert ended.status == 0
    assert (
        "values from the checkpoint are used: --lr 0.002 (not 0.009), --warmup-steps 1 (not 3), "
        "--weight-decay 0.3 (not 0.1); pass --override"
    ) in error_text(ended)
    summary = json.loads((tmp_path / "b/summary.json").read_text())
    assert summary["losses"] == straight["losses"][3:]
    assert summary["recipe"] == straight["recipe"] == {
        "lr": 2e-3, "weight_decay": 0.3, "warmup_steps": 1, "lr_steps": 6, "max_grad_norm": 1.0
    }  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "b/steps.jsonl").read_text().splitlines()]
    expected = [json.loads(line)["lr"] for line in (tmp_path / "a/steps.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == expected


def test_override_uses_command_line_values(tmp_path: Path) -> None:
    """Only the given options change, and the next checkpoint records them."""
    run_here(*SMALL, "--lr", "2e-3", "--warmup-steps", "0", "--steps", "2", "--out", "o")
    ended = run_here(
        *SMALL, "--lr", "1e-3", "--max-grad-norm", "2", "--steps", "3", "--out", "o", "--resume", "--override"
    )
    assert "replace the values in the checkpoint: --lr 0.001 (was 0.002), --max-grad-norm 2 (was off)" in error_text(
        ended
    )
    assert "the learning rate stays at 0.0001 after step 2" in error_text(ended)
    assert "--override --lr-steps 3" in error_text(ended)
    row = json.loads((tmp_path / "o/steps.jsonl").read_text().splitlines()[-1])
    assert row["lr"] == pytest.approx(1e-4)
    recipe = run_here(*SMALL, "--steps", "4", "--out", "o", "--resume", "--json").summary["recipe"]
    assert (recipe["lr"], recipe["weight_decay"], recipe["max_grad_norm"]) == (1e-3, 0.1, 2.0)
    assert "--override requires --resume" in run_here(*SMALL, "--override").errors


def test_checkpoint_and_command_line_options_are_validated_together(tmp_path: Path) -> None:
    """Each is valid alone; a rejected command leaves the run unchanged."""
    run_here(*SMALL, "--steps", "1", "--out", "o")
    again = ["train", "--resume", "--out", "o", *SMALL[-4:], "--steps", "2"]
    ended = run_here(*again, "--seq", "48")
    assert ended.status == 2
    assert "--batch-tokens 128 is not a multiple of --seq 48; try 144" in error_text(ended)
    ended = run_here(*again, "--batch-tokens", "16")
    assert "--batch-tokens 16 is not a multiple of --seq 32; try 32" in error_text(ended)
    ended = run_here(*again, "--batch-tokens", "8192", "--seq", "4096", "--eval-every", "1")
    assert "--eval-every 1 requires --eval-data or --eval-split" in error_text(ended)
    assert "resumed at step 1" in run_here(*again, "--seq", "64").errors


def test_changed_batch_size_and_model_are_reported(tmp_path: Path) -> None:
    """The values of the command line are used."""
    config = json.loads(find_model("tiny").config.to_json_string())
    (tmp_path / "one.json").write_text(json.dumps(config))
    (tmp_path / "two.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    run_here(*SMALL, "--model", "one.json", "--steps", "1", "--out", "o")
    ended = run_here(*SMALL, "--model", "two.json", "--batch-tokens", "64", "--steps", "2", "--out", "o", "--resume")
    assert "replace the values in the checkpoint: batch_tokens 64 (was 128)" in error_text(ended)
    assert "the model differs from the one in the checkpoint: rms_norm_eps 0.5 (was 1e-06)" in error_text(ended)
    same = run_here(*SMALL, "--model", "two.json", "--batch-tokens", "64", "--steps", "3", "--out", "o", "--resume")
    assert "checkpoint" not in error_text(same).replace("--resume", ""), "nothing differs from the checkpoint"


def test_resume_auto_starts_or_resumes_run(tmp_path: Path) -> None:
    """The same command can be repeated until the run has finished."""
    train = [*SMALL, "--nvme", "n", "--out", "o", "--resume", "auto"]
    first = run_here(*train, "--steps", "2")
    assert first.status == 0
    assert "new (no checkpoint" in first.errors
    second = run_here(*train, "--steps", "3")
    assert "resumed at step 2" in second.errors
    assert "has already finished at step 3" in run_here(*train, "--steps", "3").errors
    assert len(list((tmp_path / "n").glob("*/checkpoints"))) == 1


@pytest.mark.parametrize("state", ["damaged", "other model", "part of the ranks", "no marker", "other drive"])
def test_resume_auto_rejects_unusable_checkpoint(state: str, tmp_path: Path) -> None:
    """No new run is started, and nothing is changed."""
    train = [*SMALL, "--out", "o", "--steps", "2"]
    folders = ["--nvme", "p", "--nvme", "q"] if state == "other drive" else []
    for name in ("p", "q"):
        (tmp_path / name).mkdir()
    run_here(*train, *folders)
    manifest = next(tmp_path.glob("*/**/checkpoints/step*.json"))
    root, options, expected = manifest.parent.parent, [], "but no complete checkpoint"
    if state == "damaged":
        manifest.write_bytes(manifest.read_bytes()[:-100])
        expected = "malformed"
    elif state == "other model":
        config = json.loads(find_model("tiny").config.to_json_string())
        (tmp_path / "other.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
        options, expected = ["--model", "other.json"], "belongs to a different model"
    elif state == "part of the ranks":
        manifest.rename(manifest.with_name(manifest.name.replace("-of-00001", "-of-00002")))
    elif state == "no marker":
        (root / "infinity.run").unlink()
    else:
        shutil.rmtree(tmp_path / "p")
        folders = ["--nvme", "q"]
    before = sorted(tmp_path.glob("*/*/**/*"))
    ended = run_here(*train, *folders, *options, "--steps", "3", "--resume", "auto")
    assert ended.status == 2, ended.errors
    assert expected in error_text(ended)
    assert sorted(tmp_path.glob("*/*/**/*")) == before


@pytest.mark.wide
def test_all_ranks_agree_on_resume_auto(tmp_path: Path) -> None:
    """Two ranks start the same run and resume it together."""
    train = [*SMALL, "--out", "o", "--resume", "auto", "--json"]
    first = run_process(tmp_path, *train, "--steps", "1", ranks=2).summary
    second = run_process(tmp_path, *train, "--steps", "2", ranks=2).summary
    assert (first["first_step"], second["first_step"]) == (1, 2)
    assert first["run_id"] == second["run_id"]


@pytest.mark.parametrize(
    ("option", "named"),
    [(("--resume-step", "1"), "run.resume_step"), (("--resume-path", "old"), "run.resume_paths")],
)
def test_resume_auto_rejects_fixed_resume_point(option: tuple[str, str], named: str, tmp_path: Path) -> None:
    """Otherwise, a script that is restarted repeatedly would return to the same checkpoint each time."""
    (tmp_path / "old").mkdir()
    (tmp_path / "n").mkdir()
    ended = run_here(*SMALL, "--nvme", "n", "--resume", "auto", *option)
    assert ended.status == 2
    assert f'{named} cannot be combined with run.resume = "auto"' in error_text(ended)


def test_suggested_commands_work_after_training(tmp_path: Path) -> None:
    """The commands run exactly as the summary prints them."""
    ended = run_here(*SMALL, "--steps", "2", "--out", "my out", "--seed", "3", "--lr", "1e-3")
    summary = json.loads((tmp_path / "my out/summary.json").read_text())
    assert summary["checkpointed_step"] == 2
    assert f"step 2 of run {summary['run_id']} is checkpointed in" in ended.output
    commands = summary["next"]
    assert all(command in ended.output for command in commands.values())
    assert commands["resume"].startswith("infinity train --model tiny --batch-tokens 128 --seq 32"), (
        "explicit options are repeated"
    )
    assert run_here(*shlex.split(commands["export"])[1:]).status == 0
    assert (tmp_path / "my out/step2/model.safetensors").exists()
    again = run_here(*shlex.split(commands["resume"])[1:])
    assert "resumed at step 2" in again.errors
    assert "step 4/4" in again.errors
    assert run_here(*shlex.split(commands["free"])[1:], "--yes").status == 0
    assert not list((tmp_path / "my out/nvme").glob("*/*.pages"))


def test_keep_never_removes_state(tmp_path: Path) -> None:
    """The output reports this."""
    ended = run_here(*SMALL, "--steps", "1", "--out", "o", "--keep", "never")
    assert "no state was kept on NVMe (--keep never)" in ended.output
    assert "run.keep" not in ended.errors
    assert not (tmp_path / "o/nvme").exists()
    assert json.loads((tmp_path / "o/summary.json").read_text())["next"] == {}


def test_checkpoint_clipping_rejects_updates_in_backward(tmp_path: Path) -> None:
    """The error is raised before the first step, and the run is unchanged."""
    train = [*SMALL, "--out", "o"]
    assert run_here(*train, "--steps", "1", "--max-grad-norm", "1").status == 0
    ended = run_here(*train, "--steps", "2", "--resume", "--update", "in_backward")
    assert ended.status == 2
    assert "the checkpoint's --max-grad-norm 1 " in error_text(ended)
    assert "use --update in_forward" in error_text(ended)
    assert "resumed at step 1" in run_here(*train, "--steps", "2", "--resume").errors


def test_steps_log_has_every_step_once_after_crash(tmp_path: Path) -> None:
    """Steps after the last checkpoint are repeated, and a truncated line is dropped."""
    train = [*SMALL, "--out", "o", "--checkpoint-every", "2", "--retained-checkpoints", "2", "--steps"]
    run_here(*train, "4")
    log = tmp_path / "o/steps.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines, lines[3].replace('"step": 4', '"step": 5'), '{"step": 6, "los']))  # as if killed
    run_here(*train, "6", "--resume")
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    run_here(*train, "6", "--resume", "--resume-step", "4")
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == steps


def test_suggested_commands_refer_to_their_own_run(tmp_path: Path) -> None:
    """They are stored in summary.json and may be used after newer runs."""
    train = [*SMALL, "--nvme", "nvme", "--steps", "2"]
    commands = run_here(*train, "--out", "a", "--json").summary["next"]
    newer = run_here(*train, "--out", "b", "--seed", "9", "--json").summary["run_id"]
    exported = json.loads(run_here(*shlex.split(commands["export"])[1:], "--json").output)
    assert exported["run_id"] != newer
    assert exported["run_id"] == json.loads((tmp_path / "a/summary.json").read_text())["run_id"]
    again = run_here(*shlex.split(commands["resume"])[1:], "--json").summary
    assert (again["run_id"], again["first_step"]) == (exported["run_id"], 3)
    late = run_here(*shlex.split(commands["export"])[1:], "--out", "late")
    assert late.status == 2
    assert "no complete checkpoint of step 2" in late.errors, (
        "a later step is not exported to a folder named after step 2"
    )


def test_run_resume_setting_enables_resume_options(tmp_path: Path) -> None:
    train = [*SMALL, "--nvme", "nvme", "--out", "o"]
    run_here(*train, "--steps", "2", "--checkpoint-every", "1", "--retained-checkpoints", "2")
    (tmp_path / "c.toml").write_text('[run]\nresume = "latest"\n')
    ended = run_here(*train, "--steps", "3", "--config", "c.toml", "--resume-step", "1", "--override", "--json")
    assert ended.status == 0, ended.errors
    assert ended.summary["first_step"] == 2
