"""Compile an encoder, and functions of a processor, on the Acme accelerator.

pip install ./examples/acme_platform && python examples/acme_platform/run.py
"""

import acme.runtime
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel, ParakeetFeatureExtractor

import hf_compile

SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}


def main() -> None:
    """Print what was compiled, and that numbers are eager's."""
    print(hf_compile.current_platform("cpu"))
    model = CLIPVisionModel(CLIPVisionConfig(num_hidden_layers=4, **SIZE)).eval()
    images = [torch.rand(batch, 3, 32, 32) for batch in (1, 3, 2)]
    sound = [torch.rand(samples) for samples in (16000, 5000)]
    extractor = ParakeetFeatureExtractor()
    with torch.no_grad():
        want = [model(each).last_hidden_state for each in images]
        features = extractor(sound, sampling_rate=16000).input_features
        hf_compile.compile_mm_encoder(model)
        hf_compile.compile_processor(extractor)
        got = [model(each).last_hidden_state for each in images]
    assert all(map(torch.equal, got, want))
    assert torch.equal(extractor(sound, sampling_rate=16000).input_features, features)
    print(f"the accelerator's backend compiled {len(acme.runtime.graphs)} graphs: {'; '.join(acme.runtime.graphs)}")
    print(hf_compile.status(model))
    print(hf_compile.status(extractor))


if __name__ == "__main__":
    main()
