"""Tests of the default batch of `infinity train` for a pretrained model, and of packing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from datasets import Dataset

from infinity import Config
from infinity.errors import ConfigError, InfinityError, UnsupportedError
from infinity.models import small
from infinity.ranks import Ranks
from infinity.units import GIB
from infinity_tools.plan import plan_drives, recommended_batch
from infinity_tools.plan.inputs import Asked, plan_of
from infinity_tools.train import batch
from infinity_tools.train.datasets import check_packing, why_not_packed
from support.command import run_here
from support.fine_tuning import MARKED, chats, make_model, make_tokenizer, texts, write_jsonl
from support.tables import all_but

CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "drives limit small batches": ({"gpu": "l4", "gpu_memory": "6GiB"}, "256MiB", "hidden"),
    "device memory limits large batches": ({"gpu": "h100", "gpu_memory": "4GiB"}, "256MiB", "memory"),
    "host memory": ({"tflops": 20.0}, "256MiB", "hidden"),
    "slow processor": ({"tflops": 0.05}, "256MiB", "least"),
    "state fits in the host cache": ({"tflops": 500.0}, "16GiB", "least"),
}
"""Hardware, host cache, and what determines the batch."""


@pytest.mark.parametrize("case", CASES)
def test_recommended_batch_hides_storage_and_fits_memory(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware, host_bytes, limit = CASES[case]
    monkeypatch.setattr(recommended_batch, "available_memory", lambda: 32 * GIB)
    settings = {"memory.host_bytes": host_bytes}
    asked = Asked(
        model="llama-354m", seq=512, batch_tokens=4096, nvme_bandwidth="3e9/2e9", settings=settings, **hardware
    )
    found, _ = plan_of(asked)
    size, parts = recommended_batch.recommended_batch(found)
    least, hidden = recommended_batch.LEAST, found.hidden_from_tokens
    assert hidden is not None
    if limit == "least":
        assert (size, parts) == (least, 1)
    elif limit == "hidden":
        assert hidden <= size * parts * 512 < 2 * hidden
    else:
        assert least <= size * parts < hidden // 512
        assert parts > 1


@pytest.mark.parametrize(
    ("hardware", "ranks", "available", "expected"),
    [
        ({"tflops": 0.05}, 1, 6 * GIB, (8, 1)),
        ({"tflops": 0.05}, 4, int(2.8 * GIB), (2, 4)),
        ({"tflops": 0.05}, 1, GIB // 3, (1, 8)),
        ({"tflops": 0.05, "link": "25e9"}, 1, GIB // 3, (8, 1)),
    ],
    ids=["enough memory", "share of a rank", "not enough for one sequence", "device of unknown memory"],
)
def test_micro_batches_fit_memory_of_each_rank(
    hardware: dict[str, Any], ranks: int, available: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommended_batch, "available_memory", lambda: available)
    settings = {"memory.host_bytes": "256MiB"}
    asked = Asked(
        model="llama-354m", seq=512, batch_tokens=4096 * ranks, nvme_bandwidth="3e9/2e9", ranks=ranks,
        settings=settings, **hardware,
    )  # fmt: skip
    assert recommended_batch.recommended_batch(plan_of(asked)[0]) == expected


@pytest.mark.parametrize(
    ("answer", "size", "warning"),
    [
        (plan_drives.typed_drives("5e7/5e7", 1, 0, 0), 512, ""),
        (InfinityError("no space"), 64, "the drives cannot be measured: %s"),
        (KeyError("drive"), 8, "could not be planned"),
    ],
    ids=["measured", "cannot be measured", "fault"],
)
def test_batch_is_recommended_before_folders_exist(
    answer: Any, size: int, warning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that fails is reported, and does not end the run."""

    def drives(paths: list[Path], *_: Any) -> Any:
        assert paths == [tmp_path]
        if isinstance(answer, Exception):
            raise answer
        return answer, "typed"

    log = mock.Mock()
    monkeypatch.setattr(batch, "_log", log)
    monkeypatch.setattr(batch, "_hardware", lambda dtype: {"tflops": 0.01})
    monkeypatch.setattr(plan_drives, "drives_at", drives)
    make_model(tmp_path / "model")
    paths = [str(tmp_path / "new/a"), str(tmp_path / "new/b")]
    settings = Config().with_values(**{"storage.paths": paths, "memory.host_bytes": "1MiB"})
    args = SimpleNamespace(max_length=16, gradient_checkpointing=True, max_grad_norm=1.0, packing=False)
    recipe = {"model": str(tmp_path / "model"), "method": "sft"}
    found = batch.recommended(recipe, settings, args, "fp32", range(1 << 20), Ranks(0, 0, 1))
    assert found == {"per_device_train_batch_size": size}
    assert [warning in call.args[0] for call in log.warning.call_args_list] == [True] * bool(warning)


