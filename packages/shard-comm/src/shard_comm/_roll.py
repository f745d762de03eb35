"""Who has come to a collective of a process group: asked only where a wait is slow or fails."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from math import inf
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shard_comm._calls import listed

logger = logging.getLogger("shard_comm")

SLOW_S = 1.0
"""How long a rank waits before it tells the store where it is."""
GRACE_S = SLOW_S + 0.5
"""How long a rank whose wait failed listens for the others; they speak within ``SLOW_S``."""
_WARN_S = 10.0
_ANSWER_S = 1.0
_AGAIN_S = 0.1
_END = "end"

_rolls: WeakKeyDictionary[dist.ProcessGroup, Roll] = WeakKeyDictionary()


class Roll:
    """This rank's count of the collectives it began in a group, and what others say of theirs.

    While all goes well nothing is sent: each rank counts for itself. A rank that has waited for
    ``SLOW_S`` writes the number of its call to the group's store, under one key for all its calls.
    A rank whose wait fails reads those keys for ``GRACE_S``: whoever wrote this call's number, or
    a higher one, has come.

    Args:
        store: of the process group.
        rank: this rank.
        size: number of ranks.

    **Collective**: local. **Memory**: one short key per rank in the store.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store = PrefixStore("shard_comm", store)
        self.rank = rank
        self.size = size
        self._begun = 0
        self._parts = 0

    @staticmethod
    def of(group: dist.ProcessGroup) -> Roll:
        """Return the one roll of a group, however many comms it has. Local."""
        roll = _rolls.get(group)
        if roll is None:
            store = dist.distributed_c10d._get_process_group_store(group)
            roll = Roll(store, dist.get_rank(group), dist.get_world_size(group))
            _rolls[group] = roll
        return roll

    def begin(self) -> int:
        """Return the number of a collective that this rank begins. Local."""
        self._begun += 1
        return self._begun

    def next_part(self) -> int:
        """Return the number of a split of the group. Local; all ranks split in one order."""
        self._parts += 1
        return self._parts

    def write(self, call: int) -> None:
        """Tell the store which call this rank waits in. Local."""
        self.store.set(str(self.rank), str(call))

    def missing(self, call: int) -> list[int]:
        """Return the ranks that did not write this call or a later one. Local."""
        wrote = self._wrote(range(self.size))
        calls = self.store.multi_get([str(rank) for rank in wrote]) if wrote else []
        came = {rank for rank, latest in zip(wrote, calls, strict=True) if int(latest) >= call}
        return [rank for rank in range(self.size) if rank not in came]

    def end(self, reason: str) -> None:
        """Tell the store that this rank comes to no more calls, and why, if it answers. Local."""
        with contextlib.suppress(RuntimeError):  # nobody is there to read it either
            self.store.set(_END, reason)

    def ended(self) -> str:
        """Return why a rank comes to no more calls, if one has said so. Local."""
        return self.store.get(_END).decode() if self.store.check([_END]) else ""

    def _wrote(self, ranks: Sequence[int]) -> list[int]:
        """Which ranks have a key; a few questions if that is most of them."""
        if self.store.check([str(rank) for rank in ranks]):
            return list(ranks)
        if len(ranks) == 1:
            return []
        half = len(ranks) // 2
        return self._wrote(ranks[:half]) + self._wrote(ranks[half:])


class Inquiry(threading.Thread):
    """Says where this rank waits, and asks where the others do.

    It asks once the wait has failed, and after ten seconds for the log. A thread, since a store on
    a host that is gone may never answer.

    Args:
        roll: of the group.
        call: the number of the collective that is slow.
        what: the collective, for the log.
        listening: whether to ask meanwhile for a rank that comes to no more calls.

    Attributes:
        heard: why one does not, once that is known.
    """

    def __init__(self, roll: Roll, call: int, what: str, *, listening: bool = False) -> None:
        super().__init__(name=f"shard-comm-call-{call}", daemon=True)
        self.heard = ""
        self._listening = listening
        self._roll = roll
        self._call = call
        self._what = what
        self._over = threading.Event()
        self._failed = False
        self._missing: list[int] | None = None
        self._trouble = "the store does not answer"

    def run(self) -> None:
        """Write, wait for the end of the collective, and ask if it was a bad one."""
        try:
            self._roll.write(self._call)
            warn_at = time.monotonic() + _WARN_S - SLOW_S
            while not self._over.wait(SLOW_S):
                if self._listening:
                    self.heard = self._roll.ended()
                if time.monotonic() >= warn_at:
                    warn_at = inf
                    self._warn()
            until = time.monotonic() + GRACE_S
            while self._failed and self._missing != []:
                self._missing = self._roll.missing(self._call)
                if time.monotonic() > until:
                    break
                time.sleep(_AGAIN_S)
        except RuntimeError as error:
            self._trouble = f"the store failed: {error}"

    def _warn(self) -> None:
        missing = self._roll.missing(self._call)
        if missing:
            me, size = self._roll.rank, self._roll.size
            waited = f"{self._what} on rank {me} of {size} waited {_WARN_S:g} s"
            logger.warning("%s for %s", waited, listed(missing))

    def dismiss(self) -> None:
        """End the thread: there is nothing to ask, or no more. Local."""
        self._over.set()

    def result(self) -> str:
        """Return who came and who did not, within ``GRACE_S`` and a second. Local."""
        self._failed = True
        self._over.set()
        self.join(GRACE_S + _ANSWER_S)
        if self._missing is None:
            return f"who arrived is not known, {self._trouble} (its host may be the one missing)"
        if not self._missing:
            return "all ranks arrived"
        came = [rank for rank in range(self._roll.size) if rank not in set(self._missing)]
        return f"{listed(came)} arrived, {listed(self._missing)} did not"
