"""Eigenvectors of symmetric matrices, whatever is in them."""

from __future__ import annotations

import torch


def eigen(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eigenvalues in ascending order, and eigenvectors as columns. Local.

    An owner that raised would leave the other ranks waiting for its results. So a matrix with an
    infinity or NaN gives NaN, as other arithmetic does, and one that float32 does not settle is
    tried in float64.

    Args:
        matrix: ``[n, n]``, symmetric.

    Returns:
        ``[n]`` and ``[n, n]``, of the matrix's dtype.

    Raises:
        torch.linalg.LinAlgError: float64 does not settle it either.
    """
    if not matrix.isfinite().all():
        return torch.full_like(matrix[0], torch.nan), torch.full_like(matrix, torch.nan)
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = torch.linalg.eigh(matrix.double())
    return values.to(matrix.dtype), vectors.to(matrix.dtype)
