"""DPO of tiny models with TRL: in memory with FSDP2, and with the training state on NVMe."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from support.trainers import VOCABULARY, Outcome, as_torchrun, build, outcome_of, settings, with_adapters

WORDS = [f"w{number}" for number in range(VOCABULARY - 2)]
_FIRST = {"prompt": 10, "chosen": 40, "rejected": 70}


def tokenizer() -> Any:
    """Return a tokenizer with a small vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["<pad>", "<eos>", *WORDS])}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def arguments(out: Path, **given: Any) -> dict[str, Any]:
    """Return the arguments of a `DPOTrainer`, other than the models."""
    from datasets import Dataset
    from trl import DPOConfig

    columns = {name: [f"w{first + row} w{first + 1} " for row in range(16)] for name, first in _FIRST.items()}
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    rows = Dataset.from_dict(columns)
    return {
        "args": DPOConfig(str(out), **(defaults | given)),
        "train_dataset": rows,
        "eval_dataset": rows.select(range(4)),
        "processing_class": tokenizer(),
    }


def trained(folder: Path, kind: str, given: dict[str, Any], adapters: bool = False) -> Outcome:
    """Return the outcome of a training on this rank.

    Args:
        folder: folder of the run.
        kind: ``memory`` for `DPOTrainer` with FSDP2 in memory, ``attach`` for the same trainer on NVMe, or ``command``
            for the trainer of `infinity train`, which has no reference model.
        given: fields of `DPOConfig`.
        adapters: whether the model is a frozen one with peft adapters.
    """
    from trl import DPOTrainer

    from infinity.integrations.transformers import attach
    from infinity_tools.train.preferences import PreferenceTrainer

    several = dist.is_initialized() and dist.get_world_size() > 1
    with as_torchrun() if several else nullcontext():
        model = with_adapters() if adapters else build()
        named = arguments(folder / "out", **given)
        if kind == "command":
            trainer: Any = PreferenceTrainer(model, **named)
        else:
            trainer = DPOTrainer(model, ref_model=build("plain"), **named)
        if kind == "memory":
            trainer.is_distributed_loading_by_transformers = (
                True  # the model is sharded; without this, DDP would wrap it
            )
        else:
            folder.mkdir(parents=True, exist_ok=True)  # the Trainer creates it on rank 0 only
            attach(trainer, settings(folder / "nvme"))
        if kind == "command":
            trainer.compute_references(folder / "out", resumed=False)
        trainer.train()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # FSDP2 keeps the root gathered after an evaluation
        outcome = outcome_of(trainer)
        if kind != "memory":
            trainer.optimizer.optimizer.close()  # `trainer.end()` would end the process group of the tests
        return outcome


def stopping(step: int) -> Any:
    """Return a callback that ends training after a step."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step >= step

    return Stop()
