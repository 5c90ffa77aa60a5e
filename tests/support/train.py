"""Train the same recipe in memory and offloaded, and compare the results bitwise."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import infinity
from infinity.config import StorageConfig
from infinity.errors import BudgetError
from infinity.units import parse_size
from support import models
from support.fault_engine import Fault, FaultEngine, FaultKind

KIB, MIB = 1 << 10, 1 << 20
PAGE = 64 * KIB
STEPS = 4
SLOW = Fault(kind=FaultKind.SLOW, probability=0.3, seconds=0.003)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1, fused=True),
    "adamw_tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(3e-3), fused=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=3e-3, amsgrad=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "sgd_dampened": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, dampening=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=3e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=3e-3),
    "trust_ratio": lambda p: importlib.import_module("support.optimizers").TrustRatio(p, lr=1e-1, momentum=0.9),
}
_ACTIVATION_PAGES = {"device": 0, "host": 128, "nvme": 4}
"""Number of activation pages in the host cache by tier: all pages of a small model, or the minimum."""


class LocalOptimizer:
    """Run an optimizer on CPU copies of the local tensors of sharded parameters."""

    def __init__(self, params: list[nn.Parameter], make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self._params = params
        self._locals = [nn.Parameter(param.to_local().detach().to("cpu", copy=True)) for param in params]
        self._inner = make(self._locals)

    def step(self) -> None:
        for param, part in zip(self._params, self._locals, strict=True):
            part.grad = param.grad.to_local().to("cpu", copy=True) if param.grad is not None else None
            part.data.copy_(param.to_local())  # the parameter may have been modified in place
        self._inner.step()
        with torch.no_grad():
            for param, part in zip(self._params, self._locals, strict=True):
                param.to_local().copy_(part)

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        pairs = zip(self._params, self._locals, strict=True)
        return {param: self._inner.state.get(part, {}) for param, part in pairs}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Model and training loop, which are the same in memory and offloaded."""

    model: str = "llama"
    policy: str = "bf16"
    clip: float | None = None
    clips: str = "optimizer"
    """Function used for clipping: ``optimizer.clip_grad_norm_`` (``optimizer``) or torch's (``torch``)."""
    micro: int = 1
    sequences: int = 2
    slices: int = 0
    loss_tokens: int = 0
    checkpointing: bool = False
    compiled: bool = False
    """Whether layers are compiled."""
    groups: bool = False
    evaluate: bool = False
    edit: bool = False
    """Whether weights are modified in place after every evaluation."""
    optimizer: str = "adamw"
    reshard: bool = True
    steps: int = STEPS
    seed: int = 0
    device: str = "cpu"
    updates: str = "cpu"  # device of updates: the CPU or `device`
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class Paging:
    """Settings of the offloaded run. Except for formats with smaller moments, they must not affect the results."""

    format: str = "fp32"
    host_cache: str = "middle"
    update_schedule: str = "auto"
    engine: str = "auto"
    delays: bool = False
    paths: int = 1
    page: int = PAGE
    cores: int = 1
    device: int = 0
    """Device memory for weights and GPU-resident FSDP modules, in bytes. 0: free memory."""
    gpu_resident_pages: str = ""
    """Expected GPU-resident FSDP modules: ``all``, ``some`` or ``none``. Empty: any."""
    activations: str = "device"
    """Tier for activations: ``device``, ``host`` or ``nvme``."""


@dataclass
class Outcome:
    """Results that must be equal, and properties of the run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    state: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    update_schedule: str = ""
    moved: int = 0
    gpu_resident: int = 0
    """Number of GPU-resident FSDP modules, of `fsdp_modules`."""
    fsdp_modules: int = 0
    graphs: int = 0
    """Number of compiled graphs."""


def build(recipe: Recipe) -> nn.Module:
    """Return the sharded model of a recipe on the device of this rank. Ranks may share a device."""
    if recipe.device != "cpu":
        module = torch.get_device_module(recipe.device)
        module.set_device(dist.get_rank() % module.device_count() if dist.is_initialized() else 0)
    model = models.build(
        recipe.model,
        policy=recipe.policy,
        checkpointing=recipe.checkpointing,
        reshard=recipe.reshard,
        compiled=recipe.compiled,
        device=recipe.device,
    )
    if recipe.slices:
        infinity.micro_batches(model, recipe.slices)
    if recipe.loss_tokens:
        infinity.sliced_loss(model, recipe.loss_tokens)
    return model


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe for the trainable parameters."""
    trained = [param for param in model.parameters() if param.requires_grad]
    if not recipe.groups:
        return OPTIMIZERS[recipe.optimizer](trained)
    matrices = [param for param in trained if param.ndim > 1]
    vectors = [param for param in trained if param.ndim <= 1]
    return OPTIMIZERS[recipe.optimizer]([{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 1e-3}])


