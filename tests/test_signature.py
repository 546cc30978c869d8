"""Annotations of `forward`, as they are written in models: which arguments are tensors."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Dict, List, NamedTuple, Optional, Tuple, Union  # noqa: UP035

import pytest
import torch
from torch import FloatTensor, Tensor, nn  # noqa: F401 - named by strings
from transformers.modeling_outputs import BaseModelOutput

from hf_compile import infer_dynamic_arg_dims
from hf_compile.signature import InputVerdict, read_arguments, unwrapped_forward


class Pair(NamedTuple):
    cos: Tensor
    sin: Tensor


TENSORS = [
    torch.Tensor,
    nn.Parameter,
    torch.FloatTensor,
    torch.LongTensor,
    torch.IntTensor,
    torch.BoolTensor,
    torch.HalfTensor,
    torch.BFloat16Tensor,
    "torch.Tensor",
    "Tensor",
    "FloatTensor",
    "torch.LongTensor | None",
    "Optional[torch.BoolTensor]",
    torch.Tensor | None,
    Optional[torch.FloatTensor],  # noqa: UP045
    Union[torch.Tensor, int],  # noqa: UP007
    Optional["torch.Tensor"],
    Annotated[torch.Tensor, "batch, length"],
    "OnlyForTypeCheckers.LongTensor | None",
]
CONTAINERS = [
    tuple[torch.Tensor, torch.Tensor],
    tuple[torch.FloatTensor, ...] | None,
    list[torch.Tensor],
    dict[str, torch.LongTensor],
    Tuple[torch.Tensor],  # noqa: UP006
    List[Optional[torch.Tensor]],  # noqa: UP006, UP045
    Dict[str, torch.Tensor],  # noqa: UP006
    Sequence[torch.Tensor],
    Iterable[torch.Tensor],
    tuple["torch.Tensor", int],
    list[tuple[int, torch.Tensor]],
    Union[torch.Tensor, list[torch.Tensor]],  # noqa: UP007
    "tuple[torch.Tensor, torch.Tensor] | None",
    "List[Tensor]",
    "Tuple[OnlyForTypeCheckers.Tensor, int]",
    BaseModelOutput,
    "BaseModelOutput | None",
    Pair,
]
OPEN = [typing.Any, object, tuple, list, dict, "dict | None", tuple[Any, ...], "Any"]
OTHERS = [int, "float", bool | None, str, list[int], tuple[str, ...], dict[str, int], torch.dtype, "Tensorless", len]


def reading(annotation):
    class Block(nn.Module):
        def forward(self, x):
            return x

    Block.forward.__annotations__["x"] = annotation
    (hint,) = read_arguments(Block)
    assert hint.name == "x"
    return hint.kind, infer_dynamic_arg_dims(Block)


@pytest.mark.parametrize(
    ("kind", "annotation"),
    [
        (kind, annotation)
        for kind, annotations in (("tensor", TENSORS), ("container", CONTAINERS), ("missing", OPEN), ("other", OTHERS))
        for annotation in annotations
    ],
    ids=str,
)
def test_annotation(kind, annotation):
    assert reading(annotation) == (kind, {"x": 0} if kind in ("tensor", "container") else {})


class Mixed(nn.Module):
    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask,
        scale: float = 1.0,
        *rest,
        ids: Optional[Tensor] = None,  # noqa: UP045
        **kw,
    ):
        return x


@pytest.mark.smoke
def test_every_argument_is_read_in_order():
    assert [(hint.name, hint.kind, hint.annotation) for hint in read_arguments(Mixed)] == [
        ("x", "tensor", "Tensor"),
        ("rotary", "container", "tuple[Tensor, Tensor]"),
        ("mask", "missing", ""),
        ("scale", "other", "float"),
        ("rest", "keywords", ""),
        ("ids", "tensor", "Optional[Tensor]"),
        ("kw", "keywords", ""),
    ]
    assert infer_dynamic_arg_dims(Mixed()) == infer_dynamic_arg_dims(Mixed) == {"x": 0, "rotary": 0, "ids": 0}


def test_a_class_without_a_forward():
    assert infer_dynamic_arg_dims(nn.ModuleList) == {}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("model", "name", "tensors", "missing"),
    [
        ("siglip", "SiglipVisionModel", [], ["pixel_values"]),  # it alone serves eleven models
        ("siglip", "SiglipEncoderLayer", ["hidden_states", "attention_mask"], []),
        ("clip", "CLIPVisionModel", ["pixel_values"], []),
        ("clip", "CLIPEncoderLayer", ["hidden_states", "attention_mask"], []),
        ("whisper", "WhisperEncoderLayer", ["hidden_states", "attention_mask"], []),
        ("pixtral", "PixtralAttentionLayer", ["hidden_states", "attention_mask", "position_embeddings"], []),
        ("qwen2_5_vl", "Qwen2_5_VLVisionBlock", ["hidden_states", "cu_seqlens", "position_embeddings"], []),
        ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", ["hidden_states", "grid_thw"], []),
    ],
)
def test_classes_of_transformers(model, name, tensors, missing):
    cls = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    found = infer_dynamic_arg_dims(cls)
    found.pop("rotary_pos_emb", None)  # gone since 5.1
    assert found == dict.fromkeys(tensors, 0)
    assert [hint.name for hint in read_arguments(cls) if hint.kind == "missing"] == missing


def test_the_decorators_of_transformers_hide_the_arguments():
    from transformers.models.siglip.modeling_siglip import SiglipVisionModel

    assert SiglipVisionModel.forward is not unwrapped_forward(SiglipVisionModel)
    assert next(iter(inspect.signature(unwrapped_forward(SiglipVisionModel)).parameters)) == "self"


def test_a_forward_put_on_the_instance_is_not_what_is_read():
    module = Mixed()
    module.forward = lambda *args, **kwargs: None  # as accelerate's hooks do
    assert infer_dynamic_arg_dims(module) == infer_dynamic_arg_dims(Mixed)


def test_verdict_as_json():
    verdict = InputVerdict("x", "dynamic", (0, 1), "why")
    assert verdict.to_dict() == {"name": "x", "verdict": "dynamic", "dims": [0, 1], "reason": "why"}
