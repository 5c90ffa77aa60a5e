"""Fuzz tests of checkpoint files: reading raises an error that names the file, or returns the saved values.

`make fuzz` runs many more examples, which are different every time.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from typer.testing import CliRunner

from infinity.checkpoint import model_state, publish
from infinity.checkpoint.checkpoint_files import CheckpointFiles
from infinity.checkpoint.manifest import checksum_of, published_in, read_manifest, read_state_file, using
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import CheckpointError, StorageError
from infinity.ranks import Ranks
from infinity.store.folder import RunFolder
from infinity_tools.cli import app
from support.session import Session

LATEST = {"resume": "latest"}
ALONE = Ranks(0, 0, 1)
NEWEST, OLDER = 6, 3
FUZZ = settings.get_current_profile_name() == "fuzz"


def bounded(examples: int) -> settings:
    """Return settings for a few fixed examples or, with the profile ``fuzz``, for many random ones."""
    return settings(
        max_examples=settings.default.max_examples if FUZZ else examples,
        derandomize=not FUZZ,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


class Stored:
    """Run with two checkpoints, and its values."""

    def __init__(self, place: Path) -> None:
        self.place = place
        with Session(place, run={"retained_checkpoints": 2}) as session:
            session.run(NEWEST)
            self.model, self.layout = session.model, session.optimizer.run.layout
            self.losses = session.run(NEWEST + 1, every=0)
        (self.root,) = (entry for entry in (place / "nvme0").iterdir() if entry.is_dir())
        self.folder = RunFolder(self.root.name, (self.root,))
        self.older, self.manifest = (
            self.folder.checkpoints / name.file_name for name in published_in(self.folder.checkpoints)
        )
        self.state = self.folder.checkpoints / read_manifest(self.manifest).state_file
        self.values = self.read(CheckpointReader(self.folder))

    def read(self, reader: CheckpointReader) -> list[bytes]:
        """Return the bytes of all parameters and their states."""
        return [
            reader.read(index, name).flatten().view(torch.uint8).numpy().tobytes()
            for index in range(len(reader.tensors))
            for name in ("master", *(kind for kind, _ in reader.kinds(index)))
        ]

    def body(self, file: Path) -> dict[str, Any]:
        """Return the body of a manifest."""
        return json.loads(json.loads(file.read_text())["body"])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Run that every example restores after use."""
    return Stored(tmp_path_factory.mktemp("stored"))


@contextmanager
def replaced(file: Path, content: bytes) -> Iterator[None]:
    """Replace the content of a file temporarily, and restore the random generators afterwards."""
    good, generators = file.read_bytes(), (random.getstate(), np.random.get_state(), torch.get_rng_state())
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(good)
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_rng_state(generators[2])


def sealed(body: str) -> bytes:
    """Return a file that contains the body and its correct checksum."""
    data = body.encode("utf-8", "surrogatepass")
    return json.dumps({"checksum": checksum_of(data), "body": body}).encode()


# --- Uses of a checkpoint. Each one reads correct values or raises an exception.


def decode(stored: Stored) -> None:
    """Decode all files."""
    for name in published_in(stored.folder.checkpoints):
        found = read_manifest(stored.folder.checkpoints / name.file_name)
        model_state.load_groups(found.groups, [{} for _ in found.groups], [group["params"] for group in found.groups])
        with using(stored.folder.checkpoints / found.state_file):
            model_state.load_random(found.random, read_state_file(stored.folder.checkpoints, found))


def export(stored: Stored) -> None:
    """Read every parameter and state as an export does."""
    reader = CheckpointReader(stored.folder)
    list(reader.buffers())
    assert stored.read(reader) == stored.values, "wrong values"


def read_for_resume(stored: Stored) -> None:
    """Read the checkpoint as resume does."""
    checkpoints = publish.list_checkpoints(stored.folder, ALONE, -1)
    found = publish.find_checkpoints(stored.folder, ALONE, stored.layout, "AdamW", checkpoints)
    assert [manifest.step for manifest in found] in ([OLDER, NEWEST], [NEWEST])
    groups: list[dict[str, Any]] = [{} for _ in found[-1].groups]
    held = [group["params"] for group in found[-1].groups]
    publish.restore(found[-1], CheckpointFiles(stored.folder), stored.model, groups, held)


