"""Moving averages of parameters, sharded like them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from shard_flat import ShardTensor
from shard_optim._groups import check_params, labels_of, listed, unpack
from shard_optim._hyper import check_decay
from shard_optim._runs import find_runs, flat_piece, join, piece_of
from shard_optim._window import widened, windows


class EMA:
    """An exponential moving average of parameters.

    Averages have the pieces of the parameters, lie side by side where those do, and are updated
    as flat runs. Parameters of 16 bits are averaged in float32. Results have the same bits
    however parameters are sharded.

    Args:
        params: plain or sharded parameters, or ``(name, parameter)`` pairs. Plain ones without a
            name go by their position.
        decay: how much of the average is kept in an update, in [0, 1).

    Raises:
        TypeError: a parameter is no tensor, or one of torch's own DTensors; the decay is no
            number.
        ValueError: ``decay`` is out of range; there are no parameters; one is listed twice,
            shares memory with another, is no leaf, has holes between its elements or is not
            floating point; two have one name.

    **Collective**: local; nothing is ever sent.

    **Memory**: one average of each parameter's piece, and a copy of it while averages are swapped
    in.

    **Source**: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992.
    """

    def __init__(self, params: Iterable[Any], decay: float = 0.999) -> None:
        check_decay({"decay": decay}, "decay", "")
        entries = listed(params)
        found, names = unpack(entries, [])
        check_params(found, names, [])
        if len(set(names)) < len(names):
            name = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{name}: two parameters have this name; pass (name, parameter) pairs")
        self.decay = decay
        self.updates = 0
        self._params: list[torch.Tensor] = found
        self._given = [entry[0] if isinstance(entry, tuple) else None for entry in entries]
        self._averages = _blank(found)
        self._kept: list[torch.Tensor] | None = None
        for average, param in zip(self._averages, found, strict=True):
            flat_piece(average).copy_(flat_piece(param))

    @torch.no_grad()
    def update(self) -> None:
        """Move averages towards the parameters; call it after each step of the optimizer. Local.

        Raises:
            RuntimeError: the averages are swapped in.
        """
        self._check_swapped(False, "update")
        for average, param in self._runs():
            for old, new in windows([average, param]):
                mean = widened(old).mul_(self.decay)
                old.copy_(mean.add_(widened(new).mul_(1 - self.decay)))
        self.updates += 1

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the averages in the parameters' place, which are kept until ``swap_out``. Local.

        Raises:
            RuntimeError: they are swapped in.
        """
        self._check_swapped(False, "swap_in")
        self._kept = [flat_piece(param).clone() for param in self._params]
        for average, param in self._runs():
            param.copy_(average)
        self._mark()

    @torch.no_grad()
    def swap_out(self) -> None:
        """Put the parameters back as they were. Local.

        Raises:
            RuntimeError: the averages are not swapped in.
        """
        self._check_swapped(True, "swap_out")
        kept, self._kept = self._kept, None
        assert kept is not None
        for value, param in zip(kept, self._params, strict=True):
            flat_piece(param).copy_(value)
        self._mark()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Have the averages in the parameters' place inside, as for an evaluation. Local."""
        self.swap_in()
        try:
            yield
        finally:
            self.swap_out()

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by parameter name, sharing memory, and what is counted. Local.

        Returns:
            ``{"averages": {name: tensor}, "decay": ..., "updates": ...}``; averages of sharded
            parameters are ShardTensors. It may be taken while averages are swapped in.
        """
        averages = dict(zip(self._names(), self._averages, strict=True))
        return {"averages": averages, "decay": self.decay, "updates": self.updates}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy averages in, by name.

        Args:
            state_dict: from ``state_dict()``, with the same pieces or with full tensors.

        Raises:
            ValueError: names are missing or unexpected, or a shape or a cut is another; nothing
                was changed.

        **Collective**: local.
        """
        missing = [key for key in ("averages", "decay", "updates") if key not in state_dict]
        if missing:
            raise ValueError(
                f"expected a state dictionary with {missing}, got {sorted(state_dict)}"
            )
        saved: Mapping[str, torch.Tensor] = state_dict["averages"]
        names = self._names()
        if set(names) != set(saved):
            raise ValueError(
                f"averages: missing {sorted(set(names) - set(saved))}, unexpected "
                f"{sorted(set(saved) - set(names))}"
            )
        for name, average in zip(names, self._averages, strict=True):
            _check_source(name, average, saved[name])
        for name, average in zip(names, self._averages, strict=True):
            average.copy_(saved[name])
        self.decay, self.updates = float(state_dict["decay"]), int(state_dict["updates"])

    def _names(self) -> list[str]:
        """As they are now: a runtime may rename its shards."""
        known = labels_of({"params": self._params}, 0)
        return [k if g is None else g for g, k in zip(self._given, known, strict=True)]

    def _runs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        columns = [[flat_piece(t) for t in side] for side in (self._averages, self._params)]
        return [
            (join([columns[0][row] for row in rows]), join([columns[1][row] for row in rows]))
            for rows in find_runs(columns)
        ]

    def _check_swapped(self, wanted: bool, what: str) -> None:
        if (self._kept is not None) != wanted:
            there = "are not swapped in" if wanted else "are swapped in; call swap_out() first"
            raise RuntimeError(f"{what}: the averages {there}")

    def _mark(self) -> None:
        """Count the change on all ranks alike, also where a piece is empty."""
        empty = [piece for p in self._params if not (piece := piece_of(p)).numel()]
        torch.autograd.graph.increment_version([*self._params, *empty])


def _blank(params: list[torch.Tensor]) -> list[torch.Tensor]:
    """Averages of the parameters' pieces, side by side where those are."""
    averages: dict[int, torch.Tensor] = {}
    pieces = [flat_piece(param) for param in params]
    for rows in find_runs([pieces]):
        head = pieces[rows[0]]
        sizes = [pieces[row].numel() for row in rows]
        flat = torch.empty(sum(sizes), dtype=_wide(head.dtype), device=head.device)
        for row, part in zip(rows, flat.split(sizes), strict=True):
            param = params[row]
            if isinstance(param, ShardTensor):
                averages[row] = param.like(part)
            else:
                averages[row] = part.as_strided(param.shape, param.stride())
    for row, param in enumerate(params):
        if row not in averages:
            averages[row] = torch.empty_like(param.detach(), dtype=_wide(param.dtype))
    return [averages[row] for row in range(len(params))]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32


def _check_source(name: str, average: torch.Tensor, source: torch.Tensor) -> None:
    if tuple(source.shape) != tuple(average.shape):
        raise ValueError(
            f"{name}: expected an average of shape {tuple(average.shape)}, got "
            f"{tuple(source.shape)}"
        )
    if isinstance(source, ShardTensor) and not (
        isinstance(average, ShardTensor)
        and average.spec.is_cut_like(source.spec, average.comm.size)
    ):
        raise ValueError(
            f"{name}: the average is a piece [{source.spec.start}, {source.spec.stop}) of another "
            f"sharding; load it with shard_ckpt, which moves state between world sizes"
        )
