"""What all optimizers over flat runs share: groups, steps, state dictionaries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from torch.optim import Optimizer

from shard_optim._copies import Copies
from shard_optim._grads import grad_piece
from shard_optim._groups import (
    Group,
    check_memory,
    check_params,
    entries_of,
    labels_of,
    listed,
    name_in,
    names_of,
    unpack,
)
from shard_optim._homes import home_of
from shard_optim._offload import Offload
from shard_optim._plan import Lane, StepPlan, make_plan
from shard_optim._slots import Slot, allocate_slots
from shard_optim._state import (
    Rules,
    Saved,
    hyper_of,
    match_state,
    pack_groups,
    through_hooks,
)

_Slots = tuple[Slot, ...]


@dataclass(frozen=True)
class Job:
    """What one step does to the members of a group that have the same slots.

    Attributes:
        group: the parameter group.
        slots: the state tensors of each member.
        members: parameters that have a gradient.
        grads: this rank's piece of each gradient.
        plan: how members are joined.
        copies: what is to be written in other dtypes besides.
    """

    group: Group
    slots: _Slots
    members: list[torch.Tensor]
    grads: list[torch.Tensor]
    plan: StepPlan
    copies: Copies = field(default_factory=Copies)


class FlatOptimizer(Optimizer, ABC):
    """An optimizer whose parameters, gradients and state are updated as flat runs.

    A subclass says which state tensors a parameter has, checks hyper-parameters and updates one
    lane of a plan. Everything here is local; a subclass that talks to other ranks says so.

    Args:
        params: plain or sharded parameters, ``(name, parameter)`` pairs, or groups of either.
        defaults: hyper-parameters of groups that do not say otherwise.
        offload: where state tensors live that are as large as their parameter or larger; with the
            parameters by default.

    Raises:
        TypeError: a parameter is no tensor, or one of torch's own DTensors; a hyper-parameter is no
            number.
        ValueError: a hyper-parameter is out of range; there are no parameters; one is listed
            twice, shares memory with another, is no leaf, has holes between its elements or is
            not floating point; there is no such place to offload to.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        offload: str | Offload | None = None,
    ) -> None:
        self._check_hyper(defaults, "")
        self._offload = Offload.of(offload)
        self._home = home_of(self._offload)
        self._plans: dict[tuple[int, _Slots], StepPlan] = {}
        super().__init__(listed(params), defaults)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made from; it moves its state to files of its own in a step."""
        return {**super().__getstate__(), "_offload": self._offload}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; what a step needs besides is made anew."""
        super().__setstate__(state)
        self._plans = {}
        self._home = home_of(self._offload)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with hyper-parameters of its own where it names any. Local.

        Args:
            param_group: ``"params"`` as in the constructor, and hyper-parameters.

        Raises:
            TypeError: as for the constructor.
            ValueError: as for the constructor; nothing was added.
        """
        if not isinstance(param_group["params"], set):  # torch's own check refuses sets
            number = len(self.param_groups)
            entries = param_group["params"] = entries_of(param_group, number)
            params, names = unpack(entries, self.param_groups)
            first = f" ({names[0]}, ...)" if names else ""
            self._check_hyper({**self.defaults, **param_group}, f"group {number}{first}: ")
            check_params(params, names, self.param_groups)
            hyper = {**self.defaults, **param_group}
            for param, name in zip(params, names, strict=True):
                self._check_member(param, name, hyper)
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = ...) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss anew, with gradients.

        Returns:
            What ``closure`` returned.

        Raises:
            ValueError: a gradient is sparse, or its dtype, kind or range is not that of its
                parameter, or the parameter changed its shape or dtype under its state; nothing
                was changed.
            OSError: offloaded state is to be made and the disk has no room; nothing was changed.
            RuntimeError: offloaded state could not be read or written, here or by a rank that
                takes part in the step; the step is half done.

        **Collective**: local, unless the class says otherwise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._run()
        self._home.forget()
        return loss

    def state_dict(self, *, allocate: bool | Collection[str] = False) -> dict[str, Any]:
        """Return state and hyper-parameters by parameter name, sharing memory with the optimizer.

        Reading changes no result of training. What is written into state tensors is seen by the
        optimizer at any time, what is written into a step counter until the next step.

        Args:
            allocate: make the state of parameters that have none yet (zeros, step 0), so that a
                checkpoint can be loaded into it. True: of those that are to be trained. Names,
                such as a checkpoint holds: also of frozen parameters that are so called.

        Returns:
            ``{"state": {name: {"step", ...}}, "param_groups": [...]}``, where each group lists
            names under ``"params"``. State of sharded parameters is ShardTensors.

        Raises:
            TypeError: ``allocate`` is one name.
            ValueError: two parameters have one name.

        **Collective**: local.
        """
        if isinstance(allocate, str):
            raise TypeError(f"allocate: expected a collection of names, got {allocate!r}")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        names = names_of(self.param_groups)
        self._plans.clear()
        if allocate is not False:
            named = () if allocate is True else allocate
            for group in self.param_groups:
                wanted = [p for p in group["params"] if p.requires_grad or names[p] in named]
                self._allocate(group, wanted)
        result: dict[str, Any] = {
            "state": {n: dict(self.state[p]) for p, n in names.items() if self.state.get(p)},
            "param_groups": pack_groups(self.param_groups, names),
        }
        return through_hooks(self._optimizer_state_dict_post_hooks, self, result)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy state and hyper-parameters in, by name, or by position where there are no names.

        Gradients stay as they are. Parameters without state in ``state_dict`` lose theirs.

        Args:
            state_dict: from ``state_dict()`` at any world size with the same pieces or with full
                tensors, or from torch's optimizer of the same name with full tensors.

        Raises:
            TypeError: a hyper-parameter is no number; nothing was changed.
            ValueError: groups or names differ, a slot is missing, or a shape does not fit;
                nothing was changed.

        **Collective**: local.
        """
        saved = through_hooks(self._optimizer_load_state_dict_pre_hooks, self, dict(state_dict))
        names = names_of(self.param_groups)
        kind = type(self).__name__
        rules = Rules(
            kind,
            self._switches(),
            self._check_hyper,
            slots=self._slots_of,
            others=self._other_slots,
            adapt=self._adapt,
        )
        sources = match_state(saved, self.param_groups, names, rules=rules)
        self._plans.clear()
        for param in names.keys() - sources.keys():
            self.state.pop(param, None)
        for group, theirs in zip(self.param_groups, saved["param_groups"], strict=True):
            group.update(deepcopy(hyper_of(theirs, rules.fixed)))
            members = [p for p in group["params"] if p in sources]
            self._allocate(group, members)
            for param in members:
                self._fill(param, sources[param], self._slots_of(group, param))
                self._home.forget()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @abstractmethod
    def _check_hyper(self, group: Group, where: str) -> None:
        """Raise, beginning with ``where``, if a hyper-parameter is no number or out of range."""

    def _check_member(self, param: torch.Tensor, name: str, group: Group) -> None:
        """Raise ValueError if the optimizer has no update for a parameter of a group."""

    @abstractmethod
    def _slots_of(self, group: Group, param: torch.Tensor) -> _Slots:
        """Return the state tensors of a parameter; equal ones for equal hyper-parameters."""

    def _other_slots(self, group: Group, param: torch.Tensor) -> _Slots:
        """Return another optimizer's state tensors that this one can make its own from."""
        return ()

    def _update(self, lane: Lane, grads: Sequence[torch.Tensor], job: Job) -> None:
        """Update the members of one lane, where ``_advance`` leaves that to the lanes."""

    def _switches(self) -> Mapping[str, Any]:
        """Switches of torch's own optimizer that change results, and the value they must have."""
        return {}

    def _adapt(self, source: Saved) -> Saved:
        """Make one parameter's state of torch's own optimizer into ours."""
        return source

    def _run(self) -> None:
        self._advance(self._jobs())

    def _advance(self, jobs: Sequence[Job]) -> None:
        """Do all jobs of a step; every gradient has been checked."""
        for job in jobs:
            self._apply(job)

    def _apply(self, job: Job) -> None:
        job.plan.count()
        job = replace(job, copies=Copies(job.plan.bases))
        with job.plan.telling(), closing(self._home.each(job.plan.lanes)) as lanes:
            for lane in lanes:
                self._update(lane, job.grads, job)
                job.copies.finish(lane)
        job.copies.settle()

    def _jobs(self) -> list[Job]:
        """Check all gradients and plan what is to be done; nothing has changed before."""
        work = [self._collect(group) for group in self.param_groups]
        split = [
            (index, slots, *part)
            for index, (group, found) in enumerate(zip(self.param_groups, work, strict=True))
            for slots, part in self._by_slots(group, *found).items()
        ]
        jobs = []
        for index, slots, members, grads in split:
            plan = self._plans.get((index, slots))
            if plan is None or not plan.holds(members, grads, self.state):
                plan = make_plan(
                    members,
                    grads,
                    self.state,
                    slots=slots,
                    home=self._home,
                    name_of=self._name_of,
                )
                self._plans[index, slots] = plan
            jobs.append(Job(self.param_groups[index], slots, members, grads, plan))
        return jobs

    def _by_slots(
        self, group: Group, members: list[torch.Tensor], grads: list[torch.Tensor]
    ) -> dict[_Slots, tuple[list[torch.Tensor], list[torch.Tensor]]]:
        parts: dict[_Slots, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        last: _Slots | None = None
        for member, grad in zip(members, grads, strict=True):
            slots = self._slots_of(group, member)
            if slots is not last:  # hashing takes longer than all the rest
                part, last = parts.setdefault(slots, ([], [])), slots
            part[0].append(member)
            part[1].append(grad)
        return parts

    def _collect(self, group: Group) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Parameters of a group that have a gradient, and this rank's piece of each gradient."""
        found = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
        if len(found) < len(group["params"]):
            check_memory(group["params"], self._name_of)
        grads = [grad_piece(param, grad, self._name_of) for param, grad in found]
        return [param for param, _ in found], grads

    def _allocate(self, group: Group, params: Sequence[torch.Tensor]) -> None:
        by_slots: dict[_Slots, list[torch.Tensor]] = {}
        for param in params:
            by_slots.setdefault(self._slots_of(group, param), []).append(param)
        for slots, members in by_slots.items():
            allocate_slots(members, self.state, slots, self._home)

    @torch.no_grad()
    def _fill(self, param: torch.Tensor, source: Saved, slots: _Slots) -> None:
        self._fill_step(param, source)
        for slot in slots:
            self.state[param][slot.name].copy_(source[slot.name])

    def _fill_step(self, param: torch.Tensor, source: Saved) -> None:
        own = self.state[param]
        own["step"] = torch.full_like(own["step"], float(source["step"]))

    def _names(self) -> dict[torch.Tensor, str]:
        return {
            param: name
            for number, group in enumerate(self.param_groups)
            for param, name in zip(group["params"], labels_of(group, number), strict=True)
        }

    def _name_of(self, param: torch.Tensor) -> str:
        return name_in(self.param_groups, param)
