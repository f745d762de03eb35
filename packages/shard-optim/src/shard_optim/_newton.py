"""The nearest matrix whose singular values are all about 1."""

from __future__ import annotations

import torch


def orthogonalized(
    matrix: torch.Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Bring all singular values near 1 by Newton-Schulz iterations, in bfloat16.

    One step maps each singular value ``s`` to ``a s + b s**3 + c s**5``.

    Args:
        matrix: ``[rows, columns]``, bfloat16.
        coefficients: a, b and c.
        steps: number of iterations.
        eps: the smallest norm that is divided by.

    Returns:
        bfloat16 ``[rows, columns]``.

    **Collective**: local. **Memory**: a few times the matrix, for the call.

    **Source**: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t().contiguous() if tall else matrix
    x = x / torch.linalg.vector_norm(x, dtype=torch.float32).clamp_min(eps)
    x = x.to(torch.bfloat16)
    for _ in range(steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t().contiguous() if tall else x


def cost_of(rows: int, columns: int) -> float:
    """Return the multiplications of one iteration. Local."""
    short, long = min(rows, columns), max(rows, columns)
    return float(2 * short * short * long + short**3)
