"""Tests of the daemon's configuration: files and options, reloading, authentication and deployment files."""

from __future__ import annotations

import configparser
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from infinity.errors import ConfigError
from infinity_daemon.daemon_config import load_daemon_config
from infinity_daemon.service import _state_folder, _token
from support.daemon_process import daemon, get, until

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_options_override_the_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    file = tmp_path / "infinityd.toml"
    file.write_text(
        "[server]\nport = 9\n[stats_files]\nkeep_dead_seconds = 60\n"
        f'[drives]\nendurance = {{"{tmp_path}/drive" = "600TB"}}\n'
    )
    config = load_daemon_config(file, {"server.port": 0, "drives.paths": [str(tmp_path)]})
    assert (config.server.port, config.server.host) == (0, "127.0.0.1")
    assert (config.stats_files.keep_dead_seconds, config.stats_files.keep_ended_seconds) == (60, 120)
    assert config.drives.endurance == {f"{tmp_path}/drive": 600 * 10**12}
    assert config.drives.paths == (str(tmp_path),)


def test_invalid_settings_are_rejected(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """The message names the section, the key, the value and the valid range or the nearest known key."""
    for text, message in [
        ("[stats_files]\nhost = '::'", "unknown setting stats_files.host; did you mean server.host?"),
        ("[drives]\npaths = ['/nope']", "drives.paths: '/nope' is not a folder"),
        ("[drives]\nendurance = {'/nope' = '1TB'}", "drives.endurance: '/nope' is not a folder"),
        ("[drives]\nendurance = {'/' = 'much'}", "drives.endurance./ = 'much' is not a size"),
        ("[drives]\nendurance = 3", "drives.endurance = 3 must be an object"),
        ("[stale]\nremove_checkpointed_after_seconds = 3600", "stale.remove_checkpointed_after_seconds = 3600"),
    ]:
        with subtests.test(message):
            (tmp_path / "infinityd.toml").write_text(text)
            with pytest.raises(ConfigError) as caught:
                load_daemon_config(tmp_path / "infinityd.toml", {})
            assert message in str(caught.value)


def test_state_folder_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`measure.state_dir` precedes STATE_DIRECTORY, a configured runtime folder and the user's state folder."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    given = {"measure.state_dir": "/given", "stats_files.runtime_dir": "/pages"}
    assert load_daemon_config(None, given).state_dir == Path("/given")
    assert load_daemon_config(None, {"stats_files.runtime_dir": "/pages"}).state_dir == Path("/pages")
    assert load_daemon_config(None, {}).state_dir == Path("/home/me/.local/state/infinity")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert load_daemon_config(None, {}).state_dir == Path("/state/infinity")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert load_daemon_config(None, {}).state_dir == Path("/home/me/.local/state/infinity")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/infinity:/var/lib/other")
    assert load_daemon_config(None, {"stats_files.runtime_dir": "/pages"}).state_dir == Path("/var/lib/infinity")
    monkeypatch.delenv("STATE_DIRECTORY")
    monkeypatch.setenv("HOME", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert load_daemon_config(None, {}).state_dir == tmp_path / "infinity"


def test_an_unusable_state_folder_raises_only_if_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default folder is replaced by the runtime folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"state folder .* cannot be used: .*measure\.state_dir"):
        _state_folder(load_daemon_config(None, {"measure.state_dir": str(tmp_path / "file/state")}))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "file/state"))
    given = {"stats_files.runtime_dir": str(tmp_path)}
    assert _state_folder(load_daemon_config(None, given)) == tmp_path
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "made/state"))
    assert _state_folder(load_daemon_config(None, given)) == tmp_path / "made/state"
    assert (tmp_path / "made/state").stat().st_mode & 0o777 == 0o700


def test_sighup_reloads_the_settings(tmp_path: Path) -> None:
    """Settings that require a restart are logged, and an invalid file changes nothing."""
    (tmp_path / "drive").mkdir()
    file = tmp_path / "infinityd.toml"
    file.write_text("")
    with daemon(tmp_path, "--config", str(file)) as process:
        assert "infinity_device_free_bytes{" not in get(process.port, "/metrics")
        file.write_text("[drives]\npaths = 3\n")
        process.send_signal(signal.SIGHUP)
        until(lambda: "config.rejected" in process.log.read_text())
        file.write_text(f'[server]\nhost = "0.0.0.0"\n[drives]\npaths = ["{tmp_path}/drive"]\n')
        process.send_signal(signal.SIGHUP)
        until(lambda: "config.read" in process.log.read_text())
        until(lambda: "infinity_device_free_bytes{" in get(process.port, "/metrics"))
        assert "config.restart changed=server" in process.log.read_text()


def test_an_invalid_token_file_is_rejected(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for content, mode, message in [
        ("", 0o600, "ASCII"),
        ("two words", 0o600, "ASCII"),
        ("ä", 0o600, "ASCII"),
        ("x", 0o644, "chmod 600"),
    ]:
        with subtests.test(message):
            token = tmp_path / "token"
            token.write_text(content)
            token.chmod(mode)
            with pytest.raises(ConfigError, match=message):
                _token(str(token))


def test_systemd_units_are_valid(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """If systemd-analyze is installed, it verifies the units."""
    for unit in ["infinityd.service", "infinityd-user.service"]:
        with subtests.test(unit=unit):
            parsed = configparser.ConfigParser(strict=False, interpolation=None)
            parsed.optionxform = str  # type: ignore[assignment,method-assign]
            parsed.read(DEPLOY / "systemd" / unit)
            assert "infinityd" in parsed["Service"]["ExecStart"]
            assert parsed["Service"]["ExecReload"] == "/bin/kill -HUP $MAINPID"
            if shutil.which("systemd-analyze") is None:
                pytest.skip("systemd-analyze is not installed")
            copied = tmp_path / "infinityd.service"
            shutil.copy(DEPLOY / "systemd" / unit, copied)
            command = ["systemd-analyze", "verify", *(["--user"] if "user" in unit else []), "--man=no", str(copied)]
            environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
            found = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert "infinityd" not in found.stderr, found.stderr
