"""Patterns that read, modify, discard or accumulate gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from infinity.errors import InfinityError
from support import models
from support.loop_pattern import EARLY, LATE, STEPS, UNSUPPORTED, UPDATE_SCHEDULE, Loop, pattern, steps
from support.train import OPTIMIZERS, batch

USED = r"step\(\).*zero_grad\(\)"
"""Part of the error for access to gradients of an earlier step."""


@pattern("zero_grad after step")
def after_step(loop: Loop) -> None:
    loop.steps(*loop.begin())


@pattern("zero_grad before forward")
def before_forward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        optimizer.zero_grad()
        loop.loss(model, step).backward()
        optimizer.step()


@pattern("zero_grad between forward and backward")
def before_backward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loss = loop.loss(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pattern("model.zero_grad() instead of optimizer.zero_grad()")
def of_the_model(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()
        model.zero_grad()


@pattern("p.grad = None instead of zero_grad()")
def set_to_none(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()
        for param in model.parameters():
            param.grad = None


@pattern("zero_grad(set_to_none=False)")
def to_zero(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@pattern("zero_grad(set_to_none=False), with layers that some steps do not use")
def to_zero_and_skipped(loop: Loop) -> None:
    # Their gradients are zero, not None, so that moments decay and weights change.
    model, optimizer = loop.begin()
    for step, order in enumerate([(0, 1, 2), (0, 2), (0, 1, 2), (1, 2), (0, 2)]):
        model.order = order
        loop.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@pattern("model.zero_grad(set_to_none=False), with layers that some steps do not use", slow=True)
def model_to_zero_and_skipped(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step, order in enumerate([(0, 1, 2), (0, 2), (0, 1, 2), (1, 2), (0, 2)]):
        model.order = order
        loop.loss(model, step).backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)


@pattern(
    "zero_grad(set_to_none=False) between backward and step(), to discard a batch",
    update_schedules=("in_forward", "after_backward"),
)
def discarded_with_zeros(loop: Loop) -> None:
    for step, _, optimizer in loop.backwards():
        if step == 3:
            optimizer.zero_grad(set_to_none=False)


pattern(
    "zero_grad(set_to_none=False) between backward and step(), to discard a batch; updates in backward",
    UNSUPPORTED,
    UPDATE_SCHEDULE,
    update_schedules=("auto", *EARLY),
)(discarded_with_zeros)


@pattern(
    "no zero_grad(): gradients accumulate over all steps",
    UNSUPPORTED,
    USED,
    note="gradients cannot accumulate across steps",
)
def no_zero_grad(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()


@pattern("zero_grad() after every second step", UNSUPPORTED, USED, note="gradients cannot accumulate across steps")
def zero_grad_every_second_step(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()
        if step % 2:
            optimizer.zero_grad()


@pattern(
    "gradients of half of the parameters set to None",
    UNSUPPORTED,
    USED,
    note="gradients cannot accumulate across steps",
    slow=True,
)
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


@pattern("clip_grad_norm_ of torch", in_backward_error=UPDATE_SCHEDULE)
def clip(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))


@pattern("clip_grad_norm_ of torch, with frozen parameters", in_backward_error=UPDATE_SCHEDULE, slow=True)
def clip_frozen(loop: Loop) -> None:
    for _, model, _ in loop.backwards("frozen"):
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.05))


@pattern("clip_grad_norm_ of torch, with bf16 parameters", in_backward_error=UPDATE_SCHEDULE, slow=True)
def clip_bf16(loop: Loop) -> None:
    for _, model, _ in loop.backwards(policy="pure_bf16"):
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))


@pattern("clip_grad_norm_ of torch for the parameters that have a gradient", in_backward_error=UPDATE_SCHEDULE)
def clip_filtered(loop: Loop) -> None:
    for _, model, _ in loop.backwards("spare"):
        with_grad = [param for param in model.parameters() if param.requires_grad and param.grad is not None]
        loop.record("norm", nn.utils.clip_grad_norm_(with_grad, 0.5))


@pattern("clip_grad_norm_ of torch for each param group", in_backward_error=UPDATE_SCHEDULE)
def clip_groups(loop: Loop) -> None:
    model = models.build("toy")
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](groups))
    for step in steps(optimizer):
        loop.loss(model, step).backward()
        for group in optimizer.param_groups:
            loop.record("norm", nn.utils.clip_grad_norm_(group["params"], 0.3))


@pattern("clip_grad_norm_ of torch for each layer", in_backward_error=UPDATE_SCHEDULE, slow=True)
def clip_layers(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        for block in model.blocks:
            loop.record("norm", nn.utils.clip_grad_norm_(block.parameters(), 0.1))


@pattern("clip_grad_norm_ of torch for each parameter", in_backward_error=UPDATE_SCHEDULE, slow=True)
def clip_each(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        for param in model.parameters():
            loop.record("norm", nn.utils.clip_grad_norm_(param, 0.05))


@pattern("clip_grad_norm_ of torch twice per step", in_backward_error=UPDATE_SCHEDULE)
def clip_twice(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        for most in (0.5, 0.2):
            loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), most))


@pattern("clip_grad_norm_ of torch with foreach=False", in_backward_error=UPDATE_SCHEDULE, slow=True)
def clip_one_by_one(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False))


def clipped_with(loop: Loop, order: float) -> None:
    for _, model, _ in loop.backwards():
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=order))


@pattern("clip_grad_norm_ of torch with norm_type=inf", in_backward_error=UPDATE_SCHEDULE)
def clip_infinity(loop: Loop) -> None:
    clipped_with(loop, float("inf"))


@pattern("clip_grad_norm_ of torch with norm_type=1", in_backward_error=UPDATE_SCHEDULE, slow=True)
def clip_one(loop: Loop) -> None:
    clipped_with(loop, 1.0)


@pattern("clip_grad_norm_ of torch with norm_type=3", in_backward_error=UPDATE_SCHEDULE, slow=True)
def clip_three(loop: Loop) -> None:
    clipped_with(loop, 3.0)


@pattern("optimizer.clip_grad_norm_ with norm_type=inf", update_schedules=LATE)
def clip_paged_infinity(loop: Loop) -> None:
    for _, model, optimizer in loop.backwards():
        if loop.paging is None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf"))
        else:
            norm = optimizer.clip_grad_norm_(0.1, norm_type=float("inf"))
        loop.record("norm", norm)


@pattern("gradient norm logged with clip_grad_norm_ and max_norm=inf", in_backward_error=UPDATE_SCHEDULE, slow=True)
def clip_at_infinity(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), float("inf")))


@pattern(
    "clipping starts during training",
    in_backward_error=UPDATE_SCHEDULE,
    update_schedules=("in_forward", "after_backward"),
)
def clip_late(loop: Loop) -> None:
    for step, model, _ in loop.backwards():
        if step >= 3:
            loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))


pattern(
    "clipping starts during training; update.schedule = auto", UNSUPPORTED, UPDATE_SCHEDULE, update_schedules=("auto",)
)(clip_late)


@pattern(
    "clip_grad_norm_ with error_if_nonfinite=True; the error is caught and the step skipped",
    in_backward_error=UPDATE_SCHEDULE,
)
def clip_not_finite(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loss = loop.loss(model, step)
        (loss * float("inf") if step == 2 else loss).backward()
        try:
            loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True))
            optimizer.step()
        except InfinityError:
            raise
        except RuntimeError:
            loop.record("not finite", step)
        optimizer.zero_grad()


@pattern("clip_grad_norm_ with a non-finite norm, followed by step()", in_backward_error=UPDATE_SCHEDULE)
def clip_nan_and_step(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        loss = loop.loss(model, step)
        (loss * float("inf") if step == 2 else loss).backward()
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))


@pattern("get_total_norm and clip_grads_with_norm_", in_backward_error=UPDATE_SCHEDULE, slow=True)
def clip_in_two_calls(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        loop.record("norm", norm)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)


@pattern("clip_grad_value_", in_backward_error=UPDATE_SCHEDULE)
def clip_value(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)


@pattern("clip_grad_value_ with foreach=False", in_backward_error=UPDATE_SCHEDULE, slow=True)
def clip_value_one_by_one(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        nn.utils.clip_grad_value_(model.parameters(), 1e-3, foreach=False)


@pattern("step skipped if the gradient norm is too large", in_backward_error=UPDATE_SCHEDULE)
def skip_large_norms(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loss = loop.loss(model, step)
        (loss * 100 if step == 3 else loss).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        loop.record("norm", norm)
        if step != 3:
            optimizer.step()
        optimizer.zero_grad()


@pattern("p.grad.norm() logged for every parameter", in_backward_error=UPDATE_SCHEDULE)
def log_norms(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        for name, param in model.named_parameters():
            loop.record(name, param.grad.norm())


@pattern("p.grad.norm() logged in every second step", in_backward_error=UPDATE_SCHEDULE, slow=True)
def log_norms_every_second_step(loop: Loop) -> None:
    for step, model, _ in loop.backwards():
        if step % 2 == 0:
            loop.record("norm", sum(param.grad.norm() ** 2 for param in model.parameters()) ** 0.5)


@pattern("maximum, mean and NaN of p.grad logged", in_backward_error=UPDATE_SCHEDULE, slow=True)
def log_extremes(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        for name, param in model.named_parameters():
            loop.record(name, param.grad.abs().max())
            loop.record(name, param.grad.mean())
            loop.record(name, param.grad.isnan().any())
            loop.record(name, (param.grad == 0).sum())


@pattern("p.grad read after step()", UNSUPPORTED, "read it before", note="read it before `step()`")
def log_after_step(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()
        for name, param in model.named_parameters():
            loop.record(name, param.grad)
        optimizer.zero_grad()


@pattern("clipped gradients read after clip_grad_norm_", in_backward_error=UPDATE_SCHEDULE, slow=True)
def read_clipped(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        loop.record("gradient", model.head.weight.grad)


@pattern("shape, dtype, device, full_tensor() and to_local() of p.grad", in_backward_error=UPDATE_SCHEDULE)
def full_and_local(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        grad = model.head.weight.grad
        loop.record("form", (tuple(grad.shape), str(grad.dtype), str(grad.device), grad.numel(), grad.ndim))
        loop.record("full", grad.full_tensor())
        loop.record("local", grad.to_local())
        loop.record("copy", grad.detach().cpu().clone().full_tensor())


@pattern(
    "gradients cloned and compared with the gradients of the next step", in_backward_error=UPDATE_SCHEDULE, slow=True
)
def keep_clones(loop: Loop) -> None:
    model, optimizer = loop.begin()
    before: list[torch.Tensor] = []
    for step in steps(optimizer):
        loop.loss(model, step).backward()
        now = [param.grad.detach().clone() for param in model.parameters()]
        for a, b in zip(before, now, strict=False):
            loop.record("alike", (a * b).sum())
        before = now


@pattern("a reference to p.grad kept after step() and zero_grad()", UNSUPPORTED, "clone", note="clone the gradient")
def keep_references(loop: Loop) -> None:
    # In memory, zero_grad() only removes the reference, so that the tensor keeps its values.
    model, optimizer = loop.begin()
    kept: list[Any] = []
    for step in steps(optimizer):
        loop.loss(model, step).backward()
        for grad in kept:
            loop.record("before", grad)
        kept = [model.blocks[0].up.weight.grad, model.head.bias.grad]


@pattern("noise added to gradients", in_backward_error=UPDATE_SCHEDULE, slow=True)
def noise(loop: Loop) -> None:
    model, optimizer = loop.begin()
    generator = torch.Generator().manual_seed(3)
    for step in steps(optimizer):
        loop.loss(model, step).backward()
        for param in model.parameters():
            scales = torch.randn((), generator=generator)
            param.grad.add_(param.grad * scales, alpha=0.1)


@pattern("torch.randn_like(p.grad) added to gradients", in_backward_error=UPDATE_SCHEDULE, ranks=(1,))
def noise_like(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        torch.manual_seed(step)
        loop.loss(model, step).backward()
        for param in model.parameters():
            param.grad.add_(torch.randn_like(param.grad) * 1e-3)


@pattern("gradients divided by the number of tokens", in_backward_error=UPDATE_SCHEDULE, slow=True)
def divide(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        for param in model.parameters():
            if param.grad is not None:
                param.grad.div_(48)


@pattern("p.grad = p.grad * factor", in_backward_error=UPDATE_SCHEDULE)
def assign(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        for param in model.parameters():
            param.grad = param.grad * 3


@pattern("p.grad.data modified: mul_, clamp_", in_backward_error=UPDATE_SCHEDULE, slow=True)
def data(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        for param in model.parameters():
            param.grad.data.mul_(0.5)
            param.grad.data.clamp_(-1e-2, 1e-2)


@pattern("gradients of a layer set to zero or None before step()", in_backward_error=UPDATE_SCHEDULE)
def zero_or_none(loop: Loop) -> None:
    for step, model, _ in loop.backwards():
        for param in model.blocks[step % 3].parameters():
            param.grad.zero_()
        for param in model.blocks[(step + 1) % 3].parameters():
            param.grad = None


@pattern("torch._foreach_mul_ of all gradients", in_backward_error=UPDATE_SCHEDULE, slow=True)
def foreach(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        torch._foreach_mul_([param.grad for param in model.parameters()], 0.25)


@pattern(
    "gradients centralized (matrices) or replaced by their signs (vectors)",
    in_backward_error=UPDATE_SCHEDULE,
    slow=True,
)
def centralize(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        for param in model.parameters():
            if param.ndim > 1:
                param.grad.sub_(param.grad.mean(dim=1, keepdim=True))
            else:
                param.grad.copy_(param.grad.sign())


@pattern("in-place writes to rows and elements of p.grad", in_backward_error=UPDATE_SCHEDULE)
def views(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        model.head.weight.grad.to_local()[1:3].zero_()
        model.head.bias.grad.to_local().view(-1)[:5].fill_(0.25)
        model.embedding.weight.grad._local_tensor.mul_(2)


@pattern("gradients of two tasks computed separately and combined", in_backward_error=UPDATE_SCHEDULE)
def combine_tasks(loop: Loop) -> None:
    model, optimizer = loop.begin()
    params = list(model.parameters())
    for step in steps(optimizer):
        found = []
        for task in range(2):
            loop.loss(model, 10 * step + task).backward()
            found.append([param.grad.clone() for param in params])
            optimizer.zero_grad()
        for param, a, b in zip(params, *found, strict=True):
            dot = (a * b).sum().full_tensor()
            param.grad = a + b if dot > 0 else a - b


def summed_in_loop(loop: Loop, *, clone: bool) -> None:
    """Train with gradients that the loop sums and assigns to `p.grad`."""
    model, optimizer = loop.begin()
    params = list(model.parameters())
    for step in steps(optimizer):
        sums: list[torch.Tensor] | None = None
        for part in range(3):
            loop.loss(model, 10 * step + part).backward()
            grads = [param.grad.clone() if clone else param.grad for param in params]
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
            for param in params:
                param.grad = None
        for param, total in zip(params, sums or (), strict=True):
            param.grad = total / 3


@pattern(
    "clones of gradients summed in the loop and assigned to p.grad before step()",
    in_backward_error=UPDATE_SCHEDULE,
    slow=True,
)
def summed_clones(loop: Loop) -> None:
    summed_in_loop(loop, clone=True)


@pattern(
    "references to gradients kept after p.grad = None, summed and assigned to p.grad",
    UNSUPPORTED,
    "clone",
    note="clone the gradients",
    slow=True,
)
def summed_references(loop: Loop) -> None:
    summed_in_loop(loop, clone=False)


@pattern("gradients assigned to p.grad without backward", in_backward_error=UPDATE_SCHEDULE)
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


@pattern("SGD in the loop: p -= lr * p.grad")
def sgd_in_place(loop: Loop) -> None:
    model, _ = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        model.zero_grad()


@pattern("SGD in the loop: p.copy_(p - lr * p.grad)")
def sgd_copied(loop: Loop) -> None:
    model, _ = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(param - 0.1 * param.grad)
        model.zero_grad()


@pattern(
    "sharpness-aware minimization: weights perturbed along the gradient, second backward, weights restored",
    in_backward_error=UPDATE_SCHEDULE,
)
def sharpness(loop: Loop) -> None:
    model, optimizer = loop.begin()
    params = list(model.parameters())
    for step in steps(optimizer):
        loop.loss(model, step).backward()
        norm = nn.utils.get_total_norm([param.grad for param in params])
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


@pattern("GradScaler on the CPU", in_backward_error=UPDATE_SCHEDULE, slow=True)
def scaler(loop: Loop) -> None:
    model, optimizer = loop.begin()
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        loss = loop.loss(model, step)
        scaling.scale(loss * float("inf") if step == 2 else loss).backward()
        scaling.step(optimizer)
        scaling.update()
        loop.record("scale", scaling.get_scale())
        optimizer.zero_grad()


@pattern("GradScaler on the CPU, with an optimizer that is not fused", in_backward_error=UPDATE_SCHEDULE)
def scaler_not_fused(loop: Loop) -> None:
    model, optimizer = loop.begin(optimizer="adamw_foreach")
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        loss = loop.loss(model, step)
        scaling.scale(loss * float("inf") if step == 2 else loss).backward()
        scaling.step(optimizer)
        scaling.update()
        loop.record("scale", scaling.get_scale())
        optimizer.zero_grad()


@pattern("GradScaler on the CPU, with unscale_ and clipping", in_backward_error=UPDATE_SCHEDULE)
def scaler_and_clip(loop: Loop) -> None:
    model, optimizer = loop.begin(optimizer="adamw_foreach")
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        loss = loop.loss(model, step)
        scaling.scale(loss * float("inf") if step == 2 else loss).backward()
        scaling.unscale_(optimizer)
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaling.step(optimizer)
        scaling.update()
        loop.record("scale", scaling.get_scale())
        optimizer.zero_grad()


@pattern("gradient accumulation", in_backward_error="second gradient|" + UPDATE_SCHEDULE)
def accumulate(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        for part in range(3):
            (loop.loss(model, 10 * step + part) / 3).backward()


@pattern("gradient accumulation, with clip_grad_norm_ of torch", in_backward_error=UPDATE_SCHEDULE)
def accumulate_and_clip(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        for part in range(3):
            (loop.loss(model, 10 * step + part) / 3).backward()
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))


@pattern("gradients read during accumulation", in_backward_error=UPDATE_SCHEDULE)
def accumulate_and_read(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        for part in range(3):
            (loop.loss(model, 10 * step + part) / 3).backward()
            loop.record("norm", model.blocks[1].up.weight.grad.norm())


@pattern("gradients scaled during accumulation", in_backward_error=UPDATE_SCHEDULE, slow=True)
def accumulate_and_scale(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        for part in range(3):
            loop.loss(model, 10 * step + part).backward()
            for param in model.parameters():
                param.grad.mul_(0.5)


@pattern("set_requires_gradient_sync(False) for all micro-batches except the last")
def without_sync(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            (loop.loss(model, 10 * step + part) / 3).backward()


@pattern(
    "set_is_last_backward(False) for all micro-batches except the last",
    in_backward_error="second gradient|" + UPDATE_SCHEDULE,
    slow=True,
)
def last_backward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        for part in range(2):
            model.set_is_last_backward(part == 1)
            (loop.loss(model, 10 * step + part) / 2).backward()


@pattern(
    "a varying number of micro-batches per step: 2, 3, 1, 1, 2", in_backward_error="second gradient|" + UPDATE_SCHEDULE
)
def varying_micro_batches(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step, parts in enumerate((2, 3, 1, 1, 2)):
        for part in range(parts):
            (loop.loss(model, 10 * step + part) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()


@pattern("one micro-batch per step, later several", update_schedules=("in_forward", "after_backward"), slow=True)
def more_micro_batches(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step, parts in enumerate((1, 1, 1, 2, 2)):
        for part in range(parts):
            (loop.loss(model, 10 * step + part) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()


pattern(
    "one micro-batch per step, later several; updates in backward",
    UNSUPPORTED,
    UPDATE_SCHEDULE,
    update_schedules=("auto", *EARLY),
)(more_micro_batches)


@pattern(
    "two backward passes of one forward with retain_graph=True", in_backward_error="second gradient|" + UPDATE_SCHEDULE
)
def retain(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        loss = loop.loss(model, step)
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()


@pattern("two forward passes and one backward of the sum of their losses")
def two_forwards(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        (loop.loss(model, step) + loop.loss(model, 50 + step)).backward()


@pattern("torch.autograd.backward with two losses", slow=True)
def backward_of_two(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        torch.autograd.backward([loop.loss(model, step), loop.loss(model, 50 + step) * 0.5])


class Penalized(models.Toy):
    """A model that keeps its embedded tokens, for penalties on their gradient."""

    def forward(self, tokens: torch.Tensor, move: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        self.embedded = x = x if move is None else x + move
        for index in self.order:
            x = self.blocks[index](x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


@pattern("adversarial embeddings: torch.autograd.grad, then a second forward and backward")
def adversarial(loop: Loop) -> None:
    model, optimizer = loop.begin(Penalized())
    for step in steps(optimizer):
        loss = loop.loss(model, step)
        (slope,) = torch.autograd.grad(loss, model.embedded)
        loop.record("slope", slope)
        moved = model(batch(model, step), slope.sign() * 1e-2)
        loop.record("moved", moved)
        moved.backward()


@pattern("gradients of a first backward discarded with zero_grad()", in_backward_error=UPDATE_SCHEDULE, slow=True)
def first_backward_discarded(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        loop.loss(model, 70 + step).backward()
        optimizer.zero_grad()
        loop.loss(model, step).backward()


@pattern(
    "gradients discarded with model.zero_grad() instead of step()",
    in_backward_error=UPDATE_SCHEDULE,
    update_schedules=("in_forward", "after_backward"),
)
def discarded_with_model_zero_grad(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        if step == 3:
            model.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()


pattern(
    "gradients discarded with model.zero_grad() instead of step(); update.schedule = auto",
    UNSUPPORTED,
    UPDATE_SCHEDULE,
    update_schedules=("auto",),
)(discarded_with_model_zero_grad)


@pattern("post-accumulate-grad hooks that read the gradient")
def hooks_read(loop: Loop) -> None:
    model, optimizer = loop.begin()
    norms: dict[str, Any] = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: norms.__setitem__(name, p.grad.norm()))
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        for name in sorted(norms):
            loop.record(name, norms[name])


@pattern("post-accumulate-grad hooks that scale the gradient")
def hooks_scale(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    loop.steps(model, optimizer)


@pattern("post-accumulate-grad hooks registered before offload()", slow=True)
def hooks_before(loop: Loop) -> None:
    model = models.build("toy")
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](model.parameters()))
    loop.steps(model, optimizer)


@pattern("post-accumulate-grad hooks that replace the gradient or set it to None")
def hooks_replace(loop: Loop) -> None:
    model, optimizer = loop.begin()

    def drop(param: torch.Tensor) -> None:
        param.grad = None

    def double(param: torch.Tensor) -> None:
        param.grad = param.grad * 2

    model.head.bias.register_post_accumulate_grad_hook(drop)
    model.head.weight.register_post_accumulate_grad_hook(double)
    loop.steps(model, optimizer)


@pattern("p.register_hook on parameters")
def tensor_hooks(loop: Loop) -> None:
    # FSDP2 assigns gradients of sharded parameters without autograd, so that the hook is not called in memory either.
    model, optimizer = loop.begin()
    calls: list[int] = []
    model.head.weight.register_hook(lambda grad: calls.append(1))
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        loop.record("calls", len(calls))


@pattern("gradients zeroed with p.grad.detach_() and p.grad.zero_()")
def zeroed_in_place(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()
        for param in model.parameters():
            if param.grad is not None:
                param.grad.detach_()
                param.grad.zero_()


@pattern(
    "weight decay added to gradients: p.grad.add_(p, alpha=...), torch._foreach_add_", in_backward_error=UPDATE_SCHEDULE
)
def weight_decay(loop: Loop) -> None:
    for step, model, _ in loop.backwards():
        with torch.no_grad():
            if step % 2:
                torch._foreach_add_([p.grad for p in model.parameters()], list(model.parameters()), alpha=0.01)
            else:
                for param in model.parameters():
                    param.grad.add_(param, alpha=0.01)


@pattern("gradients scaled by the ratio of weight norm and gradient norm", in_backward_error=UPDATE_SCHEDULE, slow=True)
def trust_ratio(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        with torch.no_grad():
            for param in model.parameters():
                ratio = param.norm() / param.grad.norm().clamp(min=1e-6)
                param.grad.mul_(ratio.clamp(max=2.0))


@pattern("moving average of gradients added to gradients", in_backward_error=UPDATE_SCHEDULE)
def amplified(loop: Loop) -> None:
    model, optimizer = loop.begin()
    means: dict[str, torch.Tensor] = {}
    for step in steps(optimizer):
        loop.loss(model, step).backward()
        for name, param in model.named_parameters():
            old = means.get(name, torch.zeros_like(param.grad))
            means[name] = old * 0.9 + param.grad.detach() * 0.1
            param.grad.data = param.grad.data + means[name] * 2.0


@pattern("moving average of gradients with torch._foreach_lerp_", in_backward_error=UPDATE_SCHEDULE, slow=True)
def averaged(loop: Loop) -> None:
    model, optimizer = loop.begin()
    params = list(model.parameters())
    means = [torch.zeros_like(param) for param in params]
    for step in steps(optimizer):
        loop.loss(model, step).backward()
        torch._foreach_lerp_(means, [param.grad for param in params], 0.1)
    for mean in means:
        loop.record("mean", mean)


@pattern("all gradients concatenated into one vector: torch.cat of full_tensor()", in_backward_error=UPDATE_SCHEDULE)
def one_vector(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        vector = torch.cat([param.grad.full_tensor().flatten() for param in model.parameters()])
        loop.record("vector", vector)
        loop.record("median", vector.abs().median())


@pattern("the gradient of one parameter assigned to another", in_backward_error=UPDATE_SCHEDULE, slow=True)
def exchanged(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
        first.grad, second.grad = second.grad, first.grad


@pattern("torch.mul(p.grad, factor, out=p.grad)", in_backward_error=UPDATE_SCHEDULE)
def out(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        for param in model.parameters():
            grad = param.grad.to_local()
            torch.mul(grad, 0.5, out=grad)


@pattern("gradients multiplied by a tensor that is modified later", in_backward_error=UPDATE_SCHEDULE, slow=True)
def factor(loop: Loop) -> None:
    model, optimizer = loop.begin()
    scale = torch.tensor(0.5)
    for step in steps(optimizer):
        loop.loss(model, step).backward()
        for param in model.parameters():
            param.grad.mul_(scale)
        scale.mul_(3.0)


@pattern("loss.backward(inputs=...) with an activation in some steps", ranks=(1,), slow=True)
def some_inputs(loop: Loop) -> None:
    model, optimizer = loop.begin(Penalized())
    for step in steps(optimizer):
        loss = loop.loss(model, step)
        if step % 2:
            loss.backward(inputs=[model.embedded])
        else:
            loss.backward()


class Tempered(models.Toy):
    """A model with one-element parameters, whose shards are empty on all ranks except the first."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))
        self.blocks[0].gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = self.blocks[index](x)
        y = self.head(x).float() * self.temperature.float()
        return nn.functional.cross_entropy(y.flatten(0, 1), tokens.flatten())


@pattern("one-element parameters whose gradients are read and clipped", in_backward_error=UPDATE_SCHEDULE)
def one_element(loop: Loop) -> None:
    model, optimizer = loop.begin(Tempered())
    for step in range(STEPS):
        loop.loss(model, step).backward()
        loop.record("gradient", model.temperature.grad)
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        model.temperature.grad.mul_(2.0)
        optimizer.step()
        optimizer.zero_grad()
        loop.record("temperature", model.temperature)


@pattern("local gradients and weights read on one rank only", update_schedules=LATE, ranks=(2,), slow=True)
def one_rank_reads(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        if dist.get_rank() == 0:
            loop.record("gradient", model.head.weight.grad.to_local().norm())
            loop.record("weight", model.blocks[1].up.weight.to_local().norm())


@pattern("a tensor in a param group")
def tensor_settings(loop: Loop) -> None:
    model = models.build("toy")
    groups = [{"params": list(model.parameters()), "mask": torch.ones(3)}]
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](groups))
    loop.steps(model, optimizer)
