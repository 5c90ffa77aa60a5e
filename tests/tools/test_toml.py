"""Tests of the settings files that commands write."""

from __future__ import annotations

import tomllib

import pytest

from infinity import Config, load_config
from infinity.errors import ConfigError
from infinity_tools.toml import settings_toml, tree_toml


def test_written_settings_load_unchanged() -> None:
    """Only values that differ from the defaults are written."""
    odd = ('/nvme "0"/a\\b', "/nvme\t[1]/ü\x7f", "/nvme'2'/#")
    settings = Config().with_values(
        **{"storage.paths": odd, "storage.queue_depth": 64, "memory.host_bytes": 3 << 30,
           "memory.page_bytes": 65536 * 3, "storage.request_bytes": 12288, "run.seed": 7, "update.cores": 0}
    )  # fmt: skip
    text = settings_toml(settings, ["how it was found", 'with "quotes"'])
    assert load_config(tomllib.loads(text)) == settings
    assert text.startswith("# how it was found\n# with ")
    assert 'host_bytes = "3GiB"' in text
    assert "timeout_seconds" not in text
    assert load_config(tomllib.loads(settings_toml(Config()))) == Config()


def test_unreadable_settings_are_rejected(subtests: pytest.Subtests) -> None:
    for tree, words in [({"memory": {"host_byte": 1}}, "host_byte"), ({"storage": {"paths": ["/a\udcff"]}}, "TOML")]:
        with subtests.test(words), pytest.raises(ConfigError, match=words):
            tree_toml(tree)
