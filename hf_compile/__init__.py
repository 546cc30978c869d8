"""Compile the vision, video and audio encoders of Transformers models: one graph per region class, every size."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0.dev0"

_WHERE = {
    "api": (
        "compile_mm_encoder",
        "compile_processor",
        "status",
        "uncompile_mm_encoder",
        "uncompile_processor",
        "verify",
    ),
    "compiler.routing": ("platform_backend",),
    "config": (
        "MAX_INT32",
        "CompilationConfig",
        "CompilationMode",
        "CompileRange",
        "DynamicShapesType",
        "should_torch_compile_mm_encoder",
    ),
    "counters": ("CompilationCounter", "compilation_counter"),
    "decorators": ("ignore_torch_compile", "support_torch_compile"),
    "encoders": ("EncoderInfo", "find_encoders"),
    "errors": (
        "BackendError",
        "CompileRangeError",
        "ConfigurationError",
        "EncoderNotFoundError",
        "HfCompileError",
        "RegionCompileError",
        "UnsupportedModelError",
        "VerificationError",
    ),
    "functions": ("FunctionPatch",),
    "integrations.loading": ("from_pretrained", "inspect_mm_encoder"),
    "integrations.transformers": ("install", "uninstall"),
    "patching": ("register_patch",),
    "platforms": ("Platform", "current_platform", "register_platform"),
    "signature": ("infer_dynamic_arg_dims",),
    "warming": ("warm_first_call",),
}
_ROOMS = {name: room for room, names in _WHERE.items() for name in names}

__all__ = sorted([*_ROOMS, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_ROOMS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
