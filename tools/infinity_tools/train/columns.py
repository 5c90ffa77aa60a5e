"""Shapes of datasets that `infinity train` recognizes by their columns, and their conversion to TRL's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from infinity.errors import ConfigError

_Row = Mapping[str, Any]
_Convert = Callable[..., dict[str, Any]]

KINDS = {"text": "texts", "messages": "chats", "prompt": "prompts and completions", "chosen": "preferences"}
"""Kind of examples by TRL's column."""
_EXTRA = ("tools", "chat_template_kwargs")
"""Columns that TRL passes to the chat template."""
_QUESTIONS = ("prompt", "instruction", "question", "query", "input")
_ANSWERS = ("completion", "output", "response", "answer")
_CONTEXTS = ("input", "context")
"""Columns of texts that belong to a question, which may be empty."""
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant"}
"""Roles of ShareGPT that chat templates name differently."""
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)
"""Prompt of Alpaca, for tokenizers without a chat template."""


def in_columns_of_trl(
    rows: Any, method: str, columns: Mapping[str, str], tokenizer: Any, option: str
) -> tuple[Any, str]:
    """Return a dataset in the columns that TRL expects for a method, and the kind of its examples.

    Args:
        rows: `datasets.Dataset`.
        method: ``sft`` or ``dpo``.
        columns: source of each of TRL's columns. Empty: recognized by name.
        tokenizer: With a chat template, questions and answers become messages.
        option: option that selects the dataset, for messages.

    Raises:
        ConfigError: if the columns are not recognized, or contain something else than their names say.
    """
    names = rows.column_names
    if unknown := [source for source in columns.values() if source not in names]:
        raise ConfigError(f"--columns: {option} has no column {unknown[0]!r}; columns: {', '.join(names)}")
    if columns:
        rows = rows.select_columns([*columns.values(), *(name for name in _EXTRA if name in names)])
        rows = rows.rename_columns({source: name for name, source in columns.items() if source != name})
    if "input_ids" in rows.column_names and method == "sft":  # TRL does not tokenize again
        return rows, "texts"
    chosen = _of_preferences(rows) if method == "dpo" else _of_examples(rows)
    if chosen is None:
        wanted = "chosen and rejected" if method == "dpo" else "text, messages, or prompt and completion"
        example = "prompt=question,chosen=good,rejected=bad" if method == "dpo" else "prompt=question,completion=answer"
        raise ConfigError(
            f"{option} has the columns {', '.join(names)}, but --method {method} needs {wanted}; map them, e.g. "
            f"--columns {example}"
        )
    kept, convert = chosen
    for name in kept:
        optional = name == "system" or (name in _CONTEXTS and name != kept[0])
        if (missing := _missing(rows.data.column(name))) and not optional:
            raise ConfigError(f"{option}: column {name!r} is empty in {missing} of {len(rows)} rows; remove them")
    found = rows.select_columns([*kept, *(name for name in _EXTRA if name in rows.column_names)])
    if convert is not None:
        found = found.map(
            convert, remove_columns=kept, fn_kwargs={"chat": bool(tokenizer.chat_template)}, desc="Converting columns"
        )
    kind = next(kind for name, kind in reversed(KINDS.items()) if name in found.column_names)
    if not tokenizer.chat_template and any(isinstance(value, list) for value in found[0].values()):
        raise ConfigError(
            f"{option} contains messages, but the tokenizer has no chat template; pass one as --chat_template_path, "
            "or --tokenizer of a model that has one"
        )
    return found, kind


def _missing(column: Any) -> int:
    """Return the number of rows of an Arrow column without a value, or with an empty list."""
    import pyarrow
    from pyarrow import compute

    if not pyarrow.types.is_list(column.type):
        return int(column.null_count)
    lengths: list[int | None] = compute.list_value_length(column).to_pylist()  # type: ignore[attr-defined]
    return int(column.null_count) + lengths.count(0)


