"""Tests of TRL's trainers with their state on NVMe."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import infinity
from infinity.accumulation.micro_batches import LayerMajor
from infinity.errors import ConfigError, UnsupportedError
from infinity.integrations.transformers import attach
from infinity_tools.train.preferences import PreferenceTrainer
from support.ranks import RankPool
from support.tables import WIDE, all_but
from support.trainers import BATCH, STEPS, VOCABULARY, Outcome, as_torchrun, build, outcome_of, settings, with_adapters

WORDS = [f"w{number}" for number in range(VOCABULARY - 2)]
_FIRST = {"prompt": 10, "chosen": 40, "rejected": 70}


def tokenizer() -> Any:
    """Return a tokenizer with a small vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["<pad>", "<eos>", *WORDS])}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def arguments(out: Path, **given: Any) -> dict[str, Any]:
    """Return the arguments of a `DPOTrainer`, other than the models."""
    from datasets import Dataset
    from trl import DPOConfig

    columns = {name: [f"w{first + row} w{first + 1} " for row in range(16)] for name, first in _FIRST.items()}
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    rows = Dataset.from_dict(columns)
    return {
        "args": DPOConfig(str(out), **(defaults | given)),
        "train_dataset": rows,
        "eval_dataset": rows.select(range(4)),
        "processing_class": tokenizer(),
    }


def trained(folder: Path, kind: str, given: dict[str, Any], adapters: bool = False) -> Outcome:
    """Return the outcome of a training on this rank.

    Args:
        folder: folder of the run.
        kind: ``memory`` for `DPOTrainer` with FSDP2 in memory, ``attach`` for the same trainer on NVMe, or ``command``
            for the trainer of `infinity train`, which has no reference model.
        given: fields of `DPOConfig`.
        adapters: whether the model is a frozen one with peft adapters.
    """
    from trl import DPOTrainer

    several = dist.is_initialized() and dist.get_world_size() > 1
    with as_torchrun() if several else nullcontext():
        model = with_adapters() if adapters else build()
        named = arguments(folder / "out", **given)
        if kind == "command":
            trainer: Any = PreferenceTrainer(model, **named)
        else:
            trainer = DPOTrainer(model, ref_model=build("plain"), **named)
        if kind == "memory":
            trainer.is_distributed_loading_by_transformers = (
                True  # the model is sharded; without this, DDP would wrap it
            )
        else:
            folder.mkdir(parents=True, exist_ok=True)  # the Trainer creates it on rank 0 only
            attach(trainer, settings(folder / "nvme"))
        if kind == "command":
            trainer.compute_references(folder / "out", resumed=False)
        trainer.train()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # FSDP2 keeps the root gathered after an evaluation
        outcome = outcome_of(trainer)
        if kind != "memory":
            trainer.optimizer.optimizer.close()  # `trainer.end()` would end the process group of the tests
        return outcome


def stopping(step: int) -> Any:
    """Return a callback that ends training after a step."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step >= step

    return Stop()


def texts(lengths: tuple[int, ...]) -> Any:
    """Return a dataset of texts whose lengths in words cycle through `lengths`."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(len(WORDS), (96, max(lengths)), generator=generator).tolist()
    lines = [" ".join(WORDS[at] for at in line[: lengths[row % len(lengths)]]) for row, line in enumerate(drawn)]
    return Dataset.from_dict({"text": lines})


def sft(out: Path, model: Any, *, nvme: Path | None = None, lengths: tuple[int, ...] = (15,), **given: Any) -> Any:
    """Return an `SFTTrainer`."""
    from trl import SFTConfig, SFTTrainer

    defaults: dict[str, Any] = {
        "per_device_train_batch_size": BATCH, "max_steps": STEPS, "learning_rate": 1e-3, "logging_steps": 1,
        "train_sampling_strategy": "sequential", "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_length": 32, "packing": False,
    }  # fmt: skip
    attached = given.pop("attached", {})
    arguments = SFTConfig(output_dir=str(out), **(defaults | given))
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=texts(lengths), eval_dataset=texts(lengths).select(range(8)),
        processing_class=tokenizer(),
    )  # fmt: skip
    if nvme is not None:
        attach(trainer, settings(nvme), **attached)
    return trainer


CASES: dict[str, dict[str, Any]] = {
    "defaults": {"bf16": True, "gradient_checkpointing": True, "lengths": (5, 9, 15)},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2},
    "packed": {"packing": True, "max_length": 24, "lengths": (5, 9, 15)},
    "several lengths": {"gradient_accumulation_steps": 3, "lengths": (5,) * BATCH + (9,) * BATCH + (15,) * BATCH},
    "dft": {"loss_type": "dft"},
}


@pytest.mark.parametrize("case", all_but(CASES, "evaluated", "packed", "several lengths", "dft"))
def test_sft_trainer_equals_memory(case: str, tmp_path: Path) -> None:
    """Losses, norms and weights equal those of the unmodified `SFTTrainer`."""
    ordinary = sft(tmp_path / "memory", build("plain"), **CASES[case])
    ordinary.train()
    trainer = sft(tmp_path / "out", build(), nvme=tmp_path / "nvme", **CASES[case])
    trainer.train()
    outcome_of(trainer).equals(outcome_of(ordinary))
    trainer.end()


