"""Everything decided about a model before anything is changed."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from .attention import RAGGED_REPLACES
from .config import CompilationConfig, CompileRange, normalize_dims
from .decorators import find_mark
from .encoders import EncoderInfo, find_encoders, find_projectors
from .errors import BackendError, ConfigurationError, UnsupportedModelError
from .functions import SAMPLING, FunctionPatch, Target, families_of, find_targets
from .inputs import make_inputs, observe_ranks
from .patching import FamilyPatch, find_function_patches, find_patches
from .platforms import Platform, current_platform, resolve_backend
from .regions import RegionGroup, asks_for_flash, choose_regions, names_in_code, reads_attribute, reads_cu_seqlens
from .signature import InputVerdict, read_arguments

logger = logging.get_logger("transformers.hf_compile")

MASK_MAKERS = ("create_bidirectional_mask", "create_bidirectional_sliding_window_mask")
"""Functions of Transformers that return None in place of a padding mask that hides nothing."""

__all__ = ["EncoderPlan", "FunctionsPlan", "ModelPlan", "RegionPlan", "make_plan", "plan_function", "plan_functions"]


@dataclasses.dataclass(frozen=True)
class RegionPlan:
    """One graph to be: which modules share it, and which dims vary.

    Args:
        class_name: class of the modules; also the prefix of its names in caches, logs and profiles.
        modules: module path inside the encoder -> module.
        role: `"block"`, `"part"` or `"encoder"`.
        dynamic_arg_dims: declared argument -> dim -> shape id, from the config or the class's mark.
        unbacked_dims: the same, for dims that must never be specialised.
        inputs: what the annotations say of each argument.
        arguments: names of the positional arguments of `forward`.
        accepts_keywords: `forward` takes `**kwargs`.
        ragged: attention within packed segments goes through the operator `hf_compile::ragged_attention`.
        reads_max_seqlen: the modules pass `max_seqlen` on to attention.
        asks_is_tracing: its code asks `torch.jit.is_tracing`, to leave out a shortcut that one size may take.
        unread: keywords of Transformers that `**kwargs` takes and no code of the modules names.
        branches_on_batch: torch's own attention layer asks whether the batch is 1, so dim 0 must have no hint.
    """

    class_name: str
    modules: Mapping[str, nn.Module]
    role: str
    dynamic_arg_dims: Mapping[str, Mapping[int, str | None]]
    unbacked_dims: Mapping[str, Mapping[int, str | None]]
    inputs: tuple[InputVerdict, ...]
    arguments: tuple[str, ...]
    accepts_keywords: bool
    ragged: bool
    reads_max_seqlen: bool
    branches_on_batch: bool
    asks_is_tracing: bool
    unread: tuple[str, ...]

    @property
    def cache_prefix(self) -> str:
        """The class name: an encoder's cache entries never collide with the text model's."""
        return self.class_name


@dataclasses.dataclass(frozen=True)
class EncoderPlan:
    """The regions of one encoder, how they are compiled, and the family patches that are applied first.

    `keeps_masks`: while it runs, Transformers keeps padding masks that hide nothing.
    """

    info: EncoderInfo
    granularity: str
    granularity_reason: str
    coverage: float
    outside: tuple[str, ...]
    regions: tuple[RegionPlan, ...]
    config: CompilationConfig
    platform: Platform
    backend: str | Callable[..., Any]
    keeps_masks: bool = False
    patches: tuple[FamilyPatch, ...] = ()

    @property
    def why_static(self) -> str:
        """Say why a graph cannot serve many sizes here; nothing where it can."""
        if self.platform.supports_dynamic_compile:
            return ""
        return (
            f"platform {self.platform.name} compiles no graph that serves many sizes "
            "(supports_dynamic_compile=False); sizes named in compile_sizes are compiled each for itself"
        )


@dataclasses.dataclass(frozen=True)
class FunctionsPlan:
    """The functions of a model or processor that are compiled.

    Args:
        targets: objects, with the patches of each.
        missing: patches that name what this Transformers does not have, and why.
        how: config, backend and platform.
    """

    targets: tuple[Target, ...]
    missing: tuple[str, ...]
    how: EncoderPlan


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """The encoders of one model, and functions beside them."""

    model_class: str
    platform: str
    config: CompilationConfig
    encoders: tuple[EncoderPlan, ...]
    functions: FunctionsPlan | None = None


def make_plan(
    model: nn.Module, config: CompilationConfig, *, encoder: str | Iterable[str] | None = None, try_inputs: bool = True
) -> ModelPlan:
    """Find, inspect and decide; the model is not changed.

    Args:
        model: the model, on any device.
        config: the options.
        encoder: module path(s) instead of the search.
        try_inputs: check declared dims on an input made from the config, which costs one eager call of the encoder.

    Raises:
        EncoderNotFoundError: there is no encoder.
        ConfigurationError: the config names an argument, a dim or an encoder that does not exist.
        BackendError: torch does not know the backend, or (under `strict`) the platform's toolchain is missing.
        UnsupportedModelError: there is nothing to compile in an encoder.
    """
    infos = find_encoders(model, encoder=encoder)
    projectors = find_projectors(model, infos) if config.include_projector else []
    infos = [*infos, *projectors]
    paths = [info.path for info in infos]
    for path in config.encoders:
        if path not in paths:
            legal = ", ".join(map(repr, paths))
            raise ConfigurationError(f"encoders[{path!r}]: the encoders of this model are {legal}")
    encoders = []
    for info in infos:
        # what is declared for the model names arguments of its encoders; a projector has options of its own
        shared = dataclasses.replace(config, dynamic_arg_dims={}, compile_sizes={}) if info in projectors else config
        own = shared.for_encoder(info.path)
        granularity, reason, groups = choose_regions(info.module, own)
        if not groups:
            raise UnsupportedModelError(f"{info.path or type(info.module).__name__}: nothing to compile; {reason}")
        regions = tuple(_plan_region(group, own, info.module) for group in groups)
        platform = current_platform(info.module)
        backend = resolve_backend(own, platform)
        _check_toolchain(platform, backend, own)
        _check_declared(info, regions, own, try_inputs)
        model_types = [getattr(getattr(each, "config", None), "model_type", "") for each in (info.module, model)]
        encoders.append(
            EncoderPlan(
                info=info,
                granularity=granularity,
                granularity_reason=reason,
                coverage=_coverage(info.module, groups),
                outside=tuple(_outside(info.module, groups)),
                regions=regions,
                config=own,
                platform=platform,
                backend=backend,
                keeps_masks=granularity == "block" and _may_keep_masks(info.module),
                patches=find_patches(*model_types),
            )
        )
    _refuse_nested(encoders)
    names = ", ".join(dict.fromkeys(encoder.platform.name for encoder in encoders))
    return ModelPlan(type(model).__name__, names, config, tuple(encoders), plan_functions(model, config))


def _check_toolchain(platform: Platform, backend: str | Callable[..., Any], config: CompilationConfig) -> None:
    """Say at load time what the first image would fail for; another backend than the platform's needs other tools."""
    missing = platform.missing_toolchain() if backend == platform.simple_compile_backend else None
    if missing is None:
        return
    if config.strict:
        raise BackendError(f"{platform.name}: {missing}; or choose another backend, such as 'aot_eager'")
    logger.warning_once(f"{platform.name}: {missing}. Until then regions that have to be compiled run eager")


