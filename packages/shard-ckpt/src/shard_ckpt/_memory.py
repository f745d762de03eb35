"""Tensors' memory as bytes, without copies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

import torch

_PY_BUF_WRITE = 0x200
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_at.restype = ctypes.py_object


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor, writable. Local.

    The view does not keep the tensor alive: hold on to both.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise AssertionError(f"no bytes for a {tensor.device} tensor of stride {tensor.stride()}")
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    view: memoryview = _memory_at(tensor.data_ptr(), nbytes, _PY_BUF_WRITE)
    return view


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether memory holds the tensor's elements in order and as they are. Local."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat_range(tensor: torch.Tensor, *, start: int, stop: int) -> torch.Tensor:
    """Return elements ``[start, stop)`` of the flattened tensor, contiguous. Local.

    **Memory**: a view where ``is_flat``, else a copy of the whole tensor until it is dropped.
    """
    tensor = tensor.detach()
    if not is_flat(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.view(-1)[start:stop]


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a contiguous tensor lies in its storage: offset and length in bytes. Local."""
    size = tensor.element_size()
    return int(tensor.storage_offset()) * size, tensor.numel() * size


def byte_view(tensor: torch.Tensor, *, offset_bytes: int, nbytes: int) -> torch.Tensor:
    """Return bytes of the storage behind ``tensor`` as uint8 ``[nbytes]``, on its device. Local."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset_bytes, (nbytes,))  # type: ignore[call-overload, no-any-return]


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy uint8 ``[n]`` to another, without waiting for it. Local.

    In wide words where memory is aligned for them: torch is a fifth slower with single bytes.
    """
    done = 0
    places = [at for t in (target, source) for at in (t.storage_offset(), t.data_ptr())]
    for word in (torch.int64, torch.int16):
        if not any(at % word.itemsize for at in places):
            done = target.numel() // word.itemsize * word.itemsize
            target[:done].view(word).copy_(source[:done].view(word), non_blocking=True)
            break
    if done < target.numel():
        target[done:].copy_(source[done:], non_blocking=True)


def joined_runs(pieces: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Join contiguous pieces that follow one another in memory. Local.

    Args:
        pieces: contiguous tensors of any dtype and device; drawn one ahead of what is yielded.

    Returns:
        uint8 views ``[n]`` of the pieces' storages: the same bytes in the same order, in as few
        runs as memory allows.
    """
    owner: torch.Tensor | None = None
    storage = offset = nbytes = 0
    for piece in pieces:
        at, length = span_of(piece)
        if length == 0:
            continue
        where = piece.untyped_storage().data_ptr()
        if (
            owner is not None
            and owner.device == piece.device
            and storage == where
            and offset + nbytes == at
        ):
            nbytes += length
            continue
        if owner is not None:
            yield byte_view(owner, offset_bytes=offset, nbytes=nbytes)
        owner, storage, offset, nbytes = piece, where, at, length
    if owner is not None:
        yield byte_view(owner, offset_bytes=offset, nbytes=nbytes)
