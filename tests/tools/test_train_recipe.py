"""Tests of the keys and values of `infinity train`: recipes, the command line, and messages about mistakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import infinity
from infinity import Config
from infinity.errors import ConfigError
from infinity_tools.presets import find_model
from infinity_tools.train import model
from infinity_tools.train import recipe as recipes
from support.command import SMALL, run_here

VALUES: dict[tuple[str, ...], dict[str, Any]] = {
    ("--learning_rate", "2e-5"): {"learning_rate": 2e-5},
    ("--learning-rate=2e-5",): {"learning_rate": 2e-5},
    ("--packing",): {"packing": True},
    ("--packing", "false"): {"packing": False},
    ("--report_to", "tensorboard", "wandb"): {"report_to": ["tensorboard", "wandb"]},
    ("--lr_scheduler_kwargs", '{"min_lr_rate": 0.1}'): {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    ("--max_grad_norm", "-1"): {"max_grad_norm": -1.0},
    ("--offload.state.format", "8bit"): {"offload.state.format": "8bit"},
    ("--offload.memory.host_bytes", "1073741824"): {"offload.memory.host_bytes": "1GiB"},
    ("--offload.storage.paths", "a", "b"): {"offload.storage.paths": ["a", "b"]},
    ("--offload.storage.queue-depth", "64"): {"offload.storage.queue_depth": 64},
    ("--peft.r", "16"): {"peft.r": 16},
    ("--peft.target_modules", "q_proj"): {"peft.target_modules": ["q_proj"]},
    ("--peft.target_modules", "all-linear"): {"peft.target_modules": "all-linear"},
    ("--quantize", "nf4"): {"quantize": "nf4"},
    ("--peft.target_modules", "q_proj", "v_proj"): {"peft.target_modules": ["q_proj", "v_proj"]},
    ("--peft.modules_to_save", "null"): {"peft.modules_to_save": None},
    ("--columns", "prompt=question,completion=answer"): {"columns": {"prompt": "question", "completion": "answer"}},
    ("--eval_data", "a", "--eval_split", "test"): {"eval_data": ["a"], "eval_split": "test"},
    ("--early_stopping_patience", "3"): {"early_stopping_patience": 3},
}


def test_words_become_typed_values() -> None:
    for words, expected in VALUES.items():
        assert recipes.checked(recipes.of_words(words), "sft") == expected, words


def test_existing_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jinja").touch()
    for key in ("chat_template_path", "tokenizer", "model"):
        assert recipes.checked({key: ["t.jinja"]}, "sft") == {key: str(tmp_path / "t.jinja")}
        assert recipes.checked({key: ["other"]}, "sft") == {key: "other"}


def test_recipe_file_has_the_same_values(tmp_path: Path) -> None:
    """YAML reads 2e-5 as text, and sections may be nested."""
    expected: dict[str, Any] = {key: value for values in VALUES.values() for key, value in values.items()}
    recipes.write(tmp_path / "recipe.yaml", expected)
    assert recipes.checked(recipes.read(tmp_path / "recipe.yaml"), "sft") == expected
    (tmp_path / "other.yaml").write_text(
        "learning_rate: 2e-5\nnvme: a\noffload:\n  state: {format: split}\n  run.seed: 3\npeft: {r: 8}\n"
    )
    assert recipes.checked(recipes.read(tmp_path / "other.yaml"), "sft") == {
        "learning_rate": 2e-5, "offload.storage.paths": ["a"], "offload.state.format": "split", "offload.run.seed": 3,
        "peft.r": 8,
    }  # fmt: skip


WRONG: dict[tuple[str, ...], str] = {
    ("--learning_rat", "1"): "did you mean --learning_rate?",
    ("--load_in_4bit", "true"): "did you mean --quantize?",
    ("--quantize", "int4"): "not one of int8, nf4",
    ("--steps", "1"): "did you mean --max_steps?",
    ("--metrics_prt", "1"): "did you mean --metrics_port?",
    ("--nproc", "2"): "nproc cannot be part of a recipe",
    ("--max_steps", "many"): "invalid int value: 'many'",
    ("--max_steps",): "expected one argument",
    ("--lr_scheduler_type", "cosin"): "invalid choice: 'cosin'",
    ("--offload.state.formt", "8bit"): "did you mean state.format?",
    ("--offload.state.format", "9bit"): "'9bit'",
    ("--offload.state.format", "8bit", "split"): "requires one value",
    ("--peft.lora_alph", "16"): "did you mean --peft.lora_alpha?",
    ("--columns", "question"): "prompt=question,completion=answer",
    ("--early_stopping_patience", "0"): "above 0",
    ("--lr_scheduler_kwargs", "{min_lr: 1}"): "is not valid JSON",
    ("--method", "ppo"): "not one of sft, dpo",
    ("--beta", "0.1"): "--beta is not an option of infinity train",
}


def test_mistakes_name_the_key_and_the_fix() -> None:
    for words, message in WRONG.items():
        with pytest.raises(ConfigError) as caught:
            recipes.checked(recipes.of_words(words), "sft")
        assert message in str(caught.value), words
    assert recipes.checked({"beta": ["0.1"]}, "dpo") == {"beta": 0.1}


def test_settings_of_a_file_are_part_of_the_recipe() -> None:
    settings = Config().with_values(**{"storage.paths": ["/a"], "memory.host_bytes": "3MiB", "telemetry.timeline": "t"})
    found = recipes.with_settings({"model": "tiny", "offload.run.seed": 0}, settings)
    assert found == {"model": "tiny", "offload.storage.paths": ["/a"], "offload.memory.host_bytes": "3MiB"}


def test_conflicts_with_a_run_to_resume_are_fixed_or_change_it() -> None:
    stored = {"model": "tiny", "max_steps": 2, "learning_rate": 1e-3, "peft.r": 4, "data": ["/a"], "output_dir": "/o"}
    given = {"model": "tiny", "max_steps": 4, "peft.r": 8, "peft.lora_alpha": 8, "data": ["/b"], "output_dir": "/p"}
    fixed, changed = recipes.conflicts(given, stored)
    assert (fixed, changed) == ({"peft.r": 8, "peft.lora_alpha": 8, "data": ["/b"]}, {"max_steps": 4})
    assert recipes.conflicts({"adam_beta1": 0.9, "seed": 3}, stored) == ({"seed": 3}, {}), "0.9 is the default"
    assert recipes.shown(fixed, stored) == "data /b (was /a), peft.lora_alpha 8 (was not set), peft.r 8 (was 4)"


def test_quantized_weights_require_pretrained_model() -> None:
    pytest.importorskip("torchao")
    done = run_here(*SMALL, "--max_steps", "1", "--out", "o", "--quantize", "int8", "--peft.r", "4")
    assert (done.status, "requires a pretrained model" in done.errors) == (2, True), done.errors


def test_small_host_cache_is_rejected(tmp_path: Path) -> None:
    done = run_here(*SMALL, "--max_steps", "1", "--out", "o", "--host-memory", "64KiB")
    assert (done.status, "the host cache is too small" in done.errors) == (2, True), done.errors
    assert not (tmp_path / "o").exists()


def test_loss_that_is_not_finite_ends_run(tmp_path: Path) -> None:
    """No checkpoint is left."""
    done = run_here(*SMALL, "--out", "o", "--learning_rate", "1e30", "--warmup_steps", "0", "--max_steps", "4")
    assert (done.status, "lower --learning_rate" in done.errors) == (1, True), done.errors
    assert "Traceback" not in done.errors
    assert not list(tmp_path.glob("o/nvme/*/checkpoints/step*"))


def test_pretrained_model_without_data_or_tokenizer_is_rejected(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("some text\n" * 100)
    done = run_here("train", "--model", "model", "--out", "o")
    assert done.status == 2
    assert "--data is required" in done.errors
    done = run_here("train", "--model", "model", "--data", "text", "--out", "o")
    assert done.status == 2
    assert "--tokenizer" in done.errors


def test_srun_without_torchrun_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, every task would train the same model."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    done = run_here(*SMALL)
    assert done.status == 2
    assert "srun --ntasks-per-node=1 torchrun" in done.errors


def test_weight_that_nf4_cannot_quantize_names_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the library names arguments of its functions instead."""
    refused = ConfigError("NF4WeightOnlyConfig cannot quantize a weight of shape (3, 5): odd; choose a different one")
    monkeypatch.setattr(infinity, "from_pretrained", mock.Mock(side_effect=refused))
    monkeypatch.setattr(model, "_quantization", mock.Mock())
    source = replace(find_model("tiny"), weights=tmp_path)
    recipe = {"model": "tiny", "quantize": "nf4", "peft.r": 4}
    with pytest.raises(ConfigError, match=r"\(3, 5\): odd; pass --quantize int8, or omit it$"):
        model.build_model(recipe, source, None, bf16=False)
