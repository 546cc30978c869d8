"""Choose which modules of an encoder are compiled, and which of them share one graph."""

from __future__ import annotations

import ast
import collections
import dataclasses
import dis
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from .config import CompilationConfig
from .decorators import find_mark

__all__ = ["RegionGroup", "asks_for_flash", "choose_regions", "names_in_code", "reads_attribute", "reads_cu_seqlens"]


@dataclasses.dataclass(frozen=True)
class RegionGroup:
    """Modules of one class, with equal parameter shapes and flags: they share one graph.

    Args:
        class_name: name of their class.
        modules: module path inside the encoder -> module.
        role: a repeated layer, another module of the encoder, or the whole encoder.
    """

    class_name: str
    modules: dict[str, nn.Module]
    role: Literal["block", "part", "encoder"]


def choose_regions(encoder: nn.Module, config: CompilationConfig) -> tuple[str, str, list[RegionGroup]]:
    """Return the granularity, why it was chosen, and the groups of regions in module order.

    Args:
        encoder: the encoder module.
        config: its `granularity` decides; `"auto"` takes blocks where layers repeat.
    """
    whole = config.granularity == "encoder"
    blocks = {} if whole else dict(_blocks(encoder, "", config)) or dict(_blocks(encoder, "", config, loops=True))
    ignored = _ignored_class(encoder)
    if whole and ignored:
        return "encoder", f"asked for, but {ignored} in it is marked by ignore_torch_compile", []
    if not blocks and not ignored:
        reason = "asked for" if whole else "no layer repeats in it"
        return "encoder", reason, [RegionGroup(type(encoder).__name__, {"": encoder}, "encoder")]
    chosen = {id(module) for module in blocks.values()}
    parts = dict(_parts(encoder, "", chosen, config))
    groups: dict[tuple[object, ...], RegionGroup] = {}
    everything = [(path, module, "block") for path, module in blocks.items()]
    everything += [(path, module, "part") for path, module in parts.items()]
    order = {path: position for position, (path, _) in enumerate(encoder.named_modules())}
    everything = [item for item in everything if item[0] in order]  # a module in two lists is one module
    for path, module, role in sorted(everything, key=lambda item: order[item[0]]):
        key = (role, *_identity(module))
        if key not in groups:
            groups[key] = RegionGroup(type(module).__name__, {}, role)  # type: ignore[arg-type]
        groups[key].modules[path] = module
    reason = "asked for" if config.granularity == "block" else f"{len(blocks)} layers repeat"
    if not blocks:
        reason = f"no layer repeats in it, and {ignored} in it is marked by ignore_torch_compile"
    return "block", reason, list(groups.values())


def reads_cu_seqlens(module: nn.Module) -> bool:
    """Say whether a module attends within packed segments, by the `cu_seqlens` in its code."""
    return any("cu_seqlens" in code.co_varnames for child in module.modules() for code in _codes(type(child)))


def asks_for_flash(encoder: nn.Module) -> bool:
    """Say whether code that an encoder's forward reaches asks for flash attention, which takes segments as they are.

    Code that does not ask attends across segments, or has a mask for them: an operator for segments is not its eager.
    """
    for cls in {type(module) for module in encoder.modules()}:
        codes = {code.co_name: code for code in _codes(cls)}
        reached, waiting = set[str](), ["forward"]
        while waiting:
            code = codes.get(waiting.pop())
            if code is None or code.co_name in reached:
                continue
            reached.add(code.co_name)
            waiting += code.co_names
            words = {const for const in code.co_consts if isinstance(const, str) and " " not in const}  # no docstring
            if any("flash" in word for word in words | {*code.co_names}):
                return True
    return False


def reads_attribute(module: nn.Module, name: str) -> bool:
    """Say whether the code of a module or of one below it reads an attribute or global of this name."""
    return any(name in code.co_names for child in module.modules() for code in _codes(type(child)))


def names_in_code(module: nn.Module) -> set[str]:
    """Return the argument names and the string constants in the code of a module and all below it."""
    return {
        name
        for child in module.modules()
        for code in _codes(type(child))
        for name in (*code.co_varnames, *(const for const in code.co_consts if isinstance(const, str)))
    }


