"""Make a method anew from its own source, with a function it calls, or some of its statements, run by another.

What a model computes inline cannot be compiled alone, so the statements become a function: those of the installed
Transformers, read from its file. The class they come from is not touched; the new method is for one object.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .errors import UnsupportedModelError

__all__ = ["Cut", "rewritten"]

Function = Callable[..., Any]

_WRITES_DOCSTRINGS = {"auto_docstring", "add_start_docstrings", "replace_return_docstrings"}


@dataclasses.dataclass(frozen=True)
class Cut:
    """What is to be run by another function.

    Args:
        calls: names of functions, each called by the one before it, the first by the method; may be none.
        statements: how the first and the last of some statements begin, inside the last of these functions; None takes
            the whole function.
        name: of the function that the statements become.
    """

    calls: tuple[str, ...]
    statements: tuple[str, str] | None
    name: str


def rewritten(function: Function, cuts: Iterable[Cut], replaced_by: Callable[[Cut, Function], Function]) -> Function:
    """Return a function that does what the given one does, with every cut run by what `replaced_by` returns for it.

    Args:
        function: a method or function with a source file.
        cuts: what is cut out.
        replaced_by: called with each cut and the function that it became; returns what is to run in its place.

    Raises:
        UnsupportedModelError: the function has no source, calls no such function, or has no such statements.
    """
    plain: Any = inspect.unwrap(function)
    namespace = dict(plain.__globals__)
    inside: dict[str, list[Cut]] = {}
    own: list[Cut] = []
    for cut in cuts:
        if not cut.calls:
            own.append(cut)
            continue
        called, *rest = cut.calls
        if called not in plain.__code__.co_names or not callable(namespace.get(called)):
            raise UnsupportedModelError(f"{plain.__qualname__} of this Transformers does not call {called}")
        if rest or cut.statements:
            inside.setdefault(called, []).append(dataclasses.replace(cut, calls=tuple(rest)))
        else:
            namespace[called] = replaced_by(cut, namespace[called])
    for called, deeper in inside.items():
        namespace[called] = rewritten(namespace[called], deeper, replaced_by)
    tree = _tree_of(plain)
    pieces = [_outline(tree, cut, plain) for cut in own]
    for piece in pieces:
        _run([piece], plain, namespace)
    for cut in own:
        namespace[cut.name] = replaced_by(cut, namespace[cut.name])
    return _with_cells(tree, plain, namespace)


def _tree_of(function: Any) -> ast.FunctionDef:
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise UnsupportedModelError(f"the source of {function.__qualname__} cannot be read: {error}") from error
    (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
    assert isinstance(tree, ast.FunctionDef)
    ast.increment_lineno(tree, first - 1)
    tree.decorator_list = [each for each in tree.decorator_list if _name_of(each) not in _WRITES_DOCSTRINGS]
    return tree


def _name_of(decorator: ast.expr) -> str:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.id if isinstance(called, ast.Name) else ""


def _outline(tree: ast.FunctionDef, cut: Cut, function: Any) -> ast.FunctionDef:
    """Replace statements by a call; return the function that holds them."""
    assert cut.statements is not None
    for body in _bodies(tree):
        places = [_place_of(start, body) for start in cut.statements]
        if None not in places and places[0] <= places[1]:  # type: ignore[operator]
            break
    else:
        raise UnsupportedModelError(
            f"{function.__qualname__} of this Transformers has no statements from {cut.statements[0]!r} to "
            f"{cut.statements[1]!r}"
        )
    first, last = places
    assert first is not None
    assert last is not None
    statements = body[first : last + 1]
    names = _Names(set(function.__code__.co_varnames) | set(function.__code__.co_cellvars))
    for statement in statements:
        names.visit(statement)
    later = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.lineno > statements[-1].lineno}
    given = [name for name in names.read if name in names.local]
    made = [name for name in names.written if name in later]
    call, header, results = _code_of(cut.name, given, made)
    header.body = [*statements, *results]
    body[first : last + 1] = [ast.copy_location(call, statements[0])]
    ast.copy_location(header, statements[0])
    ast.fix_missing_locations(header)
    ast.fix_missing_locations(tree)
    return header


def _code_of(name: str, given: list[str], made: list[str]) -> tuple[ast.stmt, ast.FunctionDef, list[ast.stmt]]:
    """Return the call, an empty function of that name, and its return statement."""
    arguments, results = ", ".join(given), ", ".join(made)
    text = f"{results} = {name}({arguments})\ndef {name}({arguments}):\n    return {results}"
    call, header = ast.parse(text if made else text.partition("= ")[2]).body
    assert isinstance(header, ast.FunctionDef)
    return call, header, header.body


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                yield body


def _place_of(start: str, body: list[ast.stmt]) -> int | None:
    return next((place for place, each in enumerate(body) if ast.unparse(each).startswith(start)), None)


class _Names(ast.NodeVisitor):
    """The local names that statements read before they write them, and those that they write, in order."""

    def __init__(self, local: set[str]) -> None:
        self.local = local
        self.read: dict[str, None] = {}
        self.written: dict[str, None] = {}

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            if node.id not in self.written:
                self.read[node.id] = None
        else:
            self.written[node.id] = None

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Name) and node.target.id not in self.written:
            self.read[node.target.id] = None
        self.visit(node.target)


def _with_cells(tree: ast.FunctionDef, function: Any, namespace: dict[str, Any]) -> Function:
    """Return the function of a tree, with the cells that `super()` and others of the original need."""
    names = function.__code__.co_freevars
    outer = ast.parse(f"def _outer({', '.join(names)}):\n    return {tree.name}").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body.insert(0, tree)
    _run([ast.fix_missing_locations(outer)], function, namespace)
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    made: Function = namespace["_outer"](*values)
    inner: Any = inspect.unwrap(made)
    if isinstance(inner, types.FunctionType):
        inner.__defaults__, inner.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        inner.__qualname__ = function.__qualname__
    return made


def _run(body: list[ast.stmt], function: Any, namespace: dict[str, Any]) -> None:
    file = inspect.getsourcefile(function) or "<unknown>"
    exec(compile(ast.Module(body, []), file, "exec"), namespace)  # Transformers' own source text
