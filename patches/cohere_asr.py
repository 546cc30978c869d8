"""Its feature extractor has Parakeet's code: spectrogram, pre-emphasis and normalisation are a graph each.

Source:
https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/cohere_asr/feature_extraction_cohere_asr.py
"""

from __future__ import annotations

from .parakeet import mel_functions, normalisation

__all__ = ["FUNCTIONS"]

_CLASS = "transformers.models.cohere_asr.feature_extraction_cohere_asr.CohereAsrFeatureExtractor"

FUNCTIONS = (*mel_functions(_CLASS), normalisation(_CLASS))
