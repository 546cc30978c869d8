"""Measure one case: compile a tiny encoder, call it with many sizes, compare it with eager, and undo it."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import api
from ..compiler.dynamo import forget_graphs, torch_counts
from ..config import CompilationConfig
from ..encoders import find_encoders
from ..errors import EncoderNotFoundError, HfCompileError, UnsupportedModelError
from ..plan import make_plan
from .cases import Case, build, build_at_full_size, draws
from .models import build_on_meta

Granularity = Literal["auto", "block", "encoder"]

__all__ = ["find", "measure"]


def measure(
    name: str, case: Case, *, seed: int = 0, sizes: int = 8, granularity: Granularity = "auto", backend: str = "eager"
) -> dict[str, Any]:
    """Return the record of one encoder; whatever goes wrong is in the record, and `outcome` says it in a word.

    Graphs are counted by Dynamo's own counter, and beside it by hf_compile's report. Differences are the largest over
    all output tensors of all calls: absolute, and relative to the largest value of the eager tensor. With a backend
    that compiles, `eager_error` and `compiled_error` say how far both are from the same calls in float64.
    """
    started = time.perf_counter()
    record: dict[str, Any] = {"name": name, "class": case.cls, "note": case.note, "outcome": "failed", "error": ""}
    try:
        _measure(record, case, seed, sizes, granularity, backend)
    except UnsupportedModelError as error:
        record |= {"outcome": "absent" if "has no" in str(error) else "failed", "error": str(error)}
    except ImportError as error:  # a package that only this encoder needs
        record |= {"outcome": "absent", "error": " ".join(str(error).split())}
    except Exception as error:  # noqa: BLE001  a census goes on; the record says what happened
        record["error"] = f"{type(error).__name__}: {error}"[:2000]
    record["seconds"] = round(time.perf_counter() - started, 2)
    return record


def find(model_type: str) -> dict[str, Any]:
    """Return what `find_encoders` answers for the model of a type, built on the meta device from a default config."""
    record: dict[str, Any] = {"model_type": model_type, "model_class": "", "outcome": "failed", "error": ""}
    try:
        model = build_on_meta(model_type)
        record["model_class"] = type(model).__name__
        record["encoders"] = [
            {
                "path": info.path,
                "class_name": type(info.module).__name__,
                "modalities": list(info.modalities),
                "found_by": info.found_by,
            }
            for info in find_encoders(model)
        ]
        record["outcome"] = "found"
    except EncoderNotFoundError as error:
        record |= {"outcome": "no_encoder", "error": str(error)}
    except Exception as error:  # noqa: BLE001  a census goes on; the record says what happened
        record["error"] = f"{type(error).__name__}: {error}"[:2000]
    return record


def _measure(
    record: dict[str, Any], case: Case, seed: int, sizes: int, granularity: Granularity, backend: str
) -> None:
    encoder = build(case, seed=seed)
    inputs = list(draws(case, encoder, seed=seed, sizes=sizes))
    with torch.no_grad():
        want = [list(_tensors(encoder(**copy.deepcopy(each)))) for each in inputs]
        before = _snapshot(encoder)
        forget_graphs()
        config = CompilationConfig(backend=backend, granularity=granularity)
        try:
            _compile(encoder, config, record)
        except HfCompileError as error:
            record |= {"outcome": "refused", "error": str(error)}
            return
        graphs, differences = [], []
        for each, expected in zip(inputs, want, strict=True):
            got = list(_tensors(encoder(**copy.deepcopy(each))))
            graphs.append(torch_counts()["graphs"])
            differences.append(_difference(got, expected))
        record["graphs"] = graphs[-1]
        record["graphs_after_first_call"] = graphs[-1] - graphs[0]
        record["graph_breaks"] = torch_counts()["breaks"]
        if backend != "eager":
            record |= _against_float64(encoder, inputs, want, case, seed)
        record["difference"], record["relative_difference"] = (
            max(column) for column in zip(*differences, strict=True)
        )
        record |= _report(encoder)
        record["coverage_at_full_size"] = _coverage_at_full_size(case, config, named="not_found" in record)
        api.uncompile_mm_encoder(encoder)
        same = all(
            _difference(list(_tensors(encoder(**each))), w)[0] == 0 for each, w in zip(inputs, want, strict=True)
        )
        record["undone"] = same and _equal(_snapshot(encoder), before)
    record["outcome"] = _outcome(record)


def _against_float64(
    encoder: nn.Module, inputs: list[dict[str, Any]], want: list[list[torch.Tensor]], case: Case, seed: int
) -> dict[str, Any]:
    """Return how far eager and the compiled encoder are from the same calls in float64, relative to its values.

    Or why there is no such reference: some code asks for float32 by itself.
    """
    exact = build(case, seed=seed).double()
    for module in exact.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) == "grouped_mm":  # torch has none in float64
            config._experts_implementation = "eager"
    errors = []
    for each, eager in zip(inputs, want, strict=True):
        doubled = pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, each)
        try:
            reference = list(_tensors(exact(**copy.deepcopy(doubled))))
        except RuntimeError as error:
            return {"no_reference": f"float64: {error}"}
        got = list(_tensors(encoder(**copy.deepcopy(each))))
        errors.append((_difference(eager, reference)[1], _difference(got, reference)[1]))
    worst = [max(column) for column in zip(*errors, strict=True)]
    return {"eager_error": worst[0], "compiled_error": worst[1]}


def _compile(encoder: nn.Module, config: CompilationConfig, record: dict[str, Any]) -> None:
    """Compile; a part that takes no media itself (a Q-Former) is no encoder to be found, so it is named."""
    try:
        api.compile_mm_encoder(encoder, compilation_config=config)
    except EncoderNotFoundError as error:
        record["not_found"] = str(error)
        api.compile_mm_encoder(encoder, compilation_config=config, encoder="")


def _coverage_at_full_size(case: Case, config: CompilationConfig, *, named: bool) -> float | None:
    """Return the share of the parameters inside regions for the default config; None where it builds no encoder.

    Beside it the share in the tiny encoder says little: there single layers and tables weigh as much as the blocks.
    """
    try:
        encoder = build_at_full_size(case)
        plan = make_plan(encoder, config, encoder="" if named else None, try_inputs=False)
    except (ArithmeticError, AttributeError, HfCompileError, ImportError, LookupError, TypeError, ValueError):
        return None  # a default config that lacks something, or that needs a package
    return round(plan.encoders[0].coverage, 4)


def _report(encoder: nn.Module) -> dict[str, Any]:
    (report,) = api.status(encoder).to_dict()["encoders"]
    kept = "path class_name modalities found_by granularity granularity_reason coverage outside patches remedies"
    described = {key: report[key] for key in kept.split()}
    described["coverage"] = round(described["coverage"], 4)
    wanted = ("class_name", "instances", "state", "reason", "graphs", "eager_calls", "remedies", "inputs")
    described["regions"] = [{key: region[key] for key in wanted} for region in report["regions"]]
    return described


def _outcome(record: Mapping[str, Any]) -> str:
    """Return one_graph, one_graph_late, more_graphs, eager or wrong; regions that no call reached do not count."""
    called = [region for region in record["regions"] if region["state"] != "pending"]
    close = record["relative_difference"] <= 1e-5
    as_near = record.get("compiled_error", 1.0) <= 1.5 * record.get("eager_error", 0.0)
    if not record["undone"] or not (close or as_near):
        return "wrong"
    if not called or any(region["state"] == "eager" or region["eager_calls"] for region in called):
        return "eager"
    if all(region["graphs"] == 1 for region in called) and not record["graphs_after_first_call"]:
        return "one_graph"
    return "one_graph_late" if all(region["graphs"] == 1 for region in called) else "more_graphs"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _tensors(member)
    elif isinstance(value, (tuple, list)):
        for member in value:
            yield from _tensors(member)


def _difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> tuple[float, float]:
    if [each.shape for each in got] != [each.shape for each in want]:
        return float("inf"), float("inf")
    largest = relative = 0.0
    for left, right in zip(got, want, strict=True):
        if not right.numel() or torch.equal(left, right):
            continue
        finite = torch.nan_to_num(left.double()), torch.nan_to_num(right.double())
        difference = float((finite[0] - finite[1]).abs().max())
        if not torch.equal(left.isnan(), right.isnan()):
            difference = float("inf")
        largest = max(largest, difference)
        relative = max(relative, difference / max(float(finite[1].abs().max()), 1e-9))
    return largest, relative


def _equal(left: Any, right: Any) -> bool:
    """Compare snapshots; a tensor that a forward made anew counts by its values."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left is right or (left.shape == right.shape and torch.equal(left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left is right or left == right)


def _snapshot(encoder: nn.Module) -> Any:
    """Return everything that undo must bring back: attributes, hooks, keys and config."""
    modules = {
        path: {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for path, module in encoder.named_modules()
    }
    config: Any = getattr(encoder, "config", None)
    return modules, list(encoder.state_dict()), config.to_dict() if config is not None else None
