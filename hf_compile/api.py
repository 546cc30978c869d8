"""The straight-line story: plan, attach, remember who is compiled, undo."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.utils import logging

from .compiler import Attached, attach, attach_functions, without_slots
from .config import CompilationConfig, resolve_switch
from .counters import compilation_counter
from .errors import ConfigurationError, UnsupportedModelError
from .plan import ModelPlan, make_plan, plan_functions
from .platforms import current_platform
from .report import StatusReport, report
from .verification import largest_difference

__all__ = [
    "compile_mm_encoder",
    "compile_processor",
    "plan_model",
    "status",
    "uncompile_mm_encoder",
    "uncompile_processor",
    "verify",
]

logger = logging.get_logger("transformers.hf_compile")

Model = TypeVar("Model")
Processor = TypeVar("Processor")
Config = CompilationConfig | Mapping[str, Any] | str | None

# The slots of a model hold its Attached, so it goes when the model goes; the model is never held from here.
_attached: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Attached], Any]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()

attach_listeners: list[Callable[[nn.Module, Attached], None]] = []
"""Called with each model that was compiled, and with what runs in it."""


def compile_mm_encoder(
    model: Model, *, compilation_config: Config = None, encoder: str | Iterable[str] | None = None
) -> Model:
    """Compile the vision, video and audio encoders of a model or pipeline in place.

    Nothing of the model's code, class, keys or signatures changes; `uncompile_mm_encoder` undoes it. The compile
    itself happens at the first call. Compiling again with the same options adds nothing; with others it plans anew.

    Args:
        model: a Transformers model, a bare encoder, or a pipeline that holds a model.
        compilation_config: a `CompilationConfig`, its options, or the path of a JSON file.
        encoder: module path of the encoder, or several, instead of the search; such as `"model.vision_tower"`.

    Returns:
        The same object.

    Raises:
        EncoderNotFoundError: there is no encoder, or not at that path.
        ConfigurationError: an option is illegal, or does not fit this model.
        UnsupportedModelError: the object is no model, or is wrapped by `torch.compile(model)`.

    ```python
    >>> import torch, hf_compile
    >>> from transformers import SiglipVisionConfig, SiglipVisionModel
    >>> size = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, image_size=32, patch_size=8)
    >>> model = SiglipVisionModel(SiglipVisionConfig(num_hidden_layers=2, **size)).eval()
    >>> model = hf_compile.compile_mm_encoder(model, compilation_config={"backend": "eager"})
    >>> with torch.no_grad():
    ...     shapes = [model(torch.rand(batch, 3, 32, 32)).pooler_output.shape[0] for batch in (1, 3)]
    >>> [region["state"] for region in hf_compile.status(model).to_dict()["encoders"][0]["regions"]][1]
    'compiled'

    ```
    """
    config = resolve_switch(True, compilation_config).config
    module = _module_of(model)
    with _lock:
        key = (config, tuple(encoder) if isinstance(encoder, Iterable) and not isinstance(encoder, str) else encoder)
        current = _find(module)
        before = _attached[module][1] if current is not None else None
        if before == key:
            return model
        plan = make_plan(module, config, encoder=key[1])
        if current is not None:
            uncompile_mm_encoder(module)
        try:
            _attach(module, plan, key)
        except BaseException:
            if current is not None:
                _attach(module, current.plan, before)
            raise
    compilation_counter.add(num_models_seen=1)
    return model


def compile_processor(
    processor: Processor, *, compilation_config: Config = None, device: str | torch.device = "cpu"
) -> Processor:
    """Compile functions of a processor in place: those that the patches of its family name.

    Feature extractors, image and video processors are looked into. Each function becomes one graph for every size, and
    results are those of eager. The object's class makes way for a subclass of the same name until
    `uncompile_processor`; copies and pickles are of the original class.

    Args:
        processor: a Transformers processor, feature extractor, image processor or video processor.
        compilation_config: a `CompilationConfig`, its options, or the path of a JSON file.
        device: where it computes, as its own `device=`; it decides about the platform.

    Returns:
        The same object. One whose family names no function stays as it is, and `status` says so.

    Raises:
        ConfigurationError: an option is illegal.
        UnsupportedModelError: the object is a model, or nothing that Transformers processes inputs with.

    ```python
    >>> import hf_compile, transformers
    >>> extractor = hf_compile.compile_processor(transformers.ParakeetFeatureExtractor())
    >>> len(hf_compile.status(extractor).functions) > 0
    True

    ```
    """
    config = resolve_switch(True, compilation_config).config
    if isinstance(processor, nn.Module) or not (hasattr(processor, "model_input_names")):
        raise UnsupportedModelError(
            f"{type(processor).__name__} is no processor of Transformers; compile_mm_encoder compiles models"
        )
    with _lock:
        key = (config, str(device))
        current = _find(processor)
        if current is not None and _attached[processor][1] == key:
            return processor
        functions = plan_functions(processor, config, device)
        name = functions.how.platform.name if functions is not None else current_platform(device).name
        plan = ModelPlan(type(processor).__name__, name, config, (), functions)
        if current is not None:
            uncompile_processor(processor)
        attached = attach_functions(plan)
        if functions is not None:
            _attached[processor] = (weakref.ref(attached), key)
    return processor


def uncompile_processor(processor: Processor) -> Processor:
    """Take a processor back to what it was before `compile_processor`; one that is not compiled stays as it is.

    Returns:
        The same object.
    """
    with _lock:
        current = _find(processor)
        if current is not None:
            current.detach()
            del _attached[processor]
    return processor


def uncompile_mm_encoder(model: Model) -> Model:
    """Take a model, or the model of a pipeline, back to what it was before `compile_mm_encoder`.

    A model that is not compiled stays as it is.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: the object is no model.
    """
    module = _module_of(model)
    with _lock:
        for inner in module.modules():  # also when only a part of the model was compiled
            current = _find(inner)
            if current is not None:
                current.detach()
                del _attached[inner]
    return model


def status(model: Any) -> StatusReport:
    """Report what was compiled, what was not, and why.

    Args:
        model: a model, pipeline or processor; one that is not compiled (a deepcopy of a compiled one, say) gives an
            empty report.

    Returns:
        A report whose `str()` is a table and whose `to_dict()` holds JSON types.

    Raises:
        UnsupportedModelError: the object is no model.
    """
    if hasattr(model, "model_input_names") and not isinstance(model, nn.Module):
        current = _find(model)
        if current is not None:
            return report(current.plan, current)
        return StatusReport(type(model).__name__, "none", "none", (), note="no function of it is compiled")
    module = _module_of(model)
    reports = []
    for path, inner in module.named_modules():
        current = _find(inner)
        if current is not None:
            reports.append(report(current.plan, current, inside=path))
    if not reports:
        note = "not compiled by hf_compile; every call runs eager"
        return StatusReport(type(module).__name__, "none", "none", (), note=note)
    encoders = tuple(encoder for each in reports for encoder in each.encoders)
    functions = tuple(function for each in reports for function in each.functions)
    return dataclasses.replace(reports[0], model_class=type(module).__name__, encoders=encoders, functions=functions)


def verify(model: Any, inputs: Mapping[str, Any], *, encoder: str | None = None) -> dict[str, float]:
    """Compare compiled with eager on real inputs.

    Args:
        model: a compiled model or pipeline.
        inputs: keyword arguments of the encoder's `forward`, such as `{"pixel_values": (batch, 3, height, width)}`.
        encoder: path of the encoder, when the model has more than one.

    Returns:
        Encoder path -> largest difference, relative to the largest value of the output tensor it lies in.

    Raises:
        ConfigurationError: the model is not compiled, or the encoder is not told apart.
    """
    module = _module_of(model)
    current = _find(module)
    if current is None:
        raise ConfigurationError(f"{type(module).__name__} is not compiled; call compile_mm_encoder first")
    infos = [each.info for each in current.plan.encoders if encoder is None or each.info.path == encoder]
    if len(infos) != 1:
        paths = ", ".join(repr(each.info.path) for each in current.plan.encoders)
        raise ConfigurationError(f"encoder={encoder!r}: name one of the compiled encoders, {paths}")
    info = infos[0]
    with torch.no_grad():
        got = info.module(**inputs)
        with _lock, without_slots(info.module):
            want = info.module(**inputs)
    return {info.path: largest_difference(got, want)}


def plan_model(model: nn.Module, config: CompilationConfig, encoder: str | Iterable[str] | None = None) -> ModelPlan:
    """Return the plan of a model without changing it."""
    return make_plan(_module_of(model), config, encoder=encoder)


def _attach(module: nn.Module, plan: ModelPlan, key: Any) -> None:
    owner = weakref.ref(module)

    def give_up() -> None:
        model = owner()
        if model is not None:
            uncompile_mm_encoder(model)

    attached = attach(module, plan, give_up)
    _attached[module] = (weakref.ref(attached), key)
    for listener in attach_listeners:
        listener(module, attached)


def _find(owner: Any) -> Attached | None:
    entry = _attached.get(owner)
    return entry[0]() if entry is not None else None


def _module_of(model: Any) -> nn.Module:
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModelError(
            "this model is wrapped by torch.compile(model); unwrap it first: pass model._orig_mod, and compile the "
            "language model by itself with model.language_model.compile()"
        )
    if isinstance(model, nn.Module):
        return model
    inner = getattr(model, "model", None)
    if isinstance(inner, nn.Module):
        return _module_of(inner)
    raise UnsupportedModelError(f"{type(model).__name__} is neither a torch module nor a pipeline that holds one")
