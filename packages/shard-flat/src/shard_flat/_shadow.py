"""The copy of a flat shard in another dtype, which an optimizer may write in its own pass."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import torch

# By the storage of the shard, which its shadow holds: no other storage has that number meanwhile.
_shadows: WeakValueDictionary[int, Shadow] = WeakValueDictionary()


class Shadow:
    """What a runtime and an optimizer that do not know each other agree on about one flat shard.

    The runtime makes it and, before it reads the copy, casts the shard anew unless ``is_current``.
    An optimizer finds it by any piece of the shard, and saves that pass::

        shadow = shadow_of(piece)
        copy = shadow.lend()  # None where it is not to be written now
        ...  # change pieces of the shard, each time with what lies at the same place of the copy
        shadow.settle()

    Changes are told by the shard's version. Whoever was given a piece by ``ShardTensor.local`` or
    ``to_local()`` may write to it without torch's counting, say through numpy; from then on nothing
    is lent. A shadow without a copy, where both are in one dtype, tells the runtime of that alone.

    Args:
        flat: the shard ``[n]``, with a storage of its own.

    Attributes:
        copy: ``[n]`` in another dtype, None until ``attach``.
        hand_outs: how often somebody was given a piece.

    **Collective**: all of it is local.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.copy: torch.Tensor | None = None
        self._flat = flat
        self._is_free: Callable[[], bool] | None = None
        self._version: int | None = None  # of the shard that the copy has
        known = shadow_of(flat)
        self.hand_outs: int = 0 if known is None else known.hand_outs
        _shadows[_key(flat)] = self

    def attach(self, copy: torch.Tensor, is_free: Callable[[], bool]) -> None:
        """Say where the copy lies.

        Args:
            copy: ``[n]``, with nothing in it yet.
            is_free: whether nobody reads the copy until its owner says so.

        Raises:
            ValueError: the copy has another shape than the shard.
        """
        if copy.shape != self._flat.shape:
            raise ValueError(
                f"attach: expected a copy of shape {list(self._flat.shape)}, got "
                f"{list(copy.shape)}; make it with torch.empty_like(flat, dtype=...)"
            )
        self.copy, self._is_free, self._version = copy, is_free, None

    @property
    def is_current(self) -> bool:
        """Whether the copy holds what the shard holds."""
        return self._version == self._flat._version

    def settle(self) -> None:
        """Say that the copy holds what the shard holds now."""
        self._version = self._flat._version

    def spoil(self) -> None:
        """Say that the copy may hold something else."""
        self._version = None

    def lend(self) -> torch.Tensor | None:
        """Return the copy if it is current and nobody reads it; it is not current until settled."""
        if self._is_free is None or self.hand_outs:
            return None
        if not (self.is_current and self._is_free()):
            return None
        self._version = None
        return self.copy

    def hand_out(self) -> None:
        """Say that pieces of the shard are where they may be written without a trace."""
        self.hand_outs += 1
        self._version = None


def shadow_of(tensor: torch.Tensor) -> Shadow | None:
    """Return the shadow of the shard that a plain tensor is a view of, if it has one. Local."""
    return _shadows.get(_key(tensor)) if _shadows else None


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
