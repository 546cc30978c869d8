"""While a compiled encoder runs, Transformers keeps the padding mask that it was given.

Transformers drops a mask that hides nothing, so that a region gets None on one call and a tensor on the next: two
graphs. Kept, it is a tensor whenever the caller gave one. Only the thread that runs such an encoder sees the change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["keep_masks", "keeping"]


class _Running(threading.local):
    depth = 0


_running = _Running()
_lock = threading.Lock()
_holders: set[object] = set()


def keeping(encoder: nn.Module) -> Callable[..., Any]:
    """Return the function for the encoder's compiled slot: its call, with every mask kept."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or torch._C._get_tracing_state():
            return encoder._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        _running.depth += 1
        try:
            return encoder._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            _running.depth -= 1

    return call


def keep_masks() -> Callable[[], None]:
    """Make Transformers ask us before it drops a mask; return the undo, good for one call. Counted."""
    from transformers import masking_utils

    holder = object()
    with _lock:
        if not _holders:
            masking_utils._ignore_bidirectional_mask_sdpa = _asking(masking_utils._ignore_bidirectional_mask_sdpa)
        _holders.add(holder)

    def undo() -> None:
        with _lock:
            _holders.discard(holder)
            ours = masking_utils._ignore_bidirectional_mask_sdpa
            if not _holders and hasattr(ours, "hf_compile_original"):
                masking_utils._ignore_bidirectional_mask_sdpa = ours.hf_compile_original

    return undo


def _asking(original: Callable[..., bool]) -> Callable[..., bool]:
    def may_ignore(padding_mask: Any = None, *args: Any, **kwargs: Any) -> bool:
        is_local = any(value is not None for value in (*args[1:], kwargs.get("local_attention_size")))
        if _running.depth and (padding_mask is not None or is_local):
            return False
        return original(padding_mask, *args, **kwargs)

    may_ignore.hf_compile_original = original  # type: ignore[attr-defined]
    return may_ignore
