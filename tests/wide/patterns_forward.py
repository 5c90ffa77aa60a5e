"""Patterns in and around forward: evaluation, skipped layers, hooks, precision, compilation, data of various shapes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint

from support import models
from support.loop_pattern import BETWEEN, EARLY, STEPS, Loop, pattern
from support.train import batch, evaluate


@pattern("evaluation before the first step and between steps: no_grad, inference_mode, gradients without backward")
def evaluation(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.record("evaluation", evaluate(model))
    for step in loop.steps(model, optimizer):
        loop.record("evaluation", evaluate(model))
        with torch.inference_mode(step % 2 == 1):
            loop.loss(model, 90 + step)


@pattern("another forward with gradients enabled between forward and backward")
def between_forward_and_backward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.forwards(optimizer):
        loss = loop.loss(model, step)
        loop.loss(model, 90 + step)
        loss.backward()


@pattern(
    "evaluation, or a forward with gradients enabled, between backward or clipping and step()", early_error=BETWEEN
)
def evaluation_before_step(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.backwards(model, optimizer):
        loop.record("evaluation", evaluate(model))
        if step % 2:
            loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            loop.loss(model, 90 + step)


@pattern("evaluation between backward and step() in a single step", early_error=BETWEEN, early=EARLY)
def evaluation_before_one_step(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.backwards(model, optimizer):
        if step == 3:
            loop.record("evaluation", evaluate(model))


@pattern("forward of the next batch before step()", early_error=BETWEEN)
def forward_ahead(loop: Loop) -> None:
    # The loss is computed with the old weights, and its backward runs after the update.
    model, optimizer = loop.begin()
    loss = loop.loss(model, 0)
    for step in loop.forwards(optimizer):
        loss.backward()
        loss = loop.loss(model, step + 1)


@pattern("reshard_after_forward=False, and set_reshard_after_forward called during training")
def not_resharded(loop: Loop) -> None:
    model, optimizer = loop.begin(reshard=False)
    for step in loop.steps(model, optimizer):
        loop.record("evaluation", evaluate(model))
        model.set_reshard_after_forward(step == 2)


class Dropout(models.Toy):
    """A model with dropout after every block, and optional activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.checkpointing = nn.Dropout(0.3), ""

    def _block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.blocks[index](x))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(self._block, index, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = self._block(index, x)
        return models.cross_entropy(self.head(x), tokens)


@pattern("dropout, also under checkpoint(), evaluation in training mode, random states saved and restored")
def dropout(loop: Loop) -> None:
    model, optimizer = loop.begin(Dropout())
    for step in loop.steps(model, optimizer, 6):
        model.checkpointing = ("reentrant", "not reentrant", "")[step % 3]
        state = torch.get_rng_state()
        with torch.no_grad():
            loop.loss(model, 90)
        loop.record("drawn", torch.rand(3))
        if step % 2:
            torch.set_rng_state(state)


@pattern("blocks in a different order in every step, some of them used twice or skipped (stochastic depth)")
def shuffled(loop: Loop) -> None:
    model, optimizer = loop.begin()
    orders = [(0, 1, 2), (2, 1, 0), (1, 1, 2), (0, 2), (), (2, 0, 2, 1), (0,), (0, 1, 2)]
    for step, order in enumerate(orders):
        model.order = order
        loop.step(model, optimizer, step)


class Experts(models.Toy):
    """A model that routes each token to one of the blocks, so that a block may receive no tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        chosen = tokens % 4  # of three
        for index, block in enumerate(self.blocks):
            rows = (chosen == index).nonzero(as_tuple=True)
            if len(rows[0]):
                x = x.index_put(rows, block(x[rows]))
        return models.cross_entropy(self.head(x), tokens)


@pattern("experts that receive tokens in some steps only", ranks=(1,))
def experts(loop: Loop) -> None:
    model, optimizer = loop.begin(Experts())
    for step in loop.forwards(optimizer):
        tokens = batch(model, step)
        if step in (1, 3):
            tokens = (tokens // 4 * 4 + step % 3).clamp(max=130)
        loss = model(tokens)
        loop.record("loss", loss)
        loss.backward()


class TwoHeads(models.Toy):
    """A model with a second head, which is a separate FSDP module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Linear(models.WIDTH, 131))
        self.order, self.active = (0, 1, 2), 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.through_blocks(self.embedding(tokens))
        heads = (self.head, self.blocks[3])
        found = [heads[self.active](x)] if self.active < 2 else [head(x) for head in heads]
        return sum(models.cross_entropy(y, tokens) for y in found)


@pattern("alternating tasks, each with its own head")
def alternate(loop: Loop) -> None:
    model, optimizer = loop.begin(TwoHeads())
    for step in loop.steps(model, optimizer, STEPS + 1):
        model.active = (step + 1) % 3


class Cut(models.Toy):
    """A model that can detach the output of its first block, or run the first block without gradients."""

    cut = ""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.cut != "no_grad"):
            x = self.blocks[0](self.embedding(tokens))
        if self.cut == "detach":
            x = x.detach()
        return models.cross_entropy(self.head(self.blocks[2](self.blocks[1](x))), tokens)


