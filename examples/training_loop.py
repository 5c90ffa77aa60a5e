"""Train a model of transformers with its state on NVMe; call it again and it goes on.

    python examples/training_loop.py FOLDER [--steps N]

FOLDER is on an NVMe drive; it is made if it is missing. Each call trains N steps more.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LinearLR
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity

SEQUENCES, TOKENS = 8, 64  # of a batch
SLICES = 4  # a batch is run in slices; activations are those of two sequences
WARM_UP = 4  # steps in which the learning rate rises
CONFIG = LlamaConfig(
    vocab_size=1024, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4
)


def batch_of(step: int) -> torch.Tensor:
    """Return the tokens of one step, which depend on the step alone, so that a run can go on; your data goes here."""
    first = torch.randint(CONFIG.vocab_size, (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(TOKENS)) % CONFIG.vocab_size  # a text that counts: the next token is one more


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    # On the meta device a model takes no memory: values are made FSDP module by FSDP module, straight onto the drive.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)

    # One FSDP module per layer, and the rest as one: what is gathered together. Weights in bf16, master weights in
    # fp32.
    mesh = infinity.mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    # Accumulation: each layer runs all slices before the next one starts, so weights are read as for one slice.
    infinity.micro_batches(model, SLICES)

    # Optimizer and scheduler are made as ever; `offload` returns the optimizer to train with.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    scheduler = LinearLR(optimizer, start_factor=0.25, total_iters=WARM_UP)
    checkpointed = options.folder.exists() and any(options.folder.iterdir())
    optimizer = infinity.offload(
        model,
        optimizer,
        {
            "storage": {"paths": [str(options.folder)]},
            "memory": {"host_bytes": "8MiB"},  # the host cache: all the host memory that pages get
            "run": {"resume": "latest" if checkpointed else ""},
        },
    )

    # Leaving the `with` block closes the run: files, memory and the lock of the folder. It does not checkpoint.
    with optimizer:
        if optimizer.resumed_extra:
            scheduler.load_state_dict(optimizer.resumed_extra["scheduler"])
            print(f"going on after step {optimizer.steps}")
        for step in range(optimizer.steps, optimizer.steps + options.steps):
            batch = batch_of(step).to(mesh.device_type)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            norm = optimizer.clip_grad_norm_(1.0)  # exact, over all ranks
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            moved = optimizer.records[-1].read_bytes + optimizer.records[-1].written_bytes
            print(f"step {step + 1}: loss {loss:.3f}, norm {norm:.2f}, {moved / 1e6:.1f} MB moved")
        # Weights, moments, step counts and random state are durable after this; so is plain data of your own.
        optimizer.save_checkpoint(extra={"scheduler": scheduler.state_dict()})
        print(f"checkpointed step {optimizer.steps}")


if __name__ == "__main__":
    main()
