"""Tests of `infinity migrate`: how DeepSpeed configurations and each of their keys are translated."""

from __future__ import annotations

import inspect
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from infinity.config import Config, load_config
from infinity_tools.migrate.key_table import TABLE
from infinity_tools.migrate.keys import Key, Status
from infinity_tools.migrate.optimizers import TAKEN
from infinity_tools.migrate.read import read_config
from infinity_tools.migrate.schedulers import SCHEDULERS
from infinity_tools.migrate.translate import Migration, migrate
from support.command import Finished, run_here

INFINITY: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "total_num_steps": 10},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_param": {
            "device": "nvme", "nvme_path": "nvme0", "pin_memory": True, "buffer_count": 5, "buffer_size": 1e6,
            "max_in_cpu": 1e6,
        },
        "offload_optimizer": {"device": "nvme", "nvme_path": "nvme1", "buffer_count": 4, "fast_init": False},
        "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": 1e7,
    },
    "aio": {"block_size": 262144, "queue_depth": 16, "thread_count": 1, "single_submit": False, "overlap_events": True},
}  # fmt: skip
"""Parameters and optimizer state on NVMe, as in DeepSpeed's tutorial."""
TRAINER: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu"},
        "overlap_comm": True, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip
"""Configuration from the documentation of transformers' Trainer."""
TRAINED = """\
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
LlamaForCausalLM(config).save_pretrained("weights")
MODEL, total_steps = "weights", 10
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (8, 16))]
arguments = dict(output_dir="out", max_steps=2, warmup_steps=4, learning_rate=0.01, use_cpu=True, report_to="none")
"""
"""Definitions that the code with transformers' Trainer requires."""
MODEL = """\
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
build_model = lambda: AutoModelForCausalLM.from_config(config)
batches = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (2, 4, 16))]
"""


def translated(config: dict[str, Any], *nvme: str) -> Migration:
    """Return the translation of a configuration."""
    Path("ds.json").write_text(json.dumps(config))
    return migrate(read_config(Path("ds.json")), "ds.json", "infinity.toml", nvme)


def row(done: Migration, name: str) -> Any:
    """Return the row of a key."""
    return next(row for row in done.rows if row.key == name)


def run(config: dict[str, Any], *words: str) -> Finished:
    """Run `infinity migrate` on a configuration."""
    Path("ds.json").write_text(json.dumps(config))
    return run_here("migrate", "ds.json", *words)


def test_nvme_offload_becomes_storage_settings() -> None:
    """The memory estimate is (1e6 + 5 x 1e6) x 2 bytes."""
    done = translated(INFINITY)
    assert done.settings == {
        "storage": {"paths": ["nvme0", "nvme1"], "request_bytes": "256KiB", "queue_depth": 16},
        "memory": {"host_bytes": "12MiB"},
    }
    assert tomllib.loads(done.toml) == done.settings
    assert load_config(done.settings).storage.request_bytes == 262144
    assert "an estimate" in done.toml
    assert not done.refusals


def test_code_omits_disabled_features() -> None:
    assert "batch_size=4" in translated(INFINITY).code
    bare = translated({"zero_optimization": {"stage": 3}}).code
    for word in ("micro_batches", "clip_grad_norm_", "scheduler", "math", "args", "bfloat16", "autocast"):
        assert word not in bare
    assert "build_optimizer(model)" in bare


def test_generated_code_trains() -> None:
    """The code runs unchanged for two steps at DeepSpeed's rates and saves a checkpoint."""
    done = translated(INFINITY)
    Path("infinity.toml").write_text(done.toml)
    names: dict[str, Any] = {}
    exec(MODEL + done.code, names)
    optimizer = names["optimizer"]
    assert (optimizer.steps, optimizer.update_schedule) == (2, "in_forward")
    rate = 0.01 * 0.5  # log(2) / log(4): the second step of DeepSpeed's warm-up
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    optimizer.close()
    listed = run_here("store", "ls", "nvme0", "nvme1", "--json")
    assert [checkpoint["step"] for run in json.loads(listed.output) for checkpoint in run["checkpoints"]] == [2]


