"""Run the helpers of an encoder that read values (window indices, segment borders) before its graph, not in it.

Since 5.9 the encoders of Transformers that pack their inputs call such helpers as `helper(..., kwargs=kwargs)`, and a
helper hands back what it finds in `kwargs` under its own key. `Precompute` calls the encoder's forward on a copy
without data, lets the helpers compute with the real values, and takes note of what each returned under which key. No
table of models or helpers is kept. On that copy whole numbers (grids, lengths) are real, and so is what is made of
them alone; pixels, sound and weights have a shape only.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers.utils import generic

from .attention import ATTENTION_NAME, RAGGED_REPLACES
from .inputs import leaf_tensors
from .regions import reads_cu_seqlens

__all__ = ["BatchProbe", "Precompute", "find_helpers"]


def find_helpers(encoder: nn.Module) -> set[str]:
    """Return the names of functions that code of an encoder calls and that take a dict of precomputed results."""
    return {
        name
        for cls in {type(module) for module in encoder.modules()}
        for function in _functions(cls)
        for name in function.__code__.co_names
        if _is_helper(function.__globals__.get(name))
    }


class Precompute:
    """The helpers' results for each call of one encoder.

    Args:
        encoder: as it is when a graph is made; its weights are not kept.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self._helpers = find_helpers(encoder)
        self._counts: dict[str, int] = {}
        self._shadow = _shadow(encoder, self._helpers, self._call) if self._helpers else None
        self._run = _Run()

    def __bool__(self) -> bool:
        return bool(self._helpers)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return key -> result of every helper that this call of the encoder reaches.

        A helper that depends on what the layers compute is not reached; the graph then has to trace it.
        """
        if self._shadow is None:
            return {}
        self._run.start()
        kind = str(pytree.tree_map(_kind, (args, kwargs)))
        self._run.expected = self._counts.get(kind, 0)
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._without_numbers, (args, kwargs))
        try:
            with torch.no_grad(), _Mixed():
                type(self._shadow).forward(self._shadow, *args, **kwargs)
        except (_Enough, *_NO_DATA):
            pass
        self._counts[kind], results = self._run.called, self._run.results
        device = self._run.device
        self._run.start()
        moved: dict[str, Any] = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), results)
        return moved

    def _without_numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        self._run.device = tensor.device
        if not tensor.is_floating_point():
            return tensor.cpu()
        shape = torch.empty_like(tensor, device="meta")
        self._run.given[id(shape)] = shape, tensor  # held, so that the id stays its own
        return shape

    def _with_numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._run.given[id(tensor)][1] if id(tensor) in self._run.given else tensor

    def _call(
        self, helper: Callable[..., Any], *args: Any, kwargs: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        args, options = pytree.tree_map_only(torch.Tensor, self._with_numbers, (args, options))
        asked = _Asked(kwargs or {})
        result = helper(*args, kwargs=asked, **options)
        values = result if isinstance(result, tuple) and len(asked.keys_asked) == len(result) else (result,)
        without = any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(values))
        if asked.in_vain and len(asked.keys_asked) == len(values) and not without:  # a pair is made whole
            made = zip(asked.keys_asked, values, strict=True)
            given = kwargs or {}
            self._run.results |= {key: value for key, value in made if key not in given or value is not given[key]}
        for key in (kwargs or {}).keys() - asked.keys():
            del (kwargs or {})[key]
        self._run.called += 1
        if self._run.called == self._run.expected:
            raise _Enough
        return result


def _kind(value: Any) -> Any:
    """What of an argument may change which helpers are reached: numbers and sizes do not."""
    if isinstance(value, torch.Tensor):
        return value.dim()
    return value if isinstance(value, (bool, str, type(None))) else type(value).__name__


class _Run(threading.local):
    """What one call of the copy left: results by key, how many helpers were called, and the real inputs by shape."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.results: dict[str, Any] = {}
        self.called = self.expected = 0
        self.device = torch.device("cpu")
        self.given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


