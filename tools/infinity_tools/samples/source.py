"""Where rows come from: files and folders that the library `datasets` reads, one row after the other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.optional_dependencies import needs

_FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
}
"""The builder of `datasets` by the end of a file's name."""

_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
"""What `save_to_disk` leaves in the folder of a data set, and in that of several splits."""

_BESIDE = {".md", ".txt", ".gitattributes", ""}
"""Files that may lie beside those of a data set: what it is, and its license."""

_SPLIT = re.compile(r"(?:^|[-_./ ])(train|training|validation|valid|val|dev|test|testing|eval)(?=[-_./ ]|$)")
_CANONICAL = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation", "testing": "test"}


def is_data_set(path: Path) -> bool:
    """Return whether `datasets` is to read a path: by the end of a file's name, or by what is in a folder.

    A folder is a data set if `save_to_disk` wrote it, or if all of its files are of one such kind, but for a README and
    the like.
    """
    try:
        return bool(_saved(path) or _files(path))
    except OSError:  # which is said when it is read
        return False


@dataclass(frozen=True)
class Rows:
    """The rows of one split of some data sets, in the order of their files. Iterated over as often as needed."""

    paths: tuple[Path, ...]
    """Files and folders, as they were named."""
    split: str
    """Of those that have several; empty for those that have one."""
    option: str
    """That names the paths, for messages."""

    @classmethod
    def of(cls, paths: Sequence[Path], split: str, option: str, preferred: Sequence[str]) -> Rows:
        """Return the rows of data sets.

        Args:
            paths: files and folders for which `is_data_set` holds.
            split: the split that is asked for; empty: the first of `preferred` that there is, or the only one.
            option: the option that names the paths.
            preferred: names of splits.

        Raises:
            ConfigError: there is no such split, or several and none of them is preferred.
            MissingPackageError: `datasets` is not installed.
        """
        with needs("data", f"{option} {paths[0]}"):
            import datasets  # noqa: F401
        found = [set(_splits(path)) for path in paths]
        for path, splits in zip(paths, found, strict=True):
            wanted = split or _chosen(splits, preferred)
            if not wanted or (wanted not in splits and (split or len(splits) > 1)):
                raise ConfigError(
                    f"{option} {str(path)!r} has the splits {', '.join(sorted(splits))}"
                    f"{f', no {split!r}' if split else ''}; select one with {_split_option(option)}"
                )
        return cls(tuple(paths), split or _chosen(set.union(*found), preferred), option)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Read row after row; memory is that of some rows. Raises `ConfigError` for what cannot be read."""
        for path in self.paths:
            splits = _splits(path)
            try:
                yield from _read(path, splits.get(self.split) or next(iter(splits.values())))
            except Exception as error:  # whatever a file of any content makes of datasets
                raise ConfigError(
                    f"{self.option} {str(path)!r} cannot be read as a dataset: {_reason(error)}"
                ) from error

    @property
    def stamps(self) -> list[tuple[str, int, int]]:
        """Name, size and time of change of every file that is read."""
        return [
            (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns)
            for path in self.paths
            for file in sorted(_splits(path).get(self.split) or next(iter(_splits(path).values())))
        ]


def _split_option(option: str) -> str:
    return "--eval-split" if option.startswith("--eval") else "--split"


def _chosen(splits: Iterable[str], preferred: Sequence[str]) -> str:
    """Return the split to take where none is asked for; empty where that is not clear."""
    there = set(splits)
    if len(there) == 1:
        return next(iter(there))
    return next((name for name in preferred if name in there), "")


def _splits(path: Path) -> dict[str, list[Path]]:
    """Return the files of a data set by split; one that says nothing of splits has one, `train`."""
    if saved := _saved(path):
        return saved
    found: dict[str, list[Path]] = {}
    for file in _files(path):
        name = _SPLIT.search(str(file.relative_to(path)) if path.is_dir() else "")
        split = _CANONICAL.get(name[1], name[1]) if name else "train"
        found.setdefault(split, []).append(file)
    return found


def _saved(path: Path) -> dict[str, list[Path]]:
    """Return the Arrow files by split of a folder that `save_to_disk` wrote; empty for another one."""
    if (path / _SAVED).is_file():
        return {"train": sorted(path.glob("*.arrow"))}
    if (path / _SAVED_SPLITS).is_file():
        return {inner.name: sorted(inner.glob("*.arrow")) for inner in path.iterdir() if (inner / _SAVED).is_file()}
    return {}


def _files(path: Path) -> list[Path]:
    """Return the files of a data set in the order of their names; empty where that is none."""
    if path.is_file():
        return [path] if _ending(path) in _FORMATS else []
    if not path.is_dir():
        return []
    there = [
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    data = sorted(file for file in there if _ending(file) in _FORMATS)
    others = {_ending(file) for file in there} - _FORMATS.keys() - _BESIDE
    return data if len({_FORMATS[_ending(file)] for file in data}) == 1 and not others else []


def _ending(file: Path) -> str:
    """Return the end of a name that says what is in the file, without that of a compression."""
    return Path(file.stem if file.suffix == ".gz" else file.name).suffix


def _read(path: Path, files: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    import datasets

    if _saved(path):
        folder = files[0].parent if files else path
        yield from datasets.load_from_disk(str(folder))  # memory-mapped, with what select and shuffle made of it
        return
    extra = {"sep": "\t"} if _ending(files[0]) == ".tsv" else {}
    names = [str(file) for file in files if file.stat().st_size]
    if not names:  # of which datasets cannot tell the columns
        return
    yield from datasets.load_dataset(
        _FORMATS[_ending(files[0])], data_files={"train": names}, split="train", streaming=True, **extra
    )


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:  # datasets says only that it failed
        error = error.__cause__
    text = " ".join(str(error).split())
    return text if text and isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"
