"""Patterns in and around forward: evaluation, skipped layers, hooks, precision, compilation, data of various shapes."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support import models
from support.loop_pattern import LATE, STEPS, UNSUPPORTED, UPDATE_SCHEDULE, Loop, pattern, steps
from support.train import OPTIMIZERS, batch, evaluate

BETWEEN = r"between backward and step|" + UPDATE_SCHEDULE
"""Part of the error for access to weights that were already updated in backward."""


@pattern("evaluation under no_grad between steps")
def evaluation(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        loop.record("evaluation", evaluate(model))


@pattern("evaluation before the first step", slow=True)
def sanity(loop: Loop) -> None:
    model, optimizer = loop.begin()
    loop.record("evaluation", evaluate(model))
    loop.steps(model, optimizer)


@pattern("evaluation under inference_mode", slow=True)
def inference(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        with torch.inference_mode():
            loop.loss(model, 90)


@pattern("evaluation with gradients enabled and without backward")
def with_gradients(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        loop.loss(model, 90 + step)


@pattern("evaluation with gradients enabled before every second step", slow=True)
def with_gradients_every_second_step(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        if step % 2 == 0:
            loop.loss(model, 90 + step)
        loop.step(model, optimizer, step)


@pattern("another forward with gradients enabled between forward and backward")
def between_forward_and_backward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        loss = loop.loss(model, step)
        loop.loss(model, 90 + step)
        loss.backward()


@pattern("evaluation after every step with reshard_after_forward=False", slow=True)
def evaluation_not_resharded(loop: Loop) -> None:
    model, optimizer = loop.begin(reshard=False)
    for step in range(STEPS):
        loss = loop.loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.record("evaluation", evaluate(model))


@pattern("evaluation between backward and step()", in_backward_error=BETWEEN)
def evaluation_before_step(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        loop.record("evaluation", evaluate(model))


@pattern(
    "evaluation between backward and step() in a single step; update.schedule = auto",
    UNSUPPORTED,
    BETWEEN,
    note="set `in_forward` or `after_backward`",
    update_schedules=("auto",),
)
def evaluation_before_one_step(loop: Loop) -> None:
    for step, model, _ in loop.backwards():
        if step == 3:
            loop.record("evaluation", evaluate(model))


@pattern("evaluation between clipping and step()", in_backward_error=UPDATE_SCHEDULE, slow=True)
def clip_evaluate_step(loop: Loop) -> None:
    for _, model, _ in loop.backwards():
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        loop.record("evaluation", evaluate(model))


@pattern("a forward with gradients enabled between clipping and step()", in_backward_error=UPDATE_SCHEDULE)
def clip_forward_step(loop: Loop) -> None:
    for step, model, _ in loop.backwards():
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        loop.loss(model, 90 + step)


@pattern("a forward with gradients enabled between the optimizer's clip_grad_norm_ and step()", update_schedules=LATE)
def clip_paged_forward_step(loop: Loop) -> None:
    for step, model, optimizer in loop.backwards():
        if loop.paging is None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            norm = optimizer.clip_grad_norm_(0.5)
        loop.record("norm", norm)
        loop.loss(model, 90 + step)


@pattern("a forward with gradients enabled between backward and step()", in_backward_error=BETWEEN)
def forward_before_step(loop: Loop) -> None:
    for step, model, _ in loop.backwards():
        loop.loss(model, 90 + step)


@pattern("forward of the next batch before step()", in_backward_error=BETWEEN)
def forward_ahead(loop: Loop) -> None:
    # The loss is computed with the old weights, and its backward runs after the update.
    model, optimizer = loop.begin()
    loss = loop.loss(model, 0)
    for step in steps(optimizer):
        loss.backward()
        loss = loop.loss(model, step + 1)


@pattern("evaluation during gradient accumulation", in_backward_error="second gradient|" + BETWEEN, slow=True)
def in_accumulation(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        for part in range(3):
            (loop.loss(model, 10 * step + part) / 3).backward()
            loop.record("evaluation", evaluate(model))


@pattern("generate() during training", slow=True)
def generate(loop: Loop) -> None:
    model, optimizer = loop.begin("llama")
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        model.eval()
        with torch.no_grad():
            found = model.generate(batch(model, 90)[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
        loop.record("generated", found)
        model.train()


@pattern("dropout, and evaluation in training mode")
def dropout(loop: Loop) -> None:
    model, optimizer = loop.begin(Dropout())
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        with torch.no_grad():
            loop.loss(model, 90)


class Dropout(models.Toy):
    """A model with dropout after every block, and optional activation checkpointing."""

    def __init__(self, checkpointing: str = "") -> None:
        super().__init__()
        self.drop, self.checkpointing = nn.Dropout(0.3), checkpointing

    def _block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.blocks[index](x))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            if self.checkpointing and self.training:
                x = checkpoint(self._block, index, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = self._block(index, x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


@pattern("dropout under checkpoint(use_reentrant=True)")
def dropout_reentrant(loop: Loop) -> None:
    loop.steps(*loop.begin(Dropout("reentrant")))


@pattern("dropout under checkpoint(use_reentrant=False)", slow=True)
def dropout_not_reentrant(loop: Loop) -> None:
    loop.steps(*loop.begin(Dropout("not reentrant")))


@pattern("activation checkpointing in every second step", slow=True)
def checkpoint_every_second_step(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        for block in model.blocks:
            block.checkpointed = step % 2 == 0
        loop.step(model, optimizer, step)


@pattern("blocks skipped at random (stochastic depth)")
def stochastic_depth(loop: Loop) -> None:
    model, optimizer = loop.begin()
    generator = random.Random(0)
    for step in range(STEPS + 2):
        model.order = tuple(index for index in range(3) if generator.random() < 0.6)
        loop.step(model, optimizer, step)


@pattern("blocks skipped at random, with clip_grad_norm_ of torch", in_backward_error=UPDATE_SCHEDULE, slow=True)
def stochastic_depth_clipped(loop: Loop) -> None:
    model, optimizer = loop.begin()
    generator = random.Random(0)
    for step in steps(optimizer, STEPS + 2):
        model.order = tuple(index for index in range(3) if generator.random() < 0.6)
        loop.loss(model, step).backward()
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))


@pattern("blocks in a different order in every step, some of them used twice")
def shuffled(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 1, 2), (0, 2), (2, 0, 2, 1), (0, 1, 2)]):
        model.order = order
        loop.step(model, optimizer, step)


@pattern("growing number of layers (progressive stacking)", slow=True)
def progressive_stacking(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS + 1):
        model.order = tuple(range(1 + step // 2))
        loop.step(model, optimizer, step)


@pattern("tied weights", slow=True)
def tied(loop: Loop) -> None:
    loop.steps(*loop.begin("tied"))


class Experts(models.Toy):
    """A model that routes each token to one of the blocks, so that a block may receive no tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        chosen = tokens % 4  # of three
        for index, block in enumerate(self.blocks):
            rows = (chosen == index).nonzero(as_tuple=True)
            if len(rows[0]):
                x = x.index_put(rows, block(x[rows]))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


