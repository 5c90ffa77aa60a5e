"""The optimizer that was passed to `infinity.offload`: its param groups stay its own, its state lies on NVMe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from infinity import torch_private
from infinity.errors import InfinityError, UnsupportedError
from infinity.optim.kernel import MODES, Own, UpdateKernel
from infinity.optim.multi_optimizer import name_of, parts
from infinity.optim.optimizer_clone import attributes, content, is_plain
from infinity.optim.update import same_setting, snapshot

NO_ENTRIES = (
    "the state of an offloaded optimizer has no entries that can be set or removed: write to its tensors, for example "
    'optimizer.state[p]["exp_avg"].zero_(), or offload a model anew for a fresh start'
)


class BaseOptimizer:
    """What updates use of the optimizer that was passed in, and what of it must not change behind their back.

    It trains nothing by itself any more. Its settings may change at any time between steps: schedulers do that.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], kernel: UpdateKernel
    ) -> None:
        """Note what there is.

        Args:
            parameters: by shard.
            kernel: made of this optimizer.
        """
        self.optimizer = optimizer
        self.kernel = kernel
        groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._group_numbers = [groups.get(id(param), -1) for param in parameters]  # by shard; -1: it is in none
        self._shards = {id(param): shard for shard, param in enumerate(parameters)}  # by id of the parameter
        self._members = self._members_now()  # ids of the parameters of each param group, as they were passed in
        self._watched = {name for name, value in attributes(optimizer).items() if is_plain(value)}
        """Attributes whose values updates take over."""
        self._wrapped = [
            inner
            for inner in attributes(optimizer).values()
            if isinstance(inner, torch.optim.Optimizer) and inner.param_groups is optimizer.param_groups
        ]
        """Optimizers inside of it that have the same param groups."""
        self._fixed: list[Any] = []  # what each of several keeps on itself since `hand_over`
        self._state: object = None  # what lies in its attribute `state` since `hand_over`
        # Settings of the groups, and what it keeps on itself, as gradients began to arrive in this step; None before.
        self._noted: tuple[list[dict[str, Any]], Own] | None = None

    @property
    def name(self) -> str:
        """Its class."""
        return name_of(self.optimizer)

    def hand_over(self, paged: torch.optim.Optimizer, state: object) -> None:
        """Let `paged` train in its place: from now on it refuses to, and its `state` is what `paged` has.

        What is left on it has no reference to `paged`: it does not keep a closed run in memory.
        """
        torch_private.share_step_hooks(paged, self.optimizer)
        for part in {id(one): one for one in (self.optimizer, *parts(self.optimizer))}.values():
            part.register_step_pre_hook(_reject_step_of_base)
            part.add_param_group = refuse_group  # type: ignore[method-assign]
            part.load_state_dict = refuse_loading  # type: ignore[method-assign]
            part.state = state  # type: ignore[assignment]
        self._state = vars(self.optimizer).get("state")
        self._fixed = self._content_of_parts()

    def called(self) -> None:
        """Note that `step()` was called, where schedulers that were made on what was given look for it."""
        for part in {id(one): one for one in (self.optimizer, *parts(self.optimizer))}.values():
            vars(part)["_opt_called"] = True

    # Settings #

    def settings_of(self, shards: Iterable[int]) -> dict[int, Mapping[str, Any]]:
        """Return the settings of shards as they are now: schedulers change them before the update runs."""
        fixed: dict[int, Mapping[str, Any]] = {}
        found = {}
        for shard in shards:
            group = self.optimizer.param_groups[self._group_numbers[shard]]  # groups may be replaced: looked up now
            if id(group) not in fixed:
                fixed[id(group)] = snapshot(group)
            found[shard] = fixed[id(group)]
        return found

    def groups_by_shard(self) -> list[dict[str, Any]]:
        """Return the param groups with shards in place of parameters, as checkpoints have them."""
        return [
            {**group, "params": [self._shards[id(param)] for param in group["params"]]}
            for group in self.optimizer.param_groups
        ]

    def check_copies(self) -> None:
        """Check that settings, and what the optimizer keeps on itself, can be copied. Raises `UnsupportedError`."""
        for group in self.optimizer.param_groups:
            snapshot(group)
        self.kernel.own()

    def note_settings(self) -> None:
        """Note the settings with which updates in backward begin, once per step.

        Raises:
            UnsupportedError: as `check`.
        """
        if self._noted is None:
            self.check()
            self.kernel.check_steps()
            self._noted = [snapshot(group) for group in self.optimizer.param_groups], self.kernel.own()

    def forget_settings(self) -> None:
        """Note that the step has ended."""
        self._noted = None

    def changed_setting(self) -> str:
        """Say what was changed since `note_settings`, in groups or on the optimizer; "" if nothing."""
        if self._noted is None:
            return ""
        groups, own = self._noted
        for before, now in zip(groups, self.optimizer.param_groups, strict=False):
            for key, value in before.items():
                if key not in now:
                    return f"{key} was removed"
                if not same_setting(now[key], value):
                    return f"{key} was changed from {value} to {now[key]}"
            if added := now.keys() - before.keys() - {"params"}:
                return f"{min(added)} was added"
        return f"an attribute of {self.name} was changed" if self.kernel.own() is not own else ""

    def check_settings(self) -> None:
        """Check that what updates in backward have used is what `step()` would.

        Raises:
            InfinityError: it was changed between backward and step, and would apply to a part of the parameters only.
        """
        if changed := self.changed_setting():
            raise InfinityError(
                f"{changed} between backward and step(), but updates already ran in backward; change it before "
                'backward, or set update.schedule = "after_backward"'
            )

    # What was replaced on it #

    def check(self) -> None:
        """Check that parameters and state are those that updates know of.

        Raises:
            UnsupportedError: parameters were added to a param group, or the state was replaced.
        """
        groups = self.optimizer.param_groups
        if self._members_now() != self._members or any(inner.param_groups is not groups for inner in self._wrapped):
            raise UnsupportedError(
                "the parameters of a param group were changed after infinity.offload; give the optimizer all of them "
                "before, and set lr to 0 for what is not to be trained; settings can be changed in the groups"
            )
        if vars(self.optimizer).get("state") is not self._state:
            raise UnsupportedError(NO_ENTRIES)
        if self._content_of_parts() != self._fixed:
            raise UnsupportedError(
                f"an attribute of one of the optimizers ({self.name}) was changed after infinity.offload, and updates "
                "of pages have the first value: change settings in its param groups instead"
            )

    def _content_of_parts(self) -> list[Any]:
        several = parts(self.optimizer)
        return [content(attributes(part)) for part in several] if several != [self.optimizer] else []

    def _members_now(self) -> list[list[int]]:
        return [[id(param) for param in group["params"]] for group in self.optimizer.param_groups]

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute: updates from the next step on use it.

        Raises:
            UnsupportedError: updates would not know of it.
        """
        known = isinstance(getattr(type(self.optimizer), name, None), property)
        if not known and not (name in self._watched and is_plain(value)):
            raise UnsupportedError(
                f"{name} of {self.name} cannot be set after infinity.offload, since updates of pages "
                "would not see it: set numbers, texts, small tensors, or lists of them that the optimizer has had "
                "before, set it before infinity.offload, or keep it outside of the optimizer"
            )
        setattr(self.optimizer, name, value)

    def check_method(self, name: str, *args: Any, **named: Any) -> None:
        """Check that calling a method of the optimizer's own would change nothing.

        Raises:
            UnsupportedError: it would.
        """
        if name not in MODES or self.kernel.would_change(name, *args, **named):
            hint = "; call train() before offload" if name in MODES else ""
            raise UnsupportedError(
                f"{name}() of {self.name} would have to change weights or states, which are on NVMe"
                f"{hint}; to evaluate other weights than those that are trained, load an export of a checkpoint"
            )


def _reject_step_of_base(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, "read_state"):  # the one that trains in its place shares its hooks
        return
    raise InfinityError(
        "this optimizer was given to infinity.offload and trains nothing any more: call step() of the optimizer that "
        "infinity.offload has returned"
    )


def refuse_group(*_: Any, **__: Any) -> NoReturn:
    """Refuse another param group. Raises `UnsupportedError`."""
    raise UnsupportedError(
        "a param group cannot be added to an offloaded optimizer: its parameters have no pages; give the "
        "optimizer all groups before infinity.offload"
    )


def refuse_loading(*_: Any, **__: Any) -> NoReturn:
    """Refuse another state. Raises `UnsupportedError`."""
    raise UnsupportedError("the optimizer's state is on NVMe: set run.resume to continue from a checkpoint")
