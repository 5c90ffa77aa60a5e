"""Tests of every key in the table of DeepSpeed keys."""

from __future__ import annotations

import inspect
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from infinity.config import Config, load_config
from infinity_tools.migrate.keys import Key, Status
from infinity_tools.migrate.keys_around import TABLE
from infinity_tools.migrate.optimizers import TAKEN
from infinity_tools.migrate.read import read_config
from infinity_tools.migrate.schedulers import SCHEDULERS
from infinity_tools.migrate.translate import Migration, migrate

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


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Return a nested configuration from dotted names."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return tree


def translated(values: dict[str, Any]) -> Migration:
    """Return the translation of a configuration."""
    Path("ds.json").write_text(json.dumps(nested({"steps_per_print": 1, **values})))
    return migrate(read_config(Path("ds.json")), "ds.json", "infinity.toml")


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


def row(done: Migration, name: str) -> Any:
    """Return the row of a key."""
    return next(row for row in done.rows if row.key == name)


def keys(status: Status) -> list[Key]:
    """Return the keys with this status."""
    return [key for key in TABLE.keys.values() if key.status is status]


def test_translated_keys_change_settings_or_code(subtests: pytest.Subtests) -> None:
    for key in keys(Status.TRANSLATED):
        with subtests.test(key.name):
            value, text = EFFECTS[key.name]
            done = translated({**context(key.name), key.name: value})
            assert row(done, key.name).status is Status.TRANSLATED
            assert row(done, key.name).becomes
            assert text in done.toml + done.code
            if text and key.name != "zero_optimization.stage":  # the default
                without = translated(context(key.name) if "lr" not in key.name else {})
                assert text not in without.toml + without.code
            assert not done.refusals
            compile(done.code, key.name, "exec")


def test_unneeded_keys_change_nothing(subtests: pytest.Subtests) -> None:
    for key in keys(Status.NOT_NEEDED):
        if key.name == "optimizer.params.torch_adam":  # which changes a default
            continue
        without = translated(context(key.name))
        for value in (True, 5, "text", {"enabled": True}):
            with subtests.test(key.name, value=value):
                done = translated({**context(key.name), key.name: value})
                assert (row(done, key.name).status, row(done, key.name).why) == (Status.NOT_NEEDED, key.why)
                assert (done.toml, done.code, done.refusals) == (without.toml, without.code, without.refusals)


def test_keys_without_counterpart_fail_only_if_training_changes(subtests: pytest.Subtests) -> None:
    for key in keys(Status.NO_COUNTERPART):
        with subtests.test(key.name):
            done = translated({**context(key.name), key.name: enabling_value(key)})
            found = row(done, key.name)
            assert found.status is Status.NO_COUNTERPART
            assert found.becomes
            assert (found in done.refusals) == key.changes
            for value in (*key.off, *([{}, {"enabled": False, "part": {"enabled": True}}] if key.switch else [])):
                refusals = translated({**context(key.name), key.name: value}).refusals
                assert key.name not in [one.key for one in refusals], value


def test_every_key_accepts_null_and_auto(subtests: pytest.Subtests) -> None:
    for name in TABLE.keys:
        for value in (None, "auto"):
            with subtests.test(name, value=value):
                done = translated({**context(name), name: value})
                assert row(done, name).why
                assert name not in [one.key for one in done.refusals]


def test_texts_have_no_trailing_period() -> None:
    """Texts are joined with others."""
    for key in TABLE.keys.values():
        assert key.why, key.name
        assert not key.why.endswith("."), key.name
        assert "\n" not in key.why + key.becomes, key.name


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
            code = translated({"optimizer.type": "AdamW", "optimizer.params.lr": 0.5, "scheduler.type": kind,
                       **{f"scheduler.params.{name}": value for name, value in parameters.items()}}).code  # fmt: skip
            begin, end = code.index(f"# {kind}"), code.index("for group in optimizer.param_groups")
            names: dict[str, Any] = {}
            exec("import math\n" + code[begin:end], names)
            assert [names["rate_at"](step) for step in range(len(rates))] == pytest.approx(rates)


def test_settings_of_all_keys_are_valid() -> None:
    done = translated({name: value for name, (value, _) in EFFECTS.items() if name.startswith(("aio", "zero"))})
    load_config(tomllib.loads(done.toml))
