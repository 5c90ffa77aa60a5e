"""The position of the training loop in a plan, and the window that starts there.

The *window* is the range of upcoming accesses whose pages the plan keeps in the host cache. Each use inside the window
has a *claim* on its page.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from infinity.schedule.cache import Cache
from infinity.schedule.planner import Plan
from infinity.schedule.trace import Access


@dataclass(eq=False, slots=True)
class PlannedAccess:
    """An access that has taken its place in the plan, either for the training thread or for a reservation."""

    cursor: Cursor
    """Cursor in which the access took its place."""
    position: int
    """Position in the plan. It keeps increasing from cycle to cycle."""
    uses: Access
    """Pages of the access, with their modes."""
    ended: bool = False
    """``True`` if the access has ended. Set by `Cursor.end`, with the lock held."""


class Cursor:
    """Progress of the training loop through a plan. The caller must hold the lock for all methods and attributes.

    Positions count the accesses of the plan's prefix, and then the accesses of its trace, cycle after cycle, without
    wrapping around. Life cycle of a position: it enters the window, and its pages are claimed and prefetched; an access
    takes it; the access ends; and when all earlier accesses have ended too, the window moves past it, which releases
    its claims and evicts pages that are not pinned, claimed or resident. If the step departs from the plan, the pager
    drops the cursor and all claims.

    [Note: the window and reservations] An access of the training thread takes its position when it ends; a reservation
    takes its position when it is created. The window begins at the oldest unfinished access of any thread. Therefore
    the training thread can run ahead of the other threads only by the length of the window, and the transfers do not
    depend on the speed of any thread. For example, if reservations have positions 5 and 6 and the next position is 7,
    the window begins at 5, even if 6 ends first. When 5 has ended too, the window begins at 7.

    Args:
        first: position of the first access to follow.
    """

    def __init__(self, plan: Plan, cache: Cache, *, first: int = 0) -> None:
        self.plan, self._cache = plan, cache
        self.position = first
        """Next position to take."""
        self._claimed = first - 1
        """Last position whose pages have been claimed, which is the end of the window."""
        self._kept: set[int] = set()
        """Pages that the plan keeps until their next use, which has not entered the window."""
        self._taken: deque[PlannedAccess] = deque()
        """Accesses that have taken a position, in order, starting with the oldest unfinished one."""

    @property
    def expected(self) -> Access:
        """Access that the plan expects at `position`."""
        return self.plan.access(self.position)

    def reaches(self, position: int) -> bool:
        """Return ``True`` if a position is inside the window."""
        return self._claimed >= position

    @property
    def between_steps(self) -> bool:
        """``True`` if no step is in progress."""
        return self.plan.ends_step(self.position)

    def take(self, uses: Access) -> PlannedAccess:
        """Assign the next position to the access that the plan expects there."""
        access = PlannedAccess(self, self.position, uses)
        self._taken.append(access)
        self.position += 1
        return access

    def end(self, access: PlannedAccess) -> None:
        """Record that an access has ended, and advance the window to the oldest unfinished access."""
        access.ended = True
        # Accesses leave the window in the order of the plan, not in the order in which they end. Otherwise evictions,
        # and therefore the traffic of a step, would depend on the speed of the update thread.
        while self._taken and self._taken[0].ended:
            self._leave(self._taken.popleft())

    def _leave(self, access: PlannedAccess) -> None:
        kept = self.plan.keeps(access.position)
        self._kept |= kept
        self._cache.release_claims(access.uses, kept)
        # Claim before evicting. Otherwise a page that the window needs again would be evicted and read a second time.
        # Prefetches are requested only here, when the end of an earlier access advances the window.
        self.claim_window()
        self._cache.evict_used(access.uses)

    def claim_window(self) -> None:
        """Claim the pages that have entered the window, and start reading them."""
        plan = self.plan
        reach = plan.reach_at(self._taken[0].position if self._taken else self.position)
        while self._claimed < reach:
            self._claimed += 1
            uses = plan.access(self._claimed)
            self._cache.claim(uses, self._kept)
            if self._kept:
                self._kept.difference_update([use.page for use in uses])
        self._cache.prefetch()
