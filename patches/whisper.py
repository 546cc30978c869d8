"""Log mel spectrograms by Whisper's feature extractor take several passes over the sound: two graphs.

Many audio models use this extractor. The Fourier transform and the product with the filters stay calls of torch's
libraries between the two graphs. Source:
https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/whisper/feature_extraction_whisper.py
"""

from __future__ import annotations

from hf_compile import FunctionPatch

__all__ = ["FUNCTIONS"]

_METHOD = (
    "transformers.models.whisper.feature_extraction_whisper.WhisperFeatureExtractor._torch_extract_fbank_features"
)

FUNCTIONS = (
    FunctionPatch(
        _METHOD,
        statements=("magnitudes = (stft[", "magnitudes = (stft["),
        reason="power of the Fourier transform, before the mel filters",
    ),
    FunctionPatch(
        _METHOD,
        statements=("log_spec = torch.clamp(", "log_spec = (log_spec + 4.0)"),
        reason="logarithm, floor and scale of the spectrogram in two passes",
    ),
)
