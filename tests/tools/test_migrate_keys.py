"""Every key of the table of DeepSpeed's keys does what the table says."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from infinity.config import Config, load_config
from infinity_tools.migrate.keys import Key, Status
from infinity_tools.migrate.keys_around import GROUPS, TABLE
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
    "scheduler.params.cycle_": {"scheduler.type": "OneCycle", "optimizer.type": "AdamW",
                                "scheduler.params.cycle_min_lr": 0.5, "scheduler.params.cycle_max_lr": 0.75},
    "scheduler.params.decay_": {"scheduler.type": "OneCycle", "optimizer.type": "AdamW",
                                "scheduler.params.cycle_min_lr": 0.5, "scheduler.params.cycle_max_lr": 0.75},
    "scheduler.params.lr_range": {"scheduler.type": "LRRangeTest"},
    "fp16.": {"fp16.enabled": True},
    "bf16.": {"bf16.enabled": True},
    "bfloat16.": {"bfloat16.enabled": True},
    "torch_autocast.": {"torch_autocast.enabled": True},
    f"{PARAM}.": {f"{PARAM}.device": "nvme"},
    f"{OPTIMIZER}.": {f"{OPTIMIZER}.device": "nvme"},
}  # fmt: skip
"""What else a configuration says for a key to be in use, by how its name begins; the longest counts."""
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
    "scheduler.params.cycle_min_lr": (0.25, "LOW = 0.25"),
    "scheduler.params.cycle_max_lr": (0.25, "HIGH = 0.25"),
    "scheduler.params.cycle_first_step_size": (77, "RISE = 77"),
    "scheduler.params.cycle_second_step_size": (77, "FALL = 77"),
    "scheduler.params.cycle_first_stair_count": (7, "RISE_STAIRS = 7"),
    "scheduler.params.cycle_second_stair_count": (7, "FALL_STAIRS = 7"),
    "scheduler.params.decay_step_size": (77, "DECAY = 77"),
    "scheduler.params.decay_lr_rate": (0.25, "DECAY_RATE = 0.25"),
    "scheduler.params.cycle_momentum": (True, "beta_at(scheduler.last_epoch)"),
    "scheduler.params.cycle_min_mom": (0.25, "LOW_BETA = 0.25"),
    "scheduler.params.cycle_max_mom": (0.25, "HIGH_BETA = 0.25"),
    "scheduler.params.decay_mom_rate": (0.25, "DECAY_BETA = 0.25"),
    "scheduler.params.lr_range_test_min_lr": (0.25, "LOW = 0.25"),
    "scheduler.params.lr_range_test_step_size": (77, "EACH = 77"),
    "scheduler.params.lr_range_test_step_rate": (0.25, "RISE = 0.25"),
    "scheduler.params.lr_range_test_staircase": (True, "math.floor(step / EACH)"),
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
    f"{PARAM}.max_in_cpu": (1 << 30, 'host_bytes = "6004MiB"'),  # with DeepSpeed's defaults of the others
    f"{PARAM}.buffer_count": (0, 'host_bytes = "3815MiB"'),
    f"{PARAM}.buffer_size": (0, 'host_bytes = "3815MiB"'),
    "activation_checkpointing.cpu_checkpointing": (True, 'tier = "host"'),
    "aio.block_size": (8192, 'request_bytes = "8KiB"'),
    "aio.queue_depth": (7, "queue_depth = 7"),
}  # fmt: skip
"""Of keys with a counterpart: a value, and what is then in the settings or the code."""


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """A configuration from names with dots."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return tree


def of(values: dict[str, Any]) -> Migration:
    """What a configuration becomes."""
    Path("ds.json").write_text(json.dumps(flat({"steps_per_print": 1, **values})))
    return migrate(read_config(Path("ds.json")), "ds.json", "infinity.toml")


def context(name: str) -> dict[str, Any]:
    """What else is said for a key to be in use."""
    found = CONTEXT[max((begin for begin in CONTEXT if name.startswith(begin)), key=len, default="")] if any(
        name.startswith(begin) for begin in CONTEXT) else {}  # fmt: skip
    return {key: value for key, value in found.items() if key != name}


def used(key: Key) -> Any:
    """A value with which DeepSpeed does what the key is for."""
    if key.switch == "nested":
        return {"part": {"shared_parameters": {"enabled": True}}}
    if key.switch:
        return {"enabled": True, "x": 1}
    return {"flag": True not in key.off, "text": "sum"}.get(key.takes, 3 if True not in key.off else False)


def row(done: Migration, name: str) -> Any:
    """What became of a key."""
    return next(row for row in done.rows if row.key == name)


def with_status(status: Status) -> Any:
    """The keys of which this becomes."""
    keys = [key for key in TABLE.keys.values() if key.status is status]
    return pytest.mark.parametrize("key", keys, ids=lambda key: key.name)


@with_status(Status.TRANSLATED)
def test_what_is_translated_is_there(key: Key) -> None:
    """In the settings or the code, and not without the key; rows say so."""
    value, text = EFFECTS[key.name]
    done, without = of({**context(key.name), key.name: value}), of(context(key.name) if "lr" not in key.name else {})
    found = row(done, key.name)
    assert found.status is Status.TRANSLATED
    assert found.becomes
    assert text in done.toml + done.code
    if text and key.name not in ("zero_optimization.stage", "scheduler.params.cycle_momentum"):  # as without
        assert text not in without.toml + without.code
    assert not done.refusals
    compile(done.code, key.name, "exec")


