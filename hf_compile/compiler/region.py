"""The runtime of one region class: which graph serves a call, what a failed compile costs, and the counts of it."""

from __future__ import annotations

import collections
import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch._dynamo import eval_frame
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from transformers.utils import logging

from .. import explanation
from ..config import CompilationMode, CompileRange, DynamicShapesType
from ..counters import CompilationCounter, compilation_counter
from ..errors import CompileRangeError, ConfigurationError, RegionCompileError, VerificationError
from ..inputs import leaf_tensors
from ..plan import EncoderPlan, RegionPlan
from ..precompute import Precompute
from ..regions import names_in_code
from ..signature import InputVerdict
from ..verification import largest_difference, tolerance
from . import dynamo, hooks
from .encoder_call import EncoderCall
from .layout import Copies, Layouts, was_written
from .progress import progress_bar

__all__ = ["Region", "bind"]

logger = logging.get_logger("transformers.hf_compile")

MAX_SEQLEN = 1 << 20
"""Given to attention as the longest segment, which our operator does not need: an int that varied would be a guard."""
INSTALLED_AFTER_SECONDS = 0.2
"""Torch puts a graph into its cache after it lets go of its lock; until then other threads look again, not compile."""

_ROUNDING = 30
"""Above the tolerance, and still taken for rounding when the graph was made with the greatest care: some encoders are
further than that from float64 in eager too."""
SIZES_TO_PROVE = 3
"""Compared with eager, a graph that was made without a size hint counts as right."""

_NEVER = (0, 0, float("-inf"))
_NO_GRAPH = (
    "torch traced nothing: Dynamo is switched off (TORCHDYNAMO_DISABLE, torch._dynamo.config.disable or a stance)"
)
_SOURCE = re.compile(r"L\['(?P<kind>args|kwargs)'\]\[(?P<key>[^\]]+)\](?P<rest>.*)")
_RECORDED = ("output_attentions", "output_hidden_states", "return_dict")


class _Refused(Exception):
    """No graph fits, and a compile for this kind of call was given up before (or is not wanted)."""


class _TryAgain(Exception):
    """Another thread compiled this kind of call in the meantime."""


class _ProveFirst(Exception):
    """A graph is to be made, and this call is not yet set up to compare it with eager."""


class _NotDense(Exception):
    """No graph fits, and an input is not dense, or is never read: made so, or left out, it may well fit."""


@dataclasses.dataclass(frozen=True)
class Remedies:
    """How one trace is made; see `dynamo.marked`."""

    shapes: DynamicShapesType
    fixed_ones: Literal["none", "others", "all"] = "none"
    is_tracing: bool = False
    duck_shapes: bool = False

    def words(self, plain: Remedies) -> Iterator[str]:
        """Yield what is not plain about it, and what that helps against."""
        if self.shapes != plain.shapes:
            yield "dim 0 has no hint while tracing: the code, or an operator, chooses by the batch size"
        if self.fixed_ones == "others":
            yield "dim 0 of size 1 stays fixed in every input but the first: it is there to broadcast"
        if self.fixed_ones == "all":
            yield "dim 0 of size 1 stays fixed: the code squeezes it away"
        if self.is_tracing:
            yield "torch.jit.is_tracing is true while tracing: the code leaves out its shortcut for one size"
        if self.duck_shapes:
            yield "dims of equal size share a symbol: the code asks whether they are equal"


