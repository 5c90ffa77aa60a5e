"""`infinity migrate`: what configurations of DeepSpeed become, and what is said of them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from infinity.config import load_config
from infinity_tools.migrate.keys_around import TABLE
from infinity_tools.migrate.read import read_config
from infinity_tools.migrate.translate import Migration, migrate
from support.command import Finished, run_here, run_process

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
"""All on NVMe, as in DeepSpeed's tutorial."""
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
"""What the documentation of transformers' Trainer shows."""
MODEL = """\
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
build_model = lambda: AutoModelForCausalLM.from_config(config)
batches = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (2, 4, 16))]
"""


def of(config: dict[str, Any], *nvme: str) -> Migration:
    """What a configuration becomes."""
    Path("ds.json").write_text(json.dumps(config))
    return migrate(read_config(Path("ds.json")), "ds.json", "infinity.toml", nvme)


def row(done: Migration, name: str) -> Any:
    """What became of a key."""
    return next(row for row in done.rows if row.key == name)


def run(config: dict[str, Any], *words: str) -> Finished:
    """Run the command."""
    Path("ds.json").write_text(json.dumps(config))
    return run_here("migrate", "ds.json", *words)


def test_all_on_nvme() -> None:
    """Paths as a union in order, requests, and the estimate of memory: (1e6 + 5 x 1e6) x 2 bytes."""
    done = of(INFINITY)
    assert done.settings == {
        "storage": {"paths": ["nvme0", "nvme1"], "request_bytes": "256KiB", "queue_depth": 16},
        "memory": {"host_bytes": "12MiB"},
    }
    assert tomllib.loads(done.toml) == done.settings
    assert load_config(done.settings).storage.request_bytes == 262144
    assert "an estimate" in done.toml
    assert not done.refusals


def test_the_code_has_only_what_applies() -> None:
    """Lines of what is on; none of what is off."""
    done = of(INFINITY)
    for line in (
        "policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)",
        "infinity.micro_batches(model, 2)",
        "torch.optim.AdamW(model.parameters(), lr=0.0003, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.1, fused=True)",
        "optimizer.clip_grad_norm_(1.0)",
        "scheduler.step()",
        "batch_size=4",
    ):
        assert line in done.code
    bare = of({"zero_optimization": {"stage": 3}}).code
    for word in ("micro_batches", "clip_grad_norm_", "scheduler", "math", "args", "bfloat16", "autocast"):
        assert word not in bare
    assert "build_optimizer(model)" in bare


def test_the_code_trains(tmp_path: Path) -> None:
    """As it is printed, with a model and batches: two steps, at DeepSpeed's rates, with a checkpoint at the end."""
    done = of(INFINITY)
    (tmp_path / "infinity.toml").write_text(done.toml)
    tail = "print(optimizer.steps, optimizer.param_groups[0]['lr'], optimizer.update_schedule)\noptimizer.close()\n"
    (tmp_path / "program.py").write_text(MODEL + done.code + tail)
    ran = run_process(tmp_path, program=("program.py",))
    assert ran.status == 0, ran.errors
    steps, rate, update_schedule = ran.output.split()
    assert (steps, update_schedule) == ("2", "in_forward")
    assert float(rate) == pytest.approx(0.01 * 0.5)  # log(2) / log(4): the second step of DeepSpeed's warm-up
    listed = run_here("store", "ls", "nvme0", "nvme1", "--json")
    assert [checkpoint["step"] for run in json.loads(listed.output) for checkpoint in run["checkpoints"]] == [2]


def test_values_of_the_trainer() -> None:
    """`auto` becomes the argument that the Trainer would take, and nothing is refused."""
    done = of(TRAINER)
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


def test_arguments_of_the_trainer_exist() -> None:
    """In transformers."""
    from transformers import TrainingArguments

    for key in TABLE.keys.values():
        for word in key.auto.replace("(", " ").replace(")", " ").replace(",", " ").split():
            if word.startswith("args."):
                name = word.removeprefix("args.")
                assert hasattr(TrainingArguments, name) or name in TrainingArguments.__dataclass_fields__, name


