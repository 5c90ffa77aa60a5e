"""Python calls per step: infinity compared with FSDP2 in memory.

On a GPU, a step of infinity is as fast as in memory only if one Python interpreter can launch both. This benchmark
counts the Python functions that one step calls on all threads, and the functions of torch that it calls, for an 8-layer
Llama whose state has 613 update pages (64 KiB). The GPU is a stand-in: tensors are in host memory, and events complete
immediately. Functions of the stand-in do not count. Counts do not depend on the machine, and `make test` asserts limits
(`LIMITS`). The variants are:

- `memory`: FSDP2 and the optimizer of torch, with all state in memory.
- `device`: infinity with updates on the GPU, and prefetched weights. If all state is GPU-resident: `resident`.
- `device_split`, `device_8bit`: infinity with these state formats and prefetched weights. Updates run on the CPU.
- `host`: infinity on a CPU, with pages of 1 MiB.

The suffix `_clip` adds gradient clipping, and `_2_ranks` counts the calls of rank 0 of two.

The figures of a step are:

- `python_calls` and `torch_calls`: calls of Python functions, and calls into torch, on all threads.
- `sharding_calls`: the Python calls in FSDP2 and infinity, excluding updates. They gather weights, reduce gradients
  and submit updates. `update_calls`: the Python calls on the update thread.
- `cpu_seconds`: processor time of all threads, and `thread_seconds`: processor time of the training thread. Both are
  measured without counting, and include the computation of the model.

    python benchmarks/bench_host.py [--variants memory,device] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, _fully_shard, fully_shard

import infinity
from infinity import torch_private
from infinity.memory import device as devices
from infinity.run import run

LIMITS = {
    "host": (32_600, 1.25),
    "device": (30_000, 1.2),
    "device_clip": (35_200, 1.25),
    "resident": (31_000, 1.15),
    "device_2_ranks": (32_100, 1.15),
    "device_clip_2_ranks": (37_200, 1.18),
}
"""By variant: maximum Python calls per step, and maximum calls into torch relative to FSDP2 in memory. They are about
5 % above the counts, because a thread that waits on a slow machine checks for failures more often.
"""
SHARDING_LIMITS = {"device_split": 14_450, "device_8bit": 14_450}
"""By variant: maximum `sharding_calls`, about 5 % above the counts, which are 1.4 times the 9,735 calls of FSDP2 in
memory. The calls of updates are not limited.
"""
VARIANTS = ("memory", "memory_clip", "memory_2_ranks", "memory_clip_2_ranks", "device_nvme", *LIMITS, *SHARDING_LIMITS)
ROOT = Path(__file__).parents[1]
SHARDING = tuple(str(Path(module.__file__).parent) for module in (_fully_shard, infinity))
"""Folders of the code of FSDP2 and infinity."""
STEPS = 2
"""Number of counted steps. As many steps run before, because infinity records the first one and then makes a plan."""


class _Event:
    """An event that has always completed."""

    def record(self, stream: Any = None) -> _Event:
        return self

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Stream:
    """A stream without a queue."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.device = torch.device("cpu")

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def wait_event(self, event: _Event) -> None:
        pass

    def wait_stream(self, other: _Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _On:
    """Context in which a stream is the current one of the thread."""

    def __init__(self, stream: _Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = _current()
        _LOCAL.stream = self._stream or self._before

    def __exit__(self, *exception: object) -> None:
        _LOCAL.stream = self._before


_LOCAL = threading.local()
_DEFAULT = _Stream()


def _current(device: Any = None) -> _Stream:
    return getattr(_LOCAL, "stream", _DEFAULT)


class _Device(devices.AcceleratorDevice):
    """A GPU in host memory."""

    spare = 0

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Do nothing, because nothing is queued."""

    def spare_bytes(self) -> int:
        """Return the device memory for GPU-resident FSDP modules, in bytes."""
        return self.spare


def _update_device(settings: Any, *_: Any, **__: Any) -> tuple[bool, str]:
    """Update on the GPU if the state format allows it."""
    return settings.state.format == "fp32", "stand-in"


@contextmanager
def stand_in(spare: int) -> Iterator[None]:
    """Replace the CPU by a GPU with `spare` bytes of free memory."""
    devices.opened.cache_clear()
    with ExitStack() as stack:
        module = {"Stream": _Stream, "Event": _Event, "current_stream": _current, "stream": _On}
        for name, value in module.items():
            stack.enter_context(patch.object(torch.cpu, name, value))
        stack.enter_context(patch.object(torch.accelerator, "current_stream", _current))
        stack.enter_context(patch.object(_Device, "spare", spare))
        stack.enter_context(patch.dict(devices.KINDS, {"cpu": _Device}))
        stack.enter_context(patch.object(run, "choose_update_device", _update_device))
        stack.enter_context(patch.object(torch_private, "reuse_reduce_buffers", lambda groups: lambda: None))
        yield
    devices.opened.cache_clear()


class _Thread(threading.local):
    """Counting state of each thread."""

    def __init__(self) -> None:
        self.updates = threading.current_thread().name.startswith("infinity-update")
        self.depth = 0  # number of functions of FSDP2 and infinity that are running


class Counter:
    """Counts calls on all threads that start after its creation."""

    def __init__(self) -> None:
        self.python = self.torch = self.sharding = self.updates = 0
        self._active = False
        self._thread = _Thread()
        self._lock = threading.Lock()
        threading.setprofile(self._called)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in this context."""
        self.python = self.torch = self.sharding = self.updates = 0
        self._thread = _Thread()
        self._active = True
        sys.setprofile(self._called)
        try:
            yield
        finally:
            self._active = False
            sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, function: Any) -> None:
        if not self._active or frame.f_code.co_filename == __file__:
            return
        thread = self._thread
        if event == "call":
            thread.depth += frame.f_code.co_filename.startswith(SHARDING)
            with self._lock:
                self.python += 1
                self.updates += thread.updates
                self.sharding += thread.depth > 0 and not thread.updates
        elif event == "return":
            # A function that began before the counting has not increased the depth.
            thread.depth = max(0, thread.depth - frame.f_code.co_filename.startswith(SHARDING))
        elif event == "c_call":
            owner = type(getattr(function, "__self__", None)).__module__ or ""
            if owner.startswith("torch") or (getattr(function, "__module__", None) or "").startswith("torch"):
                with self._lock:
                    self.torch += 1


def reference(variant: str) -> str:
    """Return the variant of FSDP2 in memory with which a variant is compared."""
    return "memory" + "".join(suffix for suffix in ("_clip", "_2_ranks") if suffix in variant)


def make_model() -> torch.nn.Module:
    """Return a sharded 8-layer Llama that computes in bf16, with activation checkpointing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=160, intermediate_size=416, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4,
            vocab_size=256, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy, mesh = MixedPrecisionPolicy(torch.bfloat16, torch.float32), infinity.mesh("cpu")
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return model  # type: ignore[no-any-return]


def steps(model: Any, optimizer: Any, number: int, *, clip: bool) -> list[float]:
    """Train and return the losses."""
    losses = []
    for seed in range(number):
        torch.manual_seed(seed)
        tokens = torch.randint(0, 256, (1, 32))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def measure(variant: str, counter: Counter) -> dict[str, Any]:
    """Return the counts of a variant per step, its processor time and its losses."""
    clip = "_clip" in variant
    with ExitStack() as stack:
        if variant.startswith(("device", "resident")):
            stack.enter_context(stand_in(2 << 30 if variant == "resident" else 0))
        model = make_model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if not variant.startswith("memory"):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            settings: dict[str, Any] = {
                "storage": {"paths": [folder]},
                "memory": {
                    "host_bytes": (24 if variant == "device_nvme" else 400) << 20,
                    "page_bytes": (1 << 20) if variant == "host" else 64 << 10,
                },
                "update": {"cores": 1},
                "run": {"keep": "never"},
            }
            if variant.startswith("device"):
                settings["memory"]["device_bytes"] = 2 << 20  # for the GPU prefetch buffer only
            if variant in SHARDING_LIMITS:
                settings["state"] = {"format": variant.removeprefix("device_")}
            optimizer = infinity.offload(model, optimizer, settings)
            stack.callback(optimizer.close)
        losses = steps(model, optimizer, 2 + STEPS, clip=clip)
        before = time.process_time(), time.thread_time()
        losses += steps(model, optimizer, STEPS, clip=clip)
        after = time.process_time(), time.thread_time()
        seconds = [round((b - a) / STEPS, 4) for a, b in zip(before, after, strict=True)]
        with counter.counting():
            losses += steps(model, optimizer, STEPS, clip=clip)
            if not variant.startswith("memory"):
                optimizer._runner.updates.drain()  # wait for updates on the other thread
        plan = None if variant.startswith("memory") else optimizer.run.plan
        return {
            "accesses": len(plan.trace) if plan else 0,
            "pages": plan.traffic.total_bytes // settings["memory"]["page_bytes"] if plan else 0,
            "python_calls": counter.python // STEPS,
            "torch_calls": counter.torch // STEPS,
            "sharding_calls": counter.sharding // STEPS,
            "update_calls": counter.updates // STEPS,
            "cpu_seconds": seconds[0],
            "thread_seconds": seconds[1],
            "losses": losses,
        }


def measure_rank(rank: int, ranks: int, variants: list[str], folder: str, results: Any) -> None:
    """Measure variants on one of several ranks, and put the figures of rank 0 into a queue."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{Path(folder, 'store')}", rank=rank, world_size=ranks)
    counter = Counter()
    found = {variant: measure(variant, counter) for variant in variants}
    dist.destroy_process_group()
    if not rank:
        results.put(found)


