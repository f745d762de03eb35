"""The order in which one outermost forward entered and left its units, for backward to follow.

Ranks may need different units in backward, because their losses differ. Every rank follows the
whole path in reverse all the same, so all of them launch the same collectives::

    forward    enter root, enter a, leave a, enter b, leave b, leave root
    backward   root: gather
               b:    gather, reduce       a rank whose loss does not depend on b does so too, with
               a:    gather, reduce       nothing to give, when it comes to a or to the end
               root: reduce
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shard_fsdp._unit import Unit


@dataclass
class _Event:
    """A unit's forward began or ended.

    Attributes:
        unit: the unit.
        is_end: which of the two.
        is_recorded: autograd recorded that forward.
        is_first: it is the unit's first one that was, where its backward ends.
    """

    unit: Unit
    is_end: bool
    is_recorded: bool = False
    is_first: bool = False


class Path:
    """What one outermost forward did, and how far a backward has followed it.

    It holds no graph, so what a rank keeps alive makes no difference.
    """

    def __init__(self) -> None:
        self._events: list[_Event] = []
        self._seen: set[Unit] = set()
        self._passed = 0  # number of the last event that backward has come to

    def enter(self, unit: Unit) -> int:
        """Note that a forward begins, and return the number of the event. Local."""
        self._events.append(_Event(unit, is_end=False))
        return len(self._events) - 1

    def leave(self, entered_at: int) -> int:
        """Note that a forward ended that autograd recorded, and return the event's number. Local.

        Args:
            entered_at: the number of its beginning.
        """
        begin = self._events[entered_at]
        begin.is_recorded = True
        begin.is_first = begin.unit not in self._seen
        self._seen.add(begin.unit)
        self._events.append(_Event(begin.unit, is_end=True, is_recorded=True))
        self.rewind()
        return len(self._events) - 1

    def follow(self, number: int) -> bool:
        """Do what others may do before they come to an event, and pass it. Collective.

        Args:
            number: the event's; -1 is the end.

        Returns:
            False where backward had come further already.
        """
        while self._passed > number + 1:
            self._passed -= 1
            event = self._events[self._passed]
            if not event.is_recorded:
                continue
            if event.is_end:
                event.unit.backward.pass_outputs(self, self._passed)
            else:
                event.unit.backward.pass_inputs(is_first=event.is_first)
        in_time = self._passed >= number
        self._passed = min(self._passed, max(number, 0))
        return in_time

    def before(self, number: int, count: int) -> list[Unit]:
        """Return the units of the forwards that ended before the one that ended there. Local.

        Args:
            number: of that event.
            count: at most so many, the last to end first.
        """
        ended = (event.unit for event in reversed(self._events[:number]) if event.is_end)
        return list(islice(ended, count))

    def rewind(self) -> None:
        """Be ready for another backward. Local."""
        self._passed = len(self._events)
