"""Tests of parameters that `fully_shard` ignores: they stay in memory and are trained and saved as in plain FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import UnsupportedError
from infinity.formats.dcp import export_dcp
from infinity.formats.safetensors import export_safetensors
from infinity.fsdp.sharded_model import IGNORED_BYTES
from support.ranks import RankPool

STEPS, HALF, CLIP = 3, 2, 0.5


class Gated(nn.Module):
    """Layer with a small gate, whose output a 0-dimensional parameter scales."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.inner = nn.Linear(16, 16)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.outer = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(x)) * self.gate) * self.scale.exp()


def sharded(device: str = "cpu") -> Gated:
    torch.manual_seed(0)
    with torch.device(device):
        model = Gated()
    ignored = {model.scale, model.gate}
    fully_shard(model.inner, mesh=infinity.mesh())
    fully_shard(model, mesh=infinity.mesh(), ignored_params=ignored)
    return model


def make_optimizer(model: Gated, kind: str) -> Any:
    if kind == "several":
        rest = [param for param in model.parameters() if param is not model.scale]
        return [torch.optim.SGD([model.scale], lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01, foreach=False)]
    groups = [{"params": [model.scale, *model.inner.parameters()], "lr": 0.02, "weight_decay": 0.0},
              {"params": [model.gate, *model.outer.parameters()]}]  # fmt: skip
    return getattr(torch.optim, kind)(groups, lr=0.01, foreach=False)


def backward(model: Gated, step: int, *, reduce: bool) -> None:
    torch.manual_seed(100 * step + dist.get_rank())
    model(torch.randn(8, 16)).square().mean().backward()
    for param in (model.scale, model.gate) if reduce else ():
        dist.all_reduce(param.grad)
        param.grad.div_(dist.get_world_size())


def clip_in_memory(model: Gated) -> torch.Tensor:
    """Clip the gradients as `PagedOptimizer.clip_grad_norm_` does. PyTorch's function rejects a mix of both kinds."""
    paged = [param for param in model.parameters() if isinstance(param, DTensor)]
    ignored = [model.scale, model.gate]
    of_paged = torch.nn.utils.get_total_norm([param.grad for param in paged]).full_tensor()
    norm = torch.stack([of_paged, torch.nn.utils.get_total_norm([param.grad for param in ignored])]).norm()
    torch.nn.utils.clip_grads_with_norm_(ignored, CLIP, norm)
    torch.nn.utils.clip_grads_with_norm_(paged, CLIP, norm)
    return norm


def values(model: Gated) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in model.state_dict().items()
    }


def in_memory(kind: str, *, clip: bool, reduce: bool, steps: int = STEPS) -> tuple[Gated, Any, dict[str, torch.Tensor]]:
    """Train in plain FSDP2; return the model, its optimizer, and the final weights with the norm of the last step."""
    model = sharded()
    made = make_optimizer(model, kind)
    optimizers = made if isinstance(made, list) else [made]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) for optimizer in optimizers]
    norm = torch.zeros(())
    for step in range(steps):
        backward(model, step, reduce=reduce)
        norm = clip_in_memory(model) if clip else norm
        for one in (*optimizers, *schedules):
            one.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return model, made, {**values(model), "norm": norm}


def offload(model: nn.Module, optimizer: Any, folder: str, *, weights: str | None = None, **settings: Any) -> Any:
    config = {"storage": {"paths": [folder]}, "memory": {"host_bytes": "16MiB"}, **settings}
    return infinity.offload(model, optimizer, config, weights=weights)


