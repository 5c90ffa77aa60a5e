"""The default batch for a pretrained model, which `infinity plan` recommends for this machine."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from infinity.config import Config, runtime_dir
from infinity.errors import InfinityError
from infinity.estimate.machine import ACCELERATORS
from infinity.models.building import one_line
from infinity.ranks import Ranks
from infinity_tools.train import recipe as recipes
from infinity_tools.train.recipe import Recipe

_LEAST_STEPS = 16
"""Minimum number of steps per epoch, because a few steps would hardly train the model."""
_SLOW = "0.5e9/0.5e9"
"""Bandwidth that every NVMe drive exceeds. If it suffices for the smallest batch, drives need not be measured."""
_LENGTH = 1024
"""Assumed length of a sequence if `max_length` is not set."""
_EDGE, _REACHED = 1024, 0.5
"""Size of the matrices that are multiplied to measure a processor, and the fraction of its speed in training."""

_log = logging.getLogger("infinity")


def recommended(recipe: Recipe, settings: Config, args: Any, dtype: str, data: Any, ranks: Ranks) -> dict[str, int]:
    """Return `per_device_train_batch_size` and, if needed and not given, `gradient_accumulation_steps`.

    Args:
        recipe: Recipe of the run.
        settings: Settings of the run, with its folders.
        args: Arguments of the trainer.
        dtype: Compute dtype, bf16 or fp32.
        data: `datasets.Dataset` to train on, in TRL's columns.
        ranks: Ranks of the run.
    """
    from infinity_tools.plan.recommended_batch import LEAST

    most = max(LEAST, _sequences(data, args) // (_LEAST_STEPS * ranks.world_size))
    why = ""
    try:
        size, parts = _planned(recipe, settings, args, dtype, ranks, most)
    except Exception as error:  # for example, the layers of the model cannot be identified
        why, size, parts = one_line(error), LEAST, 1
    total = min(size * parts, most)
    given = recipe.get("gradient_accumulation_steps")
    size = max(1, min(size, total // given if given else total))
    accumulated = {"gradient_accumulation_steps": total // size} if given is None and total > size else {}
    if why:
        _log.warning("the batch could not be planned (%s), so --per_device_train_batch_size is %d", why, size)
    return {"per_device_train_batch_size": size, **accumulated}


def _planned(recipe: Recipe, settings: Config, args: Any, dtype: str, ranks: Ranks, most: int) -> tuple[int, int]:
    """Return the sequences per micro-batch and the micro-batches that are recommended. `most`: limit of the product.

    A quantized base model is planned without quantization. It moves fewer bytes, so the batch also hides storage.
    """
    from infinity_tools.plan.inputs import Asked, plan_of
    from infinity_tools.plan.plan_drives import drives_at
    from infinity_tools.plan.recommended_batch import LEAST, fits, recommended_batch

    length = (args.max_length or _LENGTH) * (2 if recipe["method"] == "dpo" else 1)  # chosen and rejected answers
    asked = Asked(
        model=recipe["model"],
        lora=_lora(recipes.peft_of(recipe)),
        dtype=dtype,
        batch_tokens=LEAST * length * ranks.world_size,
        seq=length,
        activation_checkpointing=args.gradient_checkpointing,
        clip=bool(args.max_grad_norm),
        ranks=ranks.local_world_size,
        nodes=ranks.world_size // ranks.local_world_size,
        nvme_bandwidth=_SLOW,
        settings=recipes.settings_of(recipes.with_settings({}, settings)),
        **_hardware(dtype),
    )
    found, _ = plan_of(asked)
    size, parts = recommended_batch(found)
    if min(size * parts, most) > LEAST or (found.hidden_from_tokens is None and not found.moves_nothing):
        folders = dict.fromkeys(_existing(Path(path).absolute()) for path in settings.storage.paths)
        try:
            drives, _ = drives_at(list(folders), 0, runtime_dir(settings.telemetry))
        except (InfinityError, OSError) as error:
            _log.warning("the drives cannot be measured: %s; the batch is planned for slow ones", error)
        else:
            found = replace(found, machine=replace(found.machine, drives=drives))
            size, parts = recommended_batch(found)
    if not fits(found, size, parts):
        _log.warning("not even one sequence of %d tokens is expected to fit in memory; lower --max_length", length)
    return size, parts


def _existing(folder: Path) -> Path:
    """Return a folder, or its nearest parent that exists, which is on the same drive."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def _lora(fields: dict[str, Any]) -> str | None:
    """Return the value of `infinity plan --lora` for fields of `LoraConfig`."""
    if not fields:
        return None
    targets = fields.get("target_modules")
    return f"r={fields.get('r', 8)}" + (f",targets={'+'.join(targets)}" if isinstance(targets, list) else "")


def _hardware(dtype: str) -> dict[str, Any]:
    """Return the options of `infinity plan` that describe this processor or GPU."""
    if not torch.cuda.is_available():
        return {"tflops": _measured(dtype)}
    words = re.findall("[a-z0-9]+", torch.cuda.get_device_name().lower())
    name = next((one for one in (*words, *map("".join, pairwise(words))) if one in ACCELERATORS), None)
    known = {"gpu": name} if name is not None else {"link": "25e9"}
    speed = {} if name is not None and dtype == "bf16" else {"tflops": _measured(dtype)}
    return {"gpu_memory": str(torch.cuda.get_device_properties().total_memory), **known, **speed}


def _measured(dtype: str) -> float:
    """Return the TFLOP/s that training achieves, from a matrix product that takes a few hundredths of a second."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8 * _EDGE if device == "cuda" else _EDGE
    matrix = torch.ones(size, size, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32, device=device)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the result
        seconds.append(time.perf_counter() - began)
    return _REACHED * 2 * size**3 / min(seconds) / 1e12


def _sequences(data: Any, args: Any) -> int:
    """Return the approximate number of sequences in a dataset, for packed data with 4 bytes per token."""
    if not getattr(args, "packing", False):
        return len(data)
    packed = int(data.data.nbytes) // (4 * (args.max_length or _LENGTH))
    return packed if args.packing_strategy == "wrapped" else min(len(data), packed)