def _of_examples(rows: Any) -> tuple[list[str], _Convert | None] | None:
    """Return the columns to train on and the function that converts a row, if any, or None if none is recognized."""
    first: _Row = rows[0]
    for name in ("messages", "conversations"):
        if isinstance(first.get(name), list):
            message: _Row = next((row[name][0] for row in rows if row[name]), {})
            system = ["system"] if isinstance(first.get("system"), str) else []
            is_chatml = name == "messages" and "from" not in message
            return [name, *system], None if is_chatml and not system else _chat
    if "prompt" in first and "completion" in first:
        return ["prompt", "completion"], None
    if (question := _first(first, _QUESTIONS)) and (answer := _first(first, _ANSWERS)):
        context = [name for name in _CONTEXTS if name in first and name != question]
        instructs = question == "instruction" or context
        return [question, *context, answer], _instruction if instructs else _question
    texts = [name for name, value in first.items() if isinstance(value, str)]
    if "text" in texts:
        return ["text"], None
    return (texts, _text) if len(texts) == 1 else None


def _of_preferences(rows: Any) -> tuple[list[str], _Convert | None] | None:
    first: _Row = rows[0]
    if "chosen" not in first or "rejected" not in first:
        return None
    prompt = _first(first, (*_QUESTIONS, "conversations"))
    if isinstance(first["chosen"], list) and not isinstance(first.get(prompt or ""), list):
        prompt = None  # the conversations contain it, and TRL separates it
    names = [*([prompt] if prompt else []), "chosen", "rejected"]
    system = ["system"] if isinstance(first.get("system"), str) else []
    uniform = len({type(first[name]) for name in names}) == 1 and not isinstance(first["chosen"], dict)
    return [*names, *system], None if prompt in (None, "prompt") and uniform and not system else _preference


def _first(row: _Row, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in row), None)


def _chat(row: _Row, chat: bool) -> dict[str, Any]:
    messages = list(_messages(next(iter(value for value in row.values() if isinstance(value, list)))))
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return {"messages": system + messages}


def _messages(messages: list[_Row]) -> Iterator[dict[str, Any]]:
    """Return messages with role and content. ShareGPT has `from` and `value`."""
    for message in messages:
        if "role" in message and "content" in message:
            yield {**message, "role": _ROLES.get(str(message["role"]), message["role"])}
            continue
        role = message.get("role") or message.get("from")
        content = message["content"] if message.get("content") is not None else message.get("value")
        yield {"role": _ROLES.get(str(role), role), "content": content}


def _instruction(row: _Row, chat: bool) -> dict[str, Any]:
    asked = _first(row, _QUESTIONS) or ""
    instruction = row[asked]
    context = "\n\n".join(row[name] for name in _CONTEXTS if name != asked and row.get(name))
    answer = row[_first(row, _ANSWERS) or ""]
    if chat:
        return _exchange(f"{instruction}\n\n{context}" if context else instruction, answer)
    pairing = ", paired with an input that provides further context" if context else ""
    return {
        "prompt": _ALPACA.format(pairing, instruction, f"### Input:\n{context}\n\n" if context else ""),
        "completion": answer,
    }


def _question(row: _Row, chat: bool) -> dict[str, Any]:
    question, answer = row[_first(row, _QUESTIONS) or ""], row[_first(row, _ANSWERS) or ""]
    return _exchange(question, answer) if chat else {"prompt": f"{question}\n", "completion": answer}


def _exchange(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}], "completion": [{"role": "assistant", "content": answer}]}


def _preference(row: _Row, chat: bool) -> dict[str, Any]:
    asked = _first(row, (*_QUESTIONS, "conversations"))
    found: dict[str, Any] = {"prompt": row[asked]} if asked else {}
    found |= {name: row[name] for name in ("chosen", "rejected")}
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    if len(texts) < len(found) or (chat and asked not in (None, "prompt")):
        for name, text in texts.items():
            found[name] = [{"role": "user" if name == "prompt" else "assistant", "content": text}]
    found = {name: [value] if isinstance(value, dict) else value for name, value in found.items()}  # ShareGPT's answers
    found = {name: list(_messages(value)) if isinstance(value, list) else value for name, value in found.items()}
    if system := row.get("system"):
        for name in ("prompt",) if asked else ("chosen", "rejected"):
            is_chat = isinstance(found[name], list)
            before = [{"role": "system", "content": system}] if is_chat else f"{system}\n\n"
            found[name] = before + found[name]
    return found


def _text(row: _Row, chat: bool) -> dict[str, Any]:
    return {"text": next(value for value in row.values() if isinstance(value, str))}
