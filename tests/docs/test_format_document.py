"""Tests of docs/reference/on-disk-format.md: a reader written from it reads every bit of a checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
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
from infinity.checkpoint.manifest import Manifest, checksum_of
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
from support.published import flip
from support.ranks import RankPool
from support.train import MIB, Paging, batch, settings, state_on_nvme

EXTRA = {"note": [1, "é", (2.5, None)], "milestones": {3: 1, 7: 2}, "marked": {"tuple": []}}
WEIGHTS = [1.0, 3.7, 0.9]
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "on-disk-format.md"


class Mixed(models.Toy):
    """Model with tied embeddings, a frozen block, an unused parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.head.weight = self.embedding.weight
        self.blocks[0].requires_grad_(False)
        self.blocks[1].register_parameter("unused", nn.Parameter(torch.randn(900)))
        self.register_buffer("seen", torch.arange(5.0))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with two param groups and settings of several types."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trainable if param.ndim > 1]},
        {"params": [param for param in trainable if param.ndim <= 1], "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=torch.tensor(1e-2), fused=True)


def row_wise(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that needs full matrix rows, so that no page may end within a row."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    return optimizers.Centralised(trainable, lr=1e-2, momentum=0.9)


def self_counting(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that counts steps in its own attribute."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    return optimizers.CounterOnSelf(trainable, lr=1e-2, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """Model precision, state format, optimizer and number of paths."""

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
    "trained in bf16": Case(policy="pure_bf16", make=self_counting),
    "full rows": Case(make=row_wise),
}
ON_ONE_RANK = {"split", "full rows", "8bit", "no master", "trained in bf16"}


def train_and_checkpoint(case: Case, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train two steps, write a checkpoint, and return this rank's part of the state."""
    torch.manual_seed(0)
    model = Mixed()
    model = models.shard(model.to(torch.bfloat16) if case.policy == "pure_bf16" else model, case.policy)
    paging = Paging(format=case.format, paths=case.paths)
    with (
        mock.patch.object(run_directory, "path_stripe_weights", lambda paths, *_: WEIGHTS[: len(paths)]),
        infinity.offload(model, case.make(model), settings(Path(folder), paging, 16 * MIB)) as optimizer,
    ):
        for step in range(2):
            models.loss_of(model, batch(model, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.save_checkpoint(EXTRA)
        return state_on_nvme(model, optimizer)


def find_checkpoint(folder: Path) -> tuple[RunFolder, document.Checkpoint]:
    """Return the only run of a folder, and its only checkpoint as found by the document's reader."""
    paths = sorted(folder.glob("nvme*"))
    run_folder = folder_of_run(paths)
    (run,) = document.find_runs(paths[::-1])
    assert (run.run_id, tuple(run.folders)) == (run_folder.run_id, run_folder.roots)
    (checkpoint,) = document.find_checkpoints(run)
    return run_folder, checkpoint


def folder_of_run(paths: list[Path]) -> RunFolder:
    """Return the only run on the given paths, as found by `infinity`."""
    (found,), _ = look_for_runs(paths)
    return RunFolder(found.run_id, found.in_order)


def same_bits(found: np.ndarray, expected: torch.Tensor) -> bool:
    """Return whether dtype, shape and every bit are equal."""
    bits = expected.contiguous().view(torch.uint16) if expected.dtype == torch.bfloat16 else expected
    values = bits.detach().numpy()
    return (found.dtype, found.shape, found.tobytes()) == (values.dtype, values.shape, values.tobytes())


def differences_between_readers(case: Case, folder: str) -> list[str]:
    """Return the names of the values that the document's reader and `infinity` read differently. Runs on every rank."""
    own = train_and_checkpoint(case, folder)
    rank, size = 0, 1
    if dist.is_initialized():
        dist.barrier()
        rank, size = dist.get_rank(), dist.get_world_size()
    run_folder, checkpoint = find_checkpoint(Path(folder))
    reader, content = CheckpointReader(run_folder), document.read(checkpoint)
    found = {
        "names": content.names == [list(spec.names) for spec in reader.tensors],
        "scalars": content.scalars == {reader.tensors[n].names[0]: plain(s) for n, s in reader.scalars().items()},
        "groups": content.groups == [named_group(reader, plain(group)) for group in reader.groups],
        "own": content.own == reader.manifest(0).own == ({"count": 2} if case.make is self_counting else {}),
        "extra": content.extra == reader.extra == EXTRA,
        "buffers": content.buffers.keys() == dict(reader.buffers()).keys() == {"seen"},
    }
    found |= {name: same_bits(content.buffers[name], value) for name, value in reader.buffers()}
    for index, spec in enumerate(reader.tensors):
        name = spec.names[0]
        weights, values = content.parameters[name].pop("weights"), content.parameters[name]
        compute = reader.manifest(0).description.layout.format_of(index).param
        found[f"{name}/weights"] = same_bits(weights, reader.read(index).to(getattr(torch, compute)))
        found[name] = values.keys() == {"master", *dict(reader.kinds(index))}
        for key in values:
            full = reader.read(index, key)
            found[f"{name}/{key}"] = same_bits(values[key], full)
            if key in own[name]:
                spans = reader.manifest(rank).description.tensors[index].spans
                own_slice = reader.read(index, key, spans=spans)
                found[f"{name}/{key} of this rank"] = torch.equal(own_slice.reshape(-1), own[name][key])
    segments = reader.manifest(0).description.layout.segments
    shards = reader.manifest(0).description.layout.shards
    found["rows"] = any(at.spec.row > 1 for at in shards) is (case.make is row_wise)
    split = size == 1 and case.policy == "bf16"
    found["gradient pages"] = {len(one.grad_pages) for one in segments} == {0, 2 if split else 1}
    for manifest in (reader.manifest(rank) for rank in range(size)):
        found[f"page locations of rank {manifest.rank}"] = page_locations_match(manifest)
    return [name for name, equal in found.items() if not equal]


def plain(value: Any) -> Any:
    """Return a value with tensors converted to lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def named_group(reader: CheckpointReader, group: dict[str, Any]) -> dict[str, Any]:
    """Return a param group in the form of the document's reader: separate settings, parameters by name."""
    params = [reader.tensors[index].names[0] for index in group.pop("params")]
    return {"params": params, "settings": group}


def test_document_reader_reads_a_checkpoint_of_one_rank(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """All parameters, masters, states, scalars, groups and buffers are bitwise equal."""
    for name in ON_ONE_RANK:
        with subtests.test(name):
            (tmp_path / name).mkdir()
            assert differences_between_readers(CASES[name], str(tmp_path / name)) == []


def test_document_reader_reads_a_checkpoint_of_two_ranks(
    subtests: pytest.Subtests, pair: RankPool, tmp_path: Path
) -> None:
    """The cases contain all state formats."""
    assert {case.format for case in CASES.values()} == set(STATE_FORMATS)
    assert {case.policy for case in CASES.values()} == {"bf16", "fp32", "pure_bf16"}
    for name in sorted(CASES.keys() - ON_ONE_RANK):
        with subtests.test(name):
            (tmp_path / name).mkdir()
            assert pair.run(differences_between_readers, CASES[name], str(tmp_path / name)) == [[], []]


def page_locations_match(manifest: Manifest) -> bool:
    """Return whether every page is on the path and in the slot that the document specifies."""
    pages = [page for segment in segments_of(manifest) for page in segment.pages.values()]
    paths = document.paths_of(pages, list(manifest.stripe_weights))
    slots = document.slots_of(pages, paths, retained=1)
    return all(
        (extent.path, extent.offset, extent.length) in slots and extent.path == paths[number]
        for number, extent in ((number, version.extent) for number, version in manifest.pages.items())
    )


def segments_of(manifest: Manifest) -> list[document.Segment]:
    """Return the layout of a manifest, as built by the document's reader."""
    plain_description = json.loads(json.dumps(manifest.description.plain))
    return document.build(plain_description["fsdp_modules"], plain_description["formats"], manifest.layout.page_bytes)


@st.composite
def any_layouts(draw: st.DrawFn) -> tuple[list[FSDPModuleSpec], int]:
    """Draw FSDP modules, some with shards that have rows, and a page size."""
    layout = draw(layouts())
    rows = st.sampled_from([1, 67, 96, 1000] if draw(st.booleans()) else [1])
    fsdp_modules = [
        replace(fsdp_module, shards=tuple(replace(shard, row=draw(rows)) for shard in fsdp_module.shards))
        for fsdp_module in layout.fsdp_modules
    ]
    return fsdp_modules, layout.page_bytes


@given(any_layouts())
@hypothesis_settings(max_examples=60)
def test_page_layout_matches_the_document(drawn: tuple[list[FSDPModuleSpec], int]) -> None:
    """The digest and the paths of pages match, too; a layout in which a row does not fit is rejected by both."""
    fsdp_modules, page_bytes = drawn
    formats = {key: json.loads(json.dumps(asdict(fmt))) for key, fmt in FORMATS.items()}
    trees = [fsdp_module.tree for fsdp_module in fsdp_modules]
    try:
        layout = build_layout(fsdp_modules, FORMATS, page_bytes)
    except BudgetError:
        with pytest.raises(document.Rejected):
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


def test_the_worked_example_is_correct() -> None:
    """The pages, the digest and the effect of rows match the document's reader."""
    document_text = text()
    example = json.loads(re.search(r"```json\n(.*?)```", document_text, re.DOTALL)[1])
    fsdp_modules, formats, page_bytes = example["fsdp_modules"], example["formats"], example["page_bytes"]
    segments = document.build(fsdp_modules, formats, page_bytes)
    pages = segments[0].pages
    assert (
        document.digest(fsdp_modules, segments, page_bytes)
        == re.search(r"digest is `([0-9a-f]{16})`", document_text)[1]
    )
    assert f"```text\n{document.digested(fsdp_modules, segments, page_bytes)}\n```" in document_text
    for line in re.findall(r"^\| \d+.* \| (?:PARAM|UPDATE|GRAD).*\|$", document_text, re.MULTILINE):
        numbers, role, elements, lengths = (re.findall(r"\d+|[A-Z]{3,}", cell) for cell in line.split("|")[1:5])
        shown = [pages[int(number)] for number in numbers]
        assert {page.role for page in shown} == {role[0]}
        if role[0] != "GRAD":
            assert elements == [str(n) for page in shown for n in (page.start, page.start + page.count - 1)]
        assert lengths == [str(page.length) for page in shown][-len(lengths) :]
    fsdp_modules[0]["shards"][0]["row"] = 500
    with pytest.raises(document.Rejected):
        document.build(fsdp_modules, formats, page_bytes)
    (segment,) = document.build(fsdp_modules, formats, 2 * page_bytes)
    starts = [page.start for page in segment.pages.values() if page.role == "UPDATE"]
    assert starts == [*range(0, 40001, 8000), 50112]


def test_encodings_match_the_document(subtests: pytest.Subtests) -> None:
    """All codes are combined with all scales, and the masters include ties."""
    for encoding in ENCODINGS:
        with subtests.test(encoding=encoding):
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
            assert same_bits(found, expected)


@pytest.fixture(scope="module")
def two_rank_checkpoint(pair: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a checkpoint of two ranks on two paths."""
    folder = tmp_path_factory.mktemp("two")
    pair.run(train_and_checkpoint, CASES["8bit"], str(folder))
    return folder


def names_in_table(start: str) -> list[str]:
    """Return the names in the first column of the first table after `start` in the document."""
    _, _, after = text().partition(start)
    table = re.search(r"^\|[-|]+\n((?:\|.*\n)+)", after, re.MULTILINE)
    return [name for line in table[1].splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]


def test_document_tables_list_exactly_the_stored_fields(two_rank_checkpoint: Path) -> None:
    body = body_of(manifest_of(two_rank_checkpoint, 0))
    described = body["description"]
    (fmt, *_), (fsdp_module, *_) = described["formats"].values(), described["fsdp_modules"]
    tables = {
        "## Manifest": body,
        "## Description": described,
        "| field of a shard": {**fsdp_module["shards"][0], "row": 2},  # the only optional field
        "| field of a state format": fmt,
        "| field of a tensor": described["tensors"][0],
    }
    for start, record in tables.items():
        assert sorted(names_in_table(start)) == sorted(record), start
    assert fsdp_module.keys() == {"name", "shards"}
    assert "| `fsdp_modules` | list of FSDP modules in order: `name` and `shards` |" in text()


def test_document_lists_all_dtypes_and_encodings() -> None:
    """The bytes per element match, too."""
    dtypes = re.search(r"A dtype is one of (.*?)\.", text(), re.DOTALL)[1]
    assert sorted(re.findall(r"`(\w+)`", dtypes)) == sorted(document.DTYPES) == sorted(ITEMSIZE)
    sizes = re.search(r"or, encoded, (.*?) \|", text())[1]
    documented = {
        name: sum(map(Fraction, size.split("+"))) for size, name in re.findall(r"([\d+/ ]+) \(`(\w+)`\)", sizes)
    }
    assert documented == document.ENCODED_SIZES
    assert sorted(names_in_table("| encoding | parts |")) == sorted(documented) == sorted(ENCODINGS)


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


def write_manifest(file: Path, body: str) -> None:
    """Write a manifest with its checksum."""
    file.write_text(json.dumps({"checksum": checksum_of(body.encode()), "body": body}))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object], rank: int = 1) -> None:
    file = manifest_of(folder, rank)
    body = body_of(file)
    change(body)
    write_manifest(file, json.dumps(body))


def flip_bit_in_page(folder: Path) -> None:
    """Invert one bit in the last byte of a page, which is padding."""
    path, offset, length, _ = body_of(manifest_of(folder, 1))["pages"]["1"]
    (file,) = folder.glob(f"nvme{path}/*/rank00001.pages")
    flip(file, offset + length - 1)


def swap_pages(body: dict[str, Any]) -> None:
    """Swap two pages of equal length, with their checksums."""
    pages = body["pages"]
    one, other = next((a, b) for a in pages for b in pages if a < b and pages[a][2] == pages[b][2])
    pages[one], pages[other] = pages[other], pages[one]


def swap_files(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def duplicate_key(folder: Path) -> None:
    """Add a duplicate key with the same value to the body."""
    file = manifest_of(folder, 1)
    body = json.dumps(body_of(file))
    write_manifest(file, body[:-1] + ', "step": 2}')


def change_identity(folder: Path) -> None:
    """Turn the second rank's part into a different checkpoint, in file names and bodies."""
    edit_manifest(folder, lambda body: body.update(identity="0" * 24))
    for file in (manifest_of(folder, 1), state_of(folder, 1)):
        file.rename(file.with_name(re.sub("[0-9a-f]{24}", "0" * 24, file.name)))


def repeat_first_slice(spans: list[list[list[int]]]) -> None:
    """Replace a slice by the rows at the start of the parameter."""
    ((first, last),) = spans[0]
    spans[0] = [[0, last - first]]


def truncate(folder: Path) -> None:
    """Truncate a data file within its last page."""
    path, offset, length, _ = max(body_of(manifest_of(folder, 1))["pages"].values())
    (file,) = folder.glob(f"nvme{path}/*/rank00001.pages")
    os.truncate(file, offset + length - 1)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit in a page": flip_bit_in_page,
    "two swapped pages": lambda folder: edit_manifest(folder, swap_pages),
    "a truncated data file": truncate,
    "a flipped bit in a manifest": lambda folder: flip(manifest_of(folder, 1), 500),
    "swapped manifests": lambda folder: swap_files(manifest_of(folder, 0), manifest_of(folder, 1)),
    "a flipped bit in a state file": lambda folder: flip(state_of(folder, 1), -1),
    "a duplicate key": duplicate_key,
    "an unknown field": lambda folder: edit_manifest(folder, lambda body: body.update(note="")),
    "a different identity in a manifest": lambda folder: edit_manifest(
        folder, lambda body: body.update(identity="0" * 24)
    ),
    "a different identity on one rank": change_identity,
    "different parameters on one rank": lambda folder: edit_manifest(
        folder, lambda body: body["description"]["tensors"][0]["names"].append("alias")
    ),
    "a duplicate slice and a missing slice": lambda folder: edit_manifest(
        folder, lambda body: repeat_first_slice(body["description"]["tensors"][0]["spans"])
    ),
}


def test_damaged_checkpoints_are_rejected(subtests: pytest.Subtests, two_rank_checkpoint: Path, tmp_path: Path) -> None:
    for name, damage in DAMAGES.items():
        folder = tmp_path / name
        shutil.copytree(two_rank_checkpoint, folder, ignore=shutil.ignore_patterns("runtime"))
        damage(folder)
        with subtests.test(name), pytest.raises(InfinityError):
            read_everything(folder_of_run(sorted(folder.glob("nvme*"))))


def read_everything(run_folder: RunFolder) -> None:
    """Read every value of a checkpoint."""
    reader = CheckpointReader(run_folder)
    for index in range(len(reader.tensors)):
        for key in ("master", *dict(reader.kinds(index))):
            reader.read(index, key)