@pattern("experts that receive tokens in some steps only", ranks=(1,))
def experts(loop: Loop) -> None:
    model, optimizer = loop.begin(Experts())
    for step in steps(optimizer):
        tokens = batch(model, step)
        if step in (1, 3):
            tokens = tokens // 4 * 4 + step % 3
            tokens = tokens.clamp(max=130)
        loss = model(tokens)
        loop.record("loss", loss)
        loss.backward()


class TwoHeads(models.Toy):
    """A model with a second head, which is a separate FSDP module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Linear(models.WIDTH, 131))
        self.order = (0, 1, 2)
        self.active = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = self.blocks[index](x)
        heads = (self.head, self.blocks[3])
        found = [heads[self.active](x)] if self.active < 2 else [head(x) for head in heads]
        return sum(nn.functional.cross_entropy(y.float().flatten(0, 1), tokens.flatten()) for y in found)


@pattern("alternating tasks, each with its own head")
def alternate(loop: Loop) -> None:
    model, optimizer = loop.begin(TwoHeads())
    for step in range(STEPS + 1):
        model.active = step % 3
        loop.step(model, optimizer, step)


@pattern("two heads, with one backward for each loss", slow=True)
def backward_each(loop: Loop) -> None:
    model, optimizer = loop.begin(TwoHeads())
    for step in steps(optimizer):
        for head in (0, 1):
            model.active = head
            loop.loss(model, step).backward()


@pattern("activations detached in some steps")
def detached(loop: Loop) -> None:
    model, optimizer = loop.begin(Cut())
    for step in range(STEPS):
        model.cut = step % 2 == 1
        loop.step(model, optimizer, step)


class Cut(models.Toy):
    """A model that can detach the output of its first block."""

    cut = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = self.blocks[index](x)
            if self.cut and index == 0:
                x = x.detach()
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


class Frozen(models.Toy):
    """A model that runs its first block without gradients."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.blocks[0](self.embedding(tokens))
        for index in (1, 2):
            x = self.blocks[index](x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


@pattern("first layers under no_grad in forward, with their parameters in the optimizer", slow=True)
def no_grad_inside(loop: Loop) -> None:
    loop.steps(*loop.begin(Frozen()))


@pattern("a loss multiplied by zero", slow=True)
def zero_loss(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        (loop.loss(model, step) * (0.0 if step == 2 else 1.0)).backward()


@pattern("an empty batch: a loss without gradient, and no backward")
def empty_batch(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        loss = torch.zeros(()) if step in (0, 3) else loop.loss(model, step)
        if loss.requires_grad:
            loss.backward()


@pattern("a batch of zero sequences")
def no_sequences(loop: Loop) -> None:
    model, optimizer = loop.begin(Generative())
    for step in steps(optimizer):
        tokens = batch(model, step, 0 if step == 2 else 2)
        loss = model(tokens).float().square().sum()
        loop.record("loss", loss)
        loss.backward()


class Generative(models.Toy):
    """A model that returns logits instead of a loss."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


@pattern("batches of different sizes and lengths", slow=True)
def any_shape(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step, (sequences, length) in enumerate([(2, 24), (1, 7), (5, 3), (2, 24), (3, 1)]):
        loss = model(batch(model, step, sequences)[:, :length])
        loop.record("loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pattern("batches of different sizes on the ranks, with a weighted loss", ranks=(2,), slow=True)
def uneven_ranks(loop: Loop) -> None:
    import torch.distributed as dist

    model, optimizer = loop.begin()
    for step in steps(optimizer):
        sequences = 1 + (dist.get_rank() + step) % 2
        (loop.loss(model, step, sequences) * sequences).backward()


@pattern("a rank without data in some steps uses a loss of zero", ranks=(2,), slow=True)
def idle_rank(loop: Loop) -> None:
    import torch.distributed as dist

    model, optimizer = loop.begin()
    for step in steps(optimizer):
        factor = 0.0 if dist.get_rank() == step % 2 else 1.0
        (loop.loss(model, step) * factor).backward()


@pattern("output multiplied by zero on one rank, so that its gradients are zero", ranks=(2,), slow=True)
def unused_on_one_rank(loop: Loop) -> None:
    import torch.distributed as dist

    model, optimizer = loop.begin(Generative())
    for step in steps(optimizer):
        y = model(batch(model, step)).float().square().mean()
        loss = y * 0 if dist.get_rank() else y
        loop.record("loss", loss)
        loss.backward()


@pattern("float64 loss", slow=True)
def double_loss(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        loss = loop.loss(model, step).double()
        (loss**2).backward()


@pattern("autocast around forward", slow=True)
def autocast(loop: Loop) -> None:
    model, optimizer = loop.begin(policy="fp32")
    for step in steps(optimizer):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loop.loss(model, step)
        loss.backward()


@pattern("forward hooks that read and modify activations", slow=True)
def forward_hooks(loop: Loop) -> None:
    model, optimizer = loop.begin()
    model.blocks[1].register_forward_hook(lambda module, args, out: loop.record("activation", out.float().norm()))
    model.blocks[2].register_forward_hook(lambda module, args, out: out * 0.5)
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    loop.steps(model, optimizer)


@pattern("forward hooks that read the weights of their layer")
def hooks_read_weights(loop: Loop) -> None:
    model, optimizer = loop.begin()
    model.blocks[1].register_forward_hook(
        lambda module, args, out: loop.record("weight", module.up.weight.float().norm())
    )
    loop.steps(model, optimizer)


@pattern("full backward hooks that read and modify gradients of activations")
def backward_hooks(loop: Loop) -> None:
    model, optimizer = loop.begin()
    model.blocks[1].register_full_backward_hook(lambda module, ins, outs: loop.record("slope", outs[0].float().norm()))
    model.blocks[2].register_full_backward_hook(lambda module, ins, outs: (ins[0] * 0.5,))
    loop.steps(model, optimizer)


@pattern("tensor hooks on activations", slow=True)
def activation_hooks(loop: Loop) -> None:
    model, optimizer = loop.begin(Generative())
    for step in steps(optimizer):
        y = model(batch(model, step))
        y.register_hook(lambda grad: grad * 0.5)
        y.retain_grad()
        y.float().square().mean().backward()
        loop.record("slope", y.grad)


@pattern("torch.compile of every layer before offload", slow=True, ranks=(1,))
def compile_layers(loop: Loop) -> None:
    torch._dynamo.reset()
    model = models.build("toy")
    for block in model.blocks:
        block.compile(backend="aot_eager")
    optimizer = loop.offload(model, OPTIMIZERS["adamw"](model.parameters()))
    loop.steps(model, optimizer, 3)


@pattern("torch.compile of the model after offload", slow=True, ranks=(1,))
def compile_model(loop: Loop) -> None:
    torch._dynamo.reset()
    model, optimizer = loop.begin()
    compiled = torch.compile(model, backend="aot_eager")
    for step in steps(optimizer, 3):
        loss = compiled(batch(model, step))
        loop.record("loss", loss)
        loss.backward()


@pattern("layers wrapped by checkpoint_wrapper", slow=True)
def wrapped(loop: Loop) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    torch.manual_seed(0)
    model = models.Toy()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, models.Block))
    loop.steps(*loop.begin(model))


class Adapted(models.Toy):
    """A model with low-rank adapters in frozen blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.low = nn.Linear(models.WIDTH, 4, bias=False)
            block.high = nn.Linear(4, models.WIDTH, bias=False)
            nn.init.zeros_(block.high.weight)

    adapted = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.adapted) if isinstance(block, AdaptedBlock) else block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


class AdaptedBlock(models.Block):
    """A block with an optional adapter."""

    def forward(self, x: torch.Tensor, adapted: bool = True) -> torch.Tensor:
        y = super().forward(x)
        return y + self.high(self.low(x)) if adapted else y


def adapted() -> nn.Module:
    """Return a model whose adapters are its only trainable parameters."""
    torch.manual_seed(0)
    model = Adapted()
    for block in model.blocks:
        block.__class__ = AdaptedBlock
    return model


@pattern("adapters on a frozen base")
def adapters(loop: Loop) -> None:
    loop.steps(*loop.begin(adapted()))


@pattern("adapters on a frozen base, with clip_grad_norm_ of torch", in_backward_error=UPDATE_SCHEDULE, slow=True)
def adapters_clipped(loop: Loop) -> None:
    for _, model, _ in loop.backwards(adapted()):
        loop.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@pattern("preference loss: the model with adapters compared with the same model without them", slow=True)
def preference(loop: Loop) -> None:
    model, optimizer = loop.begin(adapted())
    for step in steps(optimizer):
        model.adapted = False
        with torch.no_grad():
            target = loop.loss(model, step)
        model.adapted = True
        nn.functional.softplus(loop.loss(model, step) - target).backward()


@pattern("random state saved before a forward and restored after it", slow=True)
def random_states(loop: Loop) -> None:
    model, optimizer = loop.begin(Dropout())
    for step in range(STEPS):
        state = torch.get_rng_state()
        with torch.no_grad():
            loop.loss(model, step)
        torch.set_rng_state(state)
        loop.step(model, optimizer, step)


@pattern("buffers that forward modifies, such as batch statistics", ranks=(1,))
def buffers(loop: Loop) -> None:
    model, optimizer = loop.begin("buffered")
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        loop.record_weights(model)


@pattern("set_reshard_after_forward called during training", slow=True)
def reshard_switched(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        if step == 2:
            model.set_reshard_after_forward(False)
        loop.step(model, optimizer, step)


@pattern(
    "set_reshard_after_backward(False) during gradient accumulation",
    in_backward_error="second gradient|" + UPDATE_SCHEDULE,
    slow=True,
)
def reshard_after_backward(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in steps(optimizer):
        for part in range(2):
            model.set_reshard_after_backward(part == 1)
            loop.loss(model, 10 * step + part).backward()


@pattern("reshard_after_forward=False")
def not_resharded(loop: Loop) -> None:
    loop.steps(*loop.begin(reshard=False))


@pattern("explicit unshard() and reshard() to read full weights")
def unshard(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for step in range(STEPS):
        loop.step(model, optimizer, step)
        block = model.blocks[1]
        block.unshard()
        loop.record("weight", block.up.weight)
        block.reshard()


@pattern("explicit prefetching: set_modules_to_forward_prefetch, set_modules_to_backward_prefetch", slow=True)
def prefetch(loop: Loop) -> None:
    model, optimizer = loop.begin()
    for first, second in zip(model.blocks, list(model.blocks)[1:], strict=False):
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    loop.steps(model, optimizer)


@pattern("set_gradient_divide_factor", slow=True, ranks=(1,))
def divide_factor(loop: Loop) -> None:
    model, optimizer = loop.begin()
    model.set_gradient_divide_factor(3.0)
    loop.steps(model, optimizer)


@pattern("set_force_sum_reduction_for_comms", slow=True)
def sum_reduction(loop: Loop) -> None:
    model, optimizer = loop.begin()
    model.set_force_sum_reduction_for_comms(True)
    loop.steps(model, optimizer)


@pattern("torch.func.functional_call", slow=True)
def functional(loop: Loop) -> None:
    model, optimizer = loop.begin(Generative())
    bias = torch.randn(131, generator=torch.Generator().manual_seed(0))
    for step in steps(optimizer):
        y = torch.func.functional_call(model, {}, (batch(model, step),))
        (y.float() + bias).square().mean().backward()
        loop.record("y", y)


@pattern("a layer called outside of the model", slow=True)
def layer_outside_model(loop: Loop) -> None:
    model, optimizer = loop.begin()
    x = torch.randn(2, 5, models.WIDTH, generator=torch.Generator().manual_seed(0))
    for step in range(STEPS):
        (loop.loss(model, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loop.record("features", model.blocks[1](x))


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
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


@pattern("batch norm, and torch.optim.swa_utils.update_bn", ranks=(1,))
def update_batch_norm(loop: Loop) -> None:
    from torch.optim.swa_utils import update_bn

    model, optimizer = loop.begin(Normed(), policy="fp32")
    for step in range(STEPS):
        loop.step(model, optimizer, step)
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
    loop.steps(*loop.begin(model, policy="fp32"))


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
