"""Habits that read, write, copy or save weights."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from support import models
from support.habit import EARLY, LATE, STEPS, UNSUPPORTED, UPDATE_SCHEDULE, Loop, habit
from support.habits_forwards import BETWEEN
from support.train import OPTIMIZERS


@habit("weights read between steps")
def read(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        loop.look(model)
        loop.see("local", model.head.weight.to_local())
        loop.see("data", model.head.weight.data)
        loop.see("norm", model.head.weight.norm())


@habit("weights read between backward and step()", update_schedules=LATE)
def read_before_step(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        loop.look(model)
        optimizer.step()
        optimizer.zero_grad()


habit(
    "weights read between backward and step(); in_backward is asked for", UNSUPPORTED, BETWEEN, update_schedules=EARLY
)(read_before_step)


@habit("ratio of update to weight logged", update_schedules=LATE)
def update_ratio(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        for old, new in zip(before, model.parameters(), strict=True):
            loop.see("ratio", ((new - old).norm() / old.norm()))
        optimizer.zero_grad()


@habit("norm of all weights: parameters_to_vector, sums of squares")
def weight_norm(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        loop.see("norm", sum(param.detach().pow(2).sum() for param in model.parameters()) ** 0.5)
        loop.see("norms", nn.utils.get_total_norm(list(model.parameters())))


@habit("a penalty on weights of layers, outside of forward, added to the loss")
def weight_penalty(loop: Loop) -> None:
    """Autograd gives sharded parameters gradients, beside those that FSDP2 reduces."""
    model, optimizer = loop.begin(policy="fp32")
    for step in range(STEPS):
        loss = loop.loss(model, step)
        penalty = sum(param.to_local().square().sum() for param in model.blocks.parameters())
        (loss + 1e-3 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()


@habit("a penalty on weights alone: a backward without any forward", early=UPDATE_SCHEDULE)
def penalty_alone(loop: Loop) -> None:
    model, optimizer = loop.begin(policy="fp32")
    for _ in range(STEPS):
        sum(param.to_local().square().sum() for param in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
    loop.look(model)


@habit("moving average of weights in a loop of one's own")
def ema(loop: Loop) -> None:
    model, optimizer = loop.begin()
    mean = [param.detach().clone() for param in model.parameters()]
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        with torch.no_grad():
            for old, param in zip(mean, model.parameters(), strict=True):
                old.mul_(0.9).add_(param.detach(), alpha=0.1)
    for value in mean:
        loop.see("mean", value)


@habit("moving average with torch._foreach_lerp_", slow=True)
def ema_foreach(loop: Loop) -> None:
    model, optimizer = loop.begin()
    mean = [param.detach().clone() for param in model.parameters()]
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        with torch.no_grad():
            torch._foreach_lerp_(mean, [param.detach() for param in model.parameters()], 0.1)
    for value in mean:
        loop.see("mean", value)


@habit("weights swapped with their average for an evaluation, and back")
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


@habit("lookahead: weights set back to slow ones every second step")
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


@habit(
    "AveragedModel of torch.optim.swa_utils",
    UNSUPPORTED,
    "FSDP does not support deepcopy",
    note="by FSDP2 itself",
    slow=True,
)
def averaged(loop: Loop) -> None:
    model, optimizer = loop.begin()
    mean = AveragedModel(model)
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        mean.update_parameters(model)


@habit("AveragedModel made before offload, fed with the weights after it", slow=True)
def averaged_before(loop: Loop) -> None:
    model = models.build("toy")
    mean = models.build("toy")
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](model.parameters()))
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        with torch.no_grad():
            for value, param in zip(mean.parameters(), model.parameters(), strict=True):
                value.lerp_(param, 0.5)
    loop.look(mean)


@habit("deepcopy of the model, for a teacher", UNSUPPORTED, "FSDP does not support deepcopy", note="by FSDP2 itself")
def teacher(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.step(model, optimizer, 0)
    frozen = copy.deepcopy(model)
    for step in range(STEPS):
        with torch.no_grad():
            aim = loop.loss(frozen, step)
        (loop.loss(model, step) - aim).abs().backward()
        optimizer.step()
        optimizer.zero_grad()


@habit("deepcopy of one parameter")
def copy_of_parameter(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.step(model, optimizer, 0)
    kept = copy.deepcopy(model.head.weight.detach())
    for step in range(1, STEPS):
        loop.step(model, optimizer, step)
    loop.see("kept", kept)


@habit("best weights kept with clone() and put back with load_state_dict")
def best(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 1:
            kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if step == 3:
            model.load_state_dict(kept)


@habit(
    "best weights kept with a plain state_dict(), whose tensors continue to change",
    note="of a moment in memory too",
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
            loop.see(name, value)


@habit("best weights kept with copy.deepcopy(model.state_dict())", slow=True)
def best_copied(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 1:
            kept = copy.deepcopy(model.state_dict())
        if step == 3:
            model.load_state_dict(kept)


@habit("load_state_dict(assign=True)", UNSUPPORTED, "assign|copy_")
def assign(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 1:
            kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if step == 3:
            model.load_state_dict(kept, assign=True)
    loop.trained.clear()


@habit("torch.save(model.state_dict())")
def torch_save(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        loop.see("saved", len(file.getvalue()) > 1000)


@habit("torch.save of whole tensors (full_tensor()) and torch.load", slow=True)
def torch_save_whole(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        file = io.BytesIO()
        torch.save({name: value.full_tensor() for name, value in model.state_dict().items()}, file)
        file.seek(0)
        for name, value in torch.load(file).items():
            loop.see(name, value)


@habit("get_model_state_dict, whole and on the CPU", slow=True)
def model_state(loop: Loop) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        for name, value in found.items():
            loop.see(name, value)


@habit("set_model_state_dict in the middle of training", slow=True)
def set_state(loop: Loop) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 1:
            kept = {name: value.clone() for name, value in get_model_state_dict(model).items()}
        if step == 3:
            set_model_state_dict(model, kept)


def in_place(loop: Loop, change: Any) -> None:
    """Change weights in some steps."""
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step in (1, 3):
            with torch.no_grad():
                change(model)


@habit("weights clamped in place: p.clamp_")
def clamp(loop: Loop) -> None:
    in_place(loop, lambda model: [p.clamp_(-0.1, 0.1) for p in model.parameters()])


@habit("weights clamped through .data: p.data.clamp_")
def clamp_data(loop: Loop) -> None:
    in_place(loop, lambda model: [p.data.clamp_(-0.1, 0.1) for p in model.parameters()])


@habit("weights decayed by hand: p.mul_, torch._foreach_mul_", slow=True)
def decay(loop: Loop) -> None:
    in_place(loop, lambda model: torch._foreach_mul_(list(model.parameters()), 0.9))


@habit("weights changed by p.copy_(...)")
def copied(loop: Loop) -> None:
    in_place(loop, lambda model: [p.copy_(p.clamp(-0.1, 0.1)) for p in model.parameters()])


@habit("weights changed by p.data.copy_(...)", slow=True)
def copied_data(loop: Loop) -> None:
    in_place(loop, lambda model: [p.data.copy_(p.clamp(-0.1, 0.1)) for p in model.parameters()])


@habit("weights changed by p.to_local().copy_(...)", slow=True)
def copied_local(loop: Loop) -> None:
    in_place(loop, lambda model: [p.to_local().copy_(p.to_local() * 0.5) for p in model.parameters()])


@habit("weights changed by p.data = value")
def data_set(loop: Loop) -> None:
    def change(model: nn.Module) -> None:
        for param in model.parameters():
            param.data = param.detach().clone() * 0.5

    in_place(loop, change)


@habit("weights replaced: module.weight = nn.Parameter(...)")
def replaced(loop: Loop) -> None:
    """In memory FSDP2 goes on with the old one, the module shows the new one: nothing that should be done."""
    in_place(loop, lambda model: setattr(model.head, "bias", nn.Parameter(model.head.bias.detach() * 0.5)))


@habit("an element or a row set: p.to_local()[3] = 0")
def element(loop: Loop) -> None:
    in_place(loop, lambda model: model.head.weight.to_local()[3].zero_())


@habit("an element set through a flat view", slow=True)
def element_of_view(loop: Loop) -> None:
    in_place(loop, lambda model: model.head.weight.to_local().view(-1)[5:50].fill_(0.5))


@habit("weights changed through .numpy()", UNSUPPORTED, "read-only", note="the array is a copy")
def through_numpy(loop: Loop) -> None:
    def change(model: nn.Module) -> None:
        model.head.bias.to_local().detach().numpy()[:] = 0.25

    in_place(loop, change)


@habit("weights changed through a detached or transposed view", slow=True)
def through_transposed(loop: Loop) -> None:
    in_place(loop, lambda model: model.head.weight.to_local().detach().t()[1].mul_(0.5))


@habit("weights initialized again: nn.init.normal_", slow=True)
def reinit(loop: Loop) -> None:
    in_place(loop, lambda model: nn.init.zeros_(model.blocks[2].up.weight))


@habit("a layer's reset_parameters()")
def reset(loop: Loop) -> None:
    in_place(loop, lambda model: model.blocks[2].norm.reset_parameters())


@habit("noise added to weights by p.copy_", slow=True)
def noise(loop: Loop) -> None:
    def change(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        for param in model.parameters():
            param.copy_(param + torch.randn((), generator=generator) * 0.01)

    in_place(loop, change)


@habit("weights pruned by a mask with p.copy_", slow=True)
def pruned(loop: Loop) -> None:
    in_place(loop, lambda model: [p.copy_(p * (p.abs() > 0.01)) for p in model.parameters()])


@habit("one parameter copied onto another", slow=True)
def copied_over(loop: Loop) -> None:
    in_place(loop, lambda model: model.blocks[0].up.weight.copy_(model.blocks[1].up.weight))


@habit("vector_to_parameters", slow=True)
def vector(loop: Loop) -> None:
    def change(model: nn.Module) -> None:
        parts = [p.to_local() for p in model.head.parameters()]
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parts) * 0.5, parts)

    in_place(loop, change)


@habit("weights of a layer changed between forward and backward")
def between(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loss = loop.loss(model, step)
        if step == 2:
            with torch.no_grad():
                model.blocks[1].up.bias.mul_(0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@habit("weights changed by p.copy_ between forward and backward")
def between_copied(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loss = loop.loss(model, step)
        if step == 2:
            with torch.no_grad():
                for param in model.blocks.parameters():
                    param.copy_(param * 0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@habit("weights changed by p.copy_ between backward and step()", update_schedules=("in_forward", "after_backward"))
def copied_before_step(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        if step == 3:
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(param * 0.5)
        optimizer.step()
        optimizer.zero_grad()


habit(
    "weights changed by p.copy_ between backward and step(); updates run in backward",
    UNSUPPORTED,
    BETWEEN,
    update_schedules=("auto", *EARLY),
)(copied_before_step)


@habit("model.to(bfloat16) after training", UNSUPPORTED, "offload")
def to_bf16(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
    model.to(torch.bfloat16)
    loop.look(model)


@habit("model.double() after training", UNSUPPORTED, "offload", slow=True)
def to_double(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
    model.double()
    loop.look(model)


@habit('model.to("cpu"), model.float() where nothing changes')
def to_same(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        model.to("cpu").float().train()


@habit("model.apply and modules() that only look", slow=True)
def apply(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        model.apply(lambda module: module.train())
        loop.see("parameters", sum(param.numel() for param in model.parameters()))
        loop.see("bytes", sum(param.numel() * param.element_size() for param in model.parameters()))
        loop.see("text", len(str(model)) > 100)


@habit("printing a parameter", ranks=(1,), slow=True)
def printing(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        loop.see("length", len(f"{model.head.bias} {model.head.bias.full_tensor()}") > 10)


@habit("two forwards share weights that were copied out: a fresh local model", slow=True)
def exported(loop: Loop) -> None:
    model, optimizer = loop.begin()
    twin = models.Toy()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        twin.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
        loop.see("twin", next(twin.parameters()))