def _may_keep_masks(encoder: nn.Module) -> bool:
    """Say whether an encoder drops masks; where attention is causal without one, a mask would change numbers."""
    is_causal = any(getattr(module, "is_causal", False) is True for module in encoder.modules())
    return not is_causal and any(reads_attribute(encoder, name) for name in MASK_MAKERS)


def _plan_region(group: RegionGroup, config: CompilationConfig, encoder: nn.Module) -> RegionPlan:
    module = next(iter(group.modules.values()))
    hints = read_arguments(module)
    mark = find_mark(type(module))
    declared = {name: normalize_dims(name, dims) for name, dims in (mark.dynamic_arg_dims if mark else {}).items()}
    for key, dims in sorted(config.dynamic_arg_dims.items(), key=lambda item: "." in item[0]):  # the class's own win
        owner, _, name = key.rpartition(".")
        if owner in ("", group.class_name) and name in [hint.name for hint in hints]:
            declared[name] = normalize_dims(key, dims)
    unbacked = {name: normalize_dims(name, dims) for name, dims in (mark.mark_unbacked_dims if mark else {}).items()}
    inputs = []
    for hint in hints:
        if hint.name in declared:
            dims = tuple(declared[hint.name])
            inputs.append(InputVerdict(hint.name, "dynamic", dims, "declared by dynamic_arg_dims"))
        elif hint.kind in ("tensor", "container"):
            inputs.append(InputVerdict(hint.name, "dynamic", (0,), f"annotated as {hint.annotation}: dim 0 varies"))
        elif hint.kind == "missing":
            words = f"annotated as {hint.annotation}" if hint.annotation else "has no annotation"
            reason = f"{words}; the first call tells whether it is a tensor and which dims vary"
            inputs.append(InputVerdict(hint.name, "pending", (), reason))
        elif hint.kind == "keywords":
            reason = "tensors passed this way are listed by name after the first call"
            inputs.append(InputVerdict(f"*{hint.name}", "pending", (), reason))
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    for child in module.modules():
        implementation = getattr(getattr(child, "config", None), "_attn_implementation", implementation)
    packed = reads_cu_seqlens(module) and asks_for_flash(encoder)
    return RegionPlan(
        class_name=group.class_name,
        modules=dict(group.modules),
        role=group.role,
        dynamic_arg_dims=declared,
        unbacked_dims=unbacked,
        inputs=tuple(inputs),
        arguments=tuple(hint.name for hint in hints if hint.kind != "keywords"),
        accepts_keywords=any(hint.kind == "keywords" for hint in hints),
        ragged=packed and implementation in RAGGED_REPLACES,
        reads_max_seqlen=any("max_seqlen" in names for names in _argument_names(module)),
        unread=tuple(
            name
            for name in ("output_attentions", "output_hidden_states")
            if any(hint.kind == "keywords" for hint in hints) and name not in names_in_code(module)
        ),
        branches_on_batch=any(isinstance(child, nn.MultiheadAttention) for child in module.modules()),
        asks_is_tracing=reads_attribute(module, "is_tracing"),
    )