class Region:
    """One region class of one encoder at work.

    Args:
        plan: what was decided about it.
        encoder: the plan of its encoder.
        counter: counts of the model.
        give_up: takes the whole model back to eager; called before an error that means a wrong declaration.
    """

    def __init__(
        self, plan: RegionPlan, encoder: EncoderPlan, counter: CompilationCounter, give_up: Callable[[], None]
    ) -> None:
        self.plan, self.config, self.backend = plan, encoder.config, encoder.backend
        self.platform = encoder.platform
        is_its_own = encoder.backend == encoder.platform.simple_compile_backend
        self.platform_options = dict(encoder.platform.options) if is_its_own else {}
        self.name = ".".join(filter(None, (encoder.info.path, plan.class_name)))
        self.give_up = give_up
        self.counters = (counter, compilation_counter)
        self.calls = self.eager_calls = self.graphs = 0
        self.compile_seconds = 0.0
        self.eager_reasons: collections.Counter[str] = collections.Counter()
        self.inputs: dict[str, InputVerdict] = {}
        self.made_for: list[str] = []
        """For each graph, the mode, dtype and shapes of the call that needed it."""
        self.remedies: dict[str, None] = {}
        """What was done so that one graph serves every size, in words."""
        self.undos: list[Callable[[], None]] = []
        self.lock = threading.RLock()
        self._failures: dict[tuple[Any, ...], str] = {}
        self._finished: dict[tuple[Any, ...], tuple[int, int, float]] = {}
        self._local = threading.local()
        self._sizes = {}
        for key, sizes in self.config.compile_sizes.items():
            owner, name, dim = split_size_key(key)
            if owner in ("", plan.class_name) and name in plan.arguments:
                self._sizes[name, dim] = sizes
        self._calls: dict[Any, Callable[..., Any]] = {}
        self.ranged = self.config.compile_ranges != (CompileRange(),) or bool(self._sizes)
        self.why_static = encoder.why_static
        policies = self.config.execution_modes
        self.eager_modes = {mode for mode, policy in policies.items() if policy == "eager"}
        self.careful = self.ranged or self.config.verify or bool(self.eager_modes - {"train"} or self.why_static)
        # What Transformers passes on to every layer, and this one takes by **kwargs and never reads
        self.dropped = () if plan.role == "encoder" else tuple(name for name in _RECORDED[:2] if name in plan.unread)
        self.constants: dict[str, Any] = {}
        if (
            plan.role == "block"
            and plan.ragged
            and plan.reads_max_seqlen
            and (plan.accepts_keywords or "max_seqlen" in plan.arguments)
        ):
            self.constants["max_seqlen"] = MAX_SEQLEN
        self.encoder_call: EncoderCall | None = None
        self.precompute = Precompute(next(iter(plan.modules.values()))) if plan.role != "block" else None
        self.careful = self.careful or bool(self.precompute)
        self._plain = Remedies(DynamicShapesType(self.config.dynamic_shapes))
        # Inductor (torch 2.13) may settle a size without a hint for good, caches the code, and asks for no guard
        is_safe = callable(self.backend) or dynamo.runs_as_traced(self.backend)
        self._may_unback = is_safe and self._plain.shapes == DynamicShapesType.BACKED_SIZE_OBLIVIOUS
        self._layouts = Layouts()
        self._made_by: set[Remedies] = set()
        self._spoilt: set[Remedies] = set()
        self._proved: set[tuple[torch.Size, ...]] = set()
        self._proves = not callable(self.backend) and not dynamo.runs_as_traced(self.backend)
        self.distrusts_sizes = False
        """The backend is not told that 1 is a size like any other: a graph that was told so differed from eager."""
        self.settled = False
        """There is a graph, and it was proved at enough sizes if it was made in a way that a backend may get wrong."""
        self.version = 0
        self.call = self.call_for(None)

    # --- which graph -------------------------------------------------------------------------------------------------

    def call_for(self, key: Any) -> Callable[..., Any]:
        """Return the compiled callable of one range or fixed size; each has graphs of its own."""
        with self.lock:
            if key not in self._calls:
                is_fixed = isinstance(key, tuple)
                self._calls[key] = dynamo.compile_region(self, disable=bool(self.why_static) and not is_fixed)
            return self._calls[key]

    def pick(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, int], str]:
        """Return the callable for these sizes, argument -> dim that is fixed, and why the callable is an eager one.

        Raises:
            CompileRangeError: the size lies outside every range, and `out_of_range` says "error".
        """
        if not self.ranged:
            return self.call, {}, self.why_static
        tensors = leaf_tensors(self.plan.arguments, args, kwargs)
        for (name, dim), sizes in self._sizes.items():
            tensor = tensors.get(name)
            if tensor is not None and -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] in sizes:
                return self.call_for((name, dim, tensor.shape[dim])), {name: dim % tensor.dim()}, ""
        name, size = next(((n, t.shape[0]) for n, t in tensors.items() if t.dim()), ("", 1))
        found = next((each for each in self.config.compile_ranges if size in each), None)
        if found is not None:
            return self.call_for(found), {}, self.why_static
        if self.config.out_of_range == "eager":
            return eager_call, {}, "a size outside the compile ranges (out_of_range='eager')"
        ranges = ", ".join(map(str, self.config.compile_ranges))
        raise CompileRangeError(
            f"{self.name}: dim 0 of {name} is {size}, outside the compile ranges {ranges}; widen compile_ranges, "
            "or pass out_of_range='eager'"
        )

    # --- compile -----------------------------------------------------------------------------------------------------

    def trace(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], convert: Callable[[], Any]
    ) -> Any:
        """Let Dynamo trace a call that no graph fits; runs under Dynamo's own lock, in the calling thread."""
        unread = self._unread_lists(kwargs)
        if unread:
            self.dropped += unread
            raise _NotDense
        tensors = leaf_tensors(self.plan.arguments, args, kwargs)
        if not getattr(self._local, "dense", False) and not self._layouts.fit(tensors):
            raise _NotDense
        kind = self._kind(module, args, kwargs)
        self._look_again_if_compiled_by_another_thread(kind)
        self._refuse_further_graphs(kind)
        if self._proves and not getattr(self._local, "checked", False):
            raise _ProveFirst
        started = time.perf_counter()
        before = self.graphs
        try:
            with progress_bar(f"compiling {self.plan.class_name}"):
                self._look_at_batch(module, tensors)
                self._local.integers = tuple(dynamo.leaf_integers(args, kwargs, self.constants))
                result = self._convert(tensors, convert)
        except Exception as error:
            error.hf_compile_kind = kind  # type: ignore[attr-defined]
            raise
        finally:
            seconds = time.perf_counter() - started
            self.compile_seconds += seconds
        self._finished[kind] = self._finished.get(kind, _NEVER)[0] + 1, threading.get_ident(), time.monotonic()
        shapes = ", ".join(f"{name} {'x'.join(map(str, tensor.shape))}" for name, tensor in tensors.items())
        self.made_for += [f"{mode_of_execution()} {kind[2]} {shapes}".replace("torch.", "")] * (self.graphs - before)
        self._count(num_backend_compilations=self.graphs - before)
        self._layouts.keep(tensors)
        self.version += 1
        self._note_unread(tensors)
        logger.info(f"{self.name}: graph {self.graphs} compiled in {seconds:.1f} s ({mode_of_execution()})")
        return result

    def _unread_lists(self, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Return keywords with lists that the code only hands on by `**kwargs`: their length would be a guard."""
        lists = [name for name, value in kwargs.items() if isinstance(value, list) and name not in self.plan.arguments]
        if not lists or not self.plan.accepts_keywords or self.plan.role == "encoder":
            return ()
        named = names_in_code(next(iter(self.plan.modules.values())))
        return tuple(name for name in lists if name not in named)

    def _look_again_if_compiled_by_another_thread(self, kind: tuple[Any, ...]) -> None:
        """Dynamo lets waiting threads in one by one, and each would compile what the first one did."""
        graphs, thread, finished = self._finished.get(kind, _NEVER)
        known = self._local.__dict__.setdefault("known", {})
        is_news = graphs > known.get(kind, 0)
        known[kind] = graphs
        if thread != threading.get_ident() and (is_news or time.monotonic() - finished < INSTALLED_AFTER_SECONDS):
            raise _TryAgain

    def _refuse_further_graphs(self, kind: tuple[Any, ...]) -> None:
        if kind in self._failures:
            raise _Refused(self._failures[kind])
        if not self.graphs:
            return
        if self.config.fail_on_recompile:
            raise RegionCompileError(
                f"{self.name}: this call needs a further graph, and fail_on_recompile is set; {describe(kind)}"
            )
        if self.config.mode == CompilationMode.ONE_GRAPH:
            raise _Refused(f"mode ONE_GRAPH: this call would need a second graph; {describe(kind)}")
        if self.graphs >= self.config.recompile_limit * len(self._calls):
            raise _Refused(f"recompile_limit={self.config.recompile_limit} is reached; {describe(kind)}")

    def _convert(self, tensors: Mapping[str, torch.Tensor], convert: Callable[[], Any]) -> Any:
        """Trace as planned; where that fails or gives a graph for few sizes only, try the remedies that may help."""
        if self.why_static:
            with dynamo.static_shapes():
                return convert()
        plain = self._plain
        tried: dict[Remedies, frozenset[tuple[str, int]] | Exception] = {}
        for remedies in self._remedies(plain, tensors, tried):
            no_hint_failed = any(each.shapes == DynamicShapesType.UNBACKED for each in self._spoilt)
            if remedies in self._spoilt or (no_hint_failed and remedies.shapes == DynamicShapesType.UNBACKED):
                continue
            try:
                result = self._attempt(remedies, tensors, convert, tolerated=self._tolerated(tried.get(plain)))
                self._made_by.add(remedies)
                self.remedies.update(dict.fromkeys(remedies.words(plain)))
                return result
            except ConfigurationError:
                raise
            except Exception as error:  # noqa: BLE001  the next way may do
                rejected = dynamo.rejection(error)
                tried[remedies] = error if rejected is None else rejected.restricted
                logger.debug(f"{self.name}: traced as {remedies}: {tried[remedies]}")
        served = {remedies: found for remedies, found in tried.items() if not isinstance(found, Exception)}
        if not served:
            raise next(error for error in tried.values() if isinstance(error, Exception))
        if self._layouts.number(tensors):  # the order of dims in memory may be what ties the graph to a size
            self._begin_anew()
            raise _NotDense
        best = min(served, key=lambda remedies: len(served[remedies]))
        self._made_by.add(best)
        self.remedies.update(dict.fromkeys(best.words(plain)))
        return self._attempt(best, tensors, convert, tolerated=None)

    def _look_at_batch(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """Find which dims are the batch: those that double with it, where that can be told, else dim 0 of all."""
        self._local.first = next(iter(tensors), "")
        self._local.batch = {(name, 0) for name, tensor in tensors.items() if tensor.dim()}
        self._local.stay_one = frozenset()
        if self.encoder_call is None or self.plan.ragged:
            return
        path = next(path for path, each in self.plan.modules.items() if each is module)
        doubled = self.encoder_call.with_twice_the_batch(path, self.plan.arguments)
        if doubled.keys() != tensors.keys() or any(doubled[name].dim() != tensors[name].dim() for name in tensors):
            return
        grown = {
            (name, dim)
            for name, tensor in tensors.items()
            for dim, size in enumerate(tensor.shape)
            if size and doubled[name].shape[dim] == 2 * size
        }
        if not any(name == self._local.first for name, _ in grown):
            return
        self._local.batch = grown
        self._local.stay_one = frozenset(
            name for name, tensor in tensors.items() if tensor.dim() and tensor.shape[0] == doubled[name].shape[0] == 1
        )
        if self._local.stay_one:
            self.remedies[f"dim 0 stays 1 at any batch: {', '.join(sorted(self._local.stay_one))}"] = None

    def _tolerated(self, plain: frozenset[tuple[str, int]] | Exception | None) -> frozenset[tuple[str, int]]:
        """Return what a remedy need not cure: the plain trace was tied to it too, and it is not the first input."""
        if plain is None or isinstance(plain, Exception) or self.plan.asks_is_tracing:
            return frozenset()
        return frozenset((name, dim) for name, dim in plain if name != self._local.first)

    def _remedies(
        self,
        plain: Remedies,
        tensors: Mapping[str, torch.Tensor],
        tried: Mapping[Remedies, frozenset[tuple[str, int]] | Exception],
    ) -> Iterator[Remedies]:
        """Yield ways of tracing, the plain one first; each looks at what became of those before it."""
        asks, may_unback = self.plan.asks_is_tracing, self._may_unback
        unbacked = dataclasses.replace(plain, shapes=DynamicShapesType.UNBACKED)
        if self.plan.branches_on_batch and may_unback:
            yield unbacked
        yield plain
        outcome = tried[plain]
        ones = [tensor.dim() > 0 and tensor.shape[0] == 1 for tensor in tensors.values()]
        if isinstance(outcome, Exception) and any(ones[1:]):
            yield dataclasses.replace(plain, fixed_ones="others")
        if isinstance(outcome, Exception) and ones[:1] == [True]:
            yield dataclasses.replace(plain, fixed_ones="all")
        if asks:
            yield dataclasses.replace(plain, is_tracing=True)
        if may_unback and not isinstance(outcome, Exception) and outcome & self._local.batch:
            if unbacked not in tried:
                yield unbacked
            yield dataclasses.replace(unbacked, duck_shapes=True)
            if asks:
                yield dataclasses.replace(unbacked, is_tracing=True)

    def _attempt(
        self,
        remedies: Remedies,
        tensors: Mapping[str, torch.Tensor],
        convert: Callable[[], Any],
        tolerated: frozenset[tuple[str, int]] | None,
    ) -> Any:
        self._local.tolerated = tolerated
        with dynamo.marked(
            tensors,
            **vars(remedies),
            batch=self._local.batch,
            stay_one=self._local.stay_one,
            integers=self._local.integers,
            declared=self.plan.dynamic_arg_dims,
            unbacked=self.plan.unbacked_dims,
            static=getattr(self._local, "static", {}),
        ):
            return convert()

    def judge(self, graph_module: torch.fx.GraphModule) -> None:
        """Refuse a graph that serves few sizes, while there are other ways to try."""
        if self.why_static:
            return
        restricted = dynamo.restrictions(graph_module, self._name_of_input, self._local.batch)
        if not self.plan.asks_is_tracing:  # then another size is fixed by a weight, which no remedy changes
            restricted &= self._local.batch
        if not self._may_unback:  # nor does one change what the batch is tied to
            restricted -= self._local.batch
        tolerated = getattr(self._local, "tolerated", None)
        if tolerated is not None and not restricted <= tolerated:
            raise dynamo.Rejected(restricted)

    def _name_of_input(self, source: str) -> str | None:
        """Return our name of an input from Dynamo's: `L['args'][0][1]` is `hidden_states[1]`."""
        match = _SOURCE.match(source)
        if match is None:
            return None
        key = match["key"].strip("'\"")
        argument = self.plan.arguments[int(key)] if match["kind"] == "args" else key
        return argument + match["rest"].replace("'", "")

    def saw_graph(self, inputs: Mapping[str, tuple[int | None, ...]]) -> None:
        """Take note of a graph that reached the backend, and of the dims that are symbols in it."""
        self.graphs += 1
        self._count(num_graphs_seen=1)
        annotated = {verdict.name: verdict for verdict in self.plan.inputs}
        for source, sizes in inputs.items():
            name = self._name_of_input(source)
            if name is None:
                continue
            argument = name.partition("[")[0]
            dims = tuple(dim for dim, size in enumerate(sizes) if size is None)
            shape = "x".join("?" if size is None else str(size) for size in sizes)
            declared = annotated.get(argument)
            origin = declared.reason.partition(":")[0] if declared is not None else "passed by keyword"
            if declared is not None and declared.verdict == "pending":
                origin = "has no annotation"
            verdict: Any = "dynamic" if dims else "static"
            outcome = "may have any size" if dims else "every dim is fixed by the model"
            reason = f"{origin}; {outcome}, shape {shape or 'scalar'}"
            previous = self.inputs.get(name)
            if previous is None or len(previous.dims) < len(dims):
                self.inputs[name] = InputVerdict(name, verdict, dims, reason)

    def _note_unread(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name in tensors:
            if name not in self.inputs:
                self.inputs[name] = InputVerdict(name, "static", (), "not read by the graph")

    def _kind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What tells one kind of call from another, sizes left out."""

        def kind(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.dtype, value.device.type, value.dim(), value.requires_grad
            if isinstance(value, (tuple, list)):
                return tuple(map(kind, value))
            if isinstance(value, Mapping):
                return tuple((key, kind(member)) for key, member in value.items())
            return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__

        names = self.plan.arguments + tuple(f"args[{i}]" for i in range(len(self.plan.arguments), len(args)))
        described = tuple((name, kind(value)) for name, value in (*zip(names, args, strict=False), *kwargs.items()))
        return mode_of_execution(), module.training, next(self._dtypes(module), None), described

    @staticmethod
    def _dtypes(module: nn.Module) -> Any:
        return (parameter.dtype for parameter in module.parameters())

    def _count(self, **counts: int) -> None:
        for counter in self.counters:
            counter.add(**counts)

    # --- a call that is not plain ------------------------------------------------------------------------------------

    def eager(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
        """Run the module as torch does without a compiled slot, and take note of why."""
        result = module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.note_eager(reason)
        return result

    def note_eager(self, reason: str) -> None:
        """Count one eager call; the first of each reason is said aloud."""
        self.eager_calls += 1
        self._count(num_eager_calls=1)
        self.eager_reasons[reason] += 1
        if self.eager_reasons[reason] == 1:
            logger.info(f"{self.name} runs eager: {reason}")

    def recover(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Serve a call whose compile (or graph) failed: eager's result, or eager's own error.

        Raises:
            RegionCompileError: eager works, and the config says `strict`, or `fail_on_recompile`.
        """
        if isinstance(error, ConfigurationError):  # a declared dim that the tensor does not have
            self.give_up()
            raise error
        if isinstance(error, RegionCompileError) or dynamo.is_wanted(error):
            raise error
        if isinstance(error, checkpoint._StopRecomputationError):  # torch ends a checkpoint's second forward by it
            raise error
        result = type(module).forward(module, *args, **kwargs)  # if eager raises too, that is the error to show
        kind = getattr(error, "hf_compile_kind", None)
        reason = str(error) if isinstance(error, _Refused) else explanation.explain(error)
        if self.config.strict:
            raise RegionCompileError(f"{self.name} could not be compiled: {reason}") from error
        if not isinstance(error, _Refused):
            self._count(num_compile_failures=1)
            if kind is not None:
                self._failures[kind] = reason
                logger.warning(f"{self.name} runs eager for this kind of call: {reason}")
            elif self.graphs and self._start_over():
                logger.warning(f"{self.name}: a graph failed at run time and will be made in another way: {reason}")
            elif self.graphs:  # a graph was built and fails where eager works
                reason = f"a compiled graph failed at run time: {reason}"
                self.give_up_region(reason)
                logger.warning(f"{self.name} runs eager from now on: {reason}")
        self.note_eager(reason)
        return result

    def _start_over(self) -> bool:
        """Forget the graphs if one was made by a remedy, which then is not tried again; say whether that was so."""
        made_by = self._made_by - {self._plain}
        if not made_by:
            return False
        self._spoilt |= made_by
        self._made_by = set()
        self._proved.clear()
        self.settled = False
        self._forget()
        return True

    def _forget(self) -> None:
        """Make every graph again."""
        self._begin_anew()
        self.graphs = 0
        self.made_for.clear()
        self.remedies.clear()

    def _begin_anew(self) -> None:
        """Compile under other code objects from now on: Dynamo remembers which sizes and strides varied in the old."""
        with self.lock:
            self._calls.clear()
            self.call = self.call_for(None)
            self.version += 1

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call through its graph; everything that stands around it was done."""
        for name in self.dropped:
            kwargs.pop(name, None)
        call, self._local.static, why_eager = self.pick(args, kwargs)
        if why_eager:
            self.note_eager(why_eager)
            return call(module, args, kwargs)
        given = kwargs
        if self.precompute:
            given = {**kwargs, **self._precomputed(args, kwargs)}
        copies = Copies()
        dense_args, dense_kwargs = self._laid_out(args, given, copies)
        check = _Check(module, args, kwargs) if self.config.verify or self._is_to_prove(args, kwargs) else None
        before = self.graphs
        self._local.dense = True
        try:
            while True:
                try:
                    self._local.checked = check is not None
                    result = call(module, dense_args, dense_kwargs)
                    break
                except _ProveFirst:
                    check = _Check(module, args, kwargs)
                except _TryAgain:
                    time.sleep(INSTALLED_AFTER_SECONDS / 50)
                except _NotDense:  # a list that nobody reads, or inputs to be laid out in another way
                    call, self._local.static, _ = self.pick(args, kwargs)
                    given = {name: value for name, value in given.items() if name not in self.dropped}
                    copies = Copies()
                    dense_args, dense_kwargs = self._laid_out(args, given, copies)
        except Exception as error:  # noqa: BLE001  whatever it was, eager decides
            return self.recover(module, args, kwargs, error)
        finally:
            self._local.dense = self._local.checked = False
        if copies.pairs:
            self.remedies["inputs that are views are copied: their strides would be guards"] = None
        result = copies.write_back(result)  # in eager the caller's own tensor is written to, and may come back
        if not self.graphs:
            self.note_eager(_NO_GRAPH)
            return result
        is_new = self.graphs > before and (self.config.verify or self._proves)
        if check is not None and (is_new or self._has_no_hint()):
            result = self._verified(module, check, result)
        else:
            self.calls += 1
        proved = not self._has_no_hint() or len(self._proved) >= SIZES_TO_PROVE
        self.settled = self.graphs > 0 and proved
        return result

    def _laid_out(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], copies: Copies
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        lay_out = self._layouts.copied
        names = (*self.plan.arguments, *(f"args[{index}]" for index in range(len(self.plan.arguments), len(args))))
        dense_args = tuple(lay_out(name, each, copies) for name, each in zip(names, args, strict=False))
        return dense_args, {name: lay_out(name, each, copies) for name, each in kwargs.items()} | self.constants

    def _has_no_hint(self) -> bool:
        """Say whether a graph was made without a size hint: torch 2.13's Inductor has got numbers wrong in some."""
        return any(remedies.shapes == DynamicShapesType.UNBACKED for remedies in self._made_by)

    def _is_to_prove(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Say whether this call is to be compared with eager: the first sizes, when a graph has or may get no hint."""
        may_lack_hint = self._may_unback or self._plain.shapes == DynamicShapesType.UNBACKED
        if self.settled or not may_lack_hint or dynamo.runs_as_traced(self.backend):
            return False
        sizes = tuple(tensor.shape for tensor in leaf_tensors(self.plan.arguments, args, kwargs).values())
        is_new = sizes not in self._proved
        self._proved.add(sizes)
        return is_new

    def _precomputed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        assert self.precompute is not None
        results = self.precompute.run(args, kwargs)
        if self.plan.ragged:
            longest = [name for name in results if name.startswith("max_") and name.endswith("seqlen")]
            self.constants = dict.fromkeys(longest, MAX_SEQLEN)
        if results:
            self.remedies[f"computed before the graph, since it reads values: {', '.join(results)}"] = None
        return results

    def _verified(self, module: nn.Module, check: _Check, result: Any) -> Any:
        want = check.eager()
        difference = largest_difference(result, want)
        if difference <= tolerance(want):
            self.calls += 1
            return result
        reason = f"verify: the graph differs from eager by {difference:.1e}, more than {tolerance(want):.0e}"
        if self._proves and not self.distrusts_sizes:
            self.distrusts_sizes = True
            self._forget()
            check.hand_over()
            logger.warning(f"{self.name}: {reason}; it will be made in another way")
            self.note_eager(reason)
            return want
        if not self.config.verify and self._proves and difference <= _ROUNDING * tolerance(want):
            self.calls += 1
            return result
        if self._start_over():
            check.hand_over()
            logger.warning(f"{self.name}: {reason}; it will be made in another way")
            self.note_eager(reason)
            return want
        if self.config.strict:
            raise VerificationError(f"{self.name}: {reason}")
        check.hand_over()
        logger.warning(f"{self.name}: {reason}")
        self.give_up_region(reason)
        self.note_eager(reason)
        return want

    def give_up_region(self, reason: str) -> None:
        """From now on run every call of this region eager."""
        self.eager_modes = {"inference", "no_grad", "grad", "train", "autocast"}
        self.careful = True
        self.given_up = reason

    given_up: str | None = None

    def why_eager(self, module: nn.Module, watch: hooks.Watch, kwargs: dict[str, Any]) -> str | None:
        """Return why this call must not use a graph, or None."""
        if self.given_up is not None:
            return self.given_up
        if torch._C._len_torch_dispatch_stack():
            return "a torch dispatch mode is active, which must see every operation"
        mode = "train" if module.training else mode_of_execution()
        if mode in self.eager_modes:
            return f"execution_modes[{mode!r}] is 'eager'" + (
                ": the model is in training mode, where dropout would draw other numbers; model.eval() compiles it"
                if mode == "train"
                else ""
            )
        for modules, name, child, _ in watch.places:
            if modules.get(name) is not child:  # replaced without a new graph: look at what is there now
                watch = hooks.Watch(module, watch)
                break
        if kwargs.get("output_attentions"):
            return "attentions were asked for, which only the eager code returns"
        if self.plan.role == "encoder" and kwargs.get("output_hidden_states"):
            return "hidden states were asked for, and a whole-encoder graph does not return them"
        if dynamo.stance() == "force_eager":
            return "torch's stance is force_eager"
        return hooks.eager_because_of_hooks(module, watch, self.undos.append)

    def careful_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], watch: hooks.Watch
    ) -> Any:
        """Serve a call that has hooks, a mode with a policy, ranges, or anything else beside the plain case."""
        reason = self.why_eager(module, watch, kwargs)
        if reason is not None:
            return self.eager(module, args, kwargs, reason)
        had_pre_hooks = bool(module._forward_pre_hooks)

        def core(*args: Any, **kwargs: Any) -> Any:
            again = hooks.eager_because_of_hooks(module, watch, self.undos.append) if had_pre_hooks else None
            if again is None:
                return self.run(module, args, kwargs)
            self.note_eager(again)  # a pre-hook has put a hook inside
            return type(module).forward(module, *args, **kwargs)

        return hooks.call_with_hooks(module, args, kwargs, core)


class _Check:
    """What eager needs to run a call once more as it was: copies of its tensors, the buffers, and the random state."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.given = module, (args, kwargs)
        self.copies = pytree.tree_map_only(torch.Tensor, torch.clone, self.given)
        self.buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self.random_state = torch.get_rng_state()

    def eager(self) -> Any:
        """Return eager's result; buffers and random state are then as the graph left them."""
        after = [buffer.clone() for buffer, _ in self.buffers]
        args, kwargs = self.copies
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random_state)
            for buffer, before in self.buffers:
                buffer.copy_(before)
            try:
                return type(self.module).forward(self.module, *args, **kwargs)
            finally:
                for (buffer, _), value in zip(self.buffers, after, strict=True):
                    buffer.copy_(value)

    def hand_over(self) -> None:
        """Give the caller's tensors what eager wrote into the copies."""
        for original, copy in zip(pytree.tree_leaves(self.given), pytree.tree_leaves(self.copies), strict=True):
            if isinstance(original, torch.Tensor) and was_written(copy, original):
                original.copy_(copy)


def eager_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the module's own forward."""
    return type(module).forward(module, *args, **kwargs)


def bind(region: Region, module: nn.Module) -> Callable[..., Any]:
    """Return the function for the module's compiled slot. It is on the path of every call: no work that can wait."""
    own = vars(module)
    is_compiling, is_tracing = torch.compiler.is_dynamo_compiling, torch._C._get_tracing_state
    dispatch_modes = torch._C._len_torch_dispatch_stack
    constants, call, global_hooks = region.constants, region.call, hooks.GLOBAL_HOOKS
    watch = hooks.Watch(module)

    def compiled_call(*args: Any, **kwargs: Any) -> Any:
        nonlocal watch, call
        if is_compiling() or is_tracing():  # an outer torch.compile or export inlines the plain module
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if watch.version != region.version:  # a graph was made again, maybe since a module was replaced
            watch = hooks.Watch(module, watch)
            watch.version, call = region.version, region.call
        if (
            region.careful
            or not region.settled
            or dispatch_modes()
            or own["training"]
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
            or any(global_hooks)
            or eval_frame._stance.stance != "default"
            or (kwargs and not kwargs.keys().isdisjoint(_RECORDED))
        ):
            return region.careful_call(module, args, kwargs, watch)
        for modules, name, child, attributes in watch.places:
            if modules.get(name) is not child:
                watch = hooks.Watch(module, watch)
                watch.version = region.version
                return region.careful_call(module, args, kwargs, watch)
            if (
                attributes["_forward_hooks"]
                or attributes["_forward_pre_hooks"]
                or attributes["_backward_hooks"]
                or attributes["_backward_pre_hooks"]
                or "forward" in attributes
            ):
                return region.careful_call(module, args, kwargs, watch)
        if watch.dense:
            return region.run(module, args, kwargs)
        try:
            result = call(module, args, {**kwargs, **constants} if constants else kwargs)
        except _NotDense:
            watch.dense = True
            return region.run(module, args, kwargs)
        except (_TryAgain, _ProveFirst):
            return region.run(module, args, kwargs)
        except Exception as error:  # noqa: BLE001  whatever it was, eager decides
            return region.recover(module, args, kwargs, error)
        if region.graphs:
            region.calls += 1
        else:
            region.note_eager(_NO_GRAPH)
        return result

    compiled_call.hf_compile_region = region  # type: ignore[attr-defined]
    return compiled_call


def mode_of_execution() -> str:
    """Return the name of the current mode: autocast, inference, no_grad or grad."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "autocast"
    if torch.is_inference_mode_enabled():
        return "inference"
    return "grad" if torch.is_grad_enabled() else "no_grad"


def describe(kind: tuple[Any, ...]) -> str:
    """Say in words what kind of call this is."""
    mode, training, dtype, arguments = kind
    return f"mode {mode}{', training' if training else ''}, weights {dtype}, arguments " + ", ".join(
        f"{name}: {value}" for name, value in arguments
    )


def split_size_key(key: str) -> tuple[str, str, int]:
    """Return class name (or ""), argument and dim of a key of `compile_sizes`."""
    name, _, dim = key.rpartition(".")
    owner, _, argument = name.rpartition(".")
    return owner, argument, int(dim)