def on_nvme(kind: str, folder: str, *, clip: bool, reduce: bool, schedule: str) -> dict[str, torch.Tensor]:
    """Train offloaded; save a checkpoint after half of the steps, and continue from it with a new model."""
    norm, found = torch.zeros(()), {}
    for first, last, resume in ((0, HALF, ""), (HALF, STEPS, "latest")):
        model = sharded()
        if resume:
            with torch.no_grad():
                model.scale.zero_()
                model.gate.zero_()
        base = make_optimizer(model, kind)
        bases = base if isinstance(base, list) else [base]
        schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.9) for one in bases]
        optimizer = offload(model, base, folder, update={"schedule": schedule}, run={"resume": resume})
        with optimizer:
            for one, saved in zip(schedules, optimizer.resumed_extra.get("schedules", []), strict=bool(resume)):
                one.load_state_dict(saved)
            for step in range(first, last):
                backward(model, step, reduce=reduce)
                norm = optimizer.clip_grad_norm_(CLIP) if clip else norm
                optimizer.step()
                for one in schedules:
                    one.step()
                optimizer.zero_grad()
            found = {**values(model), "norm": norm}
            optimizer.save_checkpoint({"schedules": [one.state_dict() for one in schedules]})
    return found


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    assert expected.keys() == found.keys()
    return [name for name, value in expected.items() if not torch.equal(value, found[name])]


def compare(kind: str, clip: bool, reduce: bool, schedule: str, folder: str) -> list[str]:
    _, _, expected = in_memory(kind, clip=clip, reduce=reduce)
    assert not torch.equal(expected["scale"], torch.tensor(2.0))
    return differences(expected, on_nvme(kind, folder, clip=clip, reduce=reduce, schedule=schedule))


@pytest.mark.parametrize(
    ("kind", "clip", "schedule"),
    [
        ("AdamW", True, "in_forward"),
        ("AdamW", False, "in_backward"),
        ("NAdam", True, "after_backward"),
        ("several", True, "in_forward"),
    ],
)
def test_ignored_parameters_train_and_resume_as_in_memory(kind: str, clip: bool, schedule: str, tmp_path: Path) -> None:
    assert compare(kind, clip, False, schedule, str(tmp_path)) == []


