"""Attention is causal when nothing is padded and full when something is: one mask says both, so one graph serves both.

The attention modules are marked causal, and Transformers drops a padding mask that hides nothing. What is None then
becomes the causal mask it stands for; numbers are eager's. Source: `Phi4MultimodalVisionAttention.is_causal` in
https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/phi4_multimodal/modeling_phi4_multimodal.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["apply"]


def apply(encoder: nn.Module) -> Callable[[], None]:
    """Give every layer of the vision encoder a causal mask where it would get none; return the undo."""
    layers = [module for module in encoder.modules() if type(module).__name__ == "Phi4MultimodalVisionEncoderLayer"]
    handles = [layer.register_forward_pre_hook(_with_mask, with_kwargs=True) for layer in layers]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _with_mask(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a layer: hidden states (batch, patches, width) and the mask (batch, 1, patches, patches)."""
    given = dict(zip(("hidden_states", "attention_mask"), args, strict=False)) | kwargs
    hidden_states = given["hidden_states"]
    if given.get("attention_mask") is None:
        batch, length = hidden_states.shape[:2]
        causal = torch.ones(length, length, dtype=torch.bool, device=hidden_states.device).tril()
        given["attention_mask"] = causal.expand(batch, 1, length, length)
    return (given.pop("hidden_states"),), given
