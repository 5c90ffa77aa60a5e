"""Train a LightningModule with the strategy of infinity.

    python examples/lightning_loop.py /nvme0/run --saves SAVES                          # trains, saves checkpoints
    python examples/lightning_loop.py /nvme0/run --saves SAVES --resume SAVES/last.ckpt  # resumes from one

SAVES is a folder for checkpoints.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from infinity.integrations.lightning import PagedStrategy

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


class Llama(LightningModule):
    """A module that applies `fully_shard` to itself, as for `ModelParallelStrategy`."""

    def configure_model(self) -> None:
        """Build the model on the meta device. Parameters are initialized, or loaded, when they are written to NVMe."""
        if hasattr(self, "net"):
            return
        with torch.device("meta"):
            self.net = AutoModelForCausalLM.from_config(CONFIG)
        mesh, policy = self.device_mesh["data_parallel"], MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in self.net.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.net, mesh=mesh, mp_policy=policy)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss: torch.Tensor = self.net(input_ids=batch, labels=batch).loss
        self.print(f"step {self.global_step + 1}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> Any:
        """Return an optimizer and a learning-rate schedule."""
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    """Train 4 steps, or 4 more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("nvme", help="folder on an NVMe drive")
    parser.add_argument("--saves", required=True, help="folder for checkpoints")
    parser.add_argument("--resume", help="checkpoint to resume from")
    options = parser.parse_args()

    torch.manual_seed(0)
    strategy = PagedStrategy({"storage": {"paths": [options.nvme]}, "memory": {"host_bytes": "8MiB"}})
    trainer = Trainer(
        strategy=strategy,
        accelerator="auto",
        max_epochs=2 if options.resume else 1,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(options.saves, filename="last", enable_version_counter=False)],
        default_root_dir=options.saves,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(torch.randint(CONFIG.vocab_size, (8, 64)), batch_size=2)
    trainer.fit(Llama(), loader, ckpt_path=options.resume)
    trainer.print(f"saved step {strategy.paged.steps}")
    strategy.paged.close()


if __name__ == "__main__":
    main()
