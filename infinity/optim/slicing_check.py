"""Slicing check: verify, before training, that an optimizer can update pages one at a time.

The check trains small parameters twice: several for each combination (*case*) of param group, dtype and number of
dimensions in use. A copy of the user's optimizer updates full parameters. The update kernel updates uneven slices in
several calls, as it later updates pages. Gradients are ordinary, zero, tiny or large, and sometimes missing. The
learning rate and the weight decay change between steps, differently in every group. Weights, states, param groups and
attributes must be bitwise equal. If ``flat`` slices fail, the check tries slices with the ``rank`` (number of
dimensions) of the parameter, then full ``rows``, and finally the ``whole`` parameter in a separate call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from infinity import torch_private
from infinity.content.format import ITEMSIZE, SHARD_ALIGNMENT
from infinity.content.views import dtype_name
from infinity.errors import UnsupportedError
from infinity.optim.kernel import MODES, Own, Piece, Scalars, StateSpec, UpdateKernel
from infinity.optim.optimizer_clone import Groups, attributes, bits, content, copied, is_plain, settings_of
from infinity.optim.validation import WatchedNames, WatchedParameter, check_references, check_zero_grad
from infinity.units import align_up

_FEW_STEPS, _STEPS = 6, 24
"""Number of steps with small parameters only, which quickly detect most problems, and number of steps with all
parameters."""
_SCALES = (1.0, 0.1, 3.0, 0.0, 1e-3, 30.0, 1.0, 1e-8)
_RATES = (1.0, 0.5, 2.0, 0.7)
_MISSING = {0, 1, 5}
"""Steps in which some parameters have no gradient."""
_SWITCHED = {0, 3, 10}
"""Steps after which optimizers with modes switch to evaluation and back."""
_LEADING = (12, 128)
"""Sizes of the first dimension of the small and the large parameters. The product of the others is 48 or 192.

The large parameters are above the sizes at which some optimizers switch to a different algorithm, and below the size at
which PyTorch starts to divide the work among threads.
"""
_TRAILING = (48, 192)
_SLICES = ("flat", "rank", "rows", "whole")

Case = tuple[int, torch.dtype, int]
"""Index of a param group, dtype, and number of dimensions."""

_FOUND: dict[Hashable, tuple[dict[Case, StateSpec], frozenset[str], frozenset[str], bool]] = {}
"""Results of the check for PyTorch's own optimizers, by all inputs of the check. They speed up later calls of
`infinity.offload` in the same process."""


def make_kernel(optimizer: torch.optim.Optimizer) -> UpdateKernel:
    """Check an optimizer, and return the kernel that updates pages with copies of it.

    Raises:
        UnsupportedError: if the optimizer cannot update pages one at a time; the message states the reason.
    """
    kernel = UpdateKernel(optimizer)
    check = _SlicingCheck(kernel, optimizer)
    key = check.key()
    if key in _FOUND:
        kernel.layouts, kernel.advancing, kernel.advancing_own, kernel.uses_closure = _FOUND[key]
    else:
        try:
            kernel.layouts = check.run()
        except UnsupportedError:
            if not kernel.modes:
                raise
            kernel.modes = False  # try without modes, which then cannot be switched; a later switch raises an error
            kernel.reset()
            kernel.layouts = _SlicingCheck(kernel, optimizer).run()
        if key:
            _FOUND[key] = kernel.layouts, kernel.advancing, kernel.advancing_own, kernel.uses_closure
    check_references(optimizer)
    check_zero_grad(optimizer, kernel.template)
    return kernel


@dataclass(frozen=True)
class _Subject:
    """A small parameter with which the optimizer is tested."""

    case: Case  # case that the parameter represents
    group: int  # index among the checked groups
    shape: tuple[int, ...]  # shape of the full parameter
    sometimes_missing: bool = False  # has no gradient in the steps `_MISSING`

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def cuts(self, slices: str) -> list[tuple[int, int]]:
        if slices == "whole":
            return [(0, self.numel)]
        alignment = math.lcm(math.prod(self.shape[1:]), SHARD_ALIGNMENT) if slices == "rows" else SHARD_ALIGNMENT
        points = [0, alignment, align_up(self.numel * 5 // 8, alignment), self.numel]
        return list(itertools.pairwise(sorted(set(points))))


def view_shape(slices: str, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape of slices of a parameter, or ``None`` if it is (n,).

    -1 marks the dimension that depends on the length of the slice.
    """
    if slices == "whole":
        return tuple(shape)
    if slices == "flat" or len(shape) < 2:
        return None
    return (*[1] * (len(shape) - 1), -1) if slices == "rank" else (-1, *shape[1:])


