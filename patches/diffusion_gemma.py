"""Soft-cap, acceptance and stopping pass over the vocabulary many times in every denoising step: a graph each.

Transformers 5.24 caps the logits inline in `forward`: those statements become a function. `accept_canvas` counts and
takes the tokens that are accepted, and the stopping criterion measures how sure the model is; both are of objects that
`generate` makes for each call. What draws random numbers (`initialize_canvas`, and so `renoise_canvas`, and the
multinomial of the sampling step) stays eager, or a generator's numbers would be others. Source:
https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/diffusion_gemma/generation_diffusion_gemma.py
"""

from __future__ import annotations

from hf_compile import FunctionPatch

__all__ = ["FUNCTIONS"]

_GENERATION = "transformers.models.diffusion_gemma.generation_diffusion_gemma"
_MODELING = "transformers.models.diffusion_gemma.modeling_diffusion_gemma"

FUNCTIONS = (
    FunctionPatch(
        f"{_MODELING}.DiffusionGemmaForBlockDiffusion.forward",
        statements=(
            "logits = logits / self.final_logit_softcapping",
            "logits = logits * self.final_logit_softcapping",
        ),
        reason="soft-cap of the logits in one pass",
    ),
    FunctionPatch(
        f"{_GENERATION}.DiffusionGemmaGenerationMixin._prepare_sampler",
        reason="the sampler of each call to generate",
        returns=(
            FunctionPatch(
                f"{_GENERATION}.EntropyBoundSampler.accept_canvas",
                reason="which tokens are accepted, by their entropy over the vocabulary",
            ),
        ),
    ),
    FunctionPatch(
        f"{_GENERATION}.DiffusionGemmaGenerationMixin._prepare_diffusion_stopping_criteria",
        reason="the stopping criterion of each call to generate",
        returns=(
            FunctionPatch(
                f"{_GENERATION}.StableAndConfidentStoppingCriteria.__call__",
                statements=("dist = torch.distributions.Categorical(", "confident = torch.mean("),
                reason="mean entropy over the vocabulary in one pass",
            ),
        ),
    ),
)
