"""Blocks of numbers as small integers and a scale each."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockCode:
    """How a run of numbers becomes bytes: ``bits`` per number and a float32 scale per block.

    The scale of a block is its largest magnitude divided by the largest code, 127 or 7. With
    4 bits, the block 7.0, -2.4, 0.4, 3.6 becomes the scale 1.0 and the codes 7, -2, 0, 4. A number
    comes back with an error of at most half its scale, but for float32 arithmetic (a relative
    1e-4 of that) and magnitudes below 2**-142, which may come back as zero. A block that holds an
    infinity or a NaN comes back as NaN, all of it.

    Args:
        bits: 8 or 4.
        block: numbers that share a scale; even.

    **Collective**: local.
    """

    bits: int
    block: int

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes of so many numbers: scales, codes, and up to 3 to fill a word."""
        words = -(-self._code_bytes(numel) // 4)
        return 4 * (self._blocks(numel) + words)

    def encode(self, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``numbers`` ``[n]`` into ``out``, uint8 ``[nbytes(n)]``."""
        numel = numbers.numel()
        blocks, code_bytes = self._blocks(numel), self._code_bytes(numel)
        padded = numbers.new_zeros(blocks * self.block, dtype=torch.float32)
        padded[:numel].copy_(numbers)
        rows = padded.view(blocks, self.block)
        low, high = rows.aminmax(dim=1)
        scales = torch.maximum(-low, high).div_(self.top)
        # No integer stands for NaN, which 0 / 0 and inf / inf are: 0 does, the scale tells them.
        codes = rows.div_(scales.unsqueeze(1)).round_().nan_to_num_(0.0)
        codes = codes.clamp_(-self.top, self.top).to(torch.int8).view(-1)
        if self.bits == 4:
            pairs = codes.add_(8).view(torch.uint8).view(-1, 2)  # codes 1 to 15
            codes = pairs[:, 0] | (pairs[:, 1] << 4)
        out[: 4 * blocks].copy_(scales.view(torch.uint8))
        out[4 * blocks : 4 * blocks + code_bytes].copy_(codes.view(torch.uint8)[:code_bytes])
        out[4 * blocks + code_bytes :].zero_()

    def decode(self, coded: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the numbers, float32 ``[numel]``, of ``coded``, uint8 ``[nbytes(numel)]``."""
        blocks, code_bytes = self._blocks(numel), self._code_bytes(numel)
        scales = coded[: 4 * blocks].view(torch.float32)
        codes = coded[4 * blocks : 4 * blocks + code_bytes]
        numbers = torch.zeros(blocks * self.block, device=coded.device)
        if self.bits == 4:
            pairs = numbers.view(-1, 2)[:code_bytes]
            pairs[:, 0].copy_(codes & 15)
            pairs[:, 1].copy_(codes >> 4)
            numbers.sub_(8)
        else:
            numbers[:numel].copy_(codes.view(torch.int8))
        numbers.view(blocks, self.block).mul_(scales.unsqueeze(1))
        return numbers[:numel]

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _code_bytes(self, numel: int) -> int:
        return -(-numel * self.bits // 8)
