"""Tests of mirrors in an object store: a local server that implements the API of S3."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.checkpoint.mirror import Mirror
from infinity.errors import CheckpointError, ConfigError
from support.resharding import all_tensors, newest_checkpoint, unequal_names
from support.session import Session

moto = pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")
pytestmark = pytest.mark.wide


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address in a new bucket, with credentials in the environment."""
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"bucket-{uuid.uuid4().hex}"
    s3fs.S3FileSystem().mkdir(bucket)
    yield f"s3://{bucket}/run"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_run_resumes_from_an_object_store(address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints that are not retained are removed, and no file and no message contains the credentials."""
    with caplog.at_level(logging.INFO), Session(tmp_path, run={"mirror": address}) as session:
        losses = session.run(until=9)
    assert f"copied the checkpoint of step 9 to {address}" in caplog.text
    assert [name.step for name in Mirror(address).published(session.optimizer.run.folder.run_id)] == [9]
    before = all_tensors(newest_checkpoint(tmp_path))
    (tmp_path / "other").mkdir()
    with Session(tmp_path / "other", run={"resume": address}) as session:
        assert session.optimizer.steps == len(losses)
        session.save_checkpoint()
    assert unequal_names(before, all_tensors(newest_checkpoint(tmp_path / "other"))) == []
    assert "very-secret" not in caplog.text
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and b"very-secret" in file.read_bytes()]
    files = s3fs.S3FileSystem()
    assert not [name for name in files.find(address) if b"very-secret" in files.cat_file(name)]


@pytest.mark.parametrize("setting", ["mirror", "resume"])
def test_unreachable_store_raises_an_error(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the address, and no traceback of another package is shown."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # the discard port, where no server listens
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises((ConfigError, CheckpointError), match="s3://bucket/run"):
        Session(tmp_path, run={setting: "s3://bucket/run"})


def test_missing_bucket_raises_an_error(address: str, tmp_path: Path) -> None:
    """It is not created, because the address is probably wrong."""
    with pytest.raises(ConfigError, match="cannot be written"):
        Session(tmp_path, run={"mirror": "s3://typo/run"})
    assert not s3fs.S3FileSystem().exists("typo")