def test_offloading_to_memory_still_needs_a_path() -> None:
    """It is asked for, and taken from --nvme."""
    assert "paths" not in of(TRAINER).settings.get("storage", {})
    assert "# paths = " in of(TRAINER).toml
    assert "at least 16 bytes per parameter" in of({**TRAINER, "bf16": {}}).toml
    assert "storage.paths is not set" in run(TRAINER).output
    done = of(TRAINER, "/nvme0/run", "/nvme1/run")
    assert done.settings["storage"]["paths"] == ["/nvme0/run", "/nvme1/run"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_is_sharded(stage: int) -> None:
    """And that it is more than before is said."""
    done = of({"zero_optimization": {"stage": stage}})
    assert not done.refusals
    assert ("keeps" in row(done, "zero_optimization.stage").why) == (stage < 3)


def test_a_path_that_is_there_twice() -> None:
    """Is one path; one of a device that is not NVMe is none."""
    zero = {"offload_param": {"device": "nvme", "nvme_path": "/a/./b"}, "offload_optimizer": {"device": "nvme", "nvme_path": "/a/b"}}  # fmt: skip  # noqa: E501
    assert of({"zero_optimization": zero}).settings["storage"]["paths"] == ["/a/./b"]
    zero["offload_param"]["device"] = "cpu"
    assert of({"zero_optimization": zero}).settings["storage"]["paths"] == ["/a/b"]


@pytest.mark.parametrize(
    "path", ['/with "quotes"', "/back\\slash", "/müßig/\U0001d518", "/del\x7f", "/tab\t/new\nline", "/[red]x"]
)
def test_any_path_is_written_whole(path: str) -> None:
    """Whatever is in its name, in the file and on the terminal."""
    zero = {"offload_param": {"device": "nvme", "nvme_path": path}}
    assert run({"zero_optimization": zero}, "--out", "s.toml").status == 0
    assert load_config("s.toml").storage.paths == (path,)
    assert load_config(tomllib.loads(of({"zero_optimization": zero}).toml)).storage.paths == (path,)


OPTIMIZERS = {
    "Adam": "torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, fused=True)",
    "AdamW": "torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, fused=True)",
    "Adagrad": "torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True)",
    "SGD": "torch.optim.SGD(model.parameters(), lr=0.1, fused=True)",
    "RMSprop": "torch.optim.RMSprop(model.parameters(), lr=0.1)",
    "Lion": "Lion(model.parameters(), lr=0.1)",
}


@pytest.mark.parametrize(("kind", "line"), OPTIMIZERS.items())
def test_optimizers(kind: str, line: str) -> None:
    """DeepSpeed's Adam decays weights as AdamW does, by 0 if nothing is said."""
    done = of({"optimizer": {"type": kind, "params": {"lr": 0.1}}})
    assert f"optimizer = {line}\n" in done.code
    assert not done.refusals


def test_adam_without_its_mode() -> None:
    """Is Adam; and torch_adam has torch's own default."""
    done = of({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}})
    assert "torch.optim.Adam(model.parameters(), weight_decay=0.1, fused=True)" in done.code
    done = of({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}})
    assert "torch.optim.AdamW(model.parameters(), fused=True)" in done.code


@pytest.mark.parametrize(
    "kind", ["Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Muon", "MuAdamW", "LBFGS", "Adem"]
)
def test_optimizers_that_are_refused(kind: str) -> None:
    """Are named, with what to take, and the status is 1."""
    done = run({"optimizer": {"type": kind, "params": {"lr": 0.1, "freeze_step": 5}}})
    assert done.status == 1
    assert "no counterpart for optimizer.type." in " ".join(done.output.split())
    assert "build_optimizer(model)" in done.output


@pytest.mark.parametrize(("kind", "said"), [("Muon", "torch.optim.Muon(matrices"), ("Lamb", "pytorch_optimizer")])
def test_optimizers_that_are_yours_to_write(kind: str, said: str) -> None:
    """As infinity takes them, it says how."""
    done = of({"optimizer": {"type": kind}})
    assert [refused.key for refused in done.refusals] == ["optimizer.type"]
    assert said in done.refusals[0].becomes
    assert "refused" not in done.refusals[0].why


