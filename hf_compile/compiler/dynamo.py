"""The one place that touches `torch._dynamo` and torch's private compile hooks."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
import torch._dynamo
import torch._dynamo.config as dynamo_config
import torch.fx.experimental._config as shapes_config
from torch._dynamo import eval_frame
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.convert_frame import CatchErrorsWrapper, convert_frame_assert
from torch._dynamo.exc import RecompileError
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import counters
from torch._dynamo.variables.torch import tracing_state_functions

from ..config import DynamicShapesType
from ..errors import ConfigurationError
from .tracing import TRACE

if TYPE_CHECKING:
    from .region import Region

__all__ = [
    "Rejected",
    "compile_region",
    "forget_graphs",
    "is_inductor",
    "is_wanted",
    "leaf_integers",
    "marked",
    "rejection",
    "restrictions",
    "runs_as_traced",
    "static_shapes",
    "torch_counts",
]

# Torch refuses a further graph by itself beyond its own limit and warns in its own words; ours comes first.
_TORCH_LIMIT_MARGIN = 2


def compile_region(region: Region, *, disable: bool = False) -> Callable[..., Any]:
    """Return `call(module, args, kwargs)`, compiled as one full graph under the region's own code object.

    With `disable` it runs eager.

    Torch's cache, limits, logs and profiles are kept per code object: each region has its own, named after its class.
    (`isolate_recompiles=` would do the same per callable, but its id is one variable for all threads in torch 2.13.)
    """
    name = re.sub(r"\W", "_", region.plan.class_name)
    changes: dict[str, Any] = {"co_name": name, "co_firstlineno": next(_lines)}
    if sys.version_info >= (3, 11):
        changes["co_qualname"] = name
    own = types.FunctionType(_trampoline.__code__.replace(**changes), _trampoline.__globals__, name)
    call: Callable[..., Any] = torch.compile(
        own,
        backend=_RegionBackend(region),
        fullgraph=False,  # the door below converts to one full graph; the flag itself costs 5 microseconds a call
        dynamic=None,
        disable=disable,
    )
    if call is own:  # disabled, here or by TORCHDYNAMO_DISABLE=1
        return call
    _put_trace_door(call, own.__code__, region)
    return call


def _trampoline(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    TRACE.ours = True
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        TRACE.ours = False


# Dynamo remembers which sizes varied by file, line and name of a code object: a line of its own keeps each region's
# memory apart from that of the same class in another model.
_lines = itertools.count(1_000_000)


class _RegionBackend:
    """The backend, told to the region graph by graph. Torch keeps backends alive, so the region is held weakly."""

    def __init__(self, region: Region) -> None:
        self.region = weakref.ref(region)
        self.backend = lookup_backend(region.backend) if isinstance(region.backend, str) else region.backend
        self.options = {**region.platform_options, **region.config.options}
        self.is_inductor = is_inductor(region.backend)
        if (
            self.is_inductor
        ):  # a patch convolution gains nothing from another layout, and choosing one guards the batch
            self.options = {"layout_optimization": False, **self.options}

    def __call__(self, graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        region = self.region()
        if region is not None:
            region.judge(graph_module)
        keywords: dict[str, Any] = {}
        if self.options:
            keywords = {"config_patches" if self.is_inductor else "options": self.options}
        inputs = _graph_inputs(graph_module)
        with contextlib.ExitStack() as plainly:
            if region is not None and region.distrusts_sizes:
                plainly.enter_context(_patched(shapes_config, backed_size_oblivious=False))
                if self.is_inductor:  # its caches would hand out the code that was wrong
                    keywords["config_patches"] = {**self.options, "force_disable_caches": True}
            compiled = self.backend(graph_module, example_inputs, **keywords)
        if region is not None:
            region.judge(graph_module)  # a backend adds guards of its own
            region.saw_graph(inputs)
        return compiled


class _TraceDoor:
    """Stands before Dynamo's frame conversion, which runs only when no graph fits the call.

    So marks and config patches cost nothing on the calls that find their graph.
    """

    def __init__(self, region: Region, code: types.CodeType, convert: Any) -> None:
        self.region, self.code, self.convert = weakref.ref(region), code, convert
        self._torchdynamo_orig_backend = convert._torchdynamo_orig_backend  # by it torch walks to the backend

    def __call__(self, frame: Any, *args: Any, skip: int = 0, **kwargs: Any) -> Any:
        region = self.region()
        if region is None or frame.f_code is not self.code:
            if region is not None and not region.platform.supports_fullgraph:  # a piece between two breaks
                return self.convert(frame, *args, skip=skip + 1, **kwargs)
            return ConvertFrameReturn(skip_reason="not the frame of a region")
        values = frame.f_locals
        return region.trace(
            values["module"],
            values["args"],
            values["kwargs"],
            lambda: self.convert(frame, *args, skip=skip + 3, **kwargs),
        )

    @property
    def _clone_with_backend(self) -> Callable[[Any], _TraceDoor]:
        """Used by torch under DistributedDataParallel, to cut the graph at its buckets."""
        region = self.region()

        def clone(backend: Any) -> _TraceDoor:
            limit = region.config.recompile_limit + _TORCH_LIMIT_MARGIN if region is not None else None
            door = _TraceDoor.__new__(_TraceDoor)
            door.region, door.code = self.region, self.code
            door.convert = convert_frame_assert(backend, one_graph=True, recompile_limit=limit)
            door._torchdynamo_orig_backend = backend
            return door

        return clone


def _put_trace_door(call: Any, code: types.CodeType, region: Region) -> None:
    for cell in call.__closure__ or ():
        wrapper: Any = cell.cell_contents
        if isinstance(wrapper, CatchErrorsWrapper):
            plain: Any = wrapper._torchdynamo_orig_backend
            convert = plain
            if region.platform.supports_fullgraph:
                convert = convert_frame_assert(
                    plain._torchdynamo_orig_backend,
                    one_graph=True,
                    recompile_limit=region.config.recompile_limit + _TORCH_LIMIT_MARGIN,
                )
            wrapper._torchdynamo_orig_backend = _TraceDoor(region, code, convert)
            return
    raise RuntimeError(  # a later torch: the tests run this on every supported version
        f"torch {torch.__version__} builds its compile wrapper in a way that hf_compile does not know; use a torch "
        "version named in the README, or report this"
    )


def forget_graphs() -> None:
    """Drop every graph of the process, and torch's own counts."""
    torch._dynamo.reset()
    counters.clear()


