"""Marks on classes: how a class's own author says that, and how, it compiles. Nothing about the class is changed."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch

from .config import CompilationConfig, DimSpec, normalize_dims
from .errors import ConfigurationError
from .signature import unwrapped_forward

__all__ = ["Mark", "find_mark", "ignore_torch_compile", "support_torch_compile"]

Cls = TypeVar("Cls", bound=type)


@dataclasses.dataclass(frozen=True)
class Mark:
    """What a decorator said of a class."""

    ignored: bool = False
    dynamic_arg_dims: Mapping[str, DimSpec] = dataclasses.field(default_factory=dict)
    mark_unbacked_dims: Mapping[str, DimSpec] = dataclasses.field(default_factory=dict)
    enable_if: Callable[[CompilationConfig], bool] | None = None
    is_encoder: bool = False


_marks: weakref.WeakKeyDictionary[type, Mark] = weakref.WeakKeyDictionary()


def find_mark(cls: type) -> Mark | None:
    """Return the mark of a class: its own, else that of the nearest parent that has one."""
    return next((_marks[parent] for parent in cls.__mro__ if parent in _marks), None)


@overload
def support_torch_compile(cls: Cls, /) -> Cls: ...
@overload
def support_torch_compile(
    *,
    dynamic_arg_dims: Mapping[str, DimSpec] | None = None,
    mark_unbacked_dims: Mapping[str, DimSpec] | None = None,
    enable_if: Callable[[CompilationConfig], bool] | None = None,
    is_encoder: bool = False,
) -> Callable[[Cls], Cls]: ...
def support_torch_compile(
    cls: Any = None,
    /,
    *,
    dynamic_arg_dims: Mapping[str, DimSpec] | None = None,
    mark_unbacked_dims: Mapping[str, DimSpec] | None = None,
    enable_if: Callable[[CompilationConfig], bool] | None = None,
    is_encoder: bool = False,
) -> Any:
    """Mark a module class as one graph of its own, honoured when a model that holds it is compiled.

    The arguments are those of vLLM's decorator of the same name; the class itself stays as it is.

    Args:
        dynamic_arg_dims: argument of `forward` -> dim, dims, or dict dim -> shape id; default: inferred.
        mark_unbacked_dims: the same, for dims that must never be specialised, not even on 0 and 1.
        enable_if: called with the `CompilationConfig`; false leaves the class alone.
        is_encoder: the class is an encoder, whatever its arguments are called.

    Raises:
        ConfigurationError: an argument of that name does not exist in `forward`.

    ```python
    >>> import torch
    >>> from hf_compile import support_torch_compile
    >>> @support_torch_compile(dynamic_arg_dims={"x": [0, 1]})
    ... class Block(torch.nn.Module):
    ...     def forward(self, x: torch.Tensor) -> torch.Tensor:
    ...         return x.relu()

    ```
    """

    def mark(marked: Cls) -> Cls:
        if not (isinstance(marked, type) and issubclass(marked, torch.nn.Module)):
            raise ConfigurationError(f"support_torch_compile is for classes of torch.nn.Module, not {marked!r}")
        parameters = list(inspect.signature(unwrapped_forward(marked)).parameters.values())[1:]
        arguments = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        for option, dims in (("dynamic_arg_dims", dynamic_arg_dims), ("mark_unbacked_dims", mark_unbacked_dims)):
            for name, spec in (dims or {}).items():
                normalize_dims(name, spec)
                if name not in arguments:
                    raise ConfigurationError(
                        f"{option}: {marked.__name__}.forward has no argument {name!r}; it has {', '.join(arguments)}"
                    )
        _marks[marked] = Mark(
            dynamic_arg_dims=dict(dynamic_arg_dims or {}),
            mark_unbacked_dims=dict(mark_unbacked_dims or {}),
            enable_if=enable_if,
            is_encoder=is_encoder,
        )
        return marked

    return mark if cls is None else mark(cls)


def ignore_torch_compile(cls: Cls) -> Cls:
    """Mark a module class to stay eager; its sub-modules, and a child class that is marked again, still compile.

    ```python
    >>> import torch
    >>> from hf_compile import ignore_torch_compile
    >>> @ignore_torch_compile
    ... class Tokenizer(torch.nn.Module):
    ...     pass

    ```
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise ConfigurationError(f"ignore_torch_compile is for classes of torch.nn.Module, not {cls!r}")
    _marks[cls] = Mark(ignored=True)
    return cls
