"""Which backend a device type compiles with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .config import CompilationConfig, environment_backend
from .errors import BackendError

__all__ = ["resolve_backend", "resolve_device"]

_SIMPLE_COMPILE_BACKEND = "inductor"


def resolve_device(module: torch.nn.Module) -> str:
    """Return the device type of a module's first parameter or buffer; `"cpu"` when it has none."""
    tensor: torch.Tensor | None = next(module.parameters(), None)
    if tensor is None:
        tensor = next(module.buffers(), None)
    return "cpu" if tensor is None else tensor.device.type


def resolve_backend(config: CompilationConfig) -> str | Callable[..., Any]:
    """Return the backend: the config's, else `HF_COMPILE_BACKEND`, else Inductor.

    Raises:
        BackendError: torch knows no backend of that name.
    """
    backend = config.backend or environment_backend() or _SIMPLE_COMPILE_BACKEND
    if isinstance(backend, str):
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise BackendError(f"backend {backend!r} is not known to torch; it knows {', '.join(sorted(known))}")
    return backend