def local_optimizer(recipe: Recipe, model: nn.Module) -> LocalOptimizer:
    """Return the optimizer of a recipe as a `LocalOptimizer`."""
    if recipe.groups:
        raise ValueError("LocalOptimizer does not support recipes with several param groups")
    return LocalOptimizer([p for p in model.parameters() if p.requires_grad], OPTIMIZERS[recipe.optimizer])


def batch(model: nn.Module, seed: int, sequences: int = 2) -> torch.Tensor:
    """Return tokens of shape (sequences, 24), which differ between ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, models.vocabulary_of(model), (sequences, 24), generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> float:
    """Train one step with the batch of this number; return its loss."""
    loss = models.loss_of(model, batch(model, number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outcome: Outcome,
    *,
    first: int = 0,
    scheduler: Any = None,
) -> None:
    """Run the steps of a recipe, like a user's training loop.

    Values are copied from a device only after the last step, because a copy waits for all launched operations.
    """
    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    evaluations: list[torch.Tensor] = []
    torch.manual_seed(recipe.seed + first)  # dropout
    if scheduler is None and recipe.groups:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(first, recipe.steps):
        for part in range(recipe.micro):
            tokens = batch(model, 10 * step + part, recipe.sequences).to(recipe.device)
            loss = models.loss_of(model, tokens) / recipe.micro
            loss.backward()
            losses.append(loss.detach())
        if recipe.clip is not None:
            norms.append(_clip(recipe, optimizer, model))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        if recipe.evaluate and step % 3 == 1:
            evaluations.append(_evaluated(model, recipe.sequences, recipe.device))
            if recipe.edit:
                _edit(model)
    outcome.losses += [loss.item() for loss in losses]
    outcome.norms += [norm.item() for norm in norms]
    outcome.evaluations += [loss.item() for loss in evaluations]


class Halving:
    """A scheduler that halves the current learning rate, so that it continues only if that rate is restored."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] *= 0.5