@pattern("activations detached, or first layers under no_grad, in some steps")
def detached(loop: Loop) -> None:
    model, optimizer = loop.begin(Cut())
    for step in loop.steps(model, optimizer):
        model.cut = ("detach", "", "no_grad")[step % 3]


@pattern("batches of any size, also zero sequences, a loss of zero, a float64 loss, or no backward")
def batches(loop: Loop) -> None:
    model, optimizer = loop.begin(Logits())
    for step in loop.forwards(optimizer, 7):
        sequences, length = ((2, 24), (1, 7), (0, 24), (5, 3), (3, 1), (2, 24), (2, 24))[step]
        loss = model(batch(model, step, sequences)[:, :length]).float().square().sum()
        loop.record("loss", loss)
        if step == 3:
            loss = loss * 0.0
        if step != 5:
            (loss.double() ** 2).backward()


class Logits(models.Toy):
    """A model that returns logits instead of a loss."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.through_blocks(self.embedding(tokens)))


@pattern("batches of different sizes on the ranks, or a loss of zero on a rank without data", ranks=(2,), slow=True)
def uneven_ranks(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in loop.forwards(optimizer):
        weight = (dist.get_rank() + step) % 3
        (loop.loss(model, step, max(weight, 1)) * weight).backward()


@pattern("autocast around forward", slow=True)
def autocast(loop: Loop) -> None:
    model, optimizer = loop.begin(policy="fp32")
    for step in loop.forwards(optimizer):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loop.loss(model, step)
        loss.backward()


@pattern("forward, full backward and tensor hooks that read or modify activations and their gradients, or read weights")
def hooks(loop: Loop) -> None:
    model, optimizer = loop.begin(Logits())
    first, middle, last = model.blocks
    middle.register_forward_hook(lambda module, args, out: loop.record("activation", out.float().norm()))
    middle.register_forward_hook(lambda module, args, out: loop.record("weight", module.up.weight.float().norm()))
    last.register_forward_hook(lambda module, args, out: out * 0.5)
    first.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    middle.register_full_backward_hook(lambda module, ins, outs: loop.record("slope", outs[0].float().norm()))
    last.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 0.5,))
    for step in loop.forwards(optimizer):
        y = model(batch(model, step))
        y.register_hook(lambda grad: grad * 0.5)
        y.retain_grad()
        y.float().square().mean().backward()
        loop.record("slope", y.grad)


@pattern("checkpoint_wrapper around a layer, a compiled layer, and torch.compile of the model", slow=True, ranks=(1,))
def wrapped(loop: Loop) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = models.Toy()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1].compile(backend="aot_eager")
    model, optimizer = loop.begin(model)
    compiled = torch.compile(model, backend="aot_eager")
    for step in loop.forwards(optimizer, 3):
        loss = compiled(batch(model, step))
        loop.record("loss", loss)
        loss.backward()


class Normed(models.Toy):
    """A model with batch norm after each block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(models.WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = self.blocks[index](x)
            x = self.norm(x.transpose(1, 2).float()).transpose(1, 2)
        return models.cross_entropy(self.head(x), tokens)


@pattern("batch norm, and torch.optim.swa_utils.update_bn", ranks=(1,))
def batch_norm(loop: Loop) -> None:
    model, optimizer = loop.begin(Normed(), policy="fp32")
    for step in loop.steps(model, optimizer):
        loop.record_weights(model)
        if step == 3:
            update_bn([batch(model, 80 + number) for number in range(3)], model)
    loop.record_weights(model)


@pattern("parametrizations: weight_norm and spectral_norm", slow=True)
def parametrized(loop: Loop) -> None:
    torch.manual_seed(0)
    model = models.Toy()
    nn.utils.parametrizations.weight_norm(model.blocks[0].up)
    nn.utils.parametrizations.spectral_norm(model.blocks[1].up)
    loop.train(*loop.begin(model, policy="fp32"))


@pattern(
    "FSDP2's unshard(), reshard(), explicit prefetching, set_gradient_divide_factor, set_force_sum_reduction_for_comms"
)
def methods_of_fsdp(loop: Loop) -> None:
    model, optimizer = loop.begin()
    first, middle, last = model.blocks
    for one, other in ((first, middle), (middle, last)):
        one.set_modules_to_forward_prefetch([other])
        other.set_modules_to_backward_prefetch([one])
    model.set_force_sum_reduction_for_comms(True)
    if dist.get_world_size() == 1:
        model.set_gradient_divide_factor(3.0)
    for _ in loop.steps(model, optimizer):
        middle.unshard()
        loop.record("weight", middle.up.weight)
        middle.reshard()


@pattern("torch.func.functional_call, and a layer called outside of the model", slow=True)
def called_otherwise(loop: Loop) -> None:
    model, optimizer = loop.begin(Logits())
    x = torch.randn(2, 5, models.WIDTH, generator=torch.Generator().manual_seed(0))
    for step in range(STEPS):
        y = torch.func.functional_call(model, {}, (batch(model, step),))
        y.float().square().mean().backward()
        loop.record("y", y)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loop.record("features", model.blocks[1](x))
