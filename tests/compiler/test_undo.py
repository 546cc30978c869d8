"""Undo brings everything back, copies are eager models, and a second model is never touched."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref

import pytest
import torch

import hf_compile
from hf_compile import attention
from hf_compile.attention import ATTENTION_NAME

from .tiny import EAGER, clip, images, patches, qwen, regions, siglip, snapshot

MODELS = {"clip": (clip, images(1)), "siglip": (siglip, images(1)), "qwen": (qwen, patches([[1, 8, 8]]))}
both = pytest.mark.parametrize(("make", "inputs"), MODELS.values(), ids=MODELS)


def global_attention():
    from transformers import AttentionInterface, AttentionMaskInterface

    gc.collect()  # other tests' models hold registrations until they are collected
    return dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)


@both
@pytest.mark.smoke
def test_undo_restores_everything(make, inputs):
    model = make()
    functions = global_attention()
    with torch.no_grad():
        want = model(**inputs)
        before, signature = snapshot(model), inspect.signature(model.forward)
        hf_compile.compile_mm_encoder(model, compilation_config=EAGER)
        assert snapshot(model)[0] != before[0]
        assert inspect.signature(model.forward) == signature
        model(**inputs)
        assert {name: (region.graphs, region.reason) for name, region in regions(model).items()} == dict.fromkeys(
            regions(model), (1, "")
        )
        hf_compile.uncompile_mm_encoder(model)
        assert snapshot(model) == before
        assert torch.equal(model(**inputs).last_hidden_state, want.last_hidden_state)
    assert global_attention() == functions


@both
def test_a_failure_halfway_restores_everything(make, inputs, monkeypatch):
    import hf_compile.compiler.attaching as attaching

    model, calls, bind = make(), [], attaching.bind

    def fail_late(region, module):
        calls.append(module)
        if len(calls) == 4:
            raise MemoryError("out of memory")
        return bind(region, module)

    before = snapshot(model)
    monkeypatch.setattr(attaching, "bind", fail_late)
    with pytest.raises(MemoryError):
        hf_compile.compile_mm_encoder(model, compilation_config=EAGER)
    assert len(calls) == 4
    assert snapshot(model) == before
    assert hf_compile.status(model).encoders == ()


@both
def test_copies_are_eager_models(make, inputs):
    model = make()
    with torch.no_grad():
        want = model(**inputs).last_hidden_state
        hf_compile.compile_mm_encoder(model, compilation_config=EAGER)
        model(**inputs)
        saved = io.BytesIO()
        pickle.dump(model, saved)
        saved.seek(0)
        for other in (copy.deepcopy(model), pickle.load(saved)):
            assert "not compiled" in str(hf_compile.status(other))
            assert all(vars(module).get("_compiled_call_impl") is None for module in other.modules())
            configs = [vars(module)["config"] for module in other.modules() if "config" in vars(module)]
            assert {type(config) for config in configs} == {type(model.config)}
            assert ATTENTION_NAME not in {config._attn_implementation for config in configs}
            assert torch.equal(other(**inputs).last_hidden_state, want)
        assert regions(model)  # the original still is
        hf_compile.compile_mm_encoder(copy.deepcopy(model), compilation_config=EAGER)


def test_two_models_of_one_config_object():
    first = qwen()
    second = qwen(first.config)
    assert first.config is second.config
    inputs = patches([[1, 8, 8], [1, 12, 10]])
    with torch.no_grad():
        want, before = second(**inputs).pooler_output, snapshot(second)
        hf_compile.compile_mm_encoder(first, compilation_config=EAGER)
        first(**inputs)
        assert snapshot(second) == before
        assert second.config._attn_implementation == "sdpa"
        assert torch.equal(second(**inputs).pooler_output, want)
        assert second.blocks[0].attn.config is second.config


def test_saved_while_compiled(tmp_path):
    model = siglip()
    hf_compile.compile_mm_encoder(model, compilation_config=EAGER)
    with torch.no_grad():
        model(**images(2))
    model.save_pretrained(tmp_path)
    hf_compile.uncompile_mm_encoder(model)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert list(again.state_dict()) == list(model.state_dict())


def test_compiling_twice_adds_nothing_and_another_config_plans_anew():
    model = clip()
    before = snapshot(model)
    hf_compile.compile_mm_encoder(model, compilation_config=EAGER)
    slots = [vars(module).get("_compiled_call_impl") for module in model.modules()]
    hf_compile.compile_mm_encoder(model, compilation_config=EAGER)
    assert [vars(module).get("_compiled_call_impl") for module in model.modules()] == slots
    hf_compile.compile_mm_encoder(model, compilation_config={**EAGER, "granularity": "encoder"})
    assert list(regions(model)) == ["CLIPVisionModel"]
    with pytest.raises(hf_compile.ConfigurationError):
        hf_compile.compile_mm_encoder(model, compilation_config={**EAGER, "dynamic_arg_dims": {"nothing": 0}})
    assert list(regions(model)) == ["CLIPVisionModel"]
    hf_compile.uncompile_mm_encoder(model)
    hf_compile.uncompile_mm_encoder(model)
    assert snapshot(model) == before


def test_a_slot_taken_by_module_compile_is_restored():
    model = clip()
    model.encoder.layers[0].compile(backend="eager")
    model.compile(backend="eager")
    slots = model._compiled_call_impl, model.encoder.layers[0]._compiled_call_impl
    hf_compile.compile_mm_encoder(model, compilation_config=EAGER)
    with torch.no_grad():
        model(**images(1))
    assert regions(model)["CLIPEncoderLayer"].graphs == 1
    hf_compile.uncompile_mm_encoder(model)
    assert (model._compiled_call_impl, model.encoder.layers[0]._compiled_call_impl) == slots


def test_a_wrapped_model_is_refused():
    wrapped = torch.compile(clip(), backend="eager")
    with pytest.raises(hf_compile.UnsupportedModelError, match=r"unwrap it first: pass model\._orig_mod"):
        hf_compile.compile_mm_encoder(wrapped)
    for other in (None, "model", {"model": 1}, torch.nn.Linear):
        with pytest.raises(hf_compile.UnsupportedModelError, match="neither a torch module nor a pipeline"):
            hf_compile.compile_mm_encoder(other)


def test_a_compiled_model_can_be_freed():
    gc.collect()  # the models of other tests
    model = clip()
    hf_compile.compile_mm_encoder(model, compilation_config=EAGER)
    with torch.no_grad():
        model(**images(1))
    gone, registered = weakref.ref(model.encoder.layers[0]), len(attention._holders)
    del model
    gc.collect()
    assert gone() is None
    assert len(attention._holders) == registered - 1


def test_part_of_a_compiled_model_is_refused():
    model = clip()
    hf_compile.compile_mm_encoder(model, compilation_config=EAGER)
    before = snapshot(model)
    with pytest.raises(hf_compile.UnsupportedModelError, match="is compiled already, as part of another model"):
        hf_compile.compile_mm_encoder(model.encoder, encoder="", compilation_config=EAGER)
    assert snapshot(model) == before
