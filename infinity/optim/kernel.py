"""Any optimizer as a kernel on page views.

Nothing here knows what Adam is. A page is updated by running a copy of the user's own optimizer on views of the page.
Same object, same settings, same kernel: same bits; where that does not hold, `infinity.optim.probe` finds it out.

[Note: values that advance] Some optimizers count steps in their param groups, or on themselves, not in the state of a
parameter. All pages of a step start from the values that were there before the step; they are advanced once per step,
by a copy of the optimizer whose parameters have no gradient (`advance`), as soon as all updates of the step know what
they start from. The updates may run later. The probe proves that what advances so is what advances in memory.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from infinity import torch_private
from infinity.errors import InfinityError, UnsupportedError
from infinity.optim.multi_optimizer import name_of, owner
from infinity.optim.optimizer_clone import (
    Template,
    attributes,
    content,
    copied,
    in_place_of,
    is_object,
    is_plain,
    object_content,
    settings_of,
)
from infinity.optim.validation import reaches_an_optimizer

MODES: Final = ("eval", "train")
"""Methods with which schedule-free optimizers change the weights that are evaluated into those that are trained."""
Scalars = dict[str, Any]
Own = Mapping[str, Any]


@dataclass(frozen=True)
class StateSpec:
    """State of one parameter: element-wise kinds as (name, dtype name), and names of the scalars.

    `slices` says what an update has to be given: ``flat`` slices of any elements, shape (n,); slices of any elements
    with the parameter's ``rank``, shape (1, …, 1, n); whole ``rows``, shape (n, …); or the ``whole`` parameter.
    """

    kinds: tuple[tuple[str, str], ...]
    scalars: tuple[str, ...]
    slices: str = "flat"


@dataclass
class Piece:
    """A slice of one shard in an update: its elements, gradient and state views, all of shape (n,).

    There is no gradient where a method of the optimizer runs in place of its step.
    """

    shard: int
    master: torch.Tensor
    grad: torch.Tensor | None
    states: dict[str, torch.Tensor]


class UpdateKernel:
    """Runs a copy of one optimizer on slices of parameters. `infinity.optim.probe.make_kernel` proves that it can."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the optimizer.

        Raises:
            UnsupportedError: it keeps what cannot be copied.
        """
        self.name = name_of(optimizer)  # its class, for errors
        self._optimizer = optimizer
        self.template = Template(optimizer)  # from which copies are made
        self._runner = self.template.over([])  # the copy that updates; has parameters only inside of `update`
        self._step = torch_private.unhooked_step(self._runner)  # its step, without the hooks of users
        self.shapes: dict[int, tuple[int, ...]] = {}
        """By shard: the shape in which slices are given to the optimizer, where it is not (n,); -1 for what the length
        of a slice decides. Set by the probe while it tries, then once by `give_shapes`, before the first update."""
        self.advancing: frozenset[str] = frozenset()
        """Settings of param groups that an update changes."""
        self.advancing_own: frozenset[str] = frozenset()
        """Attributes of the optimizer itself that an update changes."""
        self._own: Own = {}  # the last that `own` returned
        self._applied: Own = {}  # the one that the runner has; this and the runner belong to the thread of updates
        self.uses_closure = False
        """Whether updates depend on the loss that a closure returns."""
        self.modes = all(inspect.ismethod(getattr(optimizer, name, None)) for name in MODES)
        """Whether it has `MODES` that can be changed over pages; the probe looks whether they can."""
        self.builds = any(optimizer.state.values()) and self._makes_its_state()
        """Whether the constructor makes the state of parameters."""
        # Attributes whose values updates take over.
        self._watched = [name for name, value in attributes(optimizer).items() if is_plain(value)]
        self._objects = [name for name, value in attributes(optimizer).items() if is_object(value)]
        """Attributes that are no plain data, and that a loop may change: own classes of settings, sets."""
        self._tied = {name for name in self._objects if reaches_an_optimizer(vars(optimizer)[name])}
        """Those that hold the optimizer, which are not copied anew."""
        # What these were when `own` looked last.
        self._seen, self._seen_objects = self._content_of_own(), self._content_of_objects()
        self._objects_now: dict[str, Any] = {}  # copies of them, once they are others than they were at first
        self.layouts: dict[tuple[int, torch.dtype, int], StateSpec] = {}
        """By number of the param group, dtype and number of dimensions."""

    def discover(self, param: torch.Tensor, group: Mapping[str, Any]) -> StateSpec:
        """Return the state layout of a parameter of a param group."""
        number = next(n for n, known in enumerate(self._optimizer.param_groups) if known is group)
        return self.layouts[number, param.dtype, param.ndim]

    # State that the constructor makes #

    def has_progress(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has taken steps: whether its state is more than what its constructor made."""
        return any(optimizer.state.values()) and not self.builds

    def _makes_its_state(self) -> bool:
        """Whether the state that is there is that of a new optimizer."""
        made: list[Mapping[str, Any]] = []
        for group in self._optimizer.param_groups:
            try:
                built = self.build([nn.Parameter(torch.ones(2, 2))], group)
            except Exception:
                return False
            # What is made from a group's settings has others as defaults.
            part = owner(self._optimizer, group)
            found, base_optimizer = ({**attributes(one), "defaults": None} for one in (built, part))
            if content(found) != content(base_optimizer):
                return False
            made.append(next(iter(built.state.values()), {}))
        for group, state in zip(self._optimizer.param_groups, made, strict=True):
            for param in group["params"]:
                there = self._optimizer.state.get(param, {})
                if there.keys() != state.keys() or _numbers(there) != _numbers(state, but=_numbers_unknown(there)):
                    return False
        return True

    def build(self, params: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return a new optimizer of the class, from those settings that its constructor takes."""
        made = type(owner(self._optimizer, settings))
        accepted = inspect.signature(made.__init__).parameters.keys() - {"self", "params"}
        return made(params, **{key: value for key, value in settings.items() if key in accepted})

    # Values that the optimizer keeps on itself #

    def own(self) -> Own:
        """Return the values on the optimizer that updates from now on start from; empty where they never change."""
        now, objects = self._content_of_own(), self._content_of_objects()
        if now != self._seen or objects != self._seen_objects or (self.advancing_own and not self._own):
            if objects != self._seen_objects:
                self._objects_now = self._copy_objects()
            self._seen, self._seen_objects = now, objects
            self._own = {name: copied(value) for name, value in self.plain_own()} | self._objects_now
        return self._own

    def _copy_objects(self) -> dict[str, Any]:
        there = vars(self._optimizer)
        changed = {name: there[name] for name in self._objects if name in there}
        before = dict(self._seen_objects)
        if any(before.get(name) != now for name, now in self._content_of_objects() if name in self._tied):
            raise UnsupportedError(
                f"{', '.join(sorted(self._tied))} on {self.name} changed after infinity.offload, and holds the "
                "optimizer itself, while updates of pages run on copies: change numbers on the optimizer instead"
            )
        changed = {name: value for name, value in changed.items() if name not in self._tied}
        try:
            return copy.deepcopy(changed)
        except Exception as error:
            raise UnsupportedError(
                f"{', '.join(changed)} on {self.name} changed after infinity.offload, and cannot be copied ({error}); "
                "updates of pages run on copies: change numbers on the optimizer or in its param groups instead"
            ) from error

    def plain_own(self) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of the optimizer that are plain data."""
        there = vars(self._optimizer)
        return ((name, there[name]) for name in self._watched if name in there)

    def _content_of_own(self) -> Any:
        return content(dict(self.plain_own()))

    def _content_of_objects(self) -> Any:
        there = vars(self._optimizer)
        return [
            (name, content(there[name]) if name in self._tied else object_content(there[name]))
            for name in self._objects
            if name in there
        ]

    def restore_own(self, own: Own) -> None:
        """Put values that a checkpoint kept back onto the optimizer."""
        there = vars(self._optimizer)
        there.update({name: in_place_of(there.get(name), value) for name, value in own.items()})

    @property
    def kept_own(self) -> dict[str, Any]:
        """The values on the optimizer that a checkpoint keeps: those that advance."""
        return {name: copied(vars(self._optimizer)[name]) for name in sorted(self.advancing_own)}

    # Modes #

    def would_change(self, method: str, *args: Any, **named: Any) -> bool:
        """Whether a method of the optimizer, such as `train`, would change its groups or what it keeps on itself."""
        clock = self._clock(self._optimizer.param_groups, dict(self.plain_own()))
        before = content([[settings_of(group) for group in clock.param_groups], attributes(clock)])
        getattr(clock, method)(*args, **named)
        return bool(before != content([[settings_of(group) for group in clock.param_groups], attributes(clock)]))

    def switch(self, method: str) -> None:
        """Change, in the param groups and on the optimizer, what one of `MODES` changes there."""
        own = {name: copied(value) for name, value in self.plain_own()}
        self.switch_values(self._optimizer.param_groups, own, method)
        there = vars(self._optimizer)
        there.update({name: in_place_of(there[name], value) for name, value in own.items()})

    def switch_values(self, groups: Sequence[dict[str, Any]], own: dict[str, Any], method: str) -> None:
        """Change in param groups, and in `own`, what one of `MODES` changes in them and on the optimizer."""
        clock = self._clock(groups, own)
        getattr(clock, method)()
        own.update({name: copied(vars(clock)[name]) for name in own if name in vars(clock)})
        for group, after in zip(groups, clock.param_groups, strict=True):
            group.update({key: in_place_of(group.get(key), value) for key, value in settings_of(after).items()})

    def check_steps(self) -> None:
        """Check that the optimizer is in a mode in which it steps.

        Raises:
            InfinityError: it is not, in its own words.
        """
        if not self.modes:
            return
        try:
            torch_private.unhooked_step(self._clock(self._optimizer.param_groups, dict(self.plain_own())))()
        except Exception as error:
            raise InfinityError(f"{self.name} does not step: {error}") from error

    def _clock(self, groups: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return a copy over groups of parameters without gradients: what it does changes groups and attributes only.

        It is another one than the copy that updates, which may be doing so on another thread.
        """
        clock = self.template.over(
            [{**settings_of(group), "params": [nn.Parameter(torch.zeros(1))]} for group in groups]
        )
        vars(clock).update({name: copied(value) for name, value in own.items()})
        vars(clock).update(self._objects_now)
        return clock

    def reset(self) -> None:
        """Begin anew with a copy of the optimizer, after one has failed."""
        self._runner = self.template.over([])
        self._step, self._applied = torch_private.unhooked_step(self._runner), {}

    # Updates #

    def advance(self) -> None:
        """Advance what updates change in the param groups and on the optimizer: once per step.

        To be called when all updates of the step have their settings.
        """
        if self.advancing or self.advancing_own:
            own = {name: copied(value) for name, value in self.plain_own()}
            self.advance_values(self._optimizer.param_groups, own)
            there = vars(self._optimizer)
            there.update({name: in_place_of(there[name], own[name]) for name in self.advancing_own})

    def advance_values(self, groups: Sequence[dict[str, Any]], own: dict[str, Any]) -> None:
        """Change, as a step does, what advances in param groups, and in `own` what it changes on the optimizer."""
        clock = self._clock(groups, own)
        torch_private.unhooked_step(clock)()
        own.update({name: copied(vars(clock)[name]) for name in own if name in vars(clock)})
        for group, after in zip(groups, clock.param_groups, strict=True):
            group.update({key: in_place_of(group.get(key), after[key]) for key in self.advancing if key in after})

    def _apply(self, own: Own) -> None:
        """Let the runner start from these values on itself."""
        if self.advancing_own:
            objects = {name: value for name, value in own.items() if name in self._objects}
            vars(self._runner).update({k: copied(v) for k, v in own.items() if k not in objects} | objects)
        elif own is not self._applied:
            vars(self._runner).update(own)
            self._applied = own

    def update(
        self,
        pieces: Sequence[Piece],
        settings: Mapping[str, Any],
        before: Mapping[int, Scalars],
        own: Own,
        method: str = "",
    ) -> dict[int, Scalars]:
        """Update slices in place: master and states.

        Args:
            pieces: slices that share a param group.
            settings: the group's settings at the step, as in `param_groups`.
            before: scalars of each shard at the start of the step; a shard that is missing has never been updated.
            own: what `own()` returned at the step.
            method: what to run in place of a step: one of `MODES`.

        Returns:
            The scalars of each shard after the step.

        Raises:
            InfinityError: the optimizer begins to keep a state that it did not keep when it was probed.
        """
        runner, base_optimizer = self._runner, []
        runner.state.clear()
        if own:
            self._apply(own)
        for piece in pieces:
            shape = self.shapes.get(piece.shard)
            states = piece.states
            if shape is None:
                param, grad = nn.Parameter(piece.master), piece.grad
            else:
                param, grad = nn.Parameter(piece.master.view(shape)), piece.grad
                grad = grad.view(shape) if grad is not None else None
                states = {key: view.view(shape) for key, view in states.items()}
            param.grad = grad
            base_optimizer.append((piece, param, states))
            if piece.shard in before:
                scalars = {
                    key: _copied_for(key, value, piece.master, settings) for key, value in before[piece.shard].items()
                }
                runner.state[param] = {**scalars, **states}
            elif self.builds and not method:
                runner.state[param] = self.build([param], settings).state[param]
        group = {**settings, "params": [param for _, param, _ in base_optimizer]}
        for key in self.advancing:
            if key in group:
                group[key] = copied(group[key])
        runner.param_groups[:] = [group]
        try:
            if method:
                getattr(self._runner, method)()
            else:
                self._step()
            return {piece.shard: self._take(piece, param, states) for piece, param, states in base_optimizer}
        finally:
            runner.state.clear()
            runner.param_groups.clear()

    def _take(self, piece: Piece, param: nn.Parameter, states: Mapping[str, torch.Tensor]) -> Scalars:
        """Copy into the page what the optimizer has put elsewhere; return the scalars."""
        if param.data_ptr() != piece.master.data_ptr():
            piece.master.copy_(param.detach().reshape(-1))  # an optimizer that replaces `p.data`
        scalars = {}
        for key, value in self._runner.state[param].items():
            view = states.get(key)
            if view is not None:
                if value is not None and value is not view and value.data_ptr() != view.data_ptr():
                    view.copy_(value)  # first step, or an optimizer that replaces its state
            elif value is not None:
                if isinstance(value, torch.Tensor) and value.numel() != 1:
                    raise InfinityError(
                        f"{self.name} has begun to keep state {key!r} of shape {tuple(value.shape)}, which it did not "
                        "keep as it was set when it was offloaded; set it so before offload"
                    )
                scalars[key] = value
        return scalars


def _copied_for(key: str, value: Any, master: torch.Tensor, settings: Mapping[str, Any]) -> Any:
    """Return a copy of a scalar of a state where torch's optimizers have it: on the CPU, unless kernels count steps.

    Those stay on the device: each look at one from the host would wait for all that the device has been given.
    """
    if key == "step" and isinstance(value, torch.Tensor) and (settings.get("fused") or settings.get("capturable")):
        return value.detach().to(master.device, copy=True)
    return copied(value)


def _numbers(state: Mapping[str, Any], but: frozenset[str] = frozenset()) -> dict[str, float]:
    """Return the scalars of a state whose values are known, but for some."""
    return {
        key: float(value)
        for key, value in state.items()
        if key not in but and key not in _numbers_unknown(state) and isinstance(value, torch.Tensor | float | int)
    }


def _numbers_unknown(state: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of what is no scalar, or one on the meta device."""
    return frozenset(k for k, v in state.items() if isinstance(v, torch.Tensor) and (v.is_meta or v.ndim))
