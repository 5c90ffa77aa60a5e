"""Bandwidths that nobody can have are not taken for shares: a commit that names them would be refused by its reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.store import bandwidth


@pytest.mark.parametrize(
    "value", ["Infinity", "NaN", "-1", "0", "1e300", "1e-300", "1" + "0" * 400, '"x"', "null", "[]"]
)
def test_what_is_remembered_is_checked(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured anew, and kept."""
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    file = runtime / bandwidth.CACHE_NAME
    file.write_text(f'{{"{"|".join(paths)}": [1.0, {value}]}}')
    file.chmod(0o600)
    monkeypatch.setattr(bandwidth, "_probed", lambda names, engine: [3.0, 4.0])
    assert bandwidth.path_shares(paths, "threads", runtime) == [3.0, 4.0]
    assert json.loads(file.read_text())["|".join(paths)] == [3.0, 4.0]