class BatchProbe:
    """Tells what grows with the batch in an inner module from what stays: at batch 1 both look alike.

    So the encoder's forward runs once more with two of everything, on the copy without data.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self._encoder: Callable[[], nn.Module | None] = weakref.ref(encoder)
        self._shadow: nn.Module | None = None

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], path: str, arguments: tuple[str, ...]
    ) -> dict[str, torch.Tensor]:
        """Return the inputs of the module at `path`, as shapes; nothing where the copy cannot tell.

        Args:
            args, kwargs: of a call of the encoder; every tensor with as many rows as the first is doubled.
            path: of a module inside the encoder.
            arguments: names of its positional arguments.
        """
        encoder = self._encoder()
        given = [tensor for tensor in pytree.tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        if encoder is None or not given or not given[0].dim():
            return {}
        batch = given[0].shape[0]
        if self._shadow is None:
            try:
                self._shadow = _shadow(encoder, set(), _no_helper)
            except (*_NO_DATA, MemoryError):  # weights or attributes that cannot be copied, as some quantisers have
                self._encoder = lambda: None
                return {}
        seen: list[dict[str, torch.Tensor]] = []

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(leaf_tensors(arguments, args, kwargs))
            raise _Enough

        handle = self._shadow.get_submodule(path).register_forward_pre_hook(look, with_kwargs=True)
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: _twice(tensor, batch), (args, kwargs))
        try:
            with torch.no_grad(), _Mixed():
                type(self._shadow).forward(self._shadow, *args, **kwargs)
        except (_Enough, *_NO_DATA):
            pass
        finally:
            handle.remove()
        return seen[0] if seen else {}


def _twice(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    twice = torch.cat([tensor, tensor]) if tensor.dim() and tensor.shape[0] == batch else tensor
    return twice.to("meta") if twice.is_floating_point() else twice.cpu()


def _no_helper(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("unreachable: no helper was replaced")


_NO_DATA = (RuntimeError, NotImplementedError, ValueError, TypeError, LookupError, AttributeError)
"""What code that wants to read a tensor without data ends with."""


class _Enough(Exception):
    """Every helper that earlier calls reached was called."""


class _Mixed(TorchFunctionMode):
    """Lets an operator have inputs with and without data: its result then has a shape only."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = (args, kwargs or {})
        if (
            function in _FACTORIES
            and _is_meta(given[1].get("device"))
            and (function is torch.arange or _is_flat(args))
        ):
            return function(*args, **{**given[1], "device": "cpu"})  # positions, a mask: code may read them
        if function is torch.Tensor.to and not args[0].is_floating_point():
            kept, options = [value for value in args if not _is_meta(value)], dict(given[1])
            if _is_meta(options.get("device")):
                del options["device"]
            return function(*kept, **options) if len(kept) > 1 or options else args[0]
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_meta for tensor in tensors) and not all(tensor.is_meta for tensor in tensors):
            given = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), given)
        return function(*given[0], **given[1])


_FACTORIES = (torch.arange, torch.ones, torch.zeros, torch.full)


def _is_meta(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "meta"


def _is_flat(args: tuple[Any, ...]) -> bool:
    shape = args[0] if args and isinstance(args[0], (tuple, list)) else args
    return len(shape) <= 2


class _Asked(dict[str, Any]):
    """A dict that remembers which keys it was asked for, and whether one was missing."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.keys_asked: list[str] = []
        self.in_vain = False

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self.keys_asked:
            self.keys_asked.append(key)
            self.in_vain |= key not in self
        return super().pop(key, *default)


def _is_helper(function: Any) -> bool:
    if not inspect.isfunction(function):
        return False
    parameter = inspect.signature(function).parameters.get("kwargs")
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _functions(cls: type) -> Iterator[types.FunctionType]:
    """Yield the methods that a class has from its own model's files, below decorators."""
    for name in {name for parent in cls.__mro__ if parent.__module__.startswith(_own(cls)) for name in vars(parent)}:
        member = inspect.getattr_static(cls, name)
        if inspect.isfunction(member):
            function = inspect.unwrap(member)
            if isinstance(function, types.FunctionType):
                yield function


def _own(cls: type) -> str:
    """Return the package of a class's module."""
    return cls.__module__.rpartition(".")[0] or cls.__module__


_NOT_COPIED = {"_compiled_call_impl", "forward", "_old_forward", "_hf_hook"}
"""What compilers and accelerate put on a module: the copy runs its class's own forward."""


def _shadow(encoder: nn.Module, helpers: set[str], call: Callable[..., Any]) -> nn.Module:
    """Return a copy of an encoder without data, hooks and compiled slots, whose helpers are called through `call`."""
    tensors = (*encoder.parameters(), *encoder.buffers())
    memo: dict[int, Any] = {id(tensor): _empty(tensor) for tensor in tensors}
    for module in encoder.modules():
        memo |= {id(vars(module)[name]): None for name in _NOT_COPIED & vars(module).keys()}
    shadow = copy.deepcopy(encoder, memo)
    for module in shadow.modules():
        config: Any = vars(module).get("config")
        if getattr(config, "_attn_implementation", "") in RAGGED_REPLACES and reads_cu_seqlens(module):
            config._attn_implementation = ATTENTION_NAME
        for name, value in vars(module).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                value.clear()
        for name in _NOT_COPIED & vars(module).keys():
            del vars(module)[name]
        cls = type(module)
        rebuilt = {
            function.__name__: _with_globals(function, helpers, call)
            for function in _functions(cls)
            if (helpers | _raises_on_meta()) & set(function.__code__.co_names)
        }
        if rebuilt:
            module.__class__ = type(cls.__name__, (cls,), {**rebuilt, "__module__": cls.__module__})
    return shadow


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().to("meta"), requires_grad=False)
    return tensor.detach().to("meta")


@functools.cache
def _raises_on_meta() -> frozenset[str]:
    """Return `maybe_autocast` where it asks torch about autocast on "meta": Transformers 5.0 does."""
    try:
        with generic.maybe_autocast("meta", enabled=False):
            return frozenset()
    except RuntimeError:
        return frozenset({"maybe_autocast"})


def _no_autocast(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    """Stand in for `maybe_autocast` on a copy without data."""
    return contextlib.nullcontext()


def _with_globals(function: types.FunctionType, helpers: set[str], call: Callable[..., Any]) -> types.FunctionType:
    """Return a function that sees other helpers; the module that it comes from is not touched."""

    def through(helper: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: call(helper, *args, **options)

    seen = {name: through(function.__globals__[name]) for name in helpers & function.__globals__.keys()}
    seen |= dict.fromkeys(_raises_on_meta() & function.__globals__.keys(), _no_autocast)
    made = types.FunctionType(
        function.__code__,
        {**function.__globals__, **seen},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
