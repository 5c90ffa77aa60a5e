"""Arguments of the trainer: defaults of `infinity train`, and checks that TRL makes too late or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.models.building import one_line
from infinity.optional_dependencies import needs
from infinity_tools.presets import ModelSource
from infinity_tools.train import recipe as recipes
from infinity_tools.train.recipe import Recipe

_DEFAULTS = {
    "logging_steps": 1, "save_strategy": "steps", "save_total_limit": 1, "report_to": "none",
    "logging_nan_inf_filter": False,
}  # fmt: skip
"""Fields of TRL's configuration whose defaults differ from TRL's."""
_FROM_SCRATCH = {
    "max_steps": 20, "max_length": 256, "per_device_train_batch_size": 2, "learning_rate": 3e-4, "weight_decay": 0.1,
    "warmup_steps": 4, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "max_grad_norm": 0.0, "gradient_checkpointing": False,
}  # fmt: skip
"""Further defaults for a model without weights. Without clipping, updates run in backward."""
_FINE_TUNING = {"num_train_epochs": 1.0, "learning_rate": 2e-5}
"""Further defaults for a pretrained model, in addition to the batch."""


def check_recipe(recipe: Recipe) -> None:
    """Check for errors that the Trainer reports only during training, or never.

    Raises:
        ConfigError: if values contradict each other.
        MissingPackageError: if torchao is not installed, but the recipe contains `quantize`.
    """
    evaluates = bool(recipe.get("eval_data") or recipe.get("eval_split")) and recipe.get("eval_strategy") != "no"
    if recipe.get("early_stopping_patience") and not evaluates:
        raise ConfigError("--early_stopping_patience requires evaluations; pass --eval_data, and no --eval_strategy no")
    if recipe.get("push_to_hub"):
        raise ConfigError(
            "--push_to_hub is not supported; run `infinity export`, and upload its folder with `hf upload`"
        )
    if recipe.get("quantize") and not recipes.peft_of(recipe):
        raise ConfigError(
            f"--quantize {recipe['quantize']} freezes the weights; also pass --peft.r 16 to train LoRA adapters"
        )
    if recipe.get("quantize"):
        with needs("qlora", f"--quantize {recipe['quantize']}"):
            import torchao  # noqa: F401


def defaults_for(recipe: Recipe, data: Mapping[str, Any], *, pretrained: bool, evaluates: bool) -> dict[str, Any]:
    """Return the fields of TRL's configuration whose defaults differ from TRL's in this run.

    Args:
        recipe: Recipe of the run.
        data: Defaults that suit the data.
        pretrained: Whether the model has weights.
        evaluates: Whether there is data to evaluate on.
    """
    defaults = {**_DEFAULTS, **(_FINE_TUNING if pretrained else _FROM_SCRATCH), **data}
    if evaluates:
        defaults["eval_strategy"] = recipe.get("eval_strategy", "steps" if "eval_steps" in recipe else "epoch")
    if "num_train_epochs" in recipe:
        defaults.pop("max_steps", None)
    if recipe.get("lr_scheduler_type", defaults.get("lr_scheduler_type")) != defaults.get("lr_scheduler_type"):
        defaults.pop("lr_scheduler_kwargs", None)
    if recipe.get("early_stopping_patience"):
        defaults["load_best_model_at_end"] = True
    if recipe.get("load_best_model_at_end", defaults.get("load_best_model_at_end")):
        if evaluates:
            defaults["save_strategy"] = defaults["eval_strategy"]
        if "eval_steps" in recipe:
            defaults["save_steps"] = recipe["eval_steps"]
        defaults["save_total_limit"] = 2  # with 1, the Trainer keeps only the best checkpoint at the end
    return defaults


def arguments_of(recipe: Recipe, defaults: Mapping[str, Any], source: ModelSource) -> Any:
    """Return the arguments of the trainer.

    Raises:
        ConfigError: if they contradict each other, the model, or the update schedule.
    """
    values = {**defaults, **recipes.arguments_of(recipe)}
    if recipe["method"] == "sft":
        values["chat_template_path"] = None  # see `load_tokenizer`
    # FSDP2's mixed precision policy computes in bf16, so autocast is not needed.
    values |= {"bf16": False, "disable_tqdm": True, "use_cpu": values.get("use_cpu", not torch.cuda.is_available())}
    try:
        args = recipes.config_class(recipe["method"])(**values)
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise ConfigError(one_line(error)) from error
    if args.max_grad_norm and recipe.get("offload.update.schedule") == "in_backward":
        raise ConfigError(
            f'update.schedule = "in_backward" updates before the global norm is known, but --max_grad_norm '
            f'{args.max_grad_norm:g} needs it; pass --max_grad_norm 0, or use "in_forward"'
        )
    if args.max_length is not None and args.max_length < 2:
        raise ConfigError(f"--max_length {args.max_length} must be at least 2")
    longest = getattr(source.config, "max_position_embeddings", None)
    if longest is not None and args.max_length is not None and args.max_length > longest:
        raise ConfigError(
            f"--max_length {args.max_length} exceeds the {longest} positions of the model (max_position_embeddings)"
        )
    return args


def complete(recipe: Recipe, defaults: Mapping[str, Any], args: Any, *, bf16: bool) -> None:
    """Add the values to a recipe that differ from the defaults of TRL, and remove secrets."""
    kept = {**defaults, "bf16": bf16}
    if args.max_steps <= 0:
        kept["num_train_epochs"] = args.num_train_epochs
    for key in recipes.SECRET:
        recipe.pop(key, None)
    recipe |= {name: value for name, value in kept.items() if name not in recipe}
