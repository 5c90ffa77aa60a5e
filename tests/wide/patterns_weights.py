"""Patterns that read, modify, copy or save weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from support.loop_pattern import BETWEEN, EARLY, Loop, pattern


@pattern("weights, their norms and their sizes read between steps")
def read(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for _ in loop.steps(model, optimizer):
        loop.record_weights(model)
        loop.record("local", model.head.weight.to_local())
        loop.record("data", model.head.weight.data)
        loop.record("norm", nn.utils.get_total_norm(list(model.parameters())))
        loop.record("bytes", sum(param.numel() * param.element_size() for param in model.parameters()))
        loop.record("text", len(f"{model} {model.head.bias.to_local()}") > 100)


@pattern("weights read between backward and step(), for the norm of the update", early_error=BETWEEN)
def read_before_step(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(5):
        loop.loss(model, step).backward()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        for old, new in zip(before, model.parameters(), strict=True):
            loop.record("ratio", ((new - old).norm() / old.norm()))
        optimizer.zero_grad()


@pattern("a weight penalty computed outside of forward and added to the loss")
def weight_penalty(loop: Loop) -> None:
    # Autograd assigns gradients to sharded parameters in addition to the gradients that FSDP2 reduces.
    model, optimizer = loop.begin(policy="fp32")
    for step in loop.forwards(optimizer):
        loss = loop.loss(model, step)
        penalty = sum(param.to_local().square().sum() for param in model.blocks.parameters())
        (loss + 1e-3 * penalty).backward()


@pattern("a weight penalty alone: backward without forward")
def penalty_alone(loop: Loop) -> None:
    model, optimizer = loop.begin(policy="fp32")
    for _ in loop.forwards(optimizer):
        sum(param.to_local().square().sum() for param in model.parameters()).backward()
    loop.record_weights(model)


@pattern("a moving average of weights that replaces the weights for an evaluation, or permanently (lookahead)")
def moving_average(loop: Loop) -> None:
    model, optimizer = loop.begin()
    params = list(model.parameters())
    mean = [param.detach().clone() for param in params]
    for step in loop.steps(model, optimizer):
        with torch.no_grad():
            torch._foreach_lerp_(mean, [param.detach() for param in params], 0.1)
            for old, param in zip(mean, params, strict=True):
                old.mul_(0.5).add_(param.detach(), alpha=0.5)
            kept = [param.detach().clone() for param in params]
            for value, param in zip(mean, params, strict=True):
                param.copy_(value)
            loop.loss(model, 90)
            model.reshard()
            if step % 2:
                for value, param in zip(kept, params, strict=True):
                    param.copy_(value)
    for value in mean:
        loop.record("mean", value)


@pattern(
    "copy.deepcopy(model), for example for a teacher",
    "FSDP does not support deepcopy",
    note="FSDP2 raises the error",
)
def teacher(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.step(model, optimizer, 0)
    copy.deepcopy(model)


@pattern("best weights kept with clone(), copy.deepcopy or get_model_state_dict, and loaded again")
def best(loop: Loop) -> None:
    model, optimizer = loop.begin()
    kept: list[dict[str, Any]] = []
    current: dict[str, Any] = {}
    for step in loop.steps(model, optimizer, 7):
        if step == 1:
            kept = [
                {name: value.detach().clone() for name, value in model.state_dict().items()},
                copy.deepcopy(model.state_dict()),
                {name: value.clone() for name, value in get_model_state_dict(model).items()},
            ]
            current = model.state_dict()  # continues to change
        if step in (3, 4):
            model.load_state_dict(kept[step - 3])
        elif step == 5:
            set_model_state_dict(model, kept[2])
        for name, value in current.items():
            loop.record(name, value)


@pattern("load_state_dict(assign=True)", "assign|copy_", note="use `assign=False`")
def assign(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.train(model, optimizer, 2)
    kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    loop.train(model, optimizer, 2)
    model.load_state_dict(kept, assign=True)
    loop.trained.clear()


def modified_in_place(loop: Loop, *changes: Callable[[Any], object]) -> None:
    """Train, and apply one of the changes to the model after each step."""
    model, optimizer = loop.begin()
    for step in loop.steps(model, optimizer, 1 + len(changes)):
        if step < len(changes):
            with torch.no_grad():
                changes[step](model)


@pattern(
    "weights modified in place: clamp_, copy_, p.data.copy_, p.data = value, rows, views, _foreach_*, "
    "nn.init, reset_parameters(), vector_to_parameters"
)
def modified(loop: Loop) -> None:
    def data_set(model: Any) -> None:
        for param in model.parameters():
            param.data = param.detach().clone() * 0.5

    def vector(model: Any) -> None:
        parts = [p.to_local() for p in model.head.parameters()]
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parts) * 0.5, parts)

    modified_in_place(
        loop,
        lambda m: [p.clamp_(-0.1, 0.1) for p in m.parameters()],
        lambda m: torch._foreach_mul_(list(m.parameters()), 0.9),
        lambda m: [p.data.copy_(p * (p.abs() > 0.01)) for p in m.parameters()],
        lambda m: [p.to_local().copy_(p.to_local() * 0.5) for p in m.parameters()],
        data_set,
        lambda m: (m.head.weight.to_local()[3].zero_(), m.head.weight.to_local().view(-1)[5:50].fill_(0.5)),
        lambda m: m.head.weight.to_local().detach().t()[1].mul_(0.5),
        lambda m: (nn.init.zeros_(m.blocks[2].up.weight), m.blocks[2].norm.reset_parameters()),
        lambda m: m.blocks[0].up.weight.copy_(m.blocks[1].up.weight),
        vector,
        # Not useful, but consistent: in memory, FSDP2 continues to use the old parameter.
        lambda m: setattr(m.head, "bias", nn.Parameter(m.head.bias.detach() * 0.5)),
    )


@pattern("weights modified through .numpy()", "read-only", note="the array is a read-only copy")
def through_numpy(loop: Loop) -> None:
    modified_in_place(loop, lambda m: m.head.bias.to_local().detach().numpy().__setitem__(slice(None), 0.25))


@pattern("weights modified between forward and backward")
def modified_before_backward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.forwards(optimizer):
        loss = loop.loss(model, step)
        with torch.no_grad():
            if step == 1:
                model.blocks[1].up.bias.mul_(0.5)
            for param in model.blocks.parameters() if step == 2 else ():
                param.copy_(param * 0.5)
        loss.backward()


@pattern("weights modified between backward and step() in some steps", early_error=BETWEEN, early=EARLY)
def modified_before_step(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.backwards(model, optimizer):
        if step == 3:
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(param * 0.5)


@pattern("model.to(torch.bfloat16)", "offload", note="convert the model before `offload()`")
def converted(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.train(model, optimizer, 2)
    model.to(torch.bfloat16)
    loop.record_weights(model)


@pattern('model.to("cpu"), float(), train() and apply() without effect')
def without_effect(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for _ in loop.steps(model, optimizer):
        model.to("cpu").float().apply(lambda module: module.train())
