"""Checkpoint reader written only from docs/reference/on-disk-format.md, which imports nothing from infinity.

It follows the sections of the document. Values are NumPy arrays. For dtypes that NumPy does not support (bfloat16,
float8), the arrays contain unsigned integers with the same bits.

    for run in find_runs(["/nvme0", "/nvme1"]):
        for checkpoint in find_checkpoints(run):
            content = read(checkpoint)
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
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


def regular_file(file: Path) -> bytes:
    """Return the content of a regular file."""
    try:
        require(stat.S_ISREG(os.lstat(file).st_mode), f"{file} is not a regular file")
        return file.read_bytes()
    except OSError as error:
        raise Rejected(f"{file}: {error}") from error


def find_runs(paths: list[Any]) -> list[Run]:
    """Return the runs whose paths are all in `paths`, oldest first."""
    found: dict[tuple[str, int], dict[int, Path]] = {}
    for path in map(Path, paths):
        for folder in path.iterdir():
            checkpoints = folder / "checkpoints"
            odd = folder.is_symlink() or checkpoints.is_symlink() or (checkpoints.exists() and not checkpoints.is_dir())
            content = marker(folder) if RUN_ID.fullmatch(folder.name) and not odd else None
            if content is not None and content["run_id"] == folder.name and content["path"] < content["paths"]:
                found.setdefault((folder.name, content["paths"]), {})[content["path"]] = folder
    complete = ((run_id, by_path) for (run_id, paths), by_path in sorted(found.items()) if len(by_path) == paths)
    return [Run(run_id, [by_path[path] for path in sorted(by_path)]) for run_id, by_path in complete]


def marker(folder: Path) -> dict[str, Any] | None:
    """Return the first valid line of the marker in a folder."""
    try:
        lines = regular_file(folder / "infinity.run").splitlines()
    except Rejected:
        return None
    for line in lines:
        try:
            return MARKER(body_of(line))
        except Rejected:
            continue
    return None


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

MOST = 2**63 - 1
Check = Callable[[Any], Any]
"""Function that returns a valid value and raises `Rejected` for other values."""


def parse(content: str | bytes) -> Any:
    """Parse JSON, and reject objects with duplicate keys."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        require(len(dict(found)) == len(found), "duplicate key")
        return dict(found)

    try:
        return json.loads(content, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise Rejected(f"invalid JSON: {error}") from error


def checksum(data: bytes, seed: int = 0) -> str:
    """Return the XXH3-64 checksum in the format of the files."""
    return xxhash.xxh3_64_hexdigest(data, seed)


def body_of(content: bytes) -> Any:
    """Return the verified body of `{"checksum": …, "body": …}`."""
    outer = record(checksum=text(), body=text())(parse(content))
    require(outer["checksum"] == checksum(outer["body"].encode()), "the checksum does not match")
    return parse(outer["body"])


def check(holds: Callable[[Any], bool], description: str) -> Check:
    """Accept values for which `holds` returns ``True``."""

    def one(value: Any) -> Any:
        if not holds(value):
            raise Rejected(f"{value!r:.80} is not {description}")
        return value

    return one


def integer(low: int = 0, high: int = MOST, multiple: int = 1) -> Check:
    """Accept integers from `low` to `high`."""
    return check(
        lambda value: type(value) is int and low <= value <= high and value % multiple == 0, "an allowed integer"
    )


def number(low: float = -MOST, high: float = MOST) -> Check:
    """Accept finite numbers from `low` to `high`."""
    return check(lambda value: type(value) in (int, float) and low <= value <= high, "an allowed number")


def text(pattern: str = r"(?s:.*)") -> Check:
    """Accept strings that match `pattern` and can be encoded as UTF-8."""

    def holds(value: Any) -> bool:
        fits = isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) is not None
        return fits and not any("\ud800" <= letter <= "\udfff" for letter in value)

    return check(holds, "an allowed string")