def torch_counts() -> dict[str, int]:
    """Return how many graphs and breaks torch itself counted since `forget_graphs`."""
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def stance() -> str:
    """Return torch's stance, "default" unless the user set another."""
    return str(eval_frame._stance.stance)


def is_wanted(error: Exception) -> bool:
    """Say whether the user told torch to raise rather than compile again, by a stance or by its config."""
    return eval_frame._stance.stance == "fail_on_recompile" or isinstance(error, RecompileError)


def is_inductor(backend: str | Callable[..., Any]) -> bool:
    """Say whether a backend is torch's Inductor, by whatever name."""
    return isinstance(backend, str) and lookup_backend(backend) is lookup_backend("inductor")


def runs_as_traced(backend: str | Callable[..., Any]) -> bool:
    """Say whether a backend of torch runs the operations of a graph one by one, and so makes nothing of a size."""
    plain = (lookup_backend("eager"), lookup_backend("aot_eager"))
    return isinstance(backend, str) and any(lookup_backend(backend) is each for each in plain)


def static_shapes() -> contextlib.AbstractContextManager[None]:
    """Trace every dim as the number it is."""
    return _patched(
        dynamo_config, automatic_dynamic_shapes=False, assume_static_by_default=True, guard_nn_modules=True
    )


@contextlib.contextmanager
def marked(
    tensors: Mapping[str, torch.Tensor],
    *,
    shapes: DynamicShapesType,
    declared: Mapping[str, Mapping[int, str | None]],
    unbacked: Mapping[str, Mapping[int, str | None]],
    static: Mapping[str, int],
    batch: Collection[tuple[str, int]],
    stay_one: Collection[str],
    integers: Iterable[str],
    fixed_ones: Literal["none", "others", "all"],
    is_tracing: bool,
    duck_shapes: bool,
) -> Iterator[None]:
    """Mark the dims that vary, for one trace, and set the shape options of that trace.

    Args:
        tensors: name -> input; members of a container as `name[0]`.
        declared, unbacked: argument -> dim -> shape id.
        static: argument -> a dim that is to be fixed at its size.
        batch: (input, dim) of what grows with the batch: marked also where it is 1, and without a hint if asked for.
        stay_one: inputs whose dim 0 is 1 whatever the batch is.
        integers: torch's names of Python integers among the arguments, which may vary too.
        fixed_ones: whose dim 0 of size 1 stays fixed: of no tensor, of those after the first (there to broadcast), of
            all (a dim that the code squeezes away).
        is_tracing: what `torch.jit.is_tracing` answers: models leave out their shortcuts for one size when it is true.
        duck_shapes: dims of equal size are taken to be the same dim; for code that asks whether they are.

    Raises:
        ConfigurationError: a declared dim is out of range.
    """
    bases = [tensor._base for tensor in tensors.values() if tensor._base is not None]
    touched = {id(tensor): (tensor, set(vars(tensor))) for tensor in (*tensors.values(), *bases)}
    inputs = {id(tensor) for tensor in tensors.values()}
    try:
        for base in bases:  # the tensor that an input is a view of varies with it, and must not become a guard
            if id(base) not in inputs:
                torch._dynamo.mark_static(base)
        for position, (name, tensor) in enumerate(tensors.items()):
            argument = name.partition("[")[0]
            if argument in declared or argument in unbacked:
                _mark_declared(name, tensor, declared.get(argument, {}), unbacked.get(argument, {}))
                continue
            for dim, size in enumerate(tensor.shape):
                is_fixed_one = fixed_ones == "all" or (fixed_ones == "others" and position > 0) or name in stay_one
                if is_fixed_one and dim == 0 and size == 1:
                    torch._dynamo.mark_static(tensor, 0)  # or torch makes it dynamic by itself the second time
                    continue
                broadcasts = size == 1 and dim > 0 and (name, dim) not in batch
                if broadcasts or static.get(argument) == dim:
                    if duck_shapes:
                        torch._dynamo.mark_static(tensor, dim)
                    continue
                if duck_shapes and (name, dim) not in batch:  # a mark would give each dim a symbol of its own
                    continue
                if shapes == DynamicShapesType.UNBACKED and (name, dim) in batch:
                    shape_id = f"hf_compile_{size}" if duck_shapes else None
                    torch._dynamo.decorators.mark_unbacked(tensor, dim, shape_id=shape_id, min=1)
                else:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
        with (
            _patched(
                shapes_config, backed_size_oblivious=shapes != DynamicShapesType.BACKED, use_duck_shape=duck_shapes
            ),
            _patched(
                dynamo_config,
                guard_nn_modules=True,
                assume_static_by_default=not duck_shapes,
                ignore_logging_functions=_LOGGING,
            ),
            _answering(torch.jit.is_tracing, is_tracing),  # type: ignore[attr-defined]
            torch.compiler.config.patch(dynamic_sources=",".join(integers)),  # type: ignore[attr-defined]
            _quiet(),
        ):
            yield
    finally:  # marks are attributes of the caller's tensors
        for tensor, before in touched.values():
            for attribute in set(vars(tensor)) - before:
                delattr(tensor, attribute)


