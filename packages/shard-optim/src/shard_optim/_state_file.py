"""State in files without a name: mapped for whoever looks, read and written by a step."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

import torch

_Buffer = ctypes.Array[ctypes.c_char]


class StateFiles:
    """Files of one folder, each of which holds what was asked for at once.

    A file has no name, so nothing is left behind by a process that is killed. It is there as long
    as a tensor of its memory is.

    Args:
        folder: where to make files.

    **Memory**: what somebody has looked at since the last ``forget``, in pages of the files, which
    the system may take back at any time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, tuple[weakref.ref[mmap.mmap], int, int]] = {}  # by address
        self._places: list[int] = []

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Make a file of zeros and return its memory, uint8 ``[nbytes]``. Local.

        Raises:
            OSError: the disk has no room for it; nothing was made.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        try:
            with tempfile.TemporaryFile(buffering=0, dir=self._folder) as file:
                fd = os.dup(file.fileno())
            try:
                os.posix_fallocate(fd, 0, nbytes)
                memory = mmap.mmap(fd, nbytes)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            raise OSError(
                error.errno,
                f"offload: expected room for a file of {nbytes} bytes of state in "
                f"{str(self._folder)!r}, got {error.strerror!r}; nothing was changed: free space "
                f"or give another folder",
            ) from error
        weakref.finalize(memory, os.close, fd)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._files[tensor.data_ptr()] = weakref.ref(memory), nbytes, fd
        self._places = sorted(self._files)
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the files. Local."""
        return self._find(tensor.data_ptr(), tensor.nbytes) is not None

    def read(self, host: torch.Tensor, target: torch.Tensor) -> None:
        """Read what is in a file behind ``host`` into other memory of the same bytes. Local.

        Raises:
            RuntimeError: the system did not give it all.
        """
        self._transfer(os.preadv, host, target, "read")

    def write(self, host: torch.Tensor, source: torch.Tensor) -> None:
        """Write other memory into the file behind ``host``. Local.

        Raises:
            RuntimeError: the system did not take it all.
        """
        self._transfer(os.pwritev, host, source, "written")

    def forget(self) -> None:
        """Take the files' pages out of this process's memory; they stay in the files. Local."""
        for reference, _, _ in self._files.values():
            memory = reference()
            if memory is not None:
                memory.madvise(mmap.MADV_DONTNEED)

    def _find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """The file with these bytes, and where they begin in it."""
        index = bisect_right(self._places, address) - 1
        if index < 0:
            return None
        start = self._places[index]
        reference, length, fd = self._files[start]
        if reference() is None:
            del self._files[start]
            self._places = sorted(self._files)
            return self._find(address, nbytes)
        return (fd, address - start) if address + nbytes <= start + length else None

    def _transfer(
        self,
        move: Callable[[int, list[_Buffer], int], int],
        host: torch.Tensor,
        other: torch.Tensor,
        verb: str,
    ) -> None:
        found = self._find(host.data_ptr(), host.nbytes)
        assert found is not None, "a plan lists tensors of these files alone"
        fd, offset = found
        done, failure = 0, None
        while done < host.nbytes:
            rest = (ctypes.c_char * (host.nbytes - done)).from_address(other.data_ptr() + done)
            try:
                moved = move(fd, [rest], offset + done)
            except OSError as error:
                moved, failure = 0, error
            if not moved:
                raise RuntimeError(
                    f"offload: {done} of {host.nbytes} bytes of state were {verb} in "
                    f"{str(self._folder)!r} ({failure}); the step is half done: load a checkpoint"
                ) from failure
            done += moved
