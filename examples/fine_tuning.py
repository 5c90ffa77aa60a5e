"""Fine-tune with TRL's SFTTrainer or DPOTrainer, with parameters and optimizer state on NVMe.

    python examples/fine_tuning.py FOLDER [--method dpo] [--model NAME]
    torchrun --nproc-per-node 2 examples/fine_tuning.py FOLDER

FOLDER is on an NVMe drive. Without --model, a tiny chat model is created in it first.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import infinity
from infinity.integrations.transformers import attach

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def make_model(folder: Path) -> None:
    """Save a tiny model whose tokens are bytes, in place of a download."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate([*alphabet, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)
    made.save_pretrained(folder)


def answer(question: int, right: bool = True) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": f"It is {question * 2 if right else question}."}]


def make_data(method: str) -> Dataset:
    """Return questions with answers, and with wrong answers for DPO. Replace it with `load_dataset`."""
    rows: list[dict[str, Any]] = []
    for number in range(64):
        prompt = [{"role": "user", "content": f"What is 2 times {number}?"}]
        if method == "sft":
            rows.append({"prompt": prompt, "completion": answer(number)})
        else:
            rows.append({"prompt": prompt, "chosen": answer(number), "rejected": answer(number + 1, right=False)})
    return Dataset.from_list(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--method", choices=("sft", "dpo"), default="sft")
    parser.add_argument("--model", help="folder or Hub id")
    options = parser.parse_args()
    mesh = infinity.mesh()
    if (name := options.model) is None:
        name = str(options.folder / "model")
        if mesh.get_rank() == 0:
            make_model(options.folder / "model")
        dist.barrier()

    dtype = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32  # many processors only emulate bf16
    model = infinity.from_pretrained(name, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    common: dict[str, Any] = {
        "output_dir": str(options.folder / "out"),
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,  # FSDP2's mixed precision computes in bf16
        "use_cpu": mesh.device_type == "cpu",
    }
    data, tokenizer = make_data(options.method), AutoTokenizer.from_pretrained(name)
    trainer: Any
    if options.method == "sft":
        trainer = SFTTrainer(
            model,
            # Padded to one length, so that micro-batches run layer by layer and weights are read twice per step.
            SFTConfig(**common, max_length=128, pad_to_multiple_of=128, gradient_accumulation_steps=2),
            train_dataset=data,
            processing_class=tokenizer,
        )
    else:
        # The reference model stays in memory. `infinity train --method dpo` needs none.
        reference = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        trainer = DPOTrainer(model, reference, DPOConfig(**common), train_dataset=data, processing_class=tokenizer)
    settings = {"storage": {"paths": [str(options.folder / "pages")]}, "memory": {"host_bytes": "8MiB"}}
    attach(trainer, settings)
    trainer.train()
    trainer.save_model(str(options.folder / "trained"))  # for from_pretrained, with tokenizer and chat template
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {entry['loss']:.4f}")
    trainer.end()


if __name__ == "__main__":
    main()
