"""Make and undo: each act returns its undo, and one stack holds them all."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..attention import register_attention
from ..config import CompilationMode
from ..counters import CompilationCounter
from ..errors import UnsupportedModelError
from ..plan import EncoderPlan, FunctionsPlan, ModelPlan
from ..precompute import BatchProbe
from .config_view import put_config_views
from .encoder_call import EncoderCall, keep_masks
from .functions import CompiledFunctions
from .region import Region, bind

__all__ = ["Attached", "attach", "attach_functions", "without_slots"]

logger = logging.get_logger("transformers.hf_compile")

_SLOT = "_compiled_call_impl"


class Attached:
    """A plan at work. Held by the compiled slots of the model, so that it lives as long as they do."""

    def __init__(self, plan: ModelPlan) -> None:
        self.plan = plan
        self.counter = CompilationCounter()
        self.regions: list[list[Region]] = []
        self.functions: CompiledFunctions | None = None
        self._undo = contextlib.ExitStack()

    def detach(self) -> None:
        """Take the model back to what it was, in reverse order."""
        functions = [region for _, region in self.functions.regions] if self.functions is not None else []
        for region in (*itertools.chain(*self.regions), *functions):
            while region.undos:
                region.undos.pop()()
        self._undo.close()


def attach(model: nn.Module, plan: ModelPlan, on_give_up: Callable[[], None]) -> Attached:
    """Compile a model as planned; an exception on the way leaves it exactly as it was.

    Args:
        model: the model that was planned.
        plan: what `make_plan` returned for it.
        on_give_up: takes the model back to eager; called when a call shows that a declaration is wrong.
    """
    attached = Attached(plan)
    with contextlib.ExitStack() as undo:
        _set_aside_slots(model, plan, undo)
        unregister = register_attention()
        undo.callback(unregister)
        weakref.finalize(attached, unregister).atexit = False  # a model that goes without being uncompiled
        for encoder in plan.encoders:
            for patch in encoder.patches:
                undo.callback(patch.apply(encoder.info.module))
            if encoder.config.mode == CompilationMode.STOCK_TORCH_COMPILE:
                _attach_stock(encoder, attached, undo)
            else:
                _attach_regions(encoder, attached, on_give_up, undo)
        if plan.functions is not None:
            _attach_functions(plan.functions, attached, undo)
        attached._undo = undo.pop_all()
    return attached


def attach_functions(plan: ModelPlan) -> Attached:
    """Compile the functions of a processor as planned; an exception on the way leaves it exactly as it was."""
    attached = Attached(plan)
    with contextlib.ExitStack() as undo:
        if plan.functions is not None:
            _attach_functions(plan.functions, attached, undo)
        attached._undo = undo.pop_all()
    return attached


def _attach_functions(plan: FunctionsPlan, attached: Attached, undo: contextlib.ExitStack) -> None:
    attached.functions = CompiledFunctions(plan.how, attached)
    for target in plan.targets:
        undo.callback(attached.functions.apply(target))


@contextlib.contextmanager
def without_slots(module: nn.Module) -> Iterator[None]:
    """Run the body with every module below this one eager; graphs and counts stay."""
    with contextlib.ExitStack() as undo:
        for child in module.modules():
            _put_slot(child, None, undo)
        yield


def _set_aside_slots(model: nn.Module, plan: ModelPlan, undo: contextlib.ExitStack) -> None:
    """Take `module.compile()` off every module in or above an encoder, since it would run in place of our regions."""
    inside = [module for encoder in plan.encoders for module in encoder.info.module.modules()]
    above = [
        module
        for path, module in model.named_modules()
        if any(
            encoder.info.path != path and (encoder.info.path + ".").startswith(path + "." if path else "")
            for encoder in plan.encoders
        )
    ]
    for module in {id(each): each for each in (*above, *inside)}.values():
        slot = vars(module).get(_SLOT)
        if slot is None:
            continue
        if getattr(slot, "hf_compile_region", None) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} is compiled already, as part of another model; call uncompile_mm_encoder "
                "on that"
            )
        if any(module is each for each in above):
            logger.warning(
                f"{type(module).__name__}.compile() compiled the encoder with the rest; it is set aside until "
                "uncompile_mm_encoder. Compile the language model by itself instead"
            )
        _put_slot(module, None, undo)


def _put_slot(module: nn.Module, slot: Callable[..., Any] | None, undo: contextlib.ExitStack) -> None:
    instance = vars(module)
    had, before = _SLOT in instance, instance.get(_SLOT)

    def restore() -> None:
        if instance.get(_SLOT) is not slot:  # taken since by somebody else
            return
        if had:
            instance[_SLOT] = before
        else:
            instance.pop(_SLOT, None)

    undo.callback(restore)
    instance[_SLOT] = slot


def _attach_stock(encoder: EncoderPlan, attached: Attached, undo: contextlib.ExitStack) -> None:
    module = encoder.info.module
    compiled = torch.compile(
        module._call_impl,
        backend=encoder.backend,
        options=dict(encoder.config.options) or None,
        dynamic=False if encoder.why_static else None,
    )

    def stock_call(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    stock_call.hf_compile_region = attached  # type: ignore[attr-defined]
    _put_slot(module, stock_call, undo)
    attached.regions.append([])


def _attach_regions(
    encoder: EncoderPlan, attached: Attached, on_give_up: Callable[[], None], undo: contextlib.ExitStack
) -> None:
    regions = []
    for plan in encoder.regions:
        region = Region(plan, encoder, attached.counter, on_give_up)
        region.attached = attached  # type: ignore[attr-defined]
        regions.append(region)
        for module in plan.modules.values():
            if plan.ragged:
                undo.callback(put_config_views(module))
            _put_slot(module, bind(region, module), undo)
    attached.regions.append(regions)
    if encoder.granularity == "block" and "" not in {path for region in encoder.regions for path in region.modules}:
        if encoder.keeps_masks:
            unpatch = keep_masks()
            undo.callback(unpatch)
            weakref.finalize(attached, unpatch).atexit = False
        call = EncoderCall(encoder.keeps_masks, BatchProbe(encoder.info.module))
        _put_slot(encoder.info.module, call.bind(encoder.info.module), undo)
        for region in regions:
            region.encoder_call = call
