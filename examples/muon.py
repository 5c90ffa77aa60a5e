"""Train with two optimizers: Muon for the matrices of the layers, AdamW for embedding, head and norms.

    python examples/muon.py FOLDER [--steps N]

FOLDER is on an NVMe drive, and is created if necessary. With `torchrun --nproc-per-node 2`, every matrix is sharded
over the ranks and gathered for its update.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity

CONFIG = LlamaConfig(
    vocab_size=1024, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    mesh = infinity.mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    # Create both optimizers and their schedules as for training in memory.
    matrices = [param for param in model.model.layers.parameters() if param.ndim == 2]
    chosen = set(matrices)
    rest = [param for param in model.parameters() if param not in chosen]
    muon = torch.optim.Muon(matrices, lr=2e-3, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=3e-3, fused=True)
    schedules = [CosineAnnealingLR(muon, T_max=100), LinearLR(adamw, start_factor=0.25, total_iters=4)]

    # `offload` returns one optimizer for both. It has all their parameter groups, and its step updates with each of
    # them.
    optimizer = infinity.offload(
        model,
        [muon, adamw],
        {"storage": {"paths": [str(options.folder)]}, "memory": {"host_bytes": "16MiB"}},
    )
    with optimizer:
        for step in range(options.steps):
            first = torch.randint(CONFIG.vocab_size, (8, 1), generator=torch.Generator().manual_seed(step))
            batch = ((first + torch.arange(64)) % CONFIG.vocab_size).to(mesh.device_type)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for schedule in schedules:
                schedule.step()
            print(f"step {step + 1}: loss {loss:.3f}, Muon at {schedules[0].get_last_lr()[0]:.2e}")
        optimizer.save_checkpoint(extra={"schedules": [schedule.state_dict() for schedule in schedules]})
        print(f"checkpointed step {optimizer.steps}")


if __name__ == "__main__":
    main()
