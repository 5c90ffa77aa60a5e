"""Tests of values that are rejected because they would silently mean something else."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from infinity.config import check_config, load_config
from infinity.errors import ConfigError
from infinity.run.run_directory import _say_where


@pytest.mark.parametrize("kind", ["BertConfig", "RobertaConfig"])
def test_bidirectional_model_is_rejected(kind: str, tmp_path: Path) -> None:
    """Its loss would approach zero. The message names the setting that makes the model causal."""
    import transformers

    from infinity_tools.presets import find_model, on_meta

    config = getattr(transformers, kind)(vocab_size=300)
    (tmp_path / "config.json").write_text(config.to_json_string())
    with pytest.raises(ConfigError, match="is_decoder"):
        on_meta(find_model("config.json"))
    for name in ("bart", "bert"):
        causal = transformers.AutoConfig.for_model(name, is_decoder=name == "bert")
        (tmp_path / "config.json").write_text(json.dumps(causal.to_dict()))
        on_meta(find_model("config.json"))


def test_shared_drive_or_tmpfs_logs_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with caplog.at_level(logging.WARNING, "infinity"):
        _say_where([str(tmp_path / "a")])
        assert not [text for text in caplog.messages if "one drive" in text]
        _say_where([str(tmp_path / "a"), str(tmp_path / "b")])
    assert any(f"{tmp_path / 'a'}, {tmp_path / 'b'} are on " in text for text in caplog.messages)
    caplog.clear()
    if " /dev/shm tmpfs " not in Path("/proc/self/mounts").read_text():
        pytest.skip("no tmpfs is mounted at /dev/shm")
    with caplog.at_level(logging.WARNING, "infinity"):
        _say_where(["/dev/shm"])
    assert caplog.messages == [
        "storage.paths: /dev/shm is in memory (tmpfs or ramfs), so the state uses host memory and is lost on reboot"
    ]


def test_check_config_validates_api_settings(tmp_path: Path) -> None:
    storage = {"paths": [str(tmp_path)]}
    with pytest.raises(ConfigError, match=r"storage\.paths contains an empty string"):
        check_config(load_config({"storage": {"paths": [""]}}))
    with pytest.raises(ConfigError, match=r"telemetry.timeline = .* cannot be written: .* is not a folder"):
        check_config(load_config({"storage": storage, "telemetry": {"timeline": str(tmp_path / "no/t.json")}}))
    with pytest.raises(ConfigError, match=r"run\.resume_step .*run\.resume = \"auto\""):
        check_config(load_config({"storage": storage, "run": {"resume": "auto", "resume_step": 3}}))
