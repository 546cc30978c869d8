"""What lies between an encoder and the text model is compiled too, when asked for."""

from __future__ import annotations

import pytest
import torch
import transformers

import hf_compile
from hf_compile import CompilationConfig, find_encoders
from hf_compile.encoders import find_projectors

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SMALL, "hidden_size": 16, "vocab_size": 64, "num_key_value_heads": 2}
IMAGE = {**SMALL, "image_size": 32, "patch_size": 8}


def image(batch):
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def tiles(batch):
    return {"pixel_values": torch.randn(batch, 1, 3, 32, 32)}


def sound(batch):
    return {"input_features": torch.randn(batch, 8, 40)}


# model class, config, inputs of get_*_features, graphs of the regions of each projector by the last part of its path
MODELS = {
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "vision_config": {"model_type": "clip_vision_model", **IMAGE},
            "text_config": {"model_type": "llama", **TEXT},
        },
        image,
        {"multi_modal_projector": {"LlavaMultiModalProjector": 1}},
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        {"vision_config": IMAGE, "text_config": {"model_type": "llama", **TEXT}, "scale_factor": 2, "pad_token_id": 0},
        tiles,
        {"connector": {"Idefics3Connector": 1}},
    ),
    "blip-2": (
        "Blip2ForConditionalGeneration",
        {
            "vision_config": IMAGE,
            "qformer_config": {**SMALL, "encoder_hidden_size": 32, "vocab_size": 64},
            "text_config": {
                "model_type": "opt",
                "hidden_size": 16,
                "word_embed_proj_dim": 16,
                "ffn_dim": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vocab_size": 64,
            },
            "num_query_tokens": 4,
        },
        image,
        {"qformer": {"Blip2QFormerLayer": [1, 1]}},  # every second layer has cross attention: two classes of regions
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"vision_config": IMAGE, "text_config": {**TEXT, "head_dim": 8}, "mm_tokens_per_image": 4},
        image,
        {"multi_modal_projector": {"Gemma3MultiModalProjector": 1}},
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {
            "vision_config": {**SMALL, "image_size": [32, 32], "patch_size": [8, 8]},
            "text_config": {"model_type": "llama", **TEXT},
        },
        image,
        {"multi_modal_projector": {"InternVLMultiModalProjector": 1}},
    ),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        {
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "num_mel_bins": 8,
                "max_source_positions": 20,
            },
            "text_config": {"model_type": "qwen2", **TEXT},
        },
        sound,
        {"multi_modal_projector": {"Qwen2AudioMultiModalProjector": 1}},
    ),
}
# The images and the queries of a Q-Former's cross attention have one batch. Nothing says so, and at batch 1 either
# might broadcast, which is a second graph; a shape id says it.
BATCH = {name: {0: "batch"} for name in ("hidden_states", "encoder_hidden_states", "encoder_attention_mask")}
OPTIONS = {"blip-2": {"encoders": {"qformer": {"dynamic_arg_dims": BATCH}}}}
SMOKE = ("llava", "blip-2")
models = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.smoke] * (name in SMOKE)) for name in MODELS]
)


@pytest.fixture
def model(name):
    class_name, options, _, _ = MODELS[name]
    cls = getattr(transformers, class_name)
    torch.manual_seed(0)
    return cls(cls.config_class(**options)).eval()


@torch.no_grad()
def features(name, model, inputs):
    """Return what the text model is given for these images or sounds."""
    if name == "qwen2_audio":  # it has no method for it
        (encoder,) = find_encoders(model)
        (projector,) = find_projectors(model, [encoder])
        return projector.module(encoder.module(inputs["input_features"]).last_hidden_state)
    found = model.get_image_features(**inputs)
    found = getattr(found, "pooler_output", found)
    return torch.cat([*found]) if isinstance(found, (tuple, list)) else found


def graphs(report):
    found: dict[str, list[int]] = {}
    for region in report.regions:
        assert (region.state, region.eager_calls) == ("compiled", 0), region.reason
        found.setdefault(region.class_name, []).append(region.graphs)
    return {name: counts[0] if len(counts) == 1 else counts for name, counts in found.items()}


@models
def test_one_graph_and_the_same_numbers(name, model):
    _, _, inputs, expected = MODELS[name]
    calls = [inputs(batch) for batch in (1, 3, 2)]
    want = [features(name, model, call) for call in calls]
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    encoders = [info.path for info in find_encoders(model)]

    options = {"backend": "eager", "include_projector": True, **OPTIONS.get(name, {})}
    hf_compile.compile_mm_encoder(model, compilation_config=options)
    for call, wanted in zip(calls, want, strict=True):
        assert torch.allclose(features(name, model, call), wanted, atol=1e-5)
    status = hf_compile.status(model)
    projectors = status.encoders[len(encoders) :]
    assert [report.path for report in status.encoders[: len(encoders)]] == encoders
    assert {report.path.rpartition(".")[2]: graphs(report) for report in projectors} == expected
    for report in projectors:
        assert report.found_by.startswith(f"it is a projector between {encoders[0]} and the text model ")
        assert report.modalities == status.encoders[0].modalities

    hf_compile.uncompile_mm_encoder(model)
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
    assert all(torch.equal(features(name, model, call), wanted) for call, wanted in zip(calls, want, strict=True))


@models
def test_left_alone_unless_asked_for(name, model):
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": "eager"})
    assert [report.path for report in hf_compile.status(model).encoders] == [i.path for i in find_encoders(model)]


@pytest.mark.parametrize("name", ["llava"])
def test_options_of_a_projector(name, model):
    config = {
        "backend": "eager",
        "include_projector": True,
        "dynamic_arg_dims": {"hidden_states": 0},  # of the encoder's layers; the projector has no such argument
        "encoders": {"model.multi_modal_projector": {"dynamic_arg_dims": {"image_features": [0, 1]}}},
    }
    hf_compile.compile_mm_encoder(model, compilation_config=CompilationConfig.from_dict(config))
    features(name, model, image(1))
    (region,) = hf_compile.status(model).encoders[1].regions
    assert region.dynamic_arg_dims == {"image_features": [0, 1]}


def test_a_merger_inside_the_encoder_is_no_projector():
    with torch.device("meta"):
        model = transformers.Qwen2VLForConditionalGeneration(
            transformers.Qwen2VLConfig(text_config={"num_hidden_layers": 1})
        )
    assert find_projectors(model, find_encoders(model)) == []


@pytest.mark.parametrize("name", ["CLIPModel", "BridgeTowerModel", "GroundingDinoModel", "WhisperModel"])
def test_no_projector_where_features_do_not_enter_a_text_model(name):
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model = cls(cls.config_class())
    assert find_projectors(model, find_encoders(model)) == []
