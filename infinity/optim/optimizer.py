"""The optimizer that users hold: a real `torch.optim.Optimizer` whose state is paged."""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from infinity.content.format import MASTER
from infinity.content.layout import Layout
from infinity.content.views import torch_dtype
from infinity.ending import end_all
from infinity.errors import InfinityError, UnsupportedError
from infinity.fsdp import private
from infinity.fsdp.gradient import Gradient
from infinity.fsdp.paged_tensor import PagedTensor
from infinity.fsdp.shard_io import ShardIO
from infinity.optim.copies import attributes, is_plain
from infinity.optim.kernel import Own
from infinity.optim.states import NO_COPIES, NO_ENTRIES, PagedStates, StateHome, StatesOfOne
from infinity.optim.step import StepState
from infinity.optim.update import same_setting, snapshot
from infinity.peers import Peers
from infinity.schedule.pager import Pager
from infinity.schedule.placement import Placement, eligible_for_backward, expand, expand_pending
from infinity.schedule.planner import Plan, make_plan, predict_seconds, preferred, prepend
from infinity.schedule.trace import Access, Event
from infinity.store.folder import RunFolder
from infinity.telemetry import Stats
from infinity.telemetry.ledger import Ledger, StepRecord

_KEPT_RECORDS = 10_000
_NOT_HERE = (
    "this process was forked from the one that trains, and weights and states are that one's alone: give workers what "
    "they need as plain tensors, made before they start"
)
_log = logging.getLogger("infinity")


class Run(Protocol):
    """The run that an optimizer belongs to."""

    @property
    def folder(self) -> RunFolder:
        """Its id, and its folders on the NVMe paths."""

    @property
    def stats(self) -> Stats:
        """This rank's counters."""

    @property
    def ledger(self) -> Ledger:
        """Where this rank's time and bytes are booked."""

    @property
    def peers(self) -> Peers:
        """The other ranks."""

    @property
    def resumed_extra(self) -> dict[str, Any]:
        """What the commit it resumed from was given as `extra`."""

    def check_extra(self, extra: dict[str, Any]) -> None:
        """Check, on all ranks, that `extra` would come back as it is. Raises `CommitError`."""

    def publish(self, step: int, scalars: Mapping[int, Mapping[str, Any]], extra: dict[str, Any]) -> None:
        """Publish a commit; the pages are flushed."""

    @property
    def says_lost_steps(self) -> bool:
        """Whether this rank tells which steps were never committed."""

    def close(self, *, committed: bool) -> None:
        """Release everything."""


