"""Tests of commands that need an optional package that is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.command import SMALL, run_here


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("prometheus_client", [*SMALL, "--metrics-port", "0"], "daemon"),
        ("trl", SMALL, "train"),
        ("transformers", ["train", "--model", "list"], "cli"),
    ],
    ids=["metrics", "model", "list"],
)
def test_missing_package_names_extra(
    package: str, arguments: list[str], extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message is one line, the status is 2, and nothing is trained."""
    monkeypatch.setitem(sys.modules, package, None)  # which makes the import fail
    monkeypatch.delitem(sys.modules, "infinity.telemetry.exporter", raising=False)
    monkeypatch.delattr("infinity.telemetry.exporter", raising=False)
    done = run_here(*arguments, *(["--out", tmp_path / "out"] if "--max_length" in arguments else []))
    assert done.status == 2
    assert done.output == ""
    assert len(done.errors.splitlines()) == 1, done.errors
    assert done.errors.endswith(
        f"needs the package {package}, which is not installed: pip install 'infinity-offload[{extra}]'\n"
    )
    assert not [*tmp_path.glob("out/nvme/*")]


def test_version_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert run_here("version", "--json").summary["transformers"] == "not installed"