def _clip(recipe: Recipe, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.Tensor:
    if isinstance(optimizer, infinity.PagedOptimizer) and recipe.clips == "optimizer":
        norm = optimizer.clip_grad_norm_(recipe.clip)
    else:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def evaluate(model: nn.Module, sequences: int = 2) -> float:
    """Return the loss of a batch in evaluation mode, without gradients."""
    return _evaluated(model, sequences, "cpu").item()


def _evaluated(model: nn.Module, sequences: int, device: str) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        loss = models.loss_of(model, batch(model, 999, sequences).to(device))
    model.train()
    return loss


def _edit(model: nn.Module) -> None:
    """Modify weights of the first layer in place."""
    with torch.no_grad():
        for param in models.layers_of(model)[0].parameters():
            if param.ndim > 1:
                param.copy_(param * 0.5)


@contextmanager
def reproducible() -> Iterator[None]:
    """Enable deterministic algorithms of torch, including those of devices."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at first use of cuBLAS
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):  # backward of other backends is not deterministic
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def local(value: torch.Tensor) -> torch.Tensor:
    """Return a flat CPU copy of the local part of a tensor."""
    part = value.to_local() if isinstance(value, DTensor) else value
    return part.detach().to("cpu", copy=True).reshape(-1)


def state_in_memory(model: nn.Module, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return parameters and optimizer states by name."""
    found = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            found[name] = {"frozen": local(param)}
            continue
        states = optimizer.state.get(param, {})
        found[name] = {"master": local(param)} | {
            key: local(value) if isinstance(value, torch.Tensor) else torch.as_tensor(value)
            for key, value in states.items()
            if value is not None
        }
    return found


def state_on_nvme(model: nn.Module, optimizer: infinity.PagedOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Return parameters and optimizer states by name. As in memory, parameters without updates have no state."""
    found = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            found[name] = {"frozen": local(param)}
            continue
        found[name] = {key: local(torch.as_tensor(value)) for key, value in optimizer.read_state(name).items()}
    return found


def digest(model: nn.Module, optimizer: infinity.PagedOptimizer, *more: object) -> str:
    """Return a digest of parameters, optimizer states and `more` values."""
    found = hashlib.sha256(repr(more).encode())
    for name, states in sorted(state_on_nvme(model, optimizer).items()):
        for kind, value in sorted(states.items()):
            found.update(f"{name}/{kind}/{value.dtype}".encode())
            found.update(local(value.float()).numpy().tobytes())
    return found.hexdigest()[:16]


def _graphs(recipe: Recipe) -> int:
    """Return the number of graphs that this process has compiled; 0 for recipes without compiled layers."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) if recipe.compiled else 0


@functools.cache
def in_memory(recipe: Recipe) -> Outcome:
    """Train a recipe with plain FSDP2."""
    model = build(recipe)
    optimizer = local_optimizer(recipe, model) if recipe.updates != recipe.device else make_optimizer(recipe, model)
    outcome = Outcome()
    train(recipe, model, optimizer, outcome)
    outcome.state = state_in_memory(model, optimizer)
    return outcome


def paged(recipe: Recipe, paging: Paging, folder: Path) -> Outcome:
    """Train a recipe offloaded."""
    outcome = Outcome()
    graphs = _graphs(recipe)
    with offloaded(recipe, paging, folder) as (model, optimizer):
        train(recipe, model, optimizer, outcome)
        outcome.graphs = _graphs(recipe) - graphs
        outcome.state = state_on_nvme(model, optimizer)
        outcome.update_schedule = optimizer.update_schedule
        outcome.moved = optimizer.records[-1].read_bytes
        outcome.gpu_resident = len(optimizer.run.planner.update_schedule.gpu_resident)
        outcome.fsdp_modules = len(
            {event.fsdp_module for event in optimizer.run.planner.events if event.fsdp_module >= 0}
        )
    return outcome


@contextmanager
def offloaded(
    recipe: Recipe, paging: Paging, folder: Path, **sections: dict[str, Any]
) -> Iterator[tuple[nn.Module, infinity.PagedOptimizer]]:
    """Yield an offloaded model and its optimizer."""
    model = build(recipe)
    optimizer = make_optimizer(recipe, model)
    if recipe.device != "cpu":
        sections["update"] = {"device": recipe.updates, **sections.get("update", {})}
    config = settings(folder, paging, host_bytes(paging, model, optimizer, folder), **sections)
    with (
        faulty(SLOW, seed=recipe.seed) if paging.delays else nullcontext(),
        infinity.offload(model, optimizer, config) as offloaded,
    ):
        yield model, offloaded


def settings(folder: Path, paging: Paging, host: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return settings whose folders are in `folder`."""
    paths = [folder / f"nvme{index}" for index in range(paging.paths)]
    for path in paths:
        path.mkdir(exist_ok=True)
    tree: dict[str, Any] = {
        "storage": {"paths": [str(path) for path in paths], "engine": paging.engine},
        "memory": {"host_bytes": host, "page_bytes": paging.page, "device_bytes": paging.device},
        "state": {"format": paging.format},
        "update": {"schedule": paging.update_schedule, "cores": paging.cores},
        "activations": {"tier": paging.activations, "host_bytes": _ACTIVATION_PAGES[paging.activations] * paging.page},
        "telemetry": {"runtime_dir": str(folder / "runtime")},
    }
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return tree


def least_host_bytes(paging: Paging, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Return the minimum host cache size, taken from the error for a host cache that is too small."""
    page = paging.page
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        try:
            tiny = Paging(page=page, format=paging.format)
            infinity.offload(model, optimizer, settings(Path(temporary), tiny, page)).close()
        except BudgetError as error:
            return parse_size(re.search(r"set memory.host_bytes to (\w+) or more", str(error))[1])
    return page


def host_bytes(paging: Paging, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Return the host cache size of a `Paging`, including pages for activations."""
    return _host_bytes(paging, model, optimizer, folder) + _ACTIVATION_PAGES[paging.activations] * paging.page


def _host_bytes(paging: Paging, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    if paging.host_cache == "all":
        return 256 * MIB
    least = least_host_bytes(paging, model, optimizer, folder)
    if paging.host_cache == "least":
        return least
    elements = sum(local(param).numel() for param in model.parameters())
    if paging.host_cache.endswith("%"):  # of the state, which has 14 bytes per element
        return max(least, elements * 14 * int(paging.host_cache[:-1]) // 100 // paging.page * paging.page)
    return max(least, elements * 6 // paging.page * paging.page)


@contextmanager
def faulty(*faults: Fault, seed: int = 0, on: bool = True) -> Iterator[list[FaultEngine]]:
    """Inject faults into all engines that are opened inside of the block; yield the engines."""
    module = importlib.import_module("infinity.run.run")
    original, opened = module.open_engine, list[FaultEngine]()

    def open_engine(config: StorageConfig) -> FaultEngine:
        opened.append(FaultEngine(original(config), seed, faults, on=on))
        return opened[-1]

    with patch.object(module, "open_engine", open_engine):
        yield opened


def differences(expected: Outcome, found: Outcome) -> list[str]:
    """Return descriptions of all differences. Empty: the outcomes are bitwise equal."""
    listed = [
        f"{name}: {a} != {b}"
        for name in ("losses", "norms", "evaluations")
        if (a := getattr(expected, name)) != (b := getattr(found, name))
    ]
    if expected.state.keys() != found.state.keys():
        listed.append(f"parameters: {sorted(expected.state.keys() ^ found.state.keys())}")
        return listed
    for name, states in expected.state.items():
        listed += _state_differences(name, states, found.state[name])
    return listed


def _state_differences(name: str, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    listed = []
    for kind, value in expected.items():
        if kind not in found:
            listed.append(f"{name}/{kind} is missing")
            continue
        wanted, got = value.reshape(-1), found[kind].reshape(-1)
        if wanted.dtype != got.dtype or not torch.equal(wanted, got):
            listed.append(f"{name}/{kind} ({wanted.dtype}, {got.dtype}): {(wanted != got).sum()} elements")
    # For parameters without gradients there is no state in memory, and pages contain zeros.
    listed += [f"{name}/{kind} is not zero" for kind in found.keys() - expected.keys() if found[kind].any()]
    return listed


def compare(recipe: Recipe, paging: Paging, folder: str) -> list[str]:
    """Train a recipe in memory and offloaded; return the differences. Called on every rank."""
    with reproducible() if recipe.deterministic else nullcontext():
        expected = in_memory(recipe)
        found = paged(recipe, paging, Path(folder))
    return differences(expected, found) + _vacuous_comparisons(recipe, paging, found)


def _vacuous_comparisons(recipe: Recipe, paging: Paging, found: Outcome) -> list[str]:
    """Return the reasons why the comparison is meaningless, for example because no page was read."""
    wanted = paging.update_schedule
    if wanted == "auto":
        wanted = "in_backward" if recipe.clip is None and recipe.micro == 1 else "in_forward"
    listed = []
    if len(set(found.losses)) == 1:
        listed.append("the loss is constant")
    if found.update_schedule != wanted:
        listed.append(f"updates ran {found.update_schedule}, not {wanted}")
    gpu_resident = "all" if found.gpu_resident == found.fsdp_modules else "some" if found.gpu_resident else "none"
    if recipe.compiled and not found.graphs:
        listed.append("no layer was compiled")
    if paging.gpu_resident_pages not in ("", gpu_resident):
        listed.append(f"{found.gpu_resident} of {found.fsdp_modules} FSDP modules were GPU-resident")
    # If some FSDP modules are GPU-resident, the others may fit into the host cache.
    if gpu_resident != "some" and (found.moved > 0) is not (paging.host_cache != "all" and gpu_resident == "none"):
        listed.append(f"the last step read {found.moved} bytes with host cache {paging.host_cache}")
    return listed


def full_copy(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of the full tensor."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
