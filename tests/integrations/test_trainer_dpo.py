"""Tests of TRL's `DPOTrainer` and the trainer of `infinity train`, on one and two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.errors import ConfigError
from infinity.integrations.transformers import attach
from infinity_tools.train.preferences import PreferenceTrainer
from support.preference_runs import arguments, stopping, trained
from support.ranks import RankPool
from support.tables import WIDE
from support.trainers import Outcome, build, outcome_of, settings

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Outcome of `DPOTrainer` in memory, with a reference model."""
    return trained(tmp_path_factory.mktemp("memory"), "memory", EVALUATED)


def test_dpo_on_one_rank_equals_memory(memory: Outcome, tmp_path: Path) -> None:
    """`DPOTrainer` with `attach` is tested by `test_trainer_trl`."""
    assert len(set(memory.losses)) == 3
    trained(tmp_path, "command", EVALUATED).equals(memory)


@pytest.mark.parametrize("kind", ["command", pytest.param("attach", marks=WIDE)])
def test_dpo_on_two_ranks_equals_memory(kind: str, pair: RankPool, tmp_path: Path) -> None:
    expected = pair.run(trained, tmp_path / "memory", "memory", EVALUATED)
    for outcome, wanted in zip(pair.run(trained, tmp_path / kind, kind, EVALUATED), expected, strict=True):
        assert outcome.losses == wanted.losses
        assert outcome.evaluations == wanted.evaluations
        assert {name: value.tolist() for name, value in outcome.weights.items()} == {
            name: value.tolist() for name, value in wanted.weights.items()
        }


def test_dpo_of_adapters_equals_memory(tmp_path: Path) -> None:
    """The reference is the frozen model without adapters."""
    expected = trained(tmp_path / "memory", "memory", EVALUATED, True)
    trained(tmp_path / "command", "command", EVALUATED, True).equals(expected)


def test_resumed_dpo_uses_the_references_of_the_initial_weights(memory: Outcome, tmp_path: Path) -> None:
    """A resumed run whose stored values are damaged is rejected, because its weights are trained already."""

    def trainer() -> Any:
        saved = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
        made: Any = PreferenceTrainer(build(), **arguments(tmp_path, **saved))
        attach(made, settings(tmp_path / "nvme"))
        return made

    first = trainer()
    first.compute_references(tmp_path, resumed=False)
    first.add_callback(stopping(2))
    first.train()
    first.optimizer.optimizer.close()
    again = trainer()
    again.compute_references(tmp_path, resumed=True)
    again.train(resume_from_checkpoint=True)
    outcome_of(again).equals(memory)
    again.optimizer.optimizer.close()
    again = trainer()
    (file,) = tmp_path.glob("reference-train-*.npz")
    content = file.read_bytes()
    for damaged in (content[:200] + bytes([content[200] ^ 1]) + content[201:], content[:200], b""):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="reference log probabilities"):
            again.compute_references(tmp_path, resumed=True)


def test_synchronized_reference_models_are_not_supported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sync_ref_model"):
        PreferenceTrainer(build(), **arguments(tmp_path, sync_ref_model=True))
