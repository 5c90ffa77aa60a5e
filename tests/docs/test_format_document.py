"""docs/reference/on-disk-format.md is true and complete: a reader written from it reads every bit of a checkpoint."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.checkpoint.manifest import Manifest, check_pages, checksum_of, read_manifest, read_state_file
from infinity.checkpoint.reader import CheckpointReader
from infinity.content.encoding import decode, encode
from infinity.content.format import ENCODINGS, ITEMSIZE
from infinity.content.format import FORMATS as STATE_FORMATS
from infinity.content.layout import FSDPModuleSpec, build_layout
from infinity.errors import BudgetError, InfinityError
from infinity.run import run_directory
from infinity.store.extents import spread
from infinity.store.folder import RunFolder
from infinity.store.marker import look_for_runs
from support import format_reader as document
from support import models, optimizers
from support.layouts import FORMATS, layouts
from support.ranks import RankPool
from support.train import MIB, Paging, batch, settings, state_on_nvme

EXTRA = {"note": [1, "é", (2.5, None)], "milestones": {3: 1, 7: 2}, "marked": {"tuple": []}}
WEIGHTS = [1.0, 3.7, 0.9]
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "on-disk-format.md"


class Mixed(models.Toy):
    """A tied head, a frozen block, a parameter that nothing uses, and a buffer."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.head.weight = self.embedding.weight
        self.blocks[0].requires_grad_(False)
        self.blocks[1].register_parameter("unused", nn.Parameter(torch.randn(900)))
        self.register_buffer("seen", torch.arange(5.0))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two param groups, with settings of several types."""
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.ndim > 1]},
        {"params": [param for param in trained if param.ndim <= 1], "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=torch.tensor(1e-2), fused=True)


def by_rows(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that needs whole rows of a matrix, of which no page may end inside."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return optimizers.Centralised(trained, lr=1e-2, momentum=0.9)


def counting(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that counts its steps on itself."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return optimizers.CounterOnSelf(trained, lr=1e-2, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """What is trained and how it is stored."""

    format: str = "fp32"
    policy: str = "bf16"
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    paths: int = 2


CASES = {
    "fp32": Case(),
    "split": Case("split", paths=1),
    "bf16-moments": Case("bf16-moments", paths=3),
    "8bit": Case("8bit"),
    "no master": Case("8bit", policy="fp32"),
    "trained in bf16": Case(policy="pure_bf16", make=counting),
    "whole rows": Case(make=by_rows),
}


def trained(case: Case, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train two steps and checkpoint; return this rank's part of the state."""
    torch.manual_seed(0)
    model = Mixed()
    model = models.shard(model.to(torch.bfloat16) if case.policy == "pure_bf16" else model, case.policy)
    paging = Paging(format=case.format, paths=case.paths)
    with (
        mock.patch.object(
            run_directory, "path_stripe_weights", lambda paths, *_: WEIGHTS[: len(paths)]
        ),  # nothing is measured
        infinity.offload(model, case.make(model), settings(Path(folder), paging, 16 * MIB)) as optimizer,
    ):
        for step in range(2):
            models.loss_of(model, batch(model, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.save_checkpoint(EXTRA)
        return state_on_nvme(model, optimizer)


def stored(folder: Path) -> tuple[RunFolder, document.Checkpoint]:
    """Return the only run of a folder, and its only checkpoint as the document's reader finds it."""
    paths = sorted(folder.glob("nvme*"))
    run_folder = folder_of_run(paths)
    (run,) = document.find_runs(paths[::-1])
    assert (run.run_id, tuple(run.folders)) == (run_folder.run_id, run_folder.roots)
    (checkpoint,) = document.find_checkpoints(run)
    return run_folder, checkpoint


def folder_of_run(paths: list[Path]) -> RunFolder:
    """Return the only run on some paths, as `infinity` finds it."""
    (found,), _ = look_for_runs(paths)
    return RunFolder(found.run_id, found.in_order)


def same(found: np.ndarray, expected: torch.Tensor) -> bool:
    """Whether shape and every bit are the same."""
    bits = expected.contiguous().view(torch.uint16) if expected.dtype == torch.bfloat16 else expected
    values = bits.detach().numpy()
    return (found.dtype, found.shape, found.tobytes()) == (values.dtype, values.shape, values.tobytes())


def differing(case: Case, folder: str) -> list[str]:
    """Return what the document's reader reads otherwise than `infinity` does. Runs on every rank."""
    own = trained(case, folder)
    rank, size = 0, 1
    if dist.is_initialized():
        dist.barrier()
        rank, size = dist.get_rank(), dist.get_world_size()
    run_folder, checkpoint = stored(Path(folder))
    reader, content = CheckpointReader(run_folder), document.read(checkpoint)
    found = {
        "names": content.names == [list(spec.names) for spec in reader.tensors],
        "scalars": content.scalars == {reader.tensors[n].names[0]: plain(s) for n, s in reader.scalars().items()},
        "groups": content.groups == [named(reader, plain(group)) for group in reader.groups],
        "own": content.own == reader.manifest(0).own == ({"count": 2} if case.make is counting else {}),
        "extra": content.extra == reader.extra == EXTRA,
        "buffers": content.buffers.keys() == dict(reader.buffers()).keys() == {"seen"},
    }
    found |= {name: same(content.buffers[name], value) for name, value in reader.buffers()}
    for index, spec in enumerate(reader.tensors):
        name = spec.names[0]
        weights, values = content.parameters[name].pop("weights"), content.parameters[name]
        compute = reader.manifest(0).description.layout.format_of(index).param
        found[f"{name}/weights"] = same(weights, reader.read(index).to(getattr(torch, compute)))
        found[name] = values.keys() == {"master", *dict(reader.kinds(index))}
        for key in values:
            whole = reader.read(index, key)
            found[f"{name}/{key}"] = same(values[key], whole)
            if key in own[name]:
                slices = torch.chunk(whole, size, spec.dim)
                mine = slices[rank] if rank < len(slices) else whole[:0]
                found[f"{name}/{key} of this rank"] = torch.equal(mine.reshape(-1), own[name][key])
    segments = reader.manifest(0).description.layout.segments
    shards = reader.manifest(0).description.layout.shards
    found["the case has rows, or none"] = any(at.spec.row > 1 for at in shards) is (case.make is by_rows)
    halves = size == 1 and case.policy == "bf16"
    found["gradients in halves, or not"] = {len(one.grad_pages) for one in segments} == {0, 2 if halves else 1}
    for manifest in (reader.manifest(rank) for rank in range(size)):
        found[f"places of rank {manifest.rank}"] = places_are_right(manifest)
    return [what for what, good in found.items() if not good]


def plain(value: Any) -> Any:
    """Return a value with lists in place of tensors."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def named(reader: CheckpointReader, group: dict[str, Any]) -> dict[str, Any]:
    """Return a param group as the document's reader does: settings apart, parameters by name."""
    params = [reader.tensors[index].names[0] for index in group.pop("params")]
    return {"params": params, "settings": group}


@pytest.mark.parametrize("name", CASES)
def test_one_rank(name: str, tmp_path: Path) -> None:
    """All parameters, masters, states, scalars, groups and buffers, bit by bit, in every state format."""
    assert differing(CASES[name], str(tmp_path)) == []


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, pair: RankPool, tmp_path: Path) -> None:
    """The same, put together from the slices of both ranks."""
    assert pair.run(differing, CASES[name], str(tmp_path)) == [[], []]


def test_every_state_format_is_among_the_cases() -> None:
    """Each of `state.format`, with a master of its own and without."""
    assert {case.format for case in CASES.values()} == set(STATE_FORMATS)
    assert {case.policy for case in CASES.values()} == {"bf16", "fp32", "pure_bf16"}


def places_are_right(manifest: Manifest) -> bool:
    """Whether every page is on the path, and in a slot, that the document says."""
    pages = [page for segment in segments_of(manifest) for page in segment.pages.values()]
    paths = document.paths_of(pages, list(manifest.weights))
    slots = document.slots_of(pages, paths, retained=1)
    return all(
        (extent.path, extent.offset, extent.length) in slots and extent.path == paths[number]
        for number, extent in ((number, version.extent) for number, version in manifest.pages.items())
    )


def segments_of(manifest: Manifest) -> list[document.Segment]:
    """Return the layout of a manifest as the document's reader builds it."""
    plain_description = json.loads(json.dumps(manifest.description.plain))
    return document.build(plain_description["fsdp_modules"], plain_description["formats"], manifest.layout.page_bytes)


@st.composite
def any_layouts(draw: st.DrawFn) -> tuple[list[FSDPModuleSpec], int]:
    """Draw FSDP modules, some of whose shards have rows, and a size of pages."""
    layout = draw(layouts())
    rows = st.sampled_from([1, 67, 96, 1000] if draw(st.booleans()) else [1])
    fsdp_modules = [
        replace(fsdp_module, shards=tuple(replace(shard, row=draw(rows)) for shard in fsdp_module.shards))
        for fsdp_module in layout.fsdp_modules
    ]
    return fsdp_modules, layout.page_bytes


@given(any_layouts())
@hypothesis_settings(max_examples=60)
def test_pages_are_numbered_and_cut_as_the_document_says(drawn: tuple[list[FSDPModuleSpec], int]) -> None:
    """Of any layout; the digest and the paths of pages, too. Where a row has no room, there is no layout."""
    fsdp_modules, page_bytes = drawn
    formats = {key: json.loads(json.dumps(asdict(fmt))) for key, fmt in FORMATS.items()}
    trees = [fsdp_module.tree for fsdp_module in fsdp_modules]
    try:
        layout = build_layout(fsdp_modules, FORMATS, page_bytes)
    except BudgetError:
        with pytest.raises(document.Refused):
            document.build(trees, formats, page_bytes)
        return
    segments = document.build(trees, formats, page_bytes)
    found = {number: page for segment in segments for number, page in segment.pages.items()}
    assert [(n, page.role, page.start, page.count, page.length) for n, page in sorted(found.items())] == [
        (page.index, page.role.name, page.start, page.count, page.nbytes) for page in layout.pages
    ]
    assert [shard for segment in segments for shard in segment.shards] == [
        (index, layout.shards[index].start) for segment in layout.segments for index in segment.shards
    ]
    assert document.digest(trees, segments, page_bytes) == layout.fingerprint
    assert document.paths_of(list(found.values()), WEIGHTS) == list(spread(layout.pages, WEIGHTS))


def test_the_example_is_worked_rightly() -> None:
    """The pages and the digest of the example, and what the rows change."""
    said = text()
    example = json.loads(re.search(r"```json\n(.*?)```", said, re.DOTALL)[1])
    fsdp_modules, formats, page_bytes = example["fsdp_modules"], example["formats"], example["page_bytes"]
    segments = document.build(fsdp_modules, formats, page_bytes)
    pages = segments[0].pages
    assert document.digest(fsdp_modules, segments, page_bytes) == re.search(r"digest is `([0-9a-f]{16})`", said)[1]
    assert f"```text\n{document.digested(fsdp_modules, segments, page_bytes)}\n```" in said
    for line in re.findall(r"^\| \d+.* \| (?:PARAM|UPDATE|GRAD).*\|$", said, re.MULTILINE):
        numbers, role, elements, lengths = (re.findall(r"\d+|[A-Z]{3,}", cell) for cell in line.split("|")[1:5])
        shown = [pages[int(number)] for number in numbers]
        assert {page.role for page in shown} == {role[0]}
        if role[0] != "GRAD":
            assert elements == [str(n) for page in shown for n in (page.start, page.start + page.count - 1)]
        assert lengths == [str(page.length) for page in shown][-len(lengths) :]
    fsdp_modules[0]["shards"][0]["row"] = 500
    with pytest.raises(document.Refused):
        document.build(fsdp_modules, formats, page_bytes)
    (segment,) = document.build(fsdp_modules, formats, 2 * page_bytes)
    starts = [page.start for page in segment.pages.values() if page.role == "UPDATE"]
    assert starts == [*range(0, 40001, 8000), 50112]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encodings_are_as_the_document_says(encoding: str) -> None:
    """All codes with all scales, all sorts of masters."""
    scales = torch.tensor([0.0, *[sign * 2.0**e for e in (-126, -3, 0, 1, 127) for sign in (1, -1)]])
    if encoding == "8bit":
        codes = torch.arange(256, dtype=torch.uint8).repeat(len(scales))
        parts = [codes, scales.repeat_interleave(4).to(torch.bfloat16)]
    else:
        bits = torch.randint(-(2**31), 2**31, (8192,), generator=torch.Generator().manual_seed(1)).int()
        bits[:4096:2] |= 0x7FFF
        bits[:4096:4] = bits[:4096:4] & ~0xFFFF | 0x8000  # ties
        parts = list(encode(bits.view(torch.float32), encoding))
    expected = decode(parts, encoding)
    weights = parts.pop(0) if encoding == "split" else torch.zeros(len(expected), dtype=torch.bfloat16)
    content = b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    bits_of_weights = weights.view(torch.uint16).numpy()
    found = document.section(document.Taker(content), len(expected), "float32", encoding, bits_of_weights)
    assert same(found, expected)


@pytest.fixture(scope="module")
def two(pair: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint of two ranks on two paths."""
    folder = tmp_path_factory.mktemp("two")
    pair.run(trained, CASES["8bit"], str(folder))
    return folder


def names_in_table(start: str) -> list[str]:
    """Return the names in the first column of the first table of the document after some text."""
    _, _, after = text().partition(start)
    table = re.search(r"^\|[-|]+\n((?:\|.*\n)+)", after, re.MULTILINE)
    return [name for line in table[1].splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]


def test_every_field_is_in_the_tables_of_the_document(two: Path) -> None:
    """And nothing else is."""
    body = body_of(manifest_of(two, 0))
    described = body["description"]
    (fmt, *_), (fsdp_module, *_) = described["formats"].values(), described["fsdp_modules"]
    said = {
        "## Manifest": body,
        "## Description": described,
        "| field of a shard": {**fsdp_module["shards"][0], "row": 2},  # the only field that may be left out
        "| field of a state format": fmt,
        "| field of a tensor": described["tensors"][0],
    }
    for start, record in said.items():
        assert sorted(names_in_table(start)) == sorted(record), start
    assert fsdp_module.keys() == {"name", "shards"}
    assert "| `fsdp_modules` | list of FSDP modules in order: `name` and `shards` |" in text()


def test_dtypes_and_encodings_are_those_of_the_document() -> None:
    """With the bytes that an element takes up."""
    dtypes = re.search(r"A dtype is one of (.*?)\.", text(), re.DOTALL)[1]
    assert sorted(re.findall(r"`(\w+)`", dtypes)) == sorted(document.DTYPES) == sorted(ITEMSIZE)
    sizes = re.search(r"or, encoded, (.*?) \|", text())[1]
    said = {name: sum(map(Fraction, size.split("+"))) for size, name in re.findall(r"([\d+/ ]+) \(`(\w+)`\)", sizes)}
    assert said == document.ENCODED_SIZES
    assert sorted(names_in_table("| encoding | parts |")) == sorted(said) == sorted(ENCODINGS)


def text() -> str:
    """Return the document."""
    return DOCUMENT.read_text(encoding="utf-8")


def manifest_of(folder: Path, rank: int) -> Path:
    """Return the manifest of a rank."""
    (file,) = folder.glob(f"nvme0/*/checkpoints/*.rank{rank:05d}-of-*.json")
    return file


def state_of(folder: Path, rank: int) -> Path:
    """Return the state file of a rank."""
    (file,) = folder.glob(f"nvme0/*/checkpoints/*.rank{rank:05d}.*.safetensors")
    return file


def body_of(file: Path) -> dict[str, Any]:
    """Return the body of a manifest."""
    return json.loads(json.loads(file.read_bytes())["body"])


def write(file: Path, body: str) -> None:
    """Write a manifest, with its checksum."""
    file.write_text(json.dumps({"checksum": checksum_of(body.encode()), "body": body}))


def edit(folder: Path, change: Callable[[dict[str, Any]], object], rank: int = 1) -> None:
    """Change the body of a manifest."""
    file = manifest_of(folder, rank)
    body = body_of(file)
    change(body)
    write(file, json.dumps(body))


def flip(file: Path, offset: int) -> None:
    """Invert one bit."""
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def flip_page(folder: Path) -> None:
    """Invert one bit in the last byte of a page, which nothing needs."""
    path, offset, length, _ = body_of(manifest_of(folder, 1))["pages"]["1"]
    (file,) = folder.glob(f"nvme{path}/*/rank00001.pages")
    flip(file, offset + length - 1)


def swap_pages(body: dict[str, Any]) -> None:
    """Put two pages of one length in each other's place, each with its checksum."""
    pages = body["pages"]
    one, other = next((a, b) for a in pages for b in pages if a < b and pages[a][2] == pages[b][2])
    pages[one], pages[other] = pages[other], pages[one]


def swap(one: Path, other: Path) -> None:
    """Put two files in each other's place."""
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def twice(folder: Path) -> None:
    """Have a key of the body twice, with the same value."""
    file = manifest_of(folder, 1)
    body = json.dumps(body_of(file))
    write(file, body[:-1] + ', "step": 2}')


def another_identity(folder: Path) -> None:
    """Have the second rank's part as another checkpoint, as its name and its body say."""
    edit(folder, lambda body: body.update(identity="0" * 24))
    for file in (manifest_of(folder, 1), state_of(folder, 1)):
        file.rename(file.with_name(re.sub("[0-9a-f]{24}", "0" * 24, file.name)))


def truncate(folder: Path) -> None:
    """Cut a data file before the end of its last page."""
    path, offset, length, _ = max(body_of(manifest_of(folder, 1))["pages"].values())
    (file,) = folder.glob(f"nvme{path}/*/rank00001.pages")
    os.truncate(file, offset + length - 1)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit in a page": flip_page,
    "two pages in each other's place": lambda folder: edit(folder, swap_pages),
    "a data file that ends early": truncate,
    "a flipped bit in a manifest": lambda folder: flip(manifest_of(folder, 1), 500),
    "manifests in each other's place": lambda folder: swap(manifest_of(folder, 0), manifest_of(folder, 1)),
    "a flipped bit in a state file": lambda folder: flip(state_of(folder, 1), -1),
    "a key that is there twice": twice,
    "an unknown field": lambda folder: edit(folder, lambda body: body.update(note="")),
    "another identity in a manifest": lambda folder: edit(folder, lambda body: body.update(identity="0" * 24)),
    "another identity on one rank": another_identity,
    "other parameters on one rank": lambda folder: edit(
        folder, lambda body: body["description"]["tensors"][0]["names"].append("alias")
    ),
    "a slice twice, another nowhere": lambda folder: edit(
        folder, lambda body: body["description"]["tensors"][0].update(shard_rank=0)
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_refused_by_both(name: str, two: Path, tmp_path: Path) -> None:
    """By a reader that the document makes, and by that of `infinity`."""
    folder = tmp_path / "copy"
    shutil.copytree(two, folder, ignore=shutil.ignore_patterns("runtime"))
    DAMAGES[name](folder)
    paths = sorted(folder.glob("nvme*"))
    checkpoints = document.find_checkpoints(document.find_runs(paths)[0])
    assert len(checkpoints) == (0 if name == "another identity on one rank" else 1)
    for checkpoint in checkpoints:
        with pytest.raises(document.Refused):
            document.read(checkpoint)
    with pytest.raises(InfinityError):
        everything(folder_of_run(paths))


def everything(run_folder: RunFolder) -> None:
    """Read a checkpoint whole."""
    reader = CheckpointReader(run_folder)
    for index in range(len(reader.tensors)):
        for key in ("master", *dict(reader.kinds(index))):
            reader.read(index, key)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value in a tree of JSON."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield (*path, key)
        if isinstance(value[key], dict | list):
            yield from places_in(value[key], (*path, key))


GONE = object()
ODD = (
    None, True, -1, 0, 1, 0.5, 1 << 63, float("nan"), "", "x", "\ud800", "bfloat16", [], [0], {}, {"tuple": [[]]},
    {"pairs": [[1, 2]]}, GONE,
)  # fmt: skip


def test_both_refuse_the_same_manifests(two: Path, tmp_path: Path) -> None:
    """One value of a manifest, anywhere in it, is another one, or is not there."""
    folder = tmp_path / "copy"
    shutil.copytree(two, folder, ignore=shutil.ignore_patterns("runtime"))
    run_folder, checkpoint = stored(folder)
    file, chance = manifest_of(folder, 0), random.Random(1)
    good, taken, differing = file.read_bytes(), 0, []
    places: dict[str, list[tuple[Any, ...]]] = {}  # items of one list are of one kind, and so are pages
    for path in places_in(body_of(file)):
        places.setdefault(re.sub(r"\d+", "0", repr(path)), []).append(path)
    for _ in range(150):
        body = body_of(file)
        *way, key = path = chance.choice(places[chance.choice(sorted(places))])
        container = functools.reduce(lambda inner, step: inner[step], way, body)
        odd = chance.choice(ODD)
        if odd is GONE:
            del container[key]
        else:
            container[key] = odd
        write(file, json.dumps(body))
        refused = (
            refuses(lambda: document.read_manifest(checkpoint, 0), document.Refused),
            refuses(lambda: check(run_folder, file), InfinityError),
        )
        file.write_bytes(good)
        taken += not refused[0]
        if refused[0] != refused[1]:
            differing.append((path, odd, refused))
    assert differing == []
    assert 0 < taken < 75


def check(run_folder: RunFolder, file: Path) -> None:
    """Read a manifest as `CheckpointReader` does."""
    manifest = read_manifest(file)
    check_pages(manifest, run_folder)
    read_state_file(run_folder.checkpoints, manifest)


def refuses(reading: Callable[[], object], kind: type[Exception]) -> bool:
    """Whether something is refused with this kind of error; others are raised."""
    try:
        reading()
    except kind:
        return True
    return False
