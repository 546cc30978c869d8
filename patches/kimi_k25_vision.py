"""Position embeddings are resampled by 16 taps a patch, which take some sixty small operations: one graph.

Earlier releases resampled image by image with a bicubic `interpolate`. Transformers 5.24 computes taps and weights for
all patches at once, after it has found the place of each patch from the grids: what follows that is compiled, the
reading of the grids stays eager. Source: `get_vision_interpolation_indices_and_weights`, called by
`Kimi_K25VisionPositionEmbeddings.forward`, in
https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/vision_utils.py
"""

from __future__ import annotations

from hf_compile import FunctionPatch

__all__ = ["FUNCTIONS"]

FUNCTIONS = (
    FunctionPatch(
        "transformers.models.kimi_k25.modeling_kimi_k25.Kimi_K25VisionPositionEmbeddings.forward",
        calls=("get_vision_interpolation_indices_and_weights",),
        statements=("blocks_w = widths // merge", "weights = (h_weights[:, :, None]"),
        reason="taps and weights of bicubic resampling, patch by patch in one pass",
        warm={"within": (4096,), "widths": (4096,), "heights": (4096,)},
    ),
)
