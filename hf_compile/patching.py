"""Family patches: remedies for one `model_type`, from the folder `patches/` and from third parties."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import threading
from collections.abc import Callable

from torch import nn

from .errors import ConfigurationError

__all__ = ["ENTRY_POINT_GROUP", "FamilyPatch", "find_patches", "register_patch"]

ENTRY_POINT_GROUP = "hf_compile.patches"
"""Entry points of this group name packages whose module `<model_type>.py` defines `apply(encoder)`."""

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
_lock = threading.Lock()


def register_patch(model_type: str, apply: Apply, *, reason: str) -> Callable[[], None]:
    """Register a family patch for this process; return the undo.

    Args:
        model_type: `config.model_type` of the encoder or of its model.
        apply: called with the encoder when it is compiled; returns its undo.
        reason: one line that says why the patch is needed.

    Raises:
        ConfigurationError: the model type or the reason is empty, or `apply` cannot be called.

    ```python
    >>> from hf_compile import register_patch
    >>> undo = register_patch("my_model", lambda encoder: lambda: None, reason="shows the form")
    >>> undo()

    ```
    """
    if not model_type or not reason or not callable(apply):
        raise ConfigurationError("register_patch needs a model_type, a callable apply(encoder) -> undo, and a reason")
    patch = FamilyPatch(model_type, apply, reason)
    with _lock:
        _registered.setdefault(model_type, []).append(patch)

    def undo() -> None:
        with _lock:
            if patch in _registered.get(model_type, []):
                _registered[model_type].remove(patch)

    return undo


def find_patches(*model_types: str) -> tuple[FamilyPatch, ...]:
    """Return the patches of these model types: from every package of the entry-point group, then the registered ones.

    Raises:
        ConfigurationError: a patch module defines no `apply`, or has no docstring to take the reason from.
    """
    found = []
    packages = sorted({entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)})
    for model_type in dict.fromkeys(filter(None, model_types)):
        for package in packages:
            name = f"{package}.{model_type}"
            if not model_type.isidentifier() or importlib.util.find_spec(name) is None:
                continue
            module = importlib.import_module(name)
            if not callable(getattr(module, "apply", None)) or not module.__doc__:
                raise ConfigurationError(
                    f"{name}: a family patch needs a docstring (its reason) and apply(encoder) -> undo"
                )
            found.append(FamilyPatch(model_type, module.apply, module.__doc__.strip().splitlines()[0]))
        found += _registered.get(model_type, [])
    return tuple(found)
