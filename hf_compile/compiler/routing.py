"""Send `torch.compile` calls that name no backend, Transformers' own among them, to the platform's backend."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from transformers import CompileConfig

from ..config import CompilationConfig
from ..platforms import current_platform, resolve_backend
from .dynamo import is_inductor

__all__ = ["platform_backend"]

_lock = threading.Lock()
_routes: list[Any] = []
_before: list[Any] = []


@contextlib.contextmanager
def platform_backend(
    device: str | torch.device | nn.Module | None = None, *, backend: str | Callable[..., Any] | None = None
) -> Iterator[str | Callable[..., Any]]:
    """Let every `torch.compile` of the process that names no backend use the platform's, inside the `with` block.

    Some code of Transformers compiles by itself, and without a backend that means Inductor: continuous batching, flex
    attention, the generation of DiffusionGemma. A `CompileConfig` (of `generate`, of continuous batching) names
    Inductor unless told otherwise; one that is made inside the block names the platform's backend. A call that names a
    backend keeps it, and so does what was compiled before. Blocks may be nested and may end in any order; the latest
    that is still open counts.

    Args:
        device: a device, its name, or a model on it; by default the accelerator that torch has at hand.
        backend: instead of the platform's; above `HF_COMPILE_BACKEND`.

    Yields:
        The backend.

    Raises:
        BackendError: torch knows no backend of that name, or the platform names none.

    ```python
    >>> import torch
    >>> from hf_compile import platform_backend
    >>> with platform_backend("cpu", backend="eager"):
    ...     double = torch.compile(lambda x: 2 * x)  # runs on "eager", not on Inductor
    >>> torch.compiler.get_default_backend()
    'inductor'

    ```
    """
    chosen = resolve_backend(CompilationConfig(backend=backend), current_platform(device))
    route = object()
    with _lock:
        if not _routes:
            _before.append((torch.compiler.get_default_backend(), CompileConfig.__init__.__defaults__))
        _routes.append((route, chosen if is_inductor(chosen) else _without_mode(chosen)))
        _use(_routes[-1][1])
    try:
        yield chosen
    finally:
        with _lock:
            _routes[:] = [each for each in _routes if each[0] is not route]
            if _routes:
                _use(_routes[-1][1])
            else:
                default, CompileConfig.__init__.__defaults__ = _before.pop()
                torch.compiler.set_default_backend(default)


def _use(backend: Any) -> None:
    torch.compiler.set_default_backend(backend)
    names = [field.name for field in dataclasses.fields(CompileConfig)]
    defaults = dict(zip(names, CompileConfig.__init__.__defaults__ or (), strict=True))
    CompileConfig.__init__.__defaults__ = tuple({**defaults, "backend": backend}.values())


def _without_mode(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a backend that takes Inductor's `mode` and leaves it out."""
    call = lookup_backend(backend) if isinstance(backend, str) else backend

    def routed(
        graph_module: torch.fx.GraphModule, example_inputs: list[Any], *, mode: str = "", **keywords: Any
    ) -> Any:
        return call(graph_module, example_inputs, **keywords)

    routed.__name__ = backend if isinstance(backend, str) else getattr(backend, "__name__", "backend")
    return routed