def test_pretrained_model_is_trained_with_recommended_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch has at least 16 steps. The drives are measured only if slow ones would limit the smallest batch."""
    monkeypatch.setattr(batch, "_hardware", lambda dtype: {"tflops": 1000.0})
    slow = plan_drives.typed_drives("5e7/5e7", 1, 0, 0)
    monkeypatch.setattr(plan_drives, "drives_at", lambda paths, endurance, runtime: (slow, "typed"))
    make_model(tmp_path / "model")
    write_jsonl(tmp_path / "text.jsonl", texts(512))
    command = ["train", "--model", "model", "--data", "text.jsonl", "--packing", "false", "--host-memory", "1MiB"]
    ended = run_here(*command, "--max_steps", "1", "--max_length", "16", "--out", "o")
    assert "batch per rank: --per_device_train_batch_size 32" in ended.errors
    assert "per_device_train_batch_size: 32" in (tmp_path / "o/recipe.yaml").read_text()


SEPARATED: dict[str, dict[str, Any]] = {
    "llama": {}, "gpt2": {}, "gpt_neo": {}, "gptj": {}, "falcon": {}, "mistral": {}, "mixtral": {}, "qwen3": {},
    "qwen3_moe": {}, "gemma3_text": {}, "phi3": {}, "deepseek_v3": {}, "lfm2": {"layer_types": ["full_attention"] * 32},
}  # fmt: skip
"""Model types that separate packed examples by position, with configuration values."""
MIXED: dict[str, dict[str, Any]] = {
    "opt": {}, "bloom": {}, "mpt": {}, "xglm": {}, "gpt_oss": {}, "mamba": {}, "mamba2": {}, "rwkv": {},
    "qwen3_next": {}, "lfm2": {"layer_types": ["full_attention", "conv"] * 16}, "jamba": {},
    "bert": {"is_decoder": True},
}  # fmt: skip
"""Model types that do not separate them: masks ignore positions, or layers carry state across tokens."""


@pytest.mark.parametrize("kind", all_but(SEPARATED, *{*SEPARATED} - {"llama"}))
def test_models_that_separate_packed_examples(kind: str) -> None:
    """The check changes neither the configuration nor the random state."""
    config = transformers.AutoConfig.for_model(kind, **SEPARATED[kind])
    before, state = config.to_dict(), torch.get_rng_state()
    assert why_not_packed(config) == ""
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", all_but(MIXED, *{*MIXED} - {"mamba"}))
def test_models_that_do_not_separate_packed_examples(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **MIXED[kind])
    assert why_not_packed(config) == f"{kind} does not separate packed examples"


def test_models_that_cannot_be_checked_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that predicts the same for any tokens would seem to separate examples."""
    config = transformers.AutoConfig.for_model("llama")
    model: Any = small.small_copy(config, "AutoModelForCausalLM")
    torch.nn.init.zeros_(model.lm_head.weight)
    monkeypatch.setattr(small, "small_copy", lambda *_: model)
    assert why_not_packed(config).endswith("predicts the same for any tokens")

    def fail(*_: object) -> Any:
        raise UnsupportedError("no layers")

    monkeypatch.setattr(small, "small_copy", fail)
    assert why_not_packed(config).endswith("llama separates packed examples: no layers")


def packing(folder: Path, model: Any, **options: Any) -> Any:
    """Return an SFTTrainer that packs chats, after `check_packing`."""
    from trl import SFTConfig, SFTTrainer

    defaults = {"packing": True, "max_length": 96, "assistant_only_loss": True} | options
    args = SFTConfig(
        str(folder / "o"), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, **defaults
    )
    rows = Dataset.from_list(list(chats(40)))
    tokenizer = make_tokenizer(folder / "t", MARKED)
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    check_packing(trainer, "m")
    return trainer


def test_packed_examples_do_not_attend_to_each_other(tmp_path: Path) -> None:
    """All batches have one shape, the logits equal those of each example alone, and its first token is not trained."""
    model = make_model(tmp_path / "m").eval()
    trainer = packing(tmp_path, model)
    batch = trainer.data_collator(list(trainer.train_dataset)[:3])
    assert {name: value.shape for name, value in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids", "attention_mask"), (3, 96)
    )
    trained = 0
    with torch.no_grad():
        given = {name: value for name, value in batch.items() if name != "labels"}
        together = model(**given, use_cache=False).logits
        for row in range(3):
            starts = [*(batch["position_ids"][row] == 0).nonzero().flatten().tolist(), 96]
            assert len(starts) > 2
            for first, last in pairwise(starts):
                alone = model(input_ids=batch["input_ids"][row : row + 1, first:last]).logits[0]
                assert torch.allclose(together[row, first:last], alone, atol=1e-5)
                assert batch["labels"][row, first] == -100
                trained += int((batch["labels"][row, first:last] != -100).sum())
    assert trained == sum(label != -100 for row in list(trainer.train_dataset)[:3] for label in row["labels"])


def test_all_tokens_of_packed_batches_are_counted(tmp_path: Path) -> None:
    """Padding is not. Examples to evaluate on need not be packed."""
    write_jsonl(tmp_path / "train.jsonl", chats(40))
    write_jsonl(tmp_path / "eval.jsonl", chats(4))
    make_model(tmp_path / "m", template=MARKED)
    done = run_here(
        "train", "--model", tmp_path / "m", "--data", tmp_path / "train.jsonl", "--eval_data", tmp_path / "eval.jsonl",
        "--eval_packing", "false", "--max_length", 96, "--per_device_train_batch_size", 2,
        "--gradient_accumulation_steps", 2, "--max_steps", 2, "--use_cpu", "--json", "--out", tmp_path / "o",
    )  # fmt: skip
    assert done.status == 0, done.errors
    assert 4 * 80 < done.summary["tokens_per_step"] <= 4 * 96
    assert len(done.summary["eval_losses"]) == 1


def test_packing_for_a_model_that_mixes_examples_is_rejected(tmp_path: Path) -> None:
    """Joined texts and padded examples need no check."""
    config = transformers.MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2, state_size=8)
    model = transformers.MambaForCausalLM(config)
    with pytest.raises(ConfigError, match="--model m: mamba does not separate packed examples; remove --packing"):
        packing(tmp_path, model)
    packing(tmp_path, model, packing=False)
    packing(tmp_path, model, packing_strategy="wrapped")
