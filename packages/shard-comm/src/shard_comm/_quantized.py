"""A comm that sends small integers in place of floating-point numbers."""

from __future__ import annotations

import torch

from shard_comm._codes import BlockCode
from shard_comm._comm import Comm, Work
from shard_comm._slices import Slices
from shard_comm._tree import tree_fold
from shard_comm._wrapper import Wrapper

_CODED = (torch.float32, torch.bfloat16, torch.float16)


class Quantized(Wrapper):
    """Gather as 8-bit and reduce as 8- or 4-bit blocks of integers; the rest goes to ``inner``.

    * ``all_gather`` sends one byte per element and a float32 scale per block: half of bfloat16. All
      ranks get the same bits, this rank's own slice of ``out`` included; where ``inp`` is that
      slice, it is overwritten.
    * ``reduce_scatter`` of sums and means sends every slice in ``bits`` bits, one ``all_to_all``,
      and adds what arrives in float32 (``sum_dtype``, if that is wider), in the fixed tree.
    * Gathered elements are off by at most ``absmax / 254``, where ``absmax`` is the largest
      magnitude in the element's block, and by one rounding to the tensor's dtype. Reduced ones are
      off by the sum over ranks of ``absmax / 254``, or ``absmax / 14`` with 4 bits, and by the
      roundings of a float32 sum. Both within a relative 1e-4 and magnitudes of 2**-142.
    * A block with an infinity or a NaN in it arrives as NaN: an overflow is not lost.
    * ``shared`` gives None: what all ranks map is not coded.
    * Results depend on the data alone. ``max``, ``min``, ``all_reduce``, ``broadcast``,
      ``all_to_all`` and objects are exact, and so are dtypes other than float32, bfloat16 and
      float16, and everything on one rank.

    Args:
        inner: the comm that moves bytes.
        bits: of each contribution to a reduction, 8 or 4.
        block: elements that share a scale, even; smaller is more exact and costs ``4 / block``
            bytes per element.

    Raises:
        ValueError: ``bits`` or ``block`` is neither.

    **Memory**: while it runs, the bytes sent and received; float32 copies of one slice per
    doubling of ranks.
    **Source**: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861;
    Wang et al., ZeRO++, arXiv:2306.10209.
    """

    def __init__(self, inner: Comm, *, bits: int = 8, block: int = 256) -> None:
        if bits not in (8, 4):
            raise ValueError(f"expected bits to be 8 or 4, got {bits}")
        if block < 2 or block % 2:
            raise ValueError(f"expected an even block of at least 2 elements, got {block}")
        super().__init__(inner)
        self.bits = bits
        self.block = block

    def split(self, color: int) -> Comm:
        """Return the inner comm's part, quantized likewise."""
        self._check_open("split")
        return Quantized(self.inner.split(color), bits=self.bits, block=self.block)

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        if not self._codes(inp):
            return self.inner._all_gather(out, inp, timeout_s)
        code, numel = BlockCode(8, self.block), inp.numel()
        mine = self.inner.empty(code.nbytes(numel), torch.uint8)
        code.encode(inp.view(-1), mine)
        everyone = self.inner.empty(self.size * mine.numel(), torch.uint8)
        work = self.inner._all_gather(everyone, mine, timeout_s)

        def finish() -> None:
            work.wait()
            slices = out.view(self.size, numel)
            for rank, coded in enumerate(everyone.view(self.size, -1)):
                slices[rank].copy_(code.decode(coded, numel))

        return Work(finish)

    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work:
        if op != "sum" or not self._codes(inp):
            return self.inner._reduce_scatter(out, inp, op, timeout_s)
        return self._sum_scatter(out, inp, 1, timeout_s)

    def _sum_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        if not self._codes(inp):
            return self.inner._sum_scatter(out, inp, divisor, timeout_s)
        code, numel = BlockCode(self.bits, self.block), out.numel()
        sent = self.inner.empty(self.size * code.nbytes(numel), torch.uint8).view(self.size, -1)
        for numbers, coded in zip(inp.view(self.size, numel), sent, strict=True):
            code.encode(numbers, coded)
        received = torch.empty_like(sent)
        work = self.inner._all_to_all(received.view(-1), sent.view(-1), timeout_s)
        sum_dtype = torch.promote_types(out.dtype, torch.float32)

        def contribution(rank: int) -> torch.Tensor:
            numbers = code.decode(received[rank], numel).to(sum_dtype)
            return numbers.div_(divisor) if divisor != 1 else numbers

        def finish() -> None:
            work.wait()
            out.view(-1).copy_(tree_fold(self.size, contribution))

        return Work(finish)

    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> Work:
        return self.inner._all_reduce(flat, op, timeout_s)

    def _sum_all(
        self, out: torch.Tensor, flat: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        return self.inner._sum_all(out, flat, divisor, timeout_s)

    def _broadcast(self, flat: torch.Tensor, src: int, timeout_s: float | None) -> Work:
        return self.inner._broadcast(flat, src, timeout_s)

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        return self.inner._all_to_all(out, inp, timeout_s)

    def _all_to_all_by(
        self, slices: Slices, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work:
        return self.inner._all_to_all_by(slices, out, inp, timeout_s)

    def _codes(self, tensor: torch.Tensor) -> bool:
        return self.size > 1 and tensor.dtype in _CODED and tensor.numel() > 0
