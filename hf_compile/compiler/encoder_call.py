"""What stands around a call of a whole encoder whose blocks are compiled.

The arguments of the call are at hand while it runs, for a region that has to know what the batch is. And Transformers
keeps the padding mask that it was given: it drops one that hides nothing, so that a region would get None on one call
and a tensor on the next, which is two graphs. Only the thread that runs such an encoder sees the change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..precompute import BatchProbe

__all__ = ["EncoderCall", "keep_masks"]


class _Running(threading.local):
    keeps_masks = 0


_running = _Running()
_lock = threading.Lock()
_holders: set[object] = set()


class EncoderCall(threading.local):
    """The call of an encoder that runs in this thread.

    Args:
        keeps_masks: Transformers keeps padding masks that hide nothing.
        probe: of the encoder.
    """

    def __init__(self, keeps_masks: bool, probe: BatchProbe) -> None:
        self.keeps_masks, self.probe = keeps_masks, probe
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def bind(self, encoder: nn.Module) -> Callable[..., Any]:
        """Return the function for the encoder's compiled slot."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or torch._C._get_tracing_state():
                return encoder._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            before, self.given = self.given, (args, kwargs)
            _running.keeps_masks += self.keeps_masks
            try:
                return encoder._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                self.given = before
                _running.keeps_masks -= self.keeps_masks

        return call

    def with_twice_the_batch(self, path: str, arguments: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return the inputs, as shapes, that a module would get in this call with twice the batch, if that shows."""
        return self.probe.run(*self.given, path, arguments) if self.given is not None else {}


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
        if _running.keeps_masks and (padding_mask is not None or is_local):
            return False
        return original(padding_mask, *args, **kwargs)

    may_ignore.hf_compile_original = original  # type: ignore[attr-defined]
    return may_ignore
