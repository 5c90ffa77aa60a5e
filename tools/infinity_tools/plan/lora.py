"""LoRA options of `infinity plan`."""

from __future__ import annotations

from infinity.errors import ConfigError


def parse_lora(text: str) -> tuple[int, tuple[str, ...]]:
    """Parse the value of `--lora`: key=value pairs, or only the rank.

    Returns:
        Rank of the adapters, and suffixes of the names of adapted modules. No suffixes: all linear layers except the
        head.

    Raises:
        ConfigError: If the value is not valid.
    """
    pairs = [part.partition("=") for part in (f"r={text}" if text.strip().isdecimal() else text).split(",")]
    values = {name.strip(): value.strip() for name, _, value in pairs}
    rank = values.get("r", "")
    known = len(values) == len(pairs) and all(values.values()) and values.keys() <= {"r", "targets"}
    if not known or not rank.isdecimal() or int(rank) < 1:
        raise ConfigError(f"--lora {text!r} is not valid; write 16, r=16, or r=16,targets=q_proj+v_proj")
    return int(rank), tuple(filter(None, values.get("targets", "").split("+")))