def measure_all(variants: list[str]) -> dict[str, Any]:
    """Return the figures of all variants. Those with the same number of ranks share their processes."""
    found: dict[str, Any] = {}
    for ranks in (1, 2):
        chosen = [variant for variant in variants if variant.endswith("_2_ranks") == (ranks == 2)]
        if chosen:
            context = get_context("spawn")
            results = context.SimpleQueue()
            with tempfile.TemporaryDirectory() as folder:
                processes = [
                    context.Process(target=measure_rank, args=(rank, ranks, chosen, folder, results))
                    for rank in range(ranks)
                ]
                for process in processes:
                    process.start()
                found |= results.get()
                for process in processes:
                    process.join()
    return {variant: found[variant] for variant in variants}


def main() -> None:
    """Measure the variants and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--json", action="store_true", help="print only JSON")
    options = parser.parse_args()
    found = measure_all(options.variants.split(","))
    if options.json:
        print(json.dumps(found))
        return
    print("Calls and processor time per step. In parentheses: relative to FSDP2 in memory.")
    columns = "python_calls", "torch_calls", "sharding_calls", "update_calls", "cpu_seconds", "thread_seconds"
    print(f"{'variant':20}", *(f"{name.replace('_', ' '):>16}" for name in columns))
    for variant, row in found.items():
        base = found.get(reference(variant))
        print(f"{variant:20}", *(f"{_cell(row[name], base and base[name]):>16}" for name in columns))


def _cell(value: float, base: float | None) -> str:
    """Return a figure, and its ratio to the figure of FSDP2 in memory."""
    text = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
    return f"{text} ({value / base:.2f}x)" if base else text


if __name__ == "__main__":
    main()
