"""What a Trainer offers and cannot do with its state on NVMe, each with the reason; said before training starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infinity.errors import ConfigError, UnsupportedError

_WHOLE = ("lomo", "adalomo", "galore", "apollo", "adamw_torch_4bit", "adamw_torch_8bit")
"""Beginnings of names of optimizers that are refused; others are tried out when they are offloaded."""
REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "deepspeed",
        lambda trainer: trainer.is_deepspeed_enabled,
        "DeepSpeed would shard the model and keep its state itself; leave it out (infinity migrate turns its "
        "configuration into settings)",
    ),
    (
        "fsdp",
        lambda trainer: trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        "the Trainer would shard a second time what is sharded already; leave fsdp= and ACCELERATE_USE_FSDP out",
    ),
    (
        "parallelism_config",
        lambda trainer: trainer.args.parallelism_config is not None,
        "it shards model or inputs on a mesh of its own; shard with fully_shard",
    ),
    (
        "several GPUs in one process",
        lambda trainer: trainer.args.n_gpu > 1,
        "DataParallel copies the whole model to each of them; start one process per GPU with torchrun",
    ),
    (
        "model_init",
        lambda trainer: trainer.model_init is not None,
        "train() would build another model, whole and in memory, in place of the sharded one; pass model= "
        "(hyperparameter_search needs model_init: start one process per trial)",
    ),
    (
        "fp16",
        lambda trainer: trainer.args.fp16,
        "Accelerate's optimizer, which would skip steps whose gradients overflow, asks for the whole state in memory; "
        "use bf16",
    ),
    (
        "fp16_full_eval, bf16_full_eval",
        lambda trainer: trainer.args.fp16_full_eval or trainer.args.bf16_full_eval,
        "they convert all weights in place, which are on NVMe; evaluation computes in the dtype of training",
    ),
    (
        "auto_find_batch_size",
        lambda trainer: trainer.args.auto_find_batch_size,
        "it begins again in the middle of a step that has run out of memory; set per_device_train_batch_size "
        "(infinity plan says what fits)",
    ),
    (
        "optim",
        lambda trainer: trainer.optimizer is None and str(trainer.args.optim.value).startswith(_WHOLE),
        "it updates in backward by itself, works on whole matrices, or keeps its state in tensors of its own kind, but "
        'here pages are updated one by one; use adamw_torch_fused, with state.format = "8bit" for less state',
    ),
    (
        "enable_jit_checkpoint",
        lambda trainer: trainer.args.enable_jit_checkpoint,
        "it saves between backward and step, when updates may have begun already; set save_steps",
    ),
    (
        "push_to_hub",
        lambda trainer: trainer.args.push_to_hub and trainer.args.hub_strategy != "end",
        'checkpoints have no weights to push, but name a checkpoint; set hub_strategy="end", or call '
        "trainer.push_to_hub() after training",
    ),
    (
        "save_only_model with load_best_model_at_end",
        lambda trainer: trainer.args.save_only_model and trainer.args.load_best_model_at_end,
        "the best weights come back from a checkpoint, and save_only_model makes none; leave it out",
    ),
)
"""What is refused: its name, how it is seen on a trainer, the reason and what to do instead."""


def check(trainer: Any) -> None:
    """Check that a trainer asks for nothing that cannot work.

    Raises:
        UnsupportedError: it does; all of it is listed.
        ConfigError: it would keep checkpoints without a limit.
    """
    found = [f"{name}: {reason}" for name, asked, reason in REFUSED if asked(trainer)]
    if found:
        raise UnsupportedError(f"the Trainer asks for what cannot work with its state on NVMe: {'; '.join(found)}")
    args = trainer.args
    if checkpoints(args) and (args.save_total_limit or 0) < 1:
        raise ConfigError(
            f"save_total_limit = {args.save_total_limit} keeps every checkpoint; each takes the size of the state on "
            'NVMe, for which space is reserved at the start: set save_total_limit, or save_strategy="no"'
        )


def checkpoints(args: Any) -> bool:
    """Whether a Trainer with these arguments writes checkpoints to resume from."""
    return args.save_strategy != "no" and not args.save_only_model


def retained(args: Any) -> int:
    """Return how many checkpoints a Trainer with these arguments keeps: the last and the best one always."""
    return max(int(args.save_total_limit), 2 if args.metric_for_best_model is not None else 1)
