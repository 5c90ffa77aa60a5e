"""Training code for a configuration, limited to the lines that change."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from infinity_tools.migrate.key_table import TABLE
from infinity_tools.migrate.optimizers import ADAM, TAKEN, Optimizer
from infinity_tools.migrate.read import AUTO, Found
from infinity_tools.migrate.schedulers import OF_TORCH, SCHEDULERS

_GONE = """\
# Remove: deepspeed.initialize(...)     deepspeed.zero.Init()    engine.backward(loss)
#         engine.step()                 engine.save_checkpoint(...)
# Define: build_model, batches, the name of your layers{yours}
# Start:  {start}
"""
_DEFAULT_POLICY = "MixedPrecisionPolicy(torch.bfloat16, torch.float32)"
"""Policy of `infinity.from_pretrained` if none is passed."""
_GONE_FROM_TRAINER = """\
# Remove: deepspeed= and bf16= from your TrainingArguments
# Define: MODEL (a folder or an id on the Hub), arguments (of TrainingArguments), data{yours}
# Start:  {start}
"""


def ranks_of(found: Found) -> int | None:
    """Return the number of ranks that the batch sizes of a configuration determine, or None if they do not."""
    whole, *parts = (
        found[name]
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )  # fmt: skip
    if not all(isinstance(size, int) and size > 0 for size in (whole, *parts)):
        return None
    each = math.prod(parts)
    return int(whole // each) if whole % each == 0 else None


def launcher_of(found: Found) -> str:
    """Return the command that starts the ranks of one node, with a remark."""
    ranks = ranks_of(found)
    if ranks is None:
        return "torchrun --nproc-per-node N train.py (N ranks per node, as with DeepSpeed)"
    if ranks == 1:
        return "python train.py"
    return f"torchrun --nproc-per-node {ranks} train.py, or fewer per node on several nodes ({ranks} in total)"


def ranks_sentence(found: Found) -> str:
    """Return a sentence about the ranks for which a settings file is meant."""
    ranks = ranks_of(found)
    if ranks is None:
        return "For any number of ranks. Sizes are per rank; the ranks of a node share the paths."
    number = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"For {number}, from the batch sizes. Sizes are per rank; the ranks of a node share the paths."


def trainer_code_of(found: Found, settings_file: str) -> str | None:
    """Return code that keeps transformers' Trainer, as valid Python, or None if no value is "auto".

    The optimizer and the scheduler of the configuration take precedence over those of the TrainingArguments, as with
    DeepSpeed. All other values equal the TrainingArguments, which the Trainer checks.
    """
    if all(entry.value != AUTO for entry in found.entries):
        return None
    optimizer = [*_optimizer(found)] if found["optimizer.type"] or found["scheduler.type"] else []
    scheduler = [*_scheduler(found)]
    given = f", optimizers=(optimizer, {'scheduler' if scheduler else None})" if optimizer else ""
    bf16 = found.precision()
    policy = _policies(found)[0 if bf16 else 1]
    chosen = f", mp_policy={policy}" if policy != _DEFAULT_POLICY else ""
    dtype = {AUTO: "bf16; fp32: mp_policy=MixedPrecisionPolicy()"}.get(bf16, "bf16" if bf16 else "fp32")
    text = "\n".join(
        [
            f"model = infinity.from_pretrained(MODEL{chosen})  # not AutoModel…; computes in {dtype}",
            "args = TrainingArguments(**arguments, save_total_limit=1)  # checkpoints that are kept; required",
            *optimizer,
            *scheduler,
            f"trainer = Trainer(model, args, train_dataset=data{given})",
            f"attach(trainer, {settings_file!r})  # weights=FOLDER: the weights of a DeepSpeed checkpoint",
            "trainer.train()",
        ]
    )
    header = _GONE_FROM_TRAINER.format(
        yours=_to_define(text, "total_steps", "build_optimizer"), start=launcher_of(found)
    )
    return header + "\n".join(_imports(found, text)) + f"\n\n{text}\n"


def _to_define(text: str, *names: str) -> str:
    shown = {"args.": "args (TrainingArguments)"}
    return "".join(f", {shown.get(name, name)}" for name in names if name in text)


def code_of(found: Found, settings_file: str) -> str:
    """Return a training loop as valid Python. Names that it does not define must be defined by the user."""
    body = [*_model(found), "", *_optimizer(found), *_scheduler(found)]
    body += [
        f"optimizer = infinity.offload(model, optimizer, {settings_file!r})  # weights=FOLDER: pretrained weights",
        "",
        *_loop(found),
    ]
    text = "\n".join(body) + "\n"
    yours = _to_define(text, "args.", "total_steps", "build_optimizer")
    return _GONE.format(yours=yours, start=launcher_of(found)) + "\n".join(_imports(found, text)) + "\n\n" + text


def _imports(found: Found, text: str) -> Iterator[str]:
    code = re.sub("#.*", "", text)
    if "math." in code:
        yield from ("import math", "")
    if "torch." in code:
        yield "import torch"
    if names := [name for name in ("MixedPrecisionPolicy", "fully_shard") if name in code]:
        yield f"from torch.distributed.fsdp import {', '.join(names)}"
    if "LambdaLR" in code:
        yield "from torch.optim.lr_scheduler import LambdaLR"
    taken = taken_of(found)
    if taken is not None and taken.imports:
        yield taken.imports
    if "Trainer(" in code:
        yield "from transformers import Trainer, TrainingArguments"
    yield from ("", "import infinity")
    if "attach(" in code:
        yield "from infinity.integrations.transformers import attach"


def value_of(found: Found, name: str) -> str | None:
    """Return the value of a key as code, or None if it is not set."""
    value = found[name]
    if value is None:
        return None
    if value == AUTO:
        return TABLE.keys[name].auto or None
    return repr(tuple(value) if isinstance(value, list) and "betas" in name else value)


def _policies(found: Found) -> tuple[str, str]:
    """Return the mixed precision policies in bf16 and in fp32, as code."""
    reduced = found["communication_data_type"]
    if isinstance(reduced, str) and reduced.lower() in ("bf16", "bfp16"):
        return (
            "MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)",
            "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)",
        )
    return _DEFAULT_POLICY, "MixedPrecisionPolicy()"


def _model(found: Found) -> Iterator[str]:
    yield "mesh = infinity.mesh()"
    bf16, (policy, fp32) = found.precision(), _policies(found)
    if bf16 == AUTO:
        yield f"policy = {policy} if args.bf16 else {fp32}"
    else:
        yield f"policy = {policy}" if bf16 else f"policy = {fp32}  # trains in fp32"
    yield 'with torch.device("meta"):  # in place of zero.Init; allocates no memory'
    yield "    model = build_model()"
    yield "for layer in model.model.layers:"
    yield "    fully_shard(layer, mesh=mesh, mp_policy=policy)"
    yield "fully_shard(model, mesh=mesh, mp_policy=policy)"
    if (count := micro_batches(found)) is not None:
        yield f"infinity.micro_batches(model, {count})  # gradient_accumulation_steps"


def micro_batches(found: Found) -> str | None:
    """Return the number of micro-batches per batch as code, or None for a single one."""
    told = found["gradient_accumulation_steps"]
    if told is not None:
        return None if isinstance(told, int) and told <= 1 else value_of(found, "gradient_accumulation_steps")
    whole, micro = found["train_batch_size"], found["train_micro_batch_size_per_gpu"]
    if isinstance(whole, int) and isinstance(micro, int) and micro and whole > micro:
        return f"{whole} // ({micro} * mesh.size())"
    return None


def _batch(found: Found) -> str:
    micro, count = found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]
    if isinstance(micro, int) and isinstance(count, int | None):
        if count is None and micro_batches(found) is not None:
            return f"batch_size={found['train_batch_size']} // mesh.size()"
        return f"batch_size={micro * (count or 1)}"
    if isinstance(whole := found["train_batch_size"], int):
        return f"batch_size={whole} // mesh.size()"
    if micro == AUTO:
        return "batch_size=args.per_device_train_batch_size * args.gradient_accumulation_steps"
    return "of this rank"


def taken_of(found: Found) -> Optimizer | None:
    """Return the optimizer of a configuration, or None if it is not supported."""
    kind = found["optimizer.type"]
    if not isinstance(kind, str):
        return None
    lower = kind.lower()
    return ADAM if lower == "adam" and found["optimizer.params.adam_w_mode"] is False else TAKEN.get(lower)


def _optimizer(found: Found) -> Iterator[str]:
    taken = taken_of(found)
    if taken is None:
        why = f"in place of {found['optimizer.type']!r}" if found["optimizer.type"] else "not in the configuration"
        yield f"optimizer = build_optimizer(model)  # {why}"
        return
    fills = {} if found["optimizer.params.torch_adam"] is True else taken.fills
    arguments = {**fills, **{name: value for name in taken.takes
                             if (value := value_of(found, f"optimizer.params.{name}")) is not None}}  # fmt: skip
    words = [f"{name}={arguments[name]}" for name in taken.takes if name in arguments]
    words += [f"{name}={value}" for name, value in taken.always.items()]
    yield f"optimizer = {taken.call}({', '.join(['model.parameters()', *words])})"


def _scheduler(found: Found) -> Iterator[str]:
    kind = found["scheduler.type"]
    if kind in OF_TORCH:
        words = "".join(f", {name}={value!r}" for name, value in (found["scheduler.params"] or {}).items())
        yield f"scheduler = torch.optim.lr_scheduler.{kind}(optimizer{words})"
    if kind not in SCHEDULERS:
        return
    scheduler = SCHEDULERS[kind]
    values = {name: value_of(found, f"scheduler.params.{name}") or default
              for name, default in scheduler.defaults.items()}  # fmt: skip
    steps = values["warmup_num_steps"]
    values["warmup_num_steps"] = str(max(2, int(steps))) if steps.isdecimal() else f"max(2, {steps})"
    definition = scheduler.code(values["warmup_type"])
    yield from ("", f"# {kind}: the learning rates of DeepSpeed")
    if "RATE" in values.values() or re.search(r"\bRATE\b", definition):
        yield f"RATE = {_rate(found)}"
    yield from (f"{shown} = {values[name]}" for name, shown in scheduler.names.items())
    yield from ("", "", *definition.splitlines(), "", "")
    yield "for group in optimizer.param_groups:"
    yield '    group["lr"] = 1.0  # multiplied by rate_at'
    yield "scheduler = LambdaLR(optimizer, rate_at)"


def _rate(found: Found) -> str:
    taken = taken_of(found)
    if taken is None:
        return 'optimizer.param_groups[0]["lr"]'
    return value_of(found, "optimizer.params.lr") or taken.rate


def _loop(found: Found) -> Iterator[str]:
    yield f"for batch in batches:  # {_batch(found)}"
    inner = "    "
    if found["torch_autocast.enabled"] is True:
        half = found["torch_autocast.dtype"] in ("fp16", "float16", "torch.float16", "half")
        yield f"    with torch.autocast(mesh.device_type, torch.{'float16' if half else 'bfloat16'}):"
        inner = "        "
    yield f"{inner}loss = model(**batch).loss"
    yield "    loss.backward()"
    if (clip := clipping(found)) is not None:
        yield f"    optimizer.clip_grad_norm_({clip})"
    yield "    optimizer.step()"
    yield "    optimizer.zero_grad()"
    if found["scheduler.type"] in (*SCHEDULERS, *OF_TORCH):
        yield "    scheduler.step()"
        yield 'optimizer.save_checkpoint(extra={"scheduler": scheduler.state_dict()})  # at any step'
    else:
        yield "optimizer.save_checkpoint()  # at any step"


def clipping(found: Found) -> str | None:
    """Return the norm for gradient clipping as code, or None without clipping."""
    for name in ("gradient_clipping", "optimizer.params.max_grad_norm"):
        value: Any = found[name]
        if value == AUTO or (value is not None and value > 0):
            return value_of(found, name)
    return None
