"""Functions that family patches name: the original's numbers, one graph for every size, undone without a trace."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import transformers
from compiler.tiny import Counting
from packaging.version import Version

import hf_compile
from benchmarks.functions import compiled, inputs_of, plain, scale, shipped, whole
from hf_compile.functions import FunctionPatch, find_targets

NEWEST = Version(transformers.__version__) >= Version("5.24")
pytestmark = pytest.mark.skipif(not NEWEST, reason="the patches are written for the sources of Transformers 5.24")


PATCHES = dict(shipped()) if NEWEST else {}
SIZES = ((1, 7), (3, 5), (1, 1), (2, 300), (5, 2), (4, 64))


def calls(name, sizes=SIZES):
    for batch, length in sizes:
        yield inputs_of(name, PATCHES[name], batch, length)


def graphs_of(name):
    """One; two for frames when the first video has a single one, as the mean then looks like a further frame."""
    return 2 if "VideoProcessor" in name else 1


def check(name, backend, *, graphs=1, sizes=SIZES):
    if name.startswith("nemotron_h_omni"):
        pytest.importorskip("torchvision")
    patch = PATCHES[name]
    original = plain(patch)
    call, region = compiled(patch, backend)
    with torch.no_grad():
        for arguments in calls(name, sizes):
            want = original(*copy.deepcopy(arguments))
            got = call(*copy.deepcopy(arguments))
            pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
            for left, right in pairs:
                is_exact = backend != "inductor" or not right.is_floating_point()
                atol = 0 if is_exact else 1e-5 * scale(right)
                torch.testing.assert_close(left, right, rtol=0, atol=atol, equal_nan=True)
    assert (region.graphs, region.eager_calls) == (graphs, 0), region.eager_reasons or region.made_for


@pytest.mark.parametrize("name", PATCHES)
def test_one_graph_and_the_same_bits(name):
    counting = Counting()
    check(name, counting, graphs=graphs_of(name))
    assert counting.graphs == graphs_of(name)


@pytest.mark.parametrize("name", PATCHES)
def test_one_graph_of_inductor_and_its_numbers(name):
    """The view behind torch's topk asks whether the batch is 1, which is a second graph there."""
    check(name, "inductor", graphs=2 if "TopKLogitsWarper" in name else graphs_of(name))


@pytest.mark.parametrize(
    "name", [name for name in PATCHES if "Gemma" in name or "parakeet" in name or "Stable" in name]
)
def test_empty_where_legal(name):
    check(name, Counting(), sizes=((2, 7), (0, 7), (1, 7), (3, 300)))


# ---- whole objects


def extractors():
    for module, name in (
        ("parakeet", "ParakeetFeatureExtractor"),
        ("cohere_asr", "CohereAsrFeatureExtractor"),
        ("nemotron_asr_streaming", "NemotronAsrStreamingFeatureExtractor"),
        ("whisper", "WhisperFeatureExtractor"),
    ):
        yield pytest.param(name, id=module)


def sound(*lengths):
    generator = np.random.default_rng(0)
    return [generator.standard_normal(length).astype(np.float32) for length in lengths]


@pytest.mark.parametrize("name", extractors())
def test_a_feature_extractor(name):
    cls = getattr(transformers, name)
    eager, extractor = cls(), cls()
    before = dict(vars(extractor))
    backend = Counting()
    assert hf_compile.compile_processor(extractor, compilation_config={"backend": backend}) is extractor
    assert isinstance(extractor, cls)
    assert type(extractor).__name__ == name
    for lengths in ((16000,), (16000, 900, 12345), (700,), (48000,) * 4):
        got, want = (each(sound(*lengths), sampling_rate=16000, return_tensors="pt") for each in (extractor, eager))
        torch.testing.assert_close(dict(got), dict(want), rtol=0, atol=0, equal_nan=True)
    report = hf_compile.status(extractor)
    assert backend.graphs == len(report.functions) >= 2
    assert {(each.state, each.graphs) for each in report.functions} == {("compiled", 1)}
    assert extractor.to_dict() == eager.to_dict()
    for copied in (copy.deepcopy(extractor), pickle.loads(pickle.dumps(extractor))):
        assert type(copied) is cls
    hf_compile.uncompile_processor(extractor)
    assert type(extractor) is cls
    assert vars(extractor) == before or list(vars(extractor)) == list(before)
    assert hf_compile.status(extractor).functions == ()


def test_only_this_object(tmp_path):
    """Another extractor of the family, and one that is read back from a folder, run what Transformers has."""
    extractor, other = transformers.ParakeetFeatureExtractor(), transformers.ParakeetFeatureExtractor()
    source = transformers.ParakeetFeatureExtractor.__call__
    hf_compile.compile_processor(extractor, compilation_config={"backend": "eager"})
    assert transformers.ParakeetFeatureExtractor.__call__ is source
    assert type(other) is transformers.ParakeetFeatureExtractor
    extractor.save_pretrained(tmp_path)
    assert type(transformers.AutoFeatureExtractor.from_pretrained(tmp_path)) is transformers.ParakeetFeatureExtractor


