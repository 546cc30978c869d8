"""The main job for every family: a checkpoint folder, its processor, real photographs or speech, batch 1 first."""

from __future__ import annotations

import json

import checkpoints
import pytest
import torch
import transformers

import hf_compile

# Graphs per region class, counted with backend "eager". One is the aim; where it is more, a comment says why.
GRAPHS = {
    "qwen2_vl": {"PatchEmbed": 1, "Qwen2VLVisionBlock": 1, "PatchMerger": 1},
    "qwen2_5_vl": {"Qwen2_5_VisionPatchEmbed": 1, "Qwen2_5_VLVisionBlock": 1, "Qwen2_5_VLPatchMerger": 1},
    # the mergers of the deepstack layers have another width: a region of their own
    "qwen3_vl": {"Qwen3VLVisionPatchEmbed": 1, "Qwen3VLVisionBlock": 1, "Qwen3VLVisionPatchMerger": [1, 1]},
    "llava": {"CLIPVisionEmbeddings": 1, "CLIPEncoderLayer": 1},
    "llava_onevision": {"SiglipVisionEmbeddings": 1, "SiglipEncoderLayer": 1},
    "gemma3": {"SiglipVisionEmbeddings": 1, "SiglipEncoderLayer": 1},
    "internvl": {"InternVLVisionEmbeddings": 1, "InternVLVisionLayer": 1},
    "mistral3": {"PixtralAttentionLayer": 1},
    "idefics3": {"Idefics3VisionEmbeddings": 1, "Idefics3EncoderLayer": 1},
    "smolvlm": {"SmolVLMVisionEmbeddings": 1, "SmolVLMEncoderLayer": 1},
    # plain and gated layers run other code: two regions
    "mllama": {"MllamaVisionEncoderLayer": [1, 1]},
    "llama4": {"Llama4UnfoldConvolution": 1, "Llama4VisionEncoderLayer": 1, "Llama4VisionPixelShuffleMLP": 1},
    "whisper": {"WhisperEncoderLayer": 1},
    "qwen2_audio": {"Qwen2AudioEncoderLayer": 1},
}
VIDEO = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SMOKE = ("llava", "qwen2_5_vl", "whisper")
families = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.smoke] * (name in SMOKE)) for name in checkpoints.FAMILIES]
)


def test_every_family_is_here():
    assert list(GRAPHS) == list(checkpoints.FAMILIES)


@pytest.fixture
def family(name, checkpoint):
    """Return the folder and the requests of a family, or skip with the reason."""
    reason = checkpoints.FAMILIES[name].unavailable()
    if reason:
        pytest.skip(reason)
    folder = checkpoint(name)
    requests = checkpoints.requests(name, folder)
    if name in VIDEO and not checkpoints.FAMILIES[name].unavailable(video=True):
        requests += checkpoints.requests(name, folder, video=True)
    return folder, requests