@with_status(Status.NOT_NEEDED)
def test_what_is_not_needed_changes_nothing(key: Key) -> None:
    """Settings and code are as without it, whatever its value is."""
    if key.name == "optimizer.params.torch_adam":  # which changes a default
        return
    without = of(context(key.name))
    for value in (True, 5, "text", {"enabled": True}):
        done = of({**context(key.name), key.name: value})
        assert row(done, key.name).status is Status.NOT_NEEDED
        assert row(done, key.name).why == key.why
        assert (done.toml, done.code, done.refusals) == (without.toml, without.code, without.refusals)


@with_status(Status.NO_COUNTERPART)
def test_what_has_no_counterpart_is_refused_if_it_changes_training(key: Key) -> None:
    """And only then; with what to do instead."""
    done = of({**context(key.name), key.name: used(key)})
    found = row(done, key.name)
    assert found.status is Status.NO_COUNTERPART
    assert found.becomes
    assert (found in done.refusals) == key.changes
    for value in (*key.off, *([{}, {"enabled": False, "part": {"enabled": True}}] if key.switch else [])):
        assert not [one for one in of({**context(key.name), key.name: value}).refusals if one.key == key.name]


@pytest.mark.parametrize("key", TABLE.keys.values(), ids=lambda key: key.name)
def test_every_key_may_be_left_open(key: Key) -> None:
    """As null, and as `auto`: neither is refused."""
    for value in (None, "auto"):
        around = {} if key.name.startswith("scheduler.params.cycle") else context(key.name)
        done = of({**around, key.name: value})
        assert row(done, key.name).why
        assert key.name not in [one.key for one in done.refusals]


def test_texts_are_sentences_without_an_end() -> None:
    """So that they can be joined; and no key is there twice."""
    assert len(TABLE.keys) == sum(map(len, GROUPS.values()))
    for keys in GROUPS.values():
        for key in keys:
            assert key.why, key.name
            assert not key.why.endswith("."), key.name
            assert "\n" not in key.why + key.becomes, key.name


def test_every_setting_that_is_named_exists() -> None:
    """In the table and in what is written."""
    sections = vars(Config())
    for key in TABLE.keys.values():
        for word in f"{key.becomes} {key.why}".replace(",", " ").replace(")", " ").replace("(", " ").split():
            section, dot, name = word.strip('".:;').partition(".")
            if dot and section in sections:
                assert hasattr(sections[section], name), word


@pytest.mark.parametrize("kind", TAKEN)
def test_every_optimizer_takes_what_it_is_given(kind: str) -> None:
    """All its arguments, by torch."""
    import inspect

    import torch

    taken = TAKEN[kind]
    if taken.call.startswith("torch."):
        known = inspect.signature(getattr(torch.optim, taken.call.rpartition(".")[2])).parameters
        assert set(taken.takes) | set(taken.fills) <= set(known)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_parameter_of_a_scheduler_is_a_key(kind: str) -> None:
    """And the other way round."""
    for name in SCHEDULERS[kind].defaults:
        assert f"scheduler.params.{name}" in TABLE.keys
    for name in TABLE.keys:
        if name.startswith("scheduler.params.") and TABLE.keys[name].status is Status.TRANSLATED:
            assert any(name.rpartition(".")[2] in one.defaults for one in SCHEDULERS.values()), name


RATES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "WarmupLR": ({"warmup_max_lr": 0.8, "warmup_num_steps": 4, "warmup_type": "linear"},
                 [0, 0, 0.2, 0.4, 0.6, 0.8, 0.8]),
    "WarmupDecayLR": ({"warmup_max_lr": 0.8, "warmup_num_steps": 2, "total_num_steps": 4, "warmup_type": "linear"},
                      [0, 0, 0.4, 0.8, 0.4, 0, 0]),
    "WarmupCosineLR": ({"warmup_num_steps": 2, "total_num_steps": 4, "warmup_type": "linear", "cos_min_ratio": 0.5},
                       [0, 0, 0.25, 0.375, 0.25, 0.25]),
    "OneCycle": ({"cycle_min_lr": 0.2, "cycle_max_lr": 0.8, "cycle_first_step_size": 2, "decay_step_size": 1,
                  "decay_lr_rate": 1.0}, [0.2, 0.5, 0.8, 0.5, 0.2, 0.1, 0.2 / 3]),
    "LRRangeTest": ({"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2}, [0.1, 0.15, 0.2, 0.25]),
}  # fmt: skip


@pytest.mark.parametrize("kind", RATES)
def test_rates_are_those_of_deepspeed(kind: str) -> None:
    """In each step: what its own schedulers give, in small numbers worked out from its formulas."""
    parameters, rates = RATES[kind]
    code = of({"optimizer.type": "AdamW", "optimizer.params.lr": 0.5, "scheduler.type": kind,
               **{f"scheduler.params.{name}": value for name, value in parameters.items()}}).code  # fmt: skip
    begin, end = code.index(f"# {kind}"), code.index("for group in optimizer.param_groups")
    names: dict[str, Any] = {}
    exec("import math\n" + code[begin:end], names)
    assert [names["rate_at"](step) for step in range(len(rates))] == pytest.approx(rates)
    if kind == "OneCycle":
        assert [names["beta_at"](step) for step in range(5)] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9])


def test_the_settings_of_every_key_are_taken() -> None:
    """All of the keys with a counterpart at once."""
    done = of({name: value for name, (value, _) in EFFECTS.items() if name.startswith(("aio", "zero"))})
    load_config(tomllib.loads(done.toml))