def run_store_commands(stored: Stored) -> None:
    """Run the `store` commands, which must exit with status 0, 1 or 2 and never with a traceback."""
    for arguments in (["ls"], ["ls", "--json"], ["verify", "--json"], ["scrub"], ["gc", "--dry-run", "--json"]):
        result = CliRunner().invoke(app, ["store", *arguments, str(stored.root.parent)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code in (0, 1, 2)
        if "--json" in arguments and result.exit_code < 2:
            json.loads(result.stdout)


USES: tuple[Callable[[Stored], None], ...] = (decode, export, read_for_resume)


def error_of(action: Callable[[], object], stored: Stored, file: Path) -> str:
    """Return the error message of an action, which must name the file, the run or the data file, or an empty string."""
    try:
        action()
        return ""
    except CheckpointError as error:
        message, names = str(error), (file.name, stored.folder.run_id)
    except StorageError as error:
        message, names = str(error), ("rank00000.pages",)
    assert any(name in message for name in names), message
    assert len(message) < 2000
    return message


def use_all(stored: Stored, file: Path) -> list[str]:
    """Use a checkpoint in every way; return the error messages."""
    return [error_of(lambda use=use: use(stored), stored, file) for use in USES]


# --- Damaged files, which the checksum detects.


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """Draw the content of a damaged file."""
    place = draw(st.integers(0, len(good) - 1))
    kind = draw(st.sampled_from(["cut", "flip", "zeros", "doubled", "noise"]))
    if kind == "cut":
        return good[:place]
    if kind == "flip":
        return good[:place] + bytes([good[place] ^ 1 << draw(st.integers(0, 7))]) + good[place + 1 :]
    if kind == "zeros":
        return good[:place] + bytes(len(good) - place)
    if kind == "doubled":
        return good + good[place:]
    return draw(st.binary(max_size=200))


FILES = ("manifest", "state")


@pytest.mark.parametrize("which", FILES)
@bounded(25)
@given(data=st.data())
def test_damage_is_detected(which: str, stored: Stored, data: st.DataObject) -> None:
    """An error names the file, and no value is read from it."""
    file: Path = getattr(stored, which)
    good = file.read_bytes()
    content = data.draw(damaged(good))
    with replaced(file, content):
        if content != good:
            assert any(use_all(stored, file))


# --- Forged files: well-formed, with the correct checksum.

DEEP = "@deep@"
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from([
        -1, 0, 1, 2, 4095, 4096, 8192, 2**31, 2**32, 2**48, 2**63 - 1, 2**63, -(2**63), 10**400, 1e308, 5e-324,
        float("nan"), float("inf"), "", "0", "-1", "../../etc/passwd", "/etc/passwd", "a\0b", "\ud800", "x" * 10_000,
        "float32", "float31", "int64", "master", "__class__", "0123456789abcdef", DEEP, [], {}, [[]], [{}], {"": None},
        {"0": []}, {"tensor": ["float32", [2**62], []]}, {"tuple": []}, {"tuple": [{"tuple": DEEP}]},
        {"tensor": ["int8", [], 300]}, {"tensor": ["float16", [1], [10**300]]}, {"tensor": ["bool", [2], [True]]},
        {"tensor": ["_C", [], 1]}, {"tensor": DEEP},
    ]),
)  # fmt: skip


def draw_place(tree: Any, draw: st.DrawFn) -> tuple[Any, Any]:
    """Draw a container in a tree and a key of it, at upper levels as often as at lower ones."""
    while True:
        keys = sorted(tree) if isinstance(tree, dict) else range(len(tree))
        key = draw(st.sampled_from(keys))
        below = tree[key]
        if not (isinstance(below, dict | list) and below) or draw(st.integers(0, 3)) == 0:
            return tree, key
        tree = below


def deform(draw: st.DrawFn, tree: Any) -> None:
    """Change one place in a tree."""
    parent, key = draw_place(tree, draw)
    kind = draw(st.sampled_from(["junk", "junk", "gone", "moved", "nudged", "doubled", "added"]))
    if kind == "gone":
        del parent[key]
    elif kind == "moved":
        other, place = draw_place(tree, draw)
        parent[key], other[place] = other[place], parent[key]
        json.dumps(tree)  # fails if the tree contains itself
    elif kind == "nudged" and type(parent[key]) is int:
        parent[key] += draw(st.sampled_from([-4096, -1024, -64, -1, 1, 64, 1024, 4096, 8192, 2**32]))
    elif kind == "doubled" and isinstance(parent, list):
        parent.append(parent[key])
    elif kind == "added" and isinstance(parent, dict):
        parent[draw(st.one_of(st.text(max_size=5), st.sampled_from(["00", "-1", "1" * 30, "params"])))] = parent[key]
    else:
        parent[key] = copy.deepcopy(draw(JUNK))  # sampled_from returns the same object every time


PARTS = ("all", "description")


@st.composite
def forged(draw: st.DrawFn, body: dict[str, Any], part: str) -> bytes:
    """Draw a file with a changed body, in any part or in the given one."""
    tree = json.loads(json.dumps(body))
    try:
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 4]))):
            deform(draw, tree if part == "all" else tree[part])
        written = json.dumps(tree)
    except (ValueError, IndexError, RecursionError):  # the tree is empty or contains itself
        written = "{}"
    return sealed(written.replace(f'"{DEEP}"', "[" * 50_000 + "]" * 50_000))


