"""Tests of the settings that `infinity probe` recommends."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from infinity.config import StorageConfig, load_config
from infinity.errors import ConfigError
from infinity.io.probe.points import Load, Measurement, Point, latency_of
from infinity_tools.probe.recommendation import Choice, best_size, mixed_speeds, settings_block, usual_size

MIB = 1 << 20
USUAL = (StorageConfig().request_bytes, StorageConfig().queue_depth)


def measured(load: Load, block: int, depth: int, read: float, write: float) -> Measurement:
    """Return a measurement."""
    return Measurement(
        point=Point(load=load, block_bytes=block, depth=depth),
        read_bytes_per_second=read,
        write_bytes_per_second=write,
        seconds=1.0,
        latency=latency_of([]),
    )


def test_best_size_prefers_defaults_then_smallest() -> None:
    """Speeds within 3 % count as equal."""
    assert usual_size() == USUAL
    for speeds, best in [
        ({USUAL: 100.0, (MIB, 1): 102.9}, USUAL),  # equal: the defaults
        ({USUAL: 100.0, (MIB, 1): 104.0}, (MIB, 1)),
        ({USUAL: 50.0, (MIB, 8): 98.0, (MIB, 32): 100.0}, (MIB, 8)),  # the smallest that is equally fast
        ({USUAL: 50.0, (MIB, 8): 96.0, (MIB, 32): 100.0}, (MIB, 32)),
        ({(4 * MIB, 2): 100.0, (MIB, 8): 100.0}, (MIB, 8)),  # equal bytes in flight: the smaller request
        ({(MIB, 1): 0.0}, (MIB, 1)),
    ]:
        assert best_size(speeds) == best, speeds


def test_mixed_speeds_sum_reads_and_writes_of_all_folders() -> None:
    a = [measured(Load.BOTH, MIB, 8, 1.0, 2.0), measured(Load.READ, MIB, 8, 50.0, 0.0)]
    b = [measured(Load.BOTH, MIB, 8, 3.0, 4.0), measured(Load.BOTH, MIB, 1, 0.5, 0.5)]
    assert mixed_speeds([a, b]) == {(MIB, 8): 10.0, (MIB, 1): 1.0}


def choice(path: str, **values: object) -> Choice:
    """Return a choice that recommends the defaults, except for `values`."""
    usual: dict[str, object] = {
        "paths": (path,), "block_bytes": USUAL[0], "depth": USUAL[1], "engine": "auto", "bytes_per_second": 1e9,
        "usual_measured": True, "gain": None,
    }  # fmt: skip
    return Choice(**(usual | values))  # type: ignore[arg-type]


def test_recommended_settings_can_be_loaded(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """Folder names may contain any character."""
    for name in ["plain", 'qu"o\\te', "umläut 🚀", "tab\tnew\nline", "del\x7f", "[x]"]:
        with subtests.test(name=name):
            folder = tmp_path / name
            folder.mkdir()
            text = choice(str(folder), block_bytes=3 * MIB + 4096, depth=7, engine="threads").toml()
            storage = load_config(tomllib.loads(text)).storage
            assert storage == StorageConfig(
                paths=(str(folder),), request_bytes=3 * MIB + 4096, queue_depth=7, engine="threads"
            )
            file = tmp_path / "probe.toml"
            file.write_text(text)
            assert load_config(file).storage == storage


def test_invalid_recommendation_raises_config_error(subtests: pytest.Subtests) -> None:
    for values, says in [
        ({"block_bytes": 1 << 31}, "request_bytes"),
        ({"depth": 5000}, "queue_depth"),
        ({"paths": ("bad\udcff",)}, "TOML"),
        ({"paths": ("missing/deep/er",)}, "cannot be created"),
    ]:
        with subtests.test(says):
            invalid = choice("x", **values)
            with pytest.raises(ConfigError, match=says):
                settings_block(invalid.paths, invalid.block_bytes, invalid.depth, invalid.engine)


def test_reasons_explain_recommendation(tmp_path: Path) -> None:
    path = str(tmp_path)
    said = " ".join(choice(path).reasons())
    assert "2 MiB, 32 in flight, the defaults: " in said
    assert "3%" in said
    assert "only storage.paths" in said
    said = " ".join(choice(path, block_bytes=MIB, depth=1, gain=2.0).reasons())
    assert "1 MiB, 1 in flight: 2.00 times as fast as the defaults" in said
    assert "only storage.paths" not in said
    said = " ".join(choice(path, block_bytes=MIB, usual_measured=False).reasons())
    assert "the defaults (2 MiB, 32) were not measured" in said