def test_number_of_ranks_follows_from_the_batch_sizes() -> None:
    """Without all three sizes, the number is that of the DeepSpeed run."""
    done = translated({**INFINITY, "train_batch_size": 32})
    assert done.ranks == 8
    assert "# For 8 ranks" in done.toml
    assert "torchrun --nproc-per-node 8 train.py" in done.code
    one = translated({**INFINITY, "train_batch_size": 4})
    assert (one.ranks, "python train.py" in one.code, "# For 1 rank," in one.toml) == (1, True, True)
    for sizes in ({}, {"train_batch_size": 33}, {"train_batch_size": "auto"}):
        done = translated({**INFINITY, **sizes})
        assert done.ranks is None
        assert "# For any number of ranks" in done.toml
        assert "--nproc-per-node N train.py" in done.code


def test_trainer_configuration_keeps_the_trainer() -> None:
    """The optimizer and the scheduler of the configuration take precedence, as with DeepSpeed."""
    code = translated(TRAINER).trainer_code
    for line in (
        "model = infinity.from_pretrained(MODEL)",
        "attach(trainer, 'infinity.toml')",
        "from infinity.integrations.transformers import attach",
        "optimizers=(optimizer, scheduler)",
    ):
        assert line in code
    assert "deepspeed=" in code
    assert "attach(trainer, 'infinity.toml', weights=FOLDER)" in run(TRAINER).output
    bare = translated({"bf16": {"enabled": False}, "gradient_clipping": "auto"}).trainer_code
    assert "optimizers=" not in bare
    assert "mp_policy=MixedPrecisionPolicy()" in bare
    assert translated(INFINITY).trainer_code is None


def test_generated_trainer_code_trains() -> None:
    """The schedule starts at the step of the DeepSpeed run if the scheduler is stepped as often before training."""
    done = translated(TRAINER, "nvme")
    Path("infinity.toml").write_text(done.toml)
    made = "scheduler = LambdaLR(optimizer, rate_at)\n"
    assert made in done.trainer_code
    names: dict[str, Any] = {}
    exec(TRAINED + done.trainer_code.replace(made, f"{made}for _ in range(5):\n    scheduler.step()\n"), names)
    optimizer = names["trainer"].optimizer.optimizer
    (lr, decay) = (optimizer.param_groups[0][name] for name in ("lr", "weight_decay"))
    assert (optimizer.steps, lr / names["rate_at"](7), decay) == (2, 1.0, 0.0)
    names["trainer"].end()


def test_defaults_of_deepspeed_do_not_replace_those_of_infinity() -> None:
    """Tools write them into a configuration; they were chosen for DeepSpeed."""
    parameters = {"device": "nvme", "nvme_path": "/a", "max_in_cpu": 1e9, "buffer_count": 5, "buffer_size": 1e8}
    aio = {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}
    done = translated({"zero_optimization": {"offload_param": parameters}, "aio": aio})
    assert done.settings == {"storage": {"paths": ["/a"]}}
    for name, default in (
        ("aio.block_size", "2 MiB"),
        ("aio.queue_depth", "32"),
        ("zero_optimization.offload_param.max_in_cpu", "a quarter of the available memory"),
    ):
        assert row(done, name).status == "not needed"
        assert "DeepSpeed's default; infinity's default" in row(done, name).why
        assert default in row(done, name).why


def test_missing_import_of_optimizer_state_is_explained() -> None:
    """The output also tells how to start the schedule at the step of the DeepSpeed run."""
    said = " ".join(run(INFINITY).output.split())
    assert (
        "Weights are imported; Adam moments and step count are not, because DeepSpeed stores them in pickle files"
        in said
    )
    assert "starts at step N, as in DeepSpeed's folder global_stepN, if you call scheduler.step() N times" in said
    assert "infinity.offload(model, optimizer, 'infinity.toml', weights=FOLDER)" in said


def test_auto_becomes_trainer_argument() -> None:
    done = translated(TRAINER)
    assert not done.refusals
    for line in (
        "if args.bf16 else",
        "infinity.micro_batches(model, args.gradient_accumulation_steps)",
        "lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon",
        "optimizer.clip_grad_norm_(args.max_grad_norm)",
        "WARMUP = max(2, args.get_warmup_steps(total_steps))",
        "TOTAL = total_steps",
    ):
        assert line in done.code
    assert "args (TrainingArguments), total_steps" in done.code
    compile(done.code, "code", "exec")


def test_trainer_arguments_exist() -> None:
    from transformers import TrainingArguments

    for key in TABLE.keys.values():
        for word in key.auto.replace("(", " ").replace(")", " ").replace(",", " ").split():
            if word.startswith("args."):
                name = word.removeprefix("args.")
                assert hasattr(TrainingArguments, name) or name in TrainingArguments.__dataclass_fields__, name


