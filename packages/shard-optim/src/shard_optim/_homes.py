"""Memory that state lives in, and its way to where a step works on it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import torch

from shard_flat import large_empty
from shard_optim._offload import Offload
from shard_optim._stage import DeviceStage, MappedStage, Stage
from shard_optim._state_file import StateFiles

if TYPE_CHECKING:
    from shard_optim._plan import Lane


class Home:
    """State in the memory of its parameters' device, where a step finds it."""

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

    def stage(self, device: torch.device) -> Stage | None:
        """Return what state of parameters on a device passes through, if anything. Local."""
        return None

    def forget(self) -> None:
        """Let go of what was only looked at. Local."""

    def each(self, lanes: Sequence[Lane]) -> Generator[Lane, None, None]:
        """Yield lanes one by one, each with its state at hand until the next one. Local.

        Raises:
            RuntimeError: state could not be read or written; the step is half done.
        """
        staged: dict[Stage, list[Lane]] = {}
        for lane in lanes:
            if lane.window is None:
                yield lane
            else:
                staged.setdefault(lane.window.stage, []).append(lane)
        for stage, found in staged.items():
            yield from stage.each(found)


class HostHome(Home):
    """State of parameters on CUDA in pinned host memory; of others where they are.

    **Memory**: the state; torch's allocator rounds what is pinned at once up to a power of two.
    """

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._stages: dict[torch.device, Stage] = {}

    def zeros(
        self, sizes: Sequence[tuple[int, torch.dtype]], device: torch.device
    ) -> list[torch.Tensor]:
        """Make zeros for state of parameters. Local."""
        if device.type != "cuda":
            return super().zeros(sizes, device)
        nbytes = sum(numel * dtype.itemsize for numel, dtype in sizes)
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return _carve(memory.zero_(), sizes)

    def holds(self, tensor: torch.Tensor, device: torch.device) -> bool:
        """Whether state of a parameter on a device is where it belongs. Local."""
        if device.type != "cuda":
            return super().holds(tensor, device)
        return not tensor.nbytes or tensor.is_pinned()

    def stage(self, device: torch.device) -> Stage | None:
        """Return what state of parameters on a device passes through, if anything. Local."""
        if device.type != "cuda":
            return None
        if device not in self._stages:
            self._stages[device] = DeviceStage(device, self._offload.window_on(device))
        return self._stages[device]


class DiskHome(Home):
    """State in files that have no name."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._files = StateFiles(offload.path)
        self._stages: dict[torch.device, Stage] = {}

    def zeros(
        self, sizes: Sequence[tuple[int, torch.dtype]], device: torch.device
    ) -> list[torch.Tensor]:
        """Make zeros for state of parameters, in one file. Local."""
        nbytes = sum(numel * dtype.itemsize for numel, dtype in sizes)
        return _carve(self._files.zeros(nbytes), sizes)

    def holds(self, tensor: torch.Tensor, device: torch.device) -> bool:
        """Whether state of a parameter on a device is where it belongs. Local."""
        return not tensor.nbytes or (tensor.device.type == "cpu" and self._files.holds(tensor))

    def stage(self, device: torch.device) -> Stage | None:
        """Return what state of parameters on a device passes through. Local."""
        if device not in self._stages:
            nbytes = self._offload.window_on(device)
            self._stages[device] = (
                MappedStage(self._files, nbytes)
                if device.type == "cpu"
                else DeviceStage(device, nbytes, files=self._files)
            )
        return self._stages[device]

    def forget(self) -> None:
        """Let go of pages that somebody looked at. Local."""
        self._files.forget()


def home_of(offload: Offload | None) -> Home:
    """Return memory for the state of one optimizer. Local."""
    if offload is None:
        return Home()
    return HostHome(offload) if offload.to == "cpu" else DiskHome(offload)


def _carve(memory: torch.Tensor, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
    """Cut bytes into tensors without gaps, the widest dtypes first, so that all are aligned."""
    found: dict[int, torch.Tensor] = {}
    at = 0
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i][1].itemsize):
        numel, dtype = sizes[index]
        nbytes = numel * dtype.itemsize
        found[index] = memory[at : at + nbytes].view(dtype)
        at += nbytes
    return [found[index] for index in range(len(sizes))]
