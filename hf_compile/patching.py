"""Family patches: remedies for one `model_type`, from the folder `patches/` and from third parties."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import threading
import types
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from .errors import ConfigurationError
from .functions import FunctionPatch

__all__ = ["ENTRY_POINT_GROUP", "FamilyPatch", "find_function_patches", "find_patches", "register_patch"]

ENTRY_POINT_GROUP = "hf_compile.patches"
"""Entry points of this group name packages whose module `<model_type>.py` defines `apply(encoder)` or `FUNCTIONS`."""

Apply = Callable[[nn.Module], Callable[[], None]]


@dataclasses.dataclass(frozen=True)
class FamilyPatch:
    """A remedy for the encoders of one model type.

    Args:
        model_type: `config.model_type` of the encoder or of its model.
        apply: changes the encoder it is given, and nothing else, and returns the undo.
        reason: one line, shown in the report.
    """

    model_type: str
    apply: Apply
    reason: str


_registered: dict[str, list[FamilyPatch]] = {}
_functions: dict[str, list[FunctionPatch]] = {}
_lock = threading.Lock()


def register_patch(
    model_type: str, apply: Apply | None = None, *, reason: str = "", functions: Iterable[FunctionPatch] = ()
) -> Callable[[], None]:
    """Register a family patch for this process; return the undo.

    Args:
        model_type: `config.model_type` of the encoder or of its model.
        apply: called with the encoder when it is compiled; returns its undo.
        reason: one line that says why `apply` is needed.
        functions: functions of the family's models and processors that are compiled.

    Raises:
        ConfigurationError: the model type is empty, there is neither `apply` nor a function, `apply` cannot be called
            or has no reason, or one of the functions is no `FunctionPatch`.

    ```python
    >>> from hf_compile import register_patch
    >>> undo = register_patch("my_model", lambda encoder: lambda: None, reason="shows the form")
    >>> undo()

    ```
    """
    named = list(functions)
    if not all(isinstance(each, FunctionPatch) for each in named):
        raise ConfigurationError(f"register_patch: functions={named!r} must be instances of hf_compile.FunctionPatch")
    is_given = apply is not None
    if not model_type or not (is_given or named) or (is_given and not (callable(apply) and reason)):
        raise ConfigurationError(
            "register_patch needs a model_type, and a callable apply(encoder) -> undo with a reason, or functions"
        )
    patch = FamilyPatch(model_type, apply, reason) if apply is not None else None
    with _lock:
        if patch is not None:
            _registered.setdefault(model_type, []).append(patch)
        _functions.setdefault(model_type, []).extend(named)

    def undo() -> None:
        with _lock:
            if patch in _registered.get(model_type, []):
                _registered[model_type].remove(patch)
            _functions[model_type] = [each for each in _functions.get(model_type, []) if each not in named]

    return undo


def find_patches(*model_types: str) -> tuple[FamilyPatch, ...]:
    """Return the patches of these model types: from every package of the entry-point group, then the registered ones.

    Raises:
        ConfigurationError: a patch module defines neither `apply` nor `FUNCTIONS`, or has no docstring to take the
            reason from.
    """
    found = []
    for model_type in dict.fromkeys(filter(None, model_types)):
        for module in _modules(model_type):
            if hasattr(module, "apply"):
                found.append(FamilyPatch(model_type, module.apply, (module.__doc__ or "").strip().splitlines()[0]))
        found += _registered.get(model_type, [])
    return tuple(found)


def find_function_patches(*model_types: str) -> tuple[FunctionPatch, ...]:
    """Return the functions that the patches of these model types name, each once.

    Raises:
        ConfigurationError: as in `find_patches`.
    """
    found: dict[FunctionPatch, None] = {}
    for model_type in dict.fromkeys(filter(None, model_types)):
        for module in _modules(model_type):
            found.update(dict.fromkeys(getattr(module, "FUNCTIONS", ())))
        found.update(dict.fromkeys(_functions.get(model_type, ())))
    return tuple(found)


def _modules(model_type: str) -> Iterator[types.ModuleType]:
    packages = sorted({entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)})
    for package in packages:
        name = f"{package}.{model_type}"
        if not model_type.isidentifier() or importlib.util.find_spec(name) is None:
            continue
        module = importlib.import_module(name)
        has_duty = callable(getattr(module, "apply", None)) or getattr(module, "FUNCTIONS", None)
        if not has_duty or not module.__doc__:
            raise ConfigurationError(
                f"{name}: a family patch needs a docstring (its reason), and apply(encoder) -> undo or FUNCTIONS"
            )
        yield module
