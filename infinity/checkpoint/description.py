"""What the pages of a run hold, written beside its commits: enough to read them without the model.

docs/on-disk-format.md describes the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infinity.checkpoint.manifest import read_checked, write_checked
from infinity.errors import CommitError
from infinity.layout import Layout, ShardSpec, StateFormat, UnitSpec, build_layout

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A whole parameter, and which of its slices along `dim` this rank holds.

    `names` are all that the model has for it: a tied parameter has several. Where it is tensor-parallel, `shape` is
    that of this rank's part.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dim: int
    shard_rank: int
    shard_size: int
    tensor_parallel: bool

    @property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """Rows of every rank's slice along `dim`, first and behind the last, as `torch.chunk` cuts."""
        rows = self.shape[self.dim]
        each = -(-rows // self.shard_size)
        return tuple((min(rank * each, rows), min((rank + 1) * each, rows)) for rank in range(self.shard_size))


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """Pages of one rank, and the parameters that they are of, shard by shard.

    `buffers` are the names of the model's persistent buffers, whose values are in the state files.
    """

    rank: int
    world_size: int
    layout: Layout
    tensors: tuple[TensorSpec, ...]
    buffers: tuple[str, ...]


def description_name(rank: int) -> str:
    """Return the file name of a description."""
    return f"layout.rank{rank:05d}.json"


def write_description(folder: Path, described: RunDescription) -> None:
    """Write a description into a run's folder of commits, durably."""
    layout = described.layout
    formats = {
        layout.shards[shard].spec.segment_key: asdict(segment.format)
        for segment in layout.segments
        for shard in segment.shards
    }
    write_checked(
        folder / description_name(described.rank),
        {
            "format": FORMAT,
            "rank": described.rank,
            "world_size": described.world_size,
            "page_bytes": layout.page_bytes,
            "units": [asdict(unit) for unit in layout.units],
            "formats": formats,
            "tensors": [asdict(tensor) for tensor in described.tensors],
            "buffers": described.buffers,
        },
    )


def read_description(folder: Path, rank: int) -> RunDescription:
    """Read and check a description.

    Raises:
        CommitError: it is missing, malformed, or does not match its checksum.
    """
    file = folder / description_name(rank)

    def decode(body: Mapping[str, Any]) -> RunDescription:
        if body["format"] != FORMAT:
            raise CommitError(f"{file} has format {body['format']}, this version reads {FORMAT}")
        units = [
            UnitSpec(name=unit["name"], shards=tuple(ShardSpec(**shard) for shard in unit["shards"]))
            for unit in body["units"]
        ]
        formats = {
            key: StateFormat(**{**values, "kinds": tuple((name, dtype) for name, dtype in values["kinds"])})
            for key, values in body["formats"].items()
        }
        layout = build_layout(units, formats, int(body["page_bytes"]))
        tensors = tuple(
            TensorSpec(**{**tensor, "names": tuple(tensor["names"]), "shape": tuple(tensor["shape"])})
            for tensor in body["tensors"]
        )
        if len(tensors) != len(layout.shards) or body["rank"] != rank:
            raise CommitError(f"{file} is malformed: {len(tensors)} tensors of {len(layout.shards)} shards")
        return RunDescription(
            rank=rank,
            world_size=int(body["world_size"]),
            layout=layout,
            tensors=tensors,
            buffers=tuple(body["buffers"]),
        )

    return read_checked(file, decode)