def plan_functions(
    root: Any, config: CompilationConfig, device: str | torch.device | None = None
) -> FunctionsPlan | None:
    """Find the functions of a model's or processor's family that are to be compiled; None where there is none.

    Args:
        root: a model, a processor, or a part of one.
        config: the options; those of encoders (dims, sizes, ranges) do not count.
        device: where the functions run; by default that of the model, or the CPU for a processor.

    Raises:
        BackendError: torch does not know the backend.
    """
    if not config.function_patches:
        return None
    is_model = isinstance(root, nn.Module)
    model_type = getattr(getattr(root, "config", None), "model_type", "") if is_model else ""
    patches = find_function_patches(*dict.fromkeys((model_type, *families_of(root))))
    if is_model and config.compile_sampling:
        patches = (*patches, *SAMPLING)
    targets, missing = find_targets(root, patches)
    if not targets and not missing:
        return None
    platform = current_platform(device or (root if is_model else "cpu"))
    own = dataclasses.replace(
        config, dynamic_arg_dims={}, compile_sizes={}, compile_ranges=(CompileRange(),), encoders={}
    )
    how = EncoderPlan(
        info=EncoderInfo("", nn.Module(), (), "named by a family patch"),
        granularity="function",
        granularity_reason="named by a family patch",
        coverage=0.0,
        outside=(),
        regions=(),
        config=own,
        platform=platform,
        backend=resolve_backend(own, platform),
    )
    return FunctionsPlan(tuple(targets), tuple(missing), how)


