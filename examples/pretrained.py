"""Fine-tune pretrained weights, and export a folder for `from_pretrained`.

    python examples/pretrained.py FOLDER [--model NAME] [--out FOLDER]

FOLDER is a new folder on an NVMe drive. Without --model, a tiny model is created in it first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import infinity

STEPS = 3


def make_weights(folder: Path) -> None:
    """Save a tiny model with `save_pretrained`, in place of a download."""
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="causal language model: a folder or a Hub id")
    parser.add_argument("--out", type=Path, help="folder for the export (default: FOLDER/exported)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    pages, out = options.folder / "pages", options.out or options.folder / "exported"
    if (name := options.model) is None:
        make_weights(name := options.folder / "weights")

    # Only the config is read here. `offload` streams the weights, so they are never in memory as a whole. The layers of
    # any transformers model are found and sharded, with bf16 as compute dtype. docs/how-to/training-loop.md lists the
    # other options.
    model = infinity.from_pretrained(name, auto_class=AutoModelForCausalLM)
    optimizer = infinity.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        {"storage": {"paths": [str(pages)]}, "memory": {"host_bytes": "8MiB"}},  # use more for a real model
    )  # raises one error that lists all missing, unexpected and mismatched tensors
    device = infinity.mesh().device_type
    with optimizer:
        for step in range(STEPS):
            batch = torch.randint(model.config.vocab_size, (2, 32), device=device)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss:.3f}")
        optimizer.save_checkpoint()

    # Export the checkpoint without building the model in memory. In a shell: infinity export PAGES --out OUT
    subprocess.run([sys.executable, "-m", "infinity_tools", "export", str(pages), "--out", str(out)], check=True)
    trained = AutoModelForCausalLM.from_pretrained(out)
    print(f"{out} has {trained.num_parameters()} parameters")


if __name__ == "__main__":
    main()