@pytest.mark.parametrize("part", PARTS)
@bounded(40)
@given(data=st.data())
def test_forged_manifest_raises_or_reads_saved_values(part: str, stored: Stored, data: st.DataObject) -> None:
    """The checksum of the forged body is correct."""
    with replaced(stored.manifest, data.draw(forged(stored.body(stored.manifest), part))):
        use_all(stored, stored.manifest)


@pytest.mark.parametrize("part", PARTS)
@bounded(5)
@given(data=st.data())
def test_store_commands_handle_forged_manifests(part: str, stored: Stored, data: st.DataObject) -> None:
    """`infinity store` can list, verify and clean up such runs."""
    with replaced(stored.manifest, data.draw(forged(stored.body(stored.manifest), part))):
        run_store_commands(stored)


TENSORS = st.one_of(
    st.none(),
    st.builds(
        lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        st.lists(st.integers(0, 5), max_size=3),
        st.sampled_from([torch.uint8, torch.int64, torch.float32, torch.bool, torch.bfloat16]),
    ),
    st.builds(
        lambda size, fill: torch.full((size,), fill, dtype=torch.uint8), st.integers(5000, 5100), st.integers(0, 255)
    ),
    st.builds(lambda fill: torch.full((624,), fill, dtype=torch.int64), st.integers(-(2**40), 2**40)),
)


@bounded(20)
@given(data=st.data())
def test_forged_state_files_are_handled(stored: Stored, data: st.DataObject) -> None:
    """Tensors are missing, or have a different shape, dtype or content, with the correct checksum."""
    tensors = load(stored.state.read_bytes())
    for name in sorted(tensors):
        change = data.draw(st.sampled_from([None, None, TENSORS]))
        if change is not None:
            tensors.pop(name)
            if (value := data.draw(change)) is not None:
                tensors[name] = value
    content = save(tensors)
    body = {**stored.body(stored.manifest), "state_checksum": checksum_of(content)}
    with replaced(stored.state, content), replaced(stored.manifest, sealed(json.dumps(body))):
        use_all(stored, stored.state)


def resume(place: Path, losses: list[float]) -> None:
    """Resume from the newest checkpoint, train, and compare the losses."""
    with Session(place, run=LATEST) as session:
        assert session.run(NEWEST + 1, every=0) == losses