def one_of(*values: str) -> Check:
    """Accept one of several strings."""
    return check(lambda value: isinstance(value, str) and value in values, f"one of {values}")


def items(each: Check, least: int = 0, most: int = MOST) -> Check:
    """Accept lists with `least` to `most` valid items."""
    is_list = check(
        lambda value: isinstance(value, list) and least <= len(value) <= most, "a list with an allowed length"
    )
    return lambda value: [each(item) for item in is_list(value)]


def row(*checks: Check) -> Check:
    """Accept lists with one item for each check."""
    is_list = check(
        lambda value: isinstance(value, list) and len(value) == len(checks), "a list with an allowed length"
    )
    return lambda value: [one(item) for one, item in zip(checks, is_list(value), strict=True)]


def table(key: Check, each: Check) -> Check:
    """Accept objects with any valid keys."""
    is_object = check(lambda value: isinstance(value, dict), "an object")
    return lambda value: {key(name): each(item) for name, item in is_object(value).items()}


def record(**checks: Check) -> Check:
    """Accept objects with exactly these fields."""
    is_object = check(
        lambda value: isinstance(value, dict) and value.keys() == checks.keys(),
        f"an object with the fields {list(checks)}",
    )
    return lambda value: {name: checks[name](item) for name, item in is_object(value).items()}


flag = check(lambda value: isinstance(value, bool), "true or false")


def anything(value: Any) -> Any:
    """Accept any JSON."""
    return value


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


def index(value: Any) -> int:
    """Accept a key that is a number; return the number."""
    return int(text("0|[1-9][0-9]{0,17}")(value))


def setting(value: Any, depth: int = 4) -> Any:
    """Decode a setting or scalar of an optimizer. Tensors become nested lists."""
    if isinstance(value, dict) and "tensor" in value:
        tensor = record(tensor=dtype, shape=items(integer(0, 2**15), most=4), value=anything)(value)
        return nested(tensor["value"], tensor["shape"], leaf(tensor["tensor"]))
    if isinstance(value, dict):
        kind = next(iter(value), "")
        require(len(value) == 1 and kind in ("tuple", "list", "dict") and depth > 0, f"{value!r:.80} is not a setting")
        inside: Check = lambda item: setting(item, depth - 1)  # noqa: E731
        found = table(text(), inside)(value[kind]) if kind == "dict" else items(inside)(value[kind])
        return tuple(found) if kind == "tuple" else found
    if isinstance(value, str):
        return text()(value)
    return value if value is None or isinstance(value, bool) else any_number(value)


def extra(value: Any) -> Any:
    """Decode `extra`, including its tuples and mappings."""
    if isinstance(value, dict) and value.keys() in ({"tuple"}, {"pairs"}):
        ((kind, found),) = value.items()
        if kind == "tuple":
            return tuple(items(extra)(found))
        return dict(items(row(check(lambda key: not isinstance(key, list | dict), "a key"), extra))(found))
    if isinstance(value, dict):
        return {key: extra(item) for key, item in value.items()}
    return [extra(item) for item in value] if isinstance(value, list) else value


def nested(value: Any, shape: list[int], each: Check) -> Any:
    """Accept nested lists with the given shape."""
    return items(lambda item: nested(item, shape[1:], each), shape[0], shape[0])(value) if shape else each(value)


def leaf(name: str) -> Check:
    """Return the check for elements of a tensor with the given dtype."""
    if name == "uint8" or name.startswith("int"):
        limits = np.iinfo(name)
        return integer(int(limits.min), int(limits.max))
    return flag if name == "bool" else any_number


