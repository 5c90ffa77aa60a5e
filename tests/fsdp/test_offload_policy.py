"""Tests of `NVMeOffloadPolicy`: only FSDP modules that have it are paged; the others stay as FSDP2 has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import UnsupportedError
from infinity.formats.safetensors import export_safetensors
from infinity.fsdp.gradient import PagedGradient
from infinity.fsdp.paged_tensor import PagedTensor
from infinity.store.page_store import PageStore
from infinity.torch_private import local_part
from support.ranks import RankPool
from support.tables import all_but
from support.train import reproducible

STEPS, HALF, CLIP, WIDTH = 4, 2, 0.05, 48
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = ("root", "embed", "layers.0", "layers.1", "layers.2")
LAYERS, ONE = ALL[2:], ALL[3:4]
SETTINGS = {"memory": {"host_bytes": "4MiB", "page_bytes": "64KiB"}}


class Model(nn.Module):
    """Embedding, three layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(65, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 65)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def sharded(on_nvme: tuple[str, ...], *, device: str = DEVICE, frozen: tuple[str, ...] = ()) -> Model:
    torch.manual_seed(0)
    with torch.device(device):
        model = Model()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for name in (*ALL[1:], "root"):
        policy = infinity.NVMeOffloadPolicy() if name in on_nvme else OffloadPolicy()
        module = model if name == "root" else model.get_submodule(name)
        fully_shard(module, mesh=infinity.mesh(DEVICE), mp_policy=mixed, offload_policy=policy)
    return model


