"""In which order the hosts of a roll-out take their turns, and when it ends early: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Rollout:
    """``canary`` hosts first (0: none), then ``batch`` at a time (0: all the others). After a group with a failed
    canary, or with more than ``max_failures`` failed hosts in all, no further group is begun."""

    canary: int = 0
    batch: int = 0
    max_failures: int = 0

    def groups(self, hosts: Sequence[T]) -> list[list[T]]:
        """The hosts, in their order, cut into groups; the first is the canaries' where there are any."""
        first, rest = list(hosts[: self.canary]), list(hosts[self.canary :])
        size = self.batch or max(1, len(rest))
        cut = [rest[start : start + size] for start in range(0, len(rest), size)]
        return [first, *cut] if first else cut

    def may_go_on(self, done: Sequence[bool]) -> bool:
        """Whether the next group may begin, by how the hosts so far went (True: ready and proven), in their order."""
        failed = len(done) - sum(done)
        return all(done[: self.canary]) and failed <= self.max_failures

    def reason(self, done: Sequence[bool]) -> str:
        """Why no further group is begun, in words; only where ``may_go_on`` is False."""
        failed = len(done) - sum(done)
        if not all(done[: self.canary]):
            return f"{len(done[: self.canary]) - sum(done[: self.canary])} of {self.canary} canaries failed"
        return f"{failed} hosts failed, {self.max_failures} may"


ALL_AT_ONCE = Rollout()