def answer(name, model, request):
    """Return the greedy tokens, or the features where the family's own generate is broken."""
    if checkpoints.FAMILIES[name].generates:
        return model.generate(**request, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        features = model.get_image_features(request["pixel_values"])
    return features if isinstance(features, torch.Tensor) else features.last_hidden_state


def counts(model):
    found: dict[str, list[int]] = {}
    for encoder in hf_compile.status(model).encoders:
        for region in encoder.regions:
            found.setdefault(region.class_name, []).append(region.graphs)
    return {name: graphs[0] if len(graphs) == 1 else graphs for name, graphs in found.items()}


@families
def test_same_answers_and_exact_graphs(name, family):
    folder, requests = family
    assert len(requests) >= 6
    eager = hf_compile.from_pretrained(folder)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    assert type(eager) is getattr(transformers, architecture)
    want = [answer(name, eager, request) for request in requests]

    config = hf_compile.CompilationConfig(backend="eager")
    model = hf_compile.from_pretrained(folder, compile_mm_encoder=True, compilation_config=config)
    assert type(model) is type(eager)
    got = [answer(name, model, requests[0])]
    torch.compiler.set_stance("fail_on_recompile")
    try:
        got += [answer(name, model, request) for request in requests[1:]]
    finally:
        torch.compiler.set_stance("default")
    for left, right in zip(got, want, strict=True):
        assert torch.equal(left, right) if not left.is_floating_point() else torch.allclose(left, right, atol=1e-5)

    assert counts(model) == GRAPHS[name]
    for encoder in hf_compile.status(model).encoders:
        for region in encoder.regions:
            assert (region.state, region.eager_calls, region.reason) == ("compiled", 0, "")
            passed = [verdict for verdict in region.inputs if verdict.verdict != "pending"]
            assert passed
            assert all(verdict.reason for verdict in region.inputs)
            assert all(verdict.reason.startswith("no tensor") for verdict in region.inputs if verdict not in passed)

    hf_compile.uncompile_mm_encoder(model)
    assert torch.equal(answer(name, model, requests[-1]), want[-1])
    assert all(vars(module).get("_compiled_call_impl") is None for module in model.modules())


# With granularity "encoder": graphs of the one region, or a part of the reason why it runs eager.
WHOLE = {
    "qwen2_vl": 1,
    "qwen2_5_vl": 1,
    "qwen3_vl": 1,
    "llava": "hidden states were asked for",
    "llava_onevision": "hidden states were asked for",
    "gemma3": 1,
    "internvl": "hidden states were asked for",
    "mistral3": "hidden states were asked for",
    "idefics3": 1,
    "smolvlm": 1,
    "mllama": 2,  # one image a prompt first: a size of 1 beyond dim 0 is taken to broadcast, so three is another
    "llama4": 1,
    "whisper": 1,
    "qwen2_audio": 1,
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_encoder_is_one_graph_or_says_why_not(name, family):
    folder, requests = family
    eager = hf_compile.from_pretrained(folder)
    config = {"backend": "eager", "granularity": "encoder"}
    model = hf_compile.from_pretrained(folder, compile_mm_encoder=True, compilation_config=config)
    for request in requests:
        got, want = answer(name, model, request), answer(name, eager, request)
        assert torch.equal(got, want) if not got.is_floating_point() else torch.allclose(got, want, atol=1e-5)
    (region,) = hf_compile.status(model).encoders[0].regions
    if isinstance(WHOLE[name], int):
        assert (region.state, region.graphs, region.eager_calls) == ("compiled", WHOLE[name], 0)
    else:
        assert (region.state, region.calls) == ("eager", 0)
        assert WHOLE[name] in region.reason


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llava"])
def test_llava_with_all_hidden_states(family):
    folder, requests = family
    eager = hf_compile.from_pretrained(folder)
    model = hf_compile.from_pretrained(folder, compile_mm_encoder=True, compilation_config={"backend": "eager"})
    with torch.no_grad():
        for request in requests:
            want = eager(**request, output_hidden_states=True)
            got = model(**request, output_hidden_states=True)
            assert torch.allclose(got.logits, want.logits, atol=1e-5)
            assert len(got.hidden_states) == len(want.hidden_states)
            states = [
                each.model.vision_tower(request["pixel_values"], output_hidden_states=True).hidden_states
                for each in (model, eager)
            ]
            assert len(states[0]) == len(states[1]) == eager.config.vision_config.num_hidden_layers + 1
            assert all(torch.allclose(left, right, atol=1e-5) for left, right in zip(*states, strict=True))
    assert counts(model)["CLIPEncoderLayer"] == 1


@pytest.mark.smoke
def test_real_whisper_transcribes_as_ever(tmp_path):
    try:
        folder = checkpoints.whisper_tiny_en(tmp_path)
        clips = [clip for clip in checkpoints.speech() if len(clip) <= 30 * 16_000]
    except checkpoints.RealDataUnavailable as error:
        pytest.skip(str(error))
    processor = checkpoints.processor_for(folder)
    model = hf_compile.from_pretrained(folder, compile_mm_encoder=True)  # Inductor

    def transcribe():
        texts = []
        for start, end in ((0, 1), (1, 4), (4, len(clips))):  # batch 1 first
            features = processor(clips[start:end], sampling_rate=16_000, return_tensors="pt").input_features
            texts += processor.batch_decode(model.generate(features), skip_special_tokens=True)
        return texts

    got = transcribe()
    assert counts(model) == {"WhisperEncoderLayer": 1}
    hf_compile.uncompile_mm_encoder(model)
    assert got == transcribe()
    assert len(got) == len(clips)
    assert len(set(got)) > 4
    assert sum(map(len, got)) > 100