def test_images_and_videos():
    pytest.importorskip("torchvision")
    processor = transformers.NemotronH_Omni_Reasoning_V3ImageProcessor(min_num_patches=4, max_num_patches=64)
    eager = copy.deepcopy(processor)
    hf_compile.compile_processor(processor, compilation_config={"backend": "eager"})
    for sizes in (((40, 60),), ((40, 60), (90, 33), (64, 64)), ((17, 200),)):
        pictures = [whole(255, 3, *size).to(torch.uint8) for size in sizes]
        got, want = (each(pictures, return_tensors="pt") for each in (processor, eager))
        assert torch.equal(got["pixel_values"], want["pixel_values"])
    assert {(each.state, each.graphs) for each in hf_compile.status(processor).functions} == {("compiled", 1)}


def gemma():
    text = {
        **{"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16},
        **{"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16, "max_position_embeddings": 512},
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=16)
    torch.manual_seed(0)
    return transformers.DiffusionGemmaForBlockDiffusion(config).eval()


def generated(model, batch):
    torch.manual_seed(batch)
    ids = whole(200, batch, 7) + 4
    return model.generate(ids, max_new_tokens=16, max_denoising_steps=3, disable_compile=True).sequences


def test_diffusion_draws_the_same_tokens():
    model = gemma()
    want = [generated(model, batch) for batch in (1, 3, 2)]
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": "eager"})
    got = [generated(model, batch) for batch in (1, 3, 2)]
    assert all(map(torch.equal, got, want))
    functions = hf_compile.status(model).functions
    assert {(each.state, each.graphs, each.eager_calls) for each in functions} == {("compiled", 1, 0)}
    assert len(functions) == 3
    hf_compile.uncompile_mm_encoder(model)
    assert type(model) is transformers.DiffusionGemmaForBlockDiffusion
    assert torch.equal(generated(model, 1), want[0])


def test_functions_can_be_left_out():
    model = gemma()
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": "eager", "function_patches": False})
    assert type(model) is transformers.DiffusionGemmaForBlockDiffusion
    assert hf_compile.status(model).functions == ()


def llava():
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**size, image_size=32, patch_size=8),
        text_config=transformers.LlamaConfig(**size, vocab_size=64, num_key_value_heads=2),
        image_token_index=60,
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval()


def test_sampling_draws_the_same_tokens():
    model = llava()
    warpers = {"do_sample": True, "max_new_tokens": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "pad_token_id": 0}

    def sampled(batch):
        torch.manual_seed(batch)
        return model.generate(whole(50, batch, 5), **warpers)

    want = [sampled(batch) for batch in (1, 3)]
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": "eager", "compile_sampling": True})
    got = [sampled(batch) for batch in (1, 3)]
    assert all(map(torch.equal, got, want))
    functions = hf_compile.status(model).functions
    assert {(each.state, each.graphs) for each in functions} == {("compiled", 1)}
    assert sum(each.calls for each in functions) == 4 * 6 * 2
    hf_compile.uncompile_mm_encoder(model)
    assert type(model) is transformers.LlavaForConditionalGeneration


def test_a_warper_of_the_caller_stays_his():
    model = llava()
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": "eager", "compile_sampling": True})
    mine = transformers.TopKLogitsWarper(3)
    model.generate(
        whole(50, 1, 5), max_new_tokens=2, pad_token_id=0, logits_processor=transformers.LogitsProcessorList([mine])
    )
    assert type(mine) is transformers.TopKLogitsWarper


# ---- what this Transformers does not have


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"method": "transformers.models.parakeet.nowhere.Class.method"},
            "has no transformers.models.parakeet.nowhere",
        ),
        ({"statements": ("mel = nothing", "mel = nothing")}, "has no statements from 'mel = nothing'"),
        ({"calls": ("log_mel",)}, "does not call log_mel"),
    ],
    ids=["class", "statements", "call"],
)
def test_absent(options, reason):
    path = "transformers.models.parakeet.feature_extraction_parakeet.ParakeetFeatureExtractor.__call__"
    patch = FunctionPatch(**{"method": path, "reason": "a test", **options})
    undo = hf_compile.register_patch("parakeet", functions=[patch])
    try:
        extractor = transformers.ParakeetFeatureExtractor()
        hf_compile.compile_processor(extractor, compilation_config={"backend": "eager"})
        (absent,) = [each for each in hf_compile.status(extractor).functions if each.state == "absent"]
        assert reason in absent.reason
    finally:
        undo()


def test_a_processor_of_another_family_stays_as_it_is():
    extractor = transformers.ASTFeatureExtractor()
    hf_compile.compile_processor(extractor, compilation_config={"backend": "eager"})
    assert type(extractor) is transformers.ASTFeatureExtractor
    assert hf_compile.status(extractor).note == "no function of it is compiled"


def test_models_are_refused():
    with pytest.raises(hf_compile.UnsupportedModelError, match="compile_mm_encoder compiles models"):
        hf_compile.compile_processor(llava())


def test_targets_are_found_in_parts():
    extractor = transformers.ParakeetFeatureExtractor()
    patches = [patch for name, patch in PATCHES.items() if name.startswith("parakeet")]
    (target,), missing = find_targets(extractor, patches)
    assert (target.path, target.holder, missing) == ("", extractor, [])
