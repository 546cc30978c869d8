"""What a hostile or unusual module does must come out as in eager, or be said."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_compile

from .tiny import EAGER, clip, images, regions


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.linear(hidden)


class Tower(nn.Module):
    def __init__(self, layer=Layer, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.eval()

    def forward(self, pixel_values: torch.Tensor, *args, **kwargs):
        for layer in self.layers:
            pixel_values = layer(pixel_values, *args, **kwargs)
        return pixel_values


def compiled(model, **options):
    return hf_compile.compile_mm_encoder(model, compilation_config={**EAGER, **options})


def x():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def equals_eager(model, call):
    """Compare the compiled model with itself undone."""
    got = call(model)
    hf_compile.uncompile_mm_encoder(model)
    torch.testing.assert_close(got, call(model))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_into_an_input_that_is_a_view(mode):
    class Writes(Layer):
        def forward(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            out.add_(hidden)
            return self.linear(hidden)

    with mode():
        buffer = torch.zeros(3, 2, 5, 8)
        compiled(Tower(Writes, 1))(x(), buffer[1])
        assert torch.equal(buffer[1], x())
        assert not buffer[0].any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_into_an_input_that_comes_back(mode):
    class InPlace(Layer):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden += self.linear(hidden)
            return hidden

    class Skip(Tower):
        def forward(self, pixel_values: torch.Tensor):
            stem = pixel_values.transpose(1, 2)
            return super().forward(stem) + stem

    with mode():
        equals_eager(compiled(Skip(InPlace)), lambda model: model(torch.ones(2, 8, 5)))


@pytest.mark.parametrize("options", [{}, {"compile_ranges": [(1, 9)]}, {"verify": True}])
def test_writes_into_a_dict(options):
    class Fills(Layer):
        def forward(self, hidden: torch.Tensor, seen: dict) -> torch.Tensor:
            hidden = super().forward(hidden)
            seen[id(self)] = hidden
            return hidden

    seen = {}
    with torch.no_grad():
        compiled(Tower(Fills), **options)(x(), seen)
    assert len(seen) == 3


def test_verify_leaves_no_trace():
    class Counts(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, hidden: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            cache.add_(1.0)
            self.calls.add_(1.0)
            return self.linear(hidden) * cache.mean() * self.calls

    model, cache = compiled(Tower(Counts, 1), verify=True), torch.zeros(2)
    with torch.no_grad():
        model(x(), cache)
    assert cache.tolist() == [1.0, 1.0]
    assert float(model.layers[0].calls) == 1.0
    assert (regions(model)["Counts"].state, regions(model)["Counts"].eager_calls) == ("compiled", 0)


def test_a_submodule_replaced_by_its_like_is_watched():
    model = compiled(clip())
    with torch.no_grad():
        for _ in range(3):
            model(**images(2))
        for layer in model.encoder.layers:
            layer.mlp = copy.deepcopy(layer.mlp)
        model(**images(2))
        for layer in model.encoder.layers:
            layer.mlp.register_forward_hook(lambda module, args, output: output * 0)
        equals_eager(model, lambda model: model(**images(2)).last_hidden_state)


def test_replaced_hook_dicts_and_hooks_put_by_hooks():
    model, seen = compiled(clip()), []
    with torch.no_grad():
        model(**images(2))
        for module in model.modules():
            module._forward_hooks = OrderedDict()
        for layer in model.encoder.layers:
            layer.register_forward_hook(lambda *_: seen.append("own"))
            layer.mlp.register_forward_hook(lambda *_: seen.append("inner"))
        model(**images(2))
        assert seen == ["inner", "own"] * 3
        model, fired, handles = clip(), [], []
        layer = model.encoder.layers[2]
        layer.register_forward_pre_hook(
            lambda module, _: handles.append(module.mlp.register_forward_hook(lambda *_: fired.append(1)))
        )
        layer.register_forward_hook(lambda *_: handles.pop().remove())
        compiled(model)
        model(**images(2))
        model(**images(2))
    assert fired == [1, 1]


def test_keywords_that_the_code_reads_are_not_dropped():
    class Reads(Layer):
        def forward(self, hidden: torch.Tensor, **kwargs) -> torch.Tensor:
            return hidden * 2 if kwargs.get("output_hidden_states") else super().forward(hidden)

    with torch.no_grad():
        equals_eager(compiled(Tower(Reads)), lambda model: model(x(), output_hidden_states=True))
        model = compiled(clip(), granularity="encoder")
        assert isinstance(model(**images(1), return_dict=False), tuple)


def test_a_compile_in_another_thread_changes_nothing_here():
    compiling, done = threading.Event(), threading.Event()

    def slow(graph_module, example_inputs):
        compiling.set()
        done.wait(30)
        return graph_module.forward

    model, other = clip(), compiled(Tower(), backend=slow)
    model.set_attn_implementation("eager")
    compiled(model)
    with torch.no_grad():
        model(**images(2))
        model(**images(2), output_attentions=True)

        def work():
            with torch.no_grad():
                other(x())

        thread = threading.Thread(target=work)
        thread.start()
        assert compiling.wait(30)
        calls = regions(model)["CLIPEncoderLayer"].calls
        model(**images(2))
        counted = regions(model)["CLIPEncoderLayer"].calls - calls
        attentions = model(**images(2), output_attentions=True).attentions
        done.set()
        thread.join(60)
    assert counted == 3
    assert len(attentions) == 3


def test_attentions_under_an_outer_compile():
    model = clip()
    model.set_attn_implementation("eager")
    compiled(model)
    with torch.no_grad():
        model(**images(2), output_attentions=True)
        model(**images(2))
        outer = torch.compile(model, backend="eager")
        assert len(outer(**images(2), output_attentions=True).attentions) == 3


def test_wrappers_around_forward():
    def wrap(module, factor):
        orig_forward = module.forward

        def wrapper(*args, **kwargs):
            return orig_forward(*args, **kwargs) * factor

        module.forward = wrapper

    def call(model):
        return model(**images(2)).last_hidden_state

    with torch.no_grad():
        model = compiled(clip())
        wrap(model.encoder.layers[2], 2.0)
        wrap(model.encoder.layers[2], 3.0)
        equals_eager(model, call)
        model = compiled(clip())
        add_hook_to_module(model.encoder.layers[2], ModelHook())
        wrap(model.encoder.layers[2], 3.0)
        equals_eager(model, call)


def test_checkpointing_around_the_encoder():
    def gradient(model):
        pixels = torch.ones(2, 5, 8, requires_grad=True)
        checkpoint(model, pixels, use_reentrant=False).square().sum().backward()
        return pixels.grad

    equals_eager(compiled(Tower()), gradient)
    model = compiled(Tower())
    gradient(model)
    assert regions(model)["Layer"].state == "compiled"


def test_one_module_in_two_lists_and_a_sparse_input():
    class Shared(Tower):
        def __init__(self):
            super().__init__()
            self.more = nn.ModuleList([self.layers[0], Layer()])

    class Sparse(Layer):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(hidden, self.linear.weight)

    with torch.no_grad():
        assert regions(compiled(Shared().eval()))["Layer"].instances == 4
        equals_eager(compiled(Tower(Sparse, 1)), lambda model: model(torch.eye(8).to_sparse()))


def test_a_later_compile_of_the_users_own_survives_the_undo():
    model = compiled(Tower())
    model.layers[0].compile(backend="eager")
    slot = model.layers[0]._compiled_call_impl
    hf_compile.uncompile_mm_encoder(model)
    assert model.layers[0]._compiled_call_impl is slot
    assert vars(model.layers[1]).get("_compiled_call_impl") is None


def test_undo_of_a_model_of_which_a_part_was_compiled():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = Tower()

    model = Whole()
    compiled(model.tower)
    assert hf_compile.status(model).encoders[0].path == "tower"
    hf_compile.uncompile_mm_encoder(model)
    assert hf_compile.status(model).encoders == ()


def test_a_broadcast_mask_after_a_full_one():
    class Masked(Layer):
        def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.linear(hidden) + mask

    model = compiled(Tower(Masked))
    with torch.no_grad():
        for batch, mask in ((2, torch.ones(2, 5, 1)), (2, torch.ones(1, 5, 1)), (3, torch.ones(3, 5, 1))):
            model(torch.ones(batch, 5, 8), mask)
    region = regions(model)["Masked"]
    assert (region.graphs, region.eager_calls) == (2, 0)
