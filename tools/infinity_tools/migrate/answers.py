"""Translations that depend on the value of a key or on other keys: paths, sizes, optimizers, schedulers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from infinity.schema import brief
from infinity.units import format_setting
from infinity_tools.migrate import schedulers, toml_output
from infinity_tools.migrate.code import taken_of
from infinity_tools.migrate.key_table import TABLE
from infinity_tools.migrate.keys import Key, Status
from infinity_tools.migrate.optimizers import BY_HAND, TAKEN, UNSUPPORTED
from infinity_tools.migrate.read import Found
from infinity_tools.migrate.schedulers import OF_TORCH, SCHEDULERS

Answer = tuple[Status, str, str] | tuple[Status, str, str, bool]
_DEFAULT = "DeepSpeed's default; infinity's default"
_LIMITS = {
    "aio.block_size": (
        "2 MiB",
        "a request size must be a multiple of 4096 from 4 KiB to 1 GiB; the default of 2 MiB applies",
    ),
    "aio.queue_depth": ("32", "infinity accepts 1 to 4096; the default of 32 applies"),
}
"""Defaults of infinity for requests, and reasons why it does not accept other values."""


def _key(name: str) -> Key:
    return TABLE.keys[name]


def _same(name: str, becomes: str) -> Answer:
    return Status.TRANSLATED, becomes, _key(name).why


def _stage(found: Found, name: str, value: Any, nvme: Sequence[str]) -> Answer:
    if value == 3:
        return _same(name, _key(name).becomes)
    why = f"stage {value} keeps {'weights' if value else 'all state'} on every rank; FSDP2 shards them, like stage 3: "
    return Status.TRANSLATED, _key(name).becomes, why + "the same values, less memory, more communication"


def _device(found: Found, name: str, value: Any, nvme: Sequence[str]) -> Answer:
    other = found.device("optimizer" if "offload_param" in name else "param")
    if value == "nvme":
        return Status.TRANSLATED, "storage.paths", "parameters and optimizer state are stored there, in pages"
    if other == "nvme":
        why = "parameters and optimizer state share the NVMe paths; part of the pages stay in the host cache"
        return Status.TRANSLATED, "storage.paths, memory.host_bytes", why
    if value == "cpu":
        why = "a host cache as large as the state keeps all of it in memory; checkpoints still require a path"
        return Status.TRANSLATED, "memory.host_bytes", why
    return Status.NOT_NEEDED, "", "without offloading, FSDP2 alone is simpler; with infinity, pages are stored on NVMe"


def _path(found: Found, name: str, value: Any, nvme: Sequence[str]) -> Answer:
    role = "param" if "offload_param" in name else "optimizer"
    if nvme:
        return Status.TRANSLATED, f"storage.paths = {_listed(nvme)}", "set by --nvme"
    if found.device(role) != "nvme":
        return Status.NOT_NEEDED, "", f"device is {found.device(role)}, so DeepSpeed does not use it"
    return _same(name, f"storage.paths = {_listed(toml_output.nvme_paths(found))}")


def _listed(paths: Sequence[str]) -> str:
    return json.dumps(list(paths), ensure_ascii=False)


def _memory(found: Found, name: str, value: Any, nvme: Sequence[str]) -> Answer:
    if (estimate := toml_output.host_bytes(found)) is not None:
        return _same(name, f'memory.host_bytes = "{format_setting(estimate)}"')
    if found.device("param") != "nvme":
        why = "device is not nvme, so DeepSpeed does not use it"
    elif toml_output.is_default(found, name):
        why = f"{_DEFAULT}, a quarter of the available memory, applies"
    else:
        why = "its value does not determine a memory size"
    return Status.NOT_NEEDED, "memory.host_bytes", why


def _request(found: Found, name: str, value: Any, nvme: Sequence[str]) -> Answer:
    setting = toml_output.REQUESTS[name][0]
    if (accepted := toml_output.request(found, name)) is not None:
        return _same(name, f"{setting} = {accepted}")
    usual, limits = _LIMITS[name]
    why = f"{_DEFAULT} of {usual} applies" if toml_output.is_default(found, name) else limits
    return Status.NOT_NEEDED, setting, why


def _clipping(found: Found, name: str, value: Any, nvme: Sequence[str]) -> Answer:
    if value <= 0:
        return Status.NOT_NEEDED, "", "0 means no clipping in DeepSpeed, too"
    if name != "gradient_clipping" and found["gradient_clipping"]:
        return Status.NOT_NEEDED, "", "gradient_clipping is also set and takes precedence"
    return _same(name, f"optimizer.clip_grad_norm_({value})")


def _accumulation(found: Found, name: str, value: Any, nvme: Sequence[str]) -> Answer:
    if value <= 1:
        return Status.NOT_NEEDED, "", "there is only one micro-batch per batch"
    return _same(name, f"infinity.micro_batches(model, {value})")


def _optimizer(found: Found, name: str, value: Any, nvme: Sequence[str]) -> Answer:
    lower = value.lower()
    if lower in BY_HAND:
        becomes, why = BY_HAND[lower]
        return Status.NO_COUNTERPART, becomes, why, True
    if lower in UNSUPPORTED:
        return Status.NO_COUNTERPART, "torch.optim.AdamW", f"{value} is not supported: {UNSUPPORTED[lower]}", True
    if lower not in TAKEN:
        why = f"{brief(value)} is not a known DeepSpeed or PyTorch optimizer ({', '.join(TAKEN)})"
        return Status.NO_COUNTERPART, "create your own; infinity.offload reports whether it is supported", why, True
    taken = taken_of(found) or TAKEN[lower]
    return Status.TRANSLATED, f"{taken.call}(model.parameters(), ...)", _key(name).why


def _parameter(found: Found, name: str, value: Any, nvme: Sequence[str]) -> Answer:
    key, word = _key(name), name.rpartition(".")[2]
    kind = found["optimizer.type"]
    lower = kind.lower() if isinstance(kind, str) else ""
    if lower not in TAKEN:
        return Status.NOT_NEEDED, "", "depends on optimizer.type"
    if key.status is not Status.TRANSLATED or word == "adam_w_mode":
        return key.status, key.becomes, key.why, key.changes
    if word in TAKEN[lower].takes:
        return _same(name, f"{word}={tuple(value) if isinstance(value, list) else value!r}")
    return Status.NOT_NEEDED, "", f"{TAKEN[lower].call} has no such argument, so DeepSpeed does not accept it either"


def _scheduler(found: Found, name: str, value: Any, nvme: Sequence[str]) -> Answer:
    if name == "scheduler.params":  # of a torch scheduler, as a whole
        return Status.TRANSLATED, "arguments of the scheduler", "passed on unchanged"
    if value in SCHEDULERS:
        return _same(name, "LambdaLR(optimizer, rate_at)")
    if value in OF_TORCH:
        return _same(name, f"torch.optim.lr_scheduler.{value}(optimizer, ...)")
    if value in schedulers.BY_HAND:
        similar = f"create your own, such as {schedulers.BY_HAND[value]}"
        return Status.NO_COUNTERPART, similar, "only DeepSpeed's warm-up schedules are translated", True
    why = f"{brief(value)} is not a known DeepSpeed or PyTorch scheduler"
    known = ", ".join((*SCHEDULERS, *OF_TORCH))
    return Status.NO_COUNTERPART, "create your own; infinity supports all PyTorch schedulers", f"{why} ({known})", True


def _rate(found: Found, name: str, value: Any, nvme: Sequence[str]) -> Answer:
    kind, word = found["scheduler.type"], name.rpartition(".")[2]
    key = _key(name)
    if key.status is not Status.TRANSLATED:
        return key.status, key.becomes, key.why
    if kind not in SCHEDULERS or word not in SCHEDULERS[kind].defaults:
        return Status.NOT_NEEDED, "", f"{kind} has no such parameter" if kind else "no scheduler is configured"
    if shown := SCHEDULERS[kind].names.get(word):
        return _same(name, f"{shown} = {value!r} in rate_at")
    return _same(name, key.becomes)


def _tensor_parallel(found: Found, name: str, value: Any, nvme: Sequence[str]) -> Answer:
    key = _key(name)
    if isinstance(value, dict) and value.get("autotp_size") in (0, 1):
        return Status.NOT_NEEDED, "", "switched off in DeepSpeed, too"
    return key.status, key.becomes, key.why, key.changes


def _reduced(found: Found, name: str, value: Any, nvme: Sequence[str]) -> Answer:
    if value.lower() in ("fp32", "bf16", "bfp16"):
        kind = "torch.float32" if value.lower() == "fp32" else "torch.bfloat16"
        return _same(name, f"MixedPrecisionPolicy(reduce_dtype={kind})")
    why = f"{brief(value)} has too small a range for unscaled gradients; they are reduced in fp32"
    return Status.NO_COUNTERPART, "remove it", why


ANSWERS: dict[str, Callable[[Found, str, Any, Sequence[str]], Answer]] = {
    "zero_optimization.stage": _stage,
    **{f"zero_optimization.offload_{role}.device": _device for role in ("param", "optimizer")},
    **{f"zero_optimization.offload_{role}.nvme_path": _path for role in ("param", "optimizer")},
    **{f"zero_optimization.offload_param.{name}": _memory for name in ("max_in_cpu", "buffer_count", "buffer_size")},
    **dict.fromkeys(toml_output.REQUESTS, _request),
    "gradient_clipping": _clipping,
    "optimizer.params.max_grad_norm": _clipping,
    "gradient_accumulation_steps": _accumulation,
    "optimizer.type": _optimizer,
    "optimizer.params.*": _parameter,
    "scheduler.type": _scheduler,
    "scheduler.params": _scheduler,
    "scheduler.params.*": _rate,
    "communication_data_type": _reduced,
    "tensor_parallel": _tensor_parallel,
}
"""Translations of keys that depend on their value or on other keys."""
