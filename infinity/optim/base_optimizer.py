"""Access to the base optimizer: the optimizer that was passed to `infinity.offload`.

Its param groups remain in use (by schedulers, for example), but its state is stored on NVMe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from infinity import torch_private
from infinity.errors import InfinityError, UnsupportedError
from infinity.optim.kernel import MODES, Own, UpdateKernel
from infinity.optim.multi_optimizer import name_of, parts
from infinity.optim.optimizer_clone import attributes, content, is_plain, settings_of
from infinity.optim.parameters_in_memory import ParametersInMemory
from infinity.optim.update import same_setting

NO_ENTRIES = (
    "entries of an offloaded optimizer's state cannot be set or removed; write to its tensors, for example "
    'optimizer.state[p]["exp_avg"].zero_(), or offload the model again to start from scratch'
)


class BaseOptimizer:
    """Base optimizer, whose settings and attributes are used to update pages.

    The base optimizer itself no longer trains. Its settings may change between steps, for example because of a
    scheduler. Changes that page updates cannot take into account raise an error.

    Args:
        optimizer: optimizer that was passed to `infinity.offload`.
        parameters: model parameters, indexed by shard.
        ignored: parameters that `fully_shard` ignores, by name.
        in_memory: shards of the FSDP modules that stay in memory.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        kernel: UpdateKernel,
        ignored: Mapping[str, nn.Parameter],
        in_memory: Iterable[int],
    ) -> None:
        self.optimizer = optimizer
        self.kernel = kernel
        self.in_memory = ParametersInMemory(ignored, {n: parameters[n] for n in in_memory}, optimizer, kernel)
        """Parameters that are not paged, and their updates."""
        groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._group_numbers = [groups.get(id(param), -1) for param in parameters]  # by shard; -1: in no group
        self._shards = {id(param): shard for shard, param in enumerate(parameters)}  # by id of the parameter
        self._members = self._members_now()  # ids of the parameters of each param group at `infinity.offload`
        self._watched = {name for name, value in attributes(optimizer).items() if is_plain(value)}
        """Attributes whose current values are copied for each update."""
        self._wrapped = [
            inner
            for inner in attributes(optimizer).values()
            if isinstance(inner, torch.optim.Optimizer) and inner.param_groups is optimizer.param_groups
        ]
        """Inner optimizers that share the param groups of the base optimizer."""
        self._fixed: list[Any] = []  # attributes of each combined optimizer at `hand_over`
        self._state: object = None  # `state` attribute of the base optimizer since `hand_over`
        # Group settings and attributes when the first gradient of this step arrived; None before.
        self.noted: tuple[list[dict[str, Any]], Own] | None = None
        # Group settings of the checkpoint until the first step, and whether there was a scheduler when they were
        # restored; None in a new run.
        self._resumed: tuple[list[dict[str, Any]], bool] | None = None

    @property
    def name(self) -> str:
        """Class name of the optimizer."""
        return name_of(self.optimizer)

    def hand_over(self, paged: torch.optim.Optimizer, state: object) -> None:
        """Make `paged` train in place of the base optimizer, whose `step()` raises an error from now on.

        The base optimizer holds no reference to `paged`, so that it does not keep a closed run in memory.

        Args:
            paged: optimizer that `infinity.offload` returns.
            state: mapping that becomes the `state` of the base optimizer.
        """
        torch_private.share_step_hooks(paged, self.optimizer)
        for part in self._all:
            part.register_step_pre_hook(_reject_step_of_base)
            part.add_param_group = reject_add_param_group  # type: ignore[method-assign]
            part.load_state_dict = _reject_load_state_dict  # type: ignore[method-assign]
            part.state = state  # type: ignore[assignment]
        self._state = vars(self.optimizer).get("state")
        self._fixed = self._content_of_parts()

    def called(self) -> None:
        """Mark `step()` as called, because schedulers that were created with the base optimizer check this."""
        for part in self._all:
            vars(part)["_opt_called"] = True

    @property
    def _all(self) -> Iterable[torch.optim.Optimizer]:
        """The base optimizer and the optimizers that it combines."""
        return {id(one): one for one in (self.optimizer, *parts(self.optimizer))}.values()

    # Settings #

    def settings_of(self, shards: Iterable[int]) -> dict[int, Mapping[str, Any]]:
        """Return a snapshot of each shard's param group settings, which schedulers may change before the update."""
        fixed: dict[int, Mapping[str, Any]] = {}
        found = {}
        for shard in shards:
            number = self._group_numbers[shard]
            if number not in fixed:  # looked up here, because groups may have been replaced
                fixed[number] = settings_of(self.optimizer.param_groups[number])
            found[shard] = fixed[number]
        return found

    def groups_by_shard(self) -> list[dict[str, Any]]:
        """Return the param groups with shard indices in place of parameters, as stored in checkpoints.

        Ignored parameters have no shard and are omitted.
        """
        return [
            {**group, "params": [self._shards[id(param)] for param in group["params"] if param not in self.in_memory]}
            for group in self.optimizer.param_groups
        ]

    def check_copies(self) -> None:
        """Check that the settings and attributes of the optimizer can be copied.

        Raises:
            UnsupportedError: if a setting or an attribute cannot be copied.
        """
        self._settings()
        self.kernel.own()

    def note_settings(self) -> None:
        """Record the settings that updates in backward start from. Call this once per step.

        Raises:
            InfinityError: if the optimizer is in a mode in which it cannot step.
            UnsupportedError: under the same conditions as `check`.
        """
        self.check()
        self.kernel.check_steps()
        self.noted = self._settings(), self.kernel.own()

    def noted_settings_of(self, shards: Iterable[int]) -> tuple[dict[int, Mapping[str, Any]], Own]:
        """Return the noted settings by shard, and the noted attributes. Call `note_settings` before."""
        assert self.noted is not None
        groups, own = self.noted
        return {shard: groups[self._group_numbers[shard]] for shard in shards}, own

    def changed_setting(self) -> str:
        """Return a description of the first setting or attribute that changed since `note_settings`, or ""."""
        if self.noted is None:
            return ""
        groups, own = self.noted
        for before, now in zip(groups, self.optimizer.param_groups, strict=False):
            if changed := _changed(before, now):
                return changed
            if added := now.keys() - before.keys() - {"params"}:
                return f"{min(added)} was added"
        return f"an attribute of {self.name} was changed" if self.kernel.own() is not own else ""

    def check_settings(self) -> None:
        """Check that settings have not changed since updates in backward used them.

        Raises:
            InfinityError: if settings have changed, because the new values would apply to only some of the parameters.
        """
        if changed := self.changed_setting():
            raise InfinityError(
                f"{changed} between backward and step(), but updates already ran in backward; change it before "
                'backward, or set update.schedule = "after_backward"'
            )

    def note_resumed(self) -> None:
        """Record the settings that were restored from a checkpoint."""
        self._resumed = self._settings(), torch_private.has_scheduler(self.optimizer)

    def changed_since_resuming(self, paged: torch.optim.Optimizer) -> str:
        """Return a description of a setting that a new scheduler has changed since the run resumed, or "".

        The constructor of a scheduler sets the learning rate of the first step. If it is called after settings were
        restored from a checkpoint, `load_state_dict` of the scheduler does not restore them again. Only the first call
        checks this.

        Args:
            paged: optimizer that `infinity.offload` returned.
        """
        if self._resumed is None:
            return ""
        (groups, had_scheduler), self._resumed = self._resumed, None
        created = torch_private.has_scheduler(self.optimizer) and not had_scheduler
        if not (created or torch_private.has_scheduler(paged)):
            return ""  # any change was made by the training loop itself
        for number, (before, now) in enumerate(zip(groups, self.optimizer.param_groups, strict=False)):
            # The constructor keeps an existing `initial_lr`. A caller that assigns it chooses the schedule itself.
            kept = "initial_lr" in before and now.get("initial_lr") is before["initial_lr"]
            if kept and (changed := _changed(before, now)):
                return f"param group {number}: {changed}"
        return ""

    def _settings(self) -> list[dict[str, Any]]:
        return [settings_of(group) for group in self.optimizer.param_groups]

    # Replaced attributes #

    def check(self) -> None:
        """Check that the base optimizer still has the parameters and the state that updates use.

        Raises:
            UnsupportedError: if the parameters of a param group, the state, or an attribute of a combined optimizer
                have changed.
        """
        groups = self.optimizer.param_groups
        if self._members_now() != self._members or any(inner.param_groups is not groups for inner in self._wrapped):
            raise UnsupportedError(
                "the parameters of a param group were changed after infinity.offload; pass all parameters to the "
                "optimizer before infinity.offload, and set lr to 0 for parameters that should not train"
            )
        if vars(self.optimizer).get("state") is not self._state:
            raise UnsupportedError(NO_ENTRIES)
        if self._content_of_parts() != self._fixed:
            raise UnsupportedError(
                f"an attribute of one of the optimizers ({self.name}) was changed after infinity.offload, but updates "
                "of pages use its original value; change settings in its param groups instead"
            )

    def _content_of_parts(self) -> list[Any]:
        several = parts(self.optimizer)
        return [content(attributes(part)) for part in several] if several != [self.optimizer] else []

    def _members_now(self) -> list[list[int]]:
        return [[id(param) for param in group["params"]] for group in self.optimizer.param_groups]

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of the base optimizer. Updates use the new value from the next step on.

        Raises:
            UnsupportedError: if updates would not use the new value.
        """
        known = isinstance(getattr(type(self.optimizer), name, None), property)
        if not known and not (name in self._watched and is_plain(value)):
            raise UnsupportedError(
                f"{name} of {self.name} cannot be set after infinity.offload because updates of pages would not use "
                "it; set it before infinity.offload, or store it elsewhere (existing attributes that hold numbers, "
                "strings, small tensors or lists of these can be set)"
            )
        setattr(self.optimizer, name, value)

    def check_method(self, name: str, *args: Any, **named: Any) -> None:
        """Check that calling a method of the base optimizer would not change weights or states.

        Raises:
            UnsupportedError: if the method would change them.
        """
        if name not in MODES or self.kernel.would_change(name, *args, **named):
            hint = "; call train() before infinity.offload" if name in MODES else ""
            raise UnsupportedError(
                f"{name}() of {self.name} would have to change weights or states, which are stored on NVMe"
                f"{hint}; to evaluate weights other than the trained ones, load an exported checkpoint"
            )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    for key, value in before.items():
        if key not in now:
            return f"{key} was removed"
        if not same_setting(now[key], value):
            return f"{key} was changed from {value} to {now[key]}"
    return ""


def _reject_step_of_base(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, "read_state"):  # the paged optimizer shares these hooks
        return
    raise InfinityError(
        "this optimizer was replaced by the one that infinity.offload() returned; call step() on that one"
    )


def rejecting(message: str) -> Callable[..., NoReturn]:
    """Return a function that raises `UnsupportedError` with a message, to be used in place of a method."""

    def reject(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(message)

    return reject


reject_add_param_group = rejecting(
    "a param group cannot be added to an offloaded optimizer because the group's parameters have no pages; add all "
    "groups before infinity.offload"
)
_reject_load_state_dict = rejecting(
    "this optimizer was replaced by the one that infinity.offload() returned; call load_state_dict() on that one"
)
