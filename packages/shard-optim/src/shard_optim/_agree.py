"""Optimizers whose step needs other ranks: all of them go on, or all of them raise."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from shard_flat import GatherComm, ShardTensor
from shard_optim._flat import FlatOptimizer
from shard_optim._groups import Group
from shard_optim._state_file import StateLost


class CollectiveOptimizer(FlatOptimizer, ABC):
    """A flat optimizer that sends something for some of its parameters.

    Before anything is changed ranks exchange whether each of them could go on, and which of those
    parameters have a gradient. One that some ranks have a gradient for and others do not is an
    error on all ranks. Where state is on disk they exchange after a step whether it was all there.
    """

    @abstractmethod
    def _ranks_of(self, group: Group, param: torch.Tensor) -> GatherComm | None:
        """Those who take part in a parameter's update, the same on all; None for this one alone."""

    def _run(self) -> None:
        failure: ValueError | OSError | None = None
        try:
            jobs = self._jobs()
        except (ValueError, OSError) as error:
            failure = error
        shared = self._shared()
        for comm, params in shared.items():
            self._agree(comm, params, failure)
        if failure is not None:
            raise failure
        with self._home.keeping():
            self._advance(jobs)
        if self._home.fails:
            self._agree_on_lost(shared)

    def _agree_on_lost(self, shared: dict[GatherComm, list[torch.Tensor]]) -> None:
        """Raise on all ranks if one of them has lost state in this step."""
        lost, self._home.lost = self._home.lost, None
        elsewhere = ""
        for comm, params in shared.items():
            is_lost = lost is not None or bool(elsewhere)
            flag = torch.tensor([is_lost], dtype=torch.int32, device=params[0].device)
            comm.all_reduce(flag, op="max")
            if flag.item():
                elsewhere = f"(rank {comm.rank} of {comm.size})"
        if lost is not None:
            raise lost
        if elsewhere:
            raise StateLost(
                f"offload: another rank has lost state; the step is half done: load a checkpoint "
                f"{elsewhere}"
            )

    def _shared(self) -> dict[GatherComm, list[torch.Tensor]]:
        """Parameters that need other ranks, with gradients or without, by comm."""
        shared: dict[GatherComm, list[torch.Tensor]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                comm = self._ranks_of(group, param)
                if comm is not None:
                    shared.setdefault(comm, []).append(param)
        return shared

    def _agree(
        self, comm: GatherComm, params: list[torch.Tensor], failure: Exception | None
    ) -> None:
        there = [int(param.grad is not None) for param in params]
        flags = torch.tensor(
            [int(failure is not None), *there, *(1 - has for has in there)],
            dtype=torch.int32,
            device=params[0].device,
        )
        comm.all_reduce(flags, op="max")
        failed, *rest = flags.tolist()
        if failure is not None:
            raise failure
        where = f"(rank {comm.rank} of {comm.size})"
        if failed:
            raise ValueError(f"another rank refused this step; nothing was changed {where}")
        for param, some, others in zip(params, rest, rest[len(params) :], strict=False):
            if some and others:
                raise ValueError(
                    f"{self._name_of(param)}: expected a gradient on all ranks or on none, got "
                    f"{'one' if param.grad is not None else 'none'} here and another elsewhere "
                    f"{where}; let all ranks take the same path, or give zeros"
                )


def sharing(param: torch.Tensor) -> GatherComm | None:
    """Return the comm of the ranks that hold pieces of a parameter, if there are several. Local."""
    return param.comm if isinstance(param, ShardTensor) and param.comm.size > 1 else None
