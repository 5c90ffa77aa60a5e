"""Patterns that read, modify, copy or save weights."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from support import models
from support.loop_pattern import EARLY, LATE, STEPS, UNSUPPORTED, UPDATE_SCHEDULE, Loop, pattern, steps
from support.patterns_forward import BETWEEN
from support.train import OPTIMIZERS


@pattern("weights read between steps")
def read(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        loop.record_weights(model)
        loop.record("local", model.head.weight.to_local())
        loop.record("data", model.head.weight.data)
        loop.record("norm", model.head.weight.norm())


@pattern("weights read between backward and step()", in_backward_error=BETWEEN)
def read_before_step(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        loop.record_weights(model)


@pattern("ratio of update norm to weight norm logged", update_schedules=LATE)
def update_ratio(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        for old, new in zip(before, model.parameters(), strict=True):
            loop.record("ratio", ((new - old).norm() / old.norm()))
        optimizer.zero_grad()


@pattern("norm of all weights: sum of squares, get_total_norm")
def weight_norm(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        loop.record("norm", sum(param.detach().pow(2).sum() for param in model.parameters()) ** 0.5)
        loop.record("norms", nn.utils.get_total_norm(list(model.parameters())))


@pattern("a weight penalty computed outside of forward and added to the loss")
def weight_penalty(loop: Loop) -> None:
    # Autograd assigns gradients to sharded parameters in addition to the gradients that FSDP2 reduces.
    model, optimizer = loop.begin(policy="fp32")
    for step in steps(optimizer):
        loss = loop.loss(model, step)
        penalty = sum(param.to_local().square().sum() for param in model.blocks.parameters())
        (loss + 1e-3 * penalty).backward()


@pattern("a weight penalty alone: backward without forward", in_backward_error=UPDATE_SCHEDULE)
def penalty_alone(loop: Loop) -> None:
    model, optimizer = loop.begin(policy="fp32")
    for _ in range(STEPS):
        sum(param.to_local().square().sum() for param in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
    loop.record_weights(model)


@pattern("moving average of weights")
def ema(loop: Loop) -> None:
    model, optimizer = loop.begin()
    mean = [param.detach().clone() for param in model.parameters()]
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        with torch.no_grad():
            for old, param in zip(mean, model.parameters(), strict=True):
                old.mul_(0.9).add_(param.detach(), alpha=0.1)
    for value in mean:
        loop.record("mean", value)


@pattern("moving average of weights with torch._foreach_lerp_", slow=True)
def ema_foreach(loop: Loop) -> None:
    model, optimizer = loop.begin()
    mean = [param.detach().clone() for param in model.parameters()]
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        with torch.no_grad():
            torch._foreach_lerp_(mean, [param.detach() for param in model.parameters()], 0.1)
    for value in mean:
        loop.record("mean", value)


@pattern("weights replaced by their average for an evaluation and then restored")
def ema_swapped(loop: Loop) -> None:
    model, optimizer = loop.begin()
    mean = [param.detach().clone() for param in model.parameters()]
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        with torch.no_grad():
            for old, param in zip(mean, model.parameters(), strict=True):
                old.mul_(0.5).add_(param.detach(), alpha=0.5)
            kept = [param.detach().clone() for param in model.parameters()]
            for value, param in zip(mean, model.parameters(), strict=True):
                param.copy_(value)
            loop.loss(model, 90)
            model.reshard()
            for value, param in zip(kept, model.parameters(), strict=True):
                param.copy_(value)


@pattern("lookahead: slow weights copied to the weights in every second step")
def lookahead(loop: Loop) -> None:
    model, optimizer = loop.begin()
    slow = [param.detach().clone() for param in model.parameters()]
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step % 2:
            with torch.no_grad():
                for value, param in zip(slow, model.parameters(), strict=True):
                    value.add_(param - value, alpha=0.5)
                    param.copy_(value)


@pattern(
    "torch.optim.swa_utils.AveragedModel created after offload()",
    UNSUPPORTED,
    "FSDP does not support deepcopy",
    note="FSDP2 raises the error",
    slow=True,
)
def averaged(loop: Loop) -> None:
    model, optimizer = loop.begin()
    mean = AveragedModel(model)
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        mean.update_parameters(model)


@pattern("an averaged model created before offload() and updated from the weights", slow=True)
def averaged_before(loop: Loop) -> None:
    model = models.build("toy")
    mean = models.build("toy")
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](model.parameters()))
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        with torch.no_grad():
            for value, param in zip(mean.parameters(), model.parameters(), strict=True):
                value.lerp_(param, 0.5)
    loop.record_weights(mean)


@pattern(
    "copy.deepcopy(model), for example for a teacher",
    UNSUPPORTED,
    "FSDP does not support deepcopy",
    note="FSDP2 raises the error",
)
def teacher(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.step(model, optimizer, 0)
    frozen = copy.deepcopy(model)
    for step in steps(optimizer):
        with torch.no_grad():
            target = loop.loss(frozen, step)
        (loop.loss(model, step) - target).abs().backward()


@pattern("copy.deepcopy of a parameter")
def copy_of_parameter(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.step(model, optimizer, 0)
    kept = copy.deepcopy(model.head.weight.detach())
    for step in range(1, STEPS):
        loop.step(model, optimizer, step)
    loop.record("kept", kept)


@pattern("best weights cloned and restored with load_state_dict")
def best(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 1:
            kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if step == 3:
            model.load_state_dict(kept)


@pattern(
    "best weights kept as a state_dict() without clone()",
    note="the tensors continue to change, as in memory",
    slow=True,
)
def best_not_cloned(loop: Loop) -> None:
    model, optimizer = loop.begin()
    kept: dict[str, Any] = {}
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 1:
            kept = model.state_dict()
        for name, value in kept.items():
            loop.record(name, value)


@pattern("best weights kept as copy.deepcopy(model.state_dict())", slow=True)
def best_copied(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 1:
            kept = copy.deepcopy(model.state_dict())
        if step == 3:
            model.load_state_dict(kept)


@pattern("load_state_dict(assign=True)", UNSUPPORTED, "assign|copy_", note="use `assign=False`")
def assign(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 1:
            kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if step == 3:
            model.load_state_dict(kept, assign=True)
    loop.trained.clear()


@pattern("torch.save(model.state_dict())")
def torch_save(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        loop.record("saved", len(file.getvalue()) > 1000)


@pattern("torch.save and torch.load of full tensors (full_tensor())", slow=True)
def torch_save_full(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        file = io.BytesIO()
        torch.save({name: value.full_tensor() for name, value in model.state_dict().items()}, file)
        file.seek(0)
        for name, value in torch.load(file).items():
            loop.record(name, value)


@pattern("get_model_state_dict with full_state_dict=True and cpu_offload=True", slow=True)
def model_state(loop: Loop) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        for name, value in found.items():
            loop.record(name, value)


@pattern("set_model_state_dict during training", slow=True)
def set_state(loop: Loop) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 1:
            kept = {name: value.clone() for name, value in get_model_state_dict(model).items()}
        if step == 3:
            set_model_state_dict(model, kept)


def modified_in_place(loop: Loop, change: Any) -> None:
    """Train, and apply `change` to the model after some steps."""
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step in (1, 3):
            with torch.no_grad():
                change(model)


@pattern("weights modified with p.clamp_")
def clamp(loop: Loop) -> None:
    modified_in_place(loop, lambda model: [p.clamp_(-0.1, 0.1) for p in model.parameters()])


@pattern("weights modified with p.data.clamp_")
def clamp_data(loop: Loop) -> None:
    modified_in_place(loop, lambda model: [p.data.clamp_(-0.1, 0.1) for p in model.parameters()])


@pattern("weights modified with torch._foreach_mul_", slow=True)
def decay(loop: Loop) -> None:
    modified_in_place(loop, lambda model: torch._foreach_mul_(list(model.parameters()), 0.9))


@pattern("weights modified with p.copy_(...)")
def copied(loop: Loop) -> None:
    modified_in_place(loop, lambda model: [p.copy_(p.clamp(-0.1, 0.1)) for p in model.parameters()])


@pattern("weights modified with p.data.copy_(...)", slow=True)
def copied_data(loop: Loop) -> None:
    modified_in_place(loop, lambda model: [p.data.copy_(p.clamp(-0.1, 0.1)) for p in model.parameters()])


@pattern("weights modified with p.to_local().copy_(...)", slow=True)
def copied_local(loop: Loop) -> None:
    modified_in_place(loop, lambda model: [p.to_local().copy_(p.to_local() * 0.5) for p in model.parameters()])


@pattern("weights modified with p.data = value")
def data_set(loop: Loop) -> None:
    def change(model: nn.Module) -> None:
        for param in model.parameters():
            param.data = param.detach().clone() * 0.5

    modified_in_place(loop, change)


@pattern("a weight replaced: module.weight = nn.Parameter(...)")
def replaced(loop: Loop) -> None:
    # Not useful, but consistent: in memory, FSDP2 continues to use the old parameter.
    modified_in_place(loop, lambda model: setattr(model.head, "bias", nn.Parameter(model.head.bias.detach() * 0.5)))


@pattern("a row modified: p.to_local()[3].zero_()")
def element(loop: Loop) -> None:
    modified_in_place(loop, lambda model: model.head.weight.to_local()[3].zero_())


@pattern("elements modified through a flat view", slow=True)
def element_of_view(loop: Loop) -> None:
    modified_in_place(loop, lambda model: model.head.weight.to_local().view(-1)[5:50].fill_(0.5))


@pattern("weights modified through .numpy()", UNSUPPORTED, "read-only", note="the array is a read-only copy")
def through_numpy(loop: Loop) -> None:
    def change(model: nn.Module) -> None:
        model.head.bias.to_local().detach().numpy()[:] = 0.25

    modified_in_place(loop, change)


@pattern("weights modified through a detached, transposed view", slow=True)
def through_transposed(loop: Loop) -> None:
    modified_in_place(loop, lambda model: model.head.weight.to_local().detach().t()[1].mul_(0.5))


@pattern("a weight reinitialized: nn.init.zeros_", slow=True)
def reinit(loop: Loop) -> None:
    modified_in_place(loop, lambda model: nn.init.zeros_(model.blocks[2].up.weight))


@pattern("reset_parameters() of a layer")
def reset(loop: Loop) -> None:
    modified_in_place(loop, lambda model: model.blocks[2].norm.reset_parameters())


@pattern("noise added to weights with p.copy_", slow=True)
def noise(loop: Loop) -> None:
    def change(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        for param in model.parameters():
            param.copy_(param + torch.randn((), generator=generator) * 0.01)

    modified_in_place(loop, change)


@pattern("weights pruned with a mask and p.copy_", slow=True)
def pruned(loop: Loop) -> None:
    modified_in_place(loop, lambda model: [p.copy_(p * (p.abs() > 0.01)) for p in model.parameters()])


@pattern("one parameter copied to another", slow=True)
def copied_over(loop: Loop) -> None:
    modified_in_place(loop, lambda model: model.blocks[0].up.weight.copy_(model.blocks[1].up.weight))


@pattern("vector_to_parameters", slow=True)
def vector(loop: Loop) -> None:
    def change(model: nn.Module) -> None:
        parts = [p.to_local() for p in model.head.parameters()]
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parts) * 0.5, parts)

    modified_in_place(loop, change)


@pattern("a bias modified in place between forward and backward")
def between(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        loss = loop.loss(model, step)
        if step == 2:
            with torch.no_grad():
                model.blocks[1].up.bias.mul_(0.5)
        loss.backward()


@pattern("weights modified with p.copy_ between forward and backward")
def between_copied(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        loss = loop.loss(model, step)
        if step == 2:
            with torch.no_grad():
                for param in model.blocks.parameters():
                    param.copy_(param * 0.5)
        loss.backward()


@pattern("weights modified with p.copy_ between backward and step()", update_schedules=("in_forward", "after_backward"))
def copied_before_step(loop: Loop) -> None:
    for step, model, _ in loop.backwards():
        if step == 3:
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(param * 0.5)


pattern(
    "weights modified with p.copy_ between backward and step(); updates in backward",
    UNSUPPORTED,
    BETWEEN,
    update_schedules=("auto", *EARLY),
)(copied_before_step)


@pattern("model.to(torch.bfloat16) after training", UNSUPPORTED, "offload", note="convert the model before `offload()`")
def to_bf16(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.steps(model, optimizer)
    model.to(torch.bfloat16)
    loop.record_weights(model)


@pattern(
    "model.double() after training", UNSUPPORTED, "offload", note="convert the model before `offload()`", slow=True
)
def to_double(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.steps(model, optimizer)
    model.double()
    loop.record_weights(model)


@pattern('model.to("cpu") and model.float() without effect')
def to_same(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        model.to("cpu").float().train()


@pattern("model.apply and modules() without modifications", slow=True)
def apply(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        model.apply(lambda module: module.train())
        loop.record("parameters", sum(param.numel() for param in model.parameters()))
        loop.record("bytes", sum(param.numel() * param.element_size() for param in model.parameters()))
        loop.record("text", len(str(model)) > 100)


@pattern("print(parameter)", ranks=(1,), slow=True)
def printing(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        loop.record("length", len(f"{model.head.bias} {model.head.bias.full_tensor()}") > 10)


@pattern("full weights loaded into a local copy of the model", slow=True)
def exported(loop: Loop) -> None:
    model, optimizer = loop.begin()
    twin = models.Toy()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        twin.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
        loop.record("twin", next(twin.parameters()))
