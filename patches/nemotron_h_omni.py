"""Images and frames are rescaled, normalised and cut into patches in passes over float32 pixels: a graph each.

The bicubic resize stays what it is (torchvision's for images, torch's for frames): a graph would only call it. Source:
https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/nemotron_h_omni/image_processing_nemotron_h_omni.py
"""

from __future__ import annotations

from hf_compile import FunctionPatch

__all__ = ["FUNCTIONS"]

_IMAGES = "transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni"

FUNCTIONS = (
    FunctionPatch(
        f"{_IMAGES}.NemotronH_Omni_Reasoning_V3ImageProcessor.rescale_and_normalize",
        reason="rescaling and normalisation in one pass",
    ),
    FunctionPatch(
        f"{_IMAGES}.NemotronH_Omni_Reasoning_V3ImageProcessor._preprocess",
        calls=("convert_image_to_patches",),
        reason="pixels of each patch side by side, in one copy",
    ),
    FunctionPatch(
        "transformers.models.nemotron_h_omni.video_processing_nemotron_h_omni."
        "NemotronH_Omni_Reasoning_V3VideoProcessor._preprocess",
        statements=("frames = (frames / 255.0", "frames = (frames / 255.0"),
        reason="rescaling and normalisation of all frames in one pass",
    ),
)
