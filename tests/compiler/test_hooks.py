"""No hook is ever skipped: around a region they run in order, inside one they are honoured or send the call eager."""

from __future__ import annotations

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module

import hf_compile

from .tiny import EAGER, clip, images, regions


@pytest.fixture
def model():
    return clip()


def compiled(model):
    hf_compile.compile_mm_encoder(model, compilation_config=EAGER)
    return model


def layer(model):
    return model.encoder.layers[1]


def run(model, batch=2, **options):
    with torch.no_grad():
        return model(**images(batch), **options)


HOOKS = {
    "forward_pre": lambda m, seen: m.register_forward_pre_hook(
        lambda _, args: seen.append("pre") or (args[0] + 1, *args[1:])
    ),
    "forward_pre_kwargs": lambda m, seen: m.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append("pre") or ((args[0] * 2, *args[1:]), kwargs), with_kwargs=True
    ),
    "forward": lambda m, seen: m.register_forward_hook(lambda _, args, output: seen.append("post") or output * 3),
    "forward_kwargs": lambda m, seen: m.register_forward_hook(
        lambda _, args, kwargs, output: seen.append("post") or output - 1, with_kwargs=True
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_hooks_on_a_region_run_around_its_graph(model, hook, when):
    plain, seen, wanted = run(model), [], []
    if when == "before":  # the first call, which compiles
        hook(layer(model), seen)
        want = run(model)
        wanted, seen[:] = list(seen), []
        compiled(model)
    else:
        compiled(model)
        run(model)
        hook(layer(model), seen)
        hf_compile.uncompile_mm_encoder(model)
        want = run(model)
        wanted, seen[:] = list(seen), []
        compiled(model)
        run(model, 1)
        seen.clear()
    with hf_compile.compilation_counter.expect(num_eager_calls=0):
        got = run(model)
    assert seen == wanted != []
    assert not torch.equal(got.last_hidden_state, plain.last_hidden_state)
    torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state)
    assert regions(model)["CLIPEncoderLayer"].graphs == 1


def test_order_of_several_hooks(model):
    order = []
    for name in "ab":
        layer(model).register_forward_pre_hook(lambda *_, name=name: order.append(f"pre {name}"))
        layer(model).register_forward_hook(lambda *_, name=name: order.append(f"post {name}"))
    layer(model).register_forward_pre_hook(lambda *_: order.append("first"), prepend=True)
    run(model)
    want, order[:] = list(order), []
    compiled(model)
    run(model)
    assert order == want == ["first", "pre a", "pre b", "post a", "post b"]


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_inside_a_region_sends_the_call_eager(model, hook):
    compiled(model)
    run(model)
    seen = []
    handle = (
        hook(layer(model).self_attn.q_proj, seen)
        if hook is not HOOKS["forward_pre_kwargs"]
        else hook(layer(model).mlp.fc1, seen)
    )
    got = run(model)
    assert seen
    region = regions(model)["CLIPEncoderLayer"]
    assert (region.state, region.eager_calls, region.graphs) == ("compiled", 1, 1)
    assert "a hook on Linear inside CLIPEncoderLayer" in region.reason
    hf_compile.uncompile_mm_encoder(model)
    torch.testing.assert_close(got.last_hidden_state, run(model).last_hidden_state)
    compiled(model)
    handle.remove()
    with hf_compile.compilation_counter.expect(num_eager_calls=0):
        run(model)


def test_backward_and_global_hooks_send_the_call_eager(model):
    compiled(model)
    seen = []
    handle = layer(model).register_full_backward_hook(lambda *_: seen.append("backward"))
    model(**images(1)).last_hidden_state.sum().backward()
    assert seen == ["backward"]
    assert "CLIPEncoderLayer has a backward hook" in regions(model)["CLIPEncoderLayer"].reason
    handle.remove()
    everywhere = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        run(model)
    finally:
        everywhere.remove()
    assert seen.count("CLIPEncoderLayer") == 3
    assert seen.count("CLIPMLP") == 3
    assert "global module hook" in regions(model)["CLIPEncoderLayer"].reason


