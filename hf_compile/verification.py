"""Compare outputs: how far two results are apart, and how far they may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["largest_difference", "tolerance"]

# Relative to the largest value: some roundings of each dtype, as they add up through one region.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def largest_difference(got: Any, want: Any) -> float:
    """Return the largest difference of two outputs, relative to the largest value of the tensor it lies in.

    Args:
        got, want: tensors, or containers and model outputs of tensors, of equal structure. NaN where only one has it,
            a missing member or another shape count as infinitely far.
    """
    largest = 0.0
    for left, right in _pairs(got, want):
        if left is None or right is None or left.shape != right.shape or left.dtype != right.dtype:
            return float("inf")
        if not left.numel():
            continue
        if not left.is_floating_point():
            if not torch.equal(left, right):
                return float("inf")
            continue
        a, b = left.detach().double(), right.detach().double()
        same = (a == b) | (a.isnan() & b.isnan())
        distance = (a - b).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))
        scale = float(b.nan_to_num(0.0, 0.0, 0.0).abs().max()) or 1.0
        largest = max(largest, float(distance.max()) / scale)
    return largest


def tolerance(output: Any) -> float:
    """Return the relative difference that rounding explains, for the coarsest dtype in an output."""
    dtypes = {tensor.dtype for tensor, _ in _pairs(output, output) if tensor is not None}
    return max((_TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def _pairs(got: Any, want: Any) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
    if isinstance(want, torch.Tensor) or isinstance(got, torch.Tensor):
        both = isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor)
        yield (got, want) if both else (None, None)
    elif isinstance(want, Mapping):
        if not isinstance(got, Mapping) or list(got) != list(want):
            yield None, None
            return
        for key in want:
            yield from _pairs(got[key], want[key])
    elif isinstance(want, (tuple, list)):
        if not isinstance(got, (tuple, list)) or len(got) != len(want):
            yield None, None
            return
        for left, right in zip(got, want, strict=True):
            yield from _pairs(left, right)
