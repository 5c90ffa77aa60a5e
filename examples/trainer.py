"""Train with the Trainer of transformers, with parameters and optimizer state on NVMe.

    python examples/trainer.py FOLDER [--steps N]
    torchrun --nproc-per-node 2 examples/trainer.py FOLDER

FOLDER is on an NVMe drive. A second call resumes from the last checkpoint, trains up to N steps in total, and exports.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import infinity
from infinity.integrations.transformers import attach


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--steps", type=int, default=4, help="total number of steps, including those before a checkpoint"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    out = options.folder / "out"

    # Build a sharded model without memory. To fine-tune, use the config of the weights, and attach(…, weights=folder).
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4
    )
    mesh, policy = infinity.mesh(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.hf_device_map = {"": mesh.device_type}  # tells the Trainer not to move the model

    tokens = torch.randint(config.vocab_size, (64, 32), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(out),
            max_steps=options.steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,  # layer by layer, so weights are read twice per step
            learning_rate=1e-3,
            save_steps=2,
            save_total_limit=1,  # each checkpoint takes the size of the state on NVMe
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=mesh.device_type == "cpu",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )
    attach(trainer, {"storage": {"paths": [str(options.folder / "pages")]}, "memory": {"host_bytes": "8MiB"}})
    trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")))
    trainer.save_model(str(options.folder / "exported"))  # for from_pretrained; uses the memory of one file
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {entry['loss']:.3f}")
    trainer.end()


if __name__ == "__main__":
    main()
