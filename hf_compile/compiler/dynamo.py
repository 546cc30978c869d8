"""The one place that touches `torch._dynamo` and torch's private compile hooks."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch._dynamo.config as dynamo_config
import torch.fx.experimental._config as shapes_config
from torch._dynamo import eval_frame
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.convert_frame import CatchErrorsWrapper, convert_frame_assert
from torch._dynamo.exc import RecompileError
from torch._dynamo.types import ConvertFrameReturn

from ..config import DynamicShapesType
from ..errors import ConfigurationError
from .tracing import TRACE

if TYPE_CHECKING:
    from .region import Region

__all__ = ["compile_region", "is_wanted", "leaf_tensors", "marked"]

# Torch refuses a further graph by itself beyond its own limit and warns in its own words; ours comes first.
_TORCH_LIMIT_MARGIN = 2


def compile_region(region: Region) -> Callable[..., Any]:
    """Return `call(module, args, kwargs)`, compiled as one full graph under the region's own code object.

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
    )
    if call is own:  # TORCHDYNAMO_DISABLE=1
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
        self.backend = region.backend
        self.options = dict(region.config.options)
        if (
            self.backend == "inductor"
        ):  # a patch convolution gains nothing from another layout, and choosing one guards the batch
            self.options = {"layout_optimization": False, **self.options}

    def __call__(self, graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        region = self.region()
        if region is not None:
            region.saw_graph(_graph_inputs(graph_module))
        keywords: dict[str, Any] = {}
        if self.options:
            keywords = {"config_patches": self.options} if self.backend == "inductor" else {"options": self.options}
        backend = lookup_backend(self.backend) if isinstance(self.backend, str) else self.backend
        return backend(graph_module, example_inputs, **keywords)


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


def stance() -> str:
    """Return torch's stance, "default" unless the user set another."""
    return str(eval_frame._stance.stance)


def is_wanted(error: Exception) -> bool:
    """Say whether the user told torch to raise rather than compile again, by a stance or by its config."""
    return eval_frame._stance.stance == "fail_on_recompile" or isinstance(error, RecompileError)


@contextlib.contextmanager
def marked(
    tensors: Mapping[str, torch.Tensor],
    *,
    shapes: DynamicShapesType,
    declared: Mapping[str, Mapping[int, str | None]],
    unbacked: Mapping[str, Mapping[int, str | None]],
    static: Mapping[str, int],
    broadcast: bool,
) -> Iterator[None]:
    """Mark the dims that vary, for one trace, and set the shape options of that trace.

    Args:
        tensors: name -> input; members of a container as `name[0]`.
        declared, unbacked: argument -> dim -> shape id.
        static: argument -> a dim that is to be fixed at its size.
        broadcast: dim 0 of size 1 of any tensor but the first is there to broadcast, and stays fixed.

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
                if broadcast and position > 0 and dim == 0 and size == 1:
                    torch._dynamo.mark_static(tensor, 0)  # or torch makes it dynamic by itself the second time
                    continue
                if (size == 1 and dim > 0) or static.get(
                    argument
                ) == dim:  # a size-1 dim further right is there to broadcast
                    continue
                if shapes == DynamicShapesType.UNBACKED and dim == 0:
                    torch._dynamo.decorators.mark_unbacked(tensor, dim)
                else:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
        with (
            _patched(shapes_config, backed_size_oblivious=shapes != DynamicShapesType.BACKED, use_duck_shape=False),
            _patched(dynamo_config, guard_nn_modules=True),
        ):
            yield
    finally:  # marks are attributes of the caller's tensors
        for tensor, before in touched.values():
            for attribute in set(vars(tensor)) - before:
                delattr(tensor, attribute)


def _patched(config: Any, **options: bool) -> contextlib.AbstractContextManager[None]:
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


def leaf_tensors(
    arguments: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return name -> plain tensor of a call, containers looked into."""
    found: dict[str, torch.Tensor] = {}

    def walk(name: str, value: Any) -> None:
        if type(value) is torch.Tensor:
            found[name] = value
        elif isinstance(value, (tuple, list)):
            for index, member in enumerate(value):
                walk(f"{name}[{index}]", member)
        elif isinstance(value, Mapping):
            for key, member in value.items():
                walk(f"{name}[{key}]", member)

    for position, value in enumerate(args):
        walk(arguments[position] if position < len(arguments) else f"args[{position}]", value)
    for name, value in kwargs.items():
        walk(name, value)
    return found


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


def _fixed_size(size: int | torch.SymInt) -> int | None:
    """Return a size that the graph fixes, None for one that stayed a symbol and was not tied to a number."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.shape_env.simplify(size.node.expr)
    return int(expression) if expression.is_number else None
