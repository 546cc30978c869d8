"""Family patches: found by model type, applied first, undone, and refused when they are not whole."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from transformers import SiglipVisionConfig, SiglipVisionModel

import hf_compile
from hf_compile.patching import find_patches


@pytest.fixture
def encoder():
    size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    return SiglipVisionModel(SiglipVisionConfig(num_hidden_layers=2, **size)).eval()


def scale_layer_norm(encoder):
    norm = getattr(encoder, "vision_model", encoder).post_layernorm  # Transformers 5.0 has one module more
    norm.eps, before = 0.5, norm.eps

    def undo():
        norm.eps = before

    return undo


@pytest.mark.smoke
def test_a_patch_is_applied_reported_and_undone(encoder):
    image = torch.rand(2, 3, 32, 32)
    unregister = hf_compile.register_patch("siglip_vision_model", scale_layer_norm, reason="a test of the door")
    try:
        with torch.no_grad():
            want = encoder(image).last_hidden_state
            hf_compile.compile_mm_encoder(encoder, compilation_config={"backend": "eager"})
            patched = encoder(image).last_hidden_state
            patches = hf_compile.status(encoder).to_dict()["encoders"][0]["patches"]
            hf_compile.uncompile_mm_encoder(encoder)
            assert torch.equal(encoder(image).last_hidden_state, want)
    finally:
        unregister()
    assert patches == ["siglip_vision_model: a test of the door"]
    assert not torch.equal(patched, want)
    assert find_patches("siglip_vision_model") == ()


def test_a_failing_patch_leaves_the_model_untouched(encoder):
    def fail(_):
        raise ValueError("no such layer")

    undo_first = hf_compile.register_patch("siglip_vision_model", scale_layer_norm, reason="comes first")
    undo_second = hf_compile.register_patch("siglip_vision_model", fail, reason="fails")
    before = [dict(vars(module)) for module in encoder.modules()]
    try:
        with pytest.raises(ValueError, match="no such layer"):
            hf_compile.compile_mm_encoder(encoder)
    finally:
        undo_first()
        undo_second()
    assert [dict(vars(module)) for module in encoder.modules()] == before


def test_a_module_of_the_folder_is_found_by_its_name(monkeypatch):
    module = types.ModuleType("hf_compile_patches.my_family", "Makes the mask contiguous.\n\nMore.")
    module.apply = lambda encoder: lambda: None
    module.__spec__ = types.SimpleNamespace(name=module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (patch,) = find_patches("my_family", "another")
    assert (patch.model_type, patch.reason) == ("my_family", "Makes the mask contiguous.")
    del module.apply
    with pytest.raises(hf_compile.ConfigurationError, match=r"hf_compile_patches\.my_family: a family patch needs"):
        find_patches("my_family")
