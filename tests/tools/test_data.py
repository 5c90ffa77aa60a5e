"""Tests of training batches, which depend only on seed and step and are divided among ranks."""

from __future__ import annotations

import os
import sysconfig

import pytest
import torch

from infinity.errors import ConfigError
from infinity_tools.data import Batches, Corpus


def _corpus(folder):
    (folder / "b.txt").write_bytes(bytes(range(100, 200)))
    (folder / "a.txt").write_bytes(bytes(range(100)))
    (folder / "empty").write_bytes(b"")
    (folder / ".hidden").write_bytes(b"not this")
    return Corpus.of([folder])


def test_corpus_read_crosses_files_and_wraps_around(tmp_path):
    corpus = _corpus(tmp_path)
    assert corpus.size == 200
    assert corpus.read(0, 200) == bytes(range(200))
    assert corpus.read(95, 10) == bytes(range(95, 105))
    assert corpus.read(195, 10) == bytes([*range(195, 200), *range(5)])
    assert corpus.read(205, 405) == (bytes(range(200)) * 4)[5:410]


def test_standard_library_corpus_skips_site_packages(tmp_path, monkeypatch):
    """`site-packages` is not even listed, because it may contain a hundred times as many files."""
    for name in ("b.py", "a/c.py", "a.py", "a/notes", "site-packages/torch/d.py", "e/site-packages/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    seen, scan = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder=".": seen.append(str(folder)) or scan(folder))
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    corpus = Corpus.of_standard_library()
    assert corpus.read(0, corpus.size) == b"a/c.pya.pyb.py"
    assert not [folder for folder in seen if "site-packages" in folder]


def test_batches_depend_only_on_seed_and_step(tmp_path):
    corpus = _corpus(tmp_path)

    def at(step, *, seed=1, rank=0, world_size=1):
        batches = Batches(corpus, sequences=4, length=16, seed=seed, rank=rank, world_size=world_size)
        return batches.at(step)["input_ids"]

    assert at(3).shape == (4, 16)
    assert torch.equal(at(3), at(3))
    assert not torch.equal(at(3), at(4))
    assert not torch.equal(at(3), at(3, seed=2))
    per_rank = [at(3, rank=rank, world_size=2) for rank in range(2)]
    assert torch.equal(torch.cat(per_rank), at(3))


def test_batches_read_text_until_sequence_is_full(tmp_path):
    corpus = _corpus(tmp_path)
    batches = Batches(
        corpus, sequences=1, length=20, seed=0, rank=0, world_size=1, encode=lambda text: [1] * (len(text) // 30)
    )
    assert batches.at(0)["input_ids"].tolist() == [[1] * 20]


def test_tokenizer_without_tokens_raises_config_error(tmp_path):
    """Otherwise, the tokenizer would receive more and more text."""
    batches = Batches(
        _corpus(tmp_path), sequences=1, length=20, seed=0, rank=0, world_size=1, encode=lambda text: [][: len(text)]
    )
    with pytest.raises(ConfigError, match=r"--data: .*tokenizer\.json .*no tokens"):
        batches.at(0)


def test_too_little_text_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="too little for sequences of 500 tokens"):
        Batches(_corpus(tmp_path), sequences=1, length=500, seed=0, rank=0, world_size=1)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match="no text"):
        Corpus.of([tmp_path / "nothing"])


def test_truncated_file_raises_config_error(tmp_path):
    corpus = _corpus(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"short")
    with pytest.raises(ConfigError, match="has changed"):
        corpus.read(0, 50)
