"""Settings derived from a DeepSpeed configuration, as TOML with the source keys in comments."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infinity.config import load_config
from infinity.units import GIB, KIB, LARGEST, format_setting
from infinity_tools.migrate.read import AUTO, Found
from infinity_tools.toml import literal, quoted

_PARAM, _OPTIMIZER = "zero_optimization.offload_param", "zero_optimization.offload_optimizer"
_ACTIVATIONS = "activation_checkpointing.cpu_checkpointing"
_BUFFERS = {"max_in_cpu": 10**9, "buffer_count": 5, "buffer_size": 10**8}
"""DeepSpeed's defaults for parameters in memory."""
REQUESTS = {
    "aio.block_size": ("storage.request_bytes", 1 << 20, range(4 * KIB, GIB + 1, 4096)),
    "aio.queue_depth": ("storage.queue_depth", 8, range(1, 4097)),
}
"""Setting for each key of requests, DeepSpeed's default, and the values that the setting accepts."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A setting, or a comment in its place if `value` is None."""

    name: str
    value: Any
    remark: str


def lines_of(found: Found, nvme: Sequence[str] = ()) -> list[Line]:
    """Return the settings for a configuration, in the order of the file. `nvme` replaces its paths."""
    lines = [*_paths(found, nvme), *_requests(found), *_memory(found)]
    if found[_ACTIVATIONS] is True:
        lines.append(Line(name="activations.tier", value="host", remark=_ACTIVATIONS))
    return lines


def nvme_paths(found: Found) -> list[str]:
    """Return the paths of parameters and optimizer that DeepSpeed uses, without duplicates."""
    paths: dict[str, str] = {}
    for section, role in ((_PARAM, "param"), (_OPTIMIZER, "optimizer")):
        path = found[f"{section}.nvme_path"]
        if found.device(role) == "nvme" and path not in (None, AUTO):
            paths.setdefault(os.path.realpath(path), path)
    return list(paths.values())


def _paths(found: Found, nvme: Sequence[str]) -> list[Line]:
    if nvme:
        return [Line(name="storage.paths", value=list(nvme), remark="--nvme")]
    if paths := nvme_paths(found):
        return [Line(name="storage.paths", value=paths, remark="nvme_path of offload_param and offload_optimizer")]
    why = "required: one folder per NVMe drive; the configuration contains none"
    return [Line(name="storage.paths", value=None, remark=f'paths = ["/nvme0/run"]  # {why}')]


def is_default(found: Found, name: str) -> bool:
    """Return whether a key of `aio`, or the memory for parameters that it describes, has DeepSpeed's default.

    A configuration that was written by a tool lists all defaults. They were chosen for DeepSpeed, so infinity's own
    defaults apply instead.
    """
    if name in REQUESTS:
        return bool(found[name] == REQUESTS[name][1])
    return all(found[f"{_PARAM}.{buffer}"] in (None, AUTO, default) for buffer, default in _BUFFERS.items())


def request(found: Found, name: str) -> int | None:
    """Return the value for the setting of a key in `REQUESTS`, or None if it is DeepSpeed's default or not accepted."""
    value = found[name]
    if not isinstance(value, int) or is_default(found, name):
        return None
    return value if value in REQUESTS[name][2] else None


def _requests(found: Found) -> list[Line]:
    values = {name: request(found, name) for name in REQUESTS}
    return [
        Line(name=REQUESTS[name][0], value=value, remark=name) for name, value in values.items() if value is not None
    ]


def host_bytes(found: Found) -> int | None:
    """Return an estimate, in bytes, of the memory that DeepSpeed uses for parameters, or None if no sizes other than
    DeepSpeed's defaults are configured.

    max_in_cpu is the number of elements kept in memory; each buffer has buffer_size elements.
    """
    told = {name: found[f"{_PARAM}.{name}"] for name in _BUFFERS}
    if found.device("param") != "nvme" or is_default(found, _PARAM):
        return None
    elements, count, size = (
        value if isinstance(value, int) else _BUFFERS[name] for name, value in told.items()
    )  # fmt: skip
    estimate = (elements + count * size) * (2 if found.precision() else 4)
    return estimate if 0 < estimate <= LARGEST // 2 else None


def _memory(found: Found) -> list[Line]:
    if (estimate := host_bytes(found)) is not None:
        remark = "an estimate: offload_param.max_in_cpu + buffer_count x buffer_size; more is faster"
        return [Line(name="memory.host_bytes", value=format_setting(estimate), remark=remark)]
    if "cpu" in (found.device("param"), found.device("optimizer")) and not nvme_paths(found):
        each = 14 if found.precision() else 16
        remark = (
            f'host_bytes = "64GiB"  # device = cpu: use at least {each} bytes per parameter of a rank to hold all state'
        )
        return [Line(name="memory.host_bytes", value=None, remark=remark)]
    return []


def to_toml(lines: Sequence[Line], source: str, ranks: str) -> tuple[str, dict[str, Any]]:
    """Return the text of a settings file and its settings.

    Args:
        lines: Settings.
        source: Name of the configuration.
        ranks: Sentence about the number of ranks.

    Raises:
        ConfigError: if `infinity.load_config` rejects the settings.
    """

    text = [f"# Settings of infinity, from {quoted(source)}.", f"# {ranks}"]
    for section in dict.fromkeys(line.name.partition(".")[0] for line in lines):
        text += ["", f"[{section}]"]
        for line in lines:
            of, _, key = line.name.partition(".")
            if of == section:
                shown = f"{key} = {literal(key, line.value)}" if line.value is not None else ""
                text.append(f"{shown}  # {line.remark}" if shown else f"# {line.remark}")
    whole = "\n".join(text) + "\n"
    settings = tomllib.loads(whole)
    load_config(settings)
    return whole, settings