def make_optimizer(model: nn.Module, kind: str = "AdamW") -> Any:
    names = dict(model.named_parameters())
    decayed = [param for name, param in names.items() if name.endswith("weight")]
    rest = [param for name, param in names.items() if not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
    return getattr(torch.optim, kind)(groups, lr=0.01)


def backward(model: Model, step: int, passes: int) -> torch.Tensor:
    """Accumulate the gradients of some passes; return the last loss."""
    for number in range(passes):
        torch.manual_seed(100 * step + 10 * number + dist.get_rank())
        loss = model(torch.randint(0, 65, (4, 8)).to(DEVICE))
        loss.backward()
    return loss.detach()


def full(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: full(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [full(value) for value in tree]
    return tree.full_tensor().clone() if isinstance(tree, DTensor) else tree


def content(model: Model, optimizer: Any) -> dict[str, Any]:
    """Return the weights and the optimizer state, by name."""
    weights, states = full(get_state_dict(model, optimizer))
    found = dict(weights)
    for name, state in states["state"].items():
        found |= {f"{name}.{key}": value for key, value in state.items()}
    return {**found, "lr": [group["lr"] for group in states["param_groups"]]}


def train(model: Model, optimizer: Any, steps: range, schedule: Any = None, *, clip: bool = True) -> list[torch.Tensor]:
    """Train; return the losses and the gradient norms. With clipping, a step consists of two passes."""
    seen = []
    for step in steps:
        seen.append(backward(model, step, 2 if clip else 1))
        if clip and isinstance(optimizer, infinity.PagedOptimizer):
            seen.append(optimizer.clip_grad_norm_(CLIP))
        elif clip:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).full_tensor())
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
    return seen


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def in_memory(kind: str = "AdamW", *, clip: bool = True, frozen: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train in plain FSDP2; return the content of the model and the optimizer, and what `train` returned."""
    model = sharded((), frozen=frozen)
    optimizer = make_optimizer(model, kind)
    seen = train(model, optimizer, range(STEPS), step_lr(optimizer), clip=clip)
    return {**content(model, optimizer), "seen": seen}


def offload(model: Model, base: Any, folder: str | Path, **settings: Any) -> infinity.PagedOptimizer:
    return infinity.offload(model, base, {"storage": {"paths": [str(folder)]}, **SETTINGS, **settings})


def on_nvme(
    names: tuple[str, ...], folder: str, kind: str, *, stop: int = STEPS, clip: bool = True,
    frozen: tuple[str, ...] = (), **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train offloaded; save a checkpoint after step `stop`, and continue from it with a new model."""
    seen: list[torch.Tensor] = []
    found: dict[str, Any] = {}
    for steps in filter(len, (range(stop), range(stop, STEPS))):
        resume = "latest" if steps.start else ""
        model = sharded(names, frozen=frozen, device="meta" if resume and stop == HALF else DEVICE)
        base = make_optimizer(model, kind)
        schedule = step_lr(base)
        with offload(model, base, folder, run={"resume": resume}, **settings) as optimizer:
            if resume:
                schedule.load_state_dict(optimizer.resumed_extra["schedule"])
            seen += train(model, optimizer, steps, schedule, clip=clip)
            assert optimizer.steps == steps.stop
            paged = {n for n, param in model.named_parameters() if isinstance(local_part(param), PagedTensor)}
            assert paged == {n for n, _ in model.named_parameters() if module_of(n) in names}
            found = {**content(model, optimizer), "seen": seen}
            optimizer.save_checkpoint({"schedule": schedule.state_dict()})
    return found


def module_of(name: str) -> str:
    return next((module for module in ALL[1:] if name.startswith(module + ".")), "root")


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    assert expected.keys() == found.keys()
    return [name for name, value in expected.items() if not same(value, found[name])]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return all(map(same, one, other)) and len(one) == len(other)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def compare(
    names: tuple[str, ...], kind: str, stop: int, clip: bool, frozen: tuple[str, ...], folder: str, settings: Any
) -> list[str]:
    expected = in_memory(kind, clip=clip, frozen=frozen)
    found = on_nvme(names, folder, kind, stop=stop, clip=clip, frozen=frozen, **settings)
    return differences(expected, found)


CASES = {
    "layers": (LAYERS, "AdamW", STEPS, True, (), {}),
    "layers in backward": (LAYERS, "AdamW", STEPS, False, (), {"update": {"schedule": "in_backward"}}),
    "one layer": (ONE, "AdamW", STEPS, True, (), {"update": {"schedule": "after_backward"}}),
    "all": (ALL, "AdamW", STEPS, True, (), {}),
    "resumed": (LAYERS, "AdamW", HALF, True, (), {}),
    "resumed, split": (LAYERS, "NAdam", HALF, True, (), {"state": {"format": "split"}}),
    "resumed, state from the constructor": (ONE, "Adagrad", HALF, True, (), {}),
    "frozen layers": (LAYERS, "AdamW", HALF, True, LAYERS, {}),
    "frozen embeddings": (LAYERS, "SGD", HALF, True, ("embed",), {}),
}


@pytest.mark.parametrize("case", all_but(CASES, "layers", "one layer", "all", "resumed", "frozen embeddings"))
def test_part_of_a_model_on_nvme_trains_and_resumes_as_in_memory(case: str, tmp_path: Path) -> None:
    names, kind, stop, clip, frozen, settings = CASES[case]
    assert compare(names, kind, stop, clip, frozen, str(tmp_path), settings) == []


@pytest.mark.parametrize("case", all_but(["resumed", "one layer"], "one layer"))
def test_part_of_a_model_on_nvme_on_two_ranks_trains_as_in_memory(pair: RankPool, case: str, tmp_path: Path) -> None:
    names, kind, stop, clip, frozen, settings = CASES[case]
    assert pair.run(compare, names, kind, stop, clip, frozen, str(tmp_path), settings) == [[], []]


def test_states_that_the_first_update_creates_are_reserved(tmp_path: Path) -> None:
    model = sharded(LAYERS)
    with offload(model, make_optimizer(model), tmp_path) as optimizer:
        in_memory = optimizer._own.in_memory
        resident = sum(param.nbytes for name, param in model.named_parameters() if module_of(name) not in LAYERS)
        assert in_memory.absent_state_bytes == 2 * resident
        train(model, optimizer, range(1))
        assert in_memory.absent_state_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available: `make gpu-test`")
@pytest.mark.parametrize("case", ["layers", "layers in backward", "resumed"])
def test_part_of_a_model_on_nvme_trains_on_a_gpu_as_in_memory(case: str, tmp_path: Path) -> None:
    names, kind, stop, clip, frozen, settings = CASES[case]
    settings = {**settings, "update": {"device": "cuda", **settings.get("update", {})}}
    with reproducible():
        assert compare(names, kind, stop, clip, frozen, str(tmp_path), settings) == []


def test_state_in_memory_is_resumed_exactly_with_low_precision_moments(tmp_path: Path) -> None:
    """`state.format` applies to pages only. Moments in memory keep the precision that they have in FSDP2."""
    found = [
        on_nvme(LAYERS, tmp_path / str(stop), "AdamW", stop=stop, state={"format": "8bit"}) for stop in (STEPS, HALF)
    ]
    assert differences(*found) == []


def test_meta_initialization_does_not_depend_on_the_policy(tmp_path: Path) -> None:
    found = []
    for names in ((), LAYERS):
        model = sharded(names, device="meta")
        with offload(model, make_optimizer(model), tmp_path / str(len(names))) as optimizer:
            found.append({**content(model, optimizer), "seen": train(model, optimizer, range(2))})
    assert differences(*found) == []


def test_micro_batches_with_a_part_on_nvme_train_as_in_memory(tmp_path: Path) -> None:
    found = []
    for names in ((), LAYERS):
        model = sharded(names)
        infinity.micro_batches(model, 2)
        optimizer = make_optimizer(model)
        optimizer = offload(model, optimizer, tmp_path) if names else optimizer
        seen = train(model, optimizer, range(2))
        found.append({**content(model, optimizer), "seen": seen})
    optimizer.close()
    assert differences(*found) == []


def test_schedule_free_modes_switch_all_weights(tmp_path: Path) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    found = []
    for names in ((), ONE):
        model = sharded(names)
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)
        optimizer = offload(model, optimizer, tmp_path) if names else optimizer
        seen: list[Any] = []
        for step in range(3):
            optimizer.train()
            seen += train(model, optimizer, range(step, step + 1), clip=False)
            optimizer.eval()
            model.reshard()
            seen.append(content(model, optimizer))
        found.append({f"{number}.{key}": value for number, one in enumerate(seen[1::2]) for key, value in one.items()})
    optimizer.close()
    assert differences(*found) == []


def test_steps_use_only_pages_of_modules_with_the_policy(tmp_path: Path) -> None:
    model = sharded(ONE)
    with offload(model, make_optimizer(model), tmp_path) as optimizer:
        train(model, optimizer, range(2))
        layout, plan = optimizer.run.layout, optimizer.run.plan
        used = {layout.pages[use.page].fsdp_module for access in plan.trace for use in access}
        assert [layout.fsdp_modules[number].name for number in used] == [*ONE]
        backward(model, 2, 1)
        paged = [n for n, p in model.named_parameters() if isinstance(local_part(p.grad), PagedGradient)]
        assert {module_of(name) for name in paged} == {*ONE}


def exchange_with_plain_fsdp2(folder: str) -> list[str]:
    """Save a run with `torch.distributed.checkpoint`, load it into plain FSDP2, and save that for two other runs."""
    expected = in_memory()
    model = sharded(LAYERS)
    base = make_optimizer(model)
    schedule, wrong = step_lr(base), []
    with offload(model, base, f"{folder}/first") as optimizer:
        seen = train(model, optimizer, range(HALF), schedule)
        dcp.save(
            dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=f"{folder}/a"
        )
    plain = sharded(())
    base = make_optimizer(plain)
    step_lr(base)
    load(plain, base, f"{folder}/a")
    dcp.save(dict(zip(("model", "optim"), get_state_dict(plain, base), strict=True)), checkpoint_id=f"{folder}/b")
    for way in ("load", "weights"):
        model = sharded(ONE if way == "load" else LAYERS, device=DEVICE if way == "load" else "meta")
        base = make_optimizer(model)
        schedule = step_lr(base)
        schedule.load_state_dict({**schedule.state_dict(), "last_epoch": HALF})
        settings = {"storage": {"paths": [f"{folder}/{way}"]}, **SETTINGS}
        weights = f"{folder}/b" if way == "weights" else None
        with infinity.offload(model, base, settings, weights=weights) as optimizer:
            if way == "load":
                load(model, optimizer, f"{folder}/b")
            more = train(model, optimizer, range(HALF, STEPS), schedule)
            wrong += differences(expected, {**content(model, optimizer), "seen": seen + more})
    return wrong


def load(model: Model, optimizer: Any, folder: str) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def test_distributed_checkpoints_are_exchanged_with_plain_fsdp2_on_two_ranks(pair: RankPool, tmp_path: Path) -> None:
    assert pair.run(exchange_with_plain_fsdp2, str(tmp_path)) == [[], []]


def save_on_two_ranks(folder: str) -> dict[str, Any]:
    """Train, export the live weights, and save a checkpoint; return the content."""
    model = sharded(LAYERS)
    with offload(model, make_optimizer(model), folder) as optimizer:
        train(model, optimizer, range(HALF))
        optimizer.save_pretrained(f"{folder}-live")
        optimizer.save_checkpoint()
        if dist.get_rank() == 0:
            export_safetensors(CheckpointReader(optimizer.run.folder), Path(f"{folder}-export"), file_bytes=2**20)
        return content(model, optimizer)


def test_exports_are_complete_and_runs_resume_with_other_ranks_and_policies(pair: RankPool, tmp_path: Path) -> None:
    expected, _ = pair.run(save_on_two_ranks, str(tmp_path / "run"))
    weights = {name: value for name, value in expected.items() if name in dict(Model().named_parameters())}
    for folder in ("run-live", "run-export"):
        (file,) = (tmp_path / folder).glob("*.safetensors")
        assert differences(weights, load_file(file)) == []
    for names in (LAYERS, ONE, ()):
        model = sharded(names)
        base = make_optimizer(model)
        with offload(model, base, tmp_path / "run", run={"resume": "latest"}) as optimizer:
            assert optimizer.steps == HALF
            assert differences(expected, content(model, optimizer)) == []


def test_export_reads_modules_in_memory_without_writing_their_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = [], PageStore.write

    def counted(store: PageStore, page: int, *arguments: Any) -> None:
        written.append(page)
        write(store, page, *arguments)

    monkeypatch.setattr(PageStore, "write", counted)
    model = sharded(LAYERS, frozen=("embed",))
    with offload(model, make_optimizer(model), tmp_path / "run") as optimizer:
        train(model, optimizer, range(1))
        model.embed.weight.data.mul_(-1)
        optimizer.run.pager.flush()
        written.clear()
        (file,) = (path for path in optimizer.save_pretrained(tmp_path / "live") if path.suffix == ".safetensors")
        optimizer.run.pager.flush()
        layout = optimizer.run.layout
        of_modules = {layout.fsdp_modules[layout.pages[page].fsdp_module].name for page in written}
        assert of_modules <= {*LAYERS}  # pending updates
        expected = content(model, optimizer)
    weights = {name: expected[name] for name, _ in Model().named_parameters()}
    assert differences(weights, load_file(file)) == []


def test_checkpoints_contain_changes_in_memory_between_steps(tmp_path: Path) -> None:
    model = sharded(LAYERS, frozen=("embed",))
    with offload(model, make_optimizer(model), tmp_path) as optimizer:
        train(model, optimizer, range(1))
        optimizer.save_checkpoint()
        model.embed.weight.data.mul_(-1)
        with torch.no_grad():
            model.head.bias.fill_(2.0)
        optimizer.state[model.head.bias]["exp_avg"].fill_(3.0)
        expected = content(model, optimizer)
        assert optimizer.read_state("head.bias")["exp_avg"].tolist() == [3.0] * 65
        optimizer.save_checkpoint()
    model = sharded(LAYERS, frozen=("embed",))
    with offload(model, make_optimizer(model), tmp_path, run={"resume": "latest"}) as optimizer:
        assert differences(expected, content(model, optimizer)) == []


def test_mix_with_cpu_offload_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0], mesh=infinity.mesh(DEVICE), offload_policy=infinity.NVMeOffloadPolicy())
    fully_shard(model, mesh=infinity.mesh(DEVICE), offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(UnsupportedError, match=r"FSDP module root .* CPUOffloadPolicy"):
        offload(model, torch.optim.AdamW(model.parameters()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_changes_in_memory_that_cannot_be_saved_are_rejected(tmp_path: Path) -> None:
    model = sharded(LAYERS, frozen=("embed",))
    with offload(model, make_optimizer(model), tmp_path) as optimizer:
        model.embed.requires_grad_(True)
        backward(model, 0, 1)
        with pytest.raises(UnsupportedError, match="requires_grad_"):
            optimizer.step()
        optimizer.zero_grad()
        model.embed.requires_grad_(False)
        model.embed.load_state_dict(model.embed.state_dict(), assign=True)
        with pytest.raises(UnsupportedError, match=r"embed.weight was replaced"):
            optimizer.save_checkpoint()
