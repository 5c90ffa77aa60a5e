"""Tests that examples are packed only for models that separate packed examples."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset

from infinity.errors import ConfigError, UnsupportedError
from infinity.models import small
from infinity_tools.train.datasets import check_packing, why_not_packed
from support.command import run_here
from support.fine_tuning import MARKED, chats, make_model, make_tokenizer, write_jsonl
from support.tables import all_but

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