class PagedOptimizer(torch.optim.Optimizer):
    """Shares `param_groups` with the optimizer it was made from; made by `infinity.offload`.

    A training step is forward, backward, optionally `clip_grad_norm_`, `step`, `zero_grad`. Several backward
    passes before a step accumulate. `commit` makes the state after the last step durable.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        *,
        layout: Layout,
        frames: int,
        pager: Pager,
        content: ShardIO,
        state: StepState,
        ledger: Ledger,
        run: Run,
        placement: str,
        steps: int,
        committed: bool,
        names: dict[str, int],
        shards: dict[int, int],
        made_with_state: bool,
    ) -> None:
        self._made = False  # whether this constructor has come to its end
        self._layout, self._frames, self._pager, self._content = layout, frames, pager, content
        self._step_state, self._ledger, self._run = state, ledger, run
        self._parameters, self._names = parameters, names
        self._shards = shards  # by id of the parameter
        self._made_with_state = made_with_state  # whether the optimizer in memory has states before its first step
        self._wanted = placement
        self._candidates: tuple[str, ...] = (placement,) if placement in ("in_forward", "after_backward") else ()
        self._placed = placement if self._candidates else "recording"
        self._events: tuple[Event, ...] = ()
        self._plan: Plan | None = None
        self._plans: dict[str, Plan] = {}
        self._updated = 0
        self._states = PagedStates(self)
        self._settings_in_backward: list[dict[str, Any]] | None = None  # of the groups, as gradients began to arrive
        self._own_in_backward: Own = {}  # what the given optimizer kept on itself then
        self._looked_between = False  # whether the first step looked at weights between backward and step
        self._given = optimizer
        self._groups = self._members()  # ids of the parameters of each param group
        self._watched = {name for name, value in attributes(optimizer).items() if is_plain(value)}
        """Attributes of the given optimizer whose values updates take over."""
        self._wrapped = [
            inner
            for inner in attributes(optimizer).values()
            if isinstance(inner, torch.optim.Optimizer) and inner.param_groups is optimizer.param_groups
        ]
        """Optimizers inside the given one that have the same param groups."""
        self._closed = ""  # why, if it is
        self._committed = steps if committed else None
        """The step of the newest commit."""
        self._steps = steps
        self.records: list[StepRecord] = []
        super().__init__(optimizer.param_groups, optimizer.defaults)
        del vars(self)["defaults"]  # those of the given optimizer, as its other attributes
        private.share_step_hooks(self, optimizer)
        optimizer.register_step_pre_hook(_refuse_step)
        # Functions without a reference to this object: the given optimizer does not keep a closed run in memory.
        optimizer.add_param_group = _refuse_group  # type: ignore[method-assign]
        optimizer.load_state_dict = _refuse_loading  # type: ignore[method-assign]
        optimizer.state = self.state  # type: ignore[assignment]
        self._left_state = vars(optimizer).get("state")  # what lies there from now on
        self._made = True

    # The torch.optim.Optimizer interface #

    @property  # type: ignore[override]
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The param groups of the given optimizer, so that schedulers made before still work."""
        return self._given.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._made:
            self._given.param_groups = groups

    @property  # type: ignore[override]
    def state(self) -> PagedStates:  # type: ignore[override]
        """The states by parameter, read when they are asked for, kept when they are written to."""
        return self._states

    @state.setter
    def state(self, value: Any) -> None:
        if self._made:
            raise UnsupportedError(NO_ENTRIES)

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        """Apply the gradients that have arrived since the last step.

        Raises:
            StorageError, CorruptPageError, StallError: a page could not be moved; the last commit is intact.
            LostRankError: another rank failed; its reason is named.
            InfinityError: settings changed, or gradients were dropped, after updates had already run in backward; or
                gradients are those of the step before.
            UnsupportedError: parameters were added to a param group, the state was replaced, a gradient was assigned
                that is no DTensor, further arguments were given, or a closure whose loss the updates would depend on.
        """
        self._check_open()
        self._check_given()
        if args or named or (closure is not None and self._step_state.kernel.uses_closure):
            what = "a closure" if not (args or named) else "arguments besides a closure"
            raise UnsupportedError(
                f"step() of {type(self._given).__name__} with {what}: updates of pages run without; call step()"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        state = self._step_state
        self._given.__dict__["_opt_called"] = True  # a scheduler made on that one looks there for steps
        self._reconcile()
        state.gradients.check_new()
        self._unscale()
        if not state.has_gradients and not state.gradients.zeros:
            state.step_without_gradients()
            return loss
        self._ledger.enter("other")
        late = state.gradients.looked_at
        if self._candidates:
            self._check_settings()
        elif self._wanted == "auto":
            late |= self._looked_between or bool(self._changed_setting())
        events = state.end()
        self._choose_placement(events, late)
        if not state.finish():
            self._ledger.skipped()
        self._steps += 1
        self._follow(events)
        self._settings_in_backward = None
        updated, self._updated = state.updated_elements - self._updated, state.updated_elements
        pager = self._pager
        self.records.append(
            self._ledger.end_step(self._steps, updated, pager.census(), pager.held_bytes(), pager.in_flight())
        )
        del self.records[:-_KEPT_RECORDS]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that have arrived and were not used by a step, or set them to zeros.

        Raises:
            InfinityError: updates with them have already run in backward.
        """
        self._check_open()
        self._step_state.check_drop()
        super().zero_grad(set_to_none)
        self._reconcile()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the global norm of all gradients over all ranks; return the norm before, a scalar tensor.

        `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`, but that the step will update nothing where the
        norm is not finite, as under `torch.amp.GradScaler`.

        Raises:
            InfinityError: updates run in backward, so the gradients are gone (set ``update.placement``).
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        """
        self._check_open()
        with self._ledger.phase("update", "norm"):
            self._step_state.close_arrivals()
            grads = [param.grad for param in self._parameters if param.grad is not None]
            with self._ledger.part("collective" if dist.get_world_size() > 1 else "update"):
                total = torch.nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite)
                torch.nn.utils.clip_grads_with_norm_(self._parameters, max_norm, total)
                norm = total.full_tensor() if isinstance(total, DTensor) else total
        if not bool(torch.isfinite(norm)):
            self._step_state.skip()
        return norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after `infinity.offload`: there is no room for more.

        Raises:
            UnsupportedError: always.
        """
        if self._made:  # before, the constructor of the base class asks for those that are there already
            _refuse_group()

    def state_dict(self) -> dict[str, Any]:
        """Refused: the state lies on NVMe.

        Raises:
            UnsupportedError: always; `commit` saves the state, `read_state` reads that of one parameter.
        """
        raise UnsupportedError(
            "the optimizer's state is on NVMe and would not fit in memory: optimizer.commit() saves it, "
            "run.resume continues from it, optimizer.read_state(name) reads one parameter's"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused; see `state_dict`.

        Raises:
            UnsupportedError: always.
        """
        _refuse_loading()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refused. Raises `UnsupportedError`."""
        raise UnsupportedError(NO_COPIES)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused: neither `copy.copy` nor `pickle`. Raises `UnsupportedError`."""
        raise UnsupportedError(NO_COPIES)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the optimizer that was passed in, of those that torch's optimizers do not have.

        Its methods are refused when they are called: they would have to change weights and states on NVMe. Only `train`
        and `eval` may be called where the optimizer is in that mode already.
        """
        given = vars(self).get("_given")
        if given is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = getattr(given, name)
        return partial(self._call, name) if inspect.ismethod(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the optimizer that was passed in, where it has it: updates from the next step on use it.

        Raises:
            UnsupportedError: updates would not know of it.
        """
        there = vars(self)
        if not there.get("_made") or name in there or hasattr(type(self), name) or _is_left_by_torch(name, value):
            super().__setattr__(name, value)
        elif isinstance(getattr(type(self._given), name, None), property) or (
            name in self._watched and is_plain(value)
        ):
            setattr(self._given, name, value)
        else:
            raise UnsupportedError(
                f"{name} of {type(self._given).__name__} cannot be set after infinity.offload, since updates of pages "
                "would not see it: set numbers, texts, small tensors, or lists of them that the optimizer has had "
                "before, set it before infinity.offload, or keep it outside of the optimizer"
            )

    def _call(self, name: str, *args: Any, **named: Any) -> None:
        self._check_open()
        if name not in ("train", "eval") or self._step_state.kernel.would_change(name, *args, **named):
            hint = "; call train() before offload" if name in ("train", "eval") else ""
            raise UnsupportedError(
                f"{name}() of {type(self._given).__name__} would have to change weights or states, which are on NVMe"
                f"{hint}; to evaluate other weights than those that are trained, load an export of a commit"
            )

    # What paging adds #

    def commit(self, extra: dict[str, Any] | None = None) -> None:
        """Make the state after the last step durable: weights, moments, step counts, random state, `extra`.

        Nothing is copied: modified pages that are still in the arena are written, then a manifest is
        published. All ranks call it together.

        Args:
            extra: plain data of your own, such as a scheduler's `state_dict` or the data position: numbers (NaN and
                infinities too), texts, None, and lists, tuples and dicts of them. A resumed run finds it in
                `resumed_extra`, equal. What would come back as something else is refused.

        Raises:
            CommitError: `extra` is not such data; the place is named. Nothing is written.
            InfinityError: gradients are pending (call it after `step`), or another rank failed.
            UnsupportedError: parameters were added to a param group, or the state was replaced.
            StorageError: a device or the folder refused; the commit before is intact.
        """
        self._check_open()
        self._check_given()
        self._reconcile()
        if self._step_state.has_gradients:
            raise InfinityError("commit() between backward and step(): call it after step()")
        extra = {} if extra is None else extra
        self._run.check_extra(extra)
        started = time.perf_counter()
        with self._ledger.phase("commit"):
            self.settle()
            self._pager.flush()
            self._run.publish(self._steps, self._step_state.scalars, extra)
        self._committed = self._steps
        self._ledger.committed(time.perf_counter() - started)
        self._ledger.restart_step()

    @property
    def steps(self) -> int:
        """How many steps were taken, those before a resumed commit too."""
        return self._steps

    @property
    def resumed_extra(self) -> dict[str, Any]:
        """The `extra` of the commit that this run resumed from; empty for a new run."""
        return self._run.resumed_extra

    @property
    def update_placement(self) -> str:
        """``in_backward``, ``in_both``, ``in_forward`` or ``after_backward``; ``recording`` in the first step."""
        return self._placed

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed; None until the first step has been recorded."""
        return self._plan

    def predict_seconds(self, bandwidth: float, computation: float) -> float:
        """Return how many seconds the plan predicts for a step.

        Args:
            bandwidth: of the drives, for this rank, bytes per second of reads and writes together.
            computation: seconds per step that are no stalls.

        Raises:
            InfinityError: there is no plan before the first step has been taken.
        """
        if self._plan is None:
            raise InfinityError("there is no plan before the first step: take a step first")
        beside = self._step_state.has_worker
        return predict_seconds(self._plan, self._layout, bandwidth=bandwidth, computation=computation, beside=beside)

    @property
    def layout(self) -> Layout:
        """The pages of this rank."""
        return self._layout

    @property
    def host_bytes(self) -> int:
        """Size of the host arena of this rank, in bytes."""
        return self._frames * self._layout.page_bytes

    @property
    def run(self) -> Run:
        """The run that this optimizer belongs to."""
        return self._run

    def read_state(self, name: str) -> dict[str, torch.Tensor]:
        """Return this rank's master and optimizer states of one parameter, each of shape (local elements,).

        Raises:
            InfinityError: there is no trained parameter of that name.
        """
        shard = self._names.get(name, -1)
        if shard < 0 or not self._layout.shards[shard].spec.trainable:
            raise InfinityError(f"there is no trained parameter {name!r}")
        kinds = self._layout.segments[self._layout.shards[shard].segment].format.kinds
        values = {kind: self._content.load_section(shard, kind) for kind, _ in kinds}
        scalars = self._step_state.scalars.get(shard, {})
        return {MASTER: self._content.load(shard), **values, **scalars}

    def updated_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that have states, in the order of `model.parameters()`."""
        return [param for param in self._parameters if self.has_state(param)]

    def has_state(self, param: object) -> bool:
        """Return whether a parameter has states: whether it was ever updated by an optimizer that has any.

        Raises:
            InfinityError: as `state_of`.
        """
        self._check_open()
        shard = self._shards.get(id(param), -1)
        if shard < 0 or not self._layout.shards[shard].spec.trainable:
            return False
        self.look(shard)
        scalars = self._step_state.scalars.get(shard)
        if scalars is None and self._made_with_state:
            raise InfinityError(
                f"{self._layout.shards[shard].spec.name} was not updated yet: its first state is made by its first step"
            )
        return scalars is not None and bool(scalars or self._layout.format_of(shard).kinds)

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the states of a parameter as they would be in memory; none where it was never updated.

        Tensors are sharded like the parameter, of its shape, and are on NVMe: what is written to them is kept.

        Raises:
            InfinityError: the parameter was updated in backward already, and `step()` has not been called; or the
                optimizer has states from the start, and the parameter was not updated yet.
            UnsupportedError: a state is larger than the limit for loading outside the plan.
        """
        if not self.has_state(param):
            return StatesOfOne()
        shard = self._shards[id(param)]
        kinds = self._layout.format_of(shard).kinds
        states = {kind: private.sharded_like(param, self._stored_state(shard, kind, param.device)) for kind, _ in kinds}
        return StatesOfOne({**states, **self._step_state.scalars[shard]})

    def _stored_state(self, shard: int, kind: str, device: torch.device) -> PagedTensor:
        spec, fmt = self._layout.shards[shard].spec, self._layout.format_of(shard)
        home = StateHome(self._content, shard, kind, f"{kind} of {spec.name}", device)
        return PagedTensor.stored(home, (spec.numel,), torch_dtype(fmt.dtypes[kind]), device)

    def drain(self) -> None:
        """Wait until nothing is in flight, so that the byte counters stand still; to be followed by `close`."""
        self._check_open()
        self._step_state.close()
        self._pager.drain()

    def close(self, error: BaseException | None = None) -> None:
        """Wait for what is in flight and release files, memory and the folder lock. Idempotent.

        Args:
            error: why the run ends early; by default the exception that is being handled. It ends the other ranks, and
                what fails while this one closes is only logged then.

        Raises:
            StallError: a device does not answer; the folder stays locked until this process ends.
            Exception: the first thing that could not be closed or removed; the rest is released all the same.
        """
        if not self._closed:
            self._closed = "this optimizer was closed"
            cause = error or sys.exception()
            self._tell_lost_steps()
            end_all(
                lambda: self._run.peers.leave(cause),
                self._step_state.close,
                self._pager.drain,
                lambda: self._run.close(committed=self._committed is not None),
                cause=cause,
            )

    def _tell_lost_steps(self) -> None:
        """Say which steps end with this object, where that was not asked for; before it is too late to see it."""
        first = (self._committed or 0) + 1
        if self._steps >= first and self._run.says_lost_steps:
            which = f"step {first} is" if first == self._steps else f"steps {first} to {self._steps} are"
            kept = "the run was never committed" if self._committed is None else "it is in no commit"
            _log.warning(
                '%s thrown away: %s; call optimizer.commit() before it is closed, or set run.keep = "never"',
                which,
                kept,
            )

    def leave_to_parent(self) -> None:
        """In a child that was forked: have nothing to close any more, and refuse all else.

        Threads, drives and counters are the parent's: this process could only wait for ever, or disturb that one.
        """
        self._closed = _NOT_HERE
        self._pager.leave_to_parent(InfinityError(_NOT_HERE))
        self._content.close(_NOT_HERE)

    def __enter__(self) -> PagedOptimizer:
        """Close at the end of a `with` block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close.

        Raises:
            LostRankError: a collective failed because another rank did; in place of torch's error.
        """
        reason = self._run.peers.explain(error) if not self._closed else None
        self.close(error)
        if reason is not None and reason is not error:
            raise reason from error

    # Gradients and gathers, called by the attachment #

    def gathering(self, shard: int, training: bool) -> bool:
        """Note that a shard's pages are about to be copied out; return whether the plan knows of it."""
        placed = self._layout.shards[shard]
        unit = self._layout.units[placed.unit].name
        self._ledger.enter("backward" if private.in_backward() else "forward", unit)
        if not training:
            self.look(shard)
            return False
        if self._layout.begins_unit(shard):
            if self._step_state.gradients.changed and not private.in_backward():
                self._reconcile()
            self._step_state.gathering(placed.unit)
        return True

    def gathered(self, shard: int) -> None:
        """Note that the pages of a shard have been copied out in a training pass."""
        if self._layout.ends_unit(shard):
            self._step_state.gathered(self._layout.shards[shard].unit)

    def gradient_arrived(self, shard: int, local: torch.Tensor | None) -> Gradient | None:
        """Take over what is in `p.grad` after a reduction; see `StepState.gradient_arrived`."""
        self._check_open()
        self._ledger.enter("backward")
        with self._ledger.part("python", name="gradient"):
            recording = not self._candidates
            if (recording or self._step_state.placement.in_backward) and self._settings_in_backward is None:
                self._check_given()
                self._settings_in_backward = self._settings()
                self._own_in_backward = self._step_state.kernel.own()
            return self._step_state.gradient_arrived(shard, local)

    # Planning #

    def _choose_placement(self, events: tuple[Event, ...], late: bool) -> None:
        """Choose the candidates once, after the first step; of those, the best one for a step of other events.

        Args:
            late: updates in backward would be too early: something has looked at gradients or weights, or changed
                settings, between backward and step.
        """
        if not self._candidates:
            early = frozenset() if late else eligible_for_backward(events)
            if self._wanted in ("in_backward", "in_both") and not early:
                raise InfinityError(
                    f'update.placement = "{self._wanted}" is impossible here: the step clips, or uses gradients '
                    'otherwise, or every unit has several gradients per step; set "auto", "in_forward" or '
                    '"after_backward"'
                )
            automatic = ("in_backward", "in_both") if early else ("in_forward",)
            self._candidates = automatic if self._wanted == "auto" else (self._wanted,)
        if events != self._events:
            worker = self._step_state.has_worker
            choices: dict[tuple[Access, ...], tuple[str, Placement]] = {}
            for name, beside in itertools.product(self._candidates, (True, False) if worker else (False,)):
                choice = replace(Placement.of(name, events, self._layout), beside=beside)
                choices.setdefault(expand(events, self._layout, choice), (name, choice))
            plans = [make_plan(trace, self._layout, self._frames, beside=worker) for trace in choices]
            plan = preferred(plans, self._layout, beside=worker)
            self._placed, self._step_state.placement = choices[plan.trace]
            self._plans = {"pending": plan}

    def _follow(self, events: tuple[Event, ...]) -> None:
        """Let the pager go on with the next step; where this one looked otherwise, plan the next one like it."""
        if events != self._events:
            self._events = events
            self._plan = self._plan_from("pending")
            self._pager.install(self._plan)
            self._ledger.predicted(self._plan.traffic.read_bytes, self._plan.traffic.written_bytes)
        if self._step_state.placement.in_forward and not self._step_state.pending:
            self._pager.install(self._plan_from("nothing"))
        else:
            self._pager.begin_step()

    def _plan_from(self, start: str) -> Plan:
        """Return the plan from the end of a step on.

        Args:
            start: what is left to the next forward: updates that are ``pending``, or ``nothing``; ``settling`` is a
                plan that runs them first.
        """
        if start not in self._plans:
            events, layout, placement = self._events, self._layout, self._step_state.placement
            prefix = expand_pending(events, layout, placement) if start == "settling" else ()
            prefix += expand(events, layout, placement, pending=False)
            self._plans[start] = prepend(prefix, self._plans["pending"])
        return self._plans[start]

    def settle(self) -> None:
        """Have all updates done, those too that are left to the next forward: before anybody looks at the state."""
        if self._step_state.pending and self._pager.between_steps:
            self._pager.install(self._plan_from("settling"))
        self._step_state.settle()

    def look(self, shard: int) -> None:
        """Let the weights and the state of a shard be those of the last step, before anybody looks at them.

        Raises:
            InfinityError: its unit was updated in backward already, and `step()` has not been called.
        """
        self._step_state.check_weights(self._layout.shards[shard].unit)
        if not self._candidates and not private.in_backward():
            self._looked_between |= self._step_state.has_gradients
        self.settle()

    def _reconcile(self) -> None:
        """Take over what was done to `p.grad` itself."""
        if self._step_state.reconcile():
            self._pager.begin_step()

    def _unscale(self) -> None:
        """Do what `torch.amp.GradScaler` leaves to optimizers that are fused: divide gradients, or skip the step."""
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and bool(found):
            self._step_state.skip()
        elif scale is not None:
            for param in self._parameters:
                if param.grad is not None:
                    param.grad.div_(scale)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `torch.amp.GradScaler` leaves unscaling to `step`, as it does for the optimizer in memory."""
        return bool(getattr(self._given, "_step_supports_amp_scaling", False))

    def _members(self) -> list[list[int]]:
        return [[id(param) for param in group["params"]] for group in self.param_groups]

    def _check_given(self) -> None:
        """Check that what was replaced on this or on the given optimizer is what updates know of."""
        groups = self.param_groups
        if self._members() != self._groups or any(inner.param_groups is not groups for inner in self._wrapped):
            raise UnsupportedError(
                "the parameters of a param group were changed after infinity.offload; give the optimizer all of them "
                "before, and set lr to 0 for what is not to be trained; settings can be changed in the groups"
            )
        if vars(self._given).get("state") is not self._left_state:
            raise UnsupportedError(NO_ENTRIES)

    def _settings(self) -> list[dict[str, Any]]:
        return [snapshot(group) for group in self.param_groups]

    def _check_settings(self) -> None:
        """With updates in backward, settings that change between backward and step would apply to a part only."""
        if changed := self._changed_setting():
            raise InfinityError(
                f"{changed} between backward and step(), but updates already ran in backward; change it before "
                'backward, or set update.placement = "after_backward"'
            )

    def _changed_setting(self) -> str:
        """Say what was changed since the first gradient arrived, in groups or on the optimizer; "" if nothing."""
        for before, now in zip(self._settings_in_backward or (), self.param_groups, strict=False):
            for key, value in before.items():
                if key not in now:
                    return f"{key} was removed"
                if not same_setting(now[key], value):
                    return f"{key} was changed from {value} to {now[key]}"
        if self._settings_in_backward is not None and self._step_state.kernel.own() is not self._own_in_backward:
            return f"an attribute of {type(self._given).__name__} was changed"
        return ""

    def _check_open(self) -> None:
        if self._closed:
            raise InfinityError(self._closed)


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, PagedOptimizer):  # shares the hooks
        return
    raise InfinityError(
        "this optimizer was given to infinity.offload and trains nothing any more: call step() of the optimizer that "
        "infinity.offload has returned"
    )


def _refuse_group(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "a param group cannot be added to an offloaded optimizer: its parameters have no pages; give the "
        "optimizer all groups before infinity.offload"
    )


def _refuse_loading(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError("the optimizer's state is on NVMe: set run.resume to continue from a commit")


def _is_left_by_torch(name: str, value: Any) -> bool:
    """Whether an attribute is one that torch's schedulers or `torch.amp.GradScaler` leave on an optimizer."""
    return private.is_bookkeeping(name, value) or name in ("found_inf", "grad_scale")