@contextlib.contextmanager
def _answering(question: Callable[[], bool], answer: bool) -> Iterator[None]:
    """Let code that Dynamo traces get an answer; traces come one at a time, by Dynamo's own lock."""
    answers = tracing_state_functions()
    before = answers[question]
    answers[question] = answer
    try:
        yield
    finally:
        answers[question] = before


_LOGGING = {getattr(logging.Logger, level) for level in ("debug", "info", "warning", "error", "exception", "critical")}
_LOGGING |= {getattr(logging.Logger, once) for once in ("warning_once", "info_once") if hasattr(logging.Logger, once)}
_FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing the stack of an operator that a trial trace fails in; what fails is explained once."""
    thread = threading.get_ident()

    def is_from_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    _FAKE_TENSOR_LOG.addFilter(is_from_elsewhere)
    try:
        yield
    finally:
        _FAKE_TENSOR_LOG.removeFilter(is_from_elsewhere)


def _patched(config: Any, **options: Any) -> contextlib.AbstractContextManager[None]:
    """Set options of one of torch's config modules, whose `patch` is made at import and unknown to type checkers."""
    patched: contextlib.AbstractContextManager[None] = config.patch(**options)
    return patched


def _mark_declared(
    name: str, tensor: torch.Tensor, declared: Mapping[int, str | None], unbacked: Mapping[int, str | None]
) -> None:
    for dims, is_unbacked in ((declared, False), (unbacked, True)):
        for dim, shape_id in dims.items():
            if not -tensor.dim() <= dim < tensor.dim():
                raise ConfigurationError(
                    f"dynamic_arg_dims[{name!r}]: dim {dim} is out of range; the tensor has {tensor.dim()} dims"
                )
            if is_unbacked or shape_id is not None:
                torch._dynamo.decorators.mark_unbacked(tensor, dim % tensor.dim(), shape_id=shape_id)
            else:
                torch._dynamo.mark_dynamic(tensor, dim % tensor.dim())


def leaf_integers(args: tuple[Any, ...], kwargs: Mapping[str, Any], constants: Mapping[str, Any]) -> Iterator[str]:
    """Yield torch's name of each Python integer of a call, in tuples and lists too; constants left out."""

    def walk(name: str, value: Any) -> Iterator[str]:
        if type(value) is int:
            yield name
        elif isinstance(value, (tuple, list)):
            for index, member in enumerate(value):
                yield from walk(f"{name}[{index}]", member)

    yield from walk("L['args']", args)
    for name, value in kwargs.items():
        if value is not constants.get(name):
            yield from walk(f"L['kwargs'][{name!r}]", value)


