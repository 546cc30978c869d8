"""The errors of hf_compile: each says what went wrong, where, and the next step."""

from __future__ import annotations

__all__ = [
    "BackendError",
    "CompileRangeError",
    "ConfigurationError",
    "EncoderNotFoundError",
    "HfCompileError",
    "RegionCompileError",
    "UnsupportedModelError",
    "VerificationError",
]


class HfCompileError(Exception):
    """Base of every error that hf_compile raises by itself."""


class ConfigurationError(HfCompileError, ValueError):
    """An option is unknown, illegal, contradictory or not available yet."""


class BackendError(ConfigurationError):
    """The backend is missing or unknown to torch."""


class EncoderNotFoundError(HfCompileError, LookupError):
    """A model has no vision, video or audio encoder that can be told apart, or not at the path given."""


class UnsupportedModelError(HfCompileError, TypeError):
    """The object is no model, or a model in a state that cannot be compiled in place."""


class CompileRangeError(HfCompileError, ValueError):
    """A call came with a size outside every compile range, or with a dim that the declared dims do not fit."""


class RegionCompileError(HfCompileError, RuntimeError):
    """A region could not be compiled as one full graph (raised only under `strict=True`)."""


class VerificationError(HfCompileError, ArithmeticError):
    """A compiled region gives other numbers than eager."""
