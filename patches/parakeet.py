"""Log mel spectrograms, pre-emphasis and normalisation are a dozen passes over the sound: a graph each.

Transformers 5.24 computes all of them inline: those statements become functions. The Fourier transform and the product
with the mel filters stay calls of torch's libraries between the graphs: a graph would only call them too, and one with
the product asks whether the batch is 1. Source:
https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/parakeet/feature_extraction_parakeet.py
"""

from __future__ import annotations

from hf_compile import FunctionPatch

__all__ = ["FUNCTIONS", "mel_functions", "normalisation"]


def mel_functions(extractor: str) -> tuple[FunctionPatch, ...]:
    """Return what feature extractors with Parakeet's code have in common; `extractor` is the path of the class."""
    return (
        FunctionPatch(
            f"{extractor}.__call__",
            statements=("timemask = ", "input_features = input_features.masked_fill("),
            reason="pre-emphasis and the mask of the padding in one pass",
        ),
        FunctionPatch(
            f"{extractor}._torch_extract_fbank_features",
            statements=("magnitudes = torch.view_as_real(", "magnitudes = magnitudes.pow("),
            reason="power of the Fourier transform in one pass, before the mel filter bank",
        ),
        FunctionPatch(
            f"{extractor}._torch_extract_fbank_features",
            statements=("mel_spec = torch.log(", "mel_spec = torch.log("),
            reason="logarithm of the mel filter bank in one pass",
        ),
    )


def normalisation(extractor: str) -> FunctionPatch:
    """Return the normalisation of each utterance."""
    return FunctionPatch(
        f"{extractor}.__call__",
        statements=("mask = attention_mask.unsqueeze(", "input_features *= mask"),
        reason="mean and deviation of each utterance without its padding, and the normalisation",
    )


_CLASS = "transformers.models.parakeet.feature_extraction_parakeet.ParakeetFeatureExtractor"

FUNCTIONS = (*mel_functions(_CLASS), normalisation(_CLASS))