any_number = check(lambda value: type(value) is float or (type(value) is int and abs(value) <= MOST), "a number")
dtype = one_of(*DTYPES)
hex16, word, size = text("[0-9a-f]{16}"), integer(0, 2**32 - 1), integer(0, 2**48)
MARKER = record(format=integer(1, 1), run_id=text(), paths=integer(1), path=integer())
SHARD = record(name=text(), numel=size, padded=size, segment_key=text(), trainable=flag, row=integer(1, 2**48))
FORMAT = record(
    param=dtype,
    master=one_of("", *DTYPES),
    kinds=items(row(text(".+"), dtype)),
    grads=items(dtype),
    encodings=items(row(text(), one_of(*ENCODED_SIZES))),
)
TENSOR = record(
    names=items(text(), least=1),
    shape=items(size, most=64),
    dim=integer(),
    shard_rank=integer(),
    shard_size=integer(1),
    tensor_parallel=flag,
)
DESCRIPTION = record(
    fsdp_modules=items(record(name=text(), shards=items(lambda value: SHARD(add_row(value))))),
    formats=table(text(), FORMAT),
    tensors=items(TENSOR),
    buffers=items(text()),
)
BODY = record(
    format=integer(2, 2),
    run_id=text(),
    step=integer(),
    identity=text("[0-9a-f]{24}"),
    rank=integer(),
    world_size=integer(1),
    created=number(0, 2**40),
    description=DESCRIPTION,
    layout=hex16,
    page_bytes=integer(4096, 2**40, multiple=4096),
    optimizer=text(r"\S{1,200}"),
    stripe_weights=items(number(1e-30, 1e30), least=1),
    pages=table(index, row(integer(), integer(multiple=4096), integer(4096, multiple=4096), hex16)),
    scalars=table(index, table(text(), setting)),
    groups=items(record(params=items(integer()), settings=table(text(r"(?!params$)(?s:.*)"), setting))),
    own=table(text(), setting),
    updated_on=text("[a-z]{1,40}"),
    random=record(
        python=row(
            integer(3, 3), row(*[word] * 624, integer(0, 624)), lambda value: None if value is None else number()(value)
        ),
        numpy=row(one_of("MT19937"), integer(0, 624), integer(0, 1), number()),
    ),
    state_checksum=hex16,
    extra=table(text(), extra),
)


def add_row(shard: Any) -> Any:
    """Return a shard with `row`, whose default is 1."""
    return {"row": 1, **shard} if isinstance(shard, dict) else shard


@dataclass
class Manifest:
    """Validated part of a checkpoint that belongs to one rank. Pages are validated when they are read."""

    run: Run
    file: Path
    body: dict[str, Any]
    segments: list[Segment]
    state: bytes

    @property
    def tensors(self) -> list[dict[str, Any]]:
        """Parameters in the order of their shards."""
        return self.body["description"]["tensors"]

    def page(self, number: int) -> bytes:
        """Return the verified bytes of a page."""
        path, offset, length, expected = self.body["pages"][number]
        with data_file(self.run, path, self.body["rank"]).open("rb") as file:
            file.seek(offset)
            content = file.read(length)
        if checksum(content, seed=number) != expected:
            raise Rejected(
                f"page {number} is corrupt" if self.file.exists() else "the checkpoint was removed during the read"
            )
        return content


def data_file(run: Run, path: int, rank: int) -> Path:
    """Return the data file of a rank on a path."""
    return run.folders[path] / f"rank{rank:05d}.pages"


def read_manifest(checkpoint: Checkpoint, rank: int) -> Manifest:
    """Read and validate the part of one rank."""
    run, file = checkpoint.run, checkpoint.manifests[rank]
    body = BODY(body_of(regular_file(file)))
    stated = [body[name] for name in ("run_id", "step", "identity", "rank", "world_size")]
    require(
        stated == [run.run_id, checkpoint.step, checkpoint.identity, rank, len(checkpoint.manifests)],
        f"{file} belongs to a different rank or checkpoint: {stated}",
    )
    segments = checked_layout(body["description"], body["page_bytes"])
    require(
        digest(body["description"]["fsdp_modules"], segments, body["page_bytes"]) == body["layout"],
        "the layout does not match its digest",
    )
    check_tensors(body["description"])
    check_pages(run, body, segments)
    shards = len(body["description"]["tensors"])
    named = [*body["scalars"], *(index for group in body["groups"] for index in group["params"])]
    require(all(index < shards for index in named), "scalars or groups refer to shards that do not exist")
    state = regular_file(
        run.checkpoints / f"step{checkpoint.step:012d}.rank{rank:05d}.{checkpoint.identity}.safetensors"
    )
    require(checksum(state) == body["state_checksum"], "the state file does not match its checksum")
    return Manifest(run, file, body, segments, state)


