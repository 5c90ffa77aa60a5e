"""Checkpoint reader written only from docs/reference/on-disk-format.md, which imports nothing from infinity.

It follows the sections of the document, and verifies checksums and digests only; tests/checkpoint/test_fuzz.py covers
the validation of fields. Values are NumPy arrays. For dtypes that NumPy does not support (bfloat16, float8), the arrays
contain unsigned integers with the same bits.

    for run in find_runs(["/nvme0", "/nvme1"]):
        for checkpoint in find_checkpoints(run):
            content = read(checkpoint)
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import xxhash


class Rejected(Exception):
    """The document requires readers to reject this file."""


def require(condition: bool, message: str) -> None:
    """Raise `Rejected` unless the condition is true."""
    if not condition:
        raise Rejected(message)


# Folders #

RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}", re.ASCII)
FIVE, TWELVE = r"(\d{5}|[1-9]\d{5,})", r"(\d{12}|[1-9]\d{12,})"
MANIFEST = re.compile(rf"step{TWELVE}\.rank{FIVE}-of-{FIVE}\.([0-9a-f]{{24}})\.json", re.ASCII)


@dataclass
class Run:
    """A run. `folders` contains its folder on each path, in the order of the run."""

    run_id: str
    folders: list[Path]

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folders[0] / "checkpoints"


@dataclass
class Checkpoint:
    """A checkpoint. `manifests` contains the manifest of each rank."""

    run: Run
    step: int
    identity: str
    manifests: list[Path]


def find_runs(paths: list[Any]) -> list[Run]:
    """Return the runs whose paths are all in `paths`, oldest first."""
    found: dict[tuple[str, int], dict[int, Path]] = {}
    for path in map(Path, paths):
        for folder in path.iterdir():
            if RUN_ID.fullmatch(folder.name) and (folder / "infinity.run").is_file():
                marker = body_of((folder / "infinity.run").read_bytes().splitlines()[0])
                found.setdefault((folder.name, marker["paths"]), {})[marker["path"]] = folder
    complete = ((run_id, by_path) for (run_id, paths), by_path in sorted(found.items()) if len(by_path) == paths)
    return [Run(run_id, [by_path[path] for path in sorted(by_path)]) for run_id, by_path in complete]


def find_checkpoints(run: Run) -> list[Checkpoint]:
    """Return the checkpoints of a run that are complete on all ranks, oldest first."""
    found: dict[tuple[int, str, int], dict[int, Path]] = {}
    for file in run.checkpoints.iterdir() if run.checkpoints.exists() else ():
        if name := MANIFEST.fullmatch(file.name):
            step, rank, size = map(int, name.groups()[:3])
            if rank < size:
                found.setdefault((step, name[4], size), {})[rank] = file
    return [
        Checkpoint(run, step, identity, [by_rank[rank] for rank in range(size)])
        for (step, identity, size), by_rank in sorted(found.items())
        if len(by_rank) == size
    ]


# JSON #


def checksum(data: bytes, seed: int = 0) -> str:
    """Return the XXH3-64 checksum in the format of the files."""
    return xxhash.xxh3_64_hexdigest(data, seed)


def body_of(content: bytes) -> Any:
    """Return the verified body of `{"checksum": …, "body": …}`."""
    outer = json.loads(content)
    require(outer["checksum"] == checksum(outer["body"].encode()), "the checksum does not match")
    return json.loads(outer["body"])


# Layout #

BLOCK = 2048
DTYPES = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1",
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1", "uint8": "u1", "bool": "?",
}  # fmt: skip
SIZES = {name: np.dtype(code).itemsize for name, code in DTYPES.items()}
ENCODED_SIZES = {"split": 2 + 1 / 8, "bfloat16": 2, "8bit": 1 + 2 / 64}


@dataclass
class Page:
    """A page, which contains the elements [start, start + count) of a segment."""

    role: str
    start: int
    count: int
    length: int
    fixed: bool


@dataclass
class Segment:
    """A segment. `shards` contains pairs of shard index and first element; `pages` contains its pages by number."""

    format: dict[str, Any]
    shards: list[tuple[int, int]] = field(default_factory=list)
    end: int = 0
    cut_by_rows: bool = False
    pages: dict[int, Page] = field(default_factory=dict)


def ceil(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def sections(fmt: dict[str, Any]) -> list[tuple[str, str, str | None]]:
    """Return name, dtype and encoding of each section of an UPDATE page."""
    master = [("master", fmt["master"])] if fmt["master"] else []
    encodings = dict(fmt["encodings"])
    return [(name, dtype, encodings.get(name)) for name, dtype in (*master, *fmt["kinds"])]


def page_sets(fmt: dict[str, Any]) -> list[tuple[str, float]]:
    """Return role and bytes per element of each set of pages of a segment, in numbering order."""
    update = sum(ENCODED_SIZES.get(encoding, SIZES[dtype]) for _, dtype, encoding in sections(fmt))
    gradients = [("GRAD", SIZES[dtype]) for dtype in fmt["grads"]]
    return [("PARAM", SIZES[fmt["param"]]), *([("UPDATE", update)] if update else []), *gradients]


def build(fsdp_modules: list[Any], formats: dict[str, Any], page_bytes: int) -> list[Segment]:
    """Return the segments of a rank with their pages."""
    segments: list[Segment] = []
    shards = [shard for fsdp_module in fsdp_modules for shard in fsdp_module["shards"]]
    index = number = 0
    for fsdp_module in fsdp_modules:
        by_key: dict[str, Segment] = {}
        for shard in fsdp_module["shards"]:
            segment = by_key.setdefault(shard["segment_key"], Segment(formats[shard["segment_key"]]))
            start = ceil(segment.end, 64) * 64
            segment.shards.append((index, start))
            segment.end = start + shard["padded"]
            segment.cut_by_rows |= shard.get("row", 1) > 1
            index += 1
        for segment in by_key.values():
            segments.append(segment)
            blocks = ceil(segment.end, BLOCK)
            if blocks == 0:
                continue
            sets = page_sets(segment.format)
            most = int(page_bytes / max(size for _, size in sets))
            pieces = between_rows(segment, shards, blocks, most) if segment.cut_by_rows else even(blocks, most)
            for role, size in sets:
                starts = join(pieces, int(page_bytes / size), even=not segment.cut_by_rows)
                for start, stop in pairwise(starts):
                    length = ceil(int((stop - start) * size), 4096) * 4096
                    segment.pages[number] = Page(role, start, stop - start, length, not segment.format["grads"])
                    number += 1
    return segments


def even(blocks: int, most: int) -> list[int]:
    """Return the starts of pieces of similar size, and the end of the last one."""
    pieces = ceil(blocks, most // BLOCK)
    return [ceil(p * blocks, pieces) * BLOCK for p in range(pieces + 1)]


def between_rows(segment: Segment, shards: list[Any], blocks: int, most: int) -> list[int]:
    """Return the starts of pieces that do not end inside of a row, and the end of the last one."""
    cuts = [0]
    ends = [*(start for _, start in segment.shards[1:]), blocks * BLOCK]
    for (index, start), end in zip(segment.shards, ends, strict=True):
        row, numel = shards[index].get("row", 1), shards[index]["numel"]
        step = math.lcm(row, 64)
        last = start + max(0, numel - 2 * row) // step * step
        while end - cuts[-1] > most:
            cut = min(last, start + max(0, cuts[-1] + most - start) // step * step)
            require(cut > cuts[-1], "a row does not fit into a page")
            cuts.append(cut)
    return [*cuts, blocks * BLOCK]


def join(pieces: list[int], most: int, *, even: bool) -> list[int]:
    """Return the starts of pages that consist of pieces, and the end of the last one."""
    if even:
        number = len(pieces) - 1
        pages = ceil(number, most // pieces[1])
        return [pieces[ceil(q * number, pages)] for q in range(pages + 1)]
    pages = [0]
    for before, end in pairwise(pieces):
        if end - pages[-1] > most:
            pages.append(before)
    return [*pages, pieces[-1]]


def digest(fsdp_modules: list[Any], segments: list[Segment], page_bytes: int) -> str:
    """Return the digest of a layout."""
    return hashlib.sha256(digested(fsdp_modules, segments, page_bytes).encode()).hexdigest()[:16]


def digested(fsdp_modules: list[Any], segments: list[Segment], page_bytes: int) -> str:
    """Return the text from which the digest of a layout is computed."""
    without_ones = [
        {
            **fsdp_module,
            "shards": [{k: v for k, v in shard.items() if (k, v) != ("row", 1)} for shard in fsdp_module["shards"]],
        }
        for fsdp_module in fsdp_modules
    ]
    formats = [segment.format for segment in segments]
    return json.dumps([without_ones, page_bytes, BLOCK, formats], sort_keys=True)


# Data files: required of writers, not needed by readers #


def paths_of(pages: list[Page], weights: list[float]) -> list[int]:
    """Return the path index of each page."""
    used: dict[str, list[float]] = {}
    paths = []
    for page in pages:
        held = used.setdefault(page.role, [0] * len(weights))
        due = sum(held) + page.length
        below_share = [path for path, weight in enumerate(weights) if held[path] * sum(weights) < weight * due]
        paths.append(min(below_share, key=lambda path: (held[path] + page.length) / weights[path]))
        held[paths[-1]] += page.length
    return paths


def slots_of(pages: list[Page], paths: list[int], retained: int) -> set[tuple[int, int, int]]:
    """Return path, offset and length of all slots of the data files."""
    state = [(path, page) for path, page in zip(paths, pages, strict=True) if page.role != "GRAD"]
    every = Counter((path, page.length) for path, page in state)
    again = Counter((path, page.length) for path, page in state if not page.fixed)
    ends: Counter[int] = Counter()
    slots = set()
    for counts in [{key: n + min(16, -(-again[key] // 25)) for key, n in every.items()}, *[again] * retained]:
        for path, length in sorted(counts):
            slots |= {(path, ends[path] + slot * length, length) for slot in range(counts[path, length])}
            ends[path] += counts[path, length] * length
    return slots


# Pages #


def values_of(segment: Segment, page_of: Callable[[int], bytes]) -> dict[str, np.ndarray]:
    """Return all elements of a segment: `weights` from the PARAM pages, `master`, and the optimizer states."""
    fmt, found = segment.format, {"weights": [np.empty(0, DTYPES[segment.format["param"]])]}
    found |= {name: [np.empty(0, DTYPES[dtype])] for name, dtype, _ in sections(fmt)}
    for number, page in segment.pages.items():
        if page.role == "PARAM":
            found["weights"].append(np.frombuffer(page_of(number), DTYPES[fmt["param"]], page.count))
    weights = np.concatenate(found["weights"])
    for number, page in segment.pages.items():
        if page.role == "UPDATE":
            take, page_weights = Taker(page_of(number)), weights[page.start : page.start + page.count]
            for name, dtype, encoding in sections(fmt):
                found[name].append(section(take, page.count, dtype, encoding, page_weights))
    values = {name: np.concatenate(parts) for name, parts in found.items()}
    return {"master": weights} | values


class Taker:
    """Read consecutive arrays from the bytes of a page."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def __call__(self, code: str, count: int) -> np.ndarray:
        """Return the next `count` items of a dtype."""
        part = np.frombuffer(self._content, code, count, self._at)
        self._at += part.nbytes
        return part


