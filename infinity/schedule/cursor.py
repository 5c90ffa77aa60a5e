"""Position of the training loop in a plan, and the claims of its window."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from infinity.schedule.cache import Cache
from infinity.schedule.planner import Plan
from infinity.schedule.trace import Access, Mode


@dataclass(eq=False, slots=True)
class PlannedAccess:
    """An access whose place in the plan has been taken, by the training thread or by a reservation."""

    position: int
    """Position in the plan, not wrapped."""
    uses: Access
    """The pages."""
    ended: bool = False
    """``True`` if the access has ended. Set by `Cursor.end`, under the lock."""


class Cursor:
    """Progress along a plan. Every method and attribute requires the lock.

    Positions count the accesses of the plan's prefix, then the accesses of its trace, cycle after cycle, and are not
    wrapped. Life cycle of a position: it enters the window (its pages are claimed and prefetched); an access takes it;
    the access ends; when all earlier accesses have ended too, the window moves past it (its claims are released, and
    pages without a pin or claim are evicted). If the step departs from the plan, the cursor and all claims are dropped.

    [Note: the window and reservations] An access of the training thread takes its place when it ends; a reservation
    takes its place when it is created. The window begins at the oldest access of either thread that has not ended.
    Therefore the training thread gets ahead of the other thread by at most the window, and the transfers do not depend
    on the speed of either thread. For example, reservations have places 5 and 6, and place 7 is next. The window begins
    at 5, even if 6 ends first. When 5 has ended too, the window begins at 7.

    Args:
        plan: plan to follow.
        cache: cache that prefetches and evicts.
        first: position of the first access.
    """

    def __init__(self, plan: Plan, cache: Cache, *, first: int = 0) -> None:
        self.plan, self._cache = plan, cache
        self.position = first
        """Next position to be taken."""
        self._claimed = first - 1
        """Last position whose pages have been claimed: the end of the window."""
        self._taken: deque[PlannedAccess] = deque()
        """Accesses before `position`, in order, beginning with the oldest one that has not ended."""

    @property
    def expected(self) -> Access:
        """Return the access that the plan expects at `position`."""
        return self.plan.access(self.position)

    @property
    def claimed(self) -> bool:
        """Return ``True`` if the window reaches the next access."""
        return self._claimed >= self.position

    def reaches(self, access: PlannedAccess) -> bool:
        """Return ``True`` if the window reaches an access."""
        return self._claimed >= access.position

    @property
    def between_steps(self) -> bool:
        """Return ``True`` if no step is in progress."""
        return self.plan.ends_step(self.position)

    def take(self, uses: Access) -> PlannedAccess:
        """Take the next place in the plan, for the access that is expected there."""
        access = PlannedAccess(self.position, uses)
        self._taken.append(access)
        self.position += 1
        return access

    def end(self, access: PlannedAccess) -> None:
        """Record that an access has ended. Move the window to the oldest access that has not ended."""
        access.ended = True
        # Accesses leave the window in the order of the plan, not in the order in which they end. Otherwise evictions,
        # and with them the bytes of a step, would depend on the speed of the update thread.
        while self._taken and self._taken[0].ended:
            self._leave(self._taken.popleft())

    def _leave(self, access: PlannedAccess) -> None:
        for use in access.uses:
            if not self.plan.keeps(access.position, use.page):
                self._cache.release_claim(use.page)
        # Claim before evicting, so that a page that the window needs again is not evicted and read once more. Reads
        # ahead are requested only here, when the release of an earlier access moves the window.
        self.claim_window()
        for use in access.uses:
            self._cache.evict(use.page, consumed=use.mode is Mode.CONSUME)

    def claim_window(self) -> None:
        """Claim the pages that the window has reached, and start to read them."""
        plan = self.plan
        reach = plan.reach_at(self._taken[0].position if self._taken else self.position)
        while self._claimed < reach:
            self._claimed += 1
            for use in plan.access(self._claimed):
                self._cache.claim(use, kept=plan.has_kept(self._claimed, use.page))
        self._cache.prefetch()