def test_cpu_offload_requires_storage_path() -> None:
    """The path comes from `--nvme`; without it, the output asks for one."""
    assert "paths" not in translated(TRAINER).settings.get("storage", {})
    assert "# paths = " in translated(TRAINER).toml
    assert "at least 16 bytes per parameter" in translated({**TRAINER, "bf16": {}}).toml
    assert "storage.paths is not set" in run(TRAINER).output
    done = translated(TRAINER, "/nvme0/run", "/nvme1/run")
    assert done.settings["storage"]["paths"] == ["/nvme0/run", "/nvme1/run"]


def test_every_zero_stage_is_fully_sharded(subtests: pytest.Subtests) -> None:
    """For stages below 3, the row explains the difference."""
    for stage in [0, 1, 2, 3]:
        with subtests.test(stage=stage):
            done = translated({"zero_optimization": {"stage": stage}})
            assert not done.refusals
            assert ("keeps" in row(done, "zero_optimization.stage").why) == (stage < 3)


def test_duplicate_paths_are_merged() -> None:
    """The path of a device other than NVMe is ignored."""
    zero = {"offload_param": {"device": "nvme", "nvme_path": "/a/./b"}, "offload_optimizer": {"device": "nvme", "nvme_path": "/a/b"}}  # fmt: skip  # noqa: E501
    assert translated({"zero_optimization": zero}).settings["storage"]["paths"] == ["/a/./b"]
    zero["offload_param"]["device"] = "cpu"
    assert translated({"zero_optimization": zero}).settings["storage"]["paths"] == ["/a/b"]


def test_unusual_paths_are_preserved(subtests: pytest.Subtests) -> None:
    for path in ['/with "quotes"', "/back\\slash", "/müßig/\U0001d518", "/del\x7f", "/tab\t/new\nline", "/[red]x"]:
        with subtests.test(path=path):
            zero = {"offload_param": {"device": "nvme", "nvme_path": path}}
            assert run({"zero_optimization": zero}, "--out", "s.toml", "--force").status == 0
            assert load_config("s.toml").storage.paths == (path,)
            assert load_config(tomllib.loads(translated({"zero_optimization": zero}).toml)).storage.paths == (path,)


OPTIMIZERS = {
    "Adam": "torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, fused=True)",
    "AdamW": "torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, fused=True)",
    "Adagrad": "torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True)",
    "SGD": "torch.optim.SGD(model.parameters(), lr=0.1, fused=True)",
    "RMSprop": "torch.optim.RMSprop(model.parameters(), lr=0.1)",
    "Lion": "Lion(model.parameters(), lr=0.1)",
}


def test_supported_optimizers(subtests: pytest.Subtests) -> None:
    """DeepSpeed's Adam decays weights like AdamW, by 0 unless a weight decay is given."""
    for kind, line in OPTIMIZERS.items():
        with subtests.test(kind=kind):
            done = translated({"optimizer": {"type": kind, "params": {"lr": 0.1}}})
            assert f"optimizer = {line}\n" in done.code
            assert not done.refusals


def test_adam_modes() -> None:
    """`adam_w_mode = false` selects Adam, and `torch_adam` uses torch's defaults."""
    done = translated({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}})
    assert "torch.optim.Adam(model.parameters(), weight_decay=0.1, fused=True)" in done.code
    done = translated({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}})
    assert "torch.optim.AdamW(model.parameters(), fused=True)" in done.code


def test_unsupported_optimizers_exit_with_status_1(subtests: pytest.Subtests) -> None:
    """The output suggests a replacement."""
    suggested = {"Muon": "torch.optim.Muon(matrices", "Lamb": "pytorch_optimizer"}
    for kind in ["Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Muon", "MuAdamW", "LBFGS", "Adem"]:
        with subtests.test(kind=kind):
            config = {"optimizer": {"type": kind, "params": {"lr": 0.1, "freeze_step": 5}}}
            done = run(config)
            assert done.status == 1
            assert "no counterpart for optimizer.type." in " ".join(done.output.split())
            assert "build_optimizer(model)" in done.output
            (refusal,) = translated(config).refusals
            assert (refusal.key, suggested.get(kind, "") in refusal.becomes) == ("optimizer.type", True)
            assert kind not in suggested or "is not supported" not in refusal.why


