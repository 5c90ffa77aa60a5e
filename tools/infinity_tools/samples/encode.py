"""From a row to tokens, and which of them are trained: text, prompt and completion, or a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.errors import ConfigError

_CHATS = ("messages", "conversations")
_PROMPT, _COMPLETION = "prompt", "completion"
_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT (`from` and `value` instead of `role` and `content`) by those of chat templates."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_Row = Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """A row as tokens."""

    tokens: Sequence[int]
    """At least one."""
    trained: Sequence[bool]
    """By token: whether it is one that the model is to learn to say."""


@dataclass(frozen=True)
class Columns:
    """What of a row is trained on."""

    kind: str
    """`text`, `completion` or `chat`."""
    name: str
    """The column of text or chat; that of the prompt for `completion`."""

    @classmethod
    def of(cls, row: _Row, text_column: str, option: str) -> Columns:
        """Return what is trained on, by the first row: the column that is named, else the one that its name tells.

        Raises:
            ConfigError: there is no such column, or none or several that it could be.
        """
        listed = f"columns: {', '.join(row)}"
        if text_column:
            if text_column not in row:
                raise ConfigError(f"--text-column {text_column!r} is not a column of {option}; {listed}")
            return cls("text" if isinstance(row[text_column], str) else "chat", text_column)
        if chat := next((name for name in _CHATS if isinstance(row.get(name), list)), None):
            return cls("chat", chat)
        if _PROMPT in row and _COMPLETION in row:
            return cls("completion", _PROMPT)
        texts = [name for name, value in row.items() if isinstance(value, str)]
        if "text" in texts or len(texts) == 1:
            return cls("text", "text" if "text" in texts else texts[0])
        raise ConfigError(
            f"{option} has neither a messages column nor prompt and completion, and "
            f"{'several text columns' if texts else 'no text column'}; select one with --text-column; {listed}"
        )


class Encoder:
    """Makes samples of rows with a tokenizer of transformers."""

    def __init__(self, tokenizer: Any, columns: Columns, loss_on: str, option: str) -> None:
        """Check that the tokenizer can do it.

        Args:
            tokenizer: of transformers.
            columns: what of a row is trained on.
            loss_on: `completions` or `all`.
            option: that names the data, for messages.

        Raises:
            ConfigError: a chat, and it has no chat template; no token for the end, and there is text to be ended.
        """
        self._tokenizer, self._columns, self._option = tokenizer, columns, option
        self._all = loss_on == "all" or columns.kind == "text"
        self._marked = bool(_GENERATION.search(_template(tokenizer)))  # whether the template says what is answered
        self._seen = 0  # rows before the batch that is being encoded
        if columns.kind == "chat":
            if not _template(tokenizer):
                raise ConfigError(
                    f"{option} has chats in {columns.name!r}, but the tokenizer has no chat template; pass a "
                    "--tokenizer folder with one, or select a text column with --text-column"
                )
            if not self._all and not tokenizer.is_fast:
                raise ConfigError(
                    f"{option}: loss on assistant messages requires a fast tokenizer (tokenizer.json); pass one, or "
                    "--loss-on all"
                )
        elif tokenizer.eos_token_id is None:
            raise ConfigError(
                f"{option}: the tokenizer has no eos_token, which is appended to every text; set it in its "
                "tokenizer_config.json"
            )

    @property
    def one_row(self) -> bool:
        """Whether samples are parts of one long text, which may be cut anywhere."""
        return self._columns.kind == "text"

    def encode(self, rows: Sequence[_Row]) -> Iterator[Sample | None]:
        """Return the samples of some rows, in order; None for a row with nothing to train on.

        Raises:
            ConfigError: a row has no text where one must be, or the template refuses it; its number is named.
        """
        kind = self._columns.kind
        if kind == "text":
            encoded = self._ids([self._text(row, number, self._columns.name) for number, row in enumerate(rows)])
            samples = [self._ended(ids) for ids in encoded]
            yield from (Sample(ids, [True] * len(ids)) if ids else None for ids in samples)
        else:
            of = self._chat if kind == "chat" else self._completion
            for number, row in enumerate(rows):
                sample = of(row, number)
                yield sample if any(sample.trained) else None
        self._seen += len(rows)

    def _completion(self, row: _Row, number: int) -> Sample:
        """Encode a prompt and what is to follow it, both texts or both messages."""
        if isinstance(row.get(_PROMPT), list):
            messages = [*self._messages(row, number, _PROMPT), *self._messages(row, number, _COMPLETION)]
            before = len(row[_PROMPT])
            text = self._render(messages, row, number)
            prompt = self._render(messages[:before], row, number, answer_follows=True)
            return self._spans(text, [(len(_common(prompt, text)), len(text))])
        texts = [self._text(row, number, name) for name in (_PROMPT, _COMPLETION)]
        prompt_ids, ids = self._ids([texts[0], "".join(texts)])
        # Where they part: the tokenizer may have put an end to the prompt, and tokens may merge across the border.
        start = len(_common(prompt_ids, ids))
        ids = self._ended(ids)
        return Sample(ids, [self._all or place >= start for place in range(len(ids))])

    def _chat(self, row: _Row, number: int) -> Sample:
        messages = self._messages(row, number, self._columns.name)
        if self._marked and not self._all:
            try:
                found = self._tokenizer.apply_chat_template(
                    messages, tools=_tools(row), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                )
            except Exception as error:  # whatever the code of a template raises
                raise self._refused(number, error) from error
            return Sample(found["input_ids"], [bool(mark) for mark in found["assistant_masks"]])
        text = self._render(messages, row, number)
        return self._spans(text, [(0, len(text))] if self._all else self._answers(text, messages, row, number))

    def _answers(self, text: str, messages: list[Any], row: _Row, number: int) -> list[tuple[int, int]]:
        """Return from where to where an assistant speaks: what a message adds to the chat before it."""
        spans = []
        for place, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(messages[:place], row, number, answer_follows=True) if place else ""
            until = self._render(messages[: place + 1], row, number)
            if not (text.startswith(before) and text.startswith(until)):
                raise ConfigError(
                    f"{self._option}, row {self._seen + number}: the chat template renders a message differently once "
                    "others follow, so assistant messages cannot be located; mark them in the template with "
                    "{% generation %} … {% endgeneration %}, or pass --loss-on all"
                )
            spans.append((len(before), len(until)))
        return spans

    def _spans(self, text: str, spans: Sequence[tuple[int, int]]) -> Sample:
        """Encode a rendered chat; trained are the tokens within the spans of its characters."""
        whole = self._all or not spans
        if whole and not self._tokenizer.is_fast:
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            return Sample(ids, [self._all] * len(ids))
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        trained = [
            self._all or any(first <= begin and end <= last and begin < last for first, last in spans)
            for begin, end in found["offset_mapping"]
        ]
        return Sample(found["input_ids"], trained)

    def _render(self, messages: list[Any], row: _Row, number: int, *, answer_follows: bool = False) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=_tools(row), tokenize=False, add_generation_prompt=answer_follows
                )
            )
        except Exception as error:  # whatever the code of a template raises
            raise self._refused(number, error) from error

    def _messages(self, row: _Row, number: int, column: str) -> list[dict[str, Any]]:
        value = row.get(column)
        if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
            raise ConfigError(
                f"{self._option}, row {self._seen + number}: {column!r} is not a list of messages with role and "
                f"content: {_brief(value)}"
            )
        return [_message(message) for message in value]

    def _text(self, row: _Row, number: int, column: str) -> str:
        value = row.get(column)
        if not isinstance(value, str):
            raise ConfigError(f"{self._option}, row {self._seen + number}: {column!r} is not text: {_brief(value)}")
        return value

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return list(self._tokenizer(texts)["input_ids"]) if texts else []

    def _ended(self, ids: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return ids if not ids or ids[-1] == end else [*ids, end]

    def _refused(self, number: int, error: Exception) -> ConfigError:
        reason = " ".join(str(error).split())
        return ConfigError(f"{self._option}, row {self._seen + number}: the chat template rejects it: {reason}")


def _template(tokenizer: Any) -> str:
    """Return the chat template, that of several which is taken for a chat; empty where there is none."""
    found = tokenizer.chat_template
    if isinstance(found, dict):
        found = found.get("default")
    return found or ""


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with role and content; without what an Arrow table fills up: keys of other messages."""
    if "role" not in message and "from" in message:
        return {"role": _ROLES.get(message["from"], message["from"]), "content": message.get("value")}
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _tools(row: _Row) -> Any:
    found = row.get("tools")
    return json.loads(found) if isinstance(found, str) and found else found or None


def _common(first: Any, second: Any) -> Any:
    """Return what two texts, or two lists of tokens, begin with alike."""
    length = next((place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    return first[: min(len(first), len(second)) if length is None else length]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
