"""Patterns around `step()`: schedulers, optimizer settings, param groups, closures, handled exceptions."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler as schedulers

from infinity import torch_private
from support import models
from support.loop_pattern import EARLY, STEPS, UNSUPPORTED, UPDATE_SCHEDULE, Loop, pattern, steps
from support.train import OPTIMIZERS, batch


def with_scheduler(loop: Loop, make: Any, *, before: bool, optimizer: str = "adamw", metric: bool = False) -> None:
    """Train with a scheduler that is created for the base optimizer (`before`) or for the offloaded one."""
    model = models.build("toy")
    base = OPTIMIZERS[optimizer](model.parameters())
    scheduler = make(base) if before else None
    trained = loop.offload(model, base)
    scheduler = scheduler or make(trained)
    for step in range(STEPS + 1):
        loss = loop.loss(model, step)
        loss.backward()
        trained.step()
        scheduler.step(loss.item()) if metric else scheduler.step()
        trained.zero_grad()
        group = trained.param_groups[0]
        loop.record("settings", [group["lr"], group.get("momentum"), group.get("betas"), base.param_groups[0]["lr"]])
        loop.record("last", scheduler.get_last_lr())


@pattern("LambdaLR created before offload()")
def lambda_before(loop: Loop) -> None:
    with_scheduler(loop, lambda opt: schedulers.LambdaLR(opt, lambda step: 1 / (1 + step)), before=True)


@pattern("LambdaLR created after offload()", slow=True)
def lambda_after(loop: Loop) -> None:
    with_scheduler(loop, lambda opt: schedulers.LambdaLR(opt, lambda step: 1 / (1 + step)), before=False)


@pattern("OneCycleLR, which cycles betas too")
def one_cycle(loop: Loop) -> None:
    with_scheduler(loop, lambda opt: schedulers.OneCycleLR(opt, 1e-2, total_steps=10), before=True)


@pattern("CosineAnnealingWarmRestarts", slow=True)
def restarts(loop: Loop) -> None:
    with_scheduler(loop, lambda opt: schedulers.CosineAnnealingWarmRestarts(opt, 2), before=False)


@pattern("CyclicLR, which cycles momentum")
def cyclic(loop: Loop) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        return schedulers.CyclicLR(optimizer, 1e-3, 1e-1, step_size_up=2)

    with_scheduler(loop, make, before=False, optimizer="sgd_nesterov")


@pattern("ReduceLROnPlateau", slow=True)
def plateau(loop: Loop) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        return schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.2)

    with_scheduler(loop, make, before=True, metric=True)


@pattern("SequentialLR with warm-up and cosine annealing", slow=True)
def sequential(loop: Loop) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.CosineAnnealingLR(optimizer, 4)]
        return schedulers.SequentialLR(optimizer, parts, [2])

    with_scheduler(loop, make, before=False)


@pattern("a scheduler with a tensor learning rate", slow=True)
def tensor_lr(loop: Loop) -> None:
    model, optimizer = loop.begin(optimizer="adamw_tensor")
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        scheduler.step()
        loop.record("lr", float(optimizer.param_groups[0]["lr"]))


@pattern("scheduler.step() before optimizer.step()", in_backward_error="changed")
def scheduler_first(loop: Loop) -> None:
    model, optimizer = loop.begin()
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    for step in steps(optimizer):
        loop.loss(model, step).backward()
        scheduler.step()


@pattern("a scheduler's state_dict loaded into a new scheduler", slow=True)
def scheduler_state(loop: Loop) -> None:
    model, optimizer = loop.begin()
    scheduler = schedulers.CosineAnnealingLR(optimizer, 10)
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        scheduler.step()
        state = scheduler.state_dict()
        scheduler = schedulers.CosineAnnealingLR(optimizer, 10)
        scheduler.load_state_dict(state)
        loop.record("lr", scheduler.get_last_lr())


@pattern("lr set before forward")
def lr_by_hand(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        loop.step(model, optimizer, step)


@pattern("lr set between forward and backward", slow=True)
def lr_before_backward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        loss = loop.loss(model, step)
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
        loss.backward()


@pattern("lr set between backward and step()", in_backward_error="lr was changed.*before backward")
def lr_after_backward(loop: Loop) -> None:
    for step, _, optimizer in loop.backwards():
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)


@pattern(
    "lr set between backward and step() in a single step; update.schedule = auto",
    UNSUPPORTED,
    "lr was changed",
    note="set `in_forward` or `after_backward`",
    update_schedules=("auto",),
)
def lr_in_one_step(loop: Loop) -> None:
    for step, _, optimizer in loop.backwards():
        if step == 3:
            optimizer.param_groups[0]["lr"] *= 0.5


@pattern("lr set on the base optimizer", slow=True)
def lr_of_base(loop: Loop) -> None:
    model = models.build("toy")
    base = OPTIMIZERS["adamw"](model.parameters())
    optimizer = loop.offload(model, base)
    for step in range(STEPS):
        for group in base.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        loop.step(model, optimizer, step)


@pattern("lr = 0 in some steps", slow=True)
def lr_zero(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.0 if step in (0, 3) else 1e-3
        loop.step(model, optimizer, step)


@pattern("weight decay and betas set in every step")
def decay_schedule(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        optimizer.param_groups[0].update(weight_decay=0.1 * step, betas=(0.9 - 0.01 * step, 0.99))
        loop.step(model, optimizer, step)


@pattern("a param group with its own lr for each layer")
def groups(loop: Loop) -> None:
    model = models.build("toy")
    parts = [model.embedding, *model.blocks, model.head]
    groups = [{"params": list(part.parameters()), "lr": 1e-3 * 0.7**depth} for depth, part in enumerate(parts)]
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](groups))
    scheduler = schedulers.LambdaLR(optimizer, [lambda step, n=n: 1 / (1 + n * step) for n in range(len(parts))])
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        scheduler.step()


@pattern("a param group for each parameter", slow=True)
def group_each(loop: Loop) -> None:
    model = models.build("toy")
    groups = [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in model.parameters()]
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](groups))
    loop.steps(model, optimizer)


@pattern("an optimizer created with named_parameters()", slow=True)
def named_groups(loop: Loop) -> None:
    model = models.build("toy")
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](model.named_parameters()))
    loop.steps(model, optimizer)
    loop.record("names", optimizer.param_groups[0]["param_names"])


@pattern("user-defined keys in param_groups", slow=True)
def extra_keys(loop: Loop) -> None:
    model = models.build("toy")
    groups = [{"params": list(model.parameters()), "lr_scale": 0.5, "name": "all"}]
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](groups))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * group["lr_scale"]
        loop.step(model, optimizer, step)


@pattern(
    "add_param_group after offload()", UNSUPPORTED, "before offload|offload", note="add all groups before `offload()`"
)
def add_group(loop: Loop) -> None:
    model = models.build("toy")
    model.head.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](trainable))
    for step in range(STEPS):
        if step == 2:
            model.head.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 1e-3})
        loop.step(model, optimizer, step)


@pattern(
    "add_param_group on the base optimizer",
    UNSUPPORTED,
    "before offload|offload",
    note="add all groups before `offload()`",
    slow=True,
)
def add_group_to_base(loop: Loop) -> None:
    model = models.build("toy")
    model.head.requires_grad_(False)
    base = OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad])
    optimizer = loop.offload(model, base)
    for step in range(STEPS):
        if step == 2:
            model.head.requires_grad_(True)
            base.add_param_group({"params": list(model.head.parameters()), "lr": 1e-3})
        loop.step(model, optimizer, step)


@pattern(
    "a group appended to the list param_groups",
    UNSUPPORTED,
    "offload",
    note="add all groups before `offload()`",
    slow=True,
)
def append_group(loop: Loop) -> None:
    model = models.build("toy")
    model.head.requires_grad_(False)
    optimizer = loop.offload(model, OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad]))
    for step in range(STEPS):
        if step == 2:
            model.head.requires_grad_(True)
            first = optimizer.param_groups[0]
            optimizer.param_groups.append({**first, "params": list(model.head.parameters())})
        loop.step(model, optimizer, step)


@pattern(
    "a parameter moved to another param group",
    UNSUPPORTED,
    "offload",
    note="param groups are fixed after `offload()`",
    slow=True,
)
def move_between_groups(loop: Loop) -> None:
    model = models.build("toy")
    head = list(model.head.parameters())
    rest = [p for p in model.parameters() if all(p is not h for h in head)]
    optimizer = loop.offload(model, OPTIMIZERS["adamw"]([{"params": rest}, {"params": head, "lr": 1e-4}]))
    for step in range(STEPS):
        if step == 2:
            moved = optimizer.param_groups[1]["params"].pop()
            optimizer.param_groups[0]["params"].append(moved)
        loop.step(model, optimizer, step)


@pattern(
    "a parameter removed from its param group",
    UNSUPPORTED,
    "offload",
    note="param groups are fixed after `offload()`; set lr to 0 instead",
)
def out_of_group(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        if step == 2:
            optimizer.param_groups[0]["params"].pop()
        loop.step(model, optimizer, step)


@pattern("parameters frozen during training")
def freeze(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        if step == 2:
            model.blocks[0].requires_grad_(False)
        loop.step(model, optimizer, step)
    model.requires_grad_(True)


@pattern("blocks frozen and unfrozen alternately")
def freeze_alternately(loop: Loop) -> None:
    model, optimizer = loop.begin(policy="fp32")
    for step in range(STEPS):
        for number, block in enumerate(model.blocks):
            block.requires_grad_(step % 3 != number)
        loop.step(model, optimizer, step)
    model.requires_grad_(True)


@pattern("the embedding and a matrix frozen and unfrozen alternately", slow=True)
def freeze_some(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        model.embedding.requires_grad_(step % 2 == 0)
        model.blocks[1].up.requires_grad_(step % 2 == 1)
        loop.step(model, optimizer, step)
    model.requires_grad_(True)


@pattern("parameters unfrozen after offload()", UNSUPPORTED, "offload", note="freeze them after `offload()` instead")
def unfreeze(loop: Loop) -> None:
    model = models.build("toy", policy="fp32")
    model.blocks[0].requires_grad_(False)
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](model.parameters()))
    for step in range(STEPS):
        if step == 2:
            model.blocks[0].requires_grad_(True)
        loop.step(model, optimizer, step)


@pattern(
    "all parameters except the head frozen at offload() and unfrozen later",
    UNSUPPORTED,
    "offload",
    note="freeze them after `offload()` instead",
    slow=True,
)
def unfreeze_all(loop: Loop) -> None:
    model = models.build("toy", policy="fp32")
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](model.parameters()))
    for step in range(STEPS):
        if step == 2:
            model.requires_grad_(True)
        loop.step(model, optimizer, step)


@pattern("frozen parameters in the optimizer", slow=True)
def frozen_base(loop: Loop) -> None:
    model = models.build("toy")
    model.blocks[0].requires_grad_(False)
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](model.parameters()))
    loop.steps(model, optimizer)


@pattern("step() with a closure")
def closure(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loop.loss(model, step)
            loss.backward()
            return loss

        loop.record("returned", optimizer.step(evaluate))


@pattern("step() with a closure that clips gradients", in_backward_error=UPDATE_SCHEDULE)
def closure_clipped(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loop.loss(model, step)
            loss.backward()
            loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            return loss

        optimizer.step(evaluate)


@pattern("LBFGS", UNSUPPORTED, "LBFGS", note="requires a closure")
def lbfgs(loop: Loop) -> None:
    model = models.build("toy")
    optimizer = loop.offload(model, torch.optim.LBFGS(model.parameters(), max_iter=2))
    for step in range(2):

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loop.loss(model, step)
            loss.backward()
            return loss

        optimizer.step(evaluate)
    loop.trained.clear()


@pattern(
    "step() twice with the same gradients", UNSUPPORTED, "zero_grad", note="call `zero_grad()` after each `step()`"
)
def step_twice(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()
        if step == 2:
            optimizer.step()
        optimizer.zero_grad()


@pattern("step() without gradients", slow=True)
def step_without_gradients(loop: Loop) -> None:
    model, optimizer = loop.begin()
    optimizer.step()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        optimizer.step()


@pattern("step() and zero_grad() before forward instead of after backward", slow=True)
def step_before_forward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        optimizer.step()
        optimizer.zero_grad()
        loop.loss(model, step).backward()
    optimizer.step()


@pattern(
    "step() of the base optimizer",
    UNSUPPORTED,
    "offload",
    note="call `step()` of the optimizer that `offload()` returns",
)
def step_of_base(loop: Loop) -> None:
    model = models.build("toy")
    base = OPTIMIZERS["adamw"](model.parameters())
    loop.offload(model, base)
    for step in range(STEPS):
        loop.loss(model, step).backward()
        base.step()
        base.zero_grad()


@pattern("zero_grad() of the base optimizer", slow=True)
def zero_of_base(loop: Loop) -> None:
    model = models.build("toy")
    base = OPTIMIZERS["adamw"](model.parameters())
    optimizer = loop.offload(model, base)
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()
        base.zero_grad()


@pattern(
    "a second optimizer for some parameters of the model",
    UNSUPPORTED,
    "optimizer",
    note="pass a list of optimizers to `offload()`",
)
def two_optimizers(loop: Loop) -> None:
    model = models.build("toy")
    body = [p for part in (model.embedding, model.blocks) for p in part.parameters()]
    first = loop.offload(model, torch.optim.AdamW(body, lr=1e-3))
    second = torch.optim.SGD(model.head.parameters(), lr=1e-2)
    for step in range(STEPS):
        loop.loss(model, step).backward()
        first.step()
        second.step()
        model.zero_grad()


@pattern("register_step_pre_hook and register_step_post_hook")
def step_hooks(loop: Loop) -> None:
    model, optimizer = loop.begin()
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: loop.record("before", len(opt.param_groups)))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: loop.record("after", len(opt.param_groups)))
    loop.steps(model, optimizer)


@pattern("step hooks registered before offload()")
def step_hooks_before(loop: Loop) -> None:
    model = models.build("toy")
    base = OPTIMIZERS["adamw"](model.parameters())
    base.register_step_pre_hook(lambda opt, args, kwargs: loop.record("before", 1))
    base.register_step_post_hook(lambda opt, args, kwargs: loop.record("after", 1))
    optimizer = loop.offload(model, base)
    loop.steps(model, optimizer)


@pattern("an entry of optimizer.state[p] replaced", UNSUPPORTED, "state", note="modify the tensors in place", slow=True)
def set_state(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 2:
            state = optimizer.state[model.head.bias]
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])


@pattern("optimizer.state = defaultdict(dict)", UNSUPPORTED, "state", note="modify the tensors in place")
def replace_state(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 2:
            optimizer.state = defaultdict(dict)


@pattern("moments and step counts read from optimizer.state[p]")
def read_state(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        state = optimizer.state[model.blocks[1].up.weight]
        loop.record("keys", sorted(state))
        loop.record("step", float(state["step"]))
        loop.record("moment", state["exp_avg"])
        loop.record("second", state["exp_avg_sq"].sqrt().mean())


@pattern("moments and step counts in optimizer.state[p] modified in place")
def write_state(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 2:
            for param in model.blocks[0].parameters():
                optimizer.state[param]["exp_avg"].zero_()
                optimizer.state[param]["exp_avg_sq"].mul_(0.5)
                optimizer.state[param]["step"] -= 1


@pattern("optimizer.state.clear() to reset the moments", UNSUPPORTED, "state", note="modify the tensors in place")
def clear_state(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 2:
            optimizer.state.clear()


@pattern(
    "a new torch optimizer created for the model during training",
    update_schedules=("in_forward", "after_backward"),
    note="the new optimizer keeps its state in memory",
)
def new_optimizer(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 2:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


pattern(
    "a new torch optimizer created for the model during training; updates in backward",
    UNSUPPORTED,
    r"step\(\) has not been|update\.schedule",
    update_schedules=("auto", *EARLY),
)(new_optimizer)


@pattern("optimizer.state_dict()")
def state_dict(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 2:
            loop.record("state", len(optimizer.state_dict()["state"]))


@pattern("optimizer.load_state_dict() of its own state_dict()")
def load_state_dict(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())


@pattern("optimizer.load_state_dict() without states, to start again")
def load_empty_state_dict(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 2:
            group = optimizer.param_groups[0]
            numbers = list(range(len(group["params"])))
            optimizer.load_state_dict({"state": {}, "param_groups": [{**group, "params": numbers}]})


@pattern("torch.distributed.checkpoint.state_dict.get_state_dict")
def distributed_state(loop: Loop) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 2:
            loop.record("keys", len(get_state_dict(model, optimizer)[1]["state"]))


@pattern("batches with a non-finite loss skipped before backward")
def skip_non_finite_loss(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loss = loop.loss(model, step) * (float("nan") if step in (1, 3) else 1)
        optimizer.zero_grad()
        if not loss.isfinite():
            continue
        loss.backward()
        optimizer.step()


@pattern("step() with NaN gradients")
def step_with_nan(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        (loop.loss(model, step) * (float("nan") if step == 3 else 1)).backward()


@pattern("step() with an infinite loss", slow=True)
def step_with_infinite_loss(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        (loop.loss(model, step) * (float("inf") if step == 3 else 1)).backward()


@pattern("an exception in forward, after which training continues")
def error_in_forward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        try:
            if step in (1, 3):
                model.blocks[1].forward = _fail
            loop.loss(model, step).backward()
            optimizer.step()
        except ValueError:
            loop.record("error", step)
        finally:
            model.blocks[1].__dict__.pop("forward", None)
        optimizer.zero_grad()


def _fail(*_: Any) -> Any:
    raise ValueError("a bad batch")


@pattern("an exception in forward before FSDP2 gathers a module", slow=True)
def error_before_gather(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        try:
            tokens = batch(model, step)
            if step in (1, 3):
                tokens = tokens + 1000
            loss = model(tokens)
            loop.record("loss", loss)
            loss.backward()
            optimizer.step()
        except IndexError:
            loop.record("error", step)
        optimizer.zero_grad()


class _Fails(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if _Fails.armed:
            _Fails.armed = False
            raise MemoryError("out of memory")
        return grad


class Fragile(models.Toy):
    """A model whose backward can fail in the middle."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = self.blocks[index](x)
            if index == 1:
                x = _Fails.apply(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def train_with_failing_backward(loop: Loop, *, sequences: int) -> None:
    """Train with a backward that fails once, after which the batch is repeated in parts of `sequences`."""
    model, optimizer = loop.begin(Fragile())
    for step in steps(optimizer):
        _Fails.armed = step == 3
        try:
            loop.loss(model, step, 4).backward()
        except MemoryError:
            loop.record("error", step)
            if loop.paging is None or dist.get_world_size() > 1:  # otherwise, `zero_grad()` does this
                torch_private.reset_states(torch_private.fsdp_states(model), gradients=True)
            optimizer.zero_grad()
            for part in range(4 // sequences):
                loop.loss(model, 10 * step + part, sequences).backward()


@pattern(
    "an exception in backward, after which the batch is repeated", update_schedules=("in_forward", "after_backward")
)
def retry(loop: Loop) -> None:
    train_with_failing_backward(loop, sequences=4)


pattern(
    "an exception in backward, after which the batch is repeated; updates in backward",
    UNSUPPORTED,
    UPDATE_SCHEDULE,
    update_schedules=("auto", *EARLY),
)(retry)


@pattern(
    "out of memory in backward: the batch is repeated as two halves", update_schedules=("in_forward", "after_backward")
)
def retry_halved(loop: Loop) -> None:
    train_with_failing_backward(loop, sequences=2)


@pattern("KeyboardInterrupt in forward, after which the loop saves a checkpoint and continues")
def interrupt(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        try:
            if step == 2:
                model.blocks[2].forward = _interrupt
            loop.loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        except KeyboardInterrupt:
            loop.record("interrupted", step)
            loop.save_checkpoint(optimizer)
        finally:
            model.blocks[2].__dict__.pop("forward", None)


def _interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


@pattern("backward in another thread")
def backward_in_a_thread(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        loss = loop.loss(model, step)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()


@pattern("the training loop in another thread", slow=True)
def loop_in_a_thread(loop: Loop) -> None:
    model, optimizer = loop.begin()

    def train() -> None:
        for step in range(STEPS):
            loop.step(model, optimizer, step)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


@pattern("torch.profiler", slow=True)
def profiler(loop: Loop) -> None:
    from torch.profiler import ProfilerActivity, profile

    model, optimizer = loop.begin()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for step in range(STEPS):
            loop.step(model, optimizer, step)
            profiled.step()


@pattern("torch.autograd.set_detect_anomaly", slow=True)
def anomaly(loop: Loop) -> None:
    model, optimizer = loop.begin()
    with torch.autograd.set_detect_anomaly(True):
        for step in range(STEPS):
            loop.step(model, optimizer, step)


@pattern("torch.set_default_dtype(torch.float64) during training", slow=True)
def default_dtype(loop: Loop) -> None:
    model, optimizer = loop.begin()
    torch.set_default_dtype(torch.float64)
    loop.steps(model, optimizer)


@pattern("torch.use_deterministic_algorithms", slow=True)
def deterministic(loop: Loop) -> None:
    model, optimizer = loop.begin()
    torch.use_deterministic_algorithms(True)
    try:
        for step in range(STEPS):
            loop.step(model, optimizer, step)
    finally:
        torch.use_deterministic_algorithms(False)


@pattern("with torch.device(...) around the loop", slow=True)
def default_device(loop: Loop) -> None:
    model, optimizer = loop.begin()
    with torch.device("cpu"):
        for step in range(STEPS):
            loop.step(model, optimizer, step)


@pattern("two models, each with its own optimizer, and one loss", slow=True)
def two_models(loop: Loop) -> None:
    one, first = loop.begin()
    other, second = loop.begin(seed=1)
    for step in range(STEPS):
        loss = loop.loss(one, step) - 0.1 * loop.loss(other, step)
        loss.backward()
        first.step()
        first.zero_grad()
        second.step()
        second.zero_grad()


class Generator(models.Toy):
    """A model that returns logits."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


class Discriminator(models.Toy):
    """A model that scores one-hot or logit inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype) @ self.embedding.weight
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x).float().mean()


def gan(loop: Loop, *, frozen: bool, discard: str) -> None:
    """Train generator and discriminator alternately; discard the discriminator gradients of generator steps."""
    generator, first = loop.begin(Generator())
    discriminator, second = loop.begin(Discriminator(blocks=2))
    for step in range(STEPS):
        fake = generator(batch(generator, step))
        real = torch.nn.functional.one_hot(batch(generator, 40 + step), 131).float()
        loss = discriminator(fake.detach()) - discriminator(real)
        loop.record("discriminator", loss)
        loss.backward()
        second.step()
        second.zero_grad()
        if frozen:
            discriminator.requires_grad_(False)
        loss = -discriminator(generator(batch(generator, step)))
        loop.record("generator", loss)
        loss.backward()
        first.step()
        first.zero_grad()
        if frozen:
            discriminator.requires_grad_(True)
        elif discard == "model":
            discriminator.zero_grad()
        else:
            second.zero_grad()


@pattern("GAN: the discriminator is frozen during the generator's step")
def gan_frozen(loop: Loop) -> None:
    gan(loop, frozen=True, discard="")


@pattern(
    "GAN: gradients of the discriminator discarded with its optimizer's zero_grad()",
    update_schedules=("in_forward", "after_backward"),
)
def gan_discarded(loop: Loop) -> None:
    gan(loop, frozen=False, discard="optimizer")


@pattern(
    "GAN: gradients of the discriminator discarded with model.zero_grad()",
    update_schedules=("in_forward", "after_backward"),
    slow=True,
)
def gan_discarded_by_model(loop: Loop) -> None:
    gan(loop, frozen=False, discard="model")


pattern(
    "GAN: gradients of the discriminator discarded with its optimizer's zero_grad(); updates in backward",
    UNSUPPORTED,
    UPDATE_SCHEDULE,
    update_schedules=("auto", *EARLY),
)(gan_discarded)


@pattern("a frozen reference model in memory", slow=True)
def reference(loop: Loop) -> None:
    model, optimizer = loop.begin()
    frozen = models.build("toy", seed=3).requires_grad_(False)
    for step in steps(optimizer):
        with torch.no_grad():
            target = loop.loss(frozen, step)
        (loop.loss(model, step) - target).abs().backward()


@pattern("training resumed in the same process", ranks=(1,))
def resume(loop: Loop) -> None:
    from pathlib import Path

    model = models.build("toy")
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](model.parameters()))
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        if step == 2 and loop.paging is not None:
            optimizer.save_checkpoint()
            optimizer.close()
            paths = [str(Path(loop._folder) / "0" / "nvme0")]
            loop.trained.clear()
            model = models.build("toy", seed=9)
            base = OPTIMIZERS["adamw"](model.parameters())
            optimizer = loop.offload(model, base, storage={"paths": paths}, run={"resume": "latest"})


@pattern("a checkpoint after every step", slow=True)
def checkpoints(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        loop.save_checkpoint(optimizer)


@pattern("random numbers drawn from the global generator between steps", slow=True)
def generator(loop: Loop) -> None:
    torch.manual_seed(5)
    model, optimizer = loop.begin("gpt2")
    loop.record("drawn", torch.rand(3))
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        loop.record("drawn", torch.rand(3))
