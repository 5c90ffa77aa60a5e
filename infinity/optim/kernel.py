"""Update kernel that runs any optimizer on views of pages.

This module is independent of specific algorithms such as Adam. To update a page, it runs a copy of the user's own
optimizer on views of the page. The same class with the same settings runs the same kernels, so results are bitwise
equal. `infinity.optim.slicing_check` detects optimizers for which this is not the case.

[Note: values that advance] Some optimizers count steps in their param groups or attributes instead of in the state of
each parameter. All page updates of a step must start from the values before the step. As soon as all updates of the
step have copied these values, `advance` advances them once, by a step of an optimizer copy whose parameters have no
gradients. The updates themselves may run later. The slicing check verifies that the advanced values are the same as in
memory.
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
"""Methods with which schedule-free optimizers switch weights between evaluation and training values."""
Scalars = dict[str, Any]
Own = Mapping[str, Any]


@dataclass(frozen=True)
class StateSpec:
    """Layout of the optimizer state of one parameter.

    Attributes:
        kinds: element-wise states as (name, dtype name).
        scalars: names of the scalar states.
        slices: smallest slices that can be updated separately: ``flat`` slices of any elements, of shape (n,); slices
            with as many dimensions as the parameter (``rank``), of shape (1, …, 1, n); full ``rows``, of shape (n, …);
            or only the ``whole`` parameter.
    """

    kinds: tuple[tuple[str, str], ...]
    scalars: tuple[str, ...]
    slices: str = "flat"


@dataclass
class Piece:
    """A slice of one shard to update: its master weights, gradient and state views, all of shape (n,).

    The gradient is ``None`` if a method of the optimizer runs in place of its step.
    """

    shard: int
    master: torch.Tensor
    grad: torch.Tensor | None
    states: dict[str, torch.Tensor]


class _FirstAssignments(dict[str, Any]):
    """State of one parameter that records the first value of each entry, before in-place updates change it."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, value.detach().clone() if isinstance(value, torch.Tensor) else value)
        super().__setitem__(key, value)

    def update(self, *args: Any, **named: Any) -> None:
        for key, value in dict(*args, **named).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


