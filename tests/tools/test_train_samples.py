"""Tests of the conversion of dataset rows to sequences: tokens, labels, packing and order."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch

from infinity.errors import ConfigError
from infinity_tools.samples.batches import Drawn, steps_of
from infinity_tools.samples.encode import Columns, Encoder, Sample
from infinity_tools.samples.order import Order
from infinity_tools.samples.pack import IGNORED, Packed, Packer
from infinity_tools.samples.prepared import Preparation, Recipe, Sequences, prepare
from infinity_tools.samples.source import Rows
from support.fine_tuning import MARKED, TEMPLATE, chats, make_model, make_tokenizer, texts, write_jsonl

STRIPPING = (
    "{% for message in messages %}{% if not loop.last and message['role'] == 'assistant' %}<|end|>{% else %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
)
"""Chat template that omits earlier answers, as the templates of reasoning models do."""


def encoded(tokenizer: Any, row: dict[str, Any], *, loss_on: str = "completions") -> tuple[str, str]:
    """Return the encoded text of a row and its trained part."""
    encoder = Encoder(tokenizer, Columns.of(row, "", "--data d"), loss_on, "--data d")
    (sample,) = encoder.encode([row])
    trained = [token for token, counts in zip(sample.tokens, sample.trained, strict=True) if counts]
    return tokenizer.decode(sample.tokens), tokenizer.decode(trained)


CHAT = {
    "messages": [
        {"role": "system", "content": "be far"},
        {"role": "user", "content": "a sea"},
        {"role": "assistant", "content": "the ship"},
        {"role": "user", "content": "and wind"},
        {"role": "assistant", "content": "a storm"},
    ]
}
SAID = "<|system|>be far<|end|><|user|>a sea<|end|><|assistant|>the ship<|end|><|user|>and wind<|end|>"
SAID += "<|assistant|>a storm<|end|>"
ANSWERS = "the ship<|end|>a storm<|end|>"


def test_trained_tokens_of_each_row_type(tmp_path: Path) -> None:
    """The loss covers answers or completions with their end tokens, or the full text."""
    tokenizer = make_tokenizer(tmp_path)
    assert encoded(tokenizer, CHAT) == (SAID, ANSWERS)
    assert encoded(tokenizer, CHAT, loss_on="all") == (SAID, SAID)
    sharegpt = [
        {"from": {"user": "human", "assistant": "gpt"}.get(one["role"], one["role"]), "value": one["content"]}
        for one in CHAT["messages"]
    ]
    assert encoded(tokenizer, {"conversations": sharegpt}) == (SAID, ANSWERS)
    filled = [{**one, "tool_calls": None} for one in CHAT["messages"]]  # Arrow fills missing keys with None
    assert encoded(tokenizer, {"messages": filled}) == (SAID, ANSWERS)
    pair = {"prompt": "a sea", "completion": " and storm"}
    assert encoded(tokenizer, pair) == ("a sea and storm<|eos|>", " and storm<|eos|>")
    assert encoded(tokenizer, pair, loss_on="all") == ("a sea and storm<|eos|>",) * 2
    talk = {"prompt": CHAT["messages"][:2], "completion": CHAT["messages"][2:3]}
    assert encoded(tokenizer, talk) == (SAID[: SAID.index("<|user|>and")], "the ship<|end|>")
    assert encoded(tokenizer, {"text": "far home"}) == ("far home<|eos|>",) * 2
    assert encoded(tokenizer, {"id": 3, "story": "far home"}) == ("far home<|eos|>",) * 2


def test_chat_template_receives_tools(tmp_path: Path) -> None:
    """Tools may be a list or JSON text, as tables store them."""
    tokenizer = make_tokenizer(
        tmp_path, "{% for tool in tools or [] %}{{ tool['name'] }}<|end|>{% endfor %}" + TEMPLATE
    )
    for tools in ([{"name": "a ship"}], '[{"name": "a ship"}]'):
        assert encoded(tokenizer, {**CHAT, "tools": tools}) == ("a ship<|end|>" + SAID, ANSWERS)


def test_template_with_generation_marks_gives_same_labels(tmp_path: Path) -> None:
    """TRL derives its labels from `apply_chat_template(return_assistant_tokens_mask=True)`."""
    plain, marked = make_tokenizer(tmp_path / "a"), make_tokenizer(tmp_path / "b", MARKED)
    for row in chats(20):
        assert encoded(plain, row) == encoded(marked, row)


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["chat", "pair", "talk", "text"])
def test_tokens_and_labels_match_trl(kind: str, tmp_path: Path) -> None:
    """The reference is `SFTTrainer` with the loss on assistant messages."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = make_model(tmp_path / "m", template=MARKED)
    rows = {
        "chat": list(chats(20)),
        "pair": [{"prompt": "a sea ", "completion": "and storm"}, {"prompt": "the", "completion": " ship sails"}],
        "talk": [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in chats(20)],
        "text": list(texts(20)),
    }[kind]
    config = SFTConfig(
        str(tmp_path / "o"), use_cpu=True, bf16=False, report_to=[], max_length=None, assistant_only_loss=kind == "chat"
    )
    tokenizer = make_tokenizer(tmp_path / "m", MARKED)
    expected = SFTTrainer(
        model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    ).train_dataset
    encoder = Encoder(tokenizer, Columns.of(rows[0], "", "--data d"), "completions", "--data d")
    for sample, row in zip(encoder.encode(rows), expected, strict=True):
        assert list(sample.tokens) == row["input_ids"]
        assert list(sample.trained) == [label != IGNORED for label in row["labels"]]