@pytest.mark.smoke
def test_hidden_states_are_recorded_around_the_graphs(model):
    """LLaVA asks for them on every call."""
    want = {batch: run(model, batch, output_hidden_states=True) for batch in (1, 3, 2)}
    model = compiled(clip())
    for batch in (1, 3, 2):
        got = run(model, batch, output_hidden_states=True)
        assert len(got.hidden_states) == len(want[batch].hidden_states) == 4
        for left, right in zip(got.hidden_states, want[batch].hidden_states, strict=True):
            torch.testing.assert_close(left, right)
        assert run(model, batch).hidden_states is None
    region = regions(model)["CLIPEncoderLayer"]
    assert (region.graphs, region.eager_calls) == (1, 0)


@pytest.mark.smoke
def test_attentions_run_eager_and_are_returned(model):
    model.set_attn_implementation("eager")
    want = run(model, output_attentions=True)
    compiled(model)
    run(model)
    got = run(model, output_attentions=True)
    assert len(got.attentions) == len(want.attentions) == 3
    for left, right in zip(got.attentions, want.attentions, strict=True):
        assert torch.equal(left, right)
    assert "attentions" in regions(model)["CLIPEncoderLayer"].reason
    calls = regions(model)["CLIPEncoderLayer"].calls
    run(model, output_hidden_states=True)
    run(model)
    assert regions(model)["CLIPEncoderLayer"].calls == calls + 6


def test_recording_hooks_are_the_models_own_again_after_undo(model):
    compiled(model)
    run(model, output_hidden_states=True)
    hf_compile.uncompile_mm_encoder(model)
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert {type(hook).__name__ for hook in hooks} <= {"function"}


class Doubling(ModelHook):
    def pre_forward(self, module, *args, **kwargs):
        return (args[0] * 2, *args[1:]), kwargs

    def post_forward(self, module, output):
        return output + 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_hook_on_a_region_runs_around_its_graph(model, when):
    plain = run(model)
    if when == "after":
        compiled(model)
        run(model, 1)
    add_hook_to_module(layer(model), Doubling())
    got = run(compiled(model))
    region = regions(model)["CLIPEncoderLayer"]
    assert (region.graphs, region.eager_calls) == (1, 0)
    hf_compile.uncompile_mm_encoder(model)
    torch.testing.assert_close(got.last_hidden_state, run(model).last_hidden_state)
    assert not torch.equal(got.last_hidden_state, plain.last_hidden_state)
    remove_hook_from_module(layer(model))
    assert torch.equal(run(model).last_hidden_state, plain.last_hidden_state)


def test_offload_hook_inside_a_region_sends_the_call_eager(model):
    want = run(model)
    linear = layer(model).mlp.fc1
    weights = {name: value.detach().clone() for name, value in linear.state_dict().items()}
    compiled(model)
    add_hook_to_module(linear, AlignDevicesHook(execution_device="cpu", offload=True, weights_map=weights))
    assert linear.weight.device.type == "meta"
    got = run(model)
    assert "an accelerate hook on Linear inside CLIPEncoderLayer" in regions(model)["CLIPEncoderLayer"].reason
    torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state)


def test_a_replaced_forward_is_called(model):
    compiled(model)
    run(model)
    target = layer(model)
    forward = target.forward
    target.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2
    got = run(model)
    assert "the forward of this CLIPEncoderLayer was replaced" in regions(model)["CLIPEncoderLayer"].reason
    hf_compile.uncompile_mm_encoder(model)
    torch.testing.assert_close(got.last_hidden_state, run(model).last_hidden_state)
    del target.forward
    compiled(model)
    inner = target.mlp
    inner.forward = lambda hidden: hidden
    got = run(model)
    assert "the forward of CLIPMLP inside CLIPEncoderLayer was replaced" in regions(model)["CLIPEncoderLayer"].reason
    hf_compile.uncompile_mm_encoder(model)
    torch.testing.assert_close(got.last_hidden_state, run(model).last_hidden_state)


def test_a_module_replaced_after_compile_is_used(model):
    """An adapter put in later: guards see it, and its hooks are seen too."""
    compiled(model)
    run(model)
    fresh = [torch.nn.Sequential(each.mlp.fc1, torch.nn.ReLU()) for each in model.encoder.layers]
    for each, new in zip(model.encoder.layers, fresh, strict=True):
        each.mlp.fc1 = new
    got = run(model)
    seen = []
    fresh[0][1].register_forward_hook(lambda *_: seen.append(1))
    run(model)
    assert seen == [1]
    hf_compile.uncompile_mm_encoder(model)
    torch.testing.assert_close(got.last_hidden_state, run(model).last_hidden_state)
