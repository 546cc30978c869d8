"""Find the platform of a device: the registered ones, those of plug-ins, and the built-in ones."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..config import CompilationConfig, environment_backend
from ..errors import BackendError, ConfigurationError
from .builtin import BUILTIN
from .platform import Platform

__all__ = [
    "ENTRY_POINT_GROUP",
    "check_backend",
    "current_platform",
    "register_platform",
    "resolve_backend",
    "resolve_device",
]

ENTRY_POINT_GROUP = "hf_compile.platforms"
"""Each entry point of this group names a `Platform` subclass, or an instance of one."""

_registered: list[Platform] = []
_lock = threading.Lock()


def register_platform(platform: Platform | type[Platform]) -> Callable[[], None]:
    """Register a platform for this process; return the undo. Those of later calls are asked first.

    A package registers its platform for every process by an entry point of the group `hf_compile.platforms`.

    Args:
        platform: a subclass of `Platform`, or an instance of one.

    Raises:
        ConfigurationError: it is no platform, has no name or device type, or its name is taken.
    """
    made = _checked(platform, "register_platform")
    with _lock:
        _refuse_clash(made, "register_platform", [*_registered, *_of_plug_ins(), *BUILTIN])
        _registered.insert(0, made)

    def undo() -> None:
        with _lock:
            if made in _registered:
                _registered.remove(made)

    return undo


def current_platform(device: str | torch.device | nn.Module | None = None) -> Platform:
    """Return the platform of a device: the first whose `device_type` it is and that says `is_current`.

    A device that no platform serves gets a plain `Platform` of its name, which compiles with Inductor.

    Args:
        device: a device, its name, or a model that lies on it; by default the accelerator that torch has at hand, else
            the CPU.

    Raises:
        ConfigurationError: a plug-in registers something that is no platform, or a name that is taken.

    ```python
    >>> from hf_compile import current_platform
    >>> current_platform("cpu").name
    'cpu'

    ```
    """
    device_type = _device_type(device)
    for platform in (*_registered, *_of_plug_ins(), *BUILTIN):
        if platform.device_type == device_type and platform.is_current():
            return platform
    return _plain(device_type)


def check_backend(config: CompilationConfig) -> str | Callable[..., Any] | None:
    """Return the backend that the config names, else `HF_COMPILE_BACKEND`, else None: then the platform's counts.

    Raises:
        BackendError: torch knows no backend of that name.
    """
    backend = config.backend or environment_backend()
    if isinstance(backend, str) and backend not in _known_backends():
        raise BackendError(f"backend {backend!r} is not known to torch; it knows {', '.join(_known_backends())}")
    return backend


def resolve_backend(config: CompilationConfig, platform: Platform) -> str | Callable[..., Any]:
    """Return the backend: the config's, else `HF_COMPILE_BACKEND`, else the platform's.

    Raises:
        BackendError: torch knows no backend of that name, or the platform names none.
    """
    backend = check_backend(config) or platform.simple_compile_backend
    if callable(backend) or (backend and backend in _known_backends()):
        return backend
    if backend and isinstance(backend, str):
        install = f", which {platform.package} brings" if platform.package else ""
        problem = f"the backend of this platform, {backend!r}{install}, is not known to torch"
    else:
        problem = f"this platform names no backend (simple_compile_backend={backend!r})"
    raise BackendError(
        f"platform {platform.name}: {problem}; torch knows {', '.join(_known_backends())}. Name one of them by "
        "backend=... or HF_COMPILE_BACKEND, or leave the model eager"
    )


def _known_backends() -> list[str]:
    return sorted(torch.compiler.list_backends(exclude_tags=()))


def resolve_device(module: nn.Module) -> str:
    """Return the device type of a module's first parameter or buffer; `"cpu"` when it has none.

    Of a module whose weights accelerate brings to the device call by call, that is the device it brings them to.
    """
    tensor: torch.Tensor | None = next(module.parameters(), None)
    if tensor is None:
        tensor = next(module.buffers(), None)
    device: Any = "cpu" if tensor is None else tensor.device
    if tensor is not None and tensor.is_meta:
        hooks = (vars(child).get("_hf_hook") for child in module.modules())
        given = (getattr(hook, "execution_device", None) for hook in hooks)
        device = next((each for each in given if each is not None), device)
    return _device_type(device)


def _device_type(device: Any) -> str:
    """Return the type of a device; a name is taken apart by hand, since torch may not know such a device."""
    if isinstance(device, nn.Module):
        return resolve_device(device)
    if isinstance(device, torch.device):
        return device.type
    if isinstance(device, str):
        return device.partition(":")[0]
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    return "xla" if "torch_xla" in sys.modules else "cpu"


@functools.cache
def _plain(device_type: str) -> Platform:
    platform: Platform = type("Platform", (Platform,), {"name": device_type, "device_type": device_type})()
    return platform


@functools.cache
def _of_plug_ins() -> tuple[Platform, ...]:
    """Return the platforms of installed packages; they are asked once, in the order of their names."""
    found: list[Platform] = []
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda each: each.name):
        where = f"entry point {entry.name!r} ({entry.value})"
        platform = _checked(entry.load(), where)
        _refuse_clash(platform, where, [*found, *BUILTIN])
        found.append(platform)
    return tuple(found)


def _checked(platform: Any, where: str) -> Platform:
    made = platform() if isinstance(platform, type) and issubclass(platform, Platform) else platform
    if not isinstance(made, Platform):
        raise ConfigurationError(
            f"{where}: {platform!r} is no subclass of hf_compile.Platform, nor an instance of one"
        )
    for attribute in ("name", "device_type"):
        if not isinstance(getattr(made, attribute), str) or not getattr(made, attribute):
            raise ConfigurationError(f"{where}: {type(made).__name__} needs a {attribute}, a string")
    return made


def _refuse_clash(platform: Platform, where: str, others: list[Platform]) -> None:
    for other in others:
        if other.name == platform.name:
            raise ConfigurationError(
                f"{where}: the platform name {platform.name!r} is taken by {type(other).__module__}."
                f"{type(other).__qualname__}; give yours another"
            )