@bounded(10)
@given(data=st.data())
def test_forged_pages_raise_or_resume_saved_state(stored: Stored, data: st.DataObject) -> None:
    """With a forged page table, startup fails, or the next step has the expected loss."""
    body = stored.body(stored.manifest)
    part = {key: body[key] for key in ("pages", "stripe_weights")}
    for _ in range(data.draw(st.integers(1, 3))):
        deform(data.draw, part)
    copied = stored.place.parent / "copied"
    shutil.copytree(stored.place, copied)
    generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    try:
        target = copied / stored.manifest.relative_to(stored.place)
        written = json.dumps({**body, **part}).replace(f'"{DEEP}"', "[]")
        target.write_bytes(sealed(written))
        error_of(lambda: resume(copied, stored.losses), stored, target)
    finally:
        shutil.rmtree(copied)
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_rng_state(generators[2])


def _set(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        inner: Any = body
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to(inner[keys[-1]]) if callable(to) else to

    return change


def _overlap(body: dict[str, Any]) -> None:
    first, second = list(body["pages"].values())[:2]
    second[:2] = first[:2]


FORGED = {
    "different checkpoint": (_set("identity", to="0" * 24), "rank 0 of 1.* step 6.* checkpoint 0000"),
    "invalid identity": (_set("identity", to="../../../../etc/passwd"), "identity = .* must be a string that matches"),
    "different layout": (_set("layout", to="0" * 16), "description .*layout .*0000"),
    "different rank": (_set("rank", to=1), "rank 1 of 1"),
    "different step": (_set("step", to=3), "step 3"),
    "more ranks": (_set("world_size", to=2), "rank 0 of 2"),
    "more parts": (_set("parts", to=lambda parts: parts * 2), "2 parts for 1 ranks"),
    "host with a control character": (_set("parts", 0, 0, to="a\nb"), r"parts\.0\.0 = 'a\\nb' must be a string"),
    "different run": (_set("run_id", to="20260101-000000-000000"), "20260101-000000-000000"),
    "different format": (_set("format", to=1), r"has format 1\b.*\b4\b"),
    "boolean format": (_set("format", to=True), "has format True"),
    "unknown path": (_set("pages", "0", 0, to=1), r"page 0 .*\bpath 1\b"),
    "unaligned offset": (_set("pages", "0", 1, to=512), r"pages\.0\.1 = 512 is not a multiple of 4096"),
    "different length": (_set("pages", "0", 2, to=4096), "its pages .*layout"),
    "beyond the end": (_set("pages", "0", 1, to=1 << 40), r"\b10995\d{8,} bytes of .*rank00000\.pages"),
    "overlapping pages": (_overlap, "two pages share the bytes"),
    "duplicate page": (
        lambda body: body["pages"].update({"00": body["pages"]["0"]}),
        r"pages\.a key = '00' must be a string that matches",
    ),
    "no stripe weights": (_set("stripe_weights", to=[]), "stripe_weights"),
    "infinite stripe weight": (_set("stripe_weights", 0, to=float("inf")), r"stripe_weights\.0 = inf must be a number"),
    "params in the settings": (
        lambda body: body["groups"][0]["settings"].update(params=[]),
        r"groups\.0\.settings\.a key = 'params' must",
    ),
    "unknown parameter in a group": (_set("groups", 0, "params", to=[1 << 40]), "scalars or groups"),
    "billions of pages": (
        _set("description", "fsdp_modules", 0, "shards", 0, "padded", to=1 << 48),
        "more than 4194304 pages",
    ),
    "negative size": (
        _set("description", "fsdp_modules", 0, "shards", 0, "numel", to=-1),
        r"description\.fsdp_modules\.0\.shards\.0\.numel = -1 is below the minimum of 0",
    ),
    "pages too small": (_set("page_bytes", to=4096), "page_bytes: 4096 is too small"),
    "different shape": (_set("description", "tensors", 0, "shape", to=[3, 5]), "tensors: .*shard"),
    "other spans": (_set("description", "tensors", 0, "spans", to=[[[0, 1]]]), "tensors: .*shard"),
    "empty ranges": (_set("description", "tensors", 0, "spans", 0, to=[[0, 0], [0, 8]]), "tensors: .*shard"),
    "spans out of order": (_set("description", "tensors", 0, "spans", 0, to=[[4, 8], [0, 4]]), "tensors: .*shard"),
    "duplicate name": (
        lambda body: body["description"]["tensors"][0]["names"].append("head.bias"),
        r"tensors: .*\bname",
    ),
    "unknown dtype": (
        lambda body: next(iter(body["description"]["formats"].values())).update(param="float31"),
        "'float31' is not one",
    ),
    "unknown encoding": (
        lambda body: next(iter(body["description"]["formats"].values())).update(encodings=[["master", "zip"]]),
        "'zip' is not one",
    ),
    "encoding of an unknown kind": (
        lambda body: next(iter(body["description"]["formats"].values())).update(encodings=[["nothing", "8bit"]]),
        "'nothing' cannot be stored as 8bit",
    ),
    "fewer tensors": (lambda body: body["description"]["tensors"].pop(), "tensors .* shards"),
    "different page size": (_set("page_bytes", to=1 << 20), "description .*layout"),
    "different name": (_set("description", "fsdp_modules", 0, "name", to="other"), "description .*layout"),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_forged_manifest_error_names_the_field(forgery: str, stored: Stored) -> None:
    change, message = FORGED[forgery]
    body = stored.body(stored.manifest)
    change(body)
    with replaced(stored.manifest, sealed(json.dumps(body))):
        for use in (export, read_for_resume):
            with pytest.raises(CheckpointError, match=message):
                use(stored)


def test_duplicate_json_keys_are_rejected(stored: Stored) -> None:
    """JSON parsers differ in which of the values they return."""
    body = json.dumps(stored.body(stored.manifest))
    with (
        replaced(stored.manifest, sealed(body.replace('"step": 6', '"step": 5, "step": 6'))),
        pytest.raises(CheckpointError, match=r"malformed.*\bkey"),
    ):
        read_manifest(stored.manifest)


@pytest.mark.parametrize(
    "name",
    [
        "step000000000006.rank00001-of-00001.json", "step0000000000006.rank00000-of-00001.json",
        "step000000000007.rank00000-of-" + "9" * 40 + ".json", "step.json",
        "step00000000000\u0667.rank00000-of-00001.json",
    ],
)  # fmt: skip
def test_invalid_file_names_are_ignored(name: str, stored: Stored) -> None:
    """No memory is allocated for the sizes in the names."""
    file = stored.folder.checkpoints / name
    file.write_bytes(stored.manifest.read_bytes())
    try:
        export(stored)
        read_for_resume(stored)
        run_store_commands(stored)
    finally:
        file.unlink()


def test_pipe_in_place_of_a_manifest_is_rejected(stored: Stored) -> None:
    """Opening the pipe would block."""
    kept = stored.manifest.rename(stored.place / "kept")
    os.mkfifo(stored.manifest)
    try:
        with pytest.raises(CheckpointError, match=f"{stored.manifest.name} cannot be read: it is not a regular file"):
            read_manifest(stored.manifest)
    finally:
        kept.replace(stored.manifest)


@pytest.mark.parametrize("size", [None, 4096])
def test_missing_or_short_data_file_is_rejected(size: int | None, stored: Stored) -> None:
    """The error names the file, which is not created again."""
    data, kept = stored.root / "rank00000.pages", stored.place / "kept"
    data.rename(kept)
    try:
        if size is not None:
            data.write_bytes(bytes(size))
        for use in (export, read_for_resume):
            with pytest.raises(CheckpointError, match=rf"rank00000\.pages, .*\b{size or 0}$"):
                use(stored)
    finally:
        kept.replace(data)


def test_checkpoints_that_share_an_extent_are_rejected(stored: Stored) -> None:
    """Otherwise removing the older checkpoint would free extents of the newest one."""
    older = stored.older
    body, newest = stored.body(older), stored.body(stored.manifest)
    page = next(page for page in body["pages"] if body["pages"][page] != newest["pages"][page])
    body["pages"] = {**newest["pages"], page: [*newest["pages"][page][:3], "0" * 16]}
    copied = stored.place.parent / "shared"
    shutil.copytree(stored.place, copied)
    (copied / older.relative_to(stored.place)).write_bytes(sealed(json.dumps(body)))
    with pytest.raises(CheckpointError, match=f"{stored.folder.run_id}.*different versions"):
        Session(copied, run=LATEST)
