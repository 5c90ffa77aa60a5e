"""Where the training loop is in a plan, and what its window claims."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from infinity.schedule.cache import Cache
from infinity.schedule.planner import Plan
from infinity.schedule.trace import Access, Mode


@dataclass(eq=False, slots=True)
class PlannedAccess:
    """One access of a plan whose place has been taken, by the training thread or by a reservation."""

    position: int
    """Position in the plan, not wrapped."""
    uses: Access
    """The pages."""
    ended: bool = False
    """Whether the access has ended; set by `Cursor.end`, under the lock."""


class Cursor:
    """Progress along a plan. Everything is called, read and changed under the lock.

    Positions count the accesses of the plan's prefix and then those of its trace, turn after turn; they are not
    wrapped. Life cycle of a position: it enters the window (its pages are claimed, and prefetched); an access takes it;
    the access ends; once all before it have ended too, the window moves on behind it (its claims are released, and what
    nothing keeps is evicted). A cursor is dropped, with all claims, when the step departs from the plan.

    [Note: the window and reservations] An access of the training thread takes its place when it ends, a reservation
    when it is
    made. The window begins at the oldest access that has not ended, of either thread. So the training thread goes ahead
    of the other one as far as the window reaches, and what is moved does not depend on how fast either is. For example:
    reservations have 5 and 6, and 7 comes next. The window begins at 5, also when 6 ends; when 5 has ended, it begins
    at 7.
    """

    def __init__(self, plan: Plan, cache: Cache, *, first: int = 0) -> None:
        self.plan, self._cache = plan, cache
        self.position = first
        """The next access that is to take its place."""
        self._claimed = first - 1
        """The last position whose pages have been claimed: the end of the window."""
        self._taken: deque[PlannedAccess] = deque()
        """Accesses before `position`, in order, from the first one on that has not ended."""

    @property
    def expected(self) -> Access:
        """The access that the plan has at `position`."""
        return self.plan.access(self.position)

    @property
    def claimed(self) -> bool:
        """Whether the window reaches as far as the next access."""
        return self._claimed >= self.position

    def reaches(self, access: PlannedAccess) -> bool:
        """Whether the window reaches as far as an access."""
        return self._claimed >= access.position

    @property
    def between_steps(self) -> bool:
        """Whether a step has ended, and none begun."""
        return self.plan.ends_step(self.position)

    def take(self, uses: Access) -> PlannedAccess:
        """Take the next place, for the access that is expected there."""
        access = PlannedAccess(self.position, uses)
        self._taken.append(access)
        self.position += 1
        return access

    def end(self, access: PlannedAccess) -> None:
        """Note that an access has ended; move the window on behind those that have, up to the first that has not."""
        access.ended = True
        while self._taken and self._taken[0].ended:
            self._leave(self._taken.popleft())

    def _leave(self, access: PlannedAccess) -> None:
        for use in access.uses:
            if not self.plan.keeps(access.position, use.page):
                self._cache.release_claim(use.page)
        self.claim_window()  # before anything is evicted, so that what is wanted again stays
        for use in access.uses:
            self._cache.evict(use.page, consumed=use.mode is Mode.CONSUME)

    def claim_window(self) -> None:
        """Claim what the window reaches, and start to read it."""
        plan = self.plan
        reach = plan.reach_at(self._taken[0].position if self._taken else self.position)
        while self._claimed < reach:
            self._claimed += 1
            for use in plan.access(self._claimed):
                self._cache.claim(use, kept=plan.has_kept(self._claimed, use.page))
        self._cache.prefetch()
