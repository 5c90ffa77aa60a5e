"""Options that several commands share, so that the same thing has the same name and help in each of them.

An option for a setting takes its help, range and default from the declaration of the setting in `infinity.config`.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from infinity.cli_errors import at_most, setting
from infinity.config import Config, TelemetryConfig, runtime_dir
from infinity.units import LARGEST

SETTINGS: Final = {
    "memory.host_bytes": "--host-memory",
    "memory.page_bytes": "--page-bytes",
    "state.format": "--state-format",
    "update.schedule": "--update",
    "update.cores": "--update-cores",
    "activations.tier": "--activations",
    "run.retained_checkpoints": "--retained-checkpoints",
    "telemetry.runtime_dir": "--runtime-dir",
}
"""Name of the option for each setting."""
_OTHERS: Final[dict[str, dict[str, Any]]] = {
    "activation_checkpointing": {"help": "Keep only the layer inputs and recompute the layers in backward."},
    "batch_tokens": {"min": 1, "callback": at_most(10**12), "help": "Tokens per step, summed over all ranks."},
    "loss_tokens": {
        "min": 1,
        "help": "Compute the logits and loss in slices of this many tokens, and recompute them in backward, so that a "
        "large vocabulary needs less memory. [default: a whole micro-batch, not sliced]",
    },
    "max_grad_norm": {
        "help": "Clip gradients to this global norm. Updates then wait until backward has finished. [default: no "
        "clipping]"
    },
    "config": {"help": "TOML file with settings (docs/reference/settings.md); command-line options override it."},
}
"""Options that are not settings, by parameter name."""
HELP: Final = {
    "telemetry.runtime_dir": "Runtime folder of infinityd, which may have measured the bandwidth of the drives. "
    "[default: from --config, or the first usable default folder (docs/reference/settings.md)]"
}
"""Help that differs from the declaration of the setting, because the commands use the setting in another way."""


Json = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
"""Option `--json` of commands."""
Runtime = Annotated[
    str,
    typer.Option("--runtime-dir", help="Runtime folder of the node. [default: same as telemetry.runtime_dir]"),
]
"""Option `--runtime-dir` of commands that do not read settings. See `runtime_folder`."""


def runtime_folder(runtime: str) -> Path:
    """Return the runtime folder for a value of `Runtime`."""
    return runtime_dir(TelemetryConfig(runtime_dir=runtime))


class Panel:
    """Options of a command that the help lists under one heading."""

    def __init__(self, title: str) -> None:
        self._title = title

    def option(self, *names: str, **declared: Any) -> Any:
        """Return an option, which is declared as for `typer.Option`."""
        return typer.Option(*names, rich_help_panel=self._title, **declared)

    def number(self, least: float, most: float, help: str) -> Any:
        """Return an option for a number. The help shows only the lower limit."""
        return self.option(min=least, callback=at_most(most), help=help)

    def setting(self, name: str) -> Any:
        """Return the option for a setting, a key of `SETTINGS`. Its value is None if the option is not passed."""
        section, key = name.split(".")
        settings = getattr(Config(), section)
        metadata, default = settings.__dataclass_fields__[key].metadata, getattr(settings, key)
        more: dict[str, Any] = {}
        if metadata["size"]:
            more["metavar"] = "SIZE"
        elif typing.get_type_hints(type(settings))[key] is int:
            more["min"] = metadata["minimum"]
            more["max"] = None if metadata["maximum"] == LARGEST else metadata["maximum"]
        example = "such as 64MiB; " if metadata["size"] else ""
        help = HELP.get(name, f"{metadata['doc']} [{example}default: from --config, or {default}]")
        return self.option(SETTINGS[name], callback=setting(name), help=help, **more)

    def shared(self, name: str) -> Any:
        """Return an option that is not a setting, a key of `_OTHERS`."""
        return self.option(**_OTHERS[name])


def settings_in(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were passed as options, by dotted name.

    Args:
        options: Parameters of a command, by name.
    """
    named = {name: options.get(option[2:].replace("-", "_")) for name, option in SETTINGS.items()}
    return {name: value for name, value in named.items() if value is not None}
