"""What hf_compile needs to know of an accelerator."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Platform"]


class Platform:
    """A device type and how torch compiles for it. Subclass it, set what differs, and register the subclass.

    Attributes:
        name: of the platform; no other may have it.
        device_type: torch's word for the device, as in `tensor.device.type`. Several platforms may share one: ROCm
            says "cuda", and TPU and Neuron both say "xla"; then `is_current` tells them apart.
        simple_compile_backend: the backend of every `torch.compile` of hf_compile: a name known to torch, or a
            callable.
        supports_dynamic_compile: one graph may serve tensors of many sizes. Where it is False, regions run eager, and
            `status` says so; sizes named in `compile_sizes` are compiled each for itself.
        supports_fullgraph: a region may be one graph. Where it is False, torch may break it into several.
        options: options of the backend, below those of the config.
        package: what to install where torch does not know the backend.

    ```python
    >>> from hf_compile import Platform, current_platform, register_platform
    >>> class Acme(Platform):
    ...     name = "acme"
    ...     device_type = "acme"
    ...     simple_compile_backend = "aot_eager"
    >>> undo = register_platform(Acme)
    >>> current_platform("acme:0").simple_compile_backend
    'aot_eager'
    >>> undo()

    ```
    """

    name: str = ""
    device_type: str = ""
    simple_compile_backend: str | Callable[..., Any] = "inductor"
    supports_dynamic_compile: bool = True
    supports_fullgraph: bool = True
    options: Mapping[str, Any] = types.MappingProxyType({})
    package: str = ""

    def __init_subclass__(cls) -> None:
        backend = vars(cls).get("simple_compile_backend")
        if isinstance(backend, types.FunctionType):  # a function in a class body is no method here
            cls.simple_compile_backend = staticmethod(backend)

    def is_current(self) -> bool:
        """Say whether models on `device_type` run on this platform, by what is loaded already; import nothing."""
        return True

    def missing_toolchain(self) -> str | None:
        """Return what the backend needs and this machine lacks, as a sentence, or None. Start no process."""
        return None

    def __repr__(self) -> str:
        """Return a line for messages and reports."""
        backend = self.simple_compile_backend
        shown = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
        return f"Platform {self.name!r} (device type {self.device_type!r}, backend {shown!r})"
