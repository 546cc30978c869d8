"""What was decided, and what became of it: for people as a table, for programs as JSON types."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from .compiler.attaching import Attached
from .compiler.region import Region
from .config import CompilationMode
from .plan import EncoderPlan, ModelPlan, RegionPlan
from .signature import InputVerdict

__all__ = ["SCHEMA_VERSION", "EncoderReport", "RegionReport", "StatusReport", "report"]

SCHEMA_VERSION = 1
KEPT_MASKS = "a padding mask that hides nothing stays a tensor: None on some calls would be a second graph"


@dataclasses.dataclass(frozen=True)
class RegionReport:
    """One region class: `state` is "pending", "compiled" (a graph was built and used) or "eager" (with a reason)."""

    class_name: str
    cache_prefix: str
    instances: int
    state: str
    reason: str
    graphs: int
    calls: int
    eager_calls: int
    compile_seconds: float
    dynamic_arg_dims: dict[str, list[int]]
    compile_ranges: list[list[int]]
    remedies: tuple[str, ...]
    inputs: tuple[InputVerdict, ...]


@dataclasses.dataclass(frozen=True)
class EncoderReport:
    """One encoder; `coverage` is the share of its parameters inside regions, `outside` the modules of the rest."""

    path: str
    class_name: str
    modalities: tuple[str, ...]
    found_by: str
    granularity: str
    granularity_reason: str
    coverage: float
    outside: tuple[str, ...]
    patches: tuple[str, ...]
    remedies: tuple[str, ...]
    regions: tuple[RegionReport, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class StatusReport:
    """A model's encoders with their regions, and functions that are compiled; `str()` is a table, `to_dict()` JSON."""

    model_class: str
    platform: str
    backend: str
    encoders: tuple[EncoderReport, ...]
    functions: tuple[RegionReport, ...] = ()
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        content = dataclasses.asdict(self)
        for encoder in content["encoders"]:
            encoder["modalities"] = list(encoder["modalities"])
            encoder["patches"] = list(encoder["patches"])
            encoder["outside"] = list(encoder["outside"])
            encoder["remedies"] = list(encoder["remedies"])
            encoder["regions"] = list(map(_lists, encoder["regions"]))
        lists = {"encoders": list(content["encoders"]), "functions": list(map(_lists, content["functions"]))}
        return {"schema_version": SCHEMA_VERSION, **content, **lists}

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    __repr__ = __str__  # what a notebook shows of a cell's last value

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        where = f" on {self.platform}, backend {self.backend}" if self.encoders or self.functions else ""
        yield Text(f"{self.model_class}{where}" + (f": {self.note}" if self.note else ""))
        for encoder in self.encoders:
            yield Text(
                f"\nencoder {encoder.path or '(the model itself)'}: {encoder.class_name}, "
                f"{' and '.join(encoder.modalities)}\n"
                f"  found because {encoder.found_by}\n"
                f"  granularity {encoder.granularity}: {encoder.granularity_reason}; "
                f"{encoder.coverage:.0%} of its parameters lie inside regions"
                + (f"; eager beside them: {', '.join(encoder.outside)}" if encoder.outside else "")
            )
            for patch in encoder.patches:
                yield Text(f"  patched for {patch}")
            for remedy in encoder.remedies:
                yield Text(f"  remedy: {remedy}")
            yield from _shown("region", "modules", encoder.regions)
        if self.functions:
            yield Text("\nfunctions")
            yield from _shown("function", "objects", self.functions)


def _lists(region: dict[str, Any]) -> dict[str, Any]:
    """Return a region with lists for tuples, as in JSON."""
    inputs = [{**verdict, "dims": list(verdict["dims"])} for verdict in region["inputs"]]
    return {**region, "remedies": list(region["remedies"]), "inputs": inputs}


