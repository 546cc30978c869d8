"""Compile functions of one object: its class makes way for a subclass whose methods run graphs."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..functions import FunctionPatch, Target, class_of
from ..plan import EncoderPlan, plan_function
from ..rewriting import Cut, rewritten
from ..warming import warm_first_call
from .region import Region, bind

if TYPE_CHECKING:
    from .attaching import Attached

__all__ = ["CompiledFunctions"]

Function = Callable[..., Any]


class CompiledFunctions:
    """The compiled functions of one model or processor.

    Args:
        encoder: how they are compiled: config, backend and platform.
        attached: what runs in the model or processor; its counter counts, and the functions keep it alive.
    """

    def __init__(self, encoder: EncoderPlan, attached: Attached) -> None:
        self.encoder, self.attached = encoder, attached
        self.regions: list[tuple[FunctionPatch, Region]] = []
        self._made: dict[tuple[FunctionPatch, ...], dict[type, type]] = {}

    def apply(self, target: Target) -> Callable[[], None]:
        """Give an object compiled functions; return the undo.

        Raises:
            UnsupportedModelError: a method is not what its patch says.
        """
        holder, original = target.holder, type(target.holder)
        subclass = self._subclass(original, target.patches)
        holder.__class__ = subclass

        def undo() -> None:
            if type(holder) is subclass:  # else somebody put another class over it
                holder.__class__ = original

        return undo

    def _subclass(self, original: type, patches: tuple[FunctionPatch, ...]) -> type:
        known = self._made.setdefault(patches, {})
        if original not in known:
            known[original] = self._make(original, patches)
        return known[original]

    def _make(self, original: type, patches: tuple[FunctionPatch, ...]) -> type:
        methods: dict[str, Any] = {}
        for name in dict.fromkeys(patch.method.rpartition(".")[2] for patch in patches):
            own = [patch for patch in patches if patch.method.rpartition(".")[2] == name]
            methods[name] = self._method(original, name, own)

        def plain(self: Any, protocol: Any) -> Any:  # a copy or a pickle holds no graph: it is of the original class
            reduced = object.__reduce_ex__(self, protocol)
            return (_new, (original, *reduced[1][1:]), *reduced[2:])

        about = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
        return type(original.__name__, (original,), {**methods, "__reduce_ex__": plain, **about})

    def _method(self, original: type, name: str, patches: list[FunctionPatch]) -> Any:
        static = inspect.getattr_static(original, name)
        method = static.__func__ if isinstance(static, (staticmethod, classmethod)) else static
        cuts: dict[Cut, FunctionPatch] = {}
        for patch in patches:
            cut = patch.cut(f"_{name.strip('_')}_{len(self.regions) + len(cuts)}")
            if cut is not None:
                cuts[cut] = patch
        if cuts:
            by_name = {cut.name: patch for cut, patch in cuts.items()}
            method = rewritten(method, cuts, lambda cut, function: self._compiled(by_name[cut.name], function))
        for patch in patches:
            if patch.returns:
                method = self._with_results(method, patch.returns)
            elif patch not in cuts.values():
                method = self._compiled(patch, method)
        return type(static)(method) if isinstance(static, (staticmethod, classmethod)) else method

    def _compiled(self, patch: FunctionPatch, function: Function) -> Function:
        plan, module = plan_function(patch, function, self.encoder)
        region = Region(plan, self.encoder, self.attached.counter, give_up=lambda: None)
        region.attached = self.attached  # type: ignore[attr-defined]
        self.regions.append((patch, region))
        call = bind(region, module)

        @functools.wraps(function)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        return warm_first_call(compiled, shape=patch.warm) if patch.warm else compiled

    def _with_results(self, method: Function, patches: tuple[FunctionPatch, ...]) -> Function:
        """Return a method whose results, made for one call, have compiled functions; what the caller gave has none."""
        classes = [(patch, class_of(patch)) for patch in patches]

        def with_functions(value: Any) -> Any:
            own = tuple(patch for patch, cls in classes if type(value) is cls)
            if not own:
                return value
            made = copy.copy(value)
            made.__class__ = self._subclass(type(value), own)
            return made

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if isinstance(result, list):
                result[:] = map(with_functions, result)
                return result
            return with_functions(result)

        return wrapper


def _new(cls: Any, *args: Any) -> Any:
    return cls.__new__(cls, *args)
