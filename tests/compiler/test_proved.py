"""Numbers come first: a graph without a size hint is used only where, and only once, it is known to be right."""

from __future__ import annotations

import copy

import pytest
import torch
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