def section(take: Taker, count: int, dtype: str, encoding: str | None, weights: np.ndarray) -> np.ndarray:
    """Decode one section of a page. `weights` contains the weights of the same elements."""
    if encoding is None:
        return take(DTYPES[dtype], count)
    if encoding == "bfloat16":
        return upper(take("<u2", count))
    if encoding == "8bit":
        return from_codes(take("u1", count), take("<u2", count // 64))
    lower, bits = take("<u2", count), np.unpackbits(take("u1", count // 8), bitorder="little")
    return (upper(weights - bits).view("<u4") | lower).view("<f4")


def upper(bits: np.ndarray) -> np.ndarray:
    """Return fp32 numbers with the given bits 16-31."""
    return (bits.astype("<u4") << 16).view("<f4")


def from_codes(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode the encoding ``8bit``."""
    scale = np.repeat(upper(scales), 64)
    unsigned = scale < 0
    least = np.where(unsigned, np.float32(2**-32), np.float32(2**-16))
    k = np.where(unsigned, codes, codes & 127).astype("<u4")
    with np.errstate(invalid="ignore", over="ignore"):
        value = ((least.view("<u4") + (k << 20)).view("<f4") - least) * np.abs(scale)
    return np.where(~unsigned & (codes > 127), -value, value)


# Manifest #


def decoded(value: Any) -> Any:
    """Decode a value, including its tuples and mappings. Tensors become nested lists."""
    if isinstance(value, dict) and value.keys() == {"tensor"}:
        return value["tensor"][2]
    if isinstance(value, dict) and value.keys() == {"tuple"}:
        return tuple(map(decoded, value["tuple"]))
    if isinstance(value, dict) and value.keys() == {"pairs"}:
        return {key: decoded(item) for key, item in value["pairs"]}
    if isinstance(value, dict):
        return {key: decoded(item) for key, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value


@dataclass
class Manifest:
    """Part of a checkpoint that belongs to one rank. Pages are verified when they are read."""

    run: Run
    body: dict[str, Any]
    segments: list[Segment]
    state: bytes

    @property
    def tensors(self) -> list[dict[str, Any]]:
        """Parameters in the order of their shards."""
        return self.body["description"]["tensors"]

    def page(self, number: int) -> bytes:
        """Return the verified bytes of a page."""
        path, offset, length, expected = self.body["pages"][str(number)]
        with data_file(self.run, path, self.body["rank"]).open("rb") as file:
            file.seek(offset)
            content = file.read(length)
        require(checksum(content, seed=number) == expected, f"page {number} is corrupt")
        return content


def data_file(run: Run, path: int, rank: int) -> Path:
    """Return the data file of a rank on a path."""
    return run.folders[path] / f"rank{rank:05d}.pages"


def read_manifest(checkpoint: Checkpoint, rank: int) -> Manifest:
    """Read the part of one rank."""
    body = body_of(checkpoint.manifests[rank].read_bytes())
    description = body["description"]
    segments = build(description["fsdp_modules"], description["formats"], body["page_bytes"])
    require(
        digest(description["fsdp_modules"], segments, body["page_bytes"]) == body["layout"],
        "the layout does not match its digest",
    )
    name = f"step{checkpoint.step:012d}.rank{rank:05d}.{checkpoint.identity}.safetensors"
    state = (checkpoint.run.checkpoints / name).read_bytes()
    require(checksum(state) == body["state_checksum"], "the state file does not match its checksum")
    return Manifest(checkpoint.run, body, segments, state)


def slice_of(tensor: dict[str, Any]) -> list[int]:
    """Return the shape of the local slice of a tensor."""
    return [sum(last - first for first, last in ranges) for ranges in tensor["spans"]]


# Complete checkpoints #


@dataclass
class Content:
    """Content of a checkpoint. `parameters` contains full tensors (`weights`, `master`, states) by name."""

    step: int
    names: list[list[str]]
    parameters: dict[str, dict[str, np.ndarray]]
    scalars: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    own: dict[str, Any]
    buffers: dict[str, np.ndarray]
    module_state: dict[str, bytes]
    extra: dict[str, Any]


def read(checkpoint: Checkpoint) -> Content:
    """Read a complete checkpoint.

    Raises:
        Rejected: if a checksum or a digest does not match.
    """
    ranks = [read_manifest(checkpoint, rank) for rank in range(len(checkpoint.manifests))]
    first, names = ranks[0].body, [tensor["names"] for tensor in ranks[0].tensors]
    slices = [dict(slices_of(manifest)) for manifest in ranks]
    parameters, scalars = {}, {}
    for shard, tensor in enumerate(ranks[0].tensors):
        name = names[shard][0]
        parameters[name] = {key: np.empty(tensor["shape"], value.dtype) for key, value in slices[0][shard].items()}
        distinct = {json.dumps(one.tensors[shard]["spans"]): slice_of(one.tensors[shard]) for one in ranks}
        held = sum(math.prod(shape) for shape in distinct.values())
        require(held == math.prod(tensor["shape"]), "the slices are not the full parameter")
        for one, values in zip(ranks, slices, strict=True):
            indices = [[i for part in ranges for i in range(*part)] for ranges in one.tensors[shard]["spans"]]
            for key, value in values[shard].items():
                parameters[name][key][np.ix_(*indices) if indices else ()] = value
        known = [one.body["scalars"][str(shard)] for one in ranks if str(shard) in one.body["scalars"]]
        if known:
            scalars[name] = decoded(known[0])
    groups = [
        {"params": [names[shard][0] for shard in group["params"]], "settings": decoded(group["settings"])}
        for group in first["groups"]
    ]
    state = dict(safetensors.deserialize(ranks[0].state))
    buffers = {name: buffer(state, name) for name in first["description"]["buffers"]}
    modules = {name.removeprefix("state."): item["data"] for name, item in state.items() if name.startswith("state.")}
    own, extra = decoded(first["own"]), decoded(first["extra"])
    return Content(checkpoint.step, names, parameters, scalars, groups, own, buffers, modules, extra)


def slices_of(manifest: Manifest) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield shard indices and local slices of a rank."""
    for segment in manifest.segments:
        values = values_of(segment, manifest.page)
        for index, start in segment.shards:
            shape = slice_of(manifest.tensors[index])
            stop = start + math.prod(shape)
            yield index, {key: value[start:stop].reshape(shape) for key, value in values.items()}


def buffer(state: dict[str, Any], name: str) -> np.ndarray:
    """Return a buffer of a state file."""
    found = state[f"buffer.{name}"]
    names = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL")
    code = dict(zip(names, DTYPES.values(), strict=True))[found["dtype"]]
    return np.frombuffer(found["data"], code).reshape(found["shape"])
