"""Marks say something about a class and change nothing of it."""

import gc
import weakref

import pytest
import torch
from torch import nn

from hf_compile import (
    CompilationConfig,
    ConfigurationError,
    ignore_torch_compile,
    should_torch_compile_mm_encoder,
    support_torch_compile,
)
from hf_compile.decorators import Mark, find_mark


def block_class():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, mask=None, **kwargs):
            return self.linear(x)

    return Block


@pytest.mark.smoke
@pytest.mark.parametrize(
    "mark", [support_torch_compile, support_torch_compile(dynamic_arg_dims={"x": 0}), ignore_torch_compile]
)
def test_the_class_stays_as_it_is(mark):
    cls = block_class()
    before = dict(vars(cls)), cls.__bases__, cls.__mro__
    assert mark(cls) is cls
    assert (dict(vars(cls)), cls.__bases__, cls.__mro__) == before
    assert find_mark(cls) is not None


def test_without_a_mark():
    assert find_mark(block_class()) is None


def test_what_a_mark_holds():
    cls = block_class()
    options = {"dynamic_arg_dims": {"x": [0, 1]}, "mark_unbacked_dims": {"mask": {0: "batch"}}, "is_encoder": True}
    support_torch_compile(**options, enable_if=should_torch_compile_mm_encoder)(cls)
    mark = find_mark(cls)
    assert mark == Mark(**options, enable_if=should_torch_compile_mm_encoder)
    assert not mark.enable_if(CompilationConfig())
    options["dynamic_arg_dims"]["mask"] = 0
    assert find_mark(cls).dynamic_arg_dims == {"x": [0, 1]}


def test_a_bare_mark_infers():
    assert find_mark(support_torch_compile(block_class())) == Mark()


def test_a_child_has_the_mark_of_its_parent_until_it_has_its_own():
    parent = ignore_torch_compile(block_class())
    child = type("Child", (parent,), {})
    assert find_mark(child).ignored
    support_torch_compile(child)
    assert not find_mark(child).ignored
    assert find_mark(parent).ignored


@pytest.mark.parametrize("option", ["dynamic_arg_dims", "mark_unbacked_dims"])
@pytest.mark.parametrize("name", ["hidden_states", "self", "kwargs"])
def test_an_argument_that_forward_does_not_have(option, name):
    cls = block_class()
    with pytest.raises(ConfigurationError) as error:
        support_torch_compile(**{option: {name: 0}})(cls)
    assert str(error.value) == f"{option}: Block.forward has no argument {name!r}; it has x, mask"
    assert find_mark(cls) is None


def test_dims_of_another_kind():
    with pytest.raises(ConfigurationError, match=r"dynamic_arg_dims\['x'\]='0' is not legal"):
        support_torch_compile(dynamic_arg_dims={"x": "0"})(block_class())


@pytest.mark.parametrize("target", [nn.Linear(1, 1), int, len])
def test_only_module_classes_are_marked(target):
    for mark in (support_torch_compile, ignore_torch_compile):
        with pytest.raises(ConfigurationError, match=f"^{mark.__name__} is for classes of torch.nn.Module, not "):
            mark(target)


def test_the_forward_below_transformers_decorators_is_read():
    from transformers.models.siglip.modeling_siglip import SiglipVisionModel

    with pytest.raises(ConfigurationError, match="has no argument 'pixels'; it has pixel_values, "):
        support_torch_compile(dynamic_arg_dims={"pixels": 0})(SiglipVisionModel)


def test_a_mark_does_not_keep_its_class_alive():
    cls = support_torch_compile(block_class())
    gone = weakref.ref(cls)
    del cls
    gc.collect()
    assert gone() is None
