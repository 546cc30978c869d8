"""Attention pads to whole blocks only where the length needs it: padded before, one graph serves both.

The attention then always finds whole blocks. The frames it is given in addition are masked, as its own would be, and
are cut off again; numbers are eager's up to rounding. Source: `GraniteSpeech5EncoderAttention.forward` in
https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/granite_speech5/modeling_granite_speech5.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

__all__ = ["apply"]


def apply(encoder: nn.Module) -> Callable[[], None]:
    """Let every attention of the encoder pad without asking whether it must; return the undo."""
    attentions = [module for module in encoder.modules() if type(module).__name__ == "GraniteSpeech5EncoderAttention"]
    originals = [type(attention) for attention in attentions]
    for attention in attentions:
        attention.__class__ = _padding(cast("Any", type(attention)))

    def undo() -> None:
        for attention, original in zip(attentions, originals, strict=True):
            attention.__class__ = original

    return undo


@functools.cache
def _padding(original: Any) -> Any:
    """Return a subclass that calls the original `forward` with whole blocks."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """hidden_states: (batch, frames, width); attention_mask: (batch, frames), True where a frame is sound."""
        batch, frames = hidden_states.shape[:2]
        needed = (frames + self.context_size - 1) // self.context_size
        blocks = torch.sym_max(needed, 2)  # type: ignore[no-untyped-call]  # a single block is a case apart
        missing = blocks * self.context_size - frames
        if attention_mask is None:
            attention_mask = torch.ones(batch, frames, dtype=torch.bool, device=hidden_states.device)
        whole = nn.functional.pad(hidden_states, (0, 0, 0, missing)).view(batch, blocks * self.context_size, -1)
        mask = nn.functional.pad(attention_mask, (0, missing), value=False).view(batch, blocks * self.context_size)
        output, weights = original.forward(self, whole, position_embeddings, mask, **kwargs)
        return output[:, :frames], weights

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})
