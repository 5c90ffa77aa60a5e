"""Train with Accelerate, using `prepare` from infinity in place of the accelerator's method.

    python examples/accelerate_loop.py /nvme0/run --checkpoint CHECKPOINT          # trains, saves its state
    python examples/accelerate_loop.py /nvme0/run --checkpoint CHECKPOINT --resume # resumes from there

For several GPUs start it with `accelerate launch`, without an FSDP configuration or with FSDP2.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from infinity.integrations.accelerate import prepare

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


def main() -> None:
    """Train 4 steps of 2 micro-batches each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("nvme", help="folder on an NVMe drive")
    parser.add_argument("--checkpoint", required=True, help="folder for the state of Accelerate")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint")
    options = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=2, mixed_precision="bf16", step_scheduler_with_optimizer=False
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)  # allocates no memory
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(torch.randint(CONFIG.vocab_size, (16, 64)), batch_size=2)
    model, optimizer, loader, scheduler = prepare(
        accelerator,
        model,
        optimizer,
        loader,
        scheduler,
        config={"storage": {"paths": [options.nvme]}, "memory": {"host_bytes": "8MiB"}},
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap"),
        resume_from=options.checkpoint if options.resume else None,
    )
    if options.resume:
        accelerator.load_state(options.checkpoint)
        accelerator.print(f"resumed after step {optimizer.optimizer.steps}")

    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                accelerator.print(f"step {optimizer.optimizer.steps}: loss {loss.item():.4f}")
    accelerator.save_state(options.checkpoint)  # writes a checkpoint without copying weights or moments
    accelerator.print(f"saved step {optimizer.optimizer.steps}")
    optimizer.optimizer.close()


if __name__ == "__main__":
    main()
