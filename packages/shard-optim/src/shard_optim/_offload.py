"""Where an optimizer's state lives while no step works on it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

_MIN_WINDOW_BYTES = 1 << 14
# What pages of two megabytes fit into, more where a transfer takes long to begin.
_WINDOW_BYTES = {"cpu": 48 << 20}
_WINDOW_BYTES_ELSEWHERE = 96 << 20
_PLACES = ("cpu", "disk")


@dataclass(frozen=True)
class Offload:
    """Where state lives, and how much of it a step has at hand.

    Args:
        to: ``"cpu"``, pinned host memory for parameters on CUDA; or ``"disk"``, files without a
            name, which are gone when the process is, on Linux. Parameters on the CPU have their
            state in host memory anyway: for them ``"cpu"`` changes nothing.
        folder: where the files are made, by default where the system keeps temporary ones. One
            that is kept in memory, as ``/dev/shm`` is, gains nothing.
        window_bytes: what a step has at hand, at least 16384; by default 48 MiB, and 96 MiB for
            parameters on CUDA. A third of it is read, a third worked on and a third written back.
            For parameters on CUDA that is memory of the device, and with ``"disk"`` as much pinned
            host memory and as much of the files' pages; for others it is pages of the files, and
            below 48 MiB up to 24 MiB more, as those come in blocks of 2 MiB. Optimizers that need
            a matrix's state whole have that of three at hand besides, where it is more.

    Raises:
        TypeError: ``window_bytes`` is no integer.
        ValueError: a value is out of range, or the folder is none.
    """

    to: str
    folder: str | os.PathLike[str] | None = None
    window_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.to not in _PLACES:
            raise ValueError(f"offload: expected one of {_PLACES} or None, got {self.to!r}")
        if not isinstance(self.window_bytes, int | None):
            raise TypeError(
                f"offload: expected window_bytes to be an integer, got {self.window_bytes!r}"
            )
        if self.window_bytes is not None and self.window_bytes < _MIN_WINDOW_BYTES:
            raise ValueError(
                f"offload: expected window_bytes >= {_MIN_WINDOW_BYTES}, got {self.window_bytes}"
            )
        if self.folder is not None and self.to != "disk":
            raise ValueError(f"offload: a folder is for 'disk', got {self.folder!r} with 'cpu'")
        if self.to == "disk" and not self.path.is_dir():
            raise ValueError(f"offload: expected a folder, got {str(self.path)!r}; make it first")

    @property
    def path(self) -> Path:
        """Where files are made."""
        return Path(tempfile.gettempdir() if self.folder is None else self.folder)

    def window_on(self, device: torch.device) -> int:
        """Return the bytes of the window on a device. Local."""
        if self.window_bytes is not None:
            return self.window_bytes
        return _WINDOW_BYTES.get(device.type, _WINDOW_BYTES_ELSEWHERE)

    @classmethod
    def of(cls, asked: str | Offload | None) -> Offload | None:
        """Return what an optimizer was asked for, a place by name or in full. Local."""
        return asked if asked is None or isinstance(asked, cls) else cls(str(asked))
