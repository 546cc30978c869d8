"""Read a `forward`: which arguments are tensors, and which of their dims vary."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """What the annotation of one argument says of it."""

    name: str
    kind: Literal["tensor", "container", "other", "missing", "keywords"]
    annotation: str


def unwrapped_forward(module: torch.nn.Module | type) -> Callable[..., Any]:
    """Return the `forward` as written in the model's file, below the decorators of Transformers."""
    cls = module if isinstance(module, type) else type(module)
    return inspect.unwrap(cls.forward)


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


def _resolve(annotation: Any, function: Callable[..., Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    scope = {**vars(typing), "torch": torch, **getattr(sys.modules.get(function.__module__), "__dict__", {})}
    try:
        return eval(annotation, scope)  # the model's own source text, as typing.get_type_hints does
    except (NameError, AttributeError, SyntaxError, TypeError):  # a name that exists only for type checkers
        return annotation


def _kind(annotation: Any) -> Literal["tensor", "container", "other"]:
    kinds = set(_kinds(annotation))
    return "container" if "container" in kinds else "tensor" if "tensor" in kinds else "other"


def _kinds(annotation: Any) -> Iterator[Literal["tensor", "container", "other"]]:
    if isinstance(annotation, str):  # unresolvable: read the words
        if re.search(r"\b\w*Tensor\b", annotation):
            yield "container" if re.search(r"\b(tuple|list|dict|Tuple|List|Dict)\[", annotation) else "tensor"
        return
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType) or origin is typing.Annotated:
        for part in typing.get_args(annotation):
            yield from _kinds(part)
    elif isinstance(origin, type) and issubclass(origin, (Sequence, Mapping)):
        if any(kind != "other" for part in typing.get_args(annotation) for kind in _kinds(part)):
            yield "container"
    elif isinstance(annotation, type):
        if issubclass(annotation, torch.Tensor) or annotation.__module__ == "torch" and annotation.__name__.endswith("Tensor"):
            yield "tensor"
        elif dataclasses.is_dataclass(annotation) and issubclass(annotation, Mapping):  # a model output
            yield "container"
        else:
            yield "other"
    elif getattr(annotation, "__name__", "").endswith("Tensor"):  # torch.FloatTensor and its kin are no classes
        yield "tensor"