def _blocks(
    module: nn.Module, path: str, config: CompilationConfig, *, loops: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the repeated layers; those that loop over an argument only if asked, which is when there are no others."""
    for name, child in module.named_children():
        here = f"{path}.{name}".lstrip(".")
        if _is_marked(child, config):
            yield here, child
        elif _is_stack(child) and not _looks_deeper(child, config):
            for index, layer in child.named_children():
                if _may_compile(layer, config) and (loops or not _loops(layer)):
                    yield f"{here}.{index}", layer
                else:
                    yield from _blocks(layer, f"{here}.{index}", config, loops=loops)
        else:
            yield from _blocks(child, here, config, loops=loops)


def _parts(
    module: nn.Module, path: str, chosen: set[int], config: CompilationConfig
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with parameters beside the blocks.

    Single layers of torch gain nothing from a graph, and some code fits into no graph that serves all sizes.
    """
    for name, child in module.named_children():
        here = f"{path}.{name}".lstrip(".")
        if id(child) in chosen:
            continue
        holds_a_block = any(id(inner) in chosen for inner in child.modules())
        if holds_a_block or _is_of_torch(child) or not _may_compile(child, config):
            yield from _parts(child, here, chosen, config)
        elif _is_composite(child) and _multiplies(child):
            if any(map(_fits_no_graph, {type(inner) for inner in child.modules()})):
                yield from _parts(child, here, chosen, config)
            else:
                yield here, child


def _is_stack(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 0 and all(map(_is_composite, module))


def _is_composite(module: nn.Module) -> bool:
    """A module with parameters that is more than one layer of torch."""
    return not _is_of_torch(module) and next(module.parameters(), None) is not None


def _is_of_torch(module: nn.Module) -> bool:
    """A layer or a container of torch, a bare `nn.Module()` that holds others among them."""
    return type(module).__module__.startswith("torch.nn.")


def _multiplies(module: nn.Module) -> bool:
    """A part pays for its graph by a matrix product or convolution; a norm or a table of positions does not."""
    return any(
        parameter.dim() >= 2
        for child in module.children()
        if not isinstance(child, nn.Embedding)
        for parameter in child.parameters()
    )


def _looks_deeper(stack: nn.Module, config: CompilationConfig) -> bool:
    """Stages of different width hold the layers that repeat (Swin): take those instead."""
    stages = list(stack.children())
    inner = [dict(_blocks(stage, "", config)) for stage in stages]
    all_different = len({_identity(stage) for stage in stages}) == len(stages)
    return all_different and all(inner) and any(len(blocks) > 1 for blocks in inner)


def _may_compile(module: nn.Module, config: CompilationConfig) -> bool:
    mark = find_mark(type(module))
    disabled = mark is not None and mark.enable_if is not None and not mark.enable_if(config)
    return not disabled and _ignored_class(module) is None


def _ignored_class(module: nn.Module) -> str | None:
    """Return the name of a class in a module (or its own) whose forward is to stay eager: no graph may hold it."""
    for cls in dict.fromkeys(map(type, module.modules())):
        mark = find_mark(cls)
        if mark is not None and mark.ignored:
            return cls.__name__
    return None


def _is_marked(module: nn.Module, config: CompilationConfig) -> bool:
    mark = find_mark(type(module))
    return mark is not None and not mark.ignored and not mark.is_encoder and _may_compile(module, config)


def _identity(module: nn.Module) -> tuple[object, ...]:
    """What two modules must share to share a graph: class, tensor shapes, and the flags that their code reads."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)
    flags = []
    for path, child in module.named_modules():
        cls: Any = type(child)
        names = {name for code in _codes(cls, of_torch=True) for name in code.co_names} - _cache_slots(cls)
        flags += [
            (path, type(child), name, value)
            for name, value in sorted(vars(child).items())
            if name in names and _is_flag(value)
        ]
    return type(module), shapes, tuple(flags)


@functools.cache
def _cache_slots(cls: type) -> frozenset[str]:
    """Return `layer_idx` where a class only hands it on or takes it as an index, as for a cache; else nothing."""
    nodes = list(ast.walk(_tree(cls)))
    handed_on = [argument for node in nodes if isinstance(node, ast.Call) for argument in node.args]
    handed_on += [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    handed = collections.Counter(map(_own_attribute, handed_on))
    read = collections.Counter(_own_attribute(node) for node in nodes if _is_read(node))
    return frozenset(name for name in handed if name == "layer_idx" and handed[name] == read[name])


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


def _own_attribute(node: ast.AST) -> str:
    """Return the name of an attribute of `self`, or nothing."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if is_own and isinstance(node, ast.Attribute) else ""


def _is_flag(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_flag, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _codes(cls: type, *, of_torch: bool = False) -> Iterator[types.CodeType]:
    """Yield the code of a class's own methods, below decorators; of torch's layers only if asked."""
    bases = "torch.nn.modules.module" if of_torch else "torch.nn."
    for parent in cls.__mro__:
        if parent.__module__.startswith((bases, "transformers.modeling_")):
            break
        for name, member in vars(parent).items():
            function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
            if inspect.isfunction(function) and name != "__init__":
                yield inspect.unwrap(function).__code__


def _loops(module: nn.Module) -> bool:
    """Say whether code of a module loops over an argument: image by image, a graph serves one number of images."""
    return any(
        _loops_over_argument(code) for cls in {type(inner) for inner in module.modules()} for code in _codes(cls)
    )


def _fits_no_graph(cls: type) -> bool:
    """Say whether the code of a class reads values, goes image by image, or takes another way for one image size."""
    by_values = any({"tolist", "item"} & set(code.co_names) or _loops_over_argument(code) for code in _codes(cls))
    return by_values or _has_shortcut(cls)


@functools.cache
def _has_shortcut(cls: type) -> bool:
    """Say whether a method that resizes (positions) compares sizes first, and does not let `is_tracing` decide."""
    for node in ast.walk(_tree(cls)):
        if not isinstance(node, ast.FunctionDef):
            continue
        inside = list(ast.walk(node))
        called = {getattr(each, "attr", getattr(each, "id", "")) for each in inside}
        tests = [each.test for each in inside if isinstance(each, ast.If)]
        compared = [each for test in tests for each in ast.walk(test) if isinstance(each, ast.Compare)]
        if "interpolate" in called and "is_tracing" not in called and any(map(_compares_sizes, compared)):
            return True
    return False


def _compares_sizes(node: ast.Compare) -> bool:
    equality = isinstance(node.ops[0], (ast.Eq, ast.NotEq))
    return equality and not any(isinstance(side, ast.Constant) for side in (node.left, *node.comparators))


def _tree(cls: type) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # a class without a file
        return ast.Module([], [])


def _loops_over_argument(code: types.CodeType) -> bool:
    arguments = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    instructions = list(dis.get_instructions(code))
    return any(
        after.opname == "GET_ITER" and before.opname.startswith("LOAD_FAST") and before.argval in arguments
        for before, after in itertools.pairwise(instructions)
    )
