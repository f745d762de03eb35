"""Host memory through which other devices' tensors pass, a window at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shard_ckpt._memory import bytes_of

WINDOW_BYTES = 16 << 20


class Windows:
    """Two host buffers used in turn, so that a copy and file I/O can overlap.

    Args:
        device: whose tensors pass through. For CUDA the buffers are pinned and copies run on a
            stream of their own (out) or on the current stream (in).
        window_bytes: size of each buffer; a multiple of 16.

    **Memory**: two windows of host memory while the object lives.
    """

    def __init__(self, device: torch.device, *, window_bytes: int = WINDOW_BYTES) -> None:
        self.window_bytes = window_bytes
        self._device = device
        self._cuda = device.type == "cuda"
        self._buffers = [
            torch.empty(window_bytes, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)
        ]
        self._busy: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._stream = torch.cuda.Stream(device) if self._cuda else None

    def read_out(self, source: torch.Tensor) -> Iterator[memoryview]:
        """Yield a tensor's bytes in order.

        Args:
            source: uint8 ``[n]``, contiguous, on the device. Its values are those that the device's
                current stream has computed.

        Returns:
            Views of the buffers. Each is overwritten once the next but one is asked for: be done
            with a view before asking for the next.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        waiting: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        for low in range(0, source.numel(), self.window_bytes):
            part = source[low : low + self.window_bytes]
            buffer = self._buffers[self._turn][: part.numel()]
            self._turn ^= 1
            copied = self._copy_out(buffer, part)
            if waiting is not None:
                yield _when_done(*waiting)
            waiting = (buffer, copied)
        if waiting is not None:
            yield _when_done(*waiting)

    def take(self) -> torch.Tensor:
        """Return the buffer whose turn it is, once the device has taken what it held. Local."""
        event = self._busy[self._turn]
        if event is not None:
            event.synchronize()
            self._busy[self._turn] = None
        return self._buffers[self._turn]

    def hand_over(self) -> None:
        """Say that copies out of the buffer last taken are launched. Local."""
        if self._cuda:
            self._busy[self._turn] = torch.cuda.current_stream(self._device).record_event()
        self._turn ^= 1

    def drain(self) -> None:
        """Return when the device has taken everything. Local."""
        for event in self._busy:
            if event is not None:
                event.synchronize()
        self._busy = [None, None]

    def _copy_out(self, buffer: torch.Tensor, part: torch.Tensor) -> torch.cuda.Event | None:
        if self._stream is None:
            buffer.copy_(part)
            return None
        with torch.cuda.stream(self._stream):
            buffer.copy_(part, non_blocking=True)
            event: torch.cuda.Event = self._stream.record_event()
            return event


def _when_done(buffer: torch.Tensor, copied: torch.cuda.Event | None) -> memoryview:
    if copied is not None:
        copied.synchronize()
    return bytes_of(buffer)
