"""Functions of a model's or processor's code that are compiled too: what a family patch names, found in one object."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from .errors import ConfigurationError, UnsupportedModelError
from .rewriting import Cut, rewritten

__all__ = ["SAMPLING", "FunctionPatch", "Target", "class_of", "families_of", "find_targets", "holders"]


@dataclasses.dataclass(frozen=True)
class FunctionPatch:
    """A function that is compiled for one object of a family: one graph for every size, with the platform's backend.

    Args:
        method: dotted path of a method. It is compiled, or what the other arguments say of it.
        reason: one line: what it computes, and why a graph pays.
        calls: names of functions, each called by the one before it, the first by the method: the last is compiled.
        statements: how the first and the last statement begin of those that are compiled, inside the method or the
            last function of `calls`. For what Transformers computes inline; the text is that of `ast.unparse`.
        returns: functions of the objects that the method returns (alone, or in a list), compiled in its place.
        warm: argument -> shape of the tensor for a first call of each kind, as in `warm_first_call`.

    ```python
    >>> from hf_compile import FunctionPatch
    >>> FunctionPatch(
    ...     "transformers.models.parakeet.feature_extraction_parakeet."
    ...     "ParakeetFeatureExtractor._torch_extract_fbank_features",
    ...     reason="log mel spectrogram",
    ... ).name
    'ParakeetFeatureExtractor._torch_extract_fbank_features'

    ```
    """

    method: str
    reason: str
    calls: tuple[str, ...] = ()
    statements: tuple[str, str] | None = None
    returns: tuple[FunctionPatch, ...] = ()
    warm: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Class and method, then what is compiled of it."""
        inside = "".join(f" > {called}" for called in self.calls)
        written = self.statements[0].partition("=")[0].strip() if self.statements else ""
        return ".".join(self.method.split(".")[-2:]) + inside + (f" > {written} ..." if written else "")

    def cut(self, name: str) -> Cut | None:
        """Return what is cut out of the method, under a name of its own; None where that is the whole of it."""
        return Cut(self.calls, self.statements, name) if self.calls or self.statements else None


@dataclasses.dataclass(frozen=True)
class Target:
    """An object, and the patches that apply to it."""

    path: str
    holder: Any
    patches: tuple[FunctionPatch, ...]


def find_targets(root: Any, patches: Iterable[FunctionPatch]) -> tuple[list[Target], list[str]]:
    """Return the objects of a model or processor to which patches apply, and what of them this Transformers lacks.

    Args:
        root: a model, a processor, or one of its parts.
        patches: those of its family.
    """
    missing: list[str] = []
    resolved: list[tuple[FunctionPatch, type]] = []
    for patch in patches:
        try:
            cls = class_of(patch)
            _try(patch, cls)
            resolved.append((patch, cls))
        except UnsupportedModelError as error:
            missing.append(f"{patch.name}: {error}")
    found = []
    for path, holder in holders(root):
        own = tuple(patch for patch, cls in resolved if isinstance(holder, cls))
        if own:
            found.append(Target(path, holder, own))
    return found, missing


def holders(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield a model's modules, or a processor and its parts, with their paths."""
    if isinstance(root, nn.Module):
        yield from root.named_modules()
        return
    yield "", root
    for name, part in vars(root).items():
        if hasattr(part, "model_input_names") and not hasattr(part, "get_vocab"):
            yield name, part


def families_of(root: Any) -> tuple[str, ...]:
    """Return the folders of `transformers.models` that the classes of an object and its parts come from."""
    found: dict[str, None] = {}
    for _, holder in [("", root)] if isinstance(root, nn.Module) else holders(root):
        for cls in type(holder).__mro__:
            parts = cls.__module__.split(".")
            if parts[:2] == ["transformers", "models"]:
                found[parts[2]] = None
    return tuple(found)


@functools.cache
def _try(patch: FunctionPatch, cls: type) -> None:
    """Cut the patch out once, so that nothing of the object has been changed when that fails."""
    cut = patch.cut("_tried")
    if cut is not None:
        method = inspect.getattr_static(cls, patch.method.rpartition(".")[2])
        rewritten(getattr(method, "__func__", method), [cut], lambda _, function: function)
    for inner in patch.returns:
        _try(inner, class_of(inner))


@functools.cache
def class_of(patch: FunctionPatch) -> type:
    """Return the class of a patch's method.

    Raises:
        UnsupportedModelError: this Transformers has no such class or method.
        ConfigurationError: the path is none.
    """
    module_name, _, rest = patch.method.rpartition(".")
    module_name, _, class_name = module_name.rpartition(".")
    if not (module_name and class_name and rest):
        raise ConfigurationError(f"{patch.method!r} is no path of a method: package.module.Class.method")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedModelError(f"this Transformers has no {module_name}.{class_name}") from error
    if not isinstance(cls, type) or inspect.getattr_static(cls, rest, None) is None:
        raise UnsupportedModelError(f"{class_name} of this Transformers has no {rest}")
    return cls


_WARPERS = "transformers.generation.logits_process"

SAMPLING = (
    FunctionPatch(
        "transformers.generation.utils.GenerationMixin._get_logits_processor",
        reason="each narrows the logits down by passes over the vocabulary; the draw itself stays eager",
        returns=(
            FunctionPatch(
                f"{_WARPERS}.TopKLogitsWarper.__call__",
                statements=("indices_to_remove = scores < torch.topk(", "scores_processed = scores.masked_fill("),
                reason="only the k likeliest tokens",
            ),
            FunctionPatch(
                f"{_WARPERS}.TopPLogitsWarper.__call__",
                statements=("cumulative_probs = ", "sorted_indices_to_remove = cumulative_probs <="),
                reason="only tokens within the probability mass p: the mass of the sorted tokens in one pass",
            ),
            FunctionPatch(
                f"{_WARPERS}.TopPLogitsWarper.__call__",
                statements=("indices_to_remove = ", "scores_processed = "),
                reason="only tokens within the probability mass p: back in their order, and masked",
            ),
            FunctionPatch(f"{_WARPERS}.MinPLogitsWarper.__call__", reason="only tokens near the likeliest one"),
        ),
    ),
)
"""Compiled for a model when its config says `compile_sampling`."""
