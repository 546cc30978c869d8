"""Which backend a device compiles with, and what it can do."""

from .platform import Platform
from .registry import check_backend, current_platform, register_platform, resolve_backend, resolve_device

__all__ = [
    "Platform",
    "check_backend",
    "current_platform",
    "register_platform",
    "resolve_backend",
    "resolve_device",
]
