"""Run a compiled function once with a generic shape, so that its first graph is not made for the first size."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

from .errors import ConfigurationError

__all__ = ["warm_first_call"]

Function = TypeVar("Function", bound=Callable[..., Any])


def warm_first_call(
    function: Function,
    *,
    shape: tuple[int, ...] | Mapping[str, tuple[int, ...]],
    key: Callable[..., Hashable] | None = None,
) -> Function:
    """Return a function that, before the first call of each kind, runs once with tensors of a generic shape.

    A kind of call is told by the grad mode, by whether each tensor requires grad, and by `key`. The extra call is like
    the first one (dtype, device, grad mode, other arguments) with tensors of ones in place of the named ones, and its
    result is dropped. Random state and gradients are not touched.

    Args:
        function: compiled, or about to be by its first call.
        shape: of the first tensor, or argument -> shape; sizes that no code treats apart, such as `(64, 64)`.
        key: called with the arguments; what else makes a graph of its own, such as an interpolation mode.

    Raises:
        ConfigurationError: the function has no argument of that name.

    ```python
    >>> import torch
    >>> from hf_compile import warm_first_call
    >>> seen = []
    >>> double = warm_first_call(lambda x: seen.append(tuple(x.shape)) or 2 * x, shape=(64, 64))
    >>> double(torch.ones(1, 3)).shape, double(torch.ones(2, 3)).shape, seen
    (torch.Size([1, 3]), torch.Size([2, 3]), [(64, 64), (1, 3), (2, 3)])

    ```
    """
    signature = inspect.signature(function)
    if isinstance(shape, Mapping):
        unknown = shape.keys() - signature.parameters.keys()
        if unknown:
            name, known = getattr(function, "__name__", function), ", ".join(signature.parameters)
            raise ConfigurationError(f"warm_first_call: {name!r} has no argument {min(unknown)!r}; it has {known}")
    warmed: set[Hashable] = set()
    lock = threading.Lock()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        tensors = {name: value for name, value in bound.items() if isinstance(value, torch.Tensor)}
        kind = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((name, tensor.requires_grad) for name, tensor in tensors.items()),
            key(*args, **kwargs) if key is not None else None,
        )
        with lock:
            is_first = kind not in warmed
            warmed.add(kind)
        if is_first and tensors:
            shapes = shape if isinstance(shape, Mapping) else {next(iter(tensors)): shape}
            generic = {name: _ones(tensors[name], size) for name, size in shapes.items() if name in tensors}
            again = signature.bind(*args, **kwargs)
            again.arguments.update(generic)
            devices = [tensor.device for tensor in tensors.values() if tensor.is_cuda]
            with torch.random.fork_rng(devices=devices):
                function(*again.args, **again.kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _ones(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    made = torch.ones(shape, dtype=like.dtype, device=like.device)
    return made.requires_grad_(like.requires_grad)
