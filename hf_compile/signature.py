"""Read a `forward`: which arguments are tensors, and which of their dims vary."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

__all__ = ["ArgumentHint", "InputVerdict", "infer_dynamic_arg_dims", "read_arguments", "unwrapped_forward"]


@dataclasses.dataclass(frozen=True)
class InputVerdict:
    """What was decided about one tensor input of a region.

    Args:
        name: argument name; members of a container as `position_embeddings[0]`.
        verdict: `"dynamic"`, `"static"`, or `"pending"` while only a call can tell.
        dims: the dims that vary, counted from 0.
        reason: why, in words.
    """

    name: str
    verdict: Literal["dynamic", "static", "pending"]
    dims: tuple[int, ...]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {"name": self.name, "verdict": self.verdict, "dims": list(self.dims), "reason": self.reason}


@dataclasses.dataclass(frozen=True)
class ArgumentHint:
    """What the annotation of one argument says of it; one that leaves it open, such as `Any`, counts as missing."""

    name: str
    kind: Literal["tensor", "container", "other", "missing", "keywords"]
    annotation: str


def unwrapped_forward(module: torch.nn.Module | type) -> Callable[..., Any]:
    """Return the `forward` as written in the model's file, below the decorators of Transformers."""
    cls: Any = module if isinstance(module, type) else type(module)
    forward: Callable[..., Any] = inspect.unwrap(cls.forward)
    return forward


def read_arguments(module: torch.nn.Module | type) -> list[ArgumentHint]:
    """Return a hint for each argument of `forward` (without `self`), from resolved annotations.

    String annotations are resolved; optional, union, tuple, list, dict and model-output types are looked into.
    """
    forward = unwrapped_forward(module)
    hints = []
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            hints.append(ArgumentHint(parameter.name, "keywords", ""))
            continue
        annotation = parameter.annotation
        if annotation is parameter.empty:
            hints.append(ArgumentHint(parameter.name, "missing", ""))
            continue
        resolved = _resolve(annotation, forward)
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        hints.append(ArgumentHint(parameter.name, _kind(resolved), text.replace("torch.", "")))
    return hints


def infer_dynamic_arg_dims(module: torch.nn.Module | type) -> dict[str, int]:
    """Infer which argument dims of a module's `forward` vary: dim 0 of every argument annotated as tensor(s).

    The rule is vLLM's; here it sees every tensor type, string annotations, and containers of tensors.

    Args:
        module: a module, or its class.

    Returns:
        Argument name -> 0.

    ```python
    >>> import torch
    >>> from hf_compile import infer_dynamic_arg_dims
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x: "torch.Tensor", mask: torch.BoolTensor | None = None, scale: float = 1.0):
    ...         return x * scale
    >>> infer_dynamic_arg_dims(Block)
    {'x': 0, 'mask': 0}

    ```
    """
    return {hint.name: 0 for hint in read_arguments(module) if hint.kind in ("tensor", "container")}


_Kind = Literal["tensor", "container", "missing", "other"]
_STRONGEST_FIRST: tuple[_Kind, ...] = ("container", "tensor", "missing", "other")
_OPEN = (Any, object, tuple, list, dict, Sequence, Mapping, typing.Tuple, typing.List, typing.Dict)  # noqa: UP006


def _resolve(annotation: Any, function: Callable[..., Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    scope = {**vars(typing), "torch": torch, **getattr(sys.modules.get(function.__module__), "__dict__", {})}
    try:
        return eval(annotation, scope)  # the model's own source text, as typing.get_type_hints does
    except (NameError, AttributeError, SyntaxError, TypeError):  # a name that exists only for type checkers
        return annotation


def _kind(annotation: Any) -> _Kind:
    kinds = set(_kinds(annotation))
    return next((kind for kind in _STRONGEST_FIRST if kind in kinds), "other")


def _kinds(annotation: Any) -> Iterator[_Kind]:
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    origin = typing.get_origin(annotation)
    if isinstance(annotation, str):  # unresolvable: read the words
        if re.search(r"\b\w*Tensor\b", annotation):
            yield "container" if re.search(r"\b(tuple|list|dict)\[", annotation, re.IGNORECASE) else "tensor"
    elif annotation in _OPEN:
        yield "missing"
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _kinds(part)
    elif origin is typing.Annotated:
        yield from _kinds(typing.get_args(annotation)[0])
    elif isinstance(origin, type) and issubclass(origin, Iterable):
        inside = {kind for part in typing.get_args(annotation) for kind in _kinds(part)} - {"other"}
        if inside:
            yield "missing" if inside == {"missing"} else "container"
    elif isinstance(annotation, type):
        is_output = dataclasses.is_dataclass(annotation) and issubclass(annotation, Mapping)
        is_tensor_type = annotation.__module__ == "torch" and annotation.__name__.endswith(
            "Tensor"
        )  # torch.LongTensor
        if issubclass(annotation, torch.Tensor) or is_tensor_type:
            yield "tensor"
        elif is_output or hasattr(annotation, "_fields"):  # a model output, a named tuple
            yield "container"
