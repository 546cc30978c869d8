"""Whether running code is being traced as one of our regions; another compile of the same modules is not ours."""

from __future__ import annotations

import torch

__all__ = ["TRACE", "in_our_graph"]


class _Trace:
    ours = False


TRACE = _Trace()
"""Set by the traced code itself, so that Dynamo sees the value without a guard."""


def in_our_graph() -> bool:
    """Say whether a region is being traced; false in eager, in every thread, and while something else is traced.

    `torch.compiler.is_compiling` will not do: it is true in all threads while one of them compiles.
    """
    return torch.compiler.is_dynamo_compiling() and TRACE.ours