def check_pages(run: Run, body: dict[str, Any], segments: list[Segment]) -> None:
    """Check that pages match the layout, lie within the data files and do not overlap."""
    require(len(body["stripe_weights"]) == len(run.folders), "the number of stripe weights is not the number of paths")
    lengths = {n: page.length for segment in segments for n, page in segment.pages.items() if page.role != "GRAD"}
    require(
        {n: length for n, (_, _, length, _) in body["pages"].items()} == lengths, "the pages do not match the layout"
    )
    end, ends = (0, 0), {}
    for path, offset, length, _ in sorted(body["pages"].values()):
        require(
            path < len(run.folders) and (path, offset) >= end,
            "a page is on a path that does not exist, or overlaps with another page",
        )
        ends[path] = offset + length
        end = (path, offset + length)
    for path, size in ends.items():
        file = data_file(run, path, body["rank"])
        require(file.is_file() and file.stat().st_size >= size, f"{file} is too short")


# Description #


def checked_layout(description: dict[str, Any], page_bytes: int) -> list[Segment]:
    """Validate a description, including its size, and return its layout."""
    fsdp_modules, formats = description["fsdp_modules"], description["formats"]
    for fmt in formats.values():
        dtypes = {"master": fmt["master"], **dict(fmt["kinds"])}
        require(len(dtypes) == 1 + len(fmt["kinds"]), "duplicate state")
        encoded = [name for name, _ in fmt["encodings"]]
        require(len(set(encoded)) == len(encoded), "a section has two encodings")
        for name, encoding in fmt["encodings"]:
            require(dtypes.get(name) == "float32" and (name == "master") == (encoding == "split"), "invalid encoding")
            require(encoding != "split" or fmt["param"] == "bfloat16", "encoding split requires bfloat16 weights")
        halves = fmt["grads"] == ["bfloat16", "int16"] and (fmt["master"] or fmt["param"]) == "float32"
        require(len(fmt["grads"]) < 2 or halves, "invalid gradient format")
        require(BLOCK * max(size for _, size in page_sets(fmt)) <= page_bytes, "2048 elements do not fit into a page")
    pages = 0.0
    for shard in (shard for fsdp_module in fsdp_modules for shard in fsdp_module["shards"]):
        require(shard["segment_key"] in formats and shard["numel"] <= shard["padded"], "invalid shard")
        fmt = formats[shard["segment_key"]]
        require(
            shard["trainable"] == bool(fmt["grads"]), "a trainable shard has no gradient, or a frozen shard has one"
        )
        # Except for the last pages of a set, a page is at least one eighth full.
        pages += sum(1 + 8 * (shard["padded"] + BLOCK) * size / page_bytes for _, size in page_sets(fmt))
    require(pages <= 2**22, "too many pages")
    return build(fsdp_modules, formats, page_bytes)


def check_tensors(description: dict[str, Any]) -> None:
    """Check that tensors match their shards."""
    shards = [shard for fsdp_module in description["fsdp_modules"] for shard in fsdp_module["shards"]]
    tensors = description["tensors"]
    names = [name for tensor in tensors for name in tensor["names"]]
    require(len(set(names)) == len(names), "duplicate parameter name")
    require(len(set(description["buffers"])) == len(description["buffers"]), "duplicate buffer")
    require(len(tensors) == len(shards), "the numbers of tensors and shards differ")
    for tensor, shard in zip(tensors, shards, strict=True):
        require(tensor["names"][0] == shard["name"], "the names of a tensor and its shard differ")
        require(
            tensor["shard_rank"] < tensor["shard_size"] and tensor["dim"] < max(1, len(tensor["shape"])),
            "invalid slice",
        )
        require(math.prod(slice_of(tensor)) == shard["numel"], "the sizes of a shard and its slice differ")


