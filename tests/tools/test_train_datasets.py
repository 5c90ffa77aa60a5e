"""Tests of the datasets and tokenizers of `infinity train`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pytest
from datasets import Dataset, DatasetDict

import infinity
from infinity.errors import ConfigError
from infinity_tools.presets import find_model
from infinity_tools.train.columns import in_columns_of_trl
from infinity_tools.train.datasets import Data, check_prepared, load, load_tokenizer
from support.fine_tuning import MARKED, chats, make_model, make_tokenizer, texts


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `datasets` an empty cache and no network, in a working directory of the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    infinity.mesh()


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    """Return tokenizers with and without a chat template."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {chat: make_tokenizer(folder / str(chat), MARKED if chat else None) for chat in (True, False)}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHAT = [message("user", "a sea"), message("assistant", "the ship")]
ASKED, ANSWERED = [message("user", "a sea")], [message("assistant", "the ship")]
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
ALPACA += "### Instruction:\na sea\n\n### Response:\n"
PAIRED = ALPACA.replace("task.", "task, paired with an input that provides further context.").replace(
    "a sea\n\n", "a\n\n### Input:\nsea\n\n"
)
SYSTEM, REJECTED = message("system", "be"), [message("assistant", "no")]
SHARED = [{"from": "human", "value": "a sea"}, {"from": "gpt", "value": "the ship"}]
PAIR = {"prompt": ASKED, "completion": ANSWERED}
CHOICE = {"prompt": ASKED, "chosen": ANSWERED, "rejected": REJECTED}
SHARED_CHOICE = {"chosen": SHARED[1], "rejected": {"from": "gpt", "value": "no"}}
Rows = dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]
"""Rows by shape, with the row that TRL receives if the tokenizer has a chat template, and if it has none."""
SFT: Rows = {
    "text": ({"text": "a sea", "id": "7"}, {"text": "a sea"}, {"text": "a sea"}),
    "only text column": ({"story": "a sea", "id": 7}, {"text": "a sea"}, {"text": "a sea"}),
    "chat": ({"messages": CHAT, "tools": "[]"}, {"messages": CHAT, "tools": "[]"}, {}),
    "ShareGPT": ({"conversations": SHARED, "id": "7"}, {"messages": CHAT}, {}),
    "ShareGPT with a system message": ({"conversations": SHARED, "system": "be"}, {"messages": [SYSTEM, *CHAT]}, {}),
    "chat with a system message": ({"messages": CHAT, "system": "be"}, {"messages": [SYSTEM, *CHAT]}, {}),
    "prompt and completion": ({"prompt": "a sea", "completion": "the ship"},) * 3,
    "Alpaca": (
        {"instruction": "a sea", "input": "", "output": "the ship"}, PAIR, {"prompt": ALPACA, "completion": "the ship"}
    ),
    "Dolly": (
        {"instruction": "a", "context": "sea", "response": "the ship", "category": "qa"},
        {"prompt": [message("user", "a\n\nsea")], "completion": ANSWERED},
        {"prompt": PAIRED, "completion": "the ship"},
    ),
    "prompt with input": (
        {"prompt": "a", "input": "sea", "output": "the ship"},
        {"prompt": [message("user", "a\n\nsea")], "completion": ANSWERED},
        {"prompt": PAIRED, "completion": "the ship"},
    ),
    "question and answer": (
        {"question": "a sea", "answer": "the ship"}, PAIR, {"prompt": "a sea\n", "completion": "the ship"}
    ),
    "query and response": (
        {"query": "a sea", "response": "the ship", "source": "x"}, PAIR,
        {"prompt": "a sea\n", "completion": "the ship"},
    ),
}  # fmt: skip
DPO: Rows = {
    "texts": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "score": 1},
        *[{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2,
    ),
    "question": (
        {"question": "a sea", "chosen": "the ship", "rejected": "no"}, CHOICE,
        {"prompt": "a sea", "chosen": "the ship", "rejected": "no"},
    ),
    "question with a system message": (
        {"system": "be", "question": "a sea", "chosen": "the ship", "rejected": "no"},
        {**CHOICE, "prompt": [SYSTEM, *ASKED]}, {"prompt": "be\n\na sea", "chosen": "the ship", "rejected": "no"},
    ),
    "ShareGPT": (
        {"conversations": SHARED[:1], "system": "be", **SHARED_CHOICE}, {**CHOICE, "prompt": [SYSTEM, *ASKED]}, {}
    ),
    "prompt with ShareGPT's answers": ({"prompt": "a sea", **SHARED_CHOICE}, CHOICE, {}),
    "ShareGPT's question with texts": (
        {"conversations": SHARED[:1], "chosen": "the ship", "rejected": "no"}, CHOICE, {}
    ),
    "conversations with a system message": (
        {"chosen": CHAT, "rejected": CHAT, "system": "be"},
        {"chosen": [SYSTEM, *CHAT], "rejected": [SYSTEM, *CHAT]}, {},
    ),
    "conversations": (
        {"prompt": "a sea", "chosen": CHAT, "rejected": [*ASKED, *REJECTED]},
        {"chosen": CHAT, "rejected": [*ASKED, *REJECTED]}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("method", "shape"), [("sft", shape) for shape in SFT] + [("dpo", shape) for shape in DPO])
def test_columns_are_recognized(method: str, shape: str, tokenizers: dict[bool, Any]) -> None:
    """Questions become messages if the tokenizer has a chat template. Without one, chats are an error."""
    row, *expected = {"sft": SFT, "dpo": DPO}[method][shape]
    for chat, wanted in zip((True, False), expected, strict=True):
        rows = Dataset.from_list([row, row])
        if wanted:
            assert in_columns_of_trl(rows, method, {}, tokenizers[chat], "--data")[0].to_list() == [wanted] * 2
        else:
            with pytest.raises(ConfigError, match="--chat_template_path"):
                in_columns_of_trl(rows, method, {}, tokenizers[chat], "--data")


def test_columns_can_be_mapped(tokenizers: dict[bool, Any]) -> None:
    rows = Dataset.from_list([{"q": "a", "a": "b", "text": "c"}])
    found, kind = in_columns_of_trl(rows, "sft", {"prompt": "q", "completion": "a"}, tokenizers[True], "--data")
    assert (found.to_list(), kind) == ([{"prompt": "a", "completion": "b"}], "prompts and completions")


@pytest.mark.parametrize(
    ("row", "method", "columns", "message"),
    [
        ({"a": "x", "b": "y"}, "sft", {}, r"columns a, b, .*--columns prompt=question"),
        ({"text": "x"}, "dpo", {}, r"columns text, .*--columns prompt=question,chosen=good"),
        ({"text": "x"}, "sft", {"text": "txt"}, r"no column 'txt'; columns: text"),
        ({"prompt": "x", "completion": None}, "sft", {}, r"'completion' is empty in 1 of 1 rows"),
        ({"messages": []}, "sft", {}, r"'messages' is empty in 1 of 1 rows"),
    ],
)
def test_unknown_columns_are_rejected(
    row: dict[str, Any], method: str, columns: dict[str, str], message: str, tokenizers: dict[bool, Any]
) -> None:
    """The message lists the columns and shows how to map them."""
    with pytest.raises(ConfigError, match=message):
        in_columns_of_trl(Dataset.from_list([row]), method, columns, tokenizers[True], "--data")


def loaded(tokenizer: Any, *names: object, model: str = "tiny", method: str = "sft", **options: Any) -> Data:
    return load({"data": [*map(str, names)], "method": method, **options}, tokenizer, find_model(model))


FORMATS: dict[str, Any] = {
    "d.jsonl": lambda made, path: made.to_json(path),
    "d.jsonl.gz": lambda made, path: made.to_json(path, compression="gzip"),
    "d.json": lambda made, path: path.write_text(json.dumps(made.to_list())),
    "d.csv": lambda made, path: made.to_csv(path, index=False),
    "d.tsv": lambda made, path: made.to_csv(path, index=False, sep="\t"),
    "d.parquet": lambda made, path: made.to_parquet(path),
    "saved": lambda made, path: made.save_to_disk(path),
    "saved splits": lambda made, path: DatasetDict(train=made, test=made.select(range(3))).save_to_disk(path),
    "files by split": lambda made, path: [
        path.mkdir(),
        made.to_parquet(path / "train-00000-of-00001.parquet"),
        made.select(range(3)).to_parquet(path / "test-00000-of-00001.parquet"),
        (path / "README.md").write_text("about it"),
    ],
}


@pytest.mark.parametrize("name", FORMATS)
def test_all_formats_load_same_rows(name: str, tmp_path: Path, tokenizers: dict[bool, Any]) -> None:
    """Folders may contain a split to train on and another one to evaluate on."""
    made = Dataset.from_list(list(texts(20)))
    FORMATS[name](made, tmp_path / name)
    split = {"eval_split": "test"} if "split" in name else {}
    found = loaded(tokenizers[True], tmp_path / name, **split)
    assert found.train.to_list() == made.to_list()
    assert found.evaluation is None if not split else found.evaluation.to_list() == made.to_list()[:3]
    assert found.said == "data: 20 texts" + ("; 3 to evaluate on" if split else "")


def test_several_datasets_are_concatenated(tmp_path: Path, tokenizers: dict[bool, Any]) -> None:
    made = Dataset.from_list(list(texts(5)))
    made.to_parquet(tmp_path / "a.parquet")
    made.to_json(tmp_path / "b.jsonl")
    found = loaded(tokenizers[True], tmp_path / "a.parquet", tmp_path / "b.jsonl", split="train[:40%]")
    assert found.train.to_list() == made.to_list()[:2] * 2


def test_plain_text_is_split_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a tokenizer reads the bytes, and a folder of source code with a JSON file is plain text."""
    monkeypatch.setattr("infinity_tools.train.datasets._PIECE", 8)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").write_text("héllo\nthere\nend")
    (tmp_path / "code/b.json").write_text("{}")
    (tmp_path / "code/.hidden").write_text("x")
    tokenizer = make_tokenizer(tmp_path / "t")
    assert [row["text"] for row in loaded(tokenizer, tmp_path / "code").train] == ["héllo\nthere\n", "end", "{}"]
    of_bytes = load_tokenizer(None, find_model("tiny"))
    found = loaded(of_bytes, tmp_path / "code")
    assert [of_bytes.decode(row["input_ids"]) for row in found.train] == ["héllo\nthere\n\0", "end\0", "{}\0"]
    assert found.train["labels"] == found.train["input_ids"]
    assert found.defaults == {"packing": True, "packing_strategy": "wrapped"}
    (tmp_path / "code/a.py").write_text("changed")
    assert of_bytes.decode(loaded(of_bytes, tmp_path / "code").train[0]["input_ids"]) == "changed\0"


def test_default_data_is_the_standard_library() -> None:
    tokenizer = load_tokenizer(None, find_model("tiny"))
    first = tokenizer.decode(loaded(tokenizer).train[0]["input_ids"])
    assert "import" in first
    assert tokenizer.encode(first) == [*first.encode()], "every token is a byte"


def test_defaults_suit_the_examples(tmp_path: Path, tokenizers: dict[bool, Any]) -> None:
    """Chats are packed, and only answers are trained if the chat template marks them."""
    Dataset.from_list(list(chats(5))).to_parquet(tmp_path / "c.parquet")
    found = loaded(tokenizers[True], tmp_path / "c.parquet")
    assert found.defaults == {"packing": True, "assistant_only_loss": True}
    unmarked = make_tokenizer(tmp_path / "unmarked")
    found = loaded(unmarked, tmp_path / "c.parquet")
    assert found.defaults == {"packing": True, "assistant_only_loss": False}
    assert "{% generation %}" in found.said


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["nowhere/at-all"], {}, "'nowhere/at-all' cannot be read as a dataset"),
        (["nowhere.jsonl"], {}, "'nowhere.jsonl' does not exist"),
        (["broken.jsonl"], {}, "'broken.jsonl' cannot be read as a dataset"),
        (["empty.txt"], {}, "no text in .*empty.txt"),
        (["splits"], {}, "has the splits a, b; select one with --split"),
        (["splits"], {"split": "c"}, "has the splits a, b; select one with --split"),
        (["splits"], {"split": "a", "eval_split": "c"}, "has the splits a, b; select one with --eval_split"),
        (["empty.txt", "splits"], {}, "is plain text, but others are datasets"),
    ],
)
def test_unreadable_data_is_rejected(
    names: list[str], options: dict[str, Any], message: str, tokenizers: dict[bool, Any]
) -> None:
    Path("broken.jsonl").write_text("{")
    Path("empty.txt").write_text("")
    made = Dataset.from_list(list(texts(3)))
    DatasetDict(a=made, b=made).save_to_disk("splits")
    with pytest.raises(ConfigError, match=message):
        loaded(tokenizers[True], *names, **options)


def test_tokenizer_is_that_of_the_model_or_the_named_one(tmp_path: Path) -> None:
    """A chat template may come from another tokenizer, or from a file."""
    make_model(tmp_path / "m", template=None)
    model = find_model(str(tmp_path / "m"))
    assert load_tokenizer(None, model).chat_template is None
    make_tokenizer(tmp_path / "t", "template")
    (tmp_path / "file.jinja").write_text("of a file")
    assert load_tokenizer(str(tmp_path / "t"), model).chat_template == "template"
    assert load_tokenizer(None, model, str(tmp_path / "t")).chat_template == "template"
    assert load_tokenizer(None, model, str(tmp_path / "file.jinja")).chat_template == "of a file"
    with pytest.raises(ConfigError, match="vocab_size of --model tiny is only 256"):
        load_tokenizer(str(tmp_path / "t"), find_model("tiny"))
    for file in (tmp_path / "m").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="as --tokenizer"):
        load_tokenizer(None, model)


def prepared(folder: Path, tokenizers: dict[bool, Any]) -> Dataset:
    """Return tokens that `datasets` keeps in its cache, as TRL prepares them."""
    rows = loaded(tokenizers[True], folder / "d.jsonl").train
    return rows.map(lambda row: {"input_ids": [len(word) for word in row["text"].split()] * 2000})


def test_changes_of_prepared_tokens_are_detected(tmp_path: Path, tokenizers: dict[bool, Any]) -> None:
    """One changed byte is enough. Prepared again, the tokens have the same checksum."""
    Dataset.from_list(list(texts(20))).to_json(tmp_path / "d.jsonl")
    found = prepared(tmp_path, tokenizers)
    checksum = check_prepared(found)
    file = Path(found.cache_files[0]["filename"])
    assert check_prepared(prepared(tmp_path, tokenizers)) == checksum
    content = file.read_bytes()
    for damaged in damages(content):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"{file.parent}|{file.name}\..*\.xxh3; remove both"):
            check_prepared(prepared(tmp_path, tokenizers))
    file.unlink()
    assert check_prepared(prepared(tmp_path, tokenizers)) == checksum
    assert check_prepared(found.select(range(19))) != checksum


def damages(content: bytes) -> Iterator[bytes]:
    """Return content with one flipped bit in the tokens, and with 16 KiB of zeros."""
    at = len(content) // 2
    yield content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    yield content[:at] + bytes(16384) + content[at + 16384 :]
