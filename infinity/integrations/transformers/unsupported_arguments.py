"""Trainer features that are not supported with the training state on NVMe, checked before training starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infinity.errors import ConfigError, UnsupportedError

_WHOLE = ("lomo", "adalomo", "galore", "apollo", "adamw_torch_4bit", "adamw_torch_8bit")
"""Prefixes of unsupported optimizer names. Other optimizers are tested when they are offloaded."""
UNSUPPORTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "deepspeed",
        lambda trainer: trainer.is_deepspeed_enabled,
        "DeepSpeed would shard the model and store the state itself; remove it (infinity migrate converts its "
        "configuration to infinity settings)",
    ),
    (
        "fsdp",
        lambda trainer: trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        "the Trainer would shard the model again; remove fsdp= and ACCELERATE_USE_FSDP",
    ),
    (
        "parallelism_config",
        lambda trainer: trainer.args.parallelism_config is not None,
        "it shards the model or inputs on its own mesh; use fully_shard instead",
    ),
    (
        "several GPUs in one process",
        lambda trainer: trainer.args.n_gpu > 1,
        "DataParallel copies the whole model to each GPU; start one process per GPU with torchrun",
    ),
    (
        "model_init",
        lambda trainer: trainer.model_init is not None,
        "train() would build a new model in memory instead of using the sharded one; pass model= "
        "(instead of hyperparameter_search, which requires model_init, start one process per trial)",
    ),
    (
        "fp16",
        lambda trainer: trainer.args.fp16,
        "Accelerate's optimizer, which skips steps whose gradients overflow, needs the whole state in memory; use bf16",
    ),
    (
        "fp16_full_eval, bf16_full_eval",
        lambda trainer: trainer.args.fp16_full_eval or trainer.args.bf16_full_eval,
        "they convert all weights in place, but weights are on NVMe; remove them: evaluation uses the training dtype",
    ),
    (
        "auto_find_batch_size",
        lambda trainer: trainer.args.auto_find_batch_size,
        "it restarts training in the middle of a step that ran out of memory; set per_device_train_batch_size "
        "(infinity plan estimates whether a size fits)",
    ),
    (
        "optim",
        lambda trainer: trainer.optimizer is None and str(trainer.args.optim.value).startswith(_WHOLE),
        "it runs updates in backward, needs full matrices, or has its own tensor type, so it cannot update page by "
        'page; use adamw_torch_fused, and state.format = "8bit" for a smaller state',
    ),
    (
        "enable_jit_checkpoint",
        lambda trainer: trainer.args.enable_jit_checkpoint,
        "it saves between backward and step, when updates may already have started; set save_steps",
    ),
    (
        "push_to_hub",
        lambda trainer: trainer.args.push_to_hub and trainer.args.hub_strategy != "end",
        'checkpoint folders contain no weights to push; set hub_strategy="end", or call '
        "trainer.push_to_hub() after training",
    ),
    (
        "save_only_model with load_best_model_at_end",
        lambda trainer: trainer.args.save_only_model and trainer.args.load_best_model_at_end,
        "the best weights are restored from a checkpoint, but save_only_model does not save one; remove it",
    ),
)
"""Unsupported features, each with its name, a function that detects it in a trainer, and the reason and alternative."""


def check(trainer: Any) -> None:
    """Check that a trainer does not use unsupported features.

    Raises:
        UnsupportedError: if it does. The message lists all of them.
        ConfigError: if it would keep an unlimited number of checkpoints.
    """
    found = [f"{name}: {reason}" for name, asked, reason in UNSUPPORTED if asked(trainer)]
    if found:
        raise UnsupportedError(
            f"the Trainer uses features that are not supported with its state on NVMe: {'; '.join(found)}"
        )
    args = trainer.args
    if checkpoints(args) and (args.save_total_limit or 0) < 1:
        raise ConfigError(
            f"save_total_limit = {args.save_total_limit} keeps every checkpoint, and space for each must be reserved "
            'on NVMe when the run starts; set save_total_limit to 1 or more, or set save_strategy="no"'
        )


def checkpoints(args: Any) -> bool:
    """Return whether a Trainer with these arguments writes checkpoints to resume from."""
    return args.save_strategy != "no" and not args.save_only_model


def retained(args: Any) -> int:
    """Return how many checkpoints a Trainer with these arguments keeps. It always keeps the last and the best."""
    return max(int(args.save_total_limit), 2 if args.metric_for_best_model is not None else 1)
