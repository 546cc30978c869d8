"""Its feature extractor has Parakeet's code but for the normalisation: spectrogram and pre-emphasis are a graph each.

Source: `feature_extraction_nemotron_asr_streaming.py` in
https://github.com/huggingface/transformers/tree/v5.24.0/src/transformers/models/nemotron_asr_streaming
"""

from __future__ import annotations

from .parakeet import mel_functions

__all__ = ["FUNCTIONS"]

FUNCTIONS = mel_functions(
    "transformers.models.nemotron_asr_streaming.feature_extraction_nemotron_asr_streaming."
    "NemotronAsrStreamingFeatureExtractor"
)
