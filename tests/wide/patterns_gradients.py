"""Patterns that read, modify, discard or accumulate gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from support import models
from support.loop_pattern import EARLY, SECOND, STEPS, UPDATE_SCHEDULE, Loop, pattern
from support.train import OPTIMIZERS, batch

USED = r"step\(\).*zero_grad\(\)"
"""Part of the error for access to gradients of an earlier step."""
INFINITY = float("inf")


@pattern("gradients cleared by the optimizer, the base optimizer or the model, set to None or zero, after step()")
def cleared(loop: Loop) -> None:
    model = models.build("toy")
    base = OPTIMIZERS["adamw"](model.parameters())
    optimizer = loop.offload(model, base)

    def by_hand(*, zero: bool) -> None:
        for param in model.parameters():
            if zero:
                param.grad.detach_()
                param.grad.zero_()
            else:
                param.grad = None

    ways = (
        optimizer.zero_grad,
        base.zero_grad,
        model.zero_grad,
        lambda: by_hand(zero=False),
        lambda: by_hand(zero=True),
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: model.zero_grad(set_to_none=False),
    )
    for step, clear in enumerate(ways):
        loop.loss(model, step).backward()
        optimizer.step()
        clear()
    loop.train(model, optimizer, 1)


@pattern("gradients cleared before forward or between forward and backward")
def cleared_before_backward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        if step % 2:
            optimizer.zero_grad()
        loss = loop.loss(model, step)
        if step % 2 == 0:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pattern("zero_grad(set_to_none=False), with layers that some steps do not use")
def to_zero_and_skipped(loop: Loop) -> None:
    # Their gradients are zero, not None, so that moments decay and weights change.
    model, optimizer = loop.begin()
    for step, order in enumerate([(0, 1, 2), (0, 2), (0, 1, 2), (1, 2), (0, 2)]):
        model.order = order
        loop.loss(model, step).backward()
        optimizer.step()
        (model if step % 2 else optimizer).zero_grad(set_to_none=False)


@pattern("gradients of a batch discarded instead of a step", early_error=UPDATE_SCHEDULE, early=EARLY)
def discarded(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        if step == 2:
            optimizer.zero_grad(set_to_none=False)
        elif step == 3:
            model.zero_grad()
        else:
            optimizer.step()
            optimizer.zero_grad()


@pattern("gradients of a first backward discarded in every step", early_error=UPDATE_SCHEDULE, slow=True)
def first_backward_discarded(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.forwards(optimizer):
        loop.loss(model, 70 + step).backward()
        optimizer.zero_grad()
        loop.loss(model, step).backward()


@pattern("no zero_grad(): gradients accumulate over steps", USED, note="gradients cannot accumulate across steps")
def no_zero_grad(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()


@pattern("gradients of half of the parameters set to None", USED, note="set all of them to None", slow=True)
def some_gradients_set_to_none(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()
        for param in list(model.parameters())[::2]:
            param.grad = None


@pattern("p.grad compared with None before backward, after backward and after step()")
def grad_is_none(loop: Loop) -> None:
    model, optimizer = loop.begin("spare")

    def record() -> None:
        loop.record("None", [param.grad is None for param in model.parameters()])

    for step in range(STEPS):
        record()
        loop.loss(model, step).backward()
        record()
        optimizer.step()
        record()
        optimizer.zero_grad()


@pattern(
    "clip_grad_norm_ of torch: any norm_type, foreach=False, several times, max_norm=inf to log the norm",
    early_error=UPDATE_SCHEDULE,
)
def clip(loop: Loop) -> None:
    model, optimizer = loop.begin()
    settings: list[list[dict[str, Any]]] = [
        [{"max_norm": 0.5}],
        [{"max_norm": 0.5, "foreach": False}],
        [{"max_norm": 0.1, "norm_type": INFINITY}, {"max_norm": 0.2}],
        [{"max_norm": 0.1, "norm_type": 1.0}],
        [{"max_norm": 0.1, "norm_type": 3.0}, {"max_norm": INFINITY}],
    ]
    for step in loop.backwards(model, optimizer):
        for each in settings[step]:
            loop.record("norm", clip_grad_norm_(model.parameters(), **each))
        loop.record("gradient", model.head.weight.grad)


@pattern(
    "clip_grad_norm_ of torch for param groups, layers, single parameters, or the parameters that have a gradient",
    early_error=UPDATE_SCHEDULE,
    slow=True,
)
def clip_parts(loop: Loop) -> None:
    model = models.build("spare")
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](groups))
    for step in loop.backwards(model, optimizer, 4):
        parts = (
            [group["params"] for group in optimizer.param_groups],
            [list(block.parameters()) for block in model.blocks],
            list(model.parameters()),
            [[param for param in model.parameters() if param.requires_grad and param.grad is not None]],
        )
        for part in parts[step]:
            loop.record("norm", clip_grad_norm_(part, 0.05))


@pattern("clip_grad_value_, get_total_norm and clip_grads_with_norm_", early_error=UPDATE_SCHEDULE)
def clip_otherwise(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.backwards(model, optimizer):
        norm = get_total_norm([param.grad for param in model.parameters()])
        loop.record("norm", norm)
        if step % 2:
            clip_grads_with_norm_(model.parameters(), 0.5, norm)
        else:
            clip_grad_value_(model.parameters(), 1e-3, foreach=step > 2)


@pattern("optimizer.clip_grad_norm_, and a forward with gradients enabled before step()", early_error=UPDATE_SCHEDULE)
def clip_paged(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.backwards(model, optimizer):
        norm_type = (2.0, INFINITY, 1.0)[step % 3]
        if loop.paging is None:
            norm = clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type)
        else:
            norm = optimizer.clip_grad_norm_(0.1, norm_type=norm_type)
        loop.record("norm", norm)
        loop.loss(model, 90 + step)


@pattern("clipping starts during training", early_error=UPDATE_SCHEDULE, early=EARLY)
def clip_late(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.backwards(model, optimizer):
        if step >= 3:
            loop.record("norm", clip_grad_norm_(model.parameters(), 0.5))


@pattern(
    "a gradient norm that is too large or not finite: the step is skipped, or step() is called",
    early_error=UPDATE_SCHEDULE,
)
def large_norm(loop: Loop) -> None:
    for last in (1.0, INFINITY):  # infinity makes all weights NaN
        model, optimizer = loop.begin()
        for step, factor in enumerate((1.0, INFINITY, 100.0, last)):
            (loop.loss(model, step) * factor).backward()
            try:
                norm = clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=step == 1)
                loop.record("norm", norm)
                if step != 2:
                    optimizer.step()
            except RuntimeError as error:
                if "non-finite" not in str(error):
                    raise
                loop.record("not finite", step)
            optimizer.zero_grad()


@pattern(
    "gradients read: norms, extremes, NaN, shape, full_tensor(), to_local(), torch.cat, clones of the previous step",
    early_error=UPDATE_SCHEDULE,
)
def read(loop: Loop) -> None:
    model, optimizer = loop.begin()
    before: list[torch.Tensor] = []
    for _ in loop.backwards(model, optimizer):
        for name, param in model.named_parameters():
            grad = param.grad
            for value in (grad.norm(), grad.abs().max(), grad.mean(), grad.isnan().any(), (grad == 0).sum()):
                loop.record(name, value)
        grad = model.head.weight.grad
        loop.record("form", (tuple(grad.shape), str(grad.dtype), str(grad.device), grad.numel(), grad.ndim))
        loop.record("local", grad.to_local())
        loop.record("copy", grad.detach().cpu().clone().full_tensor())
        loop.record("vector", torch.cat([param.grad.full_tensor().flatten() for param in model.parameters()]))
        if dist.get_rank() == 0:
            loop.record("weight", model.blocks[1].up.weight.to_local().norm())
        now = [param.grad.detach().clone() for param in model.parameters()]
        for a, b in zip(before, now, strict=False):
            loop.record("alike", (a * b).sum())
        before = now


@pattern("p.grad read after step()", "read it before", note="read it before `step()`")
def read_after_step(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()
        for name, param in model.named_parameters():
            loop.record(name, param.grad)
        optimizer.zero_grad()


@pattern("a reference to p.grad kept after step() and zero_grad()", "clone", note="clone the gradient")
def keep_references(loop: Loop) -> None:
    # In memory, zero_grad() only removes the reference, so that the tensor keeps its values.
    model, optimizer = loop.begin()
    kept: list[Any] = []
    for _ in loop.backwards(model, optimizer):
        for grad in kept:
            loop.record("before", grad)
        kept = [model.blocks[0].up.weight.grad, model.head.bias.grad]


@pattern(
    "gradients modified in place: mul_, div_, noise, clamp_, sign, copy_, rows, views, .data, _foreach_*, out=",
    early_error=UPDATE_SCHEDULE,
)
def modified(loop: Loop) -> None:
    model, optimizer = loop.begin()
    scale = torch.tensor(0.5)  # modified after each use
    for step in loop.backwards(model, optimizer):
        torch.manual_seed(step)
        grads = [param.grad for param in model.parameters()]
        if step == 0:
            model.head.weight.grad.to_local()[1:3].zero_()
            model.head.bias.grad.to_local().view(-1)[:5].fill_(0.25)
            model.embedding.weight.grad._local_tensor.mul_(2)
        elif step == 1:
            torch._foreach_mul_(grads, 0.25)
        for grad in grads:
            part = grad.to_local()
            if step == 0:
                grad.div_(48)
                part.add_(torch.randn_like(part) * 1e-3)
            elif step == 1:
                torch.mul(part, 0.5, out=part)
            elif step == 2:
                grad.data.mul_(0.5)
                grad.data.clamp_(-1e-2, 1e-2)
            elif grad.ndim > 1:
                grad.sub_(grad.mean(dim=1, keepdim=True))
            else:
                grad.copy_(grad.sign())
            grad.mul_(scale)
        scale.mul_(3.0)


@pattern(
    "weight decay or a moving average added to gradients, or gradients scaled by norms", early_error=UPDATE_SCHEDULE
)
def combined_with_weights(loop: Loop) -> None:
    model, optimizer = loop.begin()
    params = list(model.parameters())
    means = [torch.zeros_like(param) for param in params]
    for step in loop.backwards(model, optimizer):
        grads = [param.grad for param in params]
        with torch.no_grad():
            torch._foreach_lerp_(means, grads, 0.1)
            if step % 2:
                torch._foreach_add_(grads, params, alpha=0.01)
            for param, mean in zip(params, means, strict=True):
                param.grad.add_(param, alpha=0.01)
                param.grad.mul_((param.norm() / param.grad.norm().clamp(min=1e-6)).clamp(max=2.0))
                param.grad.data = param.grad.data + mean * 2.0
    for mean in means:
        loop.record("mean", mean)


@pattern("p.grad assigned: p.grad * factor, None, the gradient of another parameter", early_error=UPDATE_SCHEDULE)
def assigned(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.backwards(model, optimizer):
        for param in model.parameters():
            param.grad = param.grad * 3
        for param in model.blocks[step % 3].parameters():
            param.grad.zero_()
        for param in model.blocks[(step + 1) % 3].parameters():
            param.grad = None
        first, second = model.embedding.weight, model.head.weight
        first.grad, second.grad = second.grad, first.grad


@pattern("gradients of two tasks computed separately and combined", early_error=UPDATE_SCHEDULE)
def combine_tasks(loop: Loop) -> None:
    model, optimizer = loop.begin()
    params = list(model.parameters())
    for step in loop.forwards(optimizer):
        found = []
        for task in range(2):
            loop.loss(model, 10 * step + task).backward()
            found.append([param.grad.clone() for param in params])
            optimizer.zero_grad()
        for param, a, b in zip(params, *found, strict=True):
            dot = (a * b).sum().full_tensor()
            param.grad = a + b if dot > 0 else a - b


@pattern("gradients assigned to p.grad without backward", early_error=UPDATE_SCHEDULE)
def assigned_without_backward(loop: Loop) -> None:
    # Gradients may come from another process or from an evolution strategy.
    model, optimizer = loop.begin()
    for step in range(STEPS):
        torch.manual_seed(step)
        for param in model.parameters():
            param.grad = torch.ones_like(param) * torch.randn(())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loop.loss(model, step)


@pattern("SGD in the loop: p -= lr * p.grad, p.copy_(p - lr * p.grad)")
def sgd_in_the_loop(loop: Loop) -> None:
    model, _ = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        with torch.no_grad():
            for param in model.parameters():
                if step % 2:
                    param.copy_(param - 0.1 * param.grad)
                else:
                    param -= 0.1 * param.grad
        model.zero_grad()


@pattern(
    "sharpness-aware minimization: weights perturbed along the gradient, second backward, weights restored",
    early_error=UPDATE_SCHEDULE,
)
def sharpness(loop: Loop) -> None:
    model, optimizer = loop.begin()
    params = list(model.parameters())
    for step in loop.backwards(model, optimizer):
        norm = get_total_norm([param.grad for param in params])
        loop.record("norm", norm)
        before = [param.detach().clone() for param in params]
        with torch.no_grad():
            for param in params:
                param.copy_(param + 0.05 / norm.item() * param.grad)
        optimizer.zero_grad()
        loop.loss(model, step).backward()
        with torch.no_grad():
            for param, old in zip(params, before, strict=True):
                param.copy_(old)


@pattern(
    "GradScaler on the CPU, with an optimizer that is fused or not, and with unscale_", early_error=UPDATE_SCHEDULE
)
def scaler(loop: Loop) -> None:
    for name, scale in (("adamw", 1000.0), ("adamw_foreach", 1024.0)):
        model, optimizer = loop.begin(optimizer=name)
        scaling = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        for step in range(STEPS):
            loss = loop.loss(model, step)
            scaling.scale(loss * INFINITY if step == 2 else loss).backward()
            if step > 0:
                scaling.unscale_(optimizer)
                loop.record("norm", clip_grad_norm_(model.parameters(), 0.5))
            scaling.step(optimizer)
            scaling.update()
            loop.record("scale", scaling.get_scale())
            optimizer.zero_grad()


@pattern("gradient accumulation with a varying number of micro-batches", early_error=SECOND)
def accumulate(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.forwards(optimizer):
        parts = (2, 3, 1, 1, 2)[step]
        for part in range(parts):
            (loop.loss(model, 10 * step + part) / parts).backward()


@pattern("gradient accumulation that starts during training", early_error=UPDATE_SCHEDULE, early=EARLY, slow=True)
def accumulate_late(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.forwards(optimizer):
        for part in range(1 + step // 3):
            loop.loss(model, 10 * step + part).backward()


@pattern("gradients read, scaled and clipped, and evaluation, between micro-batches", early_error=SECOND)
def accumulate_and_use(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.forwards(optimizer):
        for part in range(3):
            (loop.loss(model, 10 * step + part) / 3).backward()
            loop.record("norm", model.blocks[1].up.weight.grad.norm())
            if step % 2:
                for param in model.parameters():
                    param.grad.mul_(0.5)
            with torch.no_grad():
                loop.loss(model, 90)
        loop.record("norm", clip_grad_norm_(model.parameters(), 0.5))


@pattern("set_requires_gradient_sync(False) for all micro-batches except the last")
def without_sync(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.forwards(optimizer):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            (loop.loss(model, 10 * step + part) / 3).backward()


@pattern(
    "set_is_last_backward(False) or set_reshard_after_backward(False) for all micro-batches except the last",
    early_error=SECOND,
    slow=True,
)
def last_backward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.forwards(optimizer):
        for part in range(2):
            if step % 2:
                model.set_reshard_after_backward(part == 1)
            else:
                model.set_is_last_backward(part == 1)
            loop.loss(model, 10 * step + part).backward()


@pattern("two backward passes of one forward with retain_graph=True", early_error=SECOND)
def retain(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.forwards(optimizer):
        loss = loop.loss(model, step)
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()


@pattern("two forward passes and one backward of the sum of their losses, or torch.autograd.backward of both")
def two_forwards(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.forwards(optimizer):
        one, other = loop.loss(model, step), loop.loss(model, 50 + step)
        if step % 2:
            torch.autograd.backward([one, other * 0.5])
        else:
            (one + other).backward()


class Penalized(models.Toy):
    """A model that keeps its embedded tokens, for penalties on their gradient."""

    def forward(self, tokens: torch.Tensor, move: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        self.embedded = x if move is None else x + move
        return models.cross_entropy(self.head(self.through_blocks(self.embedded)), tokens)


@pattern("adversarial embeddings: torch.autograd.grad, then a second forward and backward")
def adversarial(loop: Loop) -> None:
    model, optimizer = loop.begin(Penalized())
    for step in loop.forwards(optimizer):
        loss = loop.loss(model, step)
        (slope,) = torch.autograd.grad(loss, model.embedded)
        loop.record("slope", slope)
        moved = model(batch(model, step), slope.sign() * 1e-2)
        loop.record("moved", moved)
        moved.backward()


@pattern("loss.backward(inputs=...) with an activation in some steps", ranks=(1,), slow=True)
def some_inputs(loop: Loop) -> None:
    model, optimizer = loop.begin(Penalized())
    for step in loop.forwards(optimizer):
        loss = loop.loss(model, step)
        loss.backward(inputs=[model.embedded] if step % 2 else None)


@pattern("hooks of parameters that read, scale, replace or drop the gradient, registered before or after offload()")
def hooks(loop: Loop) -> None:
    model = models.build("toy")
    norms: dict[str, Any] = {}
    calls: list[int] = []

    def drop(param: torch.Tensor) -> None:
        param.grad = None

    def double(param: torch.Tensor) -> None:
        param.grad = param.grad * 2

    for param in model.blocks[0].parameters():
        param.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](model.parameters()))
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: norms.__setitem__(name, p.grad.norm()))
    for param in model.blocks.parameters():
        param.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    model.head.bias.register_post_accumulate_grad_hook(drop)
    removed = model.head.weight.register_post_accumulate_grad_hook(double)
    # FSDP2 assigns gradients of sharded parameters without autograd, so that the hook is not called in memory either.
    model.head.weight.register_hook(lambda grad: calls.append(1))
    for step in loop.steps(model, optimizer):
        for name in sorted(norms):
            loop.record(name, norms[name])
        loop.record("calls", len(calls))
        if step == 2:
            removed.remove()


class Tempered(models.Toy):
    """A model with one-element parameters, whose shards are empty on all ranks except the first."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))
        self.blocks[0].gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = self.head(self.through_blocks(self.embedding(tokens))).float()
        return models.cross_entropy(y * self.temperature.float(), tokens)


@pattern("one-element parameters whose gradients are read and clipped", early_error=UPDATE_SCHEDULE)
def one_element(loop: Loop) -> None:
    model, optimizer = loop.begin(Tempered())
    for _ in loop.backwards(model, optimizer):
        loop.record("gradient", model.temperature.grad)
        loop.record("norm", clip_grad_norm_(model.parameters(), 0.5))
        model.temperature.grad.mul_(2.0)