def test_enabled_fp16_is_unsupported() -> None:
    """Only `fp16.enabled` is reported, and the code uses bf16."""
    done = translated(
        {**INFINITY, "fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}, "bf16": {"enabled": False}}
    )
    assert [rejected.key for rejected in done.refusals] == ["fp16.enabled"]
    assert "bf16" in done.refusals[0].becomes
    assert "torch.bfloat16" in done.code
    off = translated({**INFINITY, "fp16": {"enabled": False, "loss_scale": 128}})
    assert not off.refusals
    assert row(off, "fp16.loss_scale").status == "not needed"


def test_unknown_keys_suggest_nearest_key() -> None:
    """The suggestion includes the section."""
    done = translated(
        {"zero_optimisation": {}, "zero_optimization": {"stag": 3}, "nvme_path": "/x", "zzz": 1, "bf16": {}}
    )
    why = {row.key: row.why for row in done.rows if row.status == "unknown key"}
    assert "did you mean zero_optimization?" in why["zero_optimisation"]
    assert "did you mean zero_optimization.stage?" in why["zero_optimization.stag"]
    assert "did you mean zero_optimization.offload_param.nvme_path?" in why["nvme_path"]
    assert "did you mean" not in why["zzz"]


def test_out_of_range_values_keep_default() -> None:
    done = translated({"aio": {"block_size": 5000, "queue_depth": 100000}})
    assert "request_bytes" not in done.toml
    assert "queue_depth" not in done.toml
    assert "default of 2 MiB" in row(done, "aio.block_size").why


def test_existing_file_requires_force(tmp_path: Path) -> None:
    assert run(INFINITY, "--out", "s.toml").status == 0
    (tmp_path / "s.toml").write_text("mine")
    rejected = run(INFINITY, "--out", "s.toml")
    assert rejected.status == 2
    assert "--force" in rejected.errors
    assert (tmp_path / "s.toml").read_text() == "mine"
    assert run(INFINITY, "--out", "s.toml", "--force").status == 0
    assert load_config(tmp_path / "s.toml").storage.queue_depth == 16


def test_json_output() -> None:
    done = run(INFINITY, "--json")
    found = json.loads(done.output)
    assert set(found) == {"toml", "settings", "code", "trainer_code", "ranks", "keys", "ok"}
    assert found["ok"] is True
    assert tomllib.loads(found["toml"]) == found["settings"]
    assert {"key", "value", "status", "becomes", "why", "changes_training"} == set(found["keys"][0])
    assert len(found["keys"]) == sum(len(list(leaf_values(INFINITY, name))) for name in INFINITY)
    rejected = run({**INFINITY, "compression_training": {"a": {"shared_parameters": {"enabled": True}}}}, "--json")
    assert (rejected.status, json.loads(rejected.output)["ok"]) == (1, False)


def leaf_values(tree: dict[str, Any], name: str) -> Any:
    """Yield the values of a configuration."""
    value = tree[name]
    if isinstance(value, dict):
        for inner in value:
            yield from leaf_values(value, inner)
    else:
        yield value


def test_table_fits_terminal_width(subtests: pytest.Subtests) -> None:
    """Settings and code are not wrapped, so that they can be copied."""
    for width in [60, 80, 120]:
        with subtests.test(width=width), pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("COLUMNS", str(width))
            done = run(INFINITY)
            assert done.status == 0
            assert translated(INFINITY).toml in done.output
            assert translated(INFINITY).code in done.output
            table = done.output.partition("\ntranslated (")[2]
            assert max(map(len, table.splitlines())) <= width
            assert "zero_to_fp32.py CHECKPOINT FOLDER --safe_serialization" in done.output


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(["auto", "nvme", "cpu", "OneCycle", "WarmupLR", "StepLR", "Adam", "fp16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return a nested configuration from dotted names."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, leaf = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                break
        else:
            place[leaf] = value
    return tree


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(sorted(TABLE.keys)) | st.text(max_size=5), JSON, max_size=6))
@example({"scheduler.type": "StepLR", "scheduler.params": {"step_size": 5, "gamma": "x"}})
@example({"optimizer.type": "AdamW", "optimizer.params.lr": "auto", "fp16.enabled": "auto"})
def test_any_json_is_translated_or_rejected(flat: dict[str, Any]) -> None:
    """The result is a one-line error, or valid settings and code that compiles."""
    done = run(nested(flat), "--json")
    assert done.status in (0, 1, 2)
    if done.status == 2:
        assert done.errors.startswith("error: ")
        assert len(done.errors.splitlines()) == 1
        return
    found = json.loads(done.output)
    load_config(tomllib.loads(found["toml"]))
    compile(found["code"], "code", "exec")
    assert all(key["why"] for key in found["keys"])
    assert run(nested(flat)).status == done.status


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\/#u0de1t \n', max_size=60).map(str.encode))
def test_arbitrary_bytes_never_cause_traceback(content: bytes) -> None:
    Path("ds.json").write_bytes(content)
    done = run_here("migrate", "ds.json")
    assert done.status in (0, 2)
    assert len(done.errors.splitlines()) == (done.status == 2)


def test_unused_auto_values_are_not_needed() -> None:
    """`auto` is dropped with an argument that the optimizer does not accept."""
    done = translated({"optimizer": {"type": "SGD", "params": {"lr": "auto", "betas": "auto"}}})
    assert row(done, "optimizer.params.lr").becomes == "args.learning_rate"
    assert row(done, "optimizer.params.betas").status == "not needed"
    assert "torch.optim.SGD(model.parameters(), lr=args.learning_rate, fused=True)" in done.code
    done = translated({"optimizer": {"type": "Muon", "params": {"lr": "auto"}}})
    assert row(done, "optimizer.params.lr").status == "not needed"


PARAM, OPTIMIZER = "zero_optimization.offload_param", "zero_optimization.offload_optimizer"
CONTEXT: dict[str, dict[str, Any]] = {
    "optimizer.params.": {"optimizer.type": "AdamW"},
    "optimizer.params.momentum": {"optimizer.type": "SGD"},
    "optimizer.params.dampening": {"optimizer.type": "SGD"},
    "optimizer.params.nesterov": {"optimizer.type": "SGD"},
    "optimizer.params.alpha": {"optimizer.type": "RMSprop"},
    "optimizer.params.centered": {"optimizer.type": "RMSprop"},
    "optimizer.params.lr_decay": {"optimizer.type": "Adagrad"},
    "optimizer.params.adam_w_mode": {"optimizer.type": "Adam"},
    "scheduler.params.": {"scheduler.type": "WarmupDecayLR"},
    "scheduler.params.warmup_min_ratio": {"scheduler.type": "WarmupCosineLR"},
    "scheduler.params.cos_min_ratio": {"scheduler.type": "WarmupCosineLR"},
    "fp16.": {"fp16.enabled": True},
    "bf16.": {"bf16.enabled": True},
    "bfloat16.": {"bfloat16.enabled": True},
    "torch_autocast.": {"torch_autocast.enabled": True},
    f"{PARAM}.": {f"{PARAM}.device": "nvme"},
    f"{OPTIMIZER}.": {f"{OPTIMIZER}.device": "nvme"},
}  # fmt: skip
"""Other keys that a key requires, by the longest matching prefix of its name."""
EFFECTS: dict[str, tuple[Any, str]] = {
    "train_batch_size": (64, "batch_size=64 // mesh.size()"),
    "train_micro_batch_size_per_gpu": (7, "batch_size=7"),
    "gradient_accumulation_steps": (5, "infinity.micro_batches(model, 5)"),
    "gradient_clipping": (0.75, "clip_grad_norm_(0.75)"),
    "optimizer.type": ("SGD", "torch.optim.SGD("),
    "optimizer.params.lr": (0.5, "lr=0.5"),
    "optimizer.params.betas": ([0.5, 0.75], "betas=(0.5, 0.75)"),
    "optimizer.params.eps": (0.5, "eps=0.5"),
    "optimizer.params.weight_decay": (0.5, "weight_decay=0.5"),
    "optimizer.params.momentum": (0.5, "momentum=0.5"),
    "optimizer.params.dampening": (0.5, "dampening=0.5"),
    "optimizer.params.nesterov": (True, "nesterov=True"),
    "optimizer.params.amsgrad": (True, "amsgrad=True"),
    "optimizer.params.alpha": (0.5, "alpha=0.5"),
    "optimizer.params.centered": (True, "centered=True"),
    "optimizer.params.lr_decay": (0.5, "lr_decay=0.5"),
    "optimizer.params.adam_w_mode": (False, "torch.optim.Adam("),
    "optimizer.params.max_grad_norm": (0.5, "clip_grad_norm_(0.5)"),
    "scheduler.type": ("WarmupLR", "# WarmupLR"),
    "scheduler.params.warmup_min_lr": (0.5, "LOW = 0.5"),
    "scheduler.params.warmup_max_lr": (0.5, "HIGH = 0.5"),
    "scheduler.params.warmup_num_steps": (77, "WARMUP = 77"),
    "scheduler.params.warmup_type": ("linear", "* step / WARMUP"),
    "scheduler.params.total_num_steps": (77, "TOTAL = 77"),
    "scheduler.params.warmup_min_ratio": (0.5, "LOW = 0.5"),
    "scheduler.params.cos_min_ratio": (0.5, "END = 0.5"),
    "bf16.enabled": (True, "MixedPrecisionPolicy(torch.bfloat16, torch.float32)"),
    "bfloat16.enabled": (True, "MixedPrecisionPolicy(torch.bfloat16, torch.float32)"),
    "torch_autocast.enabled": (True, "with torch.autocast(mesh.device_type, torch.bfloat16):"),
    "torch_autocast.dtype": ("float16", "torch.float16"),
    "communication_data_type": ("bf16", "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)"),
    "zero_optimization.stage": (3, "fully_shard(layer"),
    "zero_optimization.cpu_offload": (True, 'host_bytes = "64GiB"'),
    "zero_optimization.cpu_offload_param": (True, 'host_bytes = "64GiB"'),
    **dict.fromkeys(
        ("zero_optimization.stage3_gather_16bit_weights_on_model_save",
         "zero_optimization.gather_16bit_weights_on_model_save",
         "zero_optimization.stage3_gather_fp16_weights_on_model_save"), (True, "")),
    f"{PARAM}.device": ("cpu", 'host_bytes = "64GiB"'),
    f"{OPTIMIZER}.device": ("cpu", 'host_bytes = "64GiB"'),
    f"{PARAM}.nvme_path": ("/a", 'paths = ["/a"]'),
    f"{OPTIMIZER}.nvme_path": ("/a", 'paths = ["/a"]'),
    f"{PARAM}.max_in_cpu": (1 << 30, 'host_bytes = "6004MiB"'),  # with DeepSpeed's defaults for the other keys
    f"{PARAM}.buffer_count": (0, 'host_bytes = "3815MiB"'),
    f"{PARAM}.buffer_size": (0, 'host_bytes = "3815MiB"'),
    "activation_checkpointing.cpu_checkpointing": (True, 'tier = "host"'),
    "aio.block_size": (8192, 'request_bytes = "8KiB"'),
    "aio.queue_depth": (7, "queue_depth = 7"),
}  # fmt: skip
"""A value for each translated key, and the resulting text in the settings or the code."""


def translated_keys(values: dict[str, Any]) -> Migration:
    """Return the translation of a configuration with dotted names."""
    return translated(nested({"steps_per_print": 1, **values}))


def context(name: str) -> dict[str, Any]:
    """Return the other keys that a key requires."""
    longest = max((begin for begin in CONTEXT if name.startswith(begin)), key=len, default="")
    return {key: value for key, value in CONTEXT.get(longest, {}).items() if key != name}


def enabling_value(key: Key) -> Any:
    """Return a value that enables the key's feature in DeepSpeed."""
    if key.switch == "nested":
        return {"part": {"shared_parameters": {"enabled": True}}}
    if key.switch:
        return {"enabled": True, "x": 1}
    return {"flag": True not in key.off, "text": "sum"}.get(key.takes, 3 if True not in key.off else False)


def keys(status: Status) -> list[Key]:
    """Return the keys with this status."""
    return [key for key in TABLE.keys.values() if key.status is status]


def test_translated_keys_change_settings_or_code(subtests: pytest.Subtests) -> None:
    for key in keys(Status.TRANSLATED):
        with subtests.test(key.name):
            value, text = EFFECTS[key.name]
            done = translated_keys({**context(key.name), key.name: value})
            assert row(done, key.name).status is Status.TRANSLATED
            assert row(done, key.name).becomes
            assert text in done.toml + done.code
            if text and key.name != "zero_optimization.stage":  # the default
                without = translated_keys(context(key.name) if "lr" not in key.name else {})
                assert text not in without.toml + without.code
            assert not done.refusals
            compile(done.code, key.name, "exec")


def test_unneeded_keys_change_nothing(subtests: pytest.Subtests) -> None:
    for key in keys(Status.NOT_NEEDED):
        if key.name == "optimizer.params.torch_adam":  # which changes a default
            continue
        without = translated_keys(context(key.name))
        for value in (True, 5, "text", {"enabled": True}):
            with subtests.test(key.name, value=value):
                done = translated_keys({**context(key.name), key.name: value})
                assert (row(done, key.name).status, row(done, key.name).why) == (Status.NOT_NEEDED, key.why)
                assert (done.toml, done.code, done.refusals) == (without.toml, without.code, without.refusals)


def test_keys_without_counterpart_fail_only_if_training_changes(subtests: pytest.Subtests) -> None:
    for key in keys(Status.NO_COUNTERPART):
        with subtests.test(key.name):
            done = translated_keys({**context(key.name), key.name: enabling_value(key)})
            found = row(done, key.name)
            assert found.status is Status.NO_COUNTERPART
            assert found.becomes
            assert (found in done.refusals) == key.changes
            for value in (*key.off, *([{}, {"enabled": False, "part": {"enabled": True}}] if key.switch else [])):
                refusals = translated_keys({**context(key.name), key.name: value}).refusals
                assert key.name not in [one.key for one in refusals], value


def test_every_key_accepts_null_and_auto(subtests: pytest.Subtests) -> None:
    for name in TABLE.keys:
        for value in (None, "auto"):
            with subtests.test(name, value=value):
                done = translated_keys({**context(name), name: value})
                assert row(done, name).why
                assert name not in [one.key for one in done.refusals]


def test_settings_named_in_table_exist() -> None:
    sections = vars(Config())
    for key in TABLE.keys.values():
        for word in f"{key.becomes} {key.why}".replace(",", " ").replace(")", " ").replace("(", " ").split():
            section, dot, name = word.strip('".:;').partition(".")
            if dot and section in sections:
                assert hasattr(sections[section], name), word


def test_optimizer_arguments_exist_in_torch() -> None:
    import torch

    for taken in TAKEN.values():
        if taken.call.startswith("torch."):
            known = inspect.signature(getattr(torch.optim, taken.call.rpartition(".")[2])).parameters
            assert {*taken.takes, *taken.fills} <= set(known), taken.call


def test_scheduler_parameters_match_table_keys() -> None:
    defaults = {f"scheduler.params.{name}" for one in SCHEDULERS.values() for name in one.defaults}
    assert defaults <= set(TABLE.keys)
    assert {key.name for key in keys(Status.TRANSLATED) if key.name.startswith("scheduler.params.")} <= defaults


RATES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "WarmupLR": ({"warmup_max_lr": 0.8, "warmup_num_steps": 4, "warmup_type": "linear"},
                 [0, 0, 0.2, 0.4, 0.6, 0.8, 0.8]),
    "WarmupDecayLR": ({"warmup_max_lr": 0.8, "warmup_num_steps": 2, "total_num_steps": 4, "warmup_type": "linear"},
                      [0, 0, 0.4, 0.8, 0.4, 0, 0]),
    "WarmupCosineLR": ({"warmup_num_steps": 2, "total_num_steps": 4, "warmup_type": "linear", "cos_min_ratio": 0.5},
                       [0, 0, 0.25, 0.375, 0.25, 0.25]),
}  # fmt: skip


def test_learning_rates_match_deepspeed(subtests: pytest.Subtests) -> None:
    """The expected rates are computed by hand from DeepSpeed's formulas."""
    for kind in RATES:
        with subtests.test(kind):
            parameters, rates = RATES[kind]
            code = translated_keys({"optimizer.type": "AdamW", "optimizer.params.lr": 0.5, "scheduler.type": kind,
                       **{f"scheduler.params.{name}": value for name, value in parameters.items()}}).code  # fmt: skip
            begin, end = code.index(f"# {kind}"), code.index("for group in optimizer.param_groups")
            names: dict[str, Any] = {}
            exec("import math\n" + code[begin:end], names)
            assert [names["rate_at"](step) for step in range(len(rates))] == pytest.approx(rates)


def test_settings_of_all_keys_are_valid() -> None:
    done = translated_keys({name: value for name, (value, _) in EFFECTS.items() if name.startswith(("aio", "zero"))})
    load_config(tomllib.loads(done.toml))