def _graph_inputs(graph_module: torch.fx.GraphModule) -> dict[str, tuple[int | None, ...]]:
    """Return Dynamo's name of each tensor input -> its sizes, None where the graph has a symbol."""
    inputs: dict[str, tuple[int | None, ...]] = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        argument, value = node.meta.get("grapharg"), node.meta.get("example_value")
        if argument is None or not isinstance(value, torch.Tensor):
            continue
        name = argument.source.name
        name = name() if callable(name) else name
        inputs[name] = tuple(_fixed_size(size) for size in value.shape)
    return inputs


_SCALES = (2, 3, 17)


def restrictions(
    graph_module: torch.fx.GraphModule,
    name_of_input: Callable[[str], str | None],
    batch: Collection[tuple[str, int]],
) -> frozenset[tuple[str, int]]:
    """Return (input, dim) of what the graph serves at few sizes only, though it was marked.

    Such a dim became a number, or a guard excludes a size of it, or would not hold at 2, 3 or 17 times its size.

    Args:
        graph_module: as Dynamo hands it to a backend, or after the backend is done, with the guards added there.
        name_of_input: from Dynamo's name to the name wanted, None for what is no input.
        batch: (input, dim) of what grows with the batch.
    """
    found: set[tuple[str, int]] = set()
    symbols: dict[tuple[str, int], Any] = {}
    shape_env: Any = None
    for node in graph_module.graph.find_nodes(op="placeholder"):
        argument, value = node.meta.get("grapharg"), node.meta.get("example_value")
        if argument is None or not isinstance(value, torch.Tensor):
            continue
        source = argument.source.name
        name = name_of_input(source() if callable(source) else source)
        if name is None:
            continue
        for dim, size in enumerate(value.shape):
            if not isinstance(size, torch.SymInt):
                continue
            shape_env = size.node.shape_env
            expression = shape_env.simplify(size.node.expr)
            if expression.is_number:
                found.add((name, dim))
            elif expression.is_symbol:
                symbols[name, dim] = expression
    if shape_env is None:
        return frozenset()
    hints = shape_env.backed_var_to_val
    batches = {symbol for place, symbol in symbols.items() if place in batch and symbol in hints}
    guards = [guard.expr for guard in shape_env.guards]
    for place, symbol in symbols.items():
        if symbol not in hints:
            continue
        alone = [guard for guard in guards if guard.free_symbols == {symbol}]
        scaled = all(_holds(guard, {symbol: hints[symbol] * scale}) for guard in alone for scale in _SCALES)
        excluded = [guard for guard in alone if isinstance(guard, sympy.Ne)]  # one size, maybe a plausible one
        if not scaled or not all(_holds(guard, {symbol: size}) for guard in excluded for size in range(1, 129)):
            found.add(place)
    bounds = [guard for guard in guards if guard.free_symbols & batches and _is_bound(guard)]
    for scale in _SCALES:  # a batch that reaches an operator as a product with other sizes
        sizes = {symbol: hint * (scale if symbol in batches else 1) for symbol, hint in hints.items()}
        if not all(_holds(guard, sizes) for guard in bounds):
            found |= {place for place, symbol in symbols.items() if symbol in batches}
    return frozenset(found)


def _is_bound(guard: Any) -> bool:
    """Say whether a guard compares a size with a number, or orders sizes; two sizes that are equal are no bound."""
    is_equality = isinstance(guard, sympy.Eq)
    return bool(guard.is_Relational) and (not is_equality or any(side.is_number for side in guard.args))


def _holds(guard: Any, sizes: Mapping[Any, int]) -> bool:
    return bool(guard.xreplace(sizes) != False)  # noqa: E712  an expression that stays open holds


class Rejected(Exception):
    """A graph serves fewer sizes than another way of tracing might reach."""

    def __init__(self, restricted: frozenset[tuple[str, int]]) -> None:
        super().__init__(f"the graph is tied to a few sizes of {sorted(restricted)}")
        self.restricted = restricted


def rejection(error: BaseException | None) -> Rejected | None:
    """Return the rejection below what torch made of it, or None."""
    while error is not None and not isinstance(error, Rejected):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


def _fixed_size(size: int | torch.SymInt) -> int | None:
    """Return a size that the graph fixes, None for one that stayed a symbol and was not tied to a number."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.shape_env.simplify(size.node.expr)
    return int(expression) if expression.is_number else None