def test_float16_is_refused() -> None:
    """By its switch alone; the code is that of bf16."""
    done = of({**INFINITY, "fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}, "bf16": {"enabled": False}})
    assert [refused.key for refused in done.refusals] == ["fp16.enabled"]
    assert "bf16" in done.refusals[0].becomes
    assert "torch.bfloat16" in done.code
    off = of({**INFINITY, "fp16": {"enabled": False, "loss_scale": 128}})
    assert not off.refusals
    assert row(off, "fp16.loss_scale").status == "not needed"


def test_unknown_keys_name_the_nearest() -> None:
    """With the section that it lies in."""
    done = of({"zero_optimisation": {}, "zero_optimization": {"stag": 3}, "nvme_path": "/x", "zzz": 1, "bf16": {}})
    why = {row.key: row.why for row in done.rows if row.status == "unknown key"}
    assert "did you mean zero_optimization?" in why["zero_optimisation"]
    assert "did you mean zero_optimization.stage?" in why["zero_optimization.stag"]
    assert "did you mean zero_optimization.offload_param.nvme_path?" in why["nvme_path"]
    assert "did you mean" not in why["zzz"]


def test_a_value_of_another_range_is_not_taken() -> None:
    """The default holds, and the row says so."""
    done = of({"aio": {"block_size": 5000, "queue_depth": 100000}})
    assert "request_bytes" not in done.toml
    assert "queue_depth" not in done.toml
    assert "default of 2 MiB" in row(done, "aio.block_size").why


def test_files_are_not_replaced_unasked(tmp_path: Path) -> None:
    """`--force` does it; what is printed elsewhere stays."""
    assert run(INFINITY, "--out", "s.toml").status == 0
    (tmp_path / "s.toml").write_text("mine")
    refused = run(INFINITY, "--out", "s.toml")
    assert refused.status == 2
    assert "--force" in refused.errors
    assert (tmp_path / "s.toml").read_text() == "mine"
    assert run(INFINITY, "--out", "s.toml", "--force").status == 0
    assert load_config(tmp_path / "s.toml").storage.queue_depth == 16


def test_json() -> None:
    """For programs: everything, and nothing else."""
    done = run(INFINITY, "--json")
    found = json.loads(done.output)
    assert set(found) == {"toml", "settings", "code", "keys", "ok"}
    assert found["ok"] is True
    assert tomllib.loads(found["toml"]) == found["settings"]
    assert {"key", "value", "status", "becomes", "why", "changes_training"} == set(found["keys"][0])
    assert len(found["keys"]) == sum(len(list(leaves(INFINITY, name))) for name in INFINITY)
    refused = run({**INFINITY, "compression_training": {"a": {"shared_parameters": {"enabled": True}}}}, "--json")
    assert (refused.status, json.loads(refused.output)["ok"]) == (1, False)


def leaves(tree: dict[str, Any], name: str) -> Any:
    """The values of a configuration."""
    value = tree[name]
    if isinstance(value, dict):
        for inner in value:
            yield from leaves(value, inner)
    else:
        yield value


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table folds; settings and code are lines to copy."""
    monkeypatch.setenv("COLUMNS", str(width))
    done = run(INFINITY)
    assert done.status == 0
    assert of(INFINITY).toml in done.output
    assert of(INFINITY).code in done.output
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
    """A configuration from names with dots."""
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
@example({"scheduler.type": "OneCycle", "scheduler.params.cycle_min_lr": 0, "scheduler.params.cycle_max_lr": 1})
def test_any_json_ends_in_words(flat: dict[str, Any]) -> None:
    """A message, or settings that are taken and code that compiles; never a traceback."""
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
def test_any_bytes_end_in_words(content: bytes) -> None:
    """Whatever a file has in it."""
    Path("ds.json").write_bytes(content)
    done = run_here("migrate", "ds.json")
    assert done.status in (0, 2)
    assert len(done.errors.splitlines()) == (done.status == 2)


def test_auto_of_what_is_not_used() -> None:
    """Goes with the optimizer or scheduler that does not take it."""
    done = of({"optimizer": {"type": "SGD", "params": {"lr": "auto", "betas": "auto"}}})
    assert row(done, "optimizer.params.lr").becomes == "args.learning_rate"
    assert row(done, "optimizer.params.betas").status == "not needed"
    assert "torch.optim.SGD(model.parameters(), lr=args.learning_rate, fused=True)" in done.code
    done = of({"optimizer": {"type": "Muon", "params": {"lr": "auto"}}})
    assert row(done, "optimizer.params.lr").status == "not needed"