def plan_function(
    patch: FunctionPatch, function: Callable[..., Any], encoder: EncoderPlan
) -> tuple[RegionPlan, nn.Module]:
    """Return the plan of a region that is a function, and the module it is given as.

    Args:
        patch: names it.
        function: any function; what its arguments are is read from its signature.
        encoder: how it is compiled.
    """

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    module_argument = inspect.Parameter("module", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    forward.__signature__ = inspect.Signature([module_argument, *parameters])  # type: ignore[attr-defined]
    forward.__module__ = getattr(inspect.unwrap(function), "__module__", __name__)
    cls = type(patch.name, (nn.Module,), {"forward": forward, "__module__": forward.__module__})
    module: nn.Module = cls().eval()
    return _plan_region(RegionGroup(patch.name, {"": module}, "block"), encoder.config, module), module


def _argument_names(module: nn.Module) -> list[list[str]]:
    return [[hint.name for hint in read_arguments(child)] for child in module.modules() if _has_own_forward(child)]


def _has_own_forward(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.nn.")


def _coverage(encoder: nn.Module, groups: list[RegionGroup]) -> float:
    total = sum(parameter.numel() for parameter in encoder.parameters())
    inside = {id(p): p.numel() for group in groups for module in group.modules.values() for p in module.parameters()}
    return sum(inside.values()) / total if total else 0.0


def _outside(encoder: nn.Module, groups: list[RegionGroup]) -> Iterator[str]:
    """Yield the topmost paths of modules that hold parameters outside every region."""
    inside = {id(child) for group in groups for module in group.modules.values() for child in module.modules()}
    named: list[str] = []
    for path, module in encoder.named_modules():
        if id(module) in inside or next(module.parameters(recurse=False), None) is None:
            continue
        if not any(path.startswith(f"{above}.") for above in named):
            named.append(path)
            yield path or "its own parameters"


def _check_declared(
    info: EncoderInfo, regions: tuple[RegionPlan, ...], config: CompilationConfig, try_inputs: bool
) -> None:
    declared: list[tuple[str, RegionPlan, str, Iterable[int]]] = []  # what the user wrote, region, argument, dims
    for option, keys in (("dynamic_arg_dims", config.dynamic_arg_dims), ("compile_sizes", config.compile_sizes)):
        for key in keys:
            argument, size_dim = (key, "") if option == "dynamic_arg_dims" else key.rpartition(".")[::2]
            owner, _, name = argument.rpartition(".")
            having = [each for each in regions if name in each.arguments and owner in ("", each.class_name)]
            if not having:
                listed = "; ".join(f"{region.class_name}: {', '.join(region.arguments)}" for region in regions)
                raise ConfigurationError(f"{option}[{key!r}]: no region of {info.path!r} has this argument; {listed}")
            if option == "compile_sizes":
                declared += [(f"compile_sizes[{key!r}]", region, name, [int(size_dim)]) for region in having]
    for region in regions:
        marks = (("dynamic_arg_dims", region.dynamic_arg_dims), ("mark_unbacked_dims", region.unbacked_dims))
        declared += [
            (f"{option}[{name!r}]", region, name, spec) for option, mark in marks for name, spec in mark.items()
        ]
    inputs = make_inputs(info.module) if try_inputs and declared else None
    if inputs is None:  # then the first call checks
        return
    asked = {region.class_name: region for _, region, _, _ in declared}
    ranks = observe_ranks(info.module, inputs, [(name, asked[name].modules, asked[name].arguments) for name in asked])
    for words, region, name, dims in declared:
        rank = ranks.get((region.class_name, name))
        wrong = [each for each in dims if rank is not None and not -rank <= each < rank]
        if wrong:
            raise ConfigurationError(
                f"{words}: dim {wrong[0]} is out of range; in {region.class_name} that tensor has {rank} dims"
            )


def _refuse_nested(encoders: list[EncoderPlan]) -> None:
    paths = [encoder.info.path for encoder in encoders]
    for outer in paths:
        for inner in paths:
            if inner != outer and (inner.startswith(outer + ".") or not outer):
                raise ConfigurationError(f"encoder {inner!r} lies inside encoder {outer!r}; name only one of them")
