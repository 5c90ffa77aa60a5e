"""Tests of `infinity train` on several nodes that do not share the output folder: all ranks report it at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from infinity import Config
from infinity.errors import InfinityError
from infinity.ranks import Ranks
from infinity_tools.train import recipe as recipes
from infinity_tools.train.run import RunOptions, _output_folder, _resolved_together
from support.ranks import RankPool
from support.separate_nodes import node

OPTIONS = RunOptions(resume="latest", trace="", metrics_port=None, metrics_host="", metrics_linger=0.0, json=False)


def open_output(folder: str, out: str) -> str:
    """Open the output folder as the only rank of a node; return the error. Called on every rank."""
    with node(folder) as place:
        ranks = Ranks(dist.get_rank(), 0, dist.get_world_size())
        try:
            with _output_folder(place / out, Config(), ranks, resumes=False) as settings:
                assert ranks.collect(settings.storage.paths == (str(place / out / "nvme"),)) == [True] * 2
        except InfinityError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("out", ["out", "../out"])
def test_nodes_must_share_the_output_folder(out: str, pair: RankPool, tmp_path: Path) -> None:
    errors = pair.run(open_output, str(tmp_path), out)
    if out == "out":
        found = f"--out '{tmp_path}/node1/out' on host node1 is a different folder than on host node0. Choose a folder"
        assert [found in error for error in errors] == [True, True]
        assert f"checking the output folder failed on rank 1 on host node1: ConfigError: {found}" in errors[0]
    else:
        assert errors == ["", ""]
    assert [file for place in ("node0", "node1", ".") for file in (tmp_path / place).glob("out*")] == []


def read_recipe(folder: str) -> str:
    """Read the recipe on this node, and the recipe of the run to resume; return the error. Called on every rank."""
    with node(folder) as place:
        try:
            recipe = _resolved_together(lambda: recipes.read(place / "recipe.yaml"), OPTIONS, Ranks.current())[0]
        except InfinityError as error:
            return str(error)
        return str(recipe["model"])


@pytest.mark.parametrize("lacks", ["recipe.yaml", "out/recipe.yaml"])
def test_all_nodes_must_have_the_recipe(lacks: str, pair: RankPool, tmp_path: Path) -> None:
    for name in ("node0", "node1"):
        (tmp_path / name / "out").mkdir(parents=True)
        out = tmp_path / name / "out"
        for file in (tmp_path / name / "recipe.yaml", out / "recipe.yaml"):
            file.write_text(f"model: tiny\noutput_dir: {out}\noffload:\n  storage:\n    paths: [{out}/nvme]\n")
    assert pair.run(read_recipe, str(tmp_path)) == ["tiny", "tiny"]
    os.unlink(tmp_path / "node1" / lacks)
    reason = {"recipe.yaml": "cannot be read: No such file or directory", "out/recipe.yaml": "nothing to resume"}[lacks]
    for error in pair.run(read_recipe, str(tmp_path)):
        assert reason in error
        assert "The recipe and --out must be on a file system that all nodes share." in error