def test_sft_trainer_layer_major_equals_memory(tmp_path: Path) -> None:
    """Micro-batches of equal length run layer by layer, like a sliced batch in memory."""
    model = build()
    layers = LayerMajor(model, head=False)
    ordinary = sft(tmp_path / "memory", model, per_device_train_batch_size=3 * BATCH)
    with layers.slices(3):
        ordinary.train()
    trainer = sft(tmp_path / "out", build(), nvme=tmp_path / "nvme", gradient_accumulation_steps=3)
    trainer.train()
    outcome_of(trainer).equals(outcome_of(ordinary))
    trainer.end()


def dpo(out: Path, model: Any, reference: Any, *, nvme: Path | None = None, **given: Any) -> Any:
    """Return a `DPOTrainer`."""
    from trl import DPOTrainer

    trainer = DPOTrainer(model, ref_model=reference, **arguments(out, **given))
    if nvme is not None:
        attach(trainer, settings(nvme))
    return trainer


@pytest.mark.parametrize(
    "given", [{"sync_ref_model": True, "ref_model_sync_steps": 1}, {"precompute_ref_log_probs": True}]
)
def test_dpo_trainer_with_a_reference_model_equals_memory(given: dict[str, Any], tmp_path: Path) -> None:
    """Losses, weights and the synchronized reference model equal those of the unmodified `DPOTrainer`."""
    references = build("plain"), build("plain")
    ordinary = dpo(tmp_path / "memory", build("plain"), references[0], **given)
    ordinary.train()
    trainer = dpo(tmp_path / "out", build(), references[1], nvme=tmp_path / "nvme", **given)
    trainer.train()
    outcome_of(trainer).equals(outcome_of(ordinary))
    for mine, theirs, initial in zip(
        references[1].parameters(), references[0].parameters(), build("plain").parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, initial) != ("sync_ref_model" in given)
    trainer.end()


def test_dpo_trainer_with_adapters_requires_a_reference_model(tmp_path: Path) -> None:
    from peft import LoraConfig

    build("plain").save_pretrained(tmp_path / "weights")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    def model() -> Any:
        return infinity.from_pretrained(tmp_path / "weights", adapters=lora, mp_policy=MixedPrecisionPolicy())

    with pytest.raises(UnsupportedError, match=r"adapter 'ref' cannot be added.*ref_model="):
        dpo(tmp_path / "out", model(), None)
    trainer = dpo(tmp_path / "out", model(), build("plain"), nvme=tmp_path / "nvme")
    trainer.train()
    losses = outcome_of(trainer).losses
    assert len(set(losses)) == len(losses) == 3
    trainer.end()


WITHOUT_A_REFERENCE: dict[str, tuple[Any, dict[str, Any]]] = {
    "Cannot copy out of meta tensor": (partial(build, "meta"), {"precompute_ref_log_probs": True}),
    ".numpy() is not supported for tensor subclasses": (build, {"precompute_ref_log_probs": True}),
    "got mixed torch.Tensor and DTensor": (with_adapters, {}),
}
"""Errors of the constructor of `DPOTrainer` without `ref_model`, and what causes them."""


@pytest.mark.parametrize("error", WITHOUT_A_REFERENCE)
def test_documentation_names_errors_of_dpo_trainer_without_a_reference_model(error: str, tmp_path: Path) -> None:
    """The constructor runs before `attach`. With `ref_model`, it succeeds."""
    model, given = WITHOUT_A_REFERENCE[error]
    with pytest.raises(Exception, match=re.escape(error)):
        dpo(tmp_path / "out", model(), None, **given)
    dpo(tmp_path / "out", model(), build("plain"), **given)
    page = Path(__file__).parents[2] / "docs" / "how-to" / "trainer.md"
    assert f'"{error}"' in " ".join(page.read_text().split())


@WIDE
def test_sft_trainer_resumes_on_the_meta_device(tmp_path: Path) -> None:
    """Checkpoints contain the tokenizer."""
    saved = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": 6}
    uninterrupted = sft(tmp_path / "uninterrupted", build(), nvme=tmp_path / "uninterrupted-nvme", max_steps=6)
    uninterrupted.train()
    expected = outcome_of(uninterrupted)
    uninterrupted.optimizer.optimizer.close()
    first = sft(tmp_path / "out", build(), nvme=tmp_path / "nvme", **saved)
    first.add_callback(stopping(5))
    first.train()
    first.optimizer.optimizer.close()
    assert (tmp_path / "out" / "checkpoint-4" / "tokenizer.json").exists()
    again = sft(tmp_path / "out", build("meta"), nvme=tmp_path / "nvme", **saved)
    again.train(resume_from_checkpoint=True)
    outcome_of(again).equals(expected)
    again.end()


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
