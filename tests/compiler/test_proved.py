"""Numbers come first: a graph without a size hint is used only where, and only once, it is known to be right."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.fx.experimental._config as shapes_config
from torch._dynamo import register_backend
from torch._dynamo.backends.registry import _BACKENDS, _COMPILER_FNS
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import hf_compile

from .tiny import images, regions, siglip

HEAD = "SiglipMultiheadAttentionPoolingHead"
BATCHES = (1, 3, 5, 2, 1, 4)


def pooled(model, batch):
    with torch.no_grad():
        return model(**images(batch)).pooler_output


def test_inductor_is_right_at_every_batch():
    model = siglip(num_hidden_layers=1, initializer_range=0.2)
    eager = copy.deepcopy(model)
    hf_compile.compile_mm_encoder(model)
    for batch in BATCHES:
        assert torch.allclose(pooled(model, batch), pooled(eager, batch), rtol=1e-5, atol=1e-5)
    head = regions(model)[HEAD]
    assert (head.state, head.eager_calls) == ("compiled", 0)
    assert head.graphs == 2  # torch's attention layer asks whether the batch is 1, and Inductor must know


@pytest.mark.parametrize("fault", ["wrong numbers", "an error"])
def test_a_backend_that_settles_a_size_is_found_out(fault):
    made = []

    def backend(graph_module, inputs):
        values = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
        without_hint = any(free_unbacked_symbols(value) for value in values if isinstance(value, torch.Tensor))
        made.append(without_hint)

        def run(*args):
            outputs = graph_module(*args)
            batch = max(value.shape[0] for value in args if isinstance(value, torch.Tensor) and value.dim() == 3)
            if not without_hint or batch == 1:
                return outputs
            if fault == "an error":
                raise RuntimeError("expected size 3==1 at dim=0")
            return tuple(output + 1 for output in outputs)

        return run

    model = siglip(num_hidden_layers=1)
    eager = copy.deepcopy(model)
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": backend})
    for batch in BATCHES:
        assert torch.allclose(pooled(model, batch), pooled(eager, batch), atol=1e-5)
    assert any(made)
    head = regions(model)[HEAD]
    assert (head.state, head.eager_calls, head.graphs) == ("compiled", 1, 2)


def test_a_right_graph_without_hint_is_compared_at_three_sizes_only():
    def backend(graph_module, inputs):
        return graph_module

    model = siglip(num_hidden_layers=1)
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": backend})
    for batch in BATCHES:
        pooled(model, batch)
    assert regions(model)[HEAD].graphs == 1
    region = next(each for each in _running(model) if each.plan.class_name == HEAD)
    assert region.settled
    assert len(region._proved) == 3


def _running(model):
    from hf_compile.api import _find

    return [region for regions in _find(model).regions for region in regions]


# ---- a backend that is wrong about sizes, and one that is wrong anyway


@pytest.fixture
def backend_of_a_name():
    """Return a function that registers a backend by name: such a one may generate code, so its graphs are compared."""
    names = []

    def register(off):
        name = f"wrong_{len(names)}_{id(names)}"
        names.append(name)

        def compile_graph(graph_module, example_inputs, **options):
            error = off()

            def run(*inputs):
                return [
                    out + error if isinstance(out, torch.Tensor) and out.is_floating_point() else out
                    for out in graph_module.forward(*inputs)
                ]

            return run

        register_backend(compile_graph, name)
        return name

    yield register
    for name in names:
        _BACKENDS.pop(name, None)
        _COMPILER_FNS.pop(name, None)


def test_a_graph_that_differs_is_made_in_another_way(backend_of_a_name):
    """As Inductor's for the windows of SAM 3: wrong where 1 is a size like any other, right where it is not."""
    eager, model = siglip(), siglip()
    backend = backend_of_a_name(lambda: 0.1 if shapes_config.backed_size_oblivious else 0.0)
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": backend})
    with torch.no_grad():
        for batch in (1, 3, 2, 1):
            assert torch.equal(model(**images(batch)).last_hidden_state, eager(**images(batch)).last_hidden_state)
    layer = regions(model)["SiglipEncoderLayer"]
    assert (layer.state, layer.graphs, layer.eager_calls) == ("compiled", 1, 1)


def test_a_graph_that_stays_wrong_is_not_used(backend_of_a_name):
    eager, model = siglip(), siglip()
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": backend_of_a_name(lambda: 0.1)})
    with torch.no_grad():
        for batch in (1, 3, 2):
            assert torch.equal(model(**images(batch)).last_hidden_state, eager(**images(batch)).last_hidden_state)
    layer = regions(model)["SiglipEncoderLayer"]
    assert layer.state == "eager"
    assert "the graph differs from eager by" in layer.reason


def test_rounding_is_no_reason(backend_of_a_name):
    model = siglip()
    hf_compile.compile_mm_encoder(model, compilation_config={"backend": backend_of_a_name(lambda: 5e-5)})
    with torch.no_grad():
        for batch in (1, 3, 2):
            model(**images(batch))
    assert regions(model)["SiglipEncoderLayer"].state == "compiled"
