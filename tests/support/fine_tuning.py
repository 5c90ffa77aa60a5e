"""A small model with a tokenizer, and datasets, for tests of fine-tuning."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WORDS = [
    "the", "a", "sea", "ship", "sails", "far", "home", "wind", "and", "storm", "calm", "star", "night", "day",
    "new",
]  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}<|end|>{% endgeneration %}{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def sentence(rng: random.Random, most: int = 12) -> str:
    """Return a sequence of random words."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, most)))


def chats(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield rows with `messages`."""
    rng = random.Random(seed)
    for _ in range(count):
        messages = [{"role": "system", "content": "be brief"}] if rng.random() < 0.5 else []
        for _ in range(rng.randint(1, 2)):
            messages += [{"role": "user", "content": sentence(rng)}, {"role": "assistant", "content": sentence(rng)}]
        yield {"messages": messages}


def texts(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield rows with `text`."""
    rng = random.Random(seed)
    for _ in range(count):
        yield {"text": sentence(rng, 30)}


def write_jsonl(file: Path, rows: Sequence[dict[str, Any]] | Iterator[dict[str, Any]]) -> Path:
    """Write a file of JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def make_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Any:
    """Train a small byte-level BPE tokenizer, save it in transformers format, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|eos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 50, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<|pad|>")
    made.chat_template = template
    made.save_pretrained(folder)
    return made


def make_model(
    folder: Path, *, template: str | None = TEMPLATE, vocabulary: int = 320, layers: int = 2, dtype: str = "float32"
) -> Any:
    """Save a small Llama with random weights and a tokenizer; return the model."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=vocabulary, max_position_embeddings=2048, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    make_tokenizer(folder, template)
    return model