class UpdateKernel:
    """Run a copy of one optimizer on slices of parameters.

    `infinity.optim.slicing_check.make_kernel` verifies that the optimizer can be run in this way.

    Raises:
        UnsupportedError: if an attribute of the optimizer cannot be copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.name = name_of(optimizer)  # class name, for errors
        self._optimizer = optimizer
        self.template = Template(optimizer)  # creates copies of the optimizer
        self._runner = self.template.over([])  # the copy that runs updates; has parameters only inside `update`
        self._step = torch_private.unhooked_step(self._runner)  # `step` of the runner, without user hooks
        self.shapes: dict[int, tuple[int, ...]] = {}
        """Shapes in which slices are passed to the optimizer, by shard, unless the shape is (n,). -1 marks the
        dimension that depends on the length of the slice. The slicing check sets the shapes of its own parameters
        during its trials. `give_shapes` then sets the final shapes once, before the first update."""
        self.advancing: frozenset[str] = frozenset()
        """Names of param group settings that a step changes."""
        self.advancing_own: frozenset[str] = frozenset()
        """Names of optimizer attributes that a step changes."""
        self._own: Own = {}  # last return value of `own`
        self._applied: Own = {}  # values applied to the runner; only the update thread uses the runner and these values
        self.uses_closure = False
        """``True`` if updates depend on the loss that a closure returns."""
        self.modes = all(inspect.ismethod(getattr(optimizer, name, None)) for name in MODES)
        """``True`` if the optimizer has the methods `MODES` and they can run on pages, as the slicing check finds."""
        self.builds = any(optimizer.state.values()) and self._makes_its_state()
        """``True`` if the constructor of the optimizer already creates the state of parameters."""
        # Attributes that are copied to the runner before updates.
        self._watched = [name for name, value in attributes(optimizer).items() if is_plain(value)]
        self._objects = [name for name, value in attributes(optimizer).items() if is_object(value)]
        """Attributes that are not plain data and may change during training, such as settings objects and sets."""
        self._tied = {name for name in self._objects if reaches_an_optimizer(vars(optimizer)[name])}
        """Attributes in `_objects` that reference the optimizer. They are copied only once."""
        # Contents of the attributes in the last call of `own`.
        self._seen, self._seen_objects = self._content_of_own(), self._content_of_objects()
        self._objects_now: dict[str, Any] = {}  # copies of `_objects`; empty until their contents change
        self.layouts: dict[tuple[int, torch.dtype, int], StateSpec] = {}
        """State layouts by param group number, dtype and number of dimensions."""
        groups = enumerate(optimizer.param_groups)
        self._numbers = {id(param): number for number, group in groups for param in group["params"]}

    def discover(self, param: torch.Tensor) -> StateSpec:
        """Return the state layout of a parameter."""
        return self.layouts[self._numbers[id(param)], param.dtype, param.ndim]

    # State created by the constructor #

    def _makes_its_state(self) -> bool:
        """Return whether the existing state equals the state of a new optimizer."""
        made: list[Mapping[str, Any]] = []
        for group in self._optimizer.param_groups:
            try:
                built = self.build([nn.Parameter(torch.ones(2, 2))], group)
            except Exception:
                return False
            # `defaults` differ, because the new optimizer receives the group's settings as its defaults.
            part = owner(self._optimizer, group)
            found, expected = ({**attributes(one), "defaults": None} for one in (built, part))
            if content(found) != content(expected):
                return False
            made.append(next(iter(built.state.values()), {}))
        for group, state in zip(self._optimizer.param_groups, made, strict=True):
            for param in filter(torch.Tensor.dim, group["params"]):  # all states of scalars look like step counts
                there = self._optimizer.state.get(param, {})
                if there.keys() != state.keys() or _numbers(there) != _numbers(state, but=_numbers_unknown(there)):
                    return False
        return True

    def build(self, params: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return a new optimizer of the same class, with all `settings` that its constructor accepts."""
        made = type(owner(self._optimizer, settings))
        accepted = inspect.signature(made.__init__).parameters.keys() - {"self", "params"}
        return made(params, **{key: value for key, value in settings.items() if key in accepted})

    def initial_state(self, master: torch.Tensor, settings: Mapping[str, Any], own: Own) -> dict[str, Any]:
        """Return the state of a parameter before its first update: the values that the optimizer assigns first.

        Args:
            master: weights of the parameter, in the shape in which the optimizer receives them.
            settings: settings of the param group.
            own: return value of `own()`.
        """
        param = nn.Parameter(master.clone())
        if self.builds:
            return dict(self.build([param], settings).state[param])
        param.grad = torch.zeros_like(param)
        made = self.template.over([{**settings, "params": [param]}])
        vars(made).update({name: copied(value) for name, value in own.items()})
        found = made.state[param] = _FirstAssignments()
        torch_private.unhooked_step(made)()
        return {**made.state[param], **found.first}

    # Attributes of the optimizer #

    def own(self) -> Own:
        """Return the attribute values that new updates start from, or an empty mapping if they have never changed.

        Raises:
            UnsupportedError: if a changed attribute cannot be copied.
        """
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
                f"{', '.join(sorted(self._tied))} on {self.name} changed after infinity.offload and references the "
                "optimizer, but pages are updated by copies of it; change numeric attributes of the optimizer instead"
            )
        changed = {name: value for name, value in changed.items() if name not in self._tied}
        try:
            return copy.deepcopy(changed)
        except Exception as error:
            raise UnsupportedError(
                f"{', '.join(changed)} on {self.name} changed after infinity.offload and cannot be copied ({error}), "
                "but pages are updated by copies of the optimizer; change numeric attributes or param group settings "
                "instead"
            ) from error

    def plain_own(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of attributes that are plain data."""
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
        """Restore attribute values from a checkpoint, or after a step."""
        there = vars(self._optimizer)
        there.update({name: in_place_of(there.get(name), value) for name, value in own.items()})

    @property
    def persistent_attributes(self) -> dict[str, Any]:
        """Values of the attributes that updates advance. Checkpoints store them."""
        return {name: copied(vars(self._optimizer)[name]) for name in sorted(self.advancing_own)}

    # Modes #

    def would_change(self, method: str, *args: Any, **named: Any) -> bool:
        """Return whether calling `method` would change param groups or attributes of the optimizer."""
        clock = self._clock(self._optimizer.param_groups, dict(self.plain_own()))
        before = content([[settings_of(group) for group in clock.param_groups], attributes(clock)])
        getattr(clock, method)(*args, **named)
        return bool(before != content([[settings_of(group) for group in clock.param_groups], attributes(clock)]))

    def check_steps(self) -> None:
        """Check that the optimizer is in a mode in which it can step.

        Raises:
            InfinityError: if it is not; the message contains the error that the optimizer raised.
        """
        if not self.modes:
            return
        try:
            torch_private.unhooked_step(self._clock(self._optimizer.param_groups, dict(self.plain_own())))()
        except Exception as error:
            raise InfinityError(f"{self.name} cannot step: {error}") from error

    def _clock(self, groups: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return an optimizer copy whose parameters have no gradients, so that it changes only groups and attributes.

        The copy is separate from the runner, which may be in use on another thread.
        """
        clock = self.template.over(
            [{**settings_of(group), "params": [nn.Parameter(torch.zeros(1))]} for group in groups]
        )
        vars(clock).update({name: copied(value) for name, value in own.items()})
        vars(clock).update(self._objects_now)
        return clock

    def reset(self) -> None:
        """After a failure, replace the runner with a new copy of the optimizer."""
        self._runner = self.template.over([])
        self._step, self._applied = torch_private.unhooked_step(self._runner), {}

    # Updates #

    def advance(self, method: str = "") -> None:
        """Advance the values in param groups and attributes that a step, or one of `MODES`, changes.

        For a step, call this once, after all updates of the step have received their settings.
        """
        if method or self.advancing or self.advancing_own:
            own = {name: copied(value) for name, value in self.plain_own()}
            self.advance_values(self._optimizer.param_groups, own, method)
            self.restore_own(own if method else {name: own[name] for name in self.advancing_own})

    def advance_values(self, groups: Sequence[dict[str, Any]], own: dict[str, Any], method: str = "") -> None:
        """Advance values in param groups, and the attribute values in `own`, as one step or one of `MODES` would."""
        clock = self._clock(groups, own)
        getattr(clock, method)() if method else torch_private.unhooked_step(clock)()
        own.update({name: copied(vars(clock)[name]) for name in own if name in vars(clock)})
        for group, after in zip(groups, clock.param_groups, strict=True):
            changed = [key for key in after if key != "params" and (method or key in self.advancing)]
            group.update({key: in_place_of(group.get(key), after[key]) for key in changed})

    def _apply(self, own: Own) -> None:
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
        """Update the master weights and the states of slices in place.

        Args:
            pieces: slices of shards that belong to the same param group.
            settings: settings of the group at the time of the step, as in `param_groups`.
            before: scalar states before the step, by shard. Shards that were never updated are missing.
            own: return value of `own()` at the time of the step.
            method: one of `MODES` to call in place of `step()`, or an empty string.

        Returns:
            Scalar states after the step, by shard.

        Raises:
            InfinityError: if the optimizer creates a state that it did not have in the slicing check.
        """
        runner, prepared = self._runner, []
        runner.state.clear()
        if own:
            self._apply(own)
        steps = _copied_steps(pieces, settings, before)
        for number, piece in enumerate(pieces):
            shape = self.shapes.get(piece.shard)
            states = piece.states
            if shape is None:
                param, grad = nn.Parameter(piece.master), piece.grad
            else:
                param, grad = nn.Parameter(piece.master.view(shape)), piece.grad
                grad = grad.view(shape) if grad is not None else None
                states = {key: view.view(shape) for key, view in states.items()}
            param.grad = grad
            prepared.append((piece, param, states))
            if piece.shard in before:
                state = runner.state[param] = {**steps[number], **states}
                for key, value in before[piece.shard].items():
                    if key not in state:
                        state[key] = copied(value)
            elif self.builds and not method:
                runner.state[param] = self.build([param], settings).state[param]
        group = {**settings, "params": [param for _, param, _ in prepared]}
        for key in self.advancing:
            if key in group:
                group[key] = copied(group[key])
        runner.param_groups[:] = [group]
        try:
            if method:
                getattr(self._runner, method)()
            else:
                self._step()
            return self._take(prepared)
        finally:
            runner.state.clear()
            runner.param_groups.clear()

    def _take(self, prepared: Sequence[tuple[Piece, nn.Parameter, Mapping[str, torch.Tensor]]]) -> dict[int, Scalars]:
        """Copy tensors that the optimizer has replaced back into the pages, and return the scalar states by shard."""
        found: dict[int, Scalars] = {}
        for piece, param, states in prepared:
            if param.data_ptr() != piece.master.data_ptr():
                piece.master.copy_(param.detach().reshape(-1))  # the optimizer has replaced `p.data`
            scalars = found[piece.shard] = {}
            for key, value in self._runner.state[param].items():
                view = states.get(key)
                if view is not None:
                    if value is not None and value is not view and value.data_ptr() != view.data_ptr():
                        view.copy_(value)  # first step, or the optimizer has replaced its state
                elif value is not None:
                    if isinstance(value, torch.Tensor) and value.numel() != 1:
                        raise InfinityError(
                            f"{self.name} has created state {key!r} of shape {tuple(value.shape)}, which it did not "
                            "have with its settings at infinity.offload; change the settings before infinity.offload"
                        )
                    scalars[key] = value
        return found


def _copied_steps(
    pieces: Sequence[Piece], settings: Mapping[str, Any], before: Mapping[int, Scalars]
) -> list[dict[str, torch.Tensor]]:
    """Return copies of the step counts of pieces that must be on the device of the weights, in one operation.

    These are the step counts of fused and capturable optimizers, because reading a step count from the host would wait
    for all work queued on the GPU. All other scalar states stay on the CPU, where PyTorch's optimizers keep them.
    """
    found: list[dict[str, torch.Tensor]] = [{} for _ in pieces]
    if not (settings.get("fused") or settings.get("capturable")):
        return found
    alike: dict[Any, list[tuple[int, torch.Tensor]]] = {}
    for number, piece in enumerate(pieces):
        step = before[piece.shard].get("step") if piece.shard in before else None
        if isinstance(step, torch.Tensor):
            alike.setdefault((step.dtype, step.shape), []).append((number, step))
    device = pieces[0].master.device
    for steps in alike.values():
        copies = torch.stack([step.to(device) for _, step in steps]).unbind()
        for (number, _), step in zip(steps, copies, strict=True):
            found[number]["step"] = step
    return found


def _numbers(state: Mapping[str, Any], but: frozenset[str] = frozenset()) -> dict[str, float]:
    """Return the scalar states whose values are known, except those named in `but`."""
    return {
        key: float(value)
        for key, value in state.items()
        if key not in but and key not in _numbers_unknown(state) and isinstance(value, torch.Tensor | float | int)
    }


def _numbers_unknown(state: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of states that are not scalars or that are on the meta device."""
    return frozenset(k for k, v in state.items() if isinstance(v, torch.Tensor) and (v.is_meta or v.ndim))