def slice_of(tensor: dict[str, Any]) -> list[int]:
    """Return the shape of the local slice of a tensor."""
    shape, dim = list(tensor["shape"]), tensor["dim"]
    if shape:
        each = ceil(shape[dim], tensor["shard_size"])
        shape[dim] = max(0, min(each, shape[dim] - tensor["shard_rank"] * each))
        return shape
    return [] if tensor["shard_rank"] == 0 else [0]


def rank_independent(manifest: Manifest) -> Any:
    """Return the parts of a manifest that must be equal on all ranks."""
    description = manifest.body["description"]
    keys = [shard["segment_key"] for fsdp_module in description["fsdp_modules"] for shard in fsdp_module["shards"]]
    formats = [description["formats"][key] for key in keys]
    same = [{**tensor, "shard_rank": 0, "shape": not tensor["tensor_parallel"] and tensor["shape"]}
            for tensor in manifest.tensors]  # fmt: skip
    return formats, same, description["buffers"]


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
        Rejected: if the checkpoint violates a requirement of the document.
    """
    ranks = [read_manifest(checkpoint, rank) for rank in range(len(checkpoint.manifests))]
    require(
        all(rank_independent(one) == rank_independent(ranks[0]) for one in ranks), "the parameters differ between ranks"
    )
    first, names = ranks[0].body, [tensor["names"] for tensor in ranks[0].tensors]
    slices = [dict(slices_of(manifest)) for manifest in ranks]
    parameters, scalars = {}, {}
    for shard, tensor in enumerate(ranks[0].tensors):
        name = names[shard][0]
        require(not tensor["tensor_parallel"], f"{name} is tensor-parallel")
        held = {one.tensors[shard]["shard_rank"]: values[shard] for one, values in zip(ranks, slices, strict=True)}
        require(len(held) == tensor["shard_size"], f"slices of {name} are missing")
        parts = [held[position] for position in range(len(held))]
        parameters[name] = {key: joined([part[key] for part in parts], tensor["dim"]) for key in parts[0]}
        known = [one.body["scalars"][shard] for one in ranks if shard in one.body["scalars"]]
        if known:
            scalars[name] = known[0]
    groups = [group | {"params": [names[shard][0] for shard in group["params"]]} for group in first["groups"]]
    state = dict(safetensors.deserialize(ranks[0].state))
    buffers = {name: buffer(state, name) for name in first["description"]["buffers"]}
    modules = {name.removeprefix("state."): saved(value) for name, value in state.items() if name.startswith("state.")}
    return Content(checkpoint.step, names, parameters, scalars, groups, first["own"], buffers, modules, first["extra"])


def joined(slices: list[np.ndarray], dim: int) -> np.ndarray:
    """Concatenate slices. A tensor of shape [] is in the first slice, and the other slices are empty."""
    return np.concatenate(slices, dim) if slices[0].shape else slices[0]


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
    require(f"buffer.{name}" in state, f"the state file has no buffer {name}")
    found = state[f"buffer.{name}"]
    names = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL")
    code = dict(zip(names, DTYPES.values(), strict=True))[found["dtype"]]
    return np.frombuffer(found["data"], code).reshape(found["shape"])


def saved(tensor: dict[str, Any]) -> bytes:
    """Return the bytes that `torch.save` has written for the state of a module."""
    require(tensor["dtype"] == "U8" and len(tensor["shape"]) == 1, "the state of a module does not consist of bytes")
    return bytes(tensor["data"])
