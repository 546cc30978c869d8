"""Hooks around and inside a region: run, honoured or a reason to go eager; never skipped.

The slot of a compiled call replaces the code of torch that runs hooks, so what torch does there is done here.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .tracing import in_our_graph

__all__ = ["GLOBAL_HOOKS", "Watch", "call_with_hooks", "eager_because_of_hooks", "recorder_of"]

_HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


class Watch:
    """Where a hook or a replaced forward would appear, for one region module; made again with every graph."""

    version = 0
    """Of the region, when this was made."""

    def __init__(self, module: nn.Module, before: Watch | None = None) -> None:
        self.dense: bool = before is not None and before.dense
        """An input of this module had to be laid out anew before; see `layout`."""
        self.inner = [child for child in module.modules() if child is not module]
        self.places = [
            (parent._modules, name, child, vars(child))
            for parent in module.modules()
            for name, child in parent._modules.items()
            if child is not None
        ]


class _InertInGraph:
    """A recording hook of Transformers inside a region: does its work in eager, and nothing inside a graph.

    The hook reads a `ContextVar`, which Dynamo cannot trace. The call goes eager when there is something to record.
    """

    def __init__(self, original: Callable[..., Any], key: str) -> None:
        self.original, self.key = original, key

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if in_our_graph():
            return None
        return self.original(module, args, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return self.original


def _collected() -> Any:
    """Return what Transformers (from 5.2 on) is recording in this thread, or None."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return None
    return _active_collector.get()  # type: ignore[no-untyped-call]


def _capture_key(hook: Any) -> str | None:
    """Return what a hook of Transformers' output capturing records ("hidden_states", "attentions"), else None."""
    if isinstance(hook, _InertInGraph):
        return hook.key
    if getattr(hook, "__name__", "") != "output_capturing_hook" or not isinstance(hook, types.FunctionType):
        return None
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return str(cells["key"].cell_contents) if "key" in cells else None


def _is_own_forward(module: nn.Module, forward: Any) -> bool:
    """Transformers 5.0 leaves the bound method behind as an attribute after it recorded."""
    return (
        isinstance(forward, types.MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    )


def recorder_of(module: nn.Module) -> Any:
    """Return the wrapper that Transformers 5.0 puts around `forward` while it records, or None."""
    forward = vars(module).get("forward")
    if not isinstance(forward, types.FunctionType) or "orig_forward" not in forward.__code__.co_freevars:
        return None
    cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
    is_theirs = forward.__globals__.get("__name__") == "transformers.utils.generic"
    return forward if is_theirs and _is_own_forward(module, cells["orig_forward"].cell_contents) else None


def eager_because_of_hooks(
    module: nn.Module, watch: Watch, add_undo: Callable[[Callable[[], None]], None]
) -> str | None:
    """Return why hooks make this call run eager, or None; recording hooks with nothing to record are made inert."""
    name = type(module).__name__
    if module._backward_hooks or module._backward_pre_hooks or GLOBAL_HOOKS[2] or GLOBAL_HOOKS[3]:
        return f"{name} has a backward hook"
    if module._forward_hooks_always_called or torch_module._global_forward_hooks_always_called:
        return f"{name} has a forward hook that is always called"
    forward = vars(module).get("forward")
    if (
        forward is not None
        and not _is_own_forward(module, forward)
        and recorder_of(module) is None
        and not _has_accelerate_hook(module)
    ):
        return f"the forward of this {name} was replaced"
    for child in watch.inner:
        forward = vars(child).get("forward")
        if forward is None or _is_own_forward(child, forward):
            continue
        if "_hf_hook" in vars(child):
            return f"an accelerate hook on {type(child).__name__} inside {name}"
        if recorder_of(child) is not None:
            return f"Transformers records the output of {type(child).__name__} inside {name}"
        return f"the forward of {type(child).__name__} inside {name} was replaced"
    if GLOBAL_HOOKS[0] or GLOBAL_HOOKS[1]:
        return "a global module hook, which must see every module inside the region"
    return _inner_hooks(name, watch, add_undo)


def _inner_hooks(name: str, watch: Watch, add_undo: Callable[[Callable[[], None]], None]) -> str | None:
    collected: Any = False
    for child in watch.inner:
        for kind in _HOOK_DICTS:
            for key, hook in getattr(child, kind).items():
                recorded = _capture_key(hook) if kind == "_forward_hooks" else None
                if recorded is None:
                    return f"a hook on {type(child).__name__} inside {name}"
                collected = _collected() if collected is False else collected
                if collected is not None and recorded in collected:
                    return f"{recorded} of {type(child).__name__} inside {name} were asked for"
                if not isinstance(hook, _InertInGraph):
                    _make_inert(child, key, hook, recorded, add_undo)
    return None


def _make_inert(
    module: nn.Module, key: int, hook: Any, recorded: str, add_undo: Callable[[Callable[[], None]], None]
) -> None:
    hooks = module._forward_hooks
    hooks[key] = _InertInGraph(hook, recorded)  # same key, same place in the order

    def undo() -> None:
        if isinstance(hooks.get(key), _InertInGraph):
            hooks[key] = hook

    add_undo(undo)


def _has_accelerate_hook(module: nn.Module) -> bool:
    forward, old = vars(module).get("forward"), vars(module).get("_old_forward")
    is_theirs = isinstance(forward, functools.partial) and forward.func.__module__ == "accelerate.hooks"
    return "_hf_hook" in vars(module) and is_theirs and _is_own_forward(module, old)


def call_with_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], core: Callable[..., Any]) -> Any:
    """Call `core(*args, **kwargs)` in place of the module's forward, with the module's own forward hooks around it."""
    for key, pre_hook in list(module._forward_pre_hooks.items()):
        if key in module._forward_pre_hooks_with_kwargs:
            changed = pre_hook(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        else:
            changed = pre_hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    result = _around_forward(module, args, kwargs, core)
    for key, hook in list(module._forward_hooks.items()):
        if key in module._forward_hooks_with_kwargs:
            changed = hook(module, args, kwargs, result)
        else:
            changed = hook(module, args, result)
        if changed is not None:
            result = changed
    return result


def _around_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], core: Callable[..., Any]) -> Any:
    """What stands between hooks and forward: accelerate's hook, or the recorder of Transformers 5.0."""
    recorder = recorder_of(module)
    if recorder is not None:
        cells = [
            types.CellType(core) if name == "orig_forward" else cell
            for name, cell in zip(recorder.__code__.co_freevars, recorder.__closure__, strict=True)
        ]
        return types.FunctionType(
            recorder.__code__, recorder.__globals__, recorder.__name__, recorder.__defaults__, tuple(cells)
        )(*args, **kwargs)
    if not _has_accelerate_hook(module):
        return core(*args, **kwargs)
    hook: Any = vars(module)["_hf_hook"]
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    if hook.no_grad:
        with torch.no_grad():
            result = core(*args, **kwargs)
    else:
        result = core(*args, **kwargs)
    return hook.post_forward(module, result)
