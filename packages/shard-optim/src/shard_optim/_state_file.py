"""State in files without a name, whose pages come into memory and go."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from bisect import bisect_right
from pathlib import Path

import torch

BLOCK_BYTES = 2 << 20
"""How much the system may bring where one page of it is asked for."""

_POPULATE_WRITE = 23  # of madvise, which Python does not name yet


class StateLost(RuntimeError):
    """State of a step could not be read or written."""


class StateFiles:
    """Files of one folder, each of which holds what was asked for at once.

    A file has no name, so nothing is left behind by a process that is killed. It is there as long
    as a tensor of its memory is.

    Args:
        folder: where to make files.

    **Memory**: pages that were brought or looked at, until they are dropped. They belong to the
    files, so the system may take them back at any time, too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, tuple[weakref.ref[mmap.mmap], int]] = {}  # by address: length
        self._places: list[int] = []
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._brings = True

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Make a file of zeros and return its memory, uint8 ``[nbytes]``. Local.

        Raises:
            OSError: the disk has no room for it; nothing was made.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        try:
            with tempfile.TemporaryFile(buffering=0, dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                memory = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"offload: expected room for a file of {nbytes} bytes of state in "
                f"{str(self._folder)!r}, got {error.strerror!r}; nothing was changed: free space "
                f"or give another folder",
            ) from error
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._files = {at: known for at, known in self._files.items() if known[0]() is not None}
        self._files[tensor.data_ptr()] = weakref.ref(memory), nbytes
        self._places = sorted(self._files)
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the files. Local."""
        address = tensor.data_ptr()
        for start in reversed(self._places[: bisect_right(self._places, address)]):
            reference, length = self._files[start]
            if reference() is not None:
                return address + tensor.nbytes <= start + length
        return False

    def bring(self, tensor: torch.Tensor) -> None:
        """Have the pages of a tensor in this process's memory, ready to be written. Local.

        Raises:
            StateLost: the disk did not give them; touching them would end the process.
        """
        if self._brings and self._advise(tensor, _POPULATE_WRITE):
            number = ctypes.get_errno()
            if number == errno.EINVAL:  # before Linux 5.14: pages come when they are touched
                self._brings = False
                return
            raise StateLost(
                f"offload: {tensor.nbytes} bytes of state in {str(self._folder)!r} cannot be read "
                f"or written ({os.strerror(number)}); the step is half done: load a checkpoint"
            )

    def drop(self, tensor: torch.Tensor) -> None:
        """Take the pages of a tensor out of this process's memory; the file has them. Local."""
        self._advise(tensor, mmap.MADV_DONTNEED)

    def forget(self) -> None:
        """Take all pages out of this process's memory; the files have them. Local."""
        for reference, _ in self._files.values():
            memory = reference()
            if memory is not None:
                memory.madvise(mmap.MADV_DONTNEED)

    def _advise(self, tensor: torch.Tensor, advice: int) -> int:
        assert self.holds(tensor), "a plan lists tensors of these files alone"
        # Not through mmap.madvise, which lets no other thread run meanwhile.
        begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = tensor.data_ptr() + tensor.nbytes - begin
        return int(self._madvise(begin, length, advice))
