"""Memory that state lives in, and its way to where a step works on it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch

from shard_flat import large_empty
from shard_optim._offload import Offload
from shard_optim._stage import LINE_BYTES, PARTS, DeviceStage, MappedStage, Stage, Window
from shard_optim._state_file import StateFiles, StateLost

if TYPE_CHECKING:
    from shard_optim._plan import Lane

Unit = tuple[torch.device, Sequence[torch.Tensor]]
"""A parameter's device, and what it needs of its state at the same time, each ``[n]``."""


class Home:
    """State in the memory of its parameters' device, where a step finds it.

    Attributes:
        fails: whether state may be lost in a step.
        lost: the error that was kept for later, where some was.
    """

    fails: ClassVar[bool] = False

    def __init__(self) -> None:
        self.lost: StateLost | None = None

    def zeros(
        self, sizes: Sequence[tuple[int, torch.dtype]], device: torch.device
    ) -> list[torch.Tensor]:
        """Make zeros for state of parameters.

        Args:
            sizes: elements and dtype of each tensor.
            device: the parameters'.

        Returns:
            One tensor ``[n]`` for each of the sizes.

        Raises:
            OSError: there is no room; nothing was made.

        **Collective**: local.
        """
        return [large_empty(numel, dtype, device=device).zero_() for numel, dtype in sizes]

    def holds(self, tensor: torch.Tensor, device: torch.device) -> bool:
        """Whether state of a parameter on a device is where it belongs. Local."""
        return tensor.device == device

    def stage(self, device: torch.device, part_bytes: int = 0) -> Stage | None:
        """Return what state of parameters on a device passes through, if anything. Local.

        Args:
            device: the parameters'.
            part_bytes: of state that is needed at the same time.
        """
        return None

    def numel_of(self, device: torch.device, itemsizes: Sequence[int], most: int) -> int:
        """Return how many elements may be at hand with state of these sizes. Local."""
        stage = self.stage(device)
        return most if stage is None else min(most, stage.numel_of(itemsizes))

    def forget(self) -> None:
        """Let go of what was only looked at. Local."""

    def each(self, lanes: Sequence[Lane]) -> Generator[Lane, None, None]:
        """Yield lanes one by one, each with its state at hand until the next one. Local.

        Raises:
            StateLost: state could not be read or written; the step is half done.
        """
        staged: dict[Stage, list[tuple[Lane, Window]]] = {}
        for lane in lanes:
            if lane.window is None:
                yield lane
            else:
                staged.setdefault(lane.window.stage, []).append((lane, lane.window))
        for stage, found in staged.items():
            with closing(stage.each([window for _, window in found])) as numbers:
                for number in numbers:
                    yield found[number][0]

    @contextmanager
    def streaming(self, units: Sequence[Unit]) -> Iterator[Iterator[Sequence[torch.Tensor]]]:
        """Have the state of one unit after another at hand, inside.

        What is lost becomes NaN, or 0 where it is no floating number, and the error is kept in
        ``lost``: other ranks wait for what comes of it.

        Args:
            units: in the order in which they are worked on.

        Yields:
            What gives the tensors of the next unit where a step works on them, until the next one.

        **Collective**: local. **Memory**: three units that follow each other, on each device.
        """
        by_device: dict[torch.device, list[Sequence[torch.Tensor]]] = {}
        for device, tensors in units:
            by_device.setdefault(device, []).append(tensors)
        streams = {device: self._stream(device, each) for device, each in by_device.items()}
        with ExitStack() as stack:
            for stream in streams.values():
                stack.enter_context(closing(stream))
            yield (next(streams[device]) for device, _ in units)
            for stream in streams.values():
                next(stream, None)  # what was worked on last goes back

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep an error about lost state in ``lost``; other ranks wait for this one. Local."""
        try:
            yield
        except StateLost as error:
            self.lost = error

    def _stream(
        self, device: torch.device, units: Sequence[Sequence[torch.Tensor]]
    ) -> Generator[Sequence[torch.Tensor], None, None]:
        need = max(sum(t.nbytes + -t.nbytes % LINE_BYTES for t in unit) for unit in units)
        stage = self.stage(device, need) if need else None
        if stage is None:
            yield from units
            return
        planned = [stage.window(i, [[t] for t in unit]) for i, unit in enumerate(units)]
        done = 0
        with self.keeping(), closing(stage.each([window for window, _ in planned])) as numbers:
            for number in numbers:
                done += 1
                yield [near for (near,) in planned[number][1]]
        for unit in units[done:]:
            yield [_lost(tensor, device) for tensor in unit]


class _AwayHome(Home):
    """State elsewhere, which passes through a window."""

    def __init__(self, offload: Offload) -> None:
        super().__init__()
        self._offload = offload
        self._stages: dict[tuple[torch.device, bool], Stage] = {}

    def stage(self, device: torch.device, part_bytes: int = 0) -> Stage | None:
        """Return what state passes through. Local."""
        window_bytes = self._offload.window_on(device)
        is_wide = PARTS * part_bytes > window_bytes
        stage = self._stages.get((device, is_wide))
        if stage is None or stage.part_bytes < part_bytes:
            stage = self._make_stage(device, max(window_bytes, PARTS * part_bytes))
            self._stages[device, is_wide] = stage
        return stage

    @abstractmethod
    def _make_stage(self, device: torch.device, window_bytes: int) -> Stage:
        """Make what state of parameters on a device passes through."""


class HostHome(_AwayHome):
    """State of parameters on CUDA in pinned host memory; of others where they are.

    **Memory**: the state; torch's allocator rounds what is pinned at once up to a power of two.
    """

    def zeros(
        self, sizes: Sequence[tuple[int, torch.dtype]], device: torch.device
    ) -> list[torch.Tensor]:
        """Make zeros for state of parameters. Local."""
        if device.type != "cuda":
            return super().zeros(sizes, device)
        return _carved(sizes, _pinned)

    def holds(self, tensor: torch.Tensor, device: torch.device) -> bool:
        """Whether state of a parameter on a device is where it belongs. Local."""
        if device.type != "cuda":
            return super().holds(tensor, device)
        return not tensor.nbytes or tensor.is_pinned()

    def stage(self, device: torch.device, part_bytes: int = 0) -> Stage | None:
        """Return what state passes through, if anything. Local."""
        return super().stage(device, part_bytes) if device.type == "cuda" else None

    def _make_stage(self, device: torch.device, window_bytes: int) -> Stage:
        return DeviceStage(device, window_bytes)


class DiskHome(_AwayHome):
    """State in files that have no name."""

    fails: ClassVar[bool] = True

    def __init__(self, offload: Offload) -> None:
        super().__init__(offload)
        self._files = StateFiles(offload.path)

    def zeros(
        self, sizes: Sequence[tuple[int, torch.dtype]], device: torch.device
    ) -> list[torch.Tensor]:
        """Make zeros for state of parameters, in one file for each dtype. Local."""
        return _carved(sizes, self._files.zeros)

    def holds(self, tensor: torch.Tensor, device: torch.device) -> bool:
        """Whether state of a parameter on a device is where it belongs. Local."""
        return not tensor.nbytes or (tensor.device.type == "cpu" and self._files.holds(tensor))

    def forget(self) -> None:
        """Let go of pages that somebody looked at. Local."""
        self._files.forget()

    def _make_stage(self, device: torch.device, window_bytes: int) -> Stage:
        if device.type == "cpu":
            return MappedStage(self._files, window_bytes)
        return DeviceStage(device, window_bytes, files=self._files)


def home_of(offload: Offload | None) -> Home:
    """Return memory for the state of one optimizer. Local."""
    if offload is None:
        return Home()
    return HostHome(offload) if offload.to == "cpu" else DiskHome(offload)


def _carved(
    sizes: Sequence[tuple[int, torch.dtype]], make: Callable[[int], torch.Tensor]
) -> list[torch.Tensor]:
    """Cut bytes into tensors, those of a dtype from one stretch; torch.save takes no others."""
    found: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(dtype for _, dtype in sizes):
        numels = {row: numel for row, (numel, other) in enumerate(sizes) if other == dtype}
        memory = make(sum(numels.values()) * dtype.itemsize).view(dtype)
        found.update(zip(numels, memory.split(list(numels.values())), strict=True))
    return [found[row] for row in range(len(sizes))]


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).zero_()


def _lost(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return what stands for state that is lost."""
    value = math.nan if tensor.is_floating_point() else 0
    return torch.full_like(tensor, value, device=device)
