"""Tests of commands that need an optional package that is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.command import SMALL, run_here


def test_missing_package_names_extra(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """The message is one line, the status is 2, and nothing is trained."""
    for package, arguments, extra in [
        ("prometheus_client", [*SMALL, "--metrics-port", "0"], "daemon"),
        ("trl", SMALL, "train"),
        ("torchao", [*SMALL, "--quantize", "nf4", "--peft.r", "4"], "qlora"),
        ("transformers", ["train", "--model", "list"], "cli"),
    ]:
        with subtests.test(package=package), pytest.MonkeyPatch.context() as monkeypatch:
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
