"""Begin with pretrained weights, train, and export a folder for `from_pretrained`.

    python examples/pretrained.py FOLDER [--model NAME] [--out FOLDER]

FOLDER is on an NVMe drive and new. Without --model a tiny model is made and saved there first.
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
    """Save a tiny model as `save_pretrained` does: what you would have downloaded."""
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="a causal language model: a folder, or its id in the Hub")
    parser.add_argument("--out", type=Path, help="where to export to; by default FOLDER/exported")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    pages, out = options.folder / "pages", options.out or options.folder / "exported"
    if (name := options.model) is None:
        make_weights(name := options.folder / "weights")

    # Only the config is read here; the weights are streamed by `offload`, never in memory as a whole. Layers of any
    # model of transformers are found and sharded, computing in bf16; docs/how-to/guide.md has what else may be said.
    model = infinity.from_pretrained(name, auto_class=AutoModelForCausalLM)
    optimizer = infinity.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        {"storage": {"paths": [str(pages)]}, "memory": {"host_bytes": "8MiB"}},  # for a real model: as much as you have
    )  # tensors that are missing, unexpected or of another shape are refused in one list
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

    # What is exported is a checkpoint; no model is built in memory for it. In a shell: infinity export PAGES --out OUT
    subprocess.run([sys.executable, "-m", "infinity_tools", "export", str(pages), "--out", str(out)], check=True)
    trained = AutoModelForCausalLM.from_pretrained(out)
    print(f"{out} has {trained.num_parameters()} parameters")


if __name__ == "__main__":
    main()