def test_template_that_rewrites_earlier_answers_is_rejected(tmp_path: Path) -> None:
    """Answers cannot be located then, but `--loss-on all` still works."""
    tokenizer = make_tokenizer(tmp_path, STRIPPING)
    with pytest.raises(ConfigError, match=r"row 0: the chat template .*--loss-on all"):
        encoded(tokenizer, CHAT)
    full, trained = encoded(tokenizer, CHAT, loss_on="all")
    assert full == trained


def test_invalid_row_is_reported_with_its_number(tmp_path: Path) -> None:
    """Rows are counted across calls of `encode`."""
    tokenizer = make_tokenizer(tmp_path)
    rows = list(chats(3))
    encoder = Encoder(tokenizer, Columns.of(rows[0], "", "--data d"), "completions", "--data d")
    assert len(list(encoder.encode(rows))) == 3
    with pytest.raises(ConfigError, match=r"--data d, row 4: 'messages' "):
        list(encoder.encode([rows[0], {"messages": []}]))


def pack(lengths: list[int], length: int, *, one_row: bool) -> tuple[list[Packed], Packer]:
    """Pack samples of these lengths, each with its own token; the second half of each is trained."""
    packer = Packer(length, 0, one_row=one_row)
    found = []
    for number, size in enumerate(lengths, 1):
        found += packer.add(Sample([number] * size, [one_row or place >= size // 2 for place in range(size)]))
    return [*found, *packer.end()], packer


def test_texts_are_split_at_sequence_ends() -> None:
    """No token is lost, and only the last sequence has padding, which the loss ignores."""
    found, packer = pack([5, 9, 2], 6, one_row=True)
    assert [one.tokens for one in found] == [[1] * 5 + [2], [2] * 6, [2, 2, 3, 3, 0, 0]]
    assert [one.labels for one in found] == [one.tokens for one in found[:2]] + [[2, 2, 3, 3, IGNORED, IGNORED]]
    assert (packer.samples, packer.cut, packer.dropped) == (3, 0, 0)


def test_chats_are_not_split() -> None:
    """The longest chats are truncated, or dropped if no trained token remains."""
    chance = random.Random(1)
    lengths = [chance.randint(2, 30) for _ in range(500)]
    found, packer = pack([*lengths, 40, 70], 32, one_row=False)
    assert (packer.cut, packer.dropped) == (2, 1), (
        "the second half of the 70 tokens starts after the end of the sequence"
    )
    assert all(len(one.tokens) == len(one.labels) == sum(one.lengths) == 32 for one in found)
    places = {number: [one for one in found if number in one.tokens] for number in range(1, 502)}
    assert all(len(there) == 1 for there in places.values())
    assert all(places[number][0].tokens.count(number) == size for number, size in enumerate(lengths, 1))
    for one in found:
        starts = [sum(one.lengths[:number]) for number in range(len(one.lengths))]
        assert all(one.labels[start] == IGNORED for start in starts), "no sample is predicted from the one before it"
    filled = (sum(lengths) + 32) / (32 * len(found))
    assert filled > 0.95


def test_each_epoch_is_a_different_permutation() -> None:
    """Seed and epoch change the order, which looks shuffled."""
    for count in (1, 2, 3, 7, 64, 1000):
        orders = {tuple(Order(count, seed, epoch).at(place) for place in range(count))
                  for seed in range(2) for epoch in range(2)}  # fmt: skip
        assert all(sorted(order) == list(range(count)) for order in orders)
        assert len(orders) == 4 or count < 7
    order = [Order(1000, 0, 0).at(place) for place in range(1000)]
    stayed = sum(abs(number - place) < 100 for place, number in enumerate(order))
    assert 100 < stayed < 300, "190 are expected in a random order"
    assert steps_of(2, 9, 4) == 5
    assert steps_of(0.1, 9, 4) == 1
    assert [steps_of(2, 9, 4, drawn) for drawn in (1, 16, 18, 30)] == [5, 1, 0, 0]


def prepared(folder: Path, *, length: int = 32) -> Sequences:
    """Return the prepared sequences of `d.jsonl`, which is created if it is missing."""
    file = folder / "d.jsonl"
    if not file.exists():
        write_jsonl(file, chats(50))
    tokenizer = make_tokenizer(folder / "t")
    recipe = Recipe(text_column="", loss_on="completions", length=length, padding=0)
    preparation = Preparation(Rows.of([file], "", "--data", ("train",)), tokenizer, recipe, folder / "data")
    return prepare(preparation, lambda word: [word], writes=True, report=lambda text: None)


def test_ranks_draw_disjoint_parts_of_same_sequence_order(tmp_path: Path) -> None:
    """Batches may start anywhere and may cross the end of an epoch."""
    source = prepared(tmp_path)

    def drawn(
        step: int, rank: int = 0, world_size: int = 1, start: tuple[int, int] = (0, 0)
    ) -> dict[str, torch.Tensor]:
        batches = Drawn(source, sequences=4, seed=1, rank=rank, world_size=world_size)
        batches.start(*start)
        return batches.at(step)

    for step in range(2 * len(source) // 4):
        full = drawn(step)
        halves = [drawn(step, rank, 2) for rank in range(2)]
        for name, value in full.items():
            assert torch.equal(value, torch.cat([half[name] for half in halves]))
            assert torch.equal(value, drawn(0, start=(0, 4 * step))[name])
    rows = torch.cat([drawn(step)["input_ids"] for step in range(len(source))])[: 4 * len(source)]
    for epoch in range(4):
        part = rows[epoch * len(source) : (epoch + 1) * len(source)]
        assert len(set(map(tuple, part.tolist()))) == len(set(map(tuple, rows.tolist()))), "each sequence once"


def test_packed_samples_do_not_attend_to_each_other(tmp_path: Path) -> None:
    """The logits equal those of each sample alone."""
    model = make_model(tmp_path / "m").eval()
    batch = prepared(tmp_path, length=128).rows([0, 1, 2])
    with torch.no_grad():
        together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        for row in range(3):
            starts = [*(batch["position_ids"][row] == 0).nonzero().flatten().tolist(), 128]
            assert len(starts) > 2
            for first, last in pairwise(starts):
                alone = model(input_ids=batch["input_ids"][row : row + 1, first:last]).logits[0]
                assert torch.allclose(together[row, first:last], alone, atol=1e-5)


def test_prepared_data_are_reused_until_inputs_change(tmp_path: Path) -> None:
    """A damaged file is rejected."""
    first = prepared(tmp_path)
    (file,) = (tmp_path / "data").glob("*.arrow")
    before = file.stat().st_mtime_ns
    assert prepared(tmp_path).facts == first.facts
    assert file.stat().st_mtime_ns == before, "the file was not rewritten"
    assert prepared(tmp_path, length=48).facts.content != first.facts.content
    write_jsonl(tmp_path / "d.jsonl", chats(51))
    assert prepared(tmp_path).facts.rows == 51
    assert len([*(tmp_path / "data").iterdir()]) == 2 * 3
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ConfigError, match="is corrupt; remove it"):
        Sequences(file)


def test_preparation_error_on_rank_0_is_raised_on_other_ranks(tmp_path: Path) -> None:
    words = iter([["going on", "done"], ["ConfigError: there is no column", "done"]])
    recipe = Recipe(text_column="", loss_on="all", length=32, padding=0)
    file = write_jsonl(tmp_path / "d.jsonl", chats(1))
    preparation = Preparation(Rows.of([file], "", "--data", ("train",)), make_tokenizer(tmp_path), recipe, tmp_path)
    with pytest.raises(ConfigError, match="failed on rank 0: ConfigError: there is no column") as caught:
        prepare(preparation, lambda word: next(words), writes=False, report=lambda text: None)
    assert caught.value.told_elsewhere
    assert not list(tmp_path.glob("*.arrow"))


def test_memory_does_not_grow_with_dataset_size(tmp_path: Path) -> None:
    """Preparing and reading ten times as many rows use about the same memory."""
    preparing, reading, sequences = [], [], []
    prepared(tmp_path)  # imports and one-time caches
    for rows in (300, 3000):
        write_jsonl(tmp_path / "d.jsonl", texts(rows))
        tracemalloc.start()
        try:
            found = prepared(tmp_path)
            preparing.append(tracemalloc.get_traced_memory()[1] + pyarrow.total_allocated_bytes())
            tracemalloc.reset_peak()
            batches = Drawn(found, sequences=4, seed=0, rank=0, world_size=1)
            for step in range(20):
                batches.at(step)
            reading.append(tracemalloc.get_traced_memory()[1] + pyarrow.total_allocated_bytes())
        finally:
            tracemalloc.stop()
        sequences.append(len(found))
    assert sequences[1] > 9 * sequences[0]
    assert preparing[1] < 1.3 * preparing[0], preparing
    assert reading[1] < 1.3 * reading[0], reading
