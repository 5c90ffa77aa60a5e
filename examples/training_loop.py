"""Train a transformers model with its state on NVMe. A second call resumes training.

    python examples/training_loop.py FOLDER [--steps N]

FOLDER is on an NVMe drive, and is created if necessary. Each call trains N more steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LinearLR
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity

SEQUENCES, TOKENS = 8, 64  # per batch
SLICES = 4  # micro-batches per step, so activations of two sequences exist at a time
WARM_UP = 4  # steps of learning-rate warmup
CONFIG = LlamaConfig(
    vocab_size=1024, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4
)


def batch_of(step: int) -> torch.Tensor:
    """Return the tokens of a step, which depend only on the step so that runs can be resumed. Replace it with your
    data.
    """
    first = torch.randint(CONFIG.vocab_size, (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(TOKENS)) % CONFIG.vocab_size  # each token is the previous one plus 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    # A model on the meta device takes no memory. `offload` initializes one FSDP module at a time, directly on the
    # drive.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)

    # Every layer is an FSDP module, and the root holds the rest. Weights are bf16, master weights fp32.
    mesh = infinity.mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    # Gradient accumulation: each layer runs all micro-batches before the next layer starts, so weights are read only
    # once for all of them in each pass.
    infinity.micro_batches(model, SLICES)

    # Create optimizer and scheduler as usual. `offload` returns the optimizer to train with.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    scheduler = LinearLR(optimizer, start_factor=0.25, total_iters=WARM_UP)
    checkpointed = options.folder.exists() and any(options.folder.iterdir())
    optimizer = infinity.offload(
        model,
        optimizer,
        {
            "storage": {"paths": [str(options.folder)]},
            "memory": {"host_bytes": "8MiB"},  # size of the host cache, the only host memory for pages
            "run": {"resume": "latest" if checkpointed else ""},
        },
    )

    # Leaving the block closes the run: its files, its memory and the lock of the folder. It does not write a
    # checkpoint.
    with optimizer:
        if optimizer.resumed_extra:
            scheduler.load_state_dict(optimizer.resumed_extra["scheduler"])
            print(f"resumed after step {optimizer.steps}")
        for step in range(optimizer.steps, optimizer.steps + options.steps):
            batch = batch_of(step).to(mesh.device_type)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            norm = optimizer.clip_grad_norm_(1.0)  # exact norm over all ranks
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            moved = optimizer.records[-1].read_bytes + optimizer.records[-1].written_bytes
            print(f"step {step + 1}: loss {loss:.3f}, norm {norm:.2f}, {moved / 1e6:.1f} MB moved")
        # The checkpoint makes weights, moments, step counts, the RNG state and `extra` durable.
        optimizer.save_checkpoint(extra={"scheduler": scheduler.state_dict()})
        print(f"checkpointed step {optimizer.steps}")


if __name__ == "__main__":
    main()
