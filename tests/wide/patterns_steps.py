"""Patterns around `step()`: schedulers, optimizer settings, param groups, closures, handled exceptions."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.profiler import ProfilerActivity, profile

from infinity import torch_private
from support import models
from support.loop_pattern import EARLY, STEPS, UPDATE_SCHEDULE, Loop, pattern
from support.train import OPTIMIZERS, batch
from wide.patterns_forward import Logits

ADAMW = OPTIMIZERS["adamw"]
FIXED = "param groups are fixed after `offload()`"
IN_PLACE = "modify the tensors in place"


def _sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.CosineAnnealingLR(optimizer, 4)]
    return schedulers.SequentialLR(optimizer, parts, [2])


@pattern(
    "schedulers created before or after offload(): LambdaLR, OneCycleLR, CyclicLR, SequentialLR, ReduceLROnPlateau, "
    "tensor lr"
)
def with_schedulers(loop: Loop) -> None:
    for before, name, make in (
        (True, "adamw", lambda opt: schedulers.OneCycleLR(opt, 1e-2, total_steps=10)),
        (True, "adamw", lambda opt: schedulers.ReduceLROnPlateau(opt, patience=0, factor=0.5, threshold=0.2)),
        (False, "sgd_nesterov", lambda opt: schedulers.CyclicLR(opt, 1e-3, 1e-1, step_size_up=2)),
        (False, "adamw_tensor", lambda opt: schedulers.LambdaLR(opt, lambda step: 1 / (1 + step))),
        (False, "adamw", _sequential),
    ):
        model = models.build("toy")
        base = OPTIMIZERS[name](model.parameters())
        scheduler = make(base) if before else None
        optimizer = loop.offload(model, base)
        scheduler = scheduler or make(optimizer)
        for step in range(3):
            loss = loop.loss(model, step)
            loss.backward()
            optimizer.step()
            scheduler.step(loss.item()) if "Plateau" in type(scheduler).__name__ else scheduler.step()
            optimizer.zero_grad()
            for group in (optimizer.param_groups[0], base.param_groups[0]):
                loop.record("settings", [float(group["lr"]), group.get("momentum"), group.get("betas")])


@pattern("lr, weight decay and betas set before forward or before backward, also on the base optimizer")
def settings_by_hand(loop: Loop) -> None:
    model = models.build("toy")
    base = ADAMW(model.parameters())
    optimizer = loop.offload(model, base)
    for step in loop.forwards(optimizer):
        optimizer.param_groups[0]["lr"] = 1e-3 * step
        loss = loop.loss(model, step)
        if step % 2:
            base.param_groups[0]["lr"] = 1e-3 * (step + 1)
        optimizer.param_groups[0].update(weight_decay=0.1 * step, betas=(0.9 - 0.01 * step, 0.99))
        loss.backward()


@pattern(
    "lr set between backward and step(), for example by scheduler.step() before optimizer.step()",
    early_error="lr was changed.*before backward",
)
def lr_after_backward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.backwards(model, optimizer):
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)


@pattern("lr set between backward and step() in a single step", early_error="lr was changed", early=EARLY)
def lr_in_one_step(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.backwards(model, optimizer):
        if step == 3:
            optimizer.param_groups[0]["lr"] *= 0.5


@pattern("param groups for layers or single parameters, with their own keys, with tensors, or with named_parameters()")
def groups(loop: Loop) -> None:
    def by_layer(model: Any) -> Any:
        parts = enumerate((model.embedding, *model.blocks, model.head))
        return [
            {"params": list(part.parameters()), "lr": 1e-3 * 0.7**depth, "scale": 0.5, "mask": torch.ones(3)}
            for depth, part in parts
        ]

    def by_parameter(model: Any) -> Any:
        return [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in model.parameters()]

    for make in (by_layer, by_parameter, lambda model: model.named_parameters()):
        model = models.build("toy")
        optimizer = loop.offload(model, ADAMW(make(model)))
        for _ in loop.steps(model, optimizer, 3):
            for number, group in enumerate(optimizer.param_groups):
                group["lr"] *= group.get("scale", 0.5) / (1 + number)
        loop.record("names", optimizer.param_groups[0].get("param_names"))


def changed_groups(loop: Loop, change: Callable[[Any, Any, Any], object]) -> None:
    """Change param groups or frozen parameters after two steps. The head is frozen at first."""
    model = models.build("toy")
    model.head.requires_grad_(False)
    base = ADAMW([param for param in model.parameters() if param.requires_grad])
    optimizer = loop.offload(model, base)
    for step in loop.steps(model, optimizer):
        if step == 1:
            change(model, optimizer, base)


@pattern("add_param_group after offload()", "offload", note="add all groups before `offload()`")
def add_group(loop: Loop) -> None:
    changed_groups(loop, lambda model, opt, _: opt.add_param_group({"params": list(model.head.parameters())}))


@pattern("a group appended to the list param_groups", "offload", note=FIXED, slow=True)
def append_group(loop: Loop) -> None:
    changed_groups(
        loop,
        lambda model, optimizer, _: optimizer.param_groups.append(
            {**optimizer.param_groups[0], "params": list(model.head.parameters())}
        ),
    )


@pattern("a parameter removed from its param group", "offload", note=f"{FIXED}; set lr to 0 instead")
def out_of_group(loop: Loop) -> None:
    changed_groups(loop, lambda _, optimizer, __: optimizer.param_groups[0]["params"].pop())


@pattern("parameters unfrozen after offload()", "offload", note="freeze them after `offload()` instead")
def unfreeze(loop: Loop) -> None:
    model = models.build("toy", policy="fp32")
    model.blocks[0].requires_grad_(False)
    optimizer = loop.offload(model, ADAMW(model.parameters()))
    for step in loop.steps(model, optimizer):
        if step == 1:
            model.blocks[0].requires_grad_(True)


@pattern("parameters frozen and unfrozen during training")
def freeze(loop: Loop) -> None:
    model, optimizer = loop.begin(policy="fp32")
    for step in range(STEPS):
        model.embedding.requires_grad_(step % 2 == 0)
        for number, block in enumerate(model.blocks):
            block.requires_grad_(step % 3 != number)
        loop.step(model, optimizer, step)
    model.requires_grad_(True)


@pattern("requires_grad disabled between backward and step()", slow=True)
def requires_grad_disabled(loop: Loop) -> None:
    # In memory, step() uses existing gradients even if requires_grad is False.
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        model.requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(True)


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


@pattern("step() twice with the same gradients", "zero_grad", note="call `zero_grad()` after each `step()`")
def step_twice(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.backwards(model, optimizer):
        if step == 2:
            optimizer.step()


@pattern("step() without gradients, for example before the first forward")
def step_without_gradients(loop: Loop) -> None:
    model, optimizer = loop.begin()
    optimizer.step()
    for _ in loop.steps(model, optimizer):
        optimizer.step()


@pattern("step() of the base optimizer", "offload", note="call `step()` of the optimizer that `offload()` returns")
def step_of_base(loop: Loop) -> None:
    model = models.build("toy")
    base = ADAMW(model.parameters())
    loop.offload(model, base)
    loop.train(model, base)


@pattern(
    "a second optimizer for some parameters of the model", "optimizer", note="pass a list of optimizers to `offload()`"
)
def two_optimizers(loop: Loop) -> None:
    model = models.build("toy")
    body = [p for part in (model.embedding, model.blocks) for p in part.parameters()]
    first = loop.offload(model, torch.optim.AdamW(body, lr=1e-3))
    second = torch.optim.SGD(model.head.parameters(), lr=1e-2)
    for _ in loop.backwards(model, first):
        second.step()


@pattern("step hooks registered before and after offload()")
def step_hooks(loop: Loop) -> None:
    model = models.build("toy")
    base = ADAMW(model.parameters())
    base.register_step_pre_hook(lambda opt, args, kwargs: loop.record("before", 1))
    base.register_step_post_hook(lambda opt, args, kwargs: loop.record("after", 1))
    optimizer = loop.offload(model, base)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: loop.record("before", len(opt.param_groups)))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: loop.record("after", len(opt.param_groups)))
    loop.train(model, optimizer)


@pattern("moments and step counts in optimizer.state[p] read and modified in place")
def state_in_place(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.steps(model, optimizer):
        state = optimizer.state[model.blocks[1].up.weight]
        loop.record("keys", sorted(state))
        loop.record("step", float(state["step"]))
        loop.record("moment", state["exp_avg"])
        loop.record("second", state["exp_avg_sq"].sqrt().mean())
        if step == 2:
            for param in model.blocks[0].parameters():
                optimizer.state[param]["exp_avg"].zero_()
                optimizer.state[param]["exp_avg_sq"].mul_(0.5)
                optimizer.state[param]["step"] -= 1


@pattern("an entry of optimizer.state[p] replaced", "state", note=IN_PLACE, slow=True)
def replace_entry(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.train(model, optimizer, 2)
    state = optimizer.state[model.head.bias]
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


@pattern("optimizer.state = defaultdict(dict)", "state", note=IN_PLACE)
def replace_state(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.train(model, optimizer, 2)
    optimizer.state = defaultdict(dict)


@pattern("optimizer.state.clear() to reset the moments", "state", note=IN_PLACE)
def clear_state(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.train(model, optimizer, 2)
    optimizer.state.clear()


@pattern(
    "a new torch optimizer created for the model during training",
    early_error=r"step\(\) has not been|update\.schedule",
    early=EARLY,
)
def new_optimizer(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.train(model, optimizer, 3)
    loop.train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 2)  # keeps its state in memory


@pattern("optimizer.load_state_dict() of its own state_dict(), or without states, to start again")
def load_state_dict(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.steps(model, optimizer):
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        if step == 3:
            group = optimizer.param_groups[0]
            numbers = list(range(len(group["params"])))
            optimizer.load_state_dict({"state": {}, "param_groups": [{**group, "params": numbers}]})


@pattern("batches with a non-finite loss skipped before backward, and step() with NaN gradients")
def non_finite_loss(loop: Loop) -> None:
    for last in (1.0, float("nan")):  # NaN makes all weights NaN
        model, optimizer = loop.begin()
        for step in loop.forwards(optimizer, 4):
            loss = loop.loss(model, step) * (1.0, float("nan"), 1.0, last)[step]
            optimizer.zero_grad()
            if loss.isfinite() or step == 3:
                loss.backward()


def _fail(*_: Any) -> Any:
    raise ValueError("a bad batch")


def _interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


@pattern("an exception or a KeyboardInterrupt in forward, after which training continues")
def error_in_forward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.forwards(optimizer):
        try:
            if step in (1, 3):
                model.blocks[step - 1].forward = _fail if step == 1 else _interrupt
            tokens = batch(model, step)
            loss = model(tokens + 1000 if step == 2 else tokens)  # the embedding fails before FSDP2 gathers a layer
            loop.record("loss", loss)
            loss.backward()
        except (ValueError, IndexError, KeyboardInterrupt):
            loop.record("error", step)
        for block in model.blocks:
            block.__dict__.pop("forward", None)


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


@pattern(
    "out of memory in backward, after which the batch is repeated as two halves",
    early_error=UPDATE_SCHEDULE,
    early=EARLY,
)
def retry(loop: Loop) -> None:
    model, optimizer = loop.begin()
    model.blocks[1].register_forward_hook(lambda module, args, out: _Fails.apply(out))
    for step in loop.forwards(optimizer):
        _Fails.armed = step == 3
        try:
            loop.loss(model, step, 4).backward()
        except MemoryError:
            loop.record("error", step)
            if loop.paging is None or dist.get_world_size() > 1:  # otherwise, `zero_grad()` does this
                torch_private.reset_states(torch_private.fsdp_states(model), gradients=True)
            optimizer.zero_grad()
            for part in range(2):
                loop.loss(model, 10 * step + part, 2).backward()


@pattern("the training loop, or only backward, in another thread")
def in_a_thread(loop: Loop) -> None:
    def in_thread(target: Callable[[], object]) -> None:
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()

    model, optimizer = loop.begin()
    in_thread(lambda: loop.train(model, optimizer, 2))
    for step in loop.forwards(optimizer):
        in_thread(loop.loss(model, step).backward)


@contextmanager
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pattern(
    "torch.profiler, set_detect_anomaly, use_deterministic_algorithms, with torch.device(...), default dtype", slow=True
)
def contexts(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for context in (
        profile(activities=[ProfilerActivity.CPU]),
        torch.autograd.set_detect_anomaly(True),
        _deterministic(),
        torch.device("cpu"),
    ):
        with context:
            loop.train(model, optimizer, 2)
    torch.set_default_dtype(torch.float64)
    loop.train(model, optimizer)


@pattern("two models, each with its own optimizer, and one loss", slow=True)
def two_models(loop: Loop) -> None:
    one, first = loop.begin()
    other, second = loop.begin(seed=1)
    for step in loop.forwards(first):
        (loop.loss(one, step) - 0.1 * loop.loss(other, step)).backward()
        second.step()
        second.zero_grad()


class Discriminator(models.Toy):
    """A model that scores one-hot or logit inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype) @ self.embedding.weight
        return self.head(self.through_blocks(x)).float().mean()


def gan(loop: Loop, *, frozen: bool) -> None:
    """Train generator and discriminator alternately; freeze the discriminator or discard its gradients."""
    generator, first = loop.begin(Logits())
    discriminator, second = loop.begin(Discriminator(blocks=2))
    for step in range(STEPS):
        fake = generator(batch(generator, step))
        real = nn.functional.one_hot(batch(generator, 40 + step), 131).float()
        loss = discriminator(fake.detach()) - discriminator(real)
        loop.record("discriminator", loss)
        loss.backward()
        second.step()
        second.zero_grad()
        discriminator.requires_grad_(not frozen)
        loss = -discriminator(generator(batch(generator, step)))
        loop.record("generator", loss)
        loss.backward()
        first.step()
        first.zero_grad()
        discriminator.requires_grad_(True)
        second.zero_grad()


@pattern("GAN: the discriminator is frozen during the generator's step")
def gan_frozen(loop: Loop) -> None:
    gan(loop, frozen=True)


@pattern(
    "GAN: gradients of the discriminator discarded with its optimizer's zero_grad()",
    early_error=UPDATE_SCHEDULE,
    early=EARLY,
)
def gan_discarded(loop: Loop) -> None:
    gan(loop, frozen=False)