@pytest.mark.parametrize("reduce", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_ignored_parameters_on_two_ranks_train_as_in_memory(pair: RankPool, reduce: bool, tmp_path: Path) -> None:
    """FSDP2 does not reduce their gradients, so that the ranks' values differ unless the caller reduces them."""
    assert pair.run(compare, "AdamW", reduce, reduce, "in_forward", str(tmp_path)) == [[], []]


def save_after_one_step(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    model = sharded()
    with offload(model, make_optimizer(model, "AdamW"), folder) as optimizer:
        backward(model, 0, reduce=True)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.save_checkpoint()
        return model.gate.detach().clone(), optimizer.state[model.gate]["exp_avg"]


def test_ignored_parameters_resume_on_fewer_ranks(pair: RankPool, tmp_path: Path) -> None:
    (gate, moment), _ = pair.run(save_after_one_step, str(tmp_path))
    model = sharded()
    with offload(model, make_optimizer(model, "AdamW"), str(tmp_path), run={"resume": "latest"}) as optimizer:
        assert optimizer.steps == 1
        assert torch.equal(model.gate, gate)
        assert torch.equal(optimizer.state[model.gate]["exp_avg"], moment)


def test_skipped_step_updates_no_ignored_parameter(tmp_path: Path) -> None:
    model = sharded()
    with offload(model, make_optimizer(model, "AdamW"), str(tmp_path)) as optimizer:
        before = values(model)
        backward(model, 0, reduce=False)
        model.scale.grad.fill_(float("inf"))
        assert not torch.isfinite(optimizer.clip_grad_norm_(1.0))
        optimizer.step()
        optimizer.zero_grad()
        assert model.scale.grad is None
        assert differences(before, values(model)) == []
        assert model.scale not in optimizer.state


def test_optimizer_state_dict_contains_ignored_parameters(tmp_path: Path) -> None:
    plain, model = sharded(), sharded()
    expected = make_optimizer(plain, "AdamW")
    with offload(model, make_optimizer(model, "AdamW"), str(tmp_path)) as optimizer:
        for one, of_one in ((plain, expected), (model, optimizer)):
            backward(one, 0, reduce=False)
            of_one.step()
            of_one.zero_grad()
        state = optimizer.state_dict()
        there = expected.state_dict()["state"]
        assert state["state"].keys() == there.keys()
        assert torch.equal(state["state"][0]["exp_avg"], there[0]["exp_avg"])
        optimizer.load_state_dict(expected.state_dict())
        assert torch.equal(optimizer.state[model.gate]["exp_avg_sq"], expected.state[plain.gate]["exp_avg_sq"])


def test_exports_contain_ignored_parameters(tmp_path: Path) -> None:
    model = sharded()
    with offload(model, make_optimizer(model, "AdamW"), str(tmp_path / "run")) as optimizer:
        backward(model, 0, reduce=False)
        optimizer.step()
        optimizer.zero_grad()
        expected = values(model)
        (live,) = optimizer.save_pretrained(tmp_path / "live")
        optimizer.save_checkpoint()
        reader = CheckpointReader(optimizer.run.folder)
        (exported,) = export_safetensors(reader, tmp_path / "export", file_bytes=2**20)
    assert differences(expected, load_file(live)) == differences(expected, load_file(exported)) == []


def resume_from_dcp(folder: str) -> list[str]:
    """Continue from a `torch.distributed.checkpoint` folder of plain FSDP2, and from one that a checkpoint exports."""
    _, _, expected = in_memory("AdamW", clip=True, reduce=True, steps=HALF + 1)
    Path(folder).mkdir(exist_ok=True)
    plain, optimizer, _ = in_memory("AdamW", clip=True, reduce=True, steps=HALF)
    model_state, optimizer_state = get_state_dict(plain, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=f"{folder}/saved")
    wrong = []
    for source in ("saved", "exported"):
        model = sharded(device="meta")
        base = make_optimizer(model, "AdamW")
        torch.optim.lr_scheduler.StepLR(base, 1, 0.9)
        with offload(model, base, f"{folder}/{source}-run", weights=f"{folder}/{source}") as optimizer:
            if source == "saved":
                optimizer.save_checkpoint()
                if dist.get_rank() == 0:
                    export_dcp(CheckpointReader(optimizer.run.folder), Path(folder, "exported"))
                dist.barrier()
            backward(model, HALF, reduce=True)
            norm = optimizer.clip_grad_norm_(CLIP)
            optimizer.step()
            wrong += differences(expected, {**values(model), "norm": norm})
    return wrong


def test_ignored_parameters_resume_from_distributed_checkpoints(tmp_path: Path) -> None:
    assert resume_from_dcp(str(tmp_path)) == []


def test_large_ignored_parameters_are_rejected_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_parameter("table", nn.Parameter(torch.zeros(IGNORED_BYTES // 4 + 1)))
    fully_shard(model, mesh=infinity.mesh(), ignored_params={model.table})
    with pytest.raises(UnsupportedError, match=r"ignored_params .*: table \(.*at most 16 MiB"):
        offload(model, torch.optim.AdamW(model.parameters()), str(tmp_path))


def clip_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 30, (4, 8))
    ids[:, -1] = 31
    return {"input_ids": ids, "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True}


def train_clip(folder: str) -> list[torch.Tensor]:
    """Train a small CLIP; return the scale at first, after each step, after resuming, and in the saved folder."""
    text = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 8, "eos_token_id": 31, "bos_token_id": 1,
            "pad_token_id": 0}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 32, "patch_size": 16}  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    scales = []
    for resume in ("", "latest"):
        model = infinity.from_config(config, auto_class="AutoModel", mesh=infinity.mesh())
        base = torch.optim.AdamW(model.parameters(), lr=0.01)
        with offload(model, base, folder, run={"resume": resume}) as optimizer:
            scales.append(model.logit_scale.detach().clone())
            for step in range(0 if resume else 2):
                torch.manual_seed(10 * step + dist.get_rank())
                model(**clip_batch()).loss.backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                scales.append(model.logit_scale.detach().clone())
            if not resume:
                optimizer.save_checkpoint()
                optimizer.save_pretrained(Path(folder, "saved"))
    saved = transformers.CLIPModel.from_pretrained(Path(folder, "saved"))
    return [*scales, saved.logit_scale.detach()]


def test_clip_trains_resumes_and_saves_with_the_same_scale_on_all_ranks(pair: RankPool, tmp_path: Path) -> None:
    one, other = pair.run(train_clip, str(tmp_path))
    assert one == other
    initial, _, last, resumed, saved = one
    assert torch.isfinite(initial)
    assert initial != last
    assert last == resumed == saved