@dataclass
class _Trained:
    """Results of a training run, which must be the same with full parameters and with slices."""

    weights: list[torch.Tensor] = field(default_factory=list)  # by subject, after the last step
    states: list[dict[str, Any]] = field(default_factory=list)  # by subject, after the last step
    groups: list[Groups] = field(default_factory=list)  # param groups after every step
    own: list[dict[str, Any]] = field(default_factory=list)  # contents of attributes after every step
    others: list[str] = field(default_factory=list)  # keys of the optimizer state that are not parameters


class _SlicingCheck:
    """Check of one optimizer, with the small parameters on which it is tested."""

    def __init__(self, kernel: UpdateKernel, optimizer: torch.optim.Optimizer) -> None:
        self._kernel, self._name, self._optimizer = kernel, kernel.name, optimizer
        self._before = [settings_of(group) for group in optimizer.param_groups]  # at `infinity.offload`
        if kernel.modes:
            kernel.advance_values(self._before, {}, "train")
        alike: dict[str, int] = {}  # groups that differ only in settings that training loops change are checked once
        numbers = []  # index of the group that is checked in place of each group
        for number, group in enumerate(self._before):
            key = repr(content({k: v for k, v in group.items() if k not in ("lr", "initial_lr", "param_names")}))
            numbers.append(alike.setdefault(key, number))
        chosen = sorted(alike.values())
        if len(chosen) == 1 < len(self._before):
            chosen.append(next(n for n in range(len(self._before)) if n not in chosen))
        self._chosen = chosen
        self._names = WatchedNames()  # replaces parameter names, and records whether they are read
        for group in self._before:
            if "param_names" in group:  # lists all parameters of the group, but a call receives slices of only some
                group["param_names"] = self._names
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._marks = {name for param in params for name in vars(param)} - torch_private.PARAMETER_MARKS
        """Names of attributes that the user has set on parameters."""
        self._of: dict[Case, Case] = {}  # case that is tested in place of each case
        subjects: dict[_Subject, None] = {}
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param.requires_grad and param.ndim:  # FSDP2 does not shard scalars
                    here = (number, param.dtype, param.ndim)
                    case = (numbers[number], param.dtype, param.ndim)
                    self._of[here] = case
                    subjects.update(dict.fromkeys(_subjects(case, chosen.index(case[0]))))
                    if number in chosen and number != numbers[number]:
                        subjects.update(dict.fromkeys(_subjects(here, chosen.index(here[0]))))
        self._all = list(subjects)
        self._subjects, self._steps = self._all, _STEPS  # subjects and number of steps of the current trial
        self._called: set[Case] = set()  # cases in the last call of the kernel

    # Entry points #

    def key(self) -> Hashable:
        """Return a key that contains all inputs that determine the result.

        The key is ``None`` if these inputs are not known: for optimizers that are not part of PyTorch, and for
        attributes that are not plain data.
        """
        own = attributes(self._optimizer)
        settings = [{k: v for k, v in group.items() if k != "param_names"} for group in self._before]
        if not type(self._optimizer).__module__.startswith("torch.optim.") or not is_plain([own, settings]):
            return None
        named = ["param_names" in group for group in self._before]
        seen = repr(content([own, settings, named, sorted(self._marks), self._kernel.builds]))
        return type(self._optimizer), type(self._optimizer).step, torch.get_default_dtype(), frozenset(self._of), seen

    def run(self) -> dict[Case, StateSpec]:
        """Return the state layout of every case.

        Raises:
            UnsupportedError: if updating slices gives different results from updating full parameters.
        """
        slices = dict.fromkeys((subject.case for subject in self._all), 0)
        kinds: Sequence[StateSpec] = ()
        small = [subject for subject in self._all if subject.shape[0] in (_LEADING[0], _LEADING[0] * _TRAILING[0])]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for subjects, steps in ((small, _FEW_STEPS), (self._all, _STEPS)) if self._all else ():
                self._subjects, self._steps = subjects, steps
                kinds = self._try(slices)
        layouts = {
            subject.case: replace(layout, slices=_SLICES[slices[subject.case]])
            for subject, layout in zip(self._all, kinds, strict=True)
        }
        return {here: layouts[case] for here, case in self._of.items()}

    def _try(self, slices: dict[Case, int]) -> Sequence[StateSpec]:
        """Compare updates of full parameters with updates of slices. If one kind of slices fails, try the next kind."""
        subjects = self._subjects
        try:
            whole = self._whole(range(len(subjects)))
        except Exception as error:
            raise self._unsupported(
                f"failed in a trial step ({_short(error)}); updates call step() on a copy, with dense gradients and "
                "without a closure or other arguments"
            ) from error
        self._check_marks()
        if whole.others:
            raise self._unsupported(f"keeps state that belongs to no parameter ({', '.join(whole.others)})")
        kinds = [self._state_of(subject, state) for subject, state in zip(subjects, whole.states, strict=True)]
        self._check_alike(kinds)
        if all(_equal(self._values(number), weights) for number, weights in enumerate(whole.weights)):
            raise self._unsupported(
                "changes no weights when a copy of it steps with gradients on the parameters of its param groups; if "
                "it wraps other optimizers, pass these as a list"
            )
        self._find_advancing(whole)
        while unequal := self._unequal(whole, kinds, slices):
            for case, reason in unequal.items():
                # For a one-dimensional parameter, ``rank`` and ``rows`` are the same as ``flat``.
                slices[case] += 1 if case[2] > 1 else len(_SLICES) - 1
                if slices[case] >= len(_SLICES):
                    raise self._explained(whole, case, reason)
        self._kernel.uses_closure |= self._notices_loss(whole)
        return kinds

    def _notices_loss(self, whole: _Trained) -> bool:
        losses = (torch.tensor(3.0 / (1 + n) + n % 2) for n in itertools.count())
        try:
            found = self._whole(range(len(self._subjects)), closure=lambda: next(losses))
        except Exception:
            return True
        return not all(map(_equal, found.weights, whole.weights))

    def _check_marks(self) -> None:
        """Check that updates do not read parameter names or attributes that the user has set on parameters."""
        apart = "which slices do not have; put these parameters into a param group with a setting of its own"
        if self._names.read:
            raise self._unsupported(f"reads parameter names ('param_names') of its param groups, {apart}")
        if not self._marks:
            return
        WatchedParameter.names_read.clear()
        self._whole(range(len(self._subjects)), kind=WatchedParameter)
        if read := sorted(WatchedParameter.names_read & {*self._marks, "__dict__"}):
            raise self._unsupported(f"reads attributes that were set on parameters ({', '.join(read)}), {apart}")

    def _unsupported(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"{self._name} {why}; use an element-wise optimizer such as AdamW")

    # State #

    def _state_of(self, subject: _Subject, state: Mapping[str, Any]) -> StateSpec:
        kinds, scalars = [], []
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                if value.shape != subject.shape:
                    raise self._unsupported(
                        f"keeps state {key!r} of shape {tuple(value.shape)} for a parameter of shape {subject.shape}, "
                        "but pages can only store states of the parameter's shape"
                    )
                if value.is_complex():
                    raise UnsupportedError(
                        f"{self._name} keeps state {key!r} of {value.dtype}, but complex parameters cannot be paged; "
                        "train their real and imaginary parts, and combine them in forward with torch.view_as_complex"
                    )
                if dtype_name(value.dtype) not in ITEMSIZE:
                    raise self._unsupported(f"keeps state {key!r} of {value.dtype}, which pages cannot store")
                kinds.append((key, dtype_name(value.dtype)))
            elif not isinstance(key, str) or not is_plain(value):
                raise self._unsupported(
                    f"keeps state {key!r} of type {type(value).__name__}, which neither pages nor checkpoints can store"
                )
            else:
                scalars.append(key)
        return StateSpec(tuple(kinds), tuple(scalars))

    def _check_alike(self, kinds: Sequence[StateSpec]) -> None:
        found: dict[Case, StateSpec] = {}
        for subject, layout in zip(self._subjects, kinds, strict=True):
            other = found.setdefault(subject.case, layout)
            if other != layout:
                raise self._unsupported(
                    f"keeps different states for a parameter of shape {subject.shape} ({_listed(layout)}) than for a "
                    f"parameter with a different size or with gradients in different steps ({_listed(other)}), but "
                    "pages store the same states for both"
                )

    # Values that advance #

    def _find_advancing(self, whole: _Trained) -> None:
        own = {name for one, other in itertools.pairwise(whole.own) for name in other if one.get(name) != other[name]}
        first = {name: content(value) for name, value in attributes(self._kernel.template.over([])).items()}
        at_once = {name for name, value in whole.own[0].items() if first.get(name, value) != value} - own
        watched = dict(self._kernel.plain_own())
        if lost := sorted(own - watched.keys()):
            raise self._unsupported(
                f"changes attributes that are not plain data at every step ({', '.join(lost)}), so checkpoints cannot "
                "store them"
            )
        self._kernel.advancing = frozenset(self._advanced_keys(whole))
        self._kernel.advancing_own = frozenset(own | (at_once & watched.keys()))
        if not (self._kernel.advancing or self._kernel.advancing_own):
            return
        for key in self._kernel.advancing:
            for group in whole.groups[-1]:
                if key in group and not is_plain(group[key]):
                    raise self._unsupported(
                        f"changes {key!r} of its param groups at every step, but the value is not plain data, so "
                        "checkpoints cannot store it"
                    )
        try:
            groups, after = self._clock()
        except Exception as error:
            names = ", ".join(sorted(self._kernel.advancing | self._kernel.advancing_own))
            raise self._unsupported(
                f"changes {names} at every step, but fails if there are no gradients ({_short(error)})"
            ) from error
        for name in at_once:  # the runner itself sets values that become fixed with the first gradient
            if any(one[name] != other[name] for one, other in zip(after, whole.own, strict=True)):
                self._kernel.advancing_own -= {name}
        unequal = [
            f"{key!r} of its param groups"
            for key in sorted(self._kernel.advancing)
            for here, there in zip(groups, whole.groups, strict=True)
            if [content(group.get(key)) for group in here] != [content(group.get(key)) for group in there]
        ] + [
            f"its attribute {name}"
            for name in sorted(self._kernel.advancing_own)
            if any(one[name] != other[name] for one, other in zip(after, whole.own, strict=True))
        ]
        if unequal:
            raise self._unsupported(
                f"is not element-wise: {unequal[0]}, which all updates use, depends on the gradients of all "
                "parameters or on which parameters have gradients"
            )

    def _advanced_keys(self, whole: _Trained) -> Iterator[str]:
        groups = self._groups()
        for step, after in enumerate(whole.groups):
            self._set(groups, step)
            for before, now in zip(groups, after, strict=True):
                yield from (key for key in now if key not in before or content(before[key]) != content(now[key]))
            groups = [settings_of(group) for group in after]

    def _clock(self) -> tuple[list[Groups], list[dict[str, Any]]]:
        """Return the param groups and the attributes after every step, as the kernel advances them."""
        groups, own = self._groups(), {name: copied(value) for name, value in self._kernel.plain_own()}
        all_groups, all_own = [], []
        for step in range(self._steps):
            self._set(groups, step)
            self._kernel.advance_values(groups, own)
            all_groups.append([settings_of(group) for group in groups])
            all_own.append({name: content(value) for name, value in own.items()})
        return all_groups, all_own

    # Training #

    def _groups(self) -> Groups:
        return [{key: copied(value) for key, value in self._before[number].items()} for number in self._chosen]

    def _set(self, groups: Sequence[dict[str, Any]], step: int) -> None:
        """Change the learning rate, by a different factor in each group, and the weight decay, as training loops do."""
        for number, (group, chosen) in enumerate(zip(groups, self._chosen, strict=True)):
            rate = self._before[chosen].get("lr")
            if isinstance(rate, torch.Tensor | float | int) and not isinstance(rate, bool):
                first = rate if float(rate) else self._before[chosen].get("initial_lr") or 1e-3
                group["lr"] = first * _RATES[(step + number) % len(_RATES)]
            decay = self._before[chosen].get("weight_decay")
            if isinstance(decay, float | int) and not isinstance(decay, bool) and step >= self._steps // 2:
                group["weight_decay"] = decay * 0.5 if decay else 0.01

    def _values(self, number: int) -> torch.Tensor:
        subject = self._subjects[number]
        generator = torch.Generator().manual_seed(1000 + number)
        return torch.randn(subject.shape, generator=generator).to(subject.case[1])

    def _gradient(self, number: int, step: int) -> torch.Tensor | None:
        subject = self._subjects[number]
        if subject.sometimes_missing and step in _MISSING:
            return None
        generator = torch.Generator().manual_seed(100 * (number + 1) + step)
        scale = _SCALES[step % len(_SCALES)] * (1 + number % 3)
        return (torch.randn(subject.shape, generator=generator) * scale).to(subject.case[1])

    def _whole(
        self,
        numbers: Sequence[int],
        *,
        seed: int = 0,
        alone: bool = False,
        closure: Callable[[], torch.Tensor] | None = None,
        kind: type[nn.Parameter] = nn.Parameter,
    ) -> _Trained:
        """Train full parameters with a copy of the user's optimizer.

        If `alone` is set, the copy has only the param groups that contain these parameters.
        """
        torch.default_generator.manual_seed(seed)  # only the CPU generator, because `fork_rng` restores no others
        params = {number: kind(self._values(number)) for number in numbers}
        groups = self._groups()
        for place, group in enumerate(groups):
            group["params"] = [param for n, param in params.items() if self._subjects[n].group == place]
        optimizer = self._kernel.template.over([group for group in groups if group["params"] or not alone])
        if self._kernel.builds:
            for group in groups:
                optimizer.state.update(self._kernel.build(group["params"], group).state if group["params"] else {})
        step, trained = torch_private.unhooked_step(optimizer), _Trained()
        for count in range(self._steps):
            self._set(groups, count)
            for number, param in params.items():
                param.grad = self._gradient(number, count)
            step() if closure is None else step(closure)
            if self._kernel.modes and count in _SWITCHED:
                for method in MODES:
                    getattr(optimizer, method)()
            trained.groups.append([settings_of(group) for group in groups])
            trained.own.append({name: content(value) for name, value in attributes(optimizer).items()})
        trained.weights = [param.detach() for param in params.values()]
        known = set(map(id, params.values()))
        trained.others = [str(key) for key in optimizer.state if id(key) not in known]
        trained.states = [{k: v for k, v in optimizer.state[p].items() if v is not None} for p in params.values()]
        return trained

    def _in_slices(self, kinds: Sequence[StateSpec], slices: Mapping[Case, int]) -> _Trained:
        kernel, subjects = self._kernel, self._subjects
        trained = _Trained(weights=[self._values(number).reshape(-1) for number in range(len(subjects))])
        trained.states = [
            {key: torch.zeros(s.numel, dtype=getattr(torch, dtype)) for key, dtype in layout.kinds}
            for s, layout in zip(subjects, kinds, strict=True)
        ]
        modes = [_SLICES[slices[subject.case]] for subject in subjects]
        shapes = {
            n: view_shape(mode, subject.shape) for n, (subject, mode) in enumerate(zip(subjects, modes, strict=True))
        }
        kernel.shapes = {number: shape for number, shape in shapes.items() if shape is not None}
        groups, own = self._groups(), {name: copied(value) for name, value in kernel.plain_own()}
        scalars: dict[int, Scalars] = {}
        for step in range(self._steps):
            self._set(groups, step)
            start: Own = {name: copied(value) for name, value in own.items()} if kernel.advancing_own else {}
            before = dict(scalars)
            for place, group in enumerate(groups):
                calls: dict[tuple[int, int], list[Piece]] = {}
                for number, subject in enumerate(subjects):
                    gradient = self._gradient(number, step)
                    if subject.group != place or gradient is None:
                        continue
                    alone = number if modes[number] == "whole" else -1
                    for position, piece in enumerate(self._pieces(number, modes[number], trained, gradient)):
                        calls.setdefault((position, alone), []).append(piece)
                for pieces in calls.values():
                    self._called = {subjects[piece.shard].case for piece in pieces}
                    scalars.update(kernel.update(pieces, group, before, start))
            if kernel.advancing or kernel.advancing_own:
                kernel.advance_values(groups, own)
            if kernel.modes and step in _SWITCHED:
                self._switch(groups, own, trained, scalars, modes)
        kernel.shapes = {}
        for number, layout in enumerate(kinds):
            trained.states[number] |= dict.fromkeys(layout.scalars) | dict(scalars.get(number, {}))
        return trained

    def _pieces(
        self, number: int, mode: str, trained: _Trained, gradient: torch.Tensor | None = None
    ) -> Iterator[Piece]:
        """Yield the slices of a parameter in a training run with slices."""
        for low, high in self._subjects[number].cuts(mode):
            views = {key: value[low:high] for key, value in trained.states[number].items()}
            part = None if gradient is None else gradient.reshape(-1)[low:high].clone()
            yield Piece(number, trained.weights[number][low:high], part, views)

    def _switch(
        self,
        groups: Groups,
        own: dict[str, Any],
        trained: _Trained,
        scalars: dict[int, Scalars],
        modes: Sequence[str],
    ) -> None:
        kernel = self._kernel
        for method in MODES:
            start: Own = {name: copied(value) for name, value in own.items()} if kernel.advancing_own else {}
            before = dict(scalars)
            for number, subject in enumerate(self._subjects):
                for piece in self._pieces(number, modes[number], trained):
                    after = kernel.update([piece], groups[subject.group], before, start, method)
                    scalars.update(after if number in before else {})
            kernel.advance_values(groups, own, method)

    # Comparing #

    def _unequal(self, whole: _Trained, kinds: Sequence[StateSpec], slices: Mapping[Case, int]) -> dict[Case, str]:
        """Return a description of the first difference in each case that has one."""
        try:
            found = self._in_slices(kinds, slices)
        except Exception as error:
            self._kernel.reset()
            return self._failing({case: slices[case] for case in self._called}, error)
        unequal: dict[Case, str] = {}
        for number, subject in enumerate(self._subjects):
            pairs: list[tuple[str, Any, Any]] = [("weights", whole.weights[number], found.weights[number])]
            pairs += [(f"state {key!r}", v, found.states[number].get(key)) for key, v in whole.states[number].items()]
            for what, expected, got in pairs:
                if not _equal(expected, got):
                    unequal.setdefault(subject.case, what)
        return unequal

    def _failing(self, slices: Mapping[Case, int], error: Exception) -> dict[Case, str]:
        """Return the cases that may have caused a failure of the kernel and can still try another kind of slices."""
        left = [case for case, mode in slices.items() if mode < len(_SLICES) - 1]
        flat = [case for case in left if case[2] > 1] or left
        if not flat:
            raise self._unsupported(f"cannot update a slice of a parameter: {_short(error)}") from error
        return dict.fromkeys(flat, _short(error))

    def _explained(self, whole: _Trained, case: Case, what: str) -> UnsupportedError:
        """Return an error that explains on which values the update of an element depends."""
        subjects = self._subjects
        mine = [number for number, subject in enumerate(subjects) if subject.case == case]
        place = f"{what} of {case[2]}-dimensional parameters"
        self._check_noise(whole)

        def differs(numbers: Sequence[int]) -> bool:
            try:
                alone = self._whole(numbers, alone=True)
            except Exception:
                return True
            return any(not _equal(alone.weights[at], whole.weights[n]) for at, n in enumerate(numbers))

        if any(differs([number]) for number in mine):
            group = subjects[mine[0]].group
            of_group = [number for number, subject in enumerate(subjects) if subject.group == group]
            others = "of other groups" if differs(of_group) else "of other parameters"
            return self._unsupported(
                f"is not element-wise: the update of a parameter ({place}) depends on gradients, values or settings "
                f"{others}, so pages cannot be updated one at a time"
            )
        return self._unsupported(
            f"is not element-wise: the update of an element depends on other elements of its parameter ({place} differ "
            "when it is updated in slices), so pages cannot be updated one at a time"
        )

    def _check_noise(self, whole: _Trained) -> None:
        """Check that updates draw no random numbers, because slices would draw different ones."""
        again = self._whole(range(len(self._subjects)), seed=1)
        if not all(map(_equal, again.weights, whole.weights)):
            raise self._unsupported("draws random numbers in its updates, which would differ between slices")


def _equal(expected: Any, found: Any) -> bool:
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor) and expected.numel() == found.numel():
        return expected.dtype == found.dtype and torch.equal(bits(expected), bits(found))
    return bool(content(expected) == content(found))


def _subjects(case: Case, group: int) -> Iterator[_Subject]:
    ndim = case[2]
    for first, rest in zip(_LEADING, _TRAILING, strict=True):
        shape = (first, *_divided(rest, ndim - 1)) if ndim > 1 else (first * rest,)
        yield _Subject(case, group, shape)
        if first == _LEADING[0]:
            yield _Subject(case, group, shape, sometimes_missing=True)


def _divided(number: int, parts: int) -> tuple[int, ...]:
    """Split a number into `parts` factors, and avoid factors of 1 if possible."""
    factors = []
    for _ in range(parts - 1):
        factor = next((f for f in (3, 2) if number % f == 0), 1)
        factors.append(factor)
        number //= factor
    return (number, *factors)


def _listed(layout: StateSpec) -> str:
    return ", ".join([*(f"{key} ({dtype})" for key, dtype in layout.kinds), *layout.scalars]) or "none"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
