"""Train LoRA adapters on a frozen base model that is larger than memory, and load the result with peft.

    python examples/lora.py FOLDER [--weights FOLDER] [--out FOLDER]

FOLDER is a new folder on an NVMe drive. Without --weights, a tiny base model is created in it first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import infinity

STEPS = 3


def make_weights(folder: Path) -> None:
    """Save a tiny base model with `save_pretrained`, in place of a download."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", type=Path, help="folder of the base model, as for from_pretrained")
    parser.add_argument("--out", type=Path, help="folder for the adapter (default: FOLDER/adapter)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    pages, out = options.folder / "pages", options.out or options.folder / "adapter"
    if (weights := options.weights) is None:
        make_weights(weights := options.folder / "base")

    # The base keeps the dtype of its checkpoint, 2 bytes per parameter on the drive. The adapters are fp32.
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(weights), dtype=torch.bfloat16)
        model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = infinity.mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = infinity.offload(
        model,
        torch.optim.AdamW(trained, lr=1e-3, fused=True),
        {"storage": {"paths": [str(pages)]}, "memory": {"host_bytes": "8MiB"}},
        weights=weights,  # for the base only; adapters are initialized as by peft
    )
    with optimizer:
        for step in range(STEPS):
            tokens = torch.randint(base.config.vocab_size, (2, 64), device=mesh.device_type)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.4f}")
        optimizer.save_checkpoint()  # writes only the adapters, because the base has not changed
        # Writes adapter_model.safetensors and adapter_config.json. `infinity export` writes the same files.
        model.save_pretrained(out)

    # Load the adapter on any machine, with peft alone.
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(weights), out)
    print(f"{out}: {sum(p.numel() for name, p in loaded.named_parameters() if 'lora' in name)} adapter parameters")


if __name__ == "__main__":
    main()