def _shown(kind: str, members: str, regions: Sequence[RegionReport]) -> Iterator[Any]:
    """Yield a table of regions or functions, and below it a line for each with its arguments."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    for heading in (kind, members, "state", "graphs", "calls", "eager", "compile s"):
        table.add_column(heading, justify="left" if heading in (kind, "state") else "right")
    for region in regions:
        table.add_row(
            region.class_name,
            *map(str, (region.instances, region.state, region.graphs, region.calls, region.eager_calls)),
            f"{region.compile_seconds:.1f}",
        )
    yield table
    for region in regions:
        yield Text(f"{region.class_name}: {region.state}" + (f", {region.reason}" if region.reason else ""))
        for remedy in region.remedies:
            yield Text(f"  remedy: {remedy}")
        for verdict in region.inputs:
            dims = f" dim {', '.join(map(str, verdict.dims))}" if verdict.dims else ""
            yield Text(f"  {verdict.name}: {verdict.verdict}{dims} ({verdict.reason})")


def report(plan: ModelPlan, attached: Attached | None = None, inside: str = "") -> StatusReport:
    """Return the report of a plan, with what happened since it was attached.

    Args:
        plan: the plan.
        attached: the plan at work.
        inside: path of the planned module in a larger model.
    """
    encoders = []
    for index, encoder in enumerate(plan.encoders):
        running: Sequence[Region | None] = attached.regions[index] if attached is not None else []
        regions = [
            _region(region, encoder, running[position] if running else None)
            for position, region in enumerate(encoder.regions)
        ]
        encoders.append(
            EncoderReport(
                path=".".join(filter(None, (inside, encoder.info.path))),
                class_name=type(encoder.info.module).__name__,
                modalities=encoder.info.modalities,
                found_by=encoder.info.found_by,
                granularity=encoder.granularity,
                granularity_reason=encoder.granularity_reason,
                coverage=encoder.coverage,
                outside=encoder.outside,
                patches=tuple(f"{patch.model_type}: {patch.reason}" for patch in encoder.patches),
                remedies=(KEPT_MASKS,) if encoder.keeps_masks else (),
                regions=tuple(regions),
            )
        )
    hows = [*plan.encoders, *([plan.functions.how] if plan.functions is not None else [])]
    backends = dict.fromkeys(_backend_name(how.backend) for how in hows)
    functions = tuple(_functions(plan, attached))
    return StatusReport(plan.model_class, plan.platform, ", ".join(backends), tuple(encoders), functions)


def _functions(plan: ModelPlan, attached: Attached | None) -> Iterator[RegionReport]:
    """Yield what became of the functions that patches name: of one that this Transformers lacks, that."""
    if plan.functions is None:
        return
    if attached is not None and attached.functions is not None:
        for patch, region in attached.functions.regions:
            made = _region(region.plan, plan.functions.how, region)
            yield dataclasses.replace(made, reason="; ".join(filter(None, (made.reason, patch.reason))))
    for missing in plan.functions.missing:
        name, _, reason = missing.partition(": ")
        yield RegionReport(name, name, 0, "absent", reason, 0, 0, 0, 0.0, {}, [], (), ())


def _region(plan: RegionPlan, encoder: EncoderPlan, running: Region | None) -> RegionReport:
    state, reason = _state(encoder, running)
    observed = tuple(running.inputs.values()) if running is not None else ()
    inputs = _inputs(plan, observed)
    return RegionReport(
        class_name=plan.class_name,
        cache_prefix=plan.cache_prefix,
        instances=len(plan.modules),
        state=state,
        reason=reason,
        graphs=running.graphs if running else 0,
        calls=running.calls if running else 0,
        eager_calls=running.eager_calls if running else 0,
        compile_seconds=running.compile_seconds if running else 0.0,
        dynamic_arg_dims={verdict.name: list(verdict.dims) for verdict in inputs if verdict.verdict == "dynamic"},
        compile_ranges=[[each.start, each.end] for each in encoder.config.compile_ranges],
        remedies=(*_planned_remedies(plan), *(running.remedies if running else ())),
        inputs=inputs,
    )


def _planned_remedies(plan: RegionPlan) -> Iterator[str]:
    if plan.ragged:
        yield "attention within packed segments is one operator, not a loop over their lengths"


def _inputs(plan: RegionPlan, observed: tuple[InputVerdict, ...]) -> tuple[InputVerdict, ...]:
    if not observed:
        return plan.inputs
    seen = {verdict.name.partition("[")[0] for verdict in observed}
    never = [
        dataclasses.replace(verdict, verdict="pending", dims=(), reason="no tensor was passed for it so far")
        for verdict in plan.inputs
        if verdict.name not in seen and verdict.verdict != "pending"
    ]
    return (*observed, *never)


def _state(encoder: EncoderPlan, running: Region | None) -> tuple[str, str]:
    if encoder.config.mode == CompilationMode.STOCK_TORCH_COMPILE:
        return (
            "pending",
            "mode STOCK_TORCH_COMPILE: torch compiles the encoder in its own way, and counts nothing here",
        )
    if encoder.why_static and not encoder.config.compile_sizes and not (running and running.eager_calls):
        return "eager", encoder.why_static
    if running is None:
        return "pending", "planned"
    made_for = [f"graph {number} was made for {call}" for number, call in enumerate(running.made_for, start=1)]
    reasons = "; ".join(made_for if len(made_for) > 1 else [])
    eager = "; ".join(f"{count} calls ran eager: {reason}" for reason, count in running.eager_reasons.most_common())
    if running.graphs and running.calls:
        return "compiled", "; ".join(filter(None, (reasons, eager)))
    if running.eager_calls:
        return "eager", eager
    return "pending", "not called yet"


def _backend_name(backend: Any) -> str:
    return backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
